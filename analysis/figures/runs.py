"""Chooses the runs that figures show: final rows of runs that train a model, and those that were measured."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ultrabench.analysis import cells, environments
from ultrabench.analysis.numbers import count
from ultrabench.analysis.ranking import final_runs, repeats, usual_sizes
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.layout import AXES
from ultrabench.standing import standings

_SIZES = ("gbs", "num_params")
_NUMBERS = (
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "peak_mem_reserved_bytes",
    "peak_mem_reserved_rank0_bytes", "predicted_step_time_s", "predicted_peak_mem_bytes",
    "control_ratio", "step_time_ci95_rel",
)  # fmt: skip
_TEXTS = ("run_id", "status", "suspect", "stopped", "flops_formula", "control", "allocation", "sweep")
_NEEDED = (
    "source", "model", "hardware", "kernel", "precision", "seq_len", *_SIZES, "nodes", *AXES, *_TEXTS, *_NUMBERS,
)  # fmt: skip
_SETTINGS: dict[str, Callable[[Any], str]] = {
    "hardware": str,
    "kernel": str,
    "precision": str,
    "seq_len": "seq_len {:,.0f}".format,
    "gbs": "gbs {:,.0f}".format,
    "num_params": lambda value: count(value, "params"),
}
"""Column that a panel names where it varies among the rows of a model -> the text of its value."""


def final(table: pa.Table) -> pd.DataFrame:
    """The final rows of runs that train a model, in an order that does not depend on that of the table.

    Layouts that a rule rejects are no runs. The new column `panel` names the model, and what else tells
    panels apart: hardware, kernel, precision or batch. A suspect row of an imported table is in the panel of
    the other rows of its model, as in rankings.

    Raises:
        ConfigError: there are no such rows.
    """
    runs = final_runs(table.select([*dict.fromkeys((*_NEEDED, *environments.COLUMNS, "is_final"))]))
    layouts = runs.to_pandas()
    layouts["competes_in"] = environments.Environments(runs).ids
    frame = layouts[layouts["status"] != "rejected"]
    if not len(frame):
        if len(layouts):
            rule = "all rejected by a rule, so that none may run; see why: ultrabench heatmap"
            raise ConfigError(f"{counted(len(layouts), 'layout')} here, {rule}")
        todo = "launch a sweep: ultrabench sweep launch"
        if "probe" in table["kernel"].to_pylist():
            todo = "draw its bandwidths with: ultrabench plot comm"
        raise ConfigError(f"{counted(len(table), 'row')} without a run that trains a model; {todo}")
    frame = frame.sort_values([*_NEEDED], ignore_index=True)
    frame["nodes"] = frame["nodes"].astype(int)
    frame[[*_NUMBERS]] = frame[[*_NUMBERS]].astype(float).replace([np.inf, -np.inf], np.nan)
    return _with_panels(frame)


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each run of `final` in each environment that ended ok: of its repeats the one nearest to their median speed.

    The new column `good` tells whether the run may be the best: it is not suspect, and was not stopped as slower.

    Raises:
        ConfigError: no run of a model ended ok with a speed.
    """
    ok = frame[(frame["status"] == "ok") & (frame["tokens_per_s_per_gpu"] > 0)]
    if not len(ok):
        among = f"among {counted(len(frame), 'row')}"
        raise ConfigError(f"no ok run with a speed {among}; see why: ultrabench plot failures")
    ok = ok.reset_index(drop=True)
    ranked = chain(*standings(repeats(ok, zip(ok["panel"], ok["nodes"], strict=True))).values())
    good = {s.repeat: s.interval is not None and s.doubts is None for s in ranked}
    return ok.iloc[sorted(good)].assign(good=[good[row] for row in sorted(good)])


def may_be_best(runs: pd.DataFrame) -> pd.DataFrame:
    """Those of `measured` that may be the best, with `memory_gib`, the peak of their reserved memory.

    `memory_of` tells of which ranks: of rank 0 where no run has the largest of all ranks, as in imported tables.

    Raises:
        ConfigError: there are none.
    """
    good = runs[runs["good"]]
    if not len(good):
        rule = "all suspect or stopped early, so that none may be the best"
        todo = "draw them with: ultrabench plot scatter"
        raise ConfigError(f"{counted(len(runs), 'run')} here, {rule}; {todo}")
    rank0 = good["peak_mem_reserved_bytes"].isna().all()
    held = good["peak_mem_reserved_rank0_bytes" if rank0 else "peak_mem_reserved_bytes"]
    return good.assign(memory_gib=held / GIB, memory_of="of rank 0" if rank0 else "largest of all ranks")


def notes(table: pa.Table, runs: pd.DataFrame, crosses: bool = False) -> str:
    """The note of figures of measured runs: those that cannot win, then how runs ended and the versions.

    Args:
        runs: those of `measured`.
        crosses: whether the figure draws runs that cannot win as crosses; else it leaves them out.
    """
    others = int((~runs["good"]).sum())
    how = "Drawn as crosses" if crosses else "Not drawn"
    told = f"{how}: {others:,} of {counted(len(runs), 'ok run')}, suspect or stopped early as slower.\n"
    return f"{told if others else ''}{cells.notes(table)}"


def known(runs: pd.DataFrame, column: str, name: str, todo: str) -> tuple[pd.DataFrame, str]:
    """The runs with a value in a column, and a line that counts the others, empty if there are none.

    Args:
        name: what the column holds, in words.
        todo: what to do if no run has it.

    Raises:
        ConfigError: no run has it.
    """
    kept = runs.dropna(subset=column)
    if not len(kept):
        raise ConfigError(f"{counted(len(runs), 'run')} here, none with its {name}; {todo}")
    number = len(runs) - len(kept)
    return kept, f"Left out: {counted(number, 'run')} without {name}.\n" if number else ""


def _with_panels(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with the column `panel`, sorted by the sizes of the models."""
    doubted, usual = usual_sizes(frame, _SIZES)
    sizes = {name: frame[name].where(~doubted | usual[name].isna(), usual[name]) for name in _SIZES}
    frame = frame.assign(**sizes)
    panel = frame["model"].astype(str)
    for name, text in _SETTINGS.items():
        if frame.groupby("model")[name].nunique().max() > 1:
            panel += " | " + frame[name].map(text, na_action="ignore").fillna(f"unknown {name}")
    return frame.assign(panel=panel).sort_values(["num_params", "panel"], kind="stable", ignore_index=True)
