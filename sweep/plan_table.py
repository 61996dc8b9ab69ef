"""plan.parquet: one row a candidate, with decision, reason and prediction."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ultrabench.errors import SweepFolderError
from ultrabench.layout import AXES, Layout
from ultrabench.store.folder import write_whole
from ultrabench.sweep.dominated import fit_of
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.progress import PlannedRun


def plan_table(plan: Plan) -> pa.Table:
    """The plan as a table, in the plan's order."""
    rows: list[dict[str, Any]] = []
    for order, c in enumerate(plan.candidates):
        rows.append(
            {
                "order": order,
                "run_id": c.run_id,
                "model": c.shape.name,
                "nodes": c.nodes,
                "gpus_per_node": c.spec.gpus_per_node,
                "gpus": c.layout.world_size,
                **{name: getattr(c.layout, name) for name in (*AXES, "gbs")},
                "seq_len": c.spec.workload.seq_len,
                "valid": c.valid,
                "rule": c.rule,
                "reason": c.reason,
                "decision": "run" if c.runs else "rejected",
                "predicted_step_time_s": c.prediction.step_time_s,
                "predicted_peak_mem_bytes": int(c.prediction.peak_mem_bytes),
                "predicted_memory_share": c.prediction.memory_share,
                "predicted_to_fit": c.fits,
                "p_oom": None,
                "predicted_gpu_hours": c.gpu_hours(plan.steps),
            }
        )
    table = pa.Table.from_pylist(rows)
    at = table.schema.get_field_index("p_oom")
    table = table.set_column(at, "p_oom", table["p_oom"].cast(pa.float64()))
    for name in ("rule", "reason"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, table[name].cast(pa.string()))
    return table


def write_plan(plan: Plan, path: Path) -> None:
    """Writes the plan beside `path` and renames it.

    Raises:
        SweepFolderError: it cannot be written.
    """
    buffer = pa.BufferOutputStream()
    pq.write_table(plan_table(plan), buffer)
    try:
        write_whole(path, buffer.getvalue().to_pybytes())
    except OSError as error:
        raise SweepFolderError(f"cannot write {path}: {error.strerror}; choose another place") from error


def planned_runs(plan: Plan) -> list[PlannedRun]:
    """The runs of a plan, as progress needs them."""
    return [_planned(row) for row in plan_table(plan).to_pylist() if row["decision"] == "run"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a plan.parquet.

    Raises:
        SweepFolderError: the file cannot be read.
    """
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except FileNotFoundError:
        raise SweepFolderError(f"no {path}; launch the sweep again to write it") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise SweepFolderError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    return rows


def read_plan(path: Path) -> list[PlannedRun]:
    """The runs of a plan.parquet, as progress needs them."""
    return [_planned(row) for row in read_rows(path) if row["decision"] == "run"]


def _planned(row: dict[str, Any]) -> PlannedRun:
    return PlannedRun(
        run_id=row["run_id"],
        model=row["model"],
        nodes=row["nodes"],
        gpus=row["gpus"],
        fit=fit_of(row, _layout(row)),
        tokens_per_step=row["gbs"] * row["seq_len"],
        seq_len=row["seq_len"],
        duration_s=row["predicted_gpu_hours"] * 3600 / row["gpus"],
    )


def _layout(row: dict[str, Any]) -> Layout:
    return Layout(**{name: row[name] for name in AXES})
