"""What a launcher concludes of allocations that are over, and when it stops; the batch system is played here."""

import errno
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.sweep_folder import ended, events_of, finished
from tests.unit.allocations import jobs_of, key_of
from tests.unit.allocations import made_of as allocations_of
from tests.unit.launchers import played
from tests.unit.launchers.played import (
    CONTROL,
    JOB,
    NAME,
    OTHERS,
    SPECS,
    Agents,
    Played,
    keys,
    plan,
    statuses,
)
from ultrabench.errors import ClusterError
from ultrabench.launchers.allocation_ends import EndRecorder, LaunchMemory
from ultrabench.launchers.launcher import own_origin
from ultrabench.launchers.reconcile import CANCEL_PAUSE_S
from ultrabench.result import NODE_FAILURE, NOT_STARTED, STOPPED, Status
from ultrabench.store.claim import claim
from ultrabench.store.events import AllocationEnded, AllocationPlanned, Cancel, EndCode, Pause, Submitting
from ultrabench.store.jobs_seen import JobEnd, JobLimits, JobsSeen
from ultrabench.store.journal import JournalWriter
from ultrabench.store.lease import Lease
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import Launch
from ultrabench.sweep.running.blame import blame_of
from ultrabench.sweep.running.decide import decide
from ultrabench.sweep.running.starts import MAX_ALLOCATIONS_WITHOUT_RUN

sweep = played.sweep

GONE = JobEnd(status=Status.NODE_FAIL, reason="Slurm ended job 57_0: NODE_FAIL", held_s=77.0)


def recorder_of(sweep, memory=None):
    return EndRecorder(sweep, Played(), memory or LaunchMemory(), lambda note: None)


# one allocation


@pytest.mark.parametrize("journaled", [True, False])
def test_what_it_claimed_and_did_not_finish_is_lost(sweep, journaled):
    """Also where the claim is all that its agents could write."""
    mine, theirs, free = key_of(CONTROL), key_of(OTHERS[0]), key_of(OTHERS[1])
    plan(sweep, tasks=[mine, theirs, free])
    agents = Agents(sweep).start()
    agents.claim(mine, journaled)
    claim(sweep.folder.claims, str(theirs), {"allocation": "n1-another.0"})
    recorder_of(sweep).record_end(sweep.state().allocations[NAME], GONE, sweep.state())
    assert statuses(sweep) == {mine: Status.NODE_FAIL}
    allocation = sweep.state().allocations[NAME]
    assert (allocation.ended, allocation.held_s, allocation.timed) == (GONE.reason, 77.0, True)
    assert set(allocation.ends) == {JOB}


def test_a_claim_that_cannot_be_read_now_concludes_nothing(sweep, monkeypatch):
    key = key_of(CONTROL)
    plan(sweep, tasks=[key])
    Agents(sweep).start().claim(key, journaled=False)
    memory, state = LaunchMemory(), sweep.state()
    recorder = recorder_of(sweep, memory)

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", stale)
        with pytest.raises(OSError, match="Stale"):
            recorder.record_end(state.allocations[NAME], GONE, state)
        with pytest.raises(OSError, match="Stale"):
            recorder.record_claimed([key], state)
    assert (statuses(sweep), sweep.state().allocations[NAME].ended, memory.recorded_ends) == ({}, None, set())
    recorder.record_end(state.allocations[NAME], GONE, state)
    assert statuses(sweep) == {key: Status.NODE_FAIL}
    assert memory.recorded_ends == {(NAME, JOB)}


# claims of nobody who lives


ODD_NAMES = [b"7", b'"gone"', b'"../../../etc"', b'"a\\u0000b"', b'"' + b"x" * 5000 + b'"']


@pytest.mark.parametrize(
    ("claimed", "described"),
    [
        (b"{", None), *((b'{"allocation": ' + name + b"}", None) for name in ODD_NAMES),
        *((b'{"allocation": "n1-0000aaaa.0"}', words) for words in (None, "{", "[]", "{}", '{"name": 7}')),
    ],
)  # fmt: skip
def test_an_attempt_whose_owner_nobody_knows_is_lost(sweep, claimed, described):
    """Neither its claim nor the description of its allocation tells whose it is."""
    key, free = key_of(CONTROL), key_of(OTHERS[0])
    recorder = recorder_of(sweep)
    assert not recorder.record_claimed([key, free], sweep.state())
    (sweep.folder.claims / str(key)).write_bytes(claimed)
    if described:
        (sweep.folder.allocations / NAME).mkdir()
        (sweep.folder.allocations / NAME / "allocation.json").write_text(described)
    assert recorder.record_claimed([free, key], sweep.state())
    assert (statuses(sweep), events_of(sweep.folder, "allocation_planned")) == ({key: Status.LOST}, [])


def test_an_owner_that_has_not_ended_is_not_called_dead(sweep):
    """Another launcher planned it since this one has looked, and its agent was quick."""
    key = key_of(CONTROL)
    plan(sweep, tasks=[key])
    agents = Agents(sweep)
    claim(agents.claims, str(key), agents.me)
    recorder = recorder_of(sweep)
    assert recorder.record_claimed([key], sweep.state())
    assert statuses(sweep) == {}
    agents.start().end()
    assert recorder.record_claimed([key], sweep.state())
    assert statuses(sweep) == {key: Status.LOST}


def test_an_owner_that_only_its_files_know_is_taken_up_and_looked_for(sweep):
    """The journal of the launcher that submitted it was lost: its job may run."""
    by = {"user": own_origin()["user"], "cluster": "big", "host": "login7"}
    (allocation,) = allocations_of(sweep, jobs_of(sweep)[:1], by)
    allocation.write()
    agents = Agents(sweep, allocation.name).start()
    agents.claim(keys(allocation)[0], journaled=False)
    agents.journal.path.unlink()
    launcher = Played()
    reconciler = played.reconciler_of(sweep, launcher)
    for _ in range(4):
        assert reconciler.run_once()[1]
    (planned,) = events_of(sweep.folder, "allocation_planned")
    assert (planned.allocation, planned.by, planned.limit_s) == (allocation.name, by, allocation.limit_s)
    assert [*planned.tasks] == keys(allocation)
    assert (launcher.looked[-1], launcher.taken, statuses(sweep)) == ([allocation.name], [], {})


# brakes


def test_what_was_refused_is_over_for_launchers_of_other_clusters_too(sweep):
    """Which could not see whether the job is still there."""

    def refuse(allocation):
        raise ClusterError("sbatch does not take it")

    with pytest.raises(ClusterError, match="sbatch does not take it"):
        played.reconciler_of(sweep, Played(refuse)).run()
    refused = {name: state.ended for name, state in sweep.state().allocations.items()}
    assert set(refused.values()) == {"not submitted: sbatch does not take it"}
    elsewhere = Played(lambda allocation: Agents(sweep, allocation.name).start().end(ran=keys(allocation)))
    elsewhere.origin = own_origin("small")
    played.reconciler_of(sweep, elsewhere).run()
    assert set(statuses(sweep).values()) == {Status.OK}
    assert {allocation.name for allocation in elsewhere.taken}.isdisjoint(refused)


@pytest.mark.parametrize(("max_jobs", "log"), [(1, "submitit/7_1_log.err"), (4, "job.log")])
def test_allocations_that_claim_nothing_are_stopped_soon(sweep, max_jobs, log):
    def play(allocation):
        Agents(sweep, allocation.name).start().end()
        (allocation.folder / "submitit").mkdir()
        (allocation.folder / "submitit/7_0_log.err").touch()
        (allocation.folder / log).write_text("first\nImportError: no module x\n\n")

    launcher = Played(play, max_jobs)
    with pytest.raises(ClusterError) as stopped:
        played.reconciler_of(sweep, launcher).run()
    assert str(stopped.value).startswith(
        "3 allocations in a row ended without running anything (all tasks done; its log says: ImportError: no module x"
    )
    assert str(stopped.value).endswith(f"; see {launcher.taken[-1].folder}/{log}, then launch again")
    assert len(launcher.taken) == MAX_ALLOCATIONS_WITHOUT_RUN


def dead_end_of(sweep, ends, max_jobs):
    """Why a launch gives up after allocations that ended one after another, each by a letter.

    n: ran nothing, c: its control only, a: a run that was asked for, p: nothing, for the sweep is paused, w: its
    control, outside the window, o: another launch's that ran nothing; |: what is there is excused. A digit is a node
    on which no agent started, b a run of a job that still runs.
    """
    excused, codes = frozenset(), {"p": EndCode.PAUSED, "w": EndCode.OUTSIDE_WINDOW}
    for number, kind in enumerate(ends):
        if kind == "|":
            excused = frozenset(sweep.state().allocations)
            continue
        name, tasks = f"n1-0000aaaa.{number}", [key_of(CONTROL, number), key_of(OTHERS[0], number)]
        plan(sweep, name, tasks, control=CONTROL.run_id)
        if kind != "o":
            sweep.journal.write(Submitting(allocation=name, token="t"))
        if kind.isdigit():
            end = AllocationEnded(
                allocation=name, reason="failed", source="launcher", failed_on=(f"gpu0{kind}",)
            )
            sweep.journal.write(end)
            continue
        if kind == "b":
            Agents(sweep, name).start().claim(tasks[1])
            continue
        ran = [tasks[kind == "a"]] if kind in "cwa" else []
        Agents(sweep, name).start().end(codes.get(kind, EndCode.OTHER), ran=ran)
    launch = Launch(name=sweep.journal.name, by=own_origin("big"), excused=excused)
    limits = JobLimits(max_jobs=max_jobs)
    dead_end = decide(sweep.plan, sweep.state(), JobsSeen(), limits, launch, time.time()).dead_end
    return dead_end and (dead_end.num_allocations, dead_end.missing_run)


ANYTHING, ASKED = (3, "anything"), (3, "any run except control layouts")


@pytest.mark.parametrize(
    ("max_jobs", "ends", "dead_end"),
    [
        (1, "nna" * 3 + "nn", None), (1, "nna" * 3 + "nnn", ANYTHING),
        (1, "cca" * 3 + "cc", None), (1, "cca" * 3 + "ccc", ASKED),
        (1, "cna" * 3 + "cn", None), (1, "cna" * 3 + "cnc", ASKED),
        (9, "nnc" * 5 + "nn", None), (9, "nnc" * 5 + "nnn", ANYTHING),
        (1, "pwoa" * 5, None), (1, "nnnnn|nn", None), (1, "nnnnn|nnn", ANYTHING),
        (2, "ccccc", None), (2, "cccccc", (6, ASKED[1])),
        # Of those on the same nodes one counts, and a job that runs something shows that others work.
        (9, "12", None), (9, "123", ANYTHING), (9, "1111", None), (9, "112131", (6, "anything")),
        (9, "12a3", None), (9, "12b3", None), (9, "1" * 11, None), (9, "1" * 12, (12, "anything")),
    ],
)  # fmt: skip
def test_only_useless_ends_that_follow_each_other_stop_a_launch(sweep, max_jobs, ends, dead_end):
    """Not those on request, of others, or of what was there when the sweep was paused."""
    assert dead_end_of(sweep, ends, max_jobs) == dead_end


def test_a_launcher_excuses_what_was_there_while_the_sweep_was_paused(sweep):
    launcher = Played(max_jobs=1)
    reconciler = played.reconciler_of(sweep, launcher)
    for generation in range(2, 12, 2):
        reconciler.run_once()
        sweep.journal.write(Pause(generation=generation, on=True))
        launcher.ended_jobs[launcher.taken[-1].name] = JobEnd(status=Status.CANCELLED, reason="cancelled")
        assert not reconciler.run_once()[1]
        sweep.journal.write(Pause(generation=generation + 1, on=False))
    assert len(launcher.taken) == 5


# a cancelled sweep


def test_a_cancel_is_tried_until_nothing_is_left(sweep, monkeypatch):
    clock, notes = [1000.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    launcher = Played()
    reconciler = played.reconciler_of(sweep, launcher, say=notes.append)
    reconciler.run_once()
    (allocation,) = launcher.taken
    sweep.journal.write(Cancel(generation=2))
    launcher.refusals = 2
    for tries in range(1, 5):
        assert reconciler.run_once()[1], "something is left"
        assert reconciler.run_once()[1]
        assert launcher.cancelled == [[allocation.name]] * tries
        clock[0] += CANCEL_PAUSE_S
    assert notes == ["cannot cancel: scancel: no answer; retrying until the jobs have ended"]
    Agents(sweep, allocation.name).start().end()
    assert not reconciler.run_once()[1]
    assert (len(launcher.cancelled), len(launcher.taken)) == (4, 1)


# for how long nodes were held


def test_a_job_that_ends_while_slurm_is_asked_still_holds_its_nodes(sweep):
    """The answer is from before its end, so that nobody knows whether its nodes are free."""
    launcher = Played(max_jobs=1)
    reconciler = played.reconciler_of(sweep, launcher)
    reconciler.run_once()
    (allocation,) = launcher.taken
    agents, observe = Agents(sweep, allocation.name).start(), launcher.observe

    def ends_meanwhile(allocations):
        jobs = observe(allocations)
        agents.end(ran=keys(allocation)[:1])
        return jobs

    launcher.observe = ends_meanwhile
    assert reconciler.run_once()[1]
    assert launcher.taken == [allocation], "its nodes may be in use"
    launcher.observe = observe
    reconciler.run_once()
    assert len(launcher.taken) == 2


def test_what_slurm_says_of_an_ended_job_is_written_down_once(sweep):
    launcher = Played()
    reconciler = played.reconciler_of(sweep, launcher)
    reconciler.run_once()
    (allocation,) = launcher.taken
    launcher.timed = {allocation.name: JobEnd(reason="Slurm ended job 57_0: COMPLETED", held_s=130.0)}
    reconciler.run_once()
    assert events_of(sweep.folder, "allocation_ended") == [], "it has not ended"
    Agents(sweep, allocation.name).start().end(ran=keys(allocation)[:1])
    reconciler.run_once()
    launcher.timed = {}
    reconciler.run_once()
    state = sweep.state().allocations[allocation.name]
    assert (state.ended, state.held_s, state.timed) == ("all tasks done", 130.0, True)
    (end,) = (e for e in events_of(sweep.folder, "allocation_ended") if e.source == "slurm")
    assert (end.job, end.held_s) == (JOB, 130.0)
    assert set(state.ends) == {JOB}


@pytest.mark.parametrize(
    ("status", "cause"), [("node_fail", NODE_FAILURE), ("preempted", "preempted"), ("cancelled", "stopped")]
)
def test_slurm_says_why_agents_were_ended_by_a_signal(sweep, status, cause):
    """Its job may have lost a node, been preempted, or been cancelled by the user, and only Slurm knows."""
    launcher, notes = Played(), []
    reconciler = played.reconciler_of(sweep, launcher, say=notes.append)
    reconciler.run_once()
    (allocation,) = launcher.taken
    failed_hosts = ("gpu06",) if status == "node_fail" else ()
    reason = f"Slurm ended job 57_0: {status}"
    end = JobEnd(status=Status(status), reason=reason, held_s=130.0, failed_hosts=failed_hosts)
    launcher.timed = {allocation.name: end}
    ok, stopped, *_ = keys(allocation)
    agents = Agents(sweep, allocation.name).start()
    agents.ok(ok)
    agents.claim(stopped)
    result = ended(Status.CANCELLED, cause=STOPPED, reason="ended by SIGTERM", hostnames=("gpu05", "gpu06"))
    agents.journal.write(finished(SPECS[stopped.run_id], stopped, result, allocation=allocation.name))
    agents.end()
    reconciler.run_once()
    reconciler.run_once()
    state = sweep.state()
    stopped_result = state.attempts[stopped].result
    assert (stopped_result.status, stopped_result.cause) == (status, cause)
    assert (stopped_result.suspect_hosts, stopped_result.hostnames) == (failed_hosts, ("gpu05", "gpu06"))
    assert state.attempts[ok].ok
    assert [*blame_of(state, sweep.config.retry).excluded] == [*failed_hosts]
    assert any(reason in note for note in notes) == (status != "cancelled")


# jobs that start no agent

FATAL = "FATAL: could not open image bad.sif: no such file"


def sweep_of_containers(path, containers):
    """A launched sweep of two layouts in each of these containers."""
    words = [
        "launcher=slurm",
        "model=tiny",
        "kernel=command",
        "sweep.nodes=[1]",
        "sweep.mbs=[1,2]",
        "sweep.gas=null",
    ]
    words += ["sweep.gbs=8", "sweep.tp=1", "sweep.pp=1", "sweep.zero_stage=[0]", "sweep.seq_len=64"]
    words += ["kernel.command=[python,train.py]", f"+sweep.container=[{','.join(containers)}]"]
    words += ["launcher.srun=['--container-image={container}']", "launcher.pack=1", "measure.confirm=1"]
    words += ["launcher.control=false", "++hardware.peak_flops_per_s={fp32:1e11,bf16:1e11}", "hardware=cpu"]
    sweep = played.open_launched(path, make_plan(load_config(words)))
    return sweep, {run.run_id: run for run in sweep.plan.runs}


class Containers(Played):
    """Slurm whose nodes start the agents of good containers only; each job gets the next node that is not excluded."""

    def __init__(self, sweep, max_jobs, num_nodes=8):
        super().__init__(max_jobs=max_jobs)
        self.sweep, self.nodes = sweep, [f"gpu{number:02}" for number in range(1, num_nodes + 1)]
        self.containers = []

    def submit(self, allocations, avoid, say):
        for index, allocation in enumerate(allocations):
            container = allocation.tasks[0].spec.variant.get("container", "the only one, bad")
            self.containers.append(container)
            free_nodes = [node for node in self.nodes if node not in avoid] or self.nodes
            if "bad" in container:
                (allocation.folder / "job.log").write_text(f"{FATAL}\n")
                host = free_nodes[index % len(free_nodes)]
                self.ended_jobs[allocation.name] = JobEnd(
                    reason="Slurm ended job 7_0: FAILED", agent_gone=True, never_started=True,
                    unstarted_hosts=(host,), held_s=3.0,
                )  # fmt: skip
            else:
                specs = {task.run_id: task.spec for task in allocation.tasks}
                Agents(self.sweep, allocation.name, specs=specs).start().end(ran=keys(allocation))
        return super().submit(allocations, avoid, say)


@pytest.mark.parametrize("max_jobs", [1, 2, 8])
@pytest.mark.parametrize(
    "containers", [("bad.sif", "good.sif"), ("good.sif", "bad.sif"), ("bad.sif", "good.sif", "bad2.sif")]
)
@pytest.mark.parametrize("num_nodes", [1, 8])
def test_a_container_that_cannot_start_is_passed_over_and_its_runs_fail(
    tmp_path, max_jobs, containers, num_nodes
):
    sweep, run_by_id = sweep_of_containers(tmp_path / "s", containers)
    launcher, notes = Containers(sweep, max_jobs, num_nodes), []
    reconciler = played.reconciler_of(sweep, launcher, say=notes.append)
    state = reconciler.run()
    assert reconciler.stop_reason is None
    last = {run_id: attempts[-1].result for run_id, attempts in state.by_run().items()}
    assert {run_by_id[i].runtime[0] for i, result in last.items() if result.status == Status.OK} == {
        "good.sif"
    }
    bad_results = [result for i, result in last.items() if run_by_id[i].runtime[0] != "good.sif"]
    assert len(last) == len(run_by_id)
    assert {(result.status, result.cause) for result in bad_results} == {(Status.CRASH, NOT_STARTED)}
    assert all(FATAL in result.reason and "container=bad" in result.reason for result in bad_results)
    assert any(note.startswith("2 runs failed: container=bad.sif: ") for note in notes)
    num_bad_jobs = sum("bad" in container for container in launcher.containers)
    assert num_bad_jobs <= (3 + 2 * max_jobs) * (len(containers) - 1)


def test_a_job_that_started_no_agent_is_an_attempt_of_its_first_run(tmp_path):
    sweep, _ = sweep_of_containers(tmp_path / "s", ("bad.sif", "good.sif"))
    launcher = Containers(sweep, max_jobs=1)
    reconciler = played.reconciler_of(sweep, launcher)
    reconciler.run_once()
    state, _ = reconciler.run_once()
    [attempt] = [a for a in state.attempts.values() if a.result.status != Status.OK]
    assert attempt.key == keys(launcher.taken[0])[0]
    assert (attempt.result.status, attempt.result.cause) == (Status.LOST, NOT_STARTED)
    assert attempt.result.reason == f"Slurm ended job 7_0: FAILED; its log says: {FATAL}"
    assert launcher.containers == ["bad.sif", "good.sif"]


@pytest.mark.parametrize(
    "containers", [("bad.sif", "bad2.sif"), ("bad.sif", "bad2.sif", "bad3.sif", "bad4.sif")]
)
@pytest.mark.parametrize("max_jobs", [1, 8])
def test_a_launch_whose_containers_all_cannot_start_gives_up_after_few_jobs(tmp_path, max_jobs, containers):
    sweep, _ = sweep_of_containers(tmp_path / "s", containers)
    launcher = Containers(sweep, max_jobs)
    with pytest.raises(ClusterError, match=r"allocations in a row ended without running anything \(.*FATAL"):
        played.reconciler_of(sweep, launcher).run()
    assert len(launcher.taken) <= max(3, len(containers)) + 2 * (max_jobs - 1)


def test_a_cancelled_job_that_had_not_started_is_no_attempt(sweep):
    launcher = Played(max_jobs=1)
    reconciler = played.reconciler_of(sweep, launcher)
    reconciler.run_once()
    end = JobEnd(reason="Slurm ended job 7_0: FAILED", never_started=True, unstarted_hosts=("gpu01",))
    launcher.ended_jobs[launcher.taken[-1].name] = end
    sweep.journal.write(Cancel(generation=2))
    reconciler.run_once()
    assert statuses(sweep) == {}


# a launcher that lives, or did not


@pytest.mark.parametrize("is_submitting", [True, False])
def test_what_a_living_launcher_submits_is_not_over(sweep, is_submitting):
    """Slurm does not list a job while sbatch hangs."""
    other, launcher = JournalWriter(sweep.folder.journal, "launcher"), Played()
    lease = Lease(sweep.folder, other.name)
    other.write(AllocationPlanned(allocation=NAME, nodes=1, limit_s=60.0, tasks=()))
    if is_submitting:
        other.write(Submitting(allocation=NAME, token="t"))
    launcher.ended_jobs = {NAME: JobEnd(reason="Slurm does not know a job of it")}
    recorder = EndRecorder(sweep, launcher, LaunchMemory(), lambda note: None)
    seen, state = recorder.look()
    assert (seen.alive, state.allocations[NAME].ended) == ({NAME}, None)
    lease.release()
    seen, state = recorder.look()
    assert (seen.alive, state.allocations[NAME].ended) == (set(), "Slurm does not know a job of it")


def test_a_launcher_that_lapsed_before_sbatch_submits_nothing_until_it_has_looked_again(sweep):
    answers, launcher = [False, True, False, False], Played()
    sweep.lease = SimpleNamespace(has_lapsed=lambda: answers.pop(0))
    reconciler = played.reconciler_of(sweep, launcher)
    reconciler.run_once()
    (allocation,) = sweep.state().allocations.values()
    assert (launcher.taken, [*sweep.folder.allocations.iterdir()]) == ([], [])
    assert allocation.ended == "not submitted: this launcher was suspended"
    reconciler.run_once()
    assert len(launcher.taken) == 1
