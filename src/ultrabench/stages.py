"""Cuts a decoder into pipeline stages of about equal cost."""

from dataclasses import dataclass
from functools import lru_cache

from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The consecutive blocks of one pipeline stage."""

    index: int
    first_layer: int
    """Number of the first decoder layer of this stage; it has no meaning when num_layers is 0."""
    num_layers: int
    has_embedding: bool
    has_norm: bool
    has_head: bool
    num_blocks: int
    """Number of all blocks, including cast and loss, which have no parameters."""

    def num_params(self, shape: ModelShape) -> int:
        """Number of parameters of this stage; a tied embedding counts in the first and in the last stage."""
        tables = int(self.has_embedding) + int(self.has_head)
        if self.has_embedding and self.has_head and shape.tie_word_embeddings:
            tables = 1
        body = (
            shape.params_of_layers(self.first_layer, self.num_layers) + int(self.has_norm) * shape.hidden_size
        )
        return tables * shape.embedding_params + body

    def num_expert_params(self, shape: ModelShape) -> int:
        """Number of parameters of the experts of this stage among which routers choose; expert parallelism cuts only these."""
        return (
            shape.num_sparse_layers(self.first_layer, self.num_layers)
            * shape.num_experts
            * shape.expert_params
        )

    def matmul_params(self, shape: ModelShape) -> int:
        """Number of parameters of this stage that take part in the matrix products of one token."""
        head = shape.embedding_params if self.has_head else 0
        return shape.matmul_params_of_layers(self.first_layer, self.num_layers) + head


@lru_cache(maxsize=4096)  # without it `sweep plan` takes 1.2 x the CPU time
def split_stages(shape: ModelShape, num_stages: int, *, ties_advance: bool = False) -> tuple[Stage, ...]:
    """The `num_stages` stages into which the blocks [embedding, decoder x L, norm, head, cast, loss] are cut.

    The cost of a decoder layer is the parameters in the matrix products of one token, that of the head V*h, and that of other blocks 0. A
    block goes to the current stage. When the cost so far exceeds total*(stage+1)/num_stages, the next stage
    begins. This is the rule of nanotron, so results can be compared with its measurements; like nanotron's,
    stages may be empty. Later versions of nanotron begin the next stage also when the cost equals that part
    of the total.

    Args:
        ties_advance: whether to cut as these later versions do.
    """
    layers = [f"layer{'_sparse' * shape.is_sparse(n)}" for n in range(shape.num_hidden_layers)]
    kinds = ["embedding", *layers, "norm", "head", "cast", "loss"]
    cost = {"layer": shape.layer_matmul_params(), "head": shape.embedding_params}
    cost["layer_sparse"] = shape.layer_matmul_params(sparse=True)
    total = sum(cost.get(kind, 0) for kind in kinds)
    blocks: list[list[str]] = [[] for _ in range(num_stages)]
    stage = finished_cost = 0
    for kind in kinds:
        blocks[stage].append(kind)
        finished_cost += cost.get(kind, 0)
        if finished_cost * num_stages + ties_advance > total * (stage + 1) and stage + 1 < num_stages:
            stage += 1
    stages, first = [], 0
    for index, of_stage in enumerate(blocks):
        num_layers = of_stage.count("layer") + of_stage.count("layer_sparse")
        ends = {f"has_{kind}": kind in of_stage for kind in ("embedding", "norm", "head")}
        stages.append(
            Stage(index=index, first_layer=first, num_layers=num_layers, num_blocks=len(of_stage), **ends)
        )
        first += num_layers
    return tuple(stages)


@lru_cache(maxsize=4096)  # without it and that of `layout.details_of` a plan takes 1.2 x the CPU time
def stages_without_params(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """The indices of the stages that have no parameters: only the cast or the loss."""
    return tuple(s.index for s in split_stages(shape, num_stages) if s.num_params(shape) == 0)


def stages_by_rank(
    shape: ModelShape, layout: Layout, *, ties_advance: bool = False
) -> list[tuple[Stage, ...]]:
    """The stages that each rank of the pp axis holds, in the order of the model, as `split_stages` divides it."""
    stages = split_stages(shape, layout.num_stages, ties_advance=ties_advance)
    return [tuple(stages[index] for index in layout.stages_of(rank)) for rank in range(layout.pp)]
