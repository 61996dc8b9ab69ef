"""`ultrabench sweep status` shows the progress of a sweep."""

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.text import Text

from ultrabench.cli.sweep.live import panel
from ultrabench.cli.tables import out, print_json, warn
from ultrabench.errors import counted
from ultrabench.store.folder import SweepFolder, find_sweep
from ultrabench.store.heartbeat import living_launchers
from ultrabench.store.journal import JournalReader
from ultrabench.store.state import Fold, SweepState
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.plan import Candidate
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.running.progress import SweepProgress, progress

WATCH_S = 1.0


def show_status(sweep: str | None, watch: bool, as_json: bool, results: Path) -> int:
    """Prints the progress of a sweep, once or until it is over; returns the exit code."""
    look = _Look(find_sweep(sweep, results))
    now, standing = look()
    while as_json and watch and _unsettled(now):
        time.sleep(WATCH_S)
        now, standing = look()
    if as_json:
        print_json(now.as_json() | {"standing": standing})
        return 0
    if not watch:
        out().print(_page(now, standing))
        return 0
    with Live(_page(now, standing, bar=True), console=out(), auto_refresh=False) as live:
        while _unsettled(now):
            time.sleep(WATCH_S)
            now, standing = look()
            live.update(_page(now, standing, bar=True), refresh=True)
    return 0


class _Look:
    """Reads the progress of a sweep; each call reads new lines of the journal, and the plan if it changed."""

    def __init__(self, folder: SweepFolder) -> None:
        self._folder, self._sweep = folder, read_sweep_json(folder)
        self._reader, self._known = JournalReader(folder.journal, warn), Fold()
        self._runs: list[Candidate] = []
        self._written_ns: int | None = None

    def __call__(self) -> tuple[SweepProgress, str | None]:
        """The progress of the sweep, and why it stands still if it does."""
        folder, state = self._folder, self._known.add(self._reader.poll())
        written_ns = folder.plan.stat().st_mtime_ns if folder.plan.exists() else None
        if written_ns is None or written_ns != self._written_ns:
            self._runs = [*runs_of(self._sweep, read_rows(folder.plan, runs_only=True), state)]
            self._written_ns = written_ns
        now = progress(folder.name, self._runs, state, self._sweep.hardware.device)
        return now, _standing(folder, now, state) if _unsettled(now) else None


def _unsettled(now: SweepProgress) -> bool:
    return bool(now.by_status.get("pending") or now.by_status.get("running"))


def _standing(folder: SweepFolder, now: SweepProgress, state: SweepState) -> str | None:
    if state.paused:
        return f"paused; go on with: ultrabench sweep resume {folder.word}"
    if state.cancelled:
        return "cancelled; the same launch command goes on"
    if living_launchers(folder):
        return None
    if now.running or now.waiting:
        told = "no launcher follows it; what was submitted goes on, what comes next waits for one"
    else:
        told = "nothing runs and no launcher follows it"
    return f"{told}: ultrabench sweep resume {folder.word}"


def _page(now: SweepProgress, standing: str | None, bar: bool = False) -> Group:
    told = [Text(standing, style="yellow")] if standing else []
    return Group(*told, panel(now, busy=standing is None, bar=bar), *map(Text, _by_nodes(now)))


def _by_nodes(now: SweepProgress) -> Iterator[str]:
    """A line for each number of nodes, because a table of all statuses would not fit a narrow terminal."""
    for nodes, counts in now.by_nodes.items():
        yield f"{counted(nodes, 'node')}: {', '.join(f'{n} {name}' for name, n in counts.items())}"
