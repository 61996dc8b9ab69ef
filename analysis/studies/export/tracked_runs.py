"""The table of what is exported: one record for each run that was tried, with its layout, its numbers and its outcome.

Every tracker and the CSV file show these records, so that they agree with one another and with `sweep top`.
"""

import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import Any

import pandas as pd
import pyarrow as pa

from ultrabench.analysis.results.cells import layout_words, left_out
from ultrabench.analysis.results.columns import BOOL, GROUPS, RESULT_TABLE, TEXT
from ultrabench.analysis.results.ranking import Ranking
from ultrabench.analysis.results.rows import Row
from ultrabench.column import NUMERIC_TYPES, Source
from ultrabench.errors import counted
from ultrabench.result import NOT_TRIED, Status
from ultrabench.store.sweep_json import key_of

SettingValue = str | int | float | bool
"""A setting of a run."""
_ROW_KEY = ("sweep", "run_id", "repeat", "attempt")
"""Columns whose values identify a row of the results."""
_row_key_of = operator.itemgetter(*_ROW_KEY)
_CONFIG_COLUMNS = [
    column.name
    for column in RESULT_TABLE.values()
    if column.source == Source.RUN and column.name not in ("env", "variant", "first_values")
]
_OUTCOME = [column for group in ("Outcome", "State of the cluster", "Provenance") for column in GROUPS[group]]
_METRIC_COLUMNS = [column.name for column in _OUTCOME if column.type in NUMERIC_TYPES]
_TAG_COLUMNS = [
    "env_id", "kernel_digest", "gpu_name",
    *(column.name for column in _OUTCOME if column.type in (TEXT, BOOL) and column.name != "evidence"),
]  # fmt: skip
_RANKED_COLUMN = "ranked_value"
"""The column that `sweep top` adds for the number by which it ranks a run, the median of its repeats."""
_RANK_COLUMNS = ("rank", "num_repeats", "num_repeats_failed")
"""Further columns of numbers that `sweep top` adds to those of the results."""
_MARK_COLUMNS = ("best", "as_good_as_best")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as trackers show it, by the repeat that stands for it in its cell."""

    sweep: str
    sweep_key: str
    """Eight hex digits that stand for the sweep, which keeps them when it is renamed."""
    run_id: str
    name: str
    """Model, nodes and layout, as tables name them."""
    cell: str
    """Model and nodes, by which trackers group runs."""
    config: Mapping[str, SettingValue] = field(default_factory=dict)
    """What was run: columns of the results, and `variant.NAME` for each option that the sweep varies."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Column of the results, whose name has the unit -> finite number."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Column of the results -> how the run ended and where, in words; empty where there is nothing to say, so that an
    earlier word is replaced."""
    step_times_s: tuple[float, ...] = ()
    started_at: datetime | None = None

    @property
    def key(self) -> str:
        """The id of the run in a tracker: a hash of the sweep, since several may have measured it, and its own id."""
        return f"{self.sweep_key}-{self.run_id}"

    @property
    def is_ok(self) -> bool:
        """Whether the run ended with the status ok."""
        return self.tags["status"] == Status.OK


def plain_name(name: str) -> str:
    """The name with only those characters that every tracker and file system allows."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name).lstrip(".") or "_"


def tracked_runs(table: pa.Table, *, has_ranks: bool = True) -> list[TrackedRun]:
    """The runs of a result table that have ended, the first ones of `sweep top` first.

    Args:
        has_ranks: whether metrics and tags include the ranks, which change with every other result.

    Raises:
        ConfigError: the rows cannot be ranked together.
    """
    row_keys = zip(*(table[column].to_pylist() for column in _ROW_KEY), strict=True)
    index_by_key = {row_key: index for index, row_key in enumerate(row_keys)}
    ranking = Ranking(table)
    board_rows = [*chain.from_iterable(ranking.leaderboards(_ROW_KEY))]
    indices = pa.array([index_by_key[_row_key_of(row)] for row in board_rows], pa.int64())
    run_numbers = map(ranking.run_numbers, chain.from_iterable(ranking.standings.values()))
    rows = [row | numbers for row, numbers in zip(table.take(indices).to_pylist(), run_numbers, strict=True)]
    pairs = zip(rows, board_rows, strict=True)
    return [
        _tracked_run(row, board_row, has_ranks) for row, board_row in pairs if row["status"] not in NOT_TRIED
    ]


def not_exported(table: pa.Table) -> list[str]:
    """Lines that count the rows which no exported run stands for: layouts that were not tried, and incomplete rows."""
    rows = table.select(["run_id", "status", "model", "nodes"]).to_pylist()
    complete_rows = [row for row in rows if row["model"] is not None and row["nodes"] is not None]
    statuses = {row["run_id"]: row["status"] for row in complete_rows if row["status"] in NOT_TRIED}
    counts = Counter(status or "pending or running" for status in statuses.values())
    texts = [f"{number:,} {status}" for status, number in counts.most_common()]
    return [*([f"not exported: {', '.join(texts)}"] if texts else []), *left_out(table)]


def csv_text(runs: Sequence[TrackedRun]) -> str:
    """The text of a CSV file with a line for each run; what is not known of a run is empty."""
    names = [{"sweep": run.sweep, "run_id": run.run_id, "name": run.name} for run in runs]
    parts = names, [run.config for run in runs], [run.metrics for run in runs], [run.tags for run in runs]
    table = pd.concat([pd.DataFrame(records, dtype=object) for records in parts], axis=1)
    return table.to_csv(index=False, lineterminator="\n")


def _tracked_run(row: Row, board_row: Row, has_ranks: bool) -> TrackedRun:
    variant_values = {f"variant.{name}": str(value) for name, value in board_row["options"].items()}
    rank_columns = (*_RANK_COLUMNS * has_ranks, _RANKED_COLUMN)
    numbers = [*_known_values(board_row, rank_columns), *_known_values(row, _METRIC_COLUMNS)]
    tag_texts = {name: board_row[name] for name in (*_MARK_COLUMNS * has_ranks, "ranked_by")}
    tag_texts |= {name: row[name] for name in _TAG_COLUMNS}
    sweep_name = row["sweep"] or row["source"] or ""
    cell_name = f"{row['model']} on {counted(row['nodes'], 'node')}"
    return TrackedRun(
        sweep=sweep_name,
        sweep_key=row["sweep_key"] or key_of(sweep_name),
        run_id=row["run_id"],
        name=" ".join((cell_name, *layout_words(row | {"options": board_row["options"]}))),
        cell=cell_name,
        config=dict(_known_values(row, _CONFIG_COLUMNS)) | variant_values,
        metrics={name: float(number) for name, number in numbers if math.isfinite(number)},
        tags={name: "" if text is None else str(text) for name, text in tag_texts.items()},
        step_times_s=tuple(row["step_times_s"] or ()),
        started_at=row["started_at"],
    )


def _known_values(row: Row, column_names: Iterable[str]) -> list[tuple[str, Any]]:
    """Name and value of each of these columns whose value is known."""
    return [(column, row[column]) for column in column_names if row[column] is not None]
