"""What figures have in common: the title, the notes, the grid of panels with a legend, and the looks of series."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter

from ultrabench.analysis.figures.picture import GREY, wrapped
from ultrabench.errors import ConfigError, counted

WIDTH = 7.2
"""Width of a figure in inches, at which two columns of panels stay readable on a phone."""
MAX_PANELS = 60
"""Largest number of panels of one figure."""
COLOURS = sns.color_palette("colorblind", 8).as_hex()
"""Colours that colour-blind readers can tell apart."""
PALE = "#d9d9d9"
"""Colour of grid lines."""
_TITLE_LINE, _NOTE_LINE, _MARGIN = 0.23, 0.15, 0.1
"""Heights in inches of a line of the title, of a line of the notes, and of the space above and below."""
_TITLE_WIDTH, _NAME_WIDTH, _NOTE_WIDTH, _LEGEND_WIDTH, _TICKS_WIDTH = 66, 72, 128, 100, 88
"""Numbers of characters that fit into the width of a figure."""
_MARKERS = "osD^vPX*<>"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
Looks = dict[Any, dict[str, Any]]
"""Value of a series -> its label, colour, marker and line style, as options of `plot`."""


class Panel(Axes):
    """A part of a figure, with axes of its own."""

    def describe(self, name: str, x_title: str, y_title: str) -> None:
        """Writes the name of the panel above it, on at most four lines, and what its axes show with their units."""
        width = _NAME_WIDTH // self._num_columns
        lines = [line for part in name.split(" | ", 1) for line in textwrap.wrap(part, width, max_lines=2)]
        self.set_title("\n".join(lines), fontsize=9.5, fontweight="bold", loc="left")
        self.set_xlabel(x_title, fontsize=8.5, color=GREY)
        self.set_ylabel(y_title, fontsize=8.5, color=GREY)

    @property
    def _num_columns(self) -> int:
        return int(self.get_subplotspec().get_gridspec().ncols)  # type: ignore[union-attr]

    def categories(self, values: Sequence[object]) -> None:
        """Puts the values at equal distances on the x axis, with room for at least five, and labels as many as fit."""
        margin = max(0.6, (5 - len(values)) / 2)
        labels = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        label_step = -(-len(labels) * (max(map(len, labels)) + 1) // (_TICKS_WIDTH // self._num_columns))
        self.set_xticks(range(0, len(labels), label_step), labels[::label_step])
        self.set_xlim(-margin, len(values) - 1 + margin)

    def log_scale(self, direction: str, smallest: float, largest: float, text: str = "{x:,.10g}") -> None:
        """Makes the axis x or y logarithmic, with labels also between powers of ten where these are few."""
        self.set(**{f"{direction}scale": "log"})
        scale = self.xaxis if direction == "x" else self.yaxis
        ticks: Locator = LogLocator(subs=(1, 2, 5) if largest < 2000 * smallest else (1,))
        scale.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]) if largest < 4 * smallest else ticks)
        scale.set_major_formatter(text)
        scale.set_minor_formatter(NullFormatter())

    def line_in_band(self, x: Any, low: Any, middle: Any, high: Any, **look: Any) -> None:
        """Draws a line, and a pale band from the lowest to the highest values around it."""
        self.plot(x, middle, **look)
        self.fill_between(x, low, high, alpha=0.2, linewidth=0, color=look["color"])

    def remark(self, text: str) -> None:
        """Writes a text near the top of a panel that lacks what it would show."""
        self.text(0.5, 0.9, text, transform=self.transAxes, ha="center", fontsize=9)


def panel_grid(
    panel_keys: Iterable[Any], *, title: str, notes: str, legend: Iterable[Any] = (), legend_title: str | None = None,
    ncols: int = 2, height: float = 2.3, **options: Any,
) -> tuple[Figure, dict[Any, Panel]]:  # fmt: skip
    """A figure with a title above, a legend, a panel for each name, row by row, and notes below.

    All texts have room of their own.

    Args:
        notes: lines of text, which are wrapped.
        legend: its entries: artists with a label, or the looks of lines with the key `label`.
        legend_title: title of the legend.
        ncols: largest number of panels in a row.
        height: inches of a panel.
        options: further options of `Figure.subplots`, such as sharey.

    Raises:
        ConfigError: there are more than MAX_PANELS panels.
    """
    panel_keys = [*panel_keys]
    if len(panel_keys) > MAX_PANELS:
        todo = "select fewer rows with COLUMN=VALUE, such as model=NAME"
        fact = f"{counted(len(panel_keys), 'panel')} to draw; a figure holds at most {MAX_PANELS}"
        raise ConfigError(f"{fact}: {todo}")
    ncols = min(ncols, len(panel_keys))
    nrows = -(-len(panel_keys) // ncols)
    heading, note_lines = wrapped(title, _TITLE_WIDTH), wrapped(notes, _NOTE_WIDTH)
    title_height, notes_height = _TITLE_LINE * len(heading) + _MARGIN, _NOTE_LINE * len(note_lines) + _MARGIN
    part_heights = [title_height, nrows * height + 0.3, notes_height]
    figure = Figure(figsize=(WIDTH, sum(part_heights)), layout="constrained", facecolor="white")
    head, body, foot = figure.subfigures(3, 1, squeeze=False, height_ratios=part_heights).flat
    left, title_look = 0.08 / WIDTH, {"fontsize": 12, "fontweight": "bold"}
    head.text(left, 1 - _MARGIN / title_height, "\n".join(heading), va="top", **title_look)
    note_look: dict[str, Any] = {"fontsize": 7, "color": GREY, "linespacing": 1.35}
    foot.text(left, _MARGIN / notes_height, "\n".join(note_lines), va="bottom", **note_look)
    panel_class = {"axes_class": Panel}
    panels = list(body.subplots(nrows, ncols, squeeze=False, subplot_kw=panel_class, **options).flat)
    for unused_axes in panels[len(panel_keys) :]:
        unused_axes.remove()
    for axes in panels[: len(panel_keys)]:
        axes.tick_params(labelsize=8, color=GREY)
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.grid(color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if legend := [*legend]:
        _draw_legend(body, legend, legend_title)
    return figure, dict(zip(panel_keys, panels, strict=False))


def _draw_legend(body: SubFigure, entries: Sequence[Any], title: str | None) -> None:
    """Draws a legend above the panels, in as many columns as fit."""
    handles = [Line2D([], [], **entry) if isinstance(entry, dict) else entry for entry in entries]
    longest_label = max(len(str(handle.get_label())) for handle in handles)
    ncols = max(1, min(len(handles), _LEGEND_WIDTH // (longest_label + 6)))
    options: dict[str, Any] = {"frameon": False, "fontsize": 8, "title_fontsize": 8, "alignment": "left"}
    body.legend(handles=handles, title=title, loc="outside upper left", ncols=ncols, **options)


def looks(values: Sequence[Any], *, ordered: bool, name: Callable[[Any], str] = str, **options: Any) -> Looks:
    """The looks of series, which differ without colour, too, and their labels in the legend.

    Args:
        ordered: whether the values have an order, which the colours then follow from dark to light.
        name: the label of a value.
        options: options of all series, such as linestyle="" for markers alone.
    """
    ordered_colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(values))).tolist()
    colours = cycle(ordered_colours if ordered else COLOURS)
    return {
        value: {"color": colour, "marker": marker, "linestyle": dash, "label": name(value), **options}
        for value, colour, marker, dash in zip(values, colours, cycle(_MARKERS), cycle(_DASHES), strict=False)
    }
