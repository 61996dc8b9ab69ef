"""`ultrabench sweep status` shows the progress of a sweep."""

import time
from collections.abc import Iterator, Mapping

from rich.console import Group
from rich.live import Live
from rich.text import Text

from ultrabench.cli.sweep.live import panel
from ultrabench.cli.tables import out, print_json, show, warn
from ultrabench.errors import counted
from ultrabench.store.folder import SweepFolder, living_launchers
from ultrabench.store.journal import JournalReader
from ultrabench.store.state import Fold, SweepState
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.running.progress import SweepProgress, progress_of

STANDINGS = {
    "done": None,
    "followed": None,
    "paused": "Paused. To continue: ultrabench sweep resume {sweep}",
    "cancelled": "Cancelled. Results are kept; run the launch command again to continue.",
    "unfollowed": "No launcher follows this sweep. Submitted jobs keep running; new ones need a launcher: ultrabench sweep resume {sweep}",
    "stopped": "Nothing is running. To continue: ultrabench sweep resume {sweep}",
}
"""What a sweep does -> why nothing new starts in it; None where it is over, or a launcher follows it."""
WATCH_S = 1.0
"""Seconds between two looks of `sweep status --watch`."""


def show_status(folder: SweepFolder, watch: bool, as_json: bool) -> None:
    """Prints the progress of a sweep, once or until it is over."""
    looks = _looks(folder, watch)
    if as_json:
        for progress, standing in looks:
            document = progress.as_json() | {"standing": standing}
        print_json(document)
    elif watch and not out().is_terminal:
        shown_counts = None
        for progress, standing in looks:
            if progress.by_nodes != shown_counts:
                show(_page(progress, standing), "")
            shown_counts = progress.by_nodes
    elif watch:
        with Live(console=out(), auto_refresh=False) as live:
            for progress, standing in looks:
                live.update(_page(progress, standing, bar=True), refresh=True)
    else:
        show(_page(*next(looks)))


def _looks(folder: SweepFolder, watch: bool) -> Iterator[tuple[SweepProgress, str | None]]:
    """Yields the progress of a sweep, and why it stands still if it does: once, or until the sweep is over.

    Each look reads only new lines of the journal, and the plan if it changed.
    """
    sweep, reader, journal = read_sweep_json(folder), JournalReader(folder.journal, warn), Fold()
    written_ns = -1
    while True:
        state = journal.add(reader.poll())
        plan_ns = folder.plan.stat().st_mtime_ns if folder.plan.exists() else 0
        if plan_ns != written_ns:
            runs = [*runs_of(sweep, read_rows(folder.plan, runs_only=True), state)]
            written_ns = plan_ns
        progress = progress_of(folder.name, runs, state, sweep.hardware.device)
        standing = STANDINGS[activity(folder, progress, state)]
        yield progress, standing and standing.format(sweep=folder.display_name)
        if not (watch and progress.left):
            return
        time.sleep(WATCH_S)


def activity(folder: SweepFolder, progress: SweepProgress, state: SweepState) -> str:
    """What a sweep does now, as a key of STANDINGS."""
    if not progress.left:
        return "done"
    if state.paused or state.cancelled:
        return "paused" if state.paused else "cancelled"
    if living_launchers(folder):
        return "followed"
    return "unfollowed" if progress.num_at_work or progress.num_waiting else "stopped"


def _page(progress: SweepProgress, standing: str | None, bar: bool = False) -> Group:
    heading = [Text(standing, style="yellow")] if standing else []
    # Lines for the numbers of nodes, because a table of all statuses would not fit a narrow terminal.
    lines = (_of_nodes(n, counts, progress.settled_by_nodes[n]) for n, counts in progress.by_nodes.items())
    warnings = (Text(f"warning: {line}", "yellow") for line in progress.node_warnings)
    return Group(*heading, panel(progress, busy=standing is None, bar=bar), *map(Text, lines), *warnings)


def _of_nodes(num_nodes: int, counts: Mapping[str, int], num_settled: int) -> str:
    """A line such as `2 nodes: 12 of 19 runs settled: 11 ok, 1 oom, 7 pending`."""
    num_runs = sum(counts.values())
    counts_text = ", ".join(f"{number} {status}" for status, number in counts.items())
    return f"{counted(num_nodes, 'node')}: {num_settled} of {counted(num_runs, 'run')} settled: {counts_text}"
