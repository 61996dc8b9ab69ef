"""Which rank caused a hang, over constructed cases and by the evidence of real processes."""

import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.patience import wait_until
from ultrabench.agent.diagnose.hang_cause import find_hang_cause, hang_row
from ultrabench.agent.diagnose.hang_evidence import fatal_stacks, hang_evidence, main_stack
from ultrabench.agent.ranks.cleanup import EVIDENCE_FOLDER as FOLDER
from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.layout import RANK_ORDER, Layout
from ultrabench.processes import TAG_VARIABLE, descendants

REDUCE = "all_reduce (/site-packages/torch/distributed/distributed_c10d.py:3000)"
RECV = "recv (/site-packages/torch/distributed/distributed_c10d.py:2500)"
STEP = "update (/ultrabench/kernel/step.py:170)"
FORWARD = "forward (/ultrabench/kernel/model.py:88)"


def group(name, ranks, entered, finished, op="all_reduce", started=None):
    number = str(max(finished + 1, entered))
    base = {"group": name, "ranks": list(ranks), "started": started, "ops": {number: op}}
    return {**base, "entered": entered, "finished": finished}


def facts(rank, host, state="?", stack=(), groups=(), wchan="", **progress):
    evidence = {"state": state, "stack": stack, "groups": groups, "wchan": wchan}
    return RankProgress(number=rank, host=host, evidence=evidence, **progress)


def silent(rank, state="S", **fields):
    return facts(rank, f"gpu{rank // 4:02d}", phase="measure", step=7, state=state, **fields)


def waiting(rank, *groups, stack=(REDUCE, STEP), **fields):
    return silent(rank, groups=groups, stack=stack, **fields)


TP = range(8)


def tp(rank, entered=123, finished=122, **fields):
    return waiting(rank, group("tp", TP, entered, finished), **fields)


def others(*left_out):
    return [tp(r) for r in TP if r not in left_out]


BUSY, DONE = tp(5, entered=122, stack=(FORWARD,)), {"code": 0, "done_line": {"event": "done"}}
P0, P1 = group("pp", (0, 1), 4, 4), group("tp", (0, 1), 9, 9)

CASES = {
    "stopped": ([*others(5), silent(5, "T")], [5], "rank 5 on gpu01 is stopped (state T), for example by SIGSTOP; "
                "7 ranks wait for it in all_reduce #123 of group tp"),
    "many stopped": ([silent(r, "T") for r in range(12)], [*range(12)],
                     "rank 3 on gpu00 and 8 more ranks is stopped"),
    "stopped, and another has ended": ([silent(0, code=0), silent(1, "T")], [1],
        "rank 1 on gpu00 is stopped (state T)"),
    "zombie": ([*others(5), silent(5, "Z")], [5], "is dead but not reaped"),
    "never entered": ([*others(5), BUSY], [5],
                      "rank 5 on gpu01 never entered all_reduce #123 of group tp; 7 ranks wait for it. "
                      "Rank 5 is in forward (kernel/model.py:88)."),
    "did not answer": ([*others(5), silent(5, "R")], [5], "never entered all_reduce #123 of group tp"),
    "several did not": ([*others(2, 5), tp(2, entered=122, stack=(FORWARD,)), BUSY], [2, 5],
                        "rank 2 on gpu00, rank 5 on gpu01 never entered"),
    # Who has told that it did not enter is blamed, not one that told nothing.
    "one silent, one known": ([*others(2, 5), silent(2, "?"), BUSY], [5], "rank 5 on gpu01 never entered"),
    # Rank 3 waits for rank 1 in dp, rank 2 for rank 3 in tp, and so on: rank 1 waits for nobody.
    "through other groups": (
        [waiting(0, group("tp", (0, 1), 10, 9)), waiting(1, group("tp", (0, 1), 9, 9), stack=(FORWARD,)),
         waiting(2, group("tp", (2, 3), 11, 10)),
         waiting(3, group("tp", (2, 3), 10, 10), group("dp", (1, 3), 4, 3))],
        [1], "rank 1 on gpu00 never entered"),
    "exited early": ([*others(5), silent(5, "?", code=0)], [5],
                     "rank 5 on gpu01 exited early with code 0 in phase measure; 7 ranks wait for it"),
    "exited, and nothing else is known": ([silent(0), silent(1, code=0)], [1], "exited early with code 0"),
    "exited well": ([*others(5), BUSY, silent(8, **DONE)], [5], "never entered"),
    "exited, but nobody waits for it": ([waiting(0, group("x", (0, 1), 3, 2)),
                                         waiting(1, group("x", (0, 1), 2, 2), stack=(FORWARD,)),
                                         silent(2, code=0)], [1], "never entered all_reduce #3 of group x"),
    "the network": ([tp(r) for r in TP], [], "all 8 ranks wait in collectives that all have entered, "
                    "such as all_reduce #123 of group tp"),
    "another collective": (
        [*others(5), waiting(5, group("tp", TP, 123, 122, op="all_gather"))], [5],
        "rank 5 on gpu01 entered all_gather #123 of group tp where others entered all_reduce"),
    "different orders": (
        [waiting(0, group("a", (0, 1), 3, 2), group("b", (0, 1), 2, 2)),
         waiting(1, group("a", (0, 1), 2, 2), group("b", (0, 1), 3, 2))],
        [0, 1], "ranks wait for each other in different collectives: rank 0 is in all_reduce #3 of group a, "
        "rank 1 is in all_reduce #3 of group b"),
    "a device lags": (
        [waiting(r, group("tp", TP, 123, 122, started=122 if r == 6 else 123)) for r in TP], [6],
        "rank 6 on gpu01 entered all_reduce #123 of group tp, but its device has not begun it"),
    "waits for a disk": ([silent(0, stack=(STEP,)), silent(1, "D", wchan="nfs_wait", stack=(FORWARD,))], [1],
                         "rank 1 on gpu00 waits for a device or a disk (state D)"),
    # Point to point calls of gloo are in nobody's record; stacks tell them.
    "computes while a peer receives": (
        [waiting(0, P0, P1, stack=(FORWARD,)), waiting(1, P0, P1, stack=(RECV, STEP))], [0],
        "rank 0 on gpu00 is in forward (kernel/model.py:88), not in a collective; 1 rank waits in recv"),
    "fewer steps": ([silent(r) for r in range(3)] + [facts(3, "b", step=5)], [3],
                    "rank 3 on b is behind: it is in step 5, others are in step 7"),
    "an earlier part": ([silent(r, part="optimizer") for r in range(3)] + [silent(3, part="data")], [3],
                        "it is in data, others are in optimizer"),
    "fewer micro-batches": ([silent(r, microbatches=16) for r in range(3)] + [silent(3, microbatches=12)], [3],
                            "it is at 12 micro-batches, others are at 16"),
    "most are behind": ([silent(0), silent(1), facts(2, "b", step=8)], [], "none of 3 ranks stands out"),
    # Ranks that do not count are no laggards of one that does.
    "only rank 0 reports": ([silent(0), facts(1, "b"), facts(2, "b")], [],
                            "none of 3 ranks stands out: rank 0 is in phase measure, step 7"),
    "nothing is known": ([facts(0, "a"), facts(1, "a")], [], "none of 2 ranks stands out"),
    "all have ended": ([silent(0, **DONE)], [], "all ranks had ended"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_cause_of_a_hang_in_any_order_of_ranks(case):
    ranks, culprits, text = CASES[case]
    cause = find_hang_cause(ranks)
    assert [r.number for r in cause.culprits] == culprits, cause.text
    assert text in cause.text
    assert "\n" not in cause.text
    shuffled = random.Random(7).sample(ranks, len(ranks))
    assert sorted(r.number for r in find_hang_cause(shuffled).culprits) == sorted(culprits)


def test_the_place_of_a_culprit_follows_from_the_order_of_ranks():
    ranks = [silent(0), silent(1), silent(2, state="T"), silent(3)]
    layout = Layout(dp=2, pp=2, pp_schedule="afab")
    for order, place in ((RANK_ORDER, "pp 1, dp 0"), (("tp", "cp", "pp", "dp"), "pp 0, dp 1")):
        cause = find_hang_cause(ranks, layout, order)
        assert cause.text.endswith(f"Rank 2 has the place {place} in the layout.")
    assert "place" not in find_hang_cause(ranks, Layout(dp=4)).text, "it is the number of the rank"


def test_the_row_of_a_rank():
    rank = facts(3, "gpu00", state="S", stack=[REDUCE, STEP], groups=[group("tp", (0, 1), 9, 8, op="recv")],
                 phase="measure", microbatches=12, steps=[{}, {}])  # fmt: skip
    assert hang_row(rank) == {
        "rank": 3, "host": "gpu00", "state": "S", "phase": "measure", "step": 2, "part": "",
        "microbatches": 12, "collective": "recv #9 of group tp", "at": "update (kernel/step.py:170)",
    }  # fmt: skip
    row = hang_row(facts(3, "gpu00", groups=[group("tp", (0, 1), 9, 9)], code=0))
    assert (row["collective"], row["state"]) == ("#9 of tp, done", "exited 0")


DUMPING = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()  # may be the one that is interrupted
from ultrabench.kernel.rank import stack_dump
from ultrabench.rank_report import Report
stack_dump.dump_on_signals(Report.from_environment())
def inner():
    print("ready", flush=True)
    time.sleep(1000)
inner()
"""
TAG = "a:0:1:1"
DEAF = (sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(1000)")


@pytest.fixture
def start(tmp_path):
    """Starts a program as rank 0 whose node-local folder is `tmp_path`."""
    (tmp_path / FOLDER).mkdir()
    with ExitStack() as ends:

        def make(*words):
            env = {**os.environ, TAG_VARIABLE: TAG, "ULTRABENCH_REPORT": str(tmp_path / "rank0.report")}
            started = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, start_new_session=True)
            ends.enter_context(started)
            ends.callback(os.killpg, started.pid, signal.SIGKILL)
            assert started.stdout.readline() == b"ready\n"
            return started

        yield make


def evidence_at(folder: Path, pid: int):
    """What is found at rank 0."""
    rank_events = []
    for events in hang_evidence(folder, {0: pid}, TAG):
        rank_events += events
        time.sleep(0.02)
    return rank_events[0]["evidence"]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_rank_answers_also_from_behind_a_shell(tmp_path, start):
    script = tmp_path / "dumping.py"
    script.write_text(DUMPING)
    shell = start("sh", "-c", f"'{sys.executable}' '{script}'; true")
    evidence = evidence_at(tmp_path, shell.pid)
    assert evidence["groups"] == []
    assert (tmp_path / FOLDER / "rank0.collectives.json").exists()
    assert evidence["stack"][0] == f"inner ({script}:9)"
    assert (tmp_path / FOLDER / "rank0.stacks.txt").exists()


GROUP = {"group": "tp", "ranks": [0, 7], "entered": 2, "started": None, "finished": 1, "ops": {"2": "recv"}}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", "[" * 100_000, '{"state": [], "stack": 7}', '{"groups": 7}', '{"groups": [7]}', '{"groups": {}}',
     json.dumps({"groups": [{**GROUP, "ranks": 1}]}), json.dumps({"groups": [{**GROUP, "entered": math.inf}]}),
     json.dumps({"groups": [{**GROUP, "ops": []}]}), json.dumps({"groups": [GROUP]}), "no json"],
)  # fmt: skip
def test_a_program_that_promised_nothing_is_left_alone_and_its_answer_may_be_anything(tmp_path, start, text):
    deaf = start(*DEAF)
    (tmp_path / "rank0.report.collectives").write_text(text)
    wait_until(lambda: state_of(deaf.pid) == "S", 20)
    facts = evidence_at(tmp_path, deaf.pid)
    assert (facts["state"], facts["stack"]) == ("S", [])
    assert facts["groups"] in ([], [GROUP])
    assert find_hang_cause([RankProgress(number=n, evidence=facts, phase="measure") for n in (0, 1)]).headline
    assert deaf.poll() is None


def test_a_rank_ends_with_its_stack_although_it_is_stopped_and_its_log_does_not_show_it(tmp_path, start):
    script, log = tmp_path / "stopped.py", tmp_path / "rank0.log"
    script.write_text(
        "import time\n\ndef inner():\n    print('ready', flush=True)\n    time.sleep(1000)\n\ninner()\n"
    )
    log.write_text("step 1\n")
    command = f"exec '{sys.executable}' -X faulthandler '{script}' 2>>'{log}'"
    stopped, peer = start("sh", "-c", command), start(*DEAF)
    events = []
    for new_events in fatal_stacks(tmp_path, {0: stopped.pid}, {0: log, 1: log}, [stopped.pid, peer.pid]):
        events += new_events
        time.sleep(0.02)
    assert events == [
        {"rank": 0, "stack": [f"inner ({script}:5)", f"<module> ({script}:7)"]},
        {"rank": 1, "stack": []},
    ]
    assert (state_of(stopped.pid), state_of(peer.pid), log.read_text()) == ("Z", "T", "step 1\n")
    assert "Fatal Python error: Aborted" in (tmp_path / FOLDER / "rank0.stacks.txt").read_text()


def test_a_stopped_child_of_a_rank_counts_as_that_rank(tmp_path, start):
    shell = start("sh", "-c", f"{shlex.join(DEAF)}; true")
    (child,) = descendants(shell.pid)
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: evidence_at(tmp_path, shell.pid)["state"] == "T", 20)
    assert state_of(child) == "T", "never continued"


def test_the_main_thread_is_the_first_of_py_spy():
    dump = (
        'Process 7: python\nPython v3.11.7 (x)\n\nThread 7 (idle): "MainThread"\n'
        "    clock_nanosleep (libc.so.6)\n    inner (b.py:5)\n    <module> (<string>:9)\n"
        'Thread 8 (idle): "x"\n    other (c.py:1)\n'
    )
    assert main_stack(dump) == ["inner (b.py:5)", "<module> (<string>:9)"]
    assert main_stack("Error: Permission Denied\n") == []
