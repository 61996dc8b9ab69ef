"""Makes the standings of a sweep from its state: which run of each cell is the best so far."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import NamedTuple, Self

from ultrabench.model_shape import ModelShape
from ultrabench.result import Doubt, RunResult, Status, doubt_text
from ultrabench.run import AttemptKey
from ultrabench.standing import Repeat, Standing, environments_of, merge_environments, near_best, standings
from ultrabench.store.state import AttemptState, SweepState, final_attempts
from ultrabench.sweep.candidate import Candidate, CellKey
from ultrabench.sweep.running.outliers import (
    ControlRun,
    control_beside,
    control_runs,
    gemm_rates,
    rate_doubts,
    suspect_attempts,
)

RATE_OVER_BF16 = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 6.0}
"""Precision -> rate of its products over that of the bf16 products that a preflight measures: the largest ratio of the
published peaks."""
Suspects = Mapping[AttemptKey, str]
"""Ok attempts whose measurement is suspect -> the reasons."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What makes measurements of a sweep suspect, read once from its state."""

    outliers: Mapping[AttemptKey, list[Doubt]]
    gemm_rates: Mapping[str, float]
    device: str

    @classmethod
    def of(cls, state: SweepState, device: str) -> Self:
        """The suspicion of a state that `with_loss_outliers` returned."""
        return cls(suspect_attempts(state, device=device), gemm_rates(state), device)

    def doubts(
        self,
        attempt: AttemptState,
        mfu: float | None,
        shape: ModelShape | None,
        seq_len: int,
        tokens_per_s_per_gpu: float,
        precision: str,
    ) -> list[Doubt]:
        """All doubts about the measurement of an ok attempt.

        Attention counts only for the positions that the causal mask leaves.

        Args:
            mfu: a fraction; None where it is unknown.
            precision: that of the run; plain matrix products are measured in bf16.
        """
        gemm_flops_per_s, share_of_gemm_rate = self.gemm_rates.get(attempt.allocation or ""), None
        if gemm_flops_per_s and shape:
            gemm_flops_per_s *= RATE_OVER_BF16.get(precision, 1.0)
            flops_per_s = shape.flops_per_token(seq_len, "megatron") * tokens_per_s_per_gpu
            share_of_gemm_rate = flops_per_s / gemm_flops_per_s
        return [*self.outliers.get(attempt.key, ()), *rate_doubts(mfu, self.device, share_of_gemm_rate)]


class ControlComparison(NamedTuple):
    """A run beside the control runs of its allocation."""

    ratio: float | None = None
    """Step time of the control runs beside the run over that of the run; None where one is unknown."""
    ci95_rel: float | None = None
    """Half the 95 % interval of that step time of the control runs, relative to it."""


def beside_control(
    attempt: AttemptState, controls_by_allocation: Mapping[str, Sequence[ControlRun]]
) -> ControlComparison:
    """An attempt beside the control runs of its allocation.

    Args:
        controls_by_allocation: what `control_runs` returns.
    """
    result, controls = attempt.ok, controls_by_allocation.get(attempt.allocation or "", ())
    if result is None or not result.step_times_s:
        return ControlComparison()
    control = control_beside(result.started_at, controls, by_parts=result.is_partial)
    if control is None or not control.step_time_s:
        return ControlComparison()
    return ControlComparison(control.step_time_s / median(result.step_times_s), control.ci95_rel)


def suspects_of(run_by_id: Mapping[str, Candidate], state: SweepState, device: str) -> dict[AttemptKey, str]:
    """Ok attempts whose measurement is suspect -> the reasons.

    Args:
        run_by_id: run_id -> run.
    """
    suspicion = Suspicion.of(state, device)
    reason_by_attempt = {key: doubt_text(run_doubts) or "" for key, run_doubts in suspicion.outliers.items()}
    for key, attempt in state.attempts.items():
        run, ok_result = run_by_id.get(key.run_id), attempt.ok
        if run and ok_result and ok_result.step_times_s:
            tokens_per_s = run.tokens_per_s_per_gpu(ok_result)
            seq_len, precision = run.spec.workload.seq_len, run.spec.kernel.precision
            mfu, shape = run.mfu(tokens_per_s, ok_result), run.shape if run.flops(ok_result).formula else None
            doubt_arguments = mfu, shape, seq_len, tokens_per_s, precision
            run_doubts = suspicion.doubts(attempt, *doubt_arguments)
            if reason := doubt_text(run_doubts):
                reason_by_attempt[key] = reason
    return reason_by_attempt


def standings_of(
    runs: Iterable[Candidate], state: SweepState, device: str, suspects: Suspects | None = None
) -> dict[CellKey, list[Standing]]:
    """CellKey -> the standings of its runs that have been tried, the best first, by tokens/s/GPU.

    Args:
        state: what `with_loss_outliers` returns.
        suspects: what `suspects_of` returns, if it is known.
    """
    run_by_id = {run.run_id: run for run in runs}
    suspects = suspects_of(run_by_id, state, device) if suspects is None else suspects
    controls_by_allocation, attempts = control_runs(state), [*final_attempts(state).values()]
    repeats = []
    for attempt, environment in zip(attempts, _environments(attempts), strict=True):
        if run := run_by_id.get(attempt.key.run_id):
            result = attempt.result
            timed_result = result if result and result.step_times_s else None
            allocation = state.allocations.get(attempt.allocation or "")
            comparison = beside_control(attempt, controls_by_allocation)
            repeats.append(
                Repeat(
                    run_id=run.run_id, cell=run.cell, environment=environment,
                    allocation=attempt.allocation, control=allocation.control if allocation else None,
                    status=result.status if result else None, stopped=result.stopped if result else None,
                    suspect=suspects.get(attempt.key), partial=bool(timed_result and timed_result.is_partial),
                    screened=bool(result and result.is_screened),
                    rate=run.tokens_per_s_per_gpu(timed_result) if timed_result else None,
                    control_ratio=comparison.ratio, control_ci95_rel=comparison.ci95_rel,
                    ci95_rel=timed_result.step_time_ci95_rel if timed_result else None,
                    ci_reached=timed_result.ci_reached if timed_result else None,
                    parts_ci95_rel=timed_result.parts_ci95_rel if timed_result else None,
                    parts_ratio=_parts_ratio(timed_result) if timed_result else None,
                )
            )  # fmt: skip
    standings_by_cell: dict[CellKey, list[Standing]] = standings(repeats)  # type: ignore[assignment]
    return standings_by_cell


def _parts_ratio(result: RunResult) -> float | None:
    parts_s = result.parts_step_time_s
    return None if parts_s is None else parts_s / median(result.step_times_s)


def best_of_cells(
    runs: Iterable[Candidate], state: SweepState, device: str, suspects: Suspects | None = None
) -> dict[CellKey, Standing]:
    """CellKey -> its best run so far, sorted by cell; the arguments are those of `standings_of`."""
    return best_of_rankings(standings_of(runs, state, device, suspects))


def best_of_rankings(rankings: Mapping[CellKey, Sequence[Standing]]) -> dict[CellKey, Standing]:
    """CellKey -> its best run so far, sorted by cell, from what `standings_of` returns."""
    return {cell: ranking[0] for cell, ranking in sorted(rankings.items()) if ranking[0].best}


def fastest_of_cells(runs: Iterable[Candidate], state: SweepState, device: str) -> dict[CellKey, Standing]:
    """CellKey -> the run with the largest value so far, also if parts of steps alone say so."""
    rankings = standings_of(runs, state, device)
    return {cell: standing for cell, ranking in rankings.items() for standing in near_best(ranking, 1)}


def measured_rates(runs: Iterable[Candidate], state: SweepState, device: str) -> dict[str, float | None]:
    """run_id of each run that was ok -> its tokens/s/GPU in its best environment;
    None where it may not win its cell.
    """
    rate_by_run: dict[str, float | None] = {}
    for standing in chain(*standings_of(runs, state, device).values()):
        if standing.outcome == Status.OK:
            rate_by_run.setdefault(standing.run_id, standing.rate if standing.may_win else None)
    return rate_by_run


def _environments(attempts: Sequence[AttemptState]) -> list[str | None]:
    """For each attempt the env_id that stands for its environment."""
    ok_results = [ok for attempt in attempts if (ok := attempt.ok) and ok.env_id]
    representative_by_id = {str(ok.env_id): str(ok.env_id) for ok in ok_results}
    if len(representative_by_id) > 1:
        environments = ((ok.environment, str(ok.env_id), ok.driver_version or "") for ok in ok_results)
        representative_by_id, _ = merge_environments(environments)
    results = ((attempt.key.run_id, attempt.result) for attempt in attempts)
    repeats = [
        (None, run_id, result.status if result else None, result.env_id if result else None)
        for run_id, result in results
    ]
    return environments_of(repeats, representative_by_id)
