"""Writes the exported runs as a CSV file: a line for each run, with its settings, numbers and outcome."""

import csv
import io
from collections.abc import Sequence

from ultrabench.analysis.export.tracked_runs import TrackedRun

_FIRST = ("sweep", "run_id", "name")


def csv_text(runs: Sequence[TrackedRun]) -> str:
    """The text of the file; what is not known of a run is empty."""
    rows = [
        {name: getattr(run, name) for name in _FIRST} | {**run.config} | {**run.metrics} | {**run.tags}
        for run in runs
    ]
    parts = (run.config for run in runs), (run.metrics for run in runs), (run.tags for run in runs)
    names = [*dict.fromkeys((*_FIRST, *(name for part in parts for values in part for name in values)))]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
