"""Writes the exported runs as event files of TensorBoard, one folder for each run."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ultrabench.analysis.studies.export.library import tracker_module
from ultrabench.analysis.studies.export.tracked_runs import TrackedRun, plain_name

_STEP_TIMES_TAG = "step_times_s"
"""Name of the curve with the time of each measured step."""


class TensorBoard:
    """A folder of event files for each sweep; to log a run again replaces its folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if TensorBoard is not installed."""
        self._tensorboard_folder, self.destination_text = folder, f"{folder} (tensorboard --logdir {folder})"
        self._event_class = tracker_module("tensorboard.compat.proto.event_pb2").Event
        self._summary_class = tracker_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer_class = tracker_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._hparams_summary = tracker_module("tensorboard.plugins.hparams.summary_v2").hparams_pb

    def log(self, run: TrackedRun) -> None:
        """Writes the event file of a run: its settings as hparams, its numbers as scalars, and its step times."""
        run_folder = (
            self._sweep_folder(run.sweep, run.sweep_key) / f"{plain_name(run.name)[:150]}-{run.run_id}"
        )
        start_unix_s = run.started_at.timestamp() if run.started_at else 0.0
        temporary_folder = run_folder.with_name(f".{run.run_id}")
        shutil.rmtree(temporary_folder, ignore_errors=True)
        writer = self._writer_class(str(temporary_folder))
        for step, summary in self._summaries(run, start_unix_s):
            writer.add_event(self._event_class(wall_time=start_unix_s, step=step, summary=summary))
        writer.close()
        for earlier_folder in run_folder.parent.glob(f"[!.]*-{run.run_id}"):
            shutil.rmtree(earlier_folder)
        temporary_folder.rename(run_folder)

    def _sweep_folder(self, sweep: str, sweep_key: str) -> Path:
        """The folder of a sweep; that of a sweep which was renamed since gets the new name."""
        sweep_folder = self._tensorboard_folder / plain_name(sweep)
        if not sweep_folder.exists():
            for key_file in self._tensorboard_folder.glob(f"*/.{sweep_key}"):
                key_file.parent.rename(sweep_folder)
                break
        sweep_folder.mkdir(parents=True, exist_ok=True)
        (sweep_folder / f".{sweep_key}").touch()
        return sweep_folder

    def _summaries(self, run: TrackedRun, start_unix_s: float) -> Iterator[tuple[int, Any]]:
        settings = {"name": run.name, **run.config, **run.tags}
        yield 0, self._hparams_summary(settings, trial_id=run.key, start_time_secs=start_unix_s)
        for name, number in run.metrics.items():
            yield 0, self._scalar_summary(name, number)
        for step, seconds in enumerate(run.step_times_s):
            yield step, self._scalar_summary(_STEP_TIMES_TAG, seconds)

    def _scalar_summary(self, tag: str, number: float) -> Any:
        return self._summary_class(value=[self._summary_class.Value(tag=tag, simple_value=number)])

    def attach(self, sweep: str, sweep_key: str, paths: Sequence[Path]) -> None:
        """Copies files beside the event files, since TensorBoard keeps none."""
        for path in paths:
            shutil.copy(path, self._sweep_folder(sweep, sweep_key) / path.name)
