"""The programs of Slurm are shell scripts here; what they print was printed by Slurm 22.05."""

import contextlib
import math
import os
import re
import time
from pathlib import Path

import pytest

from tests.patience import slowness, wait_until
from ultrabench.errors import ClusterError
from ultrabench.launchers.slurm import query as query_module
from ultrabench.launchers.slurm.job import duration_s, find, squeue_jobs
from ultrabench.launchers.slurm.query import CommandError, SlurmQuery, ask
from ultrabench.launchers.slurm.states import Phase

QUEUE = """12|12|PENDING|0:00||PartitionNodeLimit|ub-c
10_1|10|PENDING|0:00||Resources|ub-a
10_2|10|PENDING|0:00||JobArrayTaskLimit|ub-a
10_0|15|RUNNING|1-02:03:04|gpu[01-04]|None|ub-a
11|11|PENDING|0:00||JobHeldUser|odd|name|
of two lines
14|14|COMPLETED|0:03|gpu08|None|other
"""
REFUSED = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


class Slurm:
    """Fake programs on PATH, which write down how they were called."""

    def __init__(self, folder):
        self.folder = folder

    def program(self, name, body):
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "$*" >> {self.folder}/{name}.calls\n{body}\n')
        path.chmod(0o755)

    def prints(self, name, text):
        (self.folder / f"{name}.out").write_text(text)
        self.program(name, f"cat {self.folder}/{name}.out")

    def fails(self, name, complaint, code=1):
        self.program(name, f"echo '{complaint}' >&2; exit {code}")

    def calls(self, name):
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fakes = tmp_path / "bin"
    fakes.mkdir()
    monkeypatch.setenv("PATH", f"{fakes}:/usr/bin:/bin")
    made = Slurm(fakes)
    for name in ("squeue", "sacct", "scancel"):
        made.fails(name, "nobody expects this call", 9)
    return made


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(query_module, "time", made)
    return made


@pytest.fixture
def query(slurm, clock):
    return SlurmQuery(poll_s=30.0)


def test_one_question_tells_of_all_jobs_of_a_prefix(slurm, query):
    slurm.prints("squeue", QUEUE)
    answer = query.jobs("ub-")
    assert sorted(answer.jobs) == ["10_0", "10_1", "10_2", "12"]
    job = answer.jobs["10_0"]
    assert (job.array_id, job.job_id, job.name) == ("10", "10_0", "ub-a")
    assert (job.state, job.nodes, job.elapsed_s) == ("RUNNING", "gpu[01-04]", 93784.0)
    assert job.meaning.phase is Phase.RUNNING
    assert answer.jobs["12"].job_id == "12"
    assert answer.jobs["10_2"].reason == "JobArrayTaskLimit"
    assert (answer.age_s, answer.error) == (0.0, None)
    assert list(query.jobs("odd").jobs) == ["11"]
    assert slurm.calls("squeue") == [
        f"--user={os.getuid()} --states=all --all --array --noheader --format=%i|%A|%T|%M|%N|%r|%j"
    ]


@pytest.mark.parametrize("fresh", [False, True])
def test_it_does_not_ask_again_before_its_time(slurm, query, clock, fresh):
    """An urgent question comes sooner, but not at once."""
    slurm.prints("squeue", QUEUE)
    soon = 2.0 if fresh else 30.0
    for passed, age in ((0, 0), (soon - 0.1, soon - 0.1), (0.2, 0), (1, 1)):
        clock.now += passed
        assert query.jobs("ub-", fresh=fresh).age_s == pytest.approx(age)
    assert len(slurm.calls("squeue")) == 2


def test_while_slurm_fails_the_last_answer_stays_and_questions_become_rare(slurm, query, clock):
    slurm.prints("squeue", QUEUE)
    query.jobs("ub-")
    slurm.fails("squeue", REFUSED)
    asked = []
    for _ in range(1300):
        clock.now += 1.0
        before = len(slurm.calls("squeue"))
        answer = query.jobs("ub-", fresh=clock.now > 1031)
        asked += [clock.now - 1000] * (len(slurm.calls("squeue")) - before)
    assert asked == [30, 60, 120, 240, 480, 780, 1080]
    assert "connect failure" in answer.error
    assert answer.age_s == 1300
    assert "10_0" in answer.jobs
    slurm.prints("squeue", "")
    clock.now += 300
    answer = query.jobs("ub-")
    assert (answer.jobs, answer.error, answer.age_s) == ({}, None, 0)
    clock.now += 30
    query.jobs("ub-")
    assert len(slurm.calls("squeue")) == 10


def test_before_the_first_answer_there_is_none(slurm, query, clock):
    slurm.fails("squeue", REFUSED)
    answer = query.jobs("ub-")
    assert (answer.jobs, answer.age_s) == ({}, math.inf)
    assert "connect failure" in answer.error
    slurm.prints("squeue", QUEUE)
    clock.now += 120
    assert "12" in query.jobs("ub-").jobs


def test_silence_beyond_the_budget_ends_it_in_one_line(slurm, query, clock):
    slurm.prints("squeue", "")
    query.jobs("ub-")
    slurm.fails("squeue", REFUSED)

    with pytest.raises(ClusterError) as caught:  # noqa: PT012
        while True:
            clock.now += 10
            query.jobs("ub-")
    assert clock.now == pytest.approx(1000 + 30 + 1800, abs=300)
    assert str(caught.value).startswith(f"squeue: {REFUSED} (exit 1), and so for ")
    assert "same command continues" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["Welcome!\n", "Welcome!\n7|7|RUNNING|0:05|gpu01|None|ub-z\n", "7|7|RUNN", "\x00\x01\n", "7\n"]
)
def test_nonsense_is_a_failure_not_an_empty_queue(slurm, query, clock, text):
    slurm.prints("squeue", QUEUE)
    query.jobs("ub-")
    slurm.prints("squeue", text)
    clock.now += 30
    answer = query.jobs("ub-")
    assert "not an answer" in answer.error
    assert len(answer.jobs) == 4


def test_a_program_that_hangs_is_killed_with_its_children(slurm, tmp_path):
    slurm.program("squeue", f"sleep 60 & echo $! > {tmp_path}/child; wait")
    begun = time.monotonic()
    with pytest.raises(CommandError, match="no answer within"):
        ask("squeue", timeout_s=0.2 * slowness())
    assert time.monotonic() - begun < 30
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not _runs(child), 3)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_missing_program_is_a_failure(slurm, monkeypatch):
    (slurm.folder / "squeue").unlink()
    monkeypatch.setenv("PATH", str(slurm.folder))
    with pytest.raises(CommandError, match="squeue: No such file"):
        ask("squeue")


def test_variables_that_change_the_programs_are_left_out(slurm, monkeypatch):
    slurm.program("squeue", "env")
    theirs = "SLURM_TIME_FORMAT SQUEUE_FORMAT SACCT_FEDERATION SBATCH_QOS SCANCEL_INTERACTIVE"
    for name in ("SLURM_CONF", "SLURM_JWT", *theirs.split()):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("TZ", "UTC")
    names = r"SLURM|SBATCH|SQUEUE|SACCT|SCANCEL|LC_ALL|TZ"
    assert {line for line in ask("squeue").splitlines() if re.match(names, line)} == {
        "SLURM_CONF=x", "SLURM_JWT=x", "SLURM_BITSTR_LEN=0", "LC_ALL=C", "TZ=UTC",
    }  # fmt: skip


@pytest.mark.parametrize("state", ["PENDING", "COMPLETED", "CANCELLED"])
def test_only_a_cancelled_array_speaks_for_its_elements(state):
    jobs = squeue_jobs(f"57|57|{state}|0:00||None|ub-e\n57_0|58|RUNNING|0:09|gpu01|None|ub-e\n")
    assert (jobs["57"].job_id, find(jobs, "57_0").state, find(jobs, "58_3")) == ("57", "RUNNING", None)
    cancelled = find(jobs, "57_3")
    assert (cancelled and cancelled.job_id) == ("57_3" if state == "CANCELLED" else None)


def test_elements_that_share_a_row_are_told_apart():
    found = squeue_jobs("10_[1,4-5,8-12:2%2]|10|PENDING|0:00||Resources|ub-a\n")
    assert list(found) == [f"10_{n}" for n in (1, 4, 5, 8, 10, 12)]


def test_what_squeue_has_forgotten_sacct_knows(slurm, query, clock):
    slurm.prints(
        "sacct",
        """59_2|62|PENDING|00:00:00|None assigned|2026-11-21T09:21:14|ub-e
59_4|59|RUNNING|00:00:07|gpu[01-02]|2026-11-21T09:21:14|ub-e
59_0|60|REQUEUED|00:00:13|gpu01|2026-11-21T09:21:14|ub-e
59_0|60|PENDING|00:00:00|None assigned|2026-11-21T09:21:27|ub-e
59_[4-5%1]|59|CANCELLED by 0|00:00:00|None assigned|2026-11-21T09:21:14|ub-e
7|7|OUT_OF_MEMORY|01:18:31|gpu03|2026-11-20T01:00:00|bar|red
""",
    )
    found = query.accounting(["59_0", "59_2", "59_4", "59_5", "59_9", "7", "8"])
    assert {i: job.state for i, job in found.items()} == {
        "59_0": "PENDING", "59_2": "PENDING", "59_4": "RUNNING", "59_5": "CANCELLED by 0", "7": "OUT_OF_MEMORY",
    }  # fmt: skip
    assert found["59_4"].nodes == "gpu[01-02]"
    assert found["59_0"].nodes == ""
    assert (found["7"].elapsed_s, found["7"].name) == (4711.0, "bar|red")
    assert slurm.calls("sacct") == [
        "--parsable2 --noheader --allocations "
        "--format=JobID,JobIDRaw,State,Elapsed,NodeList,Submit,JobName --jobs=59,7,8"
    ]
    slurm.prints("sacct", "59_4|59|COMPLETED|00:00:09|gpu[01-02]|2026-11-21T09:21:14|ub-e\n")
    clock.now += 30
    assert {i: job.state for i, job in query.accounting(["59_4", "59_2"]).items()} == {"59_4": "COMPLETED"}


def test_many_ids_are_asked_for_in_parts(slurm, query):
    slurm.prints("sacct", "")
    assert query.accounting(str(i) for i in range(1000, 1450)) == {}
    assert [call.count(",") - 6 + 1 for call in slurm.calls("sacct")] == [200, 200, 50]


@pytest.mark.parametrize("complaint", ["Slurm accounting storage is disabled", "Connection refused"])
def test_a_site_without_accounting_is_not_asked_all_the_time(slurm, query, clock, complaint):
    slurm.fails("sacct", complaint)
    assert query.accounting(["7"]) == {}
    clock.now += 299
    assert query.accounting(["8"]) == {}
    assert len(slurm.calls("sacct")) == 1
    slurm.prints("sacct", "8|8|FAILED|00:00:01|gpu01|2026-11-21T09:21:14|ub-a\n")
    clock.now += 1
    assert query.accounting(["8"])["8"].state == "FAILED"


def test_jobs_are_cancelled_in_few_words(slurm, query):
    slurm.program("scancel", "")
    query.cancel(["10_2", "10_0", "7", "10_11"])
    query.cancel([f"{i}" for i in range(1000, 1300)])
    query.cancel_named("ub-a", pending_only=False)
    calls = slurm.calls("scancel")
    assert calls[0] == "10_[0,2,11] 7"
    assert [len(call.split()) for call in calls[1:3]] == [200, 100]
    assert calls[3:] == [f"--user={os.getuid()} --name=ub-a"]
    query.cancel([])
    assert len(slurm.calls("scancel")) == 4


def test_only_those_that_wait_are_cancelled_if_asked_to(slurm, query):
    slurm.prints("squeue", QUEUE)
    slurm.program("scancel", "")
    for name in ("ub-a", "ub-c", "ub-", "other", "nothing"):
        query.cancel_named(name, pending_only=True)
    assert slurm.calls("scancel") == ["10_[1,2]", "12"]


@pytest.mark.parametrize(
    ("complaint", "told"),
    [("Invalid job id specified", None), ("Job/step already completing or completed", None),
     ("Access/permission denied", "permission denied")],
)  # fmt: skip
def test_a_cancellation_that_did_not_arrive_is_told(slurm, query, complaint, told):
    """One of a job that is over has nothing to do."""
    slurm.fails("scancel", f"scancel: error: Kill job error on job id 7: {complaint}")
    with pytest.raises(ClusterError, match=told) if told else contextlib.nullcontext():
        query.cancel(["7"])
    slurm.fails("squeue", REFUSED)
    with pytest.raises(ClusterError, match="nothing was cancelled"):
        query.cancel_named("ub-a", pending_only=True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:00", 0), ("30:00", 1800), ("30", 1800), ("01:02:03", 3723), ("1-02:03:04", 93784), ("2-00", 172800),
        ("1-12:30", 131400), ("7-00:00:00", 604800), ("UNLIMITED", None), ("INFINITE", None), ("NONE", None),
        ("", None), ("NOT_SET", None), ("INVALID", None), ("Partition_Limit", None), ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_times_are_read(text, seconds):
    assert duration_s(text) == seconds
