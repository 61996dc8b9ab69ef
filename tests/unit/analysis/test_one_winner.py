"""Every answer names the same best run of a cell, with the same speed: status, top, heatmap, the page,
and what is repeated.
"""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ultrabench
from tests.sweep_folder import write
from tests.unit.analysis.page_tables import shown
from tests.unit.analysis.sweeps import OK, attempted, make_sweep, spec_of
from ultrabench.analysis.results.collect import collect
from ultrabench.analysis.results.ranking import leaderboard, rank
from ultrabench.analysis.studies.compare.compare import compare
from ultrabench.layout import Layout
from ultrabench.result import SLOWER, Status
from ultrabench.store.events import AllocationPlanned
from ultrabench.store.journal import read_journal
from ultrabench.store.state import fold
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.running.attempts import contender_ids
from ultrabench.sweep.running.outliers import for_answers
from ultrabench.sweep.running.progress import progress_of

CELLS = {
    nodes: tuple(spec_of(Layout(dp=8 * nodes, zero_stage=z, mbs=m, gas=4 // m), nodes=nodes) for z in (0,
        1) for m in (1, 2))
    for nodes in (1, 2)
}  # fmt: skip
"""Number of nodes -> the runs of a cell, the control first."""
RESULTS = st.builds(
    lambda status, ticks, stopped, throttled, driver, environment, parts, few, beside: replace(
        OK, status=Status(status), step_times_s=tuple(ticks / 100 + extra for extra in (0.0, 0.001, -0.001)),
        stopped=stopped, throttled=throttled, driver_version=driver, env_id=f"{environment}{driver}" * 8,
        kernel_digest=environment, measured_gas=parts, extrapolation_error_rel=0.02 if parts else None,
        screened=True if parts or few else None, parts_step_time_s=beside if not (parts or few) else None,
        parts_ci95_rel=0.01 if parts or (beside and not few) else None,
    ),
    st.sampled_from(["ok", "ok", "ok", "ok", "crash", "oom"]), st.integers(20, 40),
    st.sampled_from([None, None, None, SLOWER]), st.sampled_from([None, None, None, "power"]),
    st.sampled_from("12"), st.sampled_from("aaab"),
    st.sampled_from([None, None, "2,4"]), st.sampled_from([False, False, True]), st.sampled_from([None, 0.25, 0.33]),
)  # fmt: skip
REPEATS = st.tuples(
    st.sampled_from([1, 2]), st.integers(0, 3), st.integers(0, 1), st.sampled_from("xyz"), RESULTS
)


def sweep_of(repeats, with_controls):
    """A sweep folder with these repeats: number of nodes, number of the run, repeat, allocation and result."""
    folder = make_sweep(Path(tempfile.mkdtemp()) / "s", [spec for specs in CELLS.values() for spec in specs])
    for nodes, specs in CELLS.items():
        for name, has_control in zip("xyz", with_controls, strict=True):
            control = specs[0].run_id if has_control else None
            planned = {"nodes": nodes, "limit_s": 60.0, "tasks": (), "control": control}
            write(folder, AllocationPlanned(allocation=f"{name}{nodes}", **planned))
    for (nodes, run, repeat), (name, result) in {r[:3]: r[3:] for r in repeats}.items():
        write(folder, *attempted(CELLS[nodes][run], result, repeat, allocation=f"{name}{nodes}"))
    return folder


NUMBERS = (
    "tokens_per_s_per_gpu", "step_time_s", "mfu", "control_ratio", "step_time_ci95_rel", "ci_reached", "num_repeats",
    "num_repeats_failed",
)  # fmt: skip
"""Numbers of a run; an answer has some of them."""


def numbers_of(row, *names):
    """The run_id of a row and its numbers."""
    return {name: row[name] for name in ("run_id", *(names or NUMBERS)) if not pd.isna(row.get(name))}


def page_rows(table):
    """The rows of the page that stand for a run, with the numbers of their run, the best of each cell last."""
    columns = shown(table)["columns"]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for row in rows:
        row |= {name: row[f"run_{name}"] for name in NUMBERS if row.get(f"run_{name}") is not None}
    return sorted((r for r in rows if r["rank"] is not None), key=lambda r: r["rank"], reverse=True)


def best_by_answer(folder):
    """Answer -> number of nodes -> run_id and numbers of the best run, where there is one."""
    table, sweep = collect([folder], pytest.fail), read_sweep_json(folder)
    state = fold(read_journal(folder.journal, pytest.fail))
    runs = [*runs_of(sweep, read_rows(folder.plan, runs_only=True), state)]
    boards = [board for board in leaderboard(table) if board and board[0]["best"]]
    near = contender_ids(runs, for_answers(state), "cuda")
    best = {cell.nodes: numbers_of(cell.to_json()) for cell in rank(table) if cell.run_id}
    notebook = ultrabench.best(table.to_pandas()).dropna(subset=["run_id"])
    environments = Counter(board_row["run_id"] for board in boards for board_row in board)
    # Other boards have no single step time that `compare` could show.
    compared_boards = [b for b in boards if environments[b[0]["run_id"]] == 1 and not b[0]["suspect"]]
    compared = compare(table, table, 0.05).rows.to_dict("records") if compared_boards else []
    columns_of_a = {"run_id": "run_id_a", "step_time_s": "step_time_a_s"}
    rows_of_a = [row | {name: row[name_in_a] for name, name_in_a in columns_of_a.items()} for row in compared]
    times = {(row["run_id"], row["nodes"]): row for row in rows_of_a}
    # Screened runs that are faster than the best are measured in full before it is repeated.
    led_by_screened = {
        board[0]["nodes"]
        for board in boards
        if any(row["screened"] and (row["ranked_value"] or 0) > board[0]["ranked_value"] for row in board)
    }
    return {
        "heatmap": best,
        "top": {board[0]["nodes"]: numbers_of(board[0]) for board in boards},
        "status": {
            s["nodes"]: numbers_of(s) for s in progress_of("s", runs, state, "cuda").as_json()["best"]
        },
        "page": {row["nodes"]: numbers_of(row) for row in page_rows(table) if row["nodes"] in best},
        "notebook": {row["nodes"]: numbers_of(row) for row in notebook.to_dict("records")},
        "repeated": {n: run for n, run in best.items() if run["run_id"] in near or n in led_by_screened},
        "compare": {
            board[0]["nodes"]: numbers_of(times[board[0]["run_id"], board[0]["nodes"]], "step_time_s")
            for board in compared_boards
        },
    }


@settings(max_examples=10)  # each is a sweep of its own
@given(st.lists(REPEATS, min_size=1, max_size=14), st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_all_answers_name_one_winner_for_each_cell_with_the_same_numbers(repeats, with_controls):
    answers = best_by_answer(sweep_of(repeats, with_controls))
    cells_by_answer = {name: {*best} for name, best in answers.items() if name != "compare"}
    assert set(map(frozenset, cells_by_answer.values())) == {frozenset(answers["heatmap"])}, cells_by_answer
    for nodes in answers["heatmap"]:
        for name, answer in ((name, best[nodes]) for name, best in answers.items() if nodes in best):
            top = answers["top"][nodes]
            assert answer["run_id"] == top["run_id"], name
            expected = pytest.approx([top[key] for key in NUMBERS if key in answer], rel=1e-5)
            assert [answer[key] for key in NUMBERS if key in answer] == expected, (
                name
            )  # the page has six digits


def test_allocations_that_differ_are_compared_by_their_controls():
    """Controls of 0.40 and 0.30 s; A took 0.36 s beside the first and B 0.33 s beside the second: A is better."""
    times = [(1, 0, 0, "x", 0.40), (1, 0, 1, "y", 0.30), (1, 1, 0, "x", 0.36), (1, 2, 0, "y", 0.33)]
    repeats = [(*key, replace(OK, step_times_s=(time_s,) * 3)) for *key, time_s in times]
    answers = best_by_answer(sweep_of(repeats, (True, True, True)))
    assert [best[1]["run_id"] for best in answers.values()] == [CELLS[1][1].run_id] * len(answers)


def test_the_interval_of_a_winner_holds_the_starts_that_screened_it_in_every_answer():
    """Few whole steps took 0.40 s in one start, all of them 0.30 s in another."""
    few, full = (replace(OK, step_times_s=(time_s,) * 6) for time_s in (0.4, 0.3))
    repeats = [(1, 0, 0, "x", replace(few, screened=True)), (1, 0, 1, "y", full)]
    answers = best_by_answer(sweep_of(repeats, (False, False, False)))
    widths = {name: best[1].get("step_time_ci95_rel") for name, best in answers.items()}
    known = {name: width for name, width in widths.items() if width is not None}
    assert known.keys() >= {"top", "heatmap", "page", "notebook"}
    assert [*known.values()] == pytest.approx([1 / 3] * len(known), rel=1e-5), widths
    assert answers["top"][1]["step_time_s"] == pytest.approx(0.3)
