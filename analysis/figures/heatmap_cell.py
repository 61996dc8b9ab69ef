"""One square of the heatmap: its words, and the fill where there is no MFU to give it a colour."""

import textwrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patches import Patch, Rectangle
from seaborn.utils import relative_luminance

from ultrabench.analysis.captions import count, layout_words, memory, percent
from ultrabench.analysis.cells import Cell

Colour = tuple[float, float, float, float]

_DARK, _LIGHT = "#1b1b1b", "#ffffff"
_NO_RESULT, _HATCH, _NO_RESULT_TEXT, _NO_MFU = "#f3f3f3", "#e2e2e2", "#3f3f3f", "#dfe6ee"
_HATCH_GAP = 0.11
"""Inches between two diagonals along an edge."""
_PITCH, _REASON_PITCH = 0.185, 0.135
"""Inches from line to line, of a result and of a reason."""
_LONGEST_LINE = 22
"""Characters of the small font that fit into the narrowest square."""


class Square(NamedTuple):
    """Where a cell is drawn: column and row in the axes, and its size in inches."""

    column: int
    row: int
    width: float
    height: float


def paint(axes: Axes, at: Square, cell: Cell, colour: Colour | None, compared_with: str | None) -> None:
    """Writes `cell` on its square of `axes`, whose unit is a square; a `colour` of None, which means no MFU, has the square filled here."""
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
    # A text for each line: a viewer that lacks the font still centres each of them.
    for y, text, size, weight in texts:
        middle = axes.text(at.column + 0.5, at.row + y, text, color=ink, fontsize=size, fontweight=weight)
        middle.set(ha="center", va="center")


def _lines(at: Square, cell: Cell, compared_with: str | None) -> list[tuple[float, str, float, str]]:
    """Height in the square, text, font size and weight of each line of a result."""
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
    """The headline of a cell: its MFU, else its rate where no peak is known."""
    if cell.mfu is not None:
        return percent(cell.mfu)
    if cell.tokens_per_s_per_gpu is not None:
        return count(cell.tokens_per_s_per_gpu, "tok/s")
    return "ok"


def _hatch(axes: Axes, at: Square, square: Patch) -> None:
    """Diagonals across the square, as plain lines: not every viewer knows patterns of SVG."""
    starts = [(n * _HATCH_GAP) / at.width for n in range(1, int((at.width + at.height) / _HATCH_GAP) + 1)]
    lean = at.height / at.width
    lines = [[(at.column + x, at.row), (at.column + x - lean, at.row + 1)] for x in starts]
    drawn = axes.add_collection(LineCollection(lines, colors=_HATCH, linewidths=0.7, zorder=1), autolim=False)
    drawn.set_clip_path(square)


def wrap_reason(reason: str, width: float) -> list[str]:
    """A reason in at most six lines of `width` inches, shortened with `...`."""
    printable = "".join(c if c.isprintable() else " " for c in reason)
    return textwrap.wrap(printable, width=int(15.5 * width), max_lines=6, placeholder=" ...")
