"""The command `ultrabench export`: the runs of a sweep as a CSV file or in a tracker of experiments."""

from pathlib import Path
from typing import Annotated

import typer

from ultrabench.cli.options import RESULTS, Json, ResultsDir, SweepOrFile
from ultrabench.cli.output import write_result
from ultrabench.errors import ConfigError, counted, require_known

Kind = Annotated[str, typer.Argument(metavar="KIND", help="csv, mlflow, tensorboard or wandb.")]
Project = Annotated[
    str | None, typer.Option(metavar="NAME", help="W&B project or MLflow experiment; default: ultrabench.")
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="CSV file, or folder for the local files of a tracker.")
]


def export(
    kind: Kind,
    source: SweepOrFile = None,
    output: Output = None,
    project: Project = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Writes the runs of a sweep to a CSV file or to a tracker."""
    from ultrabench.analysis.studies.export.library import PACKAGES, require_library

    require_known("kind of export", ("csv", *sorted(PACKAGES)), kind)
    if project is not None and kind not in ("wandb", "mlflow"):
        raise ConfigError(f"--project {project}; only wandb and mlflow have projects: leave it out")
    if kind != "csv":
        require_library(kind)
    from ultrabench.analysis.results.collect import open_results
    from ultrabench.analysis.studies.export.tracked_runs import csv_text, not_exported, tracked_runs
    from ultrabench.analysis.studies.export.trackers import log_results, open_tracker
    from ultrabench.cli.tables import output_console, print_json, say, warn

    source_name, path_prefix, result_table = open_results(source, results_dir, warn)
    runs = tracked_runs(result_table)
    if not runs:
        raise ConfigError(f"no run of {source_name} has ended; see ultrabench sweep status")
    if kind == "csv":
        destination = str(output or f"{path_prefix}export.csv")
        write_result(Path(destination), csv_text(runs).encode())
    else:
        from rich.progress import track

        tracker = open_tracker(kind, project, output or Path(path_prefix).parent)
        console = output_console(stderr=True)
        runs_with_bar = track(runs, "runs", console=console, transient=True, disable=not console.is_terminal)
        log_results(tracker, runs_with_bar, result_table, source_name)
        destination = tracker.destination_text
    if json_:
        print_json({"kind": kind, "runs": len(runs), "where": destination})
    say(f"exported {counted(len(runs), 'run')} to {destination}", *not_exported(result_table))
