"""Makes a profile of a user's own from measured runs."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from ultrabench.analysis.measured import MeasuredRun
from ultrabench.analysis.predict.cases import Case, healthy_timed
from ultrabench.analysis.predict.fit import fit_time, intervals, left_out_errors
from ultrabench.analysis.predict.fit_memory import fit_memory, memory_errors, memory_left_out, usable
from ultrabench.errors import ConfigError, counted
from ultrabench.record import to_dict
from ultrabench.sweep.predict.memory import memory_constants
from ultrabench.sweep.predict.nanotron_memory import NanotronMemory
from ultrabench.sweep.predict.profile import Profile

MIN_RUNS = 5
"""Smallest number of runs with which a fit can be checked on runs left out of it."""
MAX_ERROR = 0.5
"""Largest median error, on runs left out of the fit, of a profile that is worth writing."""
MAX_FACTOR = 30.0
"""Median factor between measured and predicted step times above which the rows are taken to have another unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted profile, and the errors before and after on runs that were left out of the fit."""

    profile: Profile
    runs: int
    before: dict[str, float]
    """median_error and p90_error of the profile that the fit started from, as fractions."""
    after: dict[str, float]
    """median_error and p90_error of constants that were fitted without the run, even if they are not kept."""
    kept: bool
    """Whether the new constants are used: on runs left out they are better than those before."""
    memory: dict[str, dict[str, float]]
    """before and after -> median_error and p90_error of rank 0's reserved memory; empty where it was not fitted."""


def calibrate(given: Sequence[Case], base: Profile, *, name: str, date: str) -> Calibration:
    """The profile that fits the healthy runs best, starting from `base`.

    Constants of `base` stay where new ones are no better on runs left out, so that few runs do no harm. Those
    of memory are fitted for nanotron only, to at least 5 runs; the intervals are those of the runs left out.

    Raises:
        ConfigError: there are fewer than 5 healthy runs with a step time, or no constants predict them.
    """
    known, others = healthy_timed(given)
    if len(known) < MIN_RUNS:
        has = f"{counted(len(known), 'healthy run')} with a step time"
        rule = f"a fit needs at least {MIN_RUNS}: measure more layouts, or name more files"
        left_out = "; left out: " * bool(others) + ", ".join(
            f"{n:,} {why}" for why, n in others.most_common()
        )
        raise ConfigError(f"{has}; {rule}{left_out}")
    old, new = [case.log_error(base.time) for case in known], left_out_errors(known, base.time)
    before, after = errors(old), errors(new)
    kept = after["median_error"] < before["median_error"]
    factor, error = math.exp(median(map(abs, old))), min(before["median_error"], after["median_error"])
    if factor > MAX_FACTOR or error > MAX_ERROR:
        wrong = f"half of {len(known):,} runs are off by a factor of {factor:,.3g} from profile {base.name}"
        fitted = f"by {100 * error:,.0f} % from constants that were fitted without them"
        rule = f"a profile needs less than {MAX_FACTOR:g} and {100 * MAX_ERROR:.0f} %"
        raise ConfigError(f"{wrong}, {fitted}; {rule}: check the seconds, hardware and model of the rows")
    memory, told = _memory([case.run for case in given], base)
    profile = replace(
        base,
        name=name,
        memory=memory,
        source=f"fitted to {counted(len(known), 'run')}, from profile {base.name}",
        date=date,
        prior=base.name,
        time=fit_time(known, base.time) if kept else base.time,
        interval=intervals(known, new if kept else old),
        quality={"runs": len(known), **(after if kept else before)},
    )
    return Calibration(profile=profile, runs=len(known), before=before, after=after, kept=kept, memory=told)


def _memory(
    given: Sequence[MeasuredRun], base: Profile
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """The constants of memory that are better on runs left out, and the errors before and after."""
    known, prior = usable(given), memory_constants(base.framework, base.memory)
    if not isinstance(prior, NanotronMemory) or len(known) < MIN_RUNS:
        return base.memory, {}
    old, new = errors(memory_errors(known, prior)), errors(memory_left_out(known, prior))
    better = new["median_error"] < old["median_error"]
    return to_dict(fit_memory(known, prior)) if better else base.memory, {"before": old, "after": new}


def errors(logs: Sequence[float]) -> dict[str, float]:
    """Median and 90 % quantile of |predicted / measured - 1| of at least two values of log(measured / predicted)."""
    found = [abs(math.expm1(-log)) for log in logs]
    return {"median_error": median(found), "p90_error": quantiles(found, n=10, method="inclusive")[-1]}


def to_yaml(profile: Profile, base: Profile) -> str:
    """The text of the profile's file; a comment at each constant of time tells its value in `base`."""
    values, old = to_dict(profile), to_dict(base)["time"]
    head = (f"{key}: {_text(values[key])}" for key in ("framework", "source", "date", "prior"))
    lines = [f"# {profile.source}.", *head]
    for key in ("time", "memory", "interval", "quality"):
        lines += [f"{key}:" if values[key] else f"{key}: {{}}"]
        for name, value in values[key].items():
            told = f"  {name}: {_text(value)}"
            lines.append(f"{told:40}# {_text(old[name])} before" if key == "time" else told)
    return "\n".join(lines) + "\n"


def _text(value: object) -> str:
    """A YAML scalar or list; numbers with four digits, and with a point, so that they are read as such."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float):
        short = f"{value:.4g}"
        mantissa, e, exponent = short.partition("e")
        return (mantissa if "." in mantissa else f"{mantissa}.0") + e + exponent
    return json.dumps(value)
