"""Measures the time of whole processes, in turns so that disturbances affect all equally, and of calls."""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
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


def seconds_a_call(
    call: Callable[[], object], times: int, rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of a call in each round of `times` calls, by a clock of the module time."""
    times_s = []
    for _ in range(rounds):
        begin = clock()
        for _ in range(times):
            call()
        times_s.append((clock() - begin) / times)
    return times_s


def python(code: str) -> list[str]:
    """The command that runs `code`."""
    return [sys.executable, "-c", code]


def ultrabench(*words: str) -> list[str]:
    """The command line `ultrabench words`."""
    return [sys.executable, "-m", "ultrabench.cli.main", *words]


def costs(command: list[str]) -> tuple[float, float]:
    """Seconds of CPU time, of the process and those it started, and of wall-clock time of one run of a command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def print_row(name: str, rows: int, command: list[str], times: int = 3) -> None:
    """Prints a row of a table: the least cost of a command of `times` runs, also as multiples of `--help`.

    The least is printed because whatever else the machine does can only add to it.
    """
    help_costs = [costs(ultrabench("--help")) for _ in range(times)]
    command_costs = [costs(command) for _ in range(times)]
    (help_s, help_wall_s), (cpu_s, wall_s) = (
        map(min, zip(*costs_of_times, strict=True)) for costs_of_times in (help_costs, command_costs)
    )
    cost_text = f"{cpu_s:.2f} s, {cpu_s / help_s:.1f} x | {wall_s:.2f} s, {wall_s / help_wall_s:.1f} x"
    print(f"| {name} | {rows:,} | {cost_text} |", flush=True)
