"""A sweep over a variable, a flag and the length of sequences ends in answers that name the winner's variant."""

import json
import re

import pytest

from tests.local.conftest import AT_ONCE, EMBEDDED, axes

pytestmark = pytest.mark.local

PROGRAM = """\
import json, os, sys

report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)
seconds = 1.0 - 0.1 * (os.environ.get("ALGO") == "Ring") - 0.05 * ("--overlap" in sys.argv)
for step in range(int(sys.argv[1])):
    print(json.dumps({"event": "step", "seconds": seconds, "loss": 2.0}), file=report)
print(json.dumps({"event": "done"}), file=report)
"""
SWEEP = """\
# @package _global_
sweep:
  models: [tiny]
  nodes: [1]
  seq_len: %s
  gbs: 8
  tp: [1]
  pp: [1]
  mbs: [1, 2]
  zero_stage: [0]
  gas: null
  env: {ALGO: [null, Ring]}
  flags: {overlap: {"off": [], "on": [--overlap]}}
"""
PROGRAM_OF_STEPS = 'kernel.command=[python,program.py,"{steps}"]'
COMMAND = ("name=t", "kernel=command", PROGRAM_OF_STEPS, "measure.confirm=1", *AT_ONCE)
MARK = """\
import os
with open(os.environ["MARKS"], "a") as marks:
    marks.write(os.environ["COLOUR"] + "\\n")
"""


def test_a_sweep_over_options_names_the_variant_of_the_winner_and_can_be_extended(bench):
    (bench.folder / "program.py").write_text(PROGRAM)
    sweep = bench.folder / "ultrabench" / "sweep" / "vary.yaml"
    sweep.parent.mkdir(parents=True)
    sweep.write_text(SWEEP % "[32]")
    bench.run("sweep", "launch", "sweep=vary", *COMMAND)
    assert len(bench.rows()) == 2 * 2 * 2
    sweep.write_text(SWEEP % "[32, 64]")
    bench.run("sweep", "launch", "sweep=vary", *COMMAND)
    rows = bench.rows()
    assert {row["status"] for row in rows} == {"ok"}
    assert len({row["run_id"] for row in rows}) == 2 * 2 * 2 * 2
    assert all(row["attempt"] == 0 for row in rows), "the runs of the first launch are not made again"

    cells = json.loads(bench.run("heatmap", "t", "--json", "--include-suspects"))
    assert [cell["seq_len"] for cell in cells] == [32, 64]
    winner = {"env.ALGO": "Ring", "flags.overlap": "on"}
    assert [cell["options"] for cell in cells] == [winner, winner]
    bench.run("heatmap", "t", "-o", "f.svg", "--include-suspects")
    assert "ALGO=Ring" in (bench.folder / "f.svg").read_text()
    assert "ALGO=Ring overlap=on" in bench.run("sweep", "top", "t")
    status = json.loads(bench.run("sweep", "status", "t", "--json"))
    assert all(best["layout"].endswith("ALGO=Ring overlap=on") for best in status["best"])

    bench.run("report", "t", "-o", "page.html")
    page = (bench.folder / "page.html").read_text()
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert {"env.ALGO", "flags.overlap"} < {*data["axes"]}
    assert data["columns"]["flags.overlap"]["distinct"] == ["off", "on"]
    assert any("ALGO=Ring" in layout for layout in data["columns"]["layout"].get("distinct", ()))


@pytest.mark.campaign
def test_our_own_kernel_sees_variables_before_it_imports_torch(bench):
    (bench.folder / "site").mkdir()
    (bench.folder / "site" / "sitecustomize.py").write_text(MARK)
    sizes = axes(gbs=4, nodes=1, tp=1, pp=1, mbs=1, gas=None, zero_stage=0)
    env = {"MARKS": f"[{bench.folder}/marks]", "PYTHONPATH": f"[{bench.folder}/site]", "COLOUR": "[red,blue]"}
    listed = ",".join(f"{name}: {values}" for name, values in env.items())
    words = (*EMBEDDED, *sizes, f"+sweep.env={{{listed}}}", *AT_ONCE, "measure.max_steps=6")
    bench.run("sweep", "launch", *words)
    assert {row["status"] for row in bench.rows()} == {"ok"}
    marks = (bench.folder / "marks").read_text().split()
    assert {*marks} == {"red", "blue"}, "what imports torch is started again with the other colour"
    assert {json.loads(row["variant"])["env.COLOUR"] for row in bench.rows()} == {"red", "blue"}
    assert len({row["env_id"] for row in bench.rows()}) == 1
