"""The fold over what allocations say: starts of a job, its ends, its preflight, its control, its job."""

from itertools import permutations

import pytest
from hypothesis import given

from tests.strategies import journals, written
from ultrabench.run import AttemptKey
from ultrabench.store.events import (
    AllocationEnded,
    AllocationPlanned,
    AllocationStarted,
    LeadingAgent,
    Preflight,
    Start,
    Submitted,
    Submitting,
)  # fmt: skip
from ultrabench.store.state import AllocationState, fold

KEY = AttemptKey("aaaa", 0, 0)


@given(files=journals())
def test_what_is_known_only_grows_and_the_latest_start_decides(files):
    """A launcher that has read less knows no end, start or job that it would not know later."""
    lines = [line for file in files for line in file]
    before, after = fold(lines[: len(lines) // 2]), fold(lines)
    for name, held in after.allocations.items():
        less = before.allocations.get(name, AllocationState(name=name))
        assert less.start <= held.start
        assert set(less.ends) <= set(held.ends)
        assert set(less.agents) <= set(held.agents)
        assert (less.job is None) or (held.job is not None)
        assert bool(less.preflight) <= bool(held.preflight)
        _its_latest_start_decides(
            held, [e.event for e in lines if getattr(e.event, "allocation", "") == name]
        )


def _its_latest_start_decides(held, own):
    starts = sorted(e.agent.job for e in own if isinstance(e, AllocationStarted))
    told = [e for e in own if isinstance(e, AllocationEnded)]
    ends = {end.job: [e for e in told if e.job == end.job] for end in told}
    assert held.start == (starts[-1] if starts else Start())
    assert set(held.ends) == set(ends)
    mine = {held.start, Start(restart=held.start.restart)}
    assert (held.ended is not None) == bool(mine & set(ends) if starts else ends)
    for start, words in ends.items():
        assert (held.ends[start].source == "agent") == any(e.source == "agent" for e in words)
        assert held.ends[start].held_s == max((e.held_s for e in words if e.held_s is not None), default=None)


def start(restart, job_id="57_0"):
    agent = LeadingAgent(host="gpu01", job=Start(job_id=job_id, restart=restart))
    return AllocationStarted(allocation="n1", agent=agent)


def end(restart, source="agent", *, job_id="57_0", reason="all tasks done", elapsed_s=10.0, **more):
    job = Start(job_id=job_id or "", restart=restart)
    return AllocationEnded(
        allocation="n1", source=source, job=job, reason=reason, elapsed_s=elapsed_s, **more
    )


def planned(limit_s=600.0, **more):
    return AllocationPlanned(allocation="n1", nodes=1, limit_s=limit_s, tasks=(KEY,), **more)


def held_of(*events):
    """The allocation of these events, the same in whatever order they are read and whoever wrote them."""
    orders = [*permutations(events)] if len(events) < 6 else [events, events[::-1]]
    found = [
        fold(written(e, writer=f"w{n}") for n, e in enumerate(order)).allocations["n1"] for order in orders
    ]
    assert all(one == found[0] for one in found)
    return found[0]


def test_a_requeued_job_lives_again_when_it_starts():
    buried = [start(0), end(0, "launcher", reason="Slurm ended job 57_0: PREEMPTED")]
    assert held_of(*buried).ended == "Slurm ended job 57_0: PREEMPTED"
    revived = held_of(*buried, start(1))
    assert (revived.ended, revived.start, len(revived.agents)) == (None, Start(job_id="57_0", restart=1), 2)
    over = held_of(*buried, start(1), end(1, elapsed_s=5.0))
    assert (over.ended, over.held_s) == ("all tasks done", 15.0)


def test_a_late_word_on_an_earlier_start_does_not_end_the_later():
    assert held_of(start(1), end(0, "launcher", reason="vanished")).ended is None
    counted = held_of(start(2), start(10), end(2))
    assert (counted.ended, counted.start.restart) == (None, 10), "restarts are numbers, not words"


@pytest.mark.parametrize("source", ["agent", "launcher"])
def test_the_end_of_a_second_job_does_not_end_an_allocation(source):
    """It was submitted twice, since an answer got lost: the other job runs nothing, and ends when it likes."""
    second = end(0, source, job_id="61_0", reason="Slurm ended job 61_0: CANCELLED")
    held = held_of(start(0), second)
    assert (held.ended, held.end, held.timed) == (None, None, False)
    assert set(held.ends) == {Start(job_id="61_0")}
    over = held_of(start(0), second, end(0))
    assert (over.ended, over.end.source) == ("all tasks done", "agent")
    later = held_of(start(0), end(1, source, job_id="61_0"))
    assert later.ended is None, "its restarts are not those of the owner"


def test_an_end_without_a_job_is_that_of_the_restart():
    """Local processes have no job."""
    assert held_of(start(1), end(0, job_id=None)).ended is None
    assert held_of(start(1), end(1, job_id=None)).ended == "all tasks done"
    both = held_of(start(0), end(0, job_id=None, reason="another"), end(0))
    assert both.ended == "all tasks done", "its own end comes first"


def test_before_agents_have_started_any_end_ends_it():
    never = end(0, "launcher", job_id=None, reason="Slurm does not know job 57_0", elapsed_s=None)
    assert held_of(planned(), never).ended == "Slurm does not know job 57_0"
    assert held_of(planned(), never, end(3, reason="no time left")).ended == "no time left"
    assert held_of(planned()).ended is None


def test_the_agent_is_believed_about_its_own_end():
    told = end(0, reason="no time left", elapsed_s=7.0, avoid=("gpu01",))
    held = held_of(told, end(0, "launcher", reason="Slurm does not know job 57_0", elapsed_s=None))
    assert (held.ended, held.held_s, held.end.avoid) == ("no time left", 7.0, ("gpu01",))


def test_the_batch_system_is_believed_about_the_time_nodes_were_held():
    """It counts the setup before the agents and the clean-up after them; its words change nothing else.

    Launchers may have looked before the last node was free, so the longest time counts.
    """
    told = end(0, reason="no time left", elapsed_s=100.0, avoid=("gpu01",))
    assert (held_of(start(0), told).held_s, held_of(start(0), told).timed) == (100.0, False)
    words = [
        end(0, "slurm", reason=f"held for {s} s", elapsed_s=None, held_s=s)
        for s in (120.0, 130.0, None, 90.0)
    ]
    held = held_of(start(0), told, *words[:3])
    assert (held.ended, held.held_s, held.timed) == ("no time left", 130.0, True)
    assert held.end.avoid == ("gpu01",)
    again = held_of(start(0), *words, end(0), end(1, "slurm", held_s=5.0, elapsed_s=None))
    assert again.held_s == 135.0, "each start held nodes of its own"


@pytest.mark.parametrize(("agents", "elapsed", "held_s"), [
    ((), None, 0.0), ((), 0.0, 0.0), ((0,), None, 600.0), ((0,), 0.0, 0.0), ((0,), 12.5, 12.5),
])  # fmt: skip
def test_an_end_nobody_timed_costs_up_to_the_limit_once_agents_had_started(agents, elapsed, held_s):
    """A budget must hold: what nodes were held for unseen counts as all that it may have been."""
    own = (planned(), *map(start, agents))
    assert (held_of(*own).held_s, held_of(*own).timed) == (0.0, False), "it has not ended"
    held = held_of(*own, end(0, "launcher", elapsed_s=elapsed))
    assert (held.held_s, held.timed) == (held_s, False)
    held = held_of(*own, end(0, "launcher", elapsed_s=elapsed), end(0, "slurm", elapsed_s=None, held_s=45.0))
    assert (held.held_s, held.timed) == (45.0, True)


def test_what_an_allocation_says_of_itself():
    by = {"user": "ann", "cluster": "big", "host": "login1"}
    said = [Submitting(allocation="n1"), Submitted(allocation="n1", job={"pid": 7}), planned(60.0, by=by)]
    held = fold(written(event, seq=n) for n, event in enumerate(said)).allocations["n1"]
    assert (held.nodes, held.limit_s, held.tasks, held.by) == (1, 60.0, (KEY,), by)
    assert (held.submission, held.job, held.ended, held.control) == (("w", 0), {"pid": 7}, None, None)
    assert held_of(planned(control="aaaa")).control == "aaaa"


def test_the_preflight_of_the_latest_start_counts():
    first, second = (
        Preflight(allocation="n1", restart=n, found={"nodes": [{"host": f"gpu{n}"}]}) for n in range(2)
    )
    assert held_of(first, second).preflight == {"nodes": [{"host": "gpu1"}]}
