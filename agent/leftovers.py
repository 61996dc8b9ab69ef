"""Files that dead ranks have left in shared memory, where they use up the memory of the host."""

import contextlib
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
KNOWN = (
    "torch_*", "nccl-*", "gloo*", "sem.*", "psm_*", "pym-*", "cuda.shm.*", "__KMP_REGISTERED_LIB_*", "nvshmem*",
    "ucx_shm_*", "vader_segment.*", "sm_segment.*",
)  # fmt: skip
"""Names that torch, NCCL, Gloo, POSIX semaphores, Python, CUDA, OpenMP, NVSHMEM, UCX and Open MPI give.

Other names are left alone: data that the user keeps there must not be lost.
"""


class Leftovers:
    """Of the runs of one agent: what was there when it started stays."""

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._before = {(entry.name, entry.inode()) for entry in _own_files(folder)}

    def remove(self) -> list[str]:
        """Removes what no living process has open or mapped; the names."""
        left = [e.name for e in _own_files(self._folder) if (e.name, e.inode()) not in self._before]
        # Listed before it is looked who uses them, so that whoever made one in between counts.
        unused = sorted(set(left) - _in_use(self._folder)) if left else []
        for name in unused:
            try:
                (self._folder / name).unlink()
            except OSError:
                continue
        return unused


def _own_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Files of this user with a known name."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            ours = entry.is_file(follow_symlinks=False) and entry.stat().st_uid == os.getuid()
        except OSError:
            continue
        if ours and any(fnmatchcase(entry.name, pattern) for pattern in KNOWN):
            yield entry


def _in_use(folder: Path) -> set[str]:
    """Names in `folder` that some process has open or mapped."""
    start, found = f"{folder}/", set[str]()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            paths = [*_mapped(Path(entry.path)), *_opened(Path(entry.path))]
            found |= {path.removeprefix(start) for path in paths if path.startswith(start)}
    return found


def _mapped(process: Path) -> list[str]:
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6]


def _opened(process: Path) -> list[str]:
    found = []
    try:
        for link in os.scandir(process / "fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(link.path))
    except OSError:
        return found
    return found
