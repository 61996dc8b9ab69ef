"""Ranks the runs of each cell: finds the best run and those that are as good, or why there is none."""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis.cells import Cell, best_outcome
from ultrabench.analysis.environments import Environments
from ultrabench.analysis.rows import Row
from ultrabench.analysis.schema import MODEL
from ultrabench.errors import ConfigError, require_known
from ultrabench.layout import AXES
from ultrabench.result import NOT_TRIED, SLOWER
from ultrabench.standing import Repeat, Standing, standings, tier

End = tuple[str, bool]
"""The status of a repeat that has ended, and whether it is suspect."""


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
    order = sorted(by_status, key=lambda s: (tier(s), -len(by_status[s]), str(s)))
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


_Ranked = Mapping[Hashable, Sequence[Standing]]
"""Cell -> the standings of its runs, of which `repeat` is a row of the frame that `_final` returns."""


def rank(table: pa.Table, *, rank_by: str = DEFAULT_RANK_BY, include_suspects: bool = False) -> list[Cell]:
    """The cells of a result table, sorted by hardware, kernel, workload, parameters, model and nodes.

    Only final ok rows compete. Suspect rows are left out unless `include_suspects` is set or a cell has no others,
    and so are runs that were stopped early as slower than the best. By default, speeds relative to the control layout are
    compared in cells where all runs have them. A repeated run counts with the median of its repeats.

    Raises:
        ConfigError: `rank_by` is no numeric column.
    """
    final, frame = _final(table, rank_by)
    return _cells(final, frame, _ranked(frame, rank_by, include_suspects), rank_by)


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
    return _boards(final, frame, _ranked(frame, rank_by), rank_by)


def rank_and_order(table: pa.Table, columns: Sequence[str]) -> tuple[list[Cell], list[list[Row]]]:
    """What `rank` and `leaderboard` return by default, the second with these columns, in less time than both need.

    Args:
        columns: columns of the rows, among them `status` and `suspect`.
    """
    final, frame = _final(table, DEFAULT_RANK_BY)
    ranked = _ranked(frame, DEFAULT_RANK_BY)
    cells = _cells(final, frame, ranked, DEFAULT_RANK_BY)
    return cells, _boards(final.select([*columns]), frame, ranked, DEFAULT_RANK_BY)


def _cells(final: pa.Table, frame: pd.DataFrame, ranked: _Ranked, rank_by: str) -> list[Cell]:
    winners = {cell: of_cell[0].repeat for cell, of_cell in ranked.items() if of_cell[0].best}
    best = dict(zip(winners, final.take([*winners.values()]).to_pylist(), strict=True)) if winners else {}
    shown = "mfu" if rank_by == DEFAULT_RANK_BY else rank_by
    several = frame.loc[frame["status"] != "rejected", [*AXES]].nunique() > 1
    varied = tuple(name for name in AXES if several[name])
    ends, contenders, labels = _ends(frame), _known(frame, "contender"), _known(frame, "environment")
    # A row without doubt says what its cell is called; it is the first after a stable sort.
    trusted_first = frame.iloc[frame["suspect"].notna().argsort(kind="stable")]
    usual = trusted_first.drop_duplicates("cell").sort_values("cell")
    heads = final.take(usual.index.to_numpy()).to_pylist()
    cells, rows_of = [], frame.groupby("cell").indices
    for head, n in zip(heads, usual["cell"], strict=True):
        shared = {name: head[name] for name in ("model", "nodes", "num_params", *_PANEL)}
        shared |= {"shown_column": shown, "varied_axes": varied, **_counts(ends[n].values())}
        if n not in best:
            status, reason = why_empty(final.take(rows_of[n]).to_pylist())
            cells.append(Cell(status=status, reason=reason, **shared))
            continue
        first, row = ranked[n][0], best[n]
        made = Cell(
            as_good_as_best=tuple(standing.run_id for standing in ranked[n] if standing.as_good),
            ranked_by="control_ratio" if first.by_control else rank_by,
            environment=labels[first.repeat],
            shown_value=row[shown],
            suspect=row["suspect"],
            layout={k: row[k] for k in AXES},
            **shared,
            **_repeats(ends[n][contenders[first.repeat]]),
            **{k: row[k] for k in ("run_id", "status", *_WINNER)},
        )
        cells.append(made)
    return cells


def _boards(final: pa.Table, frame: pd.DataFrame, ranked: _Ranked, rank_by: str) -> list[list[Row]]:
    ordered = [standing for of_cell in ranked.values() for standing in of_cell]
    oks = [standing for standing in ordered if standing.outcome == "ok"]
    if oks and all(standing.rate is None for standing in oks):
        raise ConfigError(f"no ok run has a value in {rank_by}; rank by another of docs/results-schema.md")
    rows = final.take([standing.repeat for standing in ordered]).to_pylist() if ordered else []
    ends, contenders, labels = _ends(frame), _known(frame, "contender"), _known(frame, "environment")
    boards: dict[Hashable, list[Row]] = {cell: [] for cell in ranked}
    for n, (standing, row) in enumerate(zip(ordered, rows, strict=True), 1):
        marks = {
            "ranked_by": "control_ratio" if standing.by_control else rank_by,
            "best": standing.best,
            "as_good_as_best": standing.as_good,
            "environment": labels[standing.repeat],
        }
        repeats = _repeats(ends[standing.cell][contenders[standing.repeat]])
        boards[standing.cell].append({"rank": n, **row, **marks, **repeats})
    return [*boards.values()]


def _ends(frame: pd.DataFrame) -> dict[object, dict[str, list[End]]]:
    """Cell -> contender -> the ends of its repeats."""
    found: dict[object, dict[str, list[End]]] = defaultdict(lambda: defaultdict(list))
    columns = (_known(frame, name) for name in ("cell", "contender", "status", "suspect"))
    for cell, contender, status, doubt in zip(*columns, strict=True):
        if status not in NOT_TRIED:
            found[cell][contender].append((status, doubt is not None))
    return found


def _repeats(ends: Sequence[End]) -> Row:
    """The numbers of repeats of a run that have ended, and of those that were not ok."""
    return {"num_repeats": len(ends), "num_repeats_failed": sum(status != "ok" for status, _ in ends)}


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
    frame["competes_in"] = environments.ids
    in_order = _keys(frame).sort_values(_KEY, na_position="first")
    frame["cell"] = in_order.groupby(_KEY, dropna=False, sort=False).ngroup()
    frame["environment"] = None
    for _, of_cell in frame["competes_in"].dropna().groupby(frame["cell"]):
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


def _ranked(frame: pd.DataFrame, rank_by: str, include_suspects: bool = False) -> _Ranked:
    """Cell -> the standings of its runs, in the order of the cells; `repeat` is a row of the frame."""
    tried = frame[frame["status"] != "rejected"]
    competing = repeats(tried, tried["cell"].tolist(), rank_by)
    by_control = rank_by == DEFAULT_RANK_BY
    ranked = standings(competing, include_suspects=include_suspects, by_control=by_control)
    rows, in_order = tried.index.tolist(), sorted(tried["cell"].unique().tolist())
    return {cell: [replace(s, repeat=rows[s.repeat]) for s in ranked[cell]] for cell in in_order}


def repeats(frame: pd.DataFrame, cells: Iterable[Hashable], rank_by: str = DEFAULT_RANK_BY) -> list[Repeat]:
    """The rows of a frame as they compete in their cells; its column `competes_in` names environments."""
    names = ("control", "status", "stopped", "suspect", rank_by, "control_ratio", "step_time_ci95_rel")
    *texts, values, ratios, widths = (_known(frame, name) for name in names)
    places = zip(_known(frame, "sweep"), _known(frame, "allocation"), strict=True)
    rates = [value and _sign(rank_by) * value for value in values]
    if rank_by not in _AS_SURE_AS_STEP_TIME:
        widths = [None] * len(rates)
    return [
        *map(
            Repeat,
            _known(frame, "run_id"),
            cells,
            _known(frame, "competes_in"),
            places,
            *texts,
            rates,
            ratios,
            widths,
        )
    ]


def _known(frame: pd.DataFrame, name: str) -> list[Any]:
    """The values of a column, None where one is missing."""
    return [None if value is None or value != value else value for value in frame[name].tolist()]


def _counts(ends: Collection[Sequence[End]]) -> Row:
    """The numbers of runs of a cell, from the ends of the repeats of each."""
    outcomes = Counter(best_outcome(status for status, _ in repeats) for repeats in ends)
    oks = [[suspect for status, suspect in repeats if status == "ok"] for repeats in ends]
    oom, failed = outcomes["oom"], len(ends) - outcomes["ok"] - outcomes["oom"]
    doubted = sum(all(found) for found in oks if found)
    return {"num_runs": len(ends), "num_oom": oom, "num_failed": failed, "num_in_doubt": doubted}
