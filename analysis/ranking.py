"""Ranks the runs of each cell: finds the best run and those that are as good, or why there is none."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from math import inf
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis.cells import NOT_TRIED, Cell, best_outcome, outcome_order
from ultrabench.analysis.environments import Environments
from ultrabench.analysis.rows import Row
from ultrabench.analysis.schema import MODEL
from ultrabench.errors import ConfigError, require_known
from ultrabench.layout import AXES
from ultrabench.result import SLOWER
from ultrabench.sweep.running.outliers import may_win

End = tuple[str, bool]
"""The status of a repeat that has ended, and whether it is suspect."""

_TIERS = {"ok": 0, None: 2, "skipped": 3}
"""Status -> place after the best runs; runs that failed or ran out of memory have 1."""
_SUSPECT = 0.5
"""Place of an ok run whose number is in doubt: after the other ok runs, before those that failed."""


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
    runs = len({row["run_id"] for row in rows})
    if status is None:
        return f"pending {runs}"
    number = f"all {runs}" if alone and runs > 1 else str(runs)
    if status == "ok":
        return f"{number} ok {_unranked(rows)}"
    reason = next((row["reason"] for row in rows if row["reason"]), None)
    if reason is None or status == "oom":  # the name of the status says enough
        return f"{number} {status}"
    return f"{number} {status}: {reason}"


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

_MOST_WANTED = (
    DEFAULT_RANK_BY, "mfu", "source_mfu", "hfu", "tokens_per_s", "step_time_s", "peak_mem_reserved_bytes", "control_ratio",
)  # fmt: skip
"""Columns that people rank by, which a message names first."""

_PANEL = ("hardware", "kernel", "precision", "seq_len", "gbs")
_KEY = [*dict.fromkeys((*_PANEL, "num_params", *MODEL, "nodes"))]
"""Columns that are equal in all rows of a cell; models of one name but two shapes have different cells."""
_TABLE = ("source", "model", "hardware", "kernel", "precision", "seq_len")
"""Columns that are equal in imported rows whose doubts do not put them into another cell or panel."""
_RUN = ["cell", "contender"]
_MARKS = ("ranked_by", "best", "as_good_as_best", "environment")
_ORDER = (
    "run_id", "repeat", "attempt", "sweep", "status", "tokens_per_s_per_gpu", "suspect", "rule", "reason", "source",
)  # fmt: skip
"""Columns that rows are sorted by first, so that their order in the files makes no difference."""
_WINNER = (
    "mfu", "flops_formula", "source_mfu", "tokens_per_s_per_gpu", "peak_mem_reserved_bytes",
    "peak_mem_reserved_rank0_bytes", "peak_source", "step_time_ci95_rel", "ci_reached", "env_id",
)  # fmt: skip
"""Columns that a cell has from its best run."""
_OTHERS = (
    "run_id", "status", "rule", "reason", "suspect", "stopped", "sweep", "allocation",
    "control", "control_ratio", "repeat", "attempt", "source", "step_time_s", "predicted_step_time_s", "predicted_peak_mem_bytes",
)  # fmt: skip
"""Further columns that rankings need."""

LOWER_IS_BETTER = frozenset({
    "step_time_s", "step_time_ci95_rel", "init_time_s", "duration_s", "gpu_hours", "loss_final",
    "peak_mem_allocated_bytes", "peak_mem_reserved_bytes", "peak_mem_reserved_rank0_bytes",
    "predicted_step_time_s", "predicted_peak_mem_bytes", "p_oom",
})  # fmt: skip
"""Columns in which the best run has the smallest value."""
_AS_SURE_AS_STEP_TIME = frozenset({
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "hfu", "source_mfu",
    "model_flops_per_s_per_gpu", "control_ratio",
})  # fmt: skip
"""Columns that are proportional to the step time or its inverse, so they have the same relative interval."""


def rank(table: pa.Table, *, rank_by: str = DEFAULT_RANK_BY, include_suspects: bool = False) -> list[Cell]:
    """The cells of a result table, sorted by hardware, kernel, workload, parameters, model and nodes.

    Only final ok rows compete. Suspect rows are left out unless `include_suspects` is set or a cell has no others,
    and so are runs that were stopped early as slower than the best. By default, speeds relative to the control layout are
    compared in cells where all runs have them. A repeated run counts with the median of its repeats.

    Raises:
        ConfigError: `rank_by` is no numeric column.
    """
    final, frame = _final(table, rank_by)
    return _cells(final, frame, _winners(final, frame, rank_by, include_suspects), rank_by)


def leaderboard(table: pa.Table, *, rank_by: str = DEFAULT_RANK_BY) -> list[list[Row]]:
    """The runs of each cell in order, each as one result row with its `rank` in the whole table.

    In a cell the best run and those that are as good come first, then the other ok runs by the number that is
    compared, also those that were stopped as slower, then suspects, runs that failed or ran out of memory,
    runs that run or wait, and those that were skipped. The row of a run is the best of its repeats, as `rank`
    counts it: ok, else out of memory, else another end. `best` and `as_good_as_best` mark the winners;
    `num_repeats` and `num_repeats_failed` count the repeats of the run that have ended, and those of them
    that were not ok.

    Raises:
        ConfigError: `rank_by` is no numeric column, or no ok run has a value in it.
    """
    final, frame = _final(table, rank_by)
    return _boards(final, frame, _winners(final, frame, rank_by, include_suspects=False), rank_by)


def rank_and_order(table: pa.Table, columns: Sequence[str]) -> tuple[list[Cell], list[list[Row]]]:
    """What `rank` and `leaderboard` return by default, the second with these columns, in less time than both need.

    Args:
        columns: columns of the rows, among them `status` and `suspect`.
    """
    final, frame = _final(table, DEFAULT_RANK_BY)
    winners = _winners(final, frame, DEFAULT_RANK_BY, include_suspects=False)
    cells = _cells(final, frame, winners, DEFAULT_RANK_BY)
    return cells, _boards(final.select([*columns]), frame, winners, DEFAULT_RANK_BY)


def _cells(final: pa.Table, frame: pd.DataFrame, winners: pd.DataFrame, rank_by: str) -> list[Cell]:
    won = dict(iter(winners[["run_id", *_RUN, *_MARKS]].groupby("cell")))
    first = winners.drop_duplicates("cell")
    best = dict(zip(first["cell"], final.take(first.index.to_numpy()).to_pylist(), strict=True))
    shown = "mfu" if rank_by == DEFAULT_RANK_BY else rank_by
    several = frame.loc[frame["status"] != "rejected", [*AXES]].nunique() > 1
    varied = tuple(name for name in AXES if several[name])
    ends = _ends(final, frame)
    # A row without doubt says what its cell is called; it is the first after a stable sort.
    trusted_first = frame.iloc[frame["suspect"].notna().argsort(kind="stable")]
    usual = trusted_first.drop_duplicates("cell").sort_values("cell")
    heads = final.take(usual.index.to_numpy()).to_pylist()
    cells, rows_of = [], frame.groupby("cell").indices
    for head, n in zip(heads, usual["cell"], strict=True):
        shared = {name: head[name] for name in ("model", "nodes", "num_params", *_PANEL)}
        shared |= {"shown_column": shown, "varied_axes": varied, **_counts(ends[n].values())}
        cells.append(_cell(final, rows_of[n], won.get(n), best.get(n), shared, ends[n]))
    return cells


def _boards(final: pa.Table, frame: pd.DataFrame, winners: pd.DataFrame, rank_by: str) -> list[list[Row]]:
    rest = frame[frame["status"] != "rejected"]
    known = final.take(rest.index.to_numpy()).to_pylist()
    rows = dict(zip(rest.index, known, strict=True))
    worst_first = sorted(range(len(rest)), key=lambda n: _outcome(known[n]))
    rest = rest.iloc[worst_first].drop_duplicates(_RUN, keep="last")
    runs = pd.concat([winners, rest.assign(best=False, as_good_as_best=False)]).drop_duplicates(_RUN)
    oks = runs[runs["status"] == "ok"]
    if len(oks) and oks[rank_by].isna().all():
        raise ConfigError(f"no ok run has a value in {rank_by}; rank by another of docs/results-schema.md")
    runs["ranked_by"] = runs.groupby("cell")["ranked_by"].transform("first").fillna(rank_by)
    value = runs["control_ratio"].where(runs["ranked_by"] == "control_ratio", runs[rank_by])
    runs["goodness"] = runs["goodness"].fillna(_sign(rank_by) * value).fillna(-inf)
    front = runs["best"] | runs["as_good_as_best"]
    runs["tier"] = [-1 if won else _tier(rows[i]) for i, won in zip(runs.index, front, strict=True)]
    runs = runs.sort_values(["cell", "tier", "goodness", "run_id"], ascending=[True, True, False, True])
    ends = _ends(final, frame)
    held = zip(count(1), runs.index, *(runs[name] for name in (*_RUN, *_MARKS)), strict=False)
    told = [
        {"rank": n, **rows[i], **dict(zip(_MARKS, marks, strict=True)), **_repeats(ends[cell][run])}
        for n, i, cell, run, *marks in held
    ]
    return [[told[n] for n in at] for at in runs.reset_index().groupby("cell").indices.values()]


def _outcome(row: Row) -> tuple[tuple[int, str], bool]:
    """A sort key by which the last one of the rows of a run stands for it."""
    return outcome_order(row["status"]), row["suspect"] is None


def _ends(final: pa.Table, frame: pd.DataFrame) -> dict[object, dict[str, list[End]]]:
    """Cell -> contender -> the ends of its repeats."""
    found: dict[object, dict[str, list[End]]] = defaultdict(lambda: defaultdict(list))
    ends = zip(final["status"].to_pylist(), final["suspect"].to_pylist(), strict=True)
    for cell, contender, (status, doubt) in zip(frame["cell"], frame["contender"], ends, strict=True):
        if status not in NOT_TRIED:
            found[cell][contender].append((status, doubt is not None))
    return found


def _repeats(ends: Sequence[End]) -> Row:
    """The numbers of repeats of a run that have ended, and of those that were not ok."""
    return {"num_repeats": len(ends), "num_repeats_failed": sum(status != "ok" for status, _ in ends)}


def _tier(row: Row) -> float:
    """The place of a run that is not among the best; suspects come after the other ok runs."""
    return _SUSPECT if row["status"] == "ok" and row["suspect"] else _TIERS.get(row["status"], 1)


def _sign(rank_by: str) -> int:
    return -1 if rank_by in LOWER_IS_BETTER else 1


def _final(table: pa.Table, rank_by: str) -> tuple[pa.Table, pd.DataFrame]:
    """The final rows of runs that train a model, and the same rows as a frame with the number of the cell.

    The frame has the columns `contender`, which names a run in one environment, and `environment`, which tells what
    sets that apart from the others of its cell.

    Raises:
        ConfigError: `rank_by` is no numeric column, or MFU follows from several formulas.
    """
    numeric = [f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
    require_known("column to rank by", numeric, rank_by, first=_MOST_WANTED)
    wanted = dict.fromkeys((*_KEY, *AXES, *_WINNER, *_OTHERS, "is_final", rank_by))
    final = final_runs(table).sort_by([(name, "ascending") for name in _ORDER])
    environments = Environments(final)
    final = final.select([*wanted])
    formulas = sorted({*final["flops_formula"].unique().to_pylist()} - {None})
    if len(formulas) > 1:
        mixed = f"MFU is by {' and '.join(formulas)} in these results, which makes it incomparable"
        todo = "launch the sweeps again with one measure.flops_formula, or show each alone"
        raise ConfigError(f"{mixed}; {todo}")
    frame = final.to_pandas()
    frame["contender"] = environments.contenders(frame["run_id"])
    in_order = _keys(frame).sort_values(_KEY, na_position="first")
    frame["cell"] = in_order.groupby(_KEY, dropna=False, sort=False).ngroup()
    frame["environment"] = None
    env_ids = pd.Series(environments.ids, index=frame.index, dtype=object)
    for _, of_cell in env_ids.dropna().groupby(frame["cell"]):
        frame.loc[of_cell.index, "environment"] = of_cell.map(environments.labels(of_cell))
    return final, frame


def final_runs(table: pa.Table) -> pa.Table:
    """The final rows of runs that train a model."""
    return table.filter(pc.field("is_final") & pc.field("model").is_valid() & pc.field("nodes").is_valid())


def _keys(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that tell the cells apart."""
    names = [name for name in _KEY if name not in (*_TABLE, "nodes")]
    doubted, usual = usual_sizes(frame, names)
    return frame[_KEY].assign(**frame[names].where(~doubted, usual))


def usual_sizes(frame: pd.DataFrame, names: Sequence[str]) -> tuple[pd.Series, pd.DataFrame]:
    """Which rows are suspect rows of an imported table, and for each row the usual sizes of its model.

    The usual sizes are those of the rows that are not suspect. A suspect row belongs to them, even if its own
    architecture or batch is another one: that is its doubt, and its publisher ranked it there.

    Args:
        names: columns of sizes of the model and the batch.
    """
    doubted = frame["source"].notna() & frame["suspect"].notna()
    known = frame[[*names]].mask(doubted).groupby([frame[name] for name in _TABLE], dropna=False)
    return doubted, known.transform("first")


def _winners(final: pa.Table, frame: pd.DataFrame, rank_by: str, include_suspects: bool) -> pd.DataFrame:
    """One row for each run that may win: its repeat nearest to the median. The best run of a cell is first.

    The new columns are `ranked_by`, the column that is compared in the cell, `goodness`, where larger is
    better, `best`, and `as_good_as_best`, which marks runs whose intervals overlap with those of the best.
    """
    ends = [*zip(*(final[name].to_pylist() for name in ("status", "stopped", "suspect")), strict=True)]
    measured = frame[rank_by].notna() & pd.Series(
        [may_win(s, why, None) for s, why, _ in ends], frame.index, dtype=bool
    )
    trusted = measured & pd.Series(
        [include_suspects or doubt is None for *_, doubt in ends], frame.index, dtype=bool
    )
    # A cell that has suspects alone shows the best of them, marked.
    fit = frame[trusted | (measured & ~trusted.groupby(frame["cell"]).transform("any"))]
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
    """For each row, whether all rows of its cell were measured beside the same control layout and in one environment."""
    cells = fit.groupby("cell")
    one = cells["control"].transform(lambda control: control.nunique(dropna=False)) == 1
    one &= cells["environment"].transform(lambda environment: environment.nunique(dropna=False)) == 1
    return one & (cells["control_ratio"].transform("count") == cells["cell"].transform("size"))


def _counts(ends: Collection[Sequence[End]]) -> Row:
    """The numbers of runs of a cell, from the ends of the repeats of each."""
    outcomes = Counter(best_outcome(status for status, _ in repeats) for repeats in ends)
    oks = [[suspect for status, suspect in repeats if status == "ok"] for repeats in ends]
    oom, failed = outcomes["oom"], len(ends) - outcomes["ok"] - outcomes["oom"]
    doubted = sum(all(found) for found in oks if found)
    return {"num_runs": len(ends), "num_oom": oom, "num_failed": failed, "num_in_doubt": doubted}


def _cell(
    final: pa.Table,
    held: Any,
    winners: pd.DataFrame | None,
    best: Row | None,
    shared: Row,
    ends: Mapping[str, Sequence[End]],
) -> Cell:
    """The cell of the rows `held` of the table `final`; `winners` is None when no row may win.

    Args:
        best: the row of the best run, None where there is none.
        shared: the fields that do not depend on the best run.
        ends: contender -> the ends of its repeats.
    """
    if winners is None or best is None:
        status, reason = why_empty(final.take(held).to_pylist())
        return Cell(status=status, reason=reason, **shared)
    return Cell(
        as_good_as_best=tuple(winners.loc[winners["as_good_as_best"], "run_id"]),
        environment=winners["environment"].iloc[0],
        ranked_by=winners["ranked_by"].iloc[0],
        shown_value=best[shared["shown_column"]],
        suspect=best["suspect"],
        layout={k: best[k] for k in AXES},
        **shared,
        **_repeats(ends[winners["contender"].iloc[0]]),
        **{k: best[k] for k in ("run_id", "status", *_WINNER)},
    )
