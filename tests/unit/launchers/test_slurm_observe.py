"""What a launcher makes of squeue and sacct; both are played here, answer by answer."""

import math
from dataclasses import replace

import pytest

from tests.unit.allocations import first_allocations, open_sweep, with_launcher
from tests.unit.launchers import played_slurm
from tests.unit.launchers.played_slurm import GRACE_S, JOB_NAME, A, B, rows
from ultrabench.launchers.slurm.launcher import END_GRACE_S, STALE_ACCOUNTING_S
from ultrabench.result import Status
from ultrabench.store.folder import SweepFolder
from ultrabench.store.jobs_seen import JobEnd, JobsSeen

slurm = played_slurm.slurm


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
        assert look.notes == ((f"job 57_0 {note}",) if note else ())
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


# a sweep that was renamed


@pytest.mark.parametrize(
    ("planned", "name"),
    [
        ({"job": {"job_id": "57_0", "name": "ub-old-n1-0000aaaa"}}, "ub-old-n1-0000aaaa"),
        ({"sweep": "old", "sweep_id": "c0ffee00c0ffee00"}, "ub-old-c0ffee00-n1-0000aaaa"),
        ({}, "ub-quick-n1-0000aaaa"),
    ],
)
def test_a_job_keeps_the_name_that_its_sweep_had(slurm, planned, name):
    """Jobs of earlier versions have no id in their names."""
    for field, value in planned.items():
        setattr(slurm.held[A], field, value)
    slurm.listed = rows(("57_0", "RUNNING"), name=name)
    look = slurm.observe()
    assert (look.running, look.jobs[A]["name"]) == ({A}, name)


def test_an_unanswered_job_of_an_earlier_version_keeps_the_name_in_its_file(slurm, tmp_path):
    """Its sweep was renamed, and the journal does not say how the job was named."""
    (allocation,) = first_allocations(open_sweep(tmp_path / "old"))
    replace(allocation, name=A).write()
    (tmp_path / "old").rename(tmp_path / "new")
    slurm.launcher._folder = SweepFolder(tmp_path / "new")
    slurm.listed = rows(("57_0", "RUNNING"), name=f"ub-old-{A.rpartition('.')[0]}")
    assert slurm.observe().running == {A}
