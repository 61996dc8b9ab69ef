"""Packs what is left of a sweep into allocations and computes their price for plan, consent and budget."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nsmallest
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import CPU_FLOPS_PER_S_RANGE, DEVICE_KINDS
from ultrabench.measure import Measure
from ultrabench.partial_step import MAX_DEPARTURES, Departure, Slice, pooled
from ultrabench.result import SLOWER, RunResult
from ultrabench.run import AttemptKey
from ultrabench.standing import NEAR_BEST, Standing
from ultrabench.start_up import LIMIT_FACTOR, expected_start_s
from ultrabench.store.state import SweepState
from ultrabench.sweep.candidate import Candidate, CellKey, by_cell
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Plan, ReportProgress, make_plan
from ultrabench.sweep.predict.predict import start_s
from ultrabench.sweep.running.attempts import (
    MAX_CONTENDERS,
    AttemptsLeft,
    Launch,
    PlannedAttempt,
    later_runs,
    next_attempts,
    num_starts,
)
from ultrabench.sweep.running.outliers import with_loss_outliers
from ultrabench.sweep.running.standings import fastest_of_cells
from ultrabench.variant import Value

AGENTS_START_S = 120.0
"""Seconds in an allocation's time limit for the start of its agents, their rendezvous and the preflight."""
DURATION_MARGIN = 1.5
"""Factor on the predicted duration of all runs in the time limit of an allocation."""
LIMIT_ROUNDING_S = 300.0
"""Limits are rounded up to multiples of this many seconds, so that more jobs have the same limit."""

CONTROL_SHARE = 0.2
"""Largest share of an allocation's predicted time for its control run; allocations are filled up to that."""
CONTROL_SPACING = 5
"""Number of runs after which the control run is repeated where other programs share the devices,
whose load changes from minute to minute. With a control run every 5 runs a sweep takes about a fifth longer."""
TIME_LIMIT = "time_limit"
"""The rule of runs for which no job may be long enough."""
SAFE_MEMORY_SHARE = 0.7
"""Largest predicted share of a rank's memory for a control run, which must not run out of memory."""

ControlKey = tuple[CellKey, tuple[Value, ...]]
"""The cell of a run and the runtime of its allocation."""


def control_key(run: Candidate) -> ControlKey:
    """What the runs have in common that are measured beside one control run."""
    return run.cell, run.runtime


def controls(plan: Plan) -> dict[ControlKey, Candidate]:
    """Control key -> its control run: the fastest by prediction of those that surely fit, else the smallest.

    It has the first value of each option, as far as a run with these values can be made in that runtime.
    """
    runs_by_key = defaultdict[ControlKey, list[Candidate]](list)
    first_values = plan.config.options.first_variant
    for run in plan.runs:
        runs_by_key[control_key(run)].append(run)

    def sort_key(run: Candidate) -> tuple[int | float | str, ...]:
        num_changed = sum(value != first_values.get(name) for name, value in run.spec.variant.items())
        return num_changed, *_control_rank(run)

    return {key: min(runs, key=sort_key) for key, runs in runs_by_key.items()}


def _used_controls(plan: Plan) -> dict[ControlKey, Candidate]:
    """The control runs of the allocations; empty where these have none."""
    launcher = plan.config.launcher
    return controls(plan) if launcher.control and launcher.pack != 1 else {}


def _control_rank(run: Candidate) -> tuple[float, float, str]:
    """Sort key of a control run, smaller is better; the run_id settles ties, so that all launches agree."""
    memory_share, time_s = run.prediction.memory_share, run.prediction.step_time_s
    return (0.0, time_s, run.run_id) if memory_share <= SAFE_MEMORY_SHARE else (memory_share, 0.0, run.run_id)


def with_measured_times(plan: Plan, state: SweepState) -> Plan:
    """The plan whose runs are priced with the starts and the step times that the runs before them have measured.

    Parts of steps have the departure from a straight line that runs of their kind have measured. Only the first runs of
    a kind in a cell are priced with a third size.
    """
    excess_s, factor_by_cell = _start_excess_s(plan, state), _step_factors(plan, state)
    begun_ids = {key.run_id for key in state.attempts}
    usual_factor, measure = median(factor_by_cell.values()) if factor_by_cell else 1.0, plan.config.measure
    departure_by_kind, p_wider = _departures(plan, state), _share_of_wider(plan, state)
    num_departures = Counter[tuple[CellKey, tuple[str, int]]]()

    def with_parts(run: Candidate, slice_: Slice) -> Candidate:
        kind = run.spec.linearity_kind
        departure = departure_by_kind.get(kind)
        known_slice = slice_.with_departure(departure, measure.target_ci95_rel)
        if known_slice != slice_:
            run = run.by_slice(known_slice, measure)
        num_departures[run.cell, kind] += known_slice.third is not None
        num_before = num_departures[run.cell, kind] - 1 + (departure.num_runs if departure else 0)
        has_third = num_before < (MAX_DEPARTURES if departure or plan.config.shares_devices else 1)
        if (run.has_third, run.p_wider) == (has_third, p_wider):
            return run
        return run.measured_by(measure, has_third=has_third, p_wider=p_wider)

    def repriced(run: Candidate) -> Candidate:
        if run.slice:
            run = with_parts(run, run.slice)
        factor = factor_by_cell.get(run.cell, usual_factor) if factor_by_cell and run.fits else 1.0
        start_excess_s = excess_s[run.nodes]
        if (run.start_excess_s, run.step_factor) == (start_excess_s, factor):
            return run
        run = with_step_factor(replace(run, start_excess_s=start_excess_s), factor, measure)
        return run if run.run_id in begun_ids else run.unless_dearer(measure)

    runs = [repriced(run) for run in plan.runs]
    if all(new is old for new, old in zip(runs, plan.runs, strict=True)):
        return plan
    return replace(plan, candidates=(*runs, *(c for c in plan.candidates if not c.runs)))


def with_step_factor(run: Candidate, factor: float, measure: Measure) -> Candidate:
    """The run, priced with steps that take `factor` times as long as predicted."""
    step_time_s = run.prediction.step_time_s
    steps_excess_s = run.priced_s(measure, factor * step_time_s) - run.priced_s(measure, step_time_s)
    return replace(run, step_factor=factor, steps_excess_s=steps_excess_s)


def _departures(plan: Plan, state: SweepState) -> dict[tuple[str, int], Departure | None]:
    """Kind of run -> the departure from a straight line that runs of it have measured by a third size."""
    if not any(run.slice for run in plan.runs):
        return {}
    kind_by_run = {run.run_id: run.spec.linearity_kind for run in plan.runs}
    departures = defaultdict[tuple[str, int], list[Departure | None]](list)
    for key, attempt in state.attempts.items():
        if attempt.ok and key.run_id in kind_by_run:
            departures[kind_by_run[key.run_id]].append(attempt.ok.line_departure)
    return {kind: pooled(of_kind) for kind, of_kind in departures.items()}


def _share_of_wider(plan: Plan, state: SweepState) -> float:
    """The expected share of the runs whose slice becomes wider, since its interval misses its target.

    It is that of the runs so far, and before them all where other programs share the devices and none elsewhere, which
    counts as one run.
    """
    slice_by_run = {run.run_id: run.slice for run in plan.runs if run.slice and run.slice.wider}
    are_wider = [
        str(slice_.g2) not in attempt.ok.part_times_s
        for key, attempt in state.attempts.items()
        if attempt.ok and attempt.ok.part_times_s and attempt.ok.stopped != SLOWER
        and (slice_ := slice_by_run.get(key.run_id))
    ]  # fmt: skip
    return (sum(are_wider) + plan.config.shares_devices) / (len(are_wider) + 1)


def _start_excess_s(plan: Plan, state: SweepState) -> dict[int, float]:
    """Number of nodes -> seconds by which measured starts are longer than the predicted one.

    On numbers of nodes without an attempt, a start is expected to differ from the predicted one by the same factor
    as on the others.
    """
    nodes_by_run = {run.run_id: run.nodes for run in plan.runs}
    results_by_nodes = defaultdict[int, list[RunResult]](list)
    for key, attempt in state.attempts.items():
        if attempt.result and key.run_id in nodes_by_run:
            results_by_nodes[nodes_by_run[key.run_id]].append(attempt.result)
    predicted_s = {nodes: start_s(plan.config.hardware, nodes) for nodes in {*nodes_by_run.values()}}
    expected_s = {
        nodes: expected_start_s(results, predicted_s[nodes]) for nodes, results in results_by_nodes.items()
    }
    factor = median(expected_s[nodes] / predicted_s[nodes] for nodes in expected_s) if expected_s else 1.0
    return {
        nodes: expected_s.get(nodes, factor * seconds) - seconds for nodes, seconds in predicted_s.items()
    }


def _step_factors(plan: Plan, state: SweepState) -> dict[CellKey, float]:
    """Cell -> how many times as long as predicted its measured steps have taken, the median over its runs.

    Steps of a probe are of another kind: its price is no number of steps.
    """
    if not plan.config.kernel.trains or not state.attempts:
        return {}
    run_by_id, factors = {run.run_id: run for run in plan.runs}, defaultdict[CellKey, list[float]](list)
    for key, attempt in state.attempts.items():
        if (run := run_by_id.get(key.run_id)) and attempt.ok and attempt.ok.step_times_s:
            factors[run.cell].append(median(attempt.ok.step_times_s) / run.prediction.step_time_s)
    return {cell: median(cell_factors) for cell, cell_factors in factors.items()}


def run_limit_s(attempt: PlannedAttempt, config: SweepConfig) -> float:
    """Wall-clock limit of one attempt, in seconds; it suffices for a slice that becomes wider."""
    predicted_s = LIMIT_FACTOR * attempt.candidate.at_longest(config.measure).duration_s
    return max(config.measure.run_limit_s, predicted_s) * attempt.limit_factor


def allocation_limit_s(attempts: Sequence[PlannedAttempt], config: SweepConfig) -> float:
    """Wall-clock limit of an allocation in seconds: its predicted duration with a margin, and one slow run.

    The limit need not be the sum of the limits of all runs, because a run that is cut off by the end of its
    allocation is tried again.
    """
    if config.launcher.time_minutes is not None:
        return 60.0 * config.launcher.time_minutes
    predicted_s = sum(attempt.candidate.duration_s for attempt in attempts)
    slowest_limit_s = max(run_limit_s(attempt, config) for attempt in attempts)
    needed_s = AGENTS_START_S + DURATION_MARGIN * predicted_s + slowest_limit_s
    return LIMIT_ROUNDING_S * math.ceil(needed_s / LIMIT_ROUNDING_S)


def least_limit_s(predicted_s: float, config: SweepConfig) -> float:
    """The shortest time limit of an allocation, in seconds, in which runs of `predicted_s` seconds all begin.

    It holds the start, the runs, and the time before the limit at which the allocation is told to end,
    perhaps too early.
    """
    needed_s = (
        DEVICE_KINDS[config.hardware.device].allocation_start_s + predicted_s + config.launcher.signal_lead_s
    )
    return needed_s + min(90.0, needed_s / 3)


def within_limit(plan: Plan, max_limit_s: float = math.inf) -> Plan:
    """The plan without runs that could never begin, because no job may be long enough; they are rejected.

    A run that is screened needs a job for the start that measures it in full.

    Args:
        max_limit_s: the longest time limit that the site allows; launcher.time_minutes may be shorter.

    Raises:
        ConfigError: no run is left.
    """
    time_minutes = plan.config.launcher.time_minutes
    max_job_s = min(max_limit_s, 60.0 * (time_minutes or math.inf))
    limit_text = f"launcher.time_minutes={time_minutes}"
    if max_job_s == max_limit_s:
        limit_text = f"partition, QOS and account limit a job to {max_limit_s / 60:.0f} minutes"
    measure, control_by_key, minutes_by_run = plan.config.measure, _used_controls(plan), dict[str, int]()
    for run in plan.runs:
        control = control_by_key.get(control_key(run), run)
        duration_by_run = {r.run_id: r.in_full(measure).duration_s for r in (run, control)}
        if (limit_s := least_limit_s(sum(duration_by_run.values()), plan.config)) > max_job_s:
            minutes_by_run[run.run_id] = math.ceil(limit_s / 60)
    unit = "minutes with its control run" if control_by_key else "minutes"
    unit_in_full = f"{unit} to measure it in full"
    if minutes_by_run and len(minutes_by_run) == len(plan.runs):
        advice = "allow more time, or take fewer steps with measure=quick"
        least_text = (
            f"the shortest of {counted(len(minutes_by_run), 'run')} needs "
            f"{min(minutes_by_run.values())} {unit_in_full if plan.runs[0].is_screened else unit}"
        )
        raise ConfigError(f"{limit_text}; {least_text}: {advice}")
    rejected = [
        replace(
            run,
            rule=TIME_LIMIT,
            reason=f"a job needs {minutes} {unit_in_full if run.is_screened else unit}; {limit_text}",
        )
        for run in plan.runs
        if (minutes := minutes_by_run.get(run.run_id))
    ]
    kept = (candidate for candidate in plan.candidates if candidate.run_id not in minutes_by_run)
    return replace(plan, candidates=(*kept, *rejected)) if rejected else plan


def pack(
    todo: Iterable[PlannedAttempt],
    config: SweepConfig,
    control_by_key: Mapping[ControlKey, Candidate] = {},
    max_limit_s: float = math.inf,
) -> list[list[PlannedAttempt]]:
    """The attempts in groups, in order; each group is for one allocation.

    All attempts of a group have the same number of nodes, the same repeat, the same runtime and the same nodes to
    avoid, and also the same cell where allocations have a control run. A group is full when it holds
    launcher.allocation_minutes of predicted duration with its control run, or launcher.pack runs.

    Args:
        control_by_key: the control run of each key; a group is filled at least until its control run takes at most
            CONTROL_SHARE of its time.
        max_limit_s: the longest time limit of an allocation, in which all runs of a group have to begin.
    """
    groups: list[list[PlannedAttempt]] = []
    open_groups: dict[tuple[object, ...], _OpenGroup] = {}
    full_s, max_runs = 60 * config.launcher.allocation_minutes, config.launcher.pack or math.inf
    max_limit_s = min(max_limit_s, 60.0 * (config.launcher.time_minutes or math.inf))
    for attempt in todo:
        run, control = attempt.candidate, control_by_key.get(control_key(attempt.candidate))
        cell = run.cell if config.launcher.control else None
        group_key = (run.nodes, attempt.key.repeat, run.runtime, cell, attempt.avoid)
        group, runs_s, has_full_control = open_groups.get(group_key, _OpenGroup([], 0.0, False))
        control_s, is_control, needs_full_control = 0.0, False, False
        if control:
            is_control = control.run_id == run.run_id
            needs_full_control = control.is_screened and _is_compared_in_full(control, run)
            has_full_control |= needs_full_control
            control_s = (control.in_full(config.measure) if has_full_control else control).duration_s
        run_s = 0.0 if is_control else run.duration_s
        num_repeats = _num_control_repeats(len(group) + (not is_control), config)
        group_s = runs_s + (1 + num_repeats) * control_s
        is_full = group_s + run_s > full_s and group_s >= control_s / CONTROL_SHARE
        is_too_long = least_limit_s(group_s + run_s, config) > max_limit_s
        if not group or is_full or is_too_long or len(group) >= max_runs:
            group, runs_s, has_full_control = [], 0.0, needs_full_control
            groups.append(group)
        group.append(attempt)
        open_groups[group_key] = _OpenGroup(group, runs_s + run_s, has_full_control)
    return groups


class _OpenGroup(NamedTuple):
    """Attempts for one allocation, to which others may be added."""

    attempts: list[PlannedAttempt]
    runs_s: float
    """Predicted seconds of these attempts without those of the control run."""
    has_full_control: bool
    """Whether the control run, which is screened elsewhere, is measured in full."""


def _num_control_repeats(num_runs: int, config: SweepConfig) -> int:
    """How often an allocation of so many runs repeats its control run between and after them."""
    return round(num_runs / CONTROL_SPACING) if config.shares_devices else 0


BUDGET_FACTOR = 1.5
"""Default budget of a sweep, as a factor on its predicted price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """An allocation that could be submitted."""

    attempts: tuple[PlannedAttempt, ...]
    """Attempts in the order in which they run, the control run first; on shared devices it is repeated between them."""
    control: str | None
    """run_id of the control run, if there is one."""
    limit_s: float
    """Wall-clock limit of the allocation."""
    gpu_hours: float
    """Predicted GPU hours of the allocation."""
    interval: tuple[float, float]
    """The GPU hours if all step times are at the low ends of their intervals, and at the high ends."""
    best: Mapping[CellKey, Standing] = field(default_factory=dict)
    """The best run of each cell so far that is not suspect; a much slower run is not measured to the end."""

    @property
    def nodes(self) -> int:
        """Number of nodes of the allocation."""
        return self.attempts[0].candidate.nodes

    @property
    def avoid(self) -> tuple[str, ...]:
        """Nodes that it should not use, because runs of it have failed there."""
        return tuple(sorted({host for attempt in self.attempts for host in attempt.avoid}))

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of all its runs, without its start."""
        return sum(t.candidate.duration_s for t in self.attempts)


def planned_jobs(
    plan: Plan,
    attempts_left: AttemptsLeft,
    state: SweepState,
    max_limit_s: float = math.inf,
    held_s: Mapping[str, float] = {},
) -> Iterator[PlannedJob]:
    """The allocations that the attempts to submit need, in order.

    Args:
        held_s: open allocation -> seconds for which it had held its nodes when last seen.
    """
    config = plan.config
    start_s = _allocation_start_s(plan, state, held_s)
    control_by_key = _used_controls(plan)
    known_keys = [*state.attempts, *(attempt.key for attempt in attempts_left.todo)]
    known_keys += [key for allocation in state.allocations.values() for key in allocation.tasks]
    # The repeats of control runs are new ones: larger than those of the plan and all known ones.
    last_repeat_by_run = defaultdict[str, int](lambda: config.repeats - 1)
    for run_id, repeat, _ in known_keys:
        last_repeat_by_run[run_id] = max(last_repeat_by_run[run_id], repeat)
    best_by_cell = dict[CellKey, Standing]()
    if attempts_left.todo:
        best_by_cell = fastest_of_cells(plan.runs, with_loss_outliers(state), config.hardware.device)
    priced_nodes = set[int]()

    def new_repeat(run: Candidate) -> PlannedAttempt:
        last_repeat_by_run[run.run_id] += 1
        return PlannedAttempt(candidate=run, key=AttemptKey(run.run_id, last_repeat_by_run[run.run_id], 0))

    for group in pack(attempts_left.todo, config, control_by_key, max_limit_s):
        nodes = group[0].candidate.nodes
        if nodes in attempts_left.untried_node_counts and nodes in priced_nodes:
            continue
        priced_nodes.add(nodes)
        control = control_by_key.get(control_key(group[0].candidate))
        control_id = control.run_id if control else None
        if control:
            control = _beside(control, [attempt.candidate for attempt in group], config.measure)
            group = [
                replace(attempt, candidate=control) if attempt.key.run_id == control_id else attempt
                for attempt in group
            ]
            other_attempts = [attempt for attempt in group if attempt.key.run_id != control_id]
            first_controls = [attempt for attempt in group if attempt.key.run_id == control_id]
            num_repeats = _num_control_repeats(len(other_attempts), config)
            group = first_controls or [new_repeat(control)]
            group += _with_controls_between(other_attempts, num_repeats, partial(new_repeat, control))
        start_gpu_hours = start_s * nodes * config.hardware.gpus_per_node / 3600
        runs = [attempt.candidate for attempt in group]
        low_gpu_hours, high_gpu_hours = _gpu_hour_interval(runs, config.measure)
        yield PlannedJob(
            attempts=tuple(group),
            control=control_id,
            limit_s=min(max_limit_s, allocation_limit_s(group, config)),
            gpu_hours=start_gpu_hours + sum(run.gpu_hours for run in runs),
            interval=(start_gpu_hours + low_gpu_hours, start_gpu_hours + high_gpu_hours),
            best={cell: standing for cell, standing in best_by_cell.items() if standing.may_win},
        )


def _beside(control: Candidate, runs: Iterable[Candidate], measure: Measure) -> Candidate:
    """The control run of an allocation with these runs: in full beside a run in full, else as it is screened.

    Whole steps are compared with whole steps of the control layout, and parts with its parts.
    """
    is_compared = any(_is_compared_in_full(control, run) for run in runs)
    return control.in_full(measure) if is_compared else control


def _is_compared_in_full(control: Candidate, run: Candidate) -> bool:
    """Whether a run beside a control run needs more of it than what screens it."""
    return run.has_whole_steps if control.slice else not run.is_screened


def _with_controls_between(
    attempts: Sequence[PlannedAttempt], num_parts: int, new_control: Callable[[], PlannedAttempt]
) -> list[PlannedAttempt]:
    """The attempts in `num_parts` equal parts, each followed by a control run; as they are if there are 0 parts."""
    if not num_parts:
        return [*attempts]
    ends = [round(part * len(attempts) / num_parts) for part in range(num_parts + 1)]
    return [attempt for start, end in pairwise(ends) for attempt in (*attempts[start:end], new_control())]


def _allocation_start_s(plan: Plan, state: SweepState, held_s: Mapping[str, float]) -> float:
    """Seconds for which an allocation holds its nodes without running anything: a median over this sweep.

    The median is over allocations that are over. While there are none, it is over open allocations that have
    ended a run, with `held_s`. While no run has ended, the value is `allocation_start_s` of the device.
    """
    all_run_s: dict[str, float] = {}
    for attempt in state.attempts.values():
        if attempt.allocation and attempt.result:
            duration_s = attempt.result.duration_s or 0.0
            all_run_s[attempt.allocation] = all_run_s.get(attempt.allocation, 0.0) + duration_s
    ended = (a for a in state.allocations.values() if a.agents and a.ended is not None)
    all_held_s = {allocation.name: allocation.held_s for allocation in ended}
    all_held_s = all_held_s or {name: seconds for name, seconds in held_s.items() if all_run_s.get(name)}
    if not all_held_s:
        return DEVICE_KINDS[plan.config.hardware.device].allocation_start_s
    return median(max(0.0, seconds - all_run_s.get(name, 0.0)) for name, seconds in all_held_s.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The allocations that are left of a sweep, and their predicted GPU hours."""

    jobs: tuple[PlannedJob, ...]
    """All allocations that are left, with the repeats of the best runs."""
    runs: Mapping[CellKey, tuple[int, float]]
    """CellKey -> number and GPU hours of the attempts that are left."""
    num_repeated: int
    """Number of measured runs, which are settled, that have repeats left."""
    extra: Mapping[str, tuple[int, float]]
    """Number and GPU hours of control runs, repeats of the best and starts of jobs, where there are any."""
    interval: tuple[float, float]
    """The GPU hours if all step times are at the low ends of their intervals, and at the high ends."""
    intervals: Mapping[CellKey, tuple[float, float]]
    """CellKey -> the same of the attempts that are left."""
    searched_ids: tuple[str, ...] = ()
    """run_ids of the runs that an adaptive search is expected to make yet, in their order."""

    @property
    def gpu_hours(self) -> float:
        """The predicted GPU hours of all allocations together."""
        return sum(job.gpu_hours for job in self.jobs)


def price_of(
    plan: Plan,
    state: SweepState | None = None,
    max_limit_s: float = math.inf,
    *,
    searched_ids: Sequence[str] | None = None,
    report_progress: ReportProgress = lambda done, total: None,
) -> Price:
    """The price of what is left of a sweep; without `state`, the price of the whole sweep.

    Args:
        searched_ids: those of a price of an adaptive sweep of the same candidates, whose search need not be foreseen
            again.
        report_progress: called with the number of cells whose adaptive search is foreseen, and of all.
    """
    state = state or SweepState()
    plan = with_measured_times(plan, state)
    todo: tuple[PlannedAttempt, ...] = ()
    if state.attempts or searched_ids is None:  # else all that is left follows from the search
        todo = next_attempts(plan, state, launch=Launch(old_attempts=frozenset(state.attempts))).todo
    searched_runs = list[Candidate]()
    if plan.config.strategy == "adaptive":  # those to submit now are only the next ones of a search
        submitted_ids = {attempt.key.run_id for attempt in todo}
        run_by_id = {run.run_id: run for run in plan.runs}
        if searched_ids is None:
            searched_runs = later_runs(
                plan.runs, state, plan.config.max_p_oom, plan.config.batch, report_progress
            )
        else:
            searched_runs = [run_by_id[run_id] for run_id in searched_ids if run_id in run_by_id]
        searched_todo = (
            PlannedAttempt(candidate=run, key=AttemptKey(run.run_id, repeat, 0))
            for repeat in range(plan.config.repeats)
            for run in searched_runs
            if run.run_id not in submitted_ids
        )
        todo = (*todo, *searched_todo)
    confirming_attempts = _confirmations(plan, todo)
    attempts_left = AttemptsLeft(todo=(*todo, *confirming_attempts), num_waiting=0)
    measured_ids = {key.run_id for key, attempt in state.attempts.items() if attempt.ok}
    requested_keys = {attempt.key for attempt in attempts_left.todo}
    jobs = tuple(planned_jobs(plan, attempts_left, state, max_limit_s))
    run_by_key = {attempt.key: attempt.candidate for job in jobs for attempt in job.attempts}
    start_gpu_hours = sum(job.gpu_hours for job in jobs) - _num_and_gpu_hours(run_by_key.values())[1]
    runs_by_cell, measure = by_cell(attempt.candidate for attempt in todo), plan.config.measure
    extra = {
        "control runs": _num_and_gpu_hours([r for key, r in run_by_key.items() if key not in requested_keys]),
        "repeats of the best": _num_and_gpu_hours([attempt.candidate for attempt in confirming_attempts]),
        "starts of jobs": (len(jobs), max(0.0, start_gpu_hours)),
    }
    return Price(
        jobs=jobs,
        runs={cell: _num_and_gpu_hours(runs) for cell, runs in runs_by_cell.items()},
        num_repeated=len({attempt.key.run_id for attempt in todo} & measured_ids),
        extra={purpose: (count, gpu_hours) for purpose, (count, gpu_hours) in extra.items() if count},
        interval=(sum(job.interval[0] for job in jobs), sum(job.interval[1] for job in jobs)),
        intervals={cell: _gpu_hour_interval(runs, measure) for cell, runs in runs_by_cell.items()},
        searched_ids=tuple(run.run_id for run in searched_runs),
    )


def with_unmeasured_cores(price: Price, plan: Plan, state: SweepState, cores: int) -> Price:
    """The price with intervals that hold on slow and fast CPU cores, since those of this machine are not measured yet.

    Args:
        price: that of `plan`.
        cores: CPU cores of this machine.
    """
    if not price.jobs:
        return price
    fast, slow = (
        price_of(make_plan(plan.config, core_flops_per_s=rate, cores=num_cores), state)
        for rate, num_cores in zip(reversed(CPU_FLOPS_PER_S_RANGE), (max(cores, plan.cores), 1), strict=True)
    )
    low, high = fast.interval[0], slow.interval[1]
    low_ratio, high_ratio = low / price.gpu_hours, high / price.gpu_hours
    jobs = (
        replace(job, interval=(low_ratio * job.gpu_hours, high_ratio * job.gpu_hours)) for job in price.jobs
    )
    intervals = {
        cell: (fast.intervals.get(cell, interval)[0], slow.intervals.get(cell, interval)[1])
        for cell, interval in price.intervals.items()
    }
    return replace(price, jobs=tuple(jobs), interval=(low, high), intervals=intervals)


def _gpu_hour_interval(runs: Collection[Candidate], measure: Measure) -> tuple[float, float]:
    """GPU hours of runs if the steps of those that fit take as long as the low and the high ends of their intervals."""
    low_gpu_s = high_gpu_s = 3600 * _num_and_gpu_hours(runs)[1]
    for run in (run for run in runs if run.fits):
        prediction, num_gpus, factor = run.prediction, run.layout.world_size, run.step_factor
        priced_s = run.priced_s(measure, factor * prediction.step_time_s)
        low_gpu_s += num_gpus * (run.priced_s(measure, factor * prediction.step_time_low_s) - priced_s)
        high_gpu_s += num_gpus * (run.priced_s(measure, factor * prediction.step_time_high_s) - priced_s)
    return low_gpu_s / 3600, high_gpu_s / 3600


def _num_and_gpu_hours(runs: Collection[Candidate]) -> tuple[int, float]:
    return len(runs), sum(run.gpu_hours for run in runs)


def _confirmations(plan: Plan, todo: Iterable[PlannedAttempt]) -> list[PlannedAttempt]:
    """The repeats that the best runs of each unmeasured cell will need.

    The best runs are not known yet. Those whose predicted step time is as near to the shortest as contenders are
    to the best stand for them.
    """
    repeats, measure = plan.config.repeats, plan.config.measure
    unmeasured_cells = {attempt.candidate.cell for attempt in todo if attempt.key.repeat < repeats}
    searched_ids = {attempt.key.run_id for attempt in todo} if plan.config.strategy == "adaptive" else None
    runs_of_cells = (runs for cell, runs in plan.cells.items() if cell in unmeasured_cells)
    fitting_runs = [
        [r for r in runs if r.fits and (not searched_ids or r.run_id in searched_ids)]
        for runs in runs_of_cells
    ]
    best_runs = [nsmallest(MAX_CONTENDERS, runs, key=_predicted_s) for runs in fitting_runs]
    contenders = [
        run for runs in best_runs for run in runs if _predicted_s(run) <= NEAR_BEST * _predicted_s(runs[0])
    ]
    end_repeat = {run.run_id: num_starts(run, plan.config) for run in contenders}
    return [
        PlannedAttempt(
            # The first further start measures a screened run in full.
            candidate=run.in_full(measure) if repeat == repeats else run.after_full(measure),
            key=AttemptKey(run.run_id, repeat, 0),
        )
        for repeat in range(repeats, max(end_repeat.values(), default=0))
        for run in contenders
        if repeat < end_repeat[run.run_id]
    ]


def _predicted_s(run: Candidate) -> float:
    return run.prediction.step_time_s


def committed_gpu_hours(
    plan: Plan, state: SweepState, open_names: Collection[str], held_s: Mapping[str, float] = {}
) -> float:
    """GPU hours of all allocations: what they held, or of an open one its predicted price if that is more.

    Args:
        held_s: allocation -> seconds for which it had held its nodes when last seen, setup included.
    """
    gpus_per_node = plan.config.hardware.gpus_per_node
    run_by_id, measure = {run.run_id: run for run in plan.runs}, plan.config.measure

    def gpu_hours(key: AttemptKey) -> float:
        run = run_by_id.get(key.run_id)
        if run is None:
            return 0.0
        # Later repeats of a run that is screened may measure it in full, which costs more.
        return (run if key.repeat < plan.config.repeats else run.in_full(measure)).gpu_hours

    start_s, total_gpu_hours = _allocation_start_s(plan, state, held_s), 0.0
    for name, allocation in state.allocations.items():
        seen_held_s = 0.0 if allocation.timed else held_s.get(name, 0.0)
        run_gpu_hours = sum(map(gpu_hours, allocation.tasks))
        planned_gpu_hours = start_s * allocation.nodes * gpus_per_node / 3600 + run_gpu_hours
        held_gpu_hours = max(allocation.held_s, seen_held_s) * allocation.nodes * gpus_per_node / 3600
        total_gpu_hours += max(held_gpu_hours, planned_gpu_hours if name in open_names else 0.0)
    return total_gpu_hours
