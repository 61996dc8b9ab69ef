"""Draws the bubble of pipeline schedules over the number of micro-batches, and the cost of pipelines in runs."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from ultrabench.analysis.cells import made_with
from ultrabench.analysis.figures.picture import DARK, EDGE, GREY
from ultrabench.analysis.figures.runs import final, measured
from ultrabench.analysis.figures.style import Panel, looks, panel_grid
from ultrabench.errors import ConfigError, counted
from ultrabench.layout import AXES, FOLLOWING, Layout, default_schedule, details_of
from ultrabench.sweep.predict.pipeline import bubble_share
from ultrabench.sweep.refusals import schedule_refusals

_PIPELINE = (*FOLLOWING, "pp", *details_of("pp"))
_ALIKE = ["panel", "gbs", "seq_len", "nodes", *(name for name in AXES if name not in _PIPELINE)]
"""Columns that are equal in two runs of which one has a pipeline; dp is then pp times as large without it."""
_NAMES = ["pp", "gas", "schedule", "virtual_stages", "nodes", "share"]
_DASHES = ("--", "-.", (0, (6, 1)), (0, (1, 1, 4, 1)))
_MARKERS = {"1f1b": "o", "afab": "s", "interleaved": "D", "zbv": "^"}


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """The fractions of a step that are drawn, and the note.

    There is a row for each value of a formula, with 0 as its number of nodes, and for each pair of measured
    runs. The two runs of a pair differ only in their pipeline, and one of them has none. Their share is
    1 - step time without / step time with it: what the step is longer than its work.

    Raises:
        ConfigError: no run has a pipeline.
    """
    frame = final(table)
    piped = frame[frame["pp"] > 1]
    if not len(piped):
        todo = "plan some with sweep.pp=[1,2], or draw a schedule with: ultrabench plot schedule"
        raise ConfigError(f"{counted(len(frame), 'row')}, none of a run with pp > 1", todo)
    pairs = _pairs(frame)
    note = f"{_notes(pairs, piped)} {made_with(table)}"
    pairs = pairs.dropna(subset="share").rename(columns={"pp_schedule": "schedule"})[_NAMES]
    lines = pd.DataFrame(_formulas(piped), columns=_NAMES)
    return pd.concat([lines, pairs.sort_values(_NAMES)], ignore_index=True), note


def _pairs(frame: pd.DataFrame) -> pd.DataFrame:
    """The measured runs with a pipeline that are not suspect; `share` is missing for those without a like."""
    if not ((frame["status"] == "ok") & (frame["tokens_per_s_per_gpu"] > 0)).any():
        return frame.iloc[:0].assign(share=0.0)
    runs = measured(frame)
    runs = runs[runs["good"]]
    alone = runs[runs["pp"] == 1].groupby(_ALIKE, dropna=False)["step_time_s"].median().rename("alone_s")
    piped = runs[runs["pp"] > 1].merge(alone.reset_index(), on=_ALIKE, how="left")
    share = 1 - piped["alone_s"] / piped["step_time_s"]
    return piped.assign(share=share.where(piped["gas"].notna()))


def _formulas(piped: pd.DataFrame) -> Iterator[tuple[int, int, str, int, int, float]]:
    """The bubbles of 1F1B, which AFAB has too, interleaved and ZB-V over powers of two of micro-batches."""
    for pp in sorted({*piped["pp"].astype(int)}):
        runs = piped[piped["pp"] == pp]
        interleaved_stages = runs.loc[runs["pp_schedule"] == "interleaved", "virtual_stages"].dropna()
        stages = sorted({*interleaved_stages.astype(int)}) or [2]
        largest_gas = max(4 * pp, runs["gas"].max())  # the first where gas is unknown
        for gas in (2**n for n in range(int(largest_gas).bit_length())):
            for schedule, v in (("1f1b", 1), *(("interleaved", v) for v in stages), ("zbv", 2)):
                name = default_schedule(pp, gas) if schedule == "1f1b" else schedule
                layout = Layout(dp=1, pp=pp, gas=gas, pp_schedule=name, virtual_stages=v)
                if not [*schedule_refusals(layout)]:
                    yield layout.pp, gas, schedule, v, 0, bubble_share(layout)


def _notes(pairs: pd.DataFrame, piped: pd.DataFrame) -> str:
    """What lines and points mean, and which runs with a pipeline are no points."""
    alone = int(pairs["share"].isna().sum())
    ok_not_drawn = int((piped["status"] == "ok").sum()) - len(pairs)
    return (
        "Lines: idle time if all stages take equal time, backward takes twice as long as forward, and messages take no "
        f"time; xN: N stages per rank.\nPoints ({len(pairs) - alone}): 1 - step time without pipeline / step time with "
        "it, at equal nodes, batch, tp, cp, mbs, ZeRO stage and recomputation. They also contain messages, uneven stages "
        "and the savings in data parallelism. Below 0: faster with the pipeline.\nNot drawn: "
        f"{counted(alone, 'measured run')} with pp > 1 without a pp=1 counterpart, and {counted(ok_not_drawn, 'ok row')} "
        "with pp > 1 (suspect, stopped early or repeats)."
    )


def figure(drawn: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A panel for each pp: lines of the formulas, and points of measured runs coloured by their number of nodes."""
    lines, pairs = drawn[drawn["nodes"] == 0], drawn[drawn["nodes"] > 0]
    node_counts, point = sorted(pairs["nodes"].unique()), {"linestyle": "", "marker": "o"}
    nodes = looks(node_counts, ordered=True, name=lambda n: counted(n, "node"), **point)
    against = " and measured cost of pipelines (points)" if len(pairs) else ""
    heading = f"Bubble of pipeline schedules (lines){against}: {title}"
    styles = _styles(lines)
    markers = [
        {"label": f"measured, {name}", "linestyle": "", "marker": marker, "color": GREY}
        for name, marker in _MARKERS.items() if (pairs["schedule"] == name).any()
    ]  # fmt: skip
    keys, degrees = [*styles.values(), *markers, *nodes.values()], sorted(drawn["pp"].unique())
    whole, panels = panel_grid(degrees, title=heading, notes=notes, keys=keys, sharey=True)
    for pp, axes in panels.items():
        for schedule_and_stages, series in lines[lines["pp"] == pp].groupby(["schedule", "virtual_stages"]):
            axes.plot(series["gas"], 100 * series["share"], **styles[schedule_and_stages], zorder=3)
        for (schedule, n), series in pairs[pairs["pp"] == pp].groupby(["schedule", "nodes"]):
            look = {"color": nodes[n]["color"], "marker": _MARKERS[schedule], **EDGE}
            axes.scatter(series["gas"], 100 * series["share"], 22, **look, zorder=4)
        if len(pairs) and not (pairs["pp"] == pp).any():
            axes.remark("no measured pairs")
        axes.describe(f"pp={pp}", "micro-batches per step (gas)", "share of the step (%)")
        _scale(axes, drawn)
    return whole


def _styles(lines: pd.DataFrame) -> dict[tuple[str, int], dict[str, Any]]:
    """Schedule and stages on each rank -> the look of its line; the schedules differ without colour, too."""
    several = sorted({*lines.loc[lines["schedule"] == "interleaved", "virtual_stages"]})
    interleaved = {
        ("interleaved", v): {"color": GREY, "linestyle": dash, "label": f"interleaved x{v:g}"}
        for v, dash in zip(several, cycle(_DASHES), strict=False)
    }
    return {
        ("1f1b", 1): {"color": DARK, "linestyle": "-", "label": "1f1b, afab"},
        **interleaved,
        ("zbv", 2): {"color": DARK, "linestyle": ":", "label": "zbv"},
    }


def _scale(axes: Panel, drawn: pd.DataFrame) -> None:
    """Scales gas by powers of two, and the share to 100 %, from below 0 where a pipeline was faster."""
    smallest_gas, largest_gas = int(drawn["gas"].min()), int(drawn["gas"].max())
    ticks = [2**n for n in range(smallest_gas.bit_length() - 1, largest_gas.bit_length())]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xlim(smallest_gas / 1.25, largest_gas * 1.25)
    axes.set_ylim(min(0.0, 100 * drawn["share"].min() - 6), 104)
