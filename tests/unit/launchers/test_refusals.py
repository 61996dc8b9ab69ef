"""A launch whose jobs are not taken for a while: it waits, keeps looking, and submits again."""

from types import SimpleNamespace

import pytest

from tests.configs import refused
from tests.sweep_folder import events_of
from tests.unit.allocations import with_launcher
from tests.unit.launchers import played
from tests.unit.launchers.played import Agents, Played, keys
from ultrabench.errors import ClusterError
from ultrabench.launchers import reconcile
from ultrabench.launchers.launcher import NotTakenError
from ultrabench.launchers.reconcile import SAY_AGAIN_S, Reconciler
from ultrabench.launchers.refusals import FIRST_PAUSE_S, MAX_PAUSE_S, MAX_UNKNOWN_TRIES, Refusals
from ultrabench.store.events import EndCode, Pause
from ultrabench.store.jobs_seen import JobEnd
from ultrabench.sweep.plan import Plan

sweep = played.sweep
DRAIN = NotTakenError(
    "partition hopper is DRAIN", "sbatch did not accept a job of 1 node: Required partition not available"
)
LIMIT = NotTakenError(
    "a limit of the account", "sbatch did not accept a job of 1 node: policy", fewer_may_fit=True
)
LOST = NotTakenError(
    "slurmctld did not answer", "sbatch did not accept a job of 1 node: timed out", may_exist=True
)
STRANGE = NotTakenError(
    "Slurm refused the job", "sbatch did not accept a job of 1 node: no project", is_known=False
)


class Launch:
    """A launch on a played batch system that takes jobs as a test says; time passes only where the test says so."""

    def __init__(self, sweep, monkeypatch):
        self.sweep, self.now_s, self.lines, self.tries = sweep, 1000.0, [], []
        self.slurm = Played(max_jobs=4)
        self.take = self.slurm.submit
        self.slurm.submit = self._submit
        self.refusal = None
        config = with_launcher(sweep.config, pack=1, control=False)
        sweep.plan = Plan(config=config, candidates=tuple(sweep.plan.candidates))
        monkeypatch.setattr(
            reconcile,
            "time",
            SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: 0.0, sleep=self._sleep),
        )
        self.reconciler = Reconciler(sweep, self.slurm, lambda state, alive: None, self.lines.append)

    def _sleep(self, seconds):
        self.now_s += max(seconds, 1.0)

    def _submit(self, allocations, avoid, say):
        self.tries.append((self.now_s, len(allocations)))
        refusal = self.refusal(allocations) if callable(self.refusal) else self.refusal
        if refusal:
            raise refusal
        return self.take(allocations, avoid, say)

    def rounds(self, seconds, step_s=1.0):
        """Looks every `step_s`; returns the sizes of the submissions that were tried."""
        num_before = len(self.tries)
        for _ in range(int(seconds / step_s)):
            self.reconciler.run_once()
            self.now_s += step_s
        return [size for _, size in self.tries[num_before:]]

    def folders(self):
        folder = self.sweep.folder.allocations
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def launch(sweep, monkeypatch):
    return Launch(sweep, monkeypatch)


def test_a_refusal_that_passes_is_waited_for_and_leaves_nothing_behind(launch):
    launch.refusal = DRAIN
    sizes = launch.rounds(60)
    assert sizes[1:] == [1] * (len(sizes) - 1), "one job is enough to try"
    pauses = [
        later - earlier for (earlier, _), (later, _) in zip(launch.tries, launch.tries[1:], strict=False)
    ]
    assert pauses == [FIRST_PAUSE_S * 2**n for n in range(len(pauses))]
    assert launch.folders() == []
    (line,) = launch.lines
    assert line.startswith(
        "waiting to submit jobs: partition hopper is DRAIN (sbatch did not accept a job of 1 node: Required"
    )
    assert "after 60 minutes" in line
    assert "ultrabench sweep pause" in line
    ends = events_of(launch.sweep.folder, "allocation_ended")
    assert {end.code for end in ends} == {EndCode.REFUSED}
    launch.refusal = None
    assert launch.rounds(2 * MAX_PAUSE_S), "it submits again"
    assert launch.lines[1:] == ["jobs are submitted again"]
    assert launch.folders() == sorted(allocation.name for allocation in launch.slurm.taken)


def test_it_gives_up_after_the_patience_with_slurms_words(launch):
    launch.refusal = DRAIN
    with refused(
        "a job of 1 node: Required partition not available; waited 60 minutes; launch again when it takes jobs"
    ):
        launch.rounds(2 * 3600, 30.0)
    assert 3600 <= launch.tries[-1][0] - launch.tries[0][0] <= 3630 + MAX_PAUSE_S
    assert 1 < len(launch.lines) <= 3600 // SAY_AGAIN_S, "it is told again now and then"


def test_time_in_which_a_job_lives_does_not_count(launch, sweep):
    launch.refusal = lambda allocations: (
        DRAIN if launch.slurm.taken else LIMIT if len(allocations) > 1 else None
    )
    assert launch.rounds(4000, 80.0)
    (living,) = launch.slurm.taken
    num_tries = len(launch.tries)
    Agents(sweep, living.name).start().end(ran=keys(living))
    launch.rounds(2)
    assert len(launch.tries) > num_tries, "when a job has ended, the next one is tried at once"
    launch.rounds(3000, 80.0)
    launch.refusal = None
    launch.rounds(MAX_PAUSE_S)
    assert len(launch.slurm.taken) > 1


def test_a_part_of_the_jobs_is_submitted_where_all_of_them_are_too_many(launch):
    """An account may have two jobs: an array of three would be refused for ever."""
    launch.refusal = lambda allocations: LIMIT if len(launch.slurm.taken) + len(allocations) > 2 else None
    assert launch.rounds(3)[:2] == [3, 1]
    launch.rounds(60)
    assert len(launch.slurm.taken) == 2
    assert "a limit of the account" in launch.lines[0]


def test_nothing_is_submitted_before_a_lost_answer_is_settled(launch, sweep):
    launch.refusal = LOST
    assert len(launch.rounds(600, 2.0)) == 1
    assert not events_of(sweep.folder, "allocation_ended"), "Slurm may have taken it"
    submitting = events_of(sweep.folder, "submitting")
    assert launch.folders() == sorted(event.allocation for event in submitting)


def test_a_job_that_appears_after_its_answer_was_lost_counts_as_submitted(launch, sweep):
    seen = launch.slurm.observe
    launch.slurm.observe = lambda allocations: played.replace(seen(allocations), jobs={})
    launch.refusal = LOST
    launch.rounds(10)
    assert not events_of(sweep.folder, "submitted")
    launch.slurm.observe = seen
    launch.rounds(2)
    submitted = events_of(sweep.folder, "submitted")
    assert len(submitted) == launch.reconciler.memory.num_submitted == launch.tries[0][1]
    assert {event.allocation for event in submitted} == {event.job["job_id"] for event in submitted}


def test_a_lost_job_that_never_appears_is_replaced_however_often(launch, sweep):
    """Three allocations in a row without a run would end a launch, if they had been jobs."""
    launch.slurm.observe = lambda allocations: played.JobsSeen(
        alive=frozenset(n for n, a in allocations.items() if a.ended is None and len(launch.tries) > 20),
        ended_jobs={
            n: JobEnd(reason="Slurm does not know it") for n, a in allocations.items() if a.ended is None
        },
    )
    launch.refusal = LOST
    launch.rounds(600, 2.0)
    assert len(launch.tries) > 5


def test_strange_words_end_a_launch_that_never_got_a_job(launch):
    launch.refusal = STRANGE
    with pytest.raises(ClusterError, match="no project; fix launcher"):
        launch.rounds(3600)
    assert len(launch.tries) == MAX_UNKNOWN_TRIES


def test_a_pause_ends_the_wait(launch, sweep):
    launch.refusal = DRAIN
    launch.rounds(100)
    sweep.journal.write(Pause(generation=2, on=True))
    _, is_busy = launch.reconciler.run_once()
    assert not is_busy
    assert launch.reconciler.stop_reason.startswith("paused; resume with")


def test_time_without_anything_to_submit_does_not_count():
    refusals = Refusals(60.0)
    refusals.add(DRAIN, 1, 0.0)
    refusals.rest()
    refusals.add(DRAIN, 1, 100.0)
    assert not refusals.has_waited_enough(159.0)
    assert refusals.has_waited_enough(160.0)
