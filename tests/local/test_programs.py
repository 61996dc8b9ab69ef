"""Programs of users: one that only logs, and one that needs a token."""

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.local.conftest import AT_ONCE, axes

pytestmark = pytest.mark.local

ONLY_LOGS = """
import os
if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    print("number of parameters: 3.67M")
    for step in range(1, 9):
        time = "elapsed time per iteration (ms): 250.0"
        print(f" iteration {step:8d}/{8:8d} | {time} | lm loss: {10 / step:.6E} | grad norm: 1.4 |", flush=True)
        print(f"utilization {step}%", flush=True)
mib = 100 * (1 + int(os.environ["RANK"]))
print(f"[Rank 0] (after 1 iterations) memory (MB) | allocated: 1 | max allocated: {mib} | reserved: 1 | "
      f"max reserved: {mib + 1}.5")
"""


MEGATRON = (
    "kernel=megatron", "kernel.command=[python,program.py]", "model=tiny", "name=t", "measure.warmup_steps=2",
    "measure.max_steps=6", *AT_ONCE,
)  # fmt: skip
"""Options of a sweep of a program that only logs, in the way of Megatron-LM."""


def test_steps_are_read_from_the_last_ranks_log(bench):
    """On two nodes; memory is read from the logs of all ranks.

    The program says that its model is another one than that of the sweep. What the user says of it is judged anew.
    """
    (bench.folder / "program.py").write_text(ONLY_LOGS)
    sizes = axes(nodes=2, tp=1, pp=1, zero_stage=1, mbs=1, gas=2, gbs=8)
    words = "sweep", "launch", *MEGATRON, *sizes, r"kernel.mfu_line='utilization (?P<percent>[0-9]+)%'"
    bench.run(*words)
    (row,) = bench.rows()
    problem = "the program prints 3,670,000 parameters, model=tiny has 328,256: set kernel.params"
    assert (row["source_num_params"], row["mfu"], row["mfu_problem"]) == (3_670_000, None, problem)
    assert f"no MFU: {problem}" in bench.run("sweep", "status", "t")
    assert f"no MFU in 1 row: {problem}" in bench.done("sweep", "top", "t").stderr
    assert None not in (row["num_params"], row["predicted_step_time_s"], row["tokens_per_s_per_gpu"])
    bench.run(*words, "kernel.params=3.67M")
    (row,) = bench.rows()
    assert (row["num_params"], row["flops_formula"], row["mfu_problem"]) == (3_670_000, None, None)
    assert row["model_flops_per_s_per_gpu"] == pytest.approx(6 * 3.67e6 * row["tokens_per_s_per_gpu"])
    bench.run(*words, "kernel.params=unknown")
    (row,) = bench.rows()
    blank = (
        "num_params",
        "mfu",
        "model_flops_per_s_per_gpu",
        "predicted_step_time_s",
        "predicted_peak_mem_bytes",
        "p_oom",
    )
    assert [row[name] for name in blank] == [None] * len(blank)
    ranks = row["gpus"]
    peaks = [row[f"peak_mem_{name}_bytes"] / 2**20 for name in ("allocated", "reserved", "reserved_rank0")]
    assert peaks == [100 * ranks, 100 * ranks + 1.5, 101.5]
    assert row["source_mfu"] == pytest.approx(0.055)
    assert (row["status"], row["measured_by"], row["step_times_s"]) == ("ok", "log", [0.25] * 6)
    assert row["loss_final"] == pytest.approx(10 / 5)


def test_the_first_run_without_a_step_stops_the_others_and_a_mended_pattern_continues_the_sweep(bench):
    """The runs of one program would all end alike; a result that a pattern has found fixes the pattern."""
    (bench.folder / "program.py").write_text(ONLY_LOGS)
    sizes = axes(nodes=1, tp=1, pp=1, zero_stage=1, mbs=[1, 2, 4], gas=None, gbs=8)
    words = ["sweep", "launch", *MEGATRON, *sizes]
    patterns = ["wall time per iteration", "elapsed time per iteration", "time per iteration"]
    wrong, right, other = (rf"kernel.step_line='{p} .ms.: (?P<milliseconds>[0-9.]+)'" for p in patterns)
    launched = bench.done(*words, wrong)
    assert launched.returncode == 1
    line = "nearest: iteration 8/ 8 | elapsed time per iteration (ms): 250.0 | lm loss: 1.250000E+00 | grad norm: 1.4 |"
    assert line in launched.stdout + launched.stderr
    assert "fix the program or the patterns for its log (kernel.step_line, " in launched.stderr
    ends = [(row["status"], row["cause"]) for row in bench.rows() if row["status"] != "cancelled"]
    assert ends == [("invalid", "unmeasured")]
    mended = bench.done(*words, right)
    assert "other kernel.step_line than before: 1 result read again in the kept logs" in mended.stderr
    ends = Counter(row["status"] for row in bench.rows())
    assert (ends["ok"], ends["invalid"]) == (3, 0)
    line = "other kernel.step_line than before: 3 results read again in the kept logs"
    assert line in bench.run("sweep", "plan", *words[2:], other)
    assert line in bench.done(*words, other).stderr
    rows = bench.rows()
    assert Counter(row["status"] for row in rows) == ends
    assert {tuple(row["step_times_s"]) for row in rows if row["status"] == "ok"} == {(0.25,) * 6}
    by_arrival = "kernel.step_line='iteration'"
    line = "other kernel.step_line than before: 3 runs measured again, since no kept log gives the steps"
    assert line in bench.run("sweep", "plan", *words[2:], by_arrival)


EXAMPLE = Path(__file__).parents[2] / "examples/config_file"


def test_the_example_reads_a_file_that_is_written_for_each_run(bench):
    """On two nodes, each with a folder of its own; the program runs in a folder beside that of the launch."""
    shutil.copytree(EXAMPLE / "ultrabench", bench.folder / "ultrabench")
    shutil.copytree(EXAMPLE, bench.folder / "program")
    words = [
        "kernel=config_file", "kernel.folder=program", "model=tiny", "name=t", "measure.warmup_steps=2",
        "measure.min_steps=6", "measure.max_steps=6", *axes(nodes=2, tp=1, pp=1, mbs=[1, 2], gas=None, gbs=8,
            zero_stage=0),
        *AT_ONCE, "kernel.command=[python,train.py,'{files}/config.json','{node_rank}','{local_rank}','{gas-mbs}']",
    ]  # fmt: skip
    planned = json.loads(bench.run("sweep", "plan", "--command", "--json", *words))
    assert planned["command"][2:5] == ["{files}/config.json", "{node_rank}", "{local_rank}"]
    assert json.loads(planned["files"]["config.json"])["training"]["samples_per_rank"] == 2
    bench.run("sweep", "launch", *words)
    rows = bench.rows()
    assert [(row["status"], row["measured_by"]) for row in rows] == [("ok", "log")] * 2
    shown = json.loads(bench.run("sweep", "show", "1", "--json"))["program"]
    assert json.loads(shown["files"]["config.json"])["model"] == {"hidden_size": 64}
    assert shown["command"][2:5] == planned["command"][2:5]
    changed = bench.done("sweep", "launch", *words, "kernel.files={config.json: '{}'}")
    assert changed.returncode == 2
    assert "is a sweep with a different kernel (kernel.files: config.json)" in changed.stderr


TRAINS = """
import os, sys, time
assert os.environ["PYTHONUNBUFFERED"] == "1"
num_steps, form = int(sys.argv[1]), sys.argv[2]
for step in range(1, num_steps + 1):
    time.sleep(0.3)
    if form == "bar":  # as tqdm draws it, twice a step
        bar = f"\\r{step}/{num_steps} [00:0{step % 10}<00:01,  9.99it/s"
        print(bar + "]", end="")
        print(bar + f", loss={10 / step:.4f}]", end="")
    elif form == "micro":
        print(f"micro-batch of step {step}")
        print(f"step {step} took 0.15 s, loss {'nan.0' if len(sys.argv) > 3 and step == 4 else 1 / step}")
    elif form == "buffered":
        sys.stdout = open(1, "w", buffering=8192, closefd=False) if step == 1 else sys.stdout
        print(f"{{'loss': {10 / step}}}")
    elif step % 2 == 0:  # a line for two steps
        print(f"\\x1b[32mstep {step}\\x1b[0m | loss {10 / step}")
"""


def trained(bench, form, pattern, gas=1):
    """The row of a run of TRAINS, of 2 + 6 steps."""
    (bench.folder / "program.py").write_text(TRAINS)
    words = [
        "kernel=command", f"kernel.command=[python,program.py,'{{steps}}',{form}]", "model=tiny", "name=t",
        "measure.warmup_steps=2", "measure.min_steps=6", "measure.max_steps=6", f"kernel.step_line='{pattern}'",
        *AT_ONCE,
        *axes(nodes=1, tp=1, pp=1, gbs=2 * gas, mbs=1, gas=gas, zero_stage=0),
    ]  # fmt: skip
    launched = bench.done("sweep", "launch", *words)
    assert launched.returncode != 2, launched.stderr
    row, *repeats = (row for row in bench.rows() if row["status"] not in ("cancelled", "rejected"))
    assert all(
        repeat["suspect_codes"] == row["suspect_codes"] for repeat in repeats
    )  # a suspect is measured again
    return row, launched.stderr


@pytest.mark.parametrize(
    ("form", "pattern", "num_times"),
    [("bar", r"[0-9]+/[0-9]+ \[", 6), ("lines", r"step (?P<step>[0-9]+) . loss (?P<loss>[0-9.]+)", 2)],
)
def test_the_arrival_of_lines_times_steps(bench, form, pattern, num_times):
    """The program is asked for one step more than are measured, and the interval contains the error of the arrival."""
    row, errors = trained(bench, form, pattern)
    assert (row["status"], row["measured_by"]) == ("ok", "arrival"), errors
    assert len(row["step_times_s"]) == num_times
    assert 0.25 * 0.9 < row["step_time_s"] < 0.6 * bench.slowness
    if num_times >= 6:
        assert row["step_time_ci95_rel"] * row["step_time_s"] >= 0.03


def test_lines_that_arrive_at_once_time_nothing(bench):
    row, _ = trained(bench, "buffered", "loss.: (?P<loss>[0-9.]+)")
    assert (row["status"], row["cause"]) == ("invalid", "unmeasured")
    assert "9 lines of kernel.step_line arrived at once, so that they time nothing" in row["reason"]


TOOK = r"step [0-9]+ took (?P<seconds>\S+) s, loss (?P<loss>\S+)"


def test_times_of_micro_batches_make_a_run_suspect(bench):
    row, errors = trained(bench, "micro", TOOK, gas=2)
    assert (row["status"], row["measured_by"]) == ("ok", "log"), errors
    assert row["suspect_codes"] == ["micro_batches"]


def test_a_loss_that_is_no_number_makes_a_run_invalid(bench):
    row, _ = trained(bench, "micro,bad", TOOK)
    assert (row["status"], row["cause"]) == ("invalid", "non_finite_loss")
    assert "loss is nan at step 4" in row["reason"]


def test_a_rate_that_is_taken_for_a_time_stops_the_sweep(bench):
    row, errors = trained(bench, "bar", r"(?P<seconds>[0-9.]+)it/s")
    assert (row["status"], row["cause"]) == ("invalid", "unmeasured")
    assert (
        "the unit of '9.99' is step/s, which the group seconds does not read; use the group (?P<steps_per_s>...)"
        in row["reason"]
    )
    assert "fix the program or the patterns for its log" in errors


NEEDS_A_TOKEN = """
import json, os, sys
open(sys.argv[1], "a").write(f"{os.environ['HF_TOKEN']} {os.environ['PLAIN']}\\n")
assert "hunter2" not in open(os.environ["ULTRABENCH_SPEC"]).read()
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)
if os.path.exists(sys.argv[1] + ".fail"):
    sys.exit("planted failure")
for step in range(12):
    print(json.dumps({"event": "step", "seconds": 0.01}), file=report)
print(json.dumps({"event": "done"}), file=report)
"""


def holders(bench):
    """Files of the results folder that hold the secret."""
    words = ["grep", "-rl", "hunter2", bench.folder / "results"]
    return subprocess.run(words, capture_output=True, text=True).stdout.split()


def test_a_secret_reaches_the_program_and_one_private_file_only(bench):
    (bench.folder / "program.py").write_text(NEEDS_A_TOKEN)
    tokens, fail = bench.folder / "seen", bench.folder / "seen.fail"
    fail.touch()
    words = [
        "kernel=command", "kernel.command=[python,program.py,seen]", "model=tiny", "name=t", "measure=quick",
        *axes(nodes=1, tp=1, pp=1, gbs=2, mbs=1, gas=1, zero_stage=0), "measure.warmup_steps=2",
        "measure.min_steps=6", *AT_ONCE,
    ]  # fmt: skip
    env = "kernel.env={HF_TOKEN: hunter2-very-secret, PLAIN: shown}"
    private = bench.folder / "results/t/allocations/secrets.json"
    bench.run("sweep", "launch", *words, env, code=1)
    assert set(tokens.read_text().splitlines()) == {"hunter2-very-secret shown"}
    assert holders(bench) == [str(private)]
    assert private.stat().st_mode & 0o777 == 0o600
    head = json.loads((bench.folder / "results/t/sweep.json").read_text())
    assert head["kernel"]["env"] == {"HF_TOKEN": "<redacted>", "PLAIN": "shown"}
    redacted = "kernel.env={HF_TOKEN: '<redacted>', PLAIN: shown}"
    assert redacted in head["provenance"]["argv"]

    fail.unlink()
    before = len(tokens.read_text().splitlines())
    bench.run("sweep", "retry", "t")  # finds the value again
    assert set(tokens.read_text().splitlines()[before:]) == {"hunter2-very-secret shown"}
    for override in (redacted, env.replace("hunter2", "hunter2-renewed")):  # the same sweep, the same results
        bench.run("sweep", "launch", *words, override)
    assert "hunter2-renewed-very-secret" in private.read_text()
    private.unlink()
    assert "hunter2" not in bench.run("sweep", "show", bench.rows()[0]["run_id"], "--json")
    assert "hunter2" not in bench.run("sweep", "plan", *words, env, "--json")
    assert holders(bench) == []
