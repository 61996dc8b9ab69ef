"""Logs the exported runs into Weights & Biases, or into its offline files where WANDB_MODE=offline."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ultrabench.analysis.studies.export.library import tracker_module
from ultrabench.analysis.studies.export.tracked_runs import TrackedRun, plain_name


class WeightsAndBiases:
    """A project; to log a run again updates the run of the same id, and replaces its offline files."""

    def __init__(self, project: str | None, folder: Path) -> None:
        """Files are kept in WANDB_DIR or, where it is not set, in the folder wandb of `folder`.

        Raises:
            ConfigError: wandb is not installed.
        """
        self._wandb = tracker_module("wandb")
        self._project = project or os.environ.get("WANDB_PROJECT") or "ultrabench"
        self._folder = Path(os.environ.get("WANDB_DIR") or folder)
        self.destination_text = f"W&B project {self._project}"
        if os.environ.get("WANDB_MODE") == "offline":
            self.destination_text += f", offline (wandb sync {self._folder}/wandb/offline-run-*)"

    def log(self, run: TrackedRun) -> None:
        """Makes or updates a run: its settings as config, its numbers and its outcome as summary."""
        wandb_run = self._begin_run(run.key, run.name, run.sweep, "run")
        wandb_run.config.update({"sweep": run.sweep, "cell": run.cell, **run.config}, allow_val_change=True)
        wandb_run.summary.update({**run.metrics, **run.tags})
        self._finish_run(wandb_run, exit_code=0 if run.is_ok else 1)

    def attach(self, sweep: str, sweep_key: str, paths: Sequence[Path]) -> None:
        """Keeps files as an artifact of a run of the sweep; equal files make no new version."""
        wandb_run = self._begin_run(sweep_key, sweep, sweep, "sweep")
        artifact = self._wandb.Artifact(plain_name(sweep), type="results")
        for path in paths:
            artifact.add_file(str(path))
        wandb_run.log_artifact(artifact)
        self._finish_run(wandb_run, exit_code=0)

    def _begin_run(self, key: str, name: str, sweep: str, kind: str) -> Any:
        disabled_features = dict.fromkeys(("disable_git", "x_disable_stats", "x_disable_meta"), True)
        settings = self._wandb.Settings(silent=True, console="off", **disabled_features)
        return self._wandb.init(
            project=self._project, id=key, name=name, group=sweep, job_type=kind, dir=str(self._folder),
            resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow", settings=settings,
        )  # fmt: skip

    def _finish_run(self, wandb_run: Any, exit_code: int) -> None:
        """Ends a run; then its earlier offline files go, which `wandb sync` would upload a second time."""
        run_folder = Path(wandb_run.dir).parent
        wandb_run.finish(exit_code=exit_code)
        for earlier_folder in run_folder.parent.glob(f"offline-run-*-{wandb_run.id}"):
            if earlier_folder != run_folder:
                shutil.rmtree(earlier_folder)
