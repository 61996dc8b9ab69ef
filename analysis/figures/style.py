"""What figures have in common: the title, the notes, the grid of panels, and the looks of series and statuses."""

import textwrap
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import matplotlib
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
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


def panel_grid(
    number: int, *, title: str, notes: str, columns: int = 2, height: float = 2.3, **options: Any
) -> tuple[Figure, SubFigure, list[Axes]]:
    """A figure with a title above and notes below, its middle part, and that part's panels row by row.

    All texts have room of their own; the middle part takes a legend by `legend`.

    Args:
        number: panels that are wanted.
        notes: lines of text, which are wrapped.
        height: inches of a panel.
        options: further options of `Figure.subplots`, such as sharey.

    Raises:
        ConfigError: there are more than MOST_PANELS panels.
    """
    if number > MOST_PANELS:
        rule = (
            f"a figure holds at most {MOST_PANELS}: select fewer rows with COLUMN=VALUE, such as model=NAME"
        )
        raise ConfigError(f"{counted(number, 'panel')} to draw; {rule}")
    columns = min(columns, number)
    rows = -(-number // columns)
    heading = wrapped(title, _TITLE_WIDTH)
    note_lines = wrapped(notes, _NOTE_WIDTH)
    title_height, notes_height = _TITLE_LINE * len(heading) + _MARGIN, _NOTE_LINE * len(note_lines) + _MARGIN
    parts = [title_height, rows * height + 0.3, notes_height]
    whole = Figure(figsize=(WIDTH, sum(parts)), layout="constrained", facecolor="white")
    above, middle, below = whole.subfigures(3, 1, squeeze=False, height_ratios=parts).flat
    beside = 0.08 / WIDTH
    above.text(
        beside, 1 - _MARGIN / title_height, "\n".join(heading), fontsize=12, fontweight="bold", va="top"
    )
    small: dict[str, Any] = {"fontsize": 7, "color": GREY, "linespacing": 1.35}
    below.text(beside, _MARGIN / notes_height, "\n".join(note_lines), va="bottom", **small)
    panels = list(middle.subplots(rows, columns, squeeze=False, **options).flat)
    for unused in panels[number:]:
        unused.remove()
    for axes in panels[:number]:
        axes.tick_params(labelsize=8, color=GREY)
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.grid(color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return whole, middle, panels[:number]


def label(axes: Any, name: str, across: str, up: str) -> None:
    """Writes the name of a panel above it, on at most four lines, and what its axes show with their units."""
    room = _NAME_WIDTH // axes.get_subplotspec().get_gridspec().ncols
    lines = [line for part in name.split(" | ", 1) for line in textwrap.wrap(part, room, max_lines=2)]
    axes.set_title("\n".join(lines), fontsize=9.5, fontweight="bold", loc="left")
    axes.set_xlabel(across, fontsize=8.5, color=GREY)
    axes.set_ylabel(up, fontsize=8.5, color=GREY)


def categories(axes: Axes, values: Sequence[object]) -> None:
    """Gives the values of an axis equal distances, with room for at least five, and names those that have room."""
    beside = max(0.6, (5 - len(values)) / 2)
    names = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
    room = _TICKS_WIDTH // axes.get_subplotspec().get_gridspec().ncols  # type: ignore[union-attr]
    step = -(-len(names) * (max(map(len, names)) + 1) // room)
    axes.set_xticks(range(0, len(names), step), names[::step])
    axes.set_xlim(-beside, len(values) - 1 + beside)


def log_ticks(scale: Axis, smallest: float, largest: float) -> None:
    """Names the ticks of a logarithmic axis, also between powers of ten where there are few of these."""
    few: Locator = LogLocator(subs=(1, 2, 5) if largest < 2000 * smallest else (1,))
    scale.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]) if largest < 4 * smallest else few)
    scale.set_major_formatter("{x:,.10g}")
    scale.set_minor_formatter(NullFormatter())


def remark(axes: Axes, text: str) -> None:
    """Writes a text near the top of a panel that lacks what it would show."""
    axes.text(0.5, 0.9, text, transform=axes.transAxes, ha="center", fontsize=9)


def legend(middle: SubFigure, handles: Sequence[Any], title: str | None = None) -> None:
    """Draws a legend above the panels, in as many columns as fit."""
    names = [str(handle.get_label()) for handle in handles]
    columns = max(1, min(len(names), _LEGEND_WIDTH // (max(map(len, names), default=0) + 6)))
    options: dict[str, Any] = {"frameon": False, "fontsize": 8, "title_fontsize": 8, "alignment": "left"}
    middle.legend(handles=handles, title=title, loc="outside upper left", ncols=columns, **options)


def looks(values: Sequence[object], *, ordered: bool, **options: Any) -> dict[Any, dict[str, Any]]:
    """Value -> colour, marker and line style, so that series differ without colour, too.

    Args:
        ordered: whether the values have an order, which the colours then follow from dark to light.
        options: options of all series, such as linestyle="" for markers alone.
    """
    if ordered:
        steps = max(1, len(values) - 1)
        colours: Sequence[Any] = [
            matplotlib.colormaps["viridis"](0.9 * n / steps) for n in range(len(values))
        ]
    else:
        colours = COLOURS
    series = zip(values, cycle(colours), cycle(_MARKERS), cycle(_LINES), strict=False)
    return {
        value: {"color": colour, "marker": marker, "linestyle": line, **options}
        for value, colour, marker, line in series
    }


def legend_entry(name: str, **look: Any) -> Line2D:
    """An entry of a legend."""
    return Line2D([], [], label=name, **look)
