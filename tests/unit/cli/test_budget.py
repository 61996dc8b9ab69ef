"""`sweep plan --max-gpu-hours`, what plans say of time and money, and the prices that `sweep status` shows."""

import json
import re
import shlex

import pytest

from tests.sweep_folder import write
from tests.unit.cli.conftest import QUICK, as_json, one_line, record
from ultrabench.cli.sweep import planning
from ultrabench.store.events import Launched

GRID = ("hardware=h100x8", "model=llama3-8b", "sweep.nodes=[1,2]", "sweep.tp=[1,2]", "sweep.pp=[1,2]")
PLAN = ("sweep", "plan", *GRID)


@pytest.mark.parametrize(("hours", "lists_layouts"), [("5", True), ("14", False)])
def test_the_sweep_that_fits_is_written_and_costs_what_was_said(ultrabench, hours, lists_layouts):
    budget = ("--max-gpu-hours", hours)
    code, out, _ = ultrabench(*PLAN, *budget)
    assert code == 0
    assert re.search(rf"^within {hours} GPU hours: .*: [\d.]+ GPU hours \([\d.]+ to [\d.]+\)$", out, re.M)
    assert re.search("^you will know .*\n(you will not know .*\n)+", out, re.M)
    words = shlex.split(out.strip().splitlines()[-1])
    assert words[:3] == ["ultrabench", "sweep", "plan" if lists_layouts else "launch"]
    assert shlex.split(ultrabench(*PLAN, *budget, "--top", "1")[1].strip().splitlines()[-1]) == words
    if lists_layouts:
        assert ultrabench(*words[1:])[0] == 0
    document = as_json(ultrabench, *PLAN, *budget, "--write", "fits")
    proposal, said_hours = document["proposal"], document["predicted_gpu_hours"]
    assert (proposal["layouts_per_cell"] is not None) == lists_layouts
    assert document["predicted_gpu_hours_interval"][1] <= float(hours)
    _, out, err = ultrabench(*PLAN, *budget, "--write", "fits", "--force")
    assert err.startswith("wrote ")
    assert out.strip().endswith(f"ultrabench sweep launch sweep=fits --max-gpu-hours {hours}")
    written = as_json(ultrabench, "sweep", "plan", "sweep=fits")
    assert written["partial_steps"] == document["partial_steps"] == ("off" if lists_layouts else "auto")
    assert written["predicted_gpu_hours"] == pytest.approx(said_hours, rel=1e-3)
    assert written["runs_at_most"] == document["runs_at_most"]
    if not lists_layouts:
        launched = as_json(ultrabench, "sweep", "plan", *words[3:-2])
        assert launched["predicted_gpu_hours"] == pytest.approx(said_hours, rel=1e-3)


def test_every_cell_that_was_asked_for_is_listed_and_says_why_it_has_no_run(ultrabench):
    models = ("sweep", "plan", "hardware=h100x8", "sweep.models=[llama3-8b,llama3-70b]", "sweep.nodes=[1,4]")
    plan = (*models, "sweep.tp=[4,8]", "sweep.gbs=64", "sweep.pp=[1]", "sweep.zero_stage=[3]")
    cells = [("llama3-8b", 1), ("llama3-8b", 4), ("llama3-70b", 1), ("llama3-70b", 4)]
    for budget in ((), ("--max-gpu-hours", "0.5")):
        document, (_, out, _) = as_json(ultrabench, *plan, *budget), ultrabench(*plan, *budget)
        entry_by_cell = {(entry["model"], entry["nodes"]): entry for entry in document["cells"]}
        assert [*entry_by_cell] == cells
        reasons = [entry["reason"] for entry in entry_by_cell.values()]
        assert reasons[0] is None
        assert re.match("no layout is likely to fit into .* GiB; .*; try ", reasons[2])
        line = f"llama3-70b on 1 node: {reasons[2]}"
        assert line in document["notes"]
        assert f"{line}\n" in out
        is_given_up = [reason is not None and "--max-gpu-hours 0.5" in reason for reason in reasons]
        assert is_given_up == [False, bool(budget), False, bool(budget)]
    assert [entry["runs"] for entry in entry_by_cell.values()] == [1, 0, 0, 0]
    assert "\nwithin 0.5 GPU hours: the layout predicted fastest of the cheapest cell, with " in f"\n{out}"
    assert re.search("^you will know how fast .*, for llama3-8b on 1 node$", out, re.M)
    assert "\nyou will not know whether another layout is faster\n" in out
    assert "\nyou will not know anything about llama3-8b on 4 nodes; llama3-70b on 4 nodes\n" in out
    assert (
        "\nyou will not know anything about llama3-70b on 1 node, where no layout is likely to fit\n" in out
    )


def test_cells_without_a_candidate_say_why(ultrabench):
    batches = (*PLAN[:2], "hardware=h100x8", "model=llama3-8b", "sweep.nodes=[1]", "sweep.gbs=[64,63]")
    entries = as_json(ultrabench, *batches, "sweep.tp=[1]", "sweep.pp=[1]", "sweep.zero_stage=[3]")["cells"]
    assert [entry["reason"] is None for entry in entries] == [True, False]
    assert entries[1]["reason"].startswith("no candidate: gbs=63 is not divisible by dp*mbs with ")


def test_what_cannot_be_proposed_is_refused_in_one_line(ultrabench):
    assert "give at least " in one_line(ultrabench, *PLAN, "--max-gpu-hours", "0.2")
    assert "must be" in one_line(ultrabench, *PLAN, "--max-gpu-hours", "0")
    both = (*PLAN, "--write", "x", "--top", "1", "--max-gpu-hours", "9")
    assert "leave out one" in one_line(ultrabench, *both)
    assert "--max-gpu-hours" in one_line(ultrabench, *PLAN, "--show-script", "--max-gpu-hours", "9")
    assert "--max-gpu-hours H" in one_line(ultrabench, *PLAN, "--write", "x")


def test_a_plan_says_what_it_costs_and_how_to_get_by_with_less(ultrabench):
    priced = (*PLAN, "launcher=slurm", "+cluster.price_per_gpu_hour=2.5")
    document, (_, out, _) = as_json(ultrabench, *priced), ultrabench(*priced)
    hours, ends = document["predicted_gpu_hours"], document["predicted_gpu_hours_interval"]
    costs = [document["predicted_cost"], *document["predicted_cost_interval"]]
    assert costs == pytest.approx([2.5 * hours, *(2.5 * end for end in ends)], abs=0.01)
    assert re.search(r"^cost [\d.,]+ \([\d.,]+ to [\d.,]+\) at 2.5 per GPU hour$", out, re.M)
    assert re.search(r"^about \w+ \(\w+ to \w+\) on the nodes with 8 jobs at a time", out, re.M)
    assert "add +cluster.price_per_gpu_hour=VALUE" in ultrabench(*PLAN)[1]
    shown = re.findall(r"^  (\S.*?)  ([\d.,]+) GPU hours \(-\d+%\)", out, re.M)
    assert [shlex.split(words) for words, _ in shown] == [
        saving["overrides"] for saving in document["savings"]
    ]
    assert all(saving["predicted_gpu_hours"] < hours for saving in document["savings"])
    assert document["not_searched"]["recompute"] == ["selective", "full"]
    assert "To search them, too: sweep=recommend sweep.strategy=adaptive\n" in out
    small = as_json(ultrabench, "sweep", "plan")
    assert (small["not_searched"], small["partial_steps"], document["partial_steps"]) == ({}, "off", "off")


def test_status_shows_what_was_asked_what_is_spent_and_what_is_expected_now(ultrabench, sweep):
    assert "price" not in as_json(ultrabench, "sweep", "status"), "earlier versions recorded no price"
    asked = Launched(generation=2, config=QUICK.config.resolved, asked_gpu_hours=(1.0, 0.5, 2.0))
    write(sweep, asked, Launched(generation=3, config=QUICK.config.resolved))
    before = as_json(ultrabench, "sweep", "status")["price"]
    assert (before["asked_gpu_hours"], before["asked_gpu_hours_interval"]) == (1.0, [0.5, 2.0])
    for run in QUICK.runs[2:5]:
        record(sweep, run, duration_s=3600.0, step_times_s=(100.0,) * 6)
    after = as_json(ultrabench, "sweep", "status")["price"]
    assert after["spent_gpu_hours"] > before["spent_gpu_hours"] + 3
    assert after["expected_gpu_hours"] > after["spent_gpu_hours"] + 2 * before["expected_gpu_hours"]
    line = r"^price: 1 GPU hours asked at the launch \(0.5 to 2\), [\d.]+ spent, [\d.]+ expected$"
    assert re.search(line, ultrabench("sweep", "status")[1], re.M)
    for run in QUICK.runs[5:]:
        record(sweep, run)
    over = as_json(ultrabench, "sweep", "status")
    if not over["to_go"]:
        assert over["price"]["expected_gpu_hours"] == over["price"]["spent_gpu_hours"]
    assert json.dumps(over)


def test_a_long_plan_says_how_far_it_is_where_no_terminal_shows_a_bar(capsys):
    seconds = iter([0.0, 11.0, 15.0, 22.0, 26.0, 33.0, 40.0])
    report = planning.line_printer(planning.CANDIDATES, lambda: next(seconds))
    for num_done in (10, 100, 250, 400, 500, 1000):
        report(num_done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "planning: 10 of 1,000 candidates",
        "planning: 250 of 1,000 candidates, about 1m06s left",
        "planning: 500 of 1,000 candidates, about 33s left",
    ]
