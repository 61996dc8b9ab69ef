"""The plain model, stages that add up to it, and its layers when they are recomputed or compiled."""

import dataclasses
from types import FunctionType

import pytest
import torch

from ultrabench.kernel.compile import GraphCounter
from ultrabench.kernel.dryrun.counts import ExecutedFlops
from ultrabench.kernel.mesh import take
from ultrabench.kernel.model import INIT_STD, Decoder, RmsNorm
from ultrabench.kernel.recompute import apply_recompute, recompute_of
from ultrabench.kernel.requests import TINY
from ultrabench.kernel.step import learning_rate
from ultrabench.layout import Layout
from ultrabench.stages import split_stages

TIED = dataclasses.replace(TINY, tie_word_embeddings=True)


@pytest.mark.parametrize("shape", [TINY, TIED])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_hold_the_parameters_of_the_model(shape, pp):
    """Under the same names, as many as the shape says."""
    with torch.device("meta"):
        whole = Decoder(shape, split_stages(shape, 1)[0], [range(64)])
        stages = [Decoder(shape, stage, [range(64)]) for stage in split_stages(shape, pp)]
    assert sum(p.numel() for p in whole.parameters()) == shape.num_params
    for model, stage in zip(stages, split_stages(shape, pp), strict=True):
        assert sum(p.numel() for p in model.parameters()) == stage.num_params(shape)
    names = {name for model in stages for name, _ in model.named_parameters()}
    tied_copy = {"head.weight"} if shape.tie_word_embeddings and pp > 1 else set()
    assert names - tied_copy == {name for name, _ in whole.named_parameters()}


def test_initial_values_depend_on_seed_and_name():
    """Not on the stage, and not on the default dtype; every matrix has other ones."""
    cpu = torch.device("cpu")
    whole = Decoder(TINY, split_stages(TINY, 1)[0], [range(64)])
    last = Decoder(TINY, split_stages(TINY, 2)[1], [range(64)])
    size = torch.Size((8, 8))
    value = whole.initial_value("head.weight", size, 0, cpu)
    assert torch.equal(last.initial_value("head.weight", size, 0, cpu), value)
    assert not torch.equal(whole.initial_value("head.weight", size, 1, cpu), value)
    assert not torch.equal(whole.initial_value("embedding.weight", size, 0, cpu), value)
    names = [name for name, param in whole.named_parameters() if param.dim() == 2]
    values = {tuple(whole.initial_value(name, size, 0, cpu).flatten().tolist()) for name in names}
    assert len(values) == len(names), "matrices start with the same values"
    assert torch.tensor([*values]).std() == pytest.approx(INIT_STD, rel=0.1)
    tied = Decoder(TIED, split_stages(TIED, 2)[1], [range(64)])
    embedding = whole.initial_value("embedding.weight", size, 0, cpu)
    assert torch.equal(tied.initial_value("head.weight", size, 0, cpu), embedding)


def test_rms_norm_equals_torch():
    """Values and both gradients, in fp64."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    norm = RmsNorm(8, 1e-5).double()
    torch.nn.init.normal_(norm.weight)
    grad = torch.randn(2, 3, 8, dtype=torch.float64)
    ours = torch.autograd.grad(norm(x), (x, norm.weight), grad)
    theirs = torch.autograd.grad(
        torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-5), (x, norm.weight), grad
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_wide_models_are_trained_in_small_steps():
    """In proportion to 1/h from a hidden size of 128 on, as rounding grows with the width of a sum."""
    rates = [learning_rate(dataclasses.replace(TINY, hidden_size=h)) for h in (64, 128, 1024, 16384)]
    assert rates == pytest.approx([3e-4, 3e-4, 3.75e-5, 2.34375e-6])


def test_take_follows_the_cuts():
    """Each cut is made in what the one before left."""
    full = torch.arange(24).reshape(6, 4)
    assert torch.equal(take(full, ((0, 2, 4), (0, 1, 2), (1, 0, 3))), full[3:5, :3])
    assert take(full, ((0, 6, 0),)).numel() == 0


@pytest.mark.parametrize("recompute", ["full", "selective", "attention", "every3"])
def test_dynamo_can_read_a_recomputed_layer(recompute):
    """Dynamo compiles functions; of a functools.partial it compiles nothing, without a word."""
    model = Decoder(TINY, split_stages(TINY, 1)[0], [range(8)])
    layout = Layout(dp=1, recompute=recompute)
    assert recompute_of([model], layout) == "none"
    apply_recompute(model, layout)
    assert recompute_of([model], layout) == recompute
    functions = [f for layer in model.layers.values() for f in (layer.forward, layer.attention.core)]
    wrapped = [f for f in functions if hasattr(f, "recompute")]
    assert len(wrapped) == (1 if recompute == "every3" else TINY.num_hidden_layers)
    assert all(isinstance(f, FunctionType) for f in wrapped)


def test_one_graph_serves_equal_layers_and_its_products_are_counted():
    """Counting neither compiles anew nor runs eagerly; layers of another shape need a graph of their own."""
    counter, x = GraphCounter("aot_eager"), torch.ones(4, 8)
    layers = [torch.nn.Linear(8, width, bias=False) for width in (8, 8, 16)]
    compiled = [torch.compile(layer.forward, backend=counter, fullgraph=True) for layer in layers]
    graphs = list[int]()
    for layer in compiled:
        layer(x)
        graphs.append(counter.graphs)
    with ExecutedFlops() as executed:
        compiled[0](x)
    assert graphs == [1, 1, 2]
    assert (counter.graphs, executed.flops) == (2, 2 * 4 * 8 * 8)
