"""`ultrabench sweep status`."""

import time
from pathlib import Path

from rich.console import Group
from rich.live import Live

from ultrabench.cli.live import panel
from ultrabench.cli.tables import out, print_json, table, warn
from ultrabench.folder import SweepFolder, find_sweep
from ultrabench.journal import JournalReader
from ultrabench.state import fold
from ultrabench.sweep.plan_table import read_plan
from ultrabench.sweep.progress import Progress, progress

WATCH_S = 1.0


def show_status(sweep: str | None, watch: bool, as_json: bool, results: Path) -> None:
    """Prints how far a sweep is, once or until it is over."""
    folder = find_sweep(sweep, results)
    folder.read_head()
    reader = JournalReader(folder.journal, warn)
    now = _look(folder, reader)
    while as_json and watch and _unsettled(now):
        time.sleep(WATCH_S)
        now = _look(folder, reader)
    if as_json:
        print_json(now.as_json())
        return
    if not watch:
        out().print(_page(now))
        return
    with Live(_page(now), console=out(), auto_refresh=False) as live:
        while _unsettled(now):
            time.sleep(WATCH_S)
            now = _look(folder, reader)
            live.update(_page(now), refresh=True)


def _unsettled(now: Progress) -> bool:
    return bool(now.by_status.get("pending") or now.by_status.get("running"))


def _look(folder: SweepFolder, reader: JournalReader) -> Progress:
    return progress(folder.name, read_plan(folder.plan), fold(reader.poll()))


def _page(now: Progress) -> Group:
    names = sorted({name for counts in now.by_nodes.values() for name in counts})
    made = table("", "nodes", *names, right=("nodes", *names))
    for nodes, counts in now.by_nodes.items():
        made.add_row(str(nodes), *(str(counts.get(name, "")) for name in names))
    return Group(panel(now), made)
