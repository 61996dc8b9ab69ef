"""The attempts that a sweep still needs, what is held back, and what a launch submits of them within its limits."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import left, measure, retry
from tests.strategies import FAILURES
from tests.unit.allocations import PLAN, key_of, open_sweep, told, with_launcher
from tests.unit.launchers.played import Played, reconciler_of
from ultrabench.record import raw_json
from ultrabench.result import RunResult, Status
from ultrabench.store.events import Failed
from ultrabench.store.jobs_seen import JobLimits, JobsSeen
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import Launch
from ultrabench.sweep.running.decide import Actions, decide

ONES = [run for run in PLAN.runs if run.nodes == 1]
RUNS = [*ONES[:3], *[run for run in PLAN.runs if run.nodes == 2][:3]]
ONE, TWO, *_ = ONES


def state_of(*attempts):
    """A state of (run, repeat, attempt, status); status None means no end was told."""
    state = SweepState()
    for run, repeat, attempt, status in attempts:
        told(state, run, status and Status(status), repeat, attempt)
    return state


def history(*statuses):
    return state_of(*((ONE, 0, n, status) for n, status in enumerate(statuses)))


def holds(state, name, *runs):
    """Adds an allocation that holds the first attempts of these runs."""
    tasks = tuple(key_of(run) for run in runs)
    state.allocations[name] = AllocationState(name=name, nodes=runs[0].nodes, tasks=tasks)
    return state


def keys(decision):
    return [t.key for t in decision.todo]


@st.composite
def states(draw):
    """Any state of six runs: each repeat has attempts 0, 1, 2 .. with ends; an open one may be in an allocation."""
    attempts = []
    for run in RUNS:
        for repeat in draw(st.sets(st.integers(0, 2), max_size=2)):
            ends = draw(st.lists(st.sampled_from((Status.OK, *FAILURES)), max_size=6))
            attempts += [(run, repeat, n, status) for n, status in enumerate(ends)]
            if draw(st.booleans()):
                attempts.append((run, repeat, len(ends), None))
    state = state_of(*attempts)
    state.retried = frozenset(k for k in state.attempts if draw(st.booleans()))
    nodes = {run.run_id: run.nodes for run in RUNS}
    for n, key in enumerate(k for k, a in state.attempts.items() if a.result is None):
        allocation = AllocationState(name=f"a{n}", nodes=nodes[key.run_id], tasks=(key,))
        state.allocations[allocation.name] = allocation
    return state


@given(state=states(), repeats=st.integers(1, 3), data=st.data())
def test_what_is_to_do_is_new_and_named_once_and_nothing_is_lost_by_holding_back(state, repeats, data):
    alive = frozenset(a for a in state.allocations if data.draw(st.booleans()))
    free = left(RUNS, state, alive, repeats=repeats)
    todos = keys(free)
    assert len(todos) == len(set(todos))
    assert all(todo.key.run_id == todo.candidate.run_id and todo.limit_factor >= 1.0 for todo in free.todo)
    assert not any(state.attempts[key].result for key in state.attempts.keys() & {*todos})
    running = {key for name in alive for key in state.allocations[name].tasks}
    assert not running & set(todos)
    assert free.num_waiting == len(running)
    wary = left(RUNS, state, alive, repeats=repeats, canary=True)
    assert {*keys(wary)} <= {*todos}
    assert (len(wary.todo) + wary.num_waiting, wary.is_over) == (len(todos) + free.num_waiting, free.is_over)
    assert wary.todo or wary.is_over or alive, "whatever is held back waits for something that is alive"


FREE_TRIES = 5
TRIES = {
    "ok": 1, "oom": 2,  # nothing confirms it: one repeat
    "crash": 1, "timeout": 2, "invalid": 2, "hang": 3, "comm_error": 3,
    **dict.fromkeys(("node_fail", "preempted", "lost", "cancelled"), FREE_TRIES + 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "patience"),
    [
        *(((status,) * (tries - 1), 2.0 if status == "timeout" else 1.0) for status, tries in TRIES.items()),
        *(((status,) * tries, None) for status, tries in TRIES.items()),
        (("hang", "crash"), None), (("crash", "hang"), 1.0), (("hang", "comm_error", "hang"), 1.0),
        (("lost", "node_fail", "preempted", "lost", "lost"), 1.0),
        (("lost", "node_fail", "preempted", "lost", "lost", "node_fail"), None),
        (("hang", "hang", "lost"), 1.0), (("timeout", "hang", "timeout"), None), (("oom", "cancelled"), 1.0),
        (("timeout", "lost"), 2.0), (("timeout", "timeout", "lost"), 4.0),
    ],
)  # fmt: skip
def test_how_often_a_run_is_tried_and_with_how_much_patience(statuses, patience):
    retries = [(t.key, t.limit_factor) for t in left([ONE], history(*statuses)).todo]
    assert retries == ([] if patience is None else [(key_of(ONE, attempt=len(statuses)), patience)])


@pytest.mark.parametrize("statuses", [(None,), ("lost", None)])
def test_an_end_not_told_yet_is_waited_for_under_the_same_name(statuses):
    assert keys(left([ONE], history(*statuses))) == [key_of(ONE, attempt=len(statuses) - 1)]


def test_a_retry_by_the_user_overrides_the_policy_once():
    for statuses, todo_keys in ((("crash",), [key_of(ONE, attempt=1)]), (("crash", "crash"), [])):
        state = history(*statuses)
        state.retried = frozenset({key_of(ONE)})
        assert keys(left([ONE], state)) == todo_keys


def test_repeats_go_round_the_whole_plan_first_and_are_counted_one_by_one():
    whole = left([ONE, TWO], SweepState(), repeats=2)
    assert keys(whole) == [key_of(run, repeat) for repeat in (0, 1) for run in (ONE, TWO)]
    state = state_of((ONE, 0, 0, "ok"), (ONE, 1, 0, "hang"))
    assert keys(left([ONE], state, repeats=3)) == [key_of(ONE, 1, 1), key_of(ONE, 2)]


def elsewhere(result):
    return result.env_id == "here"


def test_a_result_of_another_environment_needs_a_new_repeat():
    state = history("ok")
    begun = frozenset(state.attempts)
    assert left([ONE], state, accepts=elsewhere).is_over, "what this launch has measured counts"
    assert keys(left([ONE], state, accepts=elsewhere, begun_attempts=begun)) == [key_of(ONE, 1)]
    told(state, ONE, Status.OK, 1, env_id="here")
    assert left([ONE], state, accepts=elsewhere, begun_attempts=begun).is_over
    assert left([ONE], state, repeats=2).is_over
    todo_keys = keys(left([ONE], state, repeats=3, accepts=elsewhere, begun_attempts=begun))
    assert todo_keys == [key_of(ONE, 2), key_of(ONE, 3)], "repeats elsewhere are not counted"


def test_repeats_in_another_environment_are_made_again_a_bounded_number_of_times():
    state = history("ok")
    told(state, ONE, Status.OK, 1, torch_version="2.11")
    assert keys(left([ONE], state, repeats=2)) == [key_of(ONE, 2)]
    told(state, ONE, Status.OK, 2, driver_version="535")
    assert left([ONE], state, repeats=2).is_over, "drivers alone make no environment"
    for repeat in range(10):
        told(state, TWO, Status.OK, repeat, torch_version=f"2.{repeat}")
        if left([TWO], state, repeats=3).is_over:
            break
    assert repeat == 5, "where each node has an environment of its own, as many again as are wanted"


# pauses after failures


@pytest.mark.parametrize(
    ("ended_s", "rests"),
    [((0.0,), True), ((59.9,), True), ((60.0,), False), ((500.0, 99.0), True), ((0.0, 100.0), False)],
)
def test_a_pause_counts_from_the_end_of_the_latest_attempt_and_keeps_no_other_run_waiting(ended_s, rests):
    state = history(*["hang"] * len(ended_s))
    ago_s = dict(zip(state.attempts, ended_s, strict=True))
    decision = left([ONE, TWO], state, policy=retry(backoff_s=60.0, backoff_max_s=100.0), since_end_s=ago_s)
    retry_key = key_of(ONE, attempt=len(ended_s))
    assert keys(decision) == ([key_of(TWO)] if rests else [retry_key, key_of(TWO)])
    assert decision.num_waiting == int(rests)


def test_a_launcher_counts_pauses_by_its_own_clock(tmp_path, monkeypatch):
    plan = make_plan(load_config(["model=tiny", "retry.backoff_s=60"]))
    sweep = open_sweep(tmp_path, replace(plan, candidates=plan.runs[:1]))
    sweep = replace(sweep, kernel_digest=sweep.config.kernel.digest())
    sweep.folder.create()
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    run = plan.runs[0]

    def fail(attempt):
        node_s = time.time() + 3600.0 * (-1) ** attempt  # the clocks of nodes are wrong
        hang = RunResult(status=Status.HANG, started_at=node_s, duration_s=9.0)
        sweep.journal.write(Failed(run_id=run.run_id, repeat=0, attempt=attempt, source="agent", result=hang))

    fail(0)
    reconciler = reconciler_of(sweep, Played())

    def step():
        actions = reconciler._decide(*reversed(reconciler.recorder.look()))
        return [t.key for job in actions.submit for t in job.attempts]

    assert step() == [key_of(run, attempt=1)], "it ended before this launch"
    fail(1)
    for wait_s, ready in ((0.0, False), (60.0, False), (59.0, False), (6.0, True)):
        clock[0] += wait_s
        assert step() == [key_of(run, attempt=2)] * ready


# one allocation of each number of nodes is tried first


def canary(state, *alive):
    decision = left(RUNS, state, frozenset(alive), canary=True)
    return [t.candidate.nodes for t in decision.todo], decision.untried_node_counts, decision.num_waiting


def test_the_rest_of_a_size_waits_for_its_first_allocation():
    assert canary(SweepState()) == ([1, 1, 1, 2, 2, 2], {1, 2}, 0)
    assert left(RUNS, SweepState()).untried_node_counts == frozenset()
    assert canary(holds(SweepState(), "n1-a.0", ONE), "n1-a.0") == ([2, 2, 2], {1, 2}, 1 + 2)
    nothing_left = state_of(*((run, 0, 0, "crash") for run in RUNS))
    assert canary(nothing_left) == ([], frozenset(), 0)


def test_a_run_that_passed_frees_its_size_only():
    state = told(holds(SweepState(), "n1-a.0", ONE, TWO), ONE, Status.OK)
    assert canary(state, "n1-a.0") == ([1, 2, 2, 2], {2}, 1)


@pytest.mark.parametrize("status", FAILURES)
def test_another_end_frees_nothing_and_the_next_allocation_is_alone_again(status):
    state = told(holds(SweepState(), "n1-a.0", ONE), ONE, status)
    assert 1 not in canary(state, "n1-a.0")[0]
    sizes, untried, _ = canary(state)
    assert 1 in sizes
    assert 1 in untried


@pytest.mark.parametrize("spec", [None, {}, {"nodes": None}])
def test_a_passed_run_without_its_claim_proves_nothing(spec):
    state = told(SweepState(), ONE, Status.OK)
    state.attempts[key_of(ONE)].spec_json = raw_json(spec)
    assert 1 in canary(state)[1]


# what a launch does next within its limits

BIG = {"user": "ann", "cluster": "big", "host": "login1"}
LAUNCH = Launch(name="launcher-a", by=BIG)


def plan_of(*runs, **launcher):
    """Each run is an allocation of its own."""
    config = with_launcher(PLAN.config, **{"pack": 1, "control": False, **launcher})
    return replace(PLAN, candidates=tuple(runs or ONES), config=config)


def in_flight(number, by=BIG):
    """The state in which the first runs are in allocations that are alive, and what is seen of their jobs."""
    state = SweepState()
    for run in ONES[:number]:
        holds(state, run.run_id, run).allocations[run.run_id].by = by
    return state, JobsSeen(alive=frozenset(state.allocations))


def actions(state=None, jobs=None, plan=None, launch=LAUNCH, **limits):
    allowed = JobLimits(**{"max_jobs": 8, **limits})
    return decide(plan or plan_of(), state or SweepState(), jobs or JobsSeen(), allowed, launch, now_s=1.7e9)


def test_as_many_jobs_as_may_be_in_flight_in_the_order_of_the_plan():
    submitted = [t.key for job in actions(max_jobs=3).submit for t in job.attempts]
    assert submitted == [key_of(run) for run in ONES[:3]]
    assert len(actions(max_nodes=2).submit) == 2
    assert len(actions(plan=plan_of(ONE, RUNS[-1], TWO), max_nodes=2).submit) == 1


@pytest.mark.parametrize(("alive", "number"), [(0, 4), (1, 3), (2, 2), (3, 0), (4, 0)])
def test_it_is_refilled_when_half_of_the_jobs_are_over(alive, number):
    decision = actions(*in_flight(alive), max_jobs=4)
    assert (len(decision.submit), decision.wait, decision.stop_reason) == (number, True, None)


def test_jobs_that_have_not_given_their_nodes_back_take_room():
    state, jobs = in_flight(2)
    leaving = JobsSeen(alive=frozenset([ONES[0].run_id]), leaving=jobs.alive)
    assert [len(actions(state, leaving, max_jobs=n).submit) for n in (2, 3, 4)] == [0, 0, 2]


@pytest.mark.parametrize(("by", "number"), [({**BIG, "cluster": "small"}, 2), ({**BIG, "user": "bob"}, 0)])
def test_only_jobs_in_the_same_place_take_room(by, number):
    assert len(actions(*in_flight(2, by), max_jobs=2).submit) == number


def test_a_budget_holds_what_is_used_and_what_is_planned():
    price = actions().submit[0].gpu_hours
    assert len(actions(max_gpu_hours=1.01 * price).submit) == 1
    none = actions(max_gpu_hours=0.99 * price)
    assert (none.submit, none.over_budget, none.wait) == ((), True, False)
    assert "over the budget of " in none.stop_reason
    state, jobs = in_flight(1)
    jobs = replace(jobs, held_s={ONE.run_id: 7200.0})  # two GPUs for two hours
    assert actions(state, jobs, max_gpu_hours=4.0 + 0.5 * price).over_budget
    assert not actions(state, jobs, max_gpu_hours=4.0 + 3 * price).over_budget


@pytest.mark.parametrize(("window", "number"), [("00:00-00:00", 8), ("00:00-00:01", 0)])
def test_outside_its_window_it_waits(window, number):
    decision = actions(plan=plan_of(*ONES[:8], window=window))
    assert (len(decision.submit), decision.wait, bool(decision.notes)) == (number, True, number == 0)


def test_what_a_person_has_stopped():
    paused = actions(SweepState(paused=True))
    assert (paused.submit, paused.end_jobs, paused.wait) == ((), False, False)
    assert paused.stop_reason == f"paused; resume with: ultrabench sweep resume {PLAN.config.name}"
    cancelled = actions(SweepState(cancelled=True, paused=True))
    assert (cancelled.submit, cancelled.end_jobs, cancelled.stop_reason) == ((), True, "cancelled")


def test_runs_that_all_fail_alike_end_the_sweep():
    state = SweepState()
    for run in ONES[:10]:
        told(state, run, Status.CRASH, fingerprint="same", reason="no module x")
    decision = actions(state, launch=replace(LAUNCH, since_end_s=dict.fromkeys(state.attempts, 1.0)))
    assert (decision.end_jobs, decision.submit) == (True, ())
    assert "no module x" in decision.stop_reason


def test_a_sweep_with_nothing_left_is_over():
    state, jobs = in_flight(1)
    assert actions(state, jobs, plan_of(ONE)).wait
    told(state, ONE, Status.OK, allocation=ONE.run_id)
    over = plan_of(ONE)
    over = replace(over, config=replace(over.config, measure=measure(confirm=1)))
    assert actions(state, plan=over) == actions(plan=replace(over, candidates=())) == Actions()


def test_nodes_under_suspicion_are_named_with_the_submission():
    state = told(SweepState(), ONE, Status.NODE_FAIL, suspect_hosts=("gpu07",), reason="no answer")
    assert actions(state).bad_nodes == {"gpu07": "node gpu07 is excluded: no answer"}


@pytest.mark.parametrize(("control", "new_repeats"), [(ONE.run_id, [3, 4]), (None, [])])
def test_control_runs_of_one_allocation_confirm_as_one_repeat(control, new_repeats):
    state = SweepState()
    state.allocations["a"] = AllocationState(name="a", nodes=1, control=control)
    for repeat in range(3):
        told(state, ONE, Status.OK, repeat, allocation="a", step_times_s=(0.1,) * 6)
    assert keys(left([ONE], state, confirm=3)) == [key_of(ONE, repeat) for repeat in new_repeats]
