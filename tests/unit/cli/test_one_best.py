"""Every command names the same best run of a cell, where allocations differ in speed."""

from statistics import median

import pytest

from tests.sweep_folder import write
from tests.unit.cli.conftest import QUICK, as_json, record
from ultrabench.store.events import AllocationPlanned

NODES = QUICK.runs[0].nodes
CONTROL, A, B = [run for run in QUICK.runs if run.nodes == NODES][:3]
MEASURED = {"first": [(CONTROL, 0.40), (A, 0.36)], "second": [(CONTROL, 0.30), (B, 0.33)]}
"""Allocation -> its runs and their step times. B has the shorter one, but A gains more on its control run."""


@pytest.fixture
def two_allocations(sweep):
    """The sweep of the fixture, whose ok run is gone, with two allocations of different speed."""
    for journal in sweep.journal.iterdir():
        journal.unlink()
    for repeat, (name, runs) in enumerate(MEASURED.items()):
        planned = {"nodes": NODES, "limit_s": 60.0, "tasks": (), "control": CONTROL.run_id}
        write(sweep, AllocationPlanned(allocation=name, **planned))
        for run, time_s in runs:
            where = {"allocation": name, "repeat": repeat if run is CONTROL else 0}
            record(sweep, run, step_times_s=(time_s,) * 6, **where)
    return sweep


def test_all_commands_name_the_run_that_gains_most_on_its_control(ultrabench, two_allocations):
    heatmap = next(cell for cell in as_json(ultrabench, "heatmap") if cell["nodes"] == NODES)
    top = next(row for row in as_json(ultrabench, "sweep", "top") if row["nodes"] == NODES)
    (status,) = as_json(ultrabench, "sweep", "status")["best"]
    assert {heatmap["run_id"], top["run_id"], status["run_id"]} == {A.run_id}
    assert status["control_ratio"] == pytest.approx(0.40 / 0.36)
    _, live, _ = ultrabench("sweep", "status")
    assert A.layout.label() in live.partition("best so far")[2]
    assert B.layout.label() not in live.partition("best so far")[2]


@pytest.mark.parametrize("times_s", [(0.04, 0.05, 0.08), (0.04, 0.05)])
def test_a_run_with_repeats_counts_with_their_median_and_every_answer_says_so(ultrabench, sweep, times_s):
    for repeat, time_s in enumerate(times_s):
        record(sweep, A, repeat=repeat, step_times_s=(time_s,) * 6)
    shown_rate, *rates = (
        A.spec.tokens_per_step / time_s / A.layout.world_size for time_s in (0.05, *times_s)
    )
    top = next(row for row in as_json(ultrabench, "sweep", "top") if row["nodes"] == NODES)
    heatmap = next(cell for cell in as_json(ultrabench, "heatmap") if cell["nodes"] == NODES)
    assert top["ranked_value"] == heatmap["ranked_value"] == pytest.approx(median(rates))
    assert top["tokens_per_s_per_gpu"] == heatmap["tokens_per_s_per_gpu"] == pytest.approx(shown_rate)
    assert f"{shown_rate:,.0f} (of {len(rates)} repeats)" in ultrabench("sweep", "status")[1]
    table = ultrabench("sweep", "top")[1]
    assert "by the median tokens_per_s_per_gpu of repeats" in table
    assert "median tokens/s/GPU" in " ".join(table.split())
