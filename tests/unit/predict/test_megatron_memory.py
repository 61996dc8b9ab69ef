"""The memory of Megatron-LM: sequence parallelism, several stages on a rank, and FSDP."""

from dataclasses import replace

import pytest

from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.run import RunSpec, Workload
from ultrabench.sweep.config.load import load_model, load_profile
from ultrabench.sweep.predict.megatron_memory import megatron_layer_bytes, megatron_memory
from ultrabench.sweep.predict.memory import memory_constants

SHAPE = load_model("llama3-8b")
PROFILE = load_profile("megatron")
CONSTANTS = memory_constants(PROFILE.framework, PROFILE.memory)
LAYOUT = Layout(dp=4, tp=2, gas=8, zero_stage=1)


def first_rank(layout):
    """The memory of the first rank of the pipeline."""
    place = {"nodes": 1, "gpus_per_node": layout.world_size}
    workload = Workload(seq_len=4096, gbs=layout.gbs)
    kernel = KernelConfig(name="megatron", precision="bf16")
    spec = RunSpec(shape=SHAPE, workload=workload, layout=layout, kernel=kernel, **place)
    return megatron_memory(spec, CONSTANTS)[0]


@pytest.mark.parametrize(("recompute", "channels"), [("none", 4), ("full", 1)])
def test_without_sequence_parallelism_each_rank_keeps_what_norms_get_of_all_tokens(recompute, channels):
    """Inputs and outputs of both norms in bf16, or with full recomputation the input of the layer."""
    kept_bytes = [
        megatron_layer_bytes(
            SHAPE, replace(LAYOUT, recompute=recompute, sequence_parallel=value), 4096, SHAPE.kinds[0]
        )
        for value in ("off", "on")
    ]
    difference = kept_bytes[0][1] - kept_bytes[1][1]
    assert difference == pytest.approx(2 * channels * SHAPE.hidden_size * 4096 * (1 - 1 / 2))


def test_a_rank_holds_all_its_virtual_stages():
    flat = Layout(dp=1, pp=4, gas=8, pp_schedule="1f1b", pp_layout="8-8-8-8")
    virtual = replace(flat, pp_schedule="interleaved", virtual_stages=2, pp_layout="-".join(["4"] * 8))
    assert first_rank(virtual).weights == first_rank(flat).weights
    assert first_rank(virtual).activations > first_rank(flat).activations


def test_fsdp_shards_gradients_and_parameters():
    sharded, whole = first_rank(replace(LAYOUT, zero_stage=3)), first_rank(LAYOUT)
    assert (sharded.weights, sharded.gradients) == (whole.weights / 4, whole.gradients / 4)
    assert sharded.buffers > whole.buffers
