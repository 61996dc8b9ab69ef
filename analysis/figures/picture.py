"""Renders a figure as PNG, SVG or PDF; the same figure always gives the same bytes."""

import io
import textwrap
import warnings
from collections.abc import Callable, Iterator
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
EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}
"""Options of bars and markers that keep them apart."""

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial"],
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "ultrabench",
    "text.parse_math": False,
}
_METADATA: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def render(make: Callable[[], Figure], path: Path) -> bytes:
    """The bytes of the file `path` with the figure that `make` draws; the suffix of `path` gives the format.

    Raises:
        ConfigError: `path` ends in an unknown suffix; then `make` is not called.
    """
    suffix = path.suffix.lower()
    if suffix not in _METADATA:
        todo = "give a file with one of these endings"
        raise ConfigError(f"-o {path} does not end in .png, .svg or .pdf", todo)
    buffer = io.BytesIO()
    with styled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        figure = make()
        _fix_places(figure)
        figure.set_dpi(160)
        canvas: Any = get_registered_canvas_class(suffix[1:])(figure)  # savefig draws everything twice
        getattr(canvas, f"print_{suffix[1:]}")(buffer, metadata=_METADATA[suffix])
    return buffer.getvalue()


@contextmanager
def styled() -> Iterator[None]:
    """Draws with our fonts and settings, whatever those of the user are, which are restored afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, wrapped to `width` characters between words; names are not cut at their hyphens."""
    # A space that does not break keeps a number beside its percent sign.
    parts = (part.replace(" %", "\xa0%") for part in text.splitlines())
    lines = (line for part in parts for line in textwrap.wrap(part, width, break_on_hyphens=False))
    return [line.replace("\xa0", " ") for line in lines]


def _fix_places(figure: Figure) -> None:
    """Lays the figure out and rounds all positions, since the last digits of the layout solver vary."""
    if (engine := figure.get_layout_engine()) is None:
        return
    engine.execute(figure)
    figure.set_layout_engine("none")
    for part in figure.subfigs:
        box = part.bbox_relative
        box.p0, box.p1 = np.round(box.p0, 4), np.round(box.p1, 4)
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position().bounds, 4))
