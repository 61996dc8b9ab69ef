"""Draws nodes over time: a panel for each rate, with a mark for each measurement, coloured by its ratio to the
median of its day.
"""

from typing import Any

import pandas as pd
import pyarrow as pa
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from ultrabench.analysis.figures.runs import final_rows
from ultrabench.analysis.figures.style import panel_grid
from ultrabench.analysis.results.cells import made_with
from ultrabench.analysis.studies.nodes.measurements import RATES, measurements, table_rows
from ultrabench.analysis.studies.nodes.nodes import NodeReport, reports
from ultrabench.analysis.studies.nodes.relative import days_of
from ultrabench.errors import ConfigError, counted

MAX_NODES = 40
"""Largest number of nodes in a figure: the marked ones, then the slowest."""
_MAX_DEVIATION = 0.05
"""Relative difference from the median at the ends of the scale of colours."""
_MARK_LOOK: dict[str, Any] = {
    "marker": "s",
    "edgecolors": "grey",
    "linewidths": 0.3,
    "cmap": "RdBu",
    "vmin": 1 - _MAX_DEVIATION,
    "vmax": 1 + _MAX_DEVIATION,
}


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """The title of the rate, the node, its row, the time and the ratio of each measurement of a node, and the note.

    The ratio is that to the median of the same rate, on the same hardware with the same setting, on that day.

    Raises:
        ConfigError: the table holds no rates of nodes.
    """
    node_rows = table_rows(table)
    rate_measurements, node_reports = [*measurements(node_rows)], reports(node_rows)
    if not rate_measurements:
        final_rows(table)  # raises ConfigError where the table has no runs
        todo = "each allocation measures them at its start unless measure.preflight=false"
        raise ConfigError(f"{counted(len(node_rows), 'row')}, none with the rate of a node; {todo}")
    frame = pd.DataFrame(rate_measurements)
    day = frame["time_s"].map(days_of(frame["time_s"]))
    comparable_values = frame.groupby(["rate", "hardware", "setting", day], sort=False, dropna=False)["value"]
    frame = frame.assign(
        ratio=frame["value"] / comparable_values.transform("median"),
        time=pd.to_datetime(frame["time_s"], unit="s", utc=True),
        rate=frame["rate"].map(RATES),
    ).explode("nodes")
    drawn_reports = node_reports[:MAX_NODES]
    row_by_node = {report.node: row for row, report in enumerate(drawn_reports)}
    node_labels = [_node_label(report) for report in drawn_reports]
    frame = frame.assign(row=frame["nodes"].map(row_by_node.get)).dropna(subset="row").astype({"row": int})
    frame["node"] = frame["row"].map(node_labels.__getitem__)
    num_faster = len(node_reports) - len(drawn_reports)
    excluded_text = f"Not drawn: {counted(num_faster, 'faster node')}.\n" if num_faster else ""
    caption = "Colour: ratio to the median of the same measurement on that day."
    return frame, f"{excluded_text}{caption} {made_with(table)}"


def _node_label(report: NodeReport) -> str:
    mark_text = f" ({'failing' if report.failing else 'slow'})" if report.marked else ""
    return f"{report.node.host}{mark_text}"


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A panel for each rate, whose rows are nodes, the slowest at the top."""
    rate_names = [rate_name for rate_name in RATES.values() if rate_name in {*points["rate"]}]
    node_labels = points.drop_duplicates("row").set_index("row")["node"].sort_index()
    grid: dict[str, Any] = {"height": 1.0 + 0.14 * len(node_labels), "sharex": True, "sharey": True}
    figure, panels = panel_grid(rate_names, title=f"Rates of nodes over time: {title}", notes=notes, **grid)
    for rate_name, axes in panels.items():
        rate_points = points[points["rate"] == rate_name]
        marks = axes.scatter("time", "row", 22, "ratio", data=rate_points, **_MARK_LOOK)
        axes.describe(rate_name, "time (UTC)", "")
        axes.set_yticks([*node_labels.index], [*node_labels], fontsize=7)
        axes.set_ylim(node_labels.index.max() + 0.6, node_labels.index.min() - 0.6)
        locator = AutoDateLocator(minticks=2, maxticks=7)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
        axes.xaxis.get_offset_text().set(fontsize=7, visible=True)
        axes.tick_params("x", labelbottom=True)  # matplotlib labels shared ticks only in the last row
    colour_bar_options: dict[str, Any] = {"location": "bottom", "shrink": 0.4, "aspect": 40, "extend": "both"}
    colour_bar = axes.figure.colorbar(marks, ax=[*panels.values()], **colour_bar_options)
    colour_bar.set_label("ratio to the median", fontsize=8)
    colour_bar.ax.tick_params(labelsize=7)
    return figure
