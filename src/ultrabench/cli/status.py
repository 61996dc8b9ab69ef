"""`ultrabench sweep status`."""

import time
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.text import Text

from ultrabench.cli.live import panel
from ultrabench.cli.tables import out, print_json, table, warn
from ultrabench.folder import SweepFolder, find_sweep
from ultrabench.journal import JournalReader
from ultrabench.presence import living_launchers
from ultrabench.state import Fold, SweepState
from ultrabench.sweep.config import read_hardware
from ultrabench.sweep.losses import judged
from ultrabench.sweep.plan_table import read_plan
from ultrabench.sweep.progress import Progress, progress
from ultrabench.sweep.suspects import suspect_attempts

WATCH_S = 1.0


def show_status(sweep: str | None, watch: bool, as_json: bool, results: Path) -> int:
    """Prints how far a sweep is, once or until it is over; the exit code. Nothing is written or submitted."""
    folder = find_sweep(sweep, results)
    folder.read_head()
    reader, known = JournalReader(folder.journal, warn), Fold()
    now, standing, suspects = _look(folder, reader, known)
    while as_json and watch and _unsettled(now):
        time.sleep(WATCH_S)
        now, standing, suspects = _look(folder, reader, known)
    if as_json:
        print_json(now.as_json() | {"standing": standing, "suspects": suspects})
        return 0
    if not watch:
        out().print(_page(now, standing, suspects))
        return 0
    with Live(_page(now, standing, suspects), console=out(), auto_refresh=False) as live:
        while _unsettled(now):
            time.sleep(WATCH_S)
            now, standing, suspects = _look(folder, reader, known)
            live.update(_page(now, standing, suspects), refresh=True)
    return 0


def _unsettled(now: Progress) -> bool:
    return bool(now.by_status.get("pending") or now.by_status.get("running"))


def _look(
    folder: SweepFolder, reader: JournalReader, known: Fold
) -> tuple[Progress, str | None, dict[str, str]]:
    """How far it is, why it stands still if it does, and attempts whose number is in doubt, with the reason."""
    state = known.add(reader.poll())
    now = progress(folder.name, read_plan(folder.plan), state)
    hardware = (folder.read_head() or {}).get("hardware")
    device = read_hardware(hardware).device if hardware else "cpu"
    suspects = {str(key): why for key, why in suspect_attempts(judged(state), device=device).items()}
    return now, _standing(folder, now, state) if _unsettled(now) else None, suspects


def _standing(folder: SweepFolder, now: Progress, state: SweepState) -> str | None:
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


def _page(now: Progress, standing: str | None, suspects: dict[str, str]) -> Group:
    names = sorted({name for counts in now.by_nodes.values() for name in counts})
    made = table("", "nodes", *names, right=("nodes", *names))
    for nodes, counts in now.by_nodes.items():
        made.add_row(str(nodes), *(str(counts.get(name, "")) for name in names))
    told = [Text(standing, style="yellow")] if standing else []
    doubts = []
    if suspects:
        key, why = next(iter(suspects.items()))
        doubts = [Text(f"{len(suspects)} suspect and winning no cell, such as {key}: {why}", style="yellow")]
    return Group(*told, panel(now, busy=standing is None), made, *doubts)
