"""Figures as files: PNG, SVG or PDF, the same bytes for the same input."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ultrabench.analysis.output import write_bytes
from ultrabench.errors import ConfigError, unknown_name

SUFFIXES = (".png", ".svg", ".pdf")

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial"],
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "ultrabench",
    "text.parse_math": False,
}
_METADATA: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def write_picture(make: Callable[[], Figure], path: Path) -> None:
    """Writes the figure that `make` gives, in our style.

    Raises:
        ConfigError: an unknown suffix, before anything is drawn.
        SweepFolderError: the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(unknown_name("kind of picture", path.suffix or path.name, SUFFIXES))
    buffer = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        make().savefig(buffer, format=suffix[1:], dpi=160, metadata=_METADATA[suffix])
    write_bytes(path, buffer.getvalue())
