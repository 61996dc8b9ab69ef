"""What is kept of logs: their last bytes, or copies of bounded size with both ends."""

import os
from pathlib import Path

from ultrabench.report import read_part

PART_BYTES = 2**20


def read_tail(path: Path, size: int) -> str:
    """The last `size` bytes of a text file; empty when there is none."""
    return read_part(path, max(0, _size(path) - size), size).decode(errors="replace")


def copy_ends(source: Path, target: Path, most: int) -> None:
    """Copies a file; where it has more than `most` bytes only both ends, and a line between that counts the rest.

    The first lines of a log tell how a program was set up, the last ones how it ended.

    Raises:
        OSError: the copy cannot be written.
    """
    size = _size(source)
    left_out = size - most
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as copy:
        for start, end in [(0, size)] if left_out <= 0 else [(0, most // 2), (size - most // 2, size)]:
            if start:
                copy.write(f"\n--- ultrabench left out {start - most // 2} bytes here ---\n".encode())
            for at in range(start, end, PART_BYTES):
                copy.write(read_part(source, at, min(PART_BYTES, end - at)))


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
