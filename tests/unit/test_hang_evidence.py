"""The evidence of real processes: only those that promised to answer are sent a signal."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import wait_until
from ultrabench.agent.diagnose.hang_cause import find_hang_cause
from ultrabench.agent.diagnose.hang_evidence import hang_evidence, main_stack
from ultrabench.agent.ranks.cleanup import EVIDENCE_FOLDER as FOLDER
from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.processes import TAG_VARIABLE, descendants

DUMPING = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()  # may be the one that is interrupted
from ultrabench.kernel.rank import stack_dump
from ultrabench.rank_report import Report
stack_dump.dump_on_signals(Report.from_environment())
def inner():
    time.sleep(1000)
inner()
"""
TAG = "a:0:1:1"
DEAF = "print('ready', flush=True); import time; time.sleep(1000)"


@pytest.fixture
def start(tmp_path):
    """Starts a program as rank 0 whose node-local folder is `tmp_path`."""
    (tmp_path / FOLDER).mkdir()
    started = []

    def make(*words, ready=True):
        env = {**os.environ, TAG_VARIABLE: TAG, "ULTRABENCH_REPORT": str(tmp_path / "rank0.report")}
        started.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, start_new_session=True))
        assert not ready or started[0].stdout.readline() == b"ready\n"
        return started[0]

    yield make
    os.killpg(started[0].pid, signal.SIGKILL)
    started[0].communicate()


def found_at(folder: Path, pid: int):
    """What is found at rank 0."""
    found = []
    for events in hang_evidence(folder, {0: pid}, TAG):
        found += events
        time.sleep(0.02)
    return found[0]["found"]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_program_that_promised_nothing_is_left_alone(tmp_path, start):
    deaf = start(sys.executable, "-c", DEAF)
    wait_until(lambda: state_of(deaf.pid) == "S", 20)
    found = found_at(tmp_path, deaf.pid)
    assert (found["state"], found["stack"], found["groups"]) == ("S", [], [])
    assert deaf.poll() is None


def test_a_rank_answers_also_from_behind_a_shell(tmp_path, start):
    script, report = tmp_path / "dumping.py", tmp_path / "rank0.report"
    script.write_text(DUMPING)
    shell = start("sh", "-c", f"'{sys.executable}' '{script}'; true", ready=False)
    wait_until(lambda: report.exists() and report.stat().st_size, 60)
    found = found_at(tmp_path, shell.pid)
    assert found["groups"] == []
    assert (tmp_path / FOLDER / "rank0.collectives.json").exists()
    assert found["stack"][0] == f"inner ({script}:8)"
    assert (tmp_path / FOLDER / "rank0.stacks.txt").exists()


GROUP = {"group": "tp", "ranks": [0, 7], "entered": 2, "started": None, "finished": 1, "ops": {"2": "recv"}}


@pytest.mark.parametrize(
    "told",
    ["[]", "7", "[" * 100_000, '{"state": [], "stack": 7}', '{"groups": 7}', '{"groups": [7]}', '{"groups": {}}',
     json.dumps({"groups": [{**GROUP, "ranks": 1}]}), json.dumps({"groups": [{**GROUP, "entered": math.inf}]}),
     json.dumps({"groups": [{**GROUP, "ops": []}]}), json.dumps({"groups": [GROUP]}), "no json"],
)  # fmt: skip
def test_an_answer_may_be_anything(tmp_path, start, told):
    deaf = start(sys.executable, "-c", DEAF)
    (tmp_path / "rank0.report.collectives").write_text(told)
    found = found_at(tmp_path, deaf.pid)
    assert found["groups"] in ([], [GROUP])
    assert find_hang_cause([RankProgress(number=n, found=found, phase="measure") for n in (0, 1)]).headline


def test_a_stopped_child_of_a_rank_counts_as_that_rank(tmp_path, start):
    shell = start("sh", "-c", f'"{sys.executable}" -c "{DEAF}"; true')
    (child,) = descendants(shell.pid)
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: found_at(tmp_path, shell.pid)["state"] == "T", 20)
    assert state_of(child) == "T", "never continued"


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
