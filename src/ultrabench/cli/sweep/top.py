"""`ultrabench sweep top` shows the runs of a sweep or of a result file, the best first."""

from pathlib import Path

from rich.text import Text

from ultrabench.analysis.cells import doubts, layout_words, memory, percent
from ultrabench.analysis.collect import open_results
from ultrabench.analysis.ranking import leaderboard
from ultrabench.analysis.rows import Row
from ultrabench.cli.tables import print_json, say, show, style_of, table, warn
from ultrabench.errors import counted
from ultrabench.result import SLOWER

COLUMNS = (">rank", "layout", ">MFU", ">tokens/s/GPU", ">memory", ">step", ">predicted", "status", "run id")
MARKS = {"best": "best", "as good": "as_good_as_best", "suspect": "suspect"}
"""Mark of an ok run -> the column that says whether it has this mark; the first mark of a run is shown."""
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
    told = (f"FLOPs of MFU by the formula {name}" for name in formulas)
    say(*doubts(rows), *told, "more about a run: ultrabench sweep show RANK")


def _print_cell(name: str, runs: list[Row], first: int) -> None:
    at = runs[0]
    nodes = counted(at["nodes"], "node")
    title, more = f"{name}: {at['model']} on {nodes}, by {at['ranked_by']}", len(runs) - first
    rows = [(row["rank"], *numbers(row).values(), row["run_id"]) for row in runs[:first]]
    show(table(title, *COLUMNS, rows=rows), f"{more} more; -n {len(runs)} shows all\n" if more > 0 else "")


def numbers(row: Row) -> dict[str, str | Text | None]:
    """Column of the table -> text of the most important numbers of a run; None where one is unknown."""
    rate, step_s, sure = row["tokens_per_s_per_gpu"], row["step_time_s"], row["step_time_ci95_rel"]
    predicted_s = row["predicted_step_time_s"]
    interval = "" if sure is None else f" +- {percent(sure)}"
    return {
        "layout": " ".join(layout_words(row)),
        "MFU": percent(row["mfu"]),
        "tokens/s/GPU": None if rate is None else f"{rate:,.0f}",
        "memory": memory(row["peak_mem_reserved_bytes"]),
        "step": None if step_s is None else f"{step_s:.4g} s{interval}",
        "predicted": None if predicted_s is None else f"{predicted_s:.4g} s",
        "status": _status(row),
    }


def _status(row: Row) -> Text:
    """The status of a run as one word; for an ok run, its place in the ranking such as `best`."""
    status = row["status"]
    shown = status or ("pending" if row["attempt"] is None else "running")
    if status == "ok":
        plain = "slower" if row["stopped"] == SLOWER else "ok"
        shown = next((mark for mark, column in MARKS.items() if row[column]), plain)
    return Text(shown, style_of(status, doubtful=shown in ("suspect", "slower")))
