"""What a launcher makes of squeue and sacct; both are played here, answer by answer."""

from collections import Counter

import pytest

from tests.unit.allocations import CONFIG, with_launcher
from ultrabench.folder import SweepFolder
from ultrabench.launchers import slurm as slurm_module
from ultrabench.launchers.slurm import END_GRACE_S, STALE_ACCOUNTING_S, SlurmLauncher
from ultrabench.launchers.slurm_job import Job, find
from ultrabench.launchers.slurm_query import Answer
from ultrabench.result import Status
from ultrabench.state import AllocationState, AttemptKey

A, B = "n1-0000aaaa.0", "n1-0000aaaa.1"
GRACE_S = 60.0


class Query:
    """Gives the answers a test prepares; time passes only where the test says so."""

    def __init__(self):
        self.now = 0.0
        self.asked_at = 0.0
        self.counts = Counter()
        self.listed, self.known = {}, {}
        self.error = None
        self.silent = False
        self.polled = True
        self.asked = []

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


class Cluster:
    """A launcher on a made-up Slurm, and the allocations that it is asked about."""

    def __init__(self, folder, clock):
        self.query, self.clock = Query(), clock
        choice = with_launcher(grace_s=GRACE_S).launcher
        self.launcher = SlurmLauncher(
            SweepFolder(folder / "quick"), choice, CONFIG.hardware, self.query,
            max_jobs=8, max_nodes=8, max_array=100, max_limit_s=9e9,
        )  # fmt: skip
        self.held = {}

    def submitted(self, name, job_id="57_0"):
        self.held[name] = AllocationState(
            name=name, job=job_id and {"job_id": job_id}, tasks=(AttemptKey("a", 0, 0),)
        )

    def ended(self, name, reason="all tasks done"):
        self.held[name].ends[0] = {"reason": reason, "elapsed_s": 1.0, "avoid": []}

    def lists(self, *rows):
        """squeue's rows: (id, state) or (id, state, name of the job)."""
        self.query.listed = {job_id: row(job_id, *more) for job_id, *more in rows}

    def accounts(self, *rows):
        self.query.known = {job_id: row(job_id, *more) for job_id, *more in rows}

    def look(self, after=0.0):
        self.query.now += after
        self.clock.now = self.query.now
        return self.launcher.look(self.held)


def row(job_id, state, name="ub-quick-n1-0000aaaa", **more):
    return Job(job_id=job_id, raw_id="99", name=name, state=state, **more)


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


def nothing_happens(sight):
    assert sight.alive == {A}
    assert sight.gone == {}


def test_before_the_first_answer_everything_may_live(slurm):
    slurm.query.silent = True
    for _ in range(3):
        sight = slurm.look(after=1000)
        nothing_happens(sight)
        assert sight.queued == set()
        assert sight.notes == ("waiting for an answer of squeue",)


@pytest.mark.parametrize(
    ("state", "queued"),
    [("PENDING", True), ("REQUEUE_HOLD", True), ("RUNNING", False), ("COMPLETING", False), ("CONFIGURING", False),
     ("SUSPENDED", False), ("FROBNICATED", False), ("", False), ("running", False)],
)  # fmt: skip
def test_what_squeue_lists_lives(slurm, state, queued):
    slurm.lists(("57_0", state))
    for _ in range(3):
        sight = slurm.look(after=1000)
        nothing_happens(sight)
        assert sight.queued == ({A} if queued else set())
        assert sight.running == ({A} if state == "RUNNING" else set())
        assert sight.jobs == {A: {"job_id": "57_0", "name": "ub-quick-n1-0000aaaa"}}
    assert slurm.query.asked == []


def test_a_word_nobody_knows_is_told(slurm):
    slurm.lists(("57_0", "FROBNICATED"))
    assert slurm.look().notes == (
        "job 57_0 is FROBNICATED: is in the state FROBNICATED, which is not known here",
    )
    slurm.lists(("57_0", "REQUEUE_HOLD"))
    assert "held" in slurm.look().notes[0]
    slurm.lists(("57_0", "RUNNING"))
    assert slurm.look().notes == ()


@pytest.mark.parametrize(
    ("state", "status"),
    [("COMPLETED", Status.LOST), ("TIMEOUT", Status.CANCELLED), ("NODE_FAIL", Status.NODE_FAIL),
     ("PREEMPTED", Status.PREEMPTED), ("CANCELLED by 1000", Status.CANCELLED), ("OUT_OF_ME+", Status.OOM)],
)  # fmt: skip
def test_a_job_that_is_over_leaves_its_agents_a_moment_to_say_so(slurm, state, status):
    slurm.lists(("57_0", state))
    nothing_happens(slurm.look())
    nothing_happens(slurm.look(after=END_GRACE_S - 1))
    sight = slurm.look(after=1)
    assert (sight.alive, sight.queued) == (frozenset(), frozenset())
    assert sight.gone[A].status == status
    assert sight.gone[A].reason == f"Slurm ended job 57_0: {state}"


def test_what_the_agents_said_in_time_is_enough(slurm):
    slurm.lists(("57_0", "COMPLETED"))
    nothing_happens(slurm.look())
    slurm.ended(A)
    sight = slurm.look(after=1000)
    assert (sight.alive, sight.gone) == (frozenset(), {})


def test_a_job_that_squeue_forgot_is_looked_up(slurm):
    slurm.accounts(("57_0", "NODE_FAIL"))
    nothing_happens(slurm.look())
    nothing_happens(slurm.look(after=GRACE_S - 1))
    assert slurm.query.asked == []
    gone = slurm.look(after=1).gone[A]
    assert (gone.status, gone.reason) == (Status.NODE_FAIL, "Slurm ended job 57_0: NODE_FAIL")


def test_the_time_it_held_its_nodes_is_told(slurm):
    slurm.query.known = {"57_0": row("57_0", "TIMEOUT", elapsed_s=77.0, reason="TimeLimit")}
    slurm.look()
    gone = slurm.look(after=GRACE_S).gone[A]
    assert gone.elapsed_s == 77.0
    assert gone.reason == "Slurm ended job 57_0: TIMEOUT (TimeLimit)"


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "WHATEVER"])
def test_accounting_that_lags_is_believed_for_a_while(slurm, state):
    slurm.accounts(("57_0", state))
    nothing_happens(slurm.look())
    nothing_happens(slurm.look(after=GRACE_S))
    nothing_happens(slurm.look(after=STALE_ACCOUNTING_S - GRACE_S - 1))
    gone = slurm.look(after=1).gone[A]
    assert (gone.status, gone.reason) == (Status.LOST, f"squeue has forgotten job 57_0, sacct says {state}")


@pytest.mark.parametrize("job_id", ["57_0", None])
def test_without_accounting_a_missing_job_is_lost(slurm, job_id):
    slurm.submitted(A, job_id)
    nothing_happens(slurm.look())
    nothing_happens(slurm.look(after=GRACE_S - 1))
    gone = slurm.look(after=1).gone[A]
    assert gone.status == Status.LOST
    assert gone.reason == ("Slurm does not know job 57_0" if job_id else f"Slurm does not know a job of {A}")


def test_a_job_that_comes_back_begins_anew(slurm):
    nothing_happens(slurm.look())
    nothing_happens(slurm.look(after=GRACE_S - 1))
    slurm.lists(("57_0", "RUNNING"))
    nothing_happens(slurm.look(after=2))
    slurm.lists()
    nothing_happens(slurm.look(after=GRACE_S))
    nothing_happens(slurm.look(after=GRACE_S - 1))


def test_a_lost_answer_of_sbatch_is_no_lost_job(slurm):
    slurm.submitted(A, None)
    slurm.lists(("61_0", "RUNNING"))
    sight = slurm.look(after=1000)
    nothing_happens(sight)
    assert sight.jobs[A]["job_id"] == "61_0"


@pytest.mark.parametrize("first", ["COMPLETED", "CANCELLED", "RUNNING"])
@pytest.mark.parametrize("job_ids", [("57_0", "61_0"), ("61_0", "57_0")])
def test_of_two_jobs_of_one_name_the_one_that_lives_counts(slurm, first, job_ids):
    slurm.lists((job_ids[0], first), (job_ids[1], "PENDING"))
    for _ in range(3):
        nothing_happens(slurm.look(after=1000))
    slurm.lists((job_ids[0], "FAILED"), (job_ids[1], "FAILED"))
    nothing_happens(slurm.look())
    assert A in slurm.look(after=END_GRACE_S).gone


def test_a_requeued_job_lives_again_though_its_agents_said_goodbye(slurm):
    slurm.ended(A, "the allocation was ended by SIGTERM")
    slurm.lists(("57_0", "PENDING"))
    sight = slurm.look(after=1000)
    assert (sight.alive, sight.queued, sight.gone) == ({A}, {A}, {})
    slurm.lists(("57_0", "COMPLETING"))
    sight = slurm.look(after=1000)
    assert (sight.alive, sight.queued, sight.gone) == (frozenset(), frozenset(), {})


def test_answers_that_are_stale_bury_nobody(slurm):
    nothing_happens(slurm.look())
    slurm.query.error = "squeue: no answer within 20 s"
    for _ in range(100):
        sight = slurm.look(after=100)
        nothing_happens(sight)
    assert sight.notes == (
        "squeue does not answer (squeue: no answer within 20 s); jobs go on, asking again",
    )
    slurm.query.error = None
    slurm.lists(("57_0", "RUNNING"))
    nothing_happens(slurm.look())


@pytest.mark.parametrize("grace_s", [0.0, 1.0, GRACE_S])
def test_an_answer_older_than_a_submission_says_nothing_of_it(slurm, grace_s):
    slurm.launcher._choice = with_launcher(grace_s=grace_s).launcher
    slurm.lists(("57_0", "RUNNING"))
    slurm.look()
    slurm.query.polled = False
    slurm.submitted(B, "58_0")
    for _ in range(3):
        assert slurm.look(after=GRACE_S).alive == {A, B}
    slurm.query.polled = True
    # Only from here on its absence counts.
    sight = slurm.look()
    assert (B in sight.gone) == (grace_s == 0)
    if grace_s:
        assert slurm.look(after=grace_s - 0.5).alive == {A, B}
        assert B in slurm.look(after=0.5).gone


@pytest.mark.parametrize(
    "name", ["ub-quick-2-n1-0000aaaa", "ub-quick-n1-0000bbbb", "ub-quic-n1-0000aaaa", "ub-quick-"]
)
def test_jobs_of_others_whose_names_begin_alike_are_not_ours(slurm, name):
    slurm.lists(("60_0", "RUNNING", name))
    nothing_happens(slurm.look())
    sight = slurm.look(after=GRACE_S)
    assert (sight.alive, sight.jobs, list(sight.gone)) == (frozenset(), {}, [A])


def test_elements_that_were_cancelled_with_their_array_are_found(slurm):
    slurm.submitted(B, "57_1")
    slurm.lists(("57", "CANCELLED"), ("57_0", "RUNNING"))
    assert slurm.look().alive == {A, B}
    sight = slurm.look(after=GRACE_S)
    assert sight.alive == {A}
    assert (sight.gone[B].status, sight.gone[B].reason) == (
        Status.CANCELLED,
        "Slurm ended job 57_1: CANCELLED",
    )


def test_what_a_person_has_to_mend_is_told_once(slurm):
    slurm.submitted(B, "57_1")
    reason = {"reason": "PartitionTimeLimit"}
    slurm.query.listed = {i: row(i, "PENDING", **reason) for i in ("57_0", "57_1")}
    (note,) = slurm.look().notes
    assert note.startswith("jobs wait for PartitionTimeLimit: ")
    slurm.query.listed = {"57_0": row("57_0", "PENDING", reason="Resources")}
    assert slurm.look().notes == ()
