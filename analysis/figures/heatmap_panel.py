"""A panel of the heatmap: its squares, the models beside it, the node counts below, the colours."""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ultrabench.analysis.captions import model_label, panel_title, scale_label
from ultrabench.analysis.cells import Cell, Panel
from ultrabench.analysis.figures.heatmap_cell import Square
from ultrabench.analysis.figures.picture import GREY

RIGHT, HEADER, AXIS = 1.15, 0.42, 0.62
"""Inches around the squares: colour bar, title of the panel, node labels."""
NAME_WIDTH = 22
"""Characters of a model's name on one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A panel with its rows (models) and columns (node counts)."""

    panel: Panel
    cells: Sequence[Cell]
    models: Sequence[tuple[str, str]]
    nodes: Sequence[int]
    square: tuple[float, float]
    """Width and height of a square in inches."""

    @property
    def width(self) -> float:
        """Inches of all columns."""
        return self.square[0] * len(self.nodes)

    @property
    def height(self) -> float:
        """Inches of all rows."""
        return self.square[1] * len(self.models)

    def square_of(self, cell: Cell) -> Square:
        """Where `cell` is drawn."""
        return Square(self.nodes.index(cell.nodes), self.models.index(model_label(cell)), *self.square)


def grids_of(cells: Sequence[Cell]) -> list[Grid]:
    """The panels of a picture: cells of different hardware, kernel or workload never share one."""
    panels: dict[Panel, list[Cell]] = defaultdict(list)
    for cell in cells:
        panels[cell.panel].append(cell)
    few = max(len({cell.nodes for cell in held}) for held in panels.values()) <= 2
    compared = any(cell.compare_ratio is not None for cell in cells)
    grids = []
    for panel, held in panels.items():
        sizes = {model_label(cell): cell.num_params or 0 for cell in held}
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


def grid_axes(picture: Figure, grid: Grid, left: float, top: float) -> Axes:
    """Axes whose unit is a square, `left` and `top` inches from the picture's lower left corner."""
    width, height = picture.get_size_inches()
    place = (left / width, (top - grid.height) / height, grid.width / width, grid.height / height)
    axes = picture.add_axes(place)
    axes.set_xlim(0, len(grid.nodes))
    axes.set_ylim(len(grid.models), 0)
    axes.set_xticks([i + 0.5 for i in range(len(grid.nodes))], [f"{n:,}" for n in grid.nodes])
    axes.set_yticks([])
    axes.set_xlabel("nodes", color=GREY)
    axes.tick_params(length=0, labelsize=10)
    axes.spines[:].set_visible(False)
    return axes


def draw_labels(axes: Axes, grid: Grid, room: float) -> None:
    """Names of the models on the left, what the panel shows above it, in `room` inches."""
    for row, (name, size) in enumerate(grid.models):
        names = textwrap.wrap(name, NAME_WIDTH, max_lines=2)
        x, y = -0.1 / grid.square[0], row + 0.5
        nudge = 0.09 * len(names) / grid.square[1]
        axes.text(x, y - (nudge if size else 0), "\n".join(names), ha="right", va="center",
                  fontsize=11, fontweight="bold")  # fmt: skip
        axes.text(x, y + nudge, size, ha="right", va="center", fontsize=7.5, color=GREY)
    shown = panel_title(grid.panel)
    axes.text(0, -0.16 / grid.square[1], shown, fontsize=min(9.5, 120 * room / len(shown)),
              color=GREY, va="center")  # fmt: skip


def draw_scale(picture: Figure, grid: Grid, left: float, top: float, cmap: Colormap, norm: Normalize) -> None:
    """The colour bar beside a panel."""
    width, height = picture.get_size_inches()
    place = (left + grid.width + 0.25) / width, (top - grid.height) / height
    axes = picture.add_axes((*place, 0.18 / width, grid.height / height))
    scale = picture.colorbar(
        ScalarMappable(norm=norm, cmap=cmap), cax=axes, ticks=MaxNLocator(5, steps=[1, 2, 5, 10])
    )
    label = scale_label(grid.cells)
    scale.set_label(label.replace("of ", "of\n") if grid.height < 2 else label, fontsize=9, color=GREY)
    axes.tick_params(labelsize=8, length=2, color=GREY)
    scale.outline.set_visible(False)
