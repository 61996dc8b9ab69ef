"""Fits the constants of the step time to measured runs, starting from those of another profile."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import quantiles
from typing import NamedTuple, TypeVar

import numpy as np

from ultrabench.analysis.results.cases import Case
from ultrabench.hardware import SCALED_PRECISIONS
from ultrabench.record import field_types, values_of
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.profile import Quantiles
from ultrabench.sweep.predict.time_constants import FlagConstants, Share, TimeConstants, with_changes

S = TypeVar("S")  # the record of a run
T = TypeVar("T")  # a dataclass of constants
K = TypeVar("K")  # what names a constant

Place = tuple[str, str, str]
"""Knob, its value and a constant that this value changes; the first two are empty for a constant of `time`."""

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
LEVEL_SD = 0.15
"""Standard deviation of log(constant / prior) of the other constants of the step time, where the errors of the profile
add nothing to it."""
ORDER_SD = 2.4
"""Standard deviation of log(constant / prior) of the constants of ORDER_NAMES."""
RUN_ERROR = 0.05
"""Error of the step time of a run, as a logarithm, that no constants explain: it pulls a fit of the step time less than
in proportion from there on."""
ERROR_SCALE = 0.1
"""Error of the step time of a run, as a logarithm, from which it pulls a fit of a few constants to many runs of several
programs less than in proportion."""
MIN_EFFECT = 0.002
"""Change of the logarithm of a step time below which a constant does not matter for a run."""
SHARE_NAMES = frozenset(name for name, hint in field_types(TimeConstants).items() if hint == Share)
"""Constants that are at most 1."""
MAX_LEVERAGE = 0.999
"""Largest part of its own fitted value that a run may decide, where its error without it is estimated."""
LOG_STEP = 1e-3
"""Change of the logarithm of a constant with which its effect on errors is computed."""
TIME_TOLERANCE = 1e-3
"""Relative change of the loss below which a fit of the step time ends; more steps change predictions by less than
a measurement."""
NUM_FOLDS = 5
"""Number of fits of a cross-validation, each of which leaves another part of the runs out."""
SHRINKAGE_RUNS = 30
"""Number of runs at which their quantiles count as much as those of a wider group or of the prior profile."""


class FittedTime(NamedTuple):
    """Constants of the step time, and those that values of knobs change."""

    time: TimeConstants
    flags: FlagConstants = {}  # noqa: RUF012
    """As `Profile.flags`."""


class TimeFit(NamedTuple):
    """Constants of the step time that are fitted to runs."""

    constants: FittedTime
    left_out_errors: list[float]
    """log(measured / predicted) of each run, with constants that are fitted without it."""


def prior_sds(
    cases: Sequence[Case], prior: FittedTime, level_sd: float = LEVEL_SD, order_sd: float = ORDER_SD
) -> dict[Place, float]:
    """The constants that these runs determine and a fit may change, each with the standard deviation of
    log(constant / prior).

    One standard deviation of each changes a step time by MIN_EFFECT or more. Constants that are 0 are not among them,
    and those that a value of a knob changes only where some runs have this value, and some do not.
    """
    places = [("", "", name) for name in fitted_names(cases, prior.time)]
    places += [place for place, _ in fitted_flags(cases, prior.flags)]
    prior_errors = np.array(log_errors(cases, prior))

    def has_effect(place: Place, sd: float) -> bool:
        is_share = place[2] in SHARE_NAMES
        changed = {place: value_at(prior, place) * math.exp(-sd if is_share else sd)}
        effects = np.array(log_errors(cases, with_values(prior, changed))) - prior_errors
        return bool(np.abs(effects).max() >= MIN_EFFECT)

    sd_by_place = sds_of(places, level_sd, order_sd)
    return {place: sd for place, sd in sd_by_place.items() if has_effect(place, sd)}


def sds_of(places: Sequence[Place], level_sd: float, order_sd: float = ORDER_SD) -> dict[Place, float]:
    """The constants of which log(constant / prior) has a standard deviation above 0, with it."""
    sd_by_place = {place: order_sd if place[2] in ORDER_NAMES else level_sd for place in places}
    return {place: sd for place, sd in sd_by_place.items() if sd}


def value_at(constants: FittedTime, place: Place) -> float:
    """The value of a constant."""
    knob, value, name = place
    number: float = constants.flags[knob][value][name] if knob else getattr(constants.time, name)
    return number


def with_values(constants: FittedTime, values: Mapping[Place, float]) -> FittedTime:
    """The constants, of which these have other values."""
    flags = {
        knob: {value: {**of_value} for value, of_value in by_value.items()}
        for knob, by_value in constants.flags.items()
    }
    for (knob, knob_value, name), number in values.items():
        if knob:
            flags[knob][knob_value][name] = number
    changes = tuple((name, number) for (knob, _, name), number in values.items() if not knob)
    return FittedTime(with_changes(constants.time, changes), flags)


def fit_time(
    cases: Sequence[Case], prior: FittedTime, level_sd: float = LEVEL_SD, order_sd: float = ORDER_SD
) -> TimeFit:
    """The constants that predict these runs best while staying as close to `prior` as the runs allow.

    It minimises sum(soft_l1(log(measured / predicted) / RUN_ERROR)) + sum((log(constant / prior) / sd)**2), where
    soft_l1(x) = 2 (sqrt(1 + x**2) - 1), so that a run with a broken measurement counts little.

    Args:
        level_sd: the sd of constants that hardly change which layout is faster; 0 keeps them.
        order_sd: the same of the constants of ORDER_NAMES.
    """
    sds = prior_sds(cases, prior, level_sd, order_sd)
    values, left_out_errors = fit_with_errors(
        {place: value_at(prior, place) for place in sds},
        lambda values: log_errors(cases, with_values(prior, values)),
        RUN_ERROR,
        sds,
        name_of=lambda place: place[2],
        tolerance=TIME_TOLERANCE,
    )
    return TimeFit(with_values(prior, values), left_out_errors)


def soft_loss(errors: Sequence[float]) -> float:
    """The loss that `fit_time` minimises, of these errors alone."""
    return float(np.sum(_soft(np.array(errors) / RUN_ERROR) ** 2))


def _soft(scaled_errors: np.ndarray) -> np.ndarray:
    """Numbers whose squares are the soft-L1 losses of errors, which `_from_soft` turns back."""
    soft_errors: np.ndarray = np.sign(scaled_errors) * np.sqrt(2 * (np.sqrt(1 + scaled_errors**2) - 1))
    return soft_errors


def _from_soft(soft_errors: np.ndarray) -> np.ndarray:
    scaled_errors: np.ndarray = np.sign(soft_errors) * np.sqrt((soft_errors**2 / 2 + 1) ** 2 - 1)
    return scaled_errors


def fitted_flags(cases: Sequence[Case], flags: FlagConstants) -> list[tuple[Place, int]]:
    """Knob, value and constant that these runs determine and a fit may change -> the number of runs with this value.

    Some runs have the value and some do not; the constant is above 0.
    """
    places = list[tuple[Place, int]]()
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
    return free_names([case.run.spec for case in cases], prior)


def free_names(specs: Sequence[RunSpec], prior: TimeConstants) -> list[str]:
    """The constants above 0 in `prior` that step times of such runs may depend on and that no code decides."""
    fixed_names = FIXED_NAMES if any(spec.shape.num_experts for spec in specs) else FIXED_NAMES | EXPERT_NAMES
    if not any(spec.kernel.precision in SCALED_PRECISIONS for spec in specs):
        fixed_names |= FP8_NAMES
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
    """The values near `prior` whose logarithmic errors are smallest; `fit_with_errors` describes the arguments."""
    return fit_with_errors(prior, errors_of, scale, ridge, name_of=name_of)[0]


def fit_with_errors(
    prior: Mapping[K, float],
    errors_of: Callable[[Mapping[K, float]], Sequence[float]],
    scale: float,
    ridge: float | Mapping[K, float],
    *,
    name_of: Callable[[K], str],
    tolerance: float = 1e-8,
) -> tuple[dict[K, float], list[float]]:
    """The values near `prior` whose logarithmic errors are smallest, and the error of each run with values that are
    fitted without it.

    A run whose part of its own fitted value is h has the error e / (1 - h) without it (leave-one-out by leverage; exact
    where predictions are linear in the logarithms of the constants).

    Args:
        errors_of: returns log(measured / predicted) of each run with these values.
        scale: error from which a run pulls the fit less than in proportion.
        ridge: standard deviation of log(constant / prior), of all keys or of each one.
        name_of: the name of the constant of a key, which says what values it may have.
        tolerance: relative change of the loss at which the fit ends.
    """
    from scipy.optimize import least_squares  # it takes a second to import

    prior_logs = np.log([*prior.values()])
    ridges = np.array([ridge[key] if isinstance(ridge, Mapping) else ridge for key in prior])

    def values_at(logs: np.ndarray) -> dict[K, float]:
        values = {key: math.exp(log) for key, log in zip(prior, logs, strict=True)}
        for key in values:
            if name_of(key) in SHARE_NAMES:
                values[key] = min(values[key], 1.0)
            if (
                name_of(key) == "smooth_power"
            ):  # less would be slower than the GPU and its host one after the other
                values[key] = max(1.0, values[key])
        return values

    def soft_errors(logs: np.ndarray) -> np.ndarray:
        return _soft(np.array(errors_of(values_at(logs))) / scale)

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([soft_errors(logs), (logs - prior_logs) / ridges])

    def gradients_of(logs: np.ndarray) -> np.ndarray:
        errors = soft_errors(logs)
        columns = [(soft_errors(logs + step) - errors) / step.sum() for step in steps]
        return np.vstack([np.array(columns).T, np.diag(1 / ridges)])

    # Shares are at most 1, so their effect is seen below their values.
    steps = np.diag([-LOG_STEP if name_of(key) in SHARE_NAMES else LOG_STEP for key in prior])
    fit = least_squares(residuals, prior_logs, gradients_of, max_nfev=10, ftol=tolerance)
    num_runs = len(fit.fun) - len(prior)
    gradients = fit.jac[:num_runs]
    leverages = np.sum(gradients @ np.linalg.inv(fit.jac.T @ fit.jac) * gradients, axis=1)
    left_out = _from_soft(fit.fun[:num_runs] / (1 - np.minimum(leverages, MAX_LEVERAGE)))
    return values_at(fit.x), (scale * left_out).tolist()


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
