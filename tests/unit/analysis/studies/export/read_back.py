"""Exports a sweep in one process, again after it was renamed, and prints as JSON what the tracker's own
reader then finds.

`python -m tests.unit.analysis.studies.export.read_back KIND`, in a process of its own, since these libraries leave
threads and connections behind.
"""

import contextlib
import json
import os
import struct
import sys
from pathlib import Path

from ultrabench.cli.main import main

_BLOCK, _HEADER = 32768, struct.Struct("<IHB")
"""Bytes of a block and the header of a piece in the log format of LevelDB, in which W&B keeps offline runs."""


def export(kind):
    for command in (["export", kind], ["sweep", "rename", "quick-cpu", "new", "--yes"], ["export", kind]):
        sys.argv = ["ultrabench", *command]
        with contextlib.suppress(SystemExit):
            main()


def of_mlflow():
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{Path('results/mlflow.db').resolve()}")
    (experiment,) = (e for e in client.search_experiments() if e.name == "ultrabench")
    return [
        {
            "id": run.info.run_id, "name": run.info.run_name, "ended": run.info.status,
            "config": run.data.params, "metrics": run.data.metrics, "tags": run.data.tags,
            "points": {len(client.get_metric_history(run.info.run_id, name)) for name in run.data.metrics},
            "files": [file.path for file in client.list_artifacts(run.info.run_id)],
        }
        for run in client.search_runs([experiment.experiment_id])
    ]  # fmt: skip


def of_tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    runs = []
    for path in sorted(Path("results/tensorboard").glob("*/*/events*")):
        events = EventAccumulator(str(path.parent)).Reload()
        points = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        hparams = parse_session_start_info_plugin_data(content).hparams
        config = {name: getattr(value, value.WhichOneof("kind")) for name, value in hparams.items()}
        runs.append({"id": path.parent.name, "config": config, "metrics": points})
    return runs


def of_wandb():
    from wandb.proto.wandb_internal_pb2 import Record

    runs = []
    for path in sorted(Path("results/wandb").glob("offline-run-*/*.wandb")):
        run = {"id": path.stem.removeprefix("run-"), "config": {}, "metrics": {}, "files": []}
        for content in _pieces(path.read_bytes()):
            record = Record.FromString(content)
            for change in (*record.run.config.update, *record.config.update):
                run["config"][change.key] = json.loads(change.value_json)
            for change in record.summary.update:
                run["metrics"][change.key or change.nested_key[0]] = json.loads(change.value_json)
            entries = (
                record.request.log_artifact.artifact.manifest.contents or record.artifact.manifest.contents
            )
            run["files"] += [entry.path for entry in entries]
            if record.WhichOneof("record_type") == "run":
                run |= {"name": record.run.display_name, "group": record.run.run_group}
            if record.WhichOneof("record_type") == "exit":
                run["ended"] = record.exit.exit_code
        runs.append(run)
    return runs


def _pieces(log):
    """The records of a log: pieces of type 1 are whole, 2 begin one, 3 continue and 4 end it."""
    record, offset = b"", 7  # a header of W&B
    while offset + _HEADER.size <= len(log):
        if _BLOCK - offset % _BLOCK < _HEADER.size:
            offset += _BLOCK - offset % _BLOCK
            continue
        _, size, kind = _HEADER.unpack_from(log, offset)
        record += log[offset + _HEADER.size : offset + _HEADER.size + size]
        offset += _HEADER.size + size
        if kind in (1, 4):
            yield record
            record = b""


if __name__ == "__main__":
    os.environ |= {"WANDB_MODE": "offline"}
    kind = sys.argv[1]
    export(kind)
    read = {"mlflow": of_mlflow, "tensorboard": of_tensorboard, "wandb": of_wandb}[kind]
    print(json.dumps(read(), default=sorted))
