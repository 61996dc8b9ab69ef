"""What a launcher makes of squeue and sacct; both are played here, answer by answer."""

from dataclasses import dataclass, replace

import pytest

from tests.unit.allocations import CONFIG, with_launcher
from ultrabench.errors import ClusterError
from ultrabench.launchers.launcher import origin
from ultrabench.launchers.slurm import launcher as slurm_module
from ultrabench.launchers.slurm.command import CommandError
from ultrabench.launchers.slurm.job import SlurmJob, find
from ultrabench.launchers.slurm.launcher import END_GRACE_S, STALE_ACCOUNTING_S, SlurmLauncher
from ultrabench.launchers.slurm.query import Answer
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import AllocationEnded, LeadingAgent, Start
from ultrabench.store.folder import SweepFolder
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.store.state import AllocationState

A, B = "n1-0000aaaa.0", "n1-0000aaaa.1"
GRACE_S = 60.0


class Query:
    """Gives the answers a test prepares; time passes only where the test says so."""

    def __init__(self):
        self.now = 0.0
        self.asked_at = 0.0
        self.listed, self.known = {}, {}
        self.error = None
        self.silent = False
        self.polled = True
        self.asked, self.cancelled = [], []
        self.refuses = False

    def jobs(self, prefix, *, fresh=False):
        if self.silent:
            return None
        if self.error is None and self.polled:
            self.asked_at = self.now
        jobs = {i: job for i, job in self.listed.items() if job.name.startswith(prefix)}
        return Answer(jobs=jobs, age_s=self.now - self.asked_at, error=self.error)

    def accounting(self, job_ids):
        self.asked += job_ids
        found = ((job_id, find(self.known, job_id)) for job_id in job_ids)
        return {job_id: job for job_id, job in found if job}

    def cancel(self, job_ids):
        self.cancelled.append(sorted(job_ids))
        if self.refuses:
            raise ClusterError("scancel: no answer")


class Cluster:
    """A launcher on a made-up Slurm, and the allocations that it is asked about."""

    def __init__(self, folder, clock):
        self.query, self.clock = Query(), clock
        choice = with_launcher(grace_s=GRACE_S).launcher
        self.launcher = SlurmLauncher(
            SweepFolder(folder / "quick"), choice, CONFIG.hardware, self.query,
            JobLimits(max_jobs=8, max_nodes=8, max_array=100, max_limit_s=9e9),
        )  # fmt: skip
        self.held = {}

    def submitted(self, name, job_id="57_0"):
        self.held[name] = AllocationState(
            name=name, job=job_id and {"job_id": job_id}, tasks=(AttemptKey("a", 0, 0),)
        )

    def started(self, name, job_id="57_0", restart=0):
        """An agent of this job has claimed the allocation and said so."""
        self.held[name].agents += (LeadingAgent(host="gpu01", job=Start(job_id=job_id, restart=restart)),)

    def ended(self, name, reason="all tasks done", job_id="57_0", restart=0):
        start = Start(job_id=job_id, restart=restart)
        end = AllocationEnded(allocation=name, job=start, reason=reason, source="agent", elapsed_s=1.0)
        self.held[name].ends[start] = end

    def timed(self, name, seconds):
        """What a reconciler makes of the times of a look."""
        held = self.held[name]
        held.ends[held.start] = replace(held.end, held_s=seconds)

    def lists(self, *rows):
        """squeue's rows: (id, state) or (id, state, name of the job)."""
        self.query.listed = {job_id: row(job_id, *more) for job_id, *more in rows}

    def accounts(self, *rows):
        self.query.known = {job_id: row(job_id, *more) for job_id, *more in rows}

    def observe(self, after=0.0):
        self.query.now += after
        self.clock.now = self.query.now
        return self.launcher.observe(self.held)


def row(job_id, state, name="ub-quick-n1-0000aaaa", **more):
    return SlurmJob(job_id=job_id, name=name, state=state, **more)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(slurm_module, "time", clock)
    made = Cluster(tmp_path, clock)
    made.submitted(A)
    return made


def nothing_happens(seen):
    assert seen.alive == {A}
    assert seen.ended_jobs == {}


def test_before_the_first_answer_everything_may_live(slurm):
    slurm.query.silent = True
    for _ in range(3):
        seen = slurm.observe(after=1000)
        nothing_happens(seen)
        assert seen.queued == set()
        assert seen.notes == ("waiting for an answer of squeue",)


@pytest.mark.parametrize(
    ("state", "queued"),
    [("PENDING", True), ("REQUEUE_HOLD", True), ("RUNNING", False), ("COMPLETING", False), ("CONFIGURING", False),
     ("SUSPENDED", False), ("FROBNICATED", False), ("", False), ("running", False)],
)  # fmt: skip
def test_what_squeue_lists_lives(slurm, state, queued):
    slurm.lists(("57_0", state))
    for _ in range(3):
        seen = slurm.observe(after=1000)
        nothing_happens(seen)
        assert seen.queued == ({A} if queued else set())
        assert seen.running == ({A} if state == "RUNNING" else set())
        assert seen.jobs == {A: {"job_id": "57_0", "name": "ub-quick-n1-0000aaaa"}}
    assert slurm.query.asked == []


def test_a_word_nobody_knows_is_told(slurm):
    slurm.lists(("57_0", "FROBNICATED"))
    assert slurm.observe().notes == (
        "job 57_0 is FROBNICATED: is in the state FROBNICATED, which is not known here",
    )
    slurm.lists(("57_0", "REQUEUE_HOLD"))
    assert "held" in slurm.observe().notes[0]
    slurm.lists(("57_0", "RUNNING"))
    assert slurm.observe().notes == ()


@pytest.mark.parametrize(
    ("state", "status"),
    [("COMPLETED", Status.LOST), ("TIMEOUT", Status.CANCELLED), ("NODE_FAIL", Status.NODE_FAIL),
     ("PREEMPTED", Status.PREEMPTED), ("CANCELLED by 1000", Status.CANCELLED), ("OUT_OF_MEMORY", Status.OOM)],
)  # fmt: skip
def test_a_job_that_is_over_leaves_its_agents_a_moment_to_say_so(slurm, state, status):
    slurm.lists(("57_0", state))
    nothing_happens(slurm.observe())
    nothing_happens(slurm.observe(after=END_GRACE_S - 1))
    seen = slurm.observe(after=1)
    assert (seen.alive, seen.queued) == (frozenset(), frozenset())
    assert seen.ended_jobs[A].status == status
    assert seen.ended_jobs[A].reason == f"Slurm ended job 57_0: {state}"


def test_what_the_agents_said_in_time_is_enough(slurm):
    slurm.lists(("57_0", "COMPLETED"))
    nothing_happens(slurm.observe())
    slurm.ended(A)
    seen = slurm.observe(after=1000)
    assert (seen.alive, seen.ended_jobs) == (frozenset(), {})


def test_a_job_that_squeue_forgot_is_looked_up(slurm):
    slurm.accounts(("57_0", "NODE_FAIL"))
    nothing_happens(slurm.observe())
    nothing_happens(slurm.observe(after=GRACE_S - 1))
    assert slurm.query.asked == []
    gone = slurm.observe(after=1).ended_jobs[A]
    assert (gone.status, gone.reason) == (Status.NODE_FAIL, "Slurm ended job 57_0: NODE_FAIL")


def test_the_time_it_held_its_nodes_is_told(slurm):
    slurm.query.known = {"57_0": row("57_0", "TIMEOUT", elapsed_s=77.0, reason="TimeLimit")}
    slurm.observe()
    gone = slurm.observe(after=GRACE_S).ended_jobs[A]
    assert gone.elapsed_s == 77.0
    assert gone.reason == "Slurm ended job 57_0: TIMEOUT (TimeLimit)"


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "WHATEVER"])
def test_accounting_that_lags_is_believed_for_a_while(slurm, state):
    slurm.accounts(("57_0", state))
    nothing_happens(slurm.observe())
    nothing_happens(slurm.observe(after=GRACE_S))
    nothing_happens(slurm.observe(after=STALE_ACCOUNTING_S - GRACE_S - 1))
    gone = slurm.observe(after=1).ended_jobs[A]
    assert (gone.status, gone.reason) == (Status.LOST, f"squeue has forgotten job 57_0, sacct says {state}")


@pytest.mark.parametrize("job_id", ["57_0", None])
def test_without_accounting_a_missing_job_is_lost(slurm, job_id):
    slurm.submitted(A, job_id)
    nothing_happens(slurm.observe())
    nothing_happens(slurm.observe(after=GRACE_S - 1))
    gone = slurm.observe(after=1).ended_jobs[A]
    assert gone.status == Status.LOST
    assert gone.reason == ("Slurm does not know job 57_0" if job_id else f"Slurm does not know a job of {A}")


def test_a_job_that_comes_back_begins_anew(slurm):
    nothing_happens(slurm.observe())
    nothing_happens(slurm.observe(after=GRACE_S - 1))
    slurm.lists(("57_0", "RUNNING"))
    nothing_happens(slurm.observe(after=2))
    slurm.lists()
    nothing_happens(slurm.observe(after=GRACE_S))
    nothing_happens(slurm.observe(after=GRACE_S - 1))


def test_a_lost_answer_of_sbatch_is_no_lost_job(slurm):
    slurm.submitted(A, None)
    slurm.lists(("61_0", "RUNNING"))
    seen = slurm.observe(after=1000)
    nothing_happens(seen)
    assert seen.jobs[A]["job_id"] == "61_0"


@pytest.mark.parametrize("first", ["COMPLETED", "CANCELLED", "RUNNING"])
@pytest.mark.parametrize("job_ids", [("57_0", "61_0"), ("61_0", "57_0")])
def test_of_two_jobs_of_one_name_the_one_that_lives_counts(slurm, first, job_ids):
    slurm.lists((job_ids[0], first), (job_ids[1], "PENDING"))
    for _ in range(3):
        nothing_happens(slurm.observe(after=1000))
    slurm.lists((job_ids[0], "FAILED"), (job_ids[1], "FAILED"))
    nothing_happens(slurm.observe())
    assert A in slurm.observe(after=END_GRACE_S).ended_jobs


def test_a_requeued_job_lives_again_though_its_agents_said_goodbye(slurm):
    slurm.ended(A, "the allocation was ended by SIGTERM")
    slurm.lists(("57_0", "PENDING"))
    seen = slurm.observe(after=1000)
    assert (seen.alive, seen.queued, seen.ended_jobs) == ({A}, {A}, {})
    slurm.lists(("57_0", "COMPLETING"))
    seen = slurm.observe(after=1000)
    assert (seen.alive, seen.queued, seen.ended_jobs) == (frozenset(), frozenset(), {})


def test_answers_that_are_stale_bury_nobody(slurm):
    nothing_happens(slurm.observe())
    slurm.query.error = "squeue: no answer within 20 s"
    for _ in range(100):
        seen = slurm.observe(after=100)
        nothing_happens(seen)
    assert seen.notes == ("squeue does not answer (squeue: no answer within 20 s); jobs go on, asking again",)
    slurm.query.error = None
    slurm.lists(("57_0", "RUNNING"))
    nothing_happens(slurm.observe())


@pytest.mark.parametrize("grace_s", [0.0, 1.0, GRACE_S])
def test_an_answer_older_than_a_submission_says_nothing_of_it(slurm, grace_s):
    slurm.launcher._choice = with_launcher(grace_s=grace_s).launcher
    slurm.lists(("57_0", "RUNNING"))
    slurm.observe()
    slurm.query.polled = False
    slurm.submitted(B, "58_0")
    for _ in range(3):
        assert slurm.observe(after=GRACE_S).alive == {A, B}
    slurm.query.polled = True
    # Only from here on its absence counts.
    seen = slurm.observe()
    assert (B in seen.ended_jobs) == (grace_s == 0)
    if grace_s:
        assert slurm.observe(after=grace_s - 0.5).alive == {A, B}
        assert B in slurm.observe(after=0.5).ended_jobs


@pytest.mark.parametrize(
    "name", ["ub-quick-2-n1-0000aaaa", "ub-quick-n1-0000bbbb", "ub-quic-n1-0000aaaa", "ub-quick-"]
)
def test_jobs_of_others_whose_names_begin_alike_are_not_ours(slurm, name):
    slurm.lists(("60_0", "RUNNING", name))
    nothing_happens(slurm.observe())
    seen = slurm.observe(after=GRACE_S)
    assert (seen.alive, seen.jobs, list(seen.ended_jobs)) == (frozenset(), {}, [A])


def test_elements_that_were_cancelled_with_their_array_are_found(slurm):
    slurm.submitted(B, "57_1")
    slurm.lists(("57", "CANCELLED"), ("57_0", "RUNNING"))
    assert slurm.observe().alive == {A, B}
    seen = slurm.observe(after=GRACE_S)
    assert seen.alive == {A}
    assert (seen.ended_jobs[B].status, seen.ended_jobs[B].reason) == (
        Status.CANCELLED,
        "Slurm ended job 57_1: CANCELLED",
    )


def test_what_a_person_has_to_mend_is_told_once(slurm):
    slurm.submitted(B, "57_1")
    reason = {"reason": "PartitionTimeLimit"}
    slurm.query.listed = {i: row(i, "PENDING", **reason) for i in ("57_0", "57_1")}
    (note,) = slurm.observe().notes
    assert note.startswith("jobs wait for PartitionTimeLimit: ")
    slurm.query.listed = {"57_0": row("57_0", "PENDING", reason="Resources")}
    assert slurm.observe().notes == ()


def test_what_it_submits_is_of_this_cluster(slurm):
    assert slurm.launcher.by == origin("slurm")


# a submission that was made twice


@pytest.mark.parametrize("job_ids", [("57_0", "61_0"), ("61_0", "57_0")])
def test_the_second_of_two_jobs_is_cancelled_once_while_it_waits(slurm, job_ids):
    owner, second = job_ids
    slurm.lists((owner, "RUNNING"), (second, "PENDING"))
    slurm.observe()
    assert slurm.query.cancelled == [], "nobody knows yet which of them will own it"
    slurm.started(A, owner)
    for _ in range(3):
        seen = slurm.observe(after=1000)
        nothing_happens(seen)
        assert (seen.queued, seen.running) == (frozenset(), {A})
        assert seen.jobs[A]["job_id"] == owner
    assert slurm.query.cancelled == [[second]]


def test_the_second_job_never_revives_an_allocation(slurm):
    slurm.started(A)
    slurm.ended(A)
    slurm.lists(("57_0", "COMPLETED"), ("61_0", "PENDING"))
    for _ in range(3):
        seen = slurm.observe(after=1000)
        assert (seen.alive, seen.queued, seen.ended_jobs, seen.jobs) == (frozenset(), frozenset(), {}, {})
    assert slurm.query.cancelled == [["61_0"]]
    slurm.lists(("61_0", "RUNNING"))
    seen = slurm.observe(after=1000)
    assert (seen.alive, seen.running, seen.leaving) == (frozenset(), frozenset(), frozenset())
    # What runs leaves by itself: its agent finds the claim.
    assert slurm.query.cancelled == [["61_0"]]


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETED"])
def test_the_second_job_neither_keeps_an_allocation_alive_nor_ends_it(slurm, state):
    slurm.started(A)
    slurm.lists(("57_0", "NODE_FAIL"), ("61_0", state))
    nothing_happens(slurm.observe())
    gone = slurm.observe(after=END_GRACE_S).ended_jobs[A]
    assert (gone.status, gone.reason) == (Status.NODE_FAIL, "Slurm ended job 57_0: NODE_FAIL")
    slurm.lists(("57_0", "RUNNING"), ("61_0", "COMPLETED"))
    nothing_happens(slurm.observe(after=1000))


def test_the_owner_is_looked_up_and_not_the_job_that_sbatch_answered(slurm):
    """The answer that was lost was that of the job which runs."""
    slurm.submitted(A, "61_0")
    slurm.started(A, "57_0")
    slurm.accounts(("57_0", "TIMEOUT"), ("61_0", "COMPLETED"))
    slurm.observe()
    assert slurm.observe(after=GRACE_S).ended_jobs[A].reason == "Slurm ended job 57_0: TIMEOUT"
    assert slurm.query.asked == ["57_0"]


def test_second_jobs_that_cannot_be_cancelled_do_no_harm(slurm):
    slurm.query.refuses = True
    slurm.started(A)
    slurm.lists(("57_0", "RUNNING"), ("61_0", "PENDING"), ("62_0", "REQUEUE_HOLD"), ("63_0", "RUNNING"))
    for _ in range(3):
        nothing_happens(slurm.observe(after=1000))
    assert slurm.query.cancelled == [["61_0", "62_0"]]


def test_a_stale_answer_cancels_nothing(slurm):
    slurm.lists(("57_0", "RUNNING"), ("61_0", "PENDING"))
    slurm.observe()
    slurm.query.error = "squeue: no answer within 20 s"
    slurm.started(A)
    nothing_happens(slurm.observe(after=10))
    assert slurm.query.cancelled == []
    slurm.query.error = None
    nothing_happens(slurm.observe(after=10))
    assert slurm.query.cancelled == [["61_0"]]


def test_a_requeued_owner_is_no_second_job(slurm):
    slurm.started(A)
    slurm.lists(("57_0", "PENDING"))
    seen = slurm.observe()
    nothing_happens(seen)
    assert (seen.queued, slurm.query.cancelled) == ({A}, [])


# for how long nodes were held


def listed_for(seconds, state="COMPLETED", job_id="57_0"):
    return {job_id: row(job_id, state, elapsed_s=seconds)}


def test_jobs_that_hold_nodes_are_timed(slurm):
    """Also those that are set up, or whose agents have said goodbye; none that wait."""
    for state, held_s in (("CONFIGURING", 7.0), ("RUNNING", 8.0), ("COMPLETING", 9.0)):
        slurm.query.listed = listed_for(held_s, state)
        assert slurm.observe().held_s == {A: held_s}
    slurm.query.listed = listed_for(0.0, "PENDING")
    assert slurm.observe().held_s == {}


def test_an_ended_job_is_timed_by_squeue_until_that_was_taken_down(slurm):
    slurm.started(A)
    slurm.ended(A)
    slurm.query.listed = listed_for(130.0, "COMPLETING")
    assert slurm.observe().timed == {}, "its nodes are not free yet"
    slurm.query.listed = listed_for(135.0)
    for _ in range(2):
        assert slurm.observe(after=10).timed == {A: 135.0}
    slurm.timed(A, 135.0)
    assert slurm.observe(after=10).timed == {}
    assert slurm.query.asked == []


def test_sacct_is_asked_once_for_what_squeue_has_forgotten(slurm):
    slurm.started(A)
    slurm.ended(A)
    slurm.query.known = listed_for(140.0)
    assert slurm.observe().timed == {A: 140.0}
    for _ in range(3):
        assert slurm.observe(after=1000).timed == {}
    assert slurm.query.asked == ["57_0"]


def test_where_sacct_knows_nothing_it_is_not_asked_again(slurm):
    slurm.started(A)
    slurm.ended(A)
    for _ in range(3):
        assert slurm.observe(after=1000).timed == {}
    assert slurm.query.asked == ["57_0"]


def test_what_never_started_or_is_not_over_is_not_timed(slurm):
    slurm.submitted(B, "58_0")
    slurm.ended(A)
    slurm.started(B, "58_0")
    slurm.query.listed = listed_for(50.0) | {"58_0": row("58_0", "RUNNING", "ub-quick-n1-0000aaaa")}
    seen = slurm.observe()
    assert (seen.timed, slurm.query.asked) == ({}, [])


def test_the_time_of_a_second_job_is_not_that_of_the_allocation(slurm):
    slurm.started(A)
    slurm.ended(A)
    slurm.query.listed = listed_for(3.0, job_id="61_0")
    slurm.query.known = listed_for(140.0) | listed_for(3.0, job_id="61_0")
    assert slurm.observe().timed == {A: 140.0}
    assert slurm.query.asked == ["57_0"]


def test_the_end_of_a_job_that_ended_by_itself_carries_its_time(slurm):
    slurm.started(A)
    slurm.query.listed = listed_for(77.0, "NODE_FAIL")
    slurm.observe()
    assert slurm.observe(after=END_GRACE_S).ended_jobs[A].elapsed_s == 77.0


# a submission without an answer


@pytest.fixture
def lost_answer(slurm, monkeypatch):
    """sbatch gives no answer, the first times; `slurm.clock.sleep` passes the time."""
    tries = []

    def submit(script, environment):
        tries.append(slurm.query.now)
        if len(tries) == 1:
            raise CommandError("Socket timed out on send/recv operation")
        return "99"

    def sleep(seconds):
        slurm.query.now += seconds
        slurm.clock.now = slurm.query.now

    slurm.clock.sleep = sleep
    monkeypatch.setattr(slurm_module, "array_script", lambda *what: None)
    monkeypatch.setattr(slurm_module, "submit", submit)
    return tries


@dataclass
class Submitted:
    name: str
    nodes: int = 1


def test_nothing_is_submitted_again_before_squeue_has_answered(slurm, lost_answer):
    """Whether the first try made a job, only squeue knows."""
    told, jobs = [], slurm.query.jobs
    slurm.query.polled = False
    slurm.query.asked_at = -1.0

    def answer(prefix, *, fresh=False):
        if slurm.query.now > 300.0:
            slurm.query.polled = True
            slurm.lists(("60_0", "PENDING"))
        return jobs(prefix, fresh=fresh)

    slurm.query.jobs = answer
    found = slurm.launcher.submit([Submitted(A)], [], told.append)
    assert found == {A: {"job_id": "60_0", "name": "ub-quick-n1-0000aaaa"}}
    assert len(lost_answer) == 1
    assert told.count("squeue does not answer; nothing is submitted before it does") == 5


def test_what_squeue_does_not_list_is_submitted_again(slurm, lost_answer):
    jobs = slurm.query.jobs

    def answer(prefix, *, fresh=False):
        slurm.clock.sleep(0.1)
        found = jobs(prefix, fresh=fresh)
        slurm.clock.sleep(0.1)
        return found

    slurm.query.jobs = answer
    found = slurm.launcher.submit([Submitted(A)], [], lambda note: None)
    assert found == {A: {"job_id": "99_0", "name": "ub-quick-n1-0000aaaa"}}
    assert len(lost_answer) == 2
