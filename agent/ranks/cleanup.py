"""Removes the files that dead ranks have left in /dev/shm, where they use the memory of the host."""

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
"""Names of files of torch, NCCL, Gloo, POSIX semaphores, Python, CUDA, OpenMP, NVSHMEM, UCX and Open MPI.

Files with other names are kept, since they may be data of the user.
"""


class SharedMemoryCleanup:
    """Removes the files that the runs of one agent leave; files that are older than the agent stay."""

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._before = {(entry.name, entry.inode()) for entry in _own_files(folder)}

    def remove(self) -> list[str]:
        """Removes the new files that no living process has open or mapped; returns their names."""
        left = {e.name for e in _own_files(self._folder) if (e.name, e.inode()) not in self._before}
        # Files are listed before their users are looked for, so that a file made in between is not removed.
        unused = left - _in_use(self._folder) if left else set[str]()
        for name in unused:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
        return sorted(unused)


def _own_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The files of this user in `folder` with a name of KNOWN."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            ours = entry.is_file(follow_symlinks=False) and entry.stat().st_uid == os.getuid()
            if ours and any(fnmatchcase(entry.name, pattern) for pattern in KNOWN):
                yield entry


def _in_use(folder: Path) -> set[str]:
    """Names of the files in `folder` that some process has open or mapped."""
    start = f"{folder}/"
    paths = (path for process in Path("/proc").glob("[0-9]*") for path in _files_of(process))
    return {path.removeprefix(start) for path in paths if path.startswith(start)}


def _files_of(process: Path) -> Iterator[str]:
    """Paths that a process has mapped or open, as far as this user may see them."""
    with contextlib.suppress(OSError):
        lines = (process / "maps").read_text(errors="replace").splitlines()
        yield from (fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    with contextlib.suppress(OSError):
        for link in os.scandir(process / "fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(link.path)
