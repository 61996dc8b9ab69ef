"""Compares two result tables A and B layout by layout: step times with a rank test, ends of runs, and winners.

docs/compare.md says what the test takes for chance, and why p-values are corrected as they are.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from scipy import stats

from ultrabench.analysis.cells import MAY_DIFFER, Cell
from ultrabench.analysis.environments import CHOSEN, OBSERVED, Environments, differing
from ultrabench.analysis.numbers import percent
from ultrabench.analysis.ranking import final_runs, rank
from ultrabench.analysis.rows import Row
from ultrabench.analysis.schema import MODEL
from ultrabench.errors import ConfigError, counted
from ultrabench.layout import AXES, labels
from ultrabench.result import FAULTS
from ultrabench.result import SLOWER as STOPPED_AS_SLOWER

Runs = Sequence[Sequence[float]]
"""The step times in seconds of each run of one layout."""
_Key = tuple[Any, ...]
"""Model, batch and layout of a row: its values in the columns of `_columns`."""

ALPHA = 0.05
"""Share of the findings that may be false: corrected p-values up to this are significant."""
LEAST_FREEDOM = 5
"""Fewest degrees of freedom with which the spread between runs is estimated."""
SLOWER, FASTER, FAILING, RUNNING_AGAIN = "slower", "faster", "failing", "running again"
"""Findings about a layout of B."""
_MACHINE = (
    "peak_flops_per_s", "gemm_flops_per_s", "memory_copy_bytes_per_s", "sm_clock_hz", "allreduce_busbw_bytes_per_s",
)  # fmt: skip
"""Rates of the machine itself, which no layout and no program changes."""
_SAME_RATE = 0.01
"""Relative difference up to which a rate of the machine is the same, whatever the threshold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What B has in common with A, and how it differs."""

    names: tuple[str, str]
    """Names of A and B."""
    threshold: float
    """Largest relative difference of step times that is no finding."""
    rows: pd.DataFrame
    """One row for each layout that was tried in both, sorted by ratio: model, batch and layout, status and
    median step time of both, `ratio` B / A, `p_value`, `p_corrected`, `p_least` (the smallest p-value that so
    many steps can give), `stopped` (whether a run was stopped early as slower than the best of its cell), and
    `finding`, which is null where there is none."""
    winners: pd.DataFrame
    """One row for each cell that another layout wins: `best_a`, `best_b`, `as_good` (whether the best of A is as
    good as the best in B), and `cost`, the step time of the best of A over that of the best of B, both in B."""
    differing: Mapping[str, tuple[str, str]]
    """Column -> its values in A and in B, where these differ."""
    only: tuple[int, int]
    """Numbers of layouts that were tried only in A and only in B."""
    notes: tuple[str, ...]
    """Sentences about what was left out and what the test takes for chance."""

    @property
    def title(self) -> str:
        """The names of both tables, such as `new against old`."""
        return f"{self.names[1]} against {self.names[0]}"

    @property
    def findings(self) -> pd.DataFrame:
        """The rows with a finding: first layouts that fail in B, then the others, the slowest first."""
        found = self.rows[self.rows["finding"].notna()]
        return found.iloc[::-1].sort_values("finding", key=lambda names: names != FAILING, kind="stable")

    @property
    def unproven(self) -> pd.DataFrame:
        """The rows without a finding that have a step time in both, the largest ratio first."""
        return self.rows[self.rows["finding"].isna() & self.rows["ratio"].notna()].iloc[::-1]

    @property
    def warning(self) -> str | None:
        """A sentence if most layouts with a step time in both could not become significant if they alone differed."""
        both = self.rows[self.rows["ratio"].notna()]
        untestable = int((~(both["p_least"] <= _p_alone(both))).sum())
        if 2 * untestable <= len(both):
            return None
        told = f"{untestable:,} of {counted(len(both), 'layout')} have too few measured steps"
        rest = "to be significant alone, however much they differ; some may be slower: measure more steps"
        return f"{told} {rest}"

    @property
    def median_ratio(self) -> float | None:
        """The median of the ratios of all layouts; None where none was measured in both."""
        known = self.rows["ratio"].dropna()
        return float(known.median()) if len(known) else None

    @property
    def regressions(self) -> int:
        """Number of layouts that are slower or fail in B."""
        return int(self.rows["finding"].isin([SLOWER, FAILING]).sum())


def compare(a: pa.Table, b: pa.Table, threshold: float, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compares the layouts of the same model and batch that were tried in both tables.

    Args:
        threshold: relative difference of step times up to which it is no finding, such as 0.05.

    Raises:
        ConfigError: no layout was tried in both.
    """
    tried = [_tried(table) for table in (a, b)]
    work, layout = _columns(tried)
    in_a, in_b = (_by_key(rows, work + layout) for rows in tried)
    both = sorted(in_a.keys() & in_b.keys(), key=str)
    if not both:
        raise ConfigError(_nothing_in_common(tried, work + layout))
    pairs = [(_runs(in_a[key]), _runs(in_b[key])) for key in both]
    p_values, chance = corrected(pairs)
    rows = [_row(in_a[key], in_b[key], pair) for key, pair in zip(both, pairs, strict=True)]
    frame = pd.DataFrame(rows).join(p_values)
    frame["finding"] = [_finding(row, threshold) for row in frame.to_dict("records")]
    return Comparison(
        names=names,
        threshold=threshold,
        rows=frame.sort_values(["ratio", "model", "nodes", "layout"], ignore_index=True),
        winners=_changed((rank(a), rank(b)), (in_a, in_b), slice(len(work))),
        differing=differing(a, b),
        only=(len(in_a) - len(both), len(in_b) - len(both)),
        notes=(
            *_machine([(in_a[key], in_b[key]) for key in both], threshold),
            *_left_out(tried, frame),
            *chance,
        ),
    )


def corrected(pairs: Sequence[tuple[Runs, Runs]]) -> tuple[pd.DataFrame, list[str]]:
    """The p-values of layouts with several measured steps on both sides, and sentences about what counts as chance.

    `p_least` is the smallest p-value that the first of two tests can give for these numbers of steps.
    `p_value` is two-sided: the larger one of Mann-Whitney's test on the steps, which count for fewer where
    neighbours are alike, and of Student's test on the logarithms of the runs' medians. `p_corrected` is that
    of Benjamini and Hochberg over all layouts. Both are NaN where a side has a single step or none.
    """
    p_values = pd.DataFrame(np.nan, range(len(pairs)), ["p_value", "p_corrected", "p_least"])
    tested = [at for at, pair in enumerate(pairs) if min(sum(map(len, runs)) for runs in pair) > 1]
    if not tested:
        return p_values, []
    correlation = _correlation(run for at in tested for runs in pairs[at] for run in runs)
    spread, freedom, told = _between_runs([pairs[at] for at in tested])
    found = []
    for at in tested:
        a, b = pairs[at]
        steps_a, steps_b = np.concatenate(a), np.concatenate(b)
        p = _ranks(steps_a, steps_b, correlation)
        apart = np.arange(len(steps_a)), len(steps_a) + np.arange(len(steps_b))
        if spread:
            error = spread * sqrt(1 / len(a) + 1 / len(b))
            p = max(p, 2 * stats.t.sf(abs(log(_step_time(b) / _step_time(a))) / error, freedom))
        found.append((min(1.0, p), _ranks(*apart, correlation)))
    p_values.loc[tested, ["p_value", "p_least"]] = found
    p_values.loc[tested, "p_corrected"] = stats.false_discovery_control(p_values.loc[tested, "p_value"])
    worth = f"{(1 - correlation) / (1 + correlation):.2f}"
    return p_values, [
        f"Steps next to each other correlate by {correlation:.2f}: one counts as {worth}.",
        told,
    ]


def _ranks(a: Any, b: Any, correlation: float) -> float:
    """The p-value of Mann-Whitney's test, in which steps count for fewer by the correlation of neighbours."""
    found = stats.mannwhitneyu(a, b).pvalue
    fewer = sqrt((1 - correlation) / (1 + correlation))
    return float(2 * stats.norm.sf(stats.norm.isf(found / 2) * fewer))


def _correlation(runs: Iterable[Sequence[float]]) -> float:
    """Correlation of a step's rank in its run with that of the next step, of all runs together, at least 0.

    The estimate of a short run is about (1 + 3 r) / n too low, which is added again (Kendall, 1954).
    """
    products, squares, lengths = 0.0, 0.0, list[int]()
    for run in runs:
        if len(run) >= 3:
            off = stats.rankdata(run) - (len(run) + 1) / 2
            products, squares = products + float(off[1:] @ off[:-1]), squares + float(off @ off)
            lengths.append(len(run))
    if not squares:
        return 0.0
    r = products / squares
    return float(np.clip(r + (1 + 3 * r) / np.mean(lengths), 0.0, 0.95))


def _between_runs(pairs: Sequence[tuple[Runs, Runs]]) -> tuple[float, int, str]:
    """The standard deviation of the logarithm of a run's step time between runs, its freedom, and what it is from.

    It is 0 where it is unknown. Without repeats it is that of the ratios of the layouts, by their median absolute
    deviation, which is as sure as the usual standard deviation of a third as many.
    """
    squares, freedom = 0.0, 0
    for runs in (runs for pair in pairs for runs in pair):
        logs = np.log([median(run) for run in runs])
        squares, freedom = squares + float(((logs - logs.mean()) ** 2).sum()), freedom + len(runs) - 1
    if freedom >= LEAST_FREEDOM:
        spread = sqrt(squares / freedom)
        return spread, freedom, f"Repeats of a run differ by {percent(spread)}, which counts as chance."
    few = "Too few runs have repeats (use repeats=2)"
    ratios = np.log([_step_time(b) / _step_time(a) for a, b in pairs])
    freedom = (len(ratios) - 1) // 3
    if freedom >= LEAST_FREEDOM:
        # 1.4826 median absolute deviations are the standard deviation of a normal distribution.
        spread = 1.4826 * float(np.median(abs(ratios - np.median(ratios)))) / sqrt(2)
        told = f"{few}: chance is what the ratios of most layouts differ by, {percent(spread)}."
        return spread, freedom, told
    return 0.0, 0, f"{few}, and too few layouts were measured: chance between runs is not in the test."


def _step_time(runs: Runs) -> float:
    """Step time of a layout in seconds: the geometric mean of the medians of its runs."""
    return float(np.exp(np.mean(np.log([median(run) for run in runs]))))


def _tried(table: pa.Table) -> list[Row]:
    """The final rows of runs that train a model and were tried, in an order that their content gives."""
    run = pc.field("status").is_valid() & ~pc.field("status").isin(["rejected", "skipped"])
    ends = (
        "run_id",
        "sweep",
        "repeat",
        "status",
        "suspect",
        "stopped",
        "step_times_s",
        "step_time_s",
        "env_id",
    )
    wanted = dict.fromkeys(
        (*ends, "seq_len", "gbs", *MODEL, "nodes", *AXES, *MAY_DIFFER, *CHOSEN, *OBSERVED, *_MACHINE)
    )
    tried = final_runs(table).filter(run)
    pairs = zip(tried.select([*wanted]).to_pylist(), Environments(tried).parts, strict=True)
    rows: list[Row] = [row | parts for row, parts in pairs]
    return sorted(rows, key=lambda row: (row["run_id"], str(row["sweep"]), row["repeat"] or 0, str(row)))


def _columns(tried: Sequence[Sequence[Row]]) -> tuple[list[str], list[str]]:
    """The columns that tell model and batch, and those that tell the layout, of which both tables have values."""

    def known(names: Iterable[str]) -> list[str]:
        return [name for name in names if all(any(r[name] is not None for r in rows) for rows in tried)]

    # Where one table has several values of a column, layouts are compared at equal ones.
    apart = [name for name in (*MAY_DIFFER, *CHOSEN, *OBSERVED) if name != "driver_version"]
    several = [name for name in apart if any(len({row[name] for row in rows} - {None}) > 1 for rows in tried)]
    sizes = known(name for name in MODEL if name != "model") or ["model"]
    return [*sizes, *known(("nodes", "seq_len", "gbs")), *several], known(AXES)


def _by_key(rows: Sequence[Row], names: Sequence[str]) -> dict[_Key, list[Row]]:
    found = defaultdict[_Key, list[Row]](list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return found


def _nothing_in_common(tried: Sequence[Sequence[Row]], names: Sequence[str]) -> str:
    """The message for tables without a common layout, with the columns that have no common value."""
    counts = f"A has {counted(len(tried[0]), 'tried run')}, B {len(tried[1]):,}, and no layout is in both"
    values = {name: [sorted({str(row[name]) for row in rows}) for rows in tried] for name in names}
    apart = [
        f"{name} is {' / '.join(a[:3])} in A and {' / '.join(b[:3])} in B"
        for name, (a, b) in values.items()
        if a and b and not {*a} & {*b}
    ]
    return f"{counts}{''.join(f'; {text}' for text in apart[:3])}: compare the same models and batch"


def _runs(rows: Sequence[Row]) -> list[list[float]]:
    """The step times of each measured run; the one known time where single steps are unknown."""
    measured = (row for row in rows if row["status"] == "ok" and row["suspect"] is None)
    times = (row["step_times_s"] or [row["step_time_s"]] for row in measured)
    return [run for run in times if all(time and time > 0 for time in run)]


def _row(a: Sequence[Row], b: Sequence[Row], pair: tuple[Runs, Runs]) -> Row:
    """What the tables say about one layout."""
    shared = {name: a[0][name] for name in ("model", "num_params", "nodes", "seq_len", "gbs", *MAY_DIFFER)}
    told = shared | {"layout": " ".join(labels(a[0])), **{name: a[0][name] for name in AXES}}
    for side, rows, runs in (("a", a, pair[0]), ("b", b, pair[1])):
        told[f"run_id_{side}"] = rows[0]["run_id"]
        told[f"status_{side}"] = "ok" if runs else _end(rows)
        told[f"step_time_{side}_s"] = _step_time(runs) if runs else np.nan
        told[f"runs_{side}"], told[f"steps_{side}"] = len(runs), sum(map(len, runs))
    stopped = any(row["stopped"] == STOPPED_AS_SLOWER for row in (*a, *b))
    return told | {"stopped": stopped, "ratio": told["step_time_b_s"] / told["step_time_a_s"]}


def _end(rows: Sequence[Row]) -> str:
    """The most common end of a layout that has no good measurement; an ok run in doubt is `suspect`."""
    ends = Counter("suspect" if row["status"] == "ok" else str(row["status"]) for row in rows)
    return min(ends, key=lambda end: (-ends[end], end))


def _finding(row: Mapping[Any, Any], threshold: float) -> str | None:
    """What the row of a layout says about B; None where nothing is shown."""
    if row["status_a"] == "ok" and row["status_b"] in FAULTS:
        return FAILING
    if row["status_a"] in FAULTS and row["status_b"] == "ok":
        return RUNNING_AGAIN
    if row["p_corrected"] <= ALPHA and row["ratio"] > 1 + threshold:
        return SLOWER
    return FASTER if row["p_corrected"] <= ALPHA and row["ratio"] < 1 / (1 + threshold) else None


def _changed(
    cells: Sequence[list[Cell]], sides: Sequence[Mapping[_Key, list[Row]]], work: slice
) -> pd.DataFrame:
    """The cells that different layouts win in A and in B.

    Args:
        cells: the rankings of A and B.
        sides: the rows of A and B by key.
        work: the part of a key that tells model and batch, but not the layout.
    """
    in_a, in_b = (
        {(row["run_id"], row["env_id"]): key for key, rows in side.items() for row in rows} for side in sides
    )
    best_of_a = {key[work]: key for cell in cells[0] if (key := in_a.get((cell.run_id, cell.env_id)))}
    found = []
    for cell in cells[1]:
        new = in_b.get((cell.run_id, cell.env_id))
        old = best_of_a.get(new[work]) if new else None
        if new is None or old in (None, new):
            continue
        kept, best = _runs(sides[1].get(old, ())), _runs(sides[1][new])
        found.append({
            "model": cell.model,
            "nodes": cell.nodes,
            "best_a": " ".join(labels(sides[0][old][0])),
            "best_b": " ".join(labels(cell.layout)),
            "as_good": any(key == old for (run_id, _), key in in_b.items() if run_id in cell.as_good_as_best),
            "cost": _step_time(kept) / _step_time(best) if kept and best else np.nan,
        })  # fmt: skip
    return pd.DataFrame(found, columns=["model", "nodes", "best_a", "best_b", "as_good", "cost"])


def _machine(both: Sequence[tuple[list[Row], list[Row]]], threshold: float) -> Iterator[str]:
    """A sentence that names the rates of the machine that differ, in the median of the layouts in both tables."""
    told = []
    for name in _MACHINE:
        rates = [[[row[name] for row in rows if row[name]] for rows in pair] for pair in both]
        ratios = [median(b) / median(a) for a, b in rates if a and b]
        if ratios and abs(log(ratio := median(ratios))) > log(1 + max(threshold, _SAME_RATE)):
            told.append(f"{name} is {ratio:.2f} x")
    if told:
        yield f"In B the machine has other rates, from which other step times may come: {', '.join(told)}."


def _p_alone(rows: pd.DataFrame) -> float:
    """The largest p by which one layout is significant, corrected for all, if no other one differs."""
    return ALPHA / max(1, int(rows["p_value"].notna().sum()))


def _of_them(number: int) -> str:
    return f"{number:,} of them {'was' if number == 1 else 'were'}"


def _left_out(tried: Sequence[Sequence[Row]], rows: pd.DataFrame) -> Iterator[str]:
    """Sentences about what was compared and what was left out."""
    both = rows[rows["ratio"].notna()]
    yield f"{counted(len(rows), 'layout')} tried in both, {len(both):,} of them with a step time in both."
    if stopped := int(both["stopped"].sum()):
        yield f"{_of_them(stopped)} stopped early in A or in B, as slower than the best of the cell."
    needed = _p_alone(both)
    short = both.loc[both["p_least"] > needed, "p_least"]
    if len(short):
        why = f"because a side has too few steps: p is {short.min():.2g} or more, of at most {needed:.2g}"
        yield f"{len(short):,} of them could not become significant if each alone differed, {why}."
    if untested := int(both["p_value"].isna().sum()):
        yield f"{_of_them(untested)} not tested, because a side has a single step time."
    suspect = [sum(row["suspect"] is not None for row in side) for side in tried]
    if any(suspect):
        yield f"Suspect rows are left out: {suspect[0]:,} of A and {suspect[1]:,} of B."
