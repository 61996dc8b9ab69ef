"""`ultrabench sweep top` shows the runs of a sweep or of a result file, the best first."""

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from ultrabench.analysis.results.cells import (
    caveats,
    layout_words,
    left_out,
    model_text,
    nodes_text,
    set_apart,
)
from ultrabench.analysis.results.columns import column_of
from ultrabench.analysis.results.numbers import formula_text, half_width, memory, too_wide, with_unit
from ultrabench.analysis.results.ranking import DEFAULT_RANK_BY, PANEL_COLUMNS, leaderboard
from ultrabench.analysis.results.rows import Row
from ultrabench.analysis.results.selected_rows import open_rows
from ultrabench.cli.tables import print_json, say, show, style_of, table, warn
from ultrabench.hardware import peak_suffix
from ultrabench.partial_step import FEW_STEPS, IN_PARTS
from ultrabench.result import SLOWER, Status, state
from ultrabench.routing import routing_text
from ultrabench.store.folder import SweepFolder

SHOWN_AS = {
    name: column_of(name).short_heading
    for name in (
        "mfu",
        "tokens_per_s_per_gpu",
        "peak_mem_reserved_bytes",
        "step_time_s",
        "predicted_step_time_s",
    )
}
"""Column of the results -> column of the table that shows it; another column that is ranked by is added."""
COLUMN_BY_MARK = {"best": "best", "as good": "as_good_as_best", "suspect": "suspect"}
"""Mark of an ok run -> the column that says whether it has this mark; the first mark of a run is shown."""
_TEXT_COLUMNS = ("environment", "layout", "status", "run id")
"""Columns of the table that hold texts."""
CELL_COLUMNS = [*(name for name in PANEL_COLUMNS if name != "routing"), "num_params"]
"""Columns that the title of a table names, besides the routing, where they distinguish its cell from
others of its model."""
DEFAULT_LIMIT = 10
"""Number of runs of each cell that a table shows by default."""


def show_top(
    words: Sequence[str] | None, limit: int | None, rank_by: str, as_json: bool, results_dir: Path
) -> None:
    """Prints at most `limit` runs of each cell, the best first; by default 10 in a table, and all as JSON.

    Args:
        words: a sweep or file, and COLUMN=VALUE for the rows to show.
    """
    source_name, path_prefix, result_table = open_rows(words, results_dir, warn)
    cell_runs = [runs for runs in leaderboard(result_table, rank_by=rank_by) if runs]
    if as_json:
        print_json([row for runs in cell_runs for row in runs[: limit or len(runs)]])
        say(*left_out(result_table))
        return
    cell_settings = set_apart([runs[0] for runs in cell_runs], CELL_COLUMNS)
    for runs, setting_texts in zip(cell_runs, cell_settings, strict=True):
        _print_cell(source_name, runs, setting_texts, limit or DEFAULT_LIMIT)
    ranked_rows = [row for runs in cell_runs for row in runs if row["flops_formula"] and row["mfu"]]
    formulas = {row["flops_formula"] for row in ranked_rows}
    notes = [formula_text(formulas, any(row["num_experts"] for row in ranked_rows))] if formulas else []
    if not any(word.endswith(".parquet") for word in words or ()):
        has_ranks = rank_by == DEFAULT_RANK_BY and not any("=" in word for word in words or ())
        notes.append(_details_hint(SweepFolder(Path(path_prefix)).display_name, has_ranks, len(cell_runs)))
    if not len(result_table):
        notes.append(f"{source_name} has no rows")
    say(*caveats(result_table), *notes)


def _details_hint(sweep_name: str, has_ranks: bool, num_cells: int) -> str:
    """The command that shows a run; it takes ranks only of the default order of all rows, from cell to cell."""
    hint = "; ranks continue across cells" * (num_cells > 1 and has_ranks)
    command = f"ultrabench sweep show {'RANK' if has_ranks else 'RUN_ID'} --sweep {sweep_name}"
    return f"details of a run: {command}{hint}"


def _print_cell(results_name: str, runs: list[Row], setting_texts: Sequence[str], limit: int) -> None:
    """Prints the first runs of one cell as a table.

    Args:
        results_name: name of the sweep or file.
        setting_texts: settings that distinguish this cell from others of its model.
    """
    top_row, num_hidden = runs[0], len(runs) - limit
    rank_by = str(top_row["ranked_by"])
    column = rank_by if rank_by in top_row else "ranked_value"  # the expected rate of a plan is no column
    added_columns = {rank_by: column} if rank_by not in SHOWN_AS else {}
    ranking_text = rank_by
    if any(row["num_repeats"] - row["num_repeats_failed"] > 1 for row in runs):  # others show one repeat
        ranking_text = f"the median {rank_by} of repeats"
    if any(row["screened"] and row["status"] == Status.OK for row in runs):
        ranking_text += "; runs that were only screened come after the best and those as good"
    has_environments = any(row["environment"] for row in runs)
    shown_rows = []
    for row in runs[:limit]:
        first_texts = {"rank": row["rank"]}
        first_texts |= {heading: with_unit(rank_by, row[column]) for heading, column in added_columns.items()}
        first_texts |= {"environment": row["environment"]} if has_environments else {}
        shown_rows.append({**first_texts, **number_texts(row), "run id": row["run_id"]})
    if not any(row[SHOWN_AS["mfu"]] for row in shown_rows):
        for row in shown_rows:
            del row[SHOWN_AS["mfu"]]
    headings = [name if name in _TEXT_COLUMNS else f">{name}" for name in shown_rows[0]]
    title = f"{results_name}: {', '.join((cell_text(top_row), *setting_texts))}, by {ranking_text}"
    shown_table = table(title, *headings, rows=[row.values() for row in shown_rows])
    shown_table.always_shown = next(iter(added_columns), SHOWN_AS.get(rank_by, rank_by))
    show(shown_table, f"{num_hidden} more; to show all: -n {len(runs)}\n" if num_hidden > 0 else "")


def cell_text(row: Row) -> str:
    """The model and nodes of a run, and the routing of its experts, such as `tiny-moe on 1 node, routing balanced`."""
    cell_nodes_text = nodes_text(row["nodes"], row["partial_gpus"])
    text = f"{model_text(row['model'], row['model_mark'])} on {cell_nodes_text}"
    return ", ".join(filter(None, (text, routing_text(row["routing"]))))


def number_texts(row: Row) -> dict[str, str | Text | None]:
    """Column of the table -> text of the most important numbers of a run; None where one is unknown."""
    text_by_column: dict[str, str | Text | None] = {"layout": " ".join(layout_words(row))}
    text_by_column |= {name: with_unit(column, row[column]) for column, name in SHOWN_AS.items()}
    mfu_heading, step_heading = SHOWN_AS["mfu"], SHOWN_AS["step_time_s"]
    if text_by_column[mfu_heading]:
        text_by_column[mfu_heading] = f"{text_by_column[mfu_heading]}{peak_suffix(row['precision'])}"
    peaks = ("peak_mem_reserved_bytes", "peak_mem_reserved_rank0_bytes", "peak_mem_allocated_bytes")
    text_by_column[SHOWN_AS["peak_mem_reserved_bytes"]] = memory(*(row[name] for name in peaks))
    if text_by_column[step_heading] and row["step_time_ci95_rel"] is not None:
        width_text = half_width(row["step_time_ci95_rel"])
        text_by_column[step_heading] = f"{text_by_column[step_heading]} {width_text}"
    return text_by_column | {"status": _status_text(row)}


def _status_text(row: Row) -> Text:
    """The status of a run as one word; for an ok run, its place in the ranking such as `best`.

    A best run whose interval missed its target also has the width, such as `best +- 53.0 %`.
    """
    status = row["status"]
    label_text = state(status, row["attempt"])
    if status == Status.OK:
        plain_label = "slower" if row["stopped"] == SLOWER else str(Status.OK)
        label_text = next((mark for mark, column in COLUMN_BY_MARK.items() if row[column]), plain_label)
    width_text = too_wide(row["ci_reached"], row["step_time_ci95_rel"]) if label_text == "best" else ""
    if status == Status.OK and row["suspect"] and label_text in ("best", "as good"):
        label_text = f"{label_text}, suspect"
    if status == Status.OK and row["screened"]:
        mark = IN_PARTS if row["measured_gas"] else FEW_STEPS
        label_text = mark if label_text == str(Status.OK) else f"{label_text}, {mark}"
    style = style_of(
        status, has_caveat=bool(width_text) or "suspect" in label_text or label_text.startswith("slower")
    )
    return Text(f"{label_text} {width_text}".rstrip(), style)
