"""The trackers, to which runs are exported after a sweep or while it runs."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from ultrabench.analysis.page.page import page
from ultrabench.analysis.page.rows import document
from ultrabench.analysis.results.collect import parquet
from ultrabench.analysis.studies.export.tracked_runs import TrackedRun
from ultrabench.errors import UltrabenchError
from ultrabench.store.sweep_json import key_of


class Tracker(Protocol):
    """Keeps runs; to log a run again updates it, whoever logged it before."""

    destination_text: str
    """Where the runs are logged, in words for a message."""

    def log(self, run: TrackedRun) -> None:
        """Logs a run that has ended."""

    def attach(self, sweep: str, sweep_key: str, paths: Sequence[Path]) -> None:
        """Keeps files that belong to a whole sweep.

        Args:
            sweep_key: eight hex digits by which the sweep is known, also after it was renamed.
        """


def open_tracker(kind: str, project: str | None, folder: Path) -> Tracker:
    """The tracker of an extra of ultrabench, whose library is imported only now.

    Args:
        project: name of the project or experiment; None for the one that the tracker's own variable names.
        folder: where local files are kept.

    Raises:
        ConfigError: the library is not installed.
        UltrabenchError: the tracker cannot be used.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if kind == "wandb":
            from ultrabench.analysis.studies.export.to_wandb import WeightsAndBiases

            return WeightsAndBiases(project, folder)
        if kind == "mlflow":
            from ultrabench.analysis.studies.export.to_mlflow import MLflowExperiment

            return MLflowExperiment(project, folder)
        from ultrabench.analysis.studies.export.to_tensorboard import TensorBoard

        return TensorBoard(folder / "tensorboard")
    except Exception as error:
        raise _tracker_error(error) from error


def log_results(tracker: Tracker, runs: Iterable[TrackedRun], table: pa.Table, results_name: str) -> None:
    """Logs runs, and keeps the page and the table of their sweep.

    Args:
        results_name: the name of the sweep or of the file.

    Raises:
        UltrabenchError: the tracker cannot be used; what was logged stays.
    """
    try:
        for run in runs:
            tracker.log(run)
        with tempfile.TemporaryDirectory() as temporary_folder:
            files = _files(table, results_name, Path(temporary_folder))
            tracker.attach(results_name, _sweep_key(table, results_name), files)
    except Exception as error:
        raise _tracker_error(error) from error


def _sweep_key(table: pa.Table, results_name: str) -> str:
    """The key of the sweep of a table; that of its name where the rows have none, or those of several sweeps."""
    keys = {key for key in table["sweep_key"].unique().to_pylist() if key}
    return keys.pop() if len(keys) == 1 else key_of(results_name)


def _files(table: pa.Table, results_name: str, folder: Path) -> tuple[Path, Path]:
    html_file, parquet_file = folder / "report.html", folder / "runs.parquet"
    html_file.write_text(page(document(table, public=False), title=results_name), encoding="utf-8")
    parquet_file.write_bytes(parquet(table))
    return html_file, parquet_file


def _tracker_error(error: Exception) -> UltrabenchError:
    """The error of a tracker's library, which may be of any class, as one of ours."""
    if isinstance(error, UltrabenchError):
        return error
    todo = "export again when it works; existing runs are updated"
    return UltrabenchError(f"the tracker failed: {first_line(error)}", todo)


def first_line(error: Exception) -> str:
    """The first line of an error's text, at most 300 characters of it; its class where it says nothing."""
    return (next(iter(str(error).strip().splitlines()), "") or type(error).__name__)[:300]
