"""`sweep pause`, `resume` and `cancel` on a sweep made by hand."""

import json

import pytest

from tests.unit.cli.conftest import HEAD, QUICK, one_line
from ultrabench.journal import JournalWriter, read_journal
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.state import fold
from ultrabench.sweep.config import load_config

SLURM = load_config(["model=tiny", "launcher=slurm"]).resolved
OK = to_dict(RunResult(status=Status.OK, step_times_s=(0.1,) * 6, duration_s=9.0))


def state_of(sweep):
    return fold(read_journal(sweep.journal))


def said(sweep, kind):
    found = [e for e in read_journal(sweep.journal) if e["event"] == kind]
    return sorted(found, key=lambda e: e["generation"])


def files(sweep):
    return sorted(str(p.relative_to(sweep.path)) for p in sweep.path.rglob("*"))


def settle(sweep, repeats=1):
    """Every run ends ok once, in a sweep of so many repeats."""
    writer = JournalWriter(sweep.journal, "agent")
    writer.write("config", generation=2, config={**QUICK.config.resolved, "repeats": repeats})
    for run in QUICK.runs:
        name = {"run_id": run.spec.run_id, "repeat": 0, "attempt": 1}
        writer.write("claimed", **name, allocation="n1-a.0", spec=to_dict(run.spec), predicted={})
        writer.write("result", **name, source="agent", result=OK)
    return writer


def test_a_pause_is_told_to_agents_and_launchers(ultrabench, sweep):
    code, out, err = ultrabench("sweep", "pause")
    assert (code, out) == (0, "")
    assert (
        err == "paused: runs under way end, nothing begins; go on with: ultrabench sweep resume quick-cpu\n"
    )
    assert state_of(sweep).paused
    assert sweep.pause.exists()
    assert [e["on"] for e in said(sweep, "pause")] == [True]


def test_to_pause_twice_is_to_pause(ultrabench, sweep):
    ultrabench("sweep", "pause")
    sweep.pause.unlink()  # an agent must not depend on who was first
    assert ultrabench("sweep", "pause", "quick-cpu")[0] == 0
    assert sweep.pause.exists()
    assert len(said(sweep, "pause")) == 1


def test_a_settled_sweep_is_not_paused(ultrabench, sweep):
    settle(sweep)
    before = files(sweep)
    code, _, err = ultrabench("sweep", "pause")
    assert (code, err) == (0, "nothing to pause: every run of quick-cpu is settled\n")
    assert files(sweep) == before


@pytest.mark.parametrize("verb", ["pause", "cancel"])
def test_a_sweep_with_repeats_to_make_is_not_settled(ultrabench, sweep, verb):
    settle(sweep, repeats=2)
    assert "nothing to" not in ultrabench("sweep", verb)[2]
    assert len(said(sweep, verb)) == 1


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_a_sweep_that_is_not_there(ultrabench, sweep, verb):
    before = files(sweep)
    for given in ("quik-cpu", "other/quick-cpu"):
        assert f"unknown sweep '{given}'" in one_line(ultrabench, "sweep", verb, given)
    assert files(sweep) == before


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_a_head_that_holds_no_configuration(ultrabench, sweep, verb):
    for path in sweep.journal.iterdir():
        path.unlink()
    sweep.head.write_text(
        json.dumps({k: v for k, v in {**HEAD, "schema_version": 1}.items() if k != "config"})
    )
    assert "holds no configuration" in one_line(ultrabench, "sweep", verb)
    assert not sweep.pause.exists()
    assert said(sweep, "pause") == said(sweep, "cancel") == []


def test_a_cancel_stays_until_the_next_launch(ultrabench, sweep):
    code, out, err = ultrabench("sweep", "cancel")
    assert (code, out) == (0, "")
    assert err.splitlines()[0].startswith("quick-cpu: 2 of ")
    assert err.splitlines()[1] == "cancelled; results stay, and the same launch command goes on from here"
    assert state_of(sweep).cancelled
    assert state_of(sweep).attempts.keys() == {k for k, a in state_of(sweep).attempts.items() if a.result}
    generation = state_of(sweep).generation
    JournalWriter(sweep.journal, "launcher").write("config", generation=generation + 1, config={})
    assert not state_of(sweep).cancelled


def test_a_settled_sweep_is_cancelled_only_while_something_runs(ultrabench, sweep):
    writer = settle(sweep)
    assert "nothing to cancel" in ultrabench("sweep", "cancel")[2]
    writer.write("allocation_planned", allocation="n1-b.0", nodes=1, limit_s=60.0, tasks=[])
    assert "cancelled; results stay" in ultrabench("sweep", "cancel")[2]


@pytest.fixture
def unreachable(sweep, monkeypatch):
    """The same sweep on a cluster whose programs are not here."""
    JournalWriter(sweep.journal, "launcher").write("config", generation=2, config=SLURM)
    JournalWriter(sweep.journal, "agent").write(
        "allocation_planned", allocation="n1-b.0", nodes=1, limit_s=60.0, tasks=[]
    )
    monkeypatch.setenv("PATH", str(sweep.path))
    return sweep


@pytest.mark.parametrize("verb", ["pause", "cancel"])
def test_what_was_asked_for_is_written_down_before_slurm_is_asked(ultrabench, unreachable, verb):
    assert "No such file or directory" in one_line(ultrabench, "sweep", verb, code=3)
    state = state_of(unreachable)
    assert (state.paused, state.cancelled) == (verb == "pause", verb == "cancel")
    assert unreachable.pause.exists() == (verb == "pause")


def test_a_resume_takes_the_pause_away(ultrabench, unreachable):
    ultrabench("sweep", "pause")
    assert "Slurm cannot be asked" in one_line(ultrabench, "sweep", "resume", code=3)
    assert not unreachable.pause.exists()
    assert not state_of(unreachable).paused
    # A marker that somebody left by hand goes, too, and says nothing in the journal.
    unreachable.pause.write_text("")
    one_line(ultrabench, "sweep", "resume", code=3)
    assert not unreachable.pause.exists()
    assert [e["on"] for e in said(unreachable, "pause")] == [True, False]


@pytest.mark.parametrize(("repeats", "follows"), [(1, False), (2, True)])
def test_watching_follows_a_sweep_on_a_cluster_while_repeats_are_left(
    ultrabench, unreachable, repeats, follows
):
    settle(unreachable, repeats)
    JournalWriter(unreachable.journal, "agent").write(
        "config", generation=3, config={**SLURM, "repeats": repeats}
    )
    for path in unreachable.journal.glob("launcher-*"):
        path.rename(path.with_name(path.name.replace("launcher", "earlier")))
    code, _, err = ultrabench("sweep", "status", "--watch")
    assert ("nobody follows this sweep: following it from here" in err) is follows
    assert code == (3 if follows else 0)
