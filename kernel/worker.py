"""Runs one rank: `python -P -m ultrabench.kernel.worker`, or `main()` in a forked process.

The environment holds the variables of torchrun and three paths: ULTRABENCH_SPEC, the file of a Task as JSON;
ULTRABENCH_REPORT, the file to which all results are written; and, if there is an agent, ULTRABENCH_STORE, the file
in which the agent writes the port of rank 0's store.
"""

import faulthandler
import gc
import json
import math
import os
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.device_rates import long_probe, short_probe
from ultrabench.kernel.compat import GROUP_TIMEOUT
from ultrabench.kernel.device import kind_of
from ultrabench.kernel.dryrun.counts import ExecutedFlops
from ultrabench.kernel.mesh import build_mesh, join_process_group, reduce_over_ranks
from ultrabench.kernel.rank import environment, failure, memory, stack_dump
from ultrabench.kernel.rank.clock import run_timed
from ultrabench.kernel.rank.digest_chain import device_digest
from ultrabench.kernel.rank.probe import probe
from ultrabench.kernel.rank.progress import device_progress
from ultrabench.kernel.rank.ran import observe_steps, require_requested_options
from ultrabench.kernel.rank.trace import trace_steps
from ultrabench.kernel.replicas import require_equal_replicas
from ultrabench.kernel.step import TrainStep
from ultrabench.partial_step import Turn, step_s, turns_ci95_rel
from ultrabench.rank_report import CHECKPOINT_PHASE, STEP_PARTS, TRACE_PHASE, Report
from ultrabench.record import from_dict
from ultrabench.run import Task
from ultrabench.step_time import ci95_rel

DATA_PART, FORWARD_BACKWARD_PART, OPTIMIZER_PART = range(len(STEP_PARTS))
"""Indices of the parts of a step in STEP_PARTS."""
STOP_REASONS = (None, "interval", "max_steps")
"""Why measuring ended, by the number that rank 0 broadcasts: 0 to go on, 1 if the confidence interval is narrow
enough, 2 if max_steps were measured."""
STORE_POLL_S = 0.005
"""Seconds between two looks for the file with the port of rank 0's store."""
MAX_COMPILING_STEPS = 10
"""Largest number of steps by which compilation may prolong the warm-up."""


class Timing:
    """Runs steps one by one, reports each, and decides when enough steps have been measured."""

    def __init__(self, task: Task, trainer: TrainStep, report: Report) -> None:
        self.task, self.trainer, self.report = task, trainer, report
        self.has_both = task.slice is not None and task.few_steps
        """Whether whole steps are measured, and then parts of a step."""
        self.slice = None if self.has_both else task.slice
        """The parts of a step that are measured in turns; None: whole steps are measured, for now or for good."""
        self.limits = task.measure.few_steps if task.few_steps else task.measure
        """How many steps and seconds to warm up and to measure."""
        self.device = trainer.device
        self.is_measuring = False
        self.has_compiled = False
        """Whether this rank compiled a graph in the last step."""
        self.step_times_s: list[float] = []
        """Seconds of each measured step, or of the whole step by each turn of parts."""
        self.turns: list[Turn] = []
        """The measured turns of parts of the last slice."""
        self.num_turns = 0
        """Number of turns of parts that this rank has measured."""
        self.part_times_s: list[float] = []
        """Seconds of each measured part of a step, in order."""
        self.loss_final: float | None = None
        self.num_steps = 0
        """Number of steps that this rank has run."""

    def step(self, size: int | None = None) -> float:
        """Runs one step; returns its seconds, without making its data before and reading its loss after.

        Args:
            size: the number of micro-batches of the step, if it is another than that of the step before.
        """
        if size is not None:
            self.trainer.set_gas(size)
        step_number, num_graphs_before = self.num_steps + 1, self.trainer.compiler.num_graphs
        self.report.enter_part(DATA_PART, step_number)
        batch = self.trainer.batch(step_number)
        seconds, mean_loss = run_timed(self.device, partial(self._train, step_number, batch))
        self._record(step_number, seconds, float(mean_loss))
        self.has_compiled = self.trainer.compiler.num_graphs > num_graphs_before
        return seconds

    def _train(self, step_number: int, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Forward, backward and optimizer of a step, which is the timed part; returns the mean loss."""
        self.report.enter_part(FORWARD_BACKWARD_PART, step_number)
        mean_loss = self.trainer.accumulate(*batch)
        self.report.enter_part(OPTIMIZER_PART, step_number)
        return self.trainer.update(mean_loss)

    def _record(self, step_number: int, seconds: float, loss: float) -> None:
        if not math.isfinite(loss):
            raise failure.NonFiniteLossError(f"loss is {loss} at step {step_number}")
        tokens, gradient_norm = self.task.spec.tokens_per_step, float(self.trainer.gradient_norm)
        step_facts = {"step": step_number, "seconds": seconds, "loss": loss, "gradient_norm": gradient_norm}
        if self.slice:
            gas, whole_gas = self.trainer.layout.gas, self.task.spec.layout.gas
            tokens = tokens * gas // whole_gas
            step_facts |= {"gas": gas, "whole_gas": whole_gas, "turn": self.num_turns}
        self.report.write("step", tokens=tokens, **step_facts, measured=self.is_measuring)
        self.num_steps = step_number
        if self.is_measuring and not self.slice:
            self.step_times_s.append(seconds)
        if step_number == self.limits.loss_step and not self.slice:  # parts train on fewer tokens
            self.loss_final = loss

    def _measure_turn(self) -> None:
        """Measures one step, or the parts of a step in their turn."""
        if self.slice is None:
            self.step()
            return
        turn = {size: self.step(size) for size in self.slice.order(self.num_turns)}
        self.num_turns += 1
        self.turns.append(turn)
        self.part_times_s += turn.values()
        self.step_times_s.append(step_s(self.slice, turn, self.task.spec.layout.gas))

    def _measure(self) -> str:
        """Measures steps, or turns of parts, until there are enough; returns why no more are measured."""
        self.is_measuring, stop_reason = True, None
        while stop_reason is None:
            self._measure_turn()
            stop_reason = self.stop_reason()
            if stop_reason == "max_steps" and self._widen():
                stop_reason = None
        return stop_reason

    def _begin_parts(self) -> None:
        """Goes on with parts of a step after whole ones, which have warmed up the start for them."""
        self.slice, self.limits = self.task.slice, replace(self.task.measure, min_s=0.0)
        self.step_times_s = []
        self.is_measuring = False
        for size in self.slice.sizes if self.slice else ():
            self.step(size)  # a pipeline prepares something for each number of micro-batches

    def _widen(self) -> bool:
        """Goes on with parts of a wider slice, if there is one; returns whether there is."""
        if self.slice is None or self.slice.wider is None:
            return False
        self.slice = replace(self.slice, g2=self.slice.wider, third=None, wider=None)
        self.step_times_s, self.turns = [], []
        self.is_measuring = False
        self.step(self.slice.g2)  # it may be the first step of this size
        self.is_measuring = True
        return True

    def _value_of_rank_0(self, value: float) -> float:
        """The `value` of rank 0 on all ranks, which have to decide alike although their clocks differ."""
        shared_value = torch.tensor([value], device=self.device)
        dist.broadcast(shared_value, src=0)
        return float(shared_value)

    def _ci95_rel(self) -> float | None:
        """Half-width of the 95 % interval of the step time, without the error of the line through parts of steps."""
        if self.slice is None:
            return ci95_rel(self.step_times_s)
        return turns_ci95_rel(self.slice, self.turns, self.task.spec.layout.gas)

    def stop_reason(self) -> str | None:
        """Why no more steps are measured, one of STOP_REASONS; rank 0 decides for all ranks."""
        limits, num_measured = self.limits, len(self.step_times_s)
        if num_measured < limits.min_steps:
            return None
        measured_s = sum(self.part_times_s or self.step_times_s)
        relative_ci95, is_long = self._ci95_rel(), measured_s >= limits.min_s
        is_narrow = relative_ci95 is not None and relative_ci95 <= limits.target_ci95_rel
        reason_index = 0 if not is_long else 1 if is_narrow else 2 if num_measured >= limits.max_steps else 0
        return STOP_REASONS[int(self._value_of_rank_0(reason_index))]

    def _warm_up(self) -> None:
        """Runs steps until the warm-up is over and no rank compiled a graph in the last one."""
        start_s, warmup_steps, min_s = time.perf_counter(), self.limits.warmup_steps, self.limits.warmup_s
        for size in self.slice.sizes if self.slice else ():
            self.step(size)
        while self.num_steps < warmup_steps or self._value_of_rank_0(time.perf_counter() - start_s) < min_s:
            self.step()
        for remaining_steps in range(MAX_COMPILING_STEPS, -1, -1):
            if not reduce_over_ranks(self.has_compiled, self.device):
                return
            if remaining_steps:
                self.step()
        graphs_text = f"layers ({self.trainer.compiler.num_graphs} graphs so far); use kernel.compile=false"
        raise RuntimeError(f"step {self.num_steps} still compiled {graphs_text}")

    def _count_step_flops(self, size: int | None = None) -> float:
        """Runs one step, of `size` micro-batches if that is given; returns the FLOPs of all ranks in it."""
        with ExecutedFlops() as flop_counter:
            self.step(size)
        return reduce_over_ranks(flop_counter.flops, self.device, dist.ReduceOp.SUM)

    def _count_whole_step_flops(self) -> float:
        """The FLOPs of all ranks in a whole step, from one step, or from a part of each of two sizes."""
        if self.slice is None:
            return self._count_step_flops()
        flops_by_size = {size: self._count_step_flops(size) for size in (self.slice.g1, self.slice.g2)}
        return step_s(self.slice, flops_by_size, self.task.spec.layout.gas)

    def run(self) -> None:
        """Runs the first step, the warm-up and the measured steps; reports how the measurement ended."""
        self.report.phase("first_step")
        with observe_steps(self.trainer) as step_observations:
            self.step()
        self.report.write("ran", options=require_requested_options(self.trainer, step_observations))
        self.report.phase("warmup")
        # Torch hides the attention that a compiled layer computes again.
        hides_flops = self.task.spec.compiles and self.task.spec.layout.recompute != "none"
        hardware_flops = None
        if not hides_flops and self.limits.warmup_steps > 1:
            hardware_flops = self._count_whole_step_flops()
        self._warm_up()
        # If one rank collected garbage during a measured step, all other ranks would wait for it.
        gc.collect()
        gc.freeze()
        gc.disable()
        # Peaks are reported already here, so that a run that is stopped early has them too.
        self.report.write("memory", **memory.peak(self.device))
        self.report.phase("measure")
        stop_reason = self._measure()
        if self.has_both:
            self._begin_parts()
            self._measure()
        gc.enable()
        self.report.write("memory", **memory.peak(self.device))
        require_equal_replicas(self.trainer)
        if self.task.traced:
            self.report.phase(TRACE_PHASE)
            trace_steps(self.trainer, self.num_steps + 1, Path(self.report.path).parent / TRACE_PHASE)
        self.report.write(
            "done",
            stopped=stop_reason,
            ci_reached=stop_reason == "interval",
            loss_final=self.loss_final,
            hardware_flops_per_step=hardware_flops,
            omp_num_threads=torch.get_num_threads(),
            graphs=self.trainer.compiler.num_graphs,
        )
        if self.task.checkpoint:
            self._measure_checkpoint(Path(self.task.checkpoint))

    def _measure_checkpoint(self, folder: Path) -> None:
        """Measures checkpoints; it comes after all else is reported, and whatever fails here is reported alone."""
        from ultrabench.kernel.rank import checkpoint  # other runs save its memory and 0.1 s

        dist.barrier()  # no rank begins before all are done
        self.report.phase(CHECKPOINT_PHASE)
        self.is_measuring = False
        gc.disable()
        try:
            measurement = checkpoint.CheckpointMeasurement(self.trainer, folder)
            results: dict[str, Any] = measurement.save_and_load()
            results |= measurement.save_during_training(self.step, median(self.step_times_s))
        except BaseException as error:  # that of torch.distributed.checkpoint is no Exception
            traceback.print_exc()
            results = {"message": failure.error_line(checkpoint.first_failure(error))}
        self.report.write("checkpoint", **results)


def run(task: Task, report: Report) -> None:
    """Runs the task on this rank, from joining the process group to leaving it."""
    report.phase("process_group")
    device = environment.use_device(task.device, int(os.environ.get("LOCAL_RANK", 0)))
    report.write("memory", **memory.usage())
    _join_default_group(report, device)
    if dist.get_rank() == 0:
        report.write("environment", **environment.facts())
    if task.probe or not task.spec.kernel.trains:
        _probe(task, device, report)
    else:
        _train(task, device, report)
    report.phase("teardown")
    dist.destroy_process_group()


def _join_default_group(report: Report, device: torch.device) -> None:
    """Makes the default process group, whose store the agent tells to all ranks if there is an agent."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store_path, store = os.environ.get("ULTRABENCH_STORE"), None
    if store_path is not None:
        while rank and not Path(store_path).exists():
            time.sleep(STORE_POLL_S)
        # The store of rank 0 takes a free port, which the agent tells the other ranks.

        host_and_port = os.environ["MASTER_ADDR"], int(Path(store_path).read_text()) if rank else 0
        store = dist.TCPStore(*host_and_port, world_size, rank == 0, GROUP_TIMEOUT, wait_for_workers=False)  # type: ignore[attr-defined]
        if rank == 0:
            report.write("store", port=store.port)
    join_process_group(device, store, rank, world_size)


def _probe(task: Task, device: torch.device, report: Report) -> None:
    report.phase("probe")
    probe_settings = long_probe(task.device, task.measure.warmup_steps, task.measure.max_steps)
    if task.probe:
        probe_settings = short_probe(task.device, experts=task.spec.shape.num_experts > 0)
        report.write("digest", **device_digest(device))
        report.microbatch()
    rates = probe(device, task.spec.gpus_per_node, probe_settings, report.microbatch)
    if dist.get_rank() == 0:
        report.write("probe", **rates)
    report.write("done", stopped="probe")


def _train(task: Task, device: torch.device, report: Report) -> None:
    report.phase("build")
    mesh = build_mesh(task.spec.layout, device.type)
    # The limit is set after the groups are made, since the stacks of their threads must not count.
    if kind_of(device).shares_host:
        memory.limit_cpu_memory(task.rank_mem_bytes)
        report.write("memory", **memory.usage())
    after_microbatch = device_progress(device, report.microbatch)
    trainer = TrainStep(task.largest_spec, device, mesh, after_microbatch=after_microbatch)
    if kind_of(device).has_gpus:
        memory.reset_peak(device)
    Timing(task, trainer, report).run()


def main() -> int:
    """Runs the rank; returns its exit code: 0 if its run is done, 1 if it failed and the report says why."""
    report = Report.from_environment()
    faulthandler.enable()  # a crash of native code leaves its stacks in the log
    stack_dump.dump_on_signals(report)
    try:
        memory.reset_peak(torch.device("cpu"))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        task = from_dict(Task, json.loads(Path(os.environ["ULTRABENCH_SPEC"]).read_text()))
        run(task, report)
    except Exception as error:
        failure_kind, failure_text = failure.kind_of(error), failure.error_line(error)
        failure_facts = {"kind": failure_kind, "message": failure_text, "traceback": traceback.format_exc()}
        report.write("error", **failure_facts, **memory.usage())
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A failed collective leaves threads behind that would prevent the interpreter from ending.
    os._exit(exit_code)
