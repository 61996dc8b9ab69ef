"""Chooses the runs that would make the predictions of a profile most certain if they were measured next."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ultrabench.analysis.results.cases import Case
from ultrabench.analysis.studies.predictions.fit import (
    LOG_STEP,
    RUN_ERROR,
    FittedTime,
    Place,
    free_names,
    log_errors,
    sds_of,
    value_at,
    with_values,
)
from ultrabench.run import RunSpec
from ultrabench.sweep.best_runs import advised_groups, cell_search
from ultrabench.sweep.candidate import Candidate, CellKey
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import planned_cells
from ultrabench.sweep.predict.predict import Predictor
from ultrabench.sweep.predict.profile import Profile
from ultrabench.sweep.predict.search import mechanisms

NUM_RUNS = 3
"""Number of runs that are chosen."""
MAX_GROUPS = 16
"""Number of groups of similar layouts of a cell, the fastest by prediction, among which runs are chosen."""
NOTABLE_SHARE = 0.3
"""Share of what a run teaches of its first subject, from which a second subject is named."""
MIN_VARIANCE = 1e-12
"""Variance of the logarithm of a step time below which nothing is left to learn."""
SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "rate of matrix products": ("gemm_",),
    "rate of the products of experts": ("expert_",),
    "rate and casts of fp8": ("fp8_",),
    "rate of attention": ("attention_", "score_"),
    "exposed tp calls": ("tp_calls", "tp_end_calls", "tp_recompute_calls"),
    "rate and latency of tp and cp calls": ("tp_",),
    "pipeline exchanges": ("pp_",),
    "exposed dp reductions": ("dp_", "zero_", "gradient_"),
    "launches by the host": (
        "layer_launch", "micro_batch_launch", "slow_layer", "compiled_launch", "selective_launch", "sparse_launch",
        "smooth_power",
    ),
    "all-to-alls of experts": ("ep_", "routed_", "router_"),
    "memory traffic": ("hidden_", "ffn_", "logit_", "head_norm_", "hbm_", "compiled_traffic", "accumulate_"),
    "recomputation": ("recompute_",),
    "optimizer": ("optimizer_", "clip_"),
    "allocator": ("allocator_",),
    "waiting ranks": ("wait_",),
    "time beside all parts": ("rest_",),
}  # fmt: skip
"""What constants of the step time are about -> how their names begin."""


class NextRun(NamedTuple):
    """A run to measure next."""

    run: Candidate
    teaches: tuple[str, ...]
    """The subjects of SUBJECTS about which it says most, the first one most."""
    variance_left: float
    """Variance of the logarithms of predicted step times, over all candidates, after this run and those before it, as a
    share of the variance before them."""


def subject_of(constant: str) -> str:
    """What a constant of the step time is about.

    Raises:
        LookupError: SUBJECTS has no beginning of its name.
    """
    for subject, prefixes in SUBJECTS.items():
        if constant.startswith(prefixes):
            return subject
    raise LookupError(f"no subject of {constant}")


def candidates_of(config: SweepConfig) -> dict[CellKey, list[Candidate]]:
    """Cell of a sweep -> the fastest run, by prediction, of each of its best groups of similar layouts."""
    return {
        cell: [group[0] for group in advised_groups(config, shape, cell, MAX_GROUPS)[0]]
        for shape, cell in planned_cells(config)
    }


def next_runs(
    cases: Sequence[Case], profile: Profile, level_sd: float, config: SweepConfig, count: int = NUM_RUNS
) -> list[NextRun]:
    """The runs of a sweep that reduce the variance of the predicted step times of its cells most, one after the other.

    The constants of `profile` are normally distributed around their values, and the runs of `cases` narrow the
    distribution; predictions are linear in their logarithms. The runs differ in mechanisms where enough runs do.

    Args:
        cases: the runs with step times that were measured so far.
        profile: the profile that is fitted to them.
        level_sd: standard deviation of constants that hardly decide the order of layouts, before any run.
        config: the sweep; its layouts are the candidates, and its cells those whose predictions count.
    """
    shape_by_cell = {cell: shape for shape, cell in planned_cells(config)}
    candidates, sensitivities = list[Candidate](), list[np.ndarray]()
    constants = FittedTime(profile.time, profile.flags)
    runs_by_cell = {cell: runs for cell, runs in candidates_of(config).items() if runs}
    specs = [run.spec for runs in runs_by_cell.values() for run in runs]
    names = free_names([*(case.run.spec for case in cases), *specs], profile.time)
    sds = sds_of([("", "", name) for name in names], level_sd)
    for cell, runs in runs_by_cell.items():
        predictor = cell_search(config, shape_by_cell[cell], cell).cell_plan.predictor
        candidates += runs
        sensitivities.append(_sensitivities(_log_times(predictor, profile, runs), constants, sds))
    if not candidates:
        return []
    measured = _sensitivities(lambda at: [-error for error in log_errors(cases, at)], constants, sds)
    covariance = _posterior(np.eye(len(sds)), measured)
    return _chosen(
        candidates, np.concatenate(sensitivities), covariance, [*sds], _measured_keys(cases), count
    )


def _chosen(
    candidates: Sequence[Candidate],
    sensitivities: np.ndarray,
    covariance: np.ndarray,
    places: Sequence[Place],
    measured_keys: set[object],
    count: int,
) -> list[NextRun]:
    """The runs that `next_runs` returns.

    Args:
        sensitivities: change of the logarithm of each predicted step time by one standard deviation of each constant.
        covariance: that of the constants, in these standard deviations.
        measured_keys: the runs that were measured, which are not chosen.
    """
    chosen, used_mechanisms = list[NextRun](), set[object]()
    subjects = [subject_of(name) for _, _, name in places]
    first_variance = _mean_variance(sensitivities, covariance)
    open_indices = [n for n, run in enumerate(candidates) if _key(run.spec) not in measured_keys]
    while open_indices and len(chosen) < count:
        new_indices = [n for n in open_indices if _mechanism(candidates[n]) not in used_mechanisms]
        covariances = sensitivities @ covariance @ sensitivities.T
        reductions = (covariances**2).mean(axis=0) / (np.diag(covariances) + RUN_ERROR**2)
        index = max(new_indices or open_indices, key=lambda n: (reductions[n], -n))
        narrower = _posterior(covariance, sensitivities[[index]])
        learned = (np.diag(covariance) - np.diag(narrower)) * (sensitivities**2).mean(axis=0)
        variance_left = _mean_variance(sensitivities, narrower) / max(first_variance, MIN_VARIANCE)
        chosen.append(NextRun(candidates[index], _main_subjects(subjects, learned), variance_left))
        used_mechanisms.add(_mechanism(candidates[index]))
        open_indices.remove(index)
        covariance = narrower
    return chosen


def _mechanism(run: Candidate) -> object:
    """What runs share that teach about the same parts of a step."""
    return mechanisms(run.layout), tuple(sorted(run.options.items()))


def _key(spec: RunSpec) -> object:
    """What two measurements of the same run share, also where their kernels differ in version."""
    return spec.shape.name, spec.layout, spec.workload.seq_len, spec.nodes, spec.kernel.precision


def _measured_keys(cases: Sequence[Case]) -> set[object]:
    return {_key(case.run.spec) for case in cases}


def _main_subjects(subjects: Sequence[str], learned: np.ndarray) -> tuple[str, ...]:
    """The one or two subjects of which most is learned."""
    by_subject = dict.fromkeys(subjects, 0.0)
    for subject, amount in zip(subjects, learned, strict=True):
        by_subject[subject] += float(amount)
    first, *others = sorted(by_subject, key=lambda subject: -by_subject[subject])
    return first, *(s for s in others[:1] if by_subject[s] > NOTABLE_SHARE * by_subject[first])


def _mean_variance(sensitivities: np.ndarray, covariance: np.ndarray) -> float:
    """Mean variance of the logarithms of predicted step times."""
    return float(np.mean(np.sum(sensitivities @ covariance * sensitivities, axis=1)))


def _posterior(covariance: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """The covariance of the constants after runs with these sensitivities are measured."""
    gains = covariance @ measured.T
    noise = RUN_ERROR**2 * np.eye(len(measured))
    narrower: np.ndarray = covariance - gains @ np.linalg.solve(measured @ gains + noise, gains.T)
    return narrower


def _log_times(
    predictor: Predictor, profile: Profile, runs: Sequence[Candidate]
) -> Callable[[FittedTime], list[float]]:
    """A function that gives the logarithms of the predicted step times of runs of a cell, with any constants."""

    def log_times(constants: FittedTime) -> list[float]:
        changed = replace(predictor, profile=replace(profile, time=constants.time))
        return [math.log(changed.step_time(run.spec, ()).total) for run in runs]

    return log_times


def _sensitivities(
    log_times_at: Callable[[FittedTime], Sequence[float]], constants: FittedTime, sds: Mapping[Place, float]
) -> np.ndarray:
    """Change of the logarithm of each step time by one standard deviation of each constant; a row for each run.

    Constants are lowered, since some are at most 1.
    """
    log_times = np.array(log_times_at(constants))
    columns = []
    for place, sd in sds.items():
        changed = with_values(constants, {place: value_at(constants, place) * math.exp(-LOG_STEP)})
        columns.append((np.array(log_times_at(changed)) - log_times) * sd / -LOG_STEP)
    return np.array(columns).T
