"""Fits the constants of the step time to measured runs, starting from those of another profile."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import quantiles
from typing import Any, TypeVar

import numpy as np

from ultrabench.analysis.results.cases import Case
from ultrabench.record import values_of
from ultrabench.sweep.predict.profile import Quantiles
from ultrabench.sweep.predict.time_constants import TimeConstants

S = TypeVar("S")  # the record of a run
T = TypeVar("T")  # a dataclass of constants

FIXED_NAMES = frozenset({
    "gradient_bytes", "zero_crossings", "tp_calls", "tp_recompute_calls", "dp_bucket_bytes", "hbm_efficiency",
})  # fmt: skip
"""Constants that no fit changes: they follow from the code of a framework, or only scale other constants."""
EXPERT_NAMES = frozenset({"sparse_launch_s", "routed_bytes", "router_bytes"})
"""Constants that only runs of models with experts determine."""
FP8_NAMES = frozenset({"fp8_efficiency", "fp8_cast_bytes", "fp8_launch_s"})
"""Constants that only runs in fp8 determine."""
FEW_RUNS = 15
"""Number of runs below which the fit stays closer to the prior constants, as RIDGE says."""
RIDGE = {True: 0.15, False: 0.25}
"""Whether there are fewer runs than FEW_RUNS -> standard deviation of log(constant / prior)."""
ERROR_SCALE = 0.1
"""Error of a prediction, as a logarithm, from which a run pulls the fit less than in proportion."""
NUM_FOLDS = 5
"""Number of fits of a cross-validation, each of which leaves another part of the runs out."""
SHRINKAGE_RUNS = 30
"""Number of runs at which their quantiles count as much as those of a wider group or of the prior profile."""


def fit_time(cases: Sequence[Case], prior: TimeConstants) -> TimeConstants:
    """The constants that predict these runs best while staying as close to `prior` as the runs allow.

    It minimises sum(soft_l1(log(measured / predicted) / ERROR_SCALE)) + sum((log(constant / prior) / RIDGE)**2),
    where soft_l1(x) = 2 (sqrt(1 + x**2) - 1), so that a run with a broken measurement counts little. Constants
    that are 0 stay 0.
    """
    names = fitted_names(cases, prior)
    ridge = RIDGE[len(cases) < FEW_RUNS]
    return fit_constants(prior, names, lambda constants: log_errors(cases, constants), ERROR_SCALE, ridge)


def fitted_names(cases: Sequence[Case], prior: TimeConstants) -> list[str]:
    """The constants that these runs determine and a fit may change: those above 0 in `prior`."""
    specs = [case.run.spec for case in cases]
    fixed_names = FIXED_NAMES if any(spec.shape.num_experts for spec in specs) else FIXED_NAMES | EXPERT_NAMES
    fixed_names |= frozenset() if any(spec.kernel.precision == "fp8" for spec in specs) else FP8_NAMES
    free_constants = ((name, value) for name, value in values_of(prior).items() if name not in fixed_names)
    return [name for name, value in free_constants if isinstance(value, float) and value > 0]


def log_errors(cases: Sequence[Case], constants: TimeConstants) -> list[float]:
    """log(measured / predicted) of the step time of each case."""
    return [case.log_error(constants) for case in cases]


def fit_constants(
    prior: T, names: Sequence[str], errors_of: Callable[[T], Sequence[float]], scale: float, ridge: float
) -> T:
    """The constants, a dataclass, whose logarithmic errors are smallest near `prior`;
    efficiencies and shares are at most 1.

    Args:
        names: fields of `prior` that may change; they are positive.
        errors_of: returns log(measured / predicted) of each run with these constants.
        scale: error from which a run pulls the fit less than in proportion.
        ridge: standard deviation of log(constant / prior).
    """
    from scipy.optimize import least_squares  # it takes a second to import

    prior_logs = np.log([getattr(prior, name) for name in names])

    def constants_at(logs: np.ndarray) -> T:
        values: dict[str, Any] = {name: math.exp(log) for name, log in zip(names, logs, strict=True)}
        shares = (name for name in names if name.endswith(("_efficiency", "_shared")))
        values |= {name: min(values[name], 1.0) for name in shares}
        if "smooth_power" in values:  # less would be slower than the GPU and its host one after the other
            values["smooth_power"] = max(1.0, values["smooth_power"])
        return replace(prior, **values)  # type: ignore[type-var]

    def residuals(logs: np.ndarray) -> np.ndarray:
        scaled_errors = np.array(errors_of(constants_at(logs))) / scale
        soft_errors = np.sign(scaled_errors) * np.sqrt(2 * (np.sqrt(1 + scaled_errors**2) - 1))
        return np.concatenate([soft_errors, (logs - prior_logs) / ridge])

    return constants_at(least_squares(residuals, prior_logs, max_nfev=10, diff_step=1e-3).x)


def left_out_errors(
    runs: Sequence[S], fit: Callable[[Sequence[S]], T], errors_of: Callable[[Sequence[S], T], Sequence[float]]
) -> list[float]:
    """The errors of runs, each with constants that were fitted without it: every fifth run in turn is left out."""
    errors_left_out = [0.0] * len(runs)
    for fold in range(NUM_FOLDS):
        constants = fit([run for n, run in enumerate(runs) if n % NUM_FOLDS != fold])
        errors_left_out[fold::NUM_FOLDS] = errors_of(runs[fold::NUM_FOLDS], constants)
    return errors_left_out


def intervals(
    cases: Sequence[Case], errors: Sequence[float], prior: Mapping[str, Quantiles] | None = None
) -> dict[str, Quantiles]:
    """Regime -> 10 and 90 % quantiles of log(measured / predicted), mixed with those of all runs.

    Those of a regime with k runs have the weight k / (k + SHRINKAGE_RUNS).

    Args:
        errors: log(measured / predicted) of the step time of each case.
        prior: the intervals of another profile; those of all runs are mixed with them first, in the same way.
    """
    quantiles_of_all = _quantiles(errors)
    prior = prior or {"all": quantiles_of_all}
    interval_by_regime = dict[str, Quantiles]()
    for regime in ("all", *sorted({*prior, *(case.regime for case in cases)} - {"all"})):
        regime_errors = [error for case, error in zip(cases, errors, strict=True) if case.regime == regime]
        wider = _mixed(quantiles_of_all, prior.get(regime, prior["all"]), len(errors))
        interval_by_regime[regime] = wider
        if regime_errors:
            interval_by_regime[regime] = _mixed(_quantiles(regime_errors), wider, len(regime_errors))
    return interval_by_regime


def _mixed(narrower: Quantiles, wider: Quantiles, num_runs: int) -> Quantiles:
    """The mean of the quantiles of `num_runs` runs and those of a wider group, which weighs as SHRINKAGE_RUNS runs."""
    weight = num_runs / (num_runs + SHRINKAGE_RUNS)
    return Quantiles(*(weight * a + (1 - weight) * b for a, b in zip(narrower, wider, strict=True)))


def _quantiles(errors: Sequence[float]) -> Quantiles:
    """The 10 and 90 % quantiles, on both sides of 0; those of a single error are the error and 0."""
    deciles = quantiles(errors, n=10, method="inclusive") if len(errors) > 1 else list(errors)
    return Quantiles(min(0.0, deciles[0]), max(0.0, deciles[-1]))
