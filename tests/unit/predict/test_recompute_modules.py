"""What the parts of layers that a program computes again save and cost."""

from dataclasses import replace

import pytest

from tests.unit.predict.test_experts import IN_NODE, MIXTRAL
from tests.unit.predict.test_memory import constants
from tests.unit.predict.test_step_time import spec_of, step_time
from ultrabench.layout import Layout
from ultrabench.sweep.predict.memory import predict_memory


def with_modules(spec, text):
    """The run by a program that computes these parts again."""
    return replace(spec, variant={"flags.recompute_modules": text})


def activations(spec):
    """Bytes that Megatron-LM keeps of a micro-batch."""
    return predict_memory(spec, constants("megatron"))[0].activations


@pytest.mark.parametrize(
    ("modules", "shape", "numbers"),
    [
        ("core_attn", "llama3-8b", 0),
        ("layernorm", "llama3-8b", 2 * 4096),
        ("mlp", "llama3-8b", 3 * 14336),
        ("layernorm+mlp", "llama3-8b", 2 * 4096 + 3 * 14336),
        ("moe_act", MIXTRAL, 2 * 14336),
        ("moe", MIXTRAL, 2 * (4096 + 3 * 14336)),
        ("none", MIXTRAL, 0),
    ],
)
def test_a_layer_keeps_less_of_each_token(modules, shape, numbers):
    """Numbers of bf16 of each of 4,096 tokens in 32 layers, counted by hand."""
    spec = spec_of(Layout(dp=8, zero_stage=1) if isinstance(shape, str) else IN_NODE, shape)
    saved_bytes = activations(spec) - activations(with_modules(spec, modules))
    assert saved_bytes == pytest.approx(2 * 4096 * 32 * numbers)


@pytest.mark.parametrize(
    ("modules", "parts"),
    [("moe", {"gemm", "ep"}), ("mlp", set()), ("core_attn", {"attention"}), ("moe_act", {"memory_bound"})],
)
def test_what_is_computed_again_takes_time(modules, parts):
    usual = step_time(spec_of(IN_NODE, MIXTRAL), "megatron")._asdict()
    again = step_time(with_modules(spec_of(IN_NODE, MIXTRAL), modules), "megatron")._asdict()
    longer = {part for part, seconds in again.items() if seconds > 1.01 * usual[part]}
    assert parts <= longer <= parts | {"memory_bound"}


def test_latent_attention_keeps_its_latents_alone():
    spec = spec_of(Layout(dp=8, ep=8, zero_stage=1), "moonlight-16b-a3b")
    heads = 16 * (192 + 128 + 128)  # queries, and what follows from the latent of keys and values
    saved_bytes = activations(spec) - activations(with_modules(spec, "mla_up_proj"))
    assert saved_bytes == pytest.approx(2 * 4096 * 27 * heads)
    usual, again = (step_time(of, "megatron").gemm for of in (spec, with_modules(spec, "mla_up_proj")))
    assert 1.01 < again / usual < 1.1
