"""The programs of Slurm are shell scripts here; what they print was printed by Slurm 22.05."""

import contextlib
import math
import os
import re
import time
from datetime import datetime

import pytest

from tests.patience import slowness, wait_until
from tests.unit.launchers.conftest import Programs
from ultrabench.errors import ClusterError
from ultrabench.launchers.slurm import query as query_module
from ultrabench.launchers.slurm.job import JobIdentity, SlurmJob, duration_s, find_job, squeue_jobs
from ultrabench.launchers.slurm.query import CommandError, SlurmQuery, ask
from ultrabench.processes import start_time

QUEUE = """12|12|PENDING|0:00||PartitionNodeLimit|ub-c
10_1|10|PENDING|0:00||Resources|ub-a
10_2|10|PENDING|0:00||JobArrayTaskLimit|ub-a
10_0|15|RUNNING|1-02:03:04|gpu[01-04]|None|ub-a
11|11|PENDING|0:00||JobHeldUser|odd|name|
of two lines
14|14|COMPLETED|0:03|gpu08|None|other
"""
SUBMITTED_AT = 1795462505
WHOSE = f"{os.getuid()}|alps"
ACCOUNTS = f"""59_2|62|PENDING|00:00:00|None assigned|{SUBMITTED_AT}|{WHOSE}|ub-e
59_4|59|RUNNING|00:00:07|gpu[01-02]|{SUBMITTED_AT}|{WHOSE}|ub-e
59_0|60|REQUEUED|00:00:13|gpu01|{SUBMITTED_AT}|{WHOSE}|ub-e
59_0|60|PENDING|00:00:00|None assigned|{SUBMITTED_AT + 13}|{WHOSE}|ub-e
59_[4-5%1]|59|CANCELLED by 0|00:00:00|None assigned|{SUBMITTED_AT}|{WHOSE}|ub-e
7|7|OUT_OF_MEMORY|01:18:31|gpu03|{SUBMITTED_AT}|{WHOSE}|bar|red
"""
REFUSED = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


class Slurm(Programs):
    """Slurm's programs, and the clock of a query of them."""

    def __init__(self, folder):
        super().__init__(folder)
        self.now, self.query = 1000.0, SlurmQuery(poll_s=30.0)

    def monotonic(self):
        return self.now

    def jobs(self, prefix="ub-", *, after=0.0, fresh=False):
        self.now += after
        return self.query.jobs(prefix, fresh=fresh)

    def prints(self, key, text, code=0):
        self.says[key] = text, code
        self.write()

    def time(self):
        return SUBMITTED_AT + self.now

    def accounting(self, job_ids, name="ub-e", **facts):
        """What sacct says about these jobs, which were submitted 5 minutes before, if the clocks are equal."""
        job = JobIdentity(**{"name": name, "cluster": "Alps", "submitting_at": SUBMITTED_AT + 300.0, **facts})
        return self.query.accounting(dict.fromkeys(job_ids, job))

    def calls(self, program):
        return [line.partition(" ")[2] for line in self.asked if line.startswith(f"{program} ")]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake = Slurm(tmp_path)
    monkeypatch.setattr(query_module, "time", fake)
    return fake


def test_one_question_tells_of_all_jobs_of_a_prefix(slurm):
    slurm.prints("queue", QUEUE)
    answer = slurm.jobs()
    assert sorted(answer.jobs) == ["10_0", "10_1", "10_2", "12"]
    runs = {"state": "RUNNING", "nodes": "gpu[01-04]", "elapsed_s": 93784.0}
    assert answer.jobs["10_0"] == SlurmJob(job_id="10_0", name="ub-a", **runs)
    assert answer.jobs["10_2"].reason == "JobArrayTaskLimit"
    assert (answer.age_s, answer.error) == (0.0, None)
    assert list(slurm.jobs("odd").jobs) == ["11"]
    options = "--states=all --all --array --noheader --format=%i|%A|%T|%M|%N|%r|%j"
    assert slurm.calls("squeue") == [f"--user={os.getuid()} {options}"]


@pytest.mark.parametrize("fresh", [False, True])
def test_it_does_not_ask_again_before_its_time(slurm, fresh):
    """An urgent question comes sooner, but not at once."""
    slurm.prints("queue", QUEUE)
    soon = 2.0 if fresh else 30.0
    for after, age in ((0, 0), (soon - 0.1, soon - 0.1), (0.2, 0), (1, 1)):
        assert slurm.jobs(after=after, fresh=fresh).age_s == pytest.approx(age)
    assert len(slurm.calls("squeue")) == 2


def test_while_slurm_fails_the_last_answer_stays_and_questions_become_rare(slurm):
    slurm.prints("queue", REFUSED, 1)
    first = slurm.jobs()
    assert (first.jobs, first.age_s) == ({}, math.inf)
    slurm.prints("queue", QUEUE)
    assert slurm.jobs(after=30).error is None
    slurm.prints("queue", REFUSED, 1)
    ask_seconds = []
    for second in range(1, 1301):
        before = len(slurm.calls("squeue"))
        answer = slurm.jobs(after=1, fresh=second > 31)
        ask_seconds += [second] * (len(slurm.calls("squeue")) - before)
    assert ask_seconds == [30, 60, 120, 240, 480, 780, 1080]
    assert "connect failure" in answer.error
    assert answer.age_s == 1300
    assert "10_0" in answer.jobs
    slurm.prints("queue", "")
    answer = slurm.jobs(after=300)
    assert (answer.jobs, answer.error, answer.age_s) == ({}, None, 0)
    assert slurm.jobs(after=30).age_s == 0


def test_silence_beyond_the_budget_ends_it_in_one_line(slurm):
    slurm.prints("queue", REFUSED, 1)
    with pytest.raises(ClusterError) as caught:  # noqa: PT012
        while True:
            slurm.jobs(after=10)
    assert slurm.now == pytest.approx(1000 + 1800, abs=300)
    assert str(caught.value).startswith(f"squeue: {REFUSED.strip()} (exit 1), for ")
    assert "run the same command again" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["Welcome!\n", "Welcome!\n7|7|RUNNING|0:05|gpu01|None|ub-z\n", "7|7|RUNN\n", "\x01\n", "7\n"]
)
def test_nonsense_is_a_failure_not_an_empty_queue(slurm, text):
    slurm.prints("queue", QUEUE)
    slurm.jobs()
    slurm.prints("queue", text)
    answer = slurm.jobs(after=30)
    assert "unexpected output" in answer.error
    assert len(answer.jobs) == 4


def test_a_program_that_hangs_is_killed_with_its_children(slurm, tmp_path):
    slurm.write()
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/child; wait\n")
    begun = time.monotonic()
    with pytest.raises(CommandError, match="no answer within"):
        ask("squeue", timeout_s=0.2 * slowness())
    assert time.monotonic() - begun < 30
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: start_time(child) is None, 3)


def test_a_missing_program_is_a_failure(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match="squeue: No such file"):
        ask("squeue")


def test_variables_that_change_the_programs_are_left_out(slurm, monkeypatch, tmp_path):
    slurm.write()
    (tmp_path / "squeue").write_text("#!/bin/sh\nenv\n")
    theirs = "SLURM_TIME_FORMAT SQUEUE_FORMAT SACCT_FEDERATION SBATCH_QOS SCANCEL_INTERACTIVE"
    for name in ("SLURM_CONF", "SLURM_JWT", *theirs.split()):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("TZ", "UTC")
    names = r"SLURM|SBATCH|SQUEUE|SACCT|SCANCEL|LC_ALL|TZ"
    assert {line for line in ask("squeue").splitlines() if re.match(names, line)} == {
        "SLURM_CONF=x", "SLURM_JWT=x", "SLURM_BITSTR_LEN=0", "SLURM_TIME_FORMAT=%s", "LC_ALL=C", "TZ=UTC",
    }  # fmt: skip


@pytest.mark.parametrize("state", ["PENDING", "COMPLETED", "CANCELLED"])
def test_only_a_cancelled_array_speaks_for_its_elements(state):
    jobs = squeue_jobs(f"57|57|{state}|0:00||None|ub-e\n57_0|58|RUNNING|0:09|gpu01|None|ub-e\n")
    assert (jobs["57"].job_id, find_job(jobs, "57_0").state, find_job(jobs, "58_3")) == (
        "57",
        "RUNNING",
        None,
    )
    cancelled = find_job(jobs, "57_3")
    assert (cancelled and cancelled.job_id) == ("57_3" if state == "CANCELLED" else None)


def test_elements_that_share_a_row_are_told_apart():
    jobs = squeue_jobs("10_[1,4-5,8-12:2%2]|10|PENDING|0:00||Resources|ub-a\n")
    assert list(jobs) == [f"10_{n}" for n in (1, 4, 5, 8, 10, 12)]


def test_what_squeue_has_forgotten_sacct_knows(slurm):
    slurm.prints("sacct", ACCOUNTS)
    jobs = slurm.accounting(["59_0", "59_2", "59_4", "59_5", "59_9", "8"])
    assert {i: (job.state, job.nodes) for i, job in jobs.items()} == {
        "59_0": ("PENDING", ""), "59_2": ("PENDING", ""), "59_4": ("RUNNING", "gpu[01-02]"),
        "59_5": ("CANCELLED by 0", ""),
    }  # fmt: skip
    (odd,) = slurm.accounting(["7"], name="bar|red", submitting_at=None).values()
    assert (odd.elapsed_s, odd.name, odd.state, odd.nodes) == (4711.0, "bar|red", "OUT_OF_MEMORY", "gpu03")
    columns = "JobID,JobIDRaw,State,Elapsed,NodeList,Submit,UID,Cluster,JobName"
    options = f"--parsable2 --noheader --allocations --duplicates --format={columns}"
    assert slurm.calls("sacct") == [f"{options} --jobs=59,8", f"{options} --jobs=7"]
    slurm.prints("sacct", f"59_4|59|COMPLETED|00:00:09|gpu[01-02]|{SUBMITTED_AT}|{WHOSE}|ub-e\n")
    slurm.now += 30
    jobs = slurm.accounting(["59_4", "59_2"])
    assert {i: job.state for i, job in jobs.items()} == {"59_4": "COMPLETED"}


def test_a_site_without_accounting_is_not_asked_all_the_time(slurm):
    slurm.prints("sacct", "Slurm accounting storage is disabled\n", 1)
    assert slurm.accounting(["7"]) == {}
    slurm.now += 299
    assert slurm.accounting(["8"]) == {}
    assert len(slurm.calls("sacct")) == 1
    slurm.prints("sacct", f"8|8|FAILED|00:00:01|gpu01|{SUBMITTED_AT}|{WHOSE}|ub-e\n")
    slurm.now += 1
    assert slurm.accounting(["8"])["8"].state == "FAILED"


OURS = f"8|8|COMPLETED|00:00:09|gpu01|{SUBMITTED_AT}|{WHOSE}|ub-e\n"
TOO_EARLY = (str(SUBMITTED_AT - 1), datetime.fromtimestamp(SUBMITTED_AT - 1).isoformat())


@pytest.mark.parametrize(
    ("row", "difference"),
    [(OURS, None), (OURS.replace("ub-e", "nightly"), "name nightly instead of ub-e"),
     (OURS.replace(WHOSE, "4711|alps"), "user 4711"), (OURS.replace("alps", "juno"), "cluster juno instead of alps"),
     *((OURS.replace(f"{SUBMITTED_AT}", time), "was submitted before") for time in TOO_EARLY),
     (OURS.replace("00:00:09", "2-12:00:00"), "longer than the time since its submission"),
     # A column that sacct leaves empty does not decide.
     (OURS.replace(f"{SUBMITTED_AT}|{WHOSE}", "Unknown||"), None)],
)  # fmt: skip
def test_a_row_of_another_job_with_the_same_id_is_no_answer(slurm, row, difference):
    """Ids begin anew after MaxJobId, or with another database; the newest row need not be ours."""
    slurm.prints("sacct", row)
    assert list(slurm.accounting(["8"])) == ([] if difference else ["8"])
    assert len(slurm.query.foreign_job_notes) == bool(difference)
    for note in slurm.query.foreign_job_notes.values():
        assert note.startswith("sacct shows another job 8, which ")
        assert difference in note
    slurm.prints("sacct", OURS + row.replace("COMPLETED", "OUT_OF_MEMORY"))
    slurm.now += 30
    assert slurm.accounting(["8"])["8"].state == ("COMPLETED" if difference else "OUT_OF_MEMORY")


def test_many_ids_go_in_parts(slurm):
    slurm.prints("sacct", "")
    slurm.prints("scancel", "")
    ids = [f"{i}" for i in range(1000, 1450)]
    assert slurm.accounting(ids) == {}
    assert [call.rpartition("=")[2].count(",") + 1 for call in slurm.calls("sacct")] == [200, 200, 50]
    slurm.query.cancel(ids)
    assert [len(call.split()) for call in slurm.calls("scancel")] == [200, 200, 50]


def test_jobs_are_cancelled_in_few_words_and_only_those_that_wait_if_asked_to(slurm):
    slurm.prints("queue", QUEUE)
    slurm.prints("scancel", "")
    slurm.query.cancel(["10_2", "10_0", "7", "10_11"])
    slurm.query.cancel_named("ub-a", pending_only=False)
    slurm.query.cancel([])
    for name in ("ub-a", "ub-c", "ub-", "other", "nothing"):
        slurm.query.cancel_named(name, pending_only=True)
    assert slurm.calls("scancel") == ["10_[0,2,11] 7", f"--user={os.getuid()} --name=ub-a", "10_[1,2]", "12"]


@pytest.mark.parametrize(
    ("complaint", "message"),
    [("Invalid job id specified", None), ("Job/step already completing or completed", None),
     ("Access/permission denied", "permission denied")],
)  # fmt: skip
def test_a_cancellation_that_did_not_arrive_is_told(slurm, complaint, message):
    """One of a job that is over has nothing to do."""
    slurm.prints("scancel", f"scancel: error: Kill job error on job id 7: {complaint}\n", 1)
    with pytest.raises(ClusterError, match=message) if message else contextlib.nullcontext():
        slurm.query.cancel(["7"])
    slurm.prints("queue", REFUSED, 1)
    with pytest.raises(ClusterError, match="nothing was cancelled"):
        slurm.query.cancel_named("ub-a", pending_only=True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:00", 0), ("30:00", 1800), ("30", 1800), ("01:02:03", 3723), ("1-02:03:04", 93784), ("2-00", 172800),
     ("1-12:30", 131400), ("UNLIMITED", None), ("", None), ("1:2:3:4", None)],
)  # fmt: skip
def test_times_are_read(text, seconds):
    assert duration_s(text) == seconds
