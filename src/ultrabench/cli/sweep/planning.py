"""Makes and prices plans, and shows on stderr how far that is where it takes long."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ultrabench.cli.tables import duration_text, output_console, say
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import MIN_PARALLEL_CANDIDATES, Plan, ReportProgress, make_plan
from ultrabench.sweep.remedy import require_runs

SEARCHED_CELLS, CANDIDATES = "cells searched by prediction", "candidates"
"""What is counted while a plan is priced, and while it is made."""
MIN_SHOWN = {CANDIDATES: MIN_PARALLEL_CANDIDATES, SEARCHED_CELLS: 2}
"""What is counted -> the total from which a terminal shows a bar."""
SILENT_S = 10.0
"""Seconds until the first line about a plan, and between two of them, where stderr is no terminal."""
MIN_ESTIMATED_SHARE = 0.02
"""Share of the work that is done before a line says what is left: the first parts wait for processes that start."""


@contextlib.contextmanager
def shown_progress(noun: str) -> Iterator[ReportProgress]:
    """A function that shows how much is done: as a bar on a terminal, elsewhere as a line every ten seconds."""
    console = output_console(stderr=True)
    bar_columns = TextColumn(noun), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*bar_columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task_id = bar.add_task("", visible=False)
        yield _bar_updater(bar, task_id, noun) if console.is_terminal else line_printer(noun)


def _bar_updater(bar: Progress, task_id: TaskID, noun: str) -> ReportProgress:
    def update(num_done: int, total: int) -> None:
        bar.update(task_id, completed=num_done, total=total, visible=total >= MIN_SHOWN[noun])

    return update


def line_printer(noun: str, clock: Callable[[], float] = time.monotonic) -> ReportProgress:
    """A function that prints a line about what is done, ten seconds after the last one or later."""
    begin_s = said_s = clock()

    def print_line(num_done: int, total: int) -> None:
        nonlocal said_s
        now_s = clock()
        if now_s - said_s >= SILENT_S and num_done < total:
            said_s = now_s
            left_text = ""
            if num_done >= MIN_ESTIMATED_SHARE * total:
                left_s = (now_s - begin_s) * (total - num_done) / num_done
                left_text = f", about {duration_text(left_s)} left"
            say(f"planning: {num_done:,} of {total:,} {noun}{left_text}")

    return print_line


def plan_with_bar(config: SweepConfig, **peak_rate: Any) -> Plan:
    """The plan of a sweep; how far a large one is is shown on stderr.

    Raises:
        ConfigError: no candidate can run.
    """
    with shown_progress(CANDIDATES) as report:
        return require_runs(make_plan(config, report_progress=report, **peak_rate))
