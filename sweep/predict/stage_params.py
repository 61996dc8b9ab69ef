"""Numbers of parameters of each stage of our own kernel, and of what it gathers and reduces at once.

fully_shard pads the rows of each matrix to a multiple of the ranks among which it shards. The experts of a layer are a
group of their own, with other shards than the rest of the layer.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.stages import Stage, stages_by_rank
from ultrabench.sweep.predict.stage_memory import ENDS, EVERY
from ultrabench.tensor_parallel import kv_width_of_ranks, padded_vocab_size


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
    finished: int
    """Parameters whose backward has ended."""
    finished_shard: int
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
    """Parameters of that group if it includes norm and head, which are tied to the embedding; else 0."""
    following: int
    """Parameters of the last layer that several ranks share."""
    ends_sparse: bool
    """Whether the last layer has experts."""
    layers: Layers
    groups: tuple[ParamGroup, ...]
    """The groups among which is that of the peak, in the order of backward."""


def params_of_ranks(spec: RunSpec, ranks: str) -> Iterator[tuple[int, list[StageParams]]]:
    """The ranks of the pipeline axis that `ranks`, a word of `stage_memory`, asks for, each with its stages."""
    shape, layout = spec.shape, spec.layout
    degrees = layout.tp, layout.zero_shards, layout.ep, layout.expert_shards
    is_tied, pipeline = shape.tie_word_embeddings and layout.pp == 1, (layout.pp, layout.virtual_stages)
    for rank, stages in _ranks(shape, *pipeline, layout.pp_schedule, layout.full_every < 2, ranks):
        yield rank, [_stage_params(shape, stage, layout.full_every, is_tied, *degrees) for stage in stages]


@lru_cache(maxsize=4096)
def _ranks(
    shape: ModelShape, pp: int, virtual_stages: int, pp_schedule: str, is_uniform: bool, rank_set: str
) -> list[tuple[int, tuple[Stage, ...]]]:
    """The ranks that `rank_set` asks for, each with its stages.

    An inner rank holds no more than an earlier one with as many layers in each stage; than the first one only under
    1f1b, where that has more micro-batches in flight, since it sends no gradients.
    """
    layout = Layout(dp=1, pp=pp, virtual_stages=virtual_stages, pp_schedule=pp_schedule)
    ranks, seen_counts = [], set[tuple[int, ...]]()
    for rank, stages in enumerate(stages_by_rank(shape, layout)):
        layer_counts, is_inner = tuple(stage.num_layers for stage in stages), 0 < rank < pp - 1
        is_like_earlier = layer_counts in seen_counts and pp_schedule != "zbv" and is_uniform
        if not is_inner or rank_set == EVERY or (rank_set != ENDS and not is_like_earlier):
            ranks.append((rank, stages))
        if is_inner or pp_schedule == "1f1b":
            seen_counts.add(layer_counts)
    return ranks


@lru_cache(maxsize=4096)
def _block_sizes(shape: ModelShape, tp: int, shards: int, ep: int, expert_shards: int) -> tuple[Size, ...]:
    """The sizes of a table, a norm, a dense layer, a sparse layer without its experts, and its experts.

    expert_shards ranks share the same experts, and shards ranks the rest. A table is the embedding or the head.
    """
    h, q, kv = shape.hidden_size, shape.q_width // tp, kv_width_of_ranks(shape, tp) // tp
    norm_widths = (q, kv) if shape.qk_norm_across_heads else (shape.head_width, shape.head_width)
    vectors = [h, h, *(norm_widths if shape.qk_norm else ()), *((q, kv, kv) if shape.attention_bias else ())]
    attention = [(q, h), (kv, h), (kv, h), (h, q), *((rows, 1) for rows in vectors)]
    num_experts, width = shape.num_experts // ep, shape.moe_intermediate_size
    shared = _feed_forward(h, shape.shared_expert_intermediate_size // tp) if shape.n_shared_experts else []
    rows = num_experts * width, h  # those of all experts of the rank under each other
    return (
        _padded_size(shards, (padded_vocab_size(shape.vocab_size, tp) // tp, h)),
        _padded_size(shards, (h, 1)),
        _padded_size(shards, *attention, *_feed_forward(h, shape.intermediate_size // tp)),
        _padded_size(shards, *attention, (shape.num_experts, h), *shared),
        _padded_size(expert_shards, rows, rows, (num_experts * h, width)),
    )


def _feed_forward(h: int, width: int) -> list[tuple[int, int]]:
    return [(width, h), (width, h), (h, width)]


def _padded_size(shards: int, *matrices: tuple[int, int]) -> Size:
    num_params = sum(-(-rows // shards) * shards * columns for rows, columns in matrices)
    return Size(num_params, num_params // shards, len(matrices))


@lru_cache(maxsize=16384)
def _stage_params(
    shape: ModelShape, stage: Stage, full_every: int, is_tied: bool, *degrees: int
) -> StageParams:
    """What a rank holds of a stage.

    Args:
        full_every: n if every n-th layer keeps its input only; 0 if none does.
        is_tied: whether norm and head are in one group with the embedding.
        degrees: tp, the ranks that shard parameters, ep, and the ranks that shard the same experts.
    """
    table, norm, dense, sparse, experts = _block_sizes(shape, *degrees)
    start, end = stage.first_layer, stage.first_layer + stage.num_layers
    head = NOTHING.plus(norm, stage.has_norm and not is_tied).plus(table, stage.has_head and not is_tied)
    embedding = NOTHING.plus(norm, is_tied).plus(table, stage.has_embedding)
    # What backward passes, each with the parts whose gradients it reduces first and then.
    parts_by_sparsity = {True: (experts, sparse), False: (NOTHING, dense)}
    layers = [(n, LAYER, parts_by_sparsity[shape.is_sparse(n)]) for n in reversed(range(start, end))]
    order = [(end, HEAD, (NOTHING, head)), *layers, (start - 1, EMBEDDING, (NOTHING, embedding))]
    shared_params = [sum(part.whole for part in parts if part.shard < part.whole) for _, _, parts in layers]

    def remaining(layer: int) -> Layers:
        full = [n for n in range(start, layer + 1) if full_every and (n + 1) % full_every == 0]
        num_sparse = shape.num_sparse_layers(start, layer + 1 - start) - sum(map(shape.is_sparse, full))
        return Layers(layer + 1 - start - num_sparse - len(full), num_sparse, len(full))

    # From layer to layer, activations fall and gradients grow by the same number of bytes: the peak is at the ends.
    peak_layers = {start, shape.first_k_dense_replace, end - 2, end - 1}
    groups, finished, previous_params = list[ParamGroup](), NOTHING, 0
    for (n, kind, (expert_size, rest_size)), following in zip(order, [*shared_params, 0, 0], strict=True):
        size = rest_size.plus(expert_size)
        if n in peak_layers or (kind == EMBEDDING and embedding.whole) or (kind == HEAD and stage.has_norm):
            is_full = full_every > 0 and (n + 1) % full_every == 0
            groups.append(ParamGroup(
                kind, remaining(min(n, end - 1)), bool(expert_size.whole), is_full, size.whole, expert_size.whole or size.whole,
                finished.whole, finished.shard, previous_params, following,
            ))  # fmt: skip
        finished, previous_params = finished.plus(size), rest_size.whole
    following, tied = shared_params[0] if shared_params else 0, embedding.whole * is_tied
    ends_sparse, all_layers = start < end and shape.is_sparse(end - 1), remaining(end - 1)
    return StageParams(
        stage, finished, head.whole, embedding.whole, tied, following, ends_sparse, all_layers, tuple(groups)
    )
