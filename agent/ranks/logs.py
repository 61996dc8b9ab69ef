"""Which logs of a run are kept: the last bytes of those that went well, both ends of those that failed."""

import os
import shutil
from pathlib import Path

from ultrabench.rank_report import PROFILE, read_part
from ultrabench.store.folder import write_whole

EVIDENCE_FOLDER = "hang_evidence"
"""Folder of a run, and of its logs, for what was found when it hung: raw stacks and dumps."""
PART_BYTES = 2**20
TAIL_BYTES = 64 * 1024
KEPT = ("rank*.log", f"{EVIDENCE_FOLDER}/*")
"""Files of a failed run that are kept."""
MAX_FILES = 1000
"""Files kept for each pattern of KEPT."""


def copy_logs(run: Path, to: Path, max_bytes: int) -> None:
    """Copies the logs of a failed run, each cut to `max_bytes`."""
    for log in (log for pattern in KEPT for log in sorted(run.glob(pattern))[:MAX_FILES]):
        copy_ends(log, to / log.relative_to(run), max_bytes)


def join_tails(run: Path, to: Path, ranks: range) -> None:
    """Writes the ends of the logs of `ranks` into one file."""
    tails = (f"--- rank {rank}\n{read_tail(run / f'rank{rank}.log', TAIL_BYTES)}" for rank in ranks)
    to.mkdir(parents=True, exist_ok=True)
    write_whole(to / "node0.log", "".join(tails))


def copy_profile(run: Path, to: Path) -> None:
    """Copies what ranks have seen when they looked inside themselves."""
    if (run / PROFILE).is_dir():
        shutil.copytree(run / PROFILE, to / PROFILE, dirs_exist_ok=True)


def read_tail(path: Path, size: int) -> str:
    """The last `size` bytes of a text file; empty when there is none."""
    return read_part(path, max(0, file_size(path) - size), size).decode(errors="replace")


def copy_ends(source: Path, target: Path, max_bytes: int) -> None:
    """Copies a file; of one with more than `max_bytes` both ends and, between them, how much is left out.

    The first lines of a log tell how a program was set up, the last ones how it ended.

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
    """Bytes of a file; 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
