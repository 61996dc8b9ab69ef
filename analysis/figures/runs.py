"""Chooses the runs that figures show: final rows of runs that train a model, and those that were measured."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pandas as pd
import pyarrow as pa

from ultrabench.analysis.figures.style import drawn
from ultrabench.analysis.results import cells
from ultrabench.analysis.results.environments import DRIVERLESS, environment_numbers
from ultrabench.analysis.results.left_out import none_left
from ultrabench.analysis.results.options import in_rows
from ultrabench.analysis.results.ranking import PANEL_COLUMNS, Ranking
from ultrabench.analysis.results.schema import CHECKPOINT
from ultrabench.errors import ConfigError, counted
from ultrabench.kernel_config import kind_by_name
from ultrabench.layout import AXES
from ultrabench.result import Status
from ultrabench.sweep.config.sweep_config import WEAK

_NUMBER_COLUMNS = [
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "peak_mem_reserved_bytes",
    "peak_mem_reserved_rank0_bytes", "predicted_step_time_s", "predicted_peak_mem_bytes", *CHECKPOINT,
]  # fmt: skip
_PANEL_COLUMNS = [*(name for name in PANEL_COLUMNS if name != "gbs"), "batch", "num_params"]
"""Columns that a panel names where they vary among the rows of a model."""


def final_rows(table: pa.Table, more_columns: Sequence[str] = ()) -> pd.DataFrame:
    """The final rows of runs that train a model, in an order that does not depend on that of the table.

    Layouts that a rule rejects are no runs. The new column `panel` names the model, and what else tells panels apart:
    hardware, kernel, precision, routing or batch. A suspect row of an imported table is in the panel of the other rows
    of its model, as in rankings. The column `place` is the place of a run that ended ok in the ranking of its cell,
    null for rows that do not stand for such a run; `may_win` says whether this run may be the best of its cell.
    `rate_low` and `rate_high` are the ends of the 95 % interval of its tokens/s/GPU, and `run_numbers` maps columns to
    the medians of its repeats; `options` has the values of options that vary; `environment` is a number that rows of
    one environment share.

    Args:
        more_columns: further columns of the rows.

    Raises:
        ConfigError: there are no such rows.
    """
    ranking = Ranking(table, more_columns=(*_NUMBER_COLUMNS, "suspect_codes", *DRIVERLESS, *more_columns))
    layouts = ranking.frame
    frame = layouts[layouts["status"] != Status.REJECTED]
    if not len(frame):
        if len(layouts):
            problem_text = f"{counted(len(layouts), 'layout')}, all rejected by rules"
            raise ConfigError(f"{problem_text}; see why: ultrabench heatmap")
        todo = "launch a sweep: ultrabench sweep launch"
        if not all(kind_by_name(name).trains for name in table["kernel"].to_pylist()):
            todo = "draw its bandwidths with: ultrabench plot comm"
        problem_text = f"none of {counted(len(table), 'row')} is of a training run"
        raise ConfigError(problem_text if len(table) else "the table has no rows", todo)
    standings = [s for s in chain(*ranking.standings.values()) if s.outcome == Status.OK]
    intervals = {s.repeat: s.rate_interval for s in standings if s.rate_interval}
    interval_ends = pd.DataFrame(intervals.values(), [*intervals], ["rate_low", "rate_high"], float)
    number_columns = frame[_NUMBER_COLUMNS].astype(float).replace([np.inf, -np.inf], np.nan)
    frame = frame.assign(
        **number_columns,
        nodes=frame["nodes"].astype(int),
        environment=environment_numbers(frame),
        place_in_cell=pd.Series({s.repeat: s.place for s in standings}, dtype=float),
        **interval_ends.reindex(frame.index),
        options=pd.Series(in_rows(ranking.options, frame.index), frame.index, dtype=object),
        run_numbers=pd.Series({s.repeat: ranking.run_numbers(s) for s in standings}, dtype=object),
        may_win=frame.index.isin([s.repeat for s in standings if s.may_win]),
    )
    return _with_panels(frame)


def ok_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `final_rows` of runs that ended ok: one for each run in each environment.

    Of the repeats of a run, it is the row whose speed is nearest to their median; its speeds are the medians.

    Raises:
        ConfigError: no run of a model ended ok with a speed.
    """
    runs = frame[frame["place_in_cell"].notna() & (frame["tokens_per_s_per_gpu"] > 0)]
    if not len(runs):
        problem_text = f"{counted(len(frame), 'row')}, none of an ok run with a speed"
        raise ConfigError(problem_text, "see why: ultrabench plot failures")
    for name in [name for name in _NUMBER_COLUMNS if name in runs]:
        numbers = zip(runs["run_numbers"], runs[name], strict=True)
        runs = runs.assign(**{name: [of_run.get(name, of_row) for of_run, of_row in numbers]})
    return runs.reset_index(drop=True)


def candidate_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Those of `ok_runs` that may be the best of their cell, with `memory_gib`, the peak of their reserved memory.

    The column `memory_ranks` says in words of which ranks it is the peak. This is rank 0 where no run has the peak of
    all ranks, as in imported tables.

    Raises:
        ConfigError: there are none.
    """
    candidates = runs[runs["may_win"]]
    if not len(candidates):
        raise none_left(runs, "none can win")
    has_only_rank0 = candidates["peak_mem_reserved_bytes"].isna().all()
    peak_bytes = candidates["peak_mem_reserved_rank0_bytes" if has_only_rank0 else "peak_mem_reserved_bytes"]
    memory_ranks = "of rank 0" if has_only_rank0 else "largest of all ranks"
    return candidates.assign(
        memory_gib=drawn("peak_mem_reserved_bytes", peak_bytes), memory_ranks=memory_ranks
    )


def runs_note(table: pa.Table, runs: pd.DataFrame, has_crosses: bool = False) -> str:
    """The note of figures of measured runs: those that cannot win, then how runs ended and the versions.

    Args:
        runs: those of `ok_runs`.
        has_crosses: whether the figure draws runs that cannot win as crosses; else it leaves them out.
    """
    num_not_winning = int((~runs["may_win"]).sum())
    how_text = "Drawn as crosses" if has_crosses else "Not drawn"
    excluded_text = (
        f"{how_text}: {num_not_winning:,} of {counted(len(runs), 'ok run')}, "
        "suspect or stopped early as slower.\n"
    )
    return f"{excluded_text if num_not_winning else ''}{cells.notes(table)}"


def noun_of(rows: pd.DataFrame) -> str:
    """What a row of `final_rows` is called: a run, or a repeat where a run has several."""
    return "repeat" if rows.duplicated(["sweep", "run_id"]).any() else "run"


def runs_with_value(
    runs: pd.DataFrame, column: str, value_name: str, todo: str, noun: str = "run"
) -> tuple[pd.DataFrame, str]:
    """The runs with a value in a column, and a line that counts the others, empty if there are none.

    Args:
        value_name: what the column holds, in words.
        todo: what to do if no run has it.
        noun: what a row is, such as `repeat`.

    Raises:
        ConfigError: no run has it.
    """
    complete_runs = runs.dropna(subset=column)
    if not len(complete_runs):
        raise ConfigError(f"{counted(len(runs), noun)}, none with {value_name}; {todo}")
    num_missing = len(runs) - len(complete_runs)
    missing_text = f"Excluded: {counted(num_missing, noun)} without {value_name}.\n"
    return complete_runs, missing_text if num_missing else ""


def _with_panels(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with the columns `panel` and `batch`, sorted by the sizes of the models."""
    model_marks = (None if mark != mark else mark for mark in frame["model_mark"])
    model_names = [*map(cells.model_text, frame["model"].astype(str), model_marks)]
    batches = frame[["gbs", "nodes", "scaling"]].to_numpy()
    batch_texts = [None if gbs != gbs else cells.batch_text(gbs, *others) for gbs, *others in batches]  # nan
    frame = frame.assign(batch=pd.Series(batch_texts, frame.index, object))
    panels = pd.Series(model_names, frame.index, object)
    for column in _PANEL_COLUMNS:
        if frame.groupby("model")[column].nunique().max() > 1:
            setting_texts = frame[column].map(cells.SETTINGS[column], na_action="ignore")
            panels += " | " + setting_texts.fillna(f"unknown {column}")
    panels += [f" | {gpus:.0f} GPUs" if gpus == gpus else "" for gpus in frame["partial_gpus"].astype(float)]
    # Under weak scaling gbs grows with the nodes, so runs are compared by their batch on one node.
    compared_batch = frame["gbs"] / frame["nodes"].where(frame["scaling"] == WEAK, 1)
    sort_columns = ["num_params", "model", *PANEL_COLUMNS[:-1], "compared_batch", "panel", "nodes", *AXES]
    frame = frame.assign(panel=panels, compared_batch=compared_batch)
    return frame.sort_values(sort_columns, kind="stable", ignore_index=True).drop(columns="compared_batch")
