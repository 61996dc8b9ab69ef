"""The logs of a run that are kept: the end of those of a good run, both ends of those of a failed run."""

import os
import shutil
from pathlib import Path

from ultrabench.rank_report import PROFILE, read_part
from ultrabench.store.folder import write_whole

EVIDENCE_FOLDER = "hang_evidence"
"""Folder for the raw stacks and dumps of a run that hangs, inside its node-local folder and among its logs."""
PART_BYTES = 2**20
"""Bytes that are copied at once."""
TAIL_BYTES = 64 * 1024
"""Bytes of each log of a good run that are kept."""
KEPT = ("rank*.log", f"{EVIDENCE_FOLDER}/*")
"""Files of a failed run that are kept."""
MAX_FILES = 1000
"""Largest number of files that are kept for each pattern of KEPT."""


def copy_logs(run: Path, to: Path, max_bytes: int) -> None:
    """Copies the logs of a failed run, at most `max_bytes` of each."""
    for log in (log for pattern in KEPT for log in sorted(run.glob(pattern))[:MAX_FILES]):
        copy_ends(log, to / log.relative_to(run), max_bytes)


def join_tails(run: Path, to: Path, ranks: range) -> None:
    """Writes the ends of the logs of `ranks` to one file."""
    tails = (f"--- rank {rank}\n{read_tail(run / f'rank{rank}.log', TAIL_BYTES)}" for rank in ranks)
    to.mkdir(parents=True, exist_ok=True)
    write_whole(to / "node0.log", "".join(tails))


def copy_profile(run: Path, to: Path) -> None:
    """Copies the profiles of the ranks, if there are any."""
    if (run / PROFILE).is_dir():
        shutil.copytree(run / PROFILE, to / PROFILE, dirs_exist_ok=True)


def read_tail(path: Path, size: int) -> str:
    """The last `size` bytes of a text file; empty if there is no file."""
    return read_part(path, max(0, file_size(path) - size), size).decode(errors="replace")


def copy_ends(source: Path, target: Path, max_bytes: int) -> None:
    """Copies a file; if it has more than `max_bytes`, both its ends and a line that says how much is left out.

    The first lines of a log tell how a program was set up, the last lines how it ended.

    Raises:
        OSError: the copy cannot be written.
    """
    size = file_size(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    half = max_bytes // 2
    with target.open("wb") as copy:
        for start, end in [(0, size)] if size <= max_bytes else [(0, half), (size - half, size)]:
            if start:
                copy.write(f"\n--- ultrabench left out {start - half} bytes here ---\n".encode())
            for at in range(start, end, PART_BYTES):
                copy.write(read_part(source, at, min(PART_BYTES, end - at)))


def file_size(path: str | Path) -> int:
    """Size of a file in bytes; 0 if there is no file."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
