"""The bytes of parameters and of their gradients in each work of a rank of our own kernel.

They do not depend on the tokens of a micro-batch, so the layouts of a plan share them. The symbols are those of
`ultrabench_memory`.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat, zip_longest
from operator import attrgetter, mul
from typing import Any, NamedTuple

from ultrabench.kernel_config import ELEMENT_BYTES
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.pipeline import Load, Work, loads
from ultrabench.sweep.predict.stage_memory import BACKWARD, FORWARD, OPTIMIZER
from ultrabench.sweep.predict.stage_params import (
    EMBEDDING,
    LAYER,
    Degrees,
    ParamGroup,
    Pipeline,
    RankParams,
    StageParams,
    params_of_ranks,
)

MAX_ROUNDS = 4
"""Number of rounds of pp micro-batches that are looked at; later ones are like the first ones."""


class ParamHandling(NamedTuple):
    """What decides, beside the stages and degrees, which parameters and gradients a rank holds at a moment."""

    in_pipeline: bool
    halves_backward: bool
    """Whether backward computes gradients of inputs and of weights apart: that of zbv does."""
    is_zero3: bool
    """Whether ranks gather parameters for each pass."""
    sums_shards: bool
    """Whether each micro-batch reduces its gradients."""
    reduces_after: bool
    """Whether gradients are reduced after backward."""
    element: int
    """Bytes of a number in forward and backward: w."""
    copies_experts: bool
    """Whether torch copies the gradients of experts to divide them by 1: where a single rank of each shard group holds
    them, and ranks of other groups do, too."""

    def halves(self, p: StageParams) -> bool:
        """Whether backward of a stage computes gradients of inputs and of weights apart; the first stage has no
        inputs."""
        return self.halves_backward and not p.layers.stage.has_embedding


ParamMoment = tuple[float, str, float, float, float]
"""All bytes of parameters at a moment of a work, its phase, and the bytes of weights, of gradients and of buffers."""


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


class StageWork(NamedTuple):
    """Bytes of parameters of a stage at work."""

    params: StageParams
    kind: str
    chunk: int
    has_sums: bool
    """Whether the stage has sums of gradients of earlier micro-batches."""
    adds_in_place: bool
    """Whether gradients are added in place to the sums: those in fp32, but of gate and up of experts."""
    moments: tuple[ParamMoment, ...]
    """The end of a forward; or begin and end of the weight half of a backward; or those of the begin of the backward of
    each group of parameters, of its end, of the reduction of its gradients after backward, and of the copy from the
    buffer of its gather. The last ones may be left out."""
    totals: tuple[float, ...]
    """All bytes at each of these moments."""


WorkBytes = tuple[StageWork, StageWork, int, tuple[WorkLoad, ...]]
"""The stage at work beside other micro-batches that it keeps, and the same where it keeps none; the number of messages
between stages that are alive; and the loads of the rank."""


class RankLoads(NamedTuple):
    """Works of a rank, and what its stages hold beside each of them, in numbers that no model decides."""

    works: tuple[Work, ...]
    """One work, or backwards that differ only in what they free and reduce."""
    num_messages: int
    loads: tuple[WorkLoad, ...]
    counts: tuple[Load, ...]
    """For each of the loads what weighs in it of stages that are not at work; see `pipeline.Load`."""


class RankBytes(NamedTuple):
    """What a rank of the pipeline axis holds of parameters."""

    params: RankParams
    halved: tuple[bool, ...]
    """For each stage whether backward computes gradients of inputs and of weights apart."""
    works: tuple[WorkBytes, ...]
    """The works among which is that of the peak."""


@dataclass(frozen=True, slots=True, eq=False)  # caches find it by its identity
class ParamDivision:
    """How the ranks of a layout divide parameters and gradients, whatever the model."""

    pipeline: Pipeline
    degrees: Degrees
    handling: ParamHandling


_shared_division = lru_cache(maxsize=16384)(ParamDivision)
"""Makes one object of equal divisions, such as those of layouts without ZeRO on different numbers of nodes."""
_DIVIDING_AXES = (
    "dp", "tp", "pp", "cp", "ep", "zero_stage", "dp_shard", "pp_schedule", "virtual_stages", "pp_layout", "recompute",
    "dp_overlap",
)  # fmt: skip
"""The axes that decide a `ParamDivision`."""
_dividing_axes_of = attrgetter(*_DIVIDING_AXES)


@lru_cache(maxsize=16384)  # 388 of the playbook's 6,576 layouts differ in it
def _division(axis_values: tuple[Any, ...], element: int) -> ParamDivision:
    """How layouts with these values of `_DIVIDING_AXES` divide parameters whose numbers have `element` bytes."""
    layout = Layout(**dict(zip(_DIVIDING_AXES, axis_values, strict=True)))
    degrees, zero_stage = Degrees.of(layout), layout.zero_stage
    handling = ParamHandling(
        in_pipeline=layout.pp > 1,
        halves_backward=layout.pp_schedule == "zbv",
        is_zero3=zero_stage == 3,
        sums_shards=zero_stage >= 2 and layout.pp == 1,
        reduces_after=layout.dp_overlap == "off",
        element=element,
        copies_experts=zero_stage > 0 and degrees.expert_shards == 1 < layout.expert_copies,
    )
    return _shared_division(Pipeline.of(layout), degrees, handling)


class RankWork(NamedTuple):
    """What decides the bytes of parameters of the ranks of the pipeline axis, beside the model."""

    division: ParamDivision
    gas: int
    """Micro-batches of a step, without those after which no work is different."""


def rank_work(spec: RunSpec) -> RankWork:
    """What decides the bytes of parameters of the ranks of a run, beside its model."""
    layout, gas = spec.layout, spec.layout.gas
    if layout.virtual_stages > 1:
        gas = min(gas, gas % layout.pp + MAX_ROUNDS * layout.pp)
    elif layout.pp_schedule != "afab":
        gas = min(gas, layout.pp + 2)  # from then on a backward follows each forward
    element = min(4, ELEMENT_BYTES[spec.kernel.precision])
    return RankWork(_division(_dividing_axes_of(layout), element), gas)


@lru_cache(maxsize=16384)  # 1,960 of the playbook's 6,576 layouts differ in it
def rank_bytes(shape: ModelShape, work: RankWork, ranks: str) -> tuple[RankBytes, ...]:
    """What the ranks of the pipeline axis that `ranks`, a word of `stage_memory`, asks for hold of parameters."""
    division, gas = work
    pipeline, degrees, handling = division.pipeline, division.degrees, division.handling
    return tuple([
        RankBytes(
            rank_params,
            tuple([handling.halves(p) for p in rank_params.stages]),
            tuple(_works(pipeline, degrees, handling, gas, rank_params)),
        )
        for rank_params in params_of_ranks(shape, pipeline, degrees, ranks)
    ])  # fmt: skip


def _works(
    pipeline: Pipeline, degrees: Degrees, handling: ParamHandling, gas: int, rank: RankParams
) -> Iterator[WorkBytes]:
    """The works of a rank but forwards that need less than the backward."""
    stages, num_stages, sums_shards = rank.stages, len(rank.stages), handling.sums_shards
    load_bytes = _load_bytes(degrees, handling, stages) if num_stages > 1 else ()
    of_rank = num_stages, pipeline.pp_schedule, rank.rank, handling.is_zero3, handling.element == 2
    for works, num_messages, work_loads, counts in _rank_loads(pipeline.pp, gas, *of_rank):
        p = stages[works[0].chunk]
        if works[0].kind == "forward" and not (p.layers.stage.has_head or p.layers.ends_sparse):
            continue  # it needs less than the backward
        # The number of shards decides nothing where no gradients are reduced.
        reduced_by = degrees if works[-1].is_last or sums_shards else None
        if num_stages > 1:  # else no stage waits
            work_loads = tuple(map(_weighed, work_loads, counts, repeat(load_bytes)))
        stage_work = alone = _stage_work(p, works, handling, reduced_by)
        if works[0].kind == "forward" and any(load.is_alone for load in work_loads):
            alone = _stage_work(p, works, handling, reduced_by, is_alone=True)
        yield stage_work, alone, num_messages, work_loads


@lru_cache(maxsize=4096)
def _rank_loads(
    pp: int, gas: int, num_stages: int, pp_schedule: str, rank: int, is_zero3: bool, widens: bool
) -> tuple[RankLoads, ...]:
    """The works of a rank with what its stages hold; the arguments are those of `pipeline.loads`."""
    has_receives, has_sends = pp > 1 and (num_stages > 1 or rank < pp - 1), num_stages > 1 or rank > 0
    alike_works = defaultdict[tuple[Work, tuple[Load, ...]], list[Work]](list)
    for work, work_counts in loads(pp, gas, num_stages, pp_schedule, rank, is_zero3, widens):
        # The last backward comes last in `loads`.
        is_backward = work.kind not in ("forward", "weight")
        alike = work._replace(is_last=False, after_backward=False) if is_backward else work
        alike_works[alike, work_counts].append(work)
    rank_loads = list[RankLoads]()
    for (work, work_counts), works in alike_works.items():
        is_later = work.has_sums or work.unsummed != 0
        work_loads = tuple([
            WorkLoad(counts[: 2 * num_stages], not is_later and counts[work.chunk] <= 1)
            for counts in work_counts
        ])  # fmt: skip
        num_messages = has_receives + (has_receives + has_sends) * is_later
        counts_of_waiting = tuple([counts[2 * num_stages :] for counts in work_counts])
        rank_loads.append(RankLoads(tuple(works), num_messages, work_loads, counts_of_waiting))
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


@lru_cache(maxsize=65536)  # the playbook's layouts ask for 11,000, of which 4,100 differ
def _stage_work(
    p: StageParams,
    works: tuple[Work, ...],
    handling: ParamHandling,
    degrees: Degrees | None,
    is_alone: bool = False,
) -> StageWork:
    """The bytes of parameters of a stage at works that differ at most in what they free and reduce.

    Args:
        degrees: those by which gradients are reduced; None where none are.
        is_alone: whether the stage keeps nothing of other micro-batches.
    """
    kind, chunk, has_sums, unsummed, *_ = works[0]
    sums, w = 4.0 * p.size.whole * has_sums, handling.element
    if degrees and handling.sums_shards:
        sums = 4.0 * p.size.shard(degrees) * has_sums
    has_whole_sums = sums > 0 and not handling.sums_shards
    if kind == "forward":
        gathered = _gathered(handling, p, works[0], is_alone=is_alone)
        moments = [_moment(FORWARD, w * gathered, sums + w * num_unsummed(p) * unsummed)]
    elif kind == "weight":
        sums += w * num_unsummed(p) * unsummed
        new = w * p.size.whole * (not unsummed and (w == 2 or not has_sums))
        moments = [_moment(BACKWARD, w * p.size.whole, grad_bytes) for grad_bytes in (sums, sums + new)]
    else:
        moments, *more = [_of_groups(handling, p, work, sums, has_whole_sums, degrees) for work in works]
        if more:  # only a last backward may reduce its gradients after it, so that it has more moments
            moments = [max(filter(None, of_moment)) for of_moment in zip_longest(moments, *more)]
    totals = tuple([moment[0] for moment in moments])
    return StageWork(p, kind, chunk, has_sums, w == 4 and has_whole_sums, tuple(moments), totals)


def _moment(phase: str, weights: float, gradients: float, buffers: float = 0.0) -> ParamMoment:
    """A moment with the sum of its bytes."""
    return weights + gradients + buffers, phase, weights, gradients, buffers


def num_unsummed(p: StageParams) -> int:
    """The parameters whose gradients a weight half leaves unsummed."""
    return p.last or p.size.whole


def _gathered(handling: ParamHandling, p: StageParams, work: Work, *, is_alone: bool) -> int:
    """The parameters of a stage that are gathered at the end of its forward.

    Args:
        is_alone: whether the stage keeps nothing of other micro-batches.
    """
    is_zero3 = handling.is_zero3
    gathered = p.tied or p.last or p.following if is_zero3 else p.size.whole
    # What was gathered last is still in the buffer of the gather, too. In a pipeline a backward leaves layers gathered.
    # Layers of modules that predict more tokens are gathered after the head.
    if p.is_sharded:
        if is_zero3 and handling.in_pipeline and work.after_backward:
            gathered += p.first
        elif is_alone or is_zero3:  # a pipeline gathers its head in the first forward alone
            keeps_head = (handling.in_pipeline and not is_alone) or p.layers.num_modules > 0
            gathered += p.gathered_last if keeps_head else p.last or p.gathered_last
    return gathered


def _of_groups(
    handling: ParamHandling,
    p: StageParams,
    work: Work,
    sums: float,
    has_whole_sums: bool,
    degrees: Degrees | None,
) -> list[ParamMoment]:
    """The bytes of parameters in a backward, in the order of `StageWork.moments`. The parameters of a layer are copied
    from the buffer of its gather before the next layer is gathered.

    Args:
        sums: bytes of gradients of earlier micro-batches.
        has_whole_sums: whether no ranks share these.
        degrees: those by which gradients are reduced; None where none are.
    """
    w, whole, halved, is_zero3 = handling.element, p.size.whole, handling.halves(p), handling.is_zero3
    reduces_after, reduced_by = handling.reduces_after, degrees
    if not (work.is_last or handling.sums_shards):
        reduced_by = None
    frees = work.is_last or (is_zero3 and not handling.in_pipeline)
    begins: list[ParamMoment] = []
    ends: list[ParamMoment] = []
    laters: list[ParamMoment] = []
    copies: list[ParamMoment] = []
    for group in p.groups:
        kind, _, _, size, reduced, _, _, finished_size, before, following, shared = group
        finished = finished_size.whole
        gathered = whole - finished * frees - (p.first - p.tied) * is_zero3
        if is_zero3 and not work.after_backward:  # forward has freed the layers' parameters
            is_gathered = kind != EMBEDDING or (sums > 0 and not frees)
            gathered = finished * (not frees) + size * is_gathered + following + p.tied
        weights, freed, reducing = float(w * gathered), float(w * size * frees), 0
        if halved:
            unsummed = w * max(0, num_unsummed(p) - finished) + 4 * finished * (not work.has_sums)
            gradients, new = sums + unsummed * work.unsummed, 0.0
        elif reduced_by is None or reduces_after:
            gradients, new = sums, added_bytes(w, group, w == 4 and has_whole_sums)
            if not has_whole_sums:
                gradients, new = sums + 4 * finished, new if w == 4 else 4.0 * reduced + w * size
        else:
            finished_bytes = 4 * finished_size.shard(reduced_by)
            gradients = sums - 4 * finished + finished_bytes if has_whole_sums else sums or finished_bytes
            reducing = 4 * before
            new, freed = _reduction(handling, reduced_by, group, sums > 0, has_whole_sums, frees)
        if kind == LAYER:
            gradients += w * p.tied  # the gradient of the head
        begins.append(_moment(BACKWARD, weights, gradients + reducing))
        if is_zero3 and not work.after_backward:
            copied = w * max(0, shared - following)
            copies.append(_moment(BACKWARD, weights, gradients + reducing, copied))
        phase_at_end = OPTIMIZER if kind == EMBEDDING and reduced_by else BACKWARD
        ends.append(_moment(phase_at_end, weights - freed, gradients + new))
        if reduced_by is not None and reduces_after:
            reduced_bytes, _ = _reduction(handling, reduced_by, group, True, True, False)
            sum_bytes = sums * handling.sums_shards + 4 * (whole - finished + finished_size.shard(reduced_by))
            laters.append(_moment(OPTIMIZER, float(w * whole * (not frees)), sum_bytes + reduced_bytes))
    if copies and not laters:
        laters = [_moment(BACKWARD, 0.0, 0.0)] * len(copies)
    return [*begins, *ends, *laters, *copies]


def added_bytes(w: int, group: ParamGroup, adds_in_place: bool) -> float:
    """Bytes of the gradients of a group that a backward does not add in place to sums of earlier micro-batches: in fp32
    those of gate and up of experts, which are made at once."""
    return 8 / 3 * group.reduced * group.is_sparse if adds_in_place else float(w * group.whole)


def _reduction(
    handling: ParamHandling,
    degrees: Degrees,
    group: ParamGroup,
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
