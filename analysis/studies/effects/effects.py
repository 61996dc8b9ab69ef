"""What each value of a knob is worth, all else equal: ratios of speeds of runs that differ only in it.

docs/guide/effects.md says which runs make a pair, how the interval follows, and how often it is right.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import exp, log
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from scipy.special import stdtr, stdtrit

from ultrabench.analysis.results.environments import DRIVERLESS, environment_numbers
from ultrabench.analysis.results.knobs import COLUMNS as KNOB_COLUMNS
from ultrabench.analysis.results.knobs import in_order, is_of_variant, knobs, set_value, value_text
from ultrabench.analysis.results.left_out import none_left
from ultrabench.analysis.results.options import variant_in
from ultrabench.analysis.results.planned import PREDICTED
from ultrabench.analysis.results.ranking import Ranking
from ultrabench.analysis.results.schema import MODEL
from ultrabench.errors import ConfigError, are, counted, require_known
from ultrabench.layout import FOLLOWING, details_of
from ultrabench.partial_step import SCREENED_BY
from ultrabench.result import NOT_TRIED, Status
from ultrabench.standing import Standing
from ultrabench.sweep.predict.predict import LIKELY_OOM
from ultrabench.sweep.running.early_stopping import (
    ALL_RUNS,
    FEWEST_PAIRS,
    IN_FULL,
    TooFewPairs,
    all_settings,
    have_interval,
    too_few_text,
)

CONFIDENCE = 0.98
"""Probability with which an interval contains the true ratio.

It is above 0.95 so that hardly ever more than 5 of 100 tables without an effect seem to have one.
"""
_NORMAL_95 = float(stdtrit(np.inf, 0.975))
"""Half the 95 % interval of a step time, in standard deviations."""
_EQUAL_COLUMNS = ["hardware", "kernel", *MODEL, "nodes", "gpus", "source"]
"""Columns that are equal in the two runs of a pair, besides knobs and environment."""
_VARIANCE_SHARES = (np.arange(40) + 0.5) / 40
"""Possible shares of the variance that comes from allocations; the interval weighs each by how well
it fits the pairs."""
_REASON_BY_CODE = {
    "failed": "out of memory or failed", "suspect": "suspect", "stopped": "stopped early as slower than the best",
}  # fmt: skip
"""Code of a reason to leave a run out of all pairs -> the reason in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What one value of a knob is worth against the baseline."""

    value: Any
    against: Any
    """The baseline: the first value that the sweep lists, or the most frequent value if no
    compared run has that one."""
    ratio: float | None = None
    """Geometric mean of the ratios of speeds; None without a pair."""
    low: float | None = None
    """Lower end of the interval of the ratio, with probability CONFIDENCE; None where the runs give no interval."""
    high: float | None = None
    pairs: int = 0
    """Number of pairs of runs."""
    predicted: bool = False
    """Whether a plan predicts the speeds. Formulas have no noise, so that there is no interval."""

    @property
    def proven_log_ratio(self) -> float:
        """The smallest |log(ratio)| in the interval; 0 where the interval contains 1, or there is none."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return 0.0
        return min(abs(log(self.low)), abs(log(self.high)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompetingRuns:
    """The runs of a table that may win, with their knobs."""

    runs: pd.DataFrame
    """One row for each run: its knobs, `model`, `num_params`, `sweep`, `environment`, `alike` (a number
    that runs share whose _EQUAL_COLUMNS are equal), `first_values` (a mapping from axes to values), the medians of its
    repeats in `rate` and `control_ratio`, `control`, and `variance`, that of the log of its speed from its steps alone.
    """
    repeats: pd.DataFrame
    """One row for each repeat that competes, with the same speeds; `run`: its row in `runs`,
    `allocation`: its number."""
    knobs: tuple[str, ...]
    """The names of all knobs."""
    varied_knobs: tuple[str, ...]
    """The knobs that have several values among the runs that were tried."""
    are_predicted: bool
    """Whether a plan predicts their speeds."""
    num_left_out: Counter[str]
    """Code of _REASON_BY_CODE -> number of runs left out for it."""
    num_screened: int
    """Number of `runs` that were only screened, by parts of steps or few whole steps."""
    stopped_runs: pd.DataFrame
    """Rows like those of `runs` for the runs that were stopped early as slower than the best."""
    unmade_runs: pd.DataFrame
    """Rows like those of `runs` for the runs that the adaptive search left out although they are likely to fit into
    memory."""

    @property
    def axes(self) -> list[str]:
        """The knobs whose values have effects of their own: those that varied, without dp and gas."""
        return [name for name in self.varied_knobs if name not in FOLLOWING]

    @property
    def note(self) -> str:
        """What was left out, and what follows from that."""
        counts = ((self.num_left_out[code], reason) for code, reason in _REASON_BY_CODE.items())
        reason_texts = [f"{num_runs:,} {reason}" for num_runs, reason in counts if num_runs]
        sentence = f"Runs excluded: {', '.join(reason_texts) or 'none'}."
        if self.num_screened:
            fact = (
                f"{self.num_screened:,} of {counted(len(self.runs), 'run')} {are(self.num_screened)} measured"
            )
            sentence += f" {fact} {SCREENED_BY}, whose intervals are wider."
        if self.num_left_out["stopped"]:
            sentence += " Only slow runs are stopped early, so a slow value may look better than it is."
            sentence += f" To measure every run in full, launch under another name= with {IN_FULL}."
        return sentence

    def require_axis(self, name: str | None) -> str:
        """The knob of this name; raises ConfigError unless it varied."""
        varied_text = f"axes that varied: {', '.join(self.axes) or 'none'}"
        if name is None:
            raise ConfigError(f"no axis given; give one, as in ultrabench plot effect AXIS; {varied_text}")
        if name in FOLLOWING:
            rule = "follows from the other axes and the batch; choose another axis"
            raise ConfigError(f"{name} {rule}; {varied_text}")
        if name == "nodes":
            raise ConfigError(
                "runs on different numbers of nodes cannot be paired",
                "use: ultrabench plot scaling --axis nodes",
            )
        longer_names = [knob for knob in self.knobs if knob.startswith(f"{name}_")]
        if name not in self.knobs and len(longer_names) == 1:
            raise ConfigError(f"unknown axis {name!r}; did you mean {longer_names[0]}? ({varied_text})")
        require_known("axis", self.knobs, name, first=self.axes)
        if name not in self.axes:
            raise ConfigError(f"{name} did not vary in these runs; {varied_text}")
        return name


def competing(table: pa.Table) -> CompetingRuns:
    """The runs of a table that may win, by the rule of `standing`.

    Raises:
        ConfigError: there are none.
    """
    return competing_in(Ranking(table, more_columns=COLUMNS))


COLUMNS = ("gpus", "first_values", "suspect_codes", "dominated_by", *DRIVERLESS)
"""Columns that effects read beside those of a ranking."""


def competing_in(ranking: Ranking) -> CompetingRuns:
    """What `competing` returns, for a table that was already ranked with these COLUMNS."""
    frame = ranking.frame
    standings = [*chain.from_iterable(ranking.standings.values())]
    tried = [standing for standing in standings if standing.outcome not in NOT_TRIED]
    winners = [index for index, standing in enumerate(tried) if _why_left_out(standing) is None]
    if not winners:
        raise none_left(frame.loc[[standing.repeat for standing in tried]], "none can win")
    unmade = _is_unmade(frame)
    unmade_rows = [standing.repeat for standing in standings if unmade[standing.repeat]]
    rows = [*(standing.repeat for standing in tried), *unmade_rows]
    knob_frame, environments = knobs(ranking.rows_at(rows, KNOB_COLUMNS)), environment_numbers(frame)
    described = knob_frame.assign(
        **frame.loc[rows, ["model", "num_params", "sweep"]].reset_index(drop=True),
        first_values=frame.loc[rows, "first_values"].fillna("").map(variant_in).to_numpy(),
        environment=environments[rows].to_numpy(),
        alike=frame.groupby(_EQUAL_COLUMNS, dropna=False).ngroup()[rows].to_numpy(),
    )
    stopped = [index for index, standing in enumerate(tried) if _why_left_out(standing) == "stopped"]
    tried_knobs = knob_frame[: len(tried)]
    repeats = _repeats(frame, [tried[index].competing for index in winners])
    repeats_by_run = repeats.groupby("run")
    return CompetingRuns(
        runs=described.iloc[winners]
        .reset_index(drop=True)
        .assign(
            control=repeats_by_run["control"].first(),
            variance=repeats_by_run["variance"].mean() / repeats_by_run.size(),
            **repeats_by_run[["rate", "control_ratio"]].median(),
        ),
        stopped_runs=described.iloc[stopped],
        unmade_runs=described[len(tried) :],
        repeats=repeats,
        knobs=(*knob_frame,),
        varied_knobs=tuple(str(name) for name in knob_frame if tried_knobs[name].nunique() > 1),
        are_predicted=bool((frame["source"] == PREDICTED).any()),
        num_screened=sum(tried[index].screened for index in winners),
        num_left_out=Counter(code for code in map(_why_left_out, tried) if code),
    )


def _why_left_out(standing: Standing) -> str | None:
    """The code in _REASON_BY_CODE of the reason to leave a run out; None for a run that may win."""
    if standing.outcome != Status.OK:
        return "failed"
    if standing.suspect:
        return "suspect"
    return None if standing.may_win and (standing.rate or 0) > 0 else "stopped"


def _is_unmade(frame: pd.DataFrame) -> pd.Series:
    """Whether the adaptive search left out a run that is likely to fit; no rule did,
    and none that ran out of memory.
    """
    is_left_out = (frame["status"] == Status.SKIPPED) & frame["rule"].isna() & frame["dominated_by"].isna()
    return is_left_out & ~(frame["p_oom"] > LIKELY_OOM)


def _repeats(frame: pd.DataFrame, competing_rows: Sequence[tuple[int, ...]]) -> pd.DataFrame:
    """The repeats of each run, from the rows of the ranking that compete."""
    allocations, _ = pd.factorize(frame["allocation_key"])
    frame_rows = [frame_row for rows_of_run in competing_rows for frame_row in rows_of_run]
    repeats = frame.loc[frame_rows, ["repeat", "rate", "control", "control_ratio"]].reset_index(drop=True)
    half_widths = frame["width"].astype(float).fillna(0)[frame_rows].to_numpy()
    return repeats.assign(
        run=np.repeat(np.arange(len(competing_rows)), [*map(len, competing_rows)]),
        allocation=allocations[frame_rows],
        variance=(half_widths / _NORMAL_95) ** 2,
    )


def pairs(competing: CompetingRuns, axis: str) -> pd.DataFrame:
    """The pairs of runs that differ only in an axis and in what follows from it.

    They have the columns `value`, `against`, `left` and `right` (rows of the runs with the baseline and with the
    value), `block` (a number for all that is equal), and `log_ratio`, the logarithm of the ratio of speeds.
    """
    runs = competing.runs
    details = [n for n in (*details_of(axis), "compile") if n in competing.varied_knobs and n != axis]
    equal_knobs = [name for name in competing.axes if name not in (axis, *details)]
    codes = pd.DataFrame({name: pd.factorize(runs[name])[0] for name in (*equal_knobs, *details)}, runs.index)
    # Variables and the container are knobs of the variant and make the environment; their pairs share a sweep instead.
    codes["where"] = pd.factorize(runs["sweep" if is_of_variant(axis) else "environment"])[0]
    block = codes.assign(alike=runs["alike"]).groupby([*equal_knobs, "where", "alike"]).ngroup()
    runs_by_block = pd.DataFrame({"value": runs[axis], "block": block, "run": runs.index})[runs[axis].notna()]
    compared_runs = runs_by_block[runs_by_block.groupby("block")["value"].transform("nunique") > 1]
    num_runs_by_value = compared_runs["value"].value_counts()
    num_listed_first = Counter(
        set_value(first[axis]) for first in runs["first_values"][compared_runs.index] if axis in first
    )
    baseline = max(
        in_order(axis, num_runs_by_value.index),
        key=lambda value: (num_listed_first[value], num_runs_by_value[value]),
        default=None,
    )
    is_baseline = compared_runs["value"] == baseline
    baseline_runs = compared_runs[is_baseline].rename(columns={"value": "against", "run": "left"})
    run_pairs = baseline_runs.merge(compared_runs[~is_baseline].rename(columns={"run": "right"}), on="block")
    for name in details:  # code -1: the detail has no choice in this run
        left_codes, right_codes = (codes[name].to_numpy()[run_pairs[side]] for side in ("left", "right"))
        run_pairs = run_pairs[(left_codes == right_codes) | (left_codes < 0) | (right_codes < 0)]
    return run_pairs.assign(log_ratio=_log_ratios(runs, run_pairs)).reset_index(drop=True)


def why_no_pairs(competing: CompetingRuns, axis: str) -> str:
    """The reason why an axis that varied has no pair."""
    if axis in FOLLOWING:
        return "it follows from the other axes and the batch"
    values = in_order(axis, competing.runs[axis])
    if len(values) > 1:
        return "no two runs differ only in it"
    subject = f"only {axis}={value_text(axis, values[0])} has" if values else "no value has"
    return f"{subject} runs that can win"


def require_pairs(competing: CompetingRuns, axis: str, run_pairs: pd.DataFrame) -> None:
    """Raises ConfigError without a pair of runs."""
    if not len(run_pairs):
        todo = "to list the axes that have pairs: ultrabench sweep effects"
        raise ConfigError(f"no pairs for {axis}: {why_no_pairs(competing, axis)}; {todo}")


def effects(competing: CompetingRuns, axis: str) -> list[Effect]:
    """The effect of each value of an axis but the baseline, in the order of the values; empty without any pair."""
    all_pairs = pairs(competing, axis)
    if not len(all_pairs):
        return []
    baseline = all_pairs["against"].iloc[0]
    other_values = [value for value in in_order(axis, competing.runs[axis]) if value != baseline]
    effect_by_value = {value: effect(competing, rows) for value, rows in all_pairs.groupby("value")}
    return [
        effect_by_value.get(value) or Effect(value=value, against=baseline, predicted=competing.are_predicted)
        for value in other_values
    ]


def too_few_pairs(
    competing: CompetingRuns, effects_by_axis: Mapping[str, Sequence[Effect]]
) -> list[TooFewPairs]:
    """The values for which early stopping has left too few pairs for an interval, those of options first."""
    stopped_runs, unmade_runs = competing.stopped_runs, competing.unmade_runs
    if not len(stopped_runs) + len(unmade_runs):
        return []
    all_runs, sweeps = _with_runs(competing, stopped_runs, unmade_runs), competing.runs["sweep"].unique()
    # A sweep keeps the results of runs that were stopped.
    new_name = f"name={sweeps[0]}-full" if len(sweeps) == 1 else "name=NAME"
    all_too_few = list[TooFewPairs]()
    for axis in sorted(all_runs.axes, key=lambda name: not is_of_variant(name)):
        num_by_value, possible_by_value = _num_pairs(competing, axis), _num_pairs(all_runs, axis)
        with_interval = {effect.value for effect in effects_by_axis.get(axis, ()) if effect.low is not None}
        lacking = [
            value
            for value, num_possible in possible_by_value.items()
            if have_interval(num_possible)
            and not have_interval(num_by_value[value])
            and value not in with_interval
        ]
        if not lacking:
            continue
        num_with_stopped = _num_pairs(_with_runs(competing, stopped_runs), axis)
        num_with_unmade = _num_pairs(_with_runs(competing, unmade_runs), axis)
        for value in lacking:
            settings: tuple[str, ...] = (ALL_RUNS, IN_FULL, new_name)
            if have_interval(num_with_stopped[value]):
                settings = (IN_FULL, new_name)
            elif have_interval(num_with_unmade[value]):  # slow runs, which would be stopped early
                settings = (ALL_RUNS, IN_FULL)
            numbers = {"pairs": num_by_value[value], "possible_pairs": possible_by_value[value]}
            all_too_few.append(TooFewPairs(axis=axis, value=value, **numbers, settings=settings))
    return all_too_few


def _too_few_lines(
    competing: CompetingRuns, effects_by_axis: Mapping[str, Sequence[Effect]]
) -> Iterator[str]:
    """A sentence if early stopping has left too few pairs, with what to launch to have them."""
    if all_too_few := too_few_pairs(competing, effects_by_axis):
        fact, settings = too_few_text(all_too_few, "has left"), all_settings(all_too_few)
        yield f"{fact[0].upper()}{fact[1:]}; to have enough, launch again with {' '.join(settings)}"


def _with_runs(competing: CompetingRuns, *more_runs: pd.DataFrame) -> CompetingRuns:
    """The runs as if further ones had been measured to the end, in the first environment of their sweep."""
    runs = pd.concat([competing.runs, *(runs for runs in more_runs if len(runs))], ignore_index=True)
    first_of_sweep = competing.runs.groupby("sweep")["environment"].first()
    environments = runs["environment"].where(runs["rate"].notna(), runs["sweep"].map(first_of_sweep))
    varied_knobs = tuple(name for name in competing.knobs if runs[name].nunique() > 1)
    return replace(competing, runs=runs.assign(environment=environments), varied_knobs=varied_knobs)


def _num_pairs(competing: CompetingRuns, axis: str) -> Counter[Any]:
    """Value of an axis -> number of its differences from the baseline; pairs of one difference count once."""
    all_pairs = pairs(competing, axis)
    return Counter({value: rows["block"].nunique() for value, rows in all_pairs.groupby("value")})


HEADS = ("axis", "value", "baseline", "speedup", f"{100 * CONFIDENCE:.0f} % interval", "pairs")
"""Names of the columns of a table of effects."""


def effects_by_axis(competing: CompetingRuns) -> dict[str, list[Effect]]:
    """Axis that varied -> its effects; axes with the largest proven effect come first, those without pairs last.

    Of predictions the largest effect counts.
    """
    unsorted = {axis: effects(competing, axis) for axis in competing.varied_knobs}

    def largest(item: tuple[str, list[Effect]]) -> float:
        predicted_sizes = (abs(log(effect.ratio or 1)) for effect in item[1])
        proven_sizes = (effect.proven_log_ratio for effect in item[1])
        return max(predicted_sizes if competing.are_predicted else proven_sizes, default=-1.0)

    return dict(sorted(unsorted.items(), key=largest, reverse=True))


def cells(axis: str, effect: Effect) -> list[str]:
    """The texts of an effect in the columns of HEADS."""
    estimates = (effect.ratio, effect.low, effect.high)
    ratio, low, high = ("" if x is None else f"{x:.3f}" if x < 100 else f"{x:,.0f}" for x in estimates)
    value_texts = value_text(axis, effect.value), value_text(axis, effect.against)
    lacking = "pairs" if effect.pairs < FEWEST_PAIRS else "allocations"
    needed_text = f" (need {FEWEST_PAIRS})" if lacking == "pairs" else ""
    why_no_interval = f"too few {lacking}{needed_text}" if effect.pairs else ""
    if effect.predicted:
        why_no_interval = "none: predicted"
    return [axis, *value_texts, ratio, f"{low} to {high}" if low else why_no_interval, f"{effect.pairs:,}"]


def notes(competing: CompetingRuns, effects_by_axis: Mapping[str, Sequence[Effect]]) -> list[str]:
    """Sentences below a table of these effects."""
    all_effects = chain.from_iterable(effects_by_axis.values())
    num_intervals = sum(effect.low is not None for effect in all_effects)
    unpaired_axes = [axis for axis, axis_effects in effects_by_axis.items() if not axis_effects]
    formula_sentence = "Predictions come from formulas, so their effects have no interval."
    miss_text = f"Each interval misses the true ratio in {100 * (1 - CONFIDENCE):.0f} % of cases"
    chance_text = (
        f"{(1 - CONFIDENCE) * num_intervals:.1g} of the {counted(num_intervals, 'interval')} "
        "may exclude 1 by chance"
    )
    return [
        *(f"No pairs for {axis}: {why_no_pairs(competing, axis)}." for axis in unpaired_axes),
        "The baseline is the first value listed in the sweep, or the most frequent value if that one was not compared.",
        competing.note,
        *_too_few_lines(competing, effects_by_axis),
        formula_sentence if competing.are_predicted else f"{miss_text}: about {chance_text}.",
    ]


def effect(competing: CompetingRuns, value_pairs: pd.DataFrame) -> Effect:
    """The effect that the pairs of one value show; there must be at least one pair."""
    value, baseline = value_pairs[["value", "against"]].iloc[0]
    runs, repeats = competing.runs, competing.repeats
    measurements, row_of_repeat, row_pairs = runs, repeats["run"], value_pairs
    if value_pairs["block"].nunique() == 1:  # a single pair has no spread, but its repeats have
        repeat_pairs = _pairs_of_repeats(repeats, value_pairs)
        if repeat_pairs["block"].nunique() > 1:
            measurements, row_of_repeat, row_pairs = repeats, repeats.index.to_series(), repeat_pairs
    block_of_pair = pd.factorize(row_pairs["block"])[0]
    num_pairs = np.bincount(block_of_pair)
    variances = sum(measurements["variance"].to_numpy()[row_pairs[side]] for side in ("left", "right"))
    mean_log, *log_ends = _mean_and_interval(
        np.bincount(block_of_pair, _log_ratios(measurements, row_pairs)) / num_pairs,
        _allocation_shares(row_of_repeat, repeats["allocation"], row_pairs, block_of_pair)
        / num_pairs[:, None],
        float(np.mean(variances)),
    )
    low, high = map(exp, log_ends) if log_ends and not competing.are_predicted else (None, None)
    ratio, num_run_pairs = exp(mean_log), len(value_pairs)
    estimate = {"ratio": ratio, "low": low, "high": high}
    predicted = competing.are_predicted
    return Effect(value=value, against=baseline, **estimate, pairs=num_run_pairs, predicted=predicted)


def _pairs_of_repeats(repeats: pd.DataFrame, run_pairs: pd.DataFrame) -> pd.DataFrame:
    """The pairs of repeats with equal numbers among these pairs of runs; `left` and `right` are rows of the repeats."""
    numbered_repeats = repeats.reset_index(names="row")[["run", "repeat", "row"]]
    with_left = run_pairs[["left", "right"]].merge(numbered_repeats, left_on="left", right_on="run")
    repeat_pairs = with_left.merge(numbered_repeats, left_on=["right", "repeat"], right_on=["run", "repeat"])
    return repeat_pairs[["row_x", "row_y", "repeat"]].set_axis(["left", "right", "block"], axis=1)


def _log_ratios(measurements: pd.DataFrame, row_pairs: pd.DataFrame) -> Any:
    """The logarithms of the ratios of speeds, each relative to the control where both sides have the same one."""
    rates = measurements["rate"].to_numpy(dtype=float)
    ratios = measurements["control_ratio"].to_numpy(dtype=float)
    controls = pd.factorize(measurements["control"].where(measurements["control_ratio"] > 0))[0]
    left, right = (row_pairs[side].to_numpy() for side in ("left", "right"))
    has_same_control = (controls[left] == controls[right]) & (controls[left] >= 0)
    return np.log(np.where(has_same_control, ratios[right] / ratios[left], rates[right] / rates[left]))


def _allocation_shares(
    row_of_repeat: pd.Series, allocation: pd.Series, row_pairs: pd.DataFrame, blocks: Any
) -> Any:
    """Block x allocation: how many more runs of its right sides than of its left sides lie in the allocation."""
    allocations = np.unique(allocation[row_of_repeat.isin({*row_pairs["left"], *row_pairs["right"]})])
    shares = np.zeros((row_of_repeat.max() + 1, len(allocations)))
    is_involved = allocation.isin(allocations)
    np.add.at(shares, (row_of_repeat[is_involved], np.searchsorted(allocations, allocation[is_involved])), 1)
    shares /= np.maximum(shares.sum(1), 1)[:, None]
    differences = np.zeros((blocks.max() + 1, len(allocations)))
    np.add.at(differences, blocks, shares[row_pairs["right"]] - shares[row_pairs["left"]])
    return differences


def _mean_and_interval(log_ratios: Any, allocation_shares: Any, least_variance: float) -> tuple[float, ...]:
    """The mean of the logarithms and the ends of its interval; the mean alone where nothing gives an interval.

    The model: log ratio = mean + allocation_shares @ (log speed of each allocation) + noise, both normal. Given the
    share of allocations in the variance, the mean has Student's distribution; the distributions for all shares are
    mixed, each weighted by the restricted likelihood of its share.

    Args:
        log_ratios: the difference of each block.
        allocation_shares: block x allocation, the part of its difference that the allocation has.
        least_variance: the variance of a difference that the steps of single runs have alone.
    """
    num_blocks, mean_log = len(log_ratios), float(log_ratios.mean())
    vectors, singular_values, _ = np.linalg.svd(allocation_shares, full_matrices=False)
    is_nonzero = singular_values > 1e-9
    vectors, eigenvalues = vectors[:, is_nonzero], singular_values[is_nonzero] ** 2
    rank = len(eigenvalues)
    # If left and right sides ran in different allocations, only differences between allocations show what is chance.
    is_confounded = rank > 0 and num_blocks - float((vectors.sum(0) ** 2).sum()) < 1e-9
    dof = rank - 1 if is_confounded else max(num_blocks - 1 - rank, rank) if rank else num_blocks - 1
    if num_blocks < FEWEST_PAIRS or dof < 1:
        return (mean_log,)
    variance_shares = _VARIANCE_SHARES if rank else np.zeros(1)
    variance_ratios = variance_shares / (1 - variance_shares) * num_blocks / max(eigenvalues.sum(), 1e-9)
    weights = 1 / (1 + variance_ratios[:, None] * eigenvalues)
    vector_sums, residuals = vectors.sum(0), log_ratios - mean_log
    projections = vectors.T @ residuals
    total_weight = num_blocks + (weights - 1) @ vector_sums**2
    mean_shift = (weights - 1) @ (vector_sums * projections) / total_weight
    sum_of_squares = residuals @ residuals + (weights - 1) @ projections**2 - mean_shift**2 * total_weight
    variance = np.maximum(sum_of_squares / (num_blocks - 1), max(least_variance, 1e-12))
    log_likelihood = 0.5 * (
        np.log(weights).sum(1) - np.log(total_weight) - (num_blocks - 1) * np.log(variance)
    )
    mixture = np.exp(log_likelihood - log_likelihood.max())
    mixture /= mixture.sum()
    standard_error = np.sqrt(variance / total_weight)
    probabilities = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)
    ends = (_quantile(p, mean_log + mean_shift, standard_error, mixture, dof) for p in probabilities)
    return mean_log + float(mixture @ mean_shift), *ends


def _quantile(p: float, means: Any, standard_errors: Any, weights: Any, dof: int) -> float:
    """The quantile p of a weighted mixture of Student's distributions with these degrees of freedom, by bisection."""
    part_quantiles = means + standard_errors * stdtrit(dof, p)
    low, high = float(part_quantiles.min()), float(part_quantiles.max())
    for _ in range(25):
        middle = (low + high) / 2
        is_below = weights @ stdtr(dof, (middle - means) / standard_errors) < p
        low, high = (middle, high) if is_below else (low, middle)
    return (low + high) / 2
