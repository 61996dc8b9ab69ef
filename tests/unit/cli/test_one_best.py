"""Every command names the same best run of a cell, where allocations differ in speed."""

from statistics import median

import pytest

from tests.sweep_folder import write
from tests.unit.cli.conftest import QUICK, as_json, record
from ultrabench.result import Status
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


@pytest.mark.parametrize("times_s", [(0.06, 0.07, 0.09), (0.06, 0.07)])
def test_every_command_prints_the_medians_of_a_run_with_repeats(ultrabench, sweep, times_s):
    """The run of the fixture and a failed repeat are beside them; steps that alternate give each repeat an interval."""
    for repeat, time_s in enumerate(times_s):
        steps_s = (time_s, 1.1 * time_s, time_s) * 4
        record(sweep, A, repeat=repeat, step_times_s=steps_s, ci_reached=bool(repeat))
    record(sweep, A, repeat=len(times_s), status=Status.CRASH, reason="boom")
    speed = median(A.spec.tokens_per_step / time_s / A.layout.world_size for time_s in times_s)
    step_s = median(times_s)
    top = next(row for row in as_json(ultrabench, "sweep", "top") if row["run_id"] == A.run_id)
    heatmap = next(cell for cell in as_json(ultrabench, "heatmap") if cell["nodes"] == NODES)
    (status,) = as_json(ultrabench, "sweep", "status")["best"]
    assert [top["step_time_s"], top["ranked_value"], heatmap["ranked_value"]] == pytest.approx(
        [step_s, speed, speed]
    )
    assert top["mfu"] == heatmap["mfu"] > 0
    half_width = status["step_time_ci95_rel"]
    assert half_width > 0.1, "the interval covers those of all repeats"
    for answer in (top, heatmap, status):
        assert (answer["run_id"], answer["num_repeats"], answer["num_repeats_failed"]) == (
            A.run_id,
            len(times_s) + 1,
            1,
        )
        assert answer["tokens_per_s_per_gpu"] == pytest.approx(speed)
        assert (answer["step_time_ci95_rel"], answer["ci_reached"]) == (pytest.approx(half_width), False)
    speed_text, width_text = f"{speed:,.0f}", f"+- {100 * half_width:.1f} %"
    shown_step = f"{float(f'{step_s:.4g}'):g} s"
    repeats_text = f"(median of {len(times_s)} of {len(times_s) + 1} repeats) {width_text}"
    assert f"{speed_text} {repeats_text}" in ultrabench("sweep", "status")[1]
    (top_line,) = (line for line in ultrabench("sweep", "top")[1].splitlines() if A.run_id in line)
    assert all(
        f" {text} " in top_line for text in (speed_text, f"{shown_step} {width_text}", f"best {width_text}")
    )
    number_lines = ultrabench("sweep", "show", A.run_id)[1].partition("\n\n")[0].splitlines()[1:]
    shown = dict(line.split(maxsplit=1) for line in number_lines)
    assert (shown["tokens/s/GPU"], shown["step"]) == (speed_text, f"{shown_step} {width_text}")
    assert speed_text in ultrabench("sweep", "list")[1]
    (compared,) = (
        r
        for r in as_json(ultrabench, "compare", str(sweep.path), str(sweep.path))["rows"]
        if r["run_id_a"] == A.run_id
    )
    assert compared["step_time_a_s"] == pytest.approx(step_s)
