"""The fold over what allocations say: starts of a job, its ends, its preflight, its control, its job."""

import json
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import (
    ALLOCATIONS,
    allocation_events,
    attempt_events,
    attempt_names,
    control_events,
    lines_of,
)
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.store import state as lines_state
from ultrabench.store.events import Start
from ultrabench.store.journal import read_journal
from ultrabench.store.state import AllocationState, Fold

NAME = {"run_id": "aaaa", "repeat": 0, "attempt": 0}
KEY = AttemptKey("aaaa", 0, 0)
RESTARTS = st.integers(0, 2)
JOBS = st.fixed_dictionaries({"job_id": st.sampled_from(("57_0", "57_1")), "restart": RESTARTS})


def event(kind, *, writer="w", seq=0, **values):
    return {"v": 1, "writer": writer, "seq": seq, "time": 0.0, "event": kind, **values}


def fold(events):
    return lines_state.fold(lines_of(events))


def said(kind, **values):
    return st.fixed_dictionaries(
        {"event": st.just(kind), "allocation": st.sampled_from(ALLOCATIONS), **values}
    )


def slurm_events():
    """What agents and launchers say of jobs that Slurm may start again."""
    return st.one_of(
        said("allocation_started", restart=RESTARTS, agent=st.fixed_dictionaries({"job": st.none() | JOBS})),
        said(
            "allocation_ended",
            restart=RESTARTS,
            reason=st.sampled_from(("all tasks done", "Slurm ended job 57_0: TIMEOUT", "no time left")),
            job=st.none() | JOBS,
            elapsed_s=st.none() | st.floats(0, 1e5),
            held_s=st.none() | st.floats(0, 1e5),
            avoid=st.lists(st.sampled_from(("gpu01", "gpu02")), max_size=2),
            source=st.sampled_from(("agent", "launcher")),
        ),
        said("preflight", found=st.dictionaries(st.sampled_from(("probe", "nodes")), st.integers(0, 3))),
        said("submitted", job=JOBS),
        said(
            "allocation_planned", nodes=st.integers(1, 4), limit_s=st.floats(1, 1e4), tasks=st.just([]),
            control=st.none() | st.just("cccc"),
        ),
        st.builds(
            lambda name, job, rest: {**rest, **name, "job": job},
            attempt_names(), st.none() | JOBS, said("claimed", predicted=st.just({})),
        ),
    )  # fmt: skip


@st.composite
def journals(draw):
    """The files of up to three writers."""
    events = slurm_events() | slurm_events() | allocation_events() | attempt_events() | control_events()
    files = []
    for n in range(draw(st.integers(1, 3))):
        told = draw(st.lists(events, max_size=5))
        files.append([{"v": 1, "writer": f"w{n}", "seq": i, "time": 0.0, **e} for i, e in enumerate(told)])
    return files


def flat(files):
    return [e for file in files for e in file]


@given(files=journals(), random=st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter(files, random):
    events = flat(files)
    state = fold(events)
    shuffled = [*events, *(random.choice(events) for _ in events)]
    random.shuffle(shuffled)
    assert fold(shuffled) == state
    growing = Fold()
    while shuffled:
        growing.add(lines_of([shuffled.pop() for _ in range(random.randint(1, len(shuffled)))]))
    assert growing.state == state


@given(files=journals())
def test_what_is_known_only_grows_and_the_latest_start_decides(files):
    """A launcher that has read less knows no end, start or job that it would not know later."""
    events = flat(files)
    before, after = fold(events[: len(events) // 2]), fold(events)
    for name, held in after.allocations.items():
        less = before.allocations.get(name, AllocationState(name=name))
        assert less.start.restart <= held.start.restart
        assert set(less.ends) <= set(held.ends)
        assert len(less.agents) <= len(held.agents)
        assert (less.job is None) or (held.job is not None)
        assert bool(less.preflight) <= bool(held.preflight)
        _its_latest_start_decides(held, [e for e in events if e.get("allocation") == name])


def _its_latest_start_decides(held, own):
    agents = [e["agent"] for e in own if e["event"] == "allocation_started"]
    starts = sorted((_named(agent.get("job"), 0) for agent in agents), key=lambda s: (s.restart, s.job_id))
    assert held.start == (starts[-1] if starts else Start())
    ends = {}
    for e in own:
        if e["event"] == "allocation_ended":
            ends.setdefault(_named(e.get("job"), e.get("restart", 0)), []).append(e)
    assert set(held.ends) == set(ends)
    mine = {held.start, Start(restart=held.start.restart)}
    assert (held.ended is not None) == bool(mine & set(ends) if starts else ends)
    spent = 0.0
    for start, told in ends.items():
        end = held.ends[start]
        assert (end.source == "agent") == any(e.get("source") == "agent" for e in told)
        slurm = [e["held_s"] for e in told if e.get("held_s") is not None]
        assert end.held_s == max(slurm, default=None)
        known = [*slurm, *([end.elapsed_s] if end.elapsed_s is not None else [])]
        spent += max(known, default=held.limit_s if starts else 0.0)
    assert held.held_s == pytest.approx(spent)


def _named(job, restart):
    return Start(**job) if job else Start(restart=restart)


def start(restart, seq=0, job_id="57_0"):
    agent = {"node": 0, "host": "gpu01", "job": {"job_id": job_id, "restart": restart}}
    return event(
        "allocation_started", writer=f"a{restart}", seq=seq, allocation="n1", restart=restart, agent=agent
    )


def end(restart, source="agent", *, writer=None, seq=1, job_id="57_0", **more):
    values = {"reason": "all tasks done", "elapsed_s": 10.0, "avoid": []} | more
    writer = writer or (f"a{restart}" if source == "agent" else "launcher")
    job = job_id and {"job_id": job_id, "restart": restart}
    return event(
        "allocation_ended", writer=writer, seq=seq, allocation="n1", restart=restart, source=source, job=job,
        **values,
    )  # fmt: skip


def planned(limit_s=600.0, **more):
    return event(
        "allocation_planned", writer="p", allocation="n1", nodes=1, limit_s=limit_s, tasks=[list(KEY)], **more
    )


def held_of(*events):
    """The allocation of these events, the same in whatever order they are read."""
    orders = [*permutations(events)] if len(events) < 6 else [events, events[::-1]]
    found = [fold(order).allocations["n1"] for order in orders]
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
    held = held_of(start(1), end(0, "launcher", reason="vanished"))
    assert (held.ended, held.start) == (None, Start(job_id="57_0", restart=1))


def test_restarts_are_counted_and_not_sorted_as_words():
    held = held_of(start(2), start(10), end(2))
    assert (held.ended, held.start) == (None, Start(job_id="57_0", restart=10))


@pytest.mark.parametrize("source", ["agent", "launcher"])
def test_the_end_of_a_second_job_does_not_end_an_allocation(source):
    """It was submitted twice, since an answer got lost: the other job runs nothing, and ends when it likes."""
    second = end(0, source, writer="z", job_id="61_0", reason="Slurm ended job 61_0: CANCELLED")
    held = held_of(start(0), second)
    assert (held.ended, held.end, held.timed) == (None, None, False)
    assert set(held.ends) == {Start(job_id="61_0", restart=0)}
    over = held_of(start(0), second, end(0))
    assert (over.ended, over.end.source) == ("all tasks done", "agent")
    later = held_of(start(0), end(1, source, writer="z", job_id="61_0"))
    assert later.ended is None, "its restarts are not those of the owner"


def test_an_end_without_a_job_is_that_of_the_restart():
    """Older agents named none, local processes have none."""
    assert held_of(start(1), end(0, job_id=None)).ended is None
    assert held_of(start(1), end(1, job_id=None)).ended == "all tasks done"
    both = held_of(start(0), end(0, job_id=None, writer="z", reason="another"), end(0))
    assert both.ended == "all tasks done", "its own end comes first"


def test_before_agents_have_started_any_end_ends_it():
    never = end(0, "launcher", job_id=None, reason="Slurm does not know job 57_0", elapsed_s=None)
    assert held_of(planned(), never).ended == "Slurm does not know job 57_0"
    agent = end(3, "agent", reason="no time left")
    assert held_of(planned(), never, agent).ended == "no time left"
    assert held_of(planned()).ended is None


def test_the_agent_is_believed_about_its_own_end():
    for writers in (("a", "z"), ("z", "a")):
        told = end(0, writer=writers[0], reason="no time left", elapsed_s=7.0, avoid=["gpu01"])
        guess = end(0, "launcher", writer=writers[1], reason="Slurm does not know job 57_0", elapsed_s=None)
        held = held_of(told, guess)
        assert (held.ended, held.held_s, list(held.end.avoid)) == ("no time left", 7.0, ["gpu01"])


def test_the_batch_system_is_believed_about_the_time_nodes_were_held():
    """It counts the setup before the agents and the clean-up after them; its words change nothing else."""
    told = end(0, reason="no time left", elapsed_s=100.0, avoid=["gpu01"])
    slurm = end(0, "launcher", reason="held for 130 s", elapsed_s=None, held_s=130.0)
    held = held_of(start(0), told, slurm)
    assert (held.ended, held.held_s, held.timed) == ("no time left", 130.0, True)
    assert list(held.end.avoid) == ["gpu01"]
    assert not held_of(start(0), told).timed
    assert held_of(start(0), told).held_s == 100.0


def test_of_several_words_on_the_time_the_largest_counts():
    """Launchers may have looked before the last node was free."""
    words = [
        end(0, "launcher", writer=f"l{n}", reason=f"held for {s} s", elapsed_s=None, held_s=s)
        for n, s in enumerate((120.0, 130.0, None, 90.0))
    ]
    held = held_of(start(0), *words)
    assert (held.held_s, held.end.held_s) == (130.0, 130.0)
    again = held_of(start(0), *words, end(0), end(1, "launcher", writer="l9", held_s=5.0, elapsed_s=None))
    assert again.held_s == 135.0, "each start held nodes of its own"


@pytest.mark.parametrize(("agents", "elapsed", "held_s"), [
    ((), None, 0.0), ((), 0, 0.0), ((), 0.0, 0.0),
    ((0,), None, 600.0), ((0,), 0, 0.0), ((0,), 12.5, 12.5),
])  # fmt: skip
def test_an_end_nobody_timed_costs_up_to_the_limit_once_agents_had_started(agents, elapsed, held_s):
    """A budget must hold: what nodes were held for unseen counts as all that it may have been."""
    held = held_of(planned(), *map(start, agents), end(0, "launcher", elapsed_s=elapsed))
    assert (held.held_s, held.timed) == (held_s, False)
    slurm = end(0, "launcher", writer="z", elapsed_s=None, held_s=45.0)
    held = held_of(planned(), *map(start, agents), end(0, "launcher", elapsed_s=elapsed), slurm)
    assert (held.held_s, held.timed) == (45.0, True)


def test_what_has_not_ended_has_held_nothing_that_is_known():
    held = held_of(planned(), start(0))
    assert (held.held_s, held.timed) == (0.0, False)


def test_the_plan_says_who_submits():
    by = {"user": "ann", "cluster": "big", "host": "login1"}
    assert held_of(planned(by=by)).by == by
    assert held_of(planned()).by == {}


def test_a_claim_names_its_job():
    job = {"job_id": "57_0", "restart": 1}
    claimed = event("claimed", **NAME, allocation="n1", job=job, spec={"nodes": 1}, predicted={})
    attempt = fold([claimed]).attempts[KEY]
    assert (attempt.job, attempt.allocation) == (Start(**job), "n1")
    assert fold([{**claimed, "job": None}]).attempts[KEY].job is None


def test_a_result_of_an_earlier_start_beats_its_burial():
    lost = event(
        "failed", writer="a1", **NAME, allocation="n1", source="slurm",
        result={"status": "lost", "reason": "job 57_0 was requeued while it ran"},
    )  # fmt: skip
    done = event(
        "result", writer="a0", **NAME, source="agent", result={"status": "ok", "step_times_s": [0.1]}
    )
    assert fold([lost, done]).attempts[KEY].result.status == Status.OK
    crashed = event("failed", writer="a0", **NAME, source="agent", result={"status": "crash", "reason": "x"})
    assert fold([lost, crashed]).attempts[KEY].result.status == Status.CRASH
    assert fold([lost]).attempts[KEY].result.status == Status.LOST


def test_the_preflight_of_the_latest_start_counts():
    first = event("preflight", seq=1, allocation="n1", found={"nodes": [{"host": "gpu09"}]})
    second = event("preflight", allocation="n1", restart=1, found={"nodes": [{"host": "gpu01"}]})
    for events in ([first, second], [second, first]):
        assert fold(events).allocations["n1"].preflight == {"nodes": [{"host": "gpu01"}]}


def test_the_control_is_told_with_the_plan():
    assert fold([planned(control="aaaa")]).allocations["n1"].control == "aaaa"
    assert fold([planned()]).allocations["n1"].control is None


EACH_EVENT = [
    start(1),
    end(1, held_s=3.0),
    event("preflight", allocation="n1", found={"probe": {}}),
    planned(control="aaaa", by={"user": "ann", "cluster": "", "host": "here"}),
    event("submitted", allocation="n1", job={"job_id": "57_0"}),
    event("claimed", **NAME, allocation="n1", job={"job_id": "57_0", "restart": 0}, spec={}, predicted={}),
]
JUNK = [None, "x", -1, 0.5, [], [1], [[1]], {}, {"a": 1}, True, "7" * 40, float("nan"), float("inf")]


@pytest.mark.parametrize("whole", EACH_EVENT, ids=lambda e: e["event"])
def test_nonsense_in_a_field_leaves_the_types_alone(whole):
    for field in set(whole) - {"v", "writer", "seq", "event"}:
        for junk in JUNK:
            state = fold([{**whole, field: junk}])
            for held in state.allocations.values():
                assert held.job is None or isinstance(held.job, dict)
                assert isinstance(held.preflight, dict)
                assert isinstance(held.held_s, float | int)
                assert isinstance(held.by, dict)
                assert [type(held.start.job_id), type(held.start.restart)] == [str, int]
                assert held.timed in (False, True)
                assert held.ended is None or isinstance(held.ended, str)
                assert all(isinstance(n, str) for one in held.ends.values() for n in one.avoid)
            for attempt in state.attempts.values():
                assert attempt.job is None or isinstance(attempt.job, Start)
                assert attempt.spec is None or isinstance(attempt.spec, dict)
                assert isinstance(attempt.predicted, dict)


def test_a_damaged_line_told_twice_breaks_nothing():
    damaged = event("preflight", allocation="n1", found={"probe": float("nan")})
    assert fold([damaged, damaged]) == fold([damaged])


@pytest.mark.parametrize("field", ["v", "seq"])
def test_a_number_without_end_is_no_event(tmp_path, field):
    (tmp_path / "w.jsonl").write_text(
        json.dumps({**event("cancel", generation=1), field: float("inf")}) + "\n"
    )
    told = []
    assert list(read_journal(tmp_path, told.append)) == []
    assert "skipped a corrupt line" in told[0]
