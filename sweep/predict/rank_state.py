"""What a rank of our own kernel holds between the passes of a step, in closed form.

The symbols are those of `ultrabench_memory`.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.stages import Stage, stages_by_rank
from ultrabench.sweep.predict.micro_batch import MicroBatch
from ultrabench.sweep.predict.stage_memory import in_flight


class StageSizes(NamedTuple):
    """Numbers of parameters of a stage, padded as fully_shard pads the rows of each matrix."""

    stage: Stage
    shards: int
    whole: int
    shard: int
    layer: int
    """Parameters of one layer, whole."""
    down: int
    """Its last matrix."""
    last: int
    """Norm and head, whole; 0 where they are one group with the embedding."""
    first: int
    """The embedding, whole, or the group of a tied embedding with norm and head."""
    tensors: int
    tied: bool
    """Whether the embedding is in the same group as norm and head."""


class RankStages(NamedTuple):
    """A rank of the pipeline axis."""

    like: int
    """The first rank with the same stage, which differs at most in its micro-batches in flight."""
    less: bool
    """Whether an earlier rank holds at least as much at its peak."""
    stages: tuple[StageSizes, ...]


@lru_cache(maxsize=4096)
def rank_stages(
    shape: ModelShape, tp: int, pp: int, virtual: int, schedule: str, every: int, shards: int
) -> tuple[RankStages, ...]:
    """The ranks of the pipeline axis; each `every`-th layer keeps its input only."""
    h, q, kv, f = shape.hidden_size, shape.q_width // tp, shape.kv_width // tp, shape.intermediate_size // tp
    matrices = [(q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f), (h, 1), (h, 1)]
    matrices += [(shape.head_width, 1)] * (2 * shape.qk_norm)

    def padded(rows: int, columns: int) -> int:
        return -(-rows // shards) * shards * columns

    layer, norm, table = sum(padded(*m) for m in matrices), padded(h, 1), padded(shape.vocab_size // tp, h)
    tied, down = shape.tie_word_embeddings and pp == 1, padded(h, f)

    def sizes(stage: Stage) -> StageSizes:
        last = 0 if tied else norm * stage.has_norm + table * stage.has_head
        first = norm + table if tied else table * stage.has_embedding
        whole = last + first + layer * stage.num_layers
        ends = stage.has_embedding + stage.has_head + stage.has_norm - tied
        tensors = len(matrices) * stage.num_layers + ends
        return StageSizes(stage, shards, whole, whole // shards, layer, down, last, first, tensors, tied)

    ranks = _ranks(shape, pp, virtual, schedule, every)
    return tuple(RankStages(like, less, tuple(map(sizes, stages))) for like, less, stages in ranks)


def stages_of_ranks(shape: ModelShape, pp: int, virtual: int, schedule: str) -> list[tuple[Stage, ...]]:
    """The stages of each rank of the pipeline axis, whatever tp and dp."""
    return stages_by_rank(shape, Layout(dp=1, pp=pp, virtual_stages=virtual, pp_schedule=schedule))


@lru_cache(maxsize=4096)
def _ranks(
    shape: ModelShape, pp: int, virtual: int, schedule: str, every: int
) -> tuple[tuple[int, bool, tuple[Stage, ...]], ...]:
    """`like` and `less` of each rank of the pipeline axis, and its stages, whatever tp and dp."""
    found, firsts, most = list[tuple[int, bool, tuple[Stage, ...]]](), dict[tuple[object, ...], int](), -1
    for rank, stages in enumerate(stages_of_ranks(shape, pp, virtual, schedule)):
        layers = sum(s.num_layers for s in stages)
        places = (replace(s, index=0, first_layer=s.first_layer % (every or 1)) for s in stages)
        like = firsts.setdefault((0 < rank < pp - 1, *places), rank) if virtual == 1 else rank
        # A rank in the middle holds less than an earlier one with as many layers; than the first one only where
        # that one has more micro-batches in flight, since it sends no gradients.
        less = like < rank or (virtual == 1 and every < 2 and layers <= most and 0 < rank < pp - 1)
        most = max(most, layers) if rank or schedule == "1f1b" else most
        found.append((like, less, stages))
    return tuple(found)


class RankState(NamedTuple):
    """A moment between the micro-batches of a step at which a rank may hold most."""

    stage: StageSizes
    """The stage whose backward comes next."""
    kept: float
    """Activations of all micro-batches in flight, the one whose backward comes next included."""
    alone: float
    """Activations that stay of that one when only its first layer is left."""
    summed: float
    """Bytes of the stage's gradients of earlier micro-batches."""
    sharded: bool = False
    """Whether those are shards, since each micro-batch reduces its own."""
    copied: int = 0
    """Parameters that this micro-batch gathered last, whose buffer stays until its forward ends."""
    forward: bool = False
    """Whether a forward with the loss comes before the backward."""
    reduces: bool = False
    """Whether the backward reduces gradients."""
    frees: bool = False
    """Whether the backward frees parameters."""
    gathered: bool = False
    """Whether ZeRO-3 still holds the layers' parameters of an earlier backward."""
    ends_forward: bool = False
    """Whether it is the end of a forward for which ZeRO-3 gathered parameters, and no backward."""


def rank_states(layout: Layout, m: MicroBatch, rank: RankStages, number: int) -> list[RankState]:
    """The states of rank `number` of the pipeline axis, with one stage, among which is that of its peak; the last one reduces."""
    (s,) = rank.stages
    one, alone = m.kept_by(s.stage), m.left_by(s.stage)
    if layout.pp > 1:
        return _pipeline_states(layout, m, s, number, one, alone)
    late, gas, sharded, last = layout.zero_stage == 3, layout.gas, layout.zero_stage >= 2, s.last or s.layer
    summed = 4.0 * (s.shard if sharded else s.whole)
    states = [RankState(s, one, alone, 0.0, sharded, last, True, gas == 1 or sharded, gas == 1 or late)]
    if gas > 1:
        states.append(RankState(s, one, alone, summed, sharded, late * last, True, True, True))
    if gas > 2 and not late:
        states.append(RankState(s, one, alone, summed, sharded, forward=True, reduces=sharded))
        if s.shards == 1 or not sharded:  # the first micro-batch holds less
            del states[0]
    return states


def _pipeline_states(
    layout: Layout, m: MicroBatch, s: StageSizes, rank: int, one: float, alone: float
) -> list[RankState]:
    """The first backward, a later one with as many micro-batches in flight, and the last, which alone reduces.

    A message is held while it may be waited for: under afab outputs and gradients until the step ends, under 1f1b the
    latest gradient and, in steady state, the last output of the warm-up that was sent alone.
    """
    gas, flight, afab = layout.gas, in_flight(layout, rank), layout.pp_schedule == "afab"
    received, sent, ends = m.hidden * (rank < layout.pp - 1), m.hidden * (rank > 0), gas == 1
    shared, left = m.table_kept if afab and s.stage.has_head else 0.0, sent + afab * received
    one, later, summed = one - shared, gas > flight, 4.0 * s.whole
    rest, layer = received + (flight - 1) * one, s.layer * (s.stage.num_layers > 0)
    copied = (s.last or layer) if flight == 1 else layer * (layout.zero_stage == 3)
    states = [RankState(s, rest + one + shared, rest + alone, 0.0, False, copied, True, ends, ends)]
    if gas > 2:
        rest += left - one * (not later) + m.hidden * (later and flight > 1 and gas >= 2 * flight - 1)
        states.append(RankState(s, rest + one, rest + alone, summed, forward=later, gathered=not later))
        if later:  # it holds more than the first one
            del states[0]
    if gas > 1:
        rest = received + (left * (gas - 1) if afab else left)
        last = RankState(s, rest + one, rest + alone, summed, False, 0, flight == 1, True, True, flight > 1)
        states.append(last)
    return states
