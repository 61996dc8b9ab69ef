"""Draws a ranking as a heatmap: models by nodes, MFU or the ranked column as colour, the best layout in each cell."""

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ultrabench.analysis.cells import Cell, formula_of_cells, layout_words, tried
from ultrabench.analysis.figures.picture import GREY, wrapped
from ultrabench.analysis.numbers import count, memory, scale_end, too_wide, with_unit
from ultrabench.analysis.ranking import LOWER_IS_BETTER
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB, of_peak
from ultrabench.routing import routing_text
from ultrabench.sweep.config.sweep_config import WEAK

Line = tuple[str, float, str]
"""The text of a line, its font size in points and its font weight."""

_DARK, _LIGHT = "#1b1b1b", "#ffffff"
_NO_RESULT, _HATCH, _NO_RESULT_TEXT, _NO_MFU = "#f3f3f3", "#e2e2e2", "#3f3f3f", "#dfe6ee"
_HATCH_GAP = 0.11
"""Inches between two diagonal lines of a hatch, along the edge of a square."""
_LARGE, _USUAL, _REASON, _FINE = 12.5, 7.6, 7.2, 6.2
"""Font sizes in points: of the number, of what is known of the best run, of reasons, and of the fine print."""
_PITCH = 0.0105
"""Inches between two lines of text, for each point of their font sizes together."""
_LONGEST_LINE, _LONGEST_FINE = 22, 27
"""Number of characters of the usual and of the fine print that fit into the narrowest square."""
_LEAST_HEIGHT, _AROUND = 1.15, 0.38
"""Smallest height of a square, and its height above and below its lines, in inches."""
_CORNER = 0.15
"""Inches of the edges of the corner that marks another best layout."""
_TOP, _TITLE_LINE, _NOTE_LINE = 0.2, 0.26, 0.17
"""Heights in inches of the margin above the title, of a line of the title and of a line of the notes."""
_RIGHT, _HEADER, _AXIS = 1.15, 0.42, 0.62
"""Inches around the squares of a panel: for the colour bar, the title of the panel and the node labels."""
_MOST_PANELS = 24
"""Largest number of panels of one heatmap, which lie below each other."""
_NAME_WIDTH = 22
"""Largest number of characters of a model's name on one line."""
_TITLE: dict[str, Any] = {"fontsize": 14, "fontweight": "bold"}
_SMALL: dict[str, Any] = {"fontsize": 7.5, "color": GREY}
_COLOURS = "viridis"
"""A colour map of matplotlib that stays readable in grey print and for colour-blind readers."""
_DARK_COLOURS = 120 / 256
"""Share of the colour map, from its dark end, on which light text is readable: luminance below 0.2 (WCAG 2.2)."""


class Grid:
    """A panel of the figure, with its rows (models) and its columns (numbers of nodes)."""

    def __init__(self, cells: Sequence[Cell], width: float, compared_with: str) -> None:
        sizes = {_model(cell): cell.num_params or 0 for cell in cells}
        self.cells = cells
        self.models = sorted(sizes, key=lambda label: (sizes[label], label))
        """Name and size of each model, the smallest one first."""
        self.nodes = sorted({cell.nodes for cell in cells})
        self.lines = [_lines(cell, width, compared_with) for cell in cells]
        """The lines of text in the square of each cell."""
        least = _LEAST_HEIGHT if len(sizes) > 1 else 1.4
        self.width, self.height = width, max(least, *(_AROUND + _places(lines)[-1] for lines in self.lines))
        """Width and height of a square in inches; a single row is higher."""
        self.size = self.width * len(self.nodes), self.height * len(self.models)
        """Width and height of all squares in inches."""


def paint(axes: Axes, grid: Grid, cell: Cell, lines: Sequence[Line], end: float) -> None:
    """Draws the square of `cell` with its lines of text; a square is one unit wide and high.

    Args:
        end: value at the end of the colour scale, in percent for MFU.
    """
    x, y = grid.nodes.index(cell.nodes), grid.models.index(_model(cell))
    fill: Any = _NO_RESULT if cell.run_id is None else _NO_MFU
    ink = _NO_RESULT_TEXT if cell.run_id is None else _DARK
    if (value := _scaled(cell)) is not None:
        fill = matplotlib.colormaps[_COLOURS](value / end)
        ink = _LIGHT if value / end < _DARK_COLOURS else _DARK
    square = Rectangle((x, y), 1, 1, facecolor=fill, linewidth=0)
    axes.add_patch(square)
    if cell.run_id is None or cell.predicted:
        _hatch(axes, grid, square)
    if cell.compare_layout:
        wide, high = _CORNER / grid.width, _CORNER / grid.height
        corner = [(x + 1, y), (x + 1 - wide, y), (x + 1, y + high)]
        axes.add_patch(Polygon(corner, facecolor=ink, linewidth=0))
    places = _places(lines)
    # Each line is a text of its own, so that a viewer without the font still centres every line.
    for place, (text, size, weight) in zip(places, lines, strict=True):
        centre_y = y + 0.5 + (place - places[-1] / 2) / grid.height
        font: dict[str, Any] = {"color": ink, "fontsize": size, "fontweight": weight}
        axes.text(x + 0.5, centre_y, text, ha="center", va="center", **font)


def _places(lines: Sequence[Line]) -> list[float]:
    """Inches from the middle of the first line to the middle of each line."""
    steps = [_PITCH * (above[1] + below[1]) for above, below in pairwise(lines)]
    return [*accumulate(steps, initial=0.0)]


def _lines(cell: Cell, width: float, compared_with: str) -> list[Line]:
    """The lines of a square of `width` inches.

    Args:
        compared_with: name of what compare_ratio is relative to.
    """
    other = " ".join(layout_words(cell.compare_layout or {}, cell.varied_axes)).split()
    fine = _word_lines((cell.environment or "").split(), " ", _LONGEST_FINE)
    fine += _word_lines(tried(cell), ", ", _LONGEST_FINE) if cell.run_id else []
    fine += _word_lines(["other:", *other], " ", _LONGEST_FINE) if other else []
    below = [(text, _FINE, "normal") for text in fine]
    if cell.run_id is None:
        reason = wrap_reason(cell.reason or "no result", width)
        return [*((text, _REASON, "normal") for text in reason), *below]
    words = layout_words({**cell.layout, "options": cell.options}, cell.varied_axes)
    layout = chain.from_iterable(_word_lines(text.split(), " ", _LONGEST_LINE) for text in words)
    peak = memory(cell.peak_mem_reserved_bytes, cell.peak_mem_reserved_rank0_bytes)
    small = [(text, _USUAL, "normal") for text in (*layout, peak) if text is not None]
    if cell.compare_ratio is not None:
        ratio = f"{cell.compare_ratio:.2f}x"
        whole = f"{ratio} of {compared_with}"
        fits = compared_with and len(whole) <= _LONGEST_LINE
        small.append((whole if fits else ratio, _USUAL, "bold"))
    if wide := too_wide(cell.ci_reached, cell.step_time_ci95_rel):
        small.insert(0, (f"interval {wide}", _USUAL, "bold"))
    if cell.suspect:
        small.insert(0, ("suspect", _USUAL, "bold"))
    return [(_headline(cell), _LARGE, "normal" if wide or cell.suspect else "bold"), *small, *below]


def _word_lines(words: Sequence[str], between: str, longest: int) -> list[str]:
    """Lines of whole words of at most `longest` characters, where the words are not longer."""
    lines = [""]
    for word in words:
        longer = f"{lines[-1]}{between}{word}" if lines[-1] else word
        lines = [*lines[:-1], longer] if len(longer) <= longest or not lines[-1] else [*lines, word]
    return [line for line in lines if line]


def _headline(cell: Cell) -> str:
    """The shown value of a cell, or its tokens/s/GPU where the value, such as MFU, is unknown."""
    rate = cell.tokens_per_s_per_gpu
    return with_unit(cell.shown_column, cell.shown_value) or ("ok" if rate is None else count(rate, "tok/s"))


def _scaled(cell: Cell) -> float | None:
    """The shown value of a cell on the colour scale: MFU in percent, other columns in their own unit."""
    return cell.shown_value and cell.shown_value * (100 if cell.shown_column.endswith("mfu") else 1)


def _hatch(axes: Axes, grid: Grid, square: Rectangle) -> None:
    """Hatches the square with plain diagonal lines, since some viewers cannot draw the patterns of SVG."""
    (left, top), lean = square.get_xy(), grid.height / grid.width
    number = int((grid.width + grid.height) / _HATCH_GAP)
    starts = [left + n * _HATCH_GAP / grid.width for n in range(1, number + 1)]
    lines = [[(x, top), (x - lean, top + 1)] for x in starts]
    hatching = LineCollection(lines, colors=_HATCH, linewidths=0.7, zorder=1)
    axes.add_collection(hatching, autolim=False)
    hatching.set_clip_path(square)


def wrap_reason(reason: str, width: float) -> list[str]:
    """A reason cut into at most six lines of `width` inches; a longer one ends with `...`."""
    printable = "".join(c if c.isprintable() else " " for c in reason)
    return textwrap.wrap(printable, width=int(15.5 * width), max_lines=6, placeholder=" ...")


def figure(cells: Sequence[Cell], *, title: str, notes: str = "", compared_with: str = "") -> Figure:
    """The heatmap, with one panel for each hardware, kernel and workload.

    Args:
        title: name of the sweep.
        notes: text under the panels.
        compared_with: name of what compare_ratio is relative to.

    Raises:
        ConfigError: there are no cells, or more than _MOST_PANELS panels.
    """
    if not cells:
        todo = "plan a sweep, or draw bandwidths with: ultrabench plot comm"
        raise ConfigError("the table has no cells", todo)
    grids = _grids(cells, compared_with)
    if len(grids) > _MOST_PANELS:
        groups = f"{counted(len(cells), 'cell')} in {len(grids)} groups of hardware, kernel, precision, routing, seq_len and gbs"
        rule = f"a heatmap holds at most {_MOST_PANELS} groups: show them on a page with ultrabench report"
        raise ConfigError(f"{groups}; {rule}, or list them with ultrabench heatmap --json")
    left_inches = max(1.25, 0.35 + 0.1 * max(min(len(cell.title), _NAME_WIDTH) for cell in cells))
    width = max(7.0, left_inches + max(grid.size[0] for grid in grids) + _RIGHT)
    room = width - left_inches
    whole = f"Best layout per cell: {title}"
    heading = textwrap.wrap(whole, int(room * 7.2), max_lines=3, placeholder=" ...")
    lines = wrapped("\n".join([notes, *_sentences(cells, compared_with)]), int((room - 0.3) * 17))
    foot = 0.2 + _NOTE_LINE * len(lines)
    top = foot + sum(_HEADER + grid.size[1] + _AXIS for grid in grids)
    height = top + _TITLE_LINE * len(heading) + _TOP
    picture, inches = Figure(figsize=(width, height), facecolor="white"), np.array([width, height])
    margin = left_inches / width
    picture.text(margin, 1 - _TOP / height, "\n".join(heading), va="top", linespacing=1.25, **_TITLE)
    end = scale_end(map(_scaled, cells))
    for grid in grids:
        wide, high = grid.size
        down = top - _HEADER - high
        axes = picture.add_axes((*(left_inches, down) / inches, *(wide, high) / inches))
        for cell, written in zip(grid.cells, grid.lines, strict=True):
            paint(axes, grid, cell, written, end)
        _draw_labels(axes, grid, room)
        if any(cell.shown_value is not None for cell in grid.cells):
            place = (left_inches + wide + 0.25, down) / inches
            _draw_bar(picture.add_axes((*place, *(0.18, high) / inches)), grid, end)
        top = down - _AXIS
    picture.text(margin, foot / height, "\n".join(lines), va="top", linespacing=1.35, **_SMALL)
    return picture


def _grids(cells: Sequence[Cell], compared_with: str) -> list[Grid]:
    """The panels of the figure; all cells of a panel have the same hardware, kernel and workload."""
    panels: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        panels[cell.panel].append(cell)
    few = max(len({cell.nodes for cell in of_panel}) for of_panel in panels.values()) <= 2
    return [Grid(of_panel, 2.0 if few else 1.5, compared_with) for of_panel in panels.values()]


def _draw_bar(bar: Axes, grid: Grid, end: float) -> None:
    """Draws the colour bar of a panel."""
    colours = ScalarMappable(Normalize(0, end), _COLOURS)
    column = grid.cells[0].shown_column
    in_bytes, unit, name = column.endswith("_bytes"), 1.0, ""
    if in_bytes:
        unit, name = (GIB, " (GiB)") if end >= GIB else (2**20, " (MiB)")
    ticks = [unit * tick for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, end / unit)]
    shown = FuncFormatter(lambda value, _: f"{value / unit:,.4g}" if in_bytes else count(value))
    scale = bar.figure.colorbar(colours, cax=bar, ticks=[t for t in ticks if t <= end], format=shown)
    scale.outline.set_visible(False)
    measured = "measured " * any((cell.peak_source or "").startswith("measured") for cell in grid.cells)
    space = "\n" if grid.size[1] < 2 else " "
    mfu = f"MFU{of_peak(grid.cells[0].precision)} (% of{space}{measured}peak)"
    label = {"mfu": mfu, "source_mfu": f"source_mfu{space}(% of peak)"}
    wins = f"{name}\nlower is better" if column in LOWER_IS_BETTER else name
    bar.set_ylabel(label.get(column, column) + wins, fontsize=9, color=GREY)
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
        further = 0.09 * params.count("\n") / grid.height
        axes.text(x, y + nudge + further, params, **beside, **_SMALL)
    shown = _panel_title(grid.cells[0])
    fontsize = min(9.5, 120 * room / len(shown))
    axes.text(0, -0.16 / grid.height, shown, fontsize=fontsize, color=GREY, va="center")


def _model(cell: Cell) -> tuple[str, str]:
    """The name of the cell's model, and as a text its number of parameters and how many of them a token passes."""
    params = "" if cell.num_params is None else f"{count(cell.num_params)} params"
    active = f"\n{count(cell.num_active_params or 0)} active" if cell.has_experts else ""
    return cell.title, params + active


def _panel_title(cell: Cell) -> str:
    """The title of the panel of a cell: hardware, kernel and workload."""
    precision = f" ({cell.precision})" if cell.precision else ""
    kernel, routing = f"kernel {cell.kernel or '?'}{precision}", routing_text(cell.routing)
    parts = [cell.hardware or "unknown hardware", kernel, *([routing] if routing else [])]
    if cell.seq_len is not None:
        parts.append(f"seq_len {cell.seq_len:,}")
    if cell.gbs is not None:
        batch = cell.gbs / cell.nodes if cell.scaling == WEAK else cell.gbs
        tokens = "" if cell.seq_len is None else f" ({count(batch * cell.seq_len)} tokens)"
        parts.append(f"{cell.panel[-1]}{tokens}")
    return " | ".join(parts)


def _sentences(cells: Sequence[Cell], other: str) -> Iterator[str]:
    """The sentences under the figure that its cells give; `other` is what compare_ratio is relative to."""
    cell_count = counted(len(cells), "cell")
    if formula := formula_of_cells(cells):
        yield f"{formula}."
    if any(cell.compare_ratio is not None for cell in cells):
        yield f"Factors such as 1.00x: tokens/s/GPU relative to the best of {other}."
    differing = {
        f"{name} {other_value or 'unknown'} instead of {getattr(cell, name) or 'unknown'}"
        for cell in cells
        for name, other_value in cell.compare_differing.items()
    }
    if differing:
        yield f"{other} has {', '.join(sorted(differing))}."
    if moved := sum(cell.compare_layout is not None for cell in cells):
        where = f"In {moved} of {cell_count}, marked by a corner"
        yield f"{where}, {other} has a different best layout, shown after `other:`."
    if close := sum(bool(cell.as_good_as_best) for cell in cells):
        yield f"In {close} of {cell_count} several layouts tie for best: their 95 % intervals overlap."
    if several := sum(cell.environment is not None for cell in cells):
        yield f"In {several} of {cell_count} layouts were measured in several environments; the square names the environment of the best."
    if suspect_cells := [cell for cell in cells if cell.suspect]:
        where = f"In {len(suspect_cells)} of {cell_count} every measurement is suspect, so the best suspect one is shown"
        yield f"{where}, such as {suspect_cells[0].title} on {counted(suspect_cells[0].nodes, 'node')}: {suspect_cells[0].suspect}."
    if wide := [cell for cell in cells if cell.ci_reached is False and cell.step_time_ci95_rel is not None]:
        widest = max(wide, key=lambda cell: cell.step_time_ci95_rel or 0.0)
        where = f"{widest.title} on {counted(widest.nodes, 'node')}"
        interval = f"{too_wide(False, widest.step_time_ci95_rel)} ({where})"
        yield f"In {len(wide)} of {cell_count} the interval of the best layout is wider than its target, up to {interval}."
