"""`sweep pause`, `resume` and `cancel` on a sweep made by hand."""

import re
import time
from dataclasses import replace

import pytest

from tests.sweep_folder import events_of, write
from tests.unit.cli.conftest import QUICK, as_json, content, one_line, record
from ultrabench.errors import ClusterError
from ultrabench.launchers import open_sweep as opening
from ultrabench.launchers.launcher import own_origin
from ultrabench.processes import own_name
from ultrabench.store.claim import GIVEN_UP, owner_of
from ultrabench.store.events import (
    AllocationEnded,
    AllocationPlanned,
    AllocationStarted,
    EndCode,
    Launched,
    LeadingAgent,
    Submitted,
    Submitting,
)
from ultrabench.store.journal import read_journal
from ultrabench.store.lease import Lease, living_launchers
from ultrabench.store.state import fold
from ultrabench.sweep.config.load import load_config

SLURM = load_config(["model=tiny", "launcher=slurm"]).resolved


def state_of(sweep):
    return fold(read_journal(sweep.journal))


PLANNED = AllocationPlanned(allocation="n1-b.0", nodes=1, limit_s=60.0, tasks=())


def sorted_events(sweep, kind):
    return sorted(events_of(sweep, kind), key=lambda event: event.generation)


def settle(sweep, *unsettled, config=QUICK.config.resolved, repeats=1):
    """Every run but those of `unsettled` ends ok once, in a sweep of so many repeats."""
    write(sweep, Launched(generation=2, config={**config, "repeats": repeats}))
    for run in QUICK.runs:
        if run not in unsettled:
            record(sweep, run, attempt=1)


def test_a_pause_is_told_to_agents_and_launchers_and_twice_is_once(ultrabench, sweep):
    message = (
        "Pausing: current runs will finish, no new ones will start. To continue: "
        "ultrabench sweep resume quick-cpu\n"
    )
    assert ultrabench("sweep", "pause") == (0, "", message)
    assert state_of(sweep).paused
    sweep.pause.unlink()  # an agent must not depend on who was first
    assert ultrabench("sweep", "pause", "quick-cpu")[0] == 0
    assert sweep.pause.exists()
    assert [e.on for e in sorted_events(sweep, "pause")] == [True]


@pytest.mark.parametrize("verb", ["pause", "cancel"])
def test_a_settled_sweep_is_left_alone_unless_it_has_repeats_to_make(ultrabench, sweep, verb):
    settle(sweep)
    before = content(sweep)
    code, out, err = ultrabench("sweep", verb)
    assert (code, out, content(sweep)) == (0, "", before)
    assert err.startswith(f"nothing to {verb}: ")
    settle(sweep, repeats=2)
    assert "nothing to" not in ultrabench("sweep", verb)[2]
    assert len(sorted_events(sweep, verb)) == 1


def test_a_cancel_stays_until_the_next_launch(ultrabench, sweep):
    code, out, err = ultrabench("sweep", "cancel")
    assert (code, out) == (0, "")
    message = "quick-cpu: 2 of .*\nCancelled. Results are kept; run the launch command again to continue.\n"
    assert re.fullmatch(message, err)
    state = state_of(sweep)
    assert (state.cancelled, len(state.attempts)) == (True, 2)
    assert "nothing to pause: quick-cpu is cancelled" in ultrabench("sweep", "pause")[2]
    assert not sweep.pause.exists()
    write(sweep, Launched(generation=state.generation + 1, config={}))
    assert not state_of(sweep).cancelled


def test_a_settled_sweep_is_cancelled_while_something_runs(ultrabench, sweep):
    settle(sweep)
    write(sweep, PLANNED)
    assert "Cancelled. Results are kept" in ultrabench("sweep", "cancel")[2]


@pytest.fixture
def unreachable(sweep, monkeypatch):
    """The same sweep on a cluster whose programs are not here."""
    write(sweep, Launched(generation=2, config=SLURM), by="launcher")
    write(sweep, PLANNED)
    monkeypatch.setenv("PATH", str(sweep.path))
    lease = Lease(sweep, "launcher-a")
    yield sweep
    lease.release()


def nobody_follows(sweep):
    for path in sweep.leases.glob("*.json"):
        path.unlink()


def over(sweep):
    """Ends the allocation of the sweep on a cluster."""
    write(sweep, AllocationEnded(allocation="n1-b.0", reason="all tasks done", source="agent"))


def test_a_cancel_that_slurm_does_not_take_is_written_down_and_left_to_who_follows(ultrabench, unreachable):
    code, out, err = ultrabench("sweep", "cancel")
    assert (code, out) == (0, "")
    assert err.startswith("scancel: No such file")
    assert err.endswith(" follows this sweep and retries until the jobs have ended\n")
    nobody_follows(unreachable)
    refusal = one_line(ultrabench, "sweep", "cancel", code=3)
    assert refusal.startswith("scancel: No such file or directory; ")
    assert (
        "recorded, but no launcher carries it out: run this command again where its jobs can be ended"
        in refusal
    )
    assert (state_of(unreachable).cancelled, len(sorted_events(unreachable, "cancel"))) == (True, 2)


def test_a_job_that_waited_for_this_machine_is_over_when_it_is_cancelled(ultrabench, sweep):
    """Its agent has recorded nothing, and nobody follows the sweep any more."""
    by = dict(own_origin())
    write(sweep, replace(PLANNED, by=by), Submitting(allocation="n1-b.0"))
    assert as_json(ultrabench, "sweep", "status")["waiting_allocations"] == 1
    assert ultrabench("sweep", "cancel")[0] == 0
    assert as_json(ultrabench, "sweep", "status")["waiting_allocations"] == 0
    assert state_of(sweep).allocations["n1-b.0"].ended == "cancelled before it started"


def test_a_run_in_another_pid_namespace_or_host_is_not_called_cancelled(ultrabench, sweep):
    """A container or another host shares the folder, but its processes cannot be seen."""
    write(sweep, replace(PLANNED, by={"user": own_name(), "cluster": "", "host": "login2:4026532501"}))
    assert ultrabench("sweep", "cancel")[0] == 0, "its agents have not started, and will run nothing"
    assert owner_of(sweep.claims, "n1-b.0") == GIVEN_UP
    (sweep.claims / "n1-b.0").unlink()
    write(sweep, AllocationStarted(allocation="n1-b.0", agent=LeadingAgent(host="login2", pid=7)))
    refusal = one_line(ultrabench, "sweep", "cancel", code=3)
    assert refusal.startswith("n1-b.0 runs on login2:4026532501, whose processes cannot be ended from here. ")
    assert state_of(sweep).cancelled


def test_whose_jobs_only_they_can_end_is_told(ultrabench, unreachable):
    for n, user in enumerate(("ann", own_name())):
        by = {"user": user, "cluster": "big", "host": "login1"}
        write(unreachable, replace(PLANNED, allocation=f"n1-c.{n}", by=by))
    err = ultrabench("sweep", "cancel")[2]
    assert err.splitlines()[0] == "jobs of ann are still active: only their owner can end them"


def test_a_pause_is_written_down_before_slurm_is_asked_and_a_resume_takes_it_away(ultrabench, unreachable):
    assert "No such file or directory" in one_line(ultrabench, "sweep", "pause", code=3)
    state = state_of(unreachable)
    assert (state.paused, state.cancelled, unreachable.pause.exists()) == (True, False, True)
    assert "cannot query Slurm" in one_line(ultrabench, "sweep", "resume", code=3)
    assert (state_of(unreachable).paused, unreachable.pause.exists()) == (False, False)
    # A marker that somebody left by hand goes, too, and says nothing in the journal.
    unreachable.pause.write_text("")
    one_line(ultrabench, "sweep", "resume", code=3)
    assert not unreachable.pause.exists()
    assert [e.on for e in sorted_events(unreachable, "pause")] == [True, False]


@pytest.mark.parametrize(("options", "runs"), [((), 0), ((), 1), (("--json",), 1)])
def test_watching_writes_and_submits_nothing(ultrabench, unreachable, monkeypatch, options, runs):
    """Also where a sweep on a cluster has repeats left, and nobody follows it: that is what resume does."""
    last = QUICK.runs[2]  # it ends only while it is watched
    settle(unreachable, *[last] * runs, config=SLURM, repeats=2)
    over(unreachable)
    nobody_follows(unreachable)
    before, naps = content(unreachable), []

    def sleep(seconds):
        assert content(unreachable) == before
        naps.append(seconds)
        if len(naps) == 3:
            record(unreachable, last)

    monkeypatch.setattr(time, "sleep", sleep)
    code, out, err = ultrabench("sweep", "status", "--watch", *options)
    assert (code, err, bool(out), len(naps)) == (0, "", True, 3 * runs)
    if not options:  # where stdout is no terminal, a page for each number of settled runs
        assert out.count("runs settled (") == 1 + runs
    after = content(unreachable)
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + runs


def test_the_status_of_a_sweep_that_nobody_follows_says_how_to_go_on(ultrabench, unreachable):
    nobody_follows(unreachable)
    command = "ultrabench sweep resume quick-cpu"
    jobs_run = "No launcher follows this sweep. Submitted jobs keep running; new ones need a launcher"

    def standing():
        return as_json(ultrabench, "sweep", "status")["standing"]

    assert standing() == f"{jobs_run}: {command}", "a job is queued"
    agent = LeadingAgent(host="gpu01", pid=1, journal="agent-gpu01-1-x.jsonl")
    write(unreachable, AllocationStarted(allocation=PLANNED.allocation, agent=agent))
    assert standing() == f"{jobs_run}: {command}", "a job runs its preflight"
    over(unreachable)
    assert standing() == f"Nothing is running. To continue: {command}"


def test_the_status_says_what_a_launcher_waits_for_before_it_submits_jobs(ultrabench, unreachable):
    write(unreachable, Submitting(allocation=PLANNED.allocation), by="launcher")
    assert as_json(ultrabench, "sweep", "status")["standing"] is None
    refusal = "not submitted: partition {hopper} is DRAIN"
    end = AllocationEnded(
        allocation=PLANNED.allocation, reason=refusal, code=EndCode.REFUSED, source="launcher"
    )
    write(unreachable, end, by="launcher")
    line = f"The launcher waits to submit jobs: the latest was {refusal}"
    assert as_json(ultrabench, "sweep", "status")["standing"] == line
    assert line in ultrabench("sweep", "status")[1]
    write(unreachable, replace(PLANNED, allocation="n1-c.0"), Submitting(allocation="n1-c.0"), by="launcher")
    assert as_json(ultrabench, "sweep", "status")["standing"] == line, "sbatch has not answered yet"
    write(unreachable, Submitted(allocation="n1-c.0", job={"job_id": "7", "name": "u"}), by="launcher")
    assert as_json(ultrabench, "sweep", "status")["standing"] is None


def test_status_sees_a_launcher_that_still_looks_at_the_machine(sweep, monkeypatch):
    launchers = []

    def look(*_, **options):
        launchers.extend(living_launchers(sweep))
        raise ClusterError("enough")

    monkeypatch.setattr(opening, "_machine_facts", look)
    with pytest.raises(ClusterError, match="enough"):
        opening.open_sweep(QUICK, reuse=None, warn=pytest.fail, say=pytest.fail)
    assert len(launchers) == 1
