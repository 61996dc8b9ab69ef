"""Pure functions that find which attempts a sweep still needs and which runs it leaves out."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, NamedTuple

from ultrabench.kernel_config import LOG_OPTIONS, KernelConfig
from ultrabench.layout import dominates, family
from ultrabench.measure import Measure
from ultrabench.result import FAULTS, UNMEASURED, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.standing import Standing, near_best, open_contenders
from ultrabench.store.jobs_seen import Origin
from ultrabench.store.state import AttemptState, Nodes, SweepState, final_attempts
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config.sweep_config import RetryPolicy, SweepConfig
from ultrabench.sweep.partial_steps import partial_steps_of
from ultrabench.sweep.plan import Plan, ReportProgress
from ultrabench.sweep.predict.search import expected_runs, propose, reasons
from ultrabench.sweep.running import outliers
from ultrabench.sweep.running.blame import Blame, blame_of, policy_of
from ultrabench.sweep.running.outliers import CONTRADICTED_PARTS
from ultrabench.sweep.running.retry import breaker_reason, decide_retry, has_failed_in_full, proven_oom
from ultrabench.sweep.running.searched_cell import outcomes, runtimes_not_started
from ultrabench.sweep.running.standings import standings_of
from ultrabench.variant import runtime_text

MAX_CONTENDERS = 4
"""Largest number of contenders of one cell."""


def dominator_by_run(runs: Iterable[Candidate], state: SweepState) -> dict[str, str]:
    """run_id of each run that cannot fit -> run_id of a run that needs no more and ran out of memory.

    A run that was ok, or that the user asks for, is not left out. A run that ran out of memory is not used
    as evidence when one that needs more memory was ok. Parts of steps that were ok say nothing of a run whose start in
    full has failed.
    """
    attempts_by_run, requested_ids = state.by_run(), {key.run_id for key in state.retried}
    fitted_ids = {
        run_id
        for run_id, attempts in attempts_by_run.items()
        if any(a.ok for a in attempts) and not has_failed_in_full(attempts)
    }
    runs_by_family: dict[tuple[object, ...], list[Candidate]] = {}
    for run in runs:
        runs_by_family.setdefault((run.cell, *run.spec.variant.items(), family(run.layout)), []).append(run)
    oom_id_by_run: dict[str, str] = {}
    for family_runs in runs_by_family.values():
        for run in family_runs:
            attempts = attempts_by_run.get(run.run_id, ())
            if run.run_id not in fitted_ids and proven_oom(attempts, run.prediction.memory_share):
                dominated_ids = {other.run_id for other in family_runs if dominates(run.layout, other.layout)}
                if not dominated_ids & fitted_ids:
                    new_ids = dominated_ids - requested_ids - oom_id_by_run.keys()
                    oom_id_by_run |= dict.fromkeys(new_ids, run.run_id)
    return oom_id_by_run


def is_adaptive(state: SweepState) -> bool:
    """Whether the latest launch of a sweep had the adaptive strategy."""
    return bool(state.config.get("sweep", {}).get("strategy") == "adaptive")


def unpromising_reasons(runs: Iterable[Candidate], state: SweepState) -> dict[str, str]:
    """run_id -> why the adaptive search leaves out a run, where that is known by now.

    It is empty where the latest launch had another strategy.
    """
    if not is_adaptive(state):
        return {}
    max_p_oom = float(state.config.get("max_p_oom", 1.0))
    reason_by_run, searched_ids, searched_runs = dict[str, str](), set[str](), [*runs]
    for cell in outcomes(searched_runs, state, max_p_oom):
        searched_ids |= {run.run_id for run in (*cell.runs, *cell.other_runs)}
        reason_by_run |= reasons(cell.runs, cell.tried)
        if cell.other_runs and cell.is_over():
            begun_ids = cell.tried_others.begun_ids
            unpromising_ids = (run.run_id for run in cell.other_runs if run.run_id not in begun_ids)
            reason_by_run |= dict.fromkeys(unpromising_ids, _OTHER_VARIANT_REASON)
    return reason_by_run | _unstarted_reasons(searched_runs, searched_ids, state)


def _unstarted_reasons(
    runs: Sequence[Candidate], searched_ids: Set[str], state: SweepState
) -> dict[str, str]:
    """run_id -> why a run that the search passes over is left out; those that were tried have a status."""
    begun_ids = {key.run_id for key in state.attempts}
    passed_over = (run for run in runs if run.run_id not in searched_ids | begun_ids)
    return {run.run_id: f"no job of {runtime_text(run.runtime)} has started an agent" for run in passed_over}


_OTHER_VARIANT_REASON = (
    "not promising: its layout is not among the best of its cell, or its options made none of those faster"
)
"""Why the adaptive search leaves out a run of another variant."""


class Skip(NamedTuple):
    """Why a run is skipped."""

    reason: str
    dominator: str | None = None
    """run_id of the run that ran out of memory, if that is why."""


def skips(runs: Sequence[Candidate], state: SweepState) -> dict[str, Skip]:
    """run_id of each run that is left out, for now or for good -> why."""
    why = "which ran out of memory with a smaller micro-batch, a higher ZeRO stage or more recomputation"
    oom_id_by_run = dominator_by_run(runs, state)
    reason_by_run = unpromising_reasons((run for run in runs if run.run_id not in oom_id_by_run), state)
    skip_by_run = {i: Skip(f"dominated by {oom_id}, {why}", oom_id) for i, oom_id in oom_id_by_run.items()}
    return skip_by_run | {run_id: Skip(reason) for run_id, reason in reason_by_run.items()}


def later_runs(
    runs: Sequence[Candidate],
    state: SweepState,
    max_p_oom: float,
    batch: int,
    report_progress: ReportProgress = lambda done, total: None,
) -> list[Candidate]:
    """The runs that the adaptive search is expected to begin yet, if all measurements are as predicted.

    They have the predictions of the plan, since prices are those of the data sheet whatever links were measured.

    Args:
        batch: number of runs of a cell that are made at the same time.
        report_progress: called with the number of cells whose search is foreseen, and of all.
    """
    oom_id_by_run = dominator_by_run(runs, state)
    candidate_by_id = {run.run_id: run for run in runs if run.run_id not in oom_id_by_run}
    future_runs, num_cells = list[Candidate](), len({run.cell for run in candidate_by_id.values()})
    for num_done, cell in enumerate(outcomes(candidate_by_id.values(), state, max_p_oom)):
        report_progress(num_done, num_cells)
        searched_runs = [*expected_runs(cell.runs, cell.tried, batch)]
        is_over = not searched_runs and not cell.tried.pending_ids
        future_runs += searched_runs + (cell.next_variants() if is_over else cell.expected_variants())
    return [candidate_by_id[run.run_id] for run in future_runs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What one launch of a sweep knows in addition to the journal."""

    name: str = ""
    """Name of the journal that this launch writes; empty for a launch that submits nothing."""
    by: Origin = field(default_factory=dict)
    """Who launches, and where."""
    accepts: Callable[[RunResult], bool] = lambda result: True
    """Tells whether an ok result counts; a result of another environment may not."""
    old_attempts: frozenset[AttemptKey] = frozenset()
    """Attempts that had ended before this launch."""
    begun_attempts: frozenset[AttemptKey] = frozenset()
    """Attempts that had begun before this launch; their results count only if it accepts them, whenever they end."""
    since_end_s: Mapping[AttemptKey, float] = field(default_factory=dict)
    """Seconds since this launch saw each attempt end, by its own monotonic clock, because a run may have to
    wait after a failure. Attempts that ended before this launch are left out, for they waited long enough."""
    excused: frozenset[str] = frozenset()
    """Allocations that may end without any run: they existed when the sweep was paused or
    cancelled, or were refused."""


NO_LAUNCH = Launch()
"""A launch that has seen nothing end and accepts every result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAttempt:
    """One attempt that the sweep still has to make."""

    candidate: Candidate
    key: AttemptKey
    limit_factor: float = 1.0
    """Factor on the time limit, larger than 1 after a time-out."""
    pause_s: float = 0.0
    """Seconds to wait after the end of the failed attempt that it follows."""
    avoid: tuple[str, ...] = ()
    """Nodes that it should not use, because earlier attempts of its run failed there."""
    must_wait: bool = False
    """Whether it has to wait, because the failed attempt that it follows ended only a moment ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsLeft:
    """The attempts that are left to submit or to wait for."""

    todo: tuple[PlannedAttempt, ...]
    """Attempts to submit, in the plan's order."""
    num_waiting: int
    """Number of attempts that are queued, running or held back."""
    untried_node_counts: frozenset[int] = frozenset()
    """Numbers of nodes on which no run has passed yet. Of each, only one allocation may be in flight."""
    stop_reason: str | None = None
    """Why nothing more should be submitted; None when nothing is wrong."""
    blame: Blame = field(default_factory=Blame)
    """What the results so far say about nodes and runs."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to submit or to wait for."""
        return not self.todo and not self.num_waiting


def next_attempts(
    plan: Plan, state: SweepState, alive_names: frozenset[str] = frozenset(), launch: Launch = NO_LAUNCH
) -> AttemptsLeft:
    """The attempts to submit, and how many are already queued or running.

    Args:
        alive_names: names of the allocations that are queued or running.
    """
    config, state = plan.config, outliers.with_loss_outliers(state)
    open_allocations = [state.allocations[name] for name in alive_names if name in state.allocations]
    ended_keys = {key for key, attempt in state.attempts.items() if attempt.result}
    keys_under_way = {key for allocation in open_allocations for key in allocation.tasks} - ended_keys
    # Attempts whose losses differ without a majority are not repeated, nor are parts that whole steps contradict:
    # repeats would differ in the same way.
    doubts_by_attempt = outliers.suspect_attempts(state, device=config.hardware.device)
    repeatable_suspects = {
        key
        for key, doubts in doubts_by_attempt.items()
        if key not in state.suspect_losses and {doubt.code for doubt in doubts} != {CONTRADICTED_PARTS}
    }
    blame = blame_of(state, config.retry)
    reuses_parts = partial_steps_of(config) != "off"
    finder = _AttemptFinder(
        state, state.by_run(), config.retry, blame, launch, repeatable_suspects, reuses_parts
    )
    oom_id_by_run = dominator_by_run(plan.runs, state)
    is_sure_by_run = outliers.contradicted_runs(state, config.hardware.device)
    contradicted_cells = {run.cell for run in plan.runs if is_sure_by_run.get(run.run_id)}
    open_runs = [
        run.by_few_steps(config.measure) if run.cell in contradicted_cells else run
        for run in plan.runs
        if run.run_id not in oom_id_by_run
    ]
    open_runs = [_without_parts_that_fail(run, finder, config) for run in open_runs]
    if config.strategy == "adaptive":
        queued_ids = {key.run_id for key in keys_under_way if key.repeat < config.repeats}
        open_runs = _begun_and_proposed(config, finder, open_runs, queued_ids)
    todo = finder.todo_of(open_runs, range(config.repeats))
    if config.measure.confirm > config.repeats or any(run.is_screened for run in open_runs):
        unsettled_cells = {attempt.candidate.cell for attempt in todo}
        settled_runs = [run for run in open_runs if run.cell not in unsettled_cells]
        # A start in full that has failed is tried again, if it is at all, before others take the place of its run.
        failed_runs = [run for run in settled_runs if finder.has_failed_in_full(run)]
        todo += (retries := finder.starts_in_full(failed_runs, config.measure, config.repeats))
        retried_cells = {attempt.candidate.cell for attempt in retries}
        settled_runs = [run for run in settled_runs if run.cell not in retried_cells]
        best_ids = _startable_contender_ids(finder, settled_runs, config) | is_sure_by_run.keys()
        best_runs = [run for run in settled_runs if run.run_id in best_ids]
        # A start that measures a run in full says which run is the best, a second one if it contradicts parts, and a
        # third one if both do so in opposite directions.
        num_full = Counter(key.run_id for key, a in state.attempts.items() if a.ok and not a.ok.is_screened)
        open_ids = {
            run_id for run_id, is_sure in is_sure_by_run.items() if not is_sure and num_full[run_id] > 1
        }
        for num_starts in (1, 2, 3):
            screened_runs = [
                r
                for r in best_runs
                if r.is_screened and num_starts <= 1 + (r.run_id in is_sure_by_run) + (r.run_id in open_ids)
            ]
            todo += finder.starts_in_full(screened_runs, config.measure, config.repeats, num_starts)
        full_ids = {key.run_id for key, a in state.attempts.items() if a.ok and not a.ok.is_screened}
        full_ids -= {attempt.key.run_id for attempt in todo}
        confirmed_runs = [run for run in best_runs if run.run_id in full_ids]
        further = range(config.repeats, config.measure.confirm)
        todo += finder.todo_of([run for run in confirmed_runs if not run.has_two_starts], further)
        two_start_runs = [run for run in confirmed_runs if run.has_two_starts]
        for number in range(1, len(further) + 1):
            todo += finder.starts_in_full(two_start_runs, config.measure, config.repeats, number)
    todo = [attempt for attempt in todo if attempt.key not in keys_under_way]
    untried_node_counts = frozenset[int]()
    if config.launcher.control:  # one allocation of each number of nodes is tried first
        claims = (attempt.spec_as(Nodes) for attempt in state.attempts.values() if attempt.ok)
        passed_node_counts = {claim.nodes for claim in claims if claim}
        untried_node_counts = frozenset({attempt.candidate.nodes for attempt in todo} - passed_node_counts)
    busy_node_counts = untried_node_counts & {allocation.nodes for allocation in open_allocations}
    ready_todo = tuple(t for t in todo if t.candidate.nodes not in busy_node_counts and not t.must_wait)
    return AttemptsLeft(
        todo=ready_todo,
        num_waiting=len(keys_under_way) + len(todo) - len(ready_todo),
        untried_node_counts=untried_node_counts,
        stop_reason=breaker_reason(state, config.retry, blame, launch.since_end_s),
        blame=blame,
    )


def _without_parts_that_fail(run: Candidate, finder: "_AttemptFinder", config: SweepConfig) -> Candidate:
    """The run in full, if its program has failed by itself in the starts for parts and is not tried so again.

    It may not be able to run steps of another size, which says nothing about whole steps; memory that does not suffice
    for a part does.
    """
    attempts = finder.attempts_by_run.get(run.run_id, ())
    if not run.has_two_starts or any(attempt.ok for attempt in attempts):
        return run
    screening_statuses = [a.result.status for a in attempts if a.result and a.result.is_screened]
    if not screening_statuses or screening_statuses[-1] not in FAULTS - {Status.OOM}:
        return run
    is_tried_again = bool(finder.todo_of([run], range(config.repeats)))
    return run if is_tried_again else run.in_full(config.measure)


def attempts_of_next_launch(
    plan: Plan, state: SweepState, accepts: Callable[[RunResult], bool] = lambda _: True
) -> AttemptsLeft:
    """The attempts that a launch would make now, also those that run already."""
    attempt_keys = frozenset(state.attempts)
    launch = Launch(accepts=accepts, old_attempts=attempt_keys, begun_attempts=attempt_keys)
    return next_attempts(plan, state, launch=launch)


def is_settled(plan: Plan, state: SweepState, accepts: Callable[[RunResult], bool] = lambda _: True) -> bool:
    """Whether a sweep has no attempts left to submit or to wait for."""
    return attempts_of_next_launch(plan, state, accepts).is_over


def num_starts(run: Candidate, config: SweepConfig) -> int:
    """Number of starts in which a contender is measured: one of a screened run measures it in full."""
    return max(config.measure.confirm, config.repeats + run.is_screened)


def attempts_after(
    runs: Sequence[Candidate],
    state: SweepState,
    old_attempts: frozenset[AttemptKey] | None = None,
    blame: Blame | None = None,
) -> list[PlannedAttempt]:
    """The attempts that follow those of `runs` by the retry policy and the repeats of the latest launch.

    Args:
        old_attempts: those that ended before the launch that makes the others; None means all, as for the next launch.
        blame: what `latest_blame` returns, if the caller has it.
    """
    if (policy := policy_of(state)) is None or "repeats" not in state.config:
        return []
    launch = Launch(old_attempts=frozenset(state.attempts) if old_attempts is None else old_attempts)
    blame = blame or blame_of(state, policy)
    partial_steps = state.config.get("measure", {}).get("partial_steps", "off")
    reuses_parts = is_adaptive(state) if partial_steps is None else partial_steps != "off"
    finder = _AttemptFinder(state, state.by_run(), policy, blame, launch, frozenset(), reuses_parts)
    # A start in full that has failed is tried again as such.
    repeats = state.config["repeats"]
    failed_runs = [run for run in runs if finder.has_failed_in_full(run)]
    other_runs = [run for run in runs if not finder.has_failed_in_full(run)]
    return finder.todo_of(other_runs, range(repeats)) + finder.starts_in_full(failed_runs, None, repeats)


def _begun_and_proposed(
    config: SweepConfig, finder: "_AttemptFinder", runs: Sequence[Candidate], ids_under_way: Set[str]
) -> list[Candidate]:
    """The runs that the adaptive search has begun, and those that it proposes.

    Those of a cell are proposed when all that it has begun has ended, so that they fill an allocation together
    and follow from the same results, whoever launches.
    """
    attempts, repeats = finder.attempts_by_run, config.repeats
    begun_ids = {r.run_id for r in runs if any(a.key.repeat < repeats for a in attempts.get(r.run_id, ()))}
    begun_ids |= ids_under_way
    waiting_attempts = finder.todo_of([run for run in runs if run.run_id in begun_ids], range(repeats))
    unstarted_runtimes = runtimes_not_started(runs, attempts)
    busy_cells = {t.candidate.cell for t in waiting_attempts if t.candidate.runtime not in unstarted_runtimes}
    for cell in outcomes(runs, finder.state, config.max_p_oom):
        if cell.runs[0].cell not in busy_cells:
            proposed_runs = propose(cell.runs, cell.tried, config.batch) or cell.next_variants()
            begun_ids |= {run.run_id for run in proposed_runs}
    return [run for run in runs if run.run_id in begun_ids]


def contender_ids(runs: Iterable[Candidate], state: SweepState, device: str) -> frozenset[str]:
    """The run_ids of the best runs of each cell and of those near it that may still be the best, at most four each.

    Args:
        state: what `with_loss_outliers` returns.
    """
    return _contender_ids(standings_of(runs, state, device).values())


def _contender_ids(
    rankings: Iterable[Sequence[Standing]], passed_over_ids: Set[str] = frozenset()
) -> frozenset[str]:
    """What `contender_ids` returns, as if the runs to pass over had not been made."""
    open_rankings = ([s for s in ranking if s.run_id not in passed_over_ids] for ranking in rankings)
    contenders = (open_contenders(near_best(ranking, MAX_CONTENDERS)) for ranking in open_rankings)
    return frozenset(standing.run_id for of_cell in contenders for standing in of_cell)


def _startable_contender_ids(
    finder: "_AttemptFinder", runs: Sequence[Candidate], config: SweepConfig
) -> frozenset[str]:
    """The contenders of each cell; a run that cannot be started in full any more leaves its place to the next one.

    A run whose starts in full are all suspect stands as one that was only screened, so that it leaves its place, too.
    """
    rankings = [*standings_of(runs, finder.state, config.hardware.device).values()]
    screened_ids = {standing.run_id for ranking in rankings for standing in ranking if standing.screened}
    screened_runs = {run.run_id: run for run in runs if run.is_screened and run.run_id in screened_ids}
    unstartable_ids = set[str]()
    while True:
        best_ids = _contender_ids(rankings, unstartable_ids)
        best_runs = [screened_runs[run_id] for run_id in best_ids & screened_runs.keys()]
        starts = finder.starts_in_full(best_runs, config.measure, config.repeats)
        startable_ids = {attempt.key.run_id for attempt in starts}
        if not (new_ids := {run.run_id for run in best_runs} - startable_ids):
            return best_ids
        unstartable_ids |= new_ids


def has_old_patterns(attempt: AttemptState, kernel: KernelConfig) -> bool:
    """Whether an attempt without a step that counts was read by another pattern or from another rank's log."""
    is_unmeasured = attempt.result is not None and attempt.result.cause == UNMEASURED
    return is_unmeasured and bool(changed_patterns(attempt, kernel))


def changed_patterns(attempt: AttemptState, kernel: KernelConfig) -> frozenset[str]:
    """The options of LOG_OPTIONS that have another value now than when the logs of an attempt were read."""
    claimed_kernel = (attempt.spec_as(dict[str, Any]) or {}).get("kernel")
    values = attempt.reread.patterns if attempt.reread else claimed_kernel
    if not isinstance(values, dict):
        return frozenset()
    # With any, steps are also found in the log that another value names.
    options = (
        name for name in LOG_OPTIONS if name != "step_rank" or kernel.step_rank != "any" or not attempt.ok
    )
    return frozenset(name for name in options if values.get(name) != getattr(kernel, name))


def attempts_to_reread(state: SweepState, kernel: KernelConfig) -> list[AttemptState]:
    """The attempts whose results other patterns read in their logs than `kernel` has: ok ones,
    and the latest of each repeat.
    """
    latest_keys = {attempt.key for attempt in final_attempts(state).values()}
    return [
        attempt
        for key, attempt in state.attempts.items()
        if attempt.result and (attempt.ok or key in latest_keys)
        and _is_read_in_log(attempt.result) and changed_patterns(attempt, kernel)
    ]  # fmt: skip


def _is_read_in_log(result: RunResult) -> bool:
    """Whether patterns have read a result in a log: its steps, or that it has none that count."""
    if result.status == Status.OK:
        return result.measured_by in ("log", "arrival")
    return result.cause in (UNMEASURED, "non_finite_loss", "bad_report") and result.measured_by != "report"


def _stands_for(run: Candidate, result: RunResult, reuses_parts: bool) -> bool:
    """Whether an ok result has measured as much as is asked of the run: whole steps if not parts alone, and in full
    unless the run is only screened.

    Args:
        reuses_parts: whether the launch accepts a start that measured few whole steps and then parts.
    """
    if not reuses_parts and result.parts_step_time_s is not None:
        return False
    is_enough = run.is_screened or not result.is_screened
    return is_enough and not (run.has_whole_steps and result.is_partial)


def runs_with_too_little(plan: Plan, state: SweepState) -> list[Candidate]:
    """The runs whose ok results all measured less than the plan asks for, such as parts of steps in a sweep of whole
    ones: they are measured again."""
    reuses_parts = partial_steps_of(plan.config) != "off"
    attempts_by_run = state.by_run()
    results_by_run = {
        run.run_id: [a.ok for a in attempts_by_run.get(run.run_id, ()) if a.ok] for run in plan.runs
    }
    return [
        run
        for run in plan.runs
        if (results := results_by_run[run.run_id])
        and not any(_stands_for(run, result, reuses_parts) for result in results)
    ]


@dataclass(frozen=True, slots=True)
class _AttemptFinder:
    """Finds the next attempts of runs from the retry policy and the state of the whole sweep."""

    state: SweepState
    attempts_by_run: Mapping[str, list[AttemptState]]
    policy: RetryPolicy
    blame: Blame
    launch: Launch
    suspect_keys: Set[AttemptKey]
    reuses_parts: bool
    """Whether a start that measured few whole steps and then parts counts for a run; not in a sweep of whole steps."""

    def todo_of(
        self, runs: Sequence[Candidate], repeats: range, num_screening: int = 0
    ) -> list[PlannedAttempt]:
        """The attempts that these repeats of `runs` still need: one repeat of every run, then the next.

        Args:
            num_screening: number of first repeats that only screened the runs, if these are measured in full now.
        """
        next_attempts = (
            self._next_attempt(run, repeat, repeats.stop, num_screening) for repeat in repeats for run in runs
        )
        return [attempt for attempt in next_attempts if attempt]

    def has_failed_in_full(self, run: Candidate) -> bool:
        """Whether a run that is screened has failed in the start that was to measure it in full."""
        return run.is_screened and has_failed_in_full(self.attempts_by_run.get(run.run_id, ()))

    def starts_in_full(
        self, screened_runs: Sequence[Candidate], measure: Measure | None, num_screening: int, number: int = 1
    ) -> list[PlannedAttempt]:
        """The attempts that start number `number` in full of these runs still needs.

        Args:
            measure: how the sweep measures; None: the prices of the runs do not matter.
            num_screening: number of first repeats that only screened the runs.
        """
        runs_in_full = [run.in_full(measure) for run in screened_runs]
        return self.todo_of(runs_in_full, range(number - 1, number), num_screening)

    def _next_attempt(
        self, run: Candidate, counted_index: int, num_repeats: int, num_screening: int
    ) -> PlannedAttempt | None:
        """The attempt that a counted repeat of `run` still needs; None when it needs no more.

        `counted_index` is the number of counted repeats before it. A repeat that only screened the run and failed does
        not count for a run in full, unless parts have shown that the run does not fit: whole steps need no less memory.
        Repeats count in the environment that has most of them. Those in other ones are made again, at most
        `num_repeats` of them, since every node of a cluster may have an environment of its own.
        """
        groups = groupby(self.attempts_by_run.get(run.run_id, ()), key=lambda attempt: attempt.key.repeat)
        attempts_by_repeat = {repeat: [*attempts] for repeat, attempts in groups}
        begun_attempts, accepts = self.launch.begun_attempts, self.launch.accepts
        all_attempts = [*chain.from_iterable(attempts_by_repeat.values())]
        has_fitted = any(attempt.ok for attempt in all_attempts)
        environment_counts = Counter(a.ok.environment for a in all_attempts if a.ok)
        usual_environments = [environment for environment, _ in environment_counts.most_common(1)]
        last_index, num_suspect, num_unusual, control_allocations = -1, 0, 0, set[str]()
        end_repeat, first_new_repeat = (
            len(attempts_by_repeat) + num_repeats,
            max(attempts_by_repeat, default=-1) + 1,
        )
        for repeat in range(min(first_new_repeat, end_repeat)):
            attempts = attempts_by_repeat.get(repeat, [])
            oks = {a.key: a.ok for a in attempts if a.ok}
            if oks and not any(key not in begun_attempts or accepts(ok) for key, ok in oks.items()):
                continue  # an old result of another environment is kept, but does not count as a repeat
            if oks and not any(_stands_for(run, ok, self.reuses_parts) for ok in oks.values()):
                continue
            if attempts and not oks and not run.is_screened:
                results = [attempt.result for attempt in attempts if attempt.result]
                has_only_screened = repeat < num_screening or any(r.is_screened for r in results)
                is_oom = bool(results) and results[-1].status == Status.OOM
                if has_only_screened and (has_fitted or not is_oom):
                    continue
            # Control runs of one allocation are not independent, so that they count as one repeat.
            allocations = {attempt.allocation for attempt in attempts if attempt.ok}
            if allocations & control_allocations:
                continue
            is_suspect = bool(oks) and oks.keys() <= self.suspect_keys
            if is_suspect and num_suspect < self.policy.attempts["suspect"]:
                num_suspect += 1
                continue
            environments = {ok.environment for ok in oks.values()}
            is_unusual = bool(oks) and environments.isdisjoint(usual_environments)
            if is_unusual and num_unusual < num_repeats:
                num_unusual += 1
                continue
            control_allocations |= {name for name in allocations if name and self._is_control(run, name)}
            last_index += 1
            if last_index == counted_index:
                return None if oks else self._retry(run, repeat, attempts)
        # Repeats of which nothing was tried all count, so that the one wanted is found without looking at each.
        repeat = first_new_repeat + counted_index - last_index - 1
        return self._retry(run, repeat, []) if repeat < end_repeat else None

    def _is_control(self, run: Candidate, allocation: str) -> bool:
        """Whether a run is the control run of an allocation."""
        return (
            allocation in self.state.allocations and self.state.allocations[allocation].control == run.run_id
        )

    def _retry(self, run: Candidate, repeat: int, attempts: Sequence[AttemptState]) -> PlannedAttempt | None:
        """The attempt that follows `attempts`, none of which is ok; None when no more is allowed."""
        if not attempts:
            return PlannedAttempt(candidate=run, key=AttemptKey(run.run_id, repeat, 0))
        last_attempt = attempts[-1]
        if last_attempt.result is None:
            # The attempt still runs, or its end is not known yet, so no new one is made.
            return PlannedAttempt(candidate=run, key=last_attempt.key)
        pause_s, avoid, memory_share = 0.0, tuple[str, ...](), run.prediction.memory_share
        if last_attempt.key not in self.state.retried and not has_old_patterns(last_attempt, run.spec.kernel):
            decision = decide_retry(
                attempts,
                self.policy,
                blame=self.blame,
                old_attempts=self.launch.old_attempts,
                memory_share=memory_share,
            )
            if not decision.retry:
                return None
            pause_s, avoid = decision.pause_s, decision.avoid
        num_timeouts = sum(a.result is not None and a.result.status == Status.TIMEOUT for a in attempts)
        return PlannedAttempt(
            candidate=run,
            key=last_attempt.key._replace(attempt=last_attempt.key.attempt + 1),
            limit_factor=2.0**num_timeouts,
            pause_s=pause_s,
            avoid=avoid,
            must_wait=self.launch.since_end_s.get(last_attempt.key, math.inf) < pause_s,
        )
