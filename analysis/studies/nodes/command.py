"""The command `ultrabench nodes`, which says which nodes of a cluster are slow or failing."""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ultrabench.cli.options import RESULTS, Json, ResultsDir, Since
from ultrabench.errors import ConfigError, SweepFolderError, counted
from ultrabench.store.damage import read_each
from ultrabench.store.folder import SweepFolder, find_sweep, sweep_dirs

if TYPE_CHECKING:  # for other commands this would be a slow import
    from ultrabench.analysis.studies.nodes.measurements import SweepNodes

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
    from ultrabench.analysis.studies.nodes.digests import device_histories, history_lines
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
    from ultrabench.store.digest_history import verified_digests

    if as_exclude_list and json_:
        raise ConfigError("--exclude-list and --json cannot be combined; leave one out")
    nodes_by_folder = _read_each(_folders(sweeps, results_dir))
    attempt_rows = [*chain.from_iterable(sweep_nodes.rows for sweep_nodes in nodes_by_folder.values())]
    if since:
        attempt_rows = [row for row in attempt_rows if (row["started_at"] or 0.0) >= since.timestamp()]
        if not attempt_rows:
            fact = f"no attempt started since {since:%Y-%m-%d}"
            raise ConfigError(fact, "give an earlier date with --since")
    node_reports = reports(attempt_rows)
    preflight_digests = chain.from_iterable(sweep_nodes.digests for sweep_nodes in nodes_by_folder.values())
    histories = device_histories(
        [*preflight_digests, *verified_digests(results_dir)], since.timestamp() if since else 0.0
    )
    unused_nodes = [
        {"sweep": folder.name, "node": node, "reason": reason}
        for folder, sweep_nodes in nodes_by_folder.items()
        for node, reason in sweep_nodes.unused.items()
    ]
    if as_exclude_list:
        typer.echo(exclude_list(node_reports))
    elif json_:
        speed_losses = min_slowdowns(report.speeds for report in node_reports)
        print_json({
            "nodes": [report.as_json() for report in node_reports], "smallest_losses": speed_losses,
            "not_used": unused_nodes, "gpus": histories,
        })  # fmt: skip
    else:
        num_marked = sum(report.marked for report in node_reports)
        table_rows = ([*cells(report), health_text(report)] for report in node_reports)
        title = f"{counted(len(node_reports), 'node')}, {num_marked} marked"
        notes = NOTE, slowdowns_text(node_reports), days_text(node_reports)
        unused_lines = [f"{unused['sweep']}: {unused['reason']}" for unused in unused_nodes]
        lines = *unused_lines, *history_lines(histories)
        show(table(title, *HEADS, "health", rows=table_rows), "", *lines, *notes)


def _folders(sweep_names: list[str] | None, results_dir: Path) -> list[SweepFolder]:
    """The folders of the named sweeps, each once, or of all in the results folder."""
    if sweep_names:
        folders = {(folder := find_sweep(name, results_dir)).path.resolve(): folder for name in sweep_names}
        return [*folders.values()]
    sweep_paths = sorted(sweep_dirs(results_dir))
    if not sweep_paths:
        raise SweepFolderError(f"no sweep in {results_dir}/; start one with: ultrabench sweep launch")
    return [SweepFolder(sweep_path.absolute()) for sweep_path in sweep_paths]


def _read_each(folders: list[SweepFolder]) -> "dict[SweepFolder, SweepNodes]":
    """What each sweep says about nodes; those that cannot be read give a warning, unless there is no other one."""
    from ultrabench.analysis.studies.nodes.measurements import read_nodes
    from ultrabench.cli.tables import warn

    return read_each(
        folders, lambda folder: read_nodes(folder, warn), warn, path_of=lambda folder: folder.path
    )
