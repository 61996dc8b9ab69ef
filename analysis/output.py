"""Files that people ask for with -o: whole or not at all."""

from pathlib import Path

from ultrabench.errors import SweepFolderError
from ultrabench.store.folder import write_whole


def write_bytes(path: Path, data: bytes) -> None:
    """Writes `data` beside `path` and renames it, so that no reader sees half a file.

    Raises:
        SweepFolderError: it cannot be written.
    """
    try:
        write_whole(path, data)
    except OSError as error:
        raise SweepFolderError(
            f"cannot write {path}: {error.strerror}; choose another with -o FILE"
        ) from error
