"""Fits the constants of the step time to measured runs, starting from those of another profile."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import quantiles
from typing import NamedTuple, TypeVar

import numpy as np

from ultrabench.analysis.results.cases import Case
from ultrabench.hardware import SCALED_PRECISIONS
from ultrabench.record import values_of
from ultrabench.sweep.predict.profile import Quantiles
from ultrabench.sweep.predict.time_constants import FlagConstants, TimeConstants, with_changes

S = TypeVar("S")  # the record of a run
T = TypeVar("T")  # a dataclass of constants
K = TypeVar("K")  # what names a constant

FIXED_NAMES = frozenset({
    "gradient_bytes", "zero_crossings", "dp_bucket_bytes", "hbm_efficiency",
})  # fmt: skip
"""Constants that no fit changes: they follow from the code of a framework, or only scale other constants."""
EXPERT_NAMES = frozenset({"sparse_launch_s", "routed_bytes", "router_bytes"})
"""Constants that only runs of models with experts determine."""
FP8_NAMES = frozenset({"fp8_efficiency", "fp8_cast_bytes", "fp8_launch_s"})
"""Constants that only runs in fp8 determine."""
ORDER_NAMES = frozenset({
    "gemm_m0", "gemm_n0", "gemm_k0", "layer_launch_s", "layer_launch_tp_s", "micro_batch_launch_s",
    "slow_layer_launch_s", "slow_layer_launch_tp_s", "sparse_launch_s", "tp_calls", "tp_recompute_calls",
    "tp_call_s", "pp_call_s", "dp_overlap", "zero_overlap", "dp_exposed", "ep_node_copies", "ep_overlap",
})  # fmt: skip
"""Constants that differ most between programs and decide which layout is faster: the sizes at which products are
slow, launches, exposed collectives and their overlap, and dispatched tokens. Priors say little about them."""
ORDER_RIDGE_FACTOR = 8.0
"""How many times as far as other constants those of ORDER_NAMES may move."""
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


class FittedTime(NamedTuple):
    """Constants of the step time, and those that values of knobs change."""

    time: TimeConstants
    flags: FlagConstants = {}  # noqa: RUF012
    """As `Profile.flags`."""


def fit_time(cases: Sequence[Case], prior: FittedTime) -> FittedTime:
    """The constants that predict these runs best while staying as close to `prior` as the runs allow.

    It minimises sum(soft_l1(log(measured / predicted) / ERROR_SCALE)) + sum((log(constant / prior) / RIDGE)**2),
    with ORDER_RIDGE_FACTOR times RIDGE for the constants of ORDER_NAMES, where soft_l1(x) = 2 (sqrt(1 + x**2) - 1), so
    that a run with a broken measurement counts little. Constants that are 0 stay 0. Those that a value of a knob
    changes are fitted where some runs have this value, and some do not.
    """
    names, ridge = fitted_names(cases, prior.time), RIDGE[len(cases) < FEW_RUNS]
    places = [place for place, _ in fitted_flags(cases, prior.flags)]
    prior_values = {("", "", name): getattr(prior.time, name) for name in names}
    prior_values |= {place: prior.flags[place[0]][place[1]][place[2]] for place in places}

    def constants_at(values: Mapping[tuple[str, str, str], float]) -> FittedTime:
        flags = {
            knob: {value: {**constants} for value, constants in by_value.items()}
            for knob, by_value in prior.flags.items()
        }
        for knob, value, name in places:
            flags[knob][value][name] = values[knob, value, name]
        changes = tuple((name, values["", "", name]) for name in names)
        return FittedTime(with_changes(prior.time, changes), flags)

    def errors_of(values: Mapping[tuple[str, str, str], float]) -> Sequence[float]:
        return log_errors(cases, constants_at(values))

    ridges = {place: ridge * (ORDER_RIDGE_FACTOR if place[2] in ORDER_NAMES else 1) for place in prior_values}
    return constants_at(
        fit_values(prior_values, errors_of, ERROR_SCALE, ridges, name_of=lambda place: place[2])
    )


def fitted_flags(cases: Sequence[Case], flags: FlagConstants) -> list[tuple[tuple[str, str, str], int]]:
    """Knob, value and constant that these runs determine and a fit may change -> the number of runs with this value.

    Some runs have the value and some do not; the constant is above 0.
    """
    places = list[tuple[tuple[str, str, str], int]]()
    for knob, constants_by_value in flags.items():
        values = [str(case.run.spec.flag_values.get(knob)) for case in cases]
        for value, constants in constants_by_value.items():
            num_runs = values.count(value)
            if 0 < num_runs < len(cases):
                places += [
                    ((knob, value, name), num_runs) for name, constant in constants.items() if constant > 0
                ]
    return places


def fitted_names(cases: Sequence[Case], prior: TimeConstants) -> list[str]:
    """The constants that these runs determine and a fit may change: those above 0 in `prior`."""
    specs = [case.run.spec for case in cases]
    fixed_names = FIXED_NAMES if any(spec.shape.num_experts for spec in specs) else FIXED_NAMES | EXPERT_NAMES
    fixed_names |= (
        frozenset() if any(spec.kernel.precision in SCALED_PRECISIONS for spec in specs) else FP8_NAMES
    )
    free_constants = ((name, value) for name, value in values_of(prior).items() if name not in fixed_names)
    return [name for name, value in free_constants if isinstance(value, float) and value > 0]


def log_errors(cases: Sequence[Case], constants: FittedTime) -> list[float]:
    """log(measured / predicted) of the step time of each case."""
    return [case.log_error(*constants) for case in cases]


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

    def constants_at(values: Mapping[str, float]) -> T:
        return replace(prior, **values)  # type: ignore[type-var]

    prior_values = {name: getattr(prior, name) for name in names}
    return constants_at(
        fit_values(prior_values, lambda values: errors_of(constants_at(values)), scale, ridge, name_of=str)
    )


def fit_values(
    prior: Mapping[K, float],
    errors_of: Callable[[Mapping[K, float]], Sequence[float]],
    scale: float,
    ridge: float | Mapping[K, float],
    *,
    name_of: Callable[[K], str],
) -> dict[K, float]:
    """The values near `prior` whose logarithmic errors are smallest; `fit_constants` describes the arguments.

    Args:
        ridge: standard deviation of log(constant / prior), of all keys or of each one.
        name_of: the name of the constant of a key, whose end says which values it may have.
    """
    from scipy.optimize import least_squares  # it takes a second to import

    prior_logs = np.log([*prior.values()])
    ridges = np.array([ridge[key] if isinstance(ridge, Mapping) else ridge for key in prior])

    def values_at(logs: np.ndarray) -> dict[K, float]:
        values = {key: math.exp(log) for key, log in zip(prior, logs, strict=True)}
        for key in values:
            if name_of(key).endswith(("_efficiency", "_shared")):
                values[key] = min(values[key], 1.0)
            if (
                name_of(key) == "smooth_power"
            ):  # less would be slower than the GPU and its host one after the other
                values[key] = max(1.0, values[key])
        return values

    def residuals(logs: np.ndarray) -> np.ndarray:
        scaled_errors = np.array(errors_of(values_at(logs))) / scale
        soft_errors = np.sign(scaled_errors) * np.sqrt(2 * (np.sqrt(1 + scaled_errors**2) - 1))
        return np.concatenate([soft_errors, (logs - prior_logs) / ridges])

    return values_at(least_squares(residuals, prior_logs, max_nfev=10, diff_step=1e-3).x)


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
