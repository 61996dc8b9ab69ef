"""The sizes of models, and how their stages share them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import refused
from tests.strategies import shapes
from ultrabench.model_shape import ModelShape
from ultrabench.stages import split_stages
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.load import load_model

SMALL = {
    "name": "small", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 128, "tie_word_embeddings": False,
}  # fmt: skip
# Number of parameters as the checkpoints on the hub have them.
PUBLISHED = {
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800,
     "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496, "mistral-7b": 7_248_023_552, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen2.5-7b": 7_615_616_512,
    "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560, "olmoe-1b-7b": 6_919_161_856,
    "glm4.5-air": 106_852_245_504, "gemma3-27b": 27_009_346_304,
}  # fmt: skip
# Billions of parameters in reports and model cards, which round them: DeepSeek-V3 (arXiv 2412.19437) has 671 without
# its module for more tokens, Kimi K2 (2507.20534) 1.04 T in its report and 1.026 T in its files, gpt-oss (2508.10925)
# 20.9 and 116.8. Llama 4 Scout has 109 with its part for images. Moonlight (2502.16982) has 15.29 of 16 without the
# embedding and lm_head, 2.24 of 3 of them active; these two have 0.67 together.
ROUNDED = {
    "deepseek-v2": 236, "deepseek-v3": 671, "deepseek-v3.2": 671.9, "kimi-k2": 1026, "glm-5": 744, "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "qwen3-next": 80, "qwen3.5-35b-a3b": 35, "llama4-scout": 107.8, "minimax-m2": 229, "nemotron-3": 31.6,
    "moonlight-16b-a3b": 15.29 + 0.67,
}  # fmt: skip
# Active ones, with the embedding, which some reports leave out: 0.93 of 37 in DeepSeek-V3, 0.58 of 3.6 and of 5.1 in
# gpt-oss.
ROUNDED_ACTIVE = {
    "deepseek-v2": 21 + 0.5, "deepseek-v3": 37 + 0.5, "deepseek-v3.2": 37 + 1.4, "kimi-k2": 32 + 0.9, "glm-5": 40 + 1.8,
    "gpt-oss-20b": 3.6 + 0.58,
    "gpt-oss-120b": 5.1 + 0.58, "qwen3-next": 3.9, "qwen3.5-35b-a3b": 3.4, "llama4-scout": 17.2, "minimax-m2": 11,
    "nemotron-3": 3.2 + 0.35, "moonlight-16b-a3b": 2.24 + 0.67,
}  # fmt: skip
# Active ones in billions as reports have them: Mixtral (mistral.ai/news/mixtral-of-experts), Qwen3 (arXiv 2505.09388)
# and OLMoE (2409.02060) count the embedding, GLM-4.5 (2508.06471) neither embedding nor lm_head, which have 1.2
# together.
ACTIVE = {
    "mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "olmoe-1b-7b": 1.3, "glm4.5-air": 12 + 1.2,
}  # fmt: skip
# The same as the playbook tells it, rounded.
PLAYBOOK = {"1B": 1.34e9, "3B": 3.57e9, "8B": 8.86e9, "80B": 80.0e9, "469B": 469e9}
KNOWN = PUBLISHED | {name: pytest.approx(number, rel=0.005) for name, number in PLAYBOOK.items()}
KNOWN |= {name: pytest.approx(1e9 * number, rel=0.01) for name, number in ROUNDED.items()}


def test_every_file_of_a_model_but_our_own_has_a_known_number_of_parameters():
    assert files("model").keys() - KNOWN.keys() == {"mini", "tiny", "tiny-gqa", "tiny-moe"}


@pytest.mark.parametrize("name", KNOWN)
def test_a_model_has_the_published_number_of_parameters(name):
    shape = load_model(name)
    assert shape.num_params == KNOWN[name]
    active = shape.num_active_params / 1e9
    published = ACTIVE | ROUNDED_ACTIVE
    assert active == (
        pytest.approx(published[name], rel=0.02) if name in published else shape.num_params / 1e9
    )


def test_the_parameters_of_a_small_model_with_experts_by_hand():
    """Each term of tiny-moe: a dense layer and three with 8 experts, a router and a shared expert."""
    attention, expert = 2 * 64 * 64 + 2 * 64 * 32, 3 * 64 * 64
    sparse, dense = attention + 8 * 64 + 9 * expert + 2 * 64, attention + 3 * 64 * 256 + 2 * 64
    shape = load_model("tiny-moe")
    assert shape.num_params == 2 * 512 * 64 + dense + 3 * sparse + 64 == 497_728
    assert shape.num_active_params == shape.num_params - 3 * 6 * expert


def test_flops_of_a_published_model():
    # 8B: 6*(32 layers + head) + attention; by hand from the table of the playbook.
    products = 32 * (4 * 4096**2 + 3 * 4096 * 14336) + 131072 * 4096
    assert load_model("8B").flops_per_token(4096) == 6 * products + 12 * 32 * 4096 * 4096
    # Qwen3-0.6B: 16 heads of 128 channels on a hidden size of 1024; Megatron halves their attention.
    products = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072) + 151936 * 1024
    assert load_model("qwen3-0.6b").flops_per_token(4096, "megatron") == 6 * products + 6 * 28 * 2048 * 4096


def test_parameters_and_flops_of_published_experts():
    # Mixtral 8x7B: 46,702,792,704 parameters in its checkpoint; a token passes 2 of 8 experts in each of 32 layers.
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
             "intermediate_size": 14336, "vocab_size": 32000, "tie_word_embeddings": False}  # fmt: skip
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 14336}
    shape, expert = ModelShape(name="mixtral", **sizes, **experts), 3 * 4096 * 14336
    assert (shape.num_params, shape.expert_params) == (46_702_792_704, expert)
    assert shape.num_active_params == 46_702_792_704 - 32 * 6 * expert
    products = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 4096 * 8 + 2 * expert) + 32000 * 4096
    assert shape.flops_per_token(4096) == 6 * products + 12 * 32 * 4096 * 4096
    # A shared expert counts once, and a dense layer has none of them.
    shared = ModelShape(name="x", **sizes, **experts, n_shared_experts=1, first_k_dense_replace=30)
    products = 32 * (2 * 4096**2 + 2 * 4096 * 1024) + 30 * expert + 2 * (4096 * 8 + 3 * expert) + 32000 * 4096
    assert shared.flops_per_token(4096) == 6 * products + 12 * 32 * 4096 * 4096


@pytest.mark.parametrize(
    ("words", "line"),
    [
        *(({name: 0}, f"{name}=0; must be 1 to 1,073,741,824") for name in ("vocab_size", "head_dim")),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000; must be 1 to 10,000"),
        ({"sliding_window": 0}, "sliding_window=0; must be >= 1"),
        ({"num_attention_heads": 5}, "num_attention_heads=5 does not divide hidden_size=64; change one"),
        ({"num_attention_heads": 64, "num_key_value_heads": 64}, "head_dim=1; rotary embeddings need an even head_dim"),
        ({"head_dim": 15}, "head_dim=15; rotary embeddings need an even head_dim: choose another"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 must divide num_attention_heads=4"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(words, line):
    with refused(f"model small: {line}"):
        ModelShape(**{**SMALL, **words})


@given(shape=shapes(), pp=st.integers(1, 16))
def test_stages_hold_every_parameter_once_but_a_tied_copy(shape, pp):
    stages = split_stages(shape, pp)
    # Embedding and head meet on one stage when the layers weigh next to nothing.
    apart = not any(s.has_embedding and s.has_head for s in stages)
    copy = shape.vocab_size * shape.hidden_size if shape.tie_word_embeddings and apart else 0
    assert sum(s.num_params(shape) for s in stages) == shape.num_params + copy
    assert sum(s.matmul_params(shape) for s in stages) == shape.num_matmul_params
    layers = [n for s in stages for n in range(s.first_layer, s.first_layer + s.num_layers)]
    assert layers == list(range(shape.num_hidden_layers))
    assert sum(s.num_blocks for s in stages) == shape.num_hidden_layers + 5


def test_a_small_split_by_hand():
    ones = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"), 1)
    shape = ModelShape(**{**SMALL, **ones, "hidden_size": 2, "num_hidden_layers": 4, "vocab_size": 44})
    assert shape.layer_matmul_params() == 22
    first, second = split_stages(shape, 2)
    # total 176, half 88: the four layers make exactly 88, which is not more than half, so the
    # norm and the head still go to stage 0, and only cast and loss are left.
    assert (first.num_layers, first.has_head, first.num_blocks) == (4, True, 7)
    assert (second.num_layers, second.has_head, second.num_blocks) == (0, False, 2)
    assert second.num_params(shape) == 0
