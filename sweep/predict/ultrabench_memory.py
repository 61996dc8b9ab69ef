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
    WorkLoad,
    num_unsummed,
    rank_bytes,
    rank_work,
)
from ultrabench.sweep.predict.pipeline import Work
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
    LAYER,
    Degrees,
    Layers,
    Pipeline,
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
    schedule, memory = spec.layout.pp_schedule, list[StageMemory]()
    scale = 2 if spec.kernel.precision == "fp64" else 1
    stored_scale = scale * (1 + constants.zbv_margin * (schedule == "zbv"))
    # The batch: inputs and targets.
    batch_bytes = 8 * (2 + spec.shape.num_nextn_predict_layers) * spec.layout.gas * rank_tokens(spec)
    for rank, moment in _peaks(micro_batch_work(spec, constants.whole_logits), rank_work(spec, ranks)):
        _, phase, weights, gradients, stored, logits, buffers = moment
        buffers = scale * buffers + batch_bytes
        stored, logits = stored_scale * stored, scale * logits
        reserve = constants.base_bytes + constants.fragmentation * (stored + logits + buffers)
        reserve += constants.reduce_stream_bytes * sum([p.size.shard for p in rank.params])
        weights, gradients, optimizer = scale * weights, scale * gradients, _state_bytes(spec, rank.params)
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
    ranks = params_of_ranks(spec.shape, Pipeline.of(spec.layout), Degrees.of(spec.layout), EVERY)
    return tuple(_state_bytes(spec, params) + target_bytes for _, params in ranks)


def least_rank(shape: ModelShape, num_ranks: int) -> StageMemory:
    """What some rank holds at least in any layout: its share of masters, moments and sums of gradients.

    Every parameter has a master, two moments and, as the last gradients are reduced, a gradient of 4 bytes on at least
    one rank, so the rank that holds most has 16 N / ranks.
    """
    num_params = shape.num_params / num_ranks
    return StageMemory(0, OPTIMIZER, 0.0, 4 * num_params, 12 * num_params, 0.0, 0.0, 0.0, 0.0)


def _state_bytes(spec: RunSpec, params: tuple[StageParams, ...]) -> float:
    """Masters, moments, the optimizer's count of steps for each parameter, and what stays of routing.

    They are a route that follows from positions, and balance and counts of each router.
    """
    shape, layout, kernel = spec.shape, spec.layout, spec.kernel
    param_bytes = 24.0 if kernel.precision == "fp64" else 12.0
    state = sum([param_bytes * p.size.shard + 4 * p.size.tensors for p in params])
    if shape.num_experts:
        # Orders of the rows before and after their way to the experts, where routes do not change.
        num_orders = 0 if kernel.routing == "learned" else 4 + 2 * (layout.ep > 1)
        state += 8 * num_orders * rank_tokens(spec) / layout.tp * shape.num_experts_per_tok
        state += 12 * shape.num_experts * sum(p.num_sparse for p in params)
    return state


@lru_cache(maxsize=16384)  # 4,863 of the playbook's 6,576 layouts differ in it
def _peaks(batch_work: MicroBatchWork, work: RankWork) -> list[tuple[RankBytes, Moment]]:
    """The ranks that are asked for, each with the moment of most bytes."""
    m, schedule = micro_batch(batch_work), work.pipeline.pp_schedule
    return [(rank, _peak(m, rank, schedule)) for rank in rank_bytes(work)]


def _peak(m: MicroBatch, rank: RankBytes, schedule: str) -> Moment:
    """The moment of a rank with most bytes."""
    activations = [
        _activations(m, p, halved=halved) for p, halved in zip(rank.params, rank.halved, strict=True)
    ]
    loss = m.whole_hidden + m.table * (schedule != "afab")  # all losses of afab share one gradient
    stored = [
        a.stored + loss * p.stage.has_head + p.num_modules * (loss + JOINED * m.hidden)
        for a, p in zip(activations, rank.params, strict=True)
    ]
    kept_bytes = [*stored, *(a.halfway for a in activations)]
    peak = _NO_MOMENT
    for work_bytes in rank.works:
        work, chunk = work_bytes.work, work_bytes.work.chunk
        p, of_stage, load = rank.params[chunk], activations[chunk], _largest(work_bytes.loads, kept_bytes)
        if work.kind == "forward":
            moment = _forward(m, p, of_stage.stored, loss, load.gathered, work_bytes.sums)
        elif work.kind == "weight":
            moment = max(_weight_half(m, p, work, of_stage, work_bytes.sums))
        else:
            has_table = schedule != "afab" or not work.has_sums
            moment = _backward(m, p, work_bytes.groups, of_stage, has_table=has_table)
        _, phase, weights, gradients, stored_bytes, logits, buffers = moment
        stored_bytes += sum(map(mul, load.num_kept, kept_bytes)) - stored[chunk]
        stored_bytes += m.hidden * work_bytes.num_messages
        weights, gradients = weights + load.weights, gradients + load.gradients
        moment = _moment(phase, weights, gradients, stored_bytes, logits, buffers)
        if moment > peak:
            peak = moment
    return peak


def _largest(loads: tuple[WorkLoad, ...], kept_bytes: list[float]) -> WorkLoad:
    """The load of most bytes; each stage keeps so many bytes of a micro-batch, whole or halfway."""
    if len(loads) == 1:
        return loads[0]
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
    halfway: float
    """What they keep between the halves of a backward."""
    groups: list[tuple[float, float]]
    """For each group of parameters those as its backward begins, and those of them that it uses up."""


def _activations(m: MicroBatch, p: StageParams, *, halved: bool) -> _Activations:
    """The activations of a stage.

    Args:
        halved: whether the gradients of weights are left to another half.
    """
    stored, halfway = _stored(m, p.layers), _halfway(m, p.layers) if halved else m.hidden
    # All modules that predict more tokens keep until the end what they joined.
    joined = p.num_modules * (JOINED * m.hidden + m.whole_hidden)
    groups = list[tuple[float, float]]()
    for group in p.groups:
        if group.kind == EMBEDDING:
            groups.append((0.0, 0.0))
        elif group.kind == HEAD:
            groups.append((_stored(m, group.remaining) + joined, 0.0))
        elif halved:
            groups.append((stored + halfway - _halfway(m, group.remaining) + joined, 0.0))
        else:
            released = m.hidden if group.is_full else m.stored[group.type_number]
            # The norm has used the output of the layers.
            remaining = _stored(m, group.remaining) - m.hidden * p.stage.has_norm
            groups.append((remaining + joined, released))
    return _Activations(stored, halfway, groups)


def _forward(
    m: MicroBatch, p: StageParams, stored: float, loss: float, gathered: float, sums: float
) -> Moment:
    """The end of a forward.

    Args:
        stored: bytes that the layers keep.
        loss: bytes that a loss keeps for backward.
        gathered: bytes of the weights that are gathered.
        sums: bytes of gradients of earlier micro-batches.
    """
    stage, earlier_losses = p.stage, p.num_modules * (loss + JOINED * m.hidden)
    logits, buffers = (
        (m.loss + m.hidden * stage.has_norm + earlier_losses) * stage.has_head,
        m.layers[p.last_type_number].forward * p.ends_sparse,
    )
    logits, buffers = (logits, 0.0) if logits > buffers else (0.0, buffers)
    return _moment(FORWARD, gathered, sums, stored, logits, buffers)


def _backward(
    m: MicroBatch,
    p: StageParams,
    groups: tuple[GroupBytes, ...],
    activations: _Activations,
    *,
    has_table: bool,
) -> Moment:
    """The moment of most bytes among those of each group of parameters: its backward, or the reduction of its
    gradients.

    Args:
        has_table: whether the gradient of the head's weights is not yet taken.
    """
    peak = _NO_MOMENT
    for g, (stored, released) in zip(groups, activations.groups, strict=True):
        kind = g.group.kind
        if kind == LAYER:
            buffers = _layer_buffers(m.layers[g.group.type_number], g, released)
        elif kind == HEAD:
            # The gradients of the loss, and those of the norm with three copies in fp32.
            loss = 2 * m.whole_hidden + ((1 + p.num_modules) * m.table + g.further) * has_table
            buffers = max(loss * p.stage.has_head, (2 + 12 / m.element) * m.hidden)
        else:
            buffers = m.whole_hidden + g.further
        phase, weights, gradients = BACKWARD, g.weights, g.gradients + g.reducing
        if g.reducing + released + buffers <= g.new - g.freed:
            phase, weights, gradients = g.phase, g.weights - g.freed, g.gradients + g.new
            stored, buffers = stored - released, 0.0
        # Most groups are not that of the peak.
        if weights + gradients + stored + buffers >= peak[0]:
            peak = max(peak, _moment(phase, weights, gradients, stored, 0.0, buffers))
        if g.reduced_later:
            peak = max(peak, _moment(OPTIMIZER, *g.reduced_later, 0.0, 0.0, 0.0))
    return peak


def _layer_buffers(layer: LayerBytes, g: GroupBytes, released: float) -> float:
    """What the backward of a layer needs beside what it keeps; the gradients of q, k and v are made last and at once.

    A backward whose weight half comes later uses up nothing yet.
    """
    if g.is_input_half:
        return layer.input_half
    added, qkv_weights = g.added, layer.qkv_weights
    before_qkv, with_qkv = (added - qkv_weights, added) if added > qkv_weights else (0.0, qkv_weights)
    return (
        max(layer.feed_forward + g.one_matrix, layer.attention + before_qkv, layer.qkv + with_qkv) - released
    )


def _weight_half(
    m: MicroBatch, p: StageParams, work: Work, activations: _Activations, sums: float
) -> Iterator[Moment]:
    """The begin and the end of the weight half of a backward, for which its input half has kept all activations.

    The first gradient is that of a norm, with three copies of the residual stream in fp32. Products free their inputs.
    """
    w, whole = m.element, p.size.whole
    sums += w * num_unsummed(p) * work.unsummed
    gathered, stored = m.whole_hidden * (m.whole_hidden > m.hidden), activations.stored
    yield _moment(BACKWARD, w * whole, sums, stored, 0.0, max(12 / w * m.hidden, gathered))
    new = w * whole * (not work.unsummed and (w == 2 or not work.has_sums))
    freed = _halfway(m, p.layers) + p.layers.num_dense * 2 * m.hidden
    yield _moment(BACKWARD, w * whole, sums + new, stored - freed, 0.0, gathered)
