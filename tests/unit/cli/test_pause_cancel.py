"""`sweep pause`, `resume` and `cancel` on a sweep made by hand."""

import json
import time

import pytest

from tests.unit.cli.conftest import QUICK, one_line
from ultrabench.cli.sweep import control
from ultrabench.errors import ClusterError
from ultrabench.launchers import open_sweep as opening
from ultrabench.processes import own_name
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.store.events import EVENTS, AllocationEnded, AllocationPlanned, Claimed, Launched, Result
from ultrabench.store.folder import living_launchers
from ultrabench.store.journal import JournalWriter, read_journal
from ultrabench.store.state import fold
from ultrabench.sweep.config.load import load_config

SLURM = load_config(["model=tiny", "launcher=slurm"]).resolved
OK = RunResult(status=Status.OK, step_times_s=(0.1,) * 6, duration_s=9.0)


def state_of(sweep):
    return fold(read_journal(sweep.journal))


def said(sweep, kind):
    found = [line.event for line in read_journal(sweep.journal) if type(line.event) is EVENTS[kind]]
    return sorted(found, key=lambda event: event.generation)


def everything(sweep):
    return {path: path.read_bytes() for path in sweep.path.rglob("*") if path.is_file()}


def settle(sweep, repeats=1):
    """Every run ends ok once, in a sweep of so many repeats."""
    writer = JournalWriter(sweep.journal, "agent")
    writer.write(Launched(generation=2, config={**QUICK.config.resolved, "repeats": repeats}))
    for run in QUICK.runs:
        name = {"run_id": run.spec.run_id, "repeat": 0, "attempt": 1}
        writer.write(Claimed(**name, allocation="n1-a.0", spec=to_dict(run.spec), predicted={}))
        writer.write(Result(**name, source="agent", result=OK))
    return writer


def test_a_pause_is_told_to_agents_and_launchers_and_twice_is_once(ultrabench, sweep):
    told = "paused: runs under way end, nothing begins; go on with: ultrabench sweep resume quick-cpu\n"
    assert ultrabench("sweep", "pause") == (0, "", told)
    assert state_of(sweep).paused
    sweep.pause.unlink()  # an agent must not depend on who was first
    assert ultrabench("sweep", "pause", "quick-cpu")[0] == 0
    assert sweep.pause.exists()
    assert [e.on for e in said(sweep, "pause")] == [True]


def test_a_settled_sweep_is_not_paused(ultrabench, sweep):
    settle(sweep)
    before = everything(sweep)
    assert ultrabench("sweep", "pause") == (0, "", "nothing to pause: every run of quick-cpu is settled\n")
    assert everything(sweep) == before


@pytest.mark.parametrize("verb", ["pause", "cancel"])
def test_a_sweep_with_repeats_to_make_is_not_settled(ultrabench, sweep, verb):
    settle(sweep, repeats=2)
    assert "nothing to" not in ultrabench("sweep", verb)[2]
    assert len(said(sweep, verb)) == 1


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
@pytest.mark.parametrize("given", ["quik-cpu", "other/quick-cpu"])
def test_a_sweep_that_is_not_there(ultrabench, sweep, verb, given):
    before = everything(sweep)
    assert f"unknown sweep '{given}'" in one_line(ultrabench, "sweep", verb, given)
    assert everything(sweep) == before


def test_a_cancel_stays_until_the_next_launch(ultrabench, sweep):
    code, out, err = ultrabench("sweep", "cancel")
    assert (code, out) == (0, "")
    assert err.splitlines()[0].startswith("quick-cpu: 2 of ")
    assert err.splitlines()[1] == "cancelled; results stay, and the same launch command goes on from here"
    assert state_of(sweep).cancelled
    assert state_of(sweep).attempts.keys() == {k for k, a in state_of(sweep).attempts.items() if a.result}
    generation = state_of(sweep).generation
    JournalWriter(sweep.journal, "launcher").write(Launched(generation=generation + 1, config={}))
    assert not state_of(sweep).cancelled


def test_a_settled_sweep_is_cancelled_only_while_something_runs(ultrabench, sweep):
    writer = settle(sweep)
    assert "nothing to cancel" in ultrabench("sweep", "cancel")[2]
    writer.write(AllocationPlanned(allocation="n1-b.0", nodes=1, limit_s=60.0, tasks=()))
    assert "cancelled; results stay" in ultrabench("sweep", "cancel")[2]


@pytest.fixture
def unreachable(sweep, monkeypatch):
    """The same sweep on a cluster whose programs are not here."""
    JournalWriter(sweep.journal, "launcher").write(Launched(generation=2, config=SLURM))
    JournalWriter(sweep.journal, "agent").write(
        AllocationPlanned(allocation="n1-b.0", nodes=1, limit_s=60.0, tasks=())
    )
    monkeypatch.setenv("PATH", str(sweep.path))
    return sweep


def nobody_follows(sweep):
    for path in sweep.journal.glob("launcher-*"):
        path.rename(path.with_name(path.name.replace("launcher", "earlier")))


def test_a_pause_is_written_down_before_slurm_is_asked(ultrabench, unreachable):
    assert "No such file or directory" in one_line(ultrabench, "sweep", "pause", code=3)
    state = state_of(unreachable)
    assert (state.paused, state.cancelled) == (True, False)
    assert unreachable.pause.exists()


class Cluster:
    """A launcher that ends what it is told to, or cannot be asked."""

    def __init__(self, sweep):
        self.sweep, self.answers, self.cancelled = sweep, False, []

    def choose(self, config, folder, submits):
        assert not submits
        assert state_of(self.sweep).cancelled, "it is written down before Slurm is asked"
        return self

    def cancel(self, allocations, queued_only):
        if not self.answers:
            raise ClusterError("Slurm does not answer")
        self.cancelled.append((sorted(allocations), queued_only))


@pytest.fixture
def cluster(unreachable, monkeypatch):
    made = Cluster(unreachable)
    monkeypatch.setattr(control, "choose_launcher", made.choose)
    return made


def test_a_cancel_that_slurm_does_not_take_is_written_down_and_left_to_who_follows(ultrabench, cluster):
    code, out, err = ultrabench("sweep", "cancel")
    assert (code, out) == (0, "")
    assert err.startswith("Slurm does not answer. process ")
    assert err.endswith(" follows this sweep and tries again until it is done\n")
    nobody_follows(cluster.sweep)
    left = "The cancel is written down, but nobody follows it: run it again"
    assert one_line(ultrabench, "sweep", "cancel", code=3) == f"Slurm does not answer. {left}"
    assert (state_of(cluster.sweep).cancelled, len(said(cluster.sweep, "cancel"))) == (True, 2)


def test_whose_jobs_only_they_can_end_is_told(ultrabench, unreachable, cluster):
    cluster.answers = True
    for n, user in enumerate(("ann", own_name())):
        JournalWriter(unreachable.journal, "agent").write(
            AllocationPlanned(allocation=f"n1-c.{n}", nodes=1, limit_s=60.0, tasks=(),
            by={"user": user, "cluster": "big", "host": "login1"},
        ))  # fmt: skip
    err = ultrabench("sweep", "cancel")[2]
    assert err.splitlines()[0] == "jobs of ann are under way: only whoever submitted them can end them"
    assert [names for names, _ in cluster.cancelled] == [["n1-b.0", "n1-c.0", "n1-c.1"]]


def test_a_resume_takes_the_pause_away(ultrabench, unreachable):
    ultrabench("sweep", "pause")
    assert "Slurm cannot be asked" in one_line(ultrabench, "sweep", "resume", code=3)
    assert not unreachable.pause.exists()
    assert not state_of(unreachable).paused
    # A marker that somebody left by hand goes, too, and says nothing in the journal.
    unreachable.pause.write_text("")
    one_line(ultrabench, "sweep", "resume", code=3)
    assert not unreachable.pause.exists()
    assert [e.on for e in said(unreachable, "pause")] == [True, False]


@pytest.mark.parametrize("more", [(), ("--json",)])
@pytest.mark.parametrize("runs", [False, True])
def test_watching_writes_and_submits_nothing(ultrabench, unreachable, monkeypatch, runs, more):
    """Also where a sweep on a cluster has repeats left, and nobody follows it: that is what resume does."""
    settle(unreachable, repeats=2)
    agent = JournalWriter(unreachable.journal, "agent")
    agent.write(Launched(generation=3, config={**SLURM, "repeats": 2}))
    agent.write(AllocationEnded(allocation="n1-b.0", reason="all tasks done", source="agent"))
    one = {"run_id": QUICK.runs[0].spec.run_id, "repeat": 0, "attempt": 1}
    if runs:  # one of them ends only while it is watched
        for path in unreachable.journal.iterdir():
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(w for w in lines if not ('"result"' in w and one["run_id"] in w)))
        assert state_of(unreachable).attempts[tuple(one.values())].result is None
    nobody_follows(unreachable)
    before, naps = everything(unreachable), []

    def sleep(seconds):
        assert everything(unreachable) == before
        naps.append(seconds)
        if len(naps) == 3:
            JournalWriter(unreachable.journal, "agent").write(Result(**one, source="agent", result=OK))

    monkeypatch.setattr(time, "sleep", sleep)
    code, out, err = ultrabench("sweep", "status", "--watch", *more)
    assert (code, err, bool(out)) == (0, "", True)
    if "--json" not in more:  # where stdout is no terminal, a page for each number of settled runs
        assert out.count("runs settled (") == 1 + runs
    assert len(naps) == 3 * runs
    after = everything(unreachable)
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + runs


def test_the_status_of_a_sweep_that_nobody_follows_says_how_to_go_on(ultrabench, unreachable):
    nobody_follows(unreachable)
    code, out, _ = ultrabench("sweep", "status", "--json")
    standing = json.loads(out)["standing"]
    assert code == 0
    assert standing.startswith("no launcher follows it; what was submitted goes on")
    assert standing.endswith(": ultrabench sweep resume quick-cpu")
    JournalWriter(unreachable.journal, "agent").write(
        AllocationEnded(allocation="n1-b.0", reason="all tasks done", source="agent")
    )
    standing = json.loads(ultrabench("sweep", "status", "--json")[1])["standing"]
    assert standing == "nothing runs and no launcher follows it: ultrabench sweep resume quick-cpu"


def test_status_sees_a_launcher_that_still_looks_at_the_machine(sweep, monkeypatch):
    seen = []

    def look(*_, **options):
        seen.extend(living_launchers(sweep))
        raise ClusterError("enough")

    monkeypatch.setattr(opening, "_machine_facts", look)
    with pytest.raises(ClusterError, match="enough"):
        opening.open_sweep(QUICK, reuse=None, warn=pytest.fail, say=pytest.fail)
    assert len(seen) == 1
