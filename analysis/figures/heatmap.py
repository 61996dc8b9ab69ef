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
from ultrabench.hardware import GIB, peak_suffix
from ultrabench.routing import routing_text
from ultrabench.sweep.config.sweep_config import WEAK

Line = tuple[str, float, str]
"""The text of a line, its font size in points and its font weight."""

_DARK_TEXT, _LIGHT_TEXT = "#1b1b1b", "#ffffff"
_NO_RESULT_FILL, _HATCH_COLOUR, _NO_RESULT_TEXT, _NO_VALUE_FILL = "#f3f3f3", "#e2e2e2", "#3f3f3f", "#dfe6ee"
_HATCH_GAP = 0.11
"""Inches between two diagonal lines of a hatch, along the edge of a square."""
_NUMBER_PT, _USUAL_PT, _REASON_PT, _FINE_PT = 12.5, 7.6, 7.2, 6.2
"""Font sizes in points: of the number, of the lines about the best run, of reasons, and of the fine print."""
_LINE_DISTANCE = 0.0105
"""Inches between the middles of two lines, for each point of the sum of their font sizes."""
_MAX_USUAL, _MAX_FINE = 22, 27
"""Number of characters of the usual and of the fine print that fit into the narrowest square."""
_MIN_HEIGHT, _PADDING = 1.15, 0.38
"""Smallest height of a square, and its height above and below its lines, in inches."""
_CORNER_EDGE = 0.15
"""Inches of the edges of the corner that marks another best layout."""
_TOP_MARGIN, _TITLE_HEIGHT, _NOTE_HEIGHT = 0.2, 0.26, 0.17
"""Heights in inches of the margin above the title, of a line of the title and of a line of the notes."""
_RIGHT_MARGIN, _HEADER_HEIGHT, _FOOTER_HEIGHT = 1.15, 0.42, 0.62
"""Inches around the squares of a panel: for the colour bar, the title of the panel and the node labels."""
_MAX_PANELS = 24
"""Largest number of panels of one heatmap, which lie below each other."""
_NAME_WIDTH = 22
"""Largest number of characters of a model's name on one line."""
_TITLE_LOOK: dict[str, Any] = {"fontsize": 14, "fontweight": "bold"}
_SMALL_LOOK: dict[str, Any] = {"fontsize": 7.5, "color": GREY}
_COLOUR_MAP = "viridis"
"""A colour map of matplotlib that stays readable in grey print and for colour-blind readers."""
_DARK_SHARE = 120 / 256
"""Share of the colour map, from its dark end, on which light text is readable: luminance below 0.2 (WCAG 2.2)."""


class Grid:
    """A panel of the figure, with its rows (models) and its columns (numbers of nodes)."""

    def __init__(self, cells: Sequence[Cell], width: float, compared_with: str) -> None:
        params_by_model = {_model(cell): cell.num_params or 0 for cell in cells}
        self.cells = cells
        self.models = sorted(params_by_model, key=lambda label: (params_by_model[label], label))
        """Name and size of each model, the smallest one first."""
        self.nodes = sorted({cell.nodes for cell in cells})
        self.lines = [_lines(cell, width, compared_with) for cell in cells]
        """The lines of text in the square of each cell."""
        min_height = _MIN_HEIGHT if len(params_by_model) > 1 else 1.4
        text_heights = [_PADDING + _offsets(lines)[-1] for lines in self.lines]
        self.width, self.height = width, max(min_height, *text_heights)
        """Width and height of a square in inches; a single row is higher."""
        self.size = self.width * len(self.nodes), self.height * len(self.models)
        """Width and height of all squares in inches."""


def paint(axes: Axes, grid: Grid, cell: Cell, lines: Sequence[Line], scale_max: float) -> None:
    """Draws the square of `cell` with its lines of text; a square is one unit wide and high.

    Args:
        scale_max: value at the end of the colour scale, in percent for MFU.
    """
    x, y = grid.nodes.index(cell.nodes), grid.models.index(_model(cell))
    fill: Any = _NO_RESULT_FILL if cell.run_id is None else _NO_VALUE_FILL
    text_colour = _NO_RESULT_TEXT if cell.run_id is None else _DARK_TEXT
    if (value := _scale_value(cell)) is not None:
        fill = matplotlib.colormaps[_COLOUR_MAP](value / scale_max)
        text_colour = _LIGHT_TEXT if value / scale_max < _DARK_SHARE else _DARK_TEXT
    square = Rectangle((x, y), 1, 1, facecolor=fill, linewidth=0)
    axes.add_patch(square)
    if cell.run_id is None or cell.predicted:
        _hatch(axes, grid, square)
    if cell.compare_layout:
        corner_width, corner_height = _CORNER_EDGE / grid.width, _CORNER_EDGE / grid.height
        corner = [(x + 1, y), (x + 1 - corner_width, y), (x + 1, y + corner_height)]
        axes.add_patch(Polygon(corner, facecolor=text_colour, linewidth=0))
    offsets = _offsets(lines)
    # Each line is a text of its own, so that a viewer without the font still centres every line.
    for offset, (text, size, weight) in zip(offsets, lines, strict=True):
        centre_y = y + 0.5 + (offset - offsets[-1] / 2) / grid.height
        font: dict[str, Any] = {"color": text_colour, "fontsize": size, "fontweight": weight}
        axes.text(x + 0.5, centre_y, text, ha="center", va="center", **font)


def _offsets(lines: Sequence[Line]) -> list[float]:
    """Inches from the middle of the first line to the middle of each line."""
    distances = [_LINE_DISTANCE * (above[1] + below[1]) for above, below in pairwise(lines)]
    return [*accumulate(distances, initial=0.0)]


def _lines(cell: Cell, width: float, compared_with: str) -> list[Line]:
    """The lines of a square of `width` inches.

    Args:
        compared_with: name of what compare_ratio is relative to.
    """
    other_layout = " ".join(layout_words(cell.compare_layout or {}, cell.varied_axes)).split()
    fine_texts = _word_lines((cell.environment or "").split(), " ", _MAX_FINE)
    fine_texts += _word_lines(tried(cell), ", ", _MAX_FINE) if cell.run_id else []
    fine_texts += _word_lines(["other:", *other_layout], " ", _MAX_FINE) if other_layout else []
    fine_lines = [(text, _FINE_PT, "normal") for text in fine_texts]
    if cell.run_id is None:
        reason = wrap_reason(cell.reason or "no result", width)
        return [*((text, _REASON_PT, "normal") for text in reason), *fine_lines]
    words = layout_words({**cell.layout, "options": cell.options}, cell.varied_axes)
    layout_texts = chain.from_iterable(_word_lines(text.split(), " ", _MAX_USUAL) for text in words)
    peak_text = memory(cell.peak_mem_reserved_bytes, cell.peak_mem_reserved_rank0_bytes)
    usual_lines = [(text, _USUAL_PT, "normal") for text in (*layout_texts, peak_text) if text is not None]
    if cell.compare_ratio is not None:
        ratio = f"{cell.compare_ratio:.2f}x"
        ratio_text = f"{ratio} of {compared_with}"
        fits = compared_with and len(ratio_text) <= _MAX_USUAL
        usual_lines.append((ratio_text if fits else ratio, _USUAL_PT, "bold"))
    if interval := too_wide(cell.ci_reached, cell.step_time_ci95_rel):
        usual_lines.insert(0, (f"interval {interval}", _USUAL_PT, "bold"))
    if cell.suspect:
        usual_lines.insert(0, ("suspect", _USUAL_PT, "bold"))
    headline = _headline(cell), _NUMBER_PT, "normal" if interval or cell.suspect else "bold"
    return [headline, *usual_lines, *fine_lines]


def _word_lines(words: Sequence[str], separator: str, max_length: int) -> list[str]:
    """Lines of whole words of at most `longest` characters, where the words are not longer."""
    lines = [""]
    for word in words:
        longer = f"{lines[-1]}{separator}{word}" if lines[-1] else word
        lines = [*lines[:-1], longer] if len(longer) <= max_length or not lines[-1] else [*lines, word]
    return [line for line in lines if line]


def _headline(cell: Cell) -> str:
    """The shown value of a cell, or its tokens/s/GPU where the value, such as MFU, is unknown."""
    rate = cell.tokens_per_s_per_gpu
    return with_unit(cell.shown_column, cell.shown_value) or ("ok" if rate is None else count(rate, "tok/s"))


def _scale_value(cell: Cell) -> float | None:
    """The shown value of a cell on the colour scale: MFU in percent, other columns in their own unit."""
    return cell.shown_value and cell.shown_value * (100 if cell.shown_column.endswith("mfu") else 1)


def _hatch(axes: Axes, grid: Grid, square: Rectangle) -> None:
    """Hatches the square with plain diagonal lines, since some viewers cannot draw the patterns of SVG."""
    (left, top), lean = square.get_xy(), grid.height / grid.width
    num_lines = int((grid.width + grid.height) / _HATCH_GAP)
    starts = [left + n * _HATCH_GAP / grid.width for n in range(1, num_lines + 1)]
    lines = [[(x, top), (x - lean, top + 1)] for x in starts]
    hatching = LineCollection(lines, colors=_HATCH_COLOUR, linewidths=0.7, zorder=1)
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
        ConfigError: there are no cells, or more than _MAX_PANELS panels.
    """
    if not cells:
        todo = "plan a sweep, or draw bandwidths with: ultrabench plot comm"
        raise ConfigError("the table has no cells", todo)
    grids = _grids(cells, compared_with)
    if len(grids) > _MAX_PANELS:
        groups_text = f"{counted(len(cells), 'cell')} in {len(grids)} groups of hardware, kernel, precision, routing, seq_len and gbs"
        rule = f"a heatmap holds at most {_MAX_PANELS} groups: show them on a page with ultrabench report"
        raise ConfigError(f"{groups_text}; {rule}, or list them with ultrabench heatmap --json")
    left_inches = max(1.25, 0.35 + 0.1 * max(min(len(cell.title), _NAME_WIDTH) for cell in cells))
    width = max(7.0, left_inches + max(grid.size[0] for grid in grids) + _RIGHT_MARGIN)
    text_width = width - left_inches
    title_text = f"Best layout per cell: {title}"
    heading = textwrap.wrap(title_text, int(text_width * 7.2), max_lines=3, placeholder=" ...")
    note_lines = wrapped("\n".join([notes, *_sentences(cells, compared_with)]), int((text_width - 0.3) * 17))
    foot = 0.2 + _NOTE_HEIGHT * len(note_lines)
    top = foot + sum(_HEADER_HEIGHT + grid.size[1] + _FOOTER_HEIGHT for grid in grids)
    height = top + _TITLE_HEIGHT * len(heading) + _TOP_MARGIN
    figure, inches = Figure(figsize=(width, height), facecolor="white"), np.array([width, height])
    left = left_inches / width
    figure.text(left, 1 - _TOP_MARGIN / height, "\n".join(heading), va="top", linespacing=1.25, **_TITLE_LOOK)
    scale_max = scale_end(map(_scale_value, cells))
    for grid in grids:
        grid_width, grid_height = grid.size
        bottom = top - _HEADER_HEIGHT - grid_height
        axes = figure.add_axes((*(left_inches, bottom) / inches, *(grid_width, grid_height) / inches))
        for cell, cell_lines in zip(grid.cells, grid.lines, strict=True):
            paint(axes, grid, cell, cell_lines, scale_max)
        _draw_labels(axes, grid, text_width)
        if any(cell.shown_value is not None for cell in grid.cells):
            bar_corner = (left_inches + grid_width + 0.25, bottom) / inches
            _draw_bar(figure.add_axes((*bar_corner, *(0.18, grid_height) / inches)), grid, scale_max)
        top = bottom - _FOOTER_HEIGHT
    figure.text(left, foot / height, "\n".join(note_lines), va="top", linespacing=1.35, **_SMALL_LOOK)
    return figure


def _grids(cells: Sequence[Cell], compared_with: str) -> list[Grid]:
    """The panels of the figure; all cells of a panel have the same hardware, kernel and workload."""
    panels: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        panels[cell.panel].append(cell)
    is_narrow = max(len({cell.nodes for cell in panel_cells}) for panel_cells in panels.values()) <= 2
    return [Grid(panel_cells, 2.0 if is_narrow else 1.5, compared_with) for panel_cells in panels.values()]


def _draw_bar(axes: Axes, grid: Grid, scale_max: float) -> None:
    """Draws the colour bar of a panel."""
    colours = ScalarMappable(Normalize(0, scale_max), _COLOUR_MAP)
    column = grid.cells[0].shown_column
    is_in_bytes, unit, unit_name = column.endswith("_bytes"), 1.0, ""
    if is_in_bytes:
        unit, unit_name = (GIB, " (GiB)") if scale_max >= GIB else (2**20, " (MiB)")
    ticks = [unit * tick for tick in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, scale_max / unit)]
    text = FuncFormatter(lambda value, _: f"{value / unit:,.4g}" if is_in_bytes else count(value))
    bar = axes.figure.colorbar(colours, cax=axes, ticks=[t for t in ticks if t <= scale_max], format=text)
    bar.outline.set_visible(False)
    measured_text = "measured " * any((cell.peak_source or "").startswith("measured") for cell in grid.cells)
    space = "\n" if grid.size[1] < 2 else " "
    mfu_label = f"MFU{peak_suffix(grid.cells[0].precision)} (% of{space}{measured_text}peak)"
    label_by_column = {"mfu": mfu_label, "source_mfu": f"source_mfu{space}(% of peak)"}
    suffix = f"{unit_name}\nlower is better" if column in LOWER_IS_BETTER else unit_name
    axes.set_ylabel(label_by_column.get(column, column) + suffix, fontsize=9, color=GREY)
    axes.tick_params(labelsize=8, length=2, color=GREY)


def _draw_labels(axes: Axes, grid: Grid, max_width: float) -> None:
    """Draws the lines between squares, the labels of nodes and models, and a title no wider than `room`."""
    num_columns, num_rows = len(grid.nodes), len(grid.models)
    axes.set(frame_on=False, xlim=(0, num_columns), ylim=(num_rows, 0), yticks=[])
    axes.hlines(range(num_rows + 1), 0, num_columns, colors="white", linewidth=2.5)
    axes.vlines(range(num_columns + 1), 0, num_rows, colors="white", linewidth=2.5)
    axes.set_xticks([n + 0.5 for n in range(num_columns)], [f"{n:,}" for n in grid.nodes])
    axes.set_xlabel("nodes", color=GREY)
    axes.tick_params(length=0, labelsize=10)
    for row, (name, params) in enumerate(grid.models):
        lines = textwrap.wrap(name, _NAME_WIDTH, max_lines=2)
        x, y = -0.1 / grid.width, row + 0.5
        nudge = 0.09 * len(lines) / grid.height
        align: dict[str, Any] = {"ha": "right", "va": "center"}
        axes.text(x, y - (nudge if params else 0), "\n".join(lines), fontsize=11, fontweight="bold", **align)
        extra = 0.09 * params.count("\n") / grid.height
        axes.text(x, y + nudge + extra, params, **align, **_SMALL_LOOK)
    title = _panel_title(grid.cells[0])
    fontsize = min(9.5, 120 * max_width / len(title))
    axes.text(0, -0.16 / grid.height, title, fontsize=fontsize, color=GREY, va="center")


def _model(cell: Cell) -> tuple[str, str]:
    """The name of the cell's model, and as a text its number of parameters and how many of them a token passes."""
    params = "" if cell.num_params is None else f"{count(cell.num_params)} params"
    active_text = f"\n{count(cell.num_active_params or 0)} active" if cell.has_experts else ""
    return cell.title, params + active_text


def _panel_title(cell: Cell) -> str:
    """The title of the panel of a cell: hardware, kernel and workload."""
    precision_text = f" ({cell.precision})" if cell.precision else ""
    kernel_text, routing_label = f"kernel {cell.kernel or '?'}{precision_text}", routing_text(cell.routing)
    parts = [cell.hardware or "unknown hardware", kernel_text, *([routing_label] if routing_label else [])]
    if cell.seq_len is not None:
        parts.append(f"seq_len {cell.seq_len:,}")
    if cell.gbs is not None:
        batch = cell.gbs / cell.nodes if cell.scaling == WEAK else cell.gbs
        tokens_text = "" if cell.seq_len is None else f" ({count(batch * cell.seq_len)} tokens)"
        parts.append(f"{cell.panel[-1]}{tokens_text}")
    return " | ".join(parts)


def _sentences(cells: Sequence[Cell], compared_with: str) -> Iterator[str]:
    """The sentences under the figure that its cells give; `other` is what compare_ratio is relative to."""
    cells_text = counted(len(cells), "cell")
    if formula := formula_of_cells(cells):
        yield f"{formula}."
    if any(cell.compare_ratio is not None for cell in cells):
        yield f"Factors such as 1.00x: tokens/s/GPU relative to the best of {compared_with}."
    differing = {
        f"{name} {other_value or 'unknown'} instead of {getattr(cell, name) or 'unknown'}"
        for cell in cells
        for name, other_value in cell.compare_differing.items()
    }
    if differing:
        yield f"{compared_with} has {', '.join(sorted(differing))}."
    if num_moved := sum(cell.compare_layout is not None for cell in cells):
        where_text = f"In {num_moved} of {cells_text}, marked by a corner"
        yield f"{where_text}, {compared_with} has a different best layout, shown after `other:`."
    if num_tied := sum(bool(cell.as_good_as_best) for cell in cells):
        yield f"In {num_tied} of {cells_text} several layouts tie for best: their 95 % intervals overlap."
    if num_environments := sum(cell.environment is not None for cell in cells):
        yield f"In {num_environments} of {cells_text} layouts were measured in several environments; the square names the environment of the best."
    if suspect_cells := [cell for cell in cells if cell.suspect]:
        where_text = f"In {len(suspect_cells)} of {cells_text} every measurement is suspect, so the best suspect one is shown"
        yield f"{where_text}, such as {suspect_cells[0].title} on {counted(suspect_cells[0].nodes, 'node')}: {suspect_cells[0].suspect}."
    wide_cells = [cell for cell in cells if cell.ci_reached is False and cell.step_time_ci95_rel is not None]
    if wide_cells:
        widest = max(wide_cells, key=lambda cell: cell.step_time_ci95_rel or 0.0)
        where_text = f"{widest.title} on {counted(widest.nodes, 'node')}"
        interval_text = f"{too_wide(False, widest.step_time_ci95_rel)} ({where_text})"
        yield f"In {len(wide_cells)} of {cells_text} the interval of the best layout is wider than its target, up to {interval_text}."
