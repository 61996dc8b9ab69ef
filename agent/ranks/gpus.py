"""The GPUs of this node as NVML knows them: which are ours, who else uses them, their memory and clocks."""

import contextlib
import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pynvml

T = TypeVar("T")

LIST_S = 10.0
"""Seconds after which a driver that does not answer is given up."""
SAMPLE_S = 1.0
FREE_S = 10.0
"""Seconds in which the driver frees the memory of a killed process."""
SLACK = 0.02
"""Share of a GPU's memory by which the driver's own use of it may change."""
SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Reasons for lower clocks that show a fault; a power cap that was reached, or no work, shows none.

Source: nvml.h, nvmlClocksEventReason*.
"""


class VisibleGpu(NamedTuple):
    """A GPU that the ranks of this node may use."""

    number: str
    uuid: str
    bus_id: str
    """PCI bus as NVML writes it, such as 00000000:1B:00.0."""
    processes: Sequence[tuple[int, str, int | None]] = ()
    """Pid, program and bytes (None where unknown) of each process that computes on it."""


def visible_gpus() -> list[VisibleGpu]:
    """The GPUs of CUDA_VISIBLE_DEVICES (indices or UUIDs) in its order; all by bus where it is not set.

    There are none where the driver is absent, fails or does not answer.
    """
    gpus, words, chosen = _listed(), os.environ.get("CUDA_VISIBLE_DEVICES"), list[VisibleGpu]()
    if words is None:
        return gpus
    for word in (w.strip() for w in words.split(",")):
        found = [g for g in gpus if word == g.number or (word[:4] == "GPU-" and g.uuid.startswith(word))]
        # CUDA too takes beginnings of UUIDs and ends the list at the first bad word.
        if len(found) != 1:
            break
        chosen += found
    return chosen


def foreign_processes(ours: Callable[[int], bool]) -> list[str]:
    """One part of a sentence for each process on our GPUs whose pid `ours` does not accept.

    An example is `process 1234 (python, user alice) on GPU 2 with 1024 MiB`.
    """
    found = []
    for gpu in visible_gpus():
        for pid, program, used in gpu.processes:
            if not ours(pid):
                memory = "" if used is None else f" with {used >> 20} MiB"
                found.append(f"process {pid} ({program}, {_user(pid)}) on GPU {gpu.number}{memory}")
    return found


def _user(pid: int) -> str:
    """The user of `pid`, who is unknown where the process belongs to another container."""
    try:
        return f"user {pwd.getpwuid(os.stat(f'/proc/{pid}').st_uid).pw_name}"
    except (OSError, KeyError):
        return "unknown user"


def _listed() -> list[VisibleGpu]:
    """All GPUs of this host, asked for in a process of its own.

    The driver of a broken GPU may block whoever asks it inside the kernel, where no signal ends it.
    """
    command = [sys.executable, "-P", "-m", "ultrabench.agent.ranks.gpus"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        return [VisibleGpu(*gpu) for gpu in json.loads(child.communicate(timeout=LIST_S)[0] or "[]")]
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1.0)
        return []


def list_gpus() -> None:
    """Prints the fields of all GPUs as JSON: what the process of its own does."""
    _ask(pynvml.nvmlInit)
    gpus = []
    for number in range(_ask(pynvml.nvmlDeviceGetCount) or 0):
        handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, number)
        uuid, pci = _ask(pynvml.nvmlDeviceGetUUID, handle), _ask(pynvml.nvmlDeviceGetPciInfo, handle)
        if uuid and pci:
            found = [(p, _ask(pynvml.nvmlSystemGetProcessName, p.pid)) for p in _processes(handle)]
            processes = [(p.pid, Path(name or "unknown program").name, p.usedGpuMemory) for p, name in found]
            gpus.append(VisibleGpu(str(number), uuid, pci.busId, processes))
    print(json.dumps(gpus))


def _processes(handle: Any) -> list[Any]:
    return _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []


def _ask(query: Callable[..., T], *words: Any) -> T | None:
    """The driver's answer; None where there is no driver, or this GPU or driver does not know."""
    try:
        return query(*words)
    except pynvml.NVMLError:
        return None


class GpuGauge:
    """Looks at GPUs between and during runs; where there is no driver it knows nothing."""

    def __init__(self, gpus: Sequence[VisibleGpu]) -> None:
        if gpus:
            _ask(pynvml.nvmlInit)
        handles = {gpu.number: _ask(pynvml.nvmlDeviceGetHandleByUUID, gpu.uuid) for gpu in gpus}
        self._handles = {number: handle for number, handle in handles.items() if handle}
        self._before = {
            number: _ask(pynvml.nvmlDeviceGetMemoryInfo, handle) for number, handle in self._handles.items()
        }
        self._sampled = 0.0
        self.clear()

    def clear(self) -> None:
        """Forgets the samples of the last run."""
        self.clocks_hz: list[float] = []
        """SM clock of each GPU at each look."""
        self.slowdowns: set[str] = set()

    def sample(self) -> None:
        """Looks at clocks, at most once in SAMPLE_S seconds."""
        now = time.monotonic()
        if now - self._sampled < SAMPLE_S:
            return
        self._sampled = now
        for handle in self._handles.values():
            mhz = _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
            mask = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
            self.clocks_hz += [mhz * 1e6] if mhz else []
            self.slowdowns |= {text for bit, text in SLOWDOWNS.items() if mask & bit}

    def occupied(self, meanwhile: Callable[[], Any]) -> str | None:
        """Which GPU still holds memory that it did not hold at first; waits for the driver to free it."""
        end = time.monotonic() + FREE_S
        while (held := self._held()) and time.monotonic() < end:
            meanwhile()
            time.sleep(0.05)
        return held

    def _held(self) -> str | None:
        for number, handle in self._handles.items():
            before, now = self._before[number], _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
            if before and now and now.used > before.used + SLACK * now.total:
                pids = ", ".join(f"process {p.pid}" for p in _processes(handle)) or "no process that is known"
                gib = (now.used - before.used) / 2**30
                return f"GPU {number} still holds {gib:.1f} GiB after the run: {pids}"
        return None


if __name__ == "__main__":
    list_gpus()
