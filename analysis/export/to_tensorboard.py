"""Writes the exported runs as event files of TensorBoard, one folder for each run."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ultrabench.analysis.export.library import library
from ultrabench.analysis.export.tracked_runs import TrackedRun, plain_name

_STEP_TIMES_TAG = "step_times_s"
"""Name of the curve with the time of each measured step."""


class TensorBoard:
    """A folder of event files for each sweep; to log a run again replaces its folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if TensorBoard is not installed."""
        self._folder, self.where = folder, f"{folder} (tensorboard --logdir {folder})"
        self._event = library("tensorboard.compat.proto.event_pb2").Event
        self._summary = library("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = library("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._hparams = library("tensorboard.plugins.hparams.summary_v2").hparams_pb

    def log(self, run: TrackedRun) -> None:
        """Writes the event file of a run: its settings as hparams, its numbers as scalars, and its step times."""
        folder = self._sweep_folder(run.sweep) / f"{plain_name(run.name)[:150]}-{run.run_id}"
        time_s = run.started_at.timestamp() if run.started_at else 0.0
        temporary_folder = folder.with_name(f".{run.run_id}")
        shutil.rmtree(temporary_folder, ignore_errors=True)
        writer = self._writer(str(temporary_folder))
        for step, summary in self._summaries(run, time_s):
            writer.add_event(self._event(wall_time=time_s, step=step, summary=summary))
        writer.close()
        for earlier_folder in folder.parent.glob(f"[!.]*-{run.run_id}"):
            shutil.rmtree(earlier_folder)
        temporary_folder.rename(folder)

    def _sweep_folder(self, sweep: str) -> Path:
        return self._folder / plain_name(sweep)

    def _summaries(self, run: TrackedRun, time_s: float) -> Iterator[tuple[int, Any]]:
        settings = {"name": run.name, **run.config, **run.tags}
        yield 0, self._hparams(settings, trial_id=run.key, start_time_secs=time_s)
        for name, number in run.metrics.items():
            yield 0, self._scalar(name, number)
        for step, seconds in enumerate(run.step_times_s):
            yield step, self._scalar(_STEP_TIMES_TAG, seconds)

    def _scalar(self, tag: str, number: float) -> Any:
        return self._summary(value=[self._summary.Value(tag=tag, simple_value=number)])

    def attach(self, sweep: str, paths: Sequence[Path]) -> None:
        """Copies files beside the event files, since TensorBoard keeps none."""
        for path in paths:
            shutil.copy(path, self._sweep_folder(sweep) / path.name)
