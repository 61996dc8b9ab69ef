"""Draws a ranking as a heatmap: models by nodes, MFU or the ranked column as colour, the best layout in each cell."""

import math
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

from ultrabench.analysis.figures.picture import GREY, wrapped_lines
from ultrabench.analysis.results.cells import Cell, formula_of_cells, layout_words, tried
from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.analysis.results.numbers import count, memory, scale_end, too_wide, with_unit
from ultrabench.analysis.results.ranking import DEFAULT_RANK_BY
from ultrabench.column import NUMBER, Form, memory_axis
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import peak_suffix
from ultrabench.result import Status
from ultrabench.routing import routing_text
from ultrabench.sweep.config.sweep_config import WEAK

TextLine = tuple[str, float, str]
"""The text of a line, its font size in points and its font weight."""

_DARK_TEXT_COLOUR, _LIGHT_TEXT_COLOUR, _HATCH_COLOUR = "#1b1b1b", "#ffffff", "#e2e2e2"
_NO_RESULT_FILL, _NO_VALUE_FILL, _NO_RESULT_TEXT_COLOUR = "#f3f3f3", "#dfe6ee", "#3f3f3f"
_HATCH_GAP_INCHES = 0.11
"""Distance of two diagonal lines of a hatch, along the edge of a square."""
_NUMBER_PT, _USUAL_PT, _REASON_PT, _FINE_PT = 12.5, 7.6, 7.2, 6.2
"""Font sizes in points: of the number, of the lines about the best run, of reasons, and of the fine print."""
_INCHES_PER_POINT = 0.0105
"""Inches between the middles of two lines, for each point of the sum of their font sizes."""
_MAX_USUAL_CHARS, _MAX_FINE_CHARS = 22, 27
"""Number of characters of the usual and of the fine print that fit into the narrowest square."""
_MIN_SQUARE_INCHES, _PADDING_INCHES = 1.15, 0.38
"""Smallest height of a square, and its height above and below its lines, in inches."""
_CORNER_INCHES = 0.15
"""Length of the edges of the triangle in a corner that marks another best layout."""
_TOP_MARGIN_INCHES, _TITLE_LINE_INCHES, _NOTE_LINE_INCHES = 0.2, 0.26, 0.17
"""Heights in inches of the margin above the title, of a line of the title and of a line of the notes."""
_RIGHT_INCHES, _HEADER_INCHES, _FOOTER_INCHES = 1.15, 0.42, 0.62
"""Inches around the squares of a panel: for the colour bar, the title of the panel and the node labels."""
_MAX_PANELS = 24
"""Largest number of panels of one heatmap, which lie below each other."""
_MODEL_NAME_CHARS = 22
"""Largest number of characters of a model's name on one line."""
_TITLE_LOOK: dict[str, Any] = {"fontsize": 14, "fontweight": "bold"}
_SMALL_TEXT_LOOK: dict[str, Any] = {"fontsize": 7.5, "color": GREY}
_COLOUR_MAP = "viridis"
"""A colour map of matplotlib that stays readable in grey print and for colour-blind readers."""
_DARK_COLOURS_SHARE = 120 / 256
"""Share of the colour map, from its dark end, on which light text is readable: luminance below 0.2 (WCAG 2.2)."""


class Grid:
    """A panel of the figure, with its rows (models) and its columns (numbers of nodes)."""

    def __init__(self, cells: Sequence[Cell], square_inches: float, compared_name: str) -> None:
        num_params_by_model = {_model_label(cell): cell.num_params or 0 for cell in cells}
        self.cells = cells
        self.model_labels = sorted(num_params_by_model, key=lambda label: (num_params_by_model[label], label))
        """Name and size of each model, the smallest one first."""
        self.nodes = sorted({nodes_of(cell) for cell in cells})
        """Number of nodes and of GPUs of each column; as many GPUs as fill the nodes are infinite."""
        self.cell_lines = [_lines_of_cell(cell, square_inches, compared_name) for cell in cells]
        """The lines of text in the square of each cell."""
        min_inches = _MIN_SQUARE_INCHES if len(num_params_by_model) > 1 else 1.4
        text_inches = [_PADDING_INCHES + _offsets_inches(lines)[-1] for lines in self.cell_lines]
        self.square_width, self.square_height = square_inches, max(min_inches, *text_inches)
        """Width and height of a square in inches; a single row is higher."""
        self.width = self.square_width * len(self.nodes)
        self.height = self.square_height * len(self.model_labels)
        """Width and height of all squares together in inches."""


def nodes_of(cell: Cell) -> tuple[int, float]:
    """The column of a cell: its nodes, and its GPUs if they fill no whole number of nodes, else infinity."""
    return cell.nodes, cell.partial_gpus or math.inf


def paint(axes: Axes, grid: Grid, cell: Cell, lines: Sequence[TextLine], scale_max: float) -> None:
    """Draws the square of `cell` with its lines of text; a square is one unit wide and high.

    Args:
        scale_max: value at the end of the colour scale, in percent for MFU.
    """
    x, y = grid.nodes.index(nodes_of(cell)), grid.model_labels.index(_model_label(cell))
    fill_colour: Any = _NO_RESULT_FILL if cell.run_id is None else _NO_VALUE_FILL
    text_colour = _NO_RESULT_TEXT_COLOUR if cell.run_id is None else _DARK_TEXT_COLOUR
    if (value := _scale_value(cell)) is not None:
        fill_colour = matplotlib.colormaps[_COLOUR_MAP](value / scale_max)
        text_colour = _LIGHT_TEXT_COLOUR if value / scale_max < _DARK_COLOURS_SHARE else _DARK_TEXT_COLOUR
    square = Rectangle((x, y), 1, 1, facecolor=fill_colour, linewidth=0)
    axes.add_patch(square)
    if cell.run_id is None or cell.predicted:
        _draw_hatch(axes, grid, square)
    if cell.compare_layout:
        corner_width, corner_height = _CORNER_INCHES / grid.square_width, _CORNER_INCHES / grid.square_height
        corner_points = [(x + 1, y), (x + 1 - corner_width, y), (x + 1, y + corner_height)]
        axes.add_patch(Polygon(corner_points, facecolor=text_colour, linewidth=0))
    offsets_inches = _offsets_inches(lines)
    # Each line is a text of its own, so that a viewer without the font still centres every line.
    for offset_inches, (text, font_size, font_weight) in zip(offsets_inches, lines, strict=True):
        centre_y = y + 0.5 + (offset_inches - offsets_inches[-1] / 2) / grid.square_height
        font: dict[str, Any] = {"color": text_colour, "fontsize": font_size, "fontweight": font_weight}
        axes.text(x + 0.5, centre_y, text, ha="center", va="center", **font)


def _offsets_inches(lines: Sequence[TextLine]) -> list[float]:
    """Inches from the middle of the first line to the middle of each line."""
    font_sizes = [font_size for _, font_size, _ in lines]
    return [*accumulate((_INCHES_PER_POINT * sum(sizes) for sizes in pairwise(font_sizes)), initial=0.0)]


def _lines_of_cell(cell: Cell, square_inches: float, compared_name: str) -> list[TextLine]:
    """The lines of text in the square of a cell.

    Args:
        square_inches: width of the square.
        compared_name: name of what compare_ratio is relative to.
    """
    other_words = " ".join(layout_words(cell.compare_layout or {}, cell.varied_axes)).split()
    fine_texts = _word_lines((cell.environment or "").split(), " ", _MAX_FINE_CHARS)
    fine_texts += _word_lines(tried(cell), ", ", _MAX_FINE_CHARS) if cell.run_id else []
    fine_texts += _word_lines(["other:", *other_words], " ", _MAX_FINE_CHARS) if other_words else []
    fine_lines = [(text, _FINE_PT, "normal") for text in fine_texts]
    if cell.run_id is None:
        reason_lines = wrap_reason(cell.reason or "no result", square_inches)
        return [*((text, _REASON_PT, "normal") for text in reason_lines), *fine_lines]
    layout_texts = layout_words({**cell.layout, "options": cell.options}, cell.varied_axes)
    text_lines = chain(*(_word_lines(text.split(), " ", _MAX_USUAL_CHARS) for text in layout_texts))
    peaks = cell.peak_mem_reserved_bytes, cell.peak_mem_reserved_rank0_bytes, cell.peak_mem_allocated_bytes
    peak_text = memory(*peaks)
    usual_lines = [(text, _USUAL_PT, "normal") for text in (*text_lines, peak_text) if text is not None]
    if cell.compare_ratio is not None:
        ratio_only = f"{cell.compare_ratio:.2f}x"
        ratio_text = f"{ratio_only} of {compared_name}"
        name_fits = compared_name and len(ratio_text) <= _MAX_USUAL_CHARS
        usual_lines.append((ratio_text if name_fits else ratio_only, _USUAL_PT, "bold"))
    if interval_text := too_wide(cell.ci_reached, cell.step_time_ci95_rel):
        usual_lines.insert(0, (f"interval {interval_text}", _USUAL_PT, "bold"))
    if cell.suspect:
        usual_lines.insert(0, ("suspect", _USUAL_PT, "bold"))
    headline = _headline_text(cell), _NUMBER_PT, "normal" if interval_text or cell.suspect else "bold"
    return [headline, *usual_lines, *fine_lines]


def _word_lines(words: Sequence[str], separator: str, max_chars: int) -> list[str]:
    """The words joined to lines of at most `max_chars` characters; a longer word has a line of its own."""
    lines = [""]
    for word in words:
        extended = f"{lines[-1]}{separator}{word}" if lines[-1] else word
        lines = [*lines[:-1], extended] if len(extended) <= max_chars or not lines[-1] else [*lines, word]
    return [line for line in lines if line]


def _headline_text(cell: Cell) -> str:
    """The shown value of a cell, or its tokens/s/GPU where the value, such as MFU, is unknown."""
    speed_text = (
        Status.OK.value
        if cell.tokens_per_s_per_gpu is None
        else count(cell.tokens_per_s_per_gpu, column_of("tokens_per_s_per_gpu").unit.short_symbol)
    )
    if cell.shown_column == DEFAULT_RANK_BY:
        return speed_text
    return with_unit(cell.shown_column, cell.shown_value) or speed_text


def _scale_value(cell: Cell) -> float | None:
    """The shown value of a cell on the colour scale: fractions in percent, other columns in their own unit."""
    unit = column_of(cell.shown_column).unit
    return cell.shown_value and cell.shown_value * (unit.axis.factor if unit.is_share else 1)


def _draw_hatch(axes: Axes, grid: Grid, square: Rectangle) -> None:
    """Hatches the square with plain diagonal lines, since some viewers cannot draw the patterns of SVG."""
    (left, top), slant = square.get_xy(), grid.square_height / grid.square_width
    num_lines = int((grid.square_width + grid.square_height) / _HATCH_GAP_INCHES)
    top_xs = [left + n * _HATCH_GAP_INCHES / grid.square_width for n in range(1, num_lines + 1)]
    segments = [[(x, top), (x - slant, top + 1)] for x in top_xs]
    hatch_lines = LineCollection(segments, colors=_HATCH_COLOUR, linewidths=0.7, zorder=1)
    axes.add_collection(hatch_lines, autolim=False)
    hatch_lines.set_clip_path(square)


def wrap_reason(reason: str, square_inches: float) -> list[str]:
    """A reason cut into at most six lines of `square_inches` inches; a longer one ends with `...`."""
    printable = "".join(c if c.isprintable() else " " for c in reason)
    return textwrap.wrap(printable, int(15.5 * square_inches), max_lines=6, placeholder=" ...")


def figure(cells: Sequence[Cell], *, title: str, notes: str = "", compared_name: str = "") -> Figure:
    """The heatmap, with one panel for each hardware, kernel and workload.

    Args:
        title: name of the sweep.
        notes: text under the panels.
        compared_name: name of what compare_ratio is relative to.

    Raises:
        ConfigError: there are no cells, or more than _MAX_PANELS panels.
    """
    if not cells:
        todo = "plan a sweep, or draw bandwidths with: ultrabench plot comm"
        raise ConfigError("the table has no cells", todo)
    grids = _grids(cells, compared_name)
    if len(grids) > _MAX_PANELS:
        groups_text = (
            f"{counted(len(cells), 'cell')} in {len(grids)} groups of hardware, kernel, "
            "precision, routing, seq_len and gbs"
        )
        todo = "show them on a page with ultrabench report, or list them with ultrabench heatmap --json"
        raise ConfigError(f"{groups_text}; a heatmap holds at most {_MAX_PANELS} groups: {todo}")
    left_inches = max(1.25, 0.35 + 0.1 * max(min(len(cell.title), _MODEL_NAME_CHARS) for cell in cells))
    width_inches = max(7.0, left_inches + max(grid.width for grid in grids) + _RIGHT_INCHES)
    text_inches = width_inches - left_inches
    title_text = f"Best layout per cell: {title}"
    title_lines = textwrap.wrap(title_text, int(text_inches * 7.2), max_lines=3, placeholder=" ...")
    all_notes = "\n".join([notes, *_note_sentences(cells, compared_name)])
    note_lines = wrapped_lines(all_notes, int((text_inches - 0.3) * 17))
    notes_inches = 0.2 + _NOTE_LINE_INCHES * len(note_lines)
    top_inches = notes_inches + sum(_HEADER_INCHES + grid.height + _FOOTER_INCHES for grid in grids)
    height_inches = top_inches + _TITLE_LINE_INCHES * len(title_lines) + _TOP_MARGIN_INCHES
    figure_inches = np.array([width_inches, height_inches])
    figure = Figure(figsize=(width_inches, height_inches), facecolor="white")
    left, notes_top = (left_inches, notes_inches) / figure_inches
    title_top = 1 - _TOP_MARGIN_INCHES / height_inches
    figure.text(left, title_top, "\n".join(title_lines), va="top", linespacing=1.25, **_TITLE_LOOK)
    scale_max = scale_end(map(_scale_value, cells))
    for grid in grids:
        bottom_inches = top_inches - _HEADER_INCHES - grid.height
        corner = (left_inches, bottom_inches) / figure_inches
        axes = figure.add_axes((*corner, *(grid.width, grid.height) / figure_inches))
        for cell, cell_lines in zip(grid.cells, grid.cell_lines, strict=True):
            paint(axes, grid, cell, cell_lines, scale_max)
        _draw_labels(axes, grid, text_inches)
        if any(cell.shown_value is not None for cell in grid.cells):
            bar_corner = (left_inches + grid.width + 0.25, bottom_inches) / figure_inches
            bar_axes = figure.add_axes((*bar_corner, *(0.18, grid.height) / figure_inches))
            _draw_colour_bar(bar_axes, grid, scale_max)
        top_inches = bottom_inches - _FOOTER_INCHES
    figure.text(left, notes_top, "\n".join(note_lines), va="top", linespacing=1.35, **_SMALL_TEXT_LOOK)
    return figure


def _grids(cells: Sequence[Cell], compared_name: str) -> list[Grid]:
    """The panels of the figure; all cells of a panel have the same hardware, kernel and workload."""
    cells_by_panel: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        cells_by_panel[cell.panel].append(cell)
    max_columns = max(len({*map(nodes_of, panel_cells)}) for panel_cells in cells_by_panel.values())
    square_inches = 2.0 if max_columns <= 2 else 1.5
    return [Grid(panel_cells, square_inches, compared_name) for panel_cells in cells_by_panel.values()]


def _draw_colour_bar(axes: Axes, grid: Grid, scale_max: float) -> None:
    """Draws the colour bar of a panel."""
    colour_scale = ScalarMappable(Normalize(0, scale_max), _COLOUR_MAP)
    column = column_of(grid.cells[0].shown_column)
    separator = "\n" if grid.height < 2 else " "
    is_in_bytes, factor, unit_suffix = column.unit.form == Form.MEMORY, 1.0, ""
    if column.unit.is_share:
        unit_suffix = f"{separator}({column.unit.axis.symbol})"
    if is_in_bytes:
        unit_name, factor = memory_axis(scale_max)
        unit_suffix = f" ({unit_name})"
    ticks = np.array(MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(0, scale_max * factor)) / factor
    tick_label = FuncFormatter(lambda value, _: NUMBER.text(value * factor) if is_in_bytes else count(value))
    colour_bar = axes.figure.colorbar(
        colour_scale, cax=axes, ticks=ticks[ticks <= scale_max], format=tick_label
    )
    colour_bar.outline.set_visible(False)
    measured_text = "measured " * any((cell.peak_source or "").startswith("measured") for cell in grid.cells)
    label = f"{column.heading}{unit_suffix}"
    if column.name == "mfu":
        label = f"{column.heading}{peak_suffix(grid.cells[0].precision)} (% of{separator}{measured_text}peak)"
    label = "\n".join(filter(None, (label, column.better.note)))
    axes.set_ylabel(label, fontsize=9, color=GREY)
    axes.tick_params(labelsize=8, length=2, color=GREY)


def _draw_labels(axes: Axes, grid: Grid, max_title_inches: float) -> None:
    """Draws the lines between squares, the labels of nodes and models, and a title of at most `max_title_inches`."""
    num_columns, num_rows = len(grid.nodes), len(grid.model_labels)
    axes.set(frame_on=False, xlim=(0, num_columns), ylim=(num_rows, 0), yticks=[])
    axes.hlines(range(num_rows + 1), 0, num_columns, colors="white", linewidth=2.5)
    axes.vlines(range(num_columns + 1), 0, num_rows, colors="white", linewidth=2.5)
    nodes_texts = [f"{n:,}" if gpus == math.inf else f"{n:,} ({gpus:,} GPUs)" for n, gpus in grid.nodes]
    axes.set_xticks([n + 0.5 for n in range(num_columns)], nodes_texts)
    axes.set_xlabel("nodes", color=GREY)
    axes.tick_params(length=0, labelsize=10)
    for row, (model_name, size_text) in enumerate(grid.model_labels):
        name_lines = textwrap.wrap(model_name, _MODEL_NAME_CHARS, max_lines=2)
        x, y = -0.1 / grid.square_width, row + 0.5
        name_shift = 0.09 * len(name_lines) / grid.square_height
        align: dict[str, Any] = {"ha": "right", "va": "center"}
        name_y = y - (name_shift if size_text else 0)
        axes.text(x, name_y, "\n".join(name_lines), fontsize=11, fontweight="bold", **align)
        size_shift = 0.09 * size_text.count("\n") / grid.square_height
        axes.text(x, y + name_shift + size_shift, size_text, **align, **_SMALL_TEXT_LOOK)
    title = _panel_title(grid.cells[0])
    fontsize = min(9.5, 120 * max_title_inches / len(title))
    axes.text(0, -0.16 / grid.square_height, title, fontsize=fontsize, color=GREY, va="center")


def _model_label(cell: Cell) -> tuple[str, str]:
    """The name of the cell's model, and as a text its number of parameters and how many of them a token passes."""
    size_text = "" if cell.num_params is None else f"{count(cell.num_params)} params"
    active_text = f"\n{count(cell.num_active_params or 0)} active" if cell.has_experts else ""
    return cell.title, size_text + active_text


def _panel_title(cell: Cell) -> str:
    """The title of the panel of a cell: hardware, kernel and workload."""
    precision_text = f" ({cell.precision})" if cell.precision else ""
    kernel_text, routing_label = f"kernel {cell.kernel or '?'}{precision_text}", routing_text(cell.routing)
    title_parts = [cell.hardware or "unknown hardware", kernel_text, *filter(None, [routing_label])]
    if cell.seq_len is not None:
        title_parts.append(f"seq_len {cell.seq_len:,}")
    if cell.gbs is not None:
        num_sequences = cell.gbs / cell.nodes if cell.scaling == WEAK else cell.gbs
        tokens_text = "" if cell.seq_len is None else f" ({count(num_sequences * cell.seq_len)} tokens)"
        title_parts.append(f"{cell.panel[-1]}{tokens_text}")
    return " | ".join(title_parts)


def _note_sentences(cells: Sequence[Cell], compared_name: str) -> Iterator[str]:
    """The sentences under the figure that its cells give; compare_ratio is relative to `compared_name`."""
    cells_text = counted(len(cells), "cell")
    if formula := formula_of_cells(cells):
        yield f"{formula}."
    if num_compared := sum(cell.compare_ratio is not None for cell in cells):
        scope_text = f"Factors such as 1.00x (in {num_compared} of {cells_text})"
        yield f"{scope_text}: {column_of(RATE).heading} relative to the best of {compared_name}."
    difference_texts = {
        f"{fact_name} {other_value or 'unknown'} instead of {getattr(cell, fact_name) or 'unknown'}"
        for cell in cells
        for fact_name, other_value in cell.compare_differing.items()
    }
    if difference_texts:
        yield f"{compared_name} has {', '.join(sorted(difference_texts))}."
    if num_other_best := sum(cell.compare_layout is not None for cell in cells):
        scope_text = f"In {num_other_best} of {cells_text}, marked by a corner"
        yield f"{scope_text}, {compared_name} has a different best layout, shown after `other:`."
    if num_tied := sum(bool(cell.as_good_as_best) for cell in cells):
        yield f"In {num_tied} of {cells_text} several layouts tie for best: their 95 % intervals overlap."
    if num_environments := sum(cell.environment is not None for cell in cells):
        yield (
            f"In {num_environments} of {cells_text} layouts were measured in several environments; "
            "the square names the environment of the best."
        )
    if suspect_cells := [cell for cell in cells if cell.suspect]:
        scope_text = f"In {len(suspect_cells)} of {cells_text} the layout shown is suspect"
        yield (
            f"{scope_text}, such as {suspect_cells[0].title} on "
            f"{counted(suspect_cells[0].nodes, 'node')}: {suspect_cells[0].suspect}."
        )
    wide_cells = [cell for cell in cells if cell.ci_reached is False and cell.step_time_ci95_rel is not None]
    if wide_cells:
        widest_cell = max(wide_cells, key=lambda cell: cell.step_time_ci95_rel or 0.0)
        scope_text = f"{widest_cell.title} on {counted(widest_cell.nodes, 'node')}"
        interval_text = f"{too_wide(False, widest_cell.step_time_ci95_rel)} ({scope_text})"
        yield (
            f"In {len(wide_cells)} of {cells_text} the interval of the best layout is wider than its "
            f"target, up to {interval_text}."
        )
