"""Compares two result tables A and B layout by layout: step times, ends of runs, and winners."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, log, log1p
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ultrabench.analysis.results.cells import MAY_DIFFER, model_text, without_common_value
from ultrabench.analysis.results.environments import CHOSEN, OBSERVED, differing
from ultrabench.analysis.results.numbers import percent
from ultrabench.analysis.results.options import in_rows, variant_in
from ultrabench.analysis.results.planned import is_predicted
from ultrabench.analysis.results.ranking import Ranking
from ultrabench.analysis.results.rows import Row
from ultrabench.analysis.results.run_label import run_label
from ultrabench.analysis.results.schema import CHECKPOINT, MODEL
from ultrabench.analysis.results.significance import (
    ALPHA,
    Runs,
    corrected,
    line_error_rel,
    run_times_s,
    timed_rows,
)
from ultrabench.analysis.studies.compare.other_models import other_models
from ultrabench.errors import ConfigError, counted
from ultrabench.layout import AXES
from ultrabench.partial_step import SCREENED_BY
from ultrabench.result import FAULTS, NOT_TRIED, Status
from ultrabench.result import SLOWER as STOPPED_AS_SLOWER
from ultrabench.variant import KERNEL_OPTIONS, option_texts

_Key = tuple[Any, ...]
"""Model, batch and layout of a row: its values in the columns of `_key_columns`."""

SLOWER, FASTER, FAILING, RUNNING_AGAIN = "slower", "faster", "failing", "running again"
"""Findings about a layout of B, compared with A."""
SUSPECT = "suspect"
"""The status of a layout here whose ok runs are all suspect, so that it has no step time."""
_MACHINE_RATES = (
    "peak_flops_per_s", "gemm_flops_per_s", "memory_copy_bytes_per_s", "sm_clock_hz", "allreduce_busbw_bytes_per_s",
)  # fmt: skip
"""Rates of the machine itself, which no layout and no program changes."""
_SAME_RATE_TOLERANCE = 0.01
"""Relative difference up to which a rate of the machine is the same, whatever the threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What B has in common with A, and how it differs."""

    names: tuple[str, str]
    """Names of A and B."""
    threshold: float
    """Largest relative difference of step times that is not a finding, a fraction."""
    rows: pd.DataFrame
    """One row for each layout that was tried in both, sorted by ratio: model, batch and layout,
    status and median step time of both, `ratio` B / A, `p_value`, `p_corrected`, `p_least` (the smallest p-value that
    so many steps can give), `by_parts` (whether parts of steps gave a step time that was compared),
    `extrapolation_error_rel` (that of both sides together: 0 where whole steps were compared, NaN where it is unknown),
    the columns of CHECKPOINT of both,
    `stopped` (whether a run was stopped early as slower than the best of its cell), and `finding`, which is null where
    there is none."""
    winners: pd.DataFrame
    """One row for each cell that another layout wins: `best_a`, `best_b`, `as_good` (whether the best of A is as
    good as the best in B), and `cost`, the step time of the best of A over that of the best of B, both in B, each
    relative to the control of its allocation where B is ranked so."""
    differing: Mapping[str, tuple[str, str]]
    """Column -> its values in A and in B, where these differ."""
    num_only: tuple[int, int]
    """Numbers of layouts that were tried only in A and only in B."""
    notes: tuple[str, ...]
    """Sentences about what was left out and what the test counts as chance."""

    @property
    def title(self) -> str:
        """The names of both tables, such as `new compared with old`."""
        return f"{self.names[1]} compared with {self.names[0]}"

    @property
    def findings(self) -> pd.DataFrame:
        """The rows with a finding: first layouts that fail in B, then the others, the slowest first."""
        slowest_first = self.rows[self.rows["finding"].notna()].iloc[::-1]
        return slowest_first.sort_values("finding", key=lambda names: names != FAILING, kind="stable")

    @property
    def unproven(self) -> pd.DataFrame:
        """The rows without a finding whose step times differ by more than the threshold, the largest difference first.

        The difference is not significant, or within the error of parts of steps.
        """
        log_ratios = np.log(self.rows["ratio"])
        is_unproven = self.rows["finding"].isna() & (log_ratios.abs() > log(1 + self.threshold))
        by_difference = log_ratios[is_unproven].abs().sort_values(ascending=False, kind="stable").index
        unproven_rows: pd.DataFrame = self.rows.loc[by_difference]
        return unproven_rows

    @property
    def warning(self) -> str | None:
        """A sentence if most layouts with a step time in both could not become significant if they alone differed."""
        timed = self.rows[self.rows["ratio"].notna()]
        num_untestable = int((~(timed["p_least"] <= _needed_p(timed))).sum())
        if 2 * num_untestable <= len(timed):
            return None
        fact = (
            f"{num_untestable:,} of {counted(len(timed), 'layout')}: too few measured steps to be significant"
        )
        return f"{fact}, whatever the difference; some may be slower: measure more steps"

    @property
    def median_ratio(self) -> float | None:
        """The median of the ratios of all layouts; None where none was measured in both."""
        ratios = self.rows["ratio"].dropna()
        return float(ratios.median()) if len(ratios) else None

    @property
    def checkpoints(self) -> list[Row]:
        """For each column of CHECKPOINT the medians in A and B of the layouts that have it in
        both, and their number.
        """
        medians = []
        for name in CHECKPOINT:
            values = self.rows.reindex(columns=[f"{name}_a", f"{name}_b"]).dropna().set_axis([*"ab"], axis=1)
            if len(values):
                medians.append({"column": name, **values.median(), "layouts": len(values)})
        return medians

    @property
    def regressions(self) -> int:
        """Number of layouts that are slower or fail in B."""
        return int(self.rows["finding"].isin([SLOWER, FAILING]).sum())


def compare(
    table_a: pa.Table, table_b: pa.Table, threshold: float, names: tuple[str, str] = ("A", "B")
) -> Comparison:
    """Compares the layouts of the same model and batch that were tried in both tables.

    Args:
        threshold: relative difference of step times up to which it is no finding, such as 0.05.

    Raises:
        ConfigError: a table is a plan, no layout was tried in both, or none of them was measured in both,
            failed or ran again.
    """
    if plans := [side for side, table in zip("AB", (table_a, table_b), strict=True) if is_predicted(table)]:
        fact = (
            f"{' and '.join(plans)} {'are plans' if len(plans) > 1 else 'is a plan'}: formulas have no noise"
        )
        remedy = "for their ratios: ultrabench heatmap A --compare B; against measurements: ultrabench predict validate"
        raise ConfigError(f"{fact}, so no difference can be tested", remedy)
    columns = (
        "repeat",
        "step_times_s",
        "measured_gas",
        "extrapolation_error_rel",
        *MAY_DIFFER,
        *CHOSEN,
        *OBSERVED,
        *_MACHINE_RATES,
        *CHECKPOINT,
    )
    rankings = [Ranking(table, more_columns=columns) for table in (table_a, table_b)]
    sides = [*map(_tried_rows, rankings)]
    workload_columns, layout_columns = _key_columns(sides)
    key_columns = workload_columns + layout_columns
    rows_in_a, rows_in_b = (_rows_by_key(side, key_columns) for side in sides)
    common_keys = sorted(rows_in_a.keys() & rows_in_b.keys(), key=str)
    other_variants = "variant" in layout_columns and _other_variants((rows_in_a, rows_in_b))
    if not common_keys:
        raise ConfigError(_no_common_layout(sides, key_columns, other_variants or ""))
    compared_rows = [_measured_alike(rows_in_a[key], rows_in_b[key]) for key in common_keys]
    pairs = [(run_times_s(rows_of_a), run_times_s(rows_of_b)) for rows_of_a, rows_of_b in compared_rows]
    p_values, chance_notes = corrected(pairs)
    rows = [_layout_row(*sides_of_key, pair) for sides_of_key, pair in zip(compared_rows, pairs, strict=True)]
    frame = pd.DataFrame(rows).join(p_values)
    frame["finding"] = [_finding(row, threshold) for row in frame.to_dict("records")]
    if frame["ratio"].isna().all() and frame["finding"].isna().all():
        raise ConfigError(_nothing_comparable(frame))
    return Comparison(
        names=names,
        threshold=threshold,
        rows=frame.sort_values(["ratio", "model", "nodes", "layout"], ignore_index=True),
        winners=_changed_winners(rankings, (rows_in_a, rows_in_b), slice(len(workload_columns))),
        differing=differing(table_a, table_b),
        num_only=(len(rows_in_a) - len(common_keys), len(rows_in_b) - len(common_keys)),
        notes=(
            *_machine_sentences([(rows_in_a[key], rows_in_b[key]) for key in common_keys], threshold),
            *_left_out_sentences(sides, frame),
            *_part_sentences(frame),
            *_screened_sentences([(rows_in_a[key], rows_in_b[key]) for key in common_keys]),
            *([f"Not compared: layouts with {other_variants}."] if other_variants else []),
            *(f"Not compared: {text}." for text in other_models(*sides)),
            *chance_notes,
        ),
    )


def _tried_rows(ranking: Ranking) -> list[Row]:
    """The rows of runs that were tried, in an order that depends on their content; `number` is the row in the ranking.

    `options` has the values of the options that vary in its table, and `attention` the name that the sweep lists.
    """
    all_rows, numbers = ranking.rows_at(ranking.frame.index), range(len(ranking.frame))
    numbered = enumerate(
        zip(all_rows, ranking.environments.parts, in_rows(ranking.options, numbers), strict=True)
    )
    rows = [
        row
        | parts
        | {"number": n, "options": options, "attention": row["attention_listed"] or row["attention"]}
        for n, (row, parts, options) in numbered
        if row["status"] not in NOT_TRIED
    ]
    return sorted(rows, key=lambda row: (row["run_id"], str(row["sweep"]), row["repeat"] or 0, str(row)))


def _key_columns(sides: Sequence[Sequence[Row]]) -> tuple[list[str], list[str]]:
    """The columns of model and batch, and those of the layout, that have values in both tables."""

    def known_names(names: Iterable[str]) -> list[str]:
        return [n for n in names if all(any(row[n] is not None for row in rows) for rows in sides)]

    # Where one table has several values of a column, layouts are compared at equal ones.
    varied_columns = [
        name
        for name in (*MAY_DIFFER, *CHOSEN, *OBSERVED, *KERNEL_OPTIONS)
        if name != "driver_version" and any(len({row[name] for row in rows} - {None}) > 1 for rows in sides)
    ]
    size_columns = known_names(name for name in MODEL if name != "model") or ["model"]
    has_variant = any(row["variant"] is not None for rows in sides for row in rows)
    workload_columns = [*size_columns, *known_names(("nodes", "gpus", "seq_len", "gbs")), *varied_columns]
    return workload_columns, [*known_names(AXES), *["variant"] * has_variant]


def _rows_by_key(rows: Sequence[Row], names: Sequence[str]) -> dict[_Key, list[Row]]:
    rows_by_key = defaultdict[_Key, list[Row]](list)
    for row in rows:
        rows_by_key[tuple(row[name] for name in names)].append(row)
    return rows_by_key


def _measured_alike(rows_a: Sequence[Row], rows_b: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    """The rows of a layout in A and B that are compared.

    They are those measured in full if both sides have such step times, else those with whole steps, else those by parts
    of steps, else all.
    """

    def in_full(row: Row) -> bool:
        return not row["screened"]

    def by_whole_steps(row: Row) -> bool:
        return row["measured_gas"] is None

    def by_parts(row: Row) -> bool:
        return row["measured_gas"] is not None

    for is_alike in (in_full, by_whole_steps, by_parts):
        alike_a, alike_b = ([row for row in rows if is_alike(row)] for rows in (rows_a, rows_b))
        if run_times_s(alike_a) and run_times_s(alike_b):
            return alike_a, alike_b
    return rows_a, rows_b


def _part_sentences(layouts: pd.DataFrame) -> Iterator[str]:
    """A sentence about the layouts whose step times follow from parts of steps."""
    errors = layouts["extrapolation_error_rel"][layouts["by_parts"]]
    if num_known := int(errors.notna().sum()):
        fact = f"{counted(num_known, 'layout')} measured by parts of steps: whole steps follow from them"
        yield f"{fact}, and only differences beyond that error (up to {percent(errors.max())}) are findings."
    if num_unknown := int(errors.isna().sum()):
        fact = f"{counted(num_unknown, 'layout')} measured by parts of steps with an unknown error"
        yield f"{fact}: no difference is a finding; measure both sides by whole steps."


def _screened_sentences(pairs: Sequence[tuple[list[Row], list[Row]]]) -> Iterator[str]:
    """A sentence that counts the layouts in both tables that A, and that B, has only screened."""

    def is_only_screened(rows: Sequence[Row]) -> bool:
        ok_rows = [row for row in rows if row["status"] == Status.OK]
        return bool(ok_rows) and all(row["screened"] for row in ok_rows)

    num_a, num_b = (sum(is_only_screened(pair[side]) for pair in pairs) for side in (0, 1))
    if num_a or num_b:
        yield f"Only screened, {SCREENED_BY}: {num_a:,} of the layouts in A, {num_b:,} in B."


def _other_variants(sides: Sequence[Mapping[_Key, list[Row]]]) -> str | None:
    """The variants that only one side has of layouts that both have; None where there are none.

    Args:
        sides: the rows of A and B by key, whose last part is the variant.
    """
    side_texts = []
    for side_name, side, other_side in zip("AB", sides, reversed(sides), strict=True):
        other_layouts = {key[:-1] for key in other_side}
        counts = Counter(key[-1] for key in side if key not in other_side and key[:-1] in other_layouts)
        variant_texts = (
            f"{' '.join(option_texts(variant_in(variant))) or 'no variant'} ({counts[variant]})"
            for variant in sorted(counts, key=str)
        )
        if counts:
            first_texts = ", ".join([*variant_texts][:3])
            side_texts.append(f"{first_texts}{' ...' * (len(counts) > 3)} only in {side_name}")
    return " and ".join(side_texts) or None


def _no_common_layout(sides: Sequence[Sequence[Row]], names: Sequence[str], other_variants: str) -> str:
    """The message for tables without a common layout, with the columns that have no common value."""
    fact = f"no layout is in both A ({counted(len(sides[0]), 'tried run')}) and B ({len(sides[1]):,})"
    if other_variants:
        todo = "to compare variants, list them in one sweep and run ultrabench sweep effects"
        return f"{fact} with the same variant: {other_variants}; {todo}"
    if models := [*other_models(*sides)]:
        todo = "compare tables of the same model, or give each model its own name"
        return f"{fact}; {'; '.join(models[:3])}: {todo}"
    values_by_column = {name: [{str(row[name]) for row in rows} for rows in sides] for name in names}
    return fact + without_common_value(values_by_column)


def _nothing_comparable(layouts: pd.DataFrame) -> str:
    """The message for tables whose common layouts have no step time in both, with how these ended."""
    texts, statuses = [], set[str]()
    for side in "ab":
        counts = Counter(layouts[f"status_{side}"])
        statuses |= counts.keys()
        texts.append(
            f"{', '.join(f'{number} {status}' for status, number in counts.most_common())} in {side.upper()}"
        )
    fact = f"nothing to compare: {counted(len(layouts), 'layout')} in both A and B, none with a step time in both"
    todo = "compare sweeps that have ended, or see ultrabench sweep top"
    if SUSPECT in statuses:
        todo = (
            "suspect runs are not compared; ultrabench collect writes why each is suspect into column suspect"
        )
    return f"{fact} ({'; '.join(texts)}); {todo}"


def _layout_row(rows_a: Sequence[Row], rows_b: Sequence[Row], pair: tuple[Runs, Runs]) -> Row:
    """The row of `Comparison.rows` for one layout."""
    row_a, mark = rows_a[0], rows_a[0]["model_mark"] or rows_b[0]["model_mark"]
    names = ("num_params", "nodes", "seq_len", "gbs", *MAY_DIFFER)
    row = {"model": model_text(row_a["model"], mark), **{name: row_a[name] for name in names}}
    options = rows_b[0]["options"] | row_a["options"]
    row |= {
        "layout": run_label(row_a | {"options": options}),
        **{name: row_a[name] for name in (*AXES, "variant")},
    }
    for side, rows, runs in (("a", rows_a, pair[0]), ("b", rows_b, pair[1])):
        row[f"run_id_{side}"] = rows[0]["run_id"]
        row[f"status_{side}"] = Status.OK.value if runs else _usual_status(rows)
        row[f"step_time_{side}_s"] = median(map(median, runs)) if runs else np.nan
        row[f"runs_{side}"], row[f"steps_{side}"] = len(runs), sum(map(len, runs))
        values_by_column = {name: [r[name] for r in rows if r[name] is not None] for name in CHECKPOINT}
        row |= {f"{name}_{side}": median(values) for name, values in values_by_column.items() if values}
    was_stopped = any(row["stopped"] == STOPPED_AS_SLOWER for row in (*rows_a, *rows_b))
    errors = [line_error_rel(rows) for rows in (rows_a, rows_b)]
    compared_rows = [*timed_rows(rows_a), *timed_rows(rows_b)]
    row["by_parts"] = any(compared_row["measured_gas"] is not None for compared_row in compared_rows)
    row["extrapolation_error_rel"] = hypot(*(np.nan if error is None else error for error in errors))
    return row | {"stopped": was_stopped, "ratio": row["step_time_b_s"] / row["step_time_a_s"]}


def _usual_status(rows: Sequence[Row]) -> str:
    """The most common status of a layout without a good measurement; a suspect ok run counts as SUSPECT."""
    ends = Counter(SUSPECT if row["status"] == Status.OK else str(row["status"]) for row in rows)
    return min(ends, key=lambda end: (-ends[end], end))


def _finding(row: Mapping[Any, Any], threshold: float) -> str | None:
    """The finding that the row of a layout shows, such as SLOWER; None if it shows none."""
    if row["status_a"] == Status.OK and row["status_b"] in FAULTS:
        return FAILING
    if row["status_a"] in FAULTS and row["status_b"] == Status.OK:
        return RUNNING_AGAIN
    log_difference, line_error = log(row["ratio"]), row["extrapolation_error_rel"]
    # An unknown error of the line is NaN, which no difference exceeds.
    is_beyond = abs(log_difference) > log1p(threshold) and abs(log_difference) > log1p(line_error)
    if not is_beyond or not row["p_corrected"] <= ALPHA:
        return None
    return SLOWER if log_difference > 0 else FASTER


def _changed_winners(
    rankings: Sequence[Ranking], sides: Sequence[Mapping[_Key, list[Row]]], workload_part: slice
) -> pd.DataFrame:
    """The cells that different layouts win in A and in B.

    Args:
        rankings: those of A and B.
        sides: the rows of A and B by key.
        workload_part: the part of a key that tells model and batch, but not the layout.
    """
    key_in_a, key_in_b = (
        {row["number"]: key for key, rows in side.items() for row in rows} for side in sides
    )
    winners_in_a = (ranked[0] for ranked in rankings[0].standings.values() if ranked[0].best)
    best_in_a = {key_in_a[winner.repeat][workload_part]: key_in_a[winner.repeat] for winner in winners_in_a}
    changed_rows = []
    for best, *losers in rankings[1].standings.values():
        new_key = key_in_b[best.repeat] if best.best else None
        old_key = best_in_a.get(new_key[workload_part]) if new_key else None
        if new_key is None or old_key in (None, new_key):
            continue
        counterparts = [loser for loser in losers if key_in_b.get(loser.repeat) == old_key]
        counterpart = next((loser for loser in counterparts if not loser.suspect), None)
        first_row = sides[1][new_key][0]
        changed_rows.append({
            "model": model_text(first_row["model"], first_row["model_mark"] or sides[0][old_key][0]["model_mark"]),
            "nodes": first_row["nodes"],
            "best_a": run_label(sides[0][old_key][0]),
            "best_b": run_label(first_row),
            "as_good": any(loser.as_good for loser in counterparts),
            "cost": best.value / counterpart.value if best.value and counterpart and counterpart.value else np.nan,
        })  # fmt: skip
    return pd.DataFrame(changed_rows, columns=["model", "nodes", "best_a", "best_b", "as_good", "cost"])


def _machine_sentences(pairs: Sequence[tuple[list[Row], list[Row]]], threshold: float) -> Iterator[str]:
    """A sentence that names the rates of the machine that differ, in the median of the layouts in both tables."""
    change_texts = []
    for name in _MACHINE_RATES:
        rate_pairs = [[[row[name] for row in rows if row[name]] for rows in pair] for pair in pairs]
        ratios = [median(rates_b) / median(rates_a) for rates_a, rates_b in rate_pairs if rates_a and rates_b]
        if ratios and abs(log(ratio := median(ratios))) > log(1 + max(threshold, _SAME_RATE_TOLERANCE)):
            change_texts.append(f"{name} is {ratio:.2f} x")
    if change_texts:
        yield f"The machine itself differs in B, which may explain other step times: {', '.join(change_texts)}."


def _needed_p(rows: pd.DataFrame) -> float:
    """The largest p-value at which one layout is significant after the correction, if no other layout differs."""
    return ALPHA / max(1, int(rows["p_corrected"].notna().sum()))


def _of_them(num_layouts: int, verb: str, plural_verb: str) -> str:
    return f"{num_layouts:,} of them {verb if num_layouts == 1 else plural_verb}"


def _left_out_sentences(sides: Sequence[Sequence[Row]], layouts: pd.DataFrame) -> Iterator[str]:
    """Sentences about what was compared and what was left out."""
    timed_layouts = layouts[layouts["ratio"].notna()]
    yield (
        f"{counted(len(layouts), 'layout')} tried in both A and B, {len(timed_layouts):,} of them with "
        "a step time in both."
    )
    if num_stopped := int(timed_layouts["stopped"].sum()):
        yield f"{_of_them(num_stopped, 'was', 'were')} stopped early in A or B as slower than the best of the cell."
    max_p, least_p_values = _needed_p(timed_layouts), timed_layouts["p_least"]
    if num_untestable := int((least_p_values > ALPHA).sum()):
        reason = "too few steps to be significant, whatever the difference"
        least_text = f"the smallest possible p is {least_p_values[least_p_values > ALPHA].min():.2g}"
        yield f"{_of_them(num_untestable, 'was', 'were')} not tested: {reason} ({least_text}, needed {ALPHA})."
    weak_p_values = least_p_values[(least_p_values > max_p) & (least_p_values <= ALPHA)]
    if num_weak := len(weak_p_values):
        limits_text = f"the smallest possible p is {weak_p_values.min():.2g}, needed {max_p:.2g}"
        yield (
            f"{_of_them(num_weak, 'has', 'have')} too few steps to be significant on "
            f"{'its' if num_weak == 1 else 'their'} own: {limits_text}."
        )
    if num_single := int(least_p_values.isna().sum()):
        yield f"{_of_them(num_single, 'was', 'were')} not tested because one side has a single step time."
    num_suspect = [sum(row["suspect"] is not None for row in side) for side in sides]
    if any(num_suspect):
        yield f"Suspect rows are excluded: {num_suspect[0]:,} in A, {num_suspect[1]:,} in B."
