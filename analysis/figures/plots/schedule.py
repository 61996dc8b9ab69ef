"""Draws the timeline of a pipeline schedule: what each stage runs at which time, and when its rank is idle."""

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ultrabench.analysis.figures.style import WIDTH, Panel, panel_grid
from ultrabench.errors import ConfigError, counted, require_known
from ultrabench.layout import details_of
from ultrabench.sweep.arguments import layout_of, read_arguments
from ultrabench.sweep.predict.pipeline import timeline
from ultrabench.sweep.refusals import schedule_refusals

_MAX_PASSES = 20_000
"""Largest number of passes of one figure."""
_ARGUMENTS = ("pp", "gas", *details_of("pp"))
_ROW_INCHES, _MAX_INCHES, _RANK_GAP = 0.3, 9.0, 0.25
"""Height of the row of a stage and largest height of all rows, in inches; space between two ranks, in rows."""
_SMALLEST_FONT, _LARGEST_FONT = 3.5, 8.0
_MIN_LABEL_INCHES = 0.13
"""Smallest distance between the labels of two rows, in inches."""
_IDLE_LOOK: dict[str, Any] = {"facecolor": "white", "edgecolor": "#a8a8a8", "hatch": "/////", "linewidth": 0}
_COLOUR_MAP = matplotlib.colormaps["viridis"]
_TITLE = "number, and colour from dark to light: micro-batch"
_LABEL_BY_KIND = {"input": "backward: gradient of the input", "weight": "backward: gradient of weights"}


def points(layout: Mapping[str, Any], table: pa.Table | None = None) -> tuple[pd.DataFrame, str]:
    """The passes (rank, stage, kind, micro_batch, chunk, start, end, name of the schedule), and the note.

    Args:
        layout: values of pp, gas, pp_schedule and virtual_stages; by default pp=4 and gas=2*pp.
        table: must be None, since results do not contain the order of passes.

    Raises:
        ConfigError: the layout cannot run, has too many passes, or a table is given.
    """
    if table is not None:
        raise ConfigError("the figure schedule shows a layout, not results; remove the sweep or file")
    require_known("setting of the figure schedule", _ARGUMENTS, *layout)
    values = {"pp": 4} | read_arguments([f"{name}={value}" for name, value in layout.items()], (), "pp=4")
    values.setdefault("gas", 2 * values["pp"])
    pipeline = layout_of({"dp": 1} | values)
    if reason := next(schedule_refusals(pipeline), None):
        raise ConfigError(f"{pipeline.label()} cannot run: {reason}; choose another layout")
    num_passes = (3 if pipeline.pp_schedule == "zbv" else 2) * pipeline.num_stages * pipeline.gas
    if num_passes > _MAX_PASSES:
        rule = f"a figure holds at most {_MAX_PASSES:,}: choose a smaller gas or pp"
        raise ConfigError(f"pp={pipeline.pp}, gas={pipeline.gas} has {num_passes:,} passes; {rule}")
    passes = pd.DataFrame(timeline(pipeline)).assign(schedule=pipeline.pp_schedule)
    return passes, _notes(passes)


def _notes(passes: pd.DataFrame) -> str:
    """The note under the figure: what is assumed of times, and the bubble relative to the work."""
    bubble_ratio, has_chunks = passes["end"].max() / _working_time(passes) - 1, passes["chunk"].max() > 0
    return (
        "Assumes that all stages take equal time, backward takes twice as long as forward, and messages take no time. "
        f"{'White: the rank runs another of its stages. ' if has_chunks else ''}Idle time is {100 * bubble_ratio:.1f} % of the "
        "working time. The order is that of torch.distributed.pipelining."
    )


def _working_time(passes: pd.DataFrame) -> float:
    """The time for which each rank works."""
    return float((passes["end"] - passes["start"]).sum() / passes["rank"].nunique())


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A row for each stage and a group of rows for each rank; hatched where the rank is idle."""
    num_ranks, num_chunks, gas = (int(points[name].max()) + 1 for name in ("rank", "chunk", "micro_batch"))
    step_time, num_rows = points["end"].max(), num_ranks * num_chunks + _RANK_GAP * (num_ranks - 1)
    height = min(_ROW_INCHES * num_rows, _MAX_INCHES)
    name, share_text = points["schedule"].iloc[0], f"{100 * (1 - _working_time(points) / step_time):.1f} %"
    size_text = f"{counted(gas, 'micro-batch')} on {counted(num_ranks, 'rank')}"
    heading = f"Pipeline schedule {name}, {size_text}: the bubble is {share_text} of the step"
    options: dict[str, Any] = {"height": height + 0.7, "legend": _legend(points), "legend_title": _TITLE}
    figure, panels = panel_grid([title], title=heading, notes=notes, **options)
    axes = panels[title]
    points = points.assign(row=points["rank"] * (num_chunks + _RANK_GAP) + points["chunk"])
    for _, rank_passes in points.groupby("rank"):
        idle_starts = np.append(0.0, rank_passes["end"])
        gaps = zip(idle_starts, np.append(rank_passes["start"], step_time) - idle_starts, strict=True)
        spans = [(start, width) for start, width in gaps if width > 1e-9]
        axes.broken_barh(spans, (rank_passes["row"].min(), num_chunks), **_IDLE_LOOK)
    _draw_passes(axes, points, gas, (WIDTH - 1) / step_time, height / num_rows)
    axes.describe(title, "time (1: forward of one micro-batch through all layers of a rank)", "")
    label_step = -(-_MIN_LABEL_INCHES // (height / num_rows))
    labelled_rows = points.drop_duplicates("row")[:: max(1, round(label_step))]
    row_names = [
        f"rank {rank}" if num_chunks == 1 else f"rank {rank}, stage {stage}"
        for rank, stage in zip(labelled_rows["rank"], labelled_rows["stage"], strict=True)
    ]
    axes.set_yticks(labelled_rows["row"] + 0.5, row_names)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.set(xlim=(0, step_time), ylim=(num_rows, 0))
    return figure


def _draw_passes(axes: Panel, points: pd.DataFrame, gas: int, time_inches: float, row_inch: float) -> None:
    """Draws a box for each pass, with its number where that fits; `time_inches` is the width of one unit of time."""
    narrowest = (points["end"] - points["start"]).min() * time_inches
    font_size = min(_LARGEST_FONT, 95 * narrowest / len(str(gas - 1)), 50 * row_inch)
    for _, row_passes in points.groupby("row"):
        row = float(row_passes["row"].iloc[0])
        spans = [*zip(row_passes["start"], row_passes["end"] - row_passes["start"], strict=True)]
        kinds_and_numbers = [*zip(row_passes["kind"], row_passes["micro_batch"], strict=True)]
        colours = [_colour(kind, number, gas) for kind, number in kinds_and_numbers]
        edge_width = 0.5 if narrowest > 0.02 else 0.0
        axes.broken_barh(spans, (row, 1), facecolors=colours, edgecolor="white", linewidth=edge_width)
        if font_size < _SMALLEST_FONT:
            continue
        for (start, length), (kind, number) in zip(spans, kinds_and_numbers, strict=True):
            colour = "black" if kind == "forward" else "white"
            align: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
            axes.text(start + length / 2, row + 0.5, str(number), color=colour, fontsize=font_size, **align)


def _colour(kind: str, number: int, gas: int) -> Any:
    """The colour of a micro-batch: pale in forward, dark in backward, and darker for the gradients of weights."""
    colour = np.array(_COLOUR_MAP(0.7 * number / max(1, gas - 1))[:3])
    return 0.35 * colour + 0.65 if kind == "forward" else colour * (0.6 if kind == "weight" else 1)


def _legend(points: pd.DataFrame) -> list[Patch]:
    """The entries of the legend."""
    kinds = [kind for kind in ("forward", "backward", "input", "weight") if (points["kind"] == kind).any()]
    boxes = [Patch(facecolor=_colour(kind, 1, 3), label=_LABEL_BY_KIND.get(kind, kind)) for kind in kinds]
    return [*boxes, Patch(**_IDLE_LOOK, label="idle")]
