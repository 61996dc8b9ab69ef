"""What changed patterns of a launch mean for the results of a sweep, whose kept logs are read again."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ultrabench.errors import ConfigError, counted
from ultrabench.kernel_config import LOG_OPTIONS
from ultrabench.record import from_dict
from ultrabench.result import SLOWER, UNMEASURED, RunResult, Status
from ultrabench.run import AttemptKey, RunSpec, Task
from ultrabench.store.events import Reread
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.running.attempts import attempts_to_reread, changed_patterns

ReadLogs = Callable[[Task, RunResult, Set[str]], RunResult | None]
"""Reads the kept logs of a task by its patterns: takes its result as it was read before, and the options of LOG_OPTIONS
that have changed; returns None where the logs are not whole."""


@dataclass(frozen=True, kw_only=True)
class Rereads:
    """What changed patterns mean for the results of a sweep."""

    events: tuple[Reread, ...] = ()
    num_repeated: int = 0
    """Number of results that are measured again, since their logs do not say what the patterns ask."""
    changed_options: tuple[str, ...] = ()

    @property
    def line(self) -> str | None:
        """One line that says how many results are read again and how many are measured again;
        None if there are none.
        """
        if not self.events:
            return None
        options_text = ", ".join(f"kernel.{option}" for option in self.changed_options)
        num_read = len(self.events) - self.num_repeated
        parts = [f"{counted(num_read, 'result')} read again in the kept logs"] if num_read else []
        if self.num_repeated:
            parts.append(
                f"{counted(self.num_repeated, 'run')} measured again, since no kept log gives the steps"
            )
        return f"other {options_text} than before: {'; '.join(parts)}"

    def apply(self, state: SweepState) -> SweepState:
        """A copy of `state` with the results that were read again."""
        attempts = dict(state.attempts)
        for event in self.events:
            attempts[event.key] = replace(attempts[event.key], result=event.result, reread=event)
        return replace(state, attempts=attempts)


def rereads_of(state: SweepState, config: SweepConfig, read_logs: ReadLogs, *, keep: bool) -> Rereads:
    """The results that other patterns have read than those of `config`, read again.

    Args:
        read_logs: reads the kept logs of one attempt.
        keep: keep results whose logs are not whole as they are.
    """
    kernel, attempts = config.kernel, attempts_to_reread(state, config.kernel)
    result_by_key = {attempt.key: _read(config, attempt, read_logs) for attempt in attempts}
    fastest_s = _fastest_s_by_cell(result_by_key, attempts)
    changed_options = frozenset[str]().union(*(changed_patterns(attempt, kernel) for attempt in attempts))
    events, num_repeated = list[Reread](), 0
    for attempt in attempts:
        result, patterns = result_by_key[attempt.key], {name: getattr(kernel, name) for name in LOG_OPTIONS}
        if result is None and keep:
            result = attempt.result
        elif result is None or (
            result is not attempt.reported
            and _may_be_fast(result, fastest_s.get(_cell(attempt)), config.measure.race)
        ):
            result, patterns, num_repeated = _unread(attempt), {}, num_repeated + 1
        assert result is not None
        events.append(Reread(**attempt.key._asdict(), generation=0, patterns=patterns, result=result))
    return Rereads(
        events=tuple(events),
        num_repeated=num_repeated,
        changed_options=tuple(option for option in LOG_OPTIONS if option in changed_options),
    )


def _read(config: SweepConfig, attempt: AttemptState, read_logs: ReadLogs) -> RunResult | None:
    """The result of an attempt by the patterns of `config`; None if the kept logs do not give it.

    The arrival of lines cannot be read again, nor steps that were in a report,
    and the log of a rank that failed ends early.
    """
    reported, kernel, spec = attempt.reported, config.kernel, _spec_of(attempt)
    if spec is None:
        return None
    changed_options = {name for name in LOG_OPTIONS if getattr(spec.kernel, name) != getattr(kernel, name)}
    if reported is None or not changed_options:
        return reported
    has_failed = any(rank.get("code") != 0 for rank in reported.evidence.get("ranks", ()))
    if has_failed or kernel.step_line is None or kernel.times_by_arrival:
        return None
    task = Task(
        **attempt.key._asdict(), spec=replace(spec, kernel=replace(kernel, precision=spec.kernel.precision)),
        measure=config.measure, device=config.hardware.device, rank_mem_bytes=config.hardware.mem_bytes,
        predicted_step_time_s=0.0, predicted_duration_s=0.0, limit_s=0.0,
    )  # fmt: skip
    return read_logs(task, reported, changed_options)


def _unread(attempt: AttemptState) -> RunResult:
    """The result of an attempt whose log the new patterns cannot read."""
    assert attempt.result is not None
    reason = "other patterns have read its log, and it is not kept so that the new ones can"
    return replace(attempt.result, status=Status.INVALID, cause=UNMEASURED, reason=reason, stopped=None)


def _spec_of(attempt: AttemptState) -> RunSpec | None:
    """The run of an attempt; None if its claim is damaged."""
    with contextlib.suppress(ConfigError):
        return from_dict(RunSpec, attempt.spec_as(dict[str, Any]) or {}, skip_unknown=True)
    return None


def _cell(attempt: AttemptState) -> tuple[object, ...]:
    spec = _spec_of(attempt)
    return spec.cell if spec else ()


def _fastest_s_by_cell(
    result_by_key: Mapping[AttemptKey, RunResult | None], attempts: Sequence[AttemptState]
) -> dict[tuple[object, ...], float]:
    """Cell -> shortest median step time of the runs that were read again and were not stopped early."""
    fastest_s: dict[tuple[object, ...], float] = {}
    for attempt in attempts:
        result, cell = result_by_key[attempt.key], _cell(attempt)
        if result and result.status == Status.OK and result.stopped != SLOWER and result.step_times_s:
            fastest_s[cell] = min(fastest_s.get(cell, math.inf), median(result.step_times_s))
    return fastest_s


def _may_be_fast(result: RunResult, fastest_s: float | None, race: float | None) -> bool:
    """Whether a run was stopped as slower than the best of its cell, but is not by the new patterns."""
    if result.stopped != SLOWER or not result.step_times_s or fastest_s is None or race is None:
        return False
    return min(result.step_times_s) <= race * fastest_s
