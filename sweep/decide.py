"""What a running sweep does next: a pure function of its plan, its state and what is alive."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ultrabench.result import RunResult, Status
from ultrabench.state import AttemptKey, AttemptState, SweepState
from ultrabench.sweep.plan import Candidate

FREE_TRIES = 5
"""How often a run is tried again after something that was not its fault."""

NOT_ITS_FAULT = frozenset({Status.NODE_FAIL, Status.PREEMPTED, Status.LOST})

RETRIES = {
    Status.HANG: 2,
    Status.COMM_ERROR: 2,
    Status.TIMEOUT: 1,
    Status.INVALID: 1,
    Status.CRASH: 0,
    Status.OOM: 0,
}
"""Status -> how many attempts it may cost before it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Todo:
    """One attempt that has to be made."""

    candidate: Candidate
    key: AttemptKey
    patience: float = 1.0
    """Factor on the time limit: a run that timed out gets more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now."""

    todo: tuple[Todo, ...]
    """Attempts to submit, in the plan's order."""
    waiting: int
    """Attempts that are queued or running."""
    untried: frozenset[int] = frozenset()
    """Numbers of nodes on which nothing has passed yet: one allocation of each at a time."""

    @property
    def over(self) -> bool:
        """Nothing is left to do or to wait for."""
        return not self.todo and not self.waiting


def decide(
    runs: Sequence[Candidate],
    state: SweepState,
    alive: frozenset[str],
    *,
    repeats: int,
    accepts: Callable[[RunResult], bool] = lambda result: True,
    canary: bool = False,
) -> Decision:
    """The attempts to make and how many are on their way.

    Args:
        runs: what the plan runs, in order.
        alive: names of the allocations that are queued or running.
        repeats: independent measurements wanted of each run.
        accepts: whether an ok result counts (it may come from another environment).
        canary: hold back the runs of a number of nodes while the first allocation of that size is on
            its way and no run of that size has passed.
    """
    on_their_way = {
        key for name in alive for key in _tasks(state, name) if _unfinished(state.attempts.get(key))
    }
    tried: dict[str, list[AttemptState]] = {}
    for key, attempt in sorted(state.attempts.items()):
        tried.setdefault(key.run_id, []).append(attempt)
    todo = [
        todo
        for repeat in range(repeats)
        for run in runs
        if (todo := _next_attempt(run, repeat, repeats, tried.get(run.run_id, []), state, accepts))
        and todo.key not in on_their_way
    ]
    untried = frozenset({t.candidate.nodes for t in todo} - _passed(state)) if canary else frozenset[int]()
    busy = {state.allocations[name].nodes for name in alive if name in state.allocations}
    held_back = untried & busy
    return Decision(
        todo=tuple(t for t in todo if t.candidate.nodes not in held_back),
        waiting=len(on_their_way) + sum(t.candidate.nodes in held_back for t in todo),
        untried=untried,
    )


def _passed(state: SweepState) -> set[int]:
    """Numbers of nodes on which some run has ended ok."""
    oks = (a for a in state.attempts.values() if a.result and a.result.status == Status.OK)
    return {nodes for a in oks if isinstance(nodes := (a.spec or {}).get("nodes"), int)}


def _tasks(state: SweepState, allocation: str) -> Iterable[AttemptKey]:
    held = state.allocations.get(allocation)
    return held.tasks if held else ()


def _unfinished(attempt: AttemptState | None) -> bool:
    return attempt is None or attempt.result is None


def _next_attempt(
    run: Candidate,
    nth: int,
    repeats: int,
    tried: Sequence[AttemptState],
    state: SweepState,
    accepts: Callable[[RunResult], bool],
) -> Todo | None:
    """The attempt that the nth counted repeat of `run` still needs, or None."""
    by_repeat: dict[int, list[AttemptState]] = {}
    for attempt in tried:
        by_repeat.setdefault(attempt.key.repeat, []).append(attempt)
    counted = -1
    for repeat in range(len(by_repeat) + repeats):
        attempts = by_repeat.get(repeat, [])
        oks = [a.result for a in attempts if a.result and a.result.status == Status.OK]
        if oks and not any(accepts(r) for r in oks):
            continue  # measured elsewhere: kept, but another repeat has to be made here
        counted += 1
        if counted == nth:
            return None if oks else _after(run, repeat, attempts, state)
    return None


def _after(run: Candidate, repeat: int, attempts: list[AttemptState], state: SweepState) -> Todo | None:
    """The attempt that follows `attempts`, none of which is ok."""
    run_id = run.run_id
    if not attempts:
        return Todo(candidate=run, key=AttemptKey(run_id, repeat, 0))
    last = attempts[-1]
    if last.result is None:
        # Still running, or its end is not told yet: the same attempt stays the one to wait for.
        return Todo(candidate=run, key=last.key)
    statuses = [a.result.status for a in attempts if a.result]
    if not (last.key in state.retried or _may_retry(statuses)):
        return None
    timeouts = statuses.count(Status.TIMEOUT)
    key = AttemptKey(run_id, repeat, last.key.attempt + 1)
    return Todo(candidate=run, key=key, patience=2.0**timeouts)


def _may_retry(statuses: list[Status]) -> bool:
    last = statuses[-1]
    if last == Status.CANCELLED:
        return True
    if last in NOT_ITS_FAULT:
        return sum(s in NOT_ITS_FAULT for s in statuses) <= FREE_TRIES
    return statuses.count(last) <= RETRIES.get(last, 0)
