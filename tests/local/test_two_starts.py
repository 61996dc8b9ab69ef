"""A program whose steps have one size per start is measured by two starts of it, on this machine."""

import json
import os
import signal
from collections import Counter, defaultdict

import pytest

from tests.local.conftest import AT_ONCE, axes

pytestmark = pytest.mark.local

LINE = """
import json, os, random, sys, time

run_id, repeat, attempt, witness = sys.argv[1:5]
mbs, gas, gbs, step_tokens, microbatches, steps = map(int, sys.argv[5:])
spec = json.load(open(os.environ["ULTRABENCH_SPEC"]))["spec"]
print("started with", gas, gbs, step_tokens, microbatches, spec["layout"]["gas"], spec["workload"]["gbs"], flush=True)
if os.environ["RANK"] == "0":
    with open(witness, "a") as file:
        print(run_id, repeat, attempt, mbs, gas, file=file)
if (mbs, gas) == (4, 4):
    sys.exit("too many at once")
if (mbs, gas, attempt) == (2, 6, "0") and repeat == "0":
    time.sleep(1000)
noise = random.Random(gas)
with open(os.environ["ULTRABENCH_REPORT"], "a") as report:
    for step in range(steps):
        # The first steps of a program may be slow.
        microbatch_s = (0.05 + 0.03 * (mbs - 1)) * (1.5 if mbs == 4 else 1.0)
        seconds = 9.0 if step < 2 else (0.2 + microbatch_s * gas) * noise.gauss(1, 0.002)
        print(json.dumps({"event": "step", "seconds": seconds, "loss": 1.0}), file=report)
"""
"""A constant and as much for each micro-batch. With mbs=4 the second start fails, and whole steps are slow; with mbs=2
the first attempt does not end in its second start."""


def test_two_starts_of_a_program_give_its_whole_steps(bench):
    """The agent and the launcher are killed during a second start, and the same launch goes on."""
    (bench.folder / "line.py").write_text(LINE)
    values = (
        ["run_id", "repeat", "attempt"],
        ["mbs", "gas", "gbs", "step_tokens", "pipeline_microbatches", "steps"],
    )
    key, sizes = (",".join(f"'{{{name}}}'" for name in names) for names in values)
    words = [
        "sweep", "launch", "kernel=command", f"kernel.command=[python,line.py,{key},{bench.witness},{sizes}]",
        "model=tiny", "name=t", "measure.partial_steps=auto", "measure.warmup_steps=2", "measure.race=null",
        "launcher.heartbeat_s=3", *AT_ONCE,
        *axes(nodes=1, tp=1, pp=1, zero_stage=0, mbs=[1, 2, 4], gas=None, gbs=128),
    ]  # fmt: skip

    def starts():
        return [line.split() for line in bench.executions()]

    launcher = bench.start(*words)
    bench.wait_for(lambda: any(line[3:] == ["2", "6"] for line in starts()))
    for pid in (launcher.pid, *bench.agents()):
        os.kill(pid, signal.SIGKILL)
    launcher.communicate()
    bench.wait_for(lambda: bench.leftovers() == [])
    bench.run(*words)

    rows = bench.rows()
    assert max(Counter(tuple(line) for line in starts()).values()) == 1, "a start ran twice"
    ok = {(row["mbs"], row["repeat"]): row for row in rows if row["status"] == "ok"}
    assert set(ok) == {(1, 0), (2, 0), (2, 1), (4, 1)}, (
        "the run that fails by parts is measured in full, and the best one, too"
    )
    lost = [(row["mbs"], row["repeat"]) for row in rows if row["status"] in ("lost", "node_fail")]
    assert lost == [(2, 0)]
    for mbs in (1, 2):
        row, true_s = ok[mbs, 0], 0.2 + (0.05 + 0.03 * (mbs - 1)) * 64 / mbs
        assert (row["gas"], row["gbs"], row["measured_gas"], row["screened"]) == (64 // mbs, 128, "2,6", True)
        assert abs(row["step_time_s"] / true_s - 1) < row["step_time_ci95_rel"] < 0.12
        assert row["loss_final"] is None
    best, screened = ok[2, 1], ok[2, 0]
    assert (best["measured_gas"], best["screened"]) == (None, None)
    assert abs(screened["step_time_s"] / best["step_time_s"] - 1) < screened["step_time_ci95_rel"]

    gas_by_attempt = defaultdict(list)
    for run_id, repeat, attempt, _, gas in starts():
        gas_by_attempt[run_id, repeat, attempt].append(int(gas))
    for in_full, gas in ((best, 32), (ok[4, 1], 16)):
        assert gas_by_attempt.pop((in_full["run_id"], "1", "0")) == [gas]
    assert (ok[4, 1]["measured_gas"], ok[4, 1]["screened"]) == (None, None)
    assert {tuple(gas) for gas in gas_by_attempt.values()} == {(2, 6), (2, 4)}
    logs = bench.folder / "results/t/logs" / screened["run_id"] / f"0.{screened['attempt']}"
    for gas in (2, 6):
        words_of_part = f"started with {gas} {4 * gas} {4 * gas * best['seq_len']} 1 {gas} {4 * gas}"
        assert words_of_part in (logs / f"gas{gas}/node0.log").read_text()

    failed = [row for row in rows if row["mbs"] == 4 and row["repeat"] == 0]
    assert {row["status"] for row in failed} == {"crash"}
    assert all("too many at once; in the start with 4 micro-batches" in row["reason"] for row in failed)
    output = bench.run("sweep", "logs", ok[1, 0]["run_id"], "--sweep", "t")
    assert output.index("started with 2 4 ") < output.index("started with 6 12 ")
    top = json.loads(bench.run("sweep", "top", "t", "--json"))
    assert (top[0]["mbs"], top[0]["screened"]) == (2, None)
