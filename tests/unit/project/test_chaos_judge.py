"""The judge of chaos campaigns finds what is planted, and finds nothing where nothing is wrong."""

import pytest

from tests.chaos.fault import EXPLAINS, draw
from tests.chaos.judge import SlurmView, excluded_nodes, judge, most_jobs, submitted_jobs
from tests.chaos.witness import executions_of


def row(
    run="a", repeat=0, attempt=0, status="ok", allocation="n1-1.0", stopped="interval", cause=None, **more
):
    return {
        "run_id": run, "repeat": repeat, "attempt": attempt, "status": status, "allocation": allocation,
        "reason": None, "stopped": stopped, "cause": cause, **more,
    }  # fmt: skip


def lines(run="a", attempt=0, words="start step end", allocation="n1-1.0", host="gpu01", pid=1, at_s=0.0):
    return [
        f"s1 {run} 0 {attempt} {event} {allocation} {host} {pid}:7 {at_s + number:.3f}"
        for number, event in enumerate(words.split())
    ]


def second_start(at_s):
    """The lines of the second repeat of a run, in another allocation."""
    return [line.replace(" a 0 0 ", " a 1 0 ") for line in lines(allocation="n1-2.0", at_s=at_s)]


LOST = [row(status="lost"), row(attempt=1, allocation="n1-2.0")]
KILLED = {"kind": "scancel", "allocations": ["n1-1.0"]}
FULL = {"kind": "scratch_full", "allocations": ["n1-1.0"]}
DOOMED = {"kind": "kill_agent_always", "run": "a.0", "costs": 3}
GONE = [row(status="node_fail", attempt=n, allocation=f"n1-{n}.0") for n in range(4)]
CASES = {
    "no fault": (
        [row("a"), row("b"), row("c", status="rejected", attempt=None)], [*lines("a"), *lines("b", at_s=9)], [], []),
    "another sweep": ([row()], [*lines(), *(line.replace("s1", "s2") for line in lines("b"))], [], []),
    "twice at once": (
        [row()], [*lines(), *lines(pid=2, at_s=1.5, host="gpu02", allocation="n1-2.0")], [],
        ["a.0.0 ran 2 times", "a.0.0 and a.0.0 ran at the same time, of the same run in n1-1.0 and n1-2.0"]),
    "two attempts at once": (
        LOST, [*lines(words="start step step"), *lines(attempt=1, at_s=1.5, host="gpu02", allocation="n1-2.0")],
        [KILLED],
        ["a.0.0 and a.0.1 ran at the same time, of the same run in n1-1.0 and n1-2.0"]),
    "an attempt after one that was killed": (
        LOST, [*lines(words="start step"), *lines(attempt=1, at_s=5.0, allocation="n1-2.0")], [KILLED], []),
    "two runs in one allocation": (
        [row("a"), row("b")], [*lines("a"), *lines("b", at_s=1.0, host="gpu02")], [],
        ["a.0.0 and b.0.0 ran at the same time, in n1-1.0"]),
    "two runs on one node": (
        [row("a"), row("b", allocation="n1-2.0")], [*lines("a"), *lines("b", at_s=1.0, allocation="n1-2.0")], [],
        ["a.0.0 and b.0.0 ran at the same time, on gpu01"]),
    "two runs elsewhere": (
        [row("a"), row("b", allocation="n1-2.0")], [*lines("a"),
            *lines("b", at_s=1.0, host="gpu02", allocation="n1-2.0")],
        [], []),
    "no end": ([row()], lines(words="start step step"), [], ["a.0.0 is ok and its program never came to its end"]),
    "cut short": ([row(stopped="slower_than_best")], lines(words="start step step"), [], []),
    "ok twice": ([row(), row(attempt=1)], [*lines(), *lines(attempt=1, at_s=9)], [],
        ["a.0 is ok 2 times: attempts [0, 1]"]),
    "not recorded": ([row()], [*lines(), *lines("b", at_s=9)], [], ["b.0.0 ran and is not recorded"]),
    "never ran": ([row()], [], [], ["a.0.0 is ok and never ran"]),
    "left lost": ([row(status="lost")], lines(), [KILLED], ["a has ended lost after attempt 0 (None) and was left so"]),
    "unexplained": (
        [row(status="lost"), row(attempt=1)], [*lines(words="start"), *lines(attempt=1, at_s=9)],
        [{"kind": "port_scan", "allocations": []}], ["a.0.0 ended lost in n1-1.0: None"]),
    "screened, and then measured in full": (
        [row(screened=True), row(repeat=1, allocation="n1-2.0"), row("b", screened=True)],
        [*lines(), *lines("b", at_s=9), *second_start(at_s=20)], [], []),
    "screened, and no more": (
        [row(screened=True)], lines(), [], ["on None nodes, 1 runs were screened and none was measured in full"]),
    "a start in full that was lost": (
        [row(screened=True), row("b"), row(repeat=1, status="lost", allocation="n1-2.0")],
        [*lines(), *lines("b", at_s=9), *second_start(at_s=20)], [{"kind": "scancel", "allocations": ["n1-2.0"]}],
        ["a.1 has ended lost and was left so"]),
    "a control run that was lost": (
        [row(screened=True), row("b"), row(repeat=1, status="lost", allocation="n1-2.0", control="a")],
        [*lines(), *lines("b", at_s=9), *second_start(at_s=20)], [{"kind": "scancel", "allocations": ["n1-2.0"]}], []),
    "a full disk": (
        [row(status="crash", cause="disk_full"), row(attempt=1, allocation="n1-2.0")],
        [*lines(words="start"), *lines(attempt=1, at_s=9)], [FULL], []),
    "a full disk with another cause": (
        [row(status="crash", cause="exit_code")], lines(), [FULL], ["a.0.0 ended crash in n1-1.0: None"]),
    "a run that takes its job away each time": (GONE[:3], [], [DOOMED], []),
    "and once too often": (GONE, [], [DOOMED], ["a.0.3 ended node_fail in n1-3.0: None"]),
}  # fmt: skip
"""Name -> rows, lines of the witness, faults, and the problems that are found."""


@pytest.mark.parametrize("case", CASES)
def test_the_problems_of_a_sweep(case):
    table, witnessed, records, problems = CASES[case]
    assert judge(table, list(records), executions_of("s1", witnessed), 1, 1) == problems


@pytest.mark.parametrize(
    ("view", "problems"),
    [
        ({"excluded": frozenset({"gpu01"})}, []),
        ({"excluded": frozenset({"gpu02"})}, ["gpu02 was excluded, although no fault hit it"]),
        ({"journal": [{"event": "submitted", "allocation": "n1-1.0", "job": {"job_id": "7_0"}}]}, []),
        ({"journal": [{"event": "submitted", "allocation": "n1-1.0", "job": {"job_id": "1_0"}}]},
         ["the journal calls n1-1.0 job 1_0, Slurm calls it 7_0"]),
        ({"journal": [{"event": "allocation_ended", "allocation": "n1-1.0", "held_s": 1e6}]},
         ["n1-1.0 held its nodes for 1e+06 s, longer than the sweep exists"]),
    ],
)  # fmt: skip
def test_what_slurm_knows(view, problems):
    slurm = {"job_ids": {"n1-1.0": {"7_0"}}, "nodes": {"n1-1.0": {"gpu01"}}, "age_s": 60.0}
    faults = [{"kind": "kill_rank", "allocations": ["n1-1.0"]}]
    assert judge([row()], faults, executions_of("s1", lines()), 1, 1, SlurmView(**slurm, **view)) == problems


def test_excluded_nodes_are_those_that_launchers_name():
    logs = [
        "node gpu01 is excluded: 2 runs failed there\nok\n",
        "node gpu02 is excluded: no answer\n",
        "node gpu03 is used",
    ]
    assert excluded_nodes(logs) == {"gpu01", "gpu02"}


def test_a_run_that_fails_on_a_bad_node_only_is_tried_elsewhere():
    bad = {"kind": "bad_node", "node": "gpu01", "allocations": []}
    here, there = (
        {"status": "crash", "began_on": [node], "hostnames": [node]} for node in ("gpu01", "gpu02")
    )
    later = row(attempt=1)
    for rows, complaint in (
        ([row(**here)], ["was not tried elsewhere"]), ([row(**here), later], []),
        ([row(**there)], ["ended crash"]), ([row(**here), row(**there, attempt=1)], ["ended crash"]),
    ):  # fmt: skip
        problems = judge(rows, [bad], None, 1, 1)
        assert [any(text in problem for problem in problems) for text in complaint] == [True] * len(
            complaint
        ), problems
        assert bool(problems) == bool(complaint), problems


def test_a_job_that_starts_no_agent_is_explained_on_a_node_where_none_starts():
    lost = [row(status="lost", cause="not_started"), row(attempt=1, allocation="n1-2.0")]
    silent = {"kind": "no_agent", "node": "gpu01", "allocations": []}
    assert judge(lost, [silent], None, 1, 1) == []
    assert judge(lost, [], None, 1, 1) != []


def test_a_run_whose_variant_cannot_start_is_explained_only_in_a_sweep_with_such_a_variant():
    failed, variants = [row(status="crash", cause="not_started")], {"kind": "bad_variant", "allocations": []}
    assert judge(failed, [variants | {"variant": "/bad/python"}], [], 1, 1) == []
    assert judge(failed, [variants], [], 1, 1) != []
    assert judge([row(status="crash")], [variants | {"variant": "/bad/python"}], [], 1, 1) != []


def test_too_many_jobs():
    table = [row(str(number)) for number in range(10)]
    runs = executions_of(
        "s1", [line for number in range(10) for line in lines(str(number), at_s=9.0 * number)]
    )
    limit = most_jobs(table, [], launches=3)
    assert judge(table, [], runs, limit, 3) == []
    assert judge(table, [], runs, limit + 1, 3) == [f"{limit + 1} jobs were submitted, more than {limit}"]


def test_a_fault_that_takes_a_job_allows_another():
    table, free = [row()], most_jobs([row()], [], launches=1)
    assert most_jobs(table, [{"kind": "scancel", "allocations": ["n1-1.0"]}], 1) == free + 1
    assert most_jobs(table, [{"kind": "empty_squeue", "allocations": [], "costs": 4}], 1) == free + 4
    assert most_jobs(table, [{"kind": "kill_rank", "missed": "nothing"}], 1) == free


def test_jobs_are_counted_whatever_lies_in_the_journal(tmp_path):
    events = (("allocation_planned", "a"), ("submitted", "b"), ("adopted", "b"), ("allocation_started", "c"))
    text = "".join(f'{{"event": "{kind}", "allocation": "{name}"}}\n' for kind, name in events)
    damaged = '{"event": "subm\n' + "[" * 100_000 + '\n{"event": "submitted", "allocation": 7}\n[]\n'
    (tmp_path / "launcher-host-1-ab.jsonl").write_text(text + damaged)
    (tmp_path / "agent-stray-1-1.jsonl").mkdir()
    assert submitted_jobs(tmp_path) == 2


def test_the_same_seed_draws_the_same_faults():
    assert draw("7", 60) == draw("7", 60) != draw("8", 60)
    assert {fault.kind for fault in draw("7", len(EXPLAINS))} == set(EXPLAINS)
