"""`ultrabench sweep top` shows the runs of a sweep or of a result file, the best first."""

from pathlib import Path

from rich.text import Text

from ultrabench.analysis.cells import doubts, layout_words
from ultrabench.analysis.collect import open_results
from ultrabench.analysis.numbers import memory, percent, too_wide, with_unit
from ultrabench.analysis.ranking import DEFAULT_RANK_BY, leaderboard
from ultrabench.analysis.rows import Row
from ultrabench.cli.tables import print_json, say, show, style_of, table, warn
from ultrabench.errors import counted
from ultrabench.result import SLOWER
from ultrabench.store.folder import find_sweep

SHOWN_AS = {
    "mfu": "MFU", "tokens_per_s_per_gpu": "tokens/s/GPU", "peak_mem_reserved_bytes": "memory", "step_time_s": "step",
    "predicted_step_time_s": "predicted",
}  # fmt: skip
"""Column of the results -> column of the table that shows it; another column that is ranked by is added."""
MARKS = {"best": "best", "as good": "as_good_as_best", "suspect": "suspect"}
"""Mark of an ok run -> the column that says whether it has this mark; the first mark of a run is shown."""
_TEXTS = ("environment", "layout", "status", "run id")
"""Columns of the table that hold texts."""
FIRST = 10
"""Number of runs of each cell that a table shows by default."""


def show_top(source: str | None, first: int | None, by: str, as_json: bool, results: Path) -> None:
    """Prints the first runs of each cell; by default 10 in a table, and all as JSON."""
    name, _, rows = open_results(source, results, warn)
    cells = [runs for runs in leaderboard(rows, rank_by=by) if runs]
    if as_json:
        print_json([row for runs in cells for row in runs[: first or len(runs)]])
        return
    for runs in cells:
        _print_cell(name, runs, first or FIRST)
    formulas = {row["flops_formula"] for runs in cells for row in runs} - {None}
    told = [f"FLOPs of MFU by the formula {name}" for name in formulas]
    if not (source or "").endswith(".parquet"):
        told.append(_more(find_sweep(source, results).display_name, by, len(cells)))
    say(*doubts(rows), *told)


def _more(sweep: str, by: str, cells: int) -> str:
    """The command that shows a run; it takes ranks only of the default order, from cell to cell."""
    default = by == DEFAULT_RANK_BY
    across = "; ranks go on from cell to cell, so that each names one run" * (cells > 1 and default)
    command = f"ultrabench sweep show {'RANK' if default else 'RUN_ID'} --sweep {sweep}"
    return f"more about a run: {command}{across}"


def _print_cell(name: str, runs: list[Row], first: int) -> None:
    at, more = runs[0], len(runs) - first
    by, nodes = str(at["ranked_by"]), counted(at["nodes"], "node")
    added = {by} - SHOWN_AS.keys()
    several = any(row["environment"] for row in runs)
    shown = []
    for row in runs[:first]:
        ranked = {"rank": row["rank"], **{name: with_unit(by, row[by]) for name in added}}
        ranked |= {"environment": row["environment"]} if several else {}
        shown.append({**ranked, **numbers(row), "run id": row["run_id"]})
    columns = [name if name in _TEXTS else f">{name}" for name in shown[0]]
    made = table(f"{name}: {at['model']} on {nodes}, by {by}", *columns, rows=[row.values() for row in shown])
    made.always_shown = SHOWN_AS.get(by, by)
    show(made, f"{more} more; -n {len(runs)} shows all\n" if more > 0 else "")


def numbers(row: Row) -> dict[str, str | Text | None]:
    """Column of the table -> text of the most important numbers of a run; None where one is unknown."""
    shown: dict[str, str | Text | None] = {"layout": " ".join(layout_words(row))}
    shown |= {name: with_unit(column, row[column]) for column, name in SHOWN_AS.items()}
    shown["memory"] = memory(row["peak_mem_reserved_bytes"], row["peak_mem_reserved_rank0_bytes"])
    if shown["step"] and row["step_time_ci95_rel"] is not None:
        shown["step"] = f"{shown['step']} +- {percent(row['step_time_ci95_rel'])}"
    return shown | {"status": _status(row)}


def _status(row: Row) -> Text:
    """The status of a run as one word; for an ok run, its place in the ranking such as `best`.

    A best run whose interval missed its target also has the width, such as `best +- 53.0 %`.
    """
    status = row["status"]
    shown = status or ("pending" if row["attempt"] is None else "running")
    if status == "ok":
        plain = "slower" if row["stopped"] == SLOWER else "ok"
        shown = next((mark for mark, column in MARKS.items() if row[column]), plain)
    wide = too_wide(row["ci_reached"], row["step_time_ci95_rel"]) if shown == "best" else ""
    if status == "ok" and row["suspect"] and shown in ("best", "as good"):
        shown = f"{shown}, suspect"
    style = style_of(status, doubtful=bool(wide) or "suspect" in shown or shown == "slower")
    return Text(f"{shown} {wide}".rstrip(), style)
