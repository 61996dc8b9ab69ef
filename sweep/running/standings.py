"""Makes the standings of a sweep from its state: which run of each cell is the best so far."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Self

from ultrabench.model_shape import ModelShape
from ultrabench.result import Doubt, Status, sentences
from ultrabench.run import AttemptKey
from ultrabench.standing import Repeat, Standing, same_environments, standings
from ultrabench.step_time import ci95_rel
from ultrabench.store.state import AttemptState, SweepState, final_attempts
from ultrabench.sweep.candidate import Candidate, CellKey
from ultrabench.sweep.running.outliers import control_times, gemm_rates, impossible, suspect_attempts

FP8_OVER_BF16 = 2.0
"""Rate of products in fp8 over that of the bf16 products that a preflight measures: the ratio of all published peaks."""
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
        rate, share = self.gemm_rates.get(attempt.allocation or ""), None
        if rate and shape:
            rate *= FP8_OVER_BF16 if precision == "fp8" else 1
            share = shape.flops_per_token(seq_len, "megatron") * tokens_per_s_per_gpu / rate
        return [*self.outliers.get(attempt.key, ()), *impossible(mfu, self.device, share)]


def control_ratio(attempt: AttemptState, controls: Mapping[str, float]) -> float | None:
    """Step time of the control run of its allocation over that of an ok attempt; None where one is unknown.

    Args:
        controls: what `control_times` returns.
    """
    ok, control_s = attempt.ok, controls.get(attempt.allocation or "")
    return control_s / median(ok.step_times_s) if ok and ok.step_times_s and control_s else None


def suspects_of(runs: Mapping[str, Candidate], state: SweepState, device: str) -> dict[AttemptKey, str]:
    """Ok attempts whose measurement is suspect -> the reasons.

    Args:
        runs: run_id -> run.
    """
    suspicion = Suspicion.of(state, device)
    suspects = {key: sentences(of_key) or "" for key, of_key in suspicion.outliers.items()}
    for key, attempt in state.attempts.items():
        run, ok = runs.get(key.run_id), attempt.ok
        if run and ok and ok.step_times_s:
            rate = run.tokens_per_s_per_gpu(ok)
            numbers = run.mfu(rate), run.shape, run.spec.workload.seq_len, rate, run.spec.kernel.precision
            doubts = suspicion.doubts(attempt, *numbers)
            if reason := sentences(doubts):
                suspects[key] = reason
    return suspects


def standings_of(
    runs: Iterable[Candidate], state: SweepState, device: str, suspects: Suspects | None = None
) -> dict[CellKey, list[Standing]]:
    """CellKey -> the standings of its runs that have been tried, the best first, by tokens/s/GPU.

    Args:
        state: what `with_loss_outliers` returns.
        suspects: what `suspects_of` returns, if it is known.
    """
    by_id = {run.run_id: run for run in runs}
    suspects = suspects_of(by_id, state, device) if suspects is None else suspects
    controls, representative = control_times(state), _environments(state)
    repeats = []
    for attempt in final_attempts(state).values():
        if run := by_id.get(attempt.key.run_id):
            result = attempt.result
            timed = result if result and result.step_times_s else None
            allocation = state.allocations.get(attempt.allocation or "")
            repeats.append(
                Repeat(
                    run_id=run.run_id, cell=run.cell, environment=representative.get(str(result.env_id)) if result else None,
                    allocation=attempt.allocation, control=allocation.control if allocation else None,
                    status=result.status if result else None, stopped=result.stopped if result else None,
                    suspect=suspects.get(attempt.key), rate=run.tokens_per_s_per_gpu(timed) if timed else None,
                    control_ratio=control_ratio(attempt, controls), ci95_rel=ci95_rel(timed.step_times_s) if timed else None,
                )
            )  # fmt: skip
    cells: dict[CellKey, list[Standing]] = standings(repeats)  # type: ignore[assignment]
    return cells


def best_of_cells(
    runs: Iterable[Candidate], state: SweepState, device: str, suspects: Suspects | None = None
) -> dict[CellKey, Standing]:
    """CellKey -> its best run so far, sorted by cell; the arguments are those of `standings_of`."""
    ranked = standings_of(runs, state, device, suspects)
    return {cell: of_cell[0] for cell, of_cell in sorted(ranked.items()) if of_cell[0].best}


def measured_rates(runs: Iterable[Candidate], state: SweepState, device: str) -> dict[str, float | None]:
    """run_id of each run that was ok -> its tokens/s/GPU in its best environment; None where it may not win its cell."""
    rates: dict[str, float | None] = {}
    for standing in chain(*standings_of(runs, state, device).values()):
        if standing.outcome == Status.OK:
            rates.setdefault(standing.run_id, standing.rate if standing.may_win else None)
    return rates


def _environments(state: SweepState) -> dict[str, str]:
    """env_id -> the env_id that stands for its environment, of all ok attempts."""
    oks = [ok for attempt in state.attempts.values() if (ok := attempt.ok) and ok.env_id]
    env_ids = {str(ok.env_id) for ok in oks}
    if len(env_ids) < 2:
        return {env_id: env_id for env_id in env_ids}
    return same_environments((ok.environment, str(ok.env_id), ok.driver_version or "") for ok in oks)[0]
