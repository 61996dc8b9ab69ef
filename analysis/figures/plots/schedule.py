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

MOST_PASSES = 20_000
"""Largest number of passes of one figure."""
_WORDS = ("pp", "gas", *details_of("pp"))
_ROW, _TALLEST, _GAP = 0.3, 9.0, 0.25
"""Inches of the row of a stage, inches of all rows at most, and the space between two ranks, in rows."""
_SMALLEST_FONT, _LARGEST_FONT = 3.5, 8.0
_LABEL = 0.13
"""Smallest distance in inches of the names of two rows."""
_IDLE: dict[str, Any] = {"facecolor": "white", "edgecolor": "#a8a8a8", "hatch": "/////", "linewidth": 0}
_COLOURS = matplotlib.colormaps["viridis"]
_KEYS_TITLE = "number, and colour from dark to light: micro-batch"
_HALVES = {"input": "backward: gradient of the input", "weight": "backward: gradient of weights"}


def points(layout: Mapping[str, Any], table: pa.Table | None = None) -> tuple[pd.DataFrame, str]:
    """The passes (rank, stage, kind, micro_batch, chunk, start, end, name of the schedule), and the note.

    Args:
        layout: values of pp, gas, pp_schedule and virtual_stages; by default pp=4 and gas=2*pp.
        table: None, as results tell nothing about the order.

    Raises:
        ConfigError: the layout cannot run, has too many passes, or a table is given.
    """
    if table is not None:
        raise ConfigError("the figure schedule shows a layout, not results; remove the sweep or file")
    require_known("setting of the figure schedule", _WORDS, *layout)
    values = {"pp": 4} | read_arguments([f"{name}={value}" for name, value in layout.items()], (), "pp=4")
    values.setdefault("gas", 2 * values["pp"])
    chosen = layout_of({"dp": 1} | values)
    if reason := next(schedule_refusals(chosen), None):
        raise ConfigError(f"{chosen.label()} cannot run: {reason}; choose another layout")
    number = (3 if chosen.pp_schedule == "zbv" else 2) * chosen.num_stages * chosen.gas
    if number > MOST_PASSES:
        rule = f"a figure holds at most {MOST_PASSES:,}: choose a smaller gas or pp"
        raise ConfigError(f"pp={chosen.pp}, gas={chosen.gas} has {number:,} passes; {rule}")
    drawn = pd.DataFrame(timeline(chosen)).assign(schedule=chosen.pp_schedule)
    return drawn, _notes(drawn)


def _notes(drawn: pd.DataFrame) -> str:
    """The note under the figure: what is assumed of times, and the bubble relative to the work."""
    ratio, several = drawn["end"].max() / _work(drawn) - 1, drawn["chunk"].max() > 0
    return (
        "Assumes that all stages take equal time, backward takes twice as long as forward, and messages take no time. "
        f"{'White: the rank runs another of its stages. ' if several else ''}Idle time is {100 * ratio:.1f} % of the "
        "working time. The order is that of torch.distributed.pipelining."
    )


def _work(drawn: pd.DataFrame) -> float:
    """The time for which each rank works."""
    return float((drawn["end"] - drawn["start"]).sum() / drawn["rank"].nunique())


def figure(drawn: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A row for each stage and a group of rows for each rank; hatched where the rank is idle."""
    ranks, chunks, gas = (int(drawn[name].max()) + 1 for name in ("rank", "chunk", "micro_batch"))
    step, rows = drawn["end"].max(), ranks * chunks + _GAP * (ranks - 1)
    tall = min(_ROW * rows, _TALLEST)
    name, share = drawn["schedule"].iloc[0], f"{100 * (1 - _work(drawn) / step):.1f} %"
    where = f"{counted(gas, 'micro-batch')} on {counted(ranks, 'rank')}"
    heading = f"Pipeline schedule {name}, {where}: the bubble is {share} of the step"
    options: dict[str, Any] = {"height": tall + 0.7, "keys": _keys(drawn), "keys_title": _KEYS_TITLE}
    whole, panels = panel_grid([title], title=heading, notes=notes, **options)
    axes = panels[title]
    drawn = drawn.assign(row=drawn["rank"] * (chunks + _GAP) + drawn["chunk"])
    for _, rank_passes in drawn.groupby("rank"):
        since = np.append(0.0, rank_passes["end"])
        gaps = zip(since, np.append(rank_passes["start"], step) - since, strict=True)
        axes.broken_barh([gap for gap in gaps if gap[1] > 1e-9], (rank_passes["row"].min(), chunks), **_IDLE)
    _draw_passes(axes, drawn, gas, (WIDTH - 1) / step, tall / rows)
    axes.describe(title, "time (1: forward of one micro-batch through all layers of a rank)", "")
    label_step = -(-_LABEL // (tall / rows))
    labelled = drawn.drop_duplicates("row")[:: max(1, round(label_step))]
    names = [
        f"rank {rank}" if chunks == 1 else f"rank {rank}, stage {stage}"
        for rank, stage in zip(labelled["rank"], labelled["stage"], strict=True)
    ]
    axes.set_yticks(labelled["row"] + 0.5, names)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.set(xlim=(0, step), ylim=(rows, 0))
    return whole


def _draw_passes(axes: Panel, drawn: pd.DataFrame, gas: int, inch: float, row_inch: float) -> None:
    """Draws a box for each pass, with its number where that fits; `inch` is the width of one unit of time."""
    narrowest = (drawn["end"] - drawn["start"]).min() * inch
    font = min(_LARGEST_FONT, 95 * narrowest / len(str(gas - 1)), 50 * row_inch)
    for _, row_passes in drawn.groupby("row"):
        row = float(row_passes["row"].iloc[0])
        spans = [*zip(row_passes["start"], row_passes["end"] - row_passes["start"], strict=True)]
        passes = [*zip(row_passes["kind"], row_passes["micro_batch"], strict=True)]
        colours = [_colour(kind, number, gas) for kind, number in passes]
        edge = 0.5 if narrowest > 0.02 else 0.0
        axes.broken_barh(spans, (row, 1), facecolors=colours, edgecolor="white", linewidth=edge)
        if font < _SMALLEST_FONT:
            continue
        for (start, wide), (kind, number) in zip(spans, passes, strict=True):
            ink = "black" if kind == "forward" else "white"
            place: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
            axes.text(start + wide / 2, row + 0.5, str(number), color=ink, fontsize=font, **place)


def _colour(kind: str, number: int, gas: int) -> Any:
    """The colour of a micro-batch: pale in forward, dark in backward, and darker for the gradients of weights."""
    colour = np.array(_COLOURS(0.7 * number / max(1, gas - 1))[:3])
    return 0.35 * colour + 0.65 if kind == "forward" else colour * (0.6 if kind == "weight" else 1)


def _keys(drawn: pd.DataFrame) -> list[Patch]:
    """The entries of the legend."""
    kinds = [kind for kind in ("forward", "backward", "input", "weight") if (drawn["kind"] == kind).any()]
    boxes = [Patch(facecolor=_colour(kind, 1, 3), label=_HALVES.get(kind, kind)) for kind in kinds]
    return [*boxes, Patch(**_IDLE, label="idle")]
