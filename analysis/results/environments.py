"""The environments in which the rows of a result table were measured: which count as one, and how they differ.

What is chosen (the variables of kernel.env, the program) and what is observed (GPU, versions, variables) make an
environment, whose hash is `env_id`. Runs of one layout in two environments are two contenders of their cell, and not
repeats of one run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import pyarrow as pa

from ultrabench.analysis.results.options import variant_in
from ultrabench.result import Status
from ultrabench.standing import environments_of, merge_environments
from ultrabench.variant import one_line, value_text

CHOSEN = ("env", "kernel_digest", "kernel_version")
"""Columns with what the user chose: the variables of kernel.env, and the program."""
OBSERVED = ("gpu_name", "torch_version", "cuda_version", "nccl_version", "variables", "driver_version")
"""Columns with what a rank saw."""
DRIVERLESS = tuple(name for name in (*CHOSEN, *OBSERVED) if name != "driver_version")
"""Columns in which environments differ that do not count as one."""
COLUMNS = ("sweep", "run_id", "status", "env_id", *CHOSEN, *OBSERVED)
"""Columns that this module reads."""
_CONTEXT_COLUMNS = (
    "sweep", "cluster", "hardware", "kernel", "precision", "compile", "git_commit", *CHOSEN, *OBSERVED,
)  # fmt: skip
"""Columns that describe what was measured and where."""
_VARIABLE_COLUMNS = ("env", "variables")
"""Columns that hold variables as a JSON object."""
_LABEL_BY_COLUMN = {"kernel_digest": "program", "kernel_version": "version", "gpu_name": "GPU"}
"""Column -> its name in labels; other columns are named without `_version`."""
ID_CHARS = 8
"""Number of hex digits of env_id that name an environment."""


class Environments:
    """The environments of a table, and for each row the one that it belongs to."""

    def __init__(self, table: pa.Table) -> None:
        has_several = len(table["env_id"].drop_null().unique()) > 1
        rows = table.select([*COLUMNS]).to_pylist() if has_several else []
        ok_rows = [row for row in rows if row["status"] == Status.OK and row["env_id"]]
        row_by_id = {row["env_id"]: row for row in ok_rows}
        self._merged_id, self._merged_drivers = _merged_environments(ok_rows)
        self._row_by_id = {env_id: row_by_id[env_id] for env_id in sorted({*self._merged_id.values()})}
        repeats = [(row["sweep"], row["run_id"], row["status"], row["env_id"]) for row in rows]
        self.ids: list[str | None] = environments_of(repeats, self._merged_id) or [None] * len(table)
        """For each row the env_id that stands for its environment; None where it is unknown or the only one."""

    def labels(self, env_ids: Iterable[str | None]) -> dict[str, str]:
        """env_id -> how it differs from the others of one cell, such as `ALGO=Ring`; empty where there is only one."""
        distinct_ids = sorted({env_id for env_id in env_ids if env_id})
        if len(distinct_ids) < 2:
            return {}
        rows = [self._row_by_id[env_id] for env_id in distinct_ids]
        differing_columns = [name for name in (*CHOSEN, *OBSERVED) if len({row[name] for row in rows}) > 1]
        text_by_id = {env_id: self._label(env_id, differing_columns, distinct_ids) for env_id in distinct_ids}
        counts = Counter(text_by_id.values())
        return {
            env_id: text if text and counts[text] == 1 else f"{text} environment {env_id[:ID_CHARS]}".strip()
            for env_id, text in text_by_id.items()
        }

    def _label(self, env_id: str, columns: Sequence[str], env_ids: Sequence[str]) -> str:
        """The values of one environment in these columns; of variables only those that differ in `env_ids`."""
        texts = []
        for column in columns:
            values = {other_id: self._row_by_id[other_id][column] for other_id in env_ids}
            if column in _VARIABLE_COLUMNS:
                variables = {other_id: variant_in(text) for other_id, text in values.items()}
                texts += _variable_texts(variables, env_id)
            else:
                name = _LABEL_BY_COLUMN.get(column, column.removesuffix("_version"))
                texts.append(f"{name} {values[env_id] or 'unknown'}")
        return " ".join(dict.fromkeys(texts))

    def contenders(self, run_ids: Iterable[str]) -> list[str]:
        """For each row a name of what competes in its cell: its run_id, and the environment where there are several."""
        ids_of_rows = zip(run_ids, self.ids, strict=True)
        return [f"{run_id}.{env_id[:ID_CHARS]}" if env_id else run_id for run_id, env_id in ids_of_rows]

    @property
    def parts(self) -> list[dict[str, str | None]]:
        """For each row: column of CHOSEN or OBSERVED (without the driver) -> its value;
        empty if the table has one environment.
        """
        return [
            {name: self._row_by_id[env_id][name] for name in DRIVERLESS} if env_id else {}
            for env_id in self.ids
        ]

    @property
    def notes(self) -> list[str]:
        """A line for each sweep in which environments that differ only in the driver count as one."""
        return [
            f"{sweep}: drivers {' and '.join(drivers)} count as one environment because nothing else differs"
            for sweep, drivers in sorted(self._merged_drivers.items())
        ]


def environment_numbers(frame: pd.DataFrame) -> pd.Series:
    """For each row of a ranking, which has the columns DRIVERLESS, the number of its environment.

    Rows without an env_id, such as imported ones, have equal numbers if they are equal in DRIVERLESS.
    """
    facts = frame[[*DRIVERLESS]].where(frame["env_id"].isna()).assign(environment=frame["competes_in"])
    return facts.groupby([*facts], dropna=False).ngroup()


def _merged_environments(ok_rows: Iterable[Mapping[str, str]]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """env_id -> the env_id of the environment that it counts as, and sweep -> its drivers that count as one."""
    keyed_rows = ((tuple(str(row[name]) for name in ("sweep", *DRIVERLESS)), row) for row in ok_rows)
    environments = ((key, row["env_id"], row["driver_version"] or "") for key, row in keyed_rows)
    representative_by_id, drivers_by_key = merge_environments(sorted(environments))
    drivers_by_sweep = {key[0]: drivers for key, drivers in drivers_by_key.items() if isinstance(key, tuple)}
    return representative_by_id, drivers_by_sweep


def _variable_texts(variables_by_id: Mapping[str, Mapping[str, str]], env_id: str) -> list[str]:
    """The variables of one environment that differ from those of another one."""
    names = sorted({name for variables in variables_by_id.values() for name in variables})
    differing_names = [name for name in names if len({v.get(name) for v in variables_by_id.values()}) > 1]
    values = variables_by_id[env_id]
    return [
        f"{one_line(name)}={value_text(values[name])}" if name in values else f"{one_line(name)} unset"
        for name in differing_names
    ]


def differing(table_a: pa.Table, table_b: pa.Table) -> dict[str, tuple[str, str]]:
    """Column of _CONTEXT_COLUMNS -> its values in the tables A and B, where these differ."""
    values_by_column = {}
    for name in _CONTEXT_COLUMNS:
        distinct_values = (table[name].drop_null().unique().to_pylist() for table in (table_a, table_b))
        values_a, values_b = (sorted(map(str, values)) for values in distinct_values)
        if values_a != values_b:
            values_by_column[name] = " / ".join(values_a) or "unknown", " / ".join(values_b) or "unknown"
    return values_by_column
