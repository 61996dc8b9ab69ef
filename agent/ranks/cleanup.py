"""Removes files that dead ranks have left in shared memory, where they use up the memory of the host."""

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


class SharedMemoryCleanup:
    """Removes what the runs of one agent leave; files that were there when the agent started stay."""

    def __init__(self, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._before = {(entry.name, entry.inode()) for entry in _own_files(folder)}

    def remove(self) -> list[str]:
        """Removes the files that no living process has open or mapped; returns their names."""
        left = {e.name for e in _own_files(self._folder) if (e.name, e.inode()) not in self._before}
        # The files are listed first and their users looked for then: a file made in between is not listed.
        unused = left - _in_use(self._folder) if left else set[str]()
        for name in unused:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
        return sorted(unused)


def _own_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Files of this user with a known name."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            ours = entry.is_file(follow_symlinks=False) and entry.stat().st_uid == os.getuid()
            if ours and any(fnmatchcase(entry.name, pattern) for pattern in KNOWN):
                yield entry


def _in_use(folder: Path) -> set[str]:
    """Names in `folder` that some process has open or mapped."""
    start = f"{folder}/"
    paths = (path for process in Path("/proc").glob("[0-9]*") for path in _files_of(process))
    return {path.removeprefix(start) for path in paths if path.startswith(start)}


def _files_of(process: Path) -> Iterator[str]:
    """Paths that a process has mapped or open, as far as this user may see."""
    with contextlib.suppress(OSError):
        lines = (process / "maps").read_text(errors="replace").splitlines()
        yield from (fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    with contextlib.suppress(OSError):
        for link in os.scandir(process / "fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(link.path)
