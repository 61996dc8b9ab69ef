"""The judge of chaos campaigns finds what is planted, and finds nothing where nothing is wrong."""

import json

import pytest

from tests.chaos.judge import judge, most_jobs, submitted_jobs
from tests.chaos.witness import executions_of


def row(run="a", repeat=0, attempt=0, status="ok", allocation="n1-1.0", stopped="interval"):
    return {
        "run_id": run, "repeat": repeat, "attempt": attempt, "status": status, "allocation": allocation,
        "reason": None, "stopped": stopped,
    }  # fmt: skip


def lines(run="a", attempt=0, words="start step end", allocation="n1-1.0", host="gpu01", pid=1, at=0.0):
    return [
        f"s1 {run} 0 {attempt} {word} {allocation} {host} {pid}:7 {at + number:.3f}"
        for number, word in enumerate(words.split())
    ]


def found(table, told, records=(), jobs=1, launches=1):
    return judge(table, list(records), executions_of("s1", told), jobs, launches)


def test_a_sweep_without_fault_has_no_problem():
    table = [row("a"), row("b"), row("c", status="rejected", attempt=None)]
    assert found(table, [*lines("a"), *lines("b", at=9)]) == []


def test_other_sweeps_say_nothing():
    told = [line.replace("s1", "s2") for line in lines("b")]
    assert found([row()], [*lines(), *told]) == []


@pytest.mark.parametrize("at", [1.5, 60.0])
def test_an_attempt_that_ran_twice(at):
    """Both at once or one after the other, in the same allocation or in another."""
    for allocation in ("n1-1.0", "n1-2.0"):
        problems = found([row()], [*lines(), *lines(pid=2, at=at, host="gpu02", allocation=allocation)])
        assert "a.0.0 ran 2 times" in problems


def test_a_doubled_submission_is_seen_though_both_rows_are_one():
    problems = found([row()], [*lines(), *lines(pid=2, at=1.0, host="gpu02")])
    assert any("a.0.0 and a.0.0 ran at the same time" in problem for problem in problems)


def test_two_attempts_of_a_run_at_the_same_time():
    table = [row(status="lost"), row(attempt=1, allocation="n1-2.0")]
    record = {"kind": "scancel", "allocations": ["n1-1.0"]}
    told = [*lines(words="start step step"), *lines(attempt=1, at=1.5, host="gpu02", allocation="n1-2.0")]
    assert found(table, told, [record]) == [
        "a.0.0 and a.0.1 ran at the same time, of the same run in n1-1.0 and n1-2.0"
    ]


def test_an_attempt_after_one_that_was_killed_is_right():
    table = [row(status="lost"), row(attempt=1, allocation="n1-2.0")]
    record = {"kind": "scancel", "allocations": ["n1-1.0"]}
    told = [*lines(words="start step"), *lines(attempt=1, at=5.0, allocation="n1-2.0")]
    assert found(table, told, [record]) == []
    assert record["ends"] == ["lost"]


@pytest.mark.parametrize(("allocation", "host"), [("n1-1.0", "gpu02"), ("n1-2.0", "gpu01")])
def test_two_runs_at_the_same_time_in_one_allocation_or_on_one_node(allocation, host):
    told = [*lines("a"), *lines("b", at=1.0, host=host, allocation=allocation)]
    problems = found([row("a"), row("b", allocation=allocation)], told)
    assert len(problems) == 1
    assert "at the same time" in problems[0]


def test_two_runs_at_the_same_time_elsewhere_are_right():
    told = [*lines("a"), *lines("b", at=1.0, host="gpu02", allocation="n1-2.0")]
    assert found([row("a"), row("b", allocation="n1-2.0")], told) == []


def test_an_ok_end_that_the_program_never_came_to():
    assert found([row()], lines(words="start step step")) == [
        "a.0.0 is ok and its program never came to its end"
    ]
    assert found([row(stopped="slower_than_best")], lines(words="start step step")) == []


def test_two_ok_ends_of_a_repeat():
    table = [row(), row(attempt=1)]
    assert "a.0 is ok 2 times: attempts [0, 1]" in found(table, [*lines(), *lines(attempt=1, at=9)])


def test_what_ran_is_recorded_and_what_is_recorded_ran():
    assert found([row()], [*lines(), *lines("b", at=9)]) == ["b.0.0 ran and is not recorded"]
    assert found([row()], []) == ["a.0.0 is ok and never ran"]


def test_an_end_that_no_fault_explains():
    record = {"kind": "port_scan", "allocations": []}
    table = [row(status="lost"), row(attempt=1)]
    told = [*lines(words="start"), *lines(attempt=1, at=9)]
    assert found(table, told, [record]) == ["a.0.0 ended lost in n1-1.0: None"]
    record = {"kind": "unreadable_claim", "allocations": ["n1-1.0"]}
    assert found(table, told, [record]) == []


def test_too_many_jobs():
    table = [row(str(number)) for number in range(10)]
    told = [line for number in range(10) for line in lines(str(number), at=9.0 * number)]
    most = most_jobs(table, [], launches=3)
    assert found(table, told, jobs=most, launches=3) == []
    assert found(table, told, jobs=most + 1, launches=3) == [
        f"{most + 1} jobs were submitted, more than {most}"
    ]


def test_a_fault_that_takes_a_job_allows_another():
    table, free = [row()], most_jobs([row()], [], launches=1)
    assert most_jobs(table, [{"kind": "scancel", "allocations": ["n1-1.0"]}], 1) == free + 1
    assert most_jobs(table, [{"kind": "empty_squeue", "allocations": [], "costs": 4}], 1) == free + 4
    assert most_jobs(table, [{"kind": "kill_rank", "missed": "nothing"}], 1) == free


def test_jobs_are_counted_whatever_lies_in_the_journal(tmp_path):
    events = [
        {"event": "allocation_planned", "allocation": "never"},
        {"event": "submitted", "allocation": "n1-1.0"},
        {"event": "adopted", "allocation": "n1-1.0"},
        {"event": "allocation_started", "allocation": "n1-1.1"},
    ]
    text = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "launcher-host-1-ab.jsonl").write_text(text + '{"event": "subm\n' + "[" * 100_000 + "\n")
    (tmp_path / "agent-stray-1-1.jsonl").mkdir()
    assert submitted_jobs(tmp_path) == 2
