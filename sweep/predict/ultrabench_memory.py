"""The memory of our own kernel in closed form, which `ultrabench kernel dryrun` confirms.

Symbols: n parameters of the rank (whole, cut by tp only), D shards, P parameters of a layer, R those of norm and head,
h hidden size, q and kv widths of all queries and keys, f feed-forward width, V vocabulary, T tokens of a micro-batch
on the ranks of tp, t = T/tp. w is the size of a number in forward and backward; masters, moments and sums of
gradients have 4 bytes. docs/prediction.md derives the terms.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from ultrabench.allowed import NonNegative, require_allowed
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.stages import Stage, stages_by_rank
from ultrabench.sweep.predict.micro_batch import MicroBatch, micro_batch
from ultrabench.sweep.predict.stage_memory import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    MemoryLimit,
    StageMemory,
    in_flight,
)
from ultrabench.sweep.predict.step_time import BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class UltrabenchMemory:
    """What the closed form of our kernel cannot tell."""

    fragmentation: NonNegative
    """The part of activations, logits and buffers that the allocator holds beyond them."""
    base_bytes: NonNegative
    """Bytes that the allocator holds in any run."""
    zbv_margin: NonNegative
    """What the schedule zbv needs beyond the activations of its micro-batches in flight, as a part of them."""
    limit: MemoryLimit

    def __post_init__(self) -> None:
        require_allowed(self, "memory.")


class _Sizes(NamedTuple):
    """Numbers of parameters of a rank, padded as fully_shard pads the rows of each matrix."""

    like: int
    """The first rank with the same stage, which differs at most in its micro-batches in flight."""
    less: bool
    """Whether an earlier rank holds at least as much at its peak."""
    shards: int
    whole: int
    shard: int
    layer: int
    """Parameters of one layer, whole."""
    last: int
    """Norm and head, whole; 0 where they are one group with the embedding."""
    first: int
    """The embedding, whole, or the group of a tied embedding with norm and head."""
    tensors: int
    stages: tuple[Stage, ...]
    num_layers: int
    tied: bool
    """Whether the embedding is in the same group as norm and head."""


@lru_cache(maxsize=4096)
def _sizes(
    shape: ModelShape, tp: int, pp: int, virtual: int, schedule: str, every: int, shards: int
) -> tuple[_Sizes, ...]:
    """The sizes of the ranks of the pipeline axis; each `every`-th layer keeps its input only."""
    h, q, kv, f = shape.hidden_size, shape.q_width // tp, shape.kv_width // tp, shape.intermediate_size // tp
    matrices = [(q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f), (h, 1), (h, 1)]
    matrices += [(shape.head_width, 1)] * (2 * shape.qk_norm)

    def padded(rows: int, columns: int) -> int:
        return -(-rows // shards) * shards * columns

    layer, norm, table = sum(padded(*m) for m in matrices), padded(h, 1), padded(shape.vocab_size // tp, h)
    found, firsts, most = list[_Sizes](), dict[tuple[object, ...], int](), -1
    ranks = stages_by_rank(shape, Layout(dp=1, pp=pp, virtual_stages=virtual, pp_schedule=schedule))
    for rank, stages in enumerate(ranks):
        embedding, head, norms = (
            any(getattr(s, f"has_{e}") for s in stages) for e in ("embedding", "head", "norm")
        )
        layers = sum(s.num_layers for s in stages)
        tied = shape.tie_word_embeddings and pp == 1
        last = 0 if tied else norm * norms + table * head
        first = norm + table if tied else table * embedding
        whole = last + first + layer * layers
        tensors = len(matrices) * layers + embedding + head + norms - tied
        places = (replace(s, index=0, first_layer=s.first_layer % (every or 1)) for s in stages)
        like = firsts.setdefault((0 < rank < pp - 1, *places), rank) if virtual == 1 else rank
        # A rank in the middle holds less than an earlier one with as many layers; than the first one only where
        # that one has more micro-batches in flight, since it sends no gradients.
        less = like < rank or (virtual == 1 and every < 2 and layers <= most and 0 < rank < pp - 1)
        most = max(most, layers) if rank or schedule == "1f1b" else most
        sizes = like, less, shards, whole, whole // shards, layer, last, first, tensors, stages, layers, tied
        found.append(_Sizes(*sizes))
    return tuple(found)


class _State(NamedTuple):
    """A moment between the micro-batches of a step at which a rank may hold most."""

    kept: float
    """Activations of all micro-batches in flight, the one whose backward comes next included."""
    alone: float
    """Activations that stay of that one when only its first layer is left."""
    summed: float
    """Bytes of gradients of earlier micro-batches."""
    sharded: bool
    """Whether those are shards, since each micro-batch reduces its own."""
    gathered: bool
    """Whether parameters were gathered in this micro-batch."""
    forward: bool
    """Whether a forward with the loss comes before the backward."""
    reduces: bool
    """Whether the backward reduces gradients."""


def _kept(m: MicroBatch, stage: Stage) -> float:
    """Activations of one micro-batch of a stage: its layers, its output or the input of the norm, and tables."""
    again = 0
    if m.full:
        again = (stage.first_layer + stage.num_layers) // m.full - stage.first_layer // m.full
    layers = (stage.num_layers - again) * m.kept + again * m.hidden
    return (
        layers
        + m.hidden
        + m.rope
        + 9 * m.tokens * stage.has_embedding
        + stage.has_head * (m.gathered + m.table)
    )


def _layer_kept(m: MicroBatch, number: int) -> float:
    return m.hidden if m.full and (number + 1) % m.full == 0 else m.kept


def _counts(layout: Layout, rank: int) -> tuple[float, ...]:
    """Largest numbers of micro-batches in flight of each stage of a rank."""
    pp, gas, v = layout.pp, layout.gas, layout.virtual_stages
    if layout.pp_schedule == "zbv":
        return min(gas, 2 * pp - 1 - rank), min(gas, rank + 1)
    if v == 1:
        return (in_flight(layout, rank),)
    group = gas // max(1, gas // pp)
    forwards = min(gas * v, 2 * (pp - rank - 1) + (v - 1) * group + 1)
    rounds, rest = divmod(forwards, group * v)
    return tuple(rounds * group + min(group, max(0, rest - chunk * group)) for chunk in range(v))


def _states(layout: Layout, m: MicroBatch, s: _Sizes, rank: int) -> list[_State]:
    one = tuple(_kept(m, stage) for stage in s.stages)
    alone = m.rope + _layer_kept(m, s.stages[0].first_layer)
    if layout.pp > 1:
        return _pipeline_states(layout, m, s, rank, one, alone)
    late, gas, sharded = layout.zero_stage == 3, layout.gas, layout.zero_stage >= 2
    summed = 4.0 * (s.shard if sharded else s.whole)
    states = [_State(one[0], alone, 0.0, sharded, True, True, gas == 1 or sharded)]
    if gas > 1:
        states.append(_State(one[0], alone, summed, sharded, late, True, True))
    if gas > 2 and not sharded:
        states.append(_State(one[0], alone, summed, False, False, True, False))
        if s.shards == 1:  # the first micro-batch has nothing that this one has not
            del states[0]
    return states


def _pipeline_states(
    layout: Layout, m: MicroBatch, s: _Sizes, rank: int, one: tuple[float, ...], alone: float
) -> list[_State]:
    """The first backward, a later one with as many micro-batches in flight, and the last, which alone reduces."""
    gas, v, counts = layout.gas, layout.virtual_stages, _counts(layout, rank)
    flight, group = sum(counts), gas // max(1, gas // layout.pp)
    afab, head = layout.pp_schedule == "afab", s.stages[-1].has_head
    sent = m.hidden * (1 + (0 < rank < layout.pp - 1) - (afab and head))
    kept = sent + sum(n * each for n, each in zip(counts, one, strict=True))
    if head and afab:  # all micro-batches share one gradient of the head, which is fp32 once it is a sum
        kept -= (gas - 1) * m.table - (2 * m.table if m.word == 2 and gas > 1 else 0)
    summed, left = 4.0 * s.whole, kept - one[-1] + alone
    states = [_State(kept, left, 0.0, False, flight == 1, True, gas == 1)]
    if v > 1 and gas * v > flight:
        some = summed * min(v, -(-(gas * v - flight) // group)) / v
        states.append(_State(kept, left, some, False, False, True, False))
    elif v == 1 and gas > 2:
        less = 0 if gas > flight else one[-1]
        states.append(_State(kept - less, left - less, summed, False, False, gas > flight, False))
        if gas > flight > 1:  # it holds all that the first one does
            del states[0]
    if gas > 1:
        end = summed / v + 4.0 * s.shard * (v > 1)
        states.append(_State(one[0] + sent, alone + sent, end, False, False, flight == 1, True))
    return states


_Moment = tuple[str, float, float, float, float, float]
"""Phase, and bytes of gathered weights, gradients, activations, logits and buffers."""


def _reduction(params: int, w: int, shards: int, at: _State) -> float:
    """Bytes while the gradients of a group are added up or reduced, without what was summed before."""
    whole_sum = at.summed > 0 and not at.sharded
    if at.reduces:
        return 4 * params if whole_sum else max((w + 4) * params, 4 * params * (1 + 1 / shards))
    return w * params if at.summed or w > 2 else (w + 4) * params


def _head_moments(m: MicroBatch, s: _Sizes, layout: Layout, at: _State) -> Iterator[_Moment]:
    """The end of forward with the loss, and the backward of head and norm."""
    w, shards, late = m.word, s.shards, layout.zero_stage == 3
    head = s.stages[-1].has_head
    table, tied = m.table if head else 0.0, w * s.first if s.tied else 0
    gathered = w * s.last + tied if late else w * s.whole
    copy = w * (s.last or s.layer) if shards > 1 and at.gathered else 0
    kept = at.kept - (m.gathered + table if head else 0.0)
    if head and at.forward:
        yield FORWARD, gathered + copy, at.summed, kept, m.loss, 0.0
    if head:
        ahead = w * s.layer if late and shards > 1 and s.num_layers else 0
        yield BACKWARD, gathered + ahead, at.summed, at.kept, m.gathered + table, 0.0
    if s.stages[-1].has_norm:
        yield BACKWARD, gathered, at.summed + table, kept, 0.0, m.hidden + m.norm_work
        freed, pending = w * s.last if at.reduces else 0, table if s.tied else 0.0
        gradients = at.summed + pending + _reduction(s.last, w, shards, at)
        yield BACKWARD, gathered - freed, gradients, kept, 0.0, m.hidden
    else:
        yield BACKWARD, gathered + copy, at.summed, kept, 0.0, 3 * m.hidden


def _layer_moments(m: MicroBatch, s: _Sizes, layout: Layout, at: _State) -> Iterator[_Moment]:
    """The backward of the last layer, which comes first, of the one before it, and of the first one.

    Each has two moments: its own work, and the reduction of its gradients. Meanwhile the buffer of the reduction
    before is in use, and ZeRO-3 gathers the next layer.
    """
    w, shards, late, layer = m.word, s.shards, layout.zero_stage == 3, s.layer
    top, head = s.stages[-1].first_layer + s.stages[-1].num_layers - 1, s.stages[-1].has_head
    tied, pending = (w * s.first, m.table) if s.tied else (0, 0.0)
    kept, held = at.kept - m.hidden - (m.gathered + m.table if head else 0.0), _layer_kept(m, top)
    others = s.whole / layout.virtual_stages - layer - s.first
    ends = layer if s.num_layers > 1 else s.last
    first = others, at.alone, _layer_kept(m, s.stages[0].first_layer), ends
    places = [
        (s.last, kept, held, s.last),
        (s.last + layer, kept - held, _layer_kept(m, top - 1), layer),
        first,
    ]
    if s.num_layers <= 2:
        places = [places[0], first]
    if not late and m.full <= 1 and len(s.stages) == 1:  # then layers hold ever less activations
        if at.summed and not at.reduces:  # weights and gradients stay as they are
            places = places[:1]
        elif at.reduces and w + 4 * (at.summed > 0 and not at.sharded) >= 4 / shards:  # they get less, too
            places = places[:2]
    for done, activations, own, before in places:
        gathered = w * (s.whole - (done if at.reduces else 0))
        if late:
            ahead = layer if shards > 1 and done < others else 0
            stays = done if layout.pp > 1 and not at.reduces else 0
            gathered = w * (layer + ahead + stays) + tied
        summed = (at.summed or 4 * done) + pending
        if at.reduces:
            new = 4 * done / shards
            summed = at.summed + pending + new - (0 if at.sharded or not at.summed else 4 * done)
        waiting = 4 * before if at.reduces else 0
        yield BACKWARD, gathered, summed + waiting, activations, 0.0, m.layer - own + m.work
        freed, gradients = w * layer if at.reduces else 0, summed + _reduction(layer, w, shards, at)
        yield BACKWARD, gathered - freed, gradients, activations - own, 0.0, m.hidden


def _embedding_moments(m: MicroBatch, s: _Sizes, layout: Layout, at: _State) -> Iterator[_Moment]:
    """The backward of the embedding, whose gradient is dense, and its reduction; a tied one is added to the head's."""
    w, shards, first = m.word, s.shards, s.first
    done, dense = 4 * (s.whole - first), (3 if s.tied else 1) * w * first
    if not at.reduces:
        kept = at.kept - at.alone if layout.pp > 1 else 0.0
        gathered = w * (first if layout.zero_stage == 3 else s.whole)
        yield BACKWARD, gathered, (at.summed or done) + dense, kept, 0.0, m.gathered
        return
    gradients = done / shards + (at.summed if at.sharded or not at.summed else 4 * first)
    yield BACKWARD, w * first, gradients + dense + 4 * s.layer, 0.0, 0.0, m.gathered
    yield OPTIMIZER, 0.0, gradients + _reduction(first, w, shards, at), 0.0, 0.0, 0.0


def ultrabench_memory(spec: RunSpec, c: UltrabenchMemory, every_rank: bool = True) -> tuple[StageMemory, ...]:
    """The memory of each rank of the pipeline axis, or without those that hold no more than an earlier one.

    Each rank has the largest of about ten moments: the loss, the backward of head and norm, of the last layer, of the
    one before and of the first one, the reduction after each, and the embedding's. In fp64 every number is
    twice as wide as in fp32. zbv holds up to zbv_margin more than the closed form counts.
    """
    layout, word = spec.layout, min(4, BYTES[spec.kernel.precision])
    tokens, own_len = layout.mbs * spec.workload.seq_len // layout.cp, spec.workload.seq_len // layout.cp
    every, ring = layout.full_every, layout.cp > 1
    key = (
        spec.shape,
        layout.tp,
        layout.pp,
        layout.virtual_stages,
        layout.pp_schedule,
        every,
        layout.zero_shards,
    )
    sizes = _sizes(*key)
    m = micro_batch(
        spec.shape, tokens, own_len, layout.tp, ring, layout.recompute, every, word, sizes[0].layer
    )
    scale = 2 if spec.kernel.precision == "fp64" else 1
    gas = layout.gas  # more than two micro-batches beside those in flight add nothing
    if layout.pp_schedule in ("none", "1f1b"):
        gas = min(gas, 3)
    batch = tokens, own_len, ring, word, gas, max(1, layout.zero_stage), layout.recompute
    peaks, found = _peaks(key, *batch), list[StageMemory]()
    for rank, size in enumerate(sizes):
        if size.less and not every_rank:
            continue
        flight = in_flight(layout, rank)
        like = size.like, flight == 1, flight < layout.gas
        if (peak := peaks.get(like)) is None:
            peak = peaks[like] = _peak(layout, m, size, rank)
        found.append(_stage_memory(layout, m, size, rank, peak.moment(flight), c, scale))
    return tuple(found)


@lru_cache(maxsize=16384)
def _peaks(*of: object) -> "dict[tuple[int, bool, bool], _Peak]":
    """A place for the peaks of the ranks of layouts that differ in nothing that decides them; it is empty at first."""
    return {}


class _Peak(NamedTuple):
    """The moments of a rank at which it has most, as a function of its micro-batches in flight."""

    flight: float
    one: float
    """Activations of a micro-batch."""
    before: tuple[float, _Moment]
    """All bytes of the largest moment before the last backward, with `flight` micro-batches in flight; and it."""
    last: tuple[float, _Moment]
    """All bytes of the largest moment of the last backward, for which only one is left; and it."""

    def moment(self, flight: float) -> _Moment:
        """The largest moment with `flight` micro-batches in flight."""
        more = (flight - self.flight) * self.one
        if self.before[0] + more < self.last[0]:
            return self.last[1]
        phase, weights, gradients, kept, logits, work = self.before[1]
        return phase, weights, gradients, kept + more, logits, work


def _peak(layout: Layout, m: MicroBatch, s: _Sizes, rank: int) -> _Peak:
    largest = []
    for state in _states(layout, m, s, rank):
        moments = [*_head_moments(m, s, layout, state)]
        if s.num_layers:
            moments += _layer_moments(m, s, layout, state)
        if s.stages[0].has_embedding:
            moments += _embedding_moments(m, s, layout, state)
        totals = [a + b + c + d + e for _, a, b, c, d, e in moments]
        largest.append((most := max(totals), moments[totals.index(most)]))
    before = max(largest[:-1] or largest, key=itemgetter(0))
    return _Peak(in_flight(layout, rank), _kept(m, s.stages[0]), before, largest[-1])


def _stage_memory(
    layout: Layout, m: MicroBatch, s: _Sizes, rank: int, at: _Moment, c: UltrabenchMemory, scale: int
) -> StageMemory:
    phase, weights, gradients, kept, logits, work = at
    if layout.pp_schedule == "zbv":
        kept *= 1 + c.zbv_margin
    buffers = scale * work + 16 * layout.gas * m.tokens  # the batch: inputs and targets
    kept, logits, optimizer = scale * kept, scale * logits, scale * 12 * s.shard + 4 * s.tensors
    reserve = c.base_bytes + c.fragmentation * (kept + logits + buffers)
    return StageMemory(
        rank, phase, scale * weights, scale * gradients, optimizer, kept, logits, buffers, reserve
    )


def _rank_sizes(spec: RunSpec) -> tuple[_Sizes, ...]:
    own = spec.layout
    return _sizes(
        spec.shape, own.tp, own.pp, own.virtual_stages, own.pp_schedule, own.full_every, own.zero_shards
    )


def static_bytes(spec: RunSpec) -> tuple[float, ...]:
    """The bytes that stay from step to step on each rank of the pipeline axis.

    They are 12 n / D, or 24 n / D in fp64, and in a pipeline the last targets.
    """
    layout, scale = spec.layout, 2 if spec.kernel.precision == "fp64" else 1
    targets = 8 * layout.gas * layout.mbs * spec.workload.seq_len // layout.cp if layout.pp > 1 else 0
    return tuple(scale * 12 * s.shard + 4 * s.tensors + targets for s in _rank_sizes(spec))
