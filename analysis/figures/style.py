"""What figures have in common: the title, the notes, the grid of panels with a legend, and the looks of series.

A look is a dict of options of `plot`: colour, marker, line style and the label in the legend.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, cycle
from typing import Any

import matplotlib
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter

from ultrabench.analysis.figures.picture import GREY, wrapped_lines
from ultrabench.analysis.results.columns import column_of
from ultrabench.errors import ConfigError, counted

WIDTH_INCHES = 7.2
"""Width of a figure in inches, at which two columns of panels stay readable on a phone."""
MAX_PANELS = 60
"""Largest number of panels of one figure."""
COLOURS = sns.color_palette("colorblind", 8).as_hex()
"""Colours that colour-blind readers can tell apart."""
PALE = "#d9d9d9"
"""Colour of grid lines."""
_TITLE_LINE_INCHES, _NOTE_LINE_INCHES, _MARGIN_INCHES = 0.23, 0.15, 0.1
"""Heights in inches of a line of the title, of a line of the notes, and of the space above and below."""
_TITLE_CHARS, _PANEL_NAME_CHARS, _NOTE_CHARS, _LEGEND_CHARS, _TICK_LABEL_CHARS = 66, 72, 128, 100, 88
"""Numbers of characters that fit into the width of a figure, in the font of each kind of text."""
_MARKERS = "osD^vPX*<>"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
LookByValue = dict[Any, dict[str, Any]]
"""Value that a series stands for, such as a number of nodes -> its look."""


def axis_title(name: str, title: str = "") -> str:
    """The title of an axis that shows a column: its name, with the unit in which it is drawn where the name has none.

    Args:
        title: what the column holds, in words; by default its own name.
    """
    column = column_of(name)
    has_unit_in_name = not title and column.unit.axis.factor == 1
    return column.heading if has_unit_in_name else f"{title or column.heading} ({column.unit.axis_symbol})"


def drawn(name: str, values: Any) -> Any:
    """Numbers of a column, such as a pandas Series, in the unit in which figures draw them."""
    return column_of(name).unit.drawn(values)


class Panel(Axes):
    """A part of a figure, with axes of its own."""

    def describe(self, panel_name: str, x_title: str, y_title: str) -> None:
        """Writes the name of the panel above it, on at most four lines, and what its axes show with their units."""
        max_chars = _PANEL_NAME_CHARS // self._num_columns
        wrapper = textwrap.TextWrapper(max_chars, max_lines=2)
        title = "\n".join(chain.from_iterable(map(wrapper.wrap, panel_name.split(" | ", 1))))
        self.set_title(title, fontsize=9.5, fontweight="bold", loc="left")
        self.set_xlabel(x_title, fontsize=8.5, color=GREY)
        self.set_ylabel(y_title, fontsize=8.5, color=GREY)

    @property
    def _num_columns(self) -> int:
        return int(self.get_subplotspec().get_gridspec().ncols)  # type: ignore[union-attr]

    def set_categories(self, values: Sequence[object]) -> None:
        """Puts the values at x = 0, 1, 2, ..., with room for at least five, and labels as many as fit."""
        x_margin = max(0.6, (5 - len(values)) / 2)
        labels = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        label_step = -(-len(labels) * (max(map(len, labels)) + 1) // (_TICK_LABEL_CHARS // self._num_columns))
        self.set_xticks(range(0, len(labels), label_step), labels[::label_step])
        self.set_xlim(-x_margin, len(values) - 1 + x_margin)

    def log_scale(self, xy: str, min_value: float, max_value: float, label_format: str = "{x:,.10g}") -> None:
        """Makes the axis `xy`, which is x or y, logarithmic; it has labels also between powers of ten
        where these are few.
        """
        self.set(**{f"{xy}scale": "log"})
        axis = self.xaxis if xy == "x" else self.yaxis
        locator: Locator = LogLocator(subs=(1, 2, 5) if max_value < 2000 * min_value else (1,))
        locator = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]) if max_value < 4 * min_value else locator
        axis.set_major_locator(locator)
        axis.set_major_formatter(label_format)
        axis.set_minor_formatter(NullFormatter())

    def draw_line_in_band(self, x: Any, low: Any, middle: Any, high: Any, **look: Any) -> None:
        """Draws a line through the points (x, middle), and around it a pale band from `low` to `high`."""
        self.plot(x, middle, **look)
        self.fill_between(x, low, high, alpha=0.2, linewidth=0, color=look["color"])

    def remark(self, text: str) -> None:
        """Writes a text near the top of a panel that lacks what it would show."""
        self.text(0.5, 0.9, text, transform=self.transAxes, ha="center", fontsize=9)


def panel_grid(
    panel_keys: Iterable[Any], *, title: str, notes: str, legend: Iterable[Any] = (), legend_title: str | None = None,
    max_columns: int = 2, height: float = 2.3, **subplot_options: Any,
) -> tuple[Figure, dict[Any, Panel]]:  # fmt: skip
    """A figure with a title above, a legend, a panel for each key, row by row, and notes below.

    The height of the figure grows with its texts, so that they cover no panel.

    Args:
        notes: lines of text, which are wrapped.
        legend: the entries of the legend: artists with a label, or looks.
        legend_title: title of the legend.
        max_columns: largest number of panels in a row.
        height: height of a panel in inches.
        subplot_options: further options of `Figure.subplots`, such as sharey.

    Raises:
        ConfigError: there are more than MAX_PANELS panels.
    """
    panel_keys = [*panel_keys]
    if len(panel_keys) > MAX_PANELS:
        todo = "select fewer rows with COLUMN=VALUE, such as model=NAME"
        problem_text = f"{counted(len(panel_keys), 'panel')} to draw; a figure holds at most {MAX_PANELS}"
        raise ConfigError(f"{problem_text}: {todo}")
    ncols = min(max_columns, len(panel_keys))
    nrows = -(-len(panel_keys) // ncols)
    title_lines, note_lines = wrapped_lines(title, _TITLE_CHARS), wrapped_lines(notes, _NOTE_CHARS)
    title_inches = _TITLE_LINE_INCHES * len(title_lines) + _MARGIN_INCHES
    notes_inches = _NOTE_LINE_INCHES * len(note_lines) + _MARGIN_INCHES
    part_inches = [title_inches, nrows * height + 0.3, notes_inches]
    figure = Figure(figsize=(WIDTH_INCHES, sum(part_inches)), layout="constrained", facecolor="white")
    parts = figure.subfigures(3, 1, squeeze=False, height_ratios=part_inches)
    title_part, panels_part, notes_part = parts[:, 0]
    left_fraction, title_look = 0.08 / WIDTH_INCHES, {"fontsize": 12, "fontweight": "bold", "va": "top"}
    title_part.text(left_fraction, 1 - _MARGIN_INCHES / title_inches, "\n".join(title_lines), **title_look)
    note_look: dict[str, Any] = {"fontsize": 7, "color": GREY, "linespacing": 1.35, "va": "bottom"}
    notes_part.text(left_fraction, _MARGIN_INCHES / notes_inches, "\n".join(note_lines), **note_look)
    subplot_options |= {"squeeze": False, "subplot_kw": {"axes_class": Panel}}
    panels = [*panels_part.subplots(nrows, ncols, **subplot_options).flat]
    for unused_axes in panels[len(panel_keys) :]:
        unused_axes.remove()
    for axes in panels[: len(panel_keys)]:
        axes.tick_params(labelsize=8, color=GREY)
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.grid(color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if legend := [*legend]:
        _draw_legend(panels_part, legend, legend_title)
    return figure, dict(zip(panel_keys, panels, strict=False))


def _draw_legend(panels_part: SubFigure, entries: Sequence[Any], title: str | None) -> None:
    """Draws a legend above the panels, in as many columns as fit."""
    handles = [Line2D([], [], **entry) if isinstance(entry, dict) else entry for entry in entries]
    max_label_chars = max(len(str(handle.get_label())) for handle in handles)
    ncols = max(1, min(len(handles), _LEGEND_CHARS // (max_label_chars + 6)))
    text_look: dict[str, Any] = {"frameon": False, "fontsize": 8, "title_fontsize": 8, "alignment": "left"}
    panels_part.legend(handles=handles, title=title, loc="outside upper left", ncols=ncols, **text_look)


def series_looks(
    values: Sequence[Any], *, is_ordered: bool, label_of: Callable[[Any], str] = str, **options: Any
) -> LookByValue:
    """The looks of series, which differ without colour, too, and their labels in the legend.

    Args:
        is_ordered: whether the values have an order, which the colours then follow from dark to light.
        label_of: returns the label of a value.
        options: further options of all series, such as linestyle="" for markers alone.
    """
    ordered_colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(values))).tolist()
    cycles = map(cycle, (ordered_colours if is_ordered else COLOURS, _MARKERS, _DASHES))
    return {
        value: {"color": colour, "marker": marker, "linestyle": dash, "label": label_of(value), **options}
        for value, colour, marker, dash in zip(values, *cycles, strict=False)
    }
