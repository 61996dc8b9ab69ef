"""The files that a user asked for with -o: tables, pages and figures."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ultrabench.errors import SweepFolderError
from ultrabench.store.folder import write_whole

if TYPE_CHECKING:  # this would be a slow import
    from matplotlib.figure import Figure


def draw(path: Path, make_figure: "Callable[[], Figure]", other_suffixes: Sequence[str] = ()) -> None:
    """Writes the figure that `make_figure` draws; the suffix of `path` gives the format.

    Args:
        other_suffixes: suffixes for which the command writes another file, which the message names, too.
    """
    from ultrabench.analysis.figures.picture import render

    write_result(path, render(make_figure, path, other_suffixes))


def write_result(path: Path, content: bytes) -> None:
    """Writes a file that the user asked for, whole or not at all."""
    try:
        write_whole(path, content)
    except OSError as error:
        reason = error.strerror if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise SweepFolderError(f"cannot write {path}: {reason}; choose another -o FILE") from error
