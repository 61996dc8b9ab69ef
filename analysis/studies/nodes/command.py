"""The command `ultrabench nodes`, which says which nodes of a cluster are slow or failing."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ultrabench.cli.options import RESULTS, Json, ResultsDir, Since
from ultrabench.errors import ConfigError, SweepFolderError, UltrabenchError, counted
from ultrabench.store.damage import one_line_if_damaged, read_each
from ultrabench.store.folder import SweepFolder, find_sweep, sweep_dirs

if TYPE_CHECKING:  # for other commands this would be a slow import
    from ultrabench.analysis.studies.nodes.measurements import Row

Sweeps = Annotated[
    list[str] | None, typer.Argument(metavar="[SWEEP]...", help="Names or folders; default: all sweeps.")
]


def nodes(
    sweeps: Sweeps = None,
    as_exclude_list: bool = typer.Option(
        False, "--exclude-list", help="Print the marked nodes for sbatch --exclude."
    ),
    since: Since = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Prints all nodes, or the list of those that jobs should exclude."""
    from ultrabench.analysis.studies.nodes.nodes import exclude_list, reports
    from ultrabench.analysis.studies.nodes.relative import min_slowdowns
    from ultrabench.analysis.studies.nodes.table import (
        HEADS,
        NOTE,
        cells,
        days_text,
        health_text,
        slowdowns_text,
    )
    from ultrabench.cli.tables import print_json, show, table

    if as_exclude_list and json_:
        raise ConfigError("--exclude-list and --json cannot be combined; leave one out")
    folders = _folders(sweeps, results_dir)
    attempt_rows = _attempt_rows(folders)
    if since:
        attempt_rows = [row for row in attempt_rows if (row["started_at"] or 0.0) >= since.timestamp()]
        if not attempt_rows:
            fact = f"no attempt started since {since:%Y-%m-%d}"
            raise ConfigError(fact, "give an earlier date with --since")
    node_reports = reports(attempt_rows)
    if as_exclude_list:
        typer.echo(exclude_list(node_reports))
    elif json_:
        speed_losses = min_slowdowns(report.speeds for report in node_reports)
        unused_nodes = [
            {"sweep": name, "node": node, "reason": line} for name, node, line in _unused_nodes(folders)
        ]
        print_json({
            "nodes": [report.as_json() for report in node_reports], "smallest_losses": speed_losses,
            "not_used": unused_nodes,
        })  # fmt: skip
    else:
        num_marked = sum(report.marked for report in node_reports)
        table_rows = ([*cells(report), health_text(report)] for report in node_reports)
        title = f"{counted(len(node_reports), 'node')}, {num_marked} marked"
        notes = NOTE, slowdowns_text(node_reports), days_text(node_reports)
        unused_lines = [f"{name}: {line}" for name, _, line in _unused_nodes(folders)]
        show(table(title, *HEADS, "health", rows=table_rows), "", *unused_lines, *notes)


def _folders(sweep_names: list[str] | None, results_dir: Path) -> list[SweepFolder]:
    """The folders of the named sweeps, each once, or of all in the results folder."""
    if sweep_names:
        folders = {(folder := find_sweep(name, results_dir)).path.resolve(): folder for name in sweep_names}
        return [*folders.values()]
    sweep_paths = sorted(sweep_dirs(results_dir))
    if not sweep_paths:
        raise SweepFolderError(f"no sweep in {results_dir}/; start one with: ultrabench sweep launch")
    return [SweepFolder(sweep_path.absolute()) for sweep_path in sweep_paths]


def _attempt_rows(folders: list[SweepFolder]) -> "list[Row]":
    """The rows of sweeps; those that cannot be read give a warning, unless there is no other one."""
    from ultrabench.analysis.studies.nodes.measurements import journal_rows
    from ultrabench.cli.tables import warn

    def read(folder: SweepFolder) -> "list[Row]":
        return [*journal_rows(folder, warn)]

    rows_by_folder = read_each(folders, read, warn, path_of=lambda folder: folder.path)
    return [*chain.from_iterable(rows_by_folder.values())]


def _unused_nodes(folders: list[SweepFolder]) -> Iterator[tuple[str, str, str]]:
    """Sweep, node and a line that says why jobs of the sweep do not use the node, or only if they must."""
    from ultrabench.store.events import DECODERS
    from ultrabench.store.journal import read_journal
    from ultrabench.store.state import SweepState, fold
    from ultrabench.sweep.running.blame import EVENTS_OF_BLAME, EVENTS_OF_FAILURES, latest_blame, may_blame

    def state_of(folder: SweepFolder, event_names: Sequence[str]) -> SweepState:
        decoders = {name: DECODERS[name] for name in event_names}
        return fold(read_journal(folder.journal, lambda warning: None, decoders))

    for folder in folders:
        # `_attempt_rows` has warned. Most sweeps blame no node, so that the events of failures say enough.
        with contextlib.suppress(UltrabenchError), one_line_if_damaged(folder.path):
            if may_blame(state_of(folder, EVENTS_OF_FAILURES)):
                state = state_of(folder, EVENTS_OF_BLAME)
                for node, line in latest_blame(state).node_lines.items():
                    yield folder.name, node, line
