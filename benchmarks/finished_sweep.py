"""Writes the folder of a sweep that has ended, as a launch would have left it, without running anything."""

import itertools
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ultrabench.record import raw_json
from ultrabench.result import RunResult, Status
from ultrabench.run import RunSpec
from ultrabench.store import events
from ultrabench.store.folder import SweepFolder
from ultrabench.store.sweep_json import SweepJson, write_sweep_json
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.grid import broken_rules, layouts
from ultrabench.sweep.plan_table import write_plan
from ultrabench.sweep.predict.predict import Prediction

NODES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
PACKED = 100
"""Attempts of one allocation, which has a journal file of its own."""
HOSTS = 64
"""Number of hosts of the cluster, on two of which each allocation runs."""
PREDICTED = Prediction(
    step_time_s=5.0, step_time_low_s=4.0, step_time_high_s=6.0, peak_mem_bytes=40 << 30, memory_share=0.5, p_oom=0.2,
    limited_by="compute", duration_s=90.0,
)  # fmt: skip


def write_sweep(path: Path, attempts: int) -> SweepFolder:
    """A sweep of 10 models on 10 numbers of nodes, the grid of the Ultra-Scale Playbook, with so many attempts.

    Candidates are thinned so that each run has one attempt; where there are not enough, runs are repeated. A half
    of the attempts is ok, a third ran out of memory, the others crashed. The predictions are the same numbers
    everywhere.
    """
    config = load_config(["sweep=playbook"])
    shapes = [
        replace(shape, name=f"{shape.name}{'+' * extra}", num_hidden_layers=shape.num_hidden_layers + extra)
        for shape in config.models
        for extra in (0, 1)
    ]
    workload, per_node, plan = config.workload, config.hardware.gpus_per_node, list[Candidate]()
    for shape, nodes in itertools.product(shapes, NODES):
        spec_fields = {"shape": shape, "kernel": config.kernel, "nodes": nodes, "gpus_per_node": per_node}
        for layout in layouts(config.axes, shape, nodes * per_node, per_node, workload.gbs):
            rule, reason = next(broken_rules(layout, shape), (None, None))
            spec = RunSpec(**spec_fields, workload=workload, layout=layout)
            candidate_fields = {
                "rule": rule,
                "reason": reason,
                "predicted": PREDICTED,
                "flops_formula": "palm",
            }
            plan.append(Candidate(run_id=spec.run_id, spec=spec, **candidate_fields))
    stride = max(1, sum(c.runs for c in plan) // attempts)
    # Of each cell at least some layouts are kept, since neighbours in the list are of one cell.
    plan = plan[::stride]
    folder = SweepFolder(path)
    folder.create()
    common = {"sweep": path.name, "cluster": None, "hardware": config.hardware, "kernel": config.kernel}
    origin = {"kernel_digest": "d" * 16, "provenance": {}, "config": {}}
    write_sweep_json(folder, SweepJson(**common, **origin, models=tuple(shapes), workload=workload))
    write_plan(plan, folder.plan)
    specs = [c.spec for c in plan if c.runs]
    runs, number = itertools.cycle(specs), len(specs)
    for first in range(0, attempts, PACKED):
        name = f"agent-n1-{first}"
        numbers = range(first, min(first + PACKED, attempts))
        events_of_file = itertools.chain(
            *(_events_of(next(runs), n // number, n, f"a{first}") for n in numbers)
        )
        lines = (
            events.Line(event=e, writer=name, seq=n, time=float(first)) for n, e in enumerate(events_of_file)
        )
        (folder.journal / f"{name}.jsonl").write_bytes(b"".join(map(events.encode, lines)))
    return folder


def _events_of(spec: RunSpec, repeat: int, n: int, allocation: str) -> Iterator[events.Event]:
    """The events of the n-th attempt of the sweep."""
    key = {"run_id": spec.run_id, "repeat": repeat, "attempt": 0}
    predicted = {"step_time_s": 5.0, "peak_mem_bytes": 40 << 30, "p_oom": 0.2}
    yield events.Claimed(**key, allocation=allocation, spec=raw_json(spec), predicted=predicted)
    yield events.Started(**key, allocation=allocation, scratch="/tmp/ultrabench-1")
    for phase in ("build", "train"):
        yield events.Phase(**key, name=phase)
    # An MFU between 20 and 40 %, which the sine makes different without chance.
    share = 0.3 + 0.1 * math.sin(n * 0.7)
    gpus = spec.layout.world_size
    step_s = spec.tokens_per_step * spec.shape.flops_per_token(spec.workload.seq_len) / gpus / share / 989e12
    steps = tuple(step_s * (1 + 0.002 * math.sin(n + k)) for k in range(10))
    common = {
        "duration_s": 60.0, "started_at": 1.7e9 + 60 * n,
        "hostnames": tuple(f"n{(n // PACKED + k) % HOSTS:02}" for k in (1, 2)), "gpu_name": "NVIDIA H100 80GB HBM3",
        "torch_version": "2.13.0", "env_id": "e" * 16, "kernel_digest": "d" * 16, "measured_by": "report",
    }  # fmt: skip
    if n % 6 < 3:
        memory = {"peak_mem_allocated_bytes": 30 << 30, "peak_mem_reserved_bytes": 41 << 30}
        ok = {"step_times_s": steps, "ci_reached": True, "stopped": "interval"}
        result = RunResult(status=Status.OK, loss_final=11.0, loss_step=5, **common, **ok, **memory)
        yield events.Result(**key, allocation=allocation, result=result)
        return
    status, cause = (Status.OOM, "cuda_oom") if n % 6 < 5 else (Status.CRASH, "exception")
    failure = {"reason": f"rank {n % 8}: tried to allocate 2.00 GiB", "cause": cause, "fingerprint": "f" * 16}
    exits, tail = {str(rank): 1 for rank in range(8)}, [f"line {k} of the log" for k in range(8)]
    result = RunResult(status=status, **common, **failure, evidence={"exits": exits, "tail": tail})
    yield events.Failed(**key, allocation=allocation, result=result)


def ended_sweeps() -> Iterator[tuple[int, str, str]]:
    """Writes a sweep for each number of attempts on the command line: the number, its folder,
    and a path for a table.
    """
    for attempts in map(int, sys.argv[1:] or (1000, 4000, 16000, 100_000)):
        with tempfile.TemporaryDirectory() as folder:
            yield attempts, str(write_sweep(Path(folder) / "sweep", attempts).path), f"{folder}/runs.parquet"


if __name__ == "__main__":
    write_sweep(Path(sys.argv[1]), int(sys.argv[2]))
