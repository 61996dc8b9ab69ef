"""Files that people ask for with -o: whole or not at all."""

import contextlib
import os
from pathlib import Path

from ultrabench.errors import SweepFolderError


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` beside `path` and renames it, so that no reader sees half a file.

    Raises:
        SweepFolderError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise SweepFolderError(
            f"cannot write {path}: {error.strerror}; choose another with -o FILE"
        ) from error
