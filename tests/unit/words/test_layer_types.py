"""The FLOPs of each type of layer against counted operations: of transformers' models, of masks, and of loops."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import AutoModelForCausalLM
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from tests.unit.sweep.test_layered_models import INDEX, LATENT, LINEAR, SHARED, STATES, STEP, config_of
from ultrabench.attention_type import GroupedQuery, Index, Latent, Linear, StateSpace
from ultrabench.feed_forward_type import FeedForward
from ultrabench.layer_products import num_params
from ultrabench.layer_type import LayerType
from ultrabench.sweep.config.checkpoint import shape_of

TOKENS = 64
LATENT_SIZES = {
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("deepseek_v3", {**LATENT, "head_dim": None, "num_hidden_layers": 3}),
        ("deepseek_v32", {**LATENT, **INDEX, "index_topk": TOKENS, "num_hidden_layers": 2,
            "mlp_layer_types": ["dense", "sparse"]}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "num_hidden_layers": 2}),
        ("gemma3_text", {"num_hidden_layers": 6}),
        ("llama4_text", {"num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size_mlp": 112,
            "interleave_moe_layer_step": 2, "num_hidden_layers": 4}),
        ("olmo3", {"num_hidden_layers": 4}),
        ("nemotron_h", {**STATES, "layers_block_type": ["full_attention", "mlp", "moe"],
            "moe_latent_size": 32}),
        ("deepseek_v2", {**LATENT, "head_dim": None, "q_lora_rank": None, "num_hidden_layers": 3}),
        ("qwen3_next", LINEAR | SHARED | {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}),
        ("step3p5", {**STEP, "num_hidden_layers": 4, "layer_types": STEP["layer_types"][:4],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}),
    ],
)  # fmt: skip
def test_forward_of_transformers_has_the_flops_of_its_types(model_type, words):
    """Eager attention computes the scores of all positions, which the formula palm counts, and Llama 4 all experts.

    They include latents with and without a rank of queries, an index, gates of channels, of heads and of the shared
    expert, groups of experts, experts of a latent width, and blocks with and without gates.
    """
    config = config_of(model_type, words)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    shape, has_head = shape_of(config.to_dict(), "m", "m"), model_type != "step3p5"
    model = AutoModelForCausalLM.from_config(config) if has_head else Step3p7TextModel(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(shape.vocab_size, (1, TOKENS)))
    formula_flops = TOKENS * shape.flops_per_token(TOKENS, "palm") / 3
    head_flops = 0 if has_head else 2 * TOKENS * shape.embedding_params
    assert counter.get_total_flops() + head_flops == pytest.approx(formula_flops, rel=0.01)


def test_products_of_states_are_those_of_transformers():
    for model_type, words, kind in (
        ("qwen3_5_text", LINEAR, "linear"),
        ("nemotron_h", STATES, "state_space"),
    ):
        config = config_of(model_type, words)
        shape = shape_of(config.to_dict(), "m", "m")
        mixer = next(m for m in AutoModelForCausalLM.from_config(config).modules() if hasattr(m, "dt_bias"))
        linear_layers = [module for module in mixer.modules() if isinstance(module, torch.nn.Linear)]
        attention = next(getattr(t, kind) for t in shape.kinds if getattr(t, kind))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for layer in linear_layers:
                layer(torch.zeros(TOKENS, layer.in_features))
        assert counter.get_total_flops() == 2 * TOKENS * num_params(attention.products(shape.hidden_size))


class _Operations(TorchDispatchMode):
    """Counts the operations of elementwise functions and of products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.count += flop_registry[func.overloadpacket](*args, out_val=result)
        elif func.overloadpacket in (
            torch.ops.aten.mul,
            torch.ops.aten.add,
            torch.ops.aten.sub,
            torch.ops.aten.exp,
        ):
            self.count += result.numel()
        return result


def test_the_delta_rule_has_the_flops_of_its_loop():
    """Gated delta rule, arXiv 2412.06464, equation 10, for one head of each value head."""
    num_heads, key_dim, value_dim, kernel = 3, 64, 96, 4
    linear = Linear(
        linear_num_key_heads=3, linear_num_value_heads=num_heads, linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=kernel,
    )  # fmt: skip
    q, k, v = (torch.randn(num_heads, width) for width in (key_dim, key_dim, value_dim))
    state, decay, rate = (
        torch.randn(num_heads, key_dim, value_dim),
        torch.rand(num_heads, 1, 1),
        torch.rand(num_heads, 1),
    )
    inputs, weights = torch.randn(kernel, linear.conv_width), torch.randn(kernel, linear.conv_width)
    with _Operations() as operations:
        sum((inputs[n] * weights[n] for n in range(kernel)), torch.zeros(linear.conv_width))
        state = state * decay
        delta = (v - torch.bmm(k.unsqueeze(1), state).squeeze(1)) * rate
        state = state + k.unsqueeze(2) * delta.unsqueeze(1)
        torch.bmm(q.unsqueeze(1), state)
    assert operations.count == pytest.approx(linear.core_flops(4096, "palm"), rel=0.01)


def test_a_state_space_layer_has_the_flops_of_its_loop():
    """Mamba 2, arXiv 2405.21060, equation 2, for one token."""
    num_heads, head_dim, state_size, kernel = 4, 32, 128, 4
    states = StateSpace(
        mamba_num_heads=num_heads, mamba_head_dim=head_dim, n_groups=2, ssm_state_size=state_size
    )
    x, b, c = (torch.randn(num_heads, width) for width in (head_dim, state_size, state_size))
    state, step = torch.randn(num_heads, head_dim, state_size), torch.rand(num_heads, 1)
    inputs, weights = torch.randn(kernel, states.conv_width), torch.randn(kernel, states.conv_width)
    with _Operations() as operations:
        sum((inputs[n] * weights[n] for n in range(kernel)), torch.zeros(states.conv_width))
        state = state * torch.exp(step).unsqueeze(2) + (step * x).unsqueeze(2) * b.unsqueeze(1)
        torch.bmm(state, c.unsqueeze(2))
    assert operations.count == pytest.approx(states.core_flops(4096, "palm"), rel=0.01)


def mean_positions(is_visible):
    """The mean number of positions that a token of 100 sees in a mask."""
    return sum(is_visible(token, position) for token in range(100) for position in range(token + 1)) / 100


GROUPED = GroupedQuery(num_attention_heads=4, num_key_value_heads=2, head_dim=16)


@pytest.mark.parametrize("size", [1, 7, 25, 99, 100, 300])
def test_the_formula_masked_counts_the_pairs_of_the_mask(size):
    cases = [
        (replace(GROUPED, sliding_window=size), mean_positions(lambda token, position: token - position < size)),
        (replace(GROUPED, attention_chunk_size=size), mean_positions(lambda token,
            position: token // size == position // size)),
        (GROUPED, mean_positions(lambda token, position: True)),
    ]  # fmt: skip
    sparse = Latent(**LATENT_SIZES, index=Index(index_n_heads=3, index_head_dim=8, index_topk=size))
    num_chosen = sum(min(token + 1, size) for token in range(100)) / 100
    flops_of_pairs = 2 * 4 * (20 + 10) * num_chosen + 2 * 3 * (8 + 1) * 50.5
    assert sparse.core_flops(100, "masked") == pytest.approx(flops_of_pairs)
    for attention, expected in cases:
        assert attention.positions(100) == pytest.approx(expected)
        assert attention.core_flops(100, "masked") == pytest.approx(4 * attention.q_width * expected)
        assert attention.core_flops(100, "palm") == 4 * attention.q_width * 100
        assert attention.core_flops(100, "megatron") == 2 * attention.q_width * 100


def test_what_a_layer_keeps_and_has_by_hand():
    """A layer of latent attention with a feed-forward block of 96 channels, on 64 channels."""
    layer_type = LayerType(latent=Latent(**LATENT_SIZES), feed_forward=FeedForward(intermediate_size=96))
    down, up = 24 * 64 + (16 + 8) * 64, 4 * 20 * 24 + 4 * (12 + 10) * 16
    assert layer_type.matmul_params(64) == down + up + 64 * 4 * 10 + 3 * 64 * 96
    assert layer_type.num_params(64) == layer_type.matmul_params(64) + 24 + 16 + 2 * 64
    latents, heads = 2 * (24 + 16 + 8), 4 * (2 * 20 + 2 * 10)
    assert layer_type.kept(64) == (heads + 4 * 96, latents)
    assert layer_type.kept_channels(64) == 4 * 64 + heads + latents + 4 * 96
    assert math.isclose(layer_type.flops_per_token(64, 4096, "palm").core, 6 * 4 * (20 + 10) * 4096)
