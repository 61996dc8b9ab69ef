"""Renders a figure as PNG, SVG or PDF; the same figure always gives the same bytes."""

import io
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.figure import Figure

from ultrabench.errors import ConfigError

GREY = "#5c5c5c"
"""Colour of the notes and of the labels of axes."""
DARK = "#1b1b1b"
"""Colour of lines and markers that stand out."""
EDGE_LOOK: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}
"""Options of bars and markers that keep them apart."""

_RC_PARAMS: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial"],
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "ultrabench",
    "text.parse_math": False,
}
_METADATA: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""Suffix of a file -> the metadata of matplotlib that are left out, since the time would change the bytes."""


def render(make_figure: Callable[[], Figure], path: Path, other_suffixes: Sequence[str] = ()) -> bytes:
    """The bytes of the file `path` with the figure that `make_figure` draws; the suffix of `path` gives the format.

    Args:
        other_suffixes: further suffixes that the message about an unknown one names.

    Raises:
        ConfigError: `path` ends in an unknown suffix; then `make_figure` is not called.
    """
    suffix = path.suffix.lower()
    if suffix not in _METADATA:
        todo = "give a file with one of these endings"
        raise ConfigError(
            f"-o {path} does not end in {', '.join((*other_suffixes, '.png'))}, .svg or .pdf", todo
        )
    buffer = io.BytesIO()
    with figure_style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        figure = make_figure()
        _fix_positions(figure)
        figure.set_dpi(160)
        canvas: Any = get_registered_canvas_class(suffix[1:])(figure)  # savefig draws everything twice
        getattr(canvas, f"print_{suffix[1:]}")(buffer, metadata=_METADATA[suffix])
    return buffer.getvalue()


@contextmanager
def figure_style() -> Iterator[None]:
    """Draws with our fonts and settings, whatever those of the user are, which are restored afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC_PARAMS)
        yield


def wrapped_lines(text: str, max_chars: int) -> list[str]:
    """The lines of a text, wrapped to `max_chars` characters between words; names are not cut at their hyphens."""
    # A space that does not break keeps a number beside its percent sign.
    wrapper = textwrap.TextWrapper(max_chars, break_on_hyphens=False)
    paragraphs = text.replace(" %", "\xa0%").splitlines()
    return [line.replace("\xa0", " ") for paragraph in paragraphs for line in wrapper.wrap(paragraph)]


def _fix_positions(figure: Figure) -> None:
    """Lays the figure out and rounds all positions, since the last digits of the layout solver vary."""
    if (layout_engine := figure.get_layout_engine()) is None:
        return
    layout_engine.execute(figure)
    figure.set_layout_engine("none")
    for subfigure in figure.subfigs:
        relative_box = subfigure.bbox_relative
        relative_box.p0, relative_box.p1 = np.round(relative_box.p0, 4), np.round(relative_box.p1, 4)
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position().bounds, 4))
