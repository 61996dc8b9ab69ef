from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import ultrabench
from tests.strategies import shapes
from ultrabench.errors import ConfigError
from ultrabench.model_shape import ModelShape
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
    "name": "small",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("name", PLAYBOOK)
def test_playbook_models_have_the_published_sizes(name):
    layers, hidden, heads, intermediate, tied, published = PLAYBOOK[name]
    shape = load_model(name)
    assert shape.num_hidden_layers == layers
    assert shape.hidden_size == hidden
    assert shape.num_attention_heads == shape.num_key_value_heads == heads
    assert shape.intermediate_size == intermediate
    assert shape.vocab_size == 131072
    assert shape.tie_word_embeddings is tied
    tables = (1 if tied else 2) * 131072 * hidden
    norms = (2 * layers + 1) * hidden
    params = tables + layers * (3 * hidden * intermediate + 4 * hidden * hidden) + norms
    assert shape.num_params == params
    assert shape.num_params == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama3-8b", 8.03), ("llama3-70b", 70.55), ("llama3-405b", 405.85)]
)
def test_llama3_parameters(name, billions):
    assert load_model(name).num_params == pytest.approx(billions * 1e9, rel=0.001)


@given(shapes())
def test_parameters_by_matrix(shape):
    h, kv = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
    matrices = [(h, h), (h, kv), (h, kv), (h, h)] + [(h, shape.intermediate_size)] * 3
    layer = sum(a * b for a, b in matrices)
    table = shape.vocab_size * h
    tables = table if shape.tie_word_embeddings else 2 * table
    assert shape.layer_matmul_params == layer
    assert shape.num_params == tables + shape.num_hidden_layers * (layer + 2 * h) + h
    assert shape.num_matmul_params == shape.num_hidden_layers * layer + table
    assert shape.num_active_params == shape.num_params


@given(shape=shapes(), seq_len=st.integers(1, 8192))
def test_flops_formula(shape, seq_len):
    attention = 12 * shape.num_hidden_layers * shape.hidden_size * seq_len
    embedding = shape.vocab_size * shape.hidden_size
    norms = (2 * shape.num_hidden_layers + 1) * shape.hidden_size
    in_products = shape.num_params - norms - (0 if shape.tie_word_embeddings else embedding)
    assert shape.flops_per_token(seq_len) == 6 * in_products + attention


def test_flops_of_a_published_model():
    # 8B: 6*(32 layers + head) + attention; by hand from the table of the playbook.
    products = 32 * (4 * 4096**2 + 3 * 4096 * 14336) + 131072 * 4096
    assert load_model("8B").flops_per_token(4096) == 6 * products + 12 * 32 * 4096 * 4096


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_every_model_file_is_a_model(path):
    values = yaml.safe_load(path.read_text())
    shape = load_model(path.stem)
    assert shape.name == path.stem
    assert {k: getattr(shape, k) for k in values} == values


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"vocab_size": 0}, "vocab_size=0; must be >= 1"),
        ({"num_hidden_layers": -3}, "num_hidden_layers=-3; must be >= 1"),
        ({"num_attention_heads": 5}, "num_attention_heads=5 must cut hidden_size=64 into heads"),
        ({"num_attention_heads": 64, "num_key_value_heads": 64}, "heads of an even width"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8 must divide num_attention_heads=4"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, line):
    with pytest.raises(ConfigError) as raised:
        ModelShape(**{**SMALL, **words})
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("model small: ")
