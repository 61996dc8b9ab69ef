"""The result of an attempt as other patterns read it in the kept logs of its ranks."""

from collections.abc import Collection, Mapping
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
    """The ranks whose whole logs are needed to read an attempt again; those of memory only if its pattern changed."""
    sources = _log_sources(task, changed_options, Path())
    return {source.writer_rank for source in sources}


def _log_sources(task: Task, changed_options: Collection[str], folder: Path) -> list[Source]:
    sources = report_sources(task, range(task.spec.layout.world_size), folder)
    log_sources = (source for source in sources if not isinstance(source, ReportSource))
    return [
        s
        for s in log_sources
        if getattr(s, "option", "") != "memory_line" or "memory_line" in changed_options
    ]


def reread(
    task: Task, result: RunResult, log_by_rank: Mapping[int, str], changed_options: Collection[str]
) -> RunResult:
    """The result of an attempt whose ranks all ended well, read by the patterns of `task`.

    Args:
        result: as it was read before; what logs do not show stays.
        log_by_rank: the whole logs of the ranks of `ranks_to_read`.
        changed_options: the options of LOG_OPTIONS that have another value than before.
    """
    num_ranks = task.spec.layout.world_size
    progress = AttemptProgress(num_ranks, result.hostnames or ("",))
    with TemporaryDirectory() as folder:
        for rank, log in log_by_rank.items():
            (Path(folder) / f"rank{rank}.log").write_text(log)
        for source in _log_sources(task, changed_options, Path(folder)):
            is_first = True
            while is_first or source.has_more:
                is_first = False
                lines = source.read(is_last=True)
                progress.add([{"rank": source.described_rank, "line": line} for line in lines])
    progress.add([{"rank": rank, "code": 0, "tail": log_by_rank.get(rank, "")} for rank in range(num_ranks)])
    reading = classify(progress, task, None)
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
