"""The rates of the same runs over nights: which of their changes last, and what changed in these nights."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import hypot, log1p, nan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from scipy import stats

from ultrabench.analysis.results.collect import open_results
from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.analysis.results.environments import differing
from ultrabench.analysis.results.numbers import percent
from ultrabench.analysis.results.options import in_rows, varied_options
from ultrabench.analysis.results.ranking import PANEL_COLUMNS
from ultrabench.analysis.results.rows import Warn
from ultrabench.analysis.results.run_label import run_label
from ultrabench.analysis.results.schema import SIZES
from ultrabench.analysis.results.significance import ALPHA, corrected, false_discovery, run_times_s, step_time
from ultrabench.analysis.studies.history.change_points import (
    MIN_LENGTH,
    NUM_RECENT,
    change_points,
    outliers,
    strongest,
)
from ultrabench.errors import ConfigError, SweepFolderError, are, counted
from ultrabench.layout import AXES
from ultrabench.result import SLOWER, Status
from ultrabench.store.damage import read_each
from ultrabench.store.folder import sweep_dirs
from ultrabench.variant import KERNEL_OPTIONS

CELL = ("model", "nodes", *PANEL_COLUMNS)
_RUN_KEY = [*dict.fromkeys((*CELL, *SIZES, *AXES, "variant", "kernel_options"))]
"""Columns that are equal in all nights of a run; its id changes with the version of the program."""
_RATE_COLUMNS = ("control_ratio", "tokens_per_s_per_gpu")
"""The column of a rate: the first one where there is a control, else the second one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """One sweep of a history."""

    name: str
    """Time of its first run (UTC), or the name of the sweep where that is unknown."""
    sweep: str
    table: pa.Table


@dataclass(slots=True, kw_only=True)
class Series:
    """The rate of one run in each night."""

    cell: dict[str, Any]
    """Column of CELL -> its value."""
    layout: str
    """The layout and the options that vary as a short text."""
    run_id: str
    """The id in the last night that has one."""
    control: str | None
    """The layout beside which it was measured in the same allocations, in all nights; None: there is none."""
    rates: list[float | None]
    """For each night the rate over that of the control, or tokens/s/GPU where there is none; None: not measured."""
    bad_nights: list[int] = field(default_factory=list)
    """Numbers of single nights that are far from those around them and do not count."""
    line_errors: Mapping[int, float | None] = field(default_factory=dict)
    """Number of each night whose rate follows from parts of steps -> how much it may be off as a fraction, None if that
    is unknown; whole steps were measured in the others."""
    changes: dict[int, float] = field(default_factory=dict)
    """Number of the first night with another rate -> the new rate over the old one, less 1."""
    may_have_changed: bool = False
    """Whether its last nights, fewer than MIN_LENGTH, differ significantly,
    so that one more night will confirm or reject it."""

    @property
    def counted_nights(self) -> list[int]:
        """The numbers of the nights that count."""
        return [n for n, rate in enumerate(self.rates) if rate and n not in self.bad_nights]

    @property
    def log_rates(self) -> Any:
        """The logarithms of the rates of these nights."""
        return np.log([self.rates[night] or np.nan for night in self.counted_nights])

    def exceeds_line_error(
        self, change: float, nights_before: Iterable[int], nights_after: Iterable[int]
    ) -> bool:
        """Whether a change of the rate is larger than the error of parts of steps on both sides of it.

        The largest known error of a side stands for all of its nights by parts. No change exceeds an unknown one (NaN).
        """
        errors = [self._line_error(nights) for nights in (nights_before, nights_after)]
        return abs(log1p(change)) > log1p(hypot(*errors))

    def _line_error(self, nights: Iterable[int]) -> float:
        """The largest known error of these nights; 0 if none is by parts, NaN if it is unknown for all that are."""
        errors = [self.line_errors[night] for night in nights if night in self.line_errors]
        return max((error for error in errors if error is not None), default=nan if errors else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Changes of runs in one direction that begin in about the same night; noise shifts where each one begins."""

    night: int
    """Number of the night in which most of them begin."""
    change: float
    """The median of the changes, a fraction."""
    series: tuple[int, ...]
    """Numbers of the series that changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The series of all runs, the moves that they have in common, and sentences about what does not count."""

    nights: Sequence[Night]
    series: Sequence[Series]
    moves: Sequence[Move]
    notes: Sequence[str]
    num_tested: int
    """Number of runs that were tested for a change."""
    warning: str | None
    """Why no change can be found; None if some run was tested."""

    def differing(self, night: int) -> dict[str, tuple[str, str]]:
        """Column with a commit, a version or a place -> its values in the night before and in this
        one, if they differ.
        """
        values = differing(self.nights[night - 1].table, self.nights[night].table) if night else {}
        return {name: pair for name, pair in values.items() if name != "sweep"}

    def text(self, move: Move) -> str:
        """What a move says, such as `2026-11-12 02:00: all 20 runs are 5.1 % slower`, and what differs since then."""
        num_runs, num_total = len(move.series), len(self.series)
        first_series = self.series[move.series[0]]
        run_text = (
            f"{first_series.cell['model']} {first_series.layout} on "
            f"{counted(first_series.cell['nodes'], 'node')}"
        )
        runs_text = f"all {num_total:,}" if num_runs == num_total else f"{num_runs:,} of {num_total:,}"
        subject = run_text if num_runs == 1 else f"{runs_text} runs"
        verb, direction = are(num_runs), "slower" if move.change < 0 else "faster"
        night_before, first_night = (self.nights[n] for n in (move.night - 1, move.night))
        commits = pc.unique(first_night.table["git_commit"].drop_null()).to_pylist()
        unchanged_text = f"commit {', '.join(commits) or 'unknown'} and all versions unchanged"
        differences = (f"{name} {old} -> {new}" for name, (old, new) in self.differing(move.night).items())
        change_text = "; ".join(differences) or unchanged_text
        hint = ", so look first at what they share" * (1 < num_runs == num_total)
        return (
            f"{first_night.name}: {subject} {verb} {percent(abs(move.change))} {direction}{hint}"
            f" (since {night_before.name}: {change_text})"
        )

    def losses(self, max_loss: float) -> list[Move]:
        """The moves that are the last one of some run and a loss of more than `max_loss`, a fraction."""
        last_moves = {number: move for move in self.moves for number in move.series}
        return [move for move in self.moves if move in last_moves.values() and move.change < -max_loss]


def read_nights(sources: Sequence[str], results_dir: Path, warn: Warn) -> list[Night]:
    """The sweeps that these sources name, in the order of their first runs.

    Args:
        sources: each a sweep, a parquet file, or a folder that holds sweeps or the folders of results of several
            nights; of a folder without sweeps, its parquet files are the nights.

    Raises:
        SweepFolderError: no source can be read, or a folder holds none.
    """
    source_by_path, nights = dict[Path, str](), list[Night]()
    for source in sources:
        folder = Path(source)
        if not folder.is_dir() or (folder / "sweep.json").exists():
            source_by_path[folder.resolve()] = source
            continue
        sweeps = [*sweep_dirs(folder), *chain.from_iterable(map(sweep_dirs, folder.glob("[!.]*/")))]
        night_paths = sweeps or [*folder.glob("[!.]*.parquet")]
        if not night_paths:
            remedy = "give a sweep, its .parquet file, or a folder of either"
            raise SweepFolderError(f"{folder} holds no sweep and no .parquet file", remedy)
        source_by_path |= {path.resolve(): str(path) for path in night_paths}

    def read(source: str) -> pa.Table:
        return open_results(source, results_dir, warn)[-1]

    for table in read_each(source_by_path.values(), read, warn, path_of=Path).values():
        for sweep in table["sweep"].unique().to_pylist():
            night_table = table.filter(pc.equal(table["sweep"], sweep)) if sweep else table
            started_at = pc.min(night_table["started_at"]).as_py()
            name = f"{started_at:%Y-%m-%d %H:%M}" if started_at else str(sweep)
            nights.append(Night(name=name, sweep=str(sweep), table=night_table))
    return sorted(nights, key=lambda night: (night.name, night.sweep))


def history(nights: Sequence[Night]) -> History:
    """The rates of all runs over these nights, and their significant changes.

    Raises:
        ConfigError: no night has a rate.
    """
    if not nights:
        raise ConfigError("no night remains", "give an earlier date with --since")
    frame = pd.concat([_night_rows(night.table).assign(night=n) for n, night in enumerate(nights)])
    is_good = (
        frame["is_final"] & (frame["status"] == Status.OK) & frame["suspect"].isna() & frame["model"].notna()
    )
    rated_rows = _in_full(frame[is_good & (frame["tokens_per_s_per_gpu"] > 0)])
    if rated_rows.empty:
        raise ConfigError(
            "no night has a usable rate", "see how its runs ended: ultrabench sweep status SWEEP"
        )
    label_of_run = {row["run_id"]: run_label(row) for row in _records(rated_rows.drop_duplicates("run_id"))}
    rows_of_series = [_measured_alike(rows) for _, rows in rated_rows.groupby(_RUN_KEY, dropna=False)]
    series = [_series(rows, label_of_run, len(nights)) for rows in rows_of_series]
    num_tested, notes = _find_changes(series), list[str]()
    if num_tested:
        _add_changes_of_controls(series)
    else:
        num_tested, notes = _find_changes_of_steps(series, rows_of_series)
    num_needed = f"fewer than {2 * MIN_LENGTH} nights need more step times in each"
    too_few_text = f"not tested: {counted(len(nights), 'night')}; {num_needed}"
    return History(
        nights=nights,
        series=series,
        moves=sorted(_common_moves(series), key=lambda move: move.night),
        notes=[*_note_sentences(series, nights, num_tested), *notes],
        num_tested=num_tested,
        warning=None if num_tested else too_few_text,
    )


def _night_rows(table: pa.Table) -> pd.DataFrame:
    """The rows of a night, with `options`, those that vary in it, and `kernel_options`,
    the text of those of the kernel.
    """
    columns = [*_RUN_KEY[:-1], "run_id", "status", "stopped", "suspect", "is_final", "control", "step_time_s"]
    columns += ["measured_gas", "screened", "extrapolation_error_rel"]
    options = in_rows(varied_options(table), range(len(table)))
    texts = [str([values.get(name) for name in KERNEL_OPTIONS]) for values in options]
    frame: pd.DataFrame = table.select([*columns, *_RATE_COLUMNS]).to_pandas()
    step_times_s = pd.Series(table["step_times_s"].to_pylist(), frame.index, object)
    options_column = pd.Series(options, frame.index, object)
    return frame.assign(options=options_column, kernel_options=texts, step_times_s=step_times_s)


def _in_full(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without runs that were stopped early as slower, where the same run was measured in full that night."""
    is_full = rows["stopped"] != SLOWER
    groups = is_full.groupby([rows[name] for name in (*_RUN_KEY, "night")], dropna=False)
    return rows[is_full | ~groups.transform("any")]


def _measured_alike(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one run that are compared over the nights.

    They are those measured in full if every night has such rows, else those with whole steps, else those by parts of
    steps; else the first of these kinds that the night has.
    """
    by_parts = rows["measured_gas"].notna()
    in_full = ~rows["screened"].eq(other=True)
    nights = set(rows["night"])
    for is_alike in (in_full, ~by_parts, by_parts):
        if set(rows["night"][is_alike]) == nights:
            return rows[is_alike]
    kind = by_parts * 2 + ~(in_full | by_parts)
    return rows[kind == kind.groupby(rows["night"]).transform("min")]


def _line_errors(rows: pd.DataFrame) -> dict[int, float | None]:
    """Night in which a run was measured by parts of steps -> its largest known error of their straight line."""
    errors = rows[rows["measured_gas"].notna()].groupby("night")["extrapolation_error_rel"].max()
    nights_and_errors = zip(errors.index.tolist(), errors.tolist(), strict=True)
    return {night: None if pd.isna(error) else error for night, error in nights_and_errors}


def _records(frame: pd.DataFrame) -> list[dict[Any, Any]]:
    """The rows as dicts, None where a value is unknown."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def _series(rows: pd.DataFrame, label_of_run: Mapping[str, str], num_nights: int) -> Series:
    """The series of the rows of one run in all nights."""
    last_row = _records(rows.sort_values("night", kind="stable").tail(1))[0]
    controls = {label_of_run.get(control) for control in rows["control"]}
    has_control = len(controls) == 1 and None not in controls and rows["control_ratio"].notna().all()
    control = next(iter(controls)) if has_control and run_label(last_row) not in controls else None
    rates = rows.groupby("night")[_RATE_COLUMNS[0] if control else _RATE_COLUMNS[1]].median()
    return Series(
        cell={name: last_row[name] for name in CELL},
        layout=run_label(last_row),
        run_id=last_row["run_id"],
        control=control,
        rates=[float(rates[n]) if n in rates.index else None for n in range(num_nights)],
        line_errors=_line_errors(rows),
    )


def _find_changes(series: Sequence[Series]) -> int:
    """Finds the bad nights and the changes of each series; returns how many have enough nights.

    The p-values of the strongest changes are corrected by Benjamini and Hochberg over all series.
    """
    for one_series in series:
        nights = one_series.counted_nights
        one_series.bad_nights = [nights[n] for n in np.flatnonzero(outliers(one_series.log_rates))]
    tested = [one_series for one_series in series if len(one_series.counted_nights) >= 2 * MIN_LENGTH]
    p_values = [strongest(one_series.log_rates)[0] for one_series in tested]
    corrected_p = stats.false_discovery_control(p_values) if tested else ()
    max_p = max((p for p, q in zip(p_values, corrected_p, strict=True) if q <= ALPHA), default=-1.0)
    for one_series in tested:
        log_rates, nights = one_series.log_rates, one_series.counted_nights
        starts = [0, *change_points(log_rates, max_p, ALPHA / 2 / len(tested)), len(log_rates)]
        level_means = [log_rates[first:end].mean() for first, end in pairwise(starts)]
        changes = dict[int, float]()
        for level, (begin, first, end) in enumerate(zip(starts, starts[1:], starts[2:], strict=False)):
            change = float(np.expm1(level_means[level + 1] - level_means[level]))
            if one_series.exceeds_line_error(change, nights[begin:first], nights[first:end]):
                changes[first] = change
        lasting_changes = {
            first: change for first, change in changes.items() if len(log_rates) - first >= MIN_LENGTH
        }
        one_series.may_have_changed = len(lasting_changes) < len(changes)
        one_series.changes = {nights[first]: change for first, change in lasting_changes.items()}
    return len(tested)


def _find_changes_of_steps(
    series: Sequence[Series], rows_of_series: Sequence[pd.DataFrame]
) -> tuple[int, list[str]]:
    """Finds changes between few nights by the tests of `compare`: how many runs were tested, and what counts as chance.

    The nights before and after each night are compared. Of several such pairs the one with the smallest p-value counts,
    times their number, before the correction over all series.
    """
    num_nights = len(series[0].rates)
    records_of_series = [_records(rows) for rows in rows_of_series]
    sides_by_night, frame_by_night, notes = dict[int, list[Any]](), dict[int, pd.DataFrame](), list[str]()
    for night in range(1, num_nights):
        sides_by_night[night] = [
            (
                run_times_s([row for row in records if row["night"] < night]),
                run_times_s([row for row in records if row["night"] >= night]),
            )
            for records in records_of_series
        ]
        frame_by_night[night], notes = corrected(sides_by_night[night])

    def of_nights(column: str) -> pd.DataFrame:
        values = {night: (num_nights - 1) * frame[column] for night, frame in frame_by_night.items()}
        return pd.DataFrame(values, range(len(series)))

    p_values = of_nights("p_value")
    corrected_p = false_discovery(p_values.min(axis=1), of_nights("p_least").min(axis=1))
    night_numbers: Any = p_values.columns
    for number, p in enumerate(corrected_p.to_list()):
        if p <= ALPHA:
            night = int(night_numbers[np.nanargmin(p_values.loc[number])])
            before, after = map(step_time, sides_by_night[night][number])
            sides = range(night), range(night, num_nights)
            if series[number].exceeds_line_error(before / after - 1, *sides):
                series[number].changes = {night: before / after - 1}
    if not (num_tested := int(corrected_p.notna().sum())):
        return 0, []
    return num_tested, [
        f"Fewer than {2 * MIN_LENGTH} nights: step times are tested as in ultrabench compare.",
        *notes,
    ]


def _add_changes_of_controls(series: Sequence[Series]) -> None:
    """Adds the changes of a control layout to those of the runs that are measured relative to it.

    Where they all became slower, only the rate of the control changed; where only the control did,
    theirs rose beside it.
    """
    changes_by_layout = {(str(s.cell), s.layout): dict(s.changes) for s in series if s.control is None}
    for one_series in series:
        control_key = (str(one_series.cell), one_series.control or "")
        for night, change in changes_by_layout.get(control_key, {}).items():
            first_night = next((n for n in one_series.changes if abs(n - night) < MIN_LENGTH), night)
            total_change = (1 + one_series.changes.pop(first_night, 0.0)) * (1 + change) - 1
            if abs(total_change) > abs(change) / 2:
                one_series.changes[first_night] = total_change


def _common_moves(series: Sequence[Series]) -> Iterator[Move]:
    """The changes of all series, those in one direction together that begin within MIN_LENGTH
    nights of where most do.
    """
    changes = [(c > 0, night, n, c) for n, s in enumerate(series) for night, c in s.changes.items()]
    while changes:
        is_gain, night = Counter(change[:2] for change in changes).most_common(1)[0][0]
        group = [c for c in changes if c[0] == is_gain and abs(c[1] - night) <= MIN_LENGTH]
        changes = [change for change in changes if change not in group]
        members = tuple(sorted({change[2] for change in group}))
        yield Move(night=night, change=median(change[3] for change in group), series=members)


def _part_sentences(series: Sequence[Series]) -> Iterator[str]:
    """A sentence about the runs whose rates follow from parts of steps in some night."""
    errors_of_runs = [[*one_series.line_errors.values()] for one_series in series if one_series.line_errors]
    known_errors = [error for errors in errors_of_runs for error in errors if error is not None]
    num_unknown = sum(None in errors for errors in errors_of_runs)
    if errors_of_runs:
        size_text = f" (up to {percent(max(known_errors))})" if known_errors else ""
        unknown_text = f"; it is unknown in some nights of {num_unknown:,} of them" if num_unknown else ""
        fact = f"{counted(len(errors_of_runs), 'run')} measured by parts of steps: only changes beyond their error"
        yield f"{fact}{size_text} count{unknown_text}."


def _note_sentences(series: Sequence[Series], nights: Sequence[Night], num_tested: int) -> Iterator[str]:
    """Sentences about nights and runs that do not count."""
    if any(s.control for s in series):
        rate_name = column_of(RATE).heading
        yield f"Rates of runs with a control layout are relative to the control; its own rate is in {rate_name}."
    yield from _part_sentences(series)
    if num_untested := len(series) - num_tested:
        min_nights = 2 * MIN_LENGTH
        too_few = " and too few step times" * (len(nights) < min_nights)
        untested_text = f"{num_untested:,} of {counted(len(series), 'run')} not tested"
        yield f"{untested_text}: fewer than {min_nights} nights with a rate{too_few}."
    if num_open := sum(s.may_have_changed for s in series):
        runs_text = counted(num_open, "run")
        yield f"{runs_text} may have changed in the last {NUM_RECENT} nights; one more night will confirm or reject it."
    num_by_night = Counter(nights[n].name for s in series for n in s.bad_nights)
    if num_by_night:
        examples = [f"{name} ({counted(n, 'run')})" for name, n in sorted(num_by_night.items())[-3:]]
        yield (
            "Single bad nights, not counted as changes: "
            f"{', '.join(examples)}{' and earlier ones' * (len(num_by_night) > 3)}."
        )
    absent_layouts = [s.layout for s in series if s.rates[-1] is None]
    if absent_layouts:
        examples = [*absent_layouts[:3], *["..."] * (len(absent_layouts) > 3)]
        yield (
            f"{len(absent_layouts):,} of {counted(len(series), 'run')} without a rate in the last "
            f"night: {', '.join(examples)}."
        )
