"""Estimates from measured runs how far predictions are off, by program, GPU and other factors.

docs/design/prediction.md, Intervals, explains the estimate and how it is checked.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ultrabench.analysis.results.cases import Case
from ultrabench.sweep.predict.profile import Profile, Quantiles
from ultrabench.sweep.predict.profile_errors import FACTORS, SD_80, LayoutKind, ProfileErrors, kind_of
from ultrabench.variant import FLAGS

PROGRAM = "program"
"""The factor that a profile stands for."""
BIAS_FACTORS = (PROGRAM, "gpu", "experts", "precision")
"""Factors whose values have a mean error of their own: those that all layouts of a cell share."""
MAX_LOG_ERROR = 1.0
"""Larger errors count as this one, so that a single broken run does not set the spread of its kind."""
SETTING_CORRELATION = 0.5
"""Correlation of the errors of runs in one setting: n of them count as n / (1 + (n - 1) / 2), so as two at most."""
BIAS_SHRINKAGE = 3.0
"""Number of independent runs at which the mean of a value counts as much as the one that it is shrunk to."""
SPREAD_SHRINKAGE = 4.0
"""Number of independent runs at which the spread of a value counts as much as the one that it is shrunk to."""
MIN_SPREAD = 0.03
"""Standard deviation below which no program's errors are."""
NUM_ITERATIONS = 12
"""Number of rounds in which each value is estimated, given those of the others."""
LEFT_OUT_COVERAGE = 0.82
"""Share of left-out runs that intervals contain: a little more than they promise."""
MIN_COUNTED = 10
"""Fewest runs with a value of a factor for which the intervals of this value are checked."""
LEFT_OUT: Mapping[str, Callable[["ErrorRow"], Hashable]] = {
    "setting": lambda row: row.setting,
    "source": lambda row: row.source,
}
"""What a cross-validation leaves out -> the group of a run."""


class ErrorRow(NamedTuple):
    """The error of a prediction, and the groups of its run."""

    case: Case
    profile: str
    """Name of the profile that predicted it."""
    setting: tuple[str, str, int]
    """Model, GPU and number of GPUs."""
    source: str
    kind: LayoutKind
    log_error: float
    """log(measured / predicted) of the step time."""


def case_kind(case: Case) -> LayoutKind:
    """The kind of a measured run."""
    return kind_of(case.run.spec, case.hardware.gpu_at_limit, case.links.nvlink_gpus)


def error_row(case: Case, profile: Profile) -> ErrorRow:
    """The error of a run with a step time."""
    spec, hardware = case.run.spec, case.hardware
    return ErrorRow(
        case=case,
        profile=profile.name,
        setting=(spec.shape.name, hardware.gpu_at_limit, spec.layout.world_size),
        source=str(case.run.source),
        kind=case_kind(case),
        log_error=case.log_error(profile.time, profile.flags),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What each value of each factor adds to the error of a prediction."""

    variance: float
    """Variance of log(measured / predicted) that all runs have."""
    means: Mapping[tuple[str, str], float]
    """(factor, value) -> the mean error that it adds."""
    variances: Mapping[tuple[str, str], float]
    """(factor, value) -> the variance that it adds."""

    def over_values(self, factor: str) -> float:
        """The standard deviation that a value adds of which there is no run: the largest spread of a value, and how
        much the means differ; no less than what all runs have."""
        variances = [variance for (name, _), variance in self.variances.items() if name == factor]
        means = [mean for (name, _), mean in self.means.items() if name == factor]
        variance = max(variances, default=0.0) + sum(mean**2 for mean in means) / max(1, len(means))
        return math.sqrt(max(variance, self.variance))


def _weights(rows: Sequence[ErrorRow]) -> np.ndarray:
    """The weight of each run: those of one setting count as SETTING_CORRELATION says."""
    num_in_setting = Counter(row.setting for row in rows)
    return np.array([1 / (1 + SETTING_CORRELATION * (num_in_setting[row.setting] - 1)) for row in rows])


def fit_effects(rows: Sequence[ErrorRow], prior: Effects | None = None) -> Effects:
    """The effects that explain the errors of these runs.

    The mean of a value is the weighted mean of what the other values leave of its runs' errors, shrunk to that of
    `prior`, or to 0; its variance is the same of squared errors, shrunk to that of `prior`, or of all values of its
    factor. Both are repeated in turn. Runs of one setting count as SETTING_CORRELATION says.
    """
    errors = np.clip([row.log_error for row in rows], -MAX_LOG_ERROR, MAX_LOG_ERROR)
    weights = _weights(rows)
    value_by_factor = {PROGRAM: [row.profile for row in rows]}
    value_by_factor |= {factor: [getattr(row.kind, factor) for row in rows] for factor in FACTORS}
    has_value = {
        (factor, value): np.array([other == value for other in values])
        for factor, values in value_by_factor.items()
        for value in sorted({*values})
    }
    prior_means = prior.means if prior else {}
    prior_variances = prior.variances if prior else {}
    means = {key: prior_means.get(key, 0.0) for key in has_value if key[0] in BIAS_FACTORS}
    variances = {key: prior_variances.get(key, 0.0) for key in has_value}
    variance = prior.variance if prior else float(np.average(errors**2, weights=weights))
    mean_of_rows = sum((means[key] * has_value[key] for key in means), np.zeros(len(rows)))
    variance_of_rows = variance + sum(
        (variances[key] * has_value[key] for key in variances), np.zeros(len(rows))
    )
    for _ in range(NUM_ITERATIONS):
        precision = weights / variance_of_rows * np.median(variance_of_rows)
        for key in means:
            is_row = has_value[key]
            left = (errors - mean_of_rows)[is_row] + means[key]
            weighted_sum = precision[is_row] @ left + BIAS_SHRINKAGE * prior_means.get(key, 0.0)
            mean = float(weighted_sum / (precision[is_row].sum() + BIAS_SHRINKAGE))
            mean_of_rows += (mean - means[key]) * is_row
            means[key] = mean
        squares = np.minimum((errors - mean_of_rows) ** 2, MAX_LOG_ERROR**2)
        for factor in value_by_factor:
            keys = [key for key in has_value if key[0] == factor]
            left_by_key = {
                key: weights[has_value[key]] @ (squares - variance_of_rows + variances[key])[has_value[key]]
                for key in keys
            }
            pooled = max(0.0, float(sum(left_by_key.values()) / weights.sum()))
            for key in keys:
                target = prior_variances.get(key, pooled)
                num_runs = weights[has_value[key]].sum()
                shrunk = float((left_by_key[key] + SPREAD_SHRINKAGE * target) / (num_runs + SPREAD_SHRINKAGE))
                new_variance = max(0.0, shrunk)
                variance_of_rows += (new_variance - variances[key]) * has_value[key]
                variances[key] = new_variance
        num_prior = SPREAD_SHRINKAGE if prior else 0.0
        left = float(weights @ (squares - variance_of_rows + variance))
        new_variance = (left + num_prior * (prior.variance if prior else 0.0)) / (weights.sum() + num_prior)
        new_variance = max(MIN_SPREAD**2, new_variance)
        variance_of_rows += new_variance - variance
        variance = new_variance
        if prior is None:  # what all values of a factor share belongs to all runs
            for factor in value_by_factor:
                keys = [key for key in has_value if key[0] == factor]
                shared = min(variances[key] for key in keys)
                variance += shared
                variances |= {key: variances[key] - shared for key in keys}
    return Effects(variance=variance, means=means, variances=variances)


def with_errors(
    profile: Profile,
    pooled: Effects,
    rows: Sequence[ErrorRow],
    *,
    program: str,
    date: str,
    check: "CrossValidation | None" = None,
) -> Profile:
    """The profile with the errors of its runs.

    The interval of a profile whose constants were fitted (it has a quality) describes the kinds of its runs as it is.
    Others get the one that `rows` and `pooled` give.

    Args:
        pooled: the effects in the runs of all programs whose constants are not fitted.
        rows: all runs; those of other profiles are left out.
        check: what `cross_validated` returns for all runs; None while it makes its intervals.
    """
    own_rows = [row for row in rows if row.profile == profile.name]
    widening, extra = (check.widening, check.extra) if check else (1.0, {})
    num_by_kind = Counter(row.kind for row in own_rows)
    kinds = tuple(replace(kind, rows=num_by_kind[kind]) for kind in sorted(num_by_kind, key=astuple))
    over_programs = {factor: widening * pooled.over_values(factor) for factor in FACTORS}
    errors = ProfileErrors(
        program=program,
        date=date,
        settings=len({row.setting for row in own_rows}),
        kinds=kinds,
        knobs=_knob_values(own_rows, profile),
        over_programs=over_programs,
    )
    measured_values = {
        factor: sorted({getattr(kind, factor) for kind in kinds}) for factor in FACTORS * bool(kinds)
    }
    if has_own_interval(profile):
        spread = {factor: dict.fromkeys(values, 0.0) for factor, values in measured_values.items()}
        return replace(profile, errors=replace(errors, spread=spread))
    own = fit_effects(own_rows, prior=pooled) if own_rows else pooled
    program_key = (PROGRAM, profile.name)
    variance = own.variance + own.variances.get(program_key, pooled.over_values(PROGRAM) ** 2)
    half_width = SD_80 * widening * math.sqrt(variance)
    bias = {
        factor: {value: own.means[factor, value] for value in values}
        for factor, values in measured_values.items()
        if factor in BIAS_FACTORS
    }
    spread = {
        factor: {
            value: math.sqrt(widening**2 * own.variances[factor, value] + extra.get((factor, value), 0.0))
            for value in values
        }
        for factor, values in measured_values.items()
    }
    errors = replace(errors, mean=own.means.get(program_key, 0.0), bias=bias, spread=spread)
    return replace(profile, interval={"all": Quantiles(-half_width, half_width)}, errors=errors)


def _knob_values(rows: Sequence[ErrorRow], profile: Profile) -> dict[str, tuple[str, ...]]:
    """Knob -> its values in these runs for which the profile has no constants."""
    values_by_knob = dict[str, set[str]]()
    for row in rows:
        for feature, (value, _) in profile.unmeasured(row.case.run.spec, row.kind.gpu).items():
            group, _, knob = feature.partition(".")
            if group == FLAGS:
                values_by_knob.setdefault(knob, set()).add(str(value))
    return {knob: tuple(sorted(values)) for knob, values in sorted(values_by_knob.items())}


def has_own_interval(profile: Profile) -> bool:
    """Whether the interval of a profile comes from errors of runs that were left out of the fit of its constants."""
    return bool(profile.quality)


class LeftOut(NamedTuple):
    """The error of a run, and the interval that its profile gives without the runs of its group."""

    row: ErrorRow
    bias: float
    """The error that the profile expects."""
    half_width: float
    """Half the width of the interval, which begins or ends at 0 where that is farther away."""

    @property
    def low(self) -> float:
        """The low end of the interval."""
        return min(0.0, self.bias - self.half_width)

    @property
    def high(self) -> float:
        """The high end of the interval."""
        return max(0.0, self.bias + self.half_width)

    @property
    def is_inside(self) -> bool:
        """Whether the interval contains the error."""
        return self.low <= self.row.log_error <= self.high

    @property
    def needed_widening(self) -> float:
        """The factor of the width with which the interval would end at the error; 0 where it contains it anyway."""
        error = self.row.log_error
        is_between = min(0.0, self.bias) <= error <= max(0.0, self.bias)
        return 0.0 if is_between else abs(error - self.bias) / self.half_width

    @property
    def missing_variance(self) -> float:
        """The variance with which the interval would end at the error; below 0 where it contains it anyway."""
        return (self.needed_widening**2 - 1) * (self.half_width / SD_80) ** 2

    def widened(self, factor: float) -> "LeftOut":
        """This run with an interval whose width is multiplied by `factor`."""
        return self._replace(half_width=factor * self.half_width)

    def with_variance(self, variance: float) -> "LeftOut":
        """This run with an interval of a normal distribution that has `variance` more."""
        return self._replace(half_width=math.hypot(self.half_width, SD_80 * math.sqrt(variance)))


def left_out(rows: Sequence[ErrorRow], profiles: Collection[Profile], group_kind: str) -> list[LeftOut]:
    """The runs of profiles without an interval of their own, each with an interval from the runs of other groups; none
    where all are in one group.

    Args:
        group_kind: a key of LEFT_OUT.
    """
    group_of, profile_by_name = LEFT_OUT[group_kind], {profile.name: profile for profile in profiles}
    rows = [row for row in rows if not has_own_interval(profile_by_name[row.profile])]
    runs: list[LeftOut] = []
    groups = {group_of(row) for row in rows}
    for group in sorted(groups, key=str) if len(groups) > 1 else ():
        kept_rows = [row for row in rows if group_of(row) != group]
        pooled = fit_effects(kept_rows)
        left_rows = [row for row in rows if group_of(row) == group]
        for name in sorted({row.profile for row in left_rows}):
            profile = with_errors(profile_by_name[name], pooled, kept_rows, program=name, date="")
            assert profile.errors is not None
            for row in left_rows:
                if row.profile == name:
                    case, bias = row.case, profile.errors.size_of(row.kind).bias
                    gpu = case.hardware.gpu_at_limit
                    low, high = profile.interval_of(case.run.spec, gpu, case.links)
                    runs.append(LeftOut(row, bias, max(high - bias, bias - low)))
    return runs


class CrossValidation(NamedTuple):
    """Runs with intervals that were estimated without them, and what these intervals needed to contain them."""

    runs_by_group: dict[str, list[LeftOut]]
    """What is left out (a key of LEFT_OUT) -> the runs."""
    widening: float
    """Factor of all standard deviations."""
    extra: dict[tuple[str, str], float]
    """(factor, value) -> the variance that it adds beyond this."""


def cross_validated(rows: Sequence[ErrorRow], profiles: Collection[Profile]) -> CrossValidation:
    """The runs, each with an interval that does not know its setting, and one that does not know its source.

    All intervals are widened by the factor with which LEFT_OUT_COVERAGE of the runs are inside, whichever of both is
    left out; those of a value of a factor with MIN_COUNTED runs or more then grow until as many of its runs are.
    """
    runs_by_group = {kind: left_out(rows, profiles, kind) for kind in LEFT_OUT}
    needed = {
        kind: _quantile([run.needed_widening for run in runs], runs) for kind, runs in runs_by_group.items()
    }
    factor = max(filter(None, needed.values()), default=1.0)
    runs_by_group = {kind: [run.widened(factor) for run in runs] for kind, runs in runs_by_group.items()}
    extra: dict[tuple[str, str], float] = {}
    for name in FACTORS:
        for value in sorted({_value(run.row, name) for run in runs_by_group["setting"]}):
            runs = [run for run in runs_by_group["setting"] if _value(run.row, name) == value]
            missing = _quantile([run.missing_variance for run in runs], runs)
            if len(runs) < MIN_COUNTED or missing <= 0:
                continue
            extra[name, value] = missing
            runs_by_group = {
                kind: [run.with_variance(missing) if _value(run.row, name) == value else run for run in runs]
                for kind, runs in runs_by_group.items()
            }
    return CrossValidation(runs_by_group, factor, extra)


def _quantile(numbers: Sequence[float], runs: Sequence[LeftOut]) -> float:
    """The number that LEFT_OUT_COVERAGE of the runs do not exceed, weighted as in the fit; 0 without runs."""
    if not runs:
        return 0.0
    weights, order = _weights([run.row for run in runs]), np.argsort(numbers)
    share = np.cumsum(weights[order]) / weights.sum()
    return float(np.array(numbers)[order][np.searchsorted(share, LEFT_OUT_COVERAGE)])


def errors_by_factor(rows: Sequence[ErrorRow], profiles: Collection[Profile]) -> dict[str, Any]:
    """The errors of runs by program and factor as JSON values, and how many runs are inside their intervals: those of
    the profiles, and those that are estimated without the settings, or the sources, of the runs.

    Profiles whose constants were fitted keep their interval, so their runs have no estimate without others.
    """
    profile_by_name = {profile.name: profile for profile in profiles}
    runs_by_kind = cross_validated(rows, profiles).runs_by_group
    runs_by_group = {f"{kind}s_left_out": runs for kind, runs in runs_by_kind.items()}
    is_inside = {"inside": {id(row): _is_inside(row, profile_by_name[row.profile]) for row in rows}}
    is_inside |= {name: {id(run.row): run.is_inside for run in runs} for name, runs in runs_by_group.items()}
    by_factor = {
        name: {
            value: _group_errors([row for row in rows if _value(row, name) == value], is_inside)
            for value in sorted({_value(row, name) for row in rows})
        }
        for name in (PROGRAM, *FACTORS)
    }
    half_widths = {
        name: median((run.high - run.low) / 2 for run in runs) if runs else None
        for name, runs in runs_by_group.items()
    }
    return {**_group_errors(rows, is_inside), "log_half_widths": half_widths, "by": by_factor}


def _value(row: ErrorRow, factor: str) -> str:
    """The value of a factor of a run."""
    return row.profile if factor == PROGRAM else str(getattr(row.kind, factor))


def _is_inside(row: ErrorRow, profile: Profile) -> bool:
    """Whether the interval of the profile contains the error."""
    case = row.case
    low, high = profile.interval_of(case.run.spec, case.hardware.gpu_at_limit, case.links)
    return low <= row.log_error <= high


def _group_errors(rows: Sequence[ErrorRow], is_inside: Mapping[str, Mapping[int, bool]]) -> dict[str, Any]:
    """The errors of some runs: relative ones of the step time, and the shares that are inside their intervals."""
    relative_errors = [abs(math.expm1(-row.log_error)) for row in rows]
    shares = dict[str, float | None]()
    for name, inside_by_row in is_inside.items():
        flags = [inside_by_row[id(row)] for row in rows if id(row) in inside_by_row]
        shares[name] = sum(flags) / len(flags) if flags else None
    return {
        "rows": len(rows),
        "settings": len({row.setting for row in rows}),
        "median_error": float(np.median(relative_errors)) if rows else None,
        "p90_error": float(np.quantile(relative_errors, 0.9)) if rows else None,
        "median_ratio": math.exp(median(-row.log_error for row in rows)) if rows else None,
        **shares,
    }
