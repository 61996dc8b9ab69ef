"""Packs what is left of a sweep into allocations and computes their price for plan, consent and budget."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ultrabench.run import AttemptKey
from ultrabench.store.state import SweepState
from ultrabench.sweep.candidate import Candidate, CellKey
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.attempts import PlannedAttempt, next_attempts
from ultrabench.sweep.running.control import MOST, best_step_times_s, controls, next_repeat

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
    todo: Sequence[PlannedAttempt], config: SweepConfig, control_s: Mapping[CellKey, float] | None = None
) -> list[tuple[PlannedAttempt, ...]]:
    """The attempts in groups, in order; each group is for one allocation.

    All attempts of a group have the same number of nodes and the same repeat, and also the same model where
    allocations have a control run. A group is full when it holds launcher.allocation_minutes of predicted
    duration or launcher.pack runs.

    Args:
        control_s: predicted seconds of the control run of each cell; a group is filled at least until its control run
            takes at most CONTROL_SHARE of its time.
    """
    control_s = control_s or {}
    groups: list[list[PlannedAttempt]] = []
    filled: dict[int, float] = {}
    latest: dict[tuple[object, ...], int] = {}
    minutes, most = config.launcher.allocation_minutes, config.launcher.pack
    for item in todo:
        model = item.candidate.shape.name if config.launcher.control else None
        kind = (item.candidate.nodes, item.key.repeat, model)
        at = latest.get(kind)
        duration = item.candidate.prediction.duration_s
        if at is not None:
            least_s = control_s.get(item.candidate.cell, 0.0) / CONTROL_SHARE
            over_time = filled[at] + duration > 60 * minutes and filled[at] >= least_s
            over_count = most is not None and len(groups[at]) >= most
            if over_time or over_count:
                at = None
        if at is None:
            at = latest[kind] = len(groups)
            groups.append([])
            filled[at] = 0.0
        groups[at].append(item)
        filled[at] += duration
    return [tuple(group) for group in groups]


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
    plan: Plan, todo: Sequence[PlannedAttempt], state: SweepState, *, max_limit_s: float = math.inf,
    untried: Collection[int] = (), held_s: Mapping[str, float] | None = None,
) -> list[PlannedJob]:  # fmt: skip
    """The allocations that the attempts need, in order.

    Args:
        untried: numbers of nodes for which only one allocation may be submitted.
        held_s: open allocation -> seconds for which it had held its nodes when last seen.
    """
    config = plan.config
    start_s = _start_s(plan, state, held_s or {})
    cells = controls(plan) if config.launcher.control and config.launcher.pack != 1 else {}
    known = [*state.attempts, *(key for held in state.allocations.values() for key in held.tasks)]
    repeats: dict[str, int] = {}
    best = best_step_times_s(state, plan.runs)
    found, seen = [], set[int]()
    for group in pack(todo, config, {cell: run.prediction.duration_s for cell, run in cells.items()}):
        nodes = group[0].candidate.nodes
        if nodes in untried and nodes in seen:
            continue
        seen.add(nodes)
        control = cells.get(group[0].candidate.cell)
        if control is not None:
            run_id = control.run_id
            own = [t for t in group if t.key.run_id == run_id]
            if not own:
                if run_id not in repeats:
                    repeats[run_id] = next_repeat(run_id, [*known, *(t.key for t in todo)], config.repeats)
                own = [PlannedAttempt(candidate=control, key=AttemptKey(run_id, repeats[run_id], 0))]
                repeats[run_id] += 1
            group = (*own, *(t for t in group if t.key.run_id != run_id))
        found.append(
            PlannedJob(
                attempts=group,
                control=control.run_id if control else None,
                limit_s=min(max_limit_s, allocation_limit_s(group, config)),
                gpu_hours=sum(t.candidate.gpu_hours for t in group)
                + start_s * nodes * config.hardware.gpus_per_node / 3600,
                best_step_times_s=best,
            )
        )
    return found


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
        return sum(draft.gpu_hours for draft in self.jobs)


def reckon(plan: Plan, state: SweepState | None = None, max_limit_s: float = math.inf) -> Price:
    """The price of what is left of a sweep; without `state`, the price of the whole sweep."""
    state = state or SweepState()
    todo = next_attempts(plan, state, frozenset(), old=frozenset(state.attempts)).todo
    confirmations = _confirmations(plan, todo)
    made = planned_jobs(plan, [*todo, *confirmations], state, max_limit_s=max_limit_s)
    asked = {t.key for t in [*todo, *confirmations]}
    tasks = [t for draft in made for t in draft.attempts]
    runs: dict[CellKey, list[Candidate]] = {}
    for item in todo:
        runs.setdefault(item.candidate.cell, []).append(item.candidate)
    starts = sum(draft.gpu_hours for draft in made) - _priced([t.candidate for t in tasks])[1]
    extra = {
        "control runs": _priced([t.candidate for t in tasks if t.key not in asked]),
        "repeats of the best": _priced([t.candidate for t in confirmations]),
        "starts of jobs": (len(made), max(0.0, starts)),
    }
    return Price(
        jobs=tuple(made),
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
    fastest: dict[CellKey, list[Candidate]] = {cell: [] for cell in cells}
    for run in sorted((r for r in plan.runs if r.fits), key=lambda r: r.prediction.step_time_s):
        if len(best := fastest.get(run.cell, [])) < MOST and run.cell in cells:
            best.append(run)
    return [
        PlannedAttempt(candidate=run, key=AttemptKey(run.run_id, nth, 0))
        for nth in range(repeats, plan.config.measure.confirm)
        for runs in fastest.values()
        for run in runs
    ]


def committed_gpu_hours(
    plan: Plan, state: SweepState, open_names: Sequence[str], held_s: Mapping[str, float] | None = None
) -> float:
    """GPU hours of all allocations: what they held, or of an open one its predicted price if that is more.

    Args:
        held_s: allocation -> seconds for which it had held its nodes when last seen, setup included.
    """
    per_node = plan.config.hardware.gpus_per_node
    price = {c.run_id: c.gpu_hours for c in plan.runs}
    held_s = held_s or {}
    start_s, total = _start_s(plan, state, held_s), 0.0
    for name, held in state.allocations.items():
        seconds = held.held_s if held.timed else max(held.held_s, held_s.get(name, 0.0))
        planned = 0.0
        if name in open_names:
            planned = start_s * held.nodes * per_node / 3600
            planned += sum(price.get(key.run_id, 0.0) for key in held.tasks)
        total += max(seconds * held.nodes * per_node / 3600, planned)
    return total
