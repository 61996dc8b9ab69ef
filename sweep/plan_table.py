"""Writes and reads plan.parquet: one row for each candidate, with decision, reason and prediction."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ultrabench.errors import ConfigError, SweepFolderError
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import AXES, Layout
from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict
from ultrabench.run import RunSpec, Workload
from ultrabench.store.folder import write_whole
from ultrabench.store.state import SweepState
from ultrabench.store.sweep_json import SweepJson
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.predict.predict import Prediction

Row = dict[str, Any]
"""Column name -> value."""
RUNS = ("decision", "=", "run")
"""Filter of parquet rows that keeps only the candidates that run."""


def plan_table(candidates: Iterable[Candidate]) -> pa.Table:
    """The candidates as a table, in the order given."""
    rows: list[Row] = []
    for order, c in enumerate(candidates):
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
                "predicted_gpu_hours": c.gpu_hours,
            }
        )
    table = pa.Table.from_pylist(rows)
    at = table.schema.get_field_index("p_oom")
    table = table.set_column(at, "p_oom", table["p_oom"].cast(pa.float64()))
    for name in ("rule", "reason"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, table[name].cast(pa.string()))
    return table


def write_plan(candidates: Iterable[Candidate], path: Path) -> None:
    """Writes the plan to a temporary file beside `path` and renames it to `path`.

    Raises:
        SweepFolderError: the file cannot be written.
    """
    buffer = pa.BufferOutputStream()
    pq.write_table(plan_table(candidates), buffer)
    try:
        write_whole(path, buffer.getvalue().to_pybytes())
    except OSError as error:
        raise SweepFolderError(f"cannot write {path}: {error.strerror}; choose another place") from error


def read_rows(path: Path, *, runs_only: bool = False) -> list[Row]:
    """The rows of a plan.parquet in the plan's order; with `runs_only`, rejected candidates are left out.

    Raises:
        SweepFolderError: the file is missing or cannot be read.
    """
    try:
        rows: list[Row] = pq.read_table(path, filters=[RUNS] if runs_only else None).to_pylist()
    except FileNotFoundError:
        raise SweepFolderError(f"no {path}; launch the sweep again to write it") from None
    except (OSError, pa.ArrowException) as error:
        raise SweepFolderError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    return rows


def run_of(
    row: Row,
    shapes: Mapping[str, ModelShape],
    kernel: KernelConfig,
    seed: int,
    peak_flops_per_s: float | None,
) -> Candidate:
    """The run that a row of plan.parquet describes; a row leaves out what all runs of its sweep share.

    Args:
        shapes: model name -> shape.
        peak_flops_per_s: peak rate of one rank on the row's number of nodes; None where it is unknown.

    Raises:
        SweepFolderError: `shapes` lacks the model of the row.
    """
    if row["model"] not in shapes:
        raise SweepFolderError(
            f"plan.parquet holds model={row['model']}, of which neither sweep.json nor the journal has the sizes; "
            "launch the sweep again to write it"
        )
    return Candidate(
        run_id=row["run_id"],
        spec=RunSpec(
            shape=shapes[row["model"]],
            workload=Workload(seq_len=row["seq_len"], gbs=row["gbs"], seed=seed),
            layout=Layout(**{name: row[name] for name in AXES}),
            kernel=kernel,
            nodes=row["nodes"],
            gpus_per_node=row["gpus_per_node"],
        ),
        prediction=Prediction(
            step_time_s=row["predicted_step_time_s"],
            peak_mem_bytes=row["predicted_peak_mem_bytes"],
            memory_share=row["predicted_memory_share"],
            duration_s=row["predicted_gpu_hours"] * 3600 / row["gpus"],
        ),
        peak_flops_per_s=peak_flops_per_s,
    )


def shapes_of(sweep: SweepJson, state: SweepState) -> dict[str, ModelShape]:
    """Model name -> shape, for the models of sweep.json and of the latest launch, which wrote the plan."""
    try:
        launched = [from_dict(ModelShape, model) for model in state.config.get("models") or []]
    except ConfigError:
        launched = []
    return {shape.name: shape for shape in (*sweep.models, *launched)}


def runs_of(sweep: SweepJson, rows: Iterable[Row], state: SweepState) -> Iterator[Candidate]:
    """The runs among the rows of plan.parquet; `state` holds the latest launch, which wrote the plan.

    Raises:
        SweepFolderError: neither sweep.json nor the latest launch has the shape of a model.
    """
    shapes, runs = shapes_of(sweep, state), [row for row in rows if row["decision"] == "run"]
    peaks = {nodes: sweep.peak(nodes, sweep.kernel.precision) for nodes in {row["nodes"] for row in runs}}
    trains = sweep.kernel.kind != "probe"
    rates = {nodes: peak.flops_per_s if peak and trains else None for nodes, peak in peaks.items()}
    seed = sweep.workload.seed
    return (run_of(row, shapes, sweep.kernel, seed, rates[row["nodes"]]) for row in runs)
