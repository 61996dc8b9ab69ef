"""Tensor parallelism with sequence parallelism, put around a plain decoder.

Column-parallel: Y = X W, W = [W_1, ..., W_tp], so rank i holds Y_i. Row-parallel: W is cut along
its input, every rank holds a summand of Y, and the sum is scattered along the sequence. Between
the blocks each rank holds S/tp tokens, where norms and residuals are computed
(arXiv 2205.05198, section 4.2.2).
"""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from ultrabench.kernel.model import Decoder


def layer_plan() -> dict[str, ParallelStyle]:
    """How one layer is cut.

    Forward gathers B*S*H elements over tp before attention and before the feed-forward, and
    reduce-scatters as many after each; backward does the mirror image. So a layer costs 4
    all-gathers and 4 reduce-scatters of B*S*H elements, minus the gathers DTensor keeps.
    """
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "ffn.gate": ColwiseParallel(),
        "ffn.up": ColwiseParallel(),
        "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
    }


class VocabularyParallel(ParallelStyle):
    """Cuts an embedding by rows: each rank looks up the tokens it has rows of, the others count 0.

    DTensor's own way gives the gradient of all rows on every rank before it takes this rank's.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        module.weight = nn.Parameter(
            distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        )
        module.forward = partial(_look_up, module, device_mesh)  # type: ignore[method-assign]
        return module


def _look_up(module: nn.Embedding, tp_mesh: DeviceMesh, tokens_BS: Tensor) -> Tensor:
    """The S/tp rows of x_BSH that this rank goes on with: a reduce-scatter, backward an all-gather."""
    assert isinstance(module.weight, DTensor)
    rows = module.weight.to_local()
    index = tokens_BS - tp_mesh.get_local_rank() * rows.shape[0]
    elsewhere = (index < 0) | (index >= rows.shape[0])
    x_BSH = functional.embedding(index.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere[..., None], 0)
    summand = DTensor.from_local(x_BSH, tp_mesh, [Partial()], run_check=False)
    # Waited for: a compiled layer takes an unfinished collective for plain data and loses gradients.
    return summand.redistribute(placements=[Shard(1)]).to_local()


def outer_plan(model: Decoder) -> dict[str, ParallelStyle]:
    """How embedding, last norm and head are cut, where this stage has them.

    The embedding is cut by vocabulary (one reduce-scatter forward, one all-gather backward), and
    so is the head: the loss is computed on the parts of the logits.
    """
    plan: dict[str, ParallelStyle] = {}
    if model.embedding is not None:
        plan["embedding"] = VocabularyParallel()
    if model.norm is not None:
        plan["norm"] = SequenceParallel()
    if model.head is not None:
        plan["head"] = ColwiseParallel()
    return plan


def apply_tp(model: Decoder, tp_mesh: DeviceMesh) -> None:
    """Cuts `model` over the tp axis, in place; nothing to do when it has one rank."""
    if tp_mesh.size() == 1:
        return
    for layer in model.layers.values():
        parallelize_module(layer, tp_mesh, layer_plan())
    parallelize_module(model, tp_mesh, outer_plan(model))
    # parallelize_module makes a new parameter of each name, which undoes the tie.
    model.tie()
