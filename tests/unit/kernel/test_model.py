"""The plain model and its data, stages that add up to it, and its layers when they are recomputed or compiled."""

import dataclasses
from types import FunctionType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ultrabench.kernel import data
from ultrabench.kernel.compile import GraphCounter
from ultrabench.kernel.dryrun.counts import ExecutedFlops
from ultrabench.kernel.mesh import is_norm
from ultrabench.kernel.model import INIT_STD, Decoder, copy_name
from ultrabench.kernel.rank.precisions import value_precision
from ultrabench.kernel.recompute import apply_recompute, recompute_of
from ultrabench.kernel.requests import TINY
from ultrabench.kernel.rope import rope_tables, rotation_of
from ultrabench.kernel.step import learning_rate
from ultrabench.layout import Layout
from ultrabench.run import Workload
from ultrabench.stages import split_stages

TIED = dataclasses.replace(TINY, tie_word_embeddings=True)
PREDICTING = dataclasses.replace(TINY, num_nextn_predict_layers=1)


def stages_of(shape, pp=1):
    """The decoders of all stages of a pipeline."""
    return [Decoder(shape, stage, [range(64)]) for stage in split_stages(shape, pp)]


@pytest.mark.parametrize("shape", [TINY, TIED, PREDICTING])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_hold_the_parameters_of_the_model(shape, pp):
    """Under the same names, as many as the shape says."""
    with torch.device("meta"):
        (whole,), stages = stages_of(shape), stages_of(shape, pp)
    assert sum(p.numel() for p in whole.parameters()) == shape.num_params
    for model, stage in zip(stages, split_stages(shape, pp), strict=True):
        assert sum(p.numel() for p in model.parameters()) == stage.num_params(shape)
    names = {name for model in stages for name, _ in model.named_parameters()}
    tied_copy = {copy_name(shape)} - {None} if pp > 1 else set()
    assert names - tied_copy == {name for name, _ in whole.named_parameters()}


def test_initial_values_depend_on_seed_and_name():
    """Not on the stage, and not on the default dtype; every matrix and bias has other ones, which are not rounded."""
    biased = dataclasses.replace(TINY, attention_bias=True)
    (whole,), (_, last), (_, tied) = stages_of(biased), stages_of(TINY, 2), stages_of(TIED, 2)

    def value(model, name, seed=0):
        return model.initial_value(name, torch.Size((8, 8)), seed, torch.device("cpu"))

    assert torch.equal(value(last, "head.weight"), value(whole, "head.weight"))
    assert torch.equal(value(tied, "head.weight"), value(whole, "embedding.weight"))
    assert not torch.equal(value(whole, "head.weight", seed=1), value(whole, "head.weight"))
    names = [name for name, _ in whole.named_parameters() if not is_norm(name)]
    values = torch.stack([value(whole, name) for name in names])
    assert len(values.flatten(1).unique(dim=0)) == len(names), "parameters start with the same values"
    for drawn in values:
        assert drawn.std() == pytest.approx(INIT_STD, rel=0.4)
    assert values.std() == pytest.approx(INIT_STD, rel=0.1)
    assert (values.abs() > INIT_STD).double().mean() == pytest.approx(0.3173, abs=0.05), "not normal"
    assert value_precision([values]) == "fp32"


def test_experts_start_with_values_of_their_own():
    """Drawn from one normal distribution, the same on every rank that holds an expert, however experts are cut."""
    sparse = dataclasses.replace(TINY, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    (model,) = stages_of(sparse)

    def value(name, *part):
        size = model.get_parameter(name).shape
        return model.initial_value(name, size, 0, torch.device("cpu"), part)

    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    value_by_name = {name: value(name) for name in names}
    experts = [expert for values in value_by_name.values() for expert in values.chunk(sparse.num_experts)]
    assert len(experts) == 3 * TINY.num_hidden_layers * sparse.num_experts
    assert len({tuple(expert.flatten().tolist()) for expert in experts}) == len(experts), (
        "experts start alike"
    )
    for values in value_by_name.values():
        assert values.std() == pytest.approx(INIT_STD, rel=0.03)
        assert abs(values.mean()) < 0.03 * INIT_STD
        assert (values.abs() > INIT_STD).double().mean() == pytest.approx(0.3173, abs=0.02), "not normal"
        assert values.abs().max() < 6 * INIT_STD
    for name, values in value_by_name.items():
        for ep in (2, 8):
            rows = len(values) // ep
            parts = [value(name, (0, rank * rows, rows)) for rank in range(ep)]
            assert torch.equal(torch.cat(parts), values)
            assert torch.equal(value(name, (0, rows, rows), (1, 4, 8)), values[rows : 2 * rows, 4:12])


def test_wide_models_are_trained_in_small_steps():
    """In proportion to 1/h from a hidden size of 128 on, as rounding grows with the width of a sum."""
    rates = [learning_rate(dataclasses.replace(TINY, hidden_size=h)) for h in (64, 128, 1024, 16384)]
    assert rates == pytest.approx([3e-4, 3e-4, 3.75e-5, 2.34375e-6])


@pytest.mark.parametrize("recompute", ["full", "selective", "attention", "every3"])
def test_dynamo_can_read_a_recomputed_layer(recompute):
    """Dynamo compiles functions; of a functools.partial it compiles nothing, without a word."""
    (model,) = stages_of(TINY)
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
        graphs.append(counter.num_graphs)
    with ExecutedFlops() as executed:
        compiled[0](x)
    assert graphs == [1, 1, 2]
    assert (counter.num_graphs, executed.flops) == (2, 2 * 4 * 8 * 8)


@given(dp=st.integers(1, 6), mbs=st.integers(1, 4), gas=st.integers(1, 5))
def test_samples_of_all_dp_ranks_are_the_global_batch(dp, mbs, gas):
    """Once each, mbs*gas on every rank."""
    layout = Layout(dp=dp, mbs=mbs, gas=gas)
    ranks = [data.sample_indices(layout, rank) for rank in range(dp)]
    assert all(len(indices) == mbs * gas for indices in ranks)
    assert sorted(i for indices in ranks for i in indices) == list(range(layout.gbs))


def test_tokens_depend_on_seed_step_and_index_only():
    """The same sample read alone or in a batch; another in another step or with another seed."""

    def batch(indices, seed=1, step=1):
        return data.make_batch(
            indices, step, Workload(seq_len=16, gbs=4, seed=seed), 100, torch.device("cpu")
        )

    inputs, targets = batch(range(4))
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(batch(range(2, 3))[0][0], inputs[2])
    assert len({tuple(tokens.tolist()) for tokens in inputs}) == 4
    assert not torch.equal(batch(range(4), step=2)[0], inputs)
    assert not torch.equal(batch(range(4), seed=2)[0], inputs)
    assert int(inputs.min()) >= 0
    assert int(inputs.max()) < 100


def test_targets_are_the_next_tokens():
    """With later ones, each position has those that follow it, also where they are beyond the sequence."""
    workload, device = Workload(seq_len=16, gbs=4, seed=1), torch.device("cpu")
    tokens = torch.stack([data.sample(1, 1, index, 18, 100) for index in range(3)])
    inputs, targets = data.make_batch(range(3), 1, workload, 100, device, 2)
    assert torch.equal(inputs, tokens[:, :16])
    assert torch.equal(targets, tokens.unfold(1, 3, 1)[:, 1:])


def test_a_module_predicts_the_token_after_the_next():
    """The loss of a decoder with two modules is what the formulas of arXiv 2412.19437, section 2.2, give."""
    shape = dataclasses.replace(TINY, num_hidden_layers=1, num_nextn_predict_layers=2)
    torch.manual_seed(0)
    decoder = Decoder(shape, split_stages(shape, 1)[0], [range(8)]).double()
    for param in decoder.parameters():
        torch.nn.init.normal_(param, 0.5 if param.dim() == 1 else 0.0, 0.2)
    tokens, params = torch.randint(shape.vocab_size, (2, 11)), dict(decoder.named_parameters())
    inputs, targets = tokens[:, :8], tokens.unfold(1, 3, 1)[:, 1:]

    def normed(x, name):
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.rms_norm_eps) * params[f"{name}.weight"]
        )

    def loss_of(x, position):
        logits = x @ params["head.weight"].T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[..., position].flatten())

    tables = rope_tables([range(8)], rotation_of(shape, shape.layer(0)), params["norm.weight"])
    embedding = params["embedding.weight"]
    x = normed(decoder.layers["0"](embedding[inputs], *tables), "norm")
    losses = [loss_of(x, 0)]
    for k, number in enumerate(("1", "2")):
        parts = (x, "hidden_norm"), (embedding[targets[..., k]], "embedding_norm")
        joined = torch.cat([normed(part, f"predict.{number}.join.{name}") for part, name in parts], -1)
        x = decoder.layers[number](joined @ params[f"predict.{number}.join.projection.weight"].T, *tables)
        x = normed(x, f"predict.{number}.norm")
        losses.append(loss_of(x, k + 1))
    expected = losses[0] + 0.3 * (losses[1] + losses[2]) / 2
    assert decoder(inputs, targets).item() == pytest.approx(expected.item(), abs=1e-12)
