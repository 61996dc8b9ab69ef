"""Draws a ranking as a heatmap: models by nodes, MFU as colour, and the best layout in each cell."""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from seaborn.utils import relative_luminance

from ultrabench.analysis.cells import Cell, Panel, count, layout_words, memory, percent
from ultrabench.analysis.figures.picture import GREY
from ultrabench.errors import ConfigError, counted

Colour = tuple[float, float, float, float]

_DARK, _LIGHT = "#1b1b1b", "#ffffff"
_NO_RESULT, _HATCH, _NO_RESULT_TEXT, _NO_MFU = "#f3f3f3", "#e2e2e2", "#3f3f3f", "#dfe6ee"
_HATCH_GAP = 0.11
"""Inches between two diagonal lines of a hatch, along the edge of a square."""
_PITCH, _REASON_PITCH = 0.185, 0.135
"""Inches between two lines of text, in a square with a result and in one with a reason."""
_LONGEST_LINE = 22
"""Number of characters of the small font that fit into the narrowest square."""


class Square(NamedTuple):
    """The place of a cell in the axes, by column and row, and its size in inches."""

    column: int
    row: int
    width: float
    height: float


def paint(axes: Axes, at: Square, cell: Cell, colour: Colour | None, compared_with: str | None) -> None:
    """Writes the texts of `cell` on its square of `axes`; a square is one unit wide and high.

    Args:
        colour: the colour of the square; None means that the cell has no MFU, so the square is filled here.
        compared_with: name of what compare_ratio is relative to.
    """
    if colour is None:
        fill = _NO_RESULT if cell.run_id is None else _NO_MFU
        square = axes.add_patch(Rectangle((at.column, at.row), 1, 1, facecolor=fill, linewidth=0))
    if cell.run_id is None:
        _hatch(axes, at, square)
        lines, pitch = wrap_reason(cell.reason or "no result", at.width), _REASON_PITCH / at.height
        first = 0.5 - pitch * (len(lines) - 1) / 2
        texts = [(first + pitch * n, line, 7.2, "normal") for n, line in enumerate(lines)]
        ink = _NO_RESULT_TEXT
    else:
        texts = _lines(at, cell, compared_with)
        ink = _LIGHT if colour is not None and relative_luminance(colour) <= 0.2 else _DARK
    # Each line is a text of its own, so that a viewer without the font still centres every line.
    for y, text, size, weight in texts:
        middle = axes.text(at.column + 0.5, at.row + y, text, color=ink, fontsize=size, fontweight=weight)
        middle.set(ha="center", va="center")


def _lines(at: Square, cell: Cell, compared_with: str | None) -> list[tuple[float, str, float, str]]:
    """The lines of a square with a result: the height in the square, text, font size and weight of each."""
    small = [
        (text, "normal")
        for text in (*layout_words(cell.layout), memory(cell.peak_mem_reserved_bytes))
        if text is not None
    ]
    if cell.compare_ratio is not None:
        ratio = f"{cell.compare_ratio:.2f}x"
        whole = f"{ratio} of {compared_with}"
        small.append((whole if compared_with and len(whole) <= _LONGEST_LINE else ratio, "bold"))
    pitch = _PITCH / at.height
    first = 0.5 - pitch * (len(small) + 0.35) / 2
    lines = [
        (first + pitch * (n + 0.35), text, 7.6, weight) for n, (text, weight) in enumerate(small, start=1)
    ]
    return [(first, _speed(cell), 12.5, "bold"), *lines]


def _speed(cell: Cell) -> str:
    """The headline of a cell: its MFU, or its tokens/s/GPU where no peak rate is known."""
    if cell.mfu is not None:
        return percent(cell.mfu)
    if cell.tokens_per_s_per_gpu is not None:
        return count(cell.tokens_per_s_per_gpu, "tok/s")
    return "ok"


def _hatch(axes: Axes, at: Square, square: Patch) -> None:
    """Hatches the square with plain diagonal lines, since some viewers cannot draw the patterns of SVG."""
    starts = [(n * _HATCH_GAP) / at.width for n in range(1, int((at.width + at.height) / _HATCH_GAP) + 1)]
    lean = at.height / at.width
    lines = [[(at.column + x, at.row), (at.column + x - lean, at.row + 1)] for x in starts]
    drawn = axes.add_collection(LineCollection(lines, colors=_HATCH, linewidths=0.7, zorder=1), autolim=False)
    drawn.set_clip_path(square)


def wrap_reason(reason: str, width: float) -> list[str]:
    """A reason cut into at most six lines of `width` inches; a longer one ends with `...`."""
    printable = "".join(c if c.isprintable() else " " for c in reason)
    return textwrap.wrap(printable, width=int(15.5 * width), max_lines=6, placeholder=" ...")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A panel of the figure, with its rows (models) and its columns (numbers of nodes)."""

    panel: Panel
    cells: Sequence[Cell]
    models: Sequence[tuple[str, str]]
    """Name and size of each model, the smallest one first."""
    nodes: Sequence[int]
    square: tuple[float, float]
    """Width and height of a square in inches."""

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of all squares in inches."""
        return self.square[0] * len(self.nodes), self.square[1] * len(self.models)

    def square_of(self, cell: Cell) -> Square:
        """The square on which `cell` is drawn."""
        return Square(self.nodes.index(cell.nodes), self.models.index(_model(cell)), *self.square)


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
        raise ConfigError(
            "nothing to draw: the table has no cells; has anything been planned yet? Links are drawn by "
            "ultrabench plot comm"
        )
    grids = _grids(cells)
    left = max(1.25, 0.35 + 0.1 * max(min(len(cell.model), _NAME_WIDTH) for cell in cells))
    width = max(7.0, left + max(grid.size[0] for grid in grids) + _RIGHT)
    heading = textwrap.wrap(
        f"Best layout per cell: {title}", int((width - left) * 7.2), max_lines=3, placeholder=" ..."
    )
    lines = _note_lines(cells, notes, compared_with, width - left)
    foot = 0.2 + _NOTE_LINE * len(lines)
    top = foot + sum(_HEADER + grid.size[1] + _AXIS for grid in grids)
    height = top + _TITLE_LINE * len(heading) + _TOP
    picture = Figure(figsize=(width, height), facecolor="white")
    picture.text(left / width, 1 - _TOP / height, "\n".join(heading), va="top", linespacing=1.25, **_TITLE)
    for grid in grids:
        axes = _draw_squares(picture, grid, left, top - _HEADER, _scale_end(cells), compared_with)
        _draw_labels(axes, grid, width - left)
        top -= _HEADER + grid.size[1] + _AXIS
    picture.text(left / width, foot / height, "\n".join(lines), va="top", linespacing=1.35, **_SMALL)
    return picture


def _grids(cells: Sequence[Cell]) -> list[Grid]:
    """The panels of the figure; all cells of a panel have the same hardware, kernel and workload."""
    panels: dict[Panel, list[Cell]] = defaultdict(list)
    for cell in cells:
        panels[cell.panel].append(cell)
    few = max(len({cell.nodes for cell in held}) for held in panels.values()) <= 2
    compared = any(cell.compare_ratio is not None for cell in cells)
    grids = []
    for panel, held in panels.items():
        sizes = {_model(cell): cell.num_params or 0 for cell in held}
        height = 1.4 if len(sizes) == 1 else 1.3 if compared else 1.15
        grid = Grid(
            panel=panel,
            cells=held,
            models=sorted(sizes, key=lambda label: (sizes[label], label)),
            nodes=sorted({cell.nodes for cell in held}),
            square=(2.0 if few else 1.5, height),
        )
        grids.append(grid)
    return grids


def _draw_squares(
    picture: Figure, grid: Grid, left: float, top: float, end: float, compared_with: str | None
) -> Axes:
    """Draws the squares of a panel and its colour bar, and returns their axes.

    Args:
        left: inches from the left edge of the figure to the squares.
        top: inches from the lower edge of the figure to the upper edge of the squares.
        end: MFU in percent at the end of the colour scale.
    """
    (wide, high), (width, height) = grid.size, picture.get_size_inches()
    down = (top - high) / height
    axes = picture.add_axes((left / width, down, wide / width, high / height))
    mfu = pd.DataFrame(index=range(len(grid.models)), columns=range(len(grid.nodes)), dtype=float)
    for cell in grid.cells:
        at = grid.square_of(cell)
        mfu.loc[at.row, at.column] = None if cell.mfu is None else 100 * cell.mfu
    known = bool(mfu.notna().any(axis=None))
    bar = (
        picture.add_axes(((left + wide + 0.25) / width, down, 0.18 / width, high / height)) if known else None
    )
    ticks = [f"{n:,}" for n in grid.nodes]
    scale: dict[str, Any] = {
        "vmin": 0,
        "vmax": end,
        "cmap": _COLOURS,
        "cbar_kws": {"ticks": MaxNLocator(5, steps=[1, 2, 5, 10])},
    }
    sns.heatmap(mfu, xticklabels=ticks, yticklabels=False, ax=axes, cbar=known, cbar_ax=bar, **scale)
    axes.hlines(range(len(grid.models) + 1), 0, len(grid.nodes), colors="white", linewidth=2.5)
    axes.vlines(range(len(grid.nodes) + 1), 0, len(grid.models), colors="white", linewidth=2.5)
    axes.set_xlabel("nodes", color=GREY)
    axes.tick_params(length=0, labelsize=10)
    if bar is not None:
        measured = "measured " * any(cell.peak_source == "measured" for cell in grid.cells)
        bar.set_ylabel(f"MFU (% of{chr(10) if high < 2 else ' '}{measured}peak)", fontsize=9, color=GREY)
        bar.tick_params(labelsize=8, length=2, color=GREY)
    for cell in grid.cells:
        share = None if cell.mfu is None else 100 * cell.mfu / end
        colour = None if share is None else matplotlib.colormaps[_COLOURS](share)
        paint(axes, grid.square_of(cell), cell, colour, compared_with)
    return axes


def _draw_labels(axes: Axes, grid: Grid, room: float) -> None:
    """Writes the names of the models beside a panel, and above it a title of at most `room` inches."""
    for row, (name, size) in enumerate(grid.models):
        names = textwrap.wrap(name, _NAME_WIDTH, max_lines=2)
        x, y = -0.1 / grid.square[0], row + 0.5
        nudge = 0.09 * len(names) / grid.square[1]
        beside: dict[str, Any] = {"ha": "right", "va": "center"}
        axes.text(x, y - (nudge if size else 0), "\n".join(names), fontsize=11, fontweight="bold", **beside)
        axes.text(x, y + nudge, size, **beside, **_SMALL)
    shown = _panel_title(grid.panel)
    font = min(9.5, 120 * room / len(shown))
    axes.text(0, -0.16 / grid.square[1], shown, fontsize=font, color=GREY, va="center")


def _model(cell: Cell) -> tuple[str, str]:
    """The name of the cell's model, and its number of parameters as a text."""
    return cell.model, "" if cell.num_params is None else f"{count(cell.num_params)} params"


def _panel_title(panel: Panel) -> str:
    """The title of a panel: hardware, kernel and workload."""
    kernel = f"kernel {panel.kernel or '?'}" + (f" ({panel.precision})" if panel.precision else "")
    parts = [panel.hardware or "unknown hardware", kernel]
    if panel.seq_len is not None:
        parts.append(f"seq_len {panel.seq_len:,}")
    if panel.gbs is not None:
        tokens = "" if panel.seq_len is None else f" ({count(panel.gbs * panel.seq_len)} tokens)"
        parts.append(f"gbs {panel.gbs:,}{tokens}")
    return " | ".join(parts)


def _scale_end(cells: Sequence[Cell]) -> float:
    """Upper end of the colour scale in percent: the smallest round number that no cell exceeds."""
    most = max((100 * cell.mfu for cell in cells if cell.mfu is not None), default=0.0)
    steps = [0.1, 0.2, 0.5, 1, 2, 5, *range(10, 201, 10)]
    return next((float(step) for step in steps if step >= most), most)


def _note_lines(cells: Sequence[Cell], notes: str, compared_with: str | None, room: float) -> list[str]:
    """The lines under the figure, wrapped to `room` inches; names are not cut at their hyphens."""
    sentences = [notes]
    if any(cell.compare_ratio is not None for cell in cells):
        sentences.append(
            f"1.00x: as many tokens a second a GPU as the best of {compared_with or 'the other'}."
        )
    close = sum(bool(cell.as_good_as_best) for cell in cells)
    if close:
        sentences.append(
            f"In {close} of {counted(len(cells), 'cell')} other layouts are as good within the 95 % interval."
        )
    columns = int((room - 0.3) * 17)
    return [line for text in sentences for line in textwrap.wrap(text, columns, break_on_hyphens=False)]
