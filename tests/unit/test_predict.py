"""What a plan is told of each run: memory, step time with its interval, what limits it, and its duration."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.strategies import layouts, shapes
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.run import RunSpec, Workload
from ultrabench.sweep.config.load import load_config, load_model, load_profile
from ultrabench.sweep.plan import predictor

CONFIG = load_config(["hardware=h100x8"])
NAMES = ("ultrabench", "nanotron", "megatron")
CONFIGS = {name: replace(CONFIG, profile=load_profile(name)) for name in NAMES}
PLAYBOOK = ("1B", "3B", "8B", "80B", "469B")

real_shapes = st.sampled_from(PLAYBOOK).map(load_model)


def predicted(layout, shape, *, profile="ultrabench", seq_len=4096, precision="bf16", nodes=1):
    spec = RunSpec(
        shape=shape,
        workload=Workload(seq_len=seq_len, gbs=layout.gbs),
        layout=layout,
        kernel=KernelConfig(name="embedded", precision=precision),
        nodes=nodes,
        gpus_per_node=layout.world_size // nodes,
    )
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
    assert (found.limited_by == "memory") == (found.p_oom > 0.5)


@given(layout=layouts(), shape=real_shapes, profile=st.sampled_from(NAMES))
def test_a_higher_zero_stage_is_no_more_likely_to_run_out_of_memory(layout, shape, profile):
    assume(layout.dp > 1)
    by = [predicted(replace(layout, zero_stage=z), shape, profile=profile) for z in (0, 1)]
    assert by[1].p_oom <= by[0].p_oom
    assert by[1].peak_mem_bytes <= by[0].peak_mem_bytes


@given(layout=layouts(), shape=shapes(), smaller=st.integers(1, 8))
def test_a_smaller_micro_batch_never_needs_more_bytes(layout, shape, smaller):
    assume(smaller < layout.mbs)
    less = predicted(replace(layout, mbs=smaller), shape)
    assert less.peak_mem_bytes <= predicted(layout, shape).peak_mem_bytes


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
