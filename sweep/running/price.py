"""What is left of a sweep as allocations, and their price; plan, consent and budget all use it."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ultrabench.run import AttemptKey
from ultrabench.store.state import SweepState
from ultrabench.sweep.candidate import Candidate, Cell
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.attempts import PlannedAttempt, next_attempts
from ultrabench.sweep.running.control import MOST, best_step_times_s, controls, next_repeat
from ultrabench.sweep.running.pack import allocation_limit_s, pack

BUDGET_FACTOR = 1.5
"""A sweep may use this many times its predicted price when nothing else is agreed."""
ALLOCATION_START_S = {"cuda": 60.0, "cpu": 20.0}
"""Expected seconds from the start of an allocation to its first run, until allocations of the sweep have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """An allocation that could be submitted."""

    attempts: tuple[PlannedAttempt, ...]
    """Attempts in the order in which they run, the control first."""
    control: str | None
    limit_s: float
    gpu_hours: float
    """Predicted price of the allocation."""
    best_step_times_s: Mapping[Cell, float] = field(default_factory=dict)
    """Best step time of each cell so far; a run that is much slower need not be measured to the end."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.attempts[0].candidate.nodes


def planned_jobs(
    plan: Plan, todo: Sequence[PlannedAttempt], state: SweepState, *, max_limit_s: float = math.inf,
    untried: Collection[int] = (), held_s: Mapping[str, float] | None = None,
) -> list[PlannedJob]:  # fmt: skip
    """The allocations that the attempts need, in order.

    Args:
        untried: numbers of nodes of which only one allocation may be submitted.
        held_s: seconds that open allocations have held their nodes by the latest look.
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
    """Seconds that an allocation holds its nodes beyond its runs: the median of those of this sweep so far.

    Until an allocation is over, those that have ended a run stand for it: `held_s` is how long they have
    held their nodes by the latest look. Until a run has ended, it is what is expected of the device.
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
    """What is left of a sweep, and the GPU hours that it is expected to take."""

    jobs: tuple[PlannedJob, ...]
    """All allocations to come, those of the confirmations included."""
    runs: Mapping[Cell, tuple[int, float]]
    """Number and GPU hours of the attempts that are still to be made, by cell."""
    extra: Mapping[str, tuple[int, float]]
    """Number and GPU hours of control runs, of repeats of the best, and of the starts of allocations, if any."""

    @property
    def gpu_hours(self) -> float:
        """The sum of all allocations."""
        return sum(draft.gpu_hours for draft in self.jobs)


def reckon(plan: Plan, state: SweepState | None = None, max_limit_s: float = math.inf) -> Price:
    """The price of what is left of a sweep; of all of it where there is no state yet."""
    state = state or SweepState()
    todo = next_attempts(plan, state, frozenset(), old=frozenset(state.attempts)).todo
    confirmations = _confirmations(plan, todo)
    made = planned_jobs(plan, [*todo, *confirmations], state, max_limit_s=max_limit_s)
    asked = {t.key for t in [*todo, *confirmations]}
    tasks = [t for draft in made for t in draft.attempts]
    runs: dict[Cell, list[Candidate]] = {}
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
    """The repeats that the best of each unmeasured cell will need; the fastest by prediction stand for them."""
    repeats = plan.config.repeats
    cells = {t.candidate.cell for t in todo if t.key.repeat < repeats}
    fastest: dict[Cell, list[Candidate]] = {cell: [] for cell in cells}
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
    """GPU hours for which allocations held their nodes; of open ones what was predicted, if that is more.

    Args:
        held_s: seconds that allocations have held their nodes by the latest look, setup included.
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
