from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import shapes
from ultrabench.model_shape import ModelShape
from ultrabench.stages import split_stages
from ultrabench.sweep.config.load import load_model


def stage_of_each_block(shape, pp):
    """The documented rule, written with a running cost and exact fractions."""
    h = shape.hidden_size
    width = shape.head_dim or Fraction(h, shape.num_attention_heads)
    heads = shape.num_attention_heads + shape.num_key_value_heads
    decoder = 2 * heads * width * h + 3 * h * shape.intermediate_size
    head = Fraction(shape.vocab_size * h)
    blocks = [("embedding", Fraction(0))]
    blocks += [(f"layer{i}", decoder) for i in range(shape.num_hidden_layers)]
    blocks += [("norm", Fraction(0)), ("head", head), ("cast", Fraction(0)), ("loss", Fraction(0))]
    total = sum(cost for _, cost in blocks)
    stage, done, where = 0, Fraction(0), {}
    for name, cost in blocks:
        where[name] = stage
        done += cost
        if done > total * Fraction(stage + 1, pp):
            stage += 1
    return where


@given(shape=shapes(), pp=st.integers(1, 16))
def test_split_follows_the_rule(shape, pp):
    where = stage_of_each_block(shape, pp)
    stages = split_stages(shape, pp)
    assert len(stages) == pp
    next_layer = 0
    for stage in stages:
        held = [name for name, at in where.items() if at == stage.index]
        layers = [int(name[5:]) for name in held if name.startswith("layer")]
        assert stage.num_blocks == len(held)
        assert stage.num_layers == len(layers)
        assert stage.has_embedding == ("embedding" in held)
        assert stage.has_norm == ("norm" in held)
        assert stage.has_head == ("head" in held)
        if layers:
            assert layers == list(range(stage.first_layer, stage.first_layer + stage.num_layers))
            assert stage.first_layer == next_layer
        next_layer += len(layers)


@given(shape=shapes(), pp=st.integers(1, 16))
def test_stages_hold_every_parameter_once_but_a_tied_copy(shape, pp):
    stages = split_stages(shape, pp)
    # Embedding and head meet on one stage when the layers weigh next to nothing.
    apart = not any(s.has_embedding and s.has_head for s in stages)
    copy = shape.vocab_size * shape.hidden_size if shape.tie_word_embeddings and apart else 0
    assert sum(s.num_params(shape) for s in stages) == shape.num_params + copy
    assert sum(s.matmul_params(shape) for s in stages) == shape.num_matmul_params
    assert sum(s.num_layers for s in stages) == shape.num_hidden_layers


@pytest.mark.parametrize(
    ("model", "largest"), [("1B", 8), ("3B", 16), ("8B", 32), ("80B", 64), ("469B", 128)]
)
def test_largest_pipeline_without_an_empty_stage(model, largest):
    shape = load_model(model)
    full = [
        pp for pp in (1, 2, 4, 8, 16, 32, 64, 128, 256) if all(s.num_blocks for s in split_stages(shape, pp))
    ]
    assert max(full) == largest


def test_a_small_split_by_hand():
    shape = ModelShape(
        name="hand", hidden_size=2, num_hidden_layers=4, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=1, vocab_size=44, tie_word_embeddings=False,
    )  # fmt: skip
    assert shape.layer_matmul_params == 22
    first, second = split_stages(shape, 2)
    # total 176, half 88: the four layers make exactly 88, which is not more than half, so the
    # norm and the head still go to stage 0, and only cast and loss are left.
    assert (first.num_layers, first.has_head, first.num_blocks) == (4, True, 7)
    assert (second.num_layers, second.has_head, second.num_blocks) == (0, False, 2)
    assert second.num_params(shape) == 0
