"""The picture of a ranking: models by nodes, MFU as colour, the best layout in each cell."""

import textwrap
from collections.abc import Sequence

import matplotlib
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure

from ultrabench.analysis.cells import Cell
from ultrabench.analysis.figures.heatmap_cell import paint
from ultrabench.analysis.figures.heatmap_panel import (
    AXIS,
    HEADER,
    NAME_WIDTH,
    RIGHT,
    draw_labels,
    draw_scale,
    grid_axes,
    grids_of,
)
from ultrabench.analysis.figures.picture import GREY
from ultrabench.errors import ConfigError, counted

_TOP, _TITLE_LINE, _NOTE_LINE = 0.2, 0.26, 0.17
"""Inches of the margin above the title, a line of the title, a line of the notes."""


def figure(cells: Sequence[Cell], *, title: str, notes: str = "", compared_with: str | None = None) -> Figure:
    """The heatmap as a matplotlib figure: one panel for each hardware, kernel and workload.

    Raises:
        ConfigError: there are no cells.
    """
    if not cells:
        raise ConfigError(
            "nothing to draw: the table has no cells; has anything been planned yet? Links are drawn by "
            "ultrabench plot comm"
        )
    grids = grids_of(cells)
    left = _left_margin(cells)
    width = max(7.0, left + max(grid.width for grid in grids) + RIGHT)
    heading = textwrap.wrap(
        f"Best layout per cell: {title}", int((width - left) * 7.2), max_lines=3, placeholder=" ..."
    )
    lines = _note_lines(cells, notes, compared_with, width - left)
    foot = 0.2 + _NOTE_LINE * len(lines)
    body = sum(HEADER + grid.height + AXIS for grid in grids)
    height = _TOP + _TITLE_LINE * len(heading) + body + foot
    picture = Figure(figsize=(width, height), facecolor="white")
    picture.text(left / width, 1 - _TOP / height, "\n".join(heading), fontsize=14,
                 fontweight="bold", va="top", linespacing=1.25)  # fmt: skip
    cmap, norm = _colours(), Normalize(0, _scale_end(cells))
    top = body + foot
    for grid in grids:
        axes = grid_axes(picture, grid, left, top - HEADER)
        for cell in grid.cells:
            paint(axes, grid.square_of(cell), cell, cmap, norm, compared_with)
        draw_labels(axes, grid, width - left)
        if any(cell.mfu is not None for cell in grid.cells):
            draw_scale(picture, grid, left, top - HEADER, cmap, norm)
        top -= HEADER + grid.height + AXIS
    picture.text(left / width, foot / height, "\n".join(lines), fontsize=7.5, color=GREY,
                 va="top", linespacing=1.35)  # fmt: skip
    return picture


def _left_margin(cells: Sequence[Cell]) -> float:
    """Inches for the models' names."""
    longest = max(min(len(cell.model), NAME_WIDTH) for cell in cells)
    return max(1.25, 0.35 + 0.1 * longest)


def _colours() -> Colormap:
    """Viridis: even in lightness, so it survives colour blindness and a grey printer."""
    return matplotlib.colormaps["viridis"]


def _scale_end(cells: Sequence[Cell]) -> float:
    """Upper end of the colour scale in percent: the first round number that holds every cell."""
    most = max((100 * cell.mfu for cell in cells if cell.mfu is not None), default=0.0)
    steps = [0.1, 0.2, 0.5, 1, 2, 5, *range(10, 201, 10)]
    return next((float(step) for step in steps if step >= most), most)


def _note_lines(cells: Sequence[Cell], notes: str, compared_with: str | None, room: float) -> list[str]:
    """Everything under the picture, wrapped to `room` inches."""
    sentences = [notes] if notes else []
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
    return [line for sentence in sentences for line in _wrap(sentence, columns)]


def _wrap(text: str, columns: int) -> list[str]:
    """Lines of at most `columns` characters; names are not cut at their hyphens."""
    return textwrap.wrap(text, columns, break_on_hyphens=False)
