"""Renders a figure as PNG, SVG or PDF; the same figure always gives the same bytes."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ultrabench.errors import require_known

GREY = "#5c5c5c"
"""Colour of the notes and of the labels of axes."""

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
    require_known("kind of picture", _METADATA, suffix or path.name)
    buffer = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        make().savefig(buffer, format=suffix[1:], dpi=160, metadata=_METADATA[suffix])
    return buffer.getvalue()
