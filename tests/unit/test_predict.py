import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.configs import measure as measure_of
from tests.strategies import layouts, shapes
from ultrabench.hardware import Peak
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.run import RunSpec, Workload
from ultrabench.sweep.config.load import load_config, load_model
from ultrabench.sweep.predict.predict import predict

GPUS = load_config(["hardware=h100x8"]).hardware
PEAK = Peak(flops_per_s=989e12, source="table")
WORDS = ("none", "attention", "selective", "every2", "full")
PLAYBOOK = ("1B", "3B", "8B", "80B", "469B")

real_shapes = st.sampled_from(PLAYBOOK).map(load_model)


def predicted(layout, shape, *, seq_len=4096, precision="bf16", nodes=1, measure=None):
    spec = RunSpec(
        shape=shape,
        workload=Workload(seq_len=seq_len, gbs=layout.gbs),
        layout=layout,
        kernel=KernelConfig(name="embedded", precision=precision),
        nodes=nodes,
        gpus_per_node=layout.world_size // nodes,
    )
    return predict(spec, GPUS, PEAK, measure or measure_of())


@given(layout=layouts(), shape=shapes(), precision=st.sampled_from(("bf16", "fp32", "fp64")))
def test_everything_is_finite_and_positive(layout, shape, precision):
    found = predicted(replace(layout, dp=2 * layout.dp), shape, precision=precision, nodes=2)
    for value in (found.step_time_s, found.peak_mem_bytes, found.duration_s):
        assert math.isfinite(value)
        assert value > 0


@given(layout=layouts(), shape=real_shapes, precision=st.sampled_from(("bf16", "fp32", "fp64")))
def test_a_higher_zero_stage_never_needs_more_bytes(layout, shape, precision):
    assume(layout.dp > 1)
    needs = [
        predicted(replace(layout, zero_stage=z), shape, precision=precision).peak_mem_bytes
        for z in (0, 1, 2, 3)
    ]
    assert needs == sorted(needs, reverse=True)


@given(layout=layouts(), shape=shapes(), smaller=st.integers(1, 8))
def test_a_smaller_micro_batch_never_needs_more_bytes(layout, shape, smaller):
    assume(smaller < layout.mbs)
    less = predicted(replace(layout, mbs=smaller), shape)
    assert less.peak_mem_bytes <= predicted(layout, shape).peak_mem_bytes


@given(layout=layouts(), shape=shapes(), seq_len=st.integers(1, 8192), less=st.integers(1, 8192))
def test_a_shorter_sequence_never_needs_more_bytes(layout, shape, seq_len, less):
    short, long = sorted((seq_len, less))
    assert (
        predicted(layout, shape, seq_len=short).peak_mem_bytes
        <= predicted(layout, shape, seq_len=long).peak_mem_bytes
    )


@given(layout=layouts(), shape=shapes(), more=st.integers(1, 64))
def test_more_layers_never_take_less_time_without_a_pipeline(layout, shape, more):
    layout = replace(layout, pp=1, pp_schedule="none", virtual_stages=1)
    deeper = replace(shape, num_hidden_layers=shape.num_hidden_layers + more)
    assert predicted(layout, deeper).step_time_s > predicted(layout, shape).step_time_s


@given(shape=real_shapes, pp=st.sampled_from((2, 4, 8)), times=st.integers(2, 4))
def test_several_times_the_layers_take_longer_in_a_pipeline(shape, pp, times):
    layout = Layout(dp=2, pp=pp, gas=16, pp_schedule="1f1b")
    deeper = replace(shape, num_hidden_layers=shape.num_hidden_layers * times)
    assert predicted(layout, deeper).step_time_s > predicted(layout, shape).step_time_s


@given(layout=layouts(), shape=shapes(), more=st.integers(1, 8))
def test_more_micro_batches_take_longer(layout, shape, more):
    longer = replace(layout, gas=layout.gas + more)
    assert predicted(longer, shape).step_time_s > predicted(layout, shape).step_time_s


@pytest.mark.parametrize("name", PLAYBOOK)
def test_afab_keeps_every_micro_batch_and_so_needs_more(name):
    shape = load_model(name)
    one = Layout(dp=1, pp=4, gas=16, pp_schedule="1f1b")
    all_at_once = replace(one, pp_schedule="afab")
    assert predicted(all_at_once, shape).peak_mem_bytes > predicted(one, shape).peak_mem_bytes


def test_static_memory_of_one_process_by_hand():
    # bf16 training with fp32 master weights, gradients and two moments: 18 bytes a parameter.
    shape = replace(load_model("1B"), num_hidden_layers=1)
    needed = predicted(Layout(dp=1), shape, seq_len=1).peak_mem_bytes
    layer = (10 + 2 * 3) * shape.hidden_size + 8 * shape.intermediate_size
    assert needed == pytest.approx(18 * shape.num_params + layer)
    # 32 heads of 128 channels are 4,096 for q, k, v and the output each; q and k are kept before their norms, too.
    shape = replace(shape, head_dim=128, qk_norm=True)
    needed = predicted(Layout(dp=1), shape, seq_len=1).peak_mem_bytes
    layer = 2 * (4 * shape.hidden_size + (4 + 2) * 4096 + 4 * shape.intermediate_size)
    assert needed == pytest.approx(18 * shape.num_params + layer)


@given(layout=layouts(), shape=real_shapes)
def test_recomputation_takes_time_and_full_needs_least_memory(layout, shape):
    by = {word: predicted(replace(layout, recompute=word), shape) for word in WORDS}
    memory = {word: found.peak_mem_bytes for word, found in by.items()}
    assert memory["full"] <= min(memory.values())
    assert memory["none"] == memory["attention"] == max(memory.values())
    for word, found in by.items():
        assert by["none"].step_time_s <= found.step_time_s <= by["full"].step_time_s + 1e-9, word


def test_zero_one_shards_the_optimizer():
    shape = load_model("8B")
    whole = predicted(Layout(dp=8), shape).peak_mem_bytes
    sharded = predicted(Layout(dp=8, zero_stage=1), shape).peak_mem_bytes
    assert whole - sharded == pytest.approx(12 * shape.num_params * 7 / 8)


def test_shards_inside_a_node_need_more_bytes_than_all_and_less_time_between_nodes():
    shape, everywhere = load_model("8B"), Layout(dp=16, zero_stage=3, gas=8)
    inside = replace(everywhere, dp_shard=8)
    all_of_them, in_node = (predicted(layout, shape, nodes=2) for layout in (everywhere, inside))
    assert in_node.peak_mem_bytes - all_of_them.peak_mem_bytes == pytest.approx(16 * shape.num_params / 16)
    assert in_node.step_time_s < all_of_them.step_time_s
