"""What the kernel did for want of memory on this host."""

import re
from pathlib import Path


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """How often the kernel has killed for want of memory in this process's memory cgroup.

    A run's ranks share the cgroup of their agent, so that kills in other jobs of the host do not count.
    Where there is no such counter it is that of the whole host; 0 where nobody tells.
    Sources: docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), cgroup-v1/memory.html
    (memory.oom_control).
    """
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            file = cgroups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = cgroups / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        if match := re.search(r"^oom_kill (\d+)$", _read(file), re.MULTILINE):
            return int(match[1])
    match = re.search(r"^oom_kill (\d+)$", _read(proc / "vmstat"), re.MULTILINE)
    return int(match[1]) if match else 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
