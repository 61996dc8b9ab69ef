"""Draws the bubble of pipeline schedules over the number of micro-batches, and the cost of pipelines in runs."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.figures.picture import DARK, EDGE_LOOK, GREY
from ultrabench.analysis.figures.runs import final_rows, ok_runs
from ultrabench.analysis.figures.style import Panel, panel_grid, series_looks
from ultrabench.analysis.results.cells import made_with
from ultrabench.errors import ConfigError, counted
from ultrabench.layout import AXES, FOLLOWING, Layout, default_schedule, details_of
from ultrabench.result import Status
from ultrabench.sweep.predict.pipeline import bubble_share
from ultrabench.sweep.refusals import schedule_refusals

_PIPELINE_AXES = (*FOLLOWING, "pp", *details_of("pp"))
_PAIR_COLUMNS = [
    "panel",
    "environment",
    "gbs",
    "seq_len",
    "nodes",
    *(name for name in AXES if name not in _PIPELINE_AXES),
]
"""Columns that are equal in the two runs of a pair; the run without a pipeline has a dp that is pp times as large."""
_POINT_COLUMNS = ["pp", "gas", "schedule", "virtual_stages", "nodes", "share"]
_INTERLEAVED_DASHES = ("--", "-.", (0, (6, 1)), (0, (1, 1, 4, 1)))
_MARKER_BY_SCHEDULE = {"1f1b": "o", "afab": "s", "interleaved": "D", "zbv": "^"}


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """The fractions of a step that are drawn, and the note.

    There is a row for each value of a formula, with 0 as its number of nodes, and for each measured run with a
    pipeline that has a counterpart: runs that differ from it only in that they have no pipeline. Its share is
    1 - their median step time / its own step time: the part of the step that the pipeline adds.

    Raises:
        ConfigError: no run has a pipeline.
    """
    rows = final_rows(table)
    pipeline_runs = rows[rows["pp"] > 1]
    if not len(pipeline_runs):
        todo = "plan some with sweep.pp=[1,2], or draw a schedule with: ultrabench plot schedule"
        raise ConfigError(f"{counted(len(rows), 'row')}, none of a run with pp > 1", todo)
    runs = _measured_pipeline_runs(rows)
    note = f"{_note(runs, pipeline_runs)} {made_with(table)}"
    measured_points = runs.dropna(subset="share").rename(columns={"pp_schedule": "schedule"})[_POINT_COLUMNS]
    formula_points = pd.DataFrame(_formula_rows(pipeline_runs), columns=_POINT_COLUMNS)
    return pd.concat([formula_points, measured_points.sort_values(_POINT_COLUMNS)], ignore_index=True), note


def _measured_pipeline_runs(rows: pd.DataFrame) -> pd.DataFrame:
    """The measured runs with a pipeline that may win; `share` is null for those without a run to compare with."""
    if not ((rows["status"] == Status.OK) & (rows["tokens_per_s_per_gpu"] > 0)).any():
        return rows.iloc[:0].assign(share=0.0)
    runs = ok_runs(rows)
    runs = runs[runs["may_win"]]
    median_times_s = runs[runs["pp"] == 1].groupby(_PAIR_COLUMNS, dropna=False)["step_time_s"].median()
    base_step_times = median_times_s.rename("base_step_time_s").reset_index()
    pipeline_runs = runs[runs["pp"] > 1].merge(base_step_times, on=_PAIR_COLUMNS, how="left")
    pipeline_share = 1 - pipeline_runs["base_step_time_s"] / pipeline_runs["step_time_s"]
    return pipeline_runs.assign(share=pipeline_share.where(pipeline_runs["gas"].notna()))


def _formula_rows(pipeline_runs: pd.DataFrame) -> Iterator[tuple[int, int, str, int, int, float]]:
    """The bubbles of 1F1B, which AFAB has too, interleaved and ZB-V over powers of two of micro-batches."""
    for pp in sorted({*pipeline_runs["pp"].astype(int)}):
        pp_runs = pipeline_runs[pipeline_runs["pp"] == pp]
        interleaved_counts = pp_runs.loc[pp_runs["pp_schedule"] == "interleaved", "virtual_stages"].dropna()
        stage_counts = sorted({*interleaved_counts.astype(int)}) or [2]
        schedules_and_stages = ("1f1b", 1), *(("interleaved", n) for n in stage_counts), ("zbv", 2)
        largest_gas = max(4 * pp, pp_runs["gas"].max())  # max() returns 4 * pp where gas is unknown (nan)
        for gas in (2**n for n in range(int(largest_gas).bit_length())):
            for schedule, virtual_stages in schedules_and_stages:
                pp_schedule = default_schedule(pp, gas) if schedule == "1f1b" else schedule
                layout = Layout(dp=1, pp=pp, gas=gas, pp_schedule=pp_schedule, virtual_stages=virtual_stages)
                if not [*schedule_refusals(layout)]:
                    yield layout.pp, gas, schedule, virtual_stages, 0, bubble_share(layout)


def _note(measured_runs: pd.DataFrame, pipeline_runs: pd.DataFrame) -> str:
    """The note: what lines and points mean, and how many of the runs with a pipeline are not drawn.

    Args:
        measured_runs: what `_measured_pipeline_runs` returns.
    """
    num_unpaired = int(measured_runs["share"].isna().sum())
    num_not_drawn = int((pipeline_runs["status"] == Status.OK).sum()) - len(measured_runs)
    return (
        "Lines: idle time if all stages take equal time, backward takes twice as long as forward, and messages take no "
        f"time; xN: N stages per rank.\nPoints ({len(measured_runs) - num_unpaired}): "
        "1 - step time without pipeline / step time with "
        "it, at equal nodes, batch, tp, cp, mbs, ZeRO stage and recomputation. "
        "They also contain messages, uneven stages "
        "and the savings in data parallelism. Below 0: faster with the pipeline.\nNot drawn: "
        f"{counted(num_unpaired, 'measured run')} with pp > 1 without a pp=1 counterpart, "
        f"and {counted(num_not_drawn, 'ok row')} "
        "with pp > 1 (suspect, stopped early or repeats)."
    )


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A panel for each pp: lines of the formulas, and points of measured runs coloured by their number of nodes."""
    formula_points, runs = points[points["nodes"] == 0], points[points["nodes"] > 0]
    node_counts, dot_look = sorted(runs["nodes"].unique()), {"linestyle": "", "marker": "o"}
    node_looks = series_looks(node_counts, is_ordered=True, label_of=lambda n: counted(n, "node"), **dot_look)
    measured_text = " and measured cost of pipelines (points)" if len(runs) else ""
    heading = f"Bubble of pipeline schedules (lines){measured_text}: {title}"
    look_by_formula = _look_by_formula(formula_points)
    marker_looks = [
        {"label": f"measured, {schedule}", "linestyle": "", "marker": marker, "color": GREY}
        for schedule, marker in _MARKER_BY_SCHEDULE.items() if (runs["schedule"] == schedule).any()
    ]  # fmt: skip
    legend = [*look_by_formula.values(), *marker_looks, *node_looks.values()]
    pps = sorted(points["pp"].unique())
    figure, panels = panel_grid(pps, title=heading, notes=notes, legend=legend, sharey=True)
    for pp, axes in panels.items():
        formula_groups = formula_points[formula_points["pp"] == pp].groupby(["schedule", "virtual_stages"])
        for formula, group in formula_groups:
            axes.plot(group["gas"], 100 * group["share"], **look_by_formula[formula], zorder=3)
        for (schedule, num_nodes), group in runs[runs["pp"] == pp].groupby(["schedule", "nodes"]):
            look = {"color": node_looks[num_nodes]["color"], "marker": _MARKER_BY_SCHEDULE[schedule]}
            axes.scatter(group["gas"], 100 * group["share"], 22, **look, **EDGE_LOOK, zorder=4)
        if len(runs) and not (runs["pp"] == pp).any():
            axes.remark("no measured pairs")
        axes.describe(f"pp={pp}", "micro-batches per step (gas)", "share of the step (%)")
        _set_scales(axes, points)
    return figure


def _look_by_formula(formula_points: pd.DataFrame) -> dict[tuple[str, int], dict[str, Any]]:
    """Schedule and number of stages on each rank -> the look of its line; the lines differ without colour, too."""
    interleaved_points = formula_points[formula_points["schedule"] == "interleaved"]
    stage_counts = sorted({*interleaved_points["virtual_stages"]})
    interleaved_looks = {
        ("interleaved", n): {"color": GREY, "linestyle": dash, "label": f"interleaved x{n:g}"}
        for n, dash in zip(stage_counts, cycle(_INTERLEAVED_DASHES), strict=False)
    }
    return {
        ("1f1b", 1): {"color": DARK, "linestyle": "-", "label": "1f1b, afab"},
        **interleaved_looks,
        ("zbv", 2): {"color": DARK, "linestyle": ":", "label": "zbv"},
    }


def _set_scales(axes: Panel, points: pd.DataFrame) -> None:
    """Sets the scales: gas by powers of two; the share up to 100 %, from below 0 where a pipeline was faster."""
    smallest_gas, largest_gas = int(points["gas"].min()), int(points["gas"].max())
    gas_ticks = [2**n for n in range(smallest_gas.bit_length() - 1, largest_gas.bit_length())]
    axes.set_xscale("log", base=2)
    axes.set_xticks(gas_ticks, [f"{gas:,}" for gas in gas_ticks])
    axes.set_xlim(smallest_gas / 1.25, largest_gas * 1.25)
    axes.set_ylim(min(0.0, 100 * points["share"].min() - 6), 104)
