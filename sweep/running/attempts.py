"""Pure functions that find which attempts a sweep still needs and which runs it leaves out."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ultrabench.layout import dominates
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config.retry_policy import RetryPolicy
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.control import contenders
from ultrabench.sweep.running.losses import disputed_attempts, with_loss_outliers
from ultrabench.sweep.running.outliers import suspect_attempts
from ultrabench.sweep.running.retry import broken, decide_retry, settled_oom


def left_out(runs: Iterable[Candidate], state: SweepState) -> dict[str, str]:
    """run_id of each run that cannot fit -> run_id of a run that needs no more and ran out of memory.

    A run that was ok, or that the user asks for, is not left out. A run that ran out of memory is not used
    as evidence when one that needs more memory was ok.
    """
    if not any(_ended(attempt, Status.OOM) for attempt in state.attempts.values()):
        return {}
    tried: dict[str, list[AttemptState]] = {}
    for key, attempt in sorted(state.attempts.items()):
        tried.setdefault(key.run_id, []).append(attempt)
    kin: dict[tuple[object, ...], list[Candidate]] = {}
    for run in runs:
        at = run.layout
        kin.setdefault((run.cell, at.tp, at.pp, at.cp), []).append(run)
    fitted = {i for i, attempts in tried.items() if any(_ended(a, Status.OK) for a in attempts)}
    asked = {key.run_id for key in state.retried}
    found: dict[str, str] = {}
    for group in kin.values():
        for victims, run_id in _speaking(group, tried, fitted):
            found |= dict.fromkeys(victims - asked - found.keys(), run_id)
    return found


def _speaking(
    group: Sequence[Candidate], tried: Mapping[str, list[AttemptState]], fitted: set[str]
) -> Iterable[tuple[set[str], str]]:
    """For each run of a group that surely does not fit: the runs that need no less, and its run_id."""
    for run in group:
        attempts = tried.get(run.run_id, [])
        if run.run_id not in fitted and settled_oom(attempts, run.prediction.memory_share):
            victims = {o.run_id for o in group if dominates(run.layout, o.layout)}
            if not victims & fitted:
                yield victims, run.run_id


def _ended(attempt: AttemptState, status: Status) -> bool:
    return attempt.result is not None and attempt.result.status == status


def skipped_reason(by: str) -> str:
    """The reason that a result row gives for a run that is left out."""
    return f"dominated by {by}, which had not enough memory with a smaller micro-batch or a higher ZeRO stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAttempt:
    """One attempt that the sweep still has to make."""

    candidate: Candidate
    key: AttemptKey
    patience: float = 1.0
    """Factor on the time limit, larger than 1 after a time-out."""
    after: AttemptKey | None = None
    """The failed attempt that this one follows; None for a first attempt."""
    pause_s: float = 0.0
    """Seconds to wait after the end of that failed attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsLeft:
    """The attempts that are left to submit or to wait for."""

    todo: tuple[PlannedAttempt, ...]
    """Attempts to submit, in the plan's order."""
    waiting: int
    """Number of attempts that are queued, running or held back."""
    untried: frozenset[int] = frozenset()
    """Numbers of nodes on which no run has passed yet. Of each, only one allocation may be in flight."""
    dominated: Mapping[str, str] = field(default_factory=dict)
    """run_id of each run that is left out -> run_id of the run that proves that it cannot fit."""
    broken: str | None = None
    """Why nothing more should be submitted; None when nothing is wrong."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to submit or to wait for."""
        return not self.todo and not self.waiting


def next_attempts(
    plan: Plan,
    state: SweepState,
    alive: frozenset[str],
    *,
    accepts: Callable[[RunResult], bool] = lambda result: True,
    old: frozenset[AttemptKey] = frozenset(),
    ended_s: Mapping[AttemptKey, float] | None = None,
) -> AttemptsLeft:
    """The attempts to submit, and how many are already queued or running.

    Args:
        alive: names of the allocations that are queued or running.
        accepts: tells whether an ok result counts; a result of another environment may not.
        old: attempts that ended before this launch.
        ended_s: seconds since this launcher saw each attempt end, by its own monotonic clock, because a run
            may have to wait after a failure. Attempts that ended before this launch are left out: they have
            waited long enough.
    """
    config, state, ended_s = plan.config, with_loss_outliers(state), ended_s or {}
    on_their_way = {key for name in alive for key in _unfinished(state, name)}
    tried: dict[str, list[AttemptState]] = {}
    for key, attempt in sorted(state.attempts.items()):
        tried.setdefault(key.run_id, []).append(attempt)
    # Attempts whose losses differ without a majority are not repeated: repeats would differ in the same way.
    doubted = suspect_attempts(state, device=config.hardware.device).keys() - disputed_attempts(state).keys()
    following = _Following(state, config.retry, old, accepts, doubted)
    dominated = left_out(plan.runs, state)
    open_runs = [run for run in plan.runs if run.run_id not in dominated]
    todo = _wanted(open_runs, tried, following, range(config.repeats))
    if config.measure.confirm > config.repeats:
        unsettled = {t.candidate.cell for t in todo}
        settled = [run for run in open_runs if run.cell not in unsettled]
        best = contenders(settled, tried, state)
        further = range(config.repeats, config.measure.confirm)
        todo += _wanted([r for r in settled if r.run_id in best], tried, following, further)
    todo = [t for t in todo if t.key not in on_their_way]
    resting = {t.key for t in todo if t.after and ended_s.get(t.after, math.inf) < t.pause_s}
    canary = config.launcher.control  # one allocation of each number of nodes is tried first
    untried = frozenset({t.candidate.nodes for t in todo} - _passed(state)) if canary else frozenset[int]()
    held_back = untried & {state.allocations[name].nodes for name in alive if name in state.allocations}
    ready = tuple(t for t in todo if t.candidate.nodes not in held_back and t.key not in resting)
    return AttemptsLeft(
        todo=ready,
        waiting=len(on_their_way) + len(todo) - len(ready),
        untried=untried,
        dominated=dominated,
        broken=broken(state, config.retry, ended_s),
    )


def _wanted(
    runs: Sequence[Candidate],
    tried: Mapping[str, list[AttemptState]],
    following: "_Following",
    repeats: range,
) -> list[PlannedAttempt]:
    """The attempts that these repeats of `runs` still need: first one repeat of every run, then the next."""
    return [
        todo
        for nth in repeats
        for run in runs
        if (todo := following.next_attempt(run, nth, repeats.stop, tried.get(run.run_id, [])))
    ]


def _passed(state: SweepState) -> set[int]:
    """Numbers of nodes on which some run has ended ok."""
    oks = (a for a in state.attempts.values() if a.result and a.result.status == Status.OK)
    return {nodes for a in oks if isinstance(nodes := (a.spec or {}).get("nodes"), int)}


def _unfinished(state: SweepState, allocation: str) -> Iterator[AttemptKey]:
    """The keys of the attempts of an allocation that have not ended."""
    held = state.allocations.get(allocation)
    for key in held.tasks if held else ():
        attempt = state.attempts.get(key)
        if attempt is None or attempt.result is None:
            yield key


class _Following:
    """Finds the next attempt of a run from the retry policy and the state of the whole sweep."""

    def __init__(
        self,
        state: SweepState,
        policy: RetryPolicy,
        old: frozenset[AttemptKey],
        accepts: Callable[[RunResult], bool],
        doubted: Collection[AttemptKey],
    ) -> None:
        self._state, self._policy, self._old, self._doubted = state, policy, old, doubted
        self._accepts = accepts

    def next_attempt(
        self, run: Candidate, nth: int, repeats: int, tried: Sequence[AttemptState]
    ) -> PlannedAttempt | None:
        """The attempt that the nth counted repeat of `run` still needs; None when it needs no more."""
        by_repeat: dict[int, list[AttemptState]] = {}
        for attempt in tried:
            by_repeat.setdefault(attempt.key.repeat, []).append(attempt)
        counted, doubts = -1, 0
        for repeat in range(len(by_repeat) + repeats):
            attempts = by_repeat.get(repeat, [])
            oks = [a for a in attempts if a.result and a.result.status == Status.OK]
            if oks and not any(a.key not in self._old or (a.result and self._accepts(a.result)) for a in oks):
                continue  # an old result of another environment is kept, but does not count as a repeat
            if oks and doubts < self._policy.attempts["suspect"] and all(a.key in self._doubted for a in oks):
                doubts += 1
                continue
            counted += 1
            if counted == nth:
                return None if oks else self._after(run, repeat, attempts)
        return None

    def _after(self, run: Candidate, repeat: int, attempts: Sequence[AttemptState]) -> PlannedAttempt | None:
        """The attempt that follows `attempts`, none of which is ok; None when no more is allowed."""
        run_id = run.run_id
        if not attempts:
            return PlannedAttempt(candidate=run, key=AttemptKey(run_id, repeat, 0))
        last = attempts[-1]
        if last.result is None:
            # The attempt still runs, or its end is not known yet, so no new one is made.
            return PlannedAttempt(candidate=run, key=last.key)
        verdict = decide_retry(
            attempts,
            self._policy,
            asked=last.key in self._state.retried,
            old=self._old,
            memory_share=run.prediction.memory_share,
        )
        if not verdict.again:
            return None
        timeouts = sum(a.result is not None and a.result.status == Status.TIMEOUT for a in attempts)
        return PlannedAttempt(
            candidate=run,
            key=AttemptKey(run_id, repeat, last.key.attempt + 1),
            patience=2.0**timeouts,
            after=last.key,
            pause_s=verdict.pause_s,
        )
