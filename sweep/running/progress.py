"""Computes the progress of a sweep for `sweep status` and the live table: counts, GPU hours, best runs."""

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ultrabench.errors import counted
from ultrabench.hardware import low_peak
from ultrabench.node_health import node_warnings, warning_lines
from ultrabench.result import (
    INTERRUPTED,
    OUTER_FAILURES,
    PENDING,
    RUNNING,
    UNSETTLED,
    RunResult,
    Status,
    outcome_order,
)
from ultrabench.run import AttemptKey
from ultrabench.standing import Standing, near_best
from ultrabench.store.state import AttemptState, Nodes, SweepState, final_attempts
from ultrabench.sweep.candidate import Candidate, cell_columns
from ultrabench.sweep.running.attempts import attempts_after, is_adaptive, later_runs, skips
from ultrabench.sweep.running.blame import latest_blame
from ultrabench.sweep.running.outliers import for_answers
from ultrabench.sweep.running.retry import has_failed_in_full
from ultrabench.sweep.running.standings import best_of_rankings, standings_of, suspects_of

_JSON_FIELDS = (
    "sweep",
    "runs",
    "by_status",
    "attempts",
    "to_go",
    "unconfirmed",
    "eta_s",
    "runs_per_hour",
    "node_warnings",
    "nodes_not_used",
)
"""Fields that `sweep status --json` has under their own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """The progress of a sweep at one moment."""

    sweep: str
    runs: int
    cell_columns: tuple[str, ...]
    """What `cell_columns` returns for all cells of the sweep."""
    by_status: dict[str, int]
    """Status -> number of runs that have it; running, pending and skipped are counted, too."""
    by_nodes: dict[int, dict[str, int]]
    settled_by_nodes: Counter[int]
    settled: frozenset[str]
    """run_ids of the runs that are over: measured, skipped, or failed and not tried again."""
    pause_by_key: dict[AttemptKey, float]
    """Failed attempt that stands for a run and that another one follows -> seconds to wait after its end."""
    retried_by_status: Counter[str]
    """Status of these attempts -> their number."""
    skipped: dict[str, str]
    """run_id of each skipped run -> the reason."""
    running: tuple[tuple[Candidate, AttemptState], ...]
    """Runs that are running now, with their attempts."""
    num_waiting: int
    """Number of allocations that were submitted and have not started."""
    num_at_work: int
    """Number of allocations that have started and whose end is not known, also during their preflight."""
    attempts: int
    useful_gpu_hours: float
    wasted_by_status: dict[str, float]
    to_go: int
    """Number of runs that are expected to be made yet, with those that have begun: all that are left or, of an
    adaptive search, a few of them; 0 when it is over."""
    eta_s: float | None
    """Seconds that are left: the predicted duration of the runs to go, corrected by how long finished runs took,
    divided by the number of running allocations; 0 when it is over. None before the first result."""
    runs_per_hour: float | None
    """How many attempts began in an hour, by the latest ones; None before the third."""
    best: tuple[tuple[Candidate, Standing], ...]
    """The best run of each cell so far, sorted by cell."""
    unconfirmed: int
    """Number of cells in which a run is the fastest that was only screened, so that it is not called the best, also
    without a suspect start in full."""
    result_by_run: dict[str, RunResult]
    """run_id -> the result of its standing attempt, for ok runs."""
    node_warnings: tuple[str, ...]
    """Lines about the health of nodes, from the latest preflight of each."""
    nodes_not_used: dict[str, str]
    """Node that jobs do not use, or only if they must -> a line that says why."""
    mfu_problem: str | None
    """Why no MFU is given; None where it is."""
    suspects: dict[AttemptKey, str]
    """Attempts whose measurement is suspect -> all reasons."""
    failures: tuple[tuple[Candidate, AttemptState], ...]
    """The last five runs whose latest attempt failed by itself or with its node or agent, the newest last."""

    @property
    def left(self) -> int:
        """Number of runs that are pending, running or tried again."""
        return self.runs - len(self.settled)

    @property
    def left_text(self) -> str:
        """A text such as `12 of 26 runs left, about 3 to go`; settled runs are the others."""
        text = counted(self.runs, "run")
        text = f"{self.left} of {text} left" if self.settled else text
        return text + (f", about {self.to_go} to go" if self.to_go < self.left else "")

    @property
    def wasted_gpu_hours(self) -> float:
        """GPU hours of attempts that are not ok, and of the time between runs."""
        return sum(self.wasted_by_status.values())

    def mfu(self, run: Candidate, standing: Standing) -> float | None:
        """The MFU at the measured rate of a run; None where the rate, the peak or the model is unknown or in doubt."""
        if standing.rate is None or self.mfu_problem:
            return None
        return run.mfu(standing.rate, self.result_by_run.get(run.run_id))

    def as_json(self) -> dict[str, Any]:
        """The document of `sweep status --json`."""
        return {
            **{name: getattr(self, name) for name in _JSON_FIELDS},
            "settled": len(self.settled),
            "gpu_hours": {
                "useful": round(self.useful_gpu_hours, 6),
                "wasted": round(self.wasted_gpu_hours, 6),
                "wasted_by_status": {k: round(v, 6) for k, v in self.wasted_by_status.items()},
            },
            "waiting_allocations": self.num_waiting,
            "running": [
                {
                    "run_id": run.run_id,
                    "layout": run.spec.label(),
                    "phase": attempt.phase or "start",
                    "steps": attempt.steps,
                    "step_time_s": attempt.step_time_s,
                }
                for run, attempt in self.running
            ],
            "suspects": {str(key): reasons for key, reasons in self.suspects.items()},
            "best": [
                {
                    "model": run.shape.name,
                    "nodes": run.nodes,
                    "run_id": run.run_id,
                    "layout": run.spec.label(),
                    "tokens_per_s_per_gpu": standing.rate,
                    "control_ratio": standing.control_ratio,
                    "step_time_ci95_rel": standing.ci95_rel,
                    "ci_reached": standing.ci_reached,
                    "num_repeats": standing.num_repeats,
                    "num_repeats_failed": standing.num_repeats_failed,
                    "suspect": standing.suspect,
                }
                for run, standing in self.best
            ],
        }


def progress_of(
    sweep: str,
    plan_runs: Sequence[Candidate],
    state: SweepState,
    device: str,
    old_attempts: frozenset[AttemptKey] | None = None,
) -> SweepProgress:
    """The progress of `plan_runs` according to `state`.

    Args:
        device: the torch device type of the hardware, cuda or cpu.
        old_attempts: those that ended before the present launch; None tells what the next launch would try again.
    """
    state = for_answers(state)
    run_by_id = {r.run_id: r for r in plan_runs}
    attempt_by_run = {run_id: a for run_id, a in standing_attempts(state).items() if run_id in run_by_id}
    skipped = skips(plan_runs, state)
    status_by_run = {run_id: str(Status.SKIPPED) if run_id in skipped else PENDING for run_id in run_by_id}
    status_by_run |= {i: str(a.result.status) if a.result else RUNNING for i, a in attempt_by_run.items()}
    suspect_reasons = suspects_of(run_by_id, state, device)
    rankings = standings_of(plan_runs, state, device, suspect_reasons)
    best = best_of_rankings(rankings)
    leaders = [leader for ranking in rankings.values() for leader in near_best(ranking, 1)]
    full_ids = {key.run_id for key, a in state.attempts.items() if a.ok and not a.ok.is_screened}
    useful_gpu_hours, wasted_by_status = gpu_hours(state, plan_runs[0].spec.gpus_per_node if plan_runs else 0)
    by_nodes = defaultdict[int, Counter[str]](Counter)
    for run in plan_runs:
        by_nodes[run.nodes][status_by_run[run.run_id]] += 1
    dominated_ids = {run_id for run_id, skip in skipped.items() if skip.dominator}
    failed_ids = {i for i, a in attempt_by_run.items() if a.result and not a.ok} - dominated_ids
    failed_runs = [run_by_id[run_id] for run_id in attempt_by_run if run_id in failed_ids]
    blame = latest_blame(state)
    next_attempts = attempts_after(failed_runs, state, old_attempts, blame)
    pause_by_key = {attempt_by_run[t.key.run_id].key: t.pause_s for t in next_attempts}
    unsettled_ids = {i for i, s in status_by_run.items() if s in UNSETTLED}
    unsettled_ids |= {key.run_id for key in pause_by_key}
    settled_ids = frozenset(run_by_id.keys() - unsettled_ids)
    if is_adaptive(state):
        config = state.config
        max_p_oom, batch = float(config.get("max_p_oom", 1.0)), int(config["sweep"].get("batch", 1))
        future_ids = {run.run_id for run in later_runs(plan_runs, state, max_p_oom, batch)}
        unsettled_ids &= attempt_by_run.keys() | future_ids
    left_s = sum(run_by_id[run_id].prediction.duration_s for run_id in unsettled_ids)
    ok_runs_s = ((run_by_id[i], a.ok.duration_s) for i, a in attempt_by_run.items() if a.ok)
    ratios = [duration_s / run.prediction.duration_s for run, duration_s in ok_runs_s if duration_s]
    have_started = [bool(a.agents) for a in state.allocations.values() if a.ended is None]
    num_at_work = have_started.count(True)
    eta_s = None if unsettled_ids else 0.0
    if ratios:
        eta_s = left_s * median(ratios) / max(1, num_at_work)
    return SweepProgress(
        sweep=sweep,
        runs=len(run_by_id),
        cell_columns=(*cell_columns(run.cell for run in plan_runs),),
        by_status=dict(sorted(Counter(status_by_run.values()).items())),
        by_nodes={n: dict(sorted(c.items())) for n, c in sorted(by_nodes.items())},
        settled_by_nodes=Counter(run.nodes for run in plan_runs if run.run_id in settled_ids),
        settled=settled_ids,
        pause_by_key=pause_by_key,
        retried_by_status=Counter(status_by_run[key.run_id] for key in pause_by_key),
        skipped={i: skip.reason for i, skip in skipped.items() if status_by_run[i] == Status.SKIPPED},
        running=tuple((run_by_id[i], attempt_by_run[i]) for i, s in status_by_run.items() if s == RUNNING),
        num_waiting=have_started.count(False),
        num_at_work=num_at_work,
        attempts=len(state.attempts),
        useful_gpu_hours=useful_gpu_hours,
        wasted_by_status=wasted_by_status,
        to_go=len(unsettled_ids),
        eta_s=eta_s,
        runs_per_hour=_runs_per_hour(state),
        best=tuple((run_by_id[standing.run_id], standing) for standing in best.values()),
        unconfirmed=sum(leader.screened and leader.run_id not in full_ids for leader in leaders),
        result_by_run={run_id: a.ok for run_id, a in attempt_by_run.items() if a.ok},
        node_warnings=tuple(warning_lines(node_warnings(state.node_facts()))),
        nodes_not_used=blame.node_lines,
        mfu_problem=_mfu_problem(run_by_id, state, suspect_reasons),
        suspects=suspect_reasons,
        failures=_latest_failures(run_by_id, attempt_by_run),
    )


def _mfu_problem(
    run_by_id: Mapping[str, Candidate], state: SweepState, suspects: Container[AttemptKey]
) -> str | None:
    """The field `mfu_problem` of the progress."""
    problems = (run.mfu_problem for run in run_by_id.values() if run.mfu_problem)
    results = (
        (run_by_id[key.run_id], attempt.ok)
        for key, attempt in state.attempts.items()
        if key not in suspects and key.run_id in run_by_id
    )
    mfus = (run.mfu(run.tokens_per_s_per_gpu(ok), ok) for run, ok in results if ok and ok.step_times_s)
    return next(problems, None) or low_peak(max(filter(None, mfus), default=None))


def _latest_failures(
    runs: Mapping[str, Candidate], attempts: Mapping[str, AttemptState]
) -> tuple[tuple[Candidate, AttemptState], ...]:
    """The field `failures` of the progress."""
    no_failure = {Status.OK, *INTERRUPTED}
    failures = [(runs[i], a) for i, a in attempts.items() if a.result and a.result.status not in no_failure]
    return tuple(sorted(failures, key=lambda run_and_attempt: run_and_attempt[1].time or 0.0)[-5:])


def _runs_per_hour(state: SweepState) -> float | None:
    """Attempts begun in an hour, by the latest 20 of the hour before the newest one."""
    begin_times = sorted(attempt.time for attempt in state.attempts.values() if attempt.time is not None)
    latest_times = [time for time in begin_times[-20:] if time > begin_times[-1] - 3600]
    if len(latest_times) < 3 or latest_times[-1] == latest_times[0]:
        return None
    return (len(latest_times) - 1) / (latest_times[-1] - latest_times[0]) * 3600


def standing_attempts(state: SweepState) -> dict[str, AttemptState]:
    """run_id -> the attempt of any repeat that has the status of the run: ok, else running, else as in its standing.

    A run that was only screened and whose start in full has failed is not ok.
    """

    def order(attempt: AttemptState) -> tuple[bool, bool, tuple[int, bool]]:
        result = attempt.result
        return attempt.ok is not None, result is None, outcome_order(result.status if result else None)

    attempts_by_run = defaultdict[str, list[AttemptState]](list)
    for (run_id, _), attempt in final_attempts(state).items():
        attempts_by_run[run_id].insert(0, attempt)  # of equal ones the latest repeat
    for run_id, attempts in attempts_by_run.items():
        if has_failed_in_full(attempts):
            attempts_by_run[run_id] = [attempt for attempt in attempts if not attempt.ok]
    return {run_id: max(attempts, key=order) for run_id, attempts in attempts_by_run.items()}


def settled_runs(state: SweepState) -> dict[str, Status]:
    """run_id -> status of each run whose standing attempt has ended, unless the next launch tries it again anyway."""
    ended_statuses = ((i, a.result.status) for i, a in standing_attempts(state).items() if a.result)
    return {run_id: status for run_id, status in ended_statuses if status not in OUTER_FAILURES}


def gpu_hours(state: SweepState, gpus_per_node: int) -> tuple[float, dict[str, float]]:
    """GPU hours of ok attempts, and status -> GPU hours of the other attempts.

    The entry `between_runs` is the rest of the time that allocations held their nodes: starts, preflights,
    and runs that were lost together with their allocation.
    """
    hours_by_status: dict[str, float] = defaultdict(float)
    hours_by_allocation: dict[str | None, float] = defaultdict(float)
    for attempt in state.attempts.values():
        result = attempt.result
        if result and result.duration_s is not None and (claim := attempt.spec_as(Nodes)):
            hours = result.duration_s * claim.nodes * claim.gpus_per_node / 3600
            hours_by_allocation[attempt.allocation] += hours
            hours_by_status[str(result.status)] += hours
    held_hours = {n: a.held_s * a.nodes * gpus_per_node / 3600 for n, a in state.allocations.items()}
    between_hours = sum(max(0.0, hours - hours_by_allocation[name]) for name, hours in held_hours.items())
    useful_hours = hours_by_status.pop(Status.OK.value, 0.0)
    return useful_hours, {**hours_by_status} | ({"between_runs": between_hours} if between_hours else {})
