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
MAX_LOG_ERROR = 0.7
"""Larger errors count as this one, a factor of two, so that a single broken run does not set the spread of its kind."""
SETTING_CORRELATION = 0.5
"""Correlation of the errors of runs in one setting: n of them count as n / (1 + (n - 1) / 2), so as two at most."""
SPREAD_SHRINKAGE = 4.0
"""Number of independent runs at which the spread of a value counts as much as the one that it is shrunk to."""
LEFT_OUT_COVERAGE = 0.8
"""Share of left-out runs that intervals contain."""
MIN_SPREAD = 0.03
"""Standard deviation below which no program's errors are."""
NUM_ITERATIONS = 12
"""Number of rounds in which each value is estimated, given those of the others."""
MIN_COUNTED = 10
"""Fewest runs with a value of a factor for which the intervals of this value are checked."""
LEFT_OUT: Mapping[str, Callable[["ErrorRow"], Hashable]] = {
    "setting": lambda row: row.setting,
    "source": lambda row: row.source,
}
"""What a cross-validation leaves out -> the group of a run."""
LEFT_OUT_ERRORS: Mapping[str, Callable[["ErrorRow"], float]] = {
    "setting": lambda row: row.log_error,
    "source": lambda row: row.source_log_error,
}
"""What a cross-validation leaves out -> the error of a run without it."""


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
    """log(measured / predicted) of the step time, by constants that are fitted without the setting of the run, where
    they are fitted to such runs."""
    source_log_error: float
    """log(measured / predicted) of the step time, by constants that are fitted without the source of the run, where
    they are fitted to such runs."""


def case_kind(case: Case) -> LayoutKind:
    """The kind of a measured run."""
    return kind_of(case.run.spec, case.hardware.gpu_at_limit, case.links.nvlink_gpus)


def error_row(case: Case, profile: Profile, without_source: Profile | None = None) -> ErrorRow:
    """The error of a run with a step time.

    Args:
        profile: its constants are fitted without the setting of the run, or not to such runs.
        without_source: the same without the source of the run; None where it is `profile`.
    """
    spec, hardware = case.run.spec, case.hardware
    log_errors = [
        replace(case, gpu_factors=tuple(used.gpu_factors.get(hardware.gpu, {}).items())).log_error(
            used.time, used.flags
        )
        for used in (profile, without_source or profile)
    ]
    return ErrorRow(
        case=case,
        profile=profile.name,
        setting=(spec.shape.name, hardware.gpu_at_limit, spec.layout.world_size),
        source=str(case.run.source),
        kind=case_kind(case),
        log_error=log_errors[0],
        source_log_error=log_errors[1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """What each value of each factor adds to the error of a prediction."""

    variance: float
    """Mean square of log(measured / predicted) that all runs have."""
    variances: Mapping[tuple[str, str], float]
    """(factor, value) -> the mean square that it adds."""

    def over_values(self, factor: str) -> float:
        """The standard deviation that a value adds of which there is no run: that of the value with the largest errors,
        and no less than what all runs have."""
        largest_variance = max(
            (variance for (name, _), variance in self.variances.items() if name == factor), default=0.0
        )
        return math.sqrt(max(largest_variance, self.variance))


def _weights(rows: Sequence[ErrorRow]) -> np.ndarray:
    """The weight of each run: those of one setting count as SETTING_CORRELATION says."""
    num_in_setting = Counter(row.setting for row in rows)
    return np.array([1 / (1 + SETTING_CORRELATION * (num_in_setting[row.setting] - 1)) for row in rows])


def fit_effects(rows: Sequence[ErrorRow], prior: Effects | None = None) -> Effects:
    """The variance of the errors of these runs, and what each value of a factor adds to it.

    What a value adds is the weighted mean of what all others leave of its runs' squared errors, shrunk to that of
    `prior` or to 0, and no less than 0; values are estimated in turn. Runs of one setting count as SETTING_CORRELATION
    says.
    """
    squares = np.clip([row.log_error for row in rows], -MAX_LOG_ERROR, MAX_LOG_ERROR) ** 2
    weights = _weights(rows)
    has_value = {
        (factor, value): np.array([_value(row, factor) == value for row in rows])
        for factor in (PROGRAM, *FACTORS)
        for value in sorted({_value(row, factor) for row in rows})
    }
    prior_variances = prior.variances if prior else {}
    variances = {key: prior_variances.get(key, 0.0) for key in has_value}
    variance = prior.variance if prior else float(np.average(squares, weights=weights))
    of_rows = variance + sum(
        (variances[key] * is_row for key, is_row in has_value.items()), np.zeros(len(rows))
    )
    for _ in range(NUM_ITERATIONS):
        for key, is_row in has_value.items():
            left = weights[is_row] @ (squares - of_rows + variances[key])[is_row]
            target = SPREAD_SHRINKAGE * prior_variances.get(key, 0.0)
            shrunk = float((left + target) / (weights[is_row].sum() + SPREAD_SHRINKAGE))
            of_rows += (max(0.0, shrunk) - variances[key]) * is_row
            variances[key] = max(0.0, shrunk)
        num_prior, prior_variance = (SPREAD_SHRINKAGE, prior.variance) if prior else (0.0, 0.0)
        left = weights @ (squares - of_rows + variance) + num_prior * prior_variance
        new_variance = max(MIN_SPREAD**2, float(left / (weights.sum() + num_prior)))
        of_rows += new_variance - variance
        variance = new_variance
    return Effects(variance=variance, variances=variances)


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
    program_variance = own.variances.get((PROGRAM, profile.name), pooled.over_values(PROGRAM) ** 2)
    half_width = SD_80 * widening * math.sqrt(own.variance + program_variance)
    spread = {
        factor: {
            value: math.sqrt(widening**2 * own.variances[factor, value] + extra.get((factor, value), 0.0))
            for value in values
        }
        for factor, values in measured_values.items()
    }
    interval = {"all": Quantiles(-half_width, half_width)}
    return replace(profile, interval=interval, errors=replace(errors, spread=spread))


def _knob_values(rows: Sequence[ErrorRow], profile: Profile) -> dict[str, tuple[str, ...]]:
    """Knob -> its values in these runs for which the profile has no constants."""
    values_by_knob, without_errors = dict[str, set[str]](), replace(profile, errors=None)
    for row in rows:
        for feature, (value, _) in without_errors.unmeasured(row.case.run.spec, row.kind.gpu).items():
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
    log_error: float
    """The error by constants that do not know its group, either."""
    half_width: float
    """Half the width of the interval."""

    @property
    def is_inside(self) -> bool:
        """Whether the interval contains the error."""
        return self.needed_widening <= 1

    @property
    def needed_widening(self) -> float:
        """The factor of the width with which the interval would end at the error."""
        return abs(self.log_error) / self.half_width

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
            for row in left_rows:
                if row.profile == name:
                    case, log_error = row.case, LEFT_OUT_ERRORS[group_kind](row)
                    _, high = profile.interval_of(case.run.spec, case.hardware.gpu_at_limit, case.links)
                    runs.append(LeftOut(row, log_error, high))
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
    needed = {kind: _quantile([run.needed_widening for run in runs]) for kind, runs in runs_by_group.items()}
    factor = max(filter(None, needed.values()), default=1.0)
    runs_by_group = {kind: [run.widened(factor) for run in runs] for kind, runs in runs_by_group.items()}
    extra: dict[tuple[str, str], float] = {}
    for name in FACTORS:
        for value in sorted({_value(run.row, name) for run in runs_by_group["setting"]}):
            runs = [run for run in runs_by_group["setting"] if _value(run.row, name) == value]
            missing = _quantile([run.missing_variance for run in runs])
            if len(runs) < MIN_COUNTED or missing <= 0:
                continue
            extra[name, value] = missing
            runs_by_group = {
                kind: [run.with_variance(missing) if _value(run.row, name) == value else run for run in runs]
                for kind, runs in runs_by_group.items()
            }
    return CrossValidation(runs_by_group, factor, extra)


def _quantile(numbers: Sequence[float]) -> float:
    """The number that LEFT_OUT_COVERAGE of the runs do not exceed; 0 without runs."""
    return sorted(numbers)[math.ceil(LEFT_OUT_COVERAGE * (len(numbers) - 1))] if numbers else 0.0


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
        name: median(run.half_width for run in runs) if runs else None for name, runs in runs_by_group.items()
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
