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
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import le
from typing import NamedTuple

from ultrabench.allowed import NonNegative, require_allowed
from ultrabench.kernel_config import ELEMENT_BYTES
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.experts import busiest_share
from ultrabench.sweep.predict.micro_batch import MicroBatch, Tokens, micro_batch, route_bytes
from ultrabench.sweep.predict.rank_state import Handling, State, states_of_rank
from ultrabench.sweep.predict.stage_memory import (
    BACKWARD,
    ENDS,
    EVERY,
    FORWARD,
    OPTIMIZER,
    MemoryLimit,
    StageMemory,
)
from ultrabench.sweep.predict.stage_params import (
    OUTSIDE,
    Cut,
    ParamGroup,
    StageParams,
    params_of_rank,
    stages_of_ranks,
)

MOST_ROUNDS = 4
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


Moment = tuple[float, str, float, float, float, float, float]
"""All bytes, the phase, and the bytes of gathered weights, gradients, activations, logits and buffers."""


class GroupBytes(NamedTuple):
    """Bytes of the stage's weights and gradients around the backward of a group, which do not depend on tokens."""

    group: ParamGroup
    weights: float
    """Gathered parameters as the backward begins."""
    freed: float
    """Those of them that are freed as it ends."""
    gradients: float
    """Gradients of groups before and sums of earlier micro-batches."""
    reducing: float
    """The gradients of the group before, whose reduction is under way."""
    new: float
    """The group's own gradients as they are reduced, and those that wait for it."""
    added: float
    """Gradients of the group's weights that are not added in place."""
    at_once: float
    """Gradients of gate and up of its experts, which exist together before they are added in place."""
    waiting: float
    """Gradients of the layer around experts, which are not reduced yet."""
    least_work: float
    """What its backward needs at least beside what is kept."""
    phase: str
    """The phase as the group's gradients are reduced."""
    update: Moment | None
    """The reduction after the backward."""


def _activations(
    cut: Cut, m: MicroBatch, state: State, group_bytes: tuple[GroupBytes, ...]
) -> Iterator[tuple[float, float, float]]:
    """The activations of each group as its backward begins, those that it uses up, and what it needs beside them."""
    p, stage, shape = state.params, state.params.stage, cut.shape
    kept, sent = state.activations + m.kept_by(shape, stage), m.hidden * (not stage.has_norm)
    work = 0.0 if stage.has_norm or stage.has_head else 3 * m.hidden
    table = 0.0 if state.is_drained or not stage.has_head else m.table
    if stage.has_head:
        work = 2 * m.whole_hidden + m.table_kept * (not state.is_drained) + table
    if stage.has_norm:
        work = max(work, m.hidden * stage.has_head + m.norm + table)
    yield kept, 0.0, work
    for of_group in group_bytes[1:]:
        group = of_group.group
        if group.layer == OUTSIDE:
            yield state.activations, 0.0, m.whole_hidden + m.word * p.first.whole * (3 if p.is_tied else 1)
            continue
        through = group.layer - stage.first_layer + 1
        kept = state.activations + sent + m.layers_kept(shape, stage.first_layer, through)
        own = m.layer_kept(group.layer, is_sparse=group.is_sparse)
        if state.handling.halves:
            kept = state.activations + m.kept_by(shape, stage) + m.halfway(shape, stage, group.layer + 1)
            half = m.halfway(shape, stage, group.layer) - m.halfway(shape, stage, group.layer + 1)
            yield kept, 0.0, max(_layer_work(m, of_group) - own, half + m.hidden + m.norm)
        elif group.is_sparse and not group.is_experts:  # its backward is over
            yield kept - own, 0.0, of_group.added
        else:
            yield kept, own, _layer_work(m, of_group) - own - (sent if through == stage.num_layers else 0)


def _layer_work(m: MicroBatch, of_group: GroupBytes) -> float:
    """What the backward of a layer needs at most, all that it keeps included."""
    new, layer = of_group.added, m.sparse
    if not of_group.group.is_sparse:
        return max(m.dense.feed_forward + new / 3, m.dense.attention + new)
    return max(
        layer.feed_forward + new / 3,
        layer.sent + new + of_group.at_once,
        layer.attention + new + of_group.waiting,
    )


@lru_cache(maxsize=65536)
def _group_bytes(p: StageParams, handling: Handling) -> tuple[GroupBytes, ...]:
    """The bytes of the groups of a stage among which is that of its peak, in the order of backward."""
    # Where weights and gradients stay as they are, activations only get less.
    only_falls = handling.has_sums and not (handling.reduces or handling.regathers or handling.halves)
    groups = p.top_groups if only_falls else p.groups
    return tuple(_bytes_of(p, handling, group) for group in groups)


def _bytes_of(p: StageParams, handling: Handling, group: ParamGroup) -> GroupBytes:
    w, is_zero3, sums_shards, reduces_after, has_sums, reduces, frees, regathers, halves = handling
    size, done, is_layer = group.size, group.done, group.layer != OUTSIDE
    params, reduced, is_sharded = size.whole, done.whole - done.shard, size.shard < size.whole
    in_place = w == 4 and has_sums and not sums_shards
    is_embedding = p.first.whole > 0 and done.whole + params == p.whole.whole
    old_sums, least_work = p.sums_bytes(sums_shards) * has_sums, 0.0
    if regathers:
        tied = p.first.whole if p.is_tied else 0
        gathered = (0 if frees else done.whole) + tied + (0 if is_embedding else params)
        gathered += group.around + group.following
        if is_layer and not group.following and is_sharded:
            least_work = w * params
    else:
        gathered = p.whole.whole - done.whole * frees - (p.first.whole if is_zero3 and not p.is_tied else 0)
    update = None
    if reduces and reduces_after:
        of_sums = old_sums * sums_shards + 4 * (p.whole.whole - reduced)
        update = _moment(OPTIMIZER, w * p.whole.whole * (not frees), of_sums + 4 * params, 0.0, 0.0, 0.0)
    # fully_shard refers to the gradient of a group's last matrix until it is reduced.
    alone, added = 0 if is_layer or p.is_tied else params, 0 if in_place else w * params
    if not reduces or reduces_after:
        is_sum = has_sums and not sums_shards
        sums, reducing = old_sums + 4.0 * done.whole * (not is_sum), 0
        new: float = added if is_sum or w == 4 else 4 * params + w * alone
    elif has_sums and not sums_shards:
        sums, reducing = old_sums - 4 * reduced, 4 * group.before
        new = 4 * (params + (size.shard if alone and is_sharded else 0))
    else:
        sums, reducing = old_sums or 4.0 * done.shard, 4 * group.before
        new = max((w + 4) * params, 4 * (params + size.shard) + w * alone * is_sharded)
    if halves:
        sums, new, added = old_sums + w * (p.whole.whole - done.whole) * has_sums * (w == 2), 0, 0
    waiting, phase = (
        0 if in_place or halves else w * group.around,
        OPTIMIZER if is_embedding and reduces else BACKWARD,
    )
    at_once = w * params * 2 / 3 * (in_place and group.is_experts)
    freed = w * min(gathered, params * frees)
    return GroupBytes(
        group,
        w * gathered,
        freed,
        sums,
        reducing,
        new + waiting,
        added,
        at_once,
        waiting,
        least_work,
        phase,
        update,
    )


def _moments(cut: Cut, m: MicroBatch, state: State) -> Iterator[Moment]:
    """The end of a forward; or of each group its backward or, if it needs more, its reduction."""
    p = state.params
    if state.is_forward:
        last = p.first.whole if p.is_tied else p.last.whole or p.top_following
        gathered = m.word * ((last if cut.zero_stage == 3 else p.whole.whole) + state.copied)
        all_bytes = state.other_gradients + state.sums
        kept = state.activations + m.kept_by(cut.shape, p.stage)
        kept += m.angles * (not p.stage.num_layers)  # those of a stage with layers stay
        logits, work = 0.0, m.forward(cut.shape, p.stage)
        if p.stage.has_head:
            logits, work = m.loss + m.hidden * p.stage.has_norm, 0.0
        yield _moment(FORWARD, state.other_weights + gathered, all_bytes, kept, logits, work)
        return
    group_bytes = _group_bytes(p, state.handling)
    for of_group, (kept, own, work) in zip(
        group_bytes, _activations(cut, m, state, group_bytes), strict=True
    ):
        group, gathered_weights, freed, sums, reducing, new, _, _, _, least_work, phase, update = of_group
        if update:
            yield update
        if work < least_work:
            work = least_work
        weights = state.other_weights + gathered_weights
        gradients = state.other_gradients + sums + (m.table if p.is_tied and group.layer != OUTSIDE else 0.0)
        if reducing + own + work > new - freed:
            yield _moment(BACKWARD, weights, gradients + reducing, kept, 0.0, work)
        else:
            yield _moment(phase, weights - freed, gradients + new, kept - own, 0.0, 0.0)


def _moment(phase: str, weights: float, gradients: float, kept: float, logits: float, work: float) -> Moment:
    return weights + gradients + kept + logits + work, phase, weights, gradients, kept, logits, work


Peak = tuple[int, tuple[StageParams, ...], Moment]
"""A rank of the pipeline axis, its stages, and the moment at which it holds most."""


@lru_cache(maxsize=16384)
def _peaks(cut: Cut, gas: int, m: MicroBatch, which: str) -> tuple[Peak, ...]:
    """The moment of its peak of each rank that `which` asks for."""
    peaks, larger = list[Peak](), list[tuple[int, ...]]()
    all_stages = stages_of_ranks(cut.shape, cut.pp, cut.virtual_stages, cut.pp_schedule)
    for rank, stages in enumerate(all_stages):
        # An inner rank holds no more than an earlier one with as many layers in each stage; than the first one only
        # under 1f1b, where that has more micro-batches in flight, since it sends no gradients.
        is_inner = 0 < rank < cut.pp - 1 and cut.pp_schedule != "zbv" and m.full_every < 2
        layers = tuple([stage.num_layers for stage in stages])
        if which == ENDS and 0 < rank < cut.pp - 1:
            continue
        if which != EVERY and is_inner and any(all(map(le, layers, others)) for others in larger):
            continue
        if is_inner or cut.pp_schedule == "1f1b":
            larger.append(layers)
        moments = (
            moment for state in states_of_rank(cut, gas, m, rank) for moment in _moments(cut, m, state)
        )
        peaks.append((rank, params_of_rank(cut, rank), max(moments)))
    return tuple(peaks)


def ultrabench_memory(spec: RunSpec, c: UltrabenchMemory, which: str = EVERY) -> tuple[StageMemory, ...]:
    """The memory of the ranks of the pipeline axis that `which` asks for.

    In fp64 every number is twice as wide as in fp32. zbv holds up to zbv_margin more than the closed form counts.
    """
    layout, cut, scale = spec.layout, _cut(spec), 2 if spec.kernel.precision == "fp64" else 1
    tokens, gas, is_afab = (
        layout.mbs * spec.workload.seq_len // layout.cp,
        layout.gas,
        layout.pp_schedule == "afab",
    )
    on_rank = rank_tokens(spec)
    m = micro_batch(spec.shape, on_rank, layout.full_every, min(gas, 3) if is_afab else 1)
    if layout.virtual_stages > 1:
        gas = min(gas, gas % layout.pp + MOST_ROUNDS * layout.pp)
    elif not is_afab:
        gas = min(gas, layout.pp + 2)  # from then on a backward follows each forward
    memory, kept_scale = list[StageMemory](), scale * (1 + c.zbv_margin * (layout.pp_schedule == "zbv"))
    for rank, stages, moment in _peaks(cut, gas, m, which):
        _, phase, weights, gradients, kept, logits, work = moment
        buffers = scale * work + 16 * layout.gas * tokens  # the batch: inputs and targets
        kept, logits = kept_scale * kept, scale * logits
        reserve = c.base_bytes + c.fragmentation * (kept + logits + buffers)
        reserve += c.reduce_stream_bytes * sum([p.whole.shard for p in stages])
        optimizer = _optimizer_bytes(stages, scale) + _routing_bytes(spec.shape, on_rank, stages)
        memory.append(
            StageMemory(
                rank, phase, scale * weights, scale * gradients, optimizer, kept, logits, buffers, reserve
            )
        )
    return tuple(memory)


def _cut(spec: RunSpec) -> Cut:
    layout = spec.layout
    alone, stage = layout.pp == 1, layout.zero_stage
    degrees = layout.tp, layout.pp, layout.virtual_stages, layout.pp_schedule
    reduces_each, frees_each, after = alone and stage >= 2, alone and stage == 3, layout.dp_overlap == "off"
    of_experts = layout.ep, layout.expert_shards
    return Cut(
        spec.shape,
        *degrees,
        stage,
        layout.zero_shards,
        reduces_each,
        frees_each,
        after,
        layout.full_every,
        *of_experts,
    )


def _optimizer_bytes(stages: tuple[StageParams, ...], scale: int) -> float:
    """Bytes of masters and moments, and of the optimizer's count of steps for each parameter."""
    return sum([scale * 12.0 * p.whole.shard + 4 * p.whole.tensors for p in stages])


def static_bytes(spec: RunSpec) -> tuple[float, ...]:
    """The bytes that stay from step to step on each rank of the pipeline axis.

    They are 12 n / D, or 24 n / D in fp64, and in a pipeline the last targets.
    """
    cut, layout, scale = _cut(spec), spec.layout, 2 if spec.kernel.precision == "fp64" else 1
    targets = 8 * layout.gas * layout.mbs * spec.workload.seq_len // layout.cp if layout.pp > 1 else 0
    tokens = rank_tokens(spec)
    ranks = (params_of_rank(cut, rank) for rank in range(layout.pp))
    return tuple(
        _optimizer_bytes(stages, scale) + _routing_bytes(spec.shape, tokens, stages) + targets
        for stages in ranks
    )


def rank_tokens(spec: RunSpec) -> Tokens:
    """The tokens of a micro-batch on a rank."""
    layout = spec.layout
    return Tokens(
        layout.mbs * spec.workload.seq_len // layout.cp, spec.workload.seq_len // layout.cp, layout.tp, layout.sequence_parallel == "on", layout.cp,
        layout.cp_exchange, layout.recompute, min(4, ELEMENT_BYTES[spec.kernel.precision]), spec.compiles,
        busiest_share(spec.kernel, layout, spec.shape), layout.ep, spec.kernel.routing == "learned",
        spec.kernel.precision == "fp8",
    )  # fmt: skip


def _routing_bytes(shape: ModelShape, tokens: Tokens, stages: tuple[StageParams, ...]) -> float:
    """Bytes of routing that stay: a route that follows from positions, and balance and counts of each router."""
    if not shape.num_experts:
        return 0.0
    layers = sum(shape.num_sparse_layers(p.stage.first_layer, p.stage.num_layers) for p in stages)
    return route_bytes(shape, tokens) * (not tokens.learned) + 12 * shape.num_experts * layers
