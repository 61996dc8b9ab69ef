"""Makes a result table from a plan: its predictions take the place of measurements and are marked as predictions."""

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis.results.imported.derived import typed_table, with_derived_columns
from ultrabench.analysis.results.imported.table_map import TableMap
from ultrabench.analysis.results.options import variant_in
from ultrabench.analysis.results.rows import variant_columns
from ultrabench.analysis.results.schema import SCHEMA
from ultrabench.errors import SweepFolderError
from ultrabench.result import Status
from ultrabench.sweep.candidate import NO_ROOM, CellKey
from ultrabench.sweep.config.files import files
from ultrabench.sweep.plan_table import FIRST_VALUES_KEY, HARDWARE_KEY, KERNEL_KEY
from ultrabench.sweep.predict.predict import ADVISED_P_OOM

PREDICTED = "predicted"
"""The source of the rows of a plan, which marks titles and the names of files."""
NOTE = f"Predicted by a plan; nothing was measured. Out of memory: P(OOM) above {ADVISED_P_OOM:g}. "
"""What figures say of such rows."""


def is_predicted(table: pa.Table) -> bool:
    """Whether the rows of a result table are predictions of a plan."""
    return PREDICTED in table["source"].to_pylist()


def predicted_results(plan: pa.Table, source_name: str) -> pa.Table:
    """The rows of a plan.parquet as a result table in which each run ended as predicted.

    A run with P(OOM) of at most ADVISED_P_OOM is ok with the predicted step time, another one has the status oom. As in
    `advised`, one without room for its allocator's reserve must not win its cell if others have room: it is suspect.

    Raises:
        SweepFolderError: the plan does not name its hardware or a model that has a file.
    """
    metadata = plan.schema.metadata or {}
    keys = (HARDWARE_KEY, KERNEL_KEY, FIRST_VALUES_KEY)
    hardware, kernel, first_values = (metadata.get(key.encode(), b"").decode() for key in keys)
    if not hardware or not {*plan["model"].to_pylist()} <= {*files("model")}:
        need = "write it with ultrabench sweep plan -o plan.parquet, with models that have a file"
        raise SweepFolderError(f"{source_name} does not name its hardware or names an unknown model; {need}")
    run_rows = plan.filter(pc.field("decision") == "run")
    runs = run_rows.to_pandas()
    is_fitting = runs["p_oom"] <= ADVISED_P_OOM
    has_room = is_fitting & (runs["predicted_memory_share"] <= 1)
    has_room_by_cell = has_room.groupby([runs[column] for column in CellKey._fields], dropna=False)
    lacks_room = is_fitting & ~has_room & has_room_by_cell.transform("any")
    variants = [*map(variant_in, run_rows["variant"].to_pylist())]
    options = [variant_columns(variant) for variant in variants]
    option_columns = pd.DataFrame(options, runs.index)
    rows = runs.assign(
        **option_columns, first_values=first_values or None, sweep=source_name, hardware=hardware, kernel=kernel,
        source=PREDICTED, repeat=0, attempt=0, is_final=True,
        status=is_fitting.map({True: Status.OK.value, False: Status.OOM.value}),
        step_time_s=runs["predicted_step_time_s"].where(is_fitting),
        peak_mem_reserved_bytes=runs["predicted_peak_mem_bytes"].where(is_fitting),
        suspect=lacks_room.map({True: NO_ROOM, False: None}),
        suspect_codes=lacks_room.map({True: ["no_room"], False: None}),
    )  # fmt: skip
    table_map = TableMap(columns={}, models={model: model for model in runs["model"]})
    derived = with_derived_columns(rows, table_map, {})
    return typed_table(derived.frame, SCHEMA.names)
