"""What a plan is told of each run: memory, step time with its interval, what limits it, and its duration."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import layouts, shapes
from tests.unit.predict.test_step_time import spec_of
from ultrabench.errors import ConfigError
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.run import RunSpec, Workload
from ultrabench.sweep.config.load import load_config, load_model, load_profile
from ultrabench.sweep.plan import make_plan, predictor
from ultrabench.sweep.predict.predict import NEARLY_FULL

CONFIG = load_config(["hardware=h100x8"])
NAMES = ("ultrabench", "nanotron", "megatron")
CONFIGS = {name: replace(CONFIG, profile=load_profile(name)) for name in NAMES}


def predicted(layout, shape, *, profile="ultrabench", seq_len=4096, precision="bf16", nodes=1):
    spec = spec_of(layout, shape, nodes=nodes, precision=precision, seq_len=seq_len)
    peak = CONFIG.hardware.peak(precision, nodes, None, 1)
    return predictor(CONFIGS[profile], nodes, peak).predict(spec)


@given(
    layout=layouts(),
    shape=shapes(),
    precision=st.sampled_from(("bf16", "fp32", "fp64")),
    profile=st.sampled_from(NAMES),
)
def test_everything_is_finite_and_the_interval_contains_the_step_time(layout, shape, precision, profile):
    layout = replace(layout, dp=2 * layout.dp)
    found = predicted(layout, shape, precision=precision, nodes=2, profile=profile)
    for value in (found.step_time_s, found.peak_mem_bytes, found.duration_s):
        assert math.isfinite(value)
        assert value > 0
    assert found.step_time_low_s <= found.step_time_s <= found.step_time_high_s
    assert 0 <= found.p_oom <= 1
    assert (found.limited_by == "memory") == (found.p_oom > 0.5 or found.memory_share > NEARLY_FULL)


def test_what_a_process_holds_beside_its_tensors_is_predicted_and_does_not_count_towards_its_limit():
    config = load_config(["model=mini"])
    work = {"workload": Workload(seq_len=1024, gbs=64), "layout": Layout(dp=1, mbs=64)}
    spec = RunSpec(shape=load_model("mini"), kernel=config.kernel, nodes=1, gpus_per_node=1, **work)
    whole = predictor(config, 1, config.hardware.peak("fp32", 1, None, 1))
    tensors = replace(whole, memory=replace(whole.memory, base_bytes=0.0))
    limit = replace(config.hardware, mem_bytes=tensors.predict(spec).peak_mem_bytes)
    found, bare = (replace(p, hardware=limit).predict(spec) for p in (whole, tensors))
    assert found.peak_mem_bytes == bare.peak_mem_bytes + whole.memory.base_bytes
    assert (found.memory_share, bare.memory_share) == pytest.approx((1, 1))
    assert found.p_oom == bare.p_oom


@given(layout=layouts(), shape=shapes(), more=st.integers(1, 64))
def test_more_layers_never_take_less_time_without_a_pipeline(layout, shape, more):
    layout = replace(layout, pp=1, pp_schedule="none", virtual_stages=1)
    deeper = replace(shape, num_hidden_layers=shape.num_hidden_layers + more)
    assert predicted(layout, deeper).step_time_s > predicted(layout, shape).step_time_s


@given(layout=layouts(), shape=shapes(), more=st.integers(1, 8))
def test_more_micro_batches_take_longer(layout, shape, more):
    longer = replace(layout, gas=layout.gas + more)
    assert predicted(longer, shape).step_time_s > predicted(layout, shape).step_time_s


@pytest.mark.parametrize(
    ("limit", "model", "layout"),
    [
        ("memory", "469B", Layout(dp=8)),
        (
            "memory",
            "llama3.2-3b",
            Layout(dp=1, mbs=2, gas=2, recompute="selective"),
        ),  # fits, but not its reserve
        ("compute", "1B", Layout(dp=1, mbs=4, gas=64)),
        ("launch", "1B", Layout(dp=1, tp=8, gas=256)),
        ("bubble", "8B", Layout(dp=1, tp=2, pp=4, gas=4, mbs=4, pp_schedule="1f1b")),
    ],
)
def test_what_limits_a_layout_is_named(limit, model, layout):
    assert predicted(layout, load_model(model)).limited_by == limit


def test_a_layout_whose_ranks_exchange_too_much_is_limited_by_communication():
    assert predicted(Layout(dp=1, tp=16, gas=16), load_model("8B"), nodes=2).limited_by == "communication"


def test_a_run_that_is_unlikely_to_fit_lasts_as_long_as_its_start():
    shape = load_model("8B")
    fits, large = (predicted(Layout(dp=1, tp=8, mbs=mbs), shape) for mbs in (1, 64))
    assert fits.p_oom < 0.5 < large.p_oom
    assert large.duration_s == 20.0 < fits.duration_s - fits.step_time_s


def test_a_run_for_every_node_count_whatever_it_divides():
    """One sequence a rank, so that no batch decides which node counts are measured."""
    plan = make_plan(load_config(["sweep=comm", "hardware=h100x8", "sweep.nodes=[1,3,64]"]))
    assert [(c.nodes, c.layout.dp, c.spec.workload.gbs) for c in plan.runs] == [
        (1, 8, 8),
        (3, 24, 24),
        (64, 512, 512),
    ]
    assert len(plan.candidates) == 3
    assert {c.spec.kernel.kind for c in plan.runs} == {"probe"}
    assert not plan.config.launcher.preflight


def test_the_price_is_what_crosses_the_links():
    """8 ranks at 70 % of 450 GB/s, 5 calls of each size: (2 + 1 + 1 + 1) * 7/8 + 1 = 5.375 times its bytes."""
    alone, pair = make_plan(load_config(["sweep=comm", "hardware=h100x8", "sweep.nodes=[1,2]"])).runs
    sizes = 2**16 + 2**20 + 2**23 + 2**26 + 2**28 + 2**30
    inside = 5 * 5.375 * sizes / (0.7 * 450e9)
    assert alone.prediction.step_time_s == pytest.approx(inside)
    across = 5 * (5 * 15 / 16 + 1) * sizes / (0.7 * 50e9)
    assert pair.prediction.step_time_s == pytest.approx(inside + across)
    assert pair.prediction.duration_s < 90


def test_a_kernel_of_no_kind_is_refused():
    with pytest.raises(ConfigError, match="must be embedded, command or probe"):
        KernelConfig(name="x", kind="prob")
