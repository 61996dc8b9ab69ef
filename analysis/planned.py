"""Makes a result table of a plan: its predictions in the place of measurements, marked as such."""

import pyarrow as pa

from ultrabench.analysis.importing.derived import completed
from ultrabench.analysis.rows import Row
from ultrabench.analysis.schema import SCHEMA
from ultrabench.errors import SweepFolderError
from ultrabench.result import Status
from ultrabench.sweep.config.files import files
from ultrabench.sweep.plan_table import HARDWARE_KEY, KERNEL_KEY
from ultrabench.sweep.predict.predict import ADVISED_P_OOM

PREDICTED = "predicted"
"""The source of the rows of a plan, which marks titles and the names of files."""


NOTE = f"Predicted by a plan; nothing was measured. Out of memory: P(OOM) above {ADVISED_P_OOM:g}. "
"""What figures say of such rows."""


def is_predicted(table: pa.Table) -> bool:
    """Whether the rows of a result table are predictions of a plan."""
    return PREDICTED in table["source"].to_pylist()


def predicted_results(plan: pa.Table, name: str) -> pa.Table:
    """The rows of a plan.parquet as a result table in which each run ended as predicted.

    A run with P(OOM) of at most ADVISED_P_OOM is ok with the predicted step time, another one has the status oom.

    Raises:
        SweepFolderError: the plan does not name its hardware or a model that has a file.
    """
    metadata = plan.schema.metadata or {}
    hardware, kernel = (metadata.get(key, b"").decode() for key in (HARDWARE_KEY, KERNEL_KEY))
    if not hardware or not {*plan["model"].to_pylist()} <= {*files("model")}:
        need = "write it with ultrabench sweep plan -o plan.parquet, with models that have a file"
        raise SweepFolderError(f"{name} does not name its hardware or names an unknown model; {need}")
    runs = [row for row in plan.to_pylist() if row["decision"] == "run"]
    rows = [_result(row, name, hardware, kernel) for row in runs]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _result(run: Row, name: str, hardware: str, kernel: str) -> Row:
    """The row of a run that ends as predicted."""
    fits = run["p_oom"] <= ADVISED_P_OOM
    ended = {
        "status": Status.OK if fits else Status.OOM,
        "step_time_s": run["predicted_step_time_s"] if fits else None,
    }
    memory = run["predicted_peak_mem_bytes"] if fits else None
    place = {
        "sweep": name,
        "hardware": hardware,
        "kernel": kernel,
        "source": PREDICTED,
        "repeat": 0,
        "peak_mem_reserved_bytes": memory,
    }
    row, _ = completed({**run, **place, **ended}, {model: model for model in [run["model"]]})
    return row | {"run_id": run["run_id"]}
