"""Makes the standings of a sweep from its state: which run of each cell is the best so far."""

from collections.abc import Iterable, Mapping
from itertools import chain
from statistics import median

from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.standing import Repeat, Standing, same_environments, standings
from ultrabench.step_time import ci95_rel
from ultrabench.store.state import AttemptState, SweepState, final_attempts
from ultrabench.sweep.plan import Candidate, CellKey
from ultrabench.sweep.running.outliers import control_times, impossible, suspect_attempts


def doubt(suspects: Mapping[AttemptKey, str], key: AttemptKey, mfu: float | None, device: str) -> str | None:
    """Why the measurement of an ok attempt is in doubt; None if it is not.

    Args:
        suspects: what `suspect_attempts` returns.
        mfu: a fraction; None where it is unknown.
    """
    return "; ".join(filter(None, (suspects.get(key), impossible(mfu, device)))) or None


def control_ratio(attempt: AttemptState, controls: Mapping[str, float]) -> float | None:
    """Step time of the control run of its allocation over that of an ok attempt; None where one is unknown.

    Args:
        controls: what `control_times` returns.
    """
    ok, control_s = attempt.ok, controls.get(attempt.allocation or "")
    return control_s / median(ok.step_times_s) if ok and ok.step_times_s and control_s else None


def doubts_of(runs: Mapping[str, Candidate], state: SweepState, device: str) -> dict[AttemptKey, str]:
    """Ok attempts whose measurement is in doubt -> the reasons.

    Args:
        runs: run_id -> run.
    """
    suspects = suspect_attempts(state, device=device)
    doubts = dict(suspects)
    for key, attempt in state.attempts.items():
        run, ok = runs.get(key.run_id), attempt.ok
        if run and ok and ok.step_times_s:
            mfu = run.mfu(run.tokens_per_s_per_gpu(ok))
            if reason := doubt(suspects, key, mfu, device):
                doubts[key] = reason
    return doubts


def standings_of(
    runs: Iterable[Candidate], state: SweepState, device: str, doubts: Mapping[AttemptKey, str] | None = None
) -> dict[CellKey, list[Standing]]:
    """CellKey -> the standings of its runs that have been tried, the best first, by tokens/s/GPU.

    Args:
        state: what `with_loss_outliers` returns.
        doubts: what `doubts_of` returns, if it is known.
    """
    by_id = {run.run_id: run for run in runs}
    doubts = doubts_of(by_id, state, device) if doubts is None else doubts
    controls, same = control_times(state), _environments(state)
    repeats = []
    for attempt in final_attempts(state).values():
        if run := by_id.get(attempt.key.run_id):
            result = attempt.result
            timed = result if result and result.step_times_s else None
            allocation = state.allocations.get(attempt.allocation or "")
            repeats.append(
                Repeat(
                    run_id=run.run_id, cell=run.cell, environment=same.get(str(result.env_id)) if result else None,
                    allocation=attempt.allocation, control=allocation.control if allocation else None,
                    status=result.status if result else None, stopped=result.stopped if result else None,
                    doubt=doubts.get(attempt.key), rate=run.tokens_per_s_per_gpu(timed) if timed else None,
                    control_ratio=control_ratio(attempt, controls), ci95_rel=ci95_rel(timed.step_times_s) if timed else None,
                )
            )  # fmt: skip
    cells: dict[CellKey, list[Standing]] = standings(repeats)  # type: ignore[assignment]
    return cells


def measured_rates(runs: Iterable[Candidate], state: SweepState, device: str) -> dict[str, float | None]:
    """run_id of each run that was ok -> its tokens/s/GPU in its best environment; None where it may not win its cell."""
    rates: dict[str, float | None] = {}
    for standing in chain(*standings_of(runs, state, device).values()):
        if standing.outcome == Status.OK:
            wins = standing.interval is not None and standing.doubts is None
            rates.setdefault(standing.run_id, standing.rate if wins else None)
    return rates


def _environments(state: SweepState) -> dict[str, str]:
    """env_id -> the env_id that stands for its environment, of all ok attempts."""
    oks: list[RunResult] = [ok for attempt in state.attempts.values() if (ok := attempt.ok)]
    seen = ((ok.environment, ok.env_id, ok.driver_version or "") for ok in oks if ok.env_id)
    return same_environments(seen)[0]
