"""What is predicted of models with experts: bytes by hand, and what makes communication and computing
larger or smaller.
"""

from dataclasses import replace

import pytest

from tests.unit.predict.test_memory import constants
from tests.unit.predict.test_step_time import GPUS, spec_of, step_time
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.routing import expert_shares
from ultrabench.sweep.predict.experts import busiest_share
from ultrabench.sweep.predict.memory import predict_memory
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.predict.ultrabench_memory import static_bytes

MIXTRAL = ModelShape(
    name="mixtral", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    intermediate_size=14336, vocab_size=32000, tie_word_embeddings=False, num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=14336,
)  # fmt: skip
"""The sizes of Mixtral 8x7B."""
IN_NODE = Layout(dp=8, ep=8, zero_stage=1, gas=2)


def test_static_bytes_of_mixtral_are_those_of_a_hand_calculation():
    """12 bytes a parameter: the rest in 8 shards, and 1 of 8 experts whole; the route of 4096 tokens,
    biases and counts.
    """
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096 + 8 * 4096  # attention, norms and router
    rest, expert = 32 * layer + 2 * 32000 * 4096 + 4096, 3 * 4096 * 14336
    tensors = 32 * (4 + 2 + 1 + 3) + 3
    route = 8 * 6 * 4096 * 2
    expected = 12 * (rest // 8 + 32 * expert) + 4 * tensors + route + 12 * 8 * 32
    assert static_bytes(spec_of(IN_NODE, MIXTRAL)) == (expected,)


def test_expert_parallelism_moves_bytes_from_weights_to_links():
    alone, spread = (spec_of(replace(IN_NODE, ep=ep), MIXTRAL) for ep in (1, 8))
    bytes_alone, bytes_spread = (
        predict_memory(s, constants("ultrabench"))[0].weights for s in (alone, spread)
    )
    assert bytes_alone > 6 * bytes_spread
    assert step_time(alone, "ultrabench").ep == 0 < step_time(spread, "ultrabench").ep
    assert step_time(spread, "ultrabench").dp < step_time(alone, "ultrabench").dp


def test_all_to_alls_take_longer_between_nodes_and_as_long_as_measured():
    sheet = network(GPUS, 2)
    assert sheet.alltoall_s(2**30, 16) > 5 * sheet.alltoall_s(2**30, 8)
    rates = network(GPUS, 2, alltoall_bytes_per_s=40e9, alltoall_intra_node_bytes_per_s=300e9)
    assert rates.alltoall_s(2**30, 16) == pytest.approx(15 / 16 * 2**30 / 40e9)
    assert rates.alltoall_s(2**30, 8) == pytest.approx(7 / 8 * 2**30 / 300e9)
    slower = network(GPUS, 2, allreduce_bytes_per_s=sheet.allreduce_bytes_per_s / 4)
    assert slower.alltoall_s(2**30, 16) == pytest.approx(4 * sheet.alltoall_s(2**30, 16))


def test_a_token_may_be_sent_once_to_each_node():
    """A token with 8 experts on 4 nodes goes to 3.6 of them; forwarding inside a node takes all of its 8 rows."""
    links = network(GPUS, 4)
    copies, once = (links.alltoall_s(2**30, 32, 8, node_copies) for node_copies in (0.0, 1.0))
    assert once / copies == pytest.approx(4 * (1 - 0.75**8) / 8)
    assert links.alltoall_s(2**30, 8, 8, 1.0) == links.alltoall_s(2**30, 8)
    # A router that chooses 4 of 8 groups reaches 3 of 4 nodes with two groups each, and 4 of 8 with one.
    grouped = links.alltoall_s(2**30, 32, 8, 1.0, (8, 4))
    assert grouped / copies == pytest.approx(3 * (1 - (2 / 3) ** 8) / 8)
    assert links.alltoall_s(2**30, 32, 8, 1.0, (8, 8)) == once
    fast_nodes = replace(links, expert_node_link_bytes_per_s=1e15)
    assert fast_nodes.alltoall_s(2**30, 32, 8, 1.0) == pytest.approx(
        4 * fast_nodes.alltoall_s(2**30, 32, 8, 0.0)
    )


def test_programs_hide_all_to_alls_and_compute_experts_in_fp8():
    spec = spec_of(replace(IN_NODE, ep=8), MIXTRAL)
    usual, hidden = (step_time(spec, "megatron", ep_overlap=share).ep for share in (0.0, 0.75))
    assert hidden == pytest.approx(0.25 * usual)
    in_fp8 = replace(spec, kernel=replace(spec.kernel, precision="fp8"))
    bf16_experts, fp8_experts = (step_time(in_fp8, "megatron", fp8_experts=flag) for flag in (False, True))
    assert fp8_experts.memory_bound > 1.5 * bf16_experts.memory_bound, "their operands are cast, too"
    faster = step_time(in_fp8, "megatron", fp8_experts=True, fp8_efficiency=0.9)
    assert faster.gemm < 0.8 * fp8_experts.gemm
    full, half = (step_time(spec, "megatron", expert_efficiency=share).gemm for share in (0.8, 0.4))
    assert half > 1.3 * full


@pytest.mark.parametrize(
    ("routing", "share"),
    [
        ("balanced", 1),
        ("learned", 4 / sum((e + 1) ** -0.15 for e in range(4))),
        ("skew=0", 1),
        ("skew=1", 4 * 12 / 25),
    ],
)
def test_the_busiest_rank_has_the_most_popular_experts(routing, share):
    """With A=1 and 4 experts the first one has 12/25 of the rows."""
    shape = replace(MIXTRAL, num_experts=4, num_experts_per_tok=1)
    kernel = replace(spec_of(IN_NODE, MIXTRAL).kernel, routing=routing)
    assert busiest_share(kernel, Layout(dp=4, ep=4), shape) == pytest.approx(share)
    assert busiest_share(kernel, Layout(dp=4), shape) == 1


def test_a_token_chooses_an_expert_once_however_popular_it_is():
    """With A=1 and 3 experts of 4 a token chooses the first one, and 2 of the others as 6 to 4 to 3."""
    shares = expert_shares("skew=1", 4, 3)
    assert shares == pytest.approx((1, 12 / 13, 8 / 13, 6 / 13))
    shape = replace(MIXTRAL, num_experts=4, num_experts_per_tok=3)
    kernel = replace(spec_of(IN_NODE, MIXTRAL).kernel, routing="skew=1")
    assert busiest_share(kernel, Layout(dp=2, ep=2), shape) == pytest.approx(25 / 13 / 1.5)
