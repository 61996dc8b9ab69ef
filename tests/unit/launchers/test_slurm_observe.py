"""What a launcher makes of squeue and sacct; both are played here, answer by answer."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.unit.allocations import with_launcher
from ultrabench.errors import ClusterError
from ultrabench.launchers.launcher import own_origin
from ultrabench.launchers.slurm import launcher as slurm_module
from ultrabench.launchers.slurm.job import SlurmJob, find_job
from ultrabench.launchers.slurm.launcher import END_GRACE_S, STALE_ACCOUNTING_S, STUCK_S, SlurmLauncher
from ultrabench.launchers.slurm.query import Answer, CommandError
from ultrabench.result import Status
from ultrabench.store.allocation import JOB_LOG
from ultrabench.store.events import AllocationEnded, LeadingAgent, Start
from ultrabench.store.folder import SweepFolder
from ultrabench.store.jobs_seen import JobEnd, JobsSeen
from ultrabench.store.state import AllocationState

A, B = "n1-0000aaaa.0", "n1-0000aaaa.1"
JOB_NAME = "ub-quick-n1-0000aaaa"
GRACE_S = 60.0


def rows(*jobs, name=JOB_NAME, **fields):
    """What squeue or sacct lists, from (id, state)."""
    return {job_id: SlurmJob(job_id=job_id, name=name, state=state, **fields) for job_id, state in jobs}


class Slurm:
    """A launcher, its played Slurm and its allocations; time passes only where the test says so."""

    def __init__(self, folder):
        self.now = self.asked_at = 0.0
        self.listed, self.known, self.held = {}, {}, {}
        self.error, self.polled, self.refuses = None, True, False
        self.asked, self.cancelled, self.foreign_job_notes = [], [], {}
        self.launcher = SlurmLauncher(with_launcher(grace_s=GRACE_S), SweepFolder(folder / "quick"))
        self.launcher.query = self

    def monotonic(self):
        return self.now

    def jobs(self, prefix, *, fresh=False):
        if self.error is None and self.polled:
            self.asked_at = self.now
        jobs = {i: job for i, job in self.listed.items() if job.name.startswith(prefix)}
        return Answer(jobs=jobs, age_s=self.now - self.asked_at, error=self.error)

    def accounting(self, jobs):
        self.asked += jobs

        def job_of(job_id, ours):
            return find_job(
                {i: row for i, row in self.known.items() if not ours.difference(row, 0.0)}, job_id
            )

        return {job_id: job for job_id, ours in jobs.items() if (job := job_of(job_id, ours))}

    def cancel(self, job_ids):
        self.cancelled.append(sorted(job_ids))
        if self.refuses:
            raise ClusterError("scancel: no answer")

    def submitted(self, name, job_id="57_0"):
        self.held[name] = AllocationState(name=name, job=job_id and {"job_id": job_id})

    def log(self, name):
        path = self.launcher._folder.allocations / name / JOB_LOG
        path.parent.mkdir(parents=True)
        return path

    def started(self, name=A, job_id="57_0"):
        """An agent of this job has claimed the allocation and said so."""
        self.held[name].agents += (LeadingAgent(host="gpu01", job=Start(job_id=job_id)),)

    def ended(self, name=A, held_s=None):
        start = Start(job_id="57_0")
        end = AllocationEnded(allocation=name, job=start, reason="all done", elapsed_s=1.0, held_s=held_s)
        self.held[name].ends[start] = end

    def observe(self, *jobs, after=0.0):
        """A look, at which squeue lists these jobs if any are given."""
        self.now += after
        self.listed = rows(*jobs) if jobs else self.listed
        return self.launcher.observe(self.held)

    def lives(self, *jobs, after=0.0):
        """A look at which nothing is over."""
        look = self.observe(*jobs, after=after)
        assert (look.alive, look.ended_jobs) == ({A}, {})
        return look

    def ends(self, after):
        """A look at which the allocation is over: its status and why."""
        end = self.observe(after=after).ended_jobs[A]
        return end.status, end.reason


def times(look):
    """Allocation -> the seconds for which its job held nodes."""
    return {name: end.held_s for name, end in look.timed.items()}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = Slurm(tmp_path)
    monkeypatch.setattr(slurm_module, "time", fake)
    fake.submitted(A)
    assert fake.launcher.origin == own_origin("slurm")
    return fake


def test_before_the_first_answer_everything_may_live(slurm):
    slurm.asked_at, slurm.error = -math.inf, "squeue: refused"
    for _ in range(3):
        look = slurm.lives(after=1000)
        note = "squeue does not answer (squeue: refused); retrying, jobs continue"
        assert (look.queued, look.notes) == (set(), (note,))


@pytest.mark.parametrize(
    ("state", "queued", "note"),
    [("PENDING", True, None), ("REQUEUE_HOLD", True, "went back to the queue and is held there"),
     ("RUNNING", False, None), ("STAGE_OUT", False, None), ("CONFIGURING", False, None),
     ("SUSPENDED", False, "is suspended; its processes are kept"),
     ("FROBNICATED", False, "is in state FROBNICATED, which ultrabench does not know")],
)  # fmt: skip
def test_what_squeue_lists_lives_and_is_timed_while_it_holds_nodes(slurm, state, queued, note):
    slurm.listed = rows(("57_0", state), elapsed_s=8.0)
    for _ in range(3):
        look = slurm.lives(after=1000)
        assert (look.queued, look.held_s) == (({A}, {}) if queued else (set(), {A: 8.0}))
        assert look.running == ({A} if state == "RUNNING" else set())
        assert look.jobs == {A: {"job_id": "57_0", "name": JOB_NAME}}
        assert look.notes == ((f"job 57_0 is {state}: {note}",) if note else ())
    assert slurm.asked == []


def over(status, state):
    return JobEnd(status=status, reason=f"Slurm ended job 57_0: {state} (TimeLimit)", held_s=77.0)


@pytest.mark.parametrize(
    ("where", "state", "after_s", "count", "end"),
    [
        ("listed", "COMPLETED", END_GRACE_S, 0, over(Status.LOST, "COMPLETED")),
        ("listed", "CANCELLED by 1000", END_GRACE_S, 0, over(Status.CANCELLED, "CANCELLED by 1000")),
        ("known", "NODE_FAIL", GRACE_S, 1, over(Status.NODE_FAIL, "NODE_FAIL")),
        ("known", "RUNNING", STALE_ACCOUNTING_S, 2,
         JobEnd(reason="squeue no longer lists job 57_0, sacct says RUNNING")),
    ],
)  # fmt: skip
def test_a_job_that_is_not_active_leaves_its_agents_time_to_say_so(slurm, where, state, after_s, count, end):
    """Little where squeue says that it is over; else sacct is asked, which may lag when it says the opposite."""
    setattr(slurm, where, rows(("57_0", state), elapsed_s=77.0, reason="TimeLimit"))
    slurm.lives()
    slurm.lives(after=after_s - 1)
    look = slurm.observe(after=1)
    assert (look.alive, look.queued, look.ended_jobs) == (frozenset(), frozenset(), {A: end})
    assert slurm.asked == ["57_0"] * count
    slurm.ended()
    assert slurm.observe(after=1000).ended_jobs == {}, "what the agents said is enough"


@pytest.mark.parametrize("other", [{}, {"name": "nightly"}, {"submitted_at": 1e6}, {"cluster": "juno"}])
@pytest.mark.parametrize("job_id", ["57_0", None])
def test_without_accounting_a_missing_job_is_lost(slurm, job_id, other):
    """A row about another job with the same id says nothing."""
    slurm.launcher.origin["cluster"] = "alps"
    slurm.submitted(A, job_id)
    slurm.held[A].submitting_at = 2e6
    slurm.known = rows(("57_0", "OUT_OF_MEMORY"), **other) if other else {}
    slurm.lives()
    slurm.lives(after=GRACE_S - 1)
    lost_job = "job 57_0" if job_id else f"a job of {A}"
    assert slurm.ends(after=1) == (Status.LOST, f"Slurm does not know {lost_job}")


def test_a_job_that_comes_back_begins_anew(slurm):
    back = rows(("57_0", "RUNNING"))
    for jobs, after in (({}, 0), ({}, GRACE_S - 1), (back, 2), ({}, GRACE_S), ({}, GRACE_S - 1)):
        slurm.listed = jobs
        slurm.lives(after=after)


@pytest.mark.parametrize("first", ["COMPLETED", "CANCELLED", "RUNNING"])
@pytest.mark.parametrize("job_ids", [("57_0", "61_0"), ("61_0", "57_0")])
def test_of_two_jobs_of_one_name_the_one_that_lives_counts(slurm, first, job_ids):
    slurm.submitted(A, None)  # the answer of sbatch was lost
    for _ in range(3):
        slurm.lives((job_ids[0], first), (job_ids[1], "PENDING"), after=1000)
    slurm.lives((job_ids[0], "FAILED"), (job_ids[1], "FAILED"))
    assert A in slurm.observe(after=END_GRACE_S).ended_jobs


def test_a_requeued_job_lives_again_though_its_agents_said_goodbye(slurm):
    slurm.launcher._config = with_launcher(grace_s=GRACE_S)
    slurm.started()
    slurm.ended()
    assert slurm.lives(("57_0", "PENDING"), after=1000).queued == {A}
    assert slurm.cancelled == [], "it is no second job"
    for after in (2 * GRACE_S, GRACE_S / 2):  # the first start has ended long ago; new agents begin
        slurm.observe(("57_0", "RUNNING"), after=after)
        assert slurm.cancelled == []
    look = slurm.observe(("57_0", "COMPLETING"), after=1000)
    assert (look.alive, look.queued, look.ended_jobs) == (frozenset(), frozenset(), {})


def test_answers_that_are_stale_bury_nobody_and_cancel_nothing(slurm):
    slurm.lives(("57_0", "RUNNING"), ("61_0", "PENDING"))
    slurm.error = "squeue: no answer within 20 s"
    slurm.started()
    slurm.lives(("61_0", "PENDING"), after=10)
    for _ in range(100):
        notes = slurm.lives(after=100).notes
    assert notes == ("squeue does not answer (squeue: no answer within 20 s); retrying, jobs continue",)
    assert slurm.cancelled == []
    slurm.error = None
    slurm.lives(("57_0", "RUNNING"), ("61_0", "PENDING"))
    assert slurm.cancelled == [["61_0"]]


def test_an_answer_older_than_a_submission_says_nothing_of_it(slurm):
    slurm.observe(("57_0", "RUNNING"))
    slurm.polled = False
    slurm.submitted(B, "58_0")
    for _ in range(3):
        assert slurm.observe(after=GRACE_S).alive == {A, B}
    slurm.polled = True
    for after in (0.0, GRACE_S - 0.5):
        assert slurm.observe(after=after).alive == {A, B}, "only from here on its absence counts"
    assert B in slurm.observe(after=0.5).ended_jobs


@pytest.mark.parametrize("name", ["ub-quick-2-n1-0000aaaa", "ub-quick-n1-0000bbbb", "ub-quick-"])
def test_jobs_of_others_whose_names_begin_alike_are_not_ours(slurm, name):
    slurm.listed = rows(("60_0", "RUNNING"), name=name)
    slurm.lives()
    look = slurm.observe(after=GRACE_S)
    assert (look.alive, look.jobs, list(look.ended_jobs)) == (frozenset(), {}, [A])


def test_what_a_person_has_to_mend_is_told_once(slurm):
    slurm.submitted(B, "57_1")
    for reason, notes in (("PartitionTimeLimit", 1), ("Resources", 0)):
        slurm.listed = rows(("57_0", "PENDING"), ("57_1", "PENDING"), reason=reason)
        headlines = [note.partition(": ")[0] for note in slurm.observe().notes]
        assert headlines == [f"jobs are pending ({reason})"] * notes


# a submission that was made twice


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize(("owner", "second"), [("57_0", "61_0"), ("61_0", "57_0")])
def test_the_second_of_two_jobs_is_cancelled_once_while_it_waits(slurm, owner, second, refuses):
    """It does no harm where it cannot be cancelled; one that runs leaves by itself, for its agent finds the claim."""
    slurm.refuses = refuses
    slurm.observe((owner, "RUNNING"), (second, "PENDING"), ("62_0", "REQUEUE_HOLD"), ("63_0", "RUNNING"))
    assert slurm.cancelled == [], "nobody knows yet which of them will own it"
    slurm.started(job_id=owner)
    for _ in range(3):
        look = slurm.lives(after=1000)
        assert (look.queued, look.running, look.jobs[A]["job_id"]) == (frozenset(), {A}, owner)
    assert slurm.cancelled == [sorted([second, "62_0"])]


def test_the_second_job_never_revives_an_allocation(slurm):
    slurm.started()
    slurm.ended()
    for second in ("PENDING", "PENDING", "RUNNING"):
        look = slurm.observe(("57_0", "COMPLETED"), ("61_0", second), after=1000)
        assert replace(look, timed={}) == JobsSeen()
    assert slurm.cancelled == [["61_0"]]


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETED"])
def test_the_second_job_neither_keeps_an_allocation_alive_nor_ends_it(slurm, state):
    slurm.started()
    slurm.lives(("57_0", "NODE_FAIL"), ("61_0", state))
    assert slurm.ends(after=END_GRACE_S) == (Status.NODE_FAIL, "Slurm ended job 57_0: NODE_FAIL")
    slurm.lives(("57_0", "RUNNING"), ("61_0", "COMPLETED"), after=1000)


def test_the_owner_is_looked_up_and_not_the_job_that_sbatch_answered(slurm):
    """The answer that was lost was that of the job which runs."""
    slurm.submitted(A, "61_0")
    slurm.started()
    slurm.known = rows(("57_0", "TIMEOUT"), ("61_0", "COMPLETED"))
    slurm.observe()
    assert slurm.ends(after=GRACE_S) == (Status.CANCELLED, "Slurm ended job 57_0: TIMEOUT")
    assert slurm.asked == ["57_0"]


@pytest.mark.parametrize(("requeue", "held_s"), [(False, 0.0), (True, 1.0)])
def test_the_time_of_a_requeued_job_is_at_least_that_of_its_agents(slurm, requeue, held_s):
    """Slurm shows only the time of its latest start, and there may be none."""
    slurm.launcher._config = with_launcher(requeue=requeue)
    slurm.started()
    slurm.ended()
    assert times(slurm.observe(("57_0", "CANCELLED"))) == {A: held_s}


def test_an_ended_job_that_ran_is_timed_by_squeue_until_that_was_taken_down(slurm):
    slurm.submitted(B, "58_0")
    slurm.started(B, "58_0")
    slurm.ended()
    jobs = ("57_0", "COMPLETED"), ("58_0", "RUNNING")
    assert times(slurm.observe(*jobs)) == {}, "one never started, the other is not over"
    slurm.started()
    assert times(slurm.observe(("57_0", "COMPLETING"), jobs[1])) == {}, "its nodes are not free yet"
    slurm.listed = rows(*jobs, elapsed_s=135.0)
    for _ in range(2):
        assert times(slurm.observe(after=10)) == {A: 135.0}
    slurm.ended(held_s=135.0)
    assert (times(slurm.observe(after=10)), slurm.asked) == ({}, [])


@pytest.mark.parametrize(("log", "failed_hosts"), [
    ("", ("gpu03",)), (None, ()), ("rank 0: srun: error: Node failure on gpu01\n", ("gpu03",)),
    ("srun: error: Node failure on gpu0\nsrun: error: Node failure on gpu[06-07]\n", ("gpu06", "gpu07")),
])  # fmt: skip
def test_the_nodes_that_slurm_lost_are_those_that_srun_names_last_or_those_that_are_down(
    slurm, programs, log, failed_hosts
):
    """Slurm ends the job of a lost node by SIGTERM, so that the agents may record its end first."""
    programs.says |= {"hostnames": "gpu06\ngpu07\n", "nodes": "gpu03\ngpu03\n"}
    programs.write()
    slurm.started()
    slurm.ended()
    if log is not None:
        slurm.log(A).write_text(log)
    slurm.listed = rows(("57_0", "NODE_FAIL"), nodes="gpu[03,06-07]")
    end = slurm.observe().timed[A]
    assert (end.status, end.failed_hosts) == (Status.NODE_FAIL, failed_hosts)
    assert (f"{','.join(failed_hosts)} failed" in end.reason) == bool(failed_hosts)


@pytest.mark.parametrize("recorded", [True, False])
def test_sacct_is_asked_once_for_what_squeue_has_forgotten(slurm, recorded):
    """A second job of the allocation, which squeue still lists, says nothing of its time."""
    slurm.started()
    slurm.ended()
    slurm.listed = rows(("61_0", "COMPLETED"), elapsed_s=3.0)
    slurm.known = {**slurm.listed, **(rows(("57_0", "COMPLETED"), elapsed_s=140.0) if recorded else {})}
    assert times(slurm.observe()) == ({A: 140.0} if recorded else {})
    for _ in range(3):
        assert times(slurm.observe(after=1000)) == {}
    assert slurm.asked == ["57_0"]


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("requeue", [False, True])
def test_a_job_that_runs_on_after_its_end_is_ended(slurm, refuses, requeue):
    """Unless Slurm may have started it again."""
    slurm.refuses = refuses
    slurm.launcher._config = with_launcher(grace_s=GRACE_S, requeue=requeue)
    slurm.started()
    slurm.ended()
    for after in (0.0, GRACE_S):
        assert slurm.observe(("57_0", "RUNNING"), after=after).leaving == {A}
        assert slurm.cancelled == []
    slurm.observe(after=1)
    assert slurm.cancelled == ([] if requeue else [["57_0"]])


def test_a_job_that_has_not_given_its_nodes_back_leaves_and_is_timed(slurm):
    """Slurm counts no epilog: its time goes from the first to the last answer of squeue that shows it."""
    slurm.started()
    slurm.observe()
    slurm.ended()
    slurm.polled = False
    assert slurm.observe(after=5).leaving == {A}, "squeue was asked before its end"
    slurm.polled, slurm.listed = True, rows(("57_0", "COMPLETING"), elapsed_s=100.0, nodes="gpu07")
    for held_s, notes in ((100.0, 0), (100.0 + STUCK_S, 1)):
        look = slurm.observe(after=STUCK_S if notes else 5)
        assert (look.leaving, look.running, look.held_s, len(look.notes)) == ({A}, set(), {A: held_s}, notes)
    assert "has not freed gpu07 for 5 minutes" in look.notes[0]
    slurm.listed = rows(("57_0", "COMPLETED"), elapsed_s=100.0)
    look = slurm.observe(after=30)
    assert (look.leaving, times(look), slurm.cancelled) == (set(), {A: 100.0 + STUCK_S}, [])


@pytest.mark.parametrize("squeue_answers", [False, True])
def test_nothing_is_submitted_again_before_squeue_has_answered(slurm, monkeypatch, squeue_answers):
    """Whether the first try made a job, only squeue knows."""
    tries, messages = [], []

    def submit(path, script, environment):
        tries.append(slurm.now)
        if len(tries) == 1:
            raise CommandError("Socket timed out on send/recv operation")
        return "99"

    def sleep(seconds):
        slurm.now += seconds
        if slurm.now > 300.0:
            slurm.polled, slurm.listed = True, rows(("60_0", "PENDING"))

    monkeypatch.setattr(slurm_module, "array_script", lambda *_, **__: None)
    monkeypatch.setattr(slurm_module, "submit", submit)
    slurm.sleep, slurm.asked_at, slurm.polled = sleep, -1.0, squeue_answers
    jobs = slurm.launcher.submit([SimpleNamespace(name=A, nodes=1)], [], messages.append)
    assert jobs == {A: {"job_id": "99_0" if squeue_answers else "60_0", "name": JOB_NAME}}
    assert len(tries) == 1 + squeue_answers
    waited = "squeue does not answer; no jobs are submitted until it does" in messages
    assert waited != squeue_answers


BANNER = "Welcome! Your last job 1 was not found: invalid account\n"


@pytest.mark.parametrize(
    ("answer", "number"),
    [("Submitted batch job 99\n", 99), (f"{BANNER}Submitted batch job 99 on cluster alps\nlogged job 99\n", 99),
     (f"{BANNER}99;alps\n", 99), (BANNER, 60), ("", 60), ("1\nSubmitted batch job 99\n", 60)],
)  # fmt: skip
def test_a_job_number_is_read_from_no_banner(slurm, monkeypatch, answer, number):
    """Where the output names no job, or two, squeue is asked for the job by its name."""
    submitted = []
    slurm.launcher._folder.path.mkdir()
    monkeypatch.setattr(slurm_module, "array_script", lambda *_, **__: "")
    monkeypatch.setattr(slurm_module, "ask", lambda *words, **_: submitted.append(words) or answer)
    slurm.asked_at, slurm.listed = 1.0, rows(("60_0", "PENDING"))
    slurm.sleep = lambda seconds: setattr(slurm, "now", slurm.now + seconds)
    slurm.now = 2.0
    (job,) = slurm.launcher.submit([SimpleNamespace(name=A, nodes=1)], [], lambda note: None).values()
    assert (job["job_id"], len(submitted)) == (f"{number}_0", 1)
