"""Traces a run: takes a trace of a few more steps and a memory snapshot, and summarises them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from ultrabench.kernel.device import kind_of
from ultrabench.kernel.rank.memory import peak, reset_peak
from ultrabench.kernel.rank.timeline import peak_allocated_bytes, summarize
from ultrabench.kernel.step import TrainStep

NUM_TRACED_STEPS = 2
"""Number of steps in the trace; one step before them warms up the profiler, and one more follows."""
TRACE_FILE, SNAPSHOT_FILE, SUMMARY_FILE = "trace.json.gz", "memory.pickle", "summary.json"


def trace_steps(trainer: TrainStep, first_step: int, folder: Path) -> None:
    """Trains four more steps from `first_step` on; traced ranks write files to `folder`/rank<rank>.

    The first ranks of the first and of the last pipeline stage are traced. All ranks have to call it.
    trace.json.gz is for chrome://tracing or Perfetto, memory.pickle (only on GPUs) is for
    pytorch.org/memory_viz, and summary.json has the result of `summarize` and memory_bytes, the bytes of each
    kind at the peak.

    Raises:
        OSError: the files cannot be written.
    """
    rank, device = dist.get_rank(), trainer.device
    step_numbers = iter(range(first_step, first_step + NUM_TRACED_STEPS + 2))

    def train_step() -> None:
        trainer.update(trainer.accumulate(*trainer.batch(next(step_numbers))))
        torch.get_device_module(device).synchronize()

    if rank in (trainer.layout.first_rank(0), trainer.layout.first_rank(trainer.layout.pp - 1)):
        rank_folder = folder / f"rank{rank}"
        rank_folder.mkdir(parents=True)
        _write_trace(train_step, device, rank_folder / TRACE_FILE)
        reset_peak(device)
        if kind_of(device).has_gpus:
            torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
        train_step()
        if kind_of(device).has_gpus:
            torch.cuda.memory._dump_snapshot(str(rank_folder / SNAPSHOT_FILE))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        peak_bytes = peak(device)["allocated_bytes"]
        with gzip.open(rank_folder / TRACE_FILE) as file:
            trace = json.load(file)
        summary = {"rank": rank, "device": device.type, **summarize(trace)}
        summary["memory_bytes"] = _bytes_by_kind(trainer, peak_bytes, trace)
        (rank_folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=1))
    else:
        for _ in range(NUM_TRACED_STEPS + 2):
            train_step()
    dist.barrier()  # no rank continues while others still write


def _bytes_by_kind(trainer: TrainStep, peak_bytes: int | None, trace: dict[str, Any]) -> dict[str, int]:
    """The bytes of each kind at the peak: parameters, gradients, optimizer states; the rest is activation.

    A gradient has the size and type of its parameter. On a CPU only the bytes that the traced steps allocated
    are known, which include the gradients.
    """
    state_values = (value for state in trainer.optimizer.state.values() for value in state.values())
    optimizer_bytes = sum(value.nbytes for value in state_values if isinstance(value, torch.Tensor))
    parameter_bytes = sum(shard.nbytes for shard in trainer.shards.values())
    state_bytes = parameter_bytes + optimizer_bytes
    other_bytes = peak_allocated_bytes(trace) if peak_bytes is None else peak_bytes - state_bytes
    bytes_by_kind = {"parameter": parameter_bytes, "gradient": parameter_bytes, "optimizer": optimizer_bytes}
    bytes_by_kind["activation"] = max(0, other_bytes - parameter_bytes)
    return {**bytes_by_kind, "peak": sum(bytes_by_kind.values())}


def _write_trace(train_step: Callable[[], object], device: torch.device, path: Path) -> None:
    """Runs 1 + NUM_TRACED_STEPS steps, and writes a trace of all but the first to `path`."""
    is_gpu = kind_of(device).has_gpus
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])],
        schedule=schedule(wait=0, warmup=1, active=NUM_TRACED_STEPS, repeat=1),
        on_trace_ready=lambda finished_profiler: finished_profiler.export_chrome_trace(str(path)),
        profile_memory=not is_gpu,  # on GPUs the memory snapshot shows it
        record_shapes=True,  # they tell which matrix product of a layer an operator is
    ) as profiler:
        for _ in range(1 + NUM_TRACED_STEPS):
            train_step()
            profiler.step()
