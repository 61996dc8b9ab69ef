"""One square of the heatmap: colour, words and the contrast between them."""

import textwrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, Normalize, to_rgb
from matplotlib.patches import Rectangle

from ultrabench.analysis.captions import layout_lines, memory, speed
from ultrabench.analysis.cells import Cell

Colour = str | tuple[float, float, float, float]

DARK, LIGHT = "#1b1b1b", "#ffffff"
_NO_RESULT, _HATCH, _NO_RESULT_TEXT = "#f3f3f3", "#e2e2e2", "#3f3f3f"
_HATCH_GAP = 0.11
"""Inches between two diagonals along an edge."""
_NO_MFU = "#dfe6ee"
_PITCH = 0.185
"""Inches from line to line."""
_LONGEST_LINE = 22
"""Characters of the small font that fit into the narrowest square."""


class Square(NamedTuple):
    """Where a cell is drawn: column and row in the axes, and its size in inches."""

    column: int
    row: int
    width: float
    height: float


def paint(
    axes: Axes, at: Square, cell: Cell, cmap: Colormap, norm: Normalize, compared_with: str | None
) -> None:
    """Draws `cell` on its square of `axes`, whose unit is a square."""
    if cell.run_id is None:
        _paint_reason(axes, at, cell)
        return
    colour = _NO_MFU if cell.mfu is None else cmap(norm(100 * cell.mfu))
    _fill(axes, at, facecolor=colour)
    ink = DARK if _luminance(colour) > 0.2 else LIGHT
    for y, text, size, weight in _lines(at, cell, compared_with):
        axes.text(at.column + 0.5, at.row + y, text, color=ink, fontsize=size, fontweight=weight,
                  ha="center", va="center")  # fmt: skip


def _lines(at: Square, cell: Cell, compared_with: str | None) -> list[tuple[float, str, float, str]]:
    """Height in the square, text, font size and weight of each line of a result."""
    small = [text for text in (*layout_lines(cell), memory(cell.peak_mem_reserved_bytes)) if text is not None]
    weights = ["normal"] * len(small)
    if cell.compare_ratio is not None:
        ratio = f"{cell.compare_ratio:.2f}x"
        whole = f"{ratio} of {compared_with}"
        small.append(whole if compared_with and len(whole) <= _LONGEST_LINE else ratio)
        weights.append("bold")
    pitch = _PITCH / at.height
    first = 0.5 - pitch * (len(small) + 0.35) / 2
    lines = [(first, speed(cell), 12.5, "bold")]
    for number, (text, weight) in enumerate(zip(small, weights, strict=True), start=1):
        lines.append((first + pitch * (number + 0.35), text, 7.6, weight))
    return lines


def _paint_reason(axes: Axes, at: Square, cell: Cell) -> None:
    """Hatched light grey with the wrapped reason."""
    _fill(axes, at, facecolor=_NO_RESULT)
    _hatch(axes, at)
    lines = wrap_reason(cell.reason or "no result", at.width)
    pitch = 0.135 / at.height
    first = at.row + 0.5 - pitch * (len(lines) - 1) / 2
    # A text a line: a viewer that lacks the font still centres each of them.
    for number, line in enumerate(lines):
        axes.text(at.column + 0.5, first + pitch * number, line, color=_NO_RESULT_TEXT,
                  fontsize=7.2, ha="center", va="center")  # fmt: skip


def _hatch(axes: Axes, at: Square) -> None:
    """Diagonals across the square, as plain lines: not every viewer knows patterns of SVG."""
    lines = []
    for step in range(1, int((at.width + at.height) / _HATCH_GAP) + 1):
        across = step * _HATCH_GAP
        start = min(across, at.width), max(0.0, across - at.width)
        end = max(0.0, across - at.height), min(across, at.height)
        lines.append([(at.column + x / at.width, at.row + y / at.height) for x, y in (start, end)])
    axes.add_collection(LineCollection(lines, colors=_HATCH, linewidths=0.7, zorder=1), autolim=False)


def wrap_reason(reason: str, width: float) -> list[str]:
    """A reason in at most six lines of `width` inches, shortened with `...`."""
    printable = "".join(c if c.isprintable() else " " for c in reason)
    return textwrap.wrap(printable, width=int(15.5 * width), max_lines=6, placeholder=" ...")


def _fill(axes: Axes, at: Square, *, facecolor: Colour) -> None:
    corner = (at.column, at.row)
    axes.add_patch(Rectangle(corner, 1, 1, linewidth=0, facecolor=facecolor, zorder=0.5))
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="white", linewidth=2.5, zorder=2))


def _luminance(colour: Colour) -> float:
    """Relative luminance of a colour, 0 to 1 (WCAG 2.1, definition of relative luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
