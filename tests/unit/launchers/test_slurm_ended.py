"""What a launcher learns of jobs whose agents have recorded their end."""

import pytest

from tests.unit.allocations import with_launcher
from tests.unit.launchers import played_slurm
from tests.unit.launchers.played_slurm import GRACE_S, A, B, rows
from ultrabench.launchers.slurm.launcher import STUCK_S
from ultrabench.result import Status

slurm = played_slurm.slurm


def times(look):
    """Allocation -> the seconds for which its job held nodes."""
    return {name: end.held_s for name, end in look.timed.items()}


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
    end = [slurm.observe().timed[A] for _ in range(3)][-1]
    assert len(programs.asked if log is not None else ()) == (log is not None), "Slurm is asked once"
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
