"""Profiles a run: takes a trace of a few more steps and a memory snapshot, and summarises them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from ultrabench.kernel.compat import memory_history
from ultrabench.kernel.mesh import local
from ultrabench.kernel.step import TrainStep
from ultrabench.kernel.timeline import most_allocated, summarize
from ultrabench.layout import Layout

STEPS = 2
"""Number of steps in the trace; one step before them warms up the profiler, and one more follows."""
TRACE, SNAPSHOT, SUMMARY = "trace.json.gz", "memory.pickle", "summary.json"


def profiled_ranks(layout: Layout) -> frozenset[int]:
    """The ranks that are profiled: the first rank of the first and of the last pipeline stage."""
    return frozenset(layout.first_rank(pp) for pp in (0, layout.pp - 1))


def look_inside(trainer: TrainStep, number: int, folder: Path) -> None:
    """Trains four more steps from `number` on; profiled ranks write files to `folder`/rank<rank>.

    All ranks have to call it. trace.json.gz is for chrome://tracing or Perfetto, memory.pickle (only on GPUs)
    is for pytorch.org/memory_viz, and summary.json has the result of `summarize` and memory_bytes, the bytes
    of each kind at the peak.

    Raises:
        OSError: the files cannot be written.
    """
    rank = dist.get_rank()
    steps = iter(range(number, number + STEPS + 2))
    if rank in profiled_ranks(trainer.layout):
        to = folder / f"rank{rank}"
        to.mkdir(parents=True)
        _trace(lambda: _train(trainer, next(steps)), trainer.device, to / TRACE)
        with memory_history(trainer.device, to / SNAPSHOT):
            gradient, peak = _gradients_and_peak(trainer, next(steps))
        with gzip.open(to / TRACE) as file:
            trace = json.load(file)
        memory = _by_kind(trainer, gradient, peak, trace)
        told = {"rank": rank, "device": trainer.device.type, **summarize(trace), "memory_bytes": memory}
        (to / SUMMARY).write_text(json.dumps(told, indent=1))
    for step in steps:  # the steps of ranks that are not profiled
        _train(trainer, step)
    dist.barrier()  # no rank continues while others still write


def _train(trainer: TrainStep, step: int) -> int:
    """Trains one step; returns the bytes of the gradients before the update."""
    loss = trainer.accumulate(*trainer.batch(step))
    gradient = sum(local(p.grad).nbytes for p in trainer.params.values() if p.grad is not None)
    trainer.update(loss)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return gradient


def _gradients_and_peak(trainer: TrainStep, step: int) -> tuple[int, int | None]:
    """Trains one step; returns the bytes of its gradients and, on a GPU, the peak of allocated bytes."""
    if trainer.device.type != "cuda":
        return _train(trainer, step), None
    torch.cuda.reset_peak_memory_stats()
    return _train(trainer, step), torch.cuda.max_memory_allocated()


def _by_kind(trainer: TrainStep, gradient: int, peak: int | None, trace: dict[str, Any]) -> dict[str, int]:
    """The bytes of each kind at the peak: parameters, gradients, optimizer states; the rest is activation.

    On a CPU only the bytes that the traced steps allocated are known, which include the gradients.
    """
    states = [t for s in trainer.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    parameter, optimizer = (sum(t.nbytes for t in ts) for ts in (trainer.shards.values(), states))
    above = most_allocated(trace) if peak is None else peak - parameter - optimizer
    kinds = {"parameter": parameter, "gradient": gradient, "optimizer": optimizer}
    kinds["activation"] = max(0, above - gradient)
    return {**kinds, "peak": sum(kinds.values())}


def _trace(step: Callable[[], object], device: torch.device, path: Path) -> None:
    """Runs 1 + STEPS steps, of which the last STEPS are traced."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda made: made.export_chrome_trace(str(path)),
        profile_memory=not on_gpu,  # on GPUs the memory snapshot shows it
    ) as profiler:
        for _ in range(1 + STEPS):
            step()
            profiler.step()
