"""The fold over what allocations say: starts of a job, its ends, its preflight, its control, its job."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import ALLOCATIONS, allocation_events, attempt_events, attempt_names, control_events
from ultrabench.journal import read_journal
from ultrabench.result import Status
from ultrabench.state import AllocationState, AttemptKey, Fold, fold

NAME = {"run_id": "aaaa", "repeat": 0, "attempt": 0}
KEY = AttemptKey("aaaa", 0, 0)
RESTARTS = st.integers(0, 2)
JOBS = st.fixed_dictionaries({"job_id": st.sampled_from(("57_0", "57_1")), "restart": RESTARTS})


def event(kind, *, writer="w", seq=0, **values):
    return {"v": 1, "writer": writer, "seq": seq, "time": 0.0, "event": kind, **values}


def said(kind, **values):
    return st.fixed_dictionaries(
        {"event": st.just(kind), "allocation": st.sampled_from(ALLOCATIONS), **values}
    )


def slurm_events():
    """What agents and launchers say of jobs that Slurm may start again."""
    return st.one_of(
        said("allocation_started", restart=RESTARTS, agent=st.fixed_dictionaries({"job": JOBS})),
        said(
            "allocation_ended",
            restart=RESTARTS,
            reason=st.sampled_from(("all tasks done", "Slurm ended job 57_0: TIMEOUT", "no time left")),
            elapsed_s=st.none() | st.floats(0, 1e5),
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
        growing.add([shuffled.pop() for _ in range(random.randint(1, len(shuffled)))])
    assert growing.state == state


@given(files=journals())
def test_what_is_known_only_grows_and_the_latest_start_decides(files):
    """A launcher that has read less knows no end, start or job that it would not know later."""
    events = flat(files)
    before, after = fold(events[: len(events) // 2]), fold(events)
    for name, held in after.allocations.items():
        less = before.allocations.get(name, AllocationState(name=name))
        assert less.restart <= held.restart
        assert set(less.ends) <= set(held.ends)
        assert len(less.agents) <= len(held.agents)
        assert (less.job is None) or (held.job is not None)
        assert bool(less.preflight) <= bool(held.preflight)
        _its_latest_start_decides(held, [e for e in events if e.get("allocation") == name])


def _its_latest_start_decides(held, own):
    kinds = ("allocation_started", "allocation_ended")
    ends = [e for e in own if e["event"] == "allocation_ended"]
    assert held.restart == max((e.get("restart", 0) for e in own if e["event"] in kinds), default=0)
    assert (held.ended is not None) == any(e.get("restart", 0) == held.restart for e in ends)
    assert set(held.ends) == {e.get("restart", 0) for e in ends}
    agents = {e.get("restart", 0) for e in ends if e.get("source") == "agent"}
    assert all((held.ends[n]["source"] == "agent") == (n in agents) for n in held.ends)
    assert held.elapsed_s == sum(end["elapsed_s"] for end in held.ends.values())


def start(restart, seq=0):
    agent = {"node": 0, "host": "gpu01", "job": {"job_id": "57_0", "restart": restart}}
    return event(
        "allocation_started", writer=f"a{restart}", seq=seq, allocation="n1", restart=restart, agent=agent
    )


def end(restart, source="agent", *, writer=None, seq=1, **more):
    values = {"reason": "all tasks done", "elapsed_s": 10.0, "avoid": []} | more
    writer = writer or (f"a{restart}" if source == "agent" else "launcher")
    return event(
        "allocation_ended", writer=writer, seq=seq, allocation="n1", restart=restart, source=source, **values
    )


def test_a_requeued_job_lives_again_when_it_starts():
    buried = [start(0), end(0, "launcher", reason="Slurm ended job 57_0: PREEMPTED")]
    assert fold(buried).allocations["n1"].ended == "Slurm ended job 57_0: PREEMPTED"
    revived = fold([*buried, start(1)]).allocations["n1"]
    assert (revived.ended, revived.restart, len(revived.agents)) == (None, 1, 2)
    over = fold([*buried, start(1), end(1, elapsed_s=5.0)]).allocations["n1"]
    assert (over.ended, over.elapsed_s) == ("all tasks done", 15.0)


def test_a_late_word_on_an_earlier_start_does_not_end_the_later():
    held = fold([start(1), end(0, "launcher", reason="vanished")]).allocations["n1"]
    assert (held.ended, held.restart) == (None, 1)


def test_the_agent_is_believed_about_its_own_end():
    for writers in (("a", "z"), ("z", "a")):
        told = end(0, writer=writers[0], reason="no time left", elapsed_s=7.0, avoid=["gpu01"])
        guess = end(0, "launcher", writer=writers[1], reason="Slurm does not know job 57_0", elapsed_s=None)
        for events in ([told, guess], [guess, told]):
            held = fold(events).allocations["n1"]
            assert (held.ended, held.elapsed_s, held.ends[0]["avoid"]) == ("no time left", 7.0, ["gpu01"])


@pytest.mark.parametrize("elapsed", [None, 0, 0.0])
def test_an_unknown_duration_costs_nothing(elapsed):
    assert fold([end(0, "launcher", elapsed_s=elapsed)]).allocations["n1"].elapsed_s == 0.0


def test_a_claim_names_its_job():
    job = {"job_id": "57_0", "restart": 1}
    claimed = event("claimed", **NAME, allocation="n1", job=job, spec={"nodes": 1}, predicted={})
    attempt = fold([claimed]).attempts[KEY]
    assert (attempt.job, attempt.allocation) == (job, "n1")
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
        assert fold(events).allocations["n1"].preflight == {"restart": 1, "nodes": [{"host": "gpu01"}]}


def test_the_control_is_told_with_the_plan():
    planned = event(
        "allocation_planned", allocation="n1", nodes=1, limit_s=60, tasks=[list(KEY)], control="aaaa"
    )
    assert fold([planned]).allocations["n1"].control == "aaaa"
    del planned["control"]
    assert fold([planned]).allocations["n1"].control is None


EACH_EVENT = [
    start(1),
    end(1),
    event("preflight", allocation="n1", found={"probe": {}}),
    event("allocation_planned", allocation="n1", nodes=1, limit_s=1.0, tasks=[list(KEY)], control="aaaa"),
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
                assert isinstance(held.elapsed_s, float | int)
                assert held.ended is None or isinstance(held.ended, str)
                assert all(isinstance(n, str) for one in held.ends.values() for n in one["avoid"])
            for attempt in state.attempts.values():
                assert attempt.job is None or isinstance(attempt.job, dict)
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
