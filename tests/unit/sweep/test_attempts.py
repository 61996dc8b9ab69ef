import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import left, retry
from tests.strategies import FAILURES
from tests.unit.allocations import open_sweep, told
from tests.unit.launchers.played import Played, reconciler_of
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import Failed
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import PlannedAttempt
from ultrabench.sweep.running.price import RUN_LIMIT_FACTOR, pack, run_limit_s

FREE_TRIES = 5
CONFIG = load_config([])
RUNS = make_plan(CONFIG).runs
ONE, TWO, THREE = RUNS[:3]
NOBODY = frozenset()
ENDS = (Status.OK, *FAILURES)


def state_of(*attempts, retried=()):
    """A state of (run, repeat, attempt, status); status None means no end was told."""
    made = SweepState(retried=frozenset(retried))
    for run, repeat, attempt, status in attempts:
        told(made, run, status, repeat, attempt)
    return made


def history(*statuses, run=ONE):
    return state_of(*((run, 0, n, status) for n, status in enumerate(statuses)))


def keys(decision):
    return [(t.key.run_id, t.key.repeat, t.key.attempt) for t in decision.todo]


def todo_after(*statuses):
    decision = left([ONE], history(*statuses), NOBODY)
    return decision.todo[0] if decision.todo else None


@st.composite
def states(draw):
    """Any state of three runs: each repeat has attempts 0, 1, 2 .. with ends, the last maybe open."""
    attempts = []
    for run in (ONE, TWO, THREE):
        for repeat in draw(st.sets(st.integers(0, 3))):
            ends = draw(st.lists(st.sampled_from(ENDS), max_size=8))
            attempts += [(run, repeat, n, status) for n, status in enumerate(ends)]
            if draw(st.booleans()):
                attempts.append((run, repeat, len(ends), None))
    state = state_of(*attempts)
    state.retried = frozenset(k for k in state.attempts if draw(st.booleans()))
    open_keys = [k for k, a in state.attempts.items() if a.result is None]
    for n, key in enumerate(open_keys):
        name = f"n1-{n}"
        state.allocations[name] = AllocationState(name=name, tasks=(key,))
    return state


@given(state=states(), repeats=st.integers(1, 3), data=st.data())
def test_what_is_to_do_is_new_and_named_once(state, repeats, data):
    alive = frozenset(a for a in state.allocations if data.draw(st.booleans()))
    decision = left([ONE, TWO, THREE], state, alive, repeats=repeats)
    found = [t.key for t in decision.todo]
    assert len(found) == len(set(found))
    for todo in decision.todo:
        held = state.attempts.get(todo.key)
        assert held is None or held.result is None
        assert todo.key.run_id == todo.candidate.spec.run_id
        assert todo.patience >= 1.0
    running = {key for name in alive for key in state.allocations[name].tasks}
    assert not running & set(found)
    assert decision.waiting == len(running)


@pytest.mark.parametrize(
    ("status", "tries"),
    [
        (Status.OK, 1),
        (Status.OOM, 2),  # nothing confirms it: one repeat
        (Status.CRASH, 1), (Status.TIMEOUT, 2), (Status.INVALID, 2), (Status.HANG, 3), (Status.COMM_ERROR, 3),
        (Status.NODE_FAIL, FREE_TRIES + 1), (Status.PREEMPTED, FREE_TRIES + 1), (Status.LOST, FREE_TRIES + 1),
        (Status.CANCELLED, FREE_TRIES + 1),
    ],
)  # fmt: skip
def test_how_often_each_status_is_tried(status, tries):
    for made in range(1, tries):
        again = todo_after(*[status] * made)
        assert again.key == AttemptKey(ONE.spec.run_id, 0, made)
    assert todo_after(*[status] * tries) is None


@pytest.mark.parametrize(
    ("statuses", "again"),
    [
        (("hang", "crash"), False), (("crash", "hang"), True), (("hang", "comm_error", "hang"), True),
        (("lost", "node_fail", "preempted", "lost", "lost"), True),
        (("lost", "node_fail", "preempted", "lost", "lost", "node_fail"), False),
        (("hang", "hang", "lost"), True), (("timeout", "hang", "timeout"), False),
        (("oom", "cancelled"), True),
    ],
)  # fmt: skip
def test_mixed_histories(statuses, again):
    assert (todo_after(*map(Status, statuses)) is not None) is again


@pytest.mark.parametrize(
    ("statuses", "patience"), [((), 1.0), (("hang",), 1.0), (("timeout",), 2.0),
                               (("timeout", "lost"), 2.0), (("timeout", "timeout", "lost"), 4.0)],
)  # fmt: skip
def test_what_timed_out_gets_more_patience(statuses, patience):
    assert todo_after(*map(Status, statuses)).patience == patience


def test_a_retry_by_the_user_overrides_the_policy_once():
    run_id = ONE.spec.run_id
    crashed = history(Status.CRASH)
    crashed.retried = frozenset({AttemptKey(run_id, 0, 0)})
    assert keys(left([ONE], crashed, NOBODY)) == [(run_id, 0, 1)]
    twice = history(Status.CRASH, Status.CRASH)
    twice.retried = crashed.retried
    assert left([ONE], twice, NOBODY).over


def test_repeats_go_round_the_whole_plan_first():
    decision = left([ONE, TWO], SweepState(), NOBODY, repeats=2)
    first, second = ONE.spec.run_id, TWO.spec.run_id
    assert keys(decision) == [(first, 0, 0), (second, 0, 0), (first, 1, 0), (second, 1, 0)]


def test_repeats_are_counted_one_by_one():
    state = state_of((ONE, 0, 0, Status.OK), (ONE, 1, 0, Status.HANG))
    run_id = ONE.spec.run_id
    assert keys(left([ONE], state, NOBODY, repeats=3)) == [(run_id, 1, 1), (run_id, 2, 0)]


def elsewhere(result):
    return result.env_id == "here"


def test_a_result_of_another_environment_needs_a_new_repeat():
    state = history(Status.OK)
    run_id = ONE.spec.run_id
    assert keys(left([ONE], state, NOBODY, accepts=elsewhere, begun=frozenset(state.attempts))) == [
        (run_id, 1, 0)
    ]
    assert left([ONE], state, NOBODY, accepts=elsewhere).over, "what this launch has measured counts"
    assert not left([ONE], state, NOBODY, accepts=elsewhere, begun=frozenset(state.attempts)).over, (
        "although it ran on"
    )
    told(state, ONE, Status.OK, 1, env_id="here")
    assert left([ONE], state, NOBODY, accepts=elsewhere).over
    assert left([ONE], state, NOBODY, repeats=2, accepts=lambda result: True).over


def test_repeats_elsewhere_and_here_are_counted_apart():
    state = state_of((ONE, 0, 0, Status.OK), (ONE, 1, 0, Status.OK))
    old = frozenset(state.attempts)
    found = keys(left([ONE], state, NOBODY, repeats=2, accepts=elsewhere, begun=old))
    assert found == [(ONE.spec.run_id, 2, 0), (ONE.spec.run_id, 3, 0)]


def test_what_an_allocation_holds_is_waited_for():
    key = AttemptKey(ONE.spec.run_id, 0, 0)
    state = SweepState(allocations={"n1": AllocationState(name="n1", tasks=(key,))})
    waiting = left([ONE], state, frozenset({"n1"}))
    assert (waiting.todo, waiting.waiting, waiting.over) == ((), 1, False)
    assert keys(left([ONE], state, NOBODY)) == [key]


def test_an_end_not_told_yet_is_waited_for_under_the_same_name():
    assert todo_after(None).key.attempt == 0
    assert todo_after(Status.LOST, None).key.attempt == 1


# pauses after failures

RESTING = retry(backoff_s=60.0, backoff_max_s=100.0)


def failed_at(started_at, *statuses):
    """Attempts of ONE by the clock of some node."""
    state = history(*statuses)
    for key, attempt in state.attempts.items():
        ended = replace(attempt.result, started_at=started_at + 100 * key.attempt, duration_s=9.0)
        state.attempts[key] = replace(attempt, result=ended)
    return state


@pytest.mark.parametrize("clock_off_s", [0.0, -3600.0, 3600.0, 1e9, None])
def test_a_pause_counts_from_when_its_end_was_seen_whatever_clocks_say(clock_off_s):
    """The clocks of nodes may be an hour off, and some results have no time at all."""
    state = history(Status.HANG)
    if clock_off_s is not None:
        state = failed_at(time.time() + clock_off_s, Status.HANG)
    first, again = (AttemptKey(ONE.spec.run_id, 0, n) for n in range(2))
    for ago_s, rests in ((0.0, True), (59.9, True), (60.0, False), (1e6, False)):
        decision = left([ONE], state, NOBODY, policy=RESTING, ended_s={first: ago_s})
        assert keys(decision) == ([] if rests else [again])
        assert (decision.waiting, decision.over) == (int(rests), False)


def test_it_is_the_end_of_the_latest_attempt_that_counts():
    state = failed_at(0.0, Status.HANG, Status.HANG)
    first, second = state.attempts
    for first_s, second_s, rests in ((500.0, 99.0, True), (0.0, 100.0, False), (500.0, 100.0, False)):
        ended_s = {first: first_s, second: second_s}
        decision = left([ONE], state, NOBODY, policy=RESTING, ended_s=ended_s)
        assert bool(decision.todo) is not rests


def test_a_resting_run_keeps_no_other_waiting():
    ended_s = {AttemptKey(ONE.spec.run_id, 0, 0): 1.0}
    decision = left([ONE, TWO], failed_at(0.0, Status.HANG), NOBODY, policy=RESTING, ended_s=ended_s)
    assert keys(decision) == [(TWO.spec.run_id, 0, 0)]
    assert decision.waiting == 1


@pytest.mark.parametrize("clock_off_s", [-3600.0, 3600.0])
def test_a_launcher_counts_pauses_by_its_own_clock(tmp_path, monkeypatch, clock_off_s):
    config = load_config(["model=tiny", "retry.backoff_s=60"])
    plan = make_plan(config)
    sweep = open_sweep(tmp_path, replace(plan, candidates=plan.runs[:1]))
    sweep = replace(sweep, kernel_digest=sweep.config.kernel.digest())
    sweep.folder.create()
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    run_id = plan.runs[0].run_id

    def fail(attempt):
        hang = RunResult(status=Status.HANG, started_at=time.time() + clock_off_s, duration_s=9.0)
        sweep.journal.write(Failed(run_id=run_id, repeat=0, attempt=attempt, source="agent", result=hang))

    fail(0)
    reconciler = reconciler_of(sweep, Played())

    def step():
        actions = reconciler._decide(*reversed(reconciler.settler.look()))
        return [tuple(t.key) for job in actions.submit for t in job.attempts]

    assert step() == [(run_id, 0, 1)], "it ended before this launch"
    fail(1)
    for wait_s, ready in ((0.0, False), (60.0, False), (59.0, False), (6.0, True)):
        clock[0] += wait_s
        assert step() == [(run_id, 0, 2)] * ready


# pack


def todos(numbers):
    """Attempts of the default sweep's runs: (index of the run, repeat)."""
    return [
        PlannedAttempt(candidate=RUNS[i % len(RUNS)], key=AttemptKey(RUNS[i % len(RUNS)].spec.run_id, r, n))
        for n, (i, r) in enumerate(numbers)
    ]


def with_launcher(**words):
    return replace(CONFIG, launcher=replace(CONFIG.launcher, **words))


@given(
    numbers=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2)), max_size=30),
    most=st.none() | st.integers(1, 5),
    minutes=st.floats(0.1, 30),
)
def test_pack_loses_nothing_and_keeps_the_order(numbers, most, minutes):
    items = todos(numbers)
    config = with_launcher(pack=most, allocation_minutes=minutes)
    groups = pack(items, config)
    place = {t.key: n for n, t in enumerate(items)}
    assert sorted(place[t.key] for g in groups for t in g) == list(range(len(items)))
    firsts = [place[group[0].key] for group in groups]
    assert firsts == sorted(firsts)
    for group in groups:
        at = [place[t.key] for t in group]
        assert at == sorted(at)
        assert len({(t.candidate.nodes, t.key.repeat) for t in group}) == 1
        assert most is None or len(group) <= most
        total = sum(t.candidate.prediction.duration_s for t in group)
        assert len(group) == 1 or total <= 60 * minutes * (1 + 1e-9)


def test_pack_fills_an_allocation_before_the_next():
    same_nodes = [i for i, r in enumerate(RUNS) if r.nodes == RUNS[0].nodes][:5]
    groups = pack(todos([(i, 0) for i in same_nodes]), with_launcher(pack=2))
    assert [len(g) for g in groups] == [2, 2, 1]


def test_the_limit_of_a_run_follows_prediction_and_patience():
    todo = todos([(0, 0)])[0]
    short = run_limit_s(todo, CONFIG)
    assert short == CONFIG.measure.run_limit_s
    assert run_limit_s(replace(todo, patience=2.0), CONFIG) == 2 * short
    slow = replace(todo.candidate, predicted=replace(todo.candidate.prediction, duration_s=1e6))
    assert run_limit_s(replace(todo, candidate=slow), CONFIG) == RUN_LIMIT_FACTOR * 1e6
