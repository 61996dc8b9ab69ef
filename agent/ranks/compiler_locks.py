"""The locks in the caches of compilers that exist after a run, for which its ranks may have waited without a word.

A compiler that is killed leaves its lock. Where the lock is the file itself, as in torch's C++ extensions, which
DeepSpeed builds, every later run waits for it without end.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ultrabench.processes import own_name

_HELD = re.compile(r" ([0-9a-f]+):([0-9a-f]+):(\d+) ")
"""Matches the device and the inode in a line of /proc/locks."""
MAX_NAMED_LOCKS = 3
"""Number of locks that a message names."""


class CompilerCache(NamedTuple):
    """Where a compiler keeps what it has built, and its locks."""

    variable: str
    """The variable that names the folder."""
    default: str
    """The folder without this variable; empty for none."""
    lock_patterns: tuple[str, ...]
    """Patterns of the locks in the folder."""
    locks_by_existence: bool
    """Whether a lock is held as long as its file exists, whoever made it; other locks end with their process."""


_CACHES = (
    CompilerCache("TORCH_EXTENSIONS_DIR", "{cache}/torch_extensions", ("*/lock", "*/*/lock"), True),
    CompilerCache("TORCHINDUCTOR_CACHE_DIR", "{tmp}/torchinductor_{user}", ("locks/*.lock",), False),
    CompilerCache("TRITON_CACHE_DIR", "{home}/.triton/cache", ("*.lock", "*/lock", "*/*.lock"), False),
    CompilerCache("JAX_COMPILATION_CACHE_DIR", "", ("*.lock", ".lockfile"), False),
)


def compiler_locks(env: Mapping[str, str]) -> list[str]:
    """The paths of the locks of compilers for which programs with these variables wait, the newest first.

    To be called when no process of the run is left. Files of locks that nobody holds are no sign, since many stay
    after a build that has succeeded.
    """
    path_by_time, held_files = list[tuple[float, str]](), _held_files()
    for cache, path in _lock_files(env):
        with contextlib.suppress(OSError):
            status = path.stat()
            file_id = os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
            # A file system without locks makes the library of locks write its process into the file instead.
            if cache.locks_by_existence or status.st_size > 0 or file_id in held_files:
                path_by_time.append((status.st_mtime, str(path)))
    return [path for _, path in sorted(path_by_time, reverse=True)]


def locks_text(locks: list[str]) -> str:
    """What to do about these locks, for the message of a run that has not come to its first step."""
    paths_text = ", ".join(locks[:MAX_NAMED_LOCKS])
    more_text = f" and {len(locks) - MAX_NAMED_LOCKS:,} more" if len(locks) > MAX_NAMED_LOCKS else ""
    fact = f"programs wait for the locks of compilers, which exist: {paths_text}{more_text}"
    return f"{fact}; if nothing compiles now, a killed run has left them: remove them"


def _lock_files(env: Mapping[str, str]) -> Iterator[tuple[CompilerCache, Path]]:
    home = env.get("HOME") or str(Path.home())
    places = {
        "home": home,
        "cache": env.get("XDG_CACHE_HOME") or f"{home}/.cache",
        "tmp": env.get("TMPDIR") or tempfile.gettempdir(),
        "user": env.get("USER") or own_name(),
    }
    for cache in _CACHES:
        folder = env.get(cache.variable) or cache.default.format(**places)
        for pattern in cache.lock_patterns if folder else ():
            with contextlib.suppress(OSError):
                yield from ((cache, path) for path in Path(folder).glob(pattern))


def _held_files() -> set[tuple[int, int, int]]:
    """Major and minor device number and inode of each file that a living process has locked, as Linux lists them.

    A line is such as `1: FLOCK  ADVISORY  WRITE 4711 08:01:42 0 EOF`, where the device is hexadecimal.
    """
    try:
        matches = _HELD.finditer(Path("/proc/locks").read_text())
    except OSError:
        return set()
    return {(int(match[1], 16), int(match[2], 16), int(match[3])) for match in matches}
