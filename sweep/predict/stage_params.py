"""Numbers of parameters of each stage of our own kernel, and of what it gathers and reduces at once.

fully_shard pads the rows of each matrix to a multiple of the ranks among which it shards. The experts of a layer are a
group of their own, with other shards than the rest of the layer.
"""

from functools import lru_cache
from typing import NamedTuple

from ultrabench.model_shape import ModelShape
from ultrabench.stages import Stage


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
HEAD, LAYER, EMBEDDING = "head", "layer", "embedding"
"""Kinds of a group of parameters: norm and head; a layer; the embedding, with norm and head where it is tied to them."""


class Layers(NamedTuple):
    """Numbers of layers by what they keep."""

    dense: int
    sparse: int
    full: int
    """Layers of both kinds that keep their input only."""


class ParamGroup(NamedTuple):
    """Parameters of a stage that are gathered at once."""

    kind: str
    remaining: Layers
    """The layers whose backward has not ended."""
    is_sparse: bool
    is_full: bool
    whole: int
    reduced: int
    """Parameters whose gradients are reduced first: of a sparse layer its experts."""
    done: int
    """Parameters whose backward has ended."""
    done_shard: int
    before: int
    """Parameters of the group before, whose reduction is under way."""
    following: int
    """Parameters of the next layer that several ranks share, which are on their way."""


class StageParams(NamedTuple):
    """What a rank holds of a stage."""

    stage: Stage
    size: Size
    last: int
    """Parameters of norm and head; 0 where they are tied to the embedding."""
    first: int
    """Parameters of the group of the embedding."""
    tied: int
    """The same, where norm and head are in that group."""
    following: int
    """Parameters of the last layer that several ranks share."""
    layers: Layers
    groups: tuple[ParamGroup, ...]
    """The groups among which is that of the peak, in the order of backward."""


class _Blocks(NamedTuple):
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

    def layers(self, shape: ModelShape, start: int, end: int) -> Size:
        """The size of the layers from `start` on to the one before `end`."""
        sparse = shape.num_sparse_layers(start, end - start)
        size = NOTHING.plus(self.dense, end - start - sparse)
        return size.plus(self.rest, sparse).plus(self.experts, sparse) if sparse else size


@lru_cache(maxsize=4096)
def _blocks(shape: ModelShape, tp: int, shards: int, ep: int, expert_shards: int) -> _Blocks:
    """The sizes of blocks of which expert_shards ranks share the same experts, and shards ranks the rest."""
    h, q, kv = shape.hidden_size, shape.q_width // tp, shape.kv_width // tp
    normed = (q, kv) if shape.qk_norm_across_heads else (shape.head_width, shape.head_width)
    vectors = [h, h, *(normed if shape.qk_norm else ()), *((q, kv, kv) if shape.attention_bias else ())]
    attention = [(q, h), (kv, h), (kv, h), (h, q), *((rows, 1) for rows in vectors)]
    number, width = shape.num_experts // ep, shape.moe_intermediate_size
    shared = _feed_forward(h, shape.n_shared_experts * width // tp) if shape.n_shared_experts else []
    rows = number * width, h  # those of all experts of the rank under each other
    return _Blocks(
        table=_padded(shards, (shape.vocab_size // tp, h)),
        norm=_padded(shards, (h, 1)),
        dense=_padded(shards, *attention, *_feed_forward(h, shape.intermediate_size // tp)),
        rest=_padded(shards, *attention, (shape.num_experts, h), *shared),
        experts=_padded(expert_shards, rows, rows, (number * h, width)),
    )


def _feed_forward(h: int, width: int) -> list[tuple[int, int]]:
    return [(width, h), (width, h), (h, width)]


def _padded(shards: int, *matrices: tuple[int, int]) -> Size:
    whole = sum(-(-rows // shards) * shards * columns for rows, columns in matrices)
    return Size(whole, whole // shards, len(matrices))


@lru_cache(maxsize=16384)
def stage_params(
    shape: ModelShape, stage: Stage, full_every: int, is_tied: bool, *degrees: int
) -> StageParams:
    """What a rank holds of a stage.

    Args:
        full_every: n if every n-th layer keeps its input only; 0 if none does.
        degrees: tp, the ranks that shard parameters, ep, and the ranks that shard the same experts.
    """
    start, end, blocks = stage.first_layer, stage.first_layer + stage.num_layers, _blocks(shape, *degrees)
    last = (
        NOTHING if is_tied else NOTHING.plus(blocks.norm, stage.has_norm).plus(blocks.table, stage.has_head)
    )
    first = NOTHING.plus(blocks.norm, is_tied).plus(blocks.table, stage.has_embedding)
    size = last.plus(first).plus(blocks.layers(shape, start, end))

    def up_to(layer: int) -> Layers:
        full = [n for n in range(start, layer + 1) if full_every and (n + 1) % full_every == 0]
        sparse = shape.num_sparse_layers(start, layer + 1 - start) - sum(map(shape.is_sparse, full))
        return Layers(layer + 1 - start - sparse - len(full), sparse, len(full))

    def gathered(layer: int) -> int:
        whole = blocks.layers(shape, layer, layer + 1)
        return whole.whole if start <= layer < end and whole.shard < whole.whole else 0

    def reduced_last(layer: int) -> int:
        if not start <= layer < end:
            return last.whole
        return (blocks.rest if shape.is_sparse(layer) else blocks.dense).whole

    groups = list[ParamGroup]()
    if stage.has_norm or not stage.num_layers:
        following = gathered(end - 1)
        groups.append(
            ParamGroup(HEAD, up_to(end - 1), False, False, last.whole, last.whole, 0, 0, 0, following)
        )
    # From layer to layer, activations fall and gradients grow by the same number of bytes: the peak is at the ends.
    for layer in sorted({start, max(start, end - 2), end - 1} if stage.num_layers else (), reverse=True):
        is_sparse, done = shape.is_sparse(layer), last.plus(blocks.layers(shape, layer + 1, end))
        groups.append(ParamGroup(
            LAYER, up_to(layer), is_sparse, full_every > 0 and (layer + 1) % full_every == 0,
            blocks.layers(shape, layer, layer + 1).whole, (blocks.experts if is_sparse else blocks.dense).whole,
            done.whole, done.shard, reduced_last(layer + 1), gathered(layer - 1),
        ))  # fmt: skip
    if first.whole:
        done = size.plus(first, -1)
        groups.append(ParamGroup(
            EMBEDDING, Layers(0, 0, 0), False, False, first.whole, first.whole, done.whole, done.shard, reduced_last(start), 0,
        ))  # fmt: skip
    tied = first.whole * is_tied
    return StageParams(
        stage, size, last.whole, first.whole, tied, gathered(end - 1), up_to(end - 1), tuple(groups)
    )
