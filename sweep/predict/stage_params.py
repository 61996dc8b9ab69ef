"""Numbers of parameters of each stage of our own kernel, and of what it gathers and reduces at once.

fully_shard pads the rows of each matrix to a multiple of the ranks among which it shards. The experts of a layer are a
group of their own, with other shards than the rest of the layer.
"""

from collections.abc import Iterator
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
        return Size(*(a + times * b for a, b in zip(self, other, strict=True)))


NOTHING = Size(0, 0, 0)


class LayerGroup(NamedTuple):
    """A group of parameters of a layer, in the order of backward: the experts come before the rest of their layer."""

    layer: int
    """Number of the layer in the model."""
    is_sparse: bool
    is_experts: bool
    size: Size
    done: Size
    """What the stage's backward has finished before it."""
    before: int
    """Parameters of the group before, whose reduction is under way."""
    around: int
    """Parameters of the rest of the layer, which are gathered while its experts compute."""
    following: int
    """Parameters of the next group, which are on their way; 0 where none follows or it is not sharded."""


class StageParams(NamedTuple):
    """What a rank holds of a stage."""

    stage: Stage
    last: Size
    """Norm and head; nothing where they are one group with the embedding."""
    first: Size
    """The embedding, or the group of a tied embedding with norm and head."""
    whole: Size
    layer_groups: tuple[LayerGroup, ...]
    """The groups of layers among which is that of the peak: those of the ends of each run of like layers."""
    top_groups: tuple[LayerGroup, ...]
    """Those of the first dense layer and of the first one with experts in the order of backward."""
    is_tied: bool

    @property
    def gathered_last(self) -> int:
        """Parameters of the group that forward gathers last."""
        return self.last.whole or (self.layer_groups[0].size.whole if self.layer_groups else 0)


@lru_cache(maxsize=4096)
def params_of_ranks(cut: Cut) -> tuple[tuple[StageParams, ...], ...]:
    """The stages of each rank of the pipeline axis."""
    layout = Layout(dp=1, pp=cut.pp, virtual_stages=cut.virtual_stages, pp_schedule=cut.pp_schedule)
    return tuple(
        tuple(_stage(cut, stage) for stage in of_rank) for of_rank in stages_by_rank(cut.shape, layout)
    )


def _stage(cut: Cut, stage: Stage) -> StageParams:
    shape, is_tied = cut.shape, cut.shape.tie_word_embeddings and cut.pp == 1
    table = _padded(cut.shards, (shape.vocab_size // cut.tp, shape.hidden_size))
    norm = _padded(cut.shards, (shape.hidden_size, 1))
    last = NOTHING if is_tied else NOTHING.plus(norm, stage.has_norm).plus(table, stage.has_head)
    first = norm.plus(table) if is_tied else NOTHING.plus(table, stage.has_embedding)
    groups = tuple(_layer_groups(cut, stage, last))
    whole = last.plus(first)
    for group in groups:
        whole = whole.plus(group.size)
    looked_at = _looked_at(shape, stage)
    shown = tuple(group for group in groups if group.layer in looked_at)
    top = tuple(g for g in shown if g.layer == max(o.layer for o in shown if o.is_sparse == g.is_sparse))
    return StageParams(stage, last, first, whole, shown, top, is_tied)


def _layer_groups(cut: Cut, stage: Stage, last: Size) -> Iterator[LayerGroup]:
    """All groups of the layers of a stage, in the order of backward."""
    done, before = last, last.whole
    dense, rest, experts = _dense_layer(cut), _sparse_rest(cut), _experts(cut)
    for layer in reversed(range(stage.first_layer, stage.first_layer + stage.num_layers)):
        is_sparse, is_first = cut.shape.is_sparse(layer), layer == stage.first_layer
        below = rest if cut.shape.is_sparse(layer - 1) else dense
        following = 0 if is_first or cut.shards == 1 else below.whole
        if is_sparse:
            yield LayerGroup(layer, True, True, experts, done, before, rest.whole, following)
            done, before = done.plus(experts), experts.whole
        size = rest if is_sparse else dense
        yield LayerGroup(layer, is_sparse, False, size, done, before, 0, following)
        done, before = done.plus(size), size.whole


def _looked_at(shape: ModelShape, stage: Stage) -> set[int]:
    """The layers at the ends of each run of layers that are alike, or that repeat after decoder_sparse_step layers.

    Inside a run, activations fall and gradients grow by the same number of bytes from period to period.
    """
    first, end, step = stage.first_layer, stage.first_layer + stage.num_layers, shape.decoder_sparse_step
    looked_at = set[int]()
    for start, stop in ((first, shape.first_k_dense_replace), (max(first, shape.first_k_dense_replace), end)):
        looked_at |= {*range(start, start + step), *range(min(stop, end) - 2 * step, min(stop, end))}
    return {layer for layer in looked_at if first <= layer < end}


def _padded(shards: int, *matrices: tuple[int, int]) -> Size:
    whole = sum(-(-rows // shards) * shards * columns for rows, columns in matrices)
    return Size(whole, whole // shards, len(matrices))


def _attention(cut: Cut) -> list[tuple[int, int]]:
    """Rows and columns of the weights of attention and of both norms of a layer."""
    shape, h = cut.shape, cut.shape.hidden_size
    q, kv = shape.q_width // cut.tp, shape.kv_width // cut.tp
    normed = (q, kv) if shape.qk_norm_across_heads else (shape.head_width, shape.head_width)
    vectors = [h, h, *(normed if shape.qk_norm else ()), *((q, kv, kv) if shape.attention_bias else ())]
    return [(q, h), (kv, h), (kv, h), (h, q), *((rows, 1) for rows in vectors)]


def _feed_forward(h: int, width: int) -> list[tuple[int, int]]:
    return [(width, h), (width, h), (h, width)]


def _dense_layer(cut: Cut) -> Size:
    shape = cut.shape
    return _padded(
        cut.shards, *_attention(cut), *_feed_forward(shape.hidden_size, shape.intermediate_size // cut.tp)
    )


def _sparse_rest(cut: Cut) -> Size:
    """A layer with experts without them: its attention, norms, router and shared experts."""
    shape, h = cut.shape, cut.shape.hidden_size
    shared = shape.n_shared_experts * shape.moe_intermediate_size // cut.tp
    matrices = [*_attention(cut), (shape.num_experts, h), *(_feed_forward(h, shared) if shared else ())]
    return _padded(cut.shards, *matrices)


def _experts(cut: Cut) -> Size:
    """The experts of a layer that a rank holds, the rows of all of them under each other."""
    shape, number = cut.shape, cut.shape.num_experts // cut.ep
    rows, h = number * shape.moe_intermediate_size, shape.hidden_size
    return _padded(cut.expert_shards, (rows, h), (rows, h), (number * h, shape.moe_intermediate_size))
