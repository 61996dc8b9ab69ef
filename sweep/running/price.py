"""Packs what is left of a sweep into allocations and computes their price for plan, consent and budget."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import count
from statistics import median

from ultrabench.run import AttemptKey
from ultrabench.store.state import SweepState
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Candidate, CellKey, Plan
from ultrabench.sweep.running.attempts import MOST, AttemptsLeft, Launch, PlannedAttempt, next_attempts
from ultrabench.sweep.running.outliers import step_time_s

START_S = 120.0
"""Seconds in an allocation's time limit for the start of its agents, their rendezvous and the preflight."""
MARGIN = 1.5
"""Factor on the predicted duration of all runs in the time limit of an allocation."""
ROUND_S = 300.0
"""Limits are rounded up to multiples of this many seconds, so that more jobs have the same limit."""
RUN_LIMIT_FACTOR = 3.0
"""A run may take this many times its predicted duration, if that is more than measure.run_limit_s."""

CONTROL_SHARE = 0.1
"""Largest share of an allocation's time for its control run; allocations are made long enough for that."""


SAFE_SHARE = 0.7
"""Largest predicted share of a rank's memory for a control run, which must not run out of memory."""


def controls(plan: Plan) -> dict[CellKey, Candidate]:
    """CellKey -> its control run: the fastest by prediction of those that surely fit, else the smallest."""
    return {cell: min(runs, key=_rank) for cell, runs in plan.cells.items()}


def _rank(run: Candidate) -> tuple[float, float, str]:
    """Sort key of a control run, smaller is better; the run_id settles ties, so that all launches agree."""
    share, time_s = run.prediction.memory_share, run.prediction.step_time_s
    return (0.0, time_s, run.run_id) if share <= SAFE_SHARE else (share, 0.0, run.run_id)


def next_repeat(run_id: str, known: Iterable[tuple[str, int, int]], repeats: int) -> int:
    """The number of a new repeat of a control run, larger than those of the plan and all known ones."""
    return max([repeats - 1, *(repeat for other, repeat, _ in known if other == run_id)]) + 1


def best_step_times_s(plan: Plan, state: SweepState) -> dict[CellKey, float]:
    """CellKey -> its shortest median step time so far, in seconds."""
    tried = state.by_run()
    attempts = ((run.cell, attempt) for run in plan.runs for attempt in tried.get(run.run_id, ()))
    timed = [(cell, t) for cell, a in attempts if (t := step_time_s(a.result)) is not None]
    return dict(sorted(timed, reverse=True))  # the last one of a cell, which is the shortest, stays


def run_limit_s(todo: PlannedAttempt, config: SweepConfig) -> float:
    """Wall-clock limit of one attempt, in seconds."""
    predicted = RUN_LIMIT_FACTOR * todo.candidate.prediction.duration_s
    return max(config.measure.run_limit_s, predicted) * todo.patience


def allocation_limit_s(group: Sequence[PlannedAttempt], config: SweepConfig) -> float:
    """Wall-clock limit of an allocation in seconds: its predicted duration with a margin, and one slow run.

    The limit need not be the sum of the limits of all runs, because a run that is cut off by the end of its
    allocation is tried again.
    """
    if config.launcher.time_minutes is not None:
        return 60.0 * config.launcher.time_minutes
    predicted = sum(t.candidate.prediction.duration_s for t in group)
    slowest = max(run_limit_s(t, config) for t in group)
    return ROUND_S * math.ceil((START_S + MARGIN * predicted + slowest) / ROUND_S)


def pack(
    todo: Iterable[PlannedAttempt], config: SweepConfig, cells: Mapping[CellKey, Candidate] = {}
) -> list[list[PlannedAttempt]]:
    """The attempts in groups, in order; each group is for one allocation.

    All attempts of a group have the same number of nodes and the same repeat, and also the same model where
    allocations have a control run. A group is full when it holds launcher.allocation_minutes of predicted
    duration or launcher.pack runs.

    Args:
        cells: the control run of each cell; a group is filled at least until its control run takes at most
            CONTROL_SHARE of its time.
    """
    groups: list[list[PlannedAttempt]] = []
    latest: dict[tuple[object, ...], tuple[list[PlannedAttempt], float]] = {}
    longest_s, most = 60 * config.launcher.allocation_minutes, config.launcher.pack or math.inf
    for item in todo:
        run = item.candidate
        kind = (run.nodes, item.key.repeat, run.shape.name if config.launcher.control else None)
        group, filled_s = latest.get(kind, ([], 0.0))
        least_s = cells[run.cell].prediction.duration_s / CONTROL_SHARE if run.cell in cells else 0.0
        over_time = filled_s + run.prediction.duration_s > longest_s and filled_s >= least_s
        if not group or over_time or len(group) >= most:
            group, filled_s = [], 0.0
            groups.append(group)
        group.append(item)
        latest[kind] = group, filled_s + run.prediction.duration_s
    return groups


BUDGET_FACTOR = 1.5
"""Default budget of a sweep, as a factor on its predicted price."""
ALLOCATION_START_S = {"cuda": 60.0, "cpu": 20.0}
"""Device type -> expected seconds from the start of an allocation to its first run; used until measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """An allocation that could be submitted."""

    attempts: tuple[PlannedAttempt, ...]
    """Attempts in the order in which they run, the control run first."""
    control: str | None
    """run_id of the control run, if there is one."""
    limit_s: float
    """Wall-clock limit of the allocation."""
    gpu_hours: float
    """Predicted GPU hours of the allocation."""
    best_step_times_s: Mapping[CellKey, float] = field(default_factory=dict)
    """Best step time of each cell so far; a much slower run is not measured to the end."""

    @property
    def nodes(self) -> int:
        """Number of nodes of the allocation."""
        return self.attempts[0].candidate.nodes


def planned_jobs(
    plan: Plan,
    left: AttemptsLeft,
    state: SweepState,
    max_limit_s: float = math.inf,
    held_s: Mapping[str, float] = {},
) -> Iterator[PlannedJob]:
    """The allocations that the attempts to submit need, in order.

    Args:
        held_s: open allocation -> seconds for which it had held its nodes when last seen.
    """
    config = plan.config
    start_s = _start_s(plan, state, held_s)
    cells = controls(plan) if config.launcher.control and config.launcher.pack != 1 else {}
    known = [*state.attempts, *(t.key for t in left.todo)]
    known += [key for held in state.allocations.values() for key in held.tasks]
    repeats: dict[str, Iterator[int]] = {}
    best = best_step_times_s(plan, state)
    seen = set[int]()
    for group in pack(left.todo, config, cells):
        nodes = group[0].candidate.nodes
        if nodes in left.untried and nodes in seen:
            continue
        seen.add(nodes)
        control = cells.get(group[0].candidate.cell)
        control_id = control.run_id if control else None
        if control and all(t.key.run_id != control_id for t in group):
            if control.run_id not in repeats:
                repeats[control.run_id] = count(next_repeat(control.run_id, known, config.repeats))
            key = AttemptKey(control.run_id, next(repeats[control.run_id]), 0)
            group.append(PlannedAttempt(candidate=control, key=key))
        group = sorted(group, key=lambda t: t.key.run_id != control_id)  # the control run comes first
        start_gpu_hours = start_s * nodes * config.hardware.gpus_per_node / 3600
        yield PlannedJob(
            attempts=tuple(group),
            control=control_id,
            limit_s=min(max_limit_s, allocation_limit_s(group, config)),
            gpu_hours=start_gpu_hours + sum(t.candidate.gpu_hours for t in group),
            best_step_times_s=best,
        )


def _start_s(plan: Plan, state: SweepState, held_s: Mapping[str, float]) -> float:
    """Seconds for which an allocation holds its nodes without running anything: a median over this sweep.

    The median is over allocations that are over. While there are none, it is over open allocations that have
    ended a run, with `held_s`. While no run has ended, the value is ALLOCATION_START_S.
    """
    ran: dict[str, float] = {}
    for attempt in state.attempts.values():
        if attempt.allocation and attempt.result:
            ran[attempt.allocation] = ran.get(attempt.allocation, 0.0) + (attempt.result.duration_s or 0.0)
    over = {h.name: h.held_s for h in state.allocations.values() if h.agents and h.ended is not None}
    over = over or {name: seconds for name, seconds in held_s.items() if ran.get(name)}
    if not over:
        return ALLOCATION_START_S[plan.config.hardware.device]
    return median(max(0.0, seconds - ran.get(name, 0.0)) for name, seconds in over.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The allocations that are left of a sweep, and their predicted GPU hours."""

    jobs: tuple[PlannedJob, ...]
    """All allocations that are left, with the repeats of the best runs."""
    runs: Mapping[CellKey, tuple[int, float]]
    """CellKey -> number and GPU hours of the attempts that are left."""
    extra: Mapping[str, tuple[int, float]]
    """Number and GPU hours of control runs, repeats of the best and starts of jobs, where there are any."""

    @property
    def gpu_hours(self) -> float:
        """The predicted GPU hours of all allocations together."""
        return sum(job.gpu_hours for job in self.jobs)


def reckon(plan: Plan, state: SweepState | None = None, max_limit_s: float = math.inf) -> Price:
    """The price of what is left of a sweep; without `state`, the price of the whole sweep."""
    state = state or SweepState()
    todo = next_attempts(plan, state, launch=Launch(old=frozenset(state.attempts))).todo
    confirmations = _confirmations(plan, todo)
    whole = AttemptsLeft(todo=(*todo, *confirmations), waiting=0)
    asked = {t.key for t in whole.todo}
    jobs = tuple(planned_jobs(plan, whole, state, max_limit_s))
    tasks = {t.key: t.candidate for job in jobs for t in job.attempts}
    runs: dict[CellKey, list[Candidate]] = {}
    for item in todo:
        runs.setdefault(item.candidate.cell, []).append(item.candidate)
    starts = sum(job.gpu_hours for job in jobs) - _priced(tasks.values())[1]
    extra = {
        "control runs": _priced([run for key, run in tasks.items() if key not in asked]),
        "repeats of the best": _priced([t.candidate for t in confirmations]),
        "starts of jobs": (len(jobs), max(0.0, starts)),
    }
    return Price(
        jobs=jobs,
        runs={cell: _priced(items) for cell, items in runs.items()},
        extra={what: (number, cost) for what, (number, cost) in extra.items() if number},
    )


def _priced(runs: Collection[Candidate]) -> tuple[int, float]:
    return len(runs), sum(run.gpu_hours for run in runs)


def _confirmations(plan: Plan, todo: Iterable[PlannedAttempt]) -> list[PlannedAttempt]:
    """The repeats that the best runs of each unmeasured cell will need.

    The best runs are not known yet, so the runs with the shortest predicted step time stand for them.
    """
    repeats = plan.config.repeats
    cells = {t.candidate.cell for t in todo if t.key.repeat < repeats}
    fitting = [[run for run in runs if run.fits] for cell, runs in plan.cells.items() if cell in cells]
    best = [nsmallest(MOST, runs, key=lambda run: run.prediction.step_time_s) for runs in fitting]
    return [
        PlannedAttempt(candidate=run, key=AttemptKey(run.run_id, nth, 0))
        for nth in range(repeats, plan.config.measure.confirm)
        for runs in best
        for run in runs
    ]


def committed_gpu_hours(
    plan: Plan, state: SweepState, open_names: Collection[str], held_s: Mapping[str, float] = {}
) -> float:
    """GPU hours of all allocations: what they held, or of an open one its predicted price if that is more.

    Args:
        held_s: allocation -> seconds for which it had held its nodes when last seen, setup included.
    """
    per_node = plan.config.hardware.gpus_per_node
    price = {c.run_id: c.gpu_hours for c in plan.runs}
    start_s, total = _start_s(plan, state, held_s), 0.0
    for name, held in state.allocations.items():
        seconds = held.held_s if held.timed else max(held.held_s, held_s.get(name, 0.0))
        runs = sum(price.get(key.run_id, 0.0) for key in held.tasks)
        planned = start_s * held.nodes * per_node / 3600 + runs if name in open_names else 0.0
        total += max(seconds * held.nodes * per_node / 3600, planned)
    return total
