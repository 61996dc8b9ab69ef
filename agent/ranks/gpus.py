"""The GPUs of this node by NVML: which ones ranks may use, who else uses them, their memory, clocks and power."""

import contextlib
import json
import os
import pwd
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from ultrabench.agent.disk_retry import log_line
from ultrabench.column import BYTES
from ultrabench.processes import RunningClock

LIST_TIMEOUT_S = 10.0
"""Seconds to wait for an answer of the driver."""
SAMPLE_INTERVAL_S = 1.0
"""Seconds between two samples of the clocks."""
UNLISTED_TEXT = (
    "the driver does not list this device, so its memory, clocks, processes and health are not checked"
)
FREE_TIMEOUT_S = 10.0
"""Seconds to wait until the driver has freed the memory of a killed process."""
DRIVER_GROWTH_SHARE = 0.02
"""Share of a GPU's memory by which the driver's own use may grow during a run."""
CLOCK_SM = 1
"""The clock of the multiprocessors: nvml.h, NVML_CLOCK_SM."""
SLOWDOWN_BY_BIT = {
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
    """Index by which NVML counts the GPUs of the host, as a text; `0:1` is the second MIG device of GPU 0."""
    uuid: str
    bus_id: str
    """PCI bus as NVML writes it, such as 00000000:1B:00.0."""
    processes: Sequence[tuple[int, str]] = ()
    """Pid and description of each process that computes on it."""
    board_uuid: str = ""
    """UUID of the GPU of which this is a MIG device; empty for a whole GPU."""


def visible_gpus() -> list[VisibleGpu]:
    """The GPUs and MIG devices of CUDA_VISIBLE_DEVICES (indices or UUIDs) in its order; all GPUs where it is not set.

    The list is empty where the driver is absent, fails or does not answer. A line in the log of the job names the
    devices that the driver does not list, since nothing about these can be checked.
    """
    gpus, device_prefixes = _all_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if device_prefixes is None:
        return [gpu for gpu in gpus if not gpu.board_uuid]
    gpus_by_prefix = {p: _gpus_of(gpus, p) for p in map(str.strip, device_prefixes.split(","))}
    unlisted_prefixes = [
        p for p, found_gpus in gpus_by_prefix.items() if not found_gpus and p[:4] in ("GPU-", "MIG-")
    ]
    if gpus and unlisted_prefixes:
        _say_once(f"{', '.join(unlisted_prefixes)}: {UNLISTED_TEXT}")
    # CUDA also accepts the beginnings of UUIDs, and ends the list at the first entry that names no GPU or several.
    return [g for (g,) in takewhile(lambda gpus_of_prefix: len(gpus_of_prefix) == 1, gpus_by_prefix.values())]


def _gpus_of(gpus: Sequence[VisibleGpu], prefix: str) -> list[VisibleGpu]:
    """The GPUs and MIG devices that an entry of CUDA_VISIBLE_DEVICES may name."""
    is_uuid = prefix[:4] in ("GPU-", "MIG-")
    return [
        g for g in gpus if (g.uuid.startswith(prefix) if is_uuid else prefix == g.number and not g.board_uuid)
    ]


@cache
def _say_once(line: str) -> None:
    log_line(line)


def foreign_processes(is_ours: Callable[[int], bool]) -> list[str]:
    """A description of each process on the visible GPUs for which `is_ours(pid)` is false.

    An example is `process 1234 (python, user alice) on GPU 2 with 1024 MiB`.
    """
    return [text for gpu in visible_gpus() for pid, text in gpu.processes if not is_ours(pid)]


def _all_gpus() -> list[VisibleGpu]:
    """All GPUs of this host, listed by another process.

    The driver of a broken GPU may block its caller inside Linux, where no signal ends it.
    """
    command = [sys.executable, "-P", "-m", "ultrabench.agent.ranks.gpus"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        return [VisibleGpu(*gpu) for gpu in json.loads(child.communicate(timeout=LIST_TIMEOUT_S)[0] or "[]")]
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1.0)
        return []


def print_gpus() -> None:
    """Prints the fields of all GPUs of this host as JSON, for `_all_gpus`."""
    ask_nvml("nvmlInit")
    gpus = []
    for gpu_index in range(ask_nvml("nvmlDeviceGetCount") or 0):
        handle = ask_nvml("nvmlDeviceGetHandleByIndex", gpu_index)
        uuid, pci_info = ask_nvml("nvmlDeviceGetUUID", handle), ask_nvml("nvmlDeviceGetPciInfo", handle)
        if uuid and pci_info:
            processes = [(p.pid, _process_text(p, str(gpu_index))) for p in _processes(handle)]
            gpus.append(VisibleGpu(str(gpu_index), uuid, pci_info.busId, processes))
            gpus += _mig_devices(handle, gpus[-1])
    print(json.dumps(gpus))


def _mig_devices(handle: Any, gpu: VisibleGpu) -> Iterator[VisibleGpu]:
    """The MIG devices of a GPU, which have their own memory and processes, and the GPU's clocks and bus."""
    for mig_index in range(ask_nvml("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        mig_handle = ask_nvml("nvmlDeviceGetMigDeviceHandleByIndex", handle, mig_index)
        uuid = mig_handle and ask_nvml("nvmlDeviceGetUUID", mig_handle)
        if uuid:
            number = f"{gpu.number}:{mig_index}"
            processes = [(p.pid, _process_text(p, number)) for p in _processes(mig_handle)]
            yield VisibleGpu(number, uuid, gpu.bus_id, processes, gpu.uuid)


def _process_text(process: Any, gpu_number: str) -> str:
    """Describes a process on the GPU with this number in a line; its user is unknown if it is in another container."""
    program_name = Path(ask_nvml("nvmlSystemGetProcessName", process.pid) or "unknown program").name
    user_text, used_bytes = "unknown user", process.usedGpuMemory
    with contextlib.suppress(OSError, KeyError):
        user_text = f"user {pwd.getpwuid(os.stat(f'/proc/{process.pid}').st_uid).pw_name}"
    memory_text = "" if used_bytes is None else f" with {used_bytes >> 20} MiB"
    return f"process {process.pid} ({program_name}, {user_text}) on GPU {gpu_number}{memory_text}"


def _processes(handle: Any) -> list[Any]:
    """The processes that compute on a GPU, as NVML describes them."""
    return ask_nvml("nvmlDeviceGetComputeRunningProcesses", handle) or []


def ask_nvml(function_name: str, *arguments: Any) -> Any:
    """The driver's answer to a function of NVML; None if the driver, or the function in it or pynvml, is absent."""
    import pynvml  # 0.05 s of CPU, which an agent saves where no GPU is used

    with contextlib.suppress(pynvml.NVMLError, AttributeError):
        return getattr(pynvml, function_name)(*arguments)
    return None


class PowerSample(NamedTuple):
    """Energy and power of one GPU at one moment; None where its driver does not know a value."""

    time_s: float
    """When the sample was taken, by the monotonic clock."""
    energy_j: float | None
    """Energy since the driver was loaded."""
    power_w: float | None


def mean_power_w(samples: Sequence[PowerSample]) -> float | None:
    """The mean power of a GPU over its samples, by its energy counter or else its powers; None if unknown."""
    energy_readings = [(sample.time_s, sample.energy_j) for sample in samples if sample.energy_j is not None]
    if len(energy_readings) > 1:
        (first_s, first_j), (last_s, last_j) = energy_readings[0], energy_readings[-1]
        if last_j > first_j:  # after a reload of the driver the counter begins at 0
            return (last_j - first_j) / (last_s - first_s)
    powers_w = [sample.power_w for sample in samples if sample.power_w is not None]
    return mean(powers_w) if powers_w else None


class GpuGauge:
    """Memory, clocks and power of the GPUs, during and between runs; without a driver nothing is known."""

    def __init__(self, gpus: Sequence[VisibleGpu]) -> None:
        if gpus:
            ask_nvml("nvmlInit")
        handles = ((gpu, ask_nvml("nvmlDeviceGetHandleByUUID", gpu.uuid)) for gpu in gpus)
        known_handles = [(gpu, handle) for gpu, handle in handles if handle]
        self._baselines = [
            (gpu.number, h, ask_nvml("nvmlDeviceGetMemoryInfo", h)) for gpu, h in known_handles
        ]
        """Number, NVML handle and memory before the first run of each GPU."""
        self._boards = {
            gpu.number: ask_nvml("nvmlDeviceGetHandleByUUID", gpu.board_uuid) if gpu.board_uuid else handle
            for gpu, handle in known_handles
        }
        """Number of a GPU -> NVML handle of the whole GPU, which alone has clocks."""
        self._last_sample_s = 0.0
        """When the last sample was taken, by the monotonic clock."""
        self.clear()

    def clear(self) -> None:
        """Drops the samples of the last run."""
        self._clocks_hz = list[tuple[float, bool]]()
        """SM clock of each GPU in each sample, and whether the sample was taken in measured steps."""
        self.slowdowns: set[str] = set()
        """Reasons of SLOWDOWN_BY_BIT for which the driver lowered clocks in the samples."""
        self.foreign_processes: set[str] = set()
        """Processes of somebody else that used the GPUs during the run."""
        self._power_samples = defaultdict[str, list[PowerSample]](list)
        """Number of a GPU -> its samples in the measured steps."""

    @property
    def clocks_hz(self) -> list[float]:
        """SM clock of each GPU in each sample of the measured steps; in each sample where none was taken in them."""
        measured_hz = [clock_hz for clock_hz, is_measured in self._clocks_hz if is_measured]
        return measured_hz or [clock_hz for clock_hz, _ in self._clocks_hz]

    @property
    def powers_w(self) -> tuple[float, ...]:
        """Mean power of each GPU in the measured steps; GPUs of unknown power are left out."""
        return tuple(w for w in map(mean_power_w, self._power_samples.values()) if w is not None)

    def sample(self, read_own_pids: Callable[[], set[int]] = set, is_measuring: bool = False) -> None:
        """Samples clocks and processes, at most once in SAMPLE_INTERVAL_S seconds.

        Args:
            read_own_pids: returns the pids of our own processes; none in a PID namespace, which the driver cannot see.
            is_measuring: whether the steps are measured, so that power and clocks count.
        """
        if time.monotonic() - self._last_sample_s < SAMPLE_INTERVAL_S:
            return
        self._last_sample_s = time.monotonic()
        own_pids = read_own_pids() if self._baselines else set[int]()
        for number, handle, _ in self._baselines:
            if own_pids:
                foreign = (process for process in _processes(handle) if process.pid not in own_pids)
                self.foreign_processes |= {_process_text(process, number) for process in foreign}
            board = self._boards[number]
            clock_mhz = ask_nvml("nvmlDeviceGetClockInfo", board, CLOCK_SM)
            slowdown_mask = ask_nvml("nvmlDeviceGetCurrentClocksThrottleReasons", board) or 0
            self._clocks_hz += [(clock_mhz * 1e6, is_measuring)] if clock_mhz else []
            self.slowdowns |= {text for bit, text in SLOWDOWN_BY_BIT.items() if slowdown_mask & bit}
            if is_measuring and board is handle:  # the power of a GPU is not that of one of its MIG devices
                self._power_samples[number].append(_power_sample(handle))

    def unfreed_memory_text(self, beat: Callable[[], Any]) -> str | None:
        """Which GPU still has less free memory than before the first run, after a wait of at most FREE_TIMEOUT_S."""
        clock = RunningClock()
        while (unfreed_text := self._unfreed_memory_now()) and clock() < FREE_TIMEOUT_S:
            beat()
            time.sleep(0.05)
        return unfreed_text

    def _unfreed_memory_now(self) -> str | None:
        for number, handle, baseline in self._baselines:
            memory = ask_nvml("nvmlDeviceGetMemoryInfo", handle)
            if baseline and memory and memory.used > baseline.used + DRIVER_GROWTH_SHARE * memory.total:
                users_text = ", ".join(f"process {p.pid}" for p in _processes(handle)) or "no known process"
                excess_text = BYTES.text(memory.used - baseline.used)
                return f"GPU {number} still has {excess_text} in use after the run: {users_text}"
        return None


def _power_sample(handle: Any) -> PowerSample:
    """The energy counter and the power of a GPU now; NVML has them in mJ and mW."""
    energy_mj = ask_nvml("nvmlDeviceGetTotalEnergyConsumption", handle)
    power_mw = ask_nvml("nvmlDeviceGetPowerUsage", handle)
    energy_j, power_w = (milli_value / 1e3 if milli_value else None for milli_value in (energy_mj, power_mw))
    return PowerSample(time.monotonic(), energy_j, power_w)


if __name__ == "__main__":
    print_gpus()
