"""The command `ultrabench nodes`, which says which nodes of a cluster are slow or failing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ultrabench.cli.options import RESULTS, Json, ResultsDir, Since
from ultrabench.errors import ConfigError, SweepFolderError, UltrabenchError, counted
from ultrabench.store.folder import SweepFolder, find_sweep, sweep_dirs

if TYPE_CHECKING:  # for other commands this would be a slow import
    from ultrabench.analysis.nodes.measurements import Row

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
    """Show the nodes of all sweeps, slow and failing ones first.

    A node is marked if it was slower than the others on at least two days, by more than chance and the usual
    differences between nodes explain."""
    from ultrabench.analysis.nodes.nodes import exclude_list, reports
    from ultrabench.analysis.nodes.relative import min_slowdowns
    from ultrabench.analysis.nodes.table import HEADS, NOTE, cells, days_text, health_text, slowdowns_text
    from ultrabench.cli.tables import print_json, show, table

    if as_exclude_list and json_:
        raise ConfigError("--exclude-list and --json cannot be combined; leave one out")
    attempt_rows = _attempt_rows(sweeps, results_dir)
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
        print_json({"nodes": [report.as_json() for report in node_reports], "smallest_losses": speed_losses})
    else:
        num_marked = sum(report.marked for report in node_reports)
        table_rows = ([*cells(report), health_text(report)] for report in node_reports)
        title = f"{counted(len(node_reports), 'node')}, {num_marked} marked"
        notes = NOTE, slowdowns_text(node_reports), days_text(node_reports)
        show(table(title, *HEADS, "health", rows=table_rows), "", *notes)


def _attempt_rows(sweep_names: list[str] | None, results_dir: Path) -> "list[Row]":
    """The rows of the named sweeps, or of all in the folder, of which those that cannot be read give a warning."""
    from ultrabench.analysis.nodes.measurements import Row, journal_rows
    from ultrabench.cli.tables import warn

    if sweep_names:
        folders = {(folder := find_sweep(name, results_dir)).path.resolve(): folder for name in sweep_names}
        return [row for folder in folders.values() for row in journal_rows(folder, warn)]
    rows, sweep_paths = list[Row](), sorted(sweep_dirs(results_dir))
    for sweep_path in sweep_paths:
        try:
            rows += journal_rows(SweepFolder(sweep_path.absolute()), warn)
        except (UltrabenchError, OSError) as error:
            warn(f"{sweep_path.name}: {error}")
    if not sweep_paths:
        raise SweepFolderError(f"no sweep in {results_dir}/; start one with: ultrabench sweep launch")
    return rows
