"""The memory of our own kernel in closed form, which `ultrabench kernel dryrun` confirms.

The peak of a rank is the largest sum over the moments of a step of
- parameters: shards of the masters, and what is gathered of them in the precision of forward and backward;
- gradients: sums over earlier micro-batches, and those that are reduced now;
- optimizer: two moments;
- activations: those of a micro-batch times micro-batches in flight, and messages between stages;
- logits: what the loss needs at the end of a forward;
- buffers: what the backward of the group of parameters at work needs, and the batch.

Symbols: n parameters of the rank (whole, cut by tp only), D shards, P parameters of a group that is gathered and
reduced at once, T tokens of a micro-batch on the ranks of tp, t = T/tp. w is the size of a number in forward and
backward; masters, moments and sums of gradients have 4 bytes. docs/design/prediction.md derives the terms.

Names hold bytes, but whole, shard, size, reduced, finished, gathered, first, last and following count parameters.
In the functions, m is the micro-batch and p is a stage of the rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from ultrabench.allowed import NonNegative, require_allowed
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.micro_batch import (
    LayerBytes,
    MicroBatch,
    MicroBatchWork,
    micro_batch,
    micro_batch_work,
    rank_tokens,
)
from ultrabench.sweep.predict.param_bytes import (
    GroupBytes,
    RankBytes,
    RankWork,
    StageWork,
    WorkLoad,
    num_unsummed,
    rank_bytes,
    rank_work,
)
from ultrabench.sweep.predict.stage_memory import (
    BACKWARD,
    DEVICE_BYTES,
    EVERY,
    FORWARD,
    OPTIMIZER,
    MemoryLimit,
    StageMemory,
)
from ultrabench.sweep.predict.stage_params import (
    EMBEDDING,
    HEAD,
    Degrees,
    Layers,
    Pipeline,
    StageLayers,
    StageParams,
    params_of_ranks,
)


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
    device_bytes: NonNegative = DEVICE_BYTES
    """Bytes that a GPU holds beside the allocator: those of CUDA, its libraries and NCCL."""
    whole_logits: NonNegative = 0.0
    """Bytes of each logit in a program whose loss takes all of them at once, such as torchtitan; 0: those of our own
    kernel, which takes them in chunks."""
    zbv_margin: NonNegative
    """What the schedule zbv needs beyond the activations of its micro-batches in flight, as a part of them."""
    limit: MemoryLimit

    def __post_init__(self) -> None:
        require_allowed(self, "memory.")


JOINED = 5
"""Residual streams that a module which predicts one more token keeps beside its layer: the embeddings, both normed
inputs in one tensor of twice the width, and the input and the output of its last norm."""
Moment = tuple[float, str, float, float, float, float, float]
"""All bytes, the phase, and the bytes of weights, gradients, activations, logits and buffers."""


def ultrabench_memory(
    spec: RunSpec, constants: UltrabenchMemory, ranks: str = EVERY
) -> tuple[StageMemory, ...]:
    """The memory of the ranks of the pipeline axis that `ranks` asks for.

    In fp64 every number is twice as wide as in fp32. zbv holds up to zbv_margin more than the closed form counts.
    """
    precision, memory = spec.kernel.precision, list[StageMemory]()
    batch_work = micro_batch_work(spec, constants.whole_logits)
    scale = 2 if precision == "fp64" else 1
    stored_scale = scale * (1 + constants.zbv_margin * (spec.layout.pp_schedule == "zbv"))
    # The batch: inputs and targets.
    batch_bytes = 8 * (2 + spec.shape.num_nextn_predict_layers) * spec.layout.gas * batch_work.tokens
    for rank, moment in _peaks(batch_work, rank_work(spec, ranks)):
        _, phase, weights, gradients, stored, logits, buffers = moment
        buffers = scale * buffers + batch_bytes
        stored, logits = stored_scale * stored, scale * logits
        reserve = constants.base_bytes + constants.fragmentation * (stored + logits + buffers)
        reserve += constants.reduce_stream_bytes * rank.num_shard
        optimizer = _state_bytes(spec, rank.params, rank.num_shard, rank.num_tensors)
        weights, gradients = scale * weights, scale * gradients
        memory.append(
            StageMemory(rank.rank, phase, weights, gradients, optimizer, stored, logits, buffers, reserve)
        )
    return tuple(memory)


def static_bytes(spec: RunSpec) -> tuple[float, ...]:
    """The bytes that stay from step to step on each rank of the pipeline axis.

    They are 12 n / D, or 24 n / D in fp64, and in a pipeline the last targets.
    """
    num_targets = 1 + spec.shape.num_nextn_predict_layers
    target_bytes = 8 * num_targets * spec.layout.gas * rank_tokens(spec) * (spec.layout.pp > 1)
    degrees = Degrees.of(spec.layout)
    state_bytes = list[float]()
    for _, params in params_of_ranks(spec.shape, Pipeline.of(spec.layout), degrees, EVERY):
        num_shard, num_tensors = (
            sum(p.size.shard(degrees) for p in params),
            sum(p.size.tensors for p in params),
        )
        state_bytes.append(_state_bytes(spec, params, num_shard, num_tensors) + target_bytes)
    return tuple(state_bytes)


def least_rank(shape: ModelShape, num_ranks: int) -> StageMemory:
    """What some rank holds at least in any layout: its share of masters, moments and sums of gradients.

    Every parameter has a master, two moments and, as the last gradients are reduced, a gradient of 4 bytes on at least
    one rank, so the rank that holds most has 16 N / ranks.
    """
    num_params = shape.num_params / num_ranks
    return StageMemory(0, OPTIMIZER, 0.0, 4 * num_params, 12 * num_params, 0.0, 0.0, 0.0, 0.0)


def _state_bytes(spec: RunSpec, params: tuple[StageParams, ...], num_shard: int, num_tensors: int) -> float:
    """Masters, moments, the optimizer's count of steps for each parameter, and what stays of routing.

    They are a route that follows from positions, and balance and counts of each router.

    Args:
        params: the stages of a rank.
        num_shard: number of their parameters whose masters the rank keeps.
        num_tensors: number of their tensors.
    """
    shape, layout, kernel = spec.shape, spec.layout, spec.kernel
    param_bytes = 24.0 if kernel.precision == "fp64" else 12.0
    state = param_bytes * num_shard + 4 * num_tensors
    if shape.num_experts:
        # Orders of the rows before and after their way to the experts, where routes do not change.
        num_orders = 0 if kernel.routing == "learned" else 4 + 2 * (layout.ep > 1)
        state += 8 * num_orders * rank_tokens(spec) / layout.tp * shape.num_experts_per_tok
        state += 12 * shape.num_experts * sum(p.layers.num_sparse for p in params)
    return state


@lru_cache(maxsize=16384)  # 4,863 of the playbook's 6,576 layouts differ in it
def _peaks(batch_work: MicroBatchWork, work: RankWork) -> list[tuple[RankBytes, Moment]]:
    """The ranks that are asked for, each with the moment of most bytes."""
    m, schedule = micro_batch(batch_work), work.pipeline.pp_schedule
    return [(rank, _peak(m, rank, schedule)) for rank in rank_bytes(work)]


def _peak(m: MicroBatch, rank: RankBytes, schedule: str) -> Moment:
    """The moment of a rank with most bytes."""
    loss = m.whole_hidden + m.table * (schedule != "afab")  # all losses of afab share one gradient
    activations = [
        _activations(m, p.layers, loss, halved) for p, halved in zip(rank.params, rank.halved, strict=True)
    ]
    kept_bytes = [*(a.kept for a in activations), *(a.halfway for a in activations)]
    peak, is_table_of_each = _NO_MOMENT, schedule != "afab"
    for stage_work, num_messages, work_loads in rank.works:
        load = work_loads[0] if len(work_loads) == 1 else _largest(work_loads, kept_bytes)
        num_kept, is_alone, _, waiting_gradients, waiting_weights = load
        kind, chunk, *_ = stage_work.work
        if kind == "forward":
            moment = _forward(m, stage_work, activations[chunk].stored, loss, is_alone)
        else:
            moment = _backward_moment(m, stage_work, loss, is_table_of_each)
        _, phase, weights, gradients, stored, logits, buffers = moment
        stored += sum(map(mul, num_kept, kept_bytes)) - kept_bytes[chunk]
        stored += m.hidden * num_messages
        weights, gradients = weights + waiting_weights, gradients + waiting_gradients
        total = weights + gradients + stored + logits + buffers
        if total >= peak[0]:
            peak = max(peak, (total, phase, weights, gradients, stored, logits, buffers))
    return peak


def _largest(loads: tuple[WorkLoad, ...], kept_bytes: list[float]) -> WorkLoad:
    """The load of most bytes; each stage keeps so many bytes of a micro-batch, whole or halfway."""
    return max(loads, key=lambda load: sum([*map(mul, load.num_kept, kept_bytes), *load.param_bytes]))


_NO_MOMENT: Moment = (-1.0, "", 0.0, 0.0, 0.0, 0.0, 0.0)
"""A moment that is smaller than any other one."""


def _moment(
    phase: str, weights: float, gradients: float, stored: float, logits: float, buffers: float
) -> Moment:
    """A moment with the sum of its bytes."""
    return weights + gradients + stored + logits + buffers, phase, weights, gradients, stored, logits, buffers


def _stored(m: MicroBatch, layers: Layers) -> float:
    """What these layers keep, and the output of the last one."""
    stored_bytes: float = sum(map(mul, layers.kept, m.stored))
    return stored_bytes + (layers.full + 1) * m.hidden


def _halfway(m: MicroBatch, layers: Layers) -> float:
    """What these layers keep for the weight half of a backward."""
    halfway_bytes: float = sum(map(mul, layers.kept, m.halfway))
    return halfway_bytes + layers.full * m.halfway[0]


class _Activations(NamedTuple):
    """Bytes of the activations of one micro-batch in a stage."""

    stored: float
    """What forward keeps of its layers."""
    kept: float
    """All that forward keeps for backward, with what the loss and the modules that predict more tokens keep."""
    halfway: float
    """What they keep between the halves of a backward."""
    groups: tuple[tuple[float, float, LayerBytes | None], ...]
    """For each group of parameters those as its backward begins, those of them that it uses up, and its layer."""


@lru_cache(maxsize=16384)
def _activations(m: MicroBatch, layers: StageLayers, loss: float, halved: bool) -> _Activations:
    """The activations of a stage.

    Args:
        loss: bytes that a loss keeps for backward.
        halved: whether the gradients of weights are left to another half.
    """
    stored = _stored(m, layers.all_layers)
    halfway = _halfway(m, layers.all_layers) if halved else m.hidden
    # All modules that predict more tokens keep until the end what they joined.
    joined = layers.num_modules * (JOINED * m.hidden + m.whole_hidden)
    groups = list[tuple[float, float, LayerBytes | None]]()
    for group in layers.groups:
        layer = m.layers[group.type_number]
        if group.kind == EMBEDDING:
            groups.append((0.0, 0.0, None))
        elif group.kind == HEAD:
            groups.append((_stored(m, group.remaining) + joined, 0.0, None))
        elif halved:
            groups.append((stored + halfway - _halfway(m, group.remaining) + joined, 0.0, layer))
        else:
            released = m.hidden if group.is_full else m.stored[group.type_number]
            # The norm has used the output of the layers.
            remaining = _stored(m, group.remaining) - m.hidden * layers.stage.has_norm
            groups.append((remaining + joined, released, layer))
    kept = stored + loss * layers.stage.has_head + layers.num_modules * (loss + JOINED * m.hidden)
    return _Activations(stored, kept, halfway, tuple(groups))


def _forward(m: MicroBatch, work: StageWork, stored: float, loss: float, is_alone: bool) -> Moment:
    """The end of a forward.

    Args:
        stored: bytes that the layers keep.
        loss: bytes that a loss keeps for backward.
        is_alone: whether the stage keeps nothing of other micro-batches.
    """
    layers = work.params.layers
    stage, earlier_losses = layers.stage, layers.num_modules * (loss + JOINED * m.hidden)
    logits, buffers = (
        (m.loss + m.hidden * stage.has_norm + earlier_losses) * stage.has_head,
        m.layers[layers.last_type_number or 0].forward * layers.ends_sparse,
    )
    logits, buffers = (logits, 0.0) if logits > buffers else (0.0, buffers)
    return _moment(FORWARD, work.gathered[is_alone], work.sums, stored, logits, buffers)


@lru_cache(maxsize=65536)
def _backward_moment(m: MicroBatch, work: StageWork, loss: float, is_table_of_each: bool) -> Moment:
    """The moment of most bytes of a backward, or of one of its halves.

    Args:
        loss: bytes that a loss keeps for backward.
        is_table_of_each: whether each micro-batch has a gradient of the head's weights of its own.
    """
    activations = _activations(m, work.params.layers, loss, work.is_halved)
    if work.work.kind == "weight":
        return max(_weight_half(m, work, activations))
    return _backward(m, work, activations, has_table=is_table_of_each or not work.work.has_sums)


def _backward(m: MicroBatch, work: StageWork, activations: _Activations, *, has_table: bool) -> Moment:
    """The moment of most bytes among those of each group of parameters: its backward, or the reduction of its
    gradients.

    Args:
        has_table: whether the gradient of the head's weights is not yet taken.
    """
    layers, peak = work.params.layers, _NO_MOMENT
    for group_bytes in work.groups:
        group_index, kind, _, weights, gradients, reducing, new, freed, *_ = group_bytes
        stored, released, layer = activations.groups[group_index]
        if layer is not None:
            buffers = max(group_bytes.copied, _layer_buffers(layer, group_bytes, released))
        elif kind == HEAD:
            # The gradients of the loss, and those of the norm with three copies in fp32.
            loss = 2 * m.whole_hidden + ((1 + layers.num_modules) * m.table + group_bytes.further) * has_table
            buffers = max(loss * layers.stage.has_head, (2 + 12 / m.element) * m.hidden)
        else:
            buffers = m.whole_hidden + group_bytes.further
        phase = BACKWARD
        if reducing + released + buffers <= new - freed:
            phase, weights, gradients = group_bytes.phase, weights - freed, gradients + new
            stored, buffers = stored - released, 0.0
        else:
            gradients += reducing
        # Most groups are not that of the peak.
        if weights + gradients + stored + buffers >= peak[0]:
            peak = max(peak, _moment(phase, weights, gradients, stored, 0.0, buffers))
        if group_bytes.reduced_later:
            peak = max(peak, _moment(OPTIMIZER, *group_bytes.reduced_later, 0.0, 0.0, 0.0))
    return peak


def _layer_buffers(layer: LayerBytes, group_bytes: GroupBytes, released: float) -> float:
    """What the backward of a layer needs beside what it keeps; the gradients of q, k and v are made last and at once.

    A backward whose weight half comes later uses up nothing yet.
    """
    if group_bytes.is_input_half:
        return layer.input_half
    added, qkv_weights, feed_forward = group_bytes.added, layer.qkv_weights, layer.feed_forward
    before_qkv, with_qkv = (added - qkv_weights, added) if added > qkv_weights else (0.0, qkv_weights)
    moments = feed_forward + group_bytes.one_matrix, layer.attention + before_qkv, layer.qkv + with_qkv
    return max(moments) - released


def _weight_half(m: MicroBatch, work: StageWork, activations: _Activations) -> Iterator[Moment]:
    """The begin and the end of the weight half of a backward, for which its input half has kept all activations.

    The first gradient is that of a norm, with three copies of the residual stream in fp32. Products free their inputs.
    """
    p, (_, _, has_sums, unsummed, *_) = work.params, work.work
    w, whole, layers = m.element, p.size.whole, p.layers.all_layers
    sums = work.sums + w * num_unsummed(p) * unsummed
    gathered, stored = m.whole_hidden * (m.whole_hidden > m.hidden), activations.stored
    yield _moment(BACKWARD, w * whole, sums, stored, 0.0, max(12 / w * m.hidden, gathered))
    new = w * whole * (not unsummed and (w == 2 or not has_sums))
    freed = _halfway(m, layers) + layers.num_dense * 2 * m.hidden
    yield _moment(BACKWARD, w * whole, sums + new, stored - freed, 0.0, gathered)
