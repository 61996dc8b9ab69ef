"""Numbers in doubt: outlying losses, and ranks, nodes, links that differ from the rest of the sweep."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import LONG
from tests.unit.analysis.sweeps import LAYOUTS, OK, TINY, spec_of
from ultrabench.kernel_config import KernelConfig
from ultrabench.record import to_dict
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.step_time import extremes
from ultrabench.store.state import AllocationState, AttemptState, SweepState, final_attempts
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import next_attempts
from ultrabench.sweep.running.outliers import suspect_attempts, with_loss_outliers

BF16 = KernelConfig(name="embedded", precision="bf16")
FP32 = KernelConfig(name="embedded", precision="fp32")
COMMAND = KernelConfig(name="command", kind="command", command=("train",), precision="fp32")
AGREED = 6.93


def attempt(name, repeat=0, number=0, allocation="a0", kernel=BF16, spec=None, **told):
    result = replace(OK, loss_step=5, env_id="e", **told)
    spec = to_dict(spec_of(LAYOUTS[0], kernel)) if spec is None else spec
    key = AttemptKey(str(name), repeat, number)
    return AttemptState(key=key, allocation=allocation, spec=spec, result=result)


def state_of(attempts, allocations=()):
    return SweepState(attempts={a.key: a for a in attempts}, allocations={a.name: a for a in allocations})


def losses(*values, kernel=BF16):
    return state_of(attempt(n, kernel=kernel, loss_final=value) for n, value in enumerate(values))


def invalid(state):
    ended = {key: attempt.result for key, attempt in with_loss_outliers(state).attempts.items()}
    return {key: result.reason for key, result in ended.items() if result.status == Status.INVALID}


def bad(state):
    return {int(key.run_id) for key in invalid(state)}


def doubts(state, device="cuda"):
    found = suspect_attempts(with_loss_outliers(state), device=device)
    return {key.run_id: reason for key, reason in found.items()}


def test_an_outlying_loss_is_invalid_and_says_what_the_others_have():
    state = losses(*[AGREED + 1e-4 * (n % 3) for n in range(11)], 7.12)
    (reason,) = invalid(state).values()
    assert reason == "loss 7.12 at step 5; the other 11 layouts of this model and batch have 6.9301 +- 0.0001"
    assert suspect_attempts(state, device="cuda") == {}


@pytest.mark.parametrize(("kernel", "tolerance"), [(BF16, 1e-3), (FP32, 1e-6), (COMMAND, 1e-2)])
def test_how_close_losses_must_be(kernel, tolerance):
    assert bad(losses(5.0, 5.0, 5.0 * (1 + 0.9 * tolerance), kernel=kernel)) == set()
    assert bad(losses(5.0, 5.0, 5.0 * (1 + 1.1 * tolerance), kernel=kernel)) == {2}


def test_a_difference_beyond_the_tolerance_is_legible():
    (reason,) = invalid(losses(6.0483303, 6.0483303, 6.0483403, kernel=FP32)).values()
    assert "loss 6.0483403 at step 5; the other 2 layouts" in reason


def test_groups_of_similar_size_are_all_in_doubt_and_none_is_invalid():
    state = losses(7.0, 7.0, 7.0, 6.0, 6.0)
    assert bad(state) == set()
    assert set(doubts(state)) == set("01234")
    told = "layouts of this model and batch differ in their loss: 3 of them have 7, 2 of them have 6"
    assert doubts(state)["4"] == told


@pytest.mark.parametrize(
    "other",
    [
        {"env_id": "other"}, {"loss_step": 6}, {"status": Status.CRASH}, {"loss_final": None},
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_not(other):
    odd = attempt(9, loss_final=9.0)
    odd = replace(odd, result=replace(odd.result, **other))
    assert bad(state_of([*losses(5.0, 5.0, 5.0).attempts.values(), odd])) == set()


def test_another_model_batch_or_seed_has_a_loss_of_its_own():
    spec = spec_of(LAYOUTS[0], BF16)
    others = [
        replace(spec, shape=replace(TINY, num_hidden_layers=3)),
        replace(spec, workload=replace(spec.workload, seed=1)),
        replace(spec, workload=replace(spec.workload, seq_len=64)),
    ]
    odd = [attempt(10 + n, spec=to_dict(other), loss_final=9.0) for n, other in enumerate(others)]
    assert bad(state_of([*losses(5.0, 5.0, 5.0).attempts.values(), *odd])) == set()
    named = attempt(10, spec=to_dict(replace(spec, shape=replace(TINY, name="x"))), loss_final=9.0)
    assert bad(state_of([*losses(5.0, 5.0, 5.0).attempts.values(), named])) == {10}


def test_losses_of_models_with_scaled_rotations_are_compared():
    spec = to_dict(replace(spec_of(LAYOUTS[0], BF16), shape=replace(TINY, rope_scaling=LONG)))
    assert bad(state_of(attempt(n, spec=spec, loss_final=5.0 + n // 3) for n in range(4))) == {3}


@pytest.mark.parametrize("spec", [{}, {"kernel": 7}, {"kernel": {"kind": "x"}}, {"shape": [], "kernel": {}}])
def test_a_damaged_claim_is_not_compared(spec):
    assert (
        bad(state_of([*losses(5.0, 5.0, 5.0).attempts.values(), attempt(9, spec=spec, loss_final=9.0)]))
        == set()
    )


def test_repeats_of_a_layout_are_one_witness_and_can_differ_from_themselves():
    repeats = [attempt(0, repeat=n, loss_final=7.0) for n in range(5)]
    assert bad(state_of([*repeats, attempt(1, loss_final=6.0)])) == set()
    normal = losses(6.0, 6.0, 6.0).attempts.values()
    found = invalid(state_of([*normal, attempt(0, repeat=1, loss_final=7.0)]))
    assert list(found) == [AttemptKey("0", 1, 0)]


def test_an_outlier_counts_as_invalid_is_tried_once_more_and_then_stands():
    state = losses(5.0, 5.0, 5.0, 9.0)
    assert state.attempts["3", 0, 0].result.status == Status.OK
    assert final_attempts(with_loss_outliers(state))["3", 0].result.status == Status.INVALID
    again = attempt(3, number=1, loss_final=5.0)
    mended = with_loss_outliers(state_of([*state.attempts.values(), again]))
    assert final_attempts(mended)["3", 0].key.attempt == 1
    assert with_loss_outliers(with_loss_outliers(state)) == with_loss_outliers(state)


LOSSES = st.lists(st.sampled_from([5.0, 5.02, 5.04, 5.2, 7.0]), max_size=9)


@given(LOSSES, LOSSES)
def test_fewer_than_three_layouts_never_have_an_outlier(some, more):
    for values in (some[:2], more[:2]):
        state = losses(*values)
        assert invalid(state) == with_loss_outliers(state).disputed == {}


@given(LOSSES, st.integers(0, 8))
def test_a_further_normal_run_makes_no_normal_run_an_outlier(values, which):
    state = losses(*values)
    normal = [n for n in range(len(values)) if n not in bad(state)]
    if len(values) < 3 or with_loss_outliers(state).disputed:
        return  # nobody was called normal
    alike = values[normal[which % len(normal)]]
    assert bad(losses(*values, alike)) == bad(state)


@given(LOSSES, st.randoms())
def test_the_order_of_attempts_and_allocations_never_matters(values, random):
    """In which journals tell of them."""
    names = [f"a{n}" for n in range(len(values))]
    attempts = [
        attempt(n, allocation=name, loss_final=v)
        for n, (name, v) in enumerate(zip(names, values, strict=True))
    ]
    held = [allocation(name, gemm=(value,), control="0") for name, value in zip(names, values, strict=True)]
    state = state_of(attempts, held)
    random.shuffle(attempts)
    random.shuffle(held)
    other = state_of(attempts, held)
    assert with_loss_outliers(state) == with_loss_outliers(other)
    assert suspect_attempts(state, device="cuda") == suspect_attempts(other, device="cuda")


def allocation(name, gemm=(1.0, 1.0), busbw=1.0, control=None, nodes=1):
    links = {"allreduce": {"all": [{"bytes": 8, "busbw_bytes_per_s": busbw}]}}
    probe = {"gemm_flops_per_s": list(gemm), "collectives": links}
    return AllocationState(name=name, nodes=nodes, preflight={"probe": probe}, control=control)


def one_in_each(allocations):
    return state_of([attempt(a.name, allocation=a.name) for a in allocations], allocations)


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"gemm": (1.0, 0.8)}, "gemm_flops_per_s of its allocation is 0.80 of the median of 4 allocations of 1 node"),
        ({"busbw": 0.5}, "allreduce_busbw_bytes_per_s of its allocation is 0.50 of the median of 4 allocations"),
        ({"gemm": (1.0, 0.9)}, None),
        ({"gemm": (3.0, 3.0)}, None),
        ({"gemm": (1.0, 0.8), "nodes": 2}, None),
    ],
)  # fmt: skip
def test_a_preflight_far_below_the_others_of_as_many_nodes(odd, told):
    found = doubts(one_in_each([*(allocation(n) for n in "abc"), allocation("odd", **odd)]))
    assert set(found) == ({"odd"} if told else set())
    assert told is None or told in found["odd"]


def test_two_allocations_tell_nothing_and_noise_widens_what_is_normal():
    assert doubts(one_in_each([allocation("a"), allocation("b", gemm=(0.1, 0.1))])) == {}
    noisy = [
        allocation(name, gemm=(rate,)) for name, rate in zip("abcde", (1.0, 0.8, 1.2, 0.7, 1.3), strict=True)
    ]
    assert doubts(one_in_each([*noisy, allocation("odd", gemm=(0.6,))])) == {}


def test_cores_of_a_cpu_are_allowed_to_wander():
    state = one_in_each([*(allocation(n) for n in "abc"), allocation("odd", gemm=(0.3, 0.3))])
    assert set(doubts(state, device="cuda")) == {"odd"}
    assert doubts(state, device="cpu") == {}


def test_a_device_slower_than_its_neighbours():
    found = doubts(one_in_each([allocation("a", gemm=(1.0, 1.0, 1.0, 0.7))]))
    assert found == {
        "a": "the device of rank 3 multiplies at 0.70 of the median of the 4 devices of its allocation"
    }


def beside_controls(*times_s, others=()):
    """Allocations of one control layout, and of `others`; a run is in the last one."""
    names = ["c"] * len(times_s) + [name for name, _ in others]
    allocations = [AllocationState(name=f"a{n}", control=name) for n, name in enumerate(names)]
    measured = [*times_s, *(time_s for _, time_s in others)]
    controls = [
        attempt(name, repeat=n, allocation=f"a{n}", step_times_s=(time_s,))
        for n, (name, time_s) in enumerate(zip(names, measured, strict=True))
    ]
    return state_of([*controls, attempt("r", allocation=f"a{len(names) - 1}")], allocations)


def test_a_control_much_slower_than_elsewhere_puts_its_allocation_in_doubt():
    found = doubts(beside_controls(0.2, 0.2, 0.2, 0.25))
    told = "the control layout of its allocation took 1.25 x its median over 4 allocations of 1 node"
    assert found == {"c": told, "r": told}
    for state in (
        beside_controls(0.2, 0.2, 0.2, 0.21),
        beside_controls(0.2, 0.2, 0.2, 0.1),
        beside_controls(0.2, 0.25),
        beside_controls(0.2, 0.2, 0.2, others=[("d", 0.25)]),
    ):
        assert doubts(state) == {}


def test_ranks_with_times_of_their_own():
    assert extremes([[1.0, 3.0, 2.0], [], [1.0], [9.0, 5.0]]) == {"2": 1.0, "3": 7.0}
    assert extremes([[1.0], []]) == extremes([]) == extremes([[1.0], [0.0, 1.0]]) == {}
    state = state_of(
        [attempt("x", rank_step_times_s={"0": 1.0, "3": 1.4}), attempt("y", rank_step_times_s={})]
    )
    assert doubts(state) == {"x": "rank 3 took 1.40 x the step time of rank 0"}
    assert doubts(state, device="cpu") == {}


def test_clocks_that_were_throttled_or_lower_than_in_other_measurements_of_the_run():
    clocks = [attempt("x", repeat=n, sm_clock_hz=hz) for n, hz in enumerate((1.9e9, 1.9e9, 1.9e9, 1.5e9))]
    hard = attempt("y", sm_clock_hz=1.4e9)
    (key,) = found = suspect_attempts(state_of([*clocks, hard]), device="cuda")
    assert key == ("x", 3, 0)
    assert found[key] == "its SM clock was 0.79 of the median of 4 measurements of this run"
    assert doubts(state_of([attempt("z", throttled="thermal on n0")])) == {"z": "throttled: thermal on n0"}


def test_all_reasons_are_told():
    odd = allocation("odd", gemm=(0.5,), busbw=0.5)
    state = one_in_each([*(allocation(n, gemm=(1.0,)) for n in "abc"), odd])
    state.attempts["odd", 0, 0] = attempt("odd", allocation="odd", rank_step_times_s={"0": 1.0, "3": 1.4})
    assert len(doubts(state)["odd"].split("; ")) == 3


def test_the_next_step_tries_an_outlier_once_more_and_a_suspect_in_a_further_repeat():
    plan = make_plan(load_config(["model=tiny"]))
    *normal, outlier, odd = plan.runs[:5]
    told = [attempt(run.run_id, spec=to_dict(run.spec), loss_final=5.0) for run in normal]
    told.append(attempt(outlier.run_id, spec=to_dict(outlier.spec), loss_final=9.0))
    told.append(
        attempt(odd.run_id, spec=to_dict(odd.spec), loss_final=5.0, rank_step_times_s={"0": 1, "1": 5})
    )

    def again(*more):
        todo = next_attempts(plan, state_of([*told, *more]), frozenset()).todo
        tried = {run.run_id for run in plan.runs[:5]}
        return {tuple(t.key) for t in todo if t.key.run_id in tried}

    assert again() == {(outlier.run_id, 0, 1), (odd.run_id, 1, 0)}
    same = attempt(outlier.run_id, number=1, spec=to_dict(outlier.spec), loss_final=9.0)
    better = attempt(odd.run_id, repeat=1, spec=to_dict(odd.spec), loss_final=5.0)
    assert again(same, better) == set()
