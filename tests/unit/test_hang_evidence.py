"""A look at real processes: none that did not promise to answer is sent a signal."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ultrabench.agent.diagnose.hang_cause import find_hang_cause
from ultrabench.agent.diagnose.hang_evidence import hang_evidence, main_stack
from ultrabench.agent.ranks.logs import EVIDENCE_FOLDER as FOLDER
from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.processes import TAG_VARIABLE, descendants

DUMPING = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()  # may be the one that is interrupted
from ultrabench.kernel import stack_dump
from ultrabench.rank_report import Report
stack_dump.dump_on_signals(Report.from_environment())
def inner():
    time.sleep(1000)
inner()
"""
DEAF = "print('ready', flush=True); import time; time.sleep(1000)"


@pytest.fixture
def run(tmp_path):
    (tmp_path / FOLDER).mkdir()
    started = []

    def start(rank, *words):
        env = {
            **os.environ,
            TAG_VARIABLE: "a:0:1:1",
            "ULTRABENCH_REPORT": str(tmp_path / f"rank{rank}.report"),
        }
        process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, start_new_session=True)
        started.append(process)
        return process

    yield tmp_path, start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def looked(folder: Path, **pids: int):
    found = []
    for events in hang_evidence(folder, {int(rank[1:]): pid for rank, pid in pids.items()}, "a:0:1:1"):
        found += events
        time.sleep(0.02)
    return {item["rank"]: item["found"] for item in found}


def test_a_program_that_promised_nothing_is_left_alone(run):
    folder, start = run
    deaf = start(0, sys.executable, "-c", DEAF)
    assert deaf.stdout.readline() == b"ready\n"
    while Path(f"/proc/{deaf.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.02)  # it has still to fall asleep
    found = looked(folder, r0=deaf.pid)[0]
    assert (found["state"], found["answered"]) == ("S", False)
    assert deaf.poll() is None


def test_a_rank_answers_also_from_behind_a_shell(run):
    folder, start = run
    script = folder / "dumping.py"
    script.write_text(DUMPING)
    shell = start(0, "sh", "-c", f"'{sys.executable}' '{script}'; true")
    while not (folder / "rank0.report").exists() or not (folder / "rank0.report").stat().st_size:
        time.sleep(0.02)
    found = looked(folder, r0=shell.pid)[0]
    assert found["answered"]
    assert found["groups"] == []
    assert found["stack"][0] == f"inner ({script}:8)"
    assert (folder / FOLDER / "rank0.stacks.txt").exists()


GROUP = {"group": "tp", "ranks": [0, 7], "entered": 2, "started": None, "finished": 1, "ops": {"2": "recv"}}


@pytest.mark.parametrize(
    "told",
    ["[]", "7", "[" * 100_000, '{"state": [], "stack": 7}', '{"groups": 7}', '{"groups": [7]}', '{"groups": {}}',
     json.dumps({"groups": [{**GROUP, "ranks": 1}]}), json.dumps({"groups": [{**GROUP, "entered": math.inf}]}),
     json.dumps({"groups": [{**GROUP, "ops": []}]}), json.dumps({"groups": [GROUP]}), "no json"],
)  # fmt: skip
def test_an_answer_may_be_anything(run, told):
    folder, start = run
    deaf = start(0, sys.executable, "-c", DEAF)
    assert deaf.stdout.readline() == b"ready\n"
    (folder / "rank0.report.collectives").write_text(told)
    found = looked(folder, r0=deaf.pid)[0]
    assert found["groups"] in ([], [GROUP])
    assert find_hang_cause([RankProgress(number=n, found=found, phase="measure") for n in (0, 1)]).headline


def test_a_stopped_child_of_a_rank_counts_as_that_rank(run):
    folder, start = run
    shell = start(0, "sh", "-c", f'"{sys.executable}" -c "{DEAF}"; true')
    assert shell.stdout.readline() == b"ready\n"
    (child,) = descendants(shell.pid)
    os.kill(child, signal.SIGSTOP)
    while looked(folder, r0=shell.pid)[0]["state"] != "T":
        pass
    assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T", "never continued"


@pytest.mark.parametrize(
    ("text", "stack"),
    [
        ('Thread 0x1 (most recent call first):\n  File "t.py", line 1 in helper\n\n'
         'Current thread 0x2 (most recent call first):\n  File "b.py", line 5 in inner\n'
         '  File "a.py", line 9 in main\n', ["inner (b.py:5)", "main (a.py:9)"]),
        ('Process 7: python\nPython v3.11.7 (x)\n\nThread 7 (idle): "MainThread"\n'
         "    clock_nanosleep (libc.so.6)\n    inner (b.py:5)\n    <module> (<string>:9)\n"
         'Thread 8 (idle): "x"\n    other (c.py:1)\n', ["inner (b.py:5)", "<module> (<string>:9)"]),
        ("", []),
        ("Error: Permission Denied\n", []),
    ],
)  # fmt: skip
def test_the_stack_of_the_main_thread(text, stack):
    assert main_stack(text) == stack
