"""The result of an attempt as other patterns read it in the kept logs of its ranks."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.ranks.rank_progress import AttemptProgress
from ultrabench.agent.ranks.sources import ReportSource, Source, report_sources
from ultrabench.result import RunResult, Status
from ultrabench.run import Task

STEP_FIELDS = (
    "measured_by", "arrival_error_s", "log_doubts", "source_mfu", "ci_reached", "step_times_s", "rank_step_times_s",
    "loss_final", "loss_step",
)  # fmt: skip
"""Fields of a result that steps and losses of a log give."""
MEMORY_FIELDS = (
    "peak_mem_allocated_bytes", "peak_mem_reserved_bytes", "peak_mem_reserved_rank0_bytes",
)  # fmt: skip
"""Fields of a result that kernel.memory_line gives."""


def ranks_to_read(task: Task, changed_options: Collection[str]) -> set[int]:
    """The ranks whose whole logs are needed to read an attempt again; those of memory only if its pattern changed.

    Where any rank may log the steps, the logs of the first node are enough if they have them.
    """
    writers = {source.writer_rank for source in _log_sources(task, changed_options, Path())}
    if task.spec.logging_rank is None and "memory_line" not in changed_options:
        return {rank for rank in writers if rank < task.spec.gpus_per_node}
    return writers


def _log_sources(task: Task, changed_options: Collection[str], folder: Path) -> Iterator[Source]:
    """What reads the logs of all nodes."""
    spec = task.spec
    for first_rank in range(0, spec.layout.world_size, spec.gpus_per_node):
        for source in report_sources(task, range(first_rank, first_rank + spec.gpus_per_node), folder):
            is_memory = getattr(source, "option", "") == "memory_line"
            if not isinstance(source, ReportSource) and (not is_memory or "memory_line" in changed_options):
                yield source


def reread(
    task: Task, result: RunResult, log_by_rank: Mapping[int, str], changed_options: Collection[str]
) -> RunResult | None:
    """The result of an attempt whose ranks all ended well, read by the patterns of `task`; None if logs are missing.

    Args:
        result: as it was read before; what logs do not show stays.
        log_by_rank: whole logs.
        changed_options: the options of LOG_OPTIONS that have another value than before.
    """
    if not ranks_to_read(task, changed_options) <= log_by_rank.keys():
        return None
    num_ranks, has_all_logs = task.spec.layout.world_size, True
    progress = AttemptProgress(num_ranks, result.hostnames or ("",), starts_ranks=task.starts_ranks)
    with TemporaryDirectory() as folder:
        for rank, log in log_by_rank.items():
            (Path(folder) / f"rank{rank}.log").write_text(log)
        for source in _log_sources(task, changed_options, Path(folder)):
            has_all_logs = has_all_logs and source.writer_rank in log_by_rank
            is_first = True
            while is_first or source.has_more:
                is_first = False
                lines = source.read(is_last=True)
                progress.add([{"rank": source.described_rank, "line": line} for line in lines])
    progress.add([{"rank": rank, "code": 0, "tail": log_by_rank.get(rank, "")} for rank in range(num_ranks)])
    reading = classify(progress, task, None)
    if reading.status != Status.OK and not has_all_logs:
        return None
    has_memory = "memory_line" in changed_options
    new_values: dict[str, Any] = {
        name: getattr(reading, name) for name in (*STEP_FIELDS, *(MEMORY_FIELDS if has_memory else ()))
    }
    if reading.status != Status.OK:
        ending: dict[str, Any] = {"stopped": None, "reason": reading.reason, "cause": reading.cause}
    elif result.status == Status.OK:
        ending = {}
    else:
        ending = {"stopped": "program", "reason": None, "cause": None, "evidence": {}}
    return replace(result, status=reading.status, **new_values, **ending)
