"""What commands say of runs that were screened by parts of steps."""

import re

from tests.sweep_folder import make_folder, write
from tests.unit.cli.conftest import HEAD, as_json, record
from ultrabench.launchers.open_sweep import sweep_json_of
from ultrabench.store.events import Launched
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

BY_PARTS = [
    *("hardware=cpu", "model=tiny", "sweep.nodes=[1]", "sweep.gbs=64", "sweep.gas=null"),
    *("sweep.zero_stage=[0]", "sweep.mbs=[1]"),
]
"""The overrides of three runs with many micro-batches."""
OF_PARTS = {"measured_gas": "2,4", "screened": True, "extrapolation_error_rel": 0.01, "parts_ci95_rel": 0.01}
"""Values of an ok result by parts of steps."""


def test_show_says_which_attempts_measured_parts_of_steps(ultrabench, tmp_path):
    plan = make_plan(load_config([*BY_PARTS, "measure.partial_steps=[2,4]"]))
    folder, run = make_folder(tmp_path / "results" / "parts", HEAD, plan.candidates), plan.runs[0]
    write(folder, Launched(generation=1, config=plan.config.resolved))
    record(folder, run, **OF_PARTS)
    record(folder, run, repeat=1, parts_step_time_s=0.1)
    record(folder, run, repeat=2)
    out = ultrabench("sweep", "show", run.run_id)[1]
    assert re.search(r"^screened by +parts of 2,4 micro-batches$", out, re.MULTILINE)
    assert "{" not in out, "no column of a plan is shown as JSON"
    rows = out.partition("\nattempts")[2].splitlines()
    measured = ("parts of 2,4 micro-batches", "few whole steps, then parts", " whole steps")
    assert [next(text for text in measured if text in row) for row in rows if " ok " in row] == [*measured]


def test_show_says_that_a_program_starts_twice(ultrabench, tmp_path):
    """The words of its command are those of the start, whose steps have fewer micro-batches."""
    program = (
        "launcher=slurm",
        "kernel=command",
        "kernel.command=[python,train.py,'--gas={gas}','--gbs={gbs}']",
    )
    plan = make_plan(load_config([*BY_PARTS, *program, "measure.partial_steps=[2,4]"]))
    folder = make_folder(tmp_path / "results" / "two", sweep_json_of(plan.config, {}), plan.candidates)
    write(folder, Launched(generation=1, config=plan.config.resolved))
    run = plan.runs[0]
    start = as_json(ultrabench, "sweep", "show", run.run_id)["program"]
    gbs = 2 * run.layout.dp * run.layout.mbs
    assert (start["gas_of_starts"], start["command"][-2:]) == ([2, 4], ["--gas=2", f"--gbs={gbs}"])
    out = ultrabench("sweep", "show", run.run_id)[1]
    assert "the program starts twice: with 2 micro-batches a step, as above, then with 4" in out
    record(folder, run, **OF_PARTS)
    record(folder, run, repeat=1)
    in_full = as_json(ultrabench, "sweep", "show", run.run_id)["program"]
    assert ("gas_of_starts" in in_full, in_full["command"][-2]) == (False, f"--gas={run.layout.gas}")


def test_status_prices_starts_in_full_and_is_not_over_before_them(ultrabench, tmp_path):
    plan = make_plan(load_config([*BY_PARTS, "measure.partial_steps=[2,4]", "measure.confirm=1"]))
    folder = make_folder(tmp_path / "results" / "parts", HEAD, plan.candidates)
    write(folder, Launched(generation=1, config=plan.config.resolved, asked_gpu_hours=(1.0, 0.5, 2.0)))
    for number, run in enumerate(plan.runs):
        record(folder, run, step_times_s=(1.0 + number,) * 6, **OF_PARTS)
    screened = as_json(ultrabench, "sweep", "status")
    price = screened["price"]
    assert (screened["settled"], screened["over"], screened["starts_left"]) == (len(plan.runs), False, 1)
    assert screened["eta_s"] is None
    assert as_json(ultrabench, "sweep", "list")[0]["activity"] == "stopped"
    assert price["expected_gpu_hours"] > price["spent_gpu_hours"]
    assert screened["standing"].startswith("Nothing is running. To continue: ultrabench sweep resume")
    out = ultrabench("sweep", "status")[1]
    assert (
        "All runs have a result; 1 start is left: repeats, starts in full, or measurements in doubt." in out
    )
    assert "in 1 cell the fastest run was only screened, and is measured in full before" in " ".join(
        out.split()
    )
    record(folder, plan.runs[0], repeat=1, step_times_s=(1.0,) * 6)
    over = as_json(ultrabench, "sweep", "status")
    assert (over["over"], over["standing"]) == (True, None)
    assert over["price"]["expected_gpu_hours"] == over["price"]["spent_gpu_hours"]
