"""Ranks the runs of each cell: finds the best run and those that are as good, or why there is none."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis.cells import Cell
from ultrabench.analysis.rows import Row
from ultrabench.analysis.schema import MODEL
from ultrabench.errors import ConfigError, require_known
from ultrabench.layout import AXES
from ultrabench.result import SLOWER
from ultrabench.sweep.running.outliers import may_win

_TIERS = {"ok": 0, None: 2, "skipped": 3}
"""Status -> place of the runs that may not win; runs that failed or ran out of memory have 1."""


def why_empty(rows: Sequence[Row]) -> tuple[str | None, str]:
    """Status and reason of a cell without a winner, from its final rows.

    The reason names first the runs that were tried (`12 oom; 3 crash: <reason>`), then those that wait
    (`pending 4`), then those that were skipped. Rejected layouts are named only when there is nothing
    else. The status is None while a run waits.
    """
    by_status: dict[str | None, list[Row]] = defaultdict(list)
    for row in rows:
        by_status[row["status"]].append(row)
    rejected = by_status.pop("rejected", [])
    if not by_status:
        return "rejected", _no_valid_layout(rejected)
    order = sorted(by_status, key=lambda s: (_TIERS.get(s, 1), -len(by_status[s]), str(s)))
    parts = [_part(status, by_status[status], alone=len(order) == 1) for status in order]
    return (None if None in by_status else order[0]), "; ".join(parts)


def _part(status: str | None, rows: Sequence[Row], alone: bool) -> str:
    """The text for one status, such as `all 12 oom`, `3 crash: <first reason>` or `2 ok but suspect: ...`."""
    number = len({row["run_id"] for row in rows})
    if status is None:
        return f"pending {number}"
    count = f"all {number}" if alone and number > 1 else str(number)
    if status == "ok":
        return f"{count} ok {_unranked(rows)}"
    reason = next((row["reason"] for row in rows if row["reason"]), None)
    if reason is None or status == "oom":  # the name of the status says enough
        return f"{count} {status}"
    return f"{count} {status}: {reason}"


def _unranked(rows: Sequence[Row]) -> str:
    """The text that tells why none of the ok runs could win."""
    suspect = next((row["suspect"] for row in rows if row["suspect"]), None)
    if suspect is not None:
        return f"but suspect: {suspect}"
    if any(row["stopped"] == SLOWER for row in rows):
        return "but stopped early as slower than the best"
    return "without the number to rank by"


def _no_valid_layout(rejected: Sequence[Row]) -> str:
    """The text that names the rule that rejects most layouts, with an example of its reason."""
    rule, number = Counter(row["rule"] for row in rejected).most_common(1)[0]
    example = next((row["reason"] for row in rejected if row["rule"] == rule), None)
    return f"no valid layout: {example or rule} ({rule}, {number} of {len(rejected)})"


DEFAULT_RANK_BY = "tokens_per_s_per_gpu"

_PANEL = ("hardware", "kernel", "precision", "seq_len", "gbs")
_KEY = [*dict.fromkeys((*_PANEL, "num_params", *MODEL, "nodes"))]
"""Columns that are equal in all rows of a cell; models of one name but two shapes have different cells."""
_RUN = ["cell", "run_id"]
_WINNER = (
    "mfu",
    "flops_formula",
    "source_mfu",
    "tokens_per_s_per_gpu",
    "peak_mem_reserved_bytes",
    "peak_source",
)
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
"""Columns that are proportional to the step time or its inverse, so they have the same relative interval."""


def rank(table: pa.Table, *, rank_by: str = DEFAULT_RANK_BY, include_suspects: bool = False) -> list[Cell]:
    """The cells of a result table, sorted by hardware, kernel, workload, parameters, model and nodes.

    Only final ok rows compete. Suspect rows are left out unless `include_suspects` is set, and so are runs
    that were stopped early as slower than the best. By default, speeds relative to the control layout are
    compared in cells where all runs have them. A repeated run counts with the median of its repeats.

    Raises:
        ConfigError: `rank_by` is no numeric column.
    """
    rows, frame = _final(table, rank_by)
    winners = dict(iter(_winners(rows, frame, rank_by, include_suspects).groupby("cell")))
    return [_cell([rows[i] for i in held.index], rows, winners.get(n)) for n, held in frame.groupby("cell")]


def leaderboard(table: pa.Table, *, rank_by: str = DEFAULT_RANK_BY) -> list[list[Row]]:
    """The runs of each cell in order, each as one result row with its `rank` in the whole table.

    In a cell the runs that may win come first, as `rank` orders them, then the other ok runs, those that
    failed or ran out of memory, those that run or wait, and those that were skipped. `best` and
    `as_good_as_best` mark the winners.

    Raises:
        ConfigError: `rank_by` is no numeric column, or no ok run has a value in it.
    """
    rows, frame = _final(table, rank_by)
    rest = frame[frame["status"] != "rejected"]
    rest = rest.iloc[(rest["status"] == "ok").argsort(kind="stable")].drop_duplicates(_RUN, keep="last")
    tier = [_TIERS.get(rows[i]["status"], 1) for i in rest.index]
    goodness = _sign(rank_by) * rest[rank_by].fillna(0.0)
    rest = rest.assign(tier=tier, goodness=goodness, best=False, as_good_as_best=False)
    winners = _winners(rows, frame, rank_by, include_suspects=False).assign(tier=-1)
    runs = pd.concat([winners, rest]).drop_duplicates(_RUN)
    oks = runs[runs["status"] == "ok"]
    if len(oks) and oks[rank_by].isna().all():
        raise ConfigError(f"no ok run has a value in {rank_by}; rank by another of docs/results-schema.md")
    runs["ranked_by"] = runs.groupby("cell")["ranked_by"].transform("first").fillna(rank_by)
    runs = runs.sort_values(["cell", "tier", "goodness", "run_id"], ascending=[True, True, False, True])
    marks = runs[["ranked_by", "best", "as_good_as_best"]].to_dict("records")
    told = [{"rank": n, **rows[i], **mark} for n, i, mark in zip(count(1), runs.index, marks, strict=False)]
    return [[told[n] for n in at] for at in runs.reset_index().groupby("cell").indices.values()]


def _sign(rank_by: str) -> int:
    return -1 if rank_by in _LOWER_IS_BETTER else 1


def _final(table: pa.Table, rank_by: str) -> tuple[list[Row], pd.DataFrame]:
    """The final rows of runs that train a model, and the same rows as a frame with the number of the cell.

    Raises:
        ConfigError: `rank_by` is no numeric column, or MFU follows from several formulas.
    """
    numeric = [f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
    require_known("column to rank by", numeric, rank_by)
    wanted = dict.fromkeys((*_KEY, *AXES, *_WINNER, *_OTHERS, "is_final", rank_by))
    trained = pc.field("is_final") & pc.field("model").is_valid() & pc.field("nodes").is_valid()
    final = table.select([*wanted]).filter(trained)
    formulas = sorted({*final["flops_formula"].to_pylist()} - {None})
    if len(formulas) > 1:
        mixed = f"MFU is by {' and '.join(formulas)} in these results, which makes it incomparable"
        raise ConfigError(
            f"{mixed}; launch the sweeps again with one measure.flops_formula, or show each alone"
        )
    frame = final.to_pandas()
    in_order = frame.sort_values(_KEY, na_position="first")
    frame["cell"] = in_order.groupby(_KEY, dropna=False, sort=False).ngroup()
    return final.to_pylist(), frame


def _winners(rows: Sequence[Row], frame: pd.DataFrame, rank_by: str, include_suspects: bool) -> pd.DataFrame:
    """One row for each run that may win: its repeat nearest to the median. The best run of a cell is first.

    The new columns are `ranked_by`, the column that is compared in the cell, `goodness`, where larger is
    better, `best`, and `as_good_as_best`, which marks runs whose intervals overlap with those of the best.
    """
    allowed = [may_win(r["status"], r["stopped"], None if include_suspects else r["suspect"]) for r in rows]
    fit = frame[pd.Series(allowed, index=frame.index, dtype=bool) & frame[rank_by].notna()]
    controlled = _controlled(fit) & (rank_by == DEFAULT_RANK_BY)
    value = fit["control_ratio"].where(controlled, fit[rank_by])
    own = fit["step_time_ci95_rel"].fillna(0.0) * (rank_by in _AS_SURE_AS_STEP_TIME)
    place = [fit["cell"], fit["sweep"], fit["allocation"]]
    control = own.where(fit["run_id"] == fit["control"]).groupby(place, dropna=False).transform("last")
    unsure = (own**2 + control.where(controlled, 0.0).fillna(0.0) ** 2) ** 0.5
    goodness, reach = _sign(rank_by) * value, value.abs() * unsure
    by = controlled.map({True: "control_ratio", False: rank_by})
    fit = fit.assign(ranked_by=by, value=value, low=goodness - reach, high=goodness + reach)
    repeats = fit.groupby(_RUN)
    middle = repeats["value"].transform("median")
    fit["goodness"], fit["off"] = _sign(rank_by) * middle, (value - middle).abs()
    fit["low"], fit["high"] = repeats["low"].transform("min"), repeats["high"].transform("max")
    runs = fit.sort_values(["off", "value"]).drop_duplicates(_RUN)
    runs = runs.sort_values(["cell", "goodness", "run_id"], ascending=[True, False, True])
    runs["best"] = ~runs.duplicated("cell")
    runs["as_good_as_best"] = ~runs["best"] & (runs["high"] >= runs.groupby("cell")["low"].transform("first"))
    return runs


def _controlled(fit: pd.DataFrame) -> pd.Series:
    """For each row, whether all rows of its cell were measured beside the same control layout."""
    cells = fit.groupby("cell")
    one = cells["control"].transform(lambda control: control.nunique(dropna=False)) == 1
    return one & (cells["control_ratio"].transform("count") == cells["cell"].transform("size"))


def _cell(held: Sequence[Row], rows: Sequence[Row], winners: pd.DataFrame | None) -> Cell:
    """The cell of the rows `held`; `winners` is None when no row may win."""
    ended = {r["run_id"] for r in held if r["status"] not in (None, "rejected", "skipped")}
    shared = {k: held[0][k] for k in ("model", "nodes", "num_params", *_PANEL)} | {"num_runs": len(ended)}
    if winners is None:
        status, reason = why_empty(held)
        return Cell(status=status, reason=reason, **shared)
    best = rows[winners.index[0]]
    return Cell(
        as_good_as_best=tuple(winners.loc[winners["as_good_as_best"], "run_id"]),
        ranked_by=winners["ranked_by"].iloc[0],
        layout={k: best[k] for k in AXES},
        **shared,
        **{k: best[k] for k in ("run_id", "status", *_WINNER)},
    )
