"""Numbers of parameters of each stage of our own kernel, and of what it gathers and reduces at once.

fully_shard pads the rows of each matrix to a multiple of the ranks among which it shards. The experts of a layer are a
group of their own, with other shards than the rest of the layer. Where nothing is padded, the numbers are the same for
any number of shards, so that layouts share them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import le, mul
from typing import NamedTuple

from ultrabench.layer_products import COLUMNS, ROWS, Product, Vector
from ultrabench.layer_type import LayerType
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.stages import Stage, stages_by_rank
from ultrabench.sweep.predict.stage_memory import ENDS, EVERY
from ultrabench.tensor_parallel import kinds_of_ranks, padded_vocab_size


class Size(NamedTuple):
    """Numbers of parameters of a rank."""

    whole: int
    """Those that the rank computes with, padded to a multiple of the ranks that shard them."""
    experts: int
    """Those of them that are of experts."""
    tensors: int
    last: int = 0
    """Those of the last matrix; 0 for a sum."""

    def plus(self, other: "Size", times: int = 1) -> "Size":
        """The sum with so many times another size."""
        whole, experts, tensors, _ = other
        return Size(
            self.whole + times * whole, self.experts + times * experts, self.tensors + times * tensors
        )

    def shard(self, degrees: "Degrees") -> int:
        """Those whose masters a rank keeps."""
        rest = self.whole - self.experts
        return rest // degrees.shards + self.experts // degrees.expert_shards


NOTHING = Size(0, 0, 0)
HEAD, LAYER, EMBEDDING = "head", "layer", "embedding"
"""Kinds of a group of parameters: norm and head; a layer; the embedding,
with norm and head where it is tied to them."""


class Layers(NamedTuple):
    """Numbers of layers by what they keep."""

    kept: tuple[int, ...]
    """Layers of each type of the model that keep what backward needs."""
    full: int
    """Layers of all types that keep their input only."""
    num_dense: int
    """Those of `kept` that have no experts."""


class PeakGroup(NamedTuple):
    """A group of parameters of a stage that may be that of the peak, without the numbers that degrees divide."""

    kind: str
    remaining: Layers
    """The layers whose backward has not ended."""
    type_number: int
    """Index of the type of the layer among those of the model; 0 for other groups."""
    is_full: bool
    num_finished: tuple[int, ...]
    """Layers of each type whose backward has ended."""
    before: int | None
    """Index of the type of the layer whose backward was before; None for the first layer, and without layers."""
    following: int | None
    """Index of the type of the layer that is next in backward; None if none is."""


@dataclass(frozen=True, slots=True, eq=False)  # caches find it by its identity
class StageLayers:
    """What follows from the layers of a stage alone."""

    stage: Stage
    all_layers: Layers
    groups: tuple[PeakGroup, ...]
    """The groups that may be that of the peak, in the order of backward; that of the embedding may be empty."""
    num_by_type: tuple[int, ...]
    """Layers of each type, those of modules that predict more tokens included, as in all numbers of layers."""
    num_modules: int
    """Number of modules that predict one more token each."""
    num_sparse: int
    """Layers with experts."""
    last_type_number: int | None
    """Index of the type of the last layer; None without layers."""
    ends_sparse: bool
    """Whether the last layer has experts."""
    copies_embedding: bool
    """Whether the stage has a copy of the embedding, since the modules look up tokens."""


class ParamGroup(NamedTuple):
    """Parameters of a stage that are gathered at once."""

    kind: str
    type_number: int
    """Index of the type of the layer among those of the model; 0 for other groups."""
    is_sparse: bool
    whole: int
    reduced: int
    """Parameters whose gradients are reduced first: of a sparse layer its experts."""
    reduced_last: int
    """Those of the last matrix of them, whose gradient torch holds while it reduces all of them."""
    rest_last: int
    """Those of the last matrix of the rest of a sparse layer; 0 for other groups."""
    finished: Size
    """Parameters whose backward has ended; their tensors are not counted."""
    before: int
    """Parameters of the group before, whose reduction is under way."""
    following: int
    """Parameters of the next layer that several ranks share, which are on their way."""
    shared: int
    """Parameters of a layer that several ranks share and that are copied at once from the buffer of their gather."""


@dataclass(frozen=True, slots=True, eq=False)  # caches find it by its identity
class StageParams:
    """What a rank holds of a stage."""

    size: Size
    is_sharded: bool
    """Whether several ranks share the parameters beside experts."""
    last: int
    """Parameters of norm and head; 0 where they are tied to the embedding."""
    first: int
    """Parameters of the group of the embedding."""
    tied: int
    """Parameters of that group if it includes norm and head, which are tied to the embedding; else 0."""
    following: int
    """Parameters of the last layer that several ranks share."""
    gathered_last: int
    """Those of them that are gathered last: of a sparse layer its experts, or the rest if no ranks share experts."""
    layers: StageLayers
    groups: tuple[ParamGroup, ...]
    """Those of `layers`, with the numbers that degrees divide."""


class Pipeline(NamedTuple):
    """What decides which stages a rank of the pipeline axis holds, and which of their layers are computed again."""

    pp: int
    virtual_stages: int
    pp_layout: str
    pp_schedule: str
    full_every: int

    @classmethod
    def of(cls, layout: Layout) -> "Pipeline":
        """The pipeline of a layout."""
        stages = layout.pp, layout.virtual_stages, layout.pp_layout
        return cls(*stages, layout.pp_schedule, layout.full_every)


class Degrees(NamedTuple):
    """The numbers of ranks that divide the parameters of a stage."""

    tp: int
    shards: int
    """Ranks that shard the parameters beside experts."""
    ep: int
    expert_shards: int
    """Ranks that shard the same experts."""

    @classmethod
    def of(cls, layout: Layout) -> "Degrees":
        """The degrees of a layout."""
        return cls(layout.tp, layout.zero_shards, layout.ep, layout.expert_shards)


class RankParams(NamedTuple):
    """What a rank of the pipeline axis holds of parameters."""

    rank: int
    layers: tuple[StageLayers, ...]
    """Those of each of its stages."""
    stages: tuple[StageParams, ...]
    num_shard: int
    """Parameters of all its stages whose masters it keeps."""
    num_tensors: int
    num_sparse: int
    """Its layers with experts."""


@lru_cache(maxsize=4096)  # 480 of the playbook's 6,576 layouts differ in it
def params_of_ranks(
    shape: ModelShape, pipeline: Pipeline, degrees: Degrees, ranks: str
) -> tuple[RankParams, ...]:
    """The ranks of the pipeline axis that `ranks`, a word of `stage_memory`, asks for."""
    is_tied, sizes = shape.tie_word_embeddings and pipeline.pp == 1, _block_sizes(shape, degrees)
    rank_params: list[RankParams] = []
    for rank, layers_of_stages in _ranks(shape, pipeline, ranks):
        stages = tuple([_stage_params(layers, sizes, is_tied) for layers in layers_of_stages])
        num_shard, num_tensors = (
            sum([p.size.shard(degrees) for p in stages]),
            sum([p.size.tensors for p in stages]),
        )
        num_sparse = sum([layers.num_sparse for layers in layers_of_stages])
        rank_params.append(RankParams(rank, layers_of_stages, stages, num_shard, num_tensors, num_sparse))
    return tuple(rank_params)


@lru_cache(maxsize=4096)
def _ranks(shape: ModelShape, pipeline: Pipeline, rank_set: str) -> list[tuple[int, tuple[StageLayers, ...]]]:
    """The ranks that `rank_set` asks for, each with its stages.

    An inner rank without the head holds no more than an earlier one with at least as many layers of each type in each
    stage; than the first one only under 1f1b, where that has more micro-batches in flight, since it sends no gradients.
    """
    pp, virtual_stages, pp_layout, pp_schedule, full_every = pipeline
    layout = Layout(dp=1, pp=pp, virtual_stages=virtual_stages, pp_schedule=pp_schedule, pp_layout=pp_layout)
    # Where each n-th layer is computed again, equally many layers may keep different numbers of bytes.
    compares_ranks = rank_set != EVERY and pp_schedule != "zbv" and full_every < 2
    ranks, earlier_counts = list[tuple[int, tuple[StageLayers, ...]]](), set[tuple[int, ...]]()
    for rank, stages in enumerate(stages_by_rank(shape, layout)):
        layer_counts = tuple([num for stage in stages for num in stage.num_by_kind(shape)])
        is_inner, has_head = 0 < rank < pp - 1, any(stage.has_norm or stage.has_head for stage in stages)
        is_smaller = any(all(map(le, layer_counts, counts)) for counts in earlier_counts)
        is_left_out = rank_set == ENDS or (compares_ranks and is_smaller and not has_head)
        if not (is_inner and is_left_out):
            ranks.append((rank, tuple([_stage_layers(shape, stage, full_every) for stage in stages])))
        if is_inner or pp_schedule == "1f1b":
            earlier_counts.add(layer_counts)
    return ranks


@dataclass(frozen=True, slots=True, eq=False)  # caches find it by its identity
class BlockSizes:
    """The sizes of the blocks of a model on a rank."""

    table: Size
    """The embedding or the head."""
    norm: Size
    layers: tuple[tuple[Size, Size], ...]
    """For each type of layer its experts, and the rest of it."""
    join: Size
    """What a module that predicts one more token has beside its layer."""
    is_sharded: bool
    """Whether several ranks share the parameters beside experts."""
    shares_experts: bool
    """Whether several ranks share the same experts."""


_shared_sizes = lru_cache(maxsize=4096)(BlockSizes)
"""Makes one object of equal sizes, so that layouts which shard differently share what follows from it."""


@lru_cache(maxsize=4096)
def _block_sizes(shape: ModelShape, degrees: Degrees) -> BlockSizes:
    """The sizes of the blocks."""
    h, (tp, shards, ep, expert_shards) = shape.hidden_size, degrees
    layers = tuple([
        (_expert_size(expert_shards, *of_experts), _padded_size(shards, *of_rest))
        for of_experts, of_rest in _matrices_of_types(shape, tp, ep)
    ])  # fmt: skip
    join = _padded_size(shards, (h, 2 * h), (h, 1), (h, 1), (h, 1))
    table = _padded_size(shards, (padded_vocab_size(shape.vocab_size, tp) // tp, h))
    norm = _padded_size(shards, (h, 1))
    return _shared_sizes(table, norm, layers, join, shards > 1, expert_shards > 1)


_Matrices = tuple[tuple[int, int], ...]
"""Rows and columns of matrices."""


@lru_cache(maxsize=1024)  # it does not depend on the ranks that shard the matrices
def _matrices_of_types(shape: ModelShape, tp: int, ep: int) -> tuple[tuple[_Matrices, _Matrices], ...]:
    """The matrices of the experts of each type of layer on a rank, and of the rest of it."""
    h, kinds = shape.hidden_size, kinds_of_ranks(shape, tp)
    of_experts = [tuple(_expert_matrices(kind, h, ep)) for kind in kinds]
    of_rest = [tuple(_matrices(kind.products(h), kind.vectors(h), tp)) for kind in kinds]
    return tuple(zip(of_experts, of_rest, strict=True))


def _matrices(products: Iterable[Product], vectors: Iterable[Vector], tp: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of each matrix of a rank; a vector is a column."""
    for vector in vectors:
        yield vector.length // tp if vector.is_cut else vector.length, 1
    for product in products:
        for outputs in product.parts or (product.outputs,):
            rows = outputs // tp if product.cut == COLUMNS else outputs
            yield rows, product.inputs // tp if product.cut == ROWS else product.inputs


def _expert_matrices(kind: LayerType, h: int, ep: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of the matrices of a layer's experts on a rank: those of all its experts under each other."""
    if (experts := kind.experts) is None:
        return
    num_experts = experts.num_experts // ep
    for product in experts.expert_products(h):
        for outputs in product.parts or (product.outputs,):
            yield num_experts * outputs, product.inputs
    if experts.expert_bias:
        yield num_experts * experts.expert_bias_params(h), 1


def _padded_size(shards: int, *matrices: tuple[int, int]) -> Size:
    numbers = [-(-rows // shards) * shards * columns for rows, columns in matrices]
    return Size(sum(numbers), 0, len(matrices), numbers[-1] if numbers else 0)


def _expert_size(shards: int, *matrices: tuple[int, int]) -> Size:
    size = _padded_size(shards, *matrices)
    return size._replace(experts=size.whole)


@lru_cache(maxsize=4096)
def _stage_layers(shape: ModelShape, stage: Stage, full_every: int) -> StageLayers:
    """The layers of a stage, of which every n-th keeps its input only; n is `full_every`, 0 if none does."""
    numbers, kinds = shape.kind_numbers, shape.kinds
    # The layers of modules that predict more tokens follow the last layer, and have its type.
    num_modules = stage.has_head * shape.num_nextn_predict_layers
    start, end = stage.first_layer, stage.first_layer + stage.num_layers + num_modules
    numbers = (*numbers, *[numbers[-1]] * num_modules)
    sparse_numbers = {number for number, kind in enumerate(kinds) if kind.experts}

    def num_by_type(layers: Iterable[int]) -> list[int]:
        num_by_number = Counter(numbers[n] for n in layers)
        return [num_by_number[number] for number in range(len(kinds))]

    def is_full(layer: int) -> bool:
        return full_every > 0 and (layer + 1) % full_every == 0

    def remaining(layer: int) -> Layers:
        kept_layers = [n for n in range(start, layer + 1) if not is_full(n)]
        kept = num_by_type(kept_layers)
        num_dense = sum(num for number, num in enumerate(kept) if number not in sparse_numbers)
        return Layers(tuple(kept), len(range(start, layer + 1)) - len(kept_layers), num_dense)

    # From layer to layer of a type, activations fall and gradients grow by the same number of bytes: the peak is at the
    # ends.
    peak_layers = {start, shape.first_k_dense_replace, end - 2, end - 1}
    if len(kinds) > 1:  # the lowest and the highest layer of each type in the stage
        for number in {*numbers[start:end]}:
            of_type = [n for n in range(start, end) if numbers[n] == number]
            peak_layers |= {of_type[0], of_type[-1]}
    groups = list[PeakGroup]()
    for n in range(end, start - 2, -1):
        kind = HEAD if n == end else LAYER if n >= start else EMBEDDING
        has_params = (kind == HEAD and stage.has_norm) or (kind == EMBEDDING and stage.has_embedding)
        if n in peak_layers or has_params:
            type_number = numbers[n] if kind == LAYER else 0
            before = numbers[n + 1] if n + 1 < end else None
            following = numbers[n - 1] if start < n else None
            finished, kept_layers = num_by_type(range(n + 1, end)), remaining(min(n, end - 1))
            groups.append(
                PeakGroup(kind, kept_layers, type_number, is_full(n), tuple(finished), before, following)
            )
    num_sparse = sum(num for num, kind in zip(stage.num_by_kind(shape), kinds, strict=True) if kind.experts)
    last_number = numbers[end - 1] if start < end else None
    return StageLayers(
        stage=stage,
        all_layers=remaining(end - 1),
        groups=tuple(groups),
        num_by_type=tuple(num_by_type(range(start, end))),
        num_modules=num_modules,
        num_sparse=num_sparse,
        last_type_number=last_number,
        ends_sparse=last_number in sparse_numbers,
        copies_embedding=num_modules > 0 and not (stage.has_embedding or shape.tie_word_embeddings),
    )


@lru_cache(maxsize=16384)  # 657 of the playbook's stages differ
def _stage_params(layers: StageLayers, sizes: BlockSizes, is_tied: bool) -> StageParams:
    """What a rank holds of a stage.

    Args:
        is_tied: whether norm and head are in one group with the embedding.
    """
    stage, num_modules = layers.stage, layers.num_modules
    head = NOTHING.plus(sizes.norm, stage.has_norm and not is_tied).plus(
        sizes.table, stage.has_head and not is_tied
    )
    head = head.plus(sizes.join, num_modules * (not is_tied)).plus(sizes.table, layers.copies_embedding)
    embedding = NOTHING.plus(sizes.norm, is_tied).plus(sizes.table, stage.has_embedding)
    embedding = embedding.plus(sizes.join, num_modules * is_tied)
    layer_sizes = [rest.plus(experts) for experts, rest in sizes.layers]
    layer_wholes, layer_experts = [size.whole for size in layer_sizes], [size.experts for size in layer_sizes]
    # Of each type of layer its experts and the rest of it, if several ranks share them.
    shared_parts = [
        (experts.whole * sizes.shares_experts, rest.whole * sizes.is_sharded)
        for experts, rest in sizes.layers
    ]
    shared_params = [sum(parts) for parts in shared_parts]
    groups: list[ParamGroup] = []
    for kind, _, type_number, _, num_finished, type_before, type_following in layers.groups:
        # The parts whose gradients backward reduces first and then.
        expert_size, rest_size = sizes.layers[type_number] if kind == LAYER else (NOTHING, embedding)
        finished, before = NOTHING, 0
        if kind == HEAD:
            rest_size = head
        else:
            finished_whole = head.whole + sum(map(mul, num_finished, layer_wholes))
            finished = Size(finished_whole, sum(map(mul, num_finished, layer_experts)), 0)
            before = head.whole if type_before is None else sizes.layers[type_before][1].whole
        whole = expert_size.whole + rest_size.whole
        # Norm and head are little more than the table of the head, and the embedding is one table.
        rest_last = rest_size.last if kind == LAYER else whole
        reduced, lasts = whole, (rest_last, 0)
        if expert_size.whole:
            reduced, lasts = expert_size.whole, (expert_size.last, rest_last)
        following = 0 if type_following is None else shared_params[type_following]
        shared = max(shared_parts[type_number]) if kind == LAYER else 0
        is_sparse = expert_size.whole > 0
        of_group = kind, type_number, is_sparse, whole, reduced, *lasts, finished, before, following, shared
        groups.append(ParamGroup(*of_group))
    size = head.plus(embedding)
    for layer_size, num in zip(layer_sizes, layers.num_by_type, strict=True):
        size = size.plus(layer_size, num)
    last_type_number = layers.last_type_number
    return StageParams(
        size,
        sizes.is_sharded,
        head.whole,
        embedding.whole,
        embedding.whole * is_tied,
        0 if last_type_number is None else shared_params[last_type_number],
        0 if last_type_number is None else next(filter(None, shared_parts[last_type_number]), 0),
        layers,
        tuple(groups),
    )
