"""What a plan is told of each run: memory, step time with its interval, what limits it, and its duration."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import refused
from tests.strategies import layouts, shapes
from tests.unit.predict.test_step_time import spec_of
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.sweep.config.load import load_config, load_model, load_profile
from ultrabench.sweep.extrapolation import beyond_fit
from ultrabench.sweep.plan import make_plan, predictor
from ultrabench.sweep.predict.step_time import NEARLY_FULL

CONFIG = load_config(["hardware=h100x8"])
NAMES = ("ultrabench", "nanotron", "megatron")
CONFIGS = {name: replace(CONFIG, profile=load_profile(name)) for name in NAMES}


def predicted(layout, shape, *, profile="ultrabench", precision="bf16", nodes=1):
    spec = spec_of(layout, shape, nodes=nodes, precision=precision)
    peak = CONFIG.hardware.peak(precision, nodes, None, 1)
    return predictor(CONFIGS[profile], nodes, peak).predict(spec)


PRECISIONS, PROFILES = st.sampled_from(("bf16", "fp32", "fp64")), st.sampled_from(NAMES)


@given(layout=layouts(), shape=shapes(), precision=PRECISIONS, profile=PROFILES)
def test_everything_is_finite_and_the_interval_contains_the_step_time(layout, shape, precision, profile):
    layout = replace(layout, dp=2 * layout.dp)
    pred = predicted(layout, shape, precision=precision, nodes=2, profile=profile)
    assert all(0 < value < math.inf for value in (pred.step_time_s, pred.peak_mem_bytes, pred.duration_s))
    assert pred.step_time_low_s <= pred.step_time_s <= pred.step_time_high_s
    assert 0 <= pred.p_oom <= 1
    assert (pred.limited_by == "memory") == (pred.p_oom > 0.5 or pred.memory_share > NEARLY_FULL)


@pytest.mark.parametrize("profile", NAMES)
@pytest.mark.parametrize("num_copied", [32, 16])
def test_padding_and_copies_cost_as_much_as_tokens_and_heads_and_do_not_count_in_mfu(profile, num_copied):
    """Prediction of a model whose vocabulary tp=8 pads and whose heads it copies, and of one that has all of them.

    Of 32 layers, every second one may be of a type with a window and with enough heads.
    """
    # nanotron pads to a multiple of tp, the others to one of 128 * tp.
    num_rows = 50264 if load_profile(profile).framework == "nanotron" else 51200
    whole = replace(load_model("llama3-8b"), vocab_size=num_rows)
    part = replace(whole, vocab_size=50257, num_key_value_heads=4)
    if num_copied == 16:
        (kind,) = whole.kinds
        window = replace(kind, grouped_query=replace(kind.grouped_query, sliding_window=1024))
        whole, part = (replace(shape, layer_types=(window, *shape.kinds)) for shape in (whole, part))
    layout = Layout(dp=2, tp=8, zero_stage=1, gas=4)
    prediction, whole_prediction = (
        predicted(layout, shape, profile=profile, nodes=2) for shape in (part, whole)
    )
    assert prediction.peak_mem_bytes == whole_prediction.peak_mem_bytes
    sums_s = prediction.step_time_s - whole_prediction.step_time_s  # of the gradients of copies
    assert 0 < sums_s < 0.02 * prediction.step_time_s
    assert whole.flops_per_token(4096) - part.flops_per_token(4096) == 6 * (
        (num_rows - 50257) * 4096 + num_copied * 2 * 4 * 128 * 4096
    )


@pytest.mark.parametrize(
    ("hardware", "nodes", "model", "words", "steps"),
    [
        ("h100x8", 1, "1B", {}, 0), ("h100x8", 1, "1B", {"recompute": "full"}, 0),
        ("h100x8", 4, "1B", {"tp": 8, "zero_stage": 3}, 2 + 3 + 3), ("h100x8", 1, "1B", {"recompute": "every2"}, 1),
        ("h100x8", 1, "1B", {"mbs": 32}, 1), ("b200x8", 1, "1B", {}, 6),
        ("h100x8", 4, "mixtral-8x7b", {"ep": 8}, 2 + 1 + 3),
    ],
)  # fmt: skip
def test_an_interval_is_wider_the_more_steps_a_run_is_beyond_those_of_the_fit(
    hardware, nodes, model, words, steps
):
    config = load_config([f"hardware={hardware}"])
    config = replace(config, profile=replace(config.profile, errors=None))
    spec = spec_of(Layout(**{"dp": 2 * nodes, "gas": 4} | words), model, nodes=nodes)
    pred = predictor(config, nodes, config.hardware.peak("bf16", nodes, None, 1)).predict(spec)
    ends = (math.log(end / pred.step_time_s) for end in (pred.step_time_low_s, pred.step_time_high_s))
    low, high = config.profile.interval["all"]
    assert tuple(ends) == pytest.approx(
        (-math.hypot(low, 0.09 * steps**0.5), math.hypot(high, 0.09 * steps**0.5))
    )
    assert bool(config.profile.unmeasured(spec, config.hardware.gpu)) == bool(steps)


def test_what_a_process_holds_beside_its_tensors_is_predicted_and_does_not_count_towards_its_limit():
    config = load_config(["model=mini"])
    spec = spec_of(Layout(dp=1, mbs=64), load_model("mini"), seq_len=1024, precision="fp32")
    whole = predictor(config, 1, config.hardware.peak("fp32", 1, None, 1))
    tensors = replace(whole, memory=replace(whole.memory, base_bytes=0.0))
    limit = replace(config.hardware, mem_bytes=tensors.predict(spec).peak_mem_bytes)
    full, bare = (replace(p, hardware=limit).predict(spec) for p in (whole, tensors))
    assert full.peak_mem_bytes == bare.peak_mem_bytes + whole.memory.base_bytes
    assert (full.memory_share, bare.memory_share) == pytest.approx((1, 1))
    assert full.p_oom == bare.p_oom


@pytest.mark.parametrize(("device", "loss"), [("cuda", 0.29), ("cpu", 0.0)])
def test_a_step_is_longer_where_the_allocator_has_no_room_for_its_reserve(device, loss):
    """The loss is 0 up to NEARLY_FULL, grows without a jump, and contains the runs that were measured on an H100."""
    spec = spec_of(Layout(dp=1, mbs=2, gas=2, recompute="selective"), "llama3.2-3b")
    whole = predictor(CONFIG, 1, CONFIG.hardware.peak("bf16", 1, None, 1))
    peak = max(stage.peak_bytes for stage in whole.stages(spec))
    shares, lost = (0.5, NEARLY_FULL - 1e-6, NEARLY_FULL + 1e-6, NEARLY_FULL + 0.002, 1.5), []
    for share in shares:
        hardware = replace(CONFIG.hardware, device=device, mem_bytes=int(peak / share))
        times = replace(whole, hardware=hardware).step_time(spec, whole.stages(spec))
        lost.append(times.allocator / (times.total - times.allocator))
    assert lost == pytest.approx([0, 0, loss * 0.0005, loss * 0.632, loss], abs=1e-4)
    assert sum(times) == times.total


@pytest.mark.parametrize(
    ("limit", "model", "layout"),
    [
        ("memory", "469B", Layout(dp=8)),
        ("memory", "llama3.2-3b", Layout(dp=1, mbs=2, gas=2, recompute="selective")),  # its reserve does not fit
        ("compute", "1B", Layout(dp=1, mbs=4, gas=64)),
        ("launch", "1B", Layout(dp=1, tp=8, gas=256)),
        ("bubble", "8B", Layout(dp=1, tp=2, pp=4, gas=4, mbs=4, pp_schedule="1f1b")),
        ("communication", "8B", Layout(dp=1, tp=16, gas=16)),
    ],
)  # fmt: skip
def test_what_limits_a_layout_is_named(limit, model, layout):
    assert predicted(layout, model, nodes=-(-layout.world_size // 8)).limited_by == limit


def test_a_run_that_is_unlikely_to_fit_lasts_as_long_as_its_start():
    fits, large = (predicted(Layout(dp=1, tp=8, mbs=mbs), "8B") for mbs in (1, 64))
    assert fits.p_oom < 0.5 < large.p_oom
    assert large.duration_s == 20.0 < fits.duration_s - fits.step_time_s


def test_probes_measure_every_node_count_and_their_price_is_what_crosses_the_links():
    """One sequence a rank. 8 ranks at 70 % of 450 GB/s, 5 calls of each size of 5.375 = (2+1+1+1) * 7/8 +
    1 times its bytes.
    """
    plan = make_plan(load_config(["sweep=comm", "hardware=h100x8", "sweep.nodes=[1,2,3,64]"]))
    probes = [(c.nodes, c.layout.dp, c.spec.workload.gbs, c.spec.kernel.kind) for c in plan.candidates]
    assert probes == [(nodes, 8 * nodes, 8 * nodes, "probe") for nodes in (1, 2, 3, 64)]
    assert not plan.config.launcher.preflight
    alone, pair, *_ = plan.runs
    sizes = 2**16 + 2**20 + 2**23 + 2**26 + 2**28 + 2**30
    inside, across = 5 * 5.375 * sizes / (0.7 * 450e9), 5 * (5 * 15 / 16 + 1) * sizes / (0.7 * 50e9)
    assert alone.prediction.step_time_s == pytest.approx(inside)
    assert pair.prediction.step_time_s == pytest.approx(inside + across)
    assert pair.prediction.duration_s < 90
    assert not beyond_fit([pair.spec], plan.config.profile, plan.config.hardware.gpu_at_limit)


def test_a_kernel_of_no_kind_is_refused():
    with refused("must be embedded, command or probe"):
        KernelConfig(name="x", kind="prob")
