"""How many processes Linux has killed for lack of memory, as its counters say."""

import re
from pathlib import Path

_COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def num_oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes Linux has killed for lack of memory in the memory cgroup of this process.

    The ranks of a run, and their children, share the cgroup of their agent, so that kills in other jobs of the host do
    not count. Where the cgroup has no such counter, that of the whole host is read; without any the answer is 0.
    Sources: docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), cgroup-v1/memory.html (memory.oom_control).
    """
    entries = [line.split(":", 2) for line in _read_text(proc / "self/cgroup").splitlines()]
    v2_files = [f"{cgroups}{path}/memory.events" for _, controllers, path in entries if not controllers]
    v1_paths = (path for _, controllers, path in entries if "memory" in controllers.split(","))
    v1_files = [f"{cgroups}/memory{path}/memory.oom_control" for path in v1_paths]
    for file in (*v2_files, *v1_files, f"{proc}/vmstat"):
        if match := _COUNTER.search(_read_text(file)):
            return int(match[1])
    return 0


def _read_text(path: str | Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
