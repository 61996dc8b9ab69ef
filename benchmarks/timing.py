"""Measures the wall-clock time of whole processes, in turns so that disturbances affect all equally."""

import subprocess
import sys
import time
from statistics import median


def medians(commands: dict[str, list[str]], times: int) -> dict[str, float]:
    """Name -> median seconds of `times` runs of its command; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for round_ in range(times + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def python(code: str) -> list[str]:
    """The command that runs `code`."""
    return [sys.executable, "-c", code]


def ultrabench(*words: str) -> list[str]:
    """The command line `ultrabench words`."""
    return [sys.executable, "-m", "ultrabench.cli.main", *words]
