"""The GPUs of this node as the driver's library tells: memory in use, clocks, and what slows them."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import pynvml

from ultrabench.agent.gpus import VisibleGpu

T = TypeVar("T")

SAMPLE_S = 1.0
PATIENCE_S = 10.0
"""The driver frees the memory of a killed process within this time."""
SLACK = 0.02
"""Of a GPU's memory: what the driver itself may take more or less of."""
SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Reasons for lower clocks that are troubles; a power cap that was reached, or no work, is none.

Source: nvml.h, nvmlClocksEventReason*.
"""


class Memory(NamedTuple):
    """Of one GPU, in bytes."""

    used: int
    total: int


class GpuGauge:
    """Looks at GPUs between and during runs; where there is no driver it knows nothing."""

    def __init__(self, gpus: Sequence[VisibleGpu]) -> None:
        self._handles = {gpu.number: handle for gpu in gpus if (handle := _handle(gpu.uuid))}
        self._before = {number: _memory(handle) for number, handle in self._handles.items()}
        self._sampled = 0.0
        self.clear()

    def clear(self) -> None:
        """Forgets the samples of the last run."""
        self.clocks_hz: list[float] = []
        """One for each GPU and look."""
        self.slowdowns: set[str] = set()

    def sample(self) -> None:
        """Looks at clocks, at most once a second."""
        now = time.monotonic()
        if not self._handles or now - self._sampled < SAMPLE_S:
            return
        self._sampled = now
        for handle in self._handles.values():
            mhz = _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
            mask = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
            self.clocks_hz += [mhz * 1e6] if mhz else []
            self.slowdowns |= {text for bit, text in SLOWDOWNS.items() if mask & bit}

    def occupied(self, meanwhile: Callable[[], None]) -> str | None:
        """Which GPU still holds memory that it did not hold at first; waits for the driver to free it."""
        end = time.monotonic() + PATIENCE_S
        while (held := self._held()) and time.monotonic() < end:
            meanwhile()
            time.sleep(0.05)
        return held

    def _held(self) -> str | None:
        for number, handle in self._handles.items():
            before, now = self._before[number], _memory(handle)
            if before and now and now.used > before.used + SLACK * now.total:
                who = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
                pids = ", ".join(f"process {process.pid}" for process in who) or "no process that is known"
                gib = (now.used - before.used) / 2**30
                return f"GPU {number} still holds {gib:.1f} GiB after the run: {pids}"
        return None


def _handle(uuid: str) -> Any:
    """NVML's name of a GPU; None where there is no driver or no such GPU."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return _ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)


def _memory(handle: Any) -> Memory | None:
    told = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return Memory(int(told.used), int(told.total)) if told else None


def _ask(query: Callable[..., T], *words: Any) -> T | None:
    """The driver's answer; None for a question that this GPU or this driver does not know."""
    try:
        return query(*words)
    except pynvml.NVMLError:
        return None
