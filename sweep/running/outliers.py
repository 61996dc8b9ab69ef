"""Finds doubtful measurements, whose losses, ranks, nodes, links or clocks differ from the rest of the sweep.

Layouts of the same model and batch must have the same loss, or one has trained wrongly. A measurement is
compared with the others of the sweep, so it may become an outlier, or stop being one, when new results come
in. This changes only the state; the journal keeps what was measured.
"""

import contextlib
import functools
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from statistics import fmean, median
from typing import Any, NamedTuple, TypeVar

import msgspec

from ultrabench.device_digest import differences
from ultrabench.device_rates import DEVICE_RATES, min_rate, summary
from ultrabench.errors import counted
from ultrabench.hardware import DEVICE_KINDS, SCALED_PRECISIONS, USUAL_DEVICE
from ultrabench.kernel_config import KERNEL_KINDS, compares_losses
from ultrabench.result import RESULT_COLUMNS, SLOWER, Doubt, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.step_time import START_SD
from ultrabench.store.state import AllocationState, AttemptState, SweepState, with_lost
from ultrabench.sweep.running.part_causes import Difference, Program, cause_text
from ultrabench.variant import program_options

MIN_COMPARABLE = 3
"""Smallest number of comparable measurements, or of comparable layouts, among which one can be an outlier."""
MAX_SIGMAS = 5.0
"""Number of standard deviations beyond which a difference is not chance."""
RATE_TOLERANCE, TIME_TOLERANCE, RANK_TOLERANCE = 0.15, 0.10, 0.25
"""Relative differences up to which a measurement is normal: of rates and clocks, of the step time of a
control run, and between the step times of ranks."""
SAME_START_TOLERANCE = 0.10
"""Relative difference up to which whole steps and parts of one start are alike on cores that other programs use, beyond
both intervals. Other programs meet both within seconds, so that they hardly make them differ."""
SHARED_CORES_FACTOR = 10.0
"""Factor on RATE_TOLERANCE, TIME_TOLERANCE, RANK_TOLERANCE and the largest mfu for CPU cores,
which other programs may use, too."""

_Key = TypeVar("_Key")


def _slow_ratios(values: Mapping[_Key, float], tolerance: float, sign: int = 1) -> dict[_Key, float]:
    """Key of each value far below the median of all `values` -> its ratio to the median.

    Far is more than `tolerance` (relative) and more than 5 standard deviations. The standard deviation of a
    normal distribution is 1.4826 times its median absolute deviation. With fewer than three values, every
    value is normal.

    Args:
        sign: -1 for values such as times, which are far above the median where something is slow.
    """
    if len(values) < MIN_COMPARABLE:
        return {}
    middle = median(values.values())
    sigma = 1.4826 * median(abs(value - middle) for value in values.values())
    max_gap = max(tolerance * abs(middle), MAX_SIGMAS * sigma)
    return {key: value / middle for key, value in values.items() if sign * (middle - value) > max_gap}


def suspect_attempts(state: SweepState, *, device: str) -> dict[AttemptKey, list[Doubt]]:
    """Ok attempts whose measurement is doubtful -> all doubts.

    Args:
        state: what `with_loss_outliers` returns.
        device: the torch device type of the hardware, cuda or cpu.
    """
    factor = SHARED_CORES_FACTOR if DEVICE_KINDS[device].shares_host else 1.0
    finders = _preflight_doubts, _control_doubts, _clock_doubts, _digest_doubts
    doubt_sources = (find(state, factor) for find in finders)
    suspect_losses = ((key, Doubt("loss", reason)) for key, reason in state.suspect_losses.items())
    doubts: dict[object, list[Doubt]] = defaultdict(list)  # by allocation and by attempt
    for subject, doubt in chain(*doubt_sources, suspect_losses, _part_doubts(state, factor)):
        doubts[subject].append(doubt)
    ok_results = ((key, a.allocation, ok) for key, a in state.attempts.items() if (ok := a.ok))
    measure = state.config.get("measure", {})
    max_foreign_load = measure.get("max_foreign_load") if isinstance(measure, dict) else None
    doubts_by_attempt = {
        key: [*_own_doubts(ok, factor, max_foreign_load), *doubts.get(allocation, ()), *doubts.get(key, ())]
        for key, allocation, ok in ok_results
    }
    return {key: all_doubts for key, all_doubts in doubts_by_attempt.items() if all_doubts}


def rate_doubts(
    mfu: float | None, device: str = USUAL_DEVICE, gemm_share: float | None = None
) -> list[Doubt]:
    """The doubts about a measurement with a rate that its devices cannot have; empty where it is possible or unknown.

    Args:
        mfu: a fraction.
        gemm_share: FLOPs per second of a GPU relative to those of plain matrix products in the same allocation.
    """
    max_ratio = SHARED_CORES_FACTOR if DEVICE_KINDS[device].shares_host else 1
    doubts = []
    if mfu is not None and mfu > max_ratio:
        reason = f"mfu {mfu:.2f} is above {max_ratio:g}: the step time or the peak is measured wrongly"
        doubts.append(Doubt("mfu", reason))
    if gemm_share is not None and gemm_share > max_ratio:
        reason = f"it computes {gemm_share:.2f} x as fast as the plain matrix products of its allocation"
        doubts.append(Doubt("above_gemm", f"{reason}: one of the two is measured wrongly"))
    return doubts


def gemm_rates(state: SweepState) -> dict[str, float]:
    """Allocation -> the FLOPs per second of plain matrix products on its slowest device, for which all others wait."""
    probes = ((name, allocation.preflight.get("probe")) for name, allocation in state.allocations.items())
    rates = (
        (name, min_rate(probe.get("gemm_flops_per_s"))) for name, probe in probes if isinstance(probe, dict)
    )
    return {name: flops_per_s for name, flops_per_s in rates if flops_per_s is not None}


def foreign_load_line(loads: Iterable[float | None]) -> str | None:
    """A line about the cores that other programs used during runs that are not in doubt; None where they used few.

    Args:
        loads: the field `foreign_load` of the results.
    """
    shares = [share for share in loads if share is not None]
    least_limit = min(kind.max_foreign_load for kind in DEVICE_KINDS.values())
    if max(shares, default=0.0) <= least_limit:
        return None
    median_text, max_text = map(RESULT_COLUMNS["foreign_load"].text, (median(shares), max(shares)))
    runs_text = counted(len(shares), "run")
    return f"other programs used {median_text} of a node's cores (median of {runs_text}, up to {max_text})"


class ControlRun(NamedTuple):
    """A control run that ended ok."""

    started_at: float
    """Unix time of its start."""
    step_time_s: float
    """The median of its step times, in seconds."""
    ci95_rel: float = 0.0
    """Half the 95 % interval of this median, relative to it; 0 where it is unknown."""
    parts_step_time_s: float | None = None
    """Its step time by parts, where it has measured both, for runs that were measured by parts."""
    is_partial: bool = False
    """Whether its step time follows from parts of steps."""

    def alike_s(self, *, by_parts: bool) -> float | None:
        """Its step time by parts of steps or by whole steps; None where it has measured no such ones."""
        if self.is_partial:
            return self.step_time_s if by_parts else None
        return self.parts_step_time_s if by_parts else self.step_time_s


def control_runs(state: SweepState) -> dict[str, list[ControlRun]]:
    """Allocation -> its control runs that ended ok, in the order of their starts."""
    runs_by_allocation = defaultdict[str, list[ControlRun]](list)
    for key, attempt in state.attempts.items():
        allocation = state.allocations.get(attempt.allocation or "")
        if allocation and allocation.control == key.run_id and (ok := attempt.ok) and ok.step_times_s:
            times = median(ok.step_times_s), ok.step_time_ci95_rel or 0.0, ok.parts_step_time_s
            run = ControlRun(ok.started_at or 0.0, *times, is_partial=ok.is_partial)
            runs_by_allocation[allocation.name].append(run)
    return {
        allocation: sorted(runs, key=lambda run: run[:3]) for allocation, runs in runs_by_allocation.items()
    }


def control_beside(
    started_at: float | None, controls: Sequence[ControlRun], *, by_parts: bool = False
) -> ControlRun | None:
    """The control layout as it would have run beside a run of its allocation; None where there is no control run.

    Its step time is the mean of the control runs before and after that run, since the load of a shared machine
    changes. Its interval is that of this mean, and holds both if they differ by more. A control run is its own.

    Args:
        started_at: Unix time of the start of the run; None where it is unknown.
        controls: the control runs of its allocation, in the order of their starts.
        by_parts: whether the run was measured by parts of steps, and is compared with parts of the control layout. Only
            if no control run has measured what the run has, all of them count as they are.
    """
    timed_controls = ((run, run.alike_s(by_parts=by_parts)) for run in controls)
    controls = [run._replace(step_time_s=time_s) for run, time_s in timed_controls if time_s] or controls
    number_after = bisect_right(controls, (started_at or 0.0, math.inf, math.inf))
    neighbours = [*controls[:number_after][-1:], *controls[number_after:][:1]]
    if not neighbours or neighbours[0].started_at == started_at:
        return next(iter(neighbours), None)
    times_s = [run.step_time_s for run in neighbours]
    mean_s, half_gap_s = fmean(times_s), (max(times_s) - min(times_s)) / 2
    half_interval_s = math.hypot(*(run.step_time_s * run.ci95_rel for run in neighbours)) / len(neighbours)
    return ControlRun(started_at or 0.0, mean_s, max(half_interval_s, half_gap_s) / mean_s)


CONTRADICTED_PARTS = "contradicted_parts"
"""Code of the doubt about runs measured in parts, in a cell where whole steps contradict parts."""


class _Kernel(msgspec.Struct):
    """What a claim says of the program."""

    kind: str
    name: str
    precision: str


class _CellClaim(msgspec.Struct):
    """What a claim says of the cell of its run."""

    kernel: _Kernel
    shape: msgspec.Raw
    workload: msgspec.Raw
    nodes: int
    gpus_per_node: int

    @property
    def key(self) -> Hashable:
        """Equal for the runs of one cell."""
        texts = bytes(self.shape), bytes(self.workload)
        return *texts, self.kernel.name, self.kernel.precision, self.nodes, self.gpus_per_node

    @property
    def program(self) -> Program:
        """What is known of the program of the cell."""
        trains_itself = KERNEL_KINDS[self.kernel.kind].trains_itself
        return Program(trains_itself=trains_itself, num_ranks=self.nodes * self.gpus_per_node)


def _part_doubts(state: SweepState, factor: float) -> Iterator[tuple[AttemptKey, Doubt]]:
    """Each attempt that was measured in parts, in a cell in which whole steps of a run contradict its parts."""
    for attempts, (contradiction, *_) in _contradictions(state, factor):
        for key, attempt in attempts.items():
            if attempt.ok and attempt.ok.is_partial:
                yield key, Doubt(CONTRADICTED_PARTS, contradiction.reason)


def contradicted_runs(state: SweepState, device: str) -> dict[str, bool]:
    """run_id of each run whose whole steps contradict its parts -> whether this is sure.

    One start that has measured both is not: one of twenty intervals does not hold the true value. A second one decides,
    if it differs in the same direction.
    """
    factor = SHARED_CORES_FACTOR if DEVICE_KINDS[device].shares_host else 1.0
    of_cells = (contradictions for _, contradictions in _contradictions(state, factor))
    return {run.run_id: run.is_sure for run in chain.from_iterable(of_cells)}


class _Contradiction(NamedTuple):
    """Whole steps of a run that differ from its parts by more than both intervals."""

    run_id: str
    reason: str
    is_sure: bool


def _contradictions(
    state: SweepState, factor: float
) -> Iterator[tuple[Mapping[AttemptKey, AttemptState], list[_Contradiction]]]:
    """The timed attempts of each cell in which whole steps contradict parts, with the runs of which they do."""
    results = (attempt.ok for attempt in state.attempts.values())
    if not any(result and result.is_partial for result in results):
        return
    attempts_by_cell = defaultdict[Hashable, dict[AttemptKey, AttemptState]](dict)
    for key, attempt in state.attempts.items():
        if attempt.ok and attempt.ok.step_times_s and (claim := attempt.spec_as(_CellClaim)):
            attempts_by_cell[claim.key][key] = attempt
    controls_by_allocation = control_runs(state)
    for attempts in attempts_by_cell.values():
        if of_cell := [*_contradictions_in_cell(attempts, state, controls_by_allocation, factor)]:
            yield attempts, of_cell


class _TimedAttempt(NamedTuple):
    """The step time of an attempt, relative to that of the control layout beside it where that is known."""

    control: str | None
    """run_id of that control layout; None: the time is in seconds."""
    time: float
    ci95_rel: float


def _hosts(attempt: AttemptState) -> tuple[str, ...]:
    return attempt.result.hostnames if attempt.result else ()


def _contradictions_in_cell(
    attempts: Mapping[AttemptKey, AttemptState],
    state: SweepState,
    controls_by_allocation: Mapping[str, Sequence[ControlRun]],
    factor: float,
) -> Iterator[_Contradiction]:
    """The runs of a cell whose whole steps differ from their parts by more than both intervals.

    Starts that have measured both say it for a run that has such starts, else starts by whole steps beside those by
    parts, if all of them contradict. It is sure if two starts differ in the same direction.
    """
    attempts_by_run = defaultdict[str, list[AttemptState]](list)
    for key, attempt in attempts.items():
        attempts_by_run[key.run_id].append(attempt)
    for run_id, run_attempts in attempts_by_run.items():
        of_starts = [*_differences_in_starts(run_attempts, state, factor)] or [
            *_differences_between_starts(run_id, run_attempts, state, controls_by_allocation, factor)
        ]
        differences = [difference for difference in of_starts if difference]
        if differences and all(of_starts):
            num_slower = sum(difference.is_whole_slower for difference in differences)
            is_sure = max(num_slower, len(differences) - num_slower) > 1
            ratios_text = " and ".join(f"{ratio:.2f} x" for ratio in _extreme_ratios(differences))
            fact = f"whole steps of {run_id} took {ratios_text} the time by its parts"
            claim = run_attempts[0].spec_as(_CellClaim)
            assert claim is not None
            reason = (
                f"{fact}, interval {differences[0].interval:.1%}: {cause_text(differences, claim.program)}"
            )
            yield _Contradiction(run_id, reason, is_sure)


def _extreme_ratios(differences: Sequence[Difference]) -> list[float]:
    """The ratio of the first difference; the largest and the smallest one if they have opposite directions."""
    ratios = [difference.ratio for difference in differences]
    return [max(ratios), min(ratios)] if min(ratios) < 1 < max(ratios) else ratios[:1]


def _timed(
    attempt: AttemptState,
    state: SweepState,
    controls_by_allocation: Mapping[str, Sequence[ControlRun]] | None = None,
) -> _TimedAttempt | None:
    """The step time of an attempt, relative to the control layout if the control runs are given; None if unknown."""
    result = attempt.ok
    if result is None or result.stopped == SLOWER or result.step_time_ci95_rel is None:
        return None
    time_s, ci = median(result.step_times_s), result.step_time_ci95_rel
    if controls_by_allocation is None:
        return _TimedAttempt(None, time_s, ci)
    controls = controls_by_allocation.get(attempt.allocation or "", ())
    control = control_beside(result.started_at, controls, by_parts=result.is_partial)
    if control is None:
        return None
    name = state.allocations[attempt.allocation or ""].control
    return _TimedAttempt(name, time_s / control.step_time_s, math.hypot(ci, control.ci95_rel))


def _contradicting_ratio(
    part: _TimedAttempt, whole: _TimedAttempt, tolerance: float
) -> tuple[float, float] | None:
    """The ratio of the times and its interval, if the ratio is outside it by more than the tolerance."""
    ratio, interval = whole.time / part.time, math.hypot(part.ci95_rel, whole.ci95_rel)
    return (ratio, interval) if abs(math.log(ratio)) > math.log1p(interval + tolerance) else None


def _differences_in_starts(
    run_attempts: Sequence[AttemptState], state: SweepState, factor: float
) -> Iterator[Difference | None]:
    """For each start that has measured both, how whole steps differ from parts; None where they do not."""
    tolerance = SAME_START_TOLERANCE if factor > 1 else 0.0
    by_parts = [ok for attempt in run_attempts if (ok := attempt.ok) and ok.is_partial]
    for attempt in run_attempts:
        result, whole = attempt.ok, _timed(attempt, state)
        if result and whole and result.parts_step_time_s and result.parts_interval_rel is not None:
            part = _TimedAttempt(None, result.parts_step_time_s, result.parts_interval_rel)
            ratio = _contradicting_ratio(part, whole, tolerance)
            yield Difference(*ratio, whole=result, parts=by_parts, in_one_start=True) if ratio else None


def _differences_between_starts(
    run_id: str,
    run_attempts: Sequence[AttemptState],
    state: SweepState,
    controls_by_allocation: Mapping[str, Sequence[ControlRun]],
    factor: float,
) -> Iterator[Difference | None]:
    """For each start by whole steps that can be compared, how it differs from the first start by parts that it
    contradicts; None where it contradicts none.

    Times in seconds of cores that other programs use, too, may differ as much as those of control runs.
    """
    shared_tolerance = TIME_TOLERANCE * factor if factor > 1 else 0.0
    by_parts = [attempt for attempt in run_attempts if attempt.ok and attempt.ok.is_partial]
    for step in (attempt for attempt in run_attempts if attempt.ok and not attempt.ok.is_partial):
        is_compared = False
        for part in by_parts:
            # Nodes differ; the control layout beside both shows by how much, unless it is this run itself.
            timed_part, timed_step = (_timed(a, state, controls_by_allocation) for a in (part, step))
            tolerance = 0.0
            if not (timed_part and timed_step and timed_part.control == timed_step.control != run_id):
                if _hosts(part) != _hosts(step):
                    continue
                timed_part, timed_step = _timed(part, state), _timed(step, state)
                tolerance = shared_tolerance
            if not (timed_part and timed_step and part.ok and step.ok):
                continue
            # Its own steps do not show how much the start with whole steps differs from others.
            step_ci95_rel = math.hypot(timed_step.ci95_rel, 2 * START_SD)
            timed_step = timed_step._replace(ci95_rel=step_ci95_rel)
            if ratio := _contradicting_ratio(timed_part, timed_step, tolerance):
                whole_links, part_links = (_link_rates(attempt, state) for attempt in (step, part))
                yield Difference(
                    *ratio, whole=step.ok, parts=(part.ok,), whole_links=whole_links, part_links=part_links
                )
                break
            is_compared = True
        else:
            if is_compared:
                yield None


def _link_rates(attempt: AttemptState, state: SweepState) -> dict[str, float]:
    """Column -> bandwidth of the links in the preflight of its allocation; empty where it is unknown."""
    allocation = state.allocations.get(attempt.allocation or "")
    probe = allocation.preflight.get("probe") if allocation else None
    rates = summary(probe) if isinstance(probe, dict) else {}
    return {column: rate for column, rate in rates.items() if rate and column not in DEVICE_RATES}


def _own_doubts(result: RunResult, factor: float, max_foreign_load: float | None) -> Iterator[Doubt]:
    """Reasons for doubt that the result itself gives."""
    if max_foreign_load is not None:
        if (load := result.foreign_load or 0.0) > max_foreign_load:
            load_text, limit_text = map(RESULT_COLUMNS["foreign_load"].text, (load, max_foreign_load))
            reason = f"other programs used {load_text} of the cores of a node, limit {limit_text}"
            yield Doubt("foreign_load", reason)
        if result.foreign_gpu_processes:
            yield Doubt("foreign_gpu_processes", f"also on its GPUs: {result.foreign_gpu_processes}")
    yield from (Doubt(code, sentence) for code, sentence in result.log_doubts.items())
    if result.throttled is not None:
        yield Doubt("throttled", f"throttled: {result.throttled}")
    ranks_by_time = sorted(result.rank_step_times_s.items(), key=lambda rank_and_time: rank_and_time[1])
    if ranks_by_time and ranks_by_time[-1][1] > (1 + RANK_TOLERANCE * factor) * ranks_by_time[0][1]:
        (fast, low_s), (slow, high_s) = ranks_by_time[0], ranks_by_time[-1]
        yield Doubt("slow_rank", f"rank {slow} took {high_s / low_s:.2f} x the step time of rank {fast}")


def _clock_doubts(state: SweepState, factor: float) -> Iterator[tuple[AttemptKey, Doubt]]:
    """Each attempt whose SM clock was far below that of other attempts of the same run, and the reason.

    Only attempts of one run are compared, because a layout that works a GPU harder has a lower clock: the
    power limit slows it.
    """
    clocks_by_run: dict[str, dict[AttemptKey, float]] = defaultdict(dict)
    for key, attempt in state.attempts.items():
        if (ok := attempt.ok) and ok.sm_clock_hz is not None:
            clocks_by_run[key.run_id][key] = ok.sm_clock_hz
    for clocks in clocks_by_run.values():
        for key, ratio in _slow_ratios(clocks, RATE_TOLERANCE * factor).items():
            reason = f"its SM clock was {ratio:.2f} of the median of {len(clocks)} measurements of this run"
            yield key, Doubt("sm_clock", reason)


def _preflight_doubts(state: SweepState, factor: float) -> Iterator[tuple[str, Doubt]]:
    """Each allocation with slower devices or links than most others of as many nodes, and a reason."""
    for (nodes, column), rates in preflight_rates(state).items():
        for allocation, ratio in _slow_ratios(rates, RATE_TOLERANCE * factor).items():
            reason = f"{column} of its allocation is {ratio:.2f} of the median"
            yield (allocation, Doubt("preflight", f"{reason} of {_allocations_text(rates, nodes)}"))
        for allocation in rates if column == "gemm_flops_per_s" else ():
            device_rates = state.allocations[allocation].preflight["probe"][column]
            # All ranks wait for that of the slowest device.
            if ratio_by_rank := _slow_ratios(dict(enumerate(device_rates)), RATE_TOLERANCE * factor):
                rank = min(ratio_by_rank, key=ratio_by_rank.__getitem__)
                reason = f"the GEMM rate of rank {rank} is {ratio_by_rank[rank]:.2f}"
                reason += f" of the median of the {len(device_rates)} devices of its allocation"
                yield allocation, Doubt("slow_device", reason)


def _digest_doubts(state: SweepState, factor: float) -> Iterator[tuple[str, Doubt]]:
    """Each allocation with a GPU that computed other bits than it should, and the difference."""
    for difference in differences(state.digests()):
        reason = f"{difference.dated.host}: {difference.text} in the preflight of its allocation"
        yield difference.dated.source, Doubt("differing_gpu", reason)


def preflight_rates(state: SweepState) -> dict[tuple[int, str], dict[str, float]]:
    """(number of nodes, column of `summary`) -> allocation -> the rate that it measured before its runs.

    The allocations are in the order of their submission as far as Slurm tells it, which numbers its jobs.
    """

    def submission_order(allocation: AllocationState) -> tuple[int, str]:
        job_number = re.match(r"\d+", str((allocation.job or {}).get("job_id")))
        return int(job_number[0]) if job_number else 0, allocation.name

    rates_by_column: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)
    for allocation in sorted(state.allocations.values(), key=submission_order):
        probe = allocation.preflight.get("probe")
        for column, rate in summary(probe).items() if isinstance(probe, dict) else ():
            if rate is not None:
                rates_by_column[allocation.nodes, column][allocation.name] = rate
    return rates_by_column


def _control_doubts(state: SweepState, factor: float) -> Iterator[tuple[str, Doubt]]:
    """Each allocation in which the control layout was slower than in most others, and the reason.

    Whole steps are compared with whole steps, and parts with parts. A control that has measured both counts in both.
    """
    times_by_kind: dict[tuple[bool, str | None], dict[str, float]] = defaultdict(dict)
    for (allocation, runs), by_parts in product(control_runs(state).items(), (False, True)):
        if alike_times_s := [time_s for run in runs if (time_s := run.alike_s(by_parts=by_parts))]:
            times_by_kind[by_parts, state.allocations[allocation].control][allocation] = median(alike_times_s)
    doubtful = set[str]()
    for (by_parts, _), times_s in times_by_kind.items():
        for allocation, ratio in _slow_ratios(times_s, TIME_TOLERANCE * factor, sign=-1).items():
            if allocation in doubtful:
                continue
            doubtful.add(allocation)
            reason = (
                f"the control layout of its allocation took {ratio:.2f} x its median{' by parts' * by_parts}"
            )
            reason += f" over {_allocations_text(times_s, state.allocations[allocation].nodes)}"
            yield allocation, Doubt("slow_control", reason)


def _allocations_text(value_by_allocation: Mapping[str, float], nodes: int) -> str:
    return f"{counted(len(value_by_allocation), 'allocation')} of {counted(nodes, 'node')}"


LOSS_TOLERANCE = dict.fromkeys(SCALED_PRECISIONS, 5e-2) | {
    "bf16": 1e-3,
    "fp16": 1e-3,
    "fp32": 1e-6,
    "fp64": 1e-9,
}
"""Precision -> largest relative difference of two losses that count as equal.

The order of sums causes it, and in scaled precisions also which numbers share a scale, which layouts change.
"""
PROGRAM_LOSS_TOLERANCE = 1e-2
"""Largest relative difference of two losses of a user's program that count as equal; it may round them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGroup:
    """A group of attempts with the same loss."""

    losses: Mapping[AttemptKey, float]
    """The losses of the attempts, the smallest first."""
    tolerance: float
    """Largest relative difference between neighbouring losses."""

    @property
    def run_ids(self) -> frozenset[str]:
        """The run_ids of these attempts; repeats of a run count once."""
        return frozenset(key.run_id for key in self.losses)

    def __str__(self) -> str:
        """The median loss and its spread, such as `6.93 +- 0.0001`."""
        losses = [*self.losses.values()]
        spread = (losses[-1] - losses[0]) / 2
        return self.text(median(losses)) + (f" +- {spread:.1g}" if spread else "")

    def text(self, loss: float) -> str:
        """A loss with one digit more than losses within the tolerance have in common."""
        return f"{loss:.{2 - math.floor(math.log10(self.tolerance))}g}"


def for_answers(state: SweepState) -> SweepState:
    """A copy of `state` as answers are made from it: with lost attempts, and with losses that are outliers."""
    return with_loss_outliers(with_lost(state))


def with_loss_outliers(state: SweepState) -> SweepState:
    """A copy of `state` in which attempts with an outlying loss are `invalid`,
    and the suspect ones are in `suspect_losses`.

    An outlier differs from most layouts of its model and batch: there are at least three, and two thirds of them
    agree. Where these do not, all of them are in dispute.
    """
    attempts, suspect_losses = dict(state.attempts), dict[AttemptKey, str]()
    for groups in loss_groups(state):
        majority, *other_groups = groups
        if not _is_majority(majority, other_groups):
            counts_text = ", ".join(f"{len(g.run_ids)} have {g}" for g in groups[:3])
            reason = f"layouts of this model and batch differ in their loss: {counts_text}"
            suspect_losses |= {key: reason for group in groups for key in group.losses}
            continue
        for key, loss in (pair for group in other_groups for pair in group.losses.items()):
            attempt = attempts[key]
            assert attempt.result is not None
            step_text = "" if attempt.result.loss_step is None else f" at step {attempt.result.loss_step}"
            num_others = len(majority.run_ids - {key.run_id})
            reason = (
                f"loss {majority.text(loss)}{step_text}; the other {num_others} layouts of this "
                f"model and batch have {majority}"
            )
            result = replace(attempt.result, status=Status.INVALID, reason=reason)
            attempts[key] = replace(attempt, result=result)
    return replace(state, attempts=attempts, suspect_losses=suspect_losses)


def loss_groups(state: SweepState) -> list[list[LossGroup]]:
    """For each workload, the groups of ok attempts that have the same loss, the group of most layouts first.

    Workloads with fewer than three layouts are left out, and programs whose losses may differ between layouts, as the
    latest launch says. Losses are sorted, and neighbours within the
    tolerance belong to one group, however long the chain is. So a new attempt may join two groups into one,
    but never split a group.
    """
    losses_by_workload: dict[tuple[float, Hashable], dict[AttemptKey, float]] = defaultdict(dict)
    kernel_settings = state.config.get("kernel", {})
    loss_comparable = kernel_settings.get("loss_comparable") if isinstance(kernel_settings, dict) else None
    for key, attempt in state.attempts.items():
        if (ok := attempt.ok) and ok.loss_final is not None and (claim := attempt.spec_as(_Claim)):
            with contextlib.suppress(KeyError, msgspec.DecodeError):  # a part of the claim is damaged
                if compares_losses(_kind_of(bytes(claim.kernel)), loss_comparable):
                    losses_by_workload[_workload(claim, ok)][key] = ok.loss_final
    return [
        _groups_by_loss(loss_by_attempt, tolerance)
        for (tolerance, _), loss_by_attempt in losses_by_workload.items()
        if len({key.run_id for key in loss_by_attempt}) >= MIN_COMPARABLE
    ]


def _groups_by_loss(losses: Mapping[AttemptKey, float], tolerance: float) -> list[LossGroup]:
    chains: list[dict[AttemptKey, float]] = []
    previous_loss = -math.inf
    for key, loss in sorted(losses.items(), key=lambda key_and_loss: key_and_loss[1]):
        if not chains or loss - previous_loss > tolerance * abs(loss):
            chains.append({})
        chains[-1][key] = previous_loss = loss
    groups = [LossGroup(losses=chain_losses, tolerance=tolerance) for chain_losses in chains]
    return sorted(groups, key=lambda group: -len(group.run_ids))


class _Claim(msgspec.Struct):
    """The parts of a claim that decide a loss, as JSON text."""

    kernel: msgspec.Raw
    shape: msgspec.Raw
    workload: msgspec.Raw
    variant: msgspec.Raw = msgspec.Raw(b"{}")


@functools.cache  # most claims of a sweep have the same kernel
def _kind_of(kernel: bytes) -> str:
    """The kind of program in the kernel of a claim."""
    return msgspec.json.decode(kernel, type=_Kernel).kind


def _workload(claim: _Claim, result: RunResult) -> tuple[float, Hashable]:
    """The tolerance of a loss, and all that decides it: model, batch, program, its options, versions and step.

    Raises:
        KeyError, msgspec.DecodeError: a part of the claim is damaged.
    """
    parts = (bytes(claim.kernel), bytes(claim.shape), bytes(claim.workload), bytes(claim.variant))
    tolerance, text = _claimed_workload(*parts)
    return tolerance, (text, result.env_id, result.loss_step)


@functools.cache  # most claims of a sweep have the same parts
def _claimed_workload(kernel: bytes, shape: bytes, workload: bytes, variant: bytes) -> tuple[float, bytes]:
    """The tolerance of a loss, and what decides it in the parts of its claim, whatever the name of the model."""
    program = msgspec.json.decode(kernel, type=_Kernel)
    is_ours = KERNEL_KINDS[program.kind].trains_itself
    tolerance = LOSS_TOLERANCE[program.precision] if is_ours else PROGRAM_LOSS_TOLERANCE
    decode = functools.partial(msgspec.json.decode, type=dict[str, Any])
    sizes, batch, options = map(decode, (shape, workload, variant))
    parts = (sizes | {"name": None}, batch, program.name, *program_options(options), program.precision)
    return tolerance, msgspec.json.encode(parts, order="deterministic")


def _is_majority(majority: LossGroup, other_groups: Iterable[LossGroup]) -> bool:
    """Whether at least two thirds of the layouts belong to the group of most layouts."""
    other_ids = frozenset[str]().union(*(group.run_ids for group in other_groups))
    return len(majority.run_ids) >= 2 * len(other_ids)
