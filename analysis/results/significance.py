"""Which step times of two result tables differ by more than chance: a rank test over steps and a test between runs.

docs/guide/compare.md says what the tests take for chance, and why p-values are corrected as they are.
"""

from collections.abc import Iterable, Sequence
from math import log, sqrt
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from ultrabench.analysis.results.numbers import percent
from ultrabench.analysis.results.rows import Row
from ultrabench.result import SLOWER, Status

Runs = Sequence[Sequence[float]]
"""The step times in seconds of each run of one layout."""
ALPHA = 0.05
"""Share of the findings that may be false: corrected p-values up to this are significant."""
MIN_DOF = 5
"""Fewest degrees of freedom with which the spread between runs is estimated."""


def timed_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of measured runs whose times count: ok and not suspect.

    Runs that were stopped early as slower than the best count only where none was measured in full, as in rankings.
    """
    measured_rows = [row for row in rows if row["status"] == Status.OK and row["suspect"] is None]
    in_full = [row for row in measured_rows if row["stopped"] != SLOWER]
    return [row for row in in_full or measured_rows if all(t and t > 0 for t in _times_s(row))]


def run_times_s(rows: Sequence[Row]) -> list[list[float]]:
    """The step times of each of the `timed_rows` in seconds.

    They are those of its steps, or the step time of the run where its steps are unknown.
    """
    return [_times_s(row) for row in timed_rows(rows)]


def _times_s(row: Row) -> list[float]:
    return row["step_times_s"] or [row["step_time_s"]]


def line_error_rel(rows: Sequence[Row]) -> float | None:
    """How much the step times of rows may be off since whole steps follow from parts, as a fraction; 0 for whole steps.

    The result is None where no row of parts knows its error. Runs of one layout have the same error, so the largest
    known one stands for all.
    """
    of_parts = [row["extrapolation_error_rel"] for row in timed_rows(rows) if row["measured_gas"] is not None]
    if not of_parts:
        return 0.0
    return max((error for error in of_parts if error is not None), default=None)


def corrected(pairs: Sequence[tuple[Runs, Runs]]) -> tuple[pd.DataFrame, list[str]]:
    """The p-values of layouts with several measured steps on both sides, and sentences about what counts as chance.

    `p_least` is the smallest p-value that the first of two tests can give for these numbers of steps; it is NaN where
    a side has a single step or none. `p_value` is two-sided: the larger one of Mann-Whitney's test on the steps, which
    count for fewer where neighbours are alike, and of Student's test on the logarithms of the runs' medians.
    `p_corrected` is that of `false_discovery`.
    """
    p_values = pd.DataFrame(np.nan, range(len(pairs)), ["p_value", "p_corrected", "p_least"])
    tested_numbers = [n for n, pair in enumerate(pairs) if min(sum(map(len, runs)) for runs in pair) > 1]
    if not tested_numbers:
        return p_values, []
    correlation = _step_correlation(run for n in tested_numbers for runs in pairs[n] for run in runs)
    log_spread, dof, spread_text = _spread_between_runs([pairs[n] for n in tested_numbers])
    p_value_pairs = []
    for n in tested_numbers:
        runs_a, runs_b = pairs[n]
        steps_a, steps_b = np.concatenate(runs_a), np.concatenate(runs_b)
        p_value = _rank_test_p(steps_a, steps_b, correlation)
        separated_steps = np.arange(len(steps_a)), len(steps_a) + np.arange(len(steps_b))
        if log_spread:
            standard_error = log_spread * sqrt(1 / len(runs_a) + 1 / len(runs_b))
            ratio = step_time(runs_b) / step_time(runs_a)
            p_value = max(p_value, 2 * stats.t.sf(abs(log(ratio)) / standard_error, dof))
        p_value_pairs.append((min(1.0, p_value), _rank_test_p(*separated_steps, correlation)))
    p_values.loc[tested_numbers, ["p_value", "p_least"]] = p_value_pairs
    p_values["p_corrected"] = false_discovery(p_values["p_value"], p_values["p_least"])
    weight_text = f"{(1 - correlation) / (1 + correlation):.2f}"
    return p_values, [
        f"Neighbouring steps correlate by {correlation:.2f}, so a step counts as {weight_text} independent steps.",
        spread_text,
    ]


def false_discovery(p_values: pd.Series, least_p_values: pd.Series) -> pd.Series:
    """The p-values corrected by Benjamini and Hochberg over all layouts whose steps suffice for a significant one.

    With too few steps a layout cannot become significant, whatever its difference: it is not tested (NaN), and does
    not make the correction of the others stricter. The numbers of steps decide this alone, not their times.

    Args:
        least_p_values: the smallest p-value that the numbers of steps of each layout can give.
    """
    corrected_p_values = pd.Series(np.nan, p_values.index)
    can_be_significant = least_p_values <= ALPHA
    if can_be_significant.any():
        tested_p_values = p_values[can_be_significant].clip(upper=1)
        corrected_p_values[can_be_significant] = stats.false_discovery_control(tested_p_values)
    return corrected_p_values


def _rank_test_p(steps_a: Any, steps_b: Any, correlation: float) -> float:
    """The p-value of Mann-Whitney's test, in which steps count for fewer by the correlation of neighbours."""
    p_value = stats.mannwhitneyu(steps_a, steps_b).pvalue
    scale = sqrt((1 - correlation) / (1 + correlation))
    return float(2 * stats.norm.sf(stats.norm.isf(p_value / 2) * scale))


def _step_correlation(runs: Iterable[Sequence[float]]) -> float:
    """Correlation of a step's rank in its run with that of the next step, of all runs together, at least 0.

    The estimate of a short run is about (1 + 3 r) / n too low, which is added again (Kendall, 1954).
    """
    sum_of_products, sum_of_squares, lengths = 0.0, 0.0, list[int]()
    for run in runs:
        if len(run) >= 3:
            deviations = stats.rankdata(run) - (len(run) + 1) / 2
            sum_of_products += float(deviations[1:] @ deviations[:-1])
            sum_of_squares += float(deviations @ deviations)
            lengths.append(len(run))
    if not sum_of_squares:
        return 0.0
    correlation = sum_of_products / sum_of_squares
    return float(np.clip(correlation + (1 + 3 * correlation) / np.mean(lengths), 0.0, 0.95))


def _spread_between_runs(pairs: Sequence[tuple[Runs, Runs]]) -> tuple[float, int, str]:
    """The standard deviation between runs of the log of the step time, its degrees of freedom,
    and a sentence on its origin.

    It is 0 where it is unknown. Without repeats it is that of the ratios of the layouts, by their median absolute
    deviation, which is as sure as the usual standard deviation of a third as many.
    """
    sum_of_squares, dof = 0.0, 0
    for runs in (runs for pair in pairs for runs in pair):
        log_times = np.log([median(run) for run in runs])
        sum_of_squares += float(((log_times - log_times.mean()) ** 2).sum())
        dof += len(runs) - 1
    if dof >= MIN_DOF:
        spread = sqrt(sum_of_squares / dof)
        return spread, dof, f"Repeats of a run vary by {percent(spread)}, which the test treats as noise."
    fact = "Too few runs have repeats (use repeats=2)"
    log_ratios = np.log([step_time(b) / step_time(a) for a, b in pairs])
    dof = (len(log_ratios) - 1) // 3
    if dof >= MIN_DOF:
        # 1.4826 median absolute deviations are the standard deviation of a normal distribution.
        spread = 1.4826 * float(np.median(abs(log_ratios - np.median(log_ratios)))) / sqrt(2)
        spread_text = (
            f"{fact}: the test takes noise between runs from the spread of the ratios, {percent(spread)}."
        )
        return spread, dof, spread_text
    return 0.0, 0, f"{fact} and too few layouts were measured: the test ignores noise between runs."


def step_time(runs: Runs) -> float:
    """Step time of a layout in seconds: the geometric mean of the medians of its runs."""
    return float(np.exp(np.mean(np.log([median(run) for run in runs]))))
