"""The order in which the ranks of a pipeline run their micro-batches, and when they wait for one another.

It is the order of torch.distributed.pipelining, which runs the schedules of our own kernel.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, product
from operator import le, mul
from typing import NamedTuple

from ultrabench.layout import Layout

PASS_TIME = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}
"""Kind of a pass -> its time, which has no unit; the forward of a micro-batch through all stages of a rank takes 1.

A matrix product in forward has two in backward: one for the gradient of its input and one for that of its weight.
"""

_SOURCE_OFFSET = {"forward": -1, "backward": 1, "input": 1, "weight": 0}
"""Kind of a pass -> number of the stage whose pass it waits for, less that of its own stage; 0: it waits for none."""


class Pass(NamedTuple):
    """One forward or backward of a micro-batch through one stage."""

    kind: str
    """forward, backward, or half a backward: input (the gradient of the stage's input) or weight."""
    micro_batch: int
    chunk: int
    """Index of the stage among those of its rank."""


class TimedPass(NamedTuple):
    """A pass with its stage, its start and its end, in the unit of PASS_TIME."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float


def passes_by_rank(layout: Layout) -> list[list[Pass]]:
    """The passes of each rank of the pp axis in the order in which it runs them.

    The layout must keep the rules of `ultrabench.sweep.refusals.schedule_refusals`.
    """
    return [passes_of(layout, rank) for rank in range(layout.pp)]


def passes_of(layout: Layout, rank: int) -> list[Pass]:
    """The passes of one rank of the pp axis in their order."""
    kinds_and_chunks_of = _zbv_passes if layout.pp_schedule == "zbv" else _alternating_passes
    return [*_numbered(kinds_and_chunks_of(layout, rank), layout.gas)]


def _numbered(kinds_and_chunks: Iterator[tuple[str, int]], gas: int) -> Iterator[Pass]:
    """The passes of the first `gas` micro-batches; a stage has them in their order, for each kind of pass."""
    num_begun = Counter[tuple[str, int]]()
    for kind, chunk in kinds_and_chunks:
        micro_batch = num_begun[kind, chunk]
        num_begun[kind, chunk] += 1
        if micro_batch < gas:
            yield Pass(kind, micro_batch, chunk)


def _alternating_passes(layout: Layout, rank: int) -> Iterator[tuple[str, int]]:
    """Kind and chunk of each pass under afab, 1f1b and interleaved: forwards,
    then one forward and one backward in turn.

    The number of forwards before is gas under AFAB, pp-1-rank under 1F1B (arXiv 2006.09503), and with v stages on
    each rank 2*(pp-1-rank) + (v-1)*group (arXiv 2104.04473), where stages take turns after each group of micro-batches.
    """
    v, gas, later_ranks = layout.virtual_stages, layout.gas, layout.pp - 1 - rank
    group_size = gas // max(1, gas // layout.pp)
    warm_up_forwards = min(gas * v, (2 * later_ranks + (v - 1) * group_size) if v > 1 else later_ranks)
    if layout.pp_schedule == "afab":
        warm_up_forwards = gas
    forward_chunks = [n // group_size % v for n in range(gas * v)]
    yield from (("forward", chunk) for chunk in forward_chunks[:warm_up_forwards])
    for n, chunk in enumerate(forward_chunks):
        if warm_up_forwards + n < gas * v:
            yield "forward", forward_chunks[warm_up_forwards + n]
        yield "backward", v - 1 - chunk


def _zbv_passes(layout: Layout, rank: int) -> Iterator[tuple[str, int]]:
    """Kind and chunk of each pass under ZB-V (arXiv 2401.10241, section 6), for at least 2*pp-1 micro-batches."""
    f0, f1, i0, i1, w0, w1 = product(("forward", "input", "weight"), (0, 1))
    ranks_left, num_turns = layout.pp - rank, max(2 * layout.pp - 1, layout.gas)
    fill_turns = num_turns - layout.pp - ranks_left + 1  # turns before the last forward of the first stage
    warm_up = [f0] * (2 * ranks_left - 1) + [f1, f0] * rank + [f1, i1, w1] * ranks_left
    drain_turns = num_turns - layout.pp - fill_turns
    turn_passes = [f0, i0, w0, f1, i1, w1] * fill_turns + [i0, w0, f1, i1, w1] * drain_turns
    return iter(warm_up + turn_passes + [i0, i1] * rank + [i0, w0] * ranks_left + [w1] * rank + [w0] * rank)


class Work(NamedTuple):
    """What a rank does as a forward ends or a backward begins."""

    kind: str
    """The kind of pass. The weight half of zbv's first stage, whose input has no gradient, is a whole backward."""
    chunk: int
    """Index of the stage at work among those of its rank."""
    has_sums: bool
    """Whether the stage has sums of gradients of earlier micro-batches."""
    unsummed: int
    """1 if it has gradients of a weight half that its next input half adds to the sums; of the last stage only those
    of the head. After the last stage's first weight half -1: the head's gradients are not yet in sums of 4 bytes."""
    is_last: bool
    """Whether it is the stage's last backward in a step, which reduces its gradients."""
    after_backward: bool
    """Whether the stage's pass before was a backward, which leaves its parameters gathered under ZeRO-3."""


Load = tuple[int, ...]
"""What the stages of a rank hold: seven numbers for each stage, first one of all stages, then the next.

They are the micro-batches whose activations it keeps, the one at work included; the micro-batches whose backward has
computed the gradients of inputs, but not yet those of weights; and, of stages that are not at work, `Work.has_sums`,
`Work.unsummed`, and 1 for one with reduced gradients, with weights to compute with, and with weights that a backward
left gathered.
"""


@lru_cache(maxsize=4096)
def loads(
    pp: int, gas: int, virtual_stages: int, pp_schedule: str, rank: int, is_zero3: bool, widens: bool
) -> tuple[tuple[Work, tuple[Load, ...]], ...]:
    """The works of a rank, each with its loads but those that another one exceeds.

    Args:
        widens: whether sums of gradients have more bytes than the gradients of a weight half.
    """
    layout = Layout(dp=1, pp=pp, gas=gas, virtual_stages=virtual_stages, pp_schedule=pp_schedule)
    # For each stage of the rank, what `Load` describes, and how many of its backwards are over.
    in_flight, num_halfway, num_done, is_summed, unsummed, gathered = ([0] * virtual_stages for _ in range(6))
    loads_by_work = defaultdict[Work, dict[Load, None]](dict)
    for kind, micro_batch, chunk in passes_of(layout, rank):
        in_flight[chunk] += kind == "forward"
        is_first_stage = pp_schedule == "zbv" and rank == chunk == 0
        if not (is_first_stage and kind == "input"):
            work_kind = "backward" if is_first_stage and kind == "weight" else kind
            is_last = work_kind == "backward" and micro_batch == gas - 1
            unreduced = [index != chunk and n < gas for index, n in enumerate(num_done)]
            other_loads = (
                map(mul, unreduced, is_summed),
                map(mul, unreduced, unsummed),
                (index != chunk and n == gas for index, n in enumerate(num_done)),
                unreduced,
                map(mul, unreduced, gathered),
            )
            after_backward = is_zero3 and gathered[chunk] > 0
            work = Work(work_kind, chunk, bool(is_summed[chunk]), unsummed[chunk], is_last, after_backward)
            loads_by_work[work][(*in_flight, *num_halfway, *map(int, chain(*other_loads)))] = None
        in_flight[chunk] -= kind in ("backward", "weight")
        num_halfway[chunk] += (kind == "input") - (kind == "weight")
        num_done[chunk] += kind in ("backward", "weight")
        gathered[chunk] = int(kind != "forward")
        if kind == "input":
            is_summed[chunk], unsummed[chunk] = int(is_summed[chunk] or unsummed[chunk] != 0), 0
        elif kind == "weight" and widens and not is_first_stage:
            # The last stage, on rank 0, sums all gradients but those of the head at the end of a weight half.
            unsummed[chunk] = 1 if rank or is_summed[chunk] else -1
            is_summed[chunk] = int(is_summed[chunk] or rank == 0)
        elif kind != "forward":
            is_summed[chunk] = 1
    heaviest_loads = list[tuple[Work, tuple[Load, ...]]]()
    for work, work_loads in loads_by_work.items():
        # A later backward needs no less than the first one does with the same load.
        is_first = work.kind == "backward" and not work.has_sums
        later_loads = loads_by_work.get(work._replace(has_sums=True), ()) if is_first else ()
        if largest_loads := _largest_loads(work_loads, later_loads):
            heaviest_loads.append((work, largest_loads))
    return tuple(heaviest_loads)


def _largest_loads(work_loads: Iterable[Load], later_loads: Iterable[Load]) -> tuple[Load, ...]:
    """Those of the loads of a work, which are all different, that no other one of them and no later one exceeds."""
    largest_loads, later_loads = list[Load](), tuple(later_loads)
    for load in work_loads:
        if not any(all(map(le, load, other_load)) for other_load in chain(largest_loads, later_loads)):
            largest_loads = [other_load for other_load in largest_loads if not all(map(le, other_load, load))]
            largest_loads.append(load)
    return tuple(largest_loads)


def timeline(layout: Layout) -> list[TimedPass]:
    """Every pass of one step, at the earliest time that its order and its inputs allow; messages take no time.

    A forward waits for that of the stage before, and a backward for that of the stage after. The layout must keep
    the rules that `passes_by_rank` needs.
    """
    queues = [deque(passes) for passes in passes_by_rank(layout)]
    free_times, ready_ranks, timed_passes = [0.0] * layout.pp, [*range(layout.pp)], list[TimedPass]()
    end_by_pass, waiting_by_pass = (dict[tuple[int, int, int], float](), dict[tuple[int, int, int], int]())
    while ready_ranks:
        rank = ready_ranks.pop()
        pass_queue, stages = queues[rank], layout.stages_of(rank)
        while pass_queue:
            kind, micro_batch, chunk = pass_queue[0]
            offset, stage = _SOURCE_OFFSET[kind], stages[chunk]
            source = (offset, stage + offset, micro_batch)
            if offset and 0 <= source[1] < layout.num_stages and source not in end_by_pass:
                waiting_by_pass[source] = rank
                break
            start = max(free_times[rank], end_by_pass.get(source, 0.0))
            end = start + PASS_TIME[kind] / layout.virtual_stages
            free_times[rank] = end_by_pass[offset, stage, micro_batch] = end
            timed_passes.append(TimedPass(rank, stage, kind, micro_batch, chunk, start, end))
            pass_queue.popleft()
            if (offset, stage, micro_batch) in waiting_by_pass:
                ready_ranks.append(waiting_by_pass.pop((offset, stage, micro_batch)))
    assert not any(queues), f"the passes of {layout.label()} wait for one another"
    return sorted(timed_passes, key=lambda timed_pass: (timed_pass.rank, timed_pass.start))


def idle_micro_batches(layout: Layout) -> float:
    """The time for which a rank waits in a step, in micro-batches, where all stages take the same time;
    `timeline` has it.

    It is pp-1 under AFAB and 1F1B; (pp-1)/v with v interleaved stages (arXiv 2104.04473, section 2.2), and more with
    less than pp micro-batches; (pp-1)/6 under ZB-V (arXiv 2401.10241), and more where gas - 1 forwards do not fill the
    first wait of 2(pp-1).
    """
    pp, gas, v = layout.pp, layout.gas, layout.virtual_stages
    if layout.pp_schedule == "interleaved":
        return (pp - 1 + (v - 1) * max(0, pp - gas)) / v
    if layout.pp_schedule == "zbv":
        return max((pp - 1) / 2, 2 * (pp - 1) - (gas - 1)) / (PASS_TIME["forward"] + PASS_TIME["backward"])
    return pp - 1.0


def bubble_share(layout: Layout) -> float:
    """The part of a step for which the ranks wait, as a fraction, where all stages take the same time."""
    return idle_micro_batches(layout) / (layout.gas + idle_micro_batches(layout))
