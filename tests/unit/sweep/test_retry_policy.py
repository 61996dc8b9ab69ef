"""What follows from failures, that following them comes to an end, and what lack of memory says about others."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.configs import left, retry
from tests.unit.allocations import predicted
from ultrabench.kernel_config import LOG_OPTIONS
from ultrabench.layout import dominates
from ultrabench.record import raw_json
from ultrabench.result import FAILURES, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import AllocationEnded, Reread, Start
from ultrabench.store.state import AllocationState, AttemptState, SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import (
    attempts_to_reread,
    dominator_by_run,
    has_old_patterns,
    next_attempts,
)
from ultrabench.sweep.running.blame import Blame, blame_of
from ultrabench.sweep.running.retry import breaker_reason, decide_retry

POLICY = retry()
PLAN = make_plan(load_config(["retry.backoff_s=0", "measure.confirm=2", "retry.breaker=null"]))
SMALL = replace(PLAN, candidates=PLAN.runs[:6])


def failed(*results, run_id="r"):
    return [AttemptState(key=AttemptKey(run_id, 0, n), result=r, time=n) for n, r in enumerate(results)]


def state_of(*attempts):
    return SweepState(attempts={a.key: a for a in attempts})


def decided(attempts, policy=POLICY, **words):
    """What follows from the attempts of a run, if the sweep has no others."""
    return decide_retry(attempts, policy, blame=blame_of(state_of(*attempts), policy), **words)


def result(status="hang", hosts=("a",), **fields):
    return RunResult(status=Status(status), hostnames=hosts, **fields)


SURE, KILLED = result("oom", confirmed=True), result("crash", cause="killed")
HERE, THERE, FAR = (result(fingerprint="f", hosts=(host,)) for host in "abc")


@pytest.mark.parametrize(
    ("results", "share", "retried"),
    [
        # A known cause counts instead of the status.
        ([KILLED], 1.0, True), ([KILLED, KILLED], 1.0, False),
        ([result("crash", ("a", "b"), cause="assertion")], 1.0, False),
        ([result("invalid", cause="wrong_gpu")], 1.0, True),
        ([result("invalid", cause="unmeasured")], 1.0, False),  # it reports none again
        # The same failure on other nodes is deterministic.
        ([HERE, HERE], 1.0, True), ([HERE, THERE, FAR], 1.0, False),
        ([HERE, replace(THERE, fingerprint="g")], 1.0, True),
        # An OOM is an answer when it is confirmed and predicted.
        ([SURE], 0.9, False), ([SURE], 0.8, True), ([result("oom")], 0.9, True), ([SURE, SURE], 0.1, False),
    ],
)  # fmt: skip
def test_what_is_tried_again(results, share, retried):
    assert decided(failed(*results), memory_share=share).retry is retried


def test_a_run_without_steps_is_read_again_by_another_pattern_only():
    kernel = load_config(["kernel=megatron"]).kernel
    (attempt,) = failed(result("invalid", cause="unmeasured"))
    attempt.spec_json = raw_json({"kernel": kernel})
    assert not has_old_patterns(attempt, kernel)
    assert has_old_patterns(attempt, replace(kernel, step_rank=0))
    assert not has_old_patterns(replace(attempt, result=TOLD["c"]), replace(kernel, step_rank=0))


def test_results_that_other_patterns_have_read_in_logs_are_read_again():
    kernel = load_config(["kernel=megatron"]).kernel
    changed = replace(kernel, loss_line="loss (?P<loss>x)", step_line="took (?P<seconds>x) s")
    patterns = {name: getattr(changed, name) for name in LOG_OPTIONS}
    results = [
        result("ok", measured_by="log"), result("ok", measured_by="arrival"), result("ok", measured_by="report"),
        result("invalid", cause="unmeasured"), result("invalid", cause="non_finite_loss"), result("hang"),
    ]  # fmt: skip
    attempts = [attempt for n, ended in enumerate(results) for attempt in failed(ended, run_id=str(n))]
    for attempt in attempts:
        attempt.spec_json = raw_json({"kernel": kernel})
    assert attempts_to_reread(state_of(*attempts), kernel) == []
    assert [a.key.run_id for a in attempts_to_reread(state_of(*attempts), changed)] == ["0", "1", "3", "4"]
    attempts[0].reread = Reread(
        **attempts[0].key._asdict(), generation=2, patterns=patterns, result=results[0]
    )
    assert [a.key.run_id for a in attempts_to_reread(state_of(*attempts), changed)] == ["1", "3", "4"]
    assert [a.key.run_id for a in attempts_to_reread(state_of(attempts[0]), kernel)] == ["0"]


@pytest.mark.parametrize(
    ("backoff_s", "statuses", "pause_s"),
    [
        *((30.0, [status], 30.0 if status in ("hang", "comm_error", "node_fail", "invalid") else 0.0)
          for status in sorted(FAILURES)),
        (30.0, ["hang"] * 2, 50.0), (0.0, ["hang"], 0.0),
    ],
)  # fmt: skip
def test_a_pause_follows_what_waiting_may_help_and_doubles_up_to_its_limit(backoff_s, statuses, pause_s):
    policy = replace(POLICY, backoff_s=backoff_s, backoff_max_s=50.0)
    assert decided(failed(*map(result, statuses)), policy).pause_s == pause_s


def test_what_happened_before_this_launch_and_was_not_its_fault_is_forgotten():
    lost = failed(*[result("lost")] * 6)
    assert not decided(lost).retry
    assert decided(lost, old_attempts=frozenset(a.key for a in lost[:1])).retry


ENDS_ON_A_HOST = {
    "silent": {"status": "node_fail", "cause": "agent_gone"}, "hang": {"status": "hang"},
    "comm": {"status": "comm_error"},
    "killed": {"status": "crash", "cause": "killed"}, "ecc": {"status": "node_fail", "cause": "ecc_error"},
    "ok": {"status": "ok"},
}  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.sampled_from("rst"),
            st.sampled_from("abcd"),
            st.sampled_from([(), ("x",)]),
            st.sampled_from([*ENDS_ON_A_HOST]),
        ),
        max_size=12,
    )
)
def test_no_node_is_excluded_on_the_evidence_of_one_run_unless_the_node_says_so(ends):
    attempts = [
        AttemptState(key=AttemptKey(run, 0, n), time=n, result=result(
            hosts=(host, *others), suspect_hosts=() if end == "ok" else (host,), **ENDS_ON_A_HOST[end]
        ))
        for n, (run, host, others, end) in enumerate(ends)
    ]  # fmt: skip
    for node in blame_of(state_of(*attempts), POLICY).excluded:
        pointing = {run for run, host, _, end in ends if host == node and end != "ok"}
        assert len(pointing) > 1 or ("ecc" in {end for _, host, _, end in ends if host == node})


def test_nodes_that_their_agent_or_slurm_reports_are_excluded():
    end = AllocationEnded(allocation="x", reason="", avoid=("full",))
    state = SweepState(allocations={"x": AllocationState(name="x", ends={Start(): end})})
    assert blame_of(state, POLICY).excluded == {"full": "its agent or the batch system reported it unusable"}


SAME = "(no module x)"
TOLD = {"c": result("crash", fingerprint="f", reason="no module x"), "o": result("ok"), "m": result("oom"),
        "u": result("invalid", cause="unmeasured", reason="no module x")}  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "stops"),
    [
        ("c" * 10, SAME), ("c" * 9, None), ("c" * 5 + "o" + "c" * 4, None),
        ("c" * 5 + "m" + "c" * 4, None),  # nine are not ten
        ("o" + "c" * 10, SAME), ("c" * 10 + "o", None),
        # A program of which no step is known would give none in the other runs either.
        ("u", "could not be measured"), ("ou", None), ("uo", None),
    ],
)  # fmt: skip
def test_the_breaker_wants_the_same_failure_in_a_row_as_the_launcher_saw_the_ends(ends, stops):
    runs = [AttemptState(key=AttemptKey(f"r{n}", 0, 0), result=TOLD[end]) for n, end in enumerate(ends)]
    ago_s = {run.key: 100.0 - n for n, run in enumerate(runs)}
    reason = breaker_reason(state_of(*runs), POLICY, Blame(), ago_s)
    assert reason == stops or stops in reason
    but_one = dict([*ago_s.items()][1:10])
    assert breaker_reason(state_of(*runs[:10]), POLICY, Blame(), but_one) is None, (
        "one ended before this launch"
    )
    assert breaker_reason(state_of(*runs), replace(POLICY, breaker=None), Blame(), ago_s) is None


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
    state, succeeded = SweepState(), set()
    for _ in range(200):
        decision = next_attempts(SMALL, state, frozenset())
        if decision.is_over:
            break
        assert decision.todo, "nothing is alive, so something has to be started"
        for todo in decision.todo:
            assert todo.key[:2] not in succeeded
            assert todo.key not in state.attempts
            end = data.draw(ENDS)
            state.attempts[todo.key] = AttemptState(
                key=todo.key, result=end, spec_json=raw_json({"nodes": 1})
            )
            if end.status == Status.OK:
                succeeded.add(todo.key[:2])
    assert decision.is_over, "it loops"
    tries = [k for k in state.attempts if k.repeat == 0]
    max_tries = sum(POLICY.attempts.values()) + sum(POLICY.causes.values()) + 2
    assert len(tries) <= len(SMALL.candidates) * max_tries
    tried = {key.run_id for key in state.attempts}
    assert {run.run_id for run in SMALL.runs} == tried | dominator_by_run(SMALL.runs, state).keys()


# what lack of memory says about other layouts

SCHEDULES = "sweep.pp_schedule=[1f1b,afab,interleaved,zbv]"
GRID = make_plan(load_config(["sweep=playbook", "model=1B", "sweep.nodes=[1]", SCHEDULES, "max_p_oom=1"]))
FEW_MICRO_BATCHES = make_plan(load_config(
    ["sweep=recommend", "model=qwen3-30b-a3b", "sweep.gbs=16", "sweep.seq_len=2048", "sweep.tp=[1]", "sweep.cp=[1,2]",
     "sweep.pp=[1,2]", "sweep.ep=[1,8]", 'sweep.dp_overlap=["on","off"]', SCHEDULES, "max_p_oom=1"]
))  # fmt: skip
NEARLY = 0.97
"""With ZeRO-3, afab gathers the parameters of fewer layers at once than 1f1b."""


SAME = [predicted(r, memory_share=1.0) for r in GRID.runs if (r.nodes, r.layout.tp, r.layout.pp) == (1, 1, 1)]
OK = result("ok", step_times_s=(1.0,) * 6)


def run_of(mbs, zero):
    return next(r for r in SAME if (r.layout.mbs, r.layout.zero_stage) == (mbs, zero))


def after(*ends):
    """The state after attempts of (micro-batch size, ZeRO stage, result), each of which follows the last of its run."""
    state = SweepState()
    for mbs, zero, result in ends:
        run_id = run_of(mbs, zero).run_id
        key = AttemptKey(run_id, 0, len(state.by_run().get(run_id, ())))
        state.attempts[key] = AttemptState(key=key, result=result)
    return state


def dominated(state, runs=SAME):
    dominators = dominator_by_run(runs, state)
    return {(r.layout.mbs, r.layout.zero_stage) for r in runs if r.run_id in dominators}


@pytest.mark.parametrize("grid", [GRID, FEW_MICRO_BATCHES])
def test_dominance_is_an_order_of_memory_in_which_schedules_are_alike_or_afab_is_in_place_of_1f1b(grid):
    mem_bytes = {r.layout: r.prediction.peak_mem_bytes for r in grid.runs}
    larger = {a: {b for b in mem_bytes if dominates(a, b)} for a in mem_bytes}
    assert all(a not in larger[a] and larger[b] <= larger[a] for a in larger for b in larger[a])
    pairs = [(a, b) for a in larger for b in larger[a]]
    assert all(mem_bytes[b] >= NEARLY * mem_bytes[a] for a, b in pairs)
    alike = {(schedule, schedule) for schedule in ("none", "1f1b", "afab", "interleaved", "zbv")}
    assert {(a.pp_schedule, b.pp_schedule) for a, b in pairs} == alike | {("1f1b", "afab")}


@pytest.mark.parametrize(
    ("oom", "other", "needs_more"),
    [("full", "every2", True), ("full", "none", True), ("selective", "none", True), ("none", "full", False),
     ("selective", "every2", False), ("every2", "every3", False), ("none", "attention", False)],
)  # fmt: skip
def test_what_recomputes_less_needs_more(oom, other, needs_more):
    layout = SAME[0].layout
    assert dominates(replace(layout, recompute=oom), replace(layout, recompute=other)) is needs_more


@pytest.mark.parametrize(
    ("ends", "out"),
    [
        ([(8, 1, SURE)], {(8, 0), (16, 0), (16, 1)}), ([(8, 0, SURE)], {(16, 0)}),  # 32 accumulates nothing
        ([(8, 1, result("oom"))], set()), ([(8, 1, replace(SURE, confirmed=False))], set()),
        ([(8, 1, KILLED)], set()), ([(8, 1, OK)], set()),
        ([(8, 1, SURE), (8, 1, OK)], set()),  # it fits after all
        ([(8, 1, SURE), (16, 1, OK)], set()),  # what needs more fits
    ],
)  # fmt: skip
def test_after_a_confirmed_oom_larger_micro_batches_and_lower_zero_stages_are_left_out(ends, out):
    assert dominated(after(*ends)) == out


def test_an_oom_that_was_not_predicted_has_to_happen_twice():
    once, twice = after((8, 1, SURE)), after((8, 1, SURE), (8, 1, SURE))
    unlikely = [predicted(r, memory_share=0.8) for r in SAME]
    assert [len(dominated(state, unlikely)) for state in (once, twice)] == [0, 3]
    assert (run_of(8, 1).run_id, 0, 1) in {t.key for t in left(unlikely, once).todo}


def test_what_the_user_asks_for_is_not_left_out():
    state = after((8, 1, SURE), (16, 1, SURE))
    state.retried = frozenset({AttemptKey(run_of(16, 1).run_id, 0, 0)})
    assert (16, 1) not in dominated(state)
