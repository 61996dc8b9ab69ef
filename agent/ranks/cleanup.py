"""What a run leaves on its node: the logs of its ranks are kept, its files in /dev/shm are removed."""

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from ultrabench.column import BYTES
from ultrabench.rank_report import TRACE_PHASE, read_or_nothing
from ultrabench.store.folder import write_whole

EVIDENCE_FOLDER = "hang_evidence"
"""Folder for raw stacks and dumps of a run that hangs, inside its node-local folder and among its logs."""
COPY_CHUNK_BYTES = 2**20
"""Bytes that are copied in one step."""
MAX_TEXT_BYTES = 2**22
"""Largest number of bytes that are read from a text file."""
LOG_TAIL_BYTES = 64 * 1024
"""Bytes of each log of a good run that are kept."""
JOINED_LOG, RANK_HEADING = "node0.log", "--- rank "
"""Name of the file with the logs of a good run, and how the line above each of them begins."""
LEFT_OUT = "--- ultrabench left out "
"""How the line begins that stands in place of the middle of a log."""
LOG_FILE_PATTERNS = ("rank*.log", f"{EVIDENCE_FOLDER}/*")
"""Files of a failed run that are kept, each up to `measure.log_mib_per_rank`."""
TRACE_FILE_PATTERNS = (f"{TRACE_PHASE}/*", f"{TRACE_PHASE}/*/*")
"""Files of a traced run that are kept."""
MAX_TRACE_BYTES = 2**30
"""Size in bytes of the largest trace file that is kept; a larger one cut short could not be read."""
MAX_FILES = 1000
"""Largest number of files that are kept for each pattern."""
SHARED_MEMORY_FOLDER = Path("/dev/shm")
SHARED_MEMORY_PATTERNS = (
    "torch_*", "nccl-*", "gloo*", "sem.*", "psm_*", "pym-*", "cuda.shm.*", "__KMP_REGISTERED_LIB_*", "nvshmem*",
    "ucx_shm_*", "vader_segment.*", "sm_segment.*",
)  # fmt: skip
"""Names of files of torch, NCCL, Gloo, POSIX semaphores, Python, CUDA, OpenMP, NVSHMEM, UCX and Open MPI.

Files with other names are kept, since they may be data of the user.
"""


class SharedMemoryCleanup:
    """Removes the files that the runs of one agent leave; files that are older than the agent stay."""

    def __init__(self, folder: Path = SHARED_MEMORY_FOLDER) -> None:
        self._folder = folder
        self._older_ids = {(entry.name, entry.inode()) for entry in _own_files(folder)}
        """Names and inodes of the files that are older than the agent."""

    def remove(self) -> list[str]:
        """Removes the new files that no living process has open or mapped; returns their names."""
        new_names = {e.name for e in _own_files(self._folder) if (e.name, e.inode()) not in self._older_ids}
        # Files are listed before their users are looked for, so that a file made in between is not removed.
        unused_names = new_names - _file_names_in_use(self._folder) if new_names else set[str]()
        for file_name in unused_names:
            with contextlib.suppress(OSError):
                (self._folder / file_name).unlink()
        return sorted(unused_names)


def _own_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The files of this user in `folder` with a name of SHARED_MEMORY_PATTERNS."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            is_own = entry.is_file(follow_symlinks=False) and entry.stat().st_uid == os.getuid()
            if is_own and any(fnmatchcase(entry.name, pattern) for pattern in SHARED_MEMORY_PATTERNS):
                yield entry


def _file_names_in_use(folder: Path) -> set[str]:
    """Names of the files in `folder` that some process has open or mapped."""
    folder_prefix = f"{folder}/"
    open_paths = (path for proc_folder in Path("/proc").glob("[0-9]*") for path in _open_paths(proc_folder))
    return {path.removeprefix(folder_prefix) for path in open_paths if path.startswith(folder_prefix)}


def _open_paths(proc_folder: Path) -> Iterator[str]:
    """Paths that a process has mapped or open, as far as this user may see them."""
    with contextlib.suppress(OSError):
        map_lines = (proc_folder / "maps").read_text(errors="replace").splitlines()
        yield from (fields[5] for line in map_lines if len(fields := line.split(maxsplit=5)) == 6)
    with contextlib.suppress(OSError):
        for link in os.scandir(proc_folder / "fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(link.path)


def copy_logs(run_folder: Path, target_folder: Path, max_bytes: int) -> None:
    """Copies the logs of a failed run, at most `max_bytes` of each."""
    for log_path, _ in _regular_files(run_folder, LOG_FILE_PATTERNS):
        copy_ends(log_path, target_folder / log_path.relative_to(run_folder), max_bytes)


def copy_trace(run_folder: Path, target_folder: Path) -> list[str]:
    """Copies the trace of a run; returns the names of files that were left out because they are too large."""
    bytes_by_path = dict(_regular_files(run_folder, TRACE_FILE_PATTERNS))
    for path, num_bytes in bytes_by_path.items():
        if num_bytes <= MAX_TRACE_BYTES:
            copy_ends(path, target_folder / path.relative_to(run_folder), MAX_TRACE_BYTES)
    return [path.name for path, num_bytes in bytes_by_path.items() if num_bytes > MAX_TRACE_BYTES]


def _regular_files(run_folder: Path, patterns: Iterable[str]) -> Iterator[tuple[Path, int]]:
    """The regular files below `run_folder` that match, and their sizes; symbolic links are not followed."""
    for path in (path for pattern in patterns for path in sorted(run_folder.glob(pattern))[:MAX_FILES]):
        parents = [parent for parent in path.parents if parent.is_relative_to(run_folder)]
        file_status = path.lstat()
        if stat.S_ISREG(file_status.st_mode) and not any(parent.is_symlink() for parent in parents):
            yield path, file_status.st_size


def join_tails(run_folder: Path, target_folder: Path, ranks: Iterable[int]) -> None:
    """Writes the ends of the logs of `ranks` to one file, each below a line that begins with RANK_HEADING."""
    tail_by_rank = {rank: read_tail(run_folder / f"rank{rank}.log", LOG_TAIL_BYTES) for rank in ranks}
    tails = (
        f"{RANK_HEADING}{rank}\n{tail}{'' if tail.endswith(chr(10)) or not tail else chr(10)}"
        for rank, tail in tail_by_rank.items()
    )
    target_folder.mkdir(parents=True, exist_ok=True)
    write_whole(target_folder / JOINED_LOG, "".join(tails))


def whole_logs(log_folder: Path) -> dict[int, str]:
    """Rank -> its log, for the ranks whose kept log is whole: nothing of it was left out."""
    logs = {}
    for path in log_folder.glob("rank*.log"):
        log = path.read_text(errors="replace")
        if (number := path.stem.removeprefix("rank")).isdecimal() and LEFT_OUT not in log:
            logs[int(number)] = log
    if logs or not (joined_path := log_folder / JOINED_LOG).is_file():
        return logs
    sections = re.split(
        rf"^{RANK_HEADING}(\d+)\n", joined_path.read_text(errors="replace"), flags=re.MULTILINE
    )
    numbers, logs_in_order = sections[1::2], sections[2::2]
    if numbers != [str(rank) for rank in range(len(numbers))]:  # a program has printed such a line itself
        return {}
    return {rank: log for rank, log in enumerate(logs_in_order) if len(log.encode()) < LOG_TAIL_BYTES}


def read_tail(path: Path, max_bytes: int) -> str:
    """The last `max_bytes` of a text file; empty if there is no file."""
    return read_or_nothing(path, max(0, file_size_bytes(path) - max_bytes), max_bytes).decode(
        errors="replace"
    )


def read_text(path: str | Path) -> str:
    """The first MAX_TEXT_BYTES of a text file, or of a file in /proc; empty if there is no file."""
    return read_or_nothing(path, 0, MAX_TEXT_BYTES).decode(errors="replace")


def copy_ends(source_path: Path, target_path: Path, max_bytes: int) -> None:
    """Copies a file; if it has more than `max_bytes`, only both ends, and a line that says how much is left out.

    The first lines of a log tell how a program was set up, the last lines how it ended.

    Raises:
        OSError: the copy cannot be written.
    """
    num_bytes, half_bytes = file_size_bytes(source_path), max_bytes // 2
    both_ends = [(0, half_bytes), (num_bytes - half_bytes, num_bytes)]
    target_path.parent.mkdir(parents=True, exist_ok=True)
    with target_path.open("wb") as copy:
        for start, end in [(0, num_bytes)] if num_bytes <= max_bytes else both_ends:
            if start:
                copy.write(f"\n{LEFT_OUT}{start - half_bytes} bytes here ---\n".encode())
            for offset in range(start, end, COPY_CHUNK_BYTES):
                copy.write(read_or_nothing(source_path, offset, min(COPY_CHUNK_BYTES, end - offset)))


MIN_FREE_BYTES = 64 << 20
"""Free bytes that a node needs before a run, in shared memory and in the folder of its reports and logs."""
FULL_BELOW_BYTES = 1 << 20
"""Free bytes below which a folder counts as full; a rank that then ends with an error may have failed because of it."""


def space_shortage(log_folder: Path, min_bytes: int) -> str | None:
    """Which of `log_folder` and shared memory has less than `min_bytes` free, and how much; None if none has."""
    for folder in (log_folder, SHARED_MEMORY_FOLDER):
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            free_bytes, size_bytes = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
            if free_bytes < min(min_bytes, size_bytes // 2):
                return f"{BYTES.text(free_bytes)} free in {folder}"
    return None


def file_size_bytes(path: str | Path) -> int:
    """Size of a file in bytes; 0 if there is no file."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0
