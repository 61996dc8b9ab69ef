"""The machine that gpu_check.py examines, and the commands of ultrabench that run there until the time is spent."""

import json
import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from ultrabench.agent.ranks.gpus import CLOCK_SM, ask_nvml, visible_gpus
from ultrabench.cli.tables import say
from ultrabench.errors import UltrabenchError
from ultrabench.kernel_config import KernelConfig
from ultrabench.run import RunSpec
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal
from ultrabench.store.state import fold
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.plan_table import read_rows, runs_of

STOPPING_S = 30.0
"""Seconds that a command gets to end its runs when the time is spent."""


class RefusedError(UltrabenchError):
    """A command of ultrabench was refused; the message is its last line."""


class TimeSpentError(UltrabenchError):
    """The time ended while a command ran; it was interrupted, and the same command continues it."""


class Finding(NamedTuple):
    """What came of a line."""

    passed: bool
    text: str
    row: dict[str, Any] | None = None
    """The row of results of a line that measured one, as JSON values."""


class Line(NamedTuple):
    """One thing to try."""

    name: str
    attempt: Callable[[], Finding]
    estimate_s: float = 0.0
    """Expected seconds on one H100; a line whose estimate exceeds the remaining time is left for the next call."""
    may_be_refused: bool = False
    """Whether a refusal is an answer, because not every version or accelerator can do it."""


class Sweep(NamedTuple):
    """A sweep that has ended."""

    rows: list[dict[str, Any]]
    """The final row of each run."""
    specs: dict[str, RunSpec]
    """run_id -> what was run."""
    folder: SweepFolder


@dataclass(frozen=True)
class Machine:
    """What the lines need to know of this machine."""

    device: str
    ranks: int
    facts: dict[str, Any]
    hardware: str
    results: Path
    end_s: float = math.inf
    """The reading of time.monotonic() at which the time is spent."""

    @property
    def identity(self) -> list[Any]:
        """What has to be the same for a line that passed to count in a later call."""
        names = ("gpu_name", "torch_version", "nccl_version", "driver_version")
        return [self.device, self.ranks, KernelConfig(name="embedded").digest(), *map(self.facts.get, names)]

    @property
    def remaining_s(self) -> float:
        """Seconds until the time is spent; infinite without a limit."""
        return self.end_s - time.monotonic()

    def run(self, *words: str) -> Any:
        """Runs a command of ultrabench, whose progress goes to stderr; returns its JSON, or its text.

        Raises:
            RefusedError: the command ended with exit code 2.
            TimeSpentError: it was interrupted.
        """
        with tempfile.TemporaryFile("w+") as out:
            command = [sys.executable, "-P", "-m", "ultrabench", *words]
            child = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True)
            stderr_lines = list[str]()
            reader = threading.Thread(target=_echo, args=(child.stderr, stderr_lines), daemon=True)
            reader.start()
            try:
                child.wait(None if self.end_s == math.inf else max(0.0, self.remaining_s))
            except subprocess.TimeoutExpired:
                _interrupt(child)
                raise TimeSpentError("interrupted, because the time is spent") from None
            finally:
                reader.join(1.0)
            if child.returncode == UltrabenchError.exit_code:
                last_line = next((line for line in reversed(stderr_lines) if line.strip()), "refused")
                raise RefusedError(last_line.strip().removeprefix("ultrabench: "))
            out.seek(0)
            text = out.read()
        return json.loads(text) if words[-1] == "--json" and text else text

    def sweep_name(self, name: str) -> str:
        """The name of a sweep of the present kernel: that of an interrupted one,
        which has no table yet, or a new one.
        """
        name += f"-{KernelConfig(name='embedded').digest()[:8]}"
        return f"{name}-{len([*self.results.glob(f'{name}-*/runs.parquet')]) + 1}"

    def sweep(self, name: str, *overrides: str, ranks: int | None = None) -> Sweep:
        """Runs a sweep on `ranks` GPUs of this machine, by default all of them.

        Each call measures anew, in a folder of its own, unless an earlier call was interrupted.

        Raises:
            RefusedError, TimeSpentError: as for `run`.
        """
        name = self.sweep_name(name)
        place = [f"name={name}", f"results_dir={self.results}", "sweep.nodes=[1]", "launcher=local"]
        gpus = [f"hardware={self.hardware}", f"hardware.gpus_per_node={ranks or self.ranks}"]
        self.run("sweep", "launch", "--yes", "--reuse", "same", *place, *overrides, *gpus)
        self.run("collect", name, "--results-dir", str(self.results))
        folder = SweepFolder(self.results / name)
        state = fold(read_journal(folder.journal, say))
        runs = runs_of(read_sweep_json(folder), read_rows(folder.plan), state)
        rows = pq.read_table(folder.path / "runs.parquet").to_pylist()
        specs = {run.run_id: run.spec for run in runs}
        return Sweep([row for row in rows if row["is_final"]], specs, folder)


def _echo(stream: Any, lines: list[str]) -> None:
    with stream:
        for line in stream:
            sys.stderr.write(line)
            lines.append(line)


def _interrupt(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGINT)  # a launch ends its runs on this machine
    try:
        child.wait(STOPPING_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def limits() -> dict[str, float | None]:
    """power_limit_w and max_sm_clock_hz of the first visible GPU by NVML; None where it has no answer."""
    power_mw = clock_mhz = None
    for gpu in visible_gpus()[:1]:
        ask_nvml("nvmlInit")
        if handle := ask_nvml("nvmlDeviceGetHandleByUUID", gpu.uuid):
            power_mw = ask_nvml("nvmlDeviceGetEnforcedPowerLimit", handle)
            clock_mhz = ask_nvml("nvmlDeviceGetMaxClockInfo", handle, CLOCK_SM)
    return {"power_limit_w": power_mw and power_mw / 1e3, "max_sm_clock_hz": clock_mhz and clock_mhz * 1e6}
