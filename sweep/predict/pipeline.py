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

COST = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}
"""Kind of a pass -> its time; the forward of a micro-batch through all stages of a rank takes 1.

A matrix product in forward has two in backward: one for the gradient of its input and one for that of its weight.
"""

WAY = {"forward": -1, "backward": 1, "input": 1, "weight": 0}
"""Kind of a pass -> the stage whose pass it waits for, less its own."""


class Pass(NamedTuple):
    """One forward or backward of a micro-batch through one stage."""

    kind: str
    """forward, backward, or half a backward: input (the gradient of the stage's input) or weight."""
    micro_batch: int
    chunk: int
    """Index of the stage among those of its rank."""


class TimedPass(NamedTuple):
    """A pass with its stage and its time, in the unit of COST."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float


def order(layout: Layout) -> list[list[Pass]]:
    """The passes of each rank of the pp axis in the order in which it runs them.

    The layout must keep the rules of `ultrabench.sweep.refusals.schedule_refusals`.
    """
    return [passes_of(layout, rank) for rank in range(layout.pp)]


def passes_of(layout: Layout, rank: int) -> list[Pass]:
    """The passes of one rank of the pp axis in their order."""
    kinds_of = _zbv if layout.pp_schedule == "zbv" else _in_turn
    return [*_numbered(kinds_of(layout, rank), layout.gas)]


def _numbered(kinds_and_chunks: Iterator[tuple[str, int]], gas: int) -> Iterator[Pass]:
    """The passes of the first `gas` micro-batches; a stage has them in their order, for each kind of pass."""
    counts = Counter[tuple[str, int]]()
    for kind, chunk in kinds_and_chunks:
        micro_batch = counts[kind, chunk]
        counts[kind, chunk] += 1
        if micro_batch < gas:
            yield Pass(kind, micro_batch, chunk)


def _in_turn(layout: Layout, rank: int) -> Iterator[tuple[str, int]]:
    """Kind and chunk of each pass under afab, 1f1b and interleaved: forwards, then one forward and one backward in turn.

    The number of forwards before is gas under AFAB, pp-1-rank under 1F1B (arXiv 2006.09503), and with v stages on
    each rank 2*(pp-1-rank) + (v-1)*group (arXiv 2104.04473), where stages take turns after each group of micro-batches.
    """
    v, gas, hops = layout.virtual_stages, layout.gas, layout.pp - 1 - rank
    group = gas // max(1, gas // layout.pp)
    warm_up_forwards = min(gas * v, (2 * hops + (v - 1) * group) if v > 1 else hops)
    if layout.pp_schedule == "afab":
        warm_up_forwards = gas
    chunks = [n // group % v for n in range(gas * v)]
    yield from (("forward", chunk) for chunk in chunks[:warm_up_forwards])
    for n, chunk in enumerate(chunks):
        if warm_up_forwards + n < gas * v:
            yield "forward", chunks[warm_up_forwards + n]
        yield "backward", v - 1 - chunk


def _zbv(layout: Layout, rank: int) -> Iterator[tuple[str, int]]:
    """Kind and chunk of each pass under ZB-V (arXiv 2401.10241, section 6), for at least 2*pp-1 micro-batches."""
    f0, f1, i0, i1, w0, w1 = product(("forward", "input", "weight"), (0, 1))
    hops, max_turns = layout.pp - rank, max(2 * layout.pp - 1, layout.gas)
    fill = max_turns - layout.pp - hops + 1  # turns before the last forward of the first stage
    warm_up = [f0] * (2 * hops - 1) + [f1, f0] * rank + [f1, i1, w1] * hops
    turns = [f0, i0, w0, f1, i1, w1] * fill + [i0, w0, f1, i1, w1] * (max_turns - layout.pp - fill)
    return iter(warm_up + turns + [i0, i1] * rank + [i0, w0] * hops + [w1] * rank + [w0] * rank)


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
    in_flight, halfway, backwards, summed, unsummed, gathered = ([0] * virtual_stages for _ in range(6))
    loads_by_work = defaultdict[Work, dict[Load, None]](dict)
    for kind, micro_batch, chunk in passes_of(layout, rank):
        in_flight[chunk] += kind == "forward"
        is_first_stage = pp_schedule == "zbv" and rank == chunk == 0
        if not (is_first_stage and kind == "input"):
            work_kind = "backward" if is_first_stage and kind == "weight" else kind
            is_last = work_kind == "backward" and micro_batch == gas - 1
            unreduced = [n != chunk and done < gas for n, done in enumerate(backwards)]
            other_loads = (
                map(mul, unreduced, summed),
                map(mul, unreduced, unsummed),
                (n != chunk and done == gas for n, done in enumerate(backwards)),
                unreduced,
                map(mul, unreduced, gathered),
            )
            after_backward = is_zero3 and gathered[chunk] > 0
            work = Work(work_kind, chunk, bool(summed[chunk]), unsummed[chunk], is_last, after_backward)
            loads_by_work[work][(*in_flight, *halfway, *map(int, chain(*other_loads)))] = None
        in_flight[chunk] -= kind in ("backward", "weight")
        halfway[chunk] += (kind == "input") - (kind == "weight")
        backwards[chunk] += kind in ("backward", "weight")
        gathered[chunk] = int(kind != "forward")
        if kind == "input":
            summed[chunk], unsummed[chunk] = int(summed[chunk] or unsummed[chunk] != 0), 0
        elif kind == "weight" and widens and not is_first_stage:
            # The last stage, on rank 0, sums all gradients but those of the head at the end of a weight half.
            unsummed[chunk] = 1 if rank or summed[chunk] else -1
            summed[chunk] = int(summed[chunk] or rank == 0)
        elif kind != "forward":
            summed[chunk] = 1
    heaviest = list[tuple[Work, tuple[Load, ...]]]()
    for work, of_work in loads_by_work.items():
        # A later backward needs no less than the first one does with the same load.
        is_first = work.kind == "backward" and not work.has_sums
        later_loads = loads_by_work.get(work._replace(has_sums=True), ()) if is_first else ()
        if loads_left := tuple(load for load in of_work if not _is_exceeded(load, of_work, later_loads)):
            heaviest.append((work, loads_left))
    return tuple(heaviest)


def _is_exceeded(load: Load, work_loads: Iterable[Load], later_loads: Iterable[Load]) -> bool:
    other_loads = chain((larger for larger in work_loads if larger != load), later_loads)
    return any(all(map(le, load, larger)) for larger in other_loads)


def timeline(layout: Layout) -> list[TimedPass]:
    """Every pass of one step, at the earliest time that its order and its inputs allow; messages take no time.

    A forward waits for that of the stage before, and a backward for that of the stage after. The layout must keep
    the rules that `order` needs.
    """
    queues = [deque(passes) for passes in order(layout)]
    free_at, ready_ranks, timed_passes = [0.0] * layout.pp, [*range(layout.pp)], list[TimedPass]()
    ends, waiting_rank = dict[tuple[int, int, int], float](), dict[tuple[int, int, int], int]()
    while ready_ranks:
        rank = ready_ranks.pop()
        queue, stages = queues[rank], layout.stages_of(rank)
        while queue:
            kind, micro_batch, chunk = queue[0]
            way, stage = WAY[kind], stages[chunk]
            source = (way, stage + way, micro_batch)
            if way and 0 <= source[1] < layout.num_stages and source not in ends:
                waiting_rank[source] = rank
                break
            start = max(free_at[rank], ends.get(source, 0.0))
            free_at[rank] = ends[way, stage, micro_batch] = start + COST[kind] / layout.virtual_stages
            timed_passes.append(TimedPass(rank, stage, kind, micro_batch, chunk, start, free_at[rank]))
            queue.popleft()
            if (way, stage, micro_batch) in waiting_rank:
                ready_ranks.append(waiting_rank.pop((way, stage, micro_batch)))
    assert not any(queues), f"the passes of {layout.label()} wait for one another"
    return sorted(timed_passes, key=lambda timed: (timed.rank, timed.start))


def waiting(layout: Layout) -> float:
    """The time for which a rank waits in a step, in micro-batches, where all stages take the same time; `timeline` has it.

    It is pp-1 under AFAB and 1F1B; (pp-1)/v with v interleaved stages (arXiv 2104.04473, section 2.2), and more with
    less than pp micro-batches; (pp-1)/6 under ZB-V (arXiv 2401.10241), and more where gas - 1 forwards do not fill the
    first wait of 2(pp-1).
    """
    pp, gas, v = layout.pp, layout.gas, layout.virtual_stages
    if layout.pp_schedule == "interleaved":
        return (pp - 1 + (v - 1) * max(0, pp - gas)) / v
    if layout.pp_schedule == "zbv":
        return max((pp - 1) / 2, 2 * (pp - 1) - (gas - 1)) / (COST["forward"] + COST["backward"])
    return pp - 1.0


def bubble_share(layout: Layout) -> float:
    """The part of a step for which the ranks wait, as a fraction, where all stages take the same time."""
    return waiting(layout) / (layout.gas + waiting(layout))
