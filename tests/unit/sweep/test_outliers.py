"""Numbers in doubt: outlying losses, and ranks, nodes, links that differ from the rest of the sweep."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import LONG
from tests.unit.analysis.sweeps import LAYOUTS, OK, TINY, spec_of
from ultrabench.kernel_config import KernelConfig
from ultrabench.record import raw_json, to_dict
from ultrabench.result import Status, doubt_text
from ultrabench.run import AttemptKey
from ultrabench.step_time import extreme_medians_s
from ultrabench.store.events import Launched
from ultrabench.store.state import AllocationState, AttemptState, SweepState, final_attempts
from ultrabench.sweep.config.load import config_from_tree, load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import next_attempts
from ultrabench.sweep.running.outliers import (
    ControlRun,
    control_beside,
    control_runs,
    foreign_load_line,
    suspect_attempts,
    with_loss_outliers,
)
from ultrabench.sweep.running.standings import beside_control

BF16 = KernelConfig(name="embedded", precision="bf16")
FP32 = KernelConfig(name="embedded", precision="fp32")
COMMAND = KernelConfig(name="command", kind="command", command=("train",), precision="fp32")
SLOW_RANK = {"0": 1.0, "3": 1.4}


def attempt(name, repeat=0, number=0, allocation="a0", kernel=BF16, spec=None, **observed):
    result = replace(OK, **{"loss_step": 5, "env_id": "e", **observed})
    spec = to_dict(spec_of(LAYOUTS[0], kernel)) if spec is None else spec
    key = AttemptKey(str(name), repeat, number)
    return AttemptState(key=key, allocation=allocation, spec_json=raw_json(spec), result=result)


def state_of(attempts, allocations=(), loss_comparable=True):
    launched = Launched(generation=1, config={"kernel": {"loss_comparable": loss_comparable}})
    return SweepState(
        attempts={a.key: a for a in attempts}, allocations={a.name: a for a in allocations}, launched=launched
    )


def losses(*values, kernel=BF16):
    return state_of(attempt(n, kernel=kernel, loss_final=value) for n, value in enumerate(values))


def invalid(state):
    ended = {key: attempt.result for key, attempt in with_loss_outliers(state).attempts.items()}
    return {key: result.reason for key, result in ended.items() if result.status == Status.INVALID}


def bad(state):
    return {int(key.run_id) for key in invalid(state)}


def doubts(state, device="cuda"):
    suspects = suspect_attempts(with_loss_outliers(state), device=device)
    return {key.run_id: doubt_text(doubts) for key, doubts in suspects.items()}


def test_an_outlying_loss_is_invalid_and_says_what_the_others_have():
    state = losses(*[6.93 + 1e-4 * (n % 3) for n in range(11)], 7.12)
    (reason,) = invalid(state).values()
    assert reason == "loss 7.12 at step 5; the other 11 layouts of this model and batch have 6.9301 +- 0.0001"
    assert suspect_attempts(state, device="cuda") == {}
    (reason,) = invalid(losses(6.0483303, 6.0483303, 6.0483403, kernel=FP32)).values()
    assert "loss 6.0483403 at step 5; the other 2 layouts" in reason, "the difference is legible"


@pytest.mark.parametrize(("kernel", "tolerance"), [(BF16, 1e-3), (FP32, 1e-6), (COMMAND, 1e-2)])
def test_how_close_losses_must_be(kernel, tolerance):
    assert bad(losses(5.0, 5.0, 5.0 * (1 + 0.9 * tolerance), kernel=kernel)) == set()
    assert bad(losses(5.0, 5.0, 5.0 * (1 + 1.1 * tolerance), kernel=kernel)) == {2}


def test_groups_of_similar_size_are_all_in_doubt_and_none_is_invalid():
    state = losses(7.0, 7.0, 7.0, 6.0, 6.0)
    assert bad(state) == set()
    assert set(doubts(state)) == set("01234")
    text = "layouts of this model and batch differ in their loss: 3 have 7, 2 have 6"
    assert doubts(state)["4"] == text
    assert with_loss_outliers(losses(5.0, 9.0)) == losses(5.0, 9.0), "two are too few to tell"


SPEC = spec_of(LAYOUTS[0], BF16)
SCALED = to_dict(replace(SPEC, shape=replace(TINY, rope_scaling=LONG)))


@pytest.mark.parametrize(
    ("other", "outliers"),
    [
        ({}, {9}), ({"spec": to_dict(replace(SPEC, shape=replace(TINY, name="x")))}, {9}),
        *(({"spec": to_dict(replace(SPEC, **other))}, set()) for other in (
            {"shape": replace(TINY, num_hidden_layers=3)}, {"workload": replace(SPEC.workload, seed=1)},
            {"workload": replace(SPEC.workload, seq_len=64)})),
        *(({"spec": spec}, set()) for spec in ({}, {"kernel": 7}, {"kernel": {"kind": "x"}},
            {"shape": [], "kernel": {}})),
        ({"env_id": "other"}, set()), ({"loss_step": 6}, set()), ({"status": Status.CRASH}, set()),
        ({"loss_final": None}, set()),
    ],
)  # fmt: skip
def test_only_losses_of_one_workload_are_compared(other, outliers):
    odd = attempt(9, **{"loss_final": 9.0, **other})
    assert bad(state_of([*losses(5.0, 5.0, 5.0).attempts.values(), odd])) == outliers


@pytest.mark.parametrize(
    ("kernel", "loss_comparable", "outliers"),
    [
        (COMMAND, None, set()),
        (COMMAND, False, set()),
        (COMMAND, True, {3}),
        (BF16, None, {3}),
        (BF16, False, set()),
    ],
)
def test_the_latest_launch_says_whether_losses_are_compared(kernel, loss_comparable, outliers):
    attempts = [attempt(n, kernel=kernel, loss_final=9.0 if n == 3 else 5.0) for n in range(4)]
    assert bad(state_of(attempts, loss_comparable=loss_comparable)) == outliers


def test_losses_of_models_with_scaled_rotations_are_compared():
    assert bad(state_of(attempt(n, spec=SCALED, loss_final=5.0 + n // 3) for n in range(4))) == {3}


def test_repeats_of_a_layout_are_one_witness_and_can_differ_from_themselves():
    repeats = [attempt(0, repeat=n, loss_final=7.0) for n in range(5)]
    assert bad(state_of([*repeats, attempt(1, loss_final=6.0)])) == set()
    normal = losses(6.0, 6.0, 6.0).attempts.values()
    outliers = invalid(state_of([*normal, attempt(0, repeat=1, loss_final=7.0)]))
    assert list(outliers) == [AttemptKey("0", 1, 0)]


def test_an_outlier_counts_as_invalid_and_a_further_attempt_stands_for_it():
    state = losses(5.0, 5.0, 5.0, 9.0)
    assert final_attempts(with_loss_outliers(state))["3", 0].result.status == Status.INVALID
    retry = attempt(3, number=1, loss_final=5.0)
    mended = with_loss_outliers(state_of([*state.attempts.values(), retry]))
    assert final_attempts(mended)["3", 0].key.attempt == 1
    assert with_loss_outliers(mended) == mended


@given(st.lists(st.sampled_from([5.0, 5.02, 5.2, 7.0]), max_size=9), st.randoms())
def test_the_order_of_attempts_and_allocations_never_matters(values, random):
    allocations = [allocation(f"a{n}", gemm=(value,), control="0") for n, value in enumerate(values)]
    attempts = [attempt(n, allocation=f"a{n}", loss_final=value) for n, value in enumerate(values)]
    in_order = state_of(attempts, allocations)
    shuffled = state_of(random.sample(attempts, len(values)), random.sample(allocations, len(values)))
    assert with_loss_outliers(in_order) == with_loss_outliers(shuffled)
    assert suspect_attempts(in_order, device="cuda") == suspect_attempts(shuffled, device="cuda")


def allocation(name, gemm=(1.0, 1.0), busbw=1.0, control=None, nodes=1):
    links = {"allreduce": {"all": [{"bytes": 8, "busbw_bytes_per_s": busbw}]}}
    probe = {"gemm_flops_per_s": list(gemm), "collectives": links}
    return AllocationState(name=name, nodes=nodes, preflight={"probe": probe}, control=control)


def one_in_each(*allocations):
    return state_of([attempt(a.name, allocation=a.name) for a in allocations], allocations)


ABC = [allocation(name) for name in "abc"]
NOISY = [allocation(f"n{rate}", gemm=(rate,)) for rate in (1.0, 0.8, 1.2, 0.7, 1.3)]
OF_FOUR = "of the median of 4 allocations of 1 node"


@pytest.mark.parametrize(
    ("others", "odd", "text"),
    [
        (ABC, {"gemm": (1.0, 0.8)}, f"gemm_flops_per_s of its allocation is 0.80 {OF_FOUR}"),
        (ABC, {"busbw": 0.5}, f"allreduce_busbw_bytes_per_s of its allocation is 0.50 {OF_FOUR}"),
        ([], {"gemm": (1.0, 1.0, 1.0, 0.7)},
         "the GEMM rate of rank 3 is 0.70 of the median of the 4 devices of its allocation"),
        (ABC, {"gemm": (1.0, 0.9)}, None), (ABC, {"gemm": (3.0, 3.0)}, None),
        (ABC, {"gemm": (1.0, 0.8), "nodes": 2}, None),  # the others have fewer nodes
        (ABC[:1], {"gemm": (0.1, 0.1)}, None),  # which of two is slow nobody knows
        (NOISY, {"gemm": (0.6,)}, None),  # noise widens what is normal
    ],
)  # fmt: skip
def test_a_preflight_far_below_the_others_of_as_many_nodes_or_a_device_below_its_neighbours(
    others, odd, text
):
    state = one_in_each(*others, allocation("odd", **odd))
    assert doubts(state) == ({"odd": text} if text else {})
    assert doubts(state, device="cpu") == {}, "cores are allowed to wander"


C = ("c", 0.2)


@pytest.mark.parametrize(
    ("controls", "doubtful"),
    [([C, C, C, ("c", 0.25)], True), ([C, C, C, ("c", 0.21)], False), ([C, C, C, ("c", 0.1)], False),
     ([C, ("c", 0.25)], False), ([C, C, C, ("d", 0.25)], False)],
)  # fmt: skip
def test_a_control_much_slower_than_elsewhere_puts_its_allocation_in_doubt(controls, doubtful):
    allocations = [AllocationState(name=f"a{n}", control=name) for n, (name, _) in enumerate(controls)]
    attempts = [
        attempt(name, repeat=n, allocation=f"a{n}", step_times_s=(time_s,))
        for n, (name, time_s) in enumerate(controls)
    ]
    state = state_of([*attempts, attempt("r", allocation=allocations[-1].name)], allocations)
    text = "the control layout of its allocation took 1.25 x its median over 4 allocations of 1 node"
    assert doubts(state) == ({"c": text, "r": text} if doubtful else {})


def by_parts(time_s):
    return {"step_times_s": (time_s,), "measured_gas": "2,4", "screened": True}


def whole(time_s, parts_s=None):
    return {"step_times_s": (time_s,), "parts_step_time_s": parts_s}


@pytest.mark.parametrize(
    ("controls", "texts"),
    [
        # Parts say 20 % more than whole steps do, in whichever number they are.
        ([by_parts(0.24)] * 3 + [whole(0.2)], {}),
        ([by_parts(0.24)] * 3 + [whole(0.2, 0.24)], {}),
        ([whole(0.2)] * 3 + [by_parts(0.24)], {}),
        ([whole(0.2, 0.24)] * 3 + [by_parts(0.24)], {}),
        # A slow allocation is found among those that were measured alike.
        ([by_parts(0.24)] * 3 + [whole(0.25, 0.3)], {3: "1.25 x its median by parts over 4"}),
        ([whole(0.2, 0.24)] * 3 + [by_parts(0.3)], {3: "1.25 x its median by parts over 4"}),
        ([whole(0.2)] * 3 + [by_parts(0.24), whole(0.25)], {4: "1.25 x its median over 4"}),
        ([whole(0.2, 0.24)] * 3 + [whole(0.25, 0.3)], {3: "1.25 x its median over 4"}),
    ],
)
def test_controls_are_compared_by_whole_steps_or_by_parts(controls, texts):
    allocations = [AllocationState(name=f"a{n}", control="c") for n in range(len(controls))]
    attempts = [attempt("c", repeat=n, allocation=f"a{n}", **values) for n, values in enumerate(controls)]
    suspects = suspect_attempts(state_of(attempts, allocations), device="cuda")
    start = "the control layout of its allocation took "
    assert {key.repeat: [text.sentence for text in found] for key, found in suspects.items()} == {
        number: [f"{start}{text} allocations of 1 node"] for number, text in texts.items()
    }


@pytest.mark.parametrize(("device", "limit"), [("cpu", 0.5), ("cuda", 0.1)])
def test_other_programs_may_use_more_of_cpu_cores_than_of_the_cores_beside_gpus(device, limit):
    hardware = "cpu" if device == "cpu" else "h100x8"
    config = load_config(["sweep=quick", f"hardware={hardware}"])
    assert (config.hardware.device, config.measure.max_foreign_load) == (device, limit)
    assert config_from_tree(config.resolved).measure == config.measure
    launched = Launched(generation=1, config=config.resolved)
    attempts = [attempt("more", foreign_load=limit + 0.01), attempt("less", foreign_load=limit - 0.01)]
    state = replace(state_of(attempts), launched=launched)
    text = f"other programs used {100 * limit + 1:.1f} % of the cores of a node, limit {100 * limit:.1f} %"
    assert doubts(state, device) == {"more": text}


def test_the_load_of_other_programs_is_told_from_a_tenth_of_the_cores_on():
    line = "other programs used 20.0 % of a node's cores (median of 3 runs, up to 45.0 %)"
    assert foreign_load_line([0.2, None, 0.45, 0.0]) == line
    assert foreign_load_line([0.1, None]) is foreign_load_line([]) is None


MACHINE_TIMES = ((0, 1.0), (10, 1.0), (20, 1.5), (30, 1.5))
"""When an allocation ran its control, and the step time of the control then: from 10 s to 20 s it became slower."""


@pytest.mark.parametrize(
    ("started_at", "control_s"),
    [(5, 1.0), (10, 1.0), (15, 1.25), (25, 1.5), (30, 1.5), (99, 1.5), (None, 1.0)],
)
def test_a_run_is_compared_with_the_control_runs_before_and_after_it(started_at, control_s):
    controls = [ControlRun(*run) for run in MACHINE_TIMES]
    assert control_beside(started_at, controls).step_time_s == control_s
    assert control_beside(started_at, controls[:1]).step_time_s == 1.0
    assert control_beside(started_at, []) is None


def test_a_run_is_compared_with_controls_that_measured_what_it_has():
    """Parts say 1.2 s. The control runs are by parts, then whole steps and parts, then whole steps alone."""
    controls = [
        ControlRun(0.0, 1.2, is_partial=True), ControlRun(10.0, 1.0, parts_step_time_s=1.2), ControlRun(20.0, 1.0),
    ]  # fmt: skip
    for started_at in (5.0, 15.0, 25.0):
        assert control_beside(started_at, controls).step_time_s == 1.0
        assert control_beside(started_at, controls, by_parts=True).step_time_s == 1.2
    assert control_beside(5.0, controls[:1]).step_time_s == 1.2, "there is no other"


@pytest.mark.parametrize(
    ("before", "after", "ci95_rel"),
    [((1.0, 0.03), (1.0, 0.04), 0.025), ((0.9, 0.01), (1.1, 0.01), 0.1), ((1.0, 0.05), None, 0.05)],
)
def test_the_interval_of_the_control_holds_both_of_its_runs(before, after, ci95_rel):
    controls = [ControlRun(10.0 * n, *run) for n, run in enumerate(filter(None, (before, after)))]
    assert control_beside(5.0, controls).ci95_rel == pytest.approx(ci95_rel)
    assert control_beside(0.0, controls) == controls[0], "it is its own"


def test_the_ratio_to_the_control_takes_out_what_other_programs_cost():
    runs = {"c": MACHINE_TIMES, "early": [(5, 0.95)], "late": [(25, 1.35)]}
    attempts = [
        attempt(name, repeat=n, started_at=float(time_s), step_times_s=(step_time_s,) * 3)
        for name, measured in runs.items()
        for n, (time_s, step_time_s) in enumerate(measured)
    ]
    state = state_of(attempts, [AllocationState(name="a0", control="c")])
    ratios = {a.key.run_id: beside_control(a, control_runs(state)).ratio for a in reversed(attempts)}
    assert ratios == pytest.approx({"c": 1.0, "early": 1 / 0.95, "late": 1.5 / 1.35})
    assert ratios["late"] > ratios["early"], "it is faster, although its steps took longer"


def test_ranks_with_times_of_their_own():
    assert extreme_medians_s([[1.0, 3.0, 2.0], [], [1.0], [9.0, 5.0]]) == {"2": 1.0, "3": 7.0}
    assert (
        extreme_medians_s([[1.0], []])
        == extreme_medians_s([])
        == extreme_medians_s([[1.0], [0.0, 1.0]])
        == {}
    )
    state = state_of([attempt("x", rank_step_times_s=SLOW_RANK), attempt("y", rank_step_times_s={})])
    assert doubts(state) == {"x": "rank 3 took 1.40 x the step time of rank 0"}
    assert doubts(state, device="cpu") == {}


def test_clocks_that_were_throttled_or_lower_than_in_other_measurements_of_the_run():
    clocks = [attempt("x", repeat=n, sm_clock_hz=hz) for n, hz in enumerate((1.9e9, 1.9e9, 1.9e9, 1.5e9))]
    state = state_of([*clocks, attempt("y", sm_clock_hz=1.4e9), attempt("z", throttled="thermal on n0")])
    assert suspect_attempts(state, device="cuda") == {
        ("x", 3, 0): [("sm_clock", "its SM clock was 0.79 of the median of 4 measurements of this run")],
        ("z", 0, 0): [("throttled", "throttled: thermal on n0")],
    }


def test_all_reasons_are_told():
    state = one_in_each(*ABC, allocation("odd", gemm=(0.5,), busbw=0.5))
    state.attempts["odd", 0, 0] = attempt("odd", allocation="odd", rank_step_times_s=SLOW_RANK)
    assert len(doubts(state)["odd"].split("; ")) == 3


def test_the_next_step_tries_an_outlier_once_more_and_a_suspect_in_a_further_repeat():
    plan = make_plan(load_config(["model=tiny"]))
    *normal, outlier, odd = plan.runs[:5]
    results = [(run, {"loss_final": 5.0}) for run in normal]
    results += [
        (outlier, {"loss_final": 9.0}),
        (odd, {"loss_final": 5.0, "rank_step_times_s": {"0": 1, "3": 5}}),
    ]

    def next_keys(*later):
        attempts = (attempt(run.run_id, spec=to_dict(run.spec), **end) for run, end in (*results, *later))
        todo = next_attempts(plan, state_of(attempts), frozenset()).todo
        tried = {run.run_id for run in plan.runs[:5]}
        return {tuple(t.key) for t in todo if t.key.run_id in tried}

    assert next_keys() == {(outlier.run_id, 0, 1), (odd.run_id, 1, 0)}
    as_before, better = {"number": 1, "loss_final": 9.0}, {"repeat": 1, "loss_final": 5.0}
    assert next_keys((outlier, as_before), (odd, better)) == set()
