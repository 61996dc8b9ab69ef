"""What each value of a knob is worth, all else equal: ratios of speeds of runs that differ only in it.

docs/guide/compare.md says which runs make a pair, how the interval follows, and how often it is right.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, log
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from scipy.special import stdtr, stdtrit

from ultrabench.analysis.knobs import COLUMNS as KNOB_COLUMNS
from ultrabench.analysis.knobs import in_order, is_of_variant, knobs, set_value, value_text
from ultrabench.analysis.left_out import none_left
from ultrabench.analysis.options import variant_in
from ultrabench.analysis.ranking import Ranking
from ultrabench.analysis.schema import MODEL
from ultrabench.errors import ConfigError, counted, require_known
from ultrabench.layout import FOLLOWING, details_of
from ultrabench.result import NOT_TRIED, Status
from ultrabench.standing import Standing

LEVEL = 0.98
"""Probability with which an interval contains the ratio.

It leaves room: of 100 tables without an effect, hardly ever more than 5 then seem to have one.
"""
FEWEST_PAIRS = 3
"""Number of differences from which their spread gives an interval; from two it has a width of any size."""
_NORMAL_95 = float(stdtrit(np.inf, 0.975))
"""Half the 95 % interval of a step time, in standard deviations."""
_EQUAL = ["hardware", "kernel", *MODEL, "nodes", "gpus", "source"]
"""Columns that are equal in the two runs of a pair, besides knobs and environment."""
_SHARES = (np.arange(40) + 0.5) / 40
"""Shares of the variance that may come from allocations; the interval weighs them by how well they fit the pairs."""
_LEFT_OUT = {
    "failed": "out of memory or failed", "suspect": "suspect", "stopped": "stopped early as slower than the best",
}  # fmt: skip
"""Why a run has no part in any pair, as code and in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What one value of a knob is worth against the baseline."""

    value: Any
    against: Any
    """The baseline: the first value that the sweep lists, or the most frequent one where no run that is compared has it."""
    ratio: float | None = None
    """Geometric mean of the ratios of speeds; None without a pair."""
    low: float | None = None
    """Lower end of the interval of the ratio, of probability LEVEL; None where the runs give no interval."""
    high: float | None = None
    pairs: int = 0
    """Number of pairs of runs."""

    @property
    def proven(self) -> float:
        """The logarithm of the ratio that is proven at least; 0 where the interval contains 1, or there is none."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return 0.0
        return min(abs(log(self.low)), abs(log(self.high)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Competing:
    """The runs of a table that may win, with their knobs."""

    runs: pd.DataFrame
    """One row for each run: its knobs, `model`, `num_params`, `sweep`, `environment`, `alike` (a number for all of
    _EQUAL), `first_values` (a mapping from axes to values), the medians of its repeats in `rate` and `control_ratio`, `control`, and `variance`, what its steps alone give the logarithm."""
    repeats: pd.DataFrame
    """One row for each repeat that competes, with the same speeds; `run`: its row in `runs`, `place`: its allocation."""
    knobs: tuple[str, ...]
    """The names of all knobs."""
    varied: tuple[str, ...]
    """The knobs that have several values among the runs that were tried."""
    left_out: Counter[str]
    """Code of _LEFT_OUT -> number of runs."""

    @property
    def axes(self) -> list[str]:
        """The knobs whose values have effects of their own: those that varied, without dp and gas."""
        return [name for name in self.varied if name not in FOLLOWING]

    @property
    def note(self) -> str:
        """What was left out, and what follows from that."""
        texts = [f"{self.left_out[code]:,} {why}" for code, why in _LEFT_OUT.items() if self.left_out[code]]
        sentence = f"Runs excluded: {', '.join(texts) or 'none'}."
        if self.left_out["stopped"]:
            sentence += " Only slow runs are stopped early, so a slow value may look better than it is."
            sentence += " To measure every run in full: measure.race=null."
        return sentence

    def require_axis(self, name: str | None) -> str:
        """The knob of this name; raises ConfigError unless it varied."""
        varied = f"axes that varied: {', '.join(self.axes) or 'none'}"
        if name is None:
            raise ConfigError(f"no axis given; give one, as in ultrabench plot effect AXIS; {varied}")
        if name in FOLLOWING:
            rule = "follows from the other axes and the batch; choose another axis"
            raise ConfigError(f"{name} {rule}; {varied}")
        if name == "nodes":
            raise ConfigError(
                "runs on different numbers of nodes cannot be paired",
                "use: ultrabench plot scaling --axis nodes",
            )
        longer = [known for known in self.knobs if known.startswith(f"{name}_")]
        if name not in self.knobs and len(longer) == 1:
            raise ConfigError(f"unknown axis {name!r}; did you mean {longer[0]}? ({varied})")
        require_known("axis", self.knobs, name, first=self.axes)
        if name not in self.axes:
            raise ConfigError(f"{name} did not vary in these runs; {varied}")
        return name


def competing(table: pa.Table) -> Competing:
    """The runs of a table that may win, by the rule of `standing`.

    Raises:
        ConfigError: there are none.
    """
    return competing_in(Ranking(table, more=COLUMNS))


COLUMNS = ("gpus", "first_values", "suspect_codes")
"""Columns that effects read beside those of a ranking."""


def competing_in(ranking: Ranking) -> Competing:
    """What `competing` returns, of a table that is ranked already, with these COLUMNS."""
    frame = ranking.frame
    standings = chain.from_iterable(ranking.standings.values())
    tried = [standing for standing in standings if standing.outcome not in NOT_TRIED]
    winners = [number for number, standing in enumerate(tried) if _why_left_out(standing) is None]
    if not winners:
        raise none_left(frame.loc[[standing.repeat for standing in tried]], "none can win")
    knob_values = knobs(ranking.taken((standing.repeat for standing in tried), KNOB_COLUMNS))
    repeats = _repeats(frame, [tried[number].competing for number in winners])
    by_run, rows = repeats.groupby("run"), [tried[number].repeat for number in winners]
    runs = knob_values.iloc[winners].reset_index(drop=True)
    return Competing(
        runs=runs.assign(
            **frame.loc[rows, ["model", "num_params", "sweep"]].reset_index(drop=True),
            first_values=frame.loc[rows, "first_values"].fillna("").map(variant_in).to_numpy(),
            environment=np.array([tried[number].environment for number in winners], object),
            alike=frame.groupby(_EQUAL, dropna=False).ngroup()[rows].to_numpy(),
            control=by_run["control"].first(),
            variance=by_run["variance"].mean() / by_run.size(),
            **by_run[["rate", "control_ratio"]].median(),
        ),
        repeats=repeats,
        knobs=(*knob_values,),
        varied=tuple(str(name) for name in knob_values if knob_values[name].nunique() > 1),
        left_out=Counter(why for why in map(_why_left_out, tried) if why),
    )


def _why_left_out(standing: Standing) -> str | None:
    """The code of _LEFT_OUT, None for a run that may win."""
    if standing.outcome != Status.OK:
        return "failed"
    if standing.suspect:
        return "suspect"
    return None if standing.may_win and (standing.rate or 0) > 0 else "stopped"


def _repeats(frame: pd.DataFrame, competing_rows: Sequence[tuple[int, ...]]) -> pd.DataFrame:
    """The repeats of each run, from the rows of the ranking that compete."""
    places, _ = pd.factorize(frame["place"])
    rows = [row for rows_of_run in competing_rows for row in rows_of_run]
    repeats = frame.loc[rows, ["repeat", "rate", "control", "control_ratio"]].reset_index(drop=True)
    half_width = frame["width"].astype(float).fillna(0)[rows].to_numpy()
    return repeats.assign(
        run=np.repeat(np.arange(len(competing_rows)), [*map(len, competing_rows)]),
        place=places[rows],
        variance=(half_width / _NORMAL_95) ** 2,
    )


def pairs(measured: Competing, axis: str) -> pd.DataFrame:
    """The pairs of runs that differ only in an axis and in what follows from it.

    They have the columns `value`, `against`, `left` and `right` (rows of the runs with the baseline and with the
    value), `block` (a number for all that is equal), and `log_ratio`, the logarithm of the ratio of speeds.
    """
    runs = measured.runs
    following = [name for name in (*details_of(axis), "compile") if name in measured.varied and name != axis]
    equal = [name for name in measured.axes if name not in (axis, *following)]
    codes = pd.DataFrame({name: pd.factorize(runs[name])[0] for name in (*equal, *following)}, runs.index)
    # The variables and the container of a run make its environment, which therefore follows from them.
    codes["where"] = pd.factorize(runs["sweep" if is_of_variant(axis) else "environment"])[0]
    block = codes.assign(alike=runs["alike"]).groupby([*equal, "where", "alike"]).ngroup()
    sides = pd.DataFrame({"value": runs[axis], "block": block, "run": runs.index})[runs[axis].notna()]
    comparable = sides[sides.groupby("block")["value"].transform("nunique") > 1]
    number_by_value = comparable["value"].value_counts()
    listed_first = Counter(set_value(of[axis]) for of in runs["first_values"][comparable.index] if axis in of)
    baseline = max(
        in_order(axis, number_by_value.index),
        key=lambda value: (listed_first[value], number_by_value[value]),
        default=None,
    )
    is_baseline = comparable["value"] == baseline
    left = comparable[is_baseline].rename(columns={"value": "against", "run": "left"})
    joined = left.merge(comparable[~is_baseline].rename(columns={"run": "right"}), on="block")
    for name in following:  # -1 stands for a detail that has no choice
        a, b = (codes[name].to_numpy()[joined[side]] for side in ("left", "right"))
        joined = joined[(a == b) | (a < 0) | (b < 0)]
    return joined.assign(log_ratio=_log_ratios(runs, joined)).reset_index(drop=True)


def why_no_pairs(measured: Competing, axis: str) -> str:
    """Why an axis that varied has no pair."""
    if axis in FOLLOWING:
        return "it follows from the other axes and the batch"
    values = in_order(axis, measured.runs[axis])
    if len(values) > 1:
        return "no two runs differ only in it"
    only = f"only {axis}={value_text(axis, values[0])} has" if values else "no value has"
    return f"{only} runs that can win"


def require_pairs(measured: Competing, axis: str, of_runs: pd.DataFrame) -> None:
    """Raises ConfigError without a pair of runs."""
    if not len(of_runs):
        todo = "to list the axes that have pairs: ultrabench sweep effects"
        raise ConfigError(f"no pairs for {axis}: {why_no_pairs(measured, axis)}; {todo}")


def effects(measured: Competing, axis: str) -> list[Effect]:
    """The effect of each value of an axis but the baseline, in the order of the values; empty without any pair."""
    all_pairs = pairs(measured, axis)
    if not len(all_pairs):
        return []
    baseline = all_pairs["against"].iloc[0]
    others = [value for value in in_order(axis, measured.runs[axis]) if value != baseline]
    effect_by_value = {value: effect(measured, of_value) for value, of_value in all_pairs.groupby("value")}
    return [effect_by_value.get(value) or Effect(value=value, against=baseline) for value in others]


HEADS = ("axis", "value", "baseline", "speedup", f"{100 * LEVEL:.0f} % interval", "pairs")
"""Names of the columns of a table of effects."""


def effects_by_axis(measured: Competing) -> dict[str, list[Effect]]:
    """Axis that varied -> its effects; axes with the largest proven effect come first, those without pairs last."""
    of_axes = {axis: effects(measured, axis) for axis in measured.varied}
    worth = {axis: (bool(of), max((e.proven for e in of), default=0.0)) for axis, of in of_axes.items()}
    return {axis: of_axes[axis] for axis in sorted(worth, key=worth.__getitem__, reverse=True)}


def cells(axis: str, effect: Effect) -> list[str]:
    """The texts of an effect in the columns of HEADS."""
    numbers = (effect.ratio, effect.low, effect.high)
    ratio, low, high = ("" if x is None else f"{x:.3f}" if x < 100 else f"{x:,.0f}" for x in numbers)
    values = value_text(axis, effect.value), value_text(axis, effect.against)
    too_few = "pairs" if effect.pairs < FEWEST_PAIRS else "allocations"
    needed = f" (need {FEWEST_PAIRS})" if too_few == "pairs" else ""
    none = f"too few {too_few}{needed}" if effect.pairs else ""
    return [axis, *values, ratio, f"{low} to {high}" if low else none, f"{effect.pairs:,}"]


def notes(measured: Competing, of_axes: Mapping[str, Sequence[Effect]]) -> list[str]:
    """Sentences below a table of these effects."""
    intervals = sum(effect.low is not None for of_axis in of_axes.values() for effect in of_axis)
    misses = f"Each interval misses the true ratio in {100 * (1 - LEVEL):.0f} % of cases"
    by_chance = (
        f"{(1 - LEVEL) * intervals:.1g} of the {counted(intervals, 'interval')} may exclude 1 by chance"
    )
    return [
        *(f"No pairs for {axis}: {why_no_pairs(measured, axis)}." for axis, of in of_axes.items() if not of),
        "The baseline is the first value listed in the sweep, or the most frequent value if that one was not compared.",
        measured.note,
        f"{misses}: about {by_chance}.",
    ]


def effect(measured: Competing, of_value: pd.DataFrame) -> Effect:
    """The effect that the pairs of one value show, of which there is at least one."""
    value, baseline = of_value[["value", "against"]].iloc[0]
    units, unit_of_repeat, compared = measured.runs, measured.repeats["run"], of_value
    if of_value["block"].nunique() == 1:  # a single pair has no spread, but its repeats have
        by_repeat = _pairs_of_repeats(measured.repeats, of_value)
        if by_repeat["block"].nunique() > 1:
            units, unit_of_repeat, compared = measured.repeats, measured.repeats.index.to_series(), by_repeat
    block = pd.factorize(compared["block"])[0]
    size = np.bincount(block)
    variances = sum(units["variance"].to_numpy()[compared[side]] for side in ("left", "right"))
    middle, *ends = _interval(
        np.bincount(block, _log_ratios(units, compared)) / size,
        _shares(unit_of_repeat, measured.repeats["place"], compared, block) / size[:, None],
        float(np.mean(variances)),
    )
    low, high = map(exp, ends) if ends else (None, None)
    return Effect(value=value, against=baseline, ratio=exp(middle), low=low, high=high, pairs=len(of_value))


def _pairs_of_repeats(repeats: pd.DataFrame, of_runs: pd.DataFrame) -> pd.DataFrame:
    """The pairs of repeats of one number among pairs of runs; `left` and `right` are rows of the repeats."""
    numbered = repeats.reset_index(names="row")[["run", "repeat", "row"]]
    left = of_runs[["left", "right"]].merge(numbered, left_on="left", right_on="run")
    joined = left.merge(numbered, left_on=["right", "repeat"], right_on=["run", "repeat"])
    return joined[["row_x", "row_y", "repeat"]].set_axis(["left", "right", "block"], axis=1)


def _log_ratios(units: pd.DataFrame, compared: pd.DataFrame) -> Any:
    """The logarithms of the ratios of speeds, each relative to the control where both sides have the same one."""
    rates = units["rate"].to_numpy(dtype=float)
    ratios = units["control_ratio"].to_numpy(dtype=float)
    control = pd.factorize(units["control"].where(units["control_ratio"] > 0))[0]
    left, right = (compared[side].to_numpy() for side in ("left", "right"))
    by_control = (control[left] == control[right]) & (control[left] >= 0)
    return np.log(np.where(by_control, ratios[right] / ratios[left], rates[right] / rates[left]))


def _shares(unit_of_repeat: pd.Series, place: pd.Series, compared: pd.DataFrame, block: Any) -> Any:
    """Block x allocation: how many more runs of its right sides than of its left sides lie in the allocation."""
    places = np.unique(place[unit_of_repeat.isin({*compared["left"], *compared["right"]})])
    of_unit = np.zeros((unit_of_repeat.max() + 1, len(places)))
    is_involved = place.isin(places)
    np.add.at(of_unit, (unit_of_repeat[is_involved], np.searchsorted(places, place[is_involved])), 1)
    of_unit /= np.maximum(of_unit.sum(1), 1)[:, None]
    shares = np.zeros((block.max() + 1, len(places)))
    np.add.at(shares, block, of_unit[compared["right"]] - of_unit[compared["left"]])
    return shares


def _interval(logs: Any, places: Any, least_variance: float) -> tuple[float, ...]:
    """The mean of the logarithms and the ends of its interval; the mean alone where nothing gives an interval.

    The model: log = mean + places @ (speed of each allocation) + noise, both normal. Given the share of allocations in
    the variance, the mean has Student's distribution; these are mixed by the restricted likelihood of the shares.

    Args:
        logs: the difference of each block.
        places: block x allocation, the part of its difference that the allocation has.
        least_variance: the variance of a difference that the steps of single runs have alone.
    """
    number, centre = len(logs), float(logs.mean())
    u, scale, _ = np.linalg.svd(places, full_matrices=False)
    u, squares = u[:, scale > 1e-9], scale[scale > 1e-9] ** 2
    rank = len(squares)
    # Where all pairs go from some allocations to others, only differences between allocations tell of chance.
    confounded = rank > 0 and number - float((u.sum(0) ** 2).sum()) < 1e-9
    freedom = rank - 1 if confounded else max(number - 1 - rank, rank) if rank else number - 1
    if number < FEWEST_PAIRS or freedom < 1:
        return (centre,)
    shares = _SHARES if rank else np.zeros(1)
    spread = shares / (1 - shares) * number / max(squares.sum(), 1e-9)
    weights = 1 / (1 + spread[:, None] * squares)
    ones, rest, deviations = u.sum(0), logs - centre, u.T @ (logs - centre)
    precision = number + (weights - 1) @ ones**2
    shift = (weights - 1) @ (ones * deviations) / precision
    squared = rest @ rest + (weights - 1) @ deviations**2 - shift**2 * precision
    variance = np.maximum(squared / (number - 1), max(least_variance, 1e-12))
    likelihood = 0.5 * (np.log(weights).sum(1) - np.log(precision) - (number - 1) * np.log(variance))
    mixture = np.exp(likelihood - likelihood.max())
    mixture /= mixture.sum()
    error = np.sqrt(variance / precision)
    ends = (_quantile(p, centre + shift, error, mixture, freedom) for p in (0.5 - LEVEL / 2, 0.5 + LEVEL / 2))
    return centre + float(mixture @ shift), *ends


def _quantile(p: float, means: Any, errors: Any, mixture: Any, freedom: int) -> float:
    """The quantile of a mixture of Student's distributions, by bisection."""
    of_parts = means + errors * stdtrit(freedom, p)
    low, high = float(of_parts.min()), float(of_parts.max())
    for _ in range(25):
        middle = (low + high) / 2
        is_below = mixture @ stdtr(freedom, (middle - means) / errors) < p
        low, high = (middle, high) if is_below else (low, middle)
    return (low + high) / 2
