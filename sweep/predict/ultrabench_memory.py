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

from dataclasses import dataclass
from functools import lru_cache
from operator import add, mul

from ultrabench.allowed import NonNegative, require_allowed
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.micro_batch import MicroBatch, micro_batch, micro_batch_work, rank_tokens
from ultrabench.sweep.predict.param_bytes import (
    RankBytes,
    RankWork,
    StageWork,
    WorkLoad,
    added_bytes,
    rank_bytes,
    rank_work,
)
from ultrabench.sweep.predict.stage_memory import DEVICE_BYTES, EVERY, OPTIMIZER, MemoryLimit, StageMemory
from ultrabench.sweep.predict.stage_params import (
    EMBEDDING,
    HEAD,
    Degrees,
    Layers,
    ParamGroup,
    Pipeline,
    RankParams,
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


Moment = tuple[str, float, float, float, float, float]
"""The phase of a moment, and the bytes of weights, gradients, activations, logits and buffers."""
MomentActivations = tuple[list[float], list[float]]
"""For each of `StageWork.moments` the bytes of activations, logits and buffers, and those of activations alone. The
rest are logits or buffers at the end of a forward, and buffers at other moments."""


def ultrabench_memory(
    spec: RunSpec, constants: UltrabenchMemory, ranks: str = EVERY
) -> tuple[StageMemory, ...]:
    """The memory of the ranks of the pipeline axis that `ranks` asks for.

    In fp64 every number is twice as wide as in fp32. zbv holds up to zbv_margin more than the closed form counts.
    """
    precision = spec.kernel.precision
    memory: list[StageMemory] = []
    batch_work = micro_batch_work(spec, constants.whole_logits)
    scale = 2 if precision == "fp64" else 1
    stored_scale = scale * (1 + constants.zbv_margin * (spec.layout.pp_schedule == "zbv"))
    # The batch: inputs and targets.
    batch_bytes = 8 * (2 + spec.shape.num_nextn_predict_layers) * spec.layout.gas * batch_work.tokens
    peaks = _peaks(micro_batch(batch_work), rank_work(spec), ranks)
    for rank, (phase, weights, gradients, stored, logits, buffers) in peaks:
        buffers = scale * buffers + batch_bytes
        stored, logits = stored_scale * stored, scale * logits
        reserve = constants.base_bytes + constants.fragmentation * (stored + logits + buffers)
        reserve += constants.reduce_stream_bytes * rank.num_shard
        optimizer = _state_bytes(spec, rank)
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
    ranks = params_of_ranks(spec.shape, Pipeline.of(spec.layout), Degrees.of(spec.layout), EVERY)
    return tuple([_state_bytes(spec, rank) + target_bytes for rank in ranks])


def least_rank(shape: ModelShape, num_ranks: int) -> StageMemory:
    """What some rank holds at least in any layout: its share of masters, moments and sums of gradients.

    Every parameter has a master, two moments and, as the last gradients are reduced, a gradient of 4 bytes on at least
    one rank, so the rank that holds most has 16 N / ranks.
    """
    num_params = shape.num_params / num_ranks
    return StageMemory(0, OPTIMIZER, 0.0, 4 * num_params, 12 * num_params, 0.0, 0.0, 0.0, 0.0)


def _state_bytes(spec: RunSpec, rank: RankParams) -> float:
    """Masters, moments, the optimizer's count of steps for each parameter, and what stays of routing.

    They are a route that follows from positions, and balance and counts of each router.
    """
    shape, layout, kernel = spec.shape, spec.layout, spec.kernel
    param_bytes = 24.0 if kernel.precision == "fp64" else 12.0
    state = param_bytes * rank.num_shard + 4 * rank.num_tensors
    if shape.num_experts:
        # Orders of the rows before and after their way to the experts, where routes do not change.
        num_orders = 0 if kernel.routing == "learned" else 4 + 2 * (layout.ep > 1)
        state += 8 * num_orders * rank_tokens(spec) / layout.tp * shape.num_experts_per_tok
        state += 12 * shape.num_experts * rank.num_sparse
    return state


@lru_cache(maxsize=16384)  # 4,863 of the playbook's 6,576 layouts differ in it
def _peaks(m: MicroBatch, work: RankWork, ranks: str) -> list[tuple[RankParams, Moment]]:
    """The ranks that are asked for, each with the moment of most bytes."""
    shares_table = work.division.pipeline.pp_schedule == "afab"
    return [(rank.params, _peak(m, rank, shares_table)) for rank in rank_bytes(m.shape, work, ranks)]


def _peak(m: MicroBatch, rank: RankBytes, shares_table: bool) -> Moment:
    """The moment of a rank with most bytes.

    Args:
        shares_table: whether the losses of all micro-batches share one gradient of the head's weights.
    """
    stages, kept_bytes = _rank_activations(m, rank.params.layers, rank.halved, shares_table)
    peak_bytes = -1.0
    peaks: list[_WorkPeak] = []
    for work, work_alone, num_messages, work_loads in rank.works:
        load = work_loads[0] if len(work_loads) == 1 else _largest(work_loads, kept_bytes)
        num_kept, is_alone, _, waiting_gradients, waiting_weights = load
        if is_alone:
            work = work_alone
        params, kind, chunk, has_sums, adds_in_place, _, param_totals = work
        stage = stages[chunk]
        if kind == "forward":
            activations = stage.forward
        elif kind == "weight":
            activations = stage.weight_half
        else:
            has_table = not (shares_table and has_sums)
            activations = _backward(m, params, stage, adds_in_place, has_table)
        kept = m.hidden * num_messages - kept_bytes[chunk] + sum(map(mul, num_kept, kept_bytes))
        total = max(map(add, param_totals, activations[0])) + kept + waiting_weights + waiting_gradients
        if total > peak_bytes:
            peak_bytes, peaks = total, []
        if total == peak_bytes:
            has_logits = kind == "forward" and stage.has_logits
            peaks.append((work, activations, has_logits, kept, waiting_gradients, waiting_weights))
    return max([_largest_moment(*peak) for peak in peaks])


_WorkPeak = tuple[StageWork, MomentActivations, bool, float, float, float]
"""The arguments of `_largest_moment`."""


def _largest_moment(
    work: StageWork,
    activations: MomentActivations,
    has_logits: bool,
    kept: float,
    waiting_gradients: float,
    waiting_weights: float,
) -> Moment:
    """The moment of a work with most bytes.

    Args:
        has_logits: whether the bytes beside activations are logits.
        kept: bytes of activations that other works keep, and of messages.
        waiting_gradients: bytes of gradients of stages that are not at work.
        waiting_weights: bytes of their weights.
    """
    totals, stored_bytes = activations
    at_work = max(zip(map(add, work.totals, totals), work.moments, totals, stored_bytes, strict=False))
    _, (_, phase, weights, gradients, param_buffers), of_activations, stored = at_work
    rest = of_activations - stored + param_buffers
    logits, buffers = (rest, 0.0) if has_logits else (0.0, rest)
    return phase, weights + waiting_weights, gradients + waiting_gradients, stored + kept, logits, buffers


@lru_cache(maxsize=16384)  # ranks share it whose parameters have other shards: 2,362 of 8,664 differ
def _rank_activations(
    m: MicroBatch, layers_of_stages: tuple[StageLayers, ...], halved: tuple[bool, ...], shares_table: bool
) -> tuple[list["_Activations"], list[float]]:
    """The activations of each stage of a rank, and the bytes of `WorkLoad.num_kept`: what each stage keeps of a
    micro-batch, whole, and then halfway.

    Args:
        halved: for each stage whether the gradients of weights are left to another half.
        shares_table: as for `_peak`.
    """
    loss = m.whole_hidden if shares_table else m.whole_hidden + m.table
    stages = [
        _activations(m, layers, loss, is_halved)
        for layers, is_halved in zip(layers_of_stages, halved, strict=True)
    ]
    return stages, [*[stage.kept for stage in stages], *[stage.halfway for stage in stages]]


def _largest(loads: tuple[WorkLoad, ...], kept_bytes: list[float]) -> WorkLoad:
    """The load of most bytes; each stage keeps so many bytes of a micro-batch, whole or halfway."""
    return max(loads, key=lambda load: sum([*map(mul, load.num_kept, kept_bytes), *load.param_bytes]))


def _stored(m: MicroBatch, layers: Layers) -> float:
    """What these layers keep, and the output of the last one."""
    kept, num_full, _ = layers
    return sum(map(mul, kept, m.stored), (num_full + 1) * m.hidden)


def _halfway(m: MicroBatch, layers: Layers) -> float:
    """What these layers keep for the weight half of a backward."""
    kept, num_full, _ = layers
    return sum(map(mul, kept, m.halfway), num_full * m.halfway[0])


@dataclass(frozen=True, slots=True, eq=False)  # caches find it by its identity
class _Activations:
    """Bytes of the activations of one micro-batch in a stage."""

    halved: bool
    """Whether the gradients of weights are left to another half."""
    kept: float
    """All that forward keeps for backward, with what the loss and the modules that predict more tokens keep."""
    halfway: float
    """What they keep between the halves of a backward."""
    forward: MomentActivations
    """Those at the end of a forward."""
    has_logits: bool
    """Whether logits are more there than what the last layer needs."""
    groups: list[tuple[float, float]]
    """What is kept as the backward of each group of parameters begins, and what of it this backward uses up."""
    weight_half: MomentActivations
    """Those at the begin and the end of a weight half, for which its input half has kept all activations."""


def _activations(m: MicroBatch, layers: StageLayers, loss: float, halved: bool) -> _Activations:
    """The activations of a stage.

    Args:
        loss: bytes that a loss keeps for backward.
        halved: whether the gradients of weights are left to another half.
    """
    stage, num_modules = layers.stage, layers.num_modules
    stored = _stored(m, layers.all_layers)
    halfway = _halfway(m, layers.all_layers) if halved else m.hidden
    # All modules that predict more tokens keep until the end what they joined.
    joined = num_modules * (JOINED * m.hidden + m.whole_hidden)
    groups: list[tuple[float, float]] = []
    for kind, remaining, type_number, is_full, *_ in layers.groups:
        if kind == EMBEDDING:
            groups.append((0.0, 0.0))
        elif kind == HEAD:
            groups.append((_stored(m, remaining) + joined, 0.0))
        elif halved:  # its weight half comes later, so that it uses up nothing
            groups.append((stored + halfway - _halfway(m, remaining) + joined, 0.0))
        else:  # the norm has used the output of the layers
            kept = _stored(m, remaining) - m.hidden * stage.has_norm + joined
            groups.append((kept, m.hidden if is_full else m.stored[type_number]))
    earlier_losses = num_modules * (loss + JOINED * m.hidden)
    logits = (m.loss + m.hidden * stage.has_norm + earlier_losses) * stage.has_head
    buffers = m.layers[layers.last_type_number or 0].forward * layers.ends_sparse
    forward = [stored + max(logits, buffers)], [stored]
    # The first gradient of a weight half is that of a norm, with three copies of the residual stream in fp32. Products
    # free their inputs.
    gathered = m.whole_hidden * (m.whole_hidden > m.hidden)
    freed = _halfway(m, layers.all_layers) + layers.all_layers.num_dense * 2 * m.hidden
    half_totals = [stored + max(12 / m.element * m.hidden, gathered), stored - freed + gathered]
    return _Activations(
        halved,
        stored + loss * stage.has_head + earlier_losses,
        halfway,
        forward,
        logits > buffers,
        groups,
        (half_totals, [stored, stored - freed]),
    )


@lru_cache(maxsize=65536)
def _backward(
    m: MicroBatch, p: StageParams, activations: _Activations, adds_in_place: bool, has_table: bool
) -> MomentActivations:
    """Bytes of activations in a backward, or in its input half, in the order of `StageWork.moments`.

    Args:
        adds_in_place: as in `StageWork`.
        has_table: whether the gradient of the head's weights is of this micro-batch alone and not yet taken.
    """
    layers, w = p.layers, m.element
    begins: list[float] = []
    for (stored, released), group in zip(activations.groups, p.groups, strict=True):
        if group.kind == HEAD:
            # The gradients of the loss, and those of the norm with three copies in fp32.
            head = (1 + layers.num_modules) * m.table + w * (p.last or p.first)
            loss = (2 * m.whole_hidden + head * has_table) * layers.stage.has_head
            buffers = max(loss, (2 + 12 / w) * m.hidden)
        elif group.kind == EMBEDDING:
            buffers = m.whole_hidden + w * (p.first + 2 * p.tied)
        elif activations.halved:
            buffers = m.layers[group.type_number].input_half
        else:
            buffers = _layer_buffers(m, group, added_bytes(w, group, adds_in_place)) - released
        begins.append(stored + buffers)
    stored_at_begin = [stored for stored, _ in activations.groups]
    ends, laters = [stored - released for stored, released in activations.groups], [0.0] * len(begins)
    at_copies = stored_at_begin
    return [*begins, *ends, *laters, *at_copies], [*stored_at_begin, *ends, *laters, *at_copies]


def _layer_buffers(m: MicroBatch, group: ParamGroup, added: float) -> float:
    """What the backward of a layer needs, all that the layer keeps included.

    Args:
        added: bytes of the gradients of its weights that are not added in place. They are made one matrix after the
            other, but those of q, k and v last and at once.
    """
    _, _, feed_forward, attention, qkv, qkv_weights, *_ = m.layers[group.type_number]
    one_matrix = min(added, m.element * group.reduced) / 3
    before_qkv, with_qkv = (added - qkv_weights, added) if added > qkv_weights else (0.0, qkv_weights)
    needed_bytes: float = max(feed_forward + one_matrix, attention + before_qkv, qkv + with_qkv)
    return needed_bytes
