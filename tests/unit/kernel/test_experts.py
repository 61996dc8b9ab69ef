"""A sparse block is that of transformers, and routings by position send what they say."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ultrabench.kernel import ep
from ultrabench.kernel.model import sparse_feed_forward
from ultrabench.kernel.moe import static_experts, update_router_biases
from ultrabench.kernel.rank.precisions import value_precision
from ultrabench.model_shape import ModelShape

H, E, K, M = 16, 8, 2, 12
SIZES = {"hidden_size": H, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
THEIRS = {
    "mixtral": (MixtralSparseMoeBlock, {"num_local_experts": E, "intermediate_size": M}, {}),
    "qwen3_moe": (
        Qwen3MoeSparseMoeBlock, {"num_experts": E, "moe_intermediate_size": M, "norm_topk_prob": False},
        {"norm_topk_prob": False},
    ),
    "glm4_moe": (
        Glm4MoeMoE,
        {"n_routed_experts": E, "moe_intermediate_size": M, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
            "n_group": 1, "topk_group": 1},
        {"n_shared_experts": 2, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5},
    ),
}  # fmt: skip
"""Model type -> its sparse block, what its config.json says of experts, and what our shape says beside their sizes."""


def shape_with(**values):
    experts = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": M}
    return ModelShape(name="experts", vocab_size=32, tie_word_embeddings=False, **SIZES, **experts, **values)


def block_with(**values):
    shape = shape_with(**values)
    return sparse_feed_forward(shape.layer(0).experts, shape.hidden_size)


def with_variant_env(block):
    """The block in fp64 with random values, the same for parameters of the same order and size."""
    torch.manual_seed(0)
    for param in block.parameters():
        torch.nn.init.normal_(param, 0, 0.5)
    return block.double()


def copy(ours, theirs):
    """Gives `ours` the weights of `theirs`."""
    gate, up = theirs.experts.gate_up_proj.chunk(2, dim=1)
    pairs = [
        (ours.router.weight, theirs.gate.weight), (ours.experts.gate, gate), (ours.experts.up, up),
        (ours.experts.down, theirs.experts.down_proj),
    ]  # fmt: skip
    if ours.shared is not None:
        pairs += [
            (getattr(ours.shared, name).weight, getattr(theirs.shared_experts, f"{name}_proj").weight)
            for name in ("gate", "up", "down")
        ]
    with torch.no_grad():
        for to, source in pairs:
            to.copy_(source.reshape(to.shape))


@pytest.mark.parametrize("name", THEIRS)
def test_a_sparse_block_is_the_one_of_transformers(name):
    """Outputs and gradients of the input, the router and the experts within what their fp32 scores leave, 1e-5."""
    kind, values, changes = THEIRS[name]
    config = AutoConfig.for_model(name, **{**SIZES, "num_experts_per_tok": K, **values})
    config._experts_implementation = "eager"
    theirs, ours = with_variant_env(kind(config)), block_with(**changes).double()
    ours.balance.zero_()
    if name == "glm4_moe":  # a bias that changes the choice, but no weight
        theirs.gate.e_score_correction_bias = torch.linspace(0, 0.5, E).double()
        ours.balance.copy_(theirs.gate.e_score_correction_bias)
    copy(ours, theirs)
    x = torch.randn(2, 20, H).double()
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outs = [ours(inputs[0], None), theirs(inputs[1])]
    for out in outs:
        out.square().sum().backward()
    pairs = [outs, [t.grad for t in inputs], [ours.router.weight.grad, theirs.gate.weight.grad]]
    pairs.append([ours.experts.down.grad, theirs.experts.down_proj.grad.flatten(0, 1)])
    for of_us, of_them in pairs:
        error = (of_us - of_them).detach().abs().max() / of_them.detach().abs().max()
        assert float(error) < 1e-5


def shares(routing, **values):
    """Each expert's share of the tokens of 4000 positions, each of which has K different experts."""
    shape, positions = shape_with(**values), 4000
    chosen = [static_experts(routing, shape, position) for position in range(positions)]
    assert {len(set(experts)) for experts in chosen} == {K}
    counts = Counter(expert for experts in chosen for expert in experts)
    return [counts[expert] / positions for expert in range(E)]


def test_balanced_experts_get_as_many_tokens():
    assert shares("balanced") == [K / E] * E


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_skewed_experts_get_their_shares(exponent):
    """In proportion to (e + 1)**-A; with A=1 the first expert's share, 0.74 of the tokens, is still below one."""
    weights = [(expert + 1) ** -exponent for expert in range(E)]
    assert shares(f"skew={exponent}") == pytest.approx([K * w / sum(weights) for w in weights], abs=2e-3)


def test_no_token_has_an_expert_twice():
    """With A=3 the first expert's share would be 1.7; it gets each token once, the others share the rest."""
    first, second, third, *_ = shares("skew=3")
    assert first == 1
    assert second / third == pytest.approx((3 / 2) ** 3, rel=0.02)


def test_the_bias_of_an_expert_follows_its_tokens():
    class Model(torch.nn.Module):
        shape = shape_with()

        def __init__(self):
            super().__init__()
            layer = torch.nn.Module()
            layer.ffn = block_with()
            self.layers = torch.nn.ModuleDict({"0": layer})

    model = Model()
    block = model.layers["0"].ffn
    block.balance.zero_()
    block.token_counts.copy_(torch.tensor([14, 1, 4, 4, 4, 4, 4, 5]))  # 5 is their mean, 4 their median
    update_router_biases([model], model.shape)
    assert block.balance.tolist() == pytest.approx([-1e-3, *[1e-3] * 6, 0])
    assert not block.token_counts.any()


def test_scores_stay_wide_on_their_way():
    """To the experts of a rank of its own and back, beside rows in bf16; products would hide what is rounded there."""
    generator = torch.Generator().manual_seed(0)
    rows, scores = torch.randn(6, H, generator=generator).bfloat16(), torch.rand(6, K, generator=generator)
    order = torch.tensor([3, 0, 7, 11, 4, 1, 2, 10, 9, 5, 8, 6])
    route = (), order // K, order.argsort(), None, None, order
    own_rank = SimpleNamespace(
        send_to_experts=lambda tensor, *_: tensor, return_to_tokens=lambda tensor, *_: tensor
    )
    rows, scores = rows.requires_grad_(), scores.requires_grad_()
    sent_rows, sent_scores = ep._Dispatch.apply(own_rank, *route, rows, scores)
    assert torch.equal(sent_rows, rows[order // K])
    assert torch.equal(sent_scores, scores.flatten()[order])
    gate, up = torch.randn(2, 12, M, generator=generator).bfloat16()
    activations = ep._WeightedActivation.apply("silu", sent_scores, gate, up)
    assert activations.dtype == torch.bfloat16
    weights = torch.randn(12, M, generator=generator)
    (activations * weights.bfloat16()).sum().backward()
    expected = (weights.bfloat16().double() * torch.nn.functional.silu(gate.double()) * up).sum(1)
    assert scores.grad.flatten()[order].double() == pytest.approx(expected, abs=0.03)
    assert value_precision([scores.grad]) == "fp32"


def test_counting_tokens_in_backward_reads_nothing_back():
    """On GPUs, an operator whose result decides what the host does next would make it wait for the device."""

    class Operators(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    block, x = with_variant_env(block_with()), torch.randn(2, 8, H, dtype=torch.float64, requires_grad=True)
    block.balance.zero_()
    block.token_counts.zero_()
    loss = block(x, None).sum()
    with Operators() as operators:
        loss.backward()
    assert block.token_counts.sum() == 2 * 8 * K
    assert not {"bincount", "_local_scalar_dense", "nonzero", "unique"} & {*operators.names}
