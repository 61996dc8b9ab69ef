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
from operator import mul

from ultrabench.allowed import NonNegative, require_allowed
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.stages import Stage, stages_by_rank
from ultrabench.sweep.predict.micro_batch import MicroBatch, micro_batch, rank_tokens
from ultrabench.sweep.predict.pipeline import Work, loads
from ultrabench.sweep.predict.stage_memory import (
    BACKWARD,
    ENDS,
    EVERY,
    FORWARD,
    OPTIMIZER,
    MemoryLimit,
    StageMemory,
)
from ultrabench.sweep.predict.stage_params import EMBEDDING, HEAD, Layers, StageParams, stage_params

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
"""All bytes, the phase, and the bytes of weights, gradients, activations, logits and buffers."""


def ultrabench_memory(spec: RunSpec, c: UltrabenchMemory, which: str = EVERY) -> tuple[StageMemory, ...]:
    """The memory of the ranks of the pipeline axis that `which` asks for.

    In fp64 every number is twice as wide as in fp32. zbv holds up to zbv_margin more than the closed form counts.
    """
    layout, m, memory = spec.layout, micro_batch(spec), list[StageMemory]()
    scale = 2 if spec.kernel.precision == "fp64" else 1
    kept_scale = scale * (1 + c.zbv_margin * (layout.pp_schedule == "zbv"))
    for rank, params in _params_of_ranks(spec, which):
        _, phase, weights, gradients, kept, logits, buffers = max(_moments(spec, m, params, rank))
        buffers = scale * buffers + 16 * layout.gas * rank_tokens(spec)  # the batch: inputs and targets
        kept, logits = kept_scale * kept, scale * logits
        reserve = c.base_bytes + c.fragmentation * (kept + logits + buffers)
        reserve += c.reduce_stream_bytes * sum([p.size.shard for p in params])
        parts = scale * weights, scale * gradients, _state_bytes(spec, params), kept, logits, buffers, reserve
        memory.append(StageMemory(rank, phase, *parts))
    return tuple(memory)


def static_bytes(spec: RunSpec) -> tuple[float, ...]:
    """The bytes that stay from step to step on each rank of the pipeline axis.

    They are 12 n / D, or 24 n / D in fp64, and in a pipeline the last targets.
    """
    targets = 8 * spec.layout.gas * rank_tokens(spec) * (spec.layout.pp > 1)
    return tuple(_state_bytes(spec, params) + targets for _, params in _params_of_ranks(spec, EVERY))


def _state_bytes(spec: RunSpec, params: list[StageParams]) -> float:
    """Masters, moments, the optimizer's count of steps for each parameter, and what stays of routing.

    They are a route that follows from positions, and balance and counts of each router.
    """
    shape, layout, kernel = spec.shape, spec.layout, spec.kernel
    scale = 24.0 if kernel.precision == "fp64" else 12.0
    state = sum([scale * p.size.shard + 4 * p.size.tensors for p in params])
    if shape.num_experts:
        orders = (4 + 2 * (layout.ep > 1)) * (
            kernel.routing != "learned"
        )  # of rows before and after their way
        state += 8 * orders * rank_tokens(spec) / layout.tp * shape.num_experts_per_tok
        routers = sum(shape.num_sparse_layers(p.stage.first_layer, p.stage.num_layers) for p in params)
        state += 12 * shape.num_experts * routers
    return state


def _params_of_ranks(spec: RunSpec, which: str) -> Iterator[tuple[int, list[StageParams]]]:
    shape, layout = spec.shape, spec.layout
    degrees = layout.tp, layout.zero_shards, layout.ep, layout.expert_shards
    is_tied, pipeline = shape.tie_word_embeddings and layout.pp == 1, (layout.pp, layout.virtual_stages)
    for rank, stages in _ranks(shape, *pipeline, layout.pp_schedule, layout.full_every < 2, which):
        yield rank, [stage_params(shape, stage, layout.full_every, is_tied, *degrees) for stage in stages]


@lru_cache(maxsize=4096)
def _ranks(
    shape: ModelShape, pp: int, virtual_stages: int, pp_schedule: str, is_uniform: bool, which: str
) -> list[tuple[int, tuple[Stage, ...]]]:
    """The ranks that `which` asks for, each with its stages.

    An inner rank holds no more than an earlier one with as many layers in each stage; than the first one only under
    1f1b, where that has more micro-batches in flight, since it sends no gradients.
    """
    layout = Layout(dp=1, pp=pp, virtual_stages=virtual_stages, pp_schedule=pp_schedule)
    ranks, seen = [], set[tuple[int, ...]]()
    for rank, stages in enumerate(stages_by_rank(shape, layout)):
        numbers, is_inner = tuple(stage.num_layers for stage in stages), 0 < rank < pp - 1
        is_like_earlier = numbers in seen and pp_schedule != "zbv" and is_uniform
        if not is_inner or which == EVERY or (which != ENDS and not is_like_earlier):
            ranks.append((rank, stages))
        if is_inner or pp_schedule == "1f1b":
            seen.add(numbers)
    return ranks


def _moments(spec: RunSpec, m: MicroBatch, params: list[StageParams], rank: int) -> Iterator[Moment]:
    """The moment of most bytes in each work of a rank."""
    layout, w, number = spec.layout, m.element, len(params)
    schedule, pp, gas, is_zero3 = layout.pp_schedule, layout.pp, layout.gas, layout.zero_stage == 3
    if number > 1:
        gas = min(gas, gas % pp + MOST_ROUNDS * pp)
    elif schedule != "afab":
        gas = min(gas, pp + 2)  # from then on a backward follows each forward
    receives, sends = pp > 1 and (number > 1 or rank < pp - 1), number > 1 or rank > 0
    loss = m.whole_hidden + m.table * (schedule != "afab")  # all losses of afab share one gradient
    kept = [_kept(m, p.layers) + loss * p.stage.has_head for p in params]
    halves = [
        w * p.size.whole * (w == 2 and _halves(spec, p)) for p in params
    ]  # the last gradients, not yet in sums
    load_bytes = (
        *kept, *(_halfway(m, p.layers) for p in params),
        *(4 * p.size.whole + half for p, half in zip(params, halves, strict=True)),
        *(4 * p.size.shard + half for p, half in zip(params, halves, strict=True)),
        *(w * (p.last if is_zero3 else p.size.whole) for p in params),
        *(w * (p.size.whole - p.first - p.last) * is_zero3 for p in params),
    )  # fmt: skip
    for work, of_work in loads(pp, gas, number, schedule, rank, is_zero3):
        p, phase_moments = params[work.chunk], _forward if work.is_forward else _backward
        load = max([[*map(mul, load, load_bytes)] for load in of_work], key=sum)
        is_alone = work.is_first and load[work.chunk] <= kept[work.chunk]
        if moments := [*phase_moments(spec, m, p, work, is_alone)]:
            _, phase, weights, gradients, activations, logits, buffers = max(moments)
            activations += sum(load[: 2 * number]) - kept[work.chunk]
            activations += m.hidden * (receives + (receives + sends) * (not work.is_first))  # messages
            gradients += sum(load[2 * number : 4 * number])
            yield _moment(phase, weights + sum(load[4 * number :]), gradients, activations, logits, buffers)


def _moment(
    phase: str, weights: float, gradients: float, kept: float, logits: float, buffers: float
) -> Moment:
    return weights + gradients + kept + logits + buffers, phase, weights, gradients, kept, logits, buffers


def _kept(m: MicroBatch, layers: Layers) -> float:
    """What these layers keep, and the output of the last one."""
    return layers.dense * m.dense.kept + layers.sparse * m.sparse.kept + (layers.full + 1) * m.hidden


def _halfway(m: MicroBatch, layers: Layers) -> float:
    """What these layers keep for the weight half of a backward."""
    return (layers.dense + layers.full) * m.dense.halfway + layers.sparse * m.sparse.halfway


def _halves(spec: RunSpec, p: StageParams) -> bool:
    """Whether backward of a stage computes gradients of inputs and of weights apart; the first stage has no inputs."""
    return spec.layout.pp_schedule == "zbv" and not p.stage.has_embedding


def _sums_shards(spec: RunSpec) -> bool:
    """Whether each micro-batch reduces its gradients, so that sums of them are shards."""
    return spec.layout.pp == 1 and spec.layout.zero_stage >= 2


def _forward(spec: RunSpec, m: MicroBatch, p: StageParams, work: Work, is_alone: bool) -> Iterator[Moment]:
    """The end of a forward, where it needs more than the backward.

    Args:
        is_alone: whether the stage keeps nothing of other micro-batches.
    """
    shape, stage, is_zero3 = spec.shape, p.stage, spec.layout.zero_stage == 3
    is_sparse = stage.num_layers > 0 and shape.is_sparse(stage.first_layer + stage.num_layers - 1)
    if not (stage.has_head or is_sparse):
        return
    gathered = p.tied or p.last or p.following if is_zero3 else p.size.whole
    if spec.layout.zero_shards > 1 and (
        is_alone or (is_zero3 and (spec.layout.pp == 1 or not stage.has_head))
    ):
        gathered += p.last or p.following  # what was gathered last is still in the buffer of the gather, too
    sums = 4.0 * (p.size.shard if _sums_shards(spec) else p.size.whole) * (not work.is_first)
    logits, buffers = (m.loss + m.hidden, 0.0) if stage.has_head else (0.0, m.sparse.forward)
    yield _moment(FORWARD, m.element * gathered, sums, _kept(m, p.layers), logits, buffers)


def _backward(spec: RunSpec, m: MicroBatch, p: StageParams, work: Work, _: bool) -> Iterator[Moment]:
    """Of each group its backward or, if it needs more, its reduction."""
    layout, w, whole, halves = spec.layout, m.element, p.size.whole, _halves(spec, p)
    is_zero3, sums_shards, reduces_after = (
        layout.zero_stage == 3,
        _sums_shards(spec),
        layout.dp_overlap == "off",
    )
    reduces, frees = work.is_last or sums_shards, work.is_last or (layout.pp == 1 and is_zero3)
    sums = 4.0 * (p.size.shard if sums_shards else whole) * (not work.is_first)
    has_whole_sums = sums > 0 and not sums_shards
    is_in_place = w == 4 and has_whole_sums
    for group in p.groups:
        kind, remaining, is_sparse, is_full, size, reduced, done, done_shard, before, following = group
        if is_zero3 and not work.after_backward:  # forward has freed the layers' parameters
            gathered = done * (not frees) + size * (kind != EMBEDDING) + following + p.tied
        else:
            gathered = whole - done * frees - (p.first - p.tied) * is_zero3
        freed = w * min(gathered, size * frees)
        added = 0 if halves or is_in_place else w * size
        if halves:
            gradients, new, reducing = sums + w * (whole - done) * (w == 2 and sums > 0), 0, 0
        elif not reduces or reduces_after:
            gradients, reducing = sums + 4 * done * (not has_whole_sums), 0
            new = added if has_whole_sums or w == 4 else 4 * reduced + w * size
        elif has_whole_sums:
            gradients, new, reducing = (
                sums - 4 * (done - done_shard),
                4 * reduced + w * (size - reduced),
                4 * before,
            )
        else:
            gradients, new, reducing = sums or 4 * done_shard, 4 * reduced + w * size, 4 * before
        kept, own = _kept(m, remaining), 0.0
        if kind == HEAD:
            has_table = layout.pp_schedule != "afab" or work.is_first
            buffers = (
                2 * m.whole_hidden + has_table * (m.table + w * (p.last or p.first))
                if p.stage.has_head
                else 0.0
            )
        elif kind == EMBEDDING:
            kept, buffers = 0.0, m.whole_hidden + w * (p.first + 2 * p.tied)
        else:
            gradients += w * p.tied  # the gradient of the head
            kept -= m.hidden * p.stage.has_norm  # the output of the last layer
            layer = m.sparse if is_sparse else m.dense
            own = m.hidden if is_full else layer.kept
            buffers = max(layer.feed_forward + added / 3, layer.attention + added) - own
            if halves:
                kept = _kept(m, p.layers) + _halfway(m, p.layers) - _halfway(m, remaining)
                own = 0.0
        if reducing + own + buffers > new - freed:
            yield _moment(BACKWARD, w * gathered, gradients + reducing, kept, 0.0, buffers)
        else:
            phase = OPTIMIZER if kind == EMBEDDING and reduces else BACKWARD
            yield _moment(phase, w * gathered - freed, gradients + new, kept - own, 0.0, 0.0)
        if reduces and reduces_after:
            gradients = sums * sums_shards + 4 * (whole - done + done_shard + size)
            yield _moment(OPTIMIZER, w * whole * (not frees), gradients, 0.0, 0.0, 0.0)
