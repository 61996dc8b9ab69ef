"""Draws a ranking as a heatmap: models by nodes, MFU as colour, and the best layout in each cell."""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from seaborn.utils import relative_luminance

from ultrabench.analysis.cells import Cell, count, layout_words, memory, percent
from ultrabench.analysis.figures.picture import GREY
from ultrabench.errors import ConfigError, counted

Line = tuple[str, float, str]
"""The text of a line, its font size and its font weight."""

_DARK, _LIGHT = "#1b1b1b", "#ffffff"
_NO_RESULT, _HATCH, _NO_RESULT_TEXT, _NO_MFU = "#f3f3f3", "#e2e2e2", "#3f3f3f", "#dfe6ee"
_HATCH_GAP = 0.11
"""Inches between two diagonal lines of a hatch, along the edge of a square."""
_PITCH, _REASON_PITCH = 0.185, 0.135
"""Inches between two lines of text, in a square with a result and in one with a reason."""
_BELOW_HEADLINE = 0.35
"""Additional distance between the first two lines of a square with a result, in pitches."""
_LONGEST_LINE = 22
"""Number of characters of the small font that fit into the narrowest square."""
_TOP, _TITLE_LINE, _NOTE_LINE = 0.2, 0.26, 0.17
"""Heights in inches of the margin above the title, of a line of the title and of a line of the notes."""
_RIGHT, _HEADER, _AXIS = 1.15, 0.42, 0.62
"""Inches around the squares of a panel: for the colour bar, the title of the panel and the node labels."""
_NAME_WIDTH = 22
"""Largest number of characters of a model's name on one line."""
_TITLE: dict[str, Any] = {"fontsize": 14, "fontweight": "bold"}
_SMALL: dict[str, Any] = {"fontsize": 7.5, "color": GREY}
_COLOURS = "viridis"
"""A colour map of matplotlib that stays readable in grey print and for colour-blind readers."""


class Grid:
    """A panel of the figure, with its rows (models) and its columns (numbers of nodes)."""

    def __init__(self, cells: Sequence[Cell], width: float, height: float) -> None:
        sizes = {_model(cell): cell.num_params or 0 for cell in cells}
        self.cells = cells
        self.models = sorted(sizes, key=lambda label: (sizes[label], label))
        """Name and size of each model, the smallest one first."""
        self.nodes = sorted({cell.nodes for cell in cells})
        self.width, self.height = width, height if len(sizes) > 1 else 1.4
        """Width and height of a square in inches; a single row is higher."""
        self.size = self.width * len(self.nodes), self.height * len(self.models)
        """Width and height of all squares in inches."""


def paint(axes: Axes, grid: Grid, cell: Cell, end: float, compared_with: str | None) -> None:
    """Draws the square of `cell` with its texts; a square is one unit wide and high.

    Args:
        end: MFU in percent at the end of the colour scale.
        compared_with: name of what compare_ratio is relative to.
    """
    x, y = grid.nodes.index(cell.nodes), grid.models.index(_model(cell))
    fill: Any = _NO_RESULT if cell.run_id is None else _NO_MFU
    if cell.mfu is not None:
        fill = matplotlib.colormaps[_COLOURS](100 * cell.mfu / end)
    square = Rectangle((x, y), 1, 1, facecolor=fill, linewidth=0)
    axes.add_patch(square)
    if cell.run_id is None:
        _hatch(axes, grid, square)
        told = wrap_reason(cell.reason or "no result", grid.width)
        lines: list[Line] = [(text, 7.2, "normal") for text in told]
        ink, pitch, gap = _NO_RESULT_TEXT, _REASON_PITCH, 0.0
    else:
        lines = _lines(cell, compared_with)
        ink, pitch, gap = _LIGHT if relative_luminance(fill) <= 0.2 else _DARK, _PITCH, _BELOW_HEADLINE
    places = [n + gap * (n > 0) for n in range(len(lines))]
    # Each line is a text of its own, so that a viewer without the font still centres every line.
    for place, (text, size, weight) in zip(places, lines, strict=True):
        at = y + 0.5 + (place - places[-1] / 2) * pitch / grid.height
        axes.text(x + 0.5, at, text, color=ink, fontsize=size, fontweight=weight, ha="center", va="center")


def _lines(cell: Cell, compared_with: str | None) -> list[Line]:
    """The lines of a square with a result."""
    held = memory(cell.peak_mem_reserved_bytes)
    small = [(text, 7.6, "normal") for text in (*layout_words(cell.layout), held) if text is not None]
    if cell.compare_ratio is not None:
        ratio = f"{cell.compare_ratio:.2f}x"
        whole = f"{ratio} of {compared_with}"
        fits = compared_with and len(whole) <= _LONGEST_LINE
        small.append((whole if fits else ratio, 7.6, "bold"))
    return [(_speed(cell), 12.5, "bold"), *small]


def _speed(cell: Cell) -> str:
    """The headline of a cell: its MFU, or its tokens/s/GPU where no peak rate is known."""
    rate = cell.tokens_per_s_per_gpu
    return percent(cell.mfu) or ("ok" if rate is None else count(rate, "tok/s"))


def _hatch(axes: Axes, grid: Grid, square: Rectangle) -> None:
    """Hatches the square with plain diagonal lines, since some viewers cannot draw the patterns of SVG."""
    (left, top), lean = square.get_xy(), grid.height / grid.width
    number = int((grid.width + grid.height) / _HATCH_GAP)
    starts = [left + n * _HATCH_GAP / grid.width for n in range(1, number + 1)]
    lines = [[(x, top), (x - lean, top + 1)] for x in starts]
    drawn = axes.add_collection(LineCollection(lines, colors=_HATCH, linewidths=0.7, zorder=1), autolim=False)
    drawn.set_clip_path(square)


def wrap_reason(reason: str, width: float) -> list[str]:
    """A reason cut into at most six lines of `width` inches; a longer one ends with `...`."""
    printable = "".join(c if c.isprintable() else " " for c in reason)
    return textwrap.wrap(printable, width=int(15.5 * width), max_lines=6, placeholder=" ...")


def figure(cells: Sequence[Cell], *, title: str, notes: str = "", compared_with: str | None = None) -> Figure:
    """The heatmap, with one panel for each hardware, kernel and workload.

    Args:
        title: name of the sweep.
        notes: text under the panels.
        compared_with: name of what compare_ratio is relative to.

    Raises:
        ConfigError: there are no cells.
    """
    if not cells:
        raise ConfigError("the table has no cells; plan a sweep, or draw links with: ultrabench plot comm")
    grids = _grids(cells)
    left = max(1.25, 0.35 + 0.1 * max(min(len(cell.model), _NAME_WIDTH) for cell in cells))
    width = max(7.0, left + max(grid.size[0] for grid in grids) + _RIGHT)
    room = width - left
    whole = f"Best layout per cell: {title}"
    heading = textwrap.wrap(whole, int(room * 7.2), max_lines=3, placeholder=" ...")
    lines = _note_lines(cells, notes, compared_with, room)
    foot = 0.2 + _NOTE_LINE * len(lines)
    top = foot + sum(_HEADER + grid.size[1] + _AXIS for grid in grids)
    height = top + _TITLE_LINE * len(heading) + _TOP
    picture = Figure(figsize=(width, height), facecolor="white")
    picture.text(left / width, 1 - _TOP / height, "\n".join(heading), va="top", linespacing=1.25, **_TITLE)
    end = _scale_end(cells)
    for grid in grids:
        wide, high = grid.size
        down = top - _HEADER - high
        axes = picture.add_axes((left / width, down / height, wide / width, high / height))
        for cell in grid.cells:
            paint(axes, grid, cell, end, compared_with)
        _draw_labels(axes, grid, room)
        if any(cell.mfu is not None for cell in grid.cells):
            bar = picture.add_axes(((left + wide + 0.25) / width, down / height, 0.18 / width, high / height))
            _draw_bar(bar, grid, end)
        top = down - _AXIS
    picture.text(left / width, foot / height, "\n".join(lines), va="top", linespacing=1.35, **_SMALL)
    return picture


def _grids(cells: Sequence[Cell]) -> list[Grid]:
    """The panels of the figure; all cells of a panel have the same hardware, kernel and workload."""
    panels: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        panels[cell.panel].append(cell)
    few = max(len({cell.nodes for cell in held}) for held in panels.values()) <= 2
    height = 1.3 if any(cell.compare_ratio is not None for cell in cells) else 1.15
    return [Grid(held, 2.0 if few else 1.5, height) for held in panels.values()]


def _draw_bar(bar: Axes, grid: Grid, end: float) -> None:
    """Draws the colour bar of a panel."""
    colours = ScalarMappable(Normalize(0, end), _COLOURS)
    scale = bar.figure.colorbar(colours, cax=bar, ticks=MaxNLocator(5, steps=[1, 2, 5, 10]))
    scale.outline.set_visible(False)
    measured = "measured " * any(cell.peak_source == "measured" for cell in grid.cells)
    space = "\n" if grid.size[1] < 2 else " "
    bar.set_ylabel(f"MFU (% of{space}{measured}peak)", fontsize=9, color=GREY)
    bar.tick_params(labelsize=8, length=2, color=GREY)


def _draw_labels(axes: Axes, grid: Grid, room: float) -> None:
    """Draws the lines between squares, the labels of nodes and models, and a title no wider than `room`."""
    columns, rows = len(grid.nodes), len(grid.models)
    axes.set(frame_on=False, xlim=(0, columns), ylim=(rows, 0), yticks=[])
    axes.hlines(range(rows + 1), 0, columns, colors="white", linewidth=2.5)
    axes.vlines(range(columns + 1), 0, rows, colors="white", linewidth=2.5)
    axes.set_xticks([n + 0.5 for n in range(columns)], [f"{n:,}" for n in grid.nodes])
    axes.set_xlabel("nodes", color=GREY)
    axes.tick_params(length=0, labelsize=10)
    for row, (name, params) in enumerate(grid.models):
        names = textwrap.wrap(name, _NAME_WIDTH, max_lines=2)
        x, y = -0.1 / grid.width, row + 0.5
        nudge = 0.09 * len(names) / grid.height
        beside: dict[str, Any] = {"ha": "right", "va": "center"}
        axes.text(x, y - (nudge if params else 0), "\n".join(names), fontsize=11, fontweight="bold", **beside)
        axes.text(x, y + nudge, params, **beside, **_SMALL)
    shown = _panel_title(grid.cells[0])
    fontsize = min(9.5, 120 * room / len(shown))
    axes.text(0, -0.16 / grid.height, shown, fontsize=fontsize, color=GREY, va="center")


def _model(cell: Cell) -> tuple[str, str]:
    """The name of the cell's model, and its number of parameters as a text."""
    return cell.model, "" if cell.num_params is None else f"{count(cell.num_params)} params"


def _panel_title(cell: Cell) -> str:
    """The title of the panel of a cell: hardware, kernel and workload."""
    precision = f" ({cell.precision})" if cell.precision else ""
    parts = [cell.hardware or "unknown hardware", f"kernel {cell.kernel or '?'}{precision}"]
    if cell.seq_len is not None:
        parts.append(f"seq_len {cell.seq_len:,}")
    if cell.gbs is not None:
        tokens = "" if cell.seq_len is None else f" ({count(cell.gbs * cell.seq_len)} tokens)"
        parts.append(f"gbs {cell.gbs:,}{tokens}")
    return " | ".join(parts)


def _scale_end(cells: Sequence[Cell]) -> float:
    """Upper end of the colour scale in percent: the smallest round number that no cell exceeds."""
    most = max((100 * cell.mfu for cell in cells if cell.mfu is not None), default=0.0)
    steps = [0.1, 0.2, 0.5, 1, 2, 5, *range(10, 201, 10)]
    return next((float(step) for step in steps if step >= most), most)


def _note_lines(cells: Sequence[Cell], notes: str, compared_with: str | None, room: float) -> list[str]:
    """The lines under the figure, wrapped to `room` inches; names are not cut at their hyphens."""
    sentences = [notes]
    if formulas := {cell.flops_formula for cell in cells if cell.mfu is not None} - {None}:
        sentences.append(f"FLOPs of MFU by the formula {', '.join(map(str, formulas))}.")
    if any(cell.compare_ratio is not None for cell in cells):
        sentences.append(f"1.00x: as many tokens/s/GPU as the best of {compared_with or 'the other'}.")
    if close := sum(bool(cell.as_good_as_best) for cell in cells):
        where = f"In {close} of {counted(len(cells), 'cell')}"
        sentences.append(f"{where} other layouts are as good within the 95 % interval.")
    columns = int((room - 0.3) * 17)
    return [line for text in sentences for line in textwrap.wrap(text, columns, break_on_hyphens=False)]
