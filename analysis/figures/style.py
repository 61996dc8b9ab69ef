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
MOST_PANELS = 60
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
_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
Looks = dict[Any, dict[str, Any]]
"""Value of a series -> its label, colour, marker and line style, as options of `plot`."""


class Panel(Axes):
    """A part of a figure, with axes of its own."""

    def describe(self, name: str, across: str, up: str) -> None:
        """Writes the name of the panel above it, on at most four lines, and what its axes show with their units."""
        room = _NAME_WIDTH // self._num_columns
        lines = [line for part in name.split(" | ", 1) for line in textwrap.wrap(part, room, max_lines=2)]
        self.set_title("\n".join(lines), fontsize=9.5, fontweight="bold", loc="left")
        self.set_xlabel(across, fontsize=8.5, color=GREY)
        self.set_ylabel(up, fontsize=8.5, color=GREY)

    @property
    def _num_columns(self) -> int:
        return int(self.get_subplotspec().get_gridspec().ncols)  # type: ignore[union-attr]

    def categories(self, values: Sequence[object]) -> None:
        """Gives the values across equal distances, with room for at least five, and names those that have room."""
        beside = max(0.6, (5 - len(values)) / 2)
        names = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        step = -(-len(names) * (max(map(len, names)) + 1) // (_TICKS_WIDTH // self._num_columns))
        self.set_xticks(range(0, len(names), step), names[::step])
        self.set_xlim(-beside, len(values) - 1 + beside)

    def log_scale(self, direction: str, smallest: float, largest: float, text: str = "{x:,.10g}") -> None:
        """Makes the axis x or y logarithmic, with names also between powers of ten where there are few of these."""
        self.set(**{f"{direction}scale": "log"})
        scale = self.xaxis if direction == "x" else self.yaxis
        few: Locator = LogLocator(subs=(1, 2, 5) if largest < 2000 * smallest else (1,))
        scale.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]) if largest < 4 * smallest else few)
        scale.set_major_formatter(text)
        scale.set_minor_formatter(NullFormatter())

    def line_in_band(self, across: Any, low: Any, middle: Any, high: Any, **look: Any) -> None:
        """Draws a line, and a pale band from the lowest to the highest values around it."""
        self.plot(across, middle, **look)
        self.fill_between(across, low, high, alpha=0.2, linewidth=0, color=look["color"])

    def remark(self, text: str) -> None:
        """Writes a text near the top of a panel that lacks what it would show."""
        self.text(0.5, 0.9, text, transform=self.transAxes, ha="center", fontsize=9)


def panel_grid(
    names: Iterable[Any], *, title: str, notes: str, keys: Iterable[Any] = (), keys_title: str | None = None,
    columns: int = 2, height: float = 2.3, **options: Any,
) -> tuple[Figure, dict[Any, Panel]]:  # fmt: skip
    """A figure with a title above, a legend, a panel for each name, row by row, and notes below.

    All texts have room of their own.

    Args:
        notes: lines of text, which are wrapped.
        keys: what the legend shows: artists with a label, or the looks of a line with the key `label`.
        keys_title: title of the legend.
        height: inches of a panel.
        options: further options of `Figure.subplots`, such as sharey.

    Raises:
        ConfigError: there are more than MOST_PANELS panels.
    """
    names = [*names]
    if len(names) > MOST_PANELS:
        todo = "select fewer rows with COLUMN=VALUE, such as model=NAME"
        fact = f"{counted(len(names), 'panel')} to draw; a figure holds at most {MOST_PANELS}"
        raise ConfigError(f"{fact}: {todo}")
    columns = min(columns, len(names))
    rows = -(-len(names) // columns)
    heading, note_lines = wrapped(title, _TITLE_WIDTH), wrapped(notes, _NOTE_WIDTH)
    title_height, notes_height = _TITLE_LINE * len(heading) + _MARGIN, _NOTE_LINE * len(note_lines) + _MARGIN
    parts = [title_height, rows * height + 0.3, notes_height]
    whole = Figure(figsize=(WIDTH, sum(parts)), layout="constrained", facecolor="white")
    above, middle, below = whole.subfigures(3, 1, squeeze=False, height_ratios=parts).flat
    beside, large = 0.08 / WIDTH, {"fontsize": 12, "fontweight": "bold"}
    above.text(beside, 1 - _MARGIN / title_height, "\n".join(heading), va="top", **large)
    small: dict[str, Any] = {"fontsize": 7, "color": GREY, "linespacing": 1.35}
    below.text(beside, _MARGIN / notes_height, "\n".join(note_lines), va="bottom", **small)
    kind = {"axes_class": Panel}
    panels = list(middle.subplots(rows, columns, squeeze=False, subplot_kw=kind, **options).flat)
    for unused in panels[len(names) :]:
        unused.remove()
    for axes in panels[: len(names)]:
        axes.tick_params(labelsize=8, color=GREY)
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.grid(color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if keys := [*keys]:
        _draw_legend(middle, keys, keys_title)
    return whole, dict(zip(names, panels, strict=False))


def _draw_legend(middle: SubFigure, keys: Sequence[Any], title: str | None) -> None:
    """Draws a legend above the panels, in as many columns as fit."""
    handles = [Line2D([], [], **key) if isinstance(key, dict) else key for key in keys]
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), _LEGEND_WIDTH // (longest + 6)))
    options: dict[str, Any] = {"frameon": False, "fontsize": 8, "title_fontsize": 8, "alignment": "left"}
    middle.legend(handles=handles, title=title, loc="outside upper left", ncols=columns, **options)


def looks(values: Sequence[Any], *, ordered: bool, name: Callable[[Any], str] = str, **options: Any) -> Looks:
    """The looks of series, which differ without colour, too, and their labels in the legend.

    Args:
        ordered: whether the values have an order, which the colours then follow from dark to light.
        name: the label of a value.
        options: options of all series, such as linestyle="" for markers alone.
    """
    in_order = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(values))).tolist()
    colours = cycle(in_order if ordered else COLOURS)
    return {
        value: {"color": colour, "marker": marker, "linestyle": line, "label": name(value), **options}
        for value, colour, marker, line in zip(values, colours, cycle(_MARKERS), cycle(_LINES), strict=False)
    }
