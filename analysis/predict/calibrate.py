"""Makes a profile of a user's own from measured runs."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from ultrabench.analysis.measured import MeasuredRun
from ultrabench.analysis.predict.cases import Case, healthy_timed
from ultrabench.analysis.predict.fit import fit_time, intervals, left_out_errors, log_errors
from ultrabench.analysis.predict.nanotron import fit_memory, memory_errors, usable
from ultrabench.errors import ConfigError, counted
from ultrabench.record import to_dict
from ultrabench.sweep.predict.memory import memory_constants
from ultrabench.sweep.predict.nanotron_memory import NanotronMemory
from ultrabench.sweep.predict.profile import Profile, features

MIN_RUNS = 5
"""Smallest number of runs with which a fit can be checked on runs left out of it."""
MAX_ERROR = 0.5
"""Largest median error, on runs left out of the fit, of a profile that is worth writing."""
MAX_FACTOR = 30.0
"""Median factor between measured and predicted step times above which the rows are taken to have another unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted profile, and the errors before and after the fit on runs that were left out of it."""

    profile: Profile
    runs: int
    before: dict[str, float]
    """median_error and p90_error of the profile that the fit started from, as fractions."""
    after: dict[str, float]
    """median_error and p90_error of constants that were fitted without the run, even if they are not kept."""
    fitted: dict[str, int]
    """step_time and memory -> number of runs that the constants of the profile were fitted to; 0 where they are the
    prior ones, since new ones are no better on runs left out."""
    memory: dict[str, dict[str, float]]
    """before and after -> median_error and p90_error of rank 0's reserved memory; empty where it was not fitted."""


def calibrate(cases: Sequence[Case], base: Profile, *, name: str, date: str) -> Calibration:
    """The profile that fits the healthy runs best, starting from `base`.

    Constants of `base` stay where new ones are no better on runs left out, so that few runs do no harm. Those
    of memory are fitted for nanotron only, to at least 5 runs. The intervals of the runs left out are mixed with
    those of `base`.

    Raises:
        ConfigError: there are fewer than 5 healthy runs with a step time, or no constants predict them.
    """
    timed, num_by_reason = healthy_timed(cases)
    if len(timed) < MIN_RUNS:
        has_text = f"{counted(len(timed), 'healthy run')} with a step time"
        rule = f"a fit needs at least {MIN_RUNS}: measure more layouts, or give more files"
        left_out = ", ".join(f"{n:,} {why}" for why, n in num_by_reason.most_common())
        raise ConfigError(f"{has_text}; {rule}" + f"; excluded: {left_out}" * bool(num_by_reason))
    old_errors = log_errors(timed, base.time)
    new_errors = left_out_errors(timed, lambda kept_runs: fit_time(kept_runs, base.time), log_errors)
    before, after = errors(old_errors), errors(new_errors)
    is_better = after["median_error"] < before["median_error"]
    _require_near(old_errors, new_errors, base)
    memory, memory_quality, memory_runs = _memory([case.run for case in cases], base)
    num_fitted = {"step_time": is_better * len(timed), "memory": memory_runs}
    profile = replace(
        base,
        name=name,
        memory=memory,
        source=_source(num_fitted, len(timed), base),
        date=date,
        prior=base.name,
        time=fit_time(timed, base.time) if is_better else base.time,
        interval=intervals(timed, new_errors if is_better else old_errors, base.interval),
        quality={"runs": len(timed), **(after if is_better else before)},
        measured=measured(timed, base),
    )
    return Calibration(
        profile=profile, runs=len(timed), before=before, after=after, fitted=num_fitted, memory=memory_quality
    )


def measured(timed: Sequence[Case], base: Profile) -> dict[str, tuple[Any, ...]]:
    """The features of these runs and of those that `base` was fitted to, in the form of `Profile.measured`."""
    values_by_feature = {name: {*values} for name, values in base.measured.items()}
    for case in timed:
        for name, value in features(case.run.spec, case.hardware.gpu_at_limit).items():
            values_by_feature.setdefault(name, set()).add(value)
    sorted_values = ((name, sorted(values)) for name, values in values_by_feature.items())
    return {name: (*v,) if isinstance(v[0], str) else (v[0], v[-1]) for name, v in sorted_values}


def _require_near(old_errors: Sequence[float], new_errors: Sequence[float], base: Profile) -> None:
    """Raises where neither the constants of `base` nor fitted ones explain the step times.

    Args:
        old_errors: log(measured / predicted) of each run with the constants of `base`.
        new_errors: the same with constants that were fitted without the run.
    """
    factor = math.exp(median(map(abs, old_errors)))
    error = min(errors(logs)["median_error"] for logs in (old_errors, new_errors))
    if factor > MAX_FACTOR or error > MAX_ERROR:
        base_text = (
            f"profile {base.name} is off by a median factor of {factor:,.1f} (at most {MAX_FACTOR:g} allowed)"
        )
        fit_text = f"a fit by a median of {100 * error:,.0f} % (at most {100 * MAX_ERROR:.0f} %)"
        remedy = "check the seconds, hardware and model of the rows"
        raise ConfigError(f"{len(old_errors):,} runs: {base_text}, {fit_text}; {remedy}")


def _source(num_runs_by_part: dict[str, int], num_runs: int, base: Profile) -> str:
    """Where each part of a profile comes from."""
    sources = (
        f"{part.replace('_', ' ')} "
        + (f"fitted to {counted(num_fitted, 'run')}" if num_fitted else f"from profile {base.name}")
        for part, num_fitted in num_runs_by_part.items()
    )
    return f"{', '.join(sources)}, intervals of {counted(num_runs, 'run')} combined with those of {base.name}"


def _memory(
    runs: Sequence[MeasuredRun], base: Profile
) -> tuple[dict[str, Any], dict[str, dict[str, float]], int]:
    """The constants of memory that are better on runs left out, the errors before and after, and the runs of the fit."""
    usable_runs, prior = usable(runs), memory_constants(base.framework, base.memory)
    if not isinstance(prior, NanotronMemory) or len(usable_runs) < MIN_RUNS:
        return base.memory, {}, 0
    errors_left_out = left_out_errors(usable_runs, lambda kept: fit_memory(kept, prior), memory_errors)
    old_quality, new_quality = errors(memory_errors(usable_runs, prior)), errors(errors_left_out)
    quality = {"before": old_quality, "after": new_quality}
    if new_quality["median_error"] < old_quality["median_error"]:
        return to_dict(fit_memory(usable_runs, prior)), quality, len(usable_runs)
    return base.memory, quality, 0


def errors(log_errors: Sequence[float]) -> dict[str, float]:
    """Median and 90 % quantile of |predicted / measured - 1| of at least two values of log(measured / predicted)."""
    relative_errors = [abs(math.expm1(-log_error)) for log_error in log_errors]
    p90 = quantiles(relative_errors, n=10, method="inclusive")[-1]
    return {"median_error": median(relative_errors), "p90_error": p90}


def to_yaml(profile: Profile, base: Profile) -> str:
    """The text of the profile's file; a comment at each constant of time gives its value in `base`."""
    values, old_times = to_dict(profile), to_dict(base)["time"]
    head_lines = (f"{key}: {_text(values[key])}" for key in ("framework", "source", "date", "prior"))
    lines = [f"# {profile.source}.", *head_lines]
    for key in ("time", "memory", "interval", "quality", "measured"):
        lines += [f"{key}:" if values[key] else f"{key}: {{}}"]
        for name, value in values[key].items():
            entry = f"  {name}: {_text(value)}"
            lines.append(f"{entry:40}# {_text(old_times[name])} before" if key == "time" else entry)
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    """A YAML scalar or list; numbers with four digits, and with a point, so that they are read as such."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):
        number_text = f"{value:.4g}"
        mantissa, separator, exponent = number_text.partition("e")
        return (mantissa if "." in mantissa else f"{mantissa}.0") + separator + exponent
    return json.dumps(value)
