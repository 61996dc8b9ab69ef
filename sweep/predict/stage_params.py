"""Numbers of parameters of each stage of our own kernel, and of what it gathers and reduces at once.

fully_shard pads the rows of each matrix to a multiple of the ranks among which it shards. The experts of a layer are a
group of their own, with other shards than the rest of the layer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.stages import Stage, stages_by_rank


class Cut(NamedTuple):
    """How a run cuts the model."""

    shape: ModelShape
    tp: int
    pp: int
    virtual_stages: int
    pp_schedule: str
    zero_stage: int
    shards: int
    reduces_each: bool
    """Whether each micro-batch reduces its gradients, so that sums of them are shards."""
    frees_each: bool
    """Whether each backward frees parameters; in a pipeline only the last one of ZeRO-3 does."""
    reduces_after: bool
    """Whether gradients are reduced after a backward instead of during it."""
    full_every: int
    """n if every n-th layer keeps its input only; 0 if none does."""
    ep: int
    expert_shards: int


class Size(NamedTuple):
    """Numbers of parameters of a rank."""

    whole: int
    """Those that the rank computes with."""
    shard: int
    """Those of them whose masters it keeps."""
    tensors: int

    def plus(self, other: "Size", times: int = 1) -> "Size":
        """The sum with so many times another size."""
        whole, shard, tensors = other
        return Size(self.whole + times * whole, self.shard + times * shard, self.tensors + times * tensors)


NOTHING = Size(0, 0, 0)
OUTSIDE = -1
"""In place of the number of a layer."""


class ParamGroup(NamedTuple):
    """Parameters of a stage that are gathered, and whose gradients are reduced, at once.

    The experts of a layer are reduced before the rest of it, both after backward of the layer.
    """

    layer: int
    """Number of the layer in the model; OUTSIDE for the groups before and after the layers."""
    is_sparse: bool
    is_experts: bool
    size: Size
    done: Size
    """What the stage's backward has finished before it."""
    before: int
    """Parameters of the group before, whose reduction is under way."""
    around: int
    """Parameters of the layer around experts, whose gradients wait while those of the experts are reduced; 0 for others."""
    following: int
    """Parameters of the next layer, which are on their way; 0 where none follows or they are not sharded."""


@dataclass(frozen=True, slots=True, eq=False)
class StageParams:
    """What a rank holds of a stage. It is compared by identity, which makes it a cheap key of a cache."""

    stage: Stage
    last: Size
    """Norm and head; nothing where they are one group with the embedding."""
    first: Size
    """The embedding, or the group of a tied embedding with norm and head."""
    whole: Size
    groups: tuple[ParamGroup, ...]
    """The groups among which is that of the peak, in the order of backward: `last`, layers at the ends of each run of like
    layers, and `first` where it is there."""
    top_groups: tuple[ParamGroup, ...]
    """Those without layers below the first dense one and the first one with experts."""
    top_following: int
    """Parameters of the last layer that are gathered from several ranks."""
    top_gather: int
    """Those of them that are gathered last: of a sparse layer its experts, if several ranks share them."""
    is_tied: bool

    @property
    def gathered_last(self) -> int:
        """Parameters of the group that forward gathers last."""
        return self.last.whole or self.top_gather

    def sums_bytes(self, sums_shards: bool) -> float:
        """Bytes of fp32 sums of the stage's gradients, of its shards or of all."""
        return 4.0 * (self.whole.shard if sums_shards else self.whole.whole)


def params_of_rank(cut: Cut, rank: int) -> tuple[StageParams, ...]:
    """The stages of a rank of the pipeline axis."""
    degrees = cut.tp, cut.shards, cut.ep, cut.expert_shards
    return _params_of_rank(
        cut.shape, cut.pp, cut.virtual_stages, cut.pp_schedule, rank, cut.full_every, *degrees
    )


@lru_cache(maxsize=16384)
def _params_of_rank(
    shape: ModelShape,
    pp: int,
    virtual_stages: int,
    pp_schedule: str,
    rank: int,
    full_every: int,
    *degrees: int,
) -> tuple[StageParams, ...]:
    stages = stages_of_ranks(shape, pp, virtual_stages, pp_schedule)[rank]
    is_tied = shape.tie_word_embeddings and pp == 1
    return tuple(_stage(shape, degrees, _like(shape, stage, full_every), is_tied) for stage in stages)


def _like(shape: ModelShape, stage: Stage, full_every: int) -> Stage:
    """The stage that stands for all stages with layers of the same kinds in the same order, so that their sizes are computed once."""
    period, first = math.lcm(shape.decoder_sparse_step, full_every or 1), stage.first_layer
    if first > (start := shape.first_k_dense_replace):
        first = start + (first - start) % period
    return replace(stage, index=0, num_blocks=0, first_layer=first)


@lru_cache(maxsize=4096)
def stages_of_ranks(
    shape: ModelShape, pp: int, virtual_stages: int, pp_schedule: str
) -> list[tuple[Stage, ...]]:
    """The stages of each rank of the pipeline axis, without their parameters."""
    layout = Layout(dp=1, pp=pp, virtual_stages=virtual_stages, pp_schedule=pp_schedule)
    return stages_by_rank(shape, layout)


class _Sizes(NamedTuple):
    """The sizes of what a rank holds of each block."""

    table: Size
    """The embedding, or the head."""
    norm: Size
    dense: Size
    """A dense layer."""
    rest: Size
    """A layer with experts without them."""
    experts: Size
    """The experts of a layer."""


def _sizes(shape: ModelShape, tp: int, shards: int, ep: int, expert_shards: int) -> _Sizes:
    h, attention = shape.hidden_size, _attention(shape, tp)
    number, width = shape.num_experts // ep, shape.moe_intermediate_size
    rest = [*attention, (shape.num_experts, h)]
    if shape.n_shared_experts:
        rest += _feed_forward(h, shape.n_shared_experts * width // tp)
    rows = number * width, h  # those of all experts of the rank under each other
    return _Sizes(
        table=_padded(shards, (shape.vocab_size // tp, h)),
        norm=_padded(shards, (h, 1)),
        dense=_padded(shards, *attention, *_feed_forward(h, shape.intermediate_size // tp)),
        rest=_padded(shards, *rest),
        experts=_padded(expert_shards, rows, rows, (number * h, width)),
    )


@lru_cache(maxsize=16384)
def _stage(shape: ModelShape, degrees: tuple[int, ...], stage: Stage, is_tied: bool) -> StageParams:
    sizes = _sizes(shape, *degrees)
    last = NOTHING if is_tied else NOTHING.plus(sizes.norm, stage.has_norm).plus(sizes.table, stage.has_head)
    first = sizes.norm.plus(sizes.table) if is_tied else NOTHING.plus(sizes.table, stage.has_embedding)
    whole = last.plus(first).plus(_of_layers(shape, sizes, stage.first_layer, stage.num_layers))
    layers = tuple(_layer_groups(shape, sizes, stage, last))
    top_groups_gathered = _gathered(shape, sizes, layers[0].layer) if layers else [0]
    top_following, top_gather = sum(top_groups_gathered), top_groups_gathered[-1]
    before = ParamGroup(OUTSIDE, False, False, last, NOTHING, 0, 0, top_following)
    below = layers[-1].size.whole if layers else 0
    after = [ParamGroup(OUTSIDE, False, False, first, whole.plus(first, -1), below, 0, 0)] * (first.whole > 0)
    top_layer = {group.is_sparse: group.layer for group in reversed(layers)}
    top = [group for group in layers if group.layer == top_layer[group.is_sparse]]
    groups, top_groups = ((before, *between, *after) for between in (layers, top))
    return StageParams(stage, last, first, whole, groups, top_groups, top_following, top_gather, is_tied)


def _gathered(shape: ModelShape, sizes: _Sizes, layer: int) -> list[int]:
    """Parameters of each group of a layer that is gathered from several ranks, [0] if the rank has all of them."""
    groups = (sizes.rest, sizes.experts) if shape.is_sparse(layer) else (sizes.dense,)
    return [size.whole for size in groups if size.shard < size.whole] or [0]


def _of_layers(shape: ModelShape, sizes: _Sizes, first: int, number: int) -> Size:
    """The size of `number` layers of the model from layer `first` on."""
    sparse = shape.num_sparse_layers(first, number)
    dense = NOTHING.plus(sizes.dense, number - sparse)
    return dense.plus(sizes.rest, sparse).plus(sizes.experts, sparse) if sparse else dense


def _layer_groups(shape: ModelShape, sizes: _Sizes, stage: Stage, last: Size) -> Iterator[ParamGroup]:
    """The groups of `_looked_at` layers, in the order of backward."""
    end = stage.first_layer + stage.num_layers
    for layer in _looked_at(shape, stage.first_layer, end):
        is_sparse, is_first = shape.is_sparse(layer), layer == stage.first_layer
        done, before = last.plus(_of_layers(shape, sizes, layer + 1, end - layer - 1)), last.whole
        if layer < end - 1:
            before = (sizes.rest if shape.is_sparse(layer + 1) else sizes.dense).whole
        following = 0 if is_first else sum(_gathered(shape, sizes, layer - 1))
        size = sizes.rest if is_sparse else sizes.dense
        if is_sparse:
            yield ParamGroup(layer, True, True, sizes.experts, done, before, size.whole, following)
            done, before = done.plus(sizes.experts), sizes.experts.whole
        yield ParamGroup(layer, is_sparse, False, size, done, before, 0, following)


def _looked_at(shape: ModelShape, first: int, end: int) -> list[int]:
    """The layers at the ends of each run of layers that are alike, or that repeat after decoder_sparse_step layers.

    Inside a run, activations fall and gradients grow by the same number of bytes from period to period. The layers of
    the stage are those from `first` on to the one before `end`.
    """
    looked_at, step = set[int](), shape.decoder_sparse_step
    for start, stop in ((first, shape.first_k_dense_replace), (max(first, shape.first_k_dense_replace), end)):
        looked_at |= {*range(start, start + step), *range(min(stop, end) - 2 * step, min(stop, end))}
    return sorted((layer for layer in looked_at if first <= layer < end), reverse=True)


def _padded(shards: int, *matrices: tuple[int, int]) -> Size:
    whole = sum(-(-rows // shards) * shards * columns for rows, columns in matrices)
    return Size(whole, whole // shards, len(matrices))


def _attention(shape: ModelShape, tp: int) -> list[tuple[int, int]]:
    """Rows and columns of the weights of attention and of both norms of a layer."""
    h, q, kv = shape.hidden_size, shape.q_width // tp, shape.kv_width // tp
    normed = (q, kv) if shape.qk_norm_across_heads else (shape.head_width, shape.head_width)
    vectors = [h, h, *(normed if shape.qk_norm else ()), *((q, kv, kv) if shape.attention_bias else ())]
    return [(q, h), (kv, h), (kv, h), (h, q), *((rows, 1) for rows in vectors)]


def _feed_forward(h: int, width: int) -> list[tuple[int, int]]:
    return [(width, h), (width, h), (h, width)]
