"""The memory of our own kernel in closed form, which `ultrabench kernel dryrun` confirms.

Symbols: n parameters of the rank (whole, cut by tp only), D shards, P parameters of a layer, R those of norm and head,
h hidden size, q and kv widths of all queries and keys, f feed-forward width, V vocabulary, T tokens of a micro-batch
on the ranks of tp, t = T/tp. w is the size of a number in forward and backward; masters, moments and sums of
gradients have 4 bytes. docs/prediction.md derives the terms.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter
from typing import NamedTuple

from ultrabench.allowed import NonNegative, require_allowed
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.micro_batch import MicroBatch, micro_batch
from ultrabench.sweep.predict.rank_state import RankStages, RankState, rank_stages, rank_states
from ultrabench.sweep.predict.stage_memory import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    MemoryLimit,
    StageMemory,
    in_flight,
)
from ultrabench.sweep.predict.step_time import BYTES
from ultrabench.sweep.predict.turn_peaks import Moment, rounds_looked_at, turn_peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class UltrabenchMemory:
    """What the closed form of our kernel cannot tell."""

    fragmentation: NonNegative
    """The part of activations, logits and buffers that the allocator holds beyond them."""
    base_bytes: NonNegative
    """Bytes that the allocator holds in any run; on CPUs the resident set of a rank beside its tensors."""
    reduce_stream_bytes: NonNegative = 0.0
    """Bytes for each parameter whose gradient the rank sums that the allocator holds for the stream which reduces
    gradients: what is freed there serves no other stream."""
    zbv_margin: NonNegative
    """What the schedule zbv needs beyond the activations of its micro-batches in flight, as a part of them."""
    limit: MemoryLimit

    def __post_init__(self) -> None:
        require_allowed(self, "memory.")


def _reduction(params: int, end: int, w: int, at: RankState) -> float:
    """Bytes while the gradients of a group are added up or reduced, without what was summed before.

    fully_shard holds that of the group's last matrix, with `end` parameters, until its shards are reduced.
    """
    if at.reduces:
        end, part = end * (at.stage.shards > 1), params / at.stage.shards
        if at.summed > 0 and not at.sharded:
            return 4 * max(params, part + end)
        return max((w + 4) * params, 4 * (params + part) + w * end)
    if w > 2:  # gradients are added in place
        return 0 if at.summed else w * params
    return w * params if at.summed else 4 * params + w * end


def _drained(layout: Layout, at: RankState) -> bool:
    """Whether an earlier backward took the gradient of the head's weights that all micro-batches share."""
    return at.summed > 0 and layout.pp_schedule == "afab"


def _moments(m: MicroBatch, layout: Layout, at: RankState) -> list[Moment]:
    s = at.stage
    if at.ends_forward:  # the last layer's parameters and the buffer in which they were gathered
        return [(FORWARD, m.word * (s.last + 2 * s.layer), at.summed, at.kept, 0.0, m.layer - m.kept)]
    loss = m.gathered + m.table_kept * (not _drained(layout, at)) if s.stage.has_head else 0.0
    moments = [*_head_moments(m, layout, at, at.kept - loss)]
    if s.stage.num_layers:
        moments += _layer_moments(m, layout, at, at.kept - loss)
    if s.stage.has_embedding:
        moments += _embedding_moments(m, layout, at)
    return moments


def _head_moments(m: MicroBatch, layout: Layout, at: RankState, kept: float) -> Iterator[Moment]:
    """The end of forward with the loss, and the backward of head and norm."""
    s, w, shards, late = at.stage, m.word, at.stage.shards, layout.zero_stage == 3
    head = s.stage.has_head
    drained, tied = head and _drained(layout, at), w * s.first if s.tied else 0
    table = m.table if head and not drained else 0.0
    gathered = w * s.last + tied if late else w * s.whole
    copy = w * at.copied * (shards > 1)
    if head and at.forward:
        loss = m.loss - m.hidden * (not (s.stage.has_norm or s.tied)) + m.rope * (not s.stage.num_layers)
        if layout.pp_schedule == "afab" and layout.gas > 2:
            loss += max(0.0, m.second_loss - (layout.gas - 2) * (m.kept_by(s.stage) - m.table_kept))
        yield FORWARD, gathered + copy, at.summed, kept, loss, 0.0
    ahead = w * s.layer if late and shards > 1 and s.stage.num_layers else 0
    if head:
        yield BACKWARD, gathered + ahead, at.summed, at.kept, m.gathered + table, 0.0
    if s.stage.has_norm:
        freed, new = w * s.last if at.frees else 0, table * (w == 2 or not at.summed or at.sharded)
        yield BACKWARD, gathered + ahead, at.summed + new, kept, 0.0, m.hidden * head + m.norm_work
        last = 0 if drained and not at.reduces else s.last  # that of the norm alone is small
        gradients = at.summed + table * s.tied + _reduction(last, last, w, at)
        yield BACKWARD, gathered + ahead - freed, gradients, kept, 0.0, 0.0
    elif at.copied or not s.stage.num_layers:
        yield BACKWARD, gathered + copy, at.summed, kept, 0.0, 3 * m.hidden


def _layer_moments(m: MicroBatch, layout: Layout, at: RankState, kept: float) -> Iterator[Moment]:
    """The backward of the last layer, which comes first, of the first one, and of the one before it or of the second.

    Each has two moments: its own work, and the reduction of its gradients. Meanwhile the buffer of the reduction
    before is in use, and ZeRO-3 gathers the next layer.
    """
    s, w, shards, late, layer = at.stage, m.word, at.stage.shards, layout.zero_stage == 3, at.stage.layer
    top, layers = s.stage.first_layer + s.stage.num_layers - 1, s.stage.num_layers
    tied, pending = (w * s.first, m.table) if s.tied else (0, 0.0)
    kept, held = kept - m.hidden * s.stage.has_norm, m.layer_kept(top)
    others = s.whole - layer - s.first
    ends = layer if layers > 1 else s.last
    first = others, at.alone, m.layer_kept(s.stage.first_layer), ends
    places = [(s.last, kept, held, s.last), first]
    if layers > 2 and late and not at.frees:  # then a layer may leave more than it held
        second = m.layer_kept(s.stage.first_layer + 1)
        places.insert(1, (others - layer, at.alone + second, second, layer))
    elif layers > 2:
        places.insert(1, (s.last + layer, kept - held, m.layer_kept(top - 1), layer))
    if not late and m.full <= 1:  # then layers hold ever less activations
        if at.summed and not at.reduces:  # weights and gradients stay as they are
            places = places[:1]
        elif w * at.frees + 4 * (at.summed > 0) >= 4 / shards:  # they get less, too, or are summed as shards
            places = places[:2]
    work, end_work = m.work_in_place if w > 2 and at.summed and not at.sharded else m.work
    for done, activations, own, before in places:
        gathered, copy = w * (s.whole - (done if at.frees else 0)), 0.0
        came = done > s.last or s.stage.has_norm
        if at.gathered and late:
            gathered -= w * s.first
        elif late:
            ahead = layer if shards > 1 and done < others else 0
            stays = 0 if at.frees else done
            copy = w * layer + m.hidden * came if shards > 1 and not ahead else 0.0
            gathered = w * (layer + ahead + stays) + tied
        summed = (at.summed or 4 * done) + pending
        if at.reduces:
            new = 4 * done / shards - 4 * done * (at.summed > 0)
            summed = at.summed + pending + (0 if at.sharded and at.summed else new)
        waiting = 4 * before if at.reduces else 0
        more = m.layer - own + (work if came else end_work)
        yield BACKWARD, gathered, summed + waiting, activations, 0.0, max(more, copy) if copy else more
        freed, gradients = w * layer if at.frees else 0, summed + _reduction(layer, s.down, w, at)
        yield BACKWARD, gathered - freed, gradients, activations - own, 0.0, m.hidden


def _embedding_moments(m: MicroBatch, layout: Layout, at: RankState) -> Iterator[Moment]:
    """The backward of the embedding, whose gradient is dense, and its reduction; a tied one is added to the head's."""
    s, w, shards, first = at.stage, m.word, at.stage.shards, at.stage.first
    done, dense = 4 * (s.whole - first), (3 if s.tied else 1) * w * first
    kept = at.alone - m.rope - m.layer_kept(s.stage.first_layer)
    if not at.reduces:
        gathered, summed = w * (s.whole - first if layout.zero_stage == 3 else s.whole), at.summed or done
        yield BACKWARD, gathered, summed + dense, kept, 0.0, m.gathered
        if not at.summed:
            yield BACKWARD, gathered, summed + _reduction(first, first, w, at), kept, 0.0, 0.0
        if layout.zero_stage == 3 and shards > 1 and at.forward:  # the next forward gathers the embedding
            yield FORWARD, gathered + 2 * w * first, at.summed, kept, 0.0, 0.0
        return
    gradients = at.summed if at.sharded and at.summed else done / shards + 4 * first * (at.summed > 0)
    gathered = 0 if at.frees else w * (s.whole - first)
    yield BACKWARD, gathered + w * first, gradients + dense + 4 * s.layer, kept, 0.0, m.gathered
    yield OPTIMIZER, gathered, gradients + _reduction(first, first * (not s.tied), w, at), 0.0, 0.0, 0.0


def ultrabench_memory(spec: RunSpec, c: UltrabenchMemory, every_rank: bool = True) -> tuple[StageMemory, ...]:
    """The memory of each rank of the pipeline axis, or without those that hold no more than an earlier one.

    Each rank has the largest of about ten moments: the loss, the backward of head and norm, of the last layer, of the
    one before and of the first one, the reduction after each, and the embedding's. In fp64 every number is
    twice as wide as in fp32. zbv holds up to zbv_margin more than the closed form counts.
    """
    layout, word = spec.layout, min(4, BYTES[spec.kernel.precision])
    tokens, own_len = layout.mbs * spec.workload.seq_len // layout.cp, spec.workload.seq_len // layout.cp
    key = _model_and_cut(spec)
    ranks = rank_stages(*key)
    layer, compiled = ranks[0].stages[0].layer, spec.compiles
    m = micro_batch(
        spec.shape, tokens, own_len, layout.tp, layout.cp, layout.recompute, layout.full_every, word, layer,
        compiled, min(layout.gas, 3) if layout.pp_schedule == "afab" else 1,
    )  # fmt: skip
    scale = 2 if spec.kernel.precision == "fp64" else 1
    gas = layout.gas  # more than three add nothing but activations in flight, which `_Peak` adds
    if layout.pp_schedule in ("none", "1f1b"):
        gas = min(gas, 3)
    elif layout.virtual_stages > 1:
        gas = rounds_looked_at(layout)
    batch = tokens, own_len, layout.cp, word, gas, max(1, layout.zero_stage), layout.recompute, compiled
    peaks, found = _peaks(key, *batch), list[StageMemory]()
    turned = _turned(key, *batch) if layout.virtual_stages > 1 else []
    if layout.virtual_stages > 1 and not turned:
        turned += turn_peaks(layout, m, spec.shape, ranks, partial(_moments, m, layout))
    for rank, own in enumerate(ranks):
        if own.less and not every_rank:
            continue
        if turned:
            found.append(_stage_memory(layout, m, own, rank, turned[rank], c, scale))
            continue
        flight = in_flight(layout, rank)
        like = own.like, flight == 1, flight < layout.gas, 2 * flight - 1 <= layout.gas
        if (peak := peaks.get(like)) is None:
            peak = peaks[like] = _peak(layout, m, own, rank)
        found.append(_stage_memory(layout, m, own, rank, peak.moment(flight), c, scale))
    return tuple(found)


@lru_cache(maxsize=16384)
def _peaks(*of: object) -> "dict[tuple[int, bool, bool, bool], _Peak]":
    """A place for the peaks of the ranks of layouts that differ in nothing that decides them; it is empty at first."""
    return {}


@lru_cache(maxsize=16384)
def _turned(*of: object) -> list[Moment]:
    """A place for the largest moments of ranks with several stages; it is empty at first."""
    return []


class _Peak(NamedTuple):
    """The moments of a rank at which it has most, as a function of its micro-batches in flight."""

    flight: float
    one: float
    """Activations of a micro-batch."""
    before: tuple[float, Moment]
    """All bytes of the largest moment before the last backward, with `flight` micro-batches in flight; and it."""
    last: tuple[float, Moment]
    """All bytes of the largest moment of the last backward, for which only one is left; and it."""

    def moment(self, flight: float) -> Moment:
        """The largest moment with `flight` micro-batches in flight."""
        more = (flight - self.flight) * self.one
        if self.before[0] + more < self.last[0]:
            return self.last[1]
        phase, weights, gradients, kept, logits, work = self.before[1]
        return phase, weights, gradients, kept + more, logits, work


def _peak(layout: Layout, m: MicroBatch, own: RankStages, rank: int) -> _Peak:
    largest = []
    for state in rank_states(layout, m, own, rank):
        moments = _moments(m, layout, state)
        totals = [a + b + c + d + e for _, a, b, c, d, e in moments]
        most = max(totals)
        largest.append((most, moments[totals.index(most)]))
    before = max(largest[:-1] or largest, key=itemgetter(0))
    return _Peak(in_flight(layout, rank), m.kept_by(own.stages[0].stage), before, largest[-1])


def _stage_memory(
    layout: Layout, m: MicroBatch, own: RankStages, rank: int, at: Moment, c: UltrabenchMemory, scale: int
) -> StageMemory:
    phase, weights, gradients, kept, logits, work = at
    if layout.pp_schedule == "zbv":
        kept *= 1 + c.zbv_margin
    buffers = scale * work + 16 * layout.gas * m.tokens  # the batch: inputs and targets
    kept, logits, optimizer = scale * kept, scale * logits, _states_bytes(own, scale)
    reserve = c.base_bytes + c.fragmentation * (kept + logits + buffers)
    reserve += c.reduce_stream_bytes * sum(s.shard for s in own.stages)
    return StageMemory(
        rank, phase, scale * weights, scale * gradients, optimizer, kept, logits, buffers, reserve
    )


def _states_bytes(rank: RankStages, scale: int) -> int:
    """Bytes of master weights and moments, and of the optimizer's count of steps for each parameter."""
    return sum(scale * 12 * s.shard + 4 * s.tensors for s in rank.stages)


def _model_and_cut(spec: RunSpec) -> tuple[ModelShape, int, int, int, str, int, int]:
    """The arguments of `rank_stages`."""
    own = spec.layout
    return (
        spec.shape, own.tp, own.pp, own.virtual_stages, own.pp_schedule, own.full_every, own.zero_shards
    )  # fmt: skip


def static_bytes(spec: RunSpec) -> tuple[float, ...]:
    """The bytes that stay from step to step on each rank of the pipeline axis.

    They are 12 n / D, or 24 n / D in fp64, and in a pipeline the last targets.
    """
    layout, scale = spec.layout, 2 if spec.kernel.precision == "fp64" else 1
    targets = 8 * layout.gas * layout.mbs * spec.workload.seq_len // layout.cp if layout.pp > 1 else 0
    return tuple(_states_bytes(rank, scale) + targets for rank in rank_stages(*_model_and_cut(spec)))
