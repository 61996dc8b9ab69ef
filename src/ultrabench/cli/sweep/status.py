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
from ultrabench.sweep.running.progress import SweepProgress, progress

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
        for now, standing in looks:
            document = now.as_json() | {"standing": standing}
        print_json(document)
    elif watch and not out().is_terminal:
        shown = None
        for now, standing in looks:
            if now.by_nodes != shown:
                show(_page(now, standing), "")
            shown = now.by_nodes
    elif watch:
        with Live(console=out(), auto_refresh=False) as live:
            for now, standing in looks:
                live.update(_page(now, standing, bar=True), refresh=True)
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
        now = progress(folder.name, runs, state, sweep.hardware.device)
        standing = STANDINGS[activity(folder, now, state)]
        yield now, standing and standing.format(sweep=folder.display_name)
        if not (watch and now.left):
            return
        time.sleep(WATCH_S)


def activity(folder: SweepFolder, now: SweepProgress, state: SweepState) -> str:
    """What a sweep does now, as a key of STANDINGS."""
    if not now.left:
        return "done"
    if state.paused or state.cancelled:
        return "paused" if state.paused else "cancelled"
    if living_launchers(folder):
        return "followed"
    return "unfollowed" if now.num_at_work or now.num_waiting else "stopped"


def _page(now: SweepProgress, standing: str | None, bar: bool = False) -> Group:
    above = [Text(standing, style="yellow")] if standing else []
    # Lines for the numbers of nodes, because a table of all statuses would not fit a narrow terminal.
    lines = (_of_nodes(n, counts, now.settled_by_nodes[n]) for n, counts in now.by_nodes.items())
    warnings = (Text(f"warning: {line}", "yellow") for line in now.node_warnings)
    return Group(*above, panel(now, busy=standing is None, bar=bar), *map(Text, lines), *warnings)


def _of_nodes(nodes: int, counts: Mapping[str, int], settled: int) -> str:
    """A line such as `2 nodes: 12 of 19 runs settled: 11 ok, 1 oom, 7 pending`."""
    runs = sum(counts.values())
    ends = ", ".join(f"{number} {status}" for status, number in counts.items())
    return f"{counted(nodes, 'node')}: {settled} of {counted(runs, 'run')} settled: {ends}"
