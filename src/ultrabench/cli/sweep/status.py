"""`ultrabench sweep status` shows the progress of a sweep."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.live import Live
from rich.text import Text

from ultrabench.cli.sweep.control import launched_config
from ultrabench.cli.sweep.live import panel
from ultrabench.cli.tables import output_console, print_json, show, three_digits, warn
from ultrabench.column import GPU_HOURS
from ultrabench.errors import UltrabenchError, are, counted
from ultrabench.store.events import EndCode
from ultrabench.store.folder import SweepFolder, last_written_s
from ultrabench.store.identity import lines_of_new_copy
from ultrabench.store.journal import JournalReader
from ultrabench.store.lease import living_launchers
from ultrabench.store.state import Fold, SweepState
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.running.attempts import attempts_of_next_launch
from ultrabench.sweep.running.price import price_of
from ultrabench.sweep.running.progress import SweepProgress, progress_of

REASON_BY_ACTIVITY = {
    "done": None,
    "followed": None,
    "waiting": "The launcher waits to submit jobs: the latest was {refusal}",
    "disk": "The launcher waits for the results folder: {disk}",
    "starting": "The launch has not written its plan yet.",
    "paused": "Paused. To continue: ultrabench sweep resume {sweep}",
    "cancelled": "Cancelled. Results are kept; run the launch command again to continue.",
    "unfollowed": "No launcher follows this sweep. Submitted jobs keep running; "
    "new ones need a launcher: ultrabench sweep resume {sweep}",
    "stopped": "Nothing is running. To continue: ultrabench sweep resume {sweep}",
}
"""What a sweep does -> why nothing new starts in it; None where it is over, or a launcher submits its jobs."""
FOLLOWED = ("followed", "waiting", "disk", "starting")
"""Keys of REASON_BY_ACTIVITY of a sweep that a launcher follows."""
MAX_START_S = 90.0
"""Seconds without a new line in the journal after which a launch has failed that has not written its plan."""
PROBE_BYTES = 65536
"""Bytes that are written to find out whether a disk is full: more than the files of an allocation."""
WATCH_INTERVAL_S = 1.0
"""Seconds between two looks of `sweep status --watch`."""


def show_status(folder: SweepFolder, watch: bool, as_json: bool) -> None:
    """Prints the progress of a sweep, once or until it is over."""
    snapshots = _snapshots(folder, watch)
    if as_json:
        for snapshot in snapshots:
            document = snapshot.as_json()
        print_json(document)
    elif watch and not output_console().is_terminal:
        shown_counts = None
        for snapshot in snapshots:
            counts = snapshot.progress.by_nodes, snapshot.is_over
            if counts != shown_counts:
                show(status_view(snapshot), "")
            shown_counts = counts
    elif watch:
        with Live(console=output_console(), auto_refresh=False) as live:
            for snapshot in snapshots:
                live.update(status_view(snapshot, with_bar=True), refresh=True)
    else:
        show(status_view(next(snapshots)))


class Prices(NamedTuple):
    """What a sweep was expected to cost when it was launched, and what is expected now, in GPU hours."""

    asked: float
    """The price that the user was asked about at the launch."""
    asked_low: float
    asked_high: float
    spent: float
    expected: float
    """The spent ones, and the price of the rest with the starts and step times that runs have measured."""
    per_gpu_hour: float | None
    """The price of a GPU hour; None if it is unknown."""

    def as_json(self) -> dict[str, Any]:
        """The entry `price` of `sweep status --json`."""
        return {
            "asked_gpu_hours": round(self.asked, 6),
            "asked_gpu_hours_interval": [round(self.asked_low, 6), round(self.asked_high, 6)],
            "spent_gpu_hours": round(self.spent, 6),
            "expected_gpu_hours": round(self.expected, 6),
            "per_gpu_hour": self.per_gpu_hour,
        }

    def line(self) -> str:
        """A line such as `price: 12 GPU hours asked at the launch (9 to 16), 5.2 spent, 14.1 expected`."""
        asked = GPU_HOURS.brief_text(self.asked)
        low, high, spent, expected = map(GPU_HOURS.bare_text, self[1:-1])
        text = f"price: {asked} asked at the launch ({low} to {high}), {spent} spent, {expected} expected"
        if self.per_gpu_hour is None:
            return text
        hours_by_word = {"asked": self.asked, "spent": self.spent, "expected": self.expected}
        costs = (f"{three_digits(hours * self.per_gpu_hour)} {word}" for word, hours in hours_by_word.items())
        return f"{text}; cost {', '.join(costs)}"


def num_starts_left(
    folder: SweepFolder, runs: Sequence[Candidate], state: SweepState, progress: SweepProgress
) -> int:
    """Number of starts that a sweep still needs although all its runs have a result: repeats, starts in full, doubts.

    It is 0 where a run has no result yet, and where the configuration of the latest launch cannot be read.
    """
    if not progress.left and runs:
        with contextlib.suppress(UltrabenchError):
            plan = Plan(config=launched_config(folder, state), candidates=tuple(runs))
            attempts = attempts_of_next_launch(plan, state)
            return len(attempts.todo) + attempts.num_waiting
    return 0


def _prices(
    folder: SweepFolder,
    runs: Sequence[Candidate],
    state: SweepState,
    progress: SweepProgress,
    *,
    is_over: bool,
) -> Prices | None:
    """The prices of a sweep; None where no launch has recorded the one that it asked about."""
    if state.asked_gpu_hours is None or not runs:
        return None
    config = launched_config(folder, state)
    spent = progress.useful_gpu_hours + progress.wasted_gpu_hours
    rest = 0.0 if is_over else price_of(Plan(config=config, candidates=tuple(runs)), state).gpu_hours
    return Prices(*state.asked_gpu_hours, spent, spent + rest, config.price_per_gpu_hour)


class Snapshot(NamedTuple):
    """What a look at a sweep shows."""

    progress: SweepProgress
    activity: str
    """A key of REASON_BY_ACTIVITY."""
    idle_reason: str | None = None
    """Why nothing new starts; None where it is over, or a launcher submits its jobs."""
    prices: Prices | None = None
    num_starts_left: int = 0
    """What `num_starts_left` returns."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to measure, and no launcher follows the sweep any more."""
        return self.activity == "done"

    def as_json(self) -> dict[str, Any]:
        """The document of `sweep status --json`."""
        document = self.progress.as_json() | {"over": self.is_over, "standing": self.idle_reason}
        document["starts_left"] = self.num_starts_left
        if self.num_starts_left:
            document["eta_s"] = None  # that of the runs without a result is 0
        return document | ({"price": self.prices.as_json()} if self.prices else {})


def _snapshots(folder: SweepFolder, watch: bool) -> Iterator[Snapshot]:
    """Yields what a look at a sweep shows: once, or until the sweep is over.

    Each look reads only new lines of the journal, and the plan if it changed.
    """
    sweep_json, journal_reader, fold = read_sweep_json(folder), JournalReader(folder.journal, warn), Fold()
    fold.add(lines_of_new_copy(folder))
    read_plan_ns, runs, priced_at = -1, list[Candidate](), (-1, -1, -1)
    num_left, prices = 0, None
    while True:
        state = fold.add(journal_reader.poll())
        plan_ns = folder.plan.stat().st_mtime_ns if folder.plan.exists() else 0
        is_starting = not plan_ns and time.time() - last_written_s(folder.path) < MAX_START_S
        if plan_ns != read_plan_ns and not is_starting:
            runs = [*runs_of(sweep_json, read_rows(folder.plan, runs_only=True), state)]
            read_plan_ns = plan_ns
        progress = progress_of(folder.name, runs, state, sweep_json.hardware.device)
        num_ended = sum(attempt.result is not None for attempt in state.attempts.values())
        facts = num_ended, read_plan_ns, progress.left
        if facts != priced_at:  # an adaptive search takes a while to foresee
            priced_at, num_left = facts, num_starts_left(folder, runs, state, progress)
            prices = _prices(folder, runs, state, progress, is_over=not (progress.left or num_left))
        now = "starting" if is_starting else activity(folder, progress, state, num_left)
        reason = REASON_BY_ACTIVITY[now]
        if reason:
            words = {"refusal": _refusal(state), "disk": disk_problem(folder.path)}
            reason = reason.format(sweep=folder.display_name, **words)
        yield Snapshot(progress, now, reason, prices, num_left)
        # Repeats that nobody makes are waited for as little as those of a sweep that is over: a resume makes them.
        if not watch or not (progress.left or now in FOLLOWED):
            return
        time.sleep(WATCH_INTERVAL_S)


def activity(folder: SweepFolder, progress: SweepProgress, state: SweepState, num_left: int) -> str:
    """What a sweep does now, as a key of REASON_BY_ACTIVITY.

    Args:
        num_left: what `num_starts_left` returns.
    """
    # A copy has the leases of its original.
    is_followed = living_launchers(folder) and not lines_of_new_copy(folder)
    if not (progress.left or num_left):
        # A launcher knows of more, such as runs that it measures again (--reuse), or a control run that ends a job.
        return "followed" if is_followed else "done"
    if state.paused or state.cancelled:
        return "paused" if state.paused else "cancelled"
    if is_followed:
        if disk_problem(folder.path):
            return "disk"
        return "waiting" if _refusal(state) else "followed"
    return "unfollowed" if progress.num_at_work or progress.num_waiting else "stopped"


def disk_problem(path: Path) -> str | None:
    """What keeps files from being written to a folder: a disk that is full, over its quota or read-only; else None.

    A file without a name is written where the file system can do that, since only a write meets a quota.
    It leaves nothing.
    """
    try:
        statistics = os.statvfs(path)
    except OSError:
        return None
    if statistics.f_flag & os.ST_RDONLY:
        return f"{path} is on a read-only file system"
    try:
        descriptor = os.open(path, os.O_TMPFILE | os.O_WRONLY)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"cannot write to {path} ({error.strerror})"
        is_full = statistics.f_blocks and not statistics.f_bavail  # EACCES: the folder of another user
        return f"the disk of {path} is full" if is_full and error.errno != errno.EACCES else None
    try:
        os.write(descriptor, bytes(PROBE_BYTES))
        os.fsync(descriptor)
    except OSError as error:
        return f"cannot write to {path} ({error.strerror})"
    finally:
        os.close(descriptor)
    return None


def _refusal(state: SweepState) -> str | None:
    """Why the batch system did not take the latest allocation, though it may take a later one; None if it took it.

    An allocation that it has not answered for yet does not count: a launcher that waits submits again and again.
    """
    answered = [a for a in state.allocations.values() if a.job or a.agents or a.end]
    latest = max(answered, key=lambda a: a.submitting_at or 0.0, default=None)
    end = latest.end if latest else None
    return end.reason if end and end.code is EndCode.REFUSED else None


def status_view(snapshot: Snapshot, *, with_bar: bool = False) -> Group:
    """What `sweep status` shows: why nothing new starts, if so, the panel, a line for each node count, prices, and
    warnings."""
    progress, idle_reason, prices = snapshot.progress, snapshot.idle_reason, snapshot.prices
    num_settled = progress.settled_by_nodes
    reason_line = [Text(idle_reason, style="yellow")] if idle_reason else []
    if num_left := snapshot.num_starts_left:
        fact = f"All runs have a result; {counted(num_left, 'start')} {are(num_left)} left"
        reason_line.append(Text(f"{fact}: repeats, starts in full, or measurements in doubt."))
    # Lines for the numbers of nodes, because a table of all statuses would not fit a narrow terminal.
    node_lines = (Text(_nodes_line(n, counts, num_settled[n])) for n, counts in progress.by_nodes.items())
    warnings = (Text(f"warning: {line}", "yellow") for line in progress.node_warnings)
    unused_nodes = (Text(line, "yellow") for line in progress.nodes_not_used.values())
    view = panel(progress, idle_reason is None, with_bar)
    price_lines = [Text(prices.line())] if prices else []
    return Group(*reason_line, view, *node_lines, *price_lines, *unused_nodes, *warnings)


def _nodes_line(num_nodes: int, counts: Mapping[str, int], num_settled: int) -> str:
    """A line such as `2 nodes: 12 of 19 runs settled: 11 ok, 1 oom, 7 pending`."""
    num_runs = sum(counts.values())
    counts_text = ", ".join(f"{num} {status}" for status, num in counts.items())
    return f"{counted(num_nodes, 'node')}: {num_settled} of {counted(num_runs, 'run')} settled: {counts_text}"
