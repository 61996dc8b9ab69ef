"""Draws the timeline of a pipeline schedule: what each stage runs at which time, and when its rank is idle."""

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ultrabench.analysis.figures.style import WIDTH_INCHES, Panel, panel_grid
from ultrabench.errors import ConfigError, counted, require_known
from ultrabench.layout import details_of
from ultrabench.sweep.arguments import layout_of, read_arguments
from ultrabench.sweep.predict.pipeline import timeline
from ultrabench.sweep.refusals import schedule_refusals

_MAX_PASSES = 20_000
"""Largest number of passes of one figure."""
_SETTING_NAMES = ("pp", "gas", *details_of("pp"))
"""Axes of a layout that the user can set."""
_ROW_INCHES, _MAX_ROWS_INCHES, _RANK_GAP_ROWS = 0.3, 9.0, 0.25
"""Height of the row of a stage and largest height of all rows, in inches; space between two ranks, in rows."""
_MIN_FONT_PT, _MAX_FONT_PT = 3.5, 8.0
"""Sizes in points of the smallest and the largest number in a box; a box where it does not fit has none."""
_MIN_LABEL_INCHES = 0.13
"""Smallest distance between the labels of two rows, in inches."""
_IDLE_LOOK: dict[str, Any] = {"facecolor": "white", "edgecolor": "#a8a8a8", "hatch": "/////", "linewidth": 0}
_COLOUR_MAP = matplotlib.colormaps["viridis"]
_LEGEND_TITLE = "number, and colour from dark to light: micro-batch"
_LABEL_BY_KIND = {"input": "backward: gradient of the input", "weight": "backward: gradient of weights"}


def points(layout: Mapping[str, Any], table: pa.Table | None = None) -> tuple[pd.DataFrame, str]:
    """The passes (rank, stage, kind, micro_batch, chunk, start, end, name of the schedule), and the note.

    A pass is the work of a stage on a micro-batch. The unit of time is the forward of one micro-batch through all
    layers of a rank.

    Args:
        layout: values of pp, gas, pp_schedule and virtual_stages; by default pp=4 and gas=2*pp.
        table: must be None, since results do not contain the order of passes.

    Raises:
        ConfigError: the layout cannot run, has too many passes, or a table is given.
    """
    if table is not None:
        raise ConfigError("the figure schedule shows a layout, not results; remove the sweep or file")
    require_known("setting of the figure schedule", _SETTING_NAMES, *layout)
    settings = {"pp": 4} | read_arguments([f"{name}={value}" for name, value in layout.items()], (), "pp=4")
    settings.setdefault("gas", 2 * settings["pp"])
    full_layout = layout_of({"dp": 1} | settings)
    if reason := next(schedule_refusals(full_layout), None):
        raise ConfigError(f"{full_layout.label()} cannot run: {reason}; choose another layout")
    num_passes = (3 if full_layout.pp_schedule == "zbv" else 2) * full_layout.num_stages * full_layout.gas
    if num_passes > _MAX_PASSES:
        limit_text = f"a figure holds at most {_MAX_PASSES:,}: choose a smaller gas or pp"
        layout_text = f"pp={full_layout.pp}, gas={full_layout.gas}"
        raise ConfigError(f"{layout_text} has {num_passes:,} passes; {limit_text}")
    passes = pd.DataFrame(timeline(full_layout)).assign(schedule=full_layout.pp_schedule)
    return passes, _note(passes)


def _note(passes: pd.DataFrame) -> str:
    """The note under the figure: what is assumed of times, and the bubble relative to the work."""
    bubble_ratio, has_chunks = passes["end"].max() / _busy_time(passes) - 1, passes["chunk"].max() > 0
    return (
        "Assumes that all stages take equal time, backward takes twice as long as forward, and messages take no time. "
        f"{'White: the rank runs another of its stages. ' if has_chunks else ''}Idle time is "
        f"{100 * bubble_ratio:.1f} % of the "
        "working time. The order is that of torch.distributed.pipelining."
    )


def _busy_time(passes: pd.DataFrame) -> float:
    """The time for which each rank works, which is the same for all ranks."""
    return float((passes["end"] - passes["start"]).sum() / passes["rank"].nunique())


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A row for each stage and a group of rows for each rank; hatched where the rank is idle."""
    num_ranks, num_chunks, gas = (int(points[name].max()) + 1 for name in ("rank", "chunk", "micro_batch"))
    step_time, num_rows = points["end"].max(), num_ranks * num_chunks + _RANK_GAP_ROWS * (num_ranks - 1)
    row_inches = min(_ROW_INCHES, _MAX_ROWS_INCHES / num_rows)
    schedule, bubble_percent = points["schedule"].iloc[0], 100 * (1 - _busy_time(points) / step_time)
    size_text = f"{counted(gas, 'micro-batch')} on {counted(num_ranks, 'rank')}"
    heading = f"Pipeline schedule {schedule}, {size_text}: the bubble is {bubble_percent:.1f} % of the step"
    legend: dict[str, Any] = {"legend": _legend_patches(points), "legend_title": _LEGEND_TITLE}
    height = row_inches * num_rows + 0.7
    figure, panels = panel_grid([title], title=heading, notes=notes, height=height, **legend)
    axes = panels[title]
    points = points.assign(row=points["rank"] * (num_chunks + _RANK_GAP_ROWS) + points["chunk"])
    for _, rank_passes in points.groupby("rank"):
        idle_starts = np.append(0.0, rank_passes["end"])
        idle_times = np.append(rank_passes["start"], step_time) - idle_starts
        idle_spans = np.stack([idle_starts, idle_times], axis=1)[idle_times > 1e-9]
        axes.broken_barh(idle_spans, (rank_passes["row"].min(), num_chunks), **_IDLE_LOOK)
    _draw_passes(axes, points, gas, (WIDTH_INCHES - 1) / step_time, row_inches)
    axes.describe(title, "time (1: forward of one micro-batch through all layers of a rank)", "")
    rows_per_label = -(-_MIN_LABEL_INCHES // row_inches)
    labelled_rows = points.drop_duplicates("row")[:: max(1, round(rows_per_label))]
    row_names = [
        f"rank {rank}" if num_chunks == 1 else f"rank {rank}, stage {stage}"
        for rank, stage in zip(labelled_rows["rank"], labelled_rows["stage"], strict=True)
    ]
    axes.set_yticks(labelled_rows["row"] + 0.5, row_names)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.set(xlim=(0, step_time), ylim=(num_rows, 0))
    return figure


def _draw_passes(axes: Panel, passes: pd.DataFrame, gas: int, time_inches: float, row_inches: float) -> None:
    """Draws a box for each pass, with the number of its micro-batch where that fits.

    Args:
        time_inches: width of one unit of time.
        row_inches: height of a row.
    """
    narrowest_inches = (passes["end"] - passes["start"]).min() * time_inches
    font_pt = min(_MAX_FONT_PT, 95 * narrowest_inches / len(str(gas - 1)), 50 * row_inches)
    for _, row_passes in passes.groupby("row"):
        row = float(row_passes["row"].iloc[0])
        spans = [*zip(row_passes["start"], row_passes["end"] - row_passes["start"], strict=True)]
        kinds_and_micro_batches = [*zip(row_passes["kind"], row_passes["micro_batch"], strict=True)]
        colours = [_pass_colour(kind, micro_batch, gas) for kind, micro_batch in kinds_and_micro_batches]
        edge_width = 0.5 if narrowest_inches > 0.02 else 0.0
        axes.broken_barh(spans, (row, 1), facecolors=colours, edgecolor="white", linewidth=edge_width)
        if font_pt < _MIN_FONT_PT:
            continue
        for (start, length), (kind, micro_batch) in zip(spans, kinds_and_micro_batches, strict=True):
            text_look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": font_pt}
            text_look["color"] = "black" if kind == "forward" else "white"
            axes.text(start + length / 2, row + 0.5, str(micro_batch), **text_look)


def _pass_colour(kind: str, micro_batch: int, gas: int) -> Any:
    """The colour of a micro-batch: pale in forward, dark in backward, and darker for the gradients of weights."""
    full_colour = np.array(_COLOUR_MAP(0.7 * micro_batch / max(1, gas - 1))[:3])
    return 0.35 * full_colour + 0.65 if kind == "forward" else full_colour * (0.6 if kind == "weight" else 1)


def _legend_patches(passes: pd.DataFrame) -> list[Patch]:
    """The entries of the legend: one for each kind of pass that occurs, and one for idle time."""
    kinds = [kind for kind in ("forward", "backward", "input", "weight") if (passes["kind"] == kind).any()]
    boxes = [
        Patch(facecolor=_pass_colour(kind, 1, 3), label=_LABEL_BY_KIND.get(kind, kind)) for kind in kinds
    ]
    return [*boxes, Patch(**_IDLE_LOOK, label="idle")]
