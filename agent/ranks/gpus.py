"""The GPUs of this node by NVML: which ones ranks may use, who else uses them, their memory, clocks and power."""

import contextlib
import json
import os
import pwd
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from ultrabench.processes import RunningClock

LIST_S = 10.0
"""Seconds to wait for an answer of the driver."""
SAMPLE_S = 1.0
"""Seconds between two samples of the clocks."""
FREE_S = 10.0
"""Seconds to wait until the driver has freed the memory of a killed process."""
MEMORY_SLACK = 0.02
"""Share of a GPU's memory by which the driver's own use may grow during a run."""
CLOCK_SM = 1
"""The clock of the multiprocessors: nvml.h, NVML_CLOCK_SM."""
SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Reasons for lower clocks that show a fault. A reached power cap and an idle GPU are no faults.

Source: nvml.h, nvmlClocksEventReason*.
"""


class VisibleGpu(NamedTuple):
    """A GPU that the ranks of this node may use."""

    number: str
    uuid: str
    bus_id: str
    """PCI bus as NVML writes it, such as 00000000:1B:00.0."""
    processes: Sequence[tuple[int, str]] = ()
    """Pid and description of each process that computes on it."""


def visible_gpus() -> list[VisibleGpu]:
    """The GPUs of CUDA_VISIBLE_DEVICES (indices or UUIDs) in its order; all GPUs where it is not set.

    The list is empty where the driver is absent, fails or does not answer.
    """
    gpus, words = _listed(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return gpus
    matches = (
        [g for g in gpus if prefix == g.number or (prefix[:4] == "GPU-" and g.uuid.startswith(prefix))]
        for prefix in map(str.strip, words.split(","))
    )
    # CUDA also accepts the beginnings of UUIDs, and ends the list at the first bad word.
    return [gpu for (gpu,) in takewhile(lambda matching: len(matching) == 1, matches)]


def foreign_processes(ours: Callable[[int], bool]) -> list[str]:
    """A description of each process on the visible GPUs for which `ours(pid)` is false.

    An example is `process 1234 (python, user alice) on GPU 2 with 1024 MiB`.
    """
    return [text for gpu in visible_gpus() for pid, text in gpu.processes if not ours(pid)]


def _listed() -> list[VisibleGpu]:
    """All GPUs of this host, listed by a process of its own.

    The driver of a broken GPU may block its caller inside Linux, where no signal ends it.
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


def print_gpus() -> None:
    """Prints the fields of all GPUs of this host as JSON, for `_listed`."""
    ask_nvml("nvmlInit")
    gpus = []
    for number in range(ask_nvml("nvmlDeviceGetCount") or 0):
        handle = ask_nvml("nvmlDeviceGetHandleByIndex", number)
        uuid, pci = ask_nvml("nvmlDeviceGetUUID", handle), ask_nvml("nvmlDeviceGetPciInfo", handle)
        if uuid and pci:
            processes = [(p.pid, _described(p, number)) for p in _processes(handle)]
            gpus.append(VisibleGpu(str(number), uuid, pci.busId, processes))
    print(json.dumps(gpus))


def _described(process: Any, number: int) -> str:
    """One line of a process on the GPU with this number; its user is unknown in another container."""
    program = Path(ask_nvml("nvmlSystemGetProcessName", process.pid) or "unknown program").name
    user, used = "unknown user", process.usedGpuMemory
    with contextlib.suppress(OSError, KeyError):
        user = f"user {pwd.getpwuid(os.stat(f'/proc/{process.pid}').st_uid).pw_name}"
    memory = "" if used is None else f" with {used >> 20} MiB"
    return f"process {process.pid} ({program}, {user}) on GPU {number}{memory}"


def _processes(handle: Any) -> list[Any]:
    return ask_nvml("nvmlDeviceGetComputeRunningProcesses", handle) or []


def ask_nvml(query: str, *words: Any) -> Any:
    """The driver's answer to a function of NVML; None without a driver, or where it or pynvml has no such function."""
    import pynvml  # 0.05 s of CPU, which an agent saves where no GPU is used

    with contextlib.suppress(pynvml.NVMLError, AttributeError):
        return getattr(pynvml, query)(*words)
    return None


class PowerSample(NamedTuple):
    """What one GPU says of its power at one moment; an absent value is one that its driver does not know."""

    time_s: float
    """The monotonic clock."""
    energy_j: float | None
    """Energy since the driver was loaded."""
    power_w: float | None


def mean_power_w(samples: Sequence[PowerSample]) -> float | None:
    """The mean power of a GPU over its samples: from its energy counter, else the mean of its powers; None if unknown."""
    counters = [(sample.time_s, sample.energy_j) for sample in samples if sample.energy_j is not None]
    if len(counters) > 1:
        (first_s, first_j), (last_s, last_j) = counters[0], counters[-1]
        if last_j > first_j:  # a driver that was loaded again counts from 0
            return (last_j - first_j) / (last_s - first_s)
    powers_w = [sample.power_w for sample in samples if sample.power_w is not None]
    return mean(powers_w) if powers_w else None


class GpuGauge:
    """Memory, clocks and power of the GPUs between and during runs; without a driver nothing is known."""

    def __init__(self, gpus: Sequence[VisibleGpu]) -> None:
        if gpus:
            ask_nvml("nvmlInit")
        handles = ((gpu.number, ask_nvml("nvmlDeviceGetHandleByUUID", gpu.uuid)) for gpu in gpus)
        self._gpus = [(number, h, ask_nvml("nvmlDeviceGetMemoryInfo", h)) for number, h in handles if h]
        self._sampled = 0.0
        self.clear()

    def clear(self) -> None:
        """Drops the samples of the last run."""
        self.clocks_hz: list[float] = []
        """SM clock of each GPU in each sample."""
        self.slowdowns: set[str] = set()
        self.foreign: set[str] = set()
        """Processes of somebody else that used the GPUs during the run."""
        self._power_samples = defaultdict[str, list[PowerSample]](list)
        """Number of a GPU -> its samples in the measured steps."""

    @property
    def powers_w(self) -> tuple[float, ...]:
        """Mean power of each GPU in the measured steps; those whose power is unknown are left out."""
        powers_w = map(mean_power_w, self._power_samples.values())
        return tuple(power_w for power_w in powers_w if power_w is not None)

    def sample(self, ours: Callable[[], set[int]] = set, measuring: bool = False) -> None:
        """Samples clocks and processes, at most once in SAMPLE_S seconds.

        Args:
            ours: gives the pids of our own processes; in a PID namespace, whose pids the driver does not know, it gives none.
            measuring: whether the steps are measured, so that the power counts.
        """
        if time.monotonic() - self._sampled < SAMPLE_S:
            return
        self._sampled = time.monotonic()
        pids = ours() if self._gpus else set[int]()
        for number, handle, _ in self._gpus:
            if pids:
                self.foreign |= {_described(p, int(number)) for p in _processes(handle) if p.pid not in pids}
            mhz = ask_nvml("nvmlDeviceGetClockInfo", handle, CLOCK_SM)
            mask = ask_nvml("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
            self.clocks_hz += [mhz * 1e6] if mhz else []
            self.slowdowns |= {text for bit, text in SLOWDOWNS.items() if mask & bit}
            if measuring:
                self._power_samples[number].append(_power_sample(handle))

    def still_held(self, meanwhile: Callable[[], Any]) -> str | None:
        """Which GPU still has less free memory than before the first run, after a wait of at most FREE_S."""
        ran_s = RunningClock()
        while (full_gpu := self._held()) and ran_s() < FREE_S:
            meanwhile()
            time.sleep(0.05)
        return full_gpu

    def _held(self) -> str | None:
        for number, handle, before in self._gpus:
            now = ask_nvml("nvmlDeviceGetMemoryInfo", handle)
            if before and now and now.used > before.used + MEMORY_SLACK * now.total:
                pids = ", ".join(f"process {p.pid}" for p in _processes(handle)) or "no known process"
                gib = (now.used - before.used) / 2**30
                return f"GPU {number} still has {gib:.1f} GiB in use after the run: {pids}"
        return None


def _power_sample(handle: Any) -> PowerSample:
    """The energy counter and the power of a GPU now; NVML has them in mJ and mW."""
    energy_mj = ask_nvml("nvmlDeviceGetTotalEnergyConsumption", handle)
    power_mw = ask_nvml("nvmlDeviceGetPowerUsage", handle)
    energy_j, power_w = (value / 1e3 if value else None for value in (energy_mj, power_mw))
    return PowerSample(time.monotonic(), energy_j, power_w)


if __name__ == "__main__":
    print_gpus()
