"""What ranks of tp hold beyond the model: rows that pad its vocabulary, and copies of its key/value heads."""

from dataclasses import replace

import pytest
import torch

from ultrabench.attention_type import GroupedQuery, Latent
from ultrabench.kernel.model import Decoder
from ultrabench.kernel.requests import TINY
from ultrabench.kernel.tp import TensorParallel, apply_tp
from ultrabench.layer_type import LayerType
from ultrabench.stages import split_stages
from ultrabench.tensor_parallel import (
    added_params,
    kinds_of_ranks,
    kv_copies,
    most_kv_copies,
    padded_vocab_size,
)


@pytest.mark.parametrize(
    ("vocab_size", "tp", "padded"),
    [(151936, 8, 151936), (50257, 1, 50257), (50257, 2, 50432), (50257, 8, 51200), (4, 3, 384), (9, 3, 9)],
)
def test_a_vocabulary_that_tp_does_not_divide_is_padded_as_megatron_pads_it(vocab_size, tp, padded):
    """To a multiple of 128 * tp; one that tp divides stays as it is."""
    assert padded_vocab_size(vocab_size, tp) == padded


def test_more_ranks_than_heads_share_them():
    assert [kv_copies(4, tp) for tp in (1, 2, 4, 8, 32)] == [1, 1, 1, 2, 8]


def test_each_type_of_layer_has_copies_of_its_own_heads():
    """Windows have 4 heads of 8 numbers each, full attention 2; latent attention has none to copy."""
    full = GroupedQuery(num_attention_heads=8, num_key_value_heads=2, head_dim=8, attention_bias=True)
    window = replace(full, num_key_value_heads=4, sliding_window=16)
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    latent = LayerType(latent=Latent(num_attention_heads=8, **sizes))
    types = LayerType(grouped_query=window), LayerType(grouped_query=full), latent
    shape = replace(TINY, num_hidden_layers=6, layer_types=types, layer_order="(aaabcc)")
    for tp, copies in {2: (1, 1), 4: (1, 2), 8: (2, 4)}.items():
        *copied, unchanged = kinds_of_ranks(shape, tp)
        assert [kind.grouped_query.num_key_value_heads for kind in copied] == [4 * copies[0], 2 * copies[1]]
        assert unchanged == latent
        assert most_kv_copies(shape, tp) == max(copies)
        added_heads = 3 * 4 * (copies[0] - 1) + 2 * (copies[1] - 1)
        (stage,) = split_stages(shape, 1)
        assert added_params(shape, stage, tp) == 2 * added_heads * 8 * (shape.hidden_size + 1)
    assert most_kv_copies(replace(shape, layer_types=(latent,), layer_order=""), 8) == 1


class Ranks:
    """Stands for a process group of tp ranks, of which only the size counts before anything is sent."""

    def __init__(self, size):
        self.size = lambda: size


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "tie_word_embeddings": True}])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_the_numbers_of_added_parameters_are_those_of_the_kernel(changes, tp, num_stages):
    """On all ranks together; norms, which each rank holds whole, count once."""
    shape = replace(TINY, vocab_size=131, num_key_value_heads=1, **changes)
    for stage in split_stages(shape, num_stages):
        with torch.device("meta"):
            model = Decoder(shape, stage, [range(8)])
        apply_tp(model, TensorParallel(Ranks(tp)))
        params = dict(model.named_parameters())
        num_params = sum(param.numel() * (1 if "norm" in name else tp) for name, param in params.items())
        assert num_params == stage.num_params(shape) + added_params(shape, stage, tp)
