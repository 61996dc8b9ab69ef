"""Draws nodes over time: a panel for each rate, with a mark for each measurement, coloured by its ratio to the median of its day."""

from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from ultrabench.analysis.cells import made_with
from ultrabench.analysis.figures.runs import final
from ultrabench.analysis.figures.style import panel_grid
from ultrabench.analysis.nodes.measurements import RATES, measurements, table_rows
from ultrabench.analysis.nodes.nodes import NodeReport, reports
from ultrabench.analysis.nodes.relative import days_of
from ultrabench.errors import ConfigError, counted

MAX_NODES = 40
"""Largest number of nodes in a figure: the marked ones, then the slowest."""
_MAX_DEVIATION = 0.05
"""Relative difference from the median at the ends of the scale of colours."""
_MARK_LOOK: dict[str, Any] = {
    "marker": "s", "edgecolors": "grey", "linewidths": 0.3, "cmap": "RdBu", "vmin": 1 - _MAX_DEVIATION, "vmax": 1 + _MAX_DEVIATION,
}  # fmt: skip


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """Rate, node, time and ratio to the median of what was measured alike on that day, and the note.

    Raises:
        ConfigError: the table holds no rates of nodes.
    """
    rows = table_rows(table)
    rates, node_reports = [*measurements(rows)], reports(rows)
    if not rates:
        final(table)  # raises ConfigError where the table has no runs
        todo = "each allocation measures them at its start unless measure.preflight=false"
        raise ConfigError(f"{counted(len(rows), 'row')}, none with the rate of a node; {todo}")
    frame = pd.DataFrame(rates)
    day = frame["time_s"].map(days_of(frame["time_s"]))
    comparable_rates = frame.groupby(["rate", "hardware", "setting", day], sort=False, dropna=False)["value"]
    frame = frame.assign(
        ratio=frame["value"] / comparable_rates.transform("median"),
        time=pd.to_datetime(frame["time_s"], unit="s", utc=True),
        rate=frame["rate"].map(RATES),
    ).explode("nodes")
    drawn_reports = node_reports[:MAX_NODES]
    places = {report.node: place for place, report in enumerate(drawn_reports)}
    labels = [_name(report) for report in drawn_reports]
    frame = frame.assign(place=frame["nodes"].map(places.get)).dropna(subset="place").astype({"place": int})
    frame["node"] = frame["place"].map(labels.__getitem__)
    num_not_drawn = len(node_reports) - len(drawn_reports)
    excluded_text = f"Not drawn: {counted(num_not_drawn, 'faster node')}.\n" if num_not_drawn else ""
    caption = "Colour: ratio to the median of the same measurement on that day."
    return frame, f"{excluded_text}{caption} {made_with(table)}"


def _name(report: NodeReport) -> str:
    mark_text = f" ({'failing' if report.failing else 'slow'})" if report.marked else ""
    return f"{report.node.host}{mark_text}"


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A panel for each rate, whose rows are nodes, the slowest at the top."""
    rates = [rate for rate in RATES.values() if rate in {*points["rate"]}]
    labels = points.drop_duplicates("place").set_index("place")["node"].sort_index()
    options: dict[str, Any] = {"height": 1.0 + 0.14 * len(labels), "sharex": True, "sharey": True}
    figure, panels = panel_grid(rates, title=f"Rates of nodes over time: {title}", notes=notes, **options)
    for rate, axes in panels.items():
        marks = axes.scatter("time", "place", 22, "ratio", data=points[points["rate"] == rate], **_MARK_LOOK)
        axes.describe(rate, "time (UTC)", "")
        axes.set_yticks([*labels.index], [*labels], fontsize=7)
        axes.set_ylim(labels.index.max() + 0.6, labels.index.min() - 0.6)
        locator = AutoDateLocator(minticks=2, maxticks=7)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
        axes.xaxis.get_offset_text().set(fontsize=7, visible=True)
        axes.tick_params("x", labelbottom=True)  # matplotlib labels shared ticks only in the last row
    bar_options: dict[str, Any] = {"location": "bottom", "shrink": 0.4, "aspect": 40, "extend": "both"}
    bar = axes.figure.colorbar(marks, ax=[*panels.values()], **bar_options)
    bar.set_label("ratio to the median", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return figure
