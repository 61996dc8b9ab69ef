"""Every answer names the same best run of a cell, with the same speed: status, top, heatmap, the page, and what is repeated."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sweep_folder import write
from tests.unit.analysis.page_tables import shown
from tests.unit.analysis.sweeps import OK, attempted, make_sweep, spec_of
from ultrabench.analysis.collect import collect
from ultrabench.analysis.ranking import leaderboard, rank
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
    nodes: tuple(spec_of(Layout(dp=8 * nodes, zero_stage=z, mbs=m, gas=4 // m), nodes=nodes) for z in (0, 1) for m in (1, 2))
    for nodes in (1, 2)
}  # fmt: skip
"""Number of nodes -> the runs of a cell, the control first."""
RESULTS = st.builds(
    lambda status, ticks, stopped, throttled, driver, environment: replace(
        OK, status=Status(status), step_times_s=tuple(ticks / 100 + extra for extra in (0.0, 0.001, -0.001)),
        stopped=stopped, throttled=throttled, driver_version=driver, env_id=f"{environment}{driver}" * 8,
        kernel_digest=environment,
    ),
    st.sampled_from(["ok", "ok", "ok", "ok", "crash", "oom"]), st.integers(20, 40),
    st.sampled_from([None, None, None, SLOWER]), st.sampled_from([None, None, None, "power"]),
    st.sampled_from("12"), st.sampled_from("aaab"),
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


def run_and_rate(row):
    """The run_id of a row and its tokens/s/GPU."""
    return row["run_id"], f"{row['tokens_per_s_per_gpu'] or 0.0:.5g}"  # the page has six digits


def best_by_answer(folder):
    """Answer -> number of nodes -> run_id and tokens/s/GPU of the best run, where there is one."""
    table, sweep = collect([folder], pytest.fail), read_sweep_json(folder)
    state = fold(read_journal(folder.journal, pytest.fail))
    runs = [*runs_of(sweep, read_rows(folder.plan, runs_only=True), state)]
    columns = shown(table)["columns"]
    keys = ("cell", "rank", "nodes", "run_id", "tokens_per_s_per_gpu")
    pages = [dict(zip(keys, values, strict=True)) for values in zip(*map(columns.get, keys), strict=True)]
    boards = [board for board in leaderboard(table) if board and board[0]["best"]]
    near = contender_ids(runs, for_answers(state), "cuda")
    best = {cell.nodes: run_and_rate(cell.to_json()) for cell in rank(table) if cell.run_id}
    ranked = sorted(
        (row for row in pages if row["rank"] is not None), key=lambda row: row["rank"], reverse=True
    )
    return {
        "heatmap": best,
        "top": {board[0]["nodes"]: run_and_rate(board[0]) for board in boards},
        "status": {
            s["nodes"]: run_and_rate(s) for s in progress_of("s", runs, state, "cuda").as_json()["best"]
        },
        "page": {row["nodes"]: run_and_rate(row) for row in ranked if row["nodes"] in best},
        "repeated": {nodes: run for nodes, run in best.items() if run[0] in near},
    }


@given(st.lists(REPEATS, min_size=1, max_size=14), st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_all_answers_name_one_winner_for_each_cell(repeats, with_controls):
    answers = best_by_answer(sweep_of(repeats, with_controls))
    assert all(best == answers["heatmap"] for best in answers.values()), answers


def test_allocations_that_differ_are_compared_by_their_controls():
    """Controls of 0.40 and 0.30 s; A took 0.36 s beside the first and B 0.33 s beside the second: A is better."""
    times = [(1, 0, 0, "x", 0.40), (1, 0, 1, "y", 0.30), (1, 1, 0, "x", 0.36), (1, 2, 0, "y", 0.33)]
    repeats = [(*key, replace(OK, step_times_s=(time_s,) * 3)) for *key, time_s in times]
    answers = best_by_answer(sweep_of(repeats, (True, True, True)))
    assert [best[1][0] for best in answers.values()] == [CELLS[1][1].run_id] * len(answers)
