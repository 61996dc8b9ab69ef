"""The GPUs of this node as the driver's own tool tells: which are ours, and who else is on them."""

import contextlib
import os
import pwd
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PATIENCE_S = 10.0


class VisibleGpu(NamedTuple):
    """A GPU that the ranks of this node may use; its bus as nvidia-smi writes it, 00000000:1B:00.0."""

    number: str
    uuid: str
    bus_id: str


def visible_gpus() -> list[VisibleGpu]:
    """The GPUs of CUDA_VISIBLE_DEVICES (indices or UUIDs) in its order; unset: all, by bus."""
    gpus = [VisibleGpu(*row) for row in _ask("--query-gpu=index,uuid,pci.bus_id") if len(row) == 3]
    words, chosen = os.environ.get("CUDA_VISIBLE_DEVICES"), list[VisibleGpu]()
    if words is None:
        return gpus
    for word in (w.strip() for w in words.split(",")):
        found = [g for g in gpus if word == g.number or (word[:4] == "GPU-" and g.uuid.startswith(word))]
        # Like CUDA, which takes beginnings of UUIDs and ends the list at the first bad word.
        if len(found) != 1:
            break
        chosen += found
    return chosen


def foreign_processes(ours: Callable[[int], bool]) -> list[str]:
    """One part of a sentence for each process on our GPUs whose pid `ours` does not accept.

    `process 1234 (python, user alice) on GPU 2 with 1024 MiB`; empty where nvidia-smi is absent
    or fails.
    """
    rows = [row for row in _ask("--query-compute-apps=pid,process_name,gpu_uuid,used_memory") if len(row) > 3]
    gpus = {gpu.uuid: gpu.number for gpu in visible_gpus()} if rows else {}
    found = []
    for pid, *name, uuid, memory in rows:
        if uuid in gpus and pid.isdigit() and not ours(int(pid)):
            who = f"process {pid} ({Path(', '.join(name)).name}, {_user(int(pid))})"
            found.append(f"{who} on GPU {gpus[uuid]}" + (f" with {memory} MiB" if memory.isdigit() else ""))
    return found


def _user(pid: int) -> str:
    """Who runs `pid`; a process of another container is not in our /proc."""
    try:
        return f"user {pwd.getpwuid(os.stat(f'/proc/{pid}').st_uid).pw_name}"
    except (OSError, KeyError):
        return "unknown user"


def _ask(query: str) -> list[list[str]]:
    """The rows that nvidia-smi answers; none when it is absent, fails or takes too long."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        smi = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return []
    try:
        out, _ = smi.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        smi.kill()
        # Stuck in the driver of a broken GPU it may not die, and must not hold us up.
        with contextlib.suppress(subprocess.TimeoutExpired):
            smi.communicate(timeout=1.0)
        return []
    return [line.split(", ") for line in out.splitlines()] if smi.returncode == 0 else []
