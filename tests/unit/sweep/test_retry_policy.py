"""The policy: what follows from failures, and that following it always comes to an end."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import AllocationEnded, Launched, Start
from ultrabench.store.state import AllocationState, AttemptState, SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import FAILURES
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import left_out, next_attempts
from ultrabench.sweep.running.retry import broken, decide_retry, excluded

POLICY = load_config(["retry.backoff_s=0"]).retry
PLAN = make_plan(load_config(["retry.backoff_s=0", "measure.confirm=2", "retry.breaker=null"]))
SMALL = replace(PLAN, candidates=PLAN.runs[:6])


def failed(*results, run_id="r"):
    return [AttemptState(key=AttemptKey(run_id, 0, n), result=r, time=n) for n, r in enumerate(results)]


def result(status="hang", hosts=("a",), **more):
    return RunResult(status=Status(status), hostnames=hosts, **more)


def test_a_known_cause_counts_instead_of_its_status():
    once = result("crash", cause="killed")
    assert decide_retry(failed(once), POLICY).again
    assert not decide_retry(failed(once, once), POLICY).again
    assert not decide_retry(failed(result("crash", cause="assertion")), POLICY).again
    assert decide_retry(failed(result("invalid", cause="wrong_gpu")), POLICY).again
    assert not decide_retry(failed(result("invalid", cause="unmeasured")), POLICY).again, (
        "it reports none again"
    )


def test_the_same_failure_on_other_nodes_is_deterministic():
    here, there = result(fingerprint="f"), result(fingerprint="f", hosts=("b",))
    assert decide_retry(failed(here, here), POLICY).again
    verdict = decide_retry(failed(here, there), POLICY)
    assert not verdict.again
    assert verdict.why == "the same failure on a and on b"
    assert decide_retry(failed(here, replace(there, fingerprint="g")), POLICY).again


def test_a_pause_doubles_with_each_failure():
    policy = replace(POLICY, backoff_s=30.0, backoff_max_s=50.0)
    # A node's clock, or a result without times, has no part in it.
    for end in ({"started_at": 100.0, "duration_s": 10.0}, {"started_at": 9e9, "duration_s": 10.0}, {}):
        assert decide_retry(failed(result(**end)), policy).pause_s == 30.0
        assert decide_retry(failed(result(**end), result(**end)), policy).pause_s == 50.0
        assert decide_retry(failed(result("timeout", **end)), policy).pause_s == 0.0
        assert decide_retry(failed(result(**end)), POLICY).pause_s == 0.0


@pytest.mark.parametrize("status", sorted(FAILURES))
def test_a_pause_follows_only_what_waiting_may_help(status):
    policy = replace(POLICY, backoff_s=30.0)
    paused = status in ("hang", "comm_error", "node_fail", "invalid", "crash")
    again = decide_retry(failed(result(status)), policy)
    assert again.pause_s == (30.0 if paused and again.again else 0.0)


def test_an_oom_is_an_answer_when_confirmed_and_predicted():
    sure = result("oom", confirmed=True)
    assert not decide_retry(failed(sure), POLICY, memory_share=0.9).again
    assert decide_retry(failed(sure), POLICY, memory_share=0.8).again
    assert decide_retry(failed(result("oom")), POLICY, memory_share=0.9).again
    assert not decide_retry(failed(sure, sure), POLICY, memory_share=0.1).again


def test_what_happened_before_this_launch_and_was_not_its_fault_is_forgotten():
    lost = failed(*[result("lost")] * 6)
    assert not decide_retry(lost, POLICY).again
    assert decide_retry(lost, POLICY, old=frozenset(a.key for a in lost[:1])).again


def state_of(*attempts):
    return SweepState(attempts={a.key: a for a in attempts})


def test_a_node_is_left_out_when_two_runs_point_at_it_or_it_failed():
    hang = result(suspect_hosts=("bad",))
    one, two = failed(hang, hang, run_id="r"), failed(hang, run_id="s")
    assert excluded(state_of(*one), POLICY) == {}
    assert excluded(state_of(*one, *two), POLICY) == {"bad": "suspected in 2 runs"}
    here = Launched(generation=1, config={"launcher": {"name": "local"}})
    assert excluded(replace(state_of(*one, *two), launched=here), POLICY) == {}, "there is no other node"
    assert excluded(state_of(*one, *two), replace(POLICY, forgive=("bad",))) == {}
    wrong = result("invalid", suspect_hosts=("bad",))  # what a program computes or reports is no node's fault
    assert excluded(state_of(*failed(wrong, run_id="r"), *failed(wrong, run_id="s")), POLICY) == {}
    down = result("node_fail", suspect_hosts=("dead",), reason="ECC error")
    assert excluded(state_of(*failed(down)), POLICY) == {"dead": "ECC error"}
    end = AllocationEnded(allocation="x", reason="", avoid=("full",))
    told = SweepState(allocations={"x": AllocationState(name="x", ends={Start(): end})})
    assert list(excluded(told, POLICY)) == ["full"]


def test_the_breaker_wants_the_same_failure_in_a_row():
    crash = result("crash", fingerprint="f", reason="ImportError: no module x")
    runs = [replace_key(a, n) for n, a in enumerate(failed(*[crash] * 10))]
    ago = {run.key: 100.0 - n for n, run in enumerate(runs)}
    assert "ImportError" in (broken(state_of(*runs), POLICY, ago) or "")
    assert broken(state_of(*runs[1:]), POLICY, ago) is None
    assert broken(state_of(*runs), POLICY, {run.key: 1.0 for run in runs[1:]}) is None, "before this launch"
    assert broken(state_of(*runs), replace(POLICY, breaker=None), ago) is None
    runs[5].result = result("ok")
    assert broken(state_of(*runs), POLICY, ago) is None
    runs[5].result = result("oom")
    assert broken(state_of(*runs), POLICY, ago) is None, "nine are not ten"


def test_the_breaker_goes_by_when_the_launcher_saw_an_end_and_not_by_clocks_of_nodes():
    crash = result("crash", fingerprint="f", reason="ImportError: no module x")
    runs = [replace_key(a, n) for n, a in enumerate(failed(*[crash] * 11))]
    runs[0].result, runs[0].time = result("ok"), 9e9  # the first to end, on a node whose clock is ahead
    ago = {run.key: 100.0 - n for n, run in enumerate(runs)}
    assert broken(state_of(*runs), POLICY, ago) is not None
    ago[runs[0].key] = 1.0
    assert broken(state_of(*runs), POLICY, ago) is None


def replace_key(attempt, number):
    return replace(attempt, key=AttemptKey(f"r{number}", 0, 0))


ENDS = st.builds(
    RunResult,
    status=st.sampled_from(sorted({*FAILURES, Status.OK})),
    cause=st.sampled_from([None, "killed", "foreign_memory", "assertion"]),
    fingerprint=st.sampled_from([None, "f", "g"]),
    confirmed=st.sampled_from([None, True, False]),
    hostnames=st.sampled_from([("a",), ("b",), ("a", "b")]),
    step_times_s=st.sampled_from([(1.0,) * 6, (1.02,) * 6, (2.0,) * 6]),
)


@settings(max_examples=75, deadline=None)
@given(data=st.data())
def test_a_sweep_ends_whatever_happens_and_no_ok_repeat_is_run_again(data):
    state, done = SweepState(), set()
    for _ in range(200):
        decision = next_attempts(SMALL, state, frozenset())
        if decision.over:
            break
        assert decision.todo, "nothing is alive, so something has to be started"
        for todo in decision.todo:
            assert todo.key[:2] not in done
            assert todo.key not in state.attempts
            end = data.draw(ENDS)
            state.attempts[todo.key] = AttemptState(key=todo.key, result=end, spec={"nodes": 1})
            if end.status == Status.OK:
                done.add(todo.key[:2])
    assert decision.over, "it loops"
    tries = [k for k in state.attempts if k.repeat == 0]
    assert len(tries) <= len(SMALL.candidates) * (
        sum(POLICY.attempts.values()) + sum(POLICY.causes.values()) + 2
    )
    dominated = left_out(SMALL.runs, state)
    for run in SMALL.candidates:
        assert run.run_id in dominated or any(k.run_id == run.run_id for k in state.attempts)
