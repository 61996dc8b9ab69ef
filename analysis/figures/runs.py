"""Chooses the runs that figures show: final rows of runs that train a model, and those that were measured."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pandas as pd
import pyarrow as pa

from ultrabench.analysis import cells
from ultrabench.analysis.left_out import none_left
from ultrabench.analysis.ranking import PANEL, Ranking
from ultrabench.analysis.schema import CHECKPOINT
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.layout import AXES
from ultrabench.result import Status
from ultrabench.sweep.config.sweep_config import WEAK

_NUMBER_COLUMNS = [
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "peak_mem_reserved_bytes",
    "peak_mem_reserved_rank0_bytes", "predicted_step_time_s", "predicted_peak_mem_bytes", *CHECKPOINT,
]  # fmt: skip
_PANEL_COLUMNS = [*(name for name in PANEL if name != "gbs"), "batch", "num_params"]
"""Columns that a panel names where they vary among the rows of a model."""


def final(table: pa.Table, more_columns: Sequence[str] = ()) -> pd.DataFrame:
    """The final rows of runs that train a model, in an order that does not depend on that of the table.

    Layouts that a rule rejects are no runs. The new column `panel` names the model, and what else tells
    panels apart: hardware, kernel, precision, routing or batch. A suspect row of an imported table is in the panel of
    the other rows of its model, as in rankings. The column `standing` is the place of a run that ended ok in its
    cell, null for rows that do not stand for such a run, and `good` tells whether this run may be the best. `rate_low`
    and `rate_high` are the ends of the 95 % interval of its tokens/s/GPU.

    Args:
        more_columns: further columns of the rows.

    Raises:
        ConfigError: there are no such rows.
    """
    ranking = Ranking(table, more_columns=(*_NUMBER_COLUMNS, "suspect_codes", *more_columns))
    layouts = ranking.frame
    frame = layouts[layouts["status"] != Status.REJECTED]
    if not len(frame):
        if len(layouts):
            rule = "all rejected by rules; see why: ultrabench heatmap"
            raise ConfigError(f"{counted(len(layouts), 'layout')}, {rule}")
        todo = "launch a sweep: ultrabench sweep launch"
        if "probe" in table["kernel"].to_pylist():
            todo = "draw its bandwidths with: ultrabench plot comm"
        fact = f"none of {counted(len(table), 'row')} is of a training run"
        raise ConfigError(fact if len(table) else "the table has no rows", todo)
    standings = {s.repeat: s for s in chain(*ranking.standings.values()) if s.outcome == Status.OK}
    intervals = {row: standing.rate_interval for row, standing in standings.items() if standing.rate_interval}
    interval_ends = pd.DataFrame(intervals.values(), [*intervals], ["rate_low", "rate_high"], float)
    numbers = frame[_NUMBER_COLUMNS].astype(float).replace([np.inf, -np.inf], np.nan)
    frame = frame.assign(
        **numbers,
        nodes=frame["nodes"].astype(int),
        standing=pd.Series({row: standing.place for row, standing in standings.items()}, dtype=float),
        **interval_ends.reindex(frame.index),
        good=frame.index.isin([row for row, standing in standings.items() if standing.may_win]),
    )
    return _with_panels(frame)


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each run of `final` in each environment that ended ok: of its repeats the one nearest to their median speed.

    Raises:
        ConfigError: no run of a model ended ok with a speed.
    """
    runs = frame[frame["standing"].notna() & (frame["tokens_per_s_per_gpu"] > 0)]
    if not len(runs):
        fact = f"{counted(len(frame), 'row')}, none of an ok run with a speed"
        raise ConfigError(fact, "see why: ultrabench plot failures")
    return runs.reset_index(drop=True)


def may_be_best(runs: pd.DataFrame) -> pd.DataFrame:
    """Those of `measured` that may be the best, with `memory_gib`, the peak of their reserved memory.

    `memory_of` tells of which ranks: of rank 0 where no run has the largest of all ranks, as in imported tables.

    Raises:
        ConfigError: there are none.
    """
    candidates = runs[runs["good"]]
    if not len(candidates):
        raise none_left(runs, "none can win")
    has_only_rank0 = candidates["peak_mem_reserved_bytes"].isna().all()
    peak_bytes = candidates["peak_mem_reserved_rank0_bytes" if has_only_rank0 else "peak_mem_reserved_bytes"]
    memory_of = "of rank 0" if has_only_rank0 else "largest of all ranks"
    return candidates.assign(memory_gib=peak_bytes / GIB, memory_of=memory_of)


def notes(table: pa.Table, runs: pd.DataFrame, has_crosses: bool = False) -> str:
    """The note of figures of measured runs: those that cannot win, then how runs ended and the versions.

    Args:
        runs: those of `measured`.
        has_crosses: whether the figure draws runs that cannot win as crosses; else it leaves them out.
    """
    num_not_winning = int((~runs["good"]).sum())
    how_text = "Drawn as crosses" if has_crosses else "Not drawn"
    excluded_text = f"{how_text}: {num_not_winning:,} of {counted(len(runs), 'ok run')}, suspect or stopped early as slower.\n"
    return f"{excluded_text if num_not_winning else ''}{cells.notes(table)}"


def known(runs: pd.DataFrame, column: str, name: str, todo: str) -> tuple[pd.DataFrame, str]:
    """The runs with a value in a column, and a line that counts the others, empty if there are none.

    Args:
        name: what the column holds, in words.
        todo: what to do if no run has it.

    Raises:
        ConfigError: no run has it.
    """
    complete_runs = runs.dropna(subset=column)
    if not len(complete_runs):
        raise ConfigError(f"{counted(len(runs), 'run')}, none with {name}; {todo}")
    num_missing = len(runs) - len(complete_runs)
    return complete_runs, f"Excluded: {counted(num_missing, 'run')} without {name}.\n" if num_missing else ""


def _with_panels(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with the column `panel`, sorted by the sizes of the models."""
    marks = (None if mark != mark else mark for mark in frame["model_mark"])
    names = [*map(cells.model_text, frame["model"].astype(str), marks)]
    panel, rows = pd.Series(names, frame.index, object), frame[["gbs", "nodes", "scaling"]].to_numpy()
    batches = [None if row[0] != row[0] else cells.batch_text(*row) for row in rows]  # gbs may be nan
    frame = frame.assign(batch=pd.Series(batches, frame.index, object))
    for name in _PANEL_COLUMNS:
        if frame.groupby("model")[name].nunique().max() > 1:
            settings = frame[name].map(cells.SETTINGS[name], na_action="ignore")
            panel += " | " + settings.fillna(f"unknown {name}")
    batch_of_all = frame["gbs"] / frame["nodes"].where(frame["scaling"] == WEAK, 1)
    sort_columns = ["num_params", "model", *PANEL[:-1], "batch_of_all", "panel", "nodes", *AXES]
    frame = frame.assign(panel=panel, batch_of_all=batch_of_all)
    return frame.sort_values(sort_columns, kind="stable", ignore_index=True).drop(columns="batch_of_all")
