"""Cuts a decoder into pipeline stages of about equal cost."""

from dataclasses import dataclass
from functools import lru_cache

from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape

_LAYER = "layer"
"""Beginning of the kind of block that a layer is; the index of its type follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The consecutive blocks of one pipeline stage."""

    index: int
    """Place of the stage in the order of the model, from 0."""
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
        num_embedding_tables = int(self.has_embedding) + int(self.has_head)
        if self.has_embedding and self.has_head and shape.tie_word_embeddings:
            num_embedding_tables = 1
        other_params = (
            shape.params_of_layers(self.first_layer, self.num_layers) + int(self.has_norm) * shape.hidden_size
        )
        num_modules = int(self.has_head) * shape.num_nextn_predict_layers
        # The modules look up tokens, for which the last stage of a pipeline has a copy of the embedding.
        if num_modules and not (self.has_embedding or shape.tie_word_embeddings):
            num_embedding_tables += 1
        other_params += num_modules * shape.num_predict_params if num_modules else 0
        return num_embedding_tables * shape.embedding_params + other_params

    def num_expert_params(self, shape: ModelShape) -> int:
        """Number of parameters of the experts of this stage among which routers choose;
        expert parallelism cuts only these.
        """
        counts = zip(self.num_by_kind(shape), shape.kinds, strict=True)
        return sum(num * kind.num_expert_params(shape.hidden_size) for num, kind in counts)

    def num_by_kind(self, shape: ModelShape) -> tuple[int, ...]:
        """Number of its layers of each of the types of the shape; modules that predict more tokens
        have the last layer's.
        """
        num_by_kind = [*shape.num_by_kind(self.first_layer, self.num_layers)]
        num_by_kind[shape.kind_numbers[-1]] += int(self.has_head) * shape.num_nextn_predict_layers
        return tuple(num_by_kind)

    def matmul_params(self, shape: ModelShape) -> int:
        """Number of parameters of this stage that take part in the matrix products of one token."""
        head_params = shape.embedding_params if self.has_head else 0
        return shape.matmul_params_of_layers(self.first_layer, self.num_layers) + head_params


@lru_cache(maxsize=4096)  # without it `sweep plan` takes 1.2 x the CPU time
def split_stages(
    shape: ModelShape, num_stages: int, *, ties_advance: bool = False, pp_layout: str = "cost"
) -> tuple[Stage, ...]:
    """The `num_stages` stages into which the blocks [embedding, decoder x L, norm, head, cast, loss] are cut.

    By pp_layout=even, and where it lists the layers of each stage, the embedding is in the first stage, and norm,
    head, cast and loss in the last one; of the stages of even, the first ones have one layer more where they are not
    equal. By cost and auto, the cost of a decoder layer is the parameters in the matrix products of one token,
    that of the head V*h, and that of other blocks 0. A block goes to the current stage. When the cost so far exceeds
    total*(stage+1)/num_stages, the next stage begins. This is the rule of nanotron, so results can be compared with
    its measurements; like nanotron's, stages may be empty. Later versions of nanotron begin the next stage also when
    the cost equals that part of the total.

    Args:
        ties_advance: whether to cut as these later versions do.
        pp_layout: the value of the axis; stages beyond a list that is too short have no layers.
    """
    if pp_layout not in ("auto", "cost"):
        return _stages_of_counts(_stage_layers(shape, num_stages, pp_layout))
    layer_kinds = [f"{_LAYER}{number}" for number in shape.kind_numbers]
    block_kinds = ["embedding", *layer_kinds, "norm", "head", "cast", "loss"]
    cost_by_kind = {
        f"{_LAYER}{number}": kind.matmul_params(shape.hidden_size) for number, kind in enumerate(shape.kinds)
    }
    cost_by_kind["head"] = shape.embedding_params
    total_cost = sum(cost_by_kind.get(kind, 0) for kind in block_kinds)
    kinds_by_stage: list[list[str]] = [[] for _ in range(num_stages)]
    index = cost_so_far = 0
    for kind in block_kinds:
        kinds_by_stage[index].append(kind)
        cost_so_far += cost_by_kind.get(kind, 0)
        if cost_so_far * num_stages + ties_advance > total_cost * (index + 1) and index + 1 < num_stages:
            index += 1
    stages, first_layer = [], 0
    for index, kinds in enumerate(kinds_by_stage):
        num_layers = sum(kind.startswith(_LAYER) for kind in kinds)
        flags = {f"has_{kind}": kind in kinds for kind in ("embedding", "norm", "head")}
        stages.append(
            Stage(index=index, first_layer=first_layer, num_layers=num_layers, num_blocks=len(kinds), **flags)
        )
        first_layer += num_layers
    return tuple(stages)


def _stage_layers(shape: ModelShape, num_stages: int, pp_layout: str) -> list[int]:
    """The layers of each stage by pp_layout=even or a list."""
    num_layers, rest = divmod(shape.num_hidden_layers, num_stages)
    if pp_layout == "even":
        return [num_layers + (index < rest) for index in range(num_stages)]
    listed = [int(number) for number in pp_layout.split("-")]
    return (listed + [0] * num_stages)[:num_stages]


def _stages_of_counts(layer_counts: list[int]) -> tuple[Stage, ...]:
    """Stages with these numbers of layers."""
    stages, first_layer, last_index = list[Stage](), 0, len(layer_counts) - 1
    for index, num_layers in enumerate(layer_counts):
        is_first, is_last = index == 0, index == last_index
        flags = {"has_embedding": is_first, "has_norm": is_last, "has_head": is_last}
        num_blocks = num_layers + is_first + 4 * is_last
        stages.append(
            Stage(index=index, first_layer=first_layer, num_layers=num_layers, num_blocks=num_blocks, **flags)
        )
        first_layer += num_layers
    return tuple(stages)


@lru_cache(maxsize=4096)  # without it and that of `layout.details_of` a plan takes 1.2 x the CPU time
def stages_without_params(shape: ModelShape, num_stages: int, pp_layout: str = "cost") -> tuple[int, ...]:
    """The indices of the stages that have no parameters: only the cast or the loss."""
    stages = split_stages(shape, num_stages, pp_layout=pp_layout)
    return tuple(s.index for s in stages if s.num_params(shape) == 0)


def stages_by_rank(
    shape: ModelShape, layout: Layout, *, ties_advance: bool = False
) -> list[tuple[Stage, ...]]:
    """The stages that each rank of the pp axis holds, in the order of the model, as `split_stages` divides it."""
    stages = split_stages(shape, layout.num_stages, ties_advance=ties_advance, pp_layout=layout.pp_layout)
    return [tuple(stages[index] for index in layout.stages_of(pp_rank)) for pp_rank in range(layout.pp)]
