"""Makes a user's own profile from measured runs."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

from ultrabench.analysis.results.cases import Case, healthy_timed
from ultrabench.analysis.results.measured import MeasuredRun
from ultrabench.analysis.studies.predictions.error_factors import case_kind
from ultrabench.analysis.studies.predictions.fit import (
    LEVEL_SD,
    FittedTime,
    fit_time,
    fitted_flags,
    intervals,
    left_out_errors,
    log_errors,
    soft_loss,
)
from ultrabench.analysis.studies.predictions.nanotron import fit_memory, memory_errors, memory_runs
from ultrabench.errors import ConfigError, counted
from ultrabench.record import to_dict, values_of
from ultrabench.sweep.predict.memory import memory_constants
from ultrabench.sweep.predict.nanotron_memory import NanotronMemory
from ultrabench.sweep.predict.profile import Profile, features
from ultrabench.sweep.predict.profile_errors import ProfileErrors
from ultrabench.sweep.predict.time_constants import TimeConstants, with_changes

MIN_RUNS = 5
"""Smallest number of runs with which a fit can be checked on runs left out of it."""
MAX_CHANCE = 0.06
"""Largest probability of a sign test that speaks for new constants: 5 of 5 runs, or 8 of 10, have smaller errors."""
MAX_MEDIAN_ERROR = 0.5
"""Largest median error, on runs left out of the fit, of a profile that is worth writing."""
NOTABLE_CHANGE = 0.1
"""Change of a constant, as a share of its value before, from which a calibration reports it."""
MAX_MEDIAN_FACTOR = 30.0
"""Largest median factor between measured and predicted step times; above it the unit of the rows must be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted profile, and the errors before and after the fit on runs that were left out of it."""

    profile: Profile
    runs: int
    before: dict[str, float]
    """median_error and p90_error of the profile that the fit started from, as fractions."""
    after: dict[str, float]
    """median_error and p90_error of constants that are fitted without the run, even if they are not kept."""
    fitted: dict[str, int]
    """step_time and memory -> number of runs that the constants of the profile were fitted to; 0 where they are the
    prior ones, since new ones are no better on runs left out."""
    memory: dict[str, dict[str, float]]
    """before and after -> median_error and p90_error of rank 0's reserved memory; empty where it was not fitted."""


def calibrate(cases: Sequence[Case], base: Profile, *, name: str, date: str) -> Calibration:
    """The profile that fits the healthy runs best, starting from `base`.

    Constants of the step time are those of `base` unless new ones are clearly better on runs left out; see
    `are_clearly_better`. Those of memory are fitted for nanotron only, to at least 5 runs. The intervals of the runs
    left out are mixed with those of `base`.

    Raises:
        ConfigError: there are fewer than 5 healthy runs with a step time, or no constants predict them.
    """
    timed_cases, num_by_reason = healthy_timed(cases)
    num_timed = len(timed_cases)
    if num_timed < MIN_RUNS:
        runs_text = f"{counted(num_timed, 'healthy run')} with a step time"
        rule = f"a fit needs at least {MIN_RUNS}: measure more layouts, or give more files"
        excluded_text = ", ".join(f"{n:,} {why}" for why, n in num_by_reason.most_common())
        raise ConfigError(f"{runs_text}; {rule}" + f"; excluded: {excluded_text}" * bool(num_by_reason))
    base_time = FittedTime(base.time, base.flags)
    old_errors = log_errors(timed_cases, base_time)
    fit = fit_time(timed_cases, base_time, level_sd_of(timed_cases, base))
    new_errors = fit.left_out_errors
    old_quality, new_quality = quality_of(old_errors), quality_of(new_errors)
    is_better = are_clearly_better(new_errors, old_errors)
    _require_close(old_errors, new_errors, base)
    memory, mem_quality, num_memory_runs = _better_memory([case.run for case in cases], base)
    num_fitted = {"step_time": is_better * num_timed, "memory": num_memory_runs}
    fitted, flag_runs = base_time, base.flag_runs
    if is_better:
        fitted, flag_runs = fit.constants, _flag_runs(timed_cases, base)
    profile = replace(
        base, name=name, memory=memory, source=_source_text(num_fitted, num_timed, base), date=date,
        prior=base.name, time=fitted.time, flags=to_dict(fitted.flags), flag_runs=flag_runs,
        interval=intervals(timed_cases, new_errors if is_better else old_errors, base.interval),
        quality={"runs": num_timed, **(new_quality if is_better else old_quality)},
        measured=measured_features(timed_cases, base),
        errors=base.errors and base.errors.fitted_to(map(case_kind, timed_cases)),
    )  # fmt: skip
    return Calibration(
        profile=profile, runs=num_timed, before=old_quality, after=new_quality, fitted=num_fitted,
        memory=mem_quality,
    )  # fmt: skip


def are_clearly_better(new_errors: Sequence[float], old_errors: Sequence[float]) -> bool:
    """Whether errors of the same runs are smaller than before by more than chance.

    Either their loss is smaller by the factor 1 + 2 * (MIN_RUNS / runs)**3, since chance makes 5 runs agree more often
    than 20; or so many of them are smaller that chance alone would do it with a probability of at most MAX_CHANCE (sign
    test): the first asks too much where one run that is unlike all others decides the loss.
    """
    num_runs = len(new_errors)
    if soft_loss(new_errors) < soft_loss(old_errors) / (1 + 2 * (MIN_RUNS / num_runs) ** 3):
        return True
    num_smaller = sum(abs(new) < abs(old) for new, old in zip(new_errors, old_errors, strict=True))
    chance: float = sum(math.comb(num_runs, n) for n in range(num_smaller, num_runs + 1)) / 2**num_runs
    return chance <= MAX_CHANCE


def level_sd_of(timed_cases: Sequence[Case], base: Profile) -> float:
    """How far constants that decide the level of step times may move: LEVEL_SD, and what the errors of the profile add
    for the program, the GPU and other factors of these runs."""
    if base.errors is None or not timed_cases:
        return LEVEL_SD
    variances = [base.errors.spread_of(case_kind(case)) ** 2 for case in timed_cases]
    return math.sqrt(LEVEL_SD**2 + fmean(variances))


def _flag_runs(timed_cases: Sequence[Case], base: Profile) -> dict[str, dict[str, int]]:
    """Knob -> value -> number of runs to which its constants are fitted now, or were before."""
    flag_runs = {knob: {**runs_by_value} for knob, runs_by_value in base.flag_runs.items()}
    for (knob, value, _), num_runs in fitted_flags(timed_cases, base.flags):
        flag_runs.setdefault(knob, {})[value] = num_runs
    return flag_runs


def measured_features(timed_cases: Sequence[Case], base: Profile) -> dict[str, tuple[Any, ...]]:
    """The values of each feature among these runs and those that `base` was fitted to,
    as `Profile.measured` has them.
    """
    values_by_feature = {name: {*values} for name, values in base.measured.items()}
    for case in timed_cases:
        for name, value in features(case.run.spec, case.hardware.gpu_at_limit).items():
            values_by_feature.setdefault(name, set()).add(value)
    sorted_values = ((name, sorted(values)) for name, values in values_by_feature.items())
    return {name: (*v,) if isinstance(v[0], str) else (v[0], v[-1]) for name, v in sorted_values}


def _require_close(old_errors: Sequence[float], new_errors: Sequence[float], base: Profile) -> None:
    """Raises ConfigError if neither the constants of `base` nor fitted ones explain the step times.

    Args:
        old_errors: log(measured / predicted) of each run with the constants of `base`.
        new_errors: the same with constants that were fitted without the run.
    """
    median_factor = math.exp(median(map(abs, old_errors)))
    best_error = min(quality_of(errors)["median_error"] for errors in (old_errors, new_errors))
    if median_factor > MAX_MEDIAN_FACTOR or best_error > MAX_MEDIAN_ERROR:
        limit_text = f"(at most {MAX_MEDIAN_FACTOR:g} allowed)"
        base_text = f"profile {base.name} is off by a median factor of {median_factor:,.1f} {limit_text}"
        fit_text = f"a fit by a median of {100 * best_error:,.0f} % (at most {100 * MAX_MEDIAN_ERROR:.0f} %)"
        remedy = "check the seconds, hardware and model of the rows"
        raise ConfigError(f"{len(old_errors):,} runs: {base_text}, {fit_text}; {remedy}")


def _source_text(num_runs_by_part: dict[str, int], num_runs: int, base: Profile) -> str:
    """A sentence that says where each part of a profile comes from."""
    sources = (
        f"{part.replace('_', ' ')} "
        + (f"fitted to {counted(num_fitted, 'run')}" if num_fitted else f"from profile {base.name}")
        for part, num_fitted in num_runs_by_part.items()
    )
    return f"{', '.join(sources)}, intervals of {counted(num_runs, 'run')} combined with those of {base.name}"


def _better_memory(
    runs: Sequence[MeasuredRun], base: Profile
) -> tuple[dict[str, Any], dict[str, dict[str, float]], int]:
    """The memory constants that are better on runs left out, their errors before and after,
    and the number of fitted runs.

    These are those of `base` and 0 where new constants are no better.
    """
    usable_runs, prior = memory_runs(runs), memory_constants(base.framework, base.memory)
    if not isinstance(prior, NanotronMemory) or len(usable_runs) < MIN_RUNS:
        return base.memory, {}, 0
    new_errors = left_out_errors(usable_runs, lambda kept_runs: fit_memory(kept_runs, prior), memory_errors)
    old_quality, new_quality = quality_of(memory_errors(usable_runs, prior)), quality_of(new_errors)
    quality = {"before": old_quality, "after": new_quality}
    if new_quality["median_error"] < old_quality["median_error"]:
        return to_dict(fit_memory(usable_runs, prior)), quality, len(usable_runs)
    return base.memory, quality, 0


def quality_of(log_errors: Sequence[float]) -> dict[str, float]:
    """Median and 90 % quantile of |predicted / measured - 1| of at least two values of log(measured / predicted)."""
    relative_errors = [abs(math.expm1(-log_error)) for log_error in log_errors]
    p90 = quantiles(relative_errors, n=10, method="inclusive")[-1]
    return {"median_error": median(relative_errors), "p90_error": p90}


def to_yaml(profile: Profile, base: Profile) -> str:
    """The text of the profile's file; a comment at each constant of time gives its value in `base`."""
    fields, base_times = to_dict(profile), to_dict(base)["time"]
    head_lines = (
        f"{key}: {_yaml_text(fields[key])}" for key in ("framework", "stages", "source", "date", "prior")
    )
    lines = [f"# {profile.source}.", *head_lines]
    for key in ("time", "memory", "interval", "quality", "measured"):
        lines += [f"{key}:" if fields[key] else f"{key}: {{}}"]
        for name, value in fields[key].items():
            entry = f"  {name}: {_yaml_text(value)}"
            lines.append(f"{entry:40}# {_yaml_text(base_times[name])} before" if key == "time" else entry)
        if key == "time" and profile.flags:
            lines += _flag_lines(profile, base)
        if key == "time" and profile.gpu_factors:
            lines.append(f"gpu_factors: {json.dumps(profile.gpu_factors)}")
    lines += errors_lines(profile.errors) if profile.errors else []
    return "\n".join(lines) + "\n"


def errors_lines(errors: ProfileErrors) -> Iterator[str]:
    """The lines of `errors` in the file of a profile."""
    fields = to_dict(errors)
    yield "errors:  # log(measured / predicted) of step times; docs/design/prediction.md, Intervals"
    yield from (f"  {name}: {_yaml_text(fields[name])}" for name in ("program", "date", "settings"))
    yield f"  kinds:  # of {counted(errors.rows, 'measured run')}" if errors.kinds else "  kinds: []"
    for kind in fields["kinds"]:
        yield f"    - {{{', '.join(f'{name}: {value}' for name, value in kind.items())}}}"
    yield "  knobs:  # values in these runs" if errors.knobs else "  knobs: {}"
    for knob, values in errors.knobs.items():
        yield f"    {json.dumps(knob)}: {json.dumps(values)}"
    yield "  spread:  # standard deviation that a value adds" if errors.spread else "  spread: {}"
    for factor, number_by_value in errors.spread.items():
        yield f"    {factor}: {_numbers_text(number_by_value)}"
    comment = "standard deviation of values that were not measured"
    yield f"  over_programs: {_numbers_text(errors.over_programs)}  # {comment}"


def _numbers_text(number_by_value: Mapping[str, float]) -> str:
    """A YAML map of one line, with numbers to a thousandth."""
    return f"{{{', '.join(f'{value}: {round(number, 3):g}' for value, number in number_by_value.items())}}}"


def _flag_lines(profile: Profile, base: Profile) -> Iterator[str]:
    """The lines of `flags` and `flag_runs`; a comment says what each constant was, or that it is a prior."""
    yield "flags:  # knob: value: constants of time that it changes"
    for knob, constants_by_value in profile.flags.items():
        yield f"  {json.dumps(knob)}:"
        for value, constants in constants_by_value.items():
            yield f"    {json.dumps(value)}:{' {}' * (not constants)}"
            is_fitted = value in profile.flag_runs.get(knob, {})
            for name, number in constants.items():
                comment = f"{_yaml_text(base.flags[knob][value][name])} before" if is_fitted else "prior"
                yield f"{f'      {name}: {_yaml_text(number)}':40}# {comment}"
    yield f"flag_runs: {json.dumps(profile.flag_runs)}"


def _yaml_text(value: object) -> str:
    """A YAML scalar or list; numbers with four digits, and with a point, so that they are read as such."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml_text, value))}]"
    if isinstance(value, float):
        number_text = f"{value:.4g}"
        mantissa, exponent_sign, exponent = number_text.partition("e")
        return (mantissa if "." in mantissa else f"{mantissa}.0") + exponent_sign + exponent
    return json.dumps(value)


class MovedConstant(NamedTuple):
    """A constant of the step time that a fit changed."""

    name: str
    before: float
    after: float
    worth: float
    """Increase of the median error of the fitted runs, as a fraction, if the constant had its old value."""


def moved_constants(profile: Profile, base: Profile, cases: Sequence[Case]) -> list[MovedConstant]:
    """The constants that a fit changed by NOTABLE_CHANGE or more, those that are worth most first."""
    timed_cases, _ = healthy_timed(cases)

    def median_error(time: TimeConstants) -> float:
        return quality_of(log_errors(timed_cases, FittedTime(time, profile.flags)))["median_error"]

    moved, fitted_error = list[MovedConstant](), median_error(profile.time)
    for name, before in values_of(base.time).items():
        after = getattr(profile.time, name)
        if isinstance(before, float) and before > 0 and abs(after / before - 1) >= NOTABLE_CHANGE:
            worth = median_error(with_changes(profile.time, ((name, before),))) - fitted_error
            moved.append(MovedConstant(name, before, after, worth))
    return sorted(moved, key=lambda constant: -constant.worth)


def moved_lines(moved: Sequence[MovedConstant]) -> Iterator[str]:
    """A line for each constant that a fit changed, and what the change is worth."""
    for name, before, after, worth in moved:
        change_text = f"{name} moved from {before:.3g} to {after:.3g}"
        points = round(100 * worth, 1) + 0.0  # no -0.0
        yield f"{change_text}; its old value would change the median error by {points:+.1f} points"


def knob_lines(profile: Profile, cases: Sequence[Case]) -> Iterator[str]:
    """Which values of knobs have fitted constants, and which values share the constants of `time`."""
    fitted_texts = [
        f"{knob}={value} ({counted(num_runs, 'run')})"
        for knob, runs_by_value in profile.flag_runs.items()
        for value, num_runs in runs_by_value.items()
    ]
    if fitted_texts:
        yield f"constants of knobs fitted: {', '.join(fitted_texts)}"
    values_by_knob = dict[str, dict[str, None]]()
    for case in cases:
        for knob, knob_value in case.run.spec.flag_values.items():
            values_by_knob.setdefault(knob, {})[str(knob_value)] = None
    for knob, values in values_by_knob.items():
        unknown_values = [value for value in values if value not in profile.flags.get(knob, {})]
        if len(unknown_values) > 1:  # the constants of time are for one of them
            advice = f"say in flags.{knob} of the profile what each changes, and calibrate again"
            yield f"the same constants predict {knob}={', '.join(unknown_values)}: {advice}"
