"""The schema of runs.parquet and its page, docs/reference/columns.md, from the columns in columns.py.

A row is one attempt, or a [candidate](../design/architecture.md#words) that was never tried (`repeat` and `attempt` are
null). A repeat is an independent measurement of a run; an attempt is one try of a repeat. Every candidate of the plan
has at least one row. `is_final` marks one row of each repeat: its `ok` attempt, or else its latest. Units are in the
names; `mfu` and similar columns are fractions. Unknown values are null, never 0 or -1; some columns give null another
meaning.

`status` is null while a run is pending or running; [rules](rules.md#statuses) lists the others. `ok` rows have speeds
and `mfu`. So do `invalid` rows whose only fault is a loss unlike that of other layouts. The file's metadata holds
each column's description and `ultrabench.schema_version`, which new columns keep; newer versions are refused.

How ultrabench finds the best run of a cell (model, batch, nodes, hardware, kernel, precision, routing):

- `ok` rows compete, except suspect rows and rows `stopped` as `slower_than_best`. If only suspect rows are left, they
  compete.
- If all competing rows have one `control` and environment, `control_ratio` ranks them, otherwise
  `tokens_per_s_per_gpu`. `heatmap --json` names the column (`ranked_by`); `--rank-by COLUMN` chooses another one of
  those whose `better` is higher or lower.
- Rows of a plan are ranked by `tokens_per_s_per_gpu` * (1 - `p_oom`), as `sweep plan --top` and `recommend` rank them.
  Those without room for the allocator's reserve are suspect where others have room.
- The value of a run is the median of its repeats (of an even number, between the two middle ones);
  so are the speeds and step times that answers show. Its interval covers the 95 % intervals of their step times;
  for `control_ratio` these include the control's. A run is as good as the best if their intervals overlap.
- An environment is what was chosen (`env`, the program) and observed (GPU, versions, `variables`); `env_id` hashes it.
  Measurements of a run in one environment are repeats; in two, they compete. Within a sweep, a driver update makes no
  new environment.
- Models with one name and different `model_id` have separate cells, named with the first digits of the id.
- GPUs that fill no whole number of nodes, such as 4 of 8, have a cell of their own.
- An imported row (with a `source`) that is suspect for its sizes or batch belongs to the cell of its source's other
  rows for that model.
"""

import pyarrow as pa

from ultrabench.analysis.results.columns import GROUPS
from ultrabench.column import NUMERIC_TYPES, Better, Column, ColumnType
from ultrabench.device_rates import LINK_FIELDS

RESULTS_SCHEMA_VERSION = 1
"""Version of result tables: new columns keep it, a changed meaning raises it, newer files are refused."""

VERSION_KEY = b"ultrabench.schema_version"
"""Key of the schema version in the metadata of a parquet file."""

TEXT, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
FLOATS, TEXTS, TIME = pa.list_(pa.float64()), pa.list_(pa.string()), pa.timestamp("us", tz="UTC")
LINK = pa.struct({"operation": TEXT, "scope": TEXT, **dict.fromkeys(LINK_FIELDS, FLOAT), "bytes": INT})
_ARROW_TYPES = {
    ColumnType.TEXT: TEXT, ColumnType.INT: INT, ColumnType.FLOAT: FLOAT, ColumnType.BOOL: BOOL, ColumnType.TEXTS: TEXTS,
    ColumnType.FLOATS: FLOATS, ColumnType.RECORDS: pa.list_(LINK), ColumnType.TIME: TIME,
}  # fmt: skip

CHECKPOINT = tuple(
    column.name
    for column in GROUPS["Outcome"]
    if column.name.startswith("checkpoint_") and column.type in NUMERIC_TYPES
)
"""Columns with the numbers of a checkpoint."""
MODEL = tuple(column.name for column in GROUPS["Model"])
"""Columns that say which model a run trains."""
SIZES = tuple(name for name in MODEL if name not in ("model", "model_id", "model_settings", "routing"))
"""Columns that hold a field or a property of the shape of a model."""
OF_EXPERTS = SIZES[SIZES.index("num_experts") :]
"""Columns with sizes that only models with experts have."""


def arrow_field(column: Column) -> pa.Field:
    """A column as parquet files hold it, with its meaning."""
    return pa.field(column.name, _ARROW_TYPES[column.type], metadata={"description": column.meaning})


SCHEMA: pa.Schema = pa.schema(
    [arrow_field(column) for group in GROUPS.values() for column in group],
    metadata={VERSION_KEY: str(RESULTS_SCHEMA_VERSION).encode()},
)


def markdown() -> str:
    """The text of docs/reference/columns.md: this module's docstring and a table for each group of columns."""
    heading = f"# The columns of runs.parquet\n\nSchema version {RESULTS_SCHEMA_VERSION}; printed by"
    about = str(__doc__).partition("\n\n")[2]
    parts = [f"{heading} `python -m ultrabench.analysis.results.schema`.\n\n{about}"]
    for group, columns in GROUPS.items():
        headings = ["| column | type | unit | better | meaning |", "|---|---|---|---|---|"]
        parts.append("\n".join([f"## {group}\n", *headings, *map(_markdown_row, columns), ""]))
    return "\n".join(parts)


def _markdown_row(column: Column) -> str:
    better = "" if column.better == Better.NONE else column.better
    return f"| `{column.name}` | {column.type} | {column.unit.symbol} | {better} | {column.meaning} |"


if __name__ == "__main__":
    print(markdown(), end="")
