"""Logs the exported runs into MLflow: an experiment, in it one run for each sweep, and below it one for each run."""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ultrabench.analysis.studies.export.library import require_library, tracker_module
from ultrabench.analysis.studies.export.tracked_runs import TrackedRun

_KEY_TAG = "ultrabench.key"
"""Tag by which a run that was logged before is found again."""
_PARENT_TAG = "mlflow.parentRunId"


class MLflowExperiment:
    """Tracker that logs runs into one experiment of MLflow; to log a run again changes only the numbers that differ."""

    def __init__(self, project: str | None, folder: Path) -> None:
        """Opens MLFLOW_TRACKING_URI or, where it is not set, mlflow.db in `folder`.

        Args:
            project: name of the experiment; None means MLFLOW_EXPERIMENT_NAME or, where it is not set, ultrabench.
            folder: where the database and the artifacts are kept without MLFLOW_TRACKING_URI.

        Raises:
            ConfigError: MLflow is not installed.
        """
        require_library("mlflow")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self._entities, mlflow = tracker_module("mlflow.entities"), tracker_module("mlflow")
        for logger_name in ("mlflow", "alembic"):
            logging.getLogger(logger_name).setLevel(logging.WARNING)
        env_uri = os.environ.get("MLFLOW_TRACKING_URI")
        tracking_uri = env_uri or f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        artifact_uri = None if env_uri else (folder.resolve() / "mlartifacts").as_uri()
        experiment_name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "ultrabench"
        self._client, self._parent_ids = mlflow.MlflowClient(tracking_uri), dict[str, str]()
        self.destination_text = f"experiment {experiment_name} at {tracking_uri}"
        if experiment := self._client.get_experiment_by_name(experiment_name):
            self._experiment_id = experiment.experiment_id
        else:
            self._experiment_id = self._client.create_experiment(experiment_name, artifact_uri)

    def log(self, run: TrackedRun) -> None:
        """Makes or updates a run: settings as params, which never change, numbers as metrics, the outcome as tags."""
        tags = {
            "sweep": run.sweep,
            "cell": run.cell,
            **run.tags,
            _PARENT_TAG: self._parent_id(run.sweep, run.sweep_key),
        }
        mlflow_run, entities = self._found_or_new_run(run.key, run.name, tags), self._entities
        old_metrics, now_ms = mlflow_run.data.metrics, int(1000 * time.time())
        new_metrics = {name: value for name, value in run.metrics.items() if old_metrics.get(name) != value}
        new_params = {name: value for name, value in run.config.items() if name not in mlflow_run.data.params}
        self._client.log_batch(
            mlflow_run.info.run_id,
            metrics=[entities.Metric(name, number, now_ms, 0) for name, number in new_metrics.items()],
            params=[entities.Param(name, str(value)) for name, value in new_params.items()],
            tags=[entities.RunTag(name, text) for name, text in tags.items()],
        )
        self._client.set_terminated(mlflow_run.info.run_id, "FINISHED" if run.is_ok else "FAILED")

    def attach(self, sweep: str, sweep_key: str, paths: Sequence[Path]) -> None:
        """Keeps files as artifacts of the sweep's run; a file of the same name is replaced."""
        parent_id = self._parent_id(sweep, sweep_key)
        for path in paths:
            self._client.log_artifact(parent_id, str(path))
        self._client.set_terminated(parent_id)

    def _parent_id(self, sweep: str, sweep_key: str) -> str:
        """The id of the run of a sweep, which bears its present name."""
        if sweep_key not in self._parent_ids:
            parent_run = self._found_or_new_run(sweep_key, sweep, {"sweep": sweep})
            if parent_run.info.run_name != sweep:
                self._client.update_run(parent_run.info.run_id, name=sweep)
                self._client.set_tag(parent_run.info.run_id, "sweep", sweep)
            self._parent_ids[sweep_key] = parent_run.info.run_id
        return self._parent_ids[sweep_key]

    def _found_or_new_run(self, key: str, name: str, tags: dict[str, str]) -> Any:
        """The run with this key, which is made if there is none."""
        filter_text = f"tags.`{_KEY_TAG}` = '{key}'"
        for run in self._client.search_runs([self._experiment_id], filter_text, max_results=1):
            return run
        return self._client.create_run(self._experiment_id, tags={_KEY_TAG: key, **tags}, run_name=name)
