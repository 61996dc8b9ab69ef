"""The best layout of each cell, with those that are as good, or why there is none."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import hypot
from statistics import median

import pyarrow as pa

from ultrabench.analysis.cells import Cell
from ultrabench.analysis.rows import Row
from ultrabench.analysis.why_empty import why_empty
from ultrabench.errors import ConfigError, unknown_name
from ultrabench.layout import AXES
from ultrabench.sweep.outliers import may_win

DEFAULT_RANK_BY = "tokens_per_s_per_gpu"

_PANEL = ("hardware", "kernel", "precision", "seq_len", "gbs")
_SHAPE = (
    "num_params", "model", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "intermediate_size", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
_KEY = (*_PANEL, *_SHAPE, "nodes")
"""A cell: two models of one name and different shape are two cells, and so are two batches."""
_WINNER = (
    "mfu", "source_mfu", "tokens_per_s_per_gpu", "peak_mem_reserved_bytes", "peak_source",
)  # fmt: skip
_OTHERS = (
    "run_id", "status", "rule", "reason", "suspect", "stopped", "step_time_ci95_rel", "sweep", "allocation",
    "control", "control_ratio", "attempt", "step_time_s", "predicted_step_time_s", "predicted_peak_mem_bytes",
)  # fmt: skip

_LOWER_IS_BETTER = frozenset({
    "step_time_s", "step_time_ci95_rel", "init_time_s", "duration_s", "gpu_hours", "loss_final",
    "peak_mem_allocated_bytes", "peak_mem_reserved_bytes", "peak_mem_reserved_rank0_bytes",
    "predicted_step_time_s", "predicted_peak_mem_bytes", "p_oom",
})  # fmt: skip
_AS_SURE_AS_STEP_TIME = frozenset({
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "hfu", "source_mfu",
    "model_flops_per_s_per_gpu", "control_ratio",
})  # fmt: skip
"""Columns proportional to the step time or its inverse: its relative interval is theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contender:
    """A run with its goodness (larger is better) and the interval of it over its repeats."""

    run_id: str
    goodness: float
    low: float
    high: float
    row: Row


def rank(table: pa.Table, *, rank_by: str = DEFAULT_RANK_BY, include_suspects: bool = False) -> list[Cell]:
    """The cells of a result table, by hardware, kernel, workload, parameters, model and nodes.

    Only final ok rows compete: no suspects unless asked for, and nothing that was stopped early
    as slower than the best. By default speeds are compared through the control layout where all of
    them can be. A run that was repeated counts with the median of its repeats.

    Raises:
        ConfigError: `rank_by` is no numeric column.
    """
    groups = _groups(table, rank_by)
    return [_cell(rows, rank_by, include_suspects) for rows in groups]


def leaderboard(table: pa.Table, *, rank_by: str = DEFAULT_RANK_BY) -> list[list[Row]]:
    """The runs of each cell, each as the row that stands for it, with its rank among all of them.

    In a cell those that may win stand first, as `rank` orders them, then the other ok runs, failed
    ones, those that run or wait, and those that were skipped. `best` and `as_good_as_best` mark winners.

    Raises:
        ConfigError: `rank_by` is no numeric column, or no ok run has a value in it.
    """
    number = count(1)
    cells = [[*_places(rows, rank_by)] for rows in _groups(table, rank_by)]
    oks = [row for rows in cells for row in rows if row["status"] == "ok"]
    if oks and all(row[rank_by] is None for row in oks):
        raise ConfigError(
            f"no ok run has a value in {rank_by}; rank by another column of docs/results-schema.md"
        )
    return [[{"rank": next(number), **row} for row in rows] for rows in cells]


def _places(rows: Sequence[Row], rank_by: str) -> Iterator[Row]:
    by, winners = _ranked([row for row in rows if _fit(row, rank_by, include_suspects=False)], rank_by)
    for n, held in enumerate(winners):
        close = n > 0 and held.high >= winners[0].low
        yield {**held.row, "ranked_by": by, "best": n == 0, "as_good_as_best": close}
    known = {held.run_id for held in winners}
    others = sorted((r for r in rows if r["run_id"] not in known), key=lambda r: r["status"] == "ok")
    sign = -1 if rank_by in _LOWER_IS_BETTER else 1
    tiers = {"ok": 0, None: 2, "skipped": 3}
    for row in sorted(
        {r["run_id"]: r for r in others if r["status"] != "rejected"}.values(),
        key=lambda r: (tiers.get(r["status"], 1), -sign * (r[rank_by] or 0.0), r["run_id"]),
    ):
        yield {**row, "ranked_by": by, "best": False, "as_good_as_best": False}


def _groups(table: pa.Table, rank_by: str) -> list[list[Row]]:
    """The final rows of each cell, the cells in their order."""
    numeric = [f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
    if rank_by not in numeric:
        raise ConfigError(unknown_name("column to rank by", rank_by, numeric))
    wanted = list(dict.fromkeys((*_KEY, *AXES, *_WINNER, *_OTHERS, "is_final", rank_by)))
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in table.select(wanted).to_pylist():
        if row["is_final"] and row["model"] is not None and row["nodes"] is not None:
            groups[tuple(row[k] for k in _KEY)].append(row)
    return [groups[key] for key in sorted(groups, key=_nulls_first)]


def _nulls_first(key: tuple[object, ...]) -> tuple[tuple[bool, object], ...]:
    return tuple((value is not None, value if value is not None else 0) for value in key)


def _cell(rows: Sequence[Row], rank_by: str, include_suspects: bool) -> Cell:
    ended = {r["run_id"] for r in rows if r["status"] not in (None, "rejected", "skipped")}
    shared = {k: rows[0][k] for k in (*_PANEL, "model", "nodes", "num_params")}
    fit = [r for r in rows if _fit(r, rank_by, include_suspects)]
    if not fit:
        status, reason = why_empty(rows)
        return Cell(run_id=None, status=status, reason=reason, num_runs=len(ended), **shared)
    by, (best, *rest) = _ranked(fit, rank_by)
    return Cell(
        run_id=best.run_id,
        status="ok",
        reason=None,
        num_runs=len(ended),
        as_good_as_best=tuple(c.run_id for c in rest if c.high >= best.low),
        ranked_by=by,
        **shared,
        layout={k: best.row[k] for k in AXES},
        **{k: best.row[k] for k in _WINNER},
    )


def _ranked(fit: Sequence[Row], rank_by: str) -> tuple[str, list[_Contender]]:
    """The column that orders the runs, and the runs, the best one first."""
    by = "control_ratio" if rank_by == DEFAULT_RANK_BY and fit and _controlled(fit) else rank_by
    return by, sorted(_contenders(fit, by), key=lambda c: (-c.goodness, c.run_id))


def _fit(row: Row, rank_by: str, include_suspects: bool) -> bool:
    """Whether a row may win."""
    suspect = None if include_suspects else row["suspect"]
    return row[rank_by] is not None and may_win(row["status"], row["stopped"], suspect)


def _controlled(rows: Sequence[Row]) -> bool:
    """Whether all were measured beside the same control layout."""
    return len({r["control"] for r in rows}) == 1 and all(r["control_ratio"] is not None for r in rows)


def _contenders(rows: Sequence[Row], by: str) -> list[_Contender]:
    runs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        runs[row["run_id"]].append(row)
    unsure = {_place(r): r["step_time_ci95_rel"] for r in rows if r["run_id"] == r["control"]}
    return [_contender(run_id, repeats, by, unsure) for run_id, repeats in runs.items()]


def _place(row: Row) -> tuple[str, str]:
    return (row["sweep"], row["allocation"])


def _contender(
    run_id: str, repeats: Sequence[Row], by: str, unsure: Mapping[tuple[str, str], float | None]
) -> _Contender:
    """The run at the median of its repeats; its interval holds those of all, its row is the nearest.

    Args:
        unsure: relative interval of the control's step time in each allocation.
    """
    sign = -1 if by in _LOWER_IS_BETTER else 1
    middle = median(row[by] for row in repeats)
    bounds = []
    for row in repeats:
        rel = row["step_time_ci95_rel"] if by in _AS_SURE_AS_STEP_TIME else None
        rel = hypot(rel or 0.0, (by == "control_ratio" and unsure.get(_place(row))) or 0.0)
        bounds += [sign * row[by] * (1 - rel), sign * row[by] * (1 + rel)]
    return _Contender(
        run_id=run_id,
        goodness=sign * middle,
        low=min(bounds),
        high=max(bounds),
        row=min(repeats, key=lambda row: (abs(row[by] - middle), row[by])),
    )
