"""The command `ultrabench nodes`, which says which nodes of a cluster are slow or failing."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ultrabench.cli.options import RESULTS, Json, ResultsDir, Since
from ultrabench.errors import ConfigError, SweepFolderError, UltrabenchError, counted
from ultrabench.store.folder import SweepFolder, find_sweep, sweeps_in

if TYPE_CHECKING:  # for other commands this would be a slow import
    from ultrabench.analysis.nodes.measurements import Row

Sweeps = Annotated[
    list[str] | None, typer.Argument(metavar="[SWEEP]...", help="Names or folders; default: all sweeps.")
]


def nodes(
    sweeps: Sweeps = None,
    exclude: bool = typer.Option(
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

    if exclude and json_:
        raise ConfigError("--exclude-list and --json cannot be combined; leave one out")
    rows = _rows(sweeps, results_dir)
    if since:
        rows = [row for row in rows if (row["started_at"] or 0.0) >= since.timestamp()]
        if not rows:
            raise ConfigError(
                f"no attempt started since {since:%Y-%m-%d}", "give an earlier date with --since"
            )
    node_reports = reports(rows)
    if exclude:
        typer.echo(exclude_list(node_reports))
    elif json_:
        slowdowns = min_slowdowns(report.speeds for report in node_reports)
        print_json({"nodes": [report.as_json() for report in node_reports], "smallest_losses": slowdowns})
    else:
        num_marked = sum(report.marked for report in node_reports)
        table_rows = ([*cells(report), health_text(report)] for report in node_reports)
        title = f"{counted(len(node_reports), 'node')}, {num_marked} marked"
        notes = NOTE, slowdowns_text(node_reports), days_text(node_reports)
        show(table(title, *HEADS, "health", rows=table_rows), "", *notes)


def _rows(names: list[str] | None, results_dir: Path) -> "list[Row]":
    """The rows of the named sweeps, or of all in the folder, of which those that cannot be read give a warning."""
    from ultrabench.analysis.nodes.measurements import Row, journal_rows
    from ultrabench.cli.tables import warn

    if names:
        folders = {(folder := find_sweep(name, results_dir)).path.resolve(): folder for name in names}
        return [row for folder in folders.values() for row in journal_rows(folder, warn)]
    rows, paths = list[Row](), sorted(sweeps_in(results_dir))
    for path in paths:
        try:
            rows += journal_rows(SweepFolder(path.absolute()), warn)
        except (UltrabenchError, OSError) as error:
            warn(f"{path.name}: {error}")
    if not paths:
        raise SweepFolderError(f"no sweep in {results_dir}/; start one with: ultrabench sweep launch")
    return rows
