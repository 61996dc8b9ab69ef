"""Several launches on one machine: their allocations are measured one after another."""

import json
from itertools import pairwise

import pytest

pytestmark = pytest.mark.local

PROGRAM = """
import json, os, sys, time
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)
begin = time.monotonic()
for step in range(1, 13):
    time.sleep(0.02)
    report.write(json.dumps({"event": "step", "step": step, "seconds": 0.02}) + "\\n")
report.write('{"event": "done"}\\n')
if os.environ["RANK"] == "0":
    line = json.dumps([sys.argv[1], begin, time.monotonic()]) + "\\n"
    os.write(os.open("witness", os.O_WRONLY | os.O_CREAT | os.O_APPEND), line.encode())
"""


@pytest.mark.campaign
def test_four_launchers_at_once_measure_one_allocation_after_another(bench):
    (bench.folder / "program.py").write_text(PROGRAM)
    command = "kernel.command=[python,program.py,{run_id}]".replace("{run_id}", "'{run_id}'")
    names = [f"s{number}" for number in range(4)]
    launchers = []
    for name in names:
        words = bench.launch("fine", command, f"name={name}", gbs=8, mbs=[1, 2], nodes=1 + (name > "s2"))
        launchers.append(bench.start(*words))
    outputs = [bench.end(launcher, seconds=240) for launcher in launchers]
    assert all("2 of 2 runs settled (2 ok)" in output for output in outputs), outputs
    waited = [output for output in outputs if "another sweep is measuring on this machine: " in output]
    assert waited
    assert f"{bench.folder}/results/s" in waited[0]
    runs = sorted(
        map(json.loads, (bench.folder / "witness").read_text().splitlines()), key=lambda run: run[1]
    )
    assert len(runs) == 8
    assert all(earlier[2] < later[1] for earlier, later in pairwise(runs)), "two ran at once"
