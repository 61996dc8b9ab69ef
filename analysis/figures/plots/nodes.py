"""Draws nodes over time: a panel for each rate, with a mark for each measurement, coloured by its ratio to the median of its day."""

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import matplotlib
import pandas as pd
import pyarrow as pa
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure

from ultrabench.analysis.cells import made_with
from ultrabench.analysis.figures.runs import final
from ultrabench.analysis.figures.style import label, panel_grid
from ultrabench.analysis.nodes.measurements import RATES, measurements, table_rows
from ultrabench.analysis.nodes.nodes import reports
from ultrabench.analysis.nodes.relative import days_of
from ultrabench.errors import ConfigError, counted

MOST_NODES = 40
"""Largest number of nodes in a figure: the marked ones, then the slowest."""
_RANGE = 0.05
"""Relative difference from the median at the ends of the scale of colours."""


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """Rate, node, time and ratio to the median of what was measured alike on that day, and the note.

    Raises:
        ConfigError: the table holds no rates of nodes.
    """
    rows = table_rows(table)
    measured, node_reports = [*measurements(rows)], reports(rows)
    if not measured:
        final(table)  # says why where there are no runs at all
        todo = "each allocation measures them at its start unless measure.preflight=false"
        raise ConfigError(f"{counted(len(rows), 'row')}, none with the rate of a node; {todo}")
    day_of = days_of(measurement.time_s for measurement in measured)
    alike = defaultdict(list)
    for measurement in measured:
        alike[measurement.rate, measurement.hardware, measurement.setting, day_of[measurement.time_s]].append(
            measurement.value
        )
    middle = {key: float(pd.Series(values).median()) for key, values in alike.items()}
    shown = {report.node: report for report in node_reports[:MOST_NODES]}
    names = [
        f"{node.host} ({'failing' if r.failing else 'slow'})" if r.marked else node.host
        for node, r in shown.items()
    ]
    name_of = dict(zip(shown, names, strict=True))
    marks = [
        (RATES[measurement.rate], name_of[node], datetime.fromtimestamp(measurement.time_s, UTC),
         measurement.value / middle[measurement.rate, measurement.hardware, measurement.setting, day_of[measurement.time_s]])
        for measurement in measured for node in measurement.nodes if node in shown
    ]  # fmt: skip
    frame = pd.DataFrame(marks, columns=["rate", "node", "time", "ratio"])
    frame["place"] = frame["node"].map({name: n for n, name in enumerate(names)})
    left_out = (
        f"Not drawn: {counted(len(node_reports) - len(shown), 'faster node')}.\n"
        if len(node_reports) > len(shown)
        else ""
    )
    return (
        frame,
        f"{left_out}Colour: ratio to the median of the same measurement on that day. {made_with(table)}",
    )


def figure(drawn: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """A panel for each rate, whose rows are nodes, the slowest at the top."""
    rates = [rate for rate in RATES.values() if rate in {*drawn["rate"]}]
    names = drawn.drop_duplicates("place").set_index("place")["node"].sort_index()
    height = 1.0 + 0.14 * len(names)
    whole, middle, panels = panel_grid(
        len(rates),
        title=f"Rates of nodes over time: {title}",
        notes=notes,
        height=height,
        sharey=True,
        sharex=True,
    )
    scale: dict[str, Any] = {"cmap": matplotlib.colormaps["RdBu"], "vmin": 1 - _RANGE, "vmax": 1 + _RANGE}
    for axes, rate in zip(panels, rates, strict=True):
        of_rate = drawn[drawn["rate"] == rate]
        marks = axes.scatter(
            of_rate["time"],
            of_rate["place"],
            c=of_rate["ratio"],
            s=22,
            marker="s",
            edgecolors="grey",
            linewidths=0.3,
            **scale,
        )
        label(axes, rate, "time (UTC)", "")
        axes.set_yticks([*names.index], [*names], fontsize=7)
        axes.set_ylim(names.index.max() + 0.6, names.index.min() - 0.6)
        locator = AutoDateLocator(minticks=2, maxticks=7)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
        axes.xaxis.get_offset_text().set_fontsize(7)
    bar = middle.colorbar(marks, ax=panels, location="bottom", shrink=0.4, aspect=40, extend="both")
    bar.set_label("ratio to the median", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    return whole
