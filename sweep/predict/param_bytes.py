"""The bytes of parameters and of their gradients in each work of a rank of our own kernel.

They do not depend on the tokens of a micro-batch, so the layouts of a plan share them. The symbols are those of
`ultrabench_memory`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from operator import le, mul
from typing import NamedTuple

from ultrabench.kernel_config import ELEMENT_BYTES
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.pipeline import Load, Work, loads
from ultrabench.sweep.predict.stage_memory import BACKWARD, OPTIMIZER
from ultrabench.sweep.predict.stage_params import (
    EMBEDDING,
    HEAD,
    LAYER,
    Degrees,
    ParamGroup,
    Pipeline,
    StageParams,
    params_of_ranks,
)

MAX_ROUNDS = 4
"""Number of rounds of pp micro-batches that are looked at; later ones are like the first ones."""


class ParamHandling(NamedTuple):
    """What decides, beside the stages, which parameters and gradients a rank holds at a moment."""

    zero_stage: int
    dp_overlap: str
    element: int
    """Bytes of a number in forward and backward: w."""
    copies_experts: bool
    """Whether torch copies the gradients of experts to divide them by 1: where a single rank of each shard group holds
    them, and ranks of other groups do, too."""

    @property
    def is_zero3(self) -> bool:
        """Whether ranks gather parameters for each pass."""
        return self.zero_stage == 3

    def sums_shards(self, pp: int) -> bool:
        """Whether each micro-batch reduces its gradients."""
        return pp == 1 and self.zero_stage >= 2


class GroupBytes(NamedTuple):
    """Bytes of parameters in the backward of a group of them."""

    group_index: int
    """Index of the group among those of `StageLayers`."""
    kind: str
    """The kind of the group."""
    phase: str
    """The phase of the end of this backward."""
    weights: float
    """Those to compute with that are gathered as it begins."""
    gradients: float
    """Sums and gradients of others."""
    reducing: float
    """Gradients whose reduction is under way as it begins."""
    new: float
    """Gradients that are there at its end."""
    freed: float
    """Weights that are freed at its end."""
    added: float
    """Gradients that are not added in place."""
    one_matrix: float
    """Those of one matrix of them."""
    further: float
    """What norm, head or embedding need beside activations."""
    is_input_half: bool
    """Whether the gradients of weights are left to another half."""
    copied: float
    """Those of the buffer of its gather, less those of the next layer, which is gathered after they are copied."""
    reduced_later: tuple[float, float] | None
    """Bytes of weights and gradients while its gradients are reduced after backward; None if they are not."""


class WorkLoad(NamedTuple):
    """What the stages of a rank hold beside the work."""

    num_kept: tuple[int, ...]
    """Micro-batches whose activations each stage keeps, and then those whose halfway gradients each stage keeps."""
    is_alone: bool
    """Whether the stage at work keeps nothing of other micro-batches."""
    param_bytes: tuple[float, ...] = ()
    """Bytes of gradients, then of weights, of stages that are not at work."""
    gradients: float = 0
    weights: float = 0


@dataclass(frozen=True, slots=True, eq=False)  # caches find it by its identity
class StageWork:
    """Bytes of parameters of a stage at work."""

    params: StageParams
    work: Work
    is_halved: bool
    """Whether backward computes gradients of inputs and of weights apart."""
    sums: float
    """Bytes of the sums of gradients of earlier micro-batches."""
    gathered: tuple[float, float]
    """Bytes of the weights that are gathered at the end of a forward, and the same of a stage that is alone."""
    groups: tuple[GroupBytes, ...]
    """Those of a backward."""


WorkBytes = tuple[StageWork, int, tuple[WorkLoad, ...]]
"""The stage at work, the number of messages between stages that are alive, and the loads of the rank."""


class RankLoads(NamedTuple):
    """A work of a rank, and what its stages hold beside it, in numbers that no model decides."""

    work: Work
    num_messages: int
    loads: tuple[WorkLoad, ...]
    counts: tuple[Load, ...]
    """For each of the loads what weighs in it of stages that are not at work; see `pipeline.Load`."""


class RankBytes(NamedTuple):
    """What a rank of the pipeline axis holds of parameters."""

    rank: int
    params: tuple[StageParams, ...]
    """Those of its stages."""
    halved: tuple[bool, ...]
    """For each stage whether backward computes gradients of inputs and of weights apart."""
    num_shard: int
    """Parameters of all its stages whose masters it keeps."""
    num_tensors: int
    works: tuple[WorkBytes, ...]
    """The works among which is that of the peak."""


class RankWork(NamedTuple):
    """What decides the bytes of parameters of ranks of the pipeline axis."""

    shape: ModelShape
    pipeline: Pipeline
    degrees: Degrees
    handling: ParamHandling
    gas: int
    """Micro-batches of a step, without those after which no work is different."""
    ranks: str
    """The ranks that are asked for, a word of `stage_memory`."""


def rank_work(spec: RunSpec, ranks: str) -> RankWork:
    """What decides the bytes of parameters of these ranks of a run."""
    layout, gas = spec.layout, spec.layout.gas
    if layout.virtual_stages > 1:
        gas = min(gas, gas % layout.pp + MAX_ROUNDS * layout.pp)
    elif layout.pp_schedule != "afab":
        gas = min(gas, layout.pp + 2)  # from then on a backward follows each forward
    element = min(4, ELEMENT_BYTES[spec.kernel.precision])
    copies_experts = layout.zero_stage > 0 and layout.expert_shards == 1 < layout.expert_copies
    handling = ParamHandling(layout.zero_stage, layout.dp_overlap, element, copies_experts)
    return RankWork(spec.shape, Pipeline.of(layout), Degrees.of(layout), handling, gas, ranks)


@lru_cache(maxsize=16384)  # 1,960 of the playbook's 6,576 layouts differ in it
def rank_bytes(work: RankWork) -> tuple[RankBytes, ...]:
    """What the ranks that are asked for hold of parameters."""
    shape, pipeline, degrees, handling, gas, ranks = work
    return tuple([
        RankBytes(
            rank,
            params,
            tuple([_is_halved(pipeline, p) for p in params]),
            sum([p.size.shard(degrees) for p in params]),
            sum([p.size.tensors for p in params]),
            tuple(_works(pipeline, degrees, handling, gas, params, rank)),
        )
        for rank, params in params_of_ranks(shape, pipeline, degrees, ranks)
    ])  # fmt: skip


def _works(
    pipeline: Pipeline,
    degrees: Degrees,
    handling: ParamHandling,
    gas: int,
    params: tuple[StageParams, ...],
    rank: int,
) -> Iterator[WorkBytes]:
    """The works of a rank but forwards that need less than the backward."""
    pp, schedule, num_stages = pipeline.pp, pipeline.pp_schedule, len(params)
    sums_shards = handling.sums_shards(pp)
    load_bytes = _load_bytes(degrees, handling, params) if num_stages > 1 else ()
    of_rank = pp, gas, num_stages, schedule, rank, handling.is_zero3, handling.element == 2
    for work, num_messages, work_loads, counts in _rank_loads(*of_rank):
        p = params[work.chunk]
        if work.kind == "forward" and not (p.layers.stage.has_head or p.layers.ends_sparse):
            continue  # it needs less than the backward
        # The number of shards decides nothing where no gradients are reduced.
        reduced_by = degrees if work.is_last or sums_shards else None
        stage_work = _stage_work(pipeline, handling, p, work, reduced_by)
        if num_stages > 1:  # else no stage waits
            work_loads = tuple(map(_weighed, work_loads, counts, repeat(load_bytes)))
        yield stage_work, num_messages, work_loads


@lru_cache(maxsize=4096)
def _rank_loads(
    pp: int, gas: int, num_stages: int, pp_schedule: str, rank: int, is_zero3: bool, widens: bool
) -> tuple[RankLoads, ...]:
    """The works of a rank with what its stages hold; the arguments are those of `pipeline.loads`."""
    has_receives, has_sends = pp > 1 and (num_stages > 1 or rank < pp - 1), num_stages > 1 or rank > 0
    rank_loads = list[RankLoads]()
    for work, work_counts in loads(pp, gas, num_stages, pp_schedule, rank, is_zero3, widens):
        is_later = work.has_sums or work.unsummed != 0
        work_loads = tuple([
            WorkLoad(counts[: 2 * num_stages], not is_later and counts[work.chunk] <= 1)
            for counts in work_counts
        ])  # fmt: skip
        num_messages = has_receives + (has_receives + has_sends) * is_later
        counts_of_waiting = tuple([counts[2 * num_stages :] for counts in work_counts])
        rank_loads.append(RankLoads(work, num_messages, work_loads, counts_of_waiting))
    return tuple(rank_loads)


def _weighed(load: WorkLoad, counts: Load, load_bytes: tuple[float, ...]) -> WorkLoad:
    """A load with the bytes of the stages that are not at work."""
    waiting_bytes, num_grad_counts = tuple(map(mul, counts, load_bytes)), 3 * len(counts) // 5
    gradients, weights = sum(waiting_bytes[:num_grad_counts]), sum(waiting_bytes[num_grad_counts:])
    return WorkLoad(load.num_kept, load.is_alone, waiting_bytes, gradients, weights)


def _load_bytes(
    degrees: Degrees, handling: ParamHandling, params: tuple[StageParams, ...]
) -> tuple[float, ...]:
    """The bytes of what stages hold while another one is at work, in the order of `pipeline.Load`."""
    w, is_zero3 = handling.element, handling.is_zero3
    return (
        *(4 * p.size.whole for p in params), *(w * num_unsummed(p) for p in params),
        *(4 * p.size.shard(degrees) for p in params), *(w * (p.last if is_zero3 else p.size.whole) for p in params),
        *(w * (p.size.whole - p.first - p.last) * is_zero3 for p in params),
    )  # fmt: skip


@lru_cache(maxsize=65536)  # the playbook's layouts ask for 10,195, of which 3,795 differ
def _stage_work(
    pipeline: Pipeline, handling: ParamHandling, p: StageParams, work: Work, reduced_by: Degrees | None
) -> StageWork:
    """The bytes of parameters of a stage at work.

    Args:
        reduced_by: the degrees by which its gradients are reduced; None where none are.
    """
    sums, w, groups = 4.0 * p.size.whole * work.has_sums, handling.element, tuple[GroupBytes, ...]()
    if reduced_by and handling.sums_shards(pipeline.pp):
        sums = 4.0 * p.size.shard(reduced_by) * work.has_sums
    gathered = (0, 0)
    if work.kind == "forward":
        sums += w * num_unsummed(p) * work.unsummed
        beside_others, alone = (
            w * _gathered(pipeline, handling, p, work, is_alone=is_alone) for is_alone in (False, True)
        )
        gathered = beside_others, alone
    elif work.kind != "weight":
        groups = tuple(_group_bytes(pipeline, handling, p, work, sums, reduced_by))
    return StageWork(p, work, _is_halved(pipeline, p), sums, gathered, groups)


def _is_halved(pipeline: Pipeline, p: StageParams) -> bool:
    """Whether backward of a stage computes gradients of inputs and of weights apart; the first stage has no inputs."""
    return pipeline.pp_schedule == "zbv" and not p.layers.stage.has_embedding


def num_unsummed(p: StageParams) -> int:
    """The parameters whose gradients a weight half leaves unsummed."""
    return p.last or p.size.whole


def _gathered(
    pipeline: Pipeline, handling: ParamHandling, p: StageParams, work: Work, *, is_alone: bool
) -> int:
    """The parameters of a stage that are gathered at the end of its forward.

    Args:
        is_alone: whether the stage keeps nothing of other micro-batches.
    """
    is_zero3 = handling.is_zero3
    gathered = p.tied or p.last or p.following if is_zero3 else p.size.whole
    # What was gathered last is still in the buffer of the gather, too. In a pipeline a backward leaves layers gathered.
    # Layers of modules that predict more tokens are gathered after the head.
    if p.is_sharded:
        if is_zero3 and pipeline.pp > 1 and work.after_backward:
            gathered += p.first
        elif is_alone or is_zero3:  # a pipeline gathers its head in the first forward alone
            keeps_head = (pipeline.pp > 1 and not is_alone) or p.layers.num_modules > 0
            gathered += p.gathered_last if keeps_head else p.last or p.gathered_last
    return gathered


def _group_bytes(
    pipeline: Pipeline,
    handling: ParamHandling,
    p: StageParams,
    work: Work,
    sums: float,
    reduced_by: Degrees | None,
) -> Iterator[GroupBytes]:
    """The bytes of each group of parameters of a stage in its backward, but of those that cannot be that of the peak.

    Activations fall from layer to layer of a backward. So a layer cannot whose parameters need no more than in the
    backward of one before that is like it. The input half of a backward keeps them, and gradients for its weight half.

    Args:
        sums: bytes of gradients of earlier micro-batches.
        reduced_by: the degrees by which its gradients are reduced; None where none are.
    """
    w, whole, halved = handling.element, p.size.whole, _is_halved(pipeline, p)
    is_zero3, reduces_after = handling.is_zero3, handling.dp_overlap == "off"
    sums_shards = handling.sums_shards(pipeline.pp)
    frees = work.is_last or (pipeline.pp == 1 and is_zero3)
    has_whole_sums = sums > 0 and not sums_shards
    bytes_by_kind: dict[tuple[int, bool], list[tuple[float, ...]]] = {}
    for group_index, group in enumerate(p.groups):
        size, reduced, finished = group.whole, group.reduced, group.finished.whole
        gathered, copied = whole - finished * frees - (p.first - p.tied) * is_zero3, 0
        if is_zero3 and not work.after_backward:  # forward has freed the layers' parameters
            is_gathered = group.kind != EMBEDDING or (sums > 0 and not frees)
            gathered = finished * (not frees) + size * is_gathered + group.following + p.tied
            copied = max(0, group.shared - group.following)
        freed, added_bytes = float(w * size * frees), 0.0 if halved else float(w * size)
        if w == 4 and has_whole_sums:  # fp32 is added in place, but that of gate and up of experts at once
            added_bytes = 8 / 3 * reduced * group.is_sparse
        if halved:
            unsummed = w * max(0, num_unsummed(p) - finished) + 4 * finished * (not work.has_sums)
            gradients, new, reducing = sums + unsummed * work.unsummed, 0.0, 0
        elif not reduced_by or reduces_after:
            gradients, reducing = sums + 4 * finished * (not has_whole_sums), 0
            new = added_bytes if has_whole_sums or w == 4 else 4.0 * group.reduced + w * size
        else:
            finished_bytes = 4 * group.finished.shard(reduced_by)
            gradients = sums - 4 * finished + finished_bytes if has_whole_sums else sums or finished_bytes
            reducing = 4 * group.before
            new, freed = _reduction(
                handling, reduced_by, group, has_sums=sums > 0, has_whole_sums=has_whole_sums, frees=frees
            )
        gradients += w * p.tied * (group.kind == LAYER)  # the gradient of the head
        reduced_later = None
        if reduced_by and reduces_after:
            reduced_bytes, _ = _reduction(
                handling, reduced_by, group, has_sums=True, has_whole_sums=True, frees=False
            )
            grad_bytes = sums * sums_shards + 4 * (whole - finished + group.finished.shard(reduced_by))
            reduced_later = w * whole * (not frees), grad_bytes + reduced_bytes
        weights, further = w * gathered, 0
        if group.kind == LAYER and not halved:
            at_begin, at_end = weights + (gradients + reducing), (weights - freed) + (gradients + new)
            of_params = at_begin + w * copied, at_end, reducing, sum(reduced_later or ())
            before = bytes_by_kind.setdefault((group.type_number, p.layers.groups[group_index].is_full), [])
            if any(all(map(le, of_params, bytes_before)) for bytes_before in before):
                continue
            before.append(of_params)
        elif group.kind == HEAD:
            further = w * (p.last or p.first)
        elif group.kind == EMBEDDING:
            further = w * (p.first + 2 * p.tied)
        yield GroupBytes(
            group_index=group_index,
            kind=group.kind,
            phase=OPTIMIZER if group.kind == EMBEDDING and reduced_by else BACKWARD,
            weights=weights,
            gradients=gradients,
            reducing=reducing,
            new=new,
            freed=freed,
            added=added_bytes,
            # Gradients of weights are made one matrix after the other.
            one_matrix=min(added_bytes, w * reduced) / 3,
            further=further,
            is_input_half=halved,
            copied=w * copied,
            reduced_later=reduced_later,
        )


def _reduction(
    handling: ParamHandling,
    degrees: Degrees,
    group: ParamGroup,
    *,
    has_sums: bool,
    has_whole_sums: bool,
    frees: bool,
) -> tuple[float, float]:
    """Bytes of gradients, beside the sums of earlier micro-batches, as backward reduces those of a group, and bytes of
    the weights that it has freed by then; of a sparse layer the experts come first.
    """
    w, size, experts = handling.element, group.whole, group.reduced
    last, shards = group.reduced_last, degrees.shards
    if not group.is_sparse:
        return _reduced_bytes(size, last, shards, w, has_whole_sums=has_whole_sums), w * size * frees
    rest, expert_shards = size - experts, degrees.expert_shards
    of_experts = w * rest * (w == 2 or not has_whole_sums) + _reduced_bytes(
        experts, last, expert_shards, w, has_whole_sums=has_whole_sums, is_copied=handling.copies_experts
    )
    expert_sums = 4 * experts * ((has_whole_sums or not has_sums) / expert_shards - has_whole_sums)
    of_rest = expert_sums + _reduced_bytes(rest, group.rest_last, shards, w, has_whole_sums=has_whole_sums)
    moments = (of_experts, w * experts * frees), (of_rest, float(w * size * frees))
    return max(moments, key=lambda moment: moment[0] - moment[1])


def _reduced_bytes(
    num_params: int, last: int, shards: int, w: int, *, has_whole_sums: bool, is_copied: bool = False
) -> float:
    """Bytes of gradients while those of some parameters are reduced.

    A reduction copies them in fp32, frees them, except for the last one where ranks shard them, and then makes the
    result, of which torch may make a copy. Sums that are whole until then are what is reduced; they count among those
    of earlier micro-batches.
    """
    summand_bytes, freed_bytes = (0.0, 4.0) if has_whole_sums else (float(w), float(w))
    num_freed = num_params - last * (shards > 1)
    result_bytes = 4 / shards * (1 + is_copied) * num_params
    return (4 + summand_bytes) * num_params + max(0.0, result_bytes - freed_bytes * num_freed)
