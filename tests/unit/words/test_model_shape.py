from pathlib import Path

import pytest
import yaml
from hypothesis import given

import ultrabench
from tests.configs import refused
from tests.strategies import shapes
from ultrabench.model_shape import ModelShape
from ultrabench.record import to_dict
from ultrabench.sweep.config.load import load_model

MODELS = sorted((Path(ultrabench.__file__).parent / "configs" / "model").glob("*.yaml"))

# name: layers, hidden, heads, intermediate, tied, parameters as published
PLAYBOOK = {
    "1B": (16, 2048, 32, 8192, True, 1.34e9),
    "3B": (28, 3072, 32, 8192, True, 3.57e9),
    "8B": (32, 4096, 32, 14336, False, 8.86e9),
    "80B": (80, 8192, 64, 28672, False, 80.0e9),
    "469B": (126, 16384, 128, 53248, False, 469e9),
}

SMALL = {
    "name": "small", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 128, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("name", PLAYBOOK)
def test_playbook_models_have_the_published_sizes(name):
    *sizes, published = PLAYBOOK[name]
    shape = load_model(name)
    assert sizes == [
        shape.num_hidden_layers, shape.hidden_size, shape.num_attention_heads, shape.intermediate_size,
        shape.tie_word_embeddings,
    ]  # fmt: skip
    assert (shape.num_key_value_heads, shape.vocab_size) == (shape.num_attention_heads, 131072)
    assert shape.num_params == pytest.approx(published, rel=0.005)


# Number of parameters as the checkpoints on the hub have them.
PUBLISHED = {
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248, "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496, "mistral-7b": 7_248_023_552, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_parameters(name):
    assert load_model(name).num_params == PUBLISHED[name]


@given(shapes())
def test_parameters_by_matrix(shape):
    h, width = shape.hidden_size, shape.head_dim or shape.hidden_size // shape.num_attention_heads
    q, kv = shape.num_attention_heads * width, shape.num_key_value_heads * width
    matrices = [(h, q), (h, kv), (h, kv), (q, h)] + [(h, shape.intermediate_size)] * 3
    layer = sum(a * b for a, b in matrices)
    table = shape.vocab_size * h
    tables = table if shape.tie_word_embeddings else 2 * table
    assert shape.layer_matmul_params == layer
    assert (
        shape.num_params == tables + shape.num_hidden_layers * (layer + 2 * h + 2 * width * shape.qk_norm) + h
    )
    assert shape.num_matmul_params == shape.num_hidden_layers * layer + table
    assert shape.num_active_params == shape.num_params


def test_flops_of_a_published_model():
    # 8B: 6*(32 layers + head) + attention; by hand from the table of the playbook.
    products = 32 * (4 * 4096**2 + 3 * 4096 * 14336) + 131072 * 4096
    assert load_model("8B").flops_per_token(4096) == 6 * products + 12 * 32 * 4096 * 4096
    # Qwen3-0.6B: 16 heads of 128 channels on a hidden size of 1024; Megatron halves their attention.
    products = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072) + 151936 * 1024
    assert load_model("qwen3-0.6b").flops_per_token(4096, "megatron") == 6 * products + 6 * 28 * 2048 * 4096


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_every_model_file_is_a_model(path):
    values = yaml.safe_load(path.read_text())
    shape = load_model(path.stem)
    assert shape.name == path.stem
    assert to_dict(shape).items() >= values.items()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"vocab_size": 0}, "vocab_size=0; must be >= 1"),
        ({"num_hidden_layers": -3}, "num_hidden_layers=-3; must be >= 1"),
        ({"num_attention_heads": 5}, "num_attention_heads=5 does not divide hidden_size=64; change one"),
        ({"num_attention_heads": 64, "num_key_value_heads": 64}, "head_dim=1; rotations need an even width"),
        ({"head_dim": 15}, "head_dim=15; rotations need an even width of heads: choose another"),
        ({"head_dim": 0}, "head_dim=0; must be >= 1"),
        ({"sliding_window": 0}, "sliding_window=0; must be >= 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 must divide num_attention_heads=4"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, line):
    with refused(f"model small: {line}"):
        ModelShape(**{**SMALL, **words})
