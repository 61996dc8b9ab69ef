from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import shapes
from ultrabench.model_shape import ModelShape
from ultrabench.stages import split_stages


def by_the_rule(shape, pp):
    """The blocks of each stage by the documented rule, with a running cost and exact fractions."""
    h = shape.hidden_size
    width = shape.head_dim or Fraction(h, shape.num_attention_heads)
    heads = shape.num_attention_heads + shape.num_key_value_heads
    decoder = 2 * heads * width * h + 3 * h * shape.intermediate_size
    head = Fraction(shape.vocab_size * h)
    total = shape.num_hidden_layers * decoder + head
    stages, stage, done = [[] for _ in range(pp)], 0, Fraction(0)
    for block in ("embedding", *range(shape.num_hidden_layers), "norm", "head", "cast", "loss"):
        stages[stage].append(block)
        done += decoder if isinstance(block, int) else head if block == "head" else 0
        if done > total * Fraction(stage + 1, pp):
            stage += 1
    return stages


@given(shape=shapes(), pp=st.integers(1, 16))
def test_split_follows_the_rule(shape, pp):
    for stage, blocks in zip(split_stages(shape, pp), by_the_rule(shape, pp), strict=True):
        ends = (stage.has_embedding, stage.has_norm, stage.has_head)
        assert ends == tuple(name in blocks for name in ("embedding", "norm", "head"))
        layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
        assert [*layers] == [block for block in blocks if isinstance(block, int)]
        assert stage.num_blocks == len(blocks)


@given(shape=shapes(), pp=st.integers(1, 16))
def test_stages_hold_every_parameter_once_but_a_tied_copy(shape, pp):
    stages = split_stages(shape, pp)
    # Embedding and head meet on one stage when the layers weigh next to nothing.
    apart = not any(s.has_embedding and s.has_head for s in stages)
    copy = shape.vocab_size * shape.hidden_size if shape.tie_word_embeddings and apart else 0
    assert sum(s.num_params(shape) for s in stages) == shape.num_params + copy
    assert sum(s.matmul_params(shape) for s in stages) == shape.num_matmul_params


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
