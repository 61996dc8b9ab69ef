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
from operator import mul

from ultrabench.allowed import NonNegative, require_allowed
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.micro_batch import MicroBatch, micro_batch, rank_tokens
from ultrabench.sweep.predict.pipeline import Work, loads
from ultrabench.sweep.predict.stage_memory import (
    BACKWARD,
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
    Layers,
    ParamGroup,
    StageParams,
    params_of_ranks,
)

MAX_ROUNDS = 4
"""Number of rounds of pp micro-batches that are looked at; later ones are like the first ones."""


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
    layout, m, memory = spec.layout, micro_batch(spec), list[StageMemory]()
    scale = 2 if spec.kernel.precision == "fp64" else 1
    stored_scale = scale * (1 + constants.zbv_margin * (layout.pp_schedule == "zbv"))
    for rank, params in params_of_ranks(spec, ranks):
        _, phase, weights, gradients, stored, logits, buffers = max(_moments(spec, m, params, rank))
        # The batch: inputs and targets.
        num_token_ids = 2 + spec.shape.num_nextn_predict_layers
        buffers = scale * buffers + 8 * num_token_ids * layout.gas * rank_tokens(spec)
        stored, logits = stored_scale * stored, scale * logits
        reserve = constants.base_bytes + constants.fragmentation * (stored + logits + buffers)
        reserve += constants.reduce_stream_bytes * sum([p.size.shard for p in params])
        weights, gradients, optimizer = scale * weights, scale * gradients, _state_bytes(spec, params)
        memory.append(
            StageMemory(rank, phase, weights, gradients, optimizer, stored, logits, buffers, reserve)
        )
    return tuple(memory)


def static_bytes(spec: RunSpec) -> tuple[float, ...]:
    """The bytes that stay from step to step on each rank of the pipeline axis.

    They are 12 n / D, or 24 n / D in fp64, and in a pipeline the last targets.
    """
    num_targets = 1 + spec.shape.num_nextn_predict_layers
    target_bytes = 8 * num_targets * spec.layout.gas * rank_tokens(spec) * (spec.layout.pp > 1)
    return tuple(_state_bytes(spec, params) + target_bytes for _, params in params_of_ranks(spec, EVERY))


def least_rank(shape: ModelShape, num_ranks: int) -> StageMemory:
    """What some rank holds at least in any layout: its share of masters, moments and sums of gradients.

    Every parameter has a master, two moments and, as the last gradients are reduced, a gradient of 4 bytes on at least
    one rank, so the rank that holds most has 16 N / ranks.
    """
    num_params = shape.num_params / num_ranks
    return StageMemory(0, OPTIMIZER, 0.0, 4 * num_params, 12 * num_params, 0.0, 0.0, 0.0, 0.0)


def _state_bytes(spec: RunSpec, params: list[StageParams]) -> float:
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


def _moments(spec: RunSpec, m: MicroBatch, params: list[StageParams], rank: int) -> Iterator[Moment]:
    """The moment of most bytes in each work of a rank."""
    layout, w, num_stages = spec.layout, m.element, len(params)
    schedule, pp, gas, is_zero3 = layout.pp_schedule, layout.pp, layout.gas, layout.zero_stage == 3
    if num_stages > 1:
        gas = min(gas, gas % pp + MAX_ROUNDS * pp)
    elif schedule != "afab":
        gas = min(gas, pp + 2)  # from then on a backward follows each forward
    sums_shards = _sums_shards(layout)
    has_receives, has_sends = pp > 1 and (num_stages > 1 or rank < pp - 1), num_stages > 1 or rank > 0
    loss = m.whole_hidden + m.table * (schedule != "afab")  # all losses of afab share one gradient
    num_modules = spec.shape.num_nextn_predict_layers
    joined = num_modules * (loss + JOINED * m.hidden)
    stored = [_stored(m, p.layers) + (loss + joined) * p.stage.has_head for p in params]
    load_bytes = (
        *stored, *(_halfway(m, p.layers) if _is_halved(spec, p) else m.hidden for p in params),
        *(4 * p.size.whole for p in params), *(w * _num_unsummed(p) for p in params),
        *(4 * p.size.shard for p in params), *(w * (p.last if is_zero3 else p.size.whole) for p in params),
        *(w * (p.size.whole - p.first - p.last) * is_zero3 for p in params),
    )  # fmt: skip
    for work, work_loads in loads(pp, gas, num_stages, schedule, rank, is_zero3, w == 2):
        p = params[work.chunk]
        if work.kind == "forward" and not (p.stage.has_head or p.ends_sparse):
            continue  # it needs less than the backward
        load = max([[*map(mul, counts, load_bytes)] for counts in work_loads], key=sum)
        is_later = work.has_sums or work.unsummed != 0
        sum_bytes = 4.0 * (p.size.shard if sums_shards else p.size.whole) * work.has_sums
        if work.kind == "forward":
            is_alone = not is_later and load[work.chunk] <= stored[work.chunk]
            sums = sum_bytes + w * _num_unsummed(p) * work.unsummed
            moment = _forward(spec, m, p, sums, is_alone=is_alone, after_backward=work.after_backward)
        elif work.kind == "weight":
            moment = max(_weight_half(m, p, work, sum_bytes))
        else:
            moment = max(_backward(spec, m, p, work, sum_bytes))
        _, phase, weights, gradients, activations, logits, buffers = moment
        activations += sum(load[: 2 * num_stages]) - stored[work.chunk]
        activations += m.hidden * (has_receives + (has_receives + has_sends) * is_later)  # messages
        gradients += sum(load[2 * num_stages : 5 * num_stages])
        yield _moment(phase, weights + sum(load[5 * num_stages :]), gradients, activations, logits, buffers)


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


def _is_halved(spec: RunSpec, p: StageParams) -> bool:
    """Whether backward of a stage computes gradients of inputs and of weights apart; the first stage has no inputs."""
    return spec.layout.pp_schedule == "zbv" and not p.stage.has_embedding


def _num_unsummed(p: StageParams) -> int:
    """The parameters whose gradients a weight half leaves unsummed."""
    return p.last or p.size.whole


def _sums_shards(layout: Layout) -> bool:
    """Whether each micro-batch reduces its gradients."""
    return layout.pp == 1 and layout.zero_stage >= 2


def _forward(
    spec: RunSpec, m: MicroBatch, p: StageParams, sums: float, *, is_alone: bool, after_backward: bool
) -> Moment:
    """The end of a forward.

    Args:
        sums: bytes of gradients of earlier micro-batches.
        is_alone: whether the stage keeps nothing of other micro-batches.
        after_backward: whether the stage's pass before was a backward.
    """
    layout, has_head, is_zero3 = spec.layout, p.stage.has_head, spec.layout.zero_stage == 3
    gathered = p.tied or p.last or p.following if is_zero3 else p.size.whole
    # What was gathered last is still in the buffer of the gather, too. In a pipeline a backward leaves layers gathered.
    if layout.zero_shards > 1:
        if is_zero3 and layout.pp > 1 and after_backward:
            gathered += p.first
        elif is_alone or (is_zero3 and (layout.pp == 1 or not has_head)):
            gathered += p.last or p.following
    num_modules = spec.shape.num_nextn_predict_layers
    kept_loss = m.whole_hidden + m.table * (layout.pp_schedule != "afab")
    logits, buffers = (
        (m.loss + m.hidden * p.stage.has_norm + num_modules * (kept_loss + JOINED * m.hidden)) * has_head,
        m.layers[p.last_type_number].forward * p.ends_sparse,
    )
    logits, buffers = (logits, 0.0) if logits > buffers else (0.0, buffers)
    return _moment(FORWARD, m.element * gathered, sums, _stored(m, p.layers), logits, buffers)


def _backward(spec: RunSpec, m: MicroBatch, p: StageParams, work: Work, sums: float) -> Iterator[Moment]:
    """The moment of most bytes of each group of parameters: its backward, or the reduction of its gradients."""
    layout, w, whole, halved = spec.layout, m.element, p.size.whole, _is_halved(spec, p)
    is_zero3, reduces_after = layout.zero_stage == 3, layout.dp_overlap == "off"
    sums_shards = _sums_shards(layout)
    reduces, frees = work.is_last or sums_shards, work.is_last or (layout.pp == 1 and is_zero3)
    has_whole_sums = sums > 0 and not sums_shards
    has_table = layout.pp_schedule != "afab" or not work.has_sums
    for group in p.groups:
        size, finished = group.whole, group.finished
        gathered = whole - finished * frees - (p.first - p.tied) * is_zero3
        if is_zero3 and not work.after_backward:  # forward has freed the layers' parameters
            is_gathered = group.kind != EMBEDDING or (sums > 0 and not frees)
            gathered = finished * (not frees) + size * is_gathered + group.following + p.tied
        freed, added_bytes = w * size * frees, 0.0 if halved else float(w * size)
        if w == 4 and has_whole_sums:  # fp32 is added in place, but that of gate and up of experts at once
            added_bytes = 8 / 3 * group.reduced * group.is_sparse
        if halved:
            unsummed = w * max(0, _num_unsummed(p) - finished) + 4 * finished * (not work.has_sums)
            gradients, new, reducing = sums + unsummed * work.unsummed, 0.0, 0
        elif not reduces or reduces_after:
            gradients, reducing = sums + 4 * finished * (not has_whole_sums), 0
            new = added_bytes if has_whole_sums or w == 4 else 4.0 * group.reduced + w * size
        else:
            finished_bytes = 4 * group.finished_shard
            gradients = sums - 4 * finished + finished_bytes if has_whole_sums else sums or finished_bytes
            reducing, new = 4 * group.before, 4.0 * group.reduced + w * size * (not has_whole_sums)
            if layout.zero_shards == 1 and not has_whole_sums:  # the result is as large
                new = max(new, 8.0 * group.reduced + w * (size - group.reduced))
            if group.kind != LAYER and layout.zero_shards > 1:
                new += 4 * size / layout.zero_shards
        modules = spec.shape.num_nextn_predict_layers * p.stage.has_head
        stored, released, buffers = _work(
            m, p, group, added_bytes, modules, has_table=has_table, halved=halved
        )
        gradients += w * p.tied * (group.kind == LAYER)  # the gradient of the head
        if reducing + released + buffers > new - freed:
            yield _moment(BACKWARD, w * gathered, gradients + reducing, stored, 0.0, buffers)
        else:
            phase = OPTIMIZER if group.kind == EMBEDDING and reduces else BACKWARD
            yield _moment(phase, w * gathered - freed, gradients + new, stored - released, 0.0, 0.0)
        if reduces and reduces_after:
            gradients = sums * sums_shards + 4 * (whole - finished + group.finished_shard + size)
            yield _moment(OPTIMIZER, w * whole * (not frees), gradients, 0.0, 0.0, 0.0)


def _weight_half(m: MicroBatch, p: StageParams, work: Work, sums: float) -> Iterator[Moment]:
    """The begin and the end of the weight half of a backward, for which its input half has kept all activations.

    The first gradient is that of a norm, with three copies of the residual stream in fp32. Products free their inputs.
    """
    w, whole = m.element, p.size.whole
    sums += w * _num_unsummed(p) * work.unsummed
    gathered, stored = m.whole_hidden * (m.whole_hidden > m.hidden), _stored(m, p.layers)
    yield _moment(BACKWARD, w * whole, sums, stored, 0.0, max(12 / w * m.hidden, gathered))
    new = w * whole * (not work.unsummed and (w == 2 or not work.has_sums))
    freed = _halfway(m, p.layers) + p.layers.num_dense * 2 * m.hidden
    yield _moment(BACKWARD, w * whole, sums + new, stored - freed, 0.0, gathered)


def _work(
    m: MicroBatch,
    p: StageParams,
    group: ParamGroup,
    added: float,
    num_modules: int = 0,
    *,
    has_table: bool,
    halved: bool,
) -> tuple[float, float, float]:
    """The activations as the backward of a group begins, those that it uses up, and what it needs beside them.

    Args:
        added: bytes of the gradients of its weights that are not added in place.
        num_modules: modules that predict one more token each, of which all keep what they joined until the end.
        has_table: whether the gradient of the head's weights is not yet taken.
        halved: whether the gradients of weights are left to another half.
    """
    joined = num_modules * (JOINED * m.hidden + m.whole_hidden)
    stored = _stored(m, group.remaining) + joined
    if group.kind == EMBEDDING:
        return 0.0, 0.0, m.whole_hidden + m.element * (p.first + 2 * p.tied)
    if group.kind == HEAD:
        # The gradients of the loss, and those of the norm with three copies in fp32.
        num_losses = 1 + num_modules
        loss = 2 * m.whole_hidden + (num_losses * m.table + m.element * (p.last or p.first)) * has_table
        return stored, 0.0, max(loss * p.stage.has_head, (2 + 12 / m.element) * m.hidden)
    layer = m.layers[group.type_number]
    if halved:
        kept = _stored(m, p.layers) + _halfway(m, p.layers) - _halfway(m, group.remaining) + joined
        return kept, 0.0, layer.input_half
    released = m.hidden if group.is_full else layer.stored
    # Gradients of weights are made one matrix after the other, those of q, k and v last and at once.
    one_matrix = min(added, m.element * group.reduced) / 3
    before_qkv, with_qkv = max(0.0, added - layer.qkv_weights), max(added, layer.qkv_weights)
    buffers = (
        max(layer.feed_forward + one_matrix, layer.attention + before_qkv, layer.qkv + with_qkv) - released
    )
    stored -= m.hidden * p.stage.has_norm  # the norm has used the output of the layers
    return stored, released, buffers
