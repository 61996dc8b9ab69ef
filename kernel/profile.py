"""Looking inside a run: a trace of some more steps, a memory snapshot, and what they show."""

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
"""In the trace; one more before them, in which the profiler itself warms up, and one after them."""
TRACE, SNAPSHOT, SUMMARY = "trace.json.gz", "memory.pickle", "summary.json"


def profiled_ranks(layout: Layout) -> frozenset[int]:
    """The first rank of the first and of the last pipeline stage."""
    return frozenset(layout.first_rank(pp) for pp in (0, layout.pp - 1))


def look_inside(trainer: TrainStep, number: int, folder: Path) -> None:
    """Trains four more steps from `number` on; profiled ranks write what they see to `folder`/rank<rank>.

    Collective. trace.json.gz is for chrome://tracing or Perfetto, memory.pickle (GPUs only) for
    pytorch.org/memory_viz, summary.json holds what `summarize` says, and memory_bytes at the peak by kind.

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
    for step in steps:  # of the other ranks
        _train(trainer, step)
    dist.barrier()  # no rank leaves while its peers still write


def _train(trainer: TrainStep, step: int) -> int:
    """One step; bytes of the gradients before the update."""
    loss = trainer.accumulate(*trainer.batch(step))
    gradient = sum(local(p.grad).nbytes for p in trainer.params.values() if p.grad is not None)
    trainer.update(loss)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return gradient


def _gradients_and_peak(trainer: TrainStep, step: int) -> tuple[int, int | None]:
    """Bytes of the gradients of one step, and the most that was allocated meanwhile on a GPU."""
    if trainer.device.type != "cuda":
        return _train(trainer, step), None
    torch.cuda.reset_peak_memory_stats()
    return _train(trainer, step), torch.cuda.max_memory_allocated()


def _by_kind(trainer: TrainStep, gradient: int, peak: int | None, trace: dict[str, Any]) -> dict[str, int]:
    """Bytes at the peak: what stays from step to step, gradients, and the rest, which is activation.

    A CPU's allocator knows only what was allocated in the traced steps, gradients among it.
    """
    states = [t for s in trainer.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    parameter, optimizer = (sum(t.nbytes for t in ts) for ts in (trainer.shards.values(), states))
    above = most_allocated(trace) if peak is None else peak - parameter - optimizer
    kinds = {"parameter": parameter, "gradient": gradient, "optimizer": optimizer}
    kinds["activation"] = max(0, above - gradient)
    return {**kinds, "peak": sum(kinds.values())}


def _trace(step: Callable[[], object], device: torch.device, path: Path) -> None:
    """Runs 1 + STEPS steps, of which the last ones are traced."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda made: made.export_chrome_trace(str(path)),
        profile_memory=not on_gpu,  # a GPU's allocator has a snapshot of its own
    ) as profiler:
        for _ in range(1 + STEPS):
            step()
            profiler.step()
