"""The order in which the ranks of a pipeline run their micro-batches, and when they wait for one another.

It is the order of torch.distributed.pipelining, which runs the schedules of our own kernel.
"""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from ultrabench.layout import Layout

COST = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}
"""Kind of a pass -> its time; the forward of a micro-batch through all stages of a rank takes 1.

A matrix product in forward has two in backward: one for the gradient of its input and one for that of its weight.
"""


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

    The layout must keep the rules of `ultrabench.sweep.grid.schedule_refusals`.
    """
    kinds = _zbv if layout.pp_schedule == "zbv" else _in_turn
    return [[*_numbered(kinds(layout, rank), layout.gas)] for rank in range(layout.pp)]


def _numbered(kinds: Iterator[tuple[str, int]], gas: int) -> Iterator[Pass]:
    """The passes of the first `gas` micro-batches; a stage has them in their order, for each kind of pass."""
    counts = Counter[tuple[str, int]]()
    for kind, chunk in kinds:
        number = counts[kind, chunk]
        counts[kind, chunk] += 1
        if number < gas:
            yield Pass(kind, number, chunk)


def _in_turn(layout: Layout, rank: int) -> Iterator[tuple[str, int]]:
    """Kind and chunk of each pass under afab, 1f1b and interleaved: forwards, then one forward and one backward in turn.

    The number of forwards before is gas under AFAB, pp-1-rank under 1F1B (arXiv 2006.09503), and with v stages on
    each rank 2*(pp-1-rank) + (v-1)*group (arXiv 2104.04473), where stages take turns after each group of micro-batches.
    """
    v, gas, hops = layout.virtual_stages, layout.gas, layout.pp - 1 - rank
    group = gas // max(1, gas // layout.pp)
    before = min(gas * v, (2 * hops + (v - 1) * group) if v > 1 else hops)
    if layout.pp_schedule == "afab":
        before = gas
    chunks = [n // group % v for n in range(gas * v)]
    yield from (("forward", chunk) for chunk in chunks[:before])
    for n, chunk in enumerate(chunks):
        if before + n < gas * v:
            yield "forward", chunks[before + n]
        yield "backward", v - 1 - chunk


def _zbv(layout: Layout, rank: int) -> Iterator[tuple[str, int]]:
    """Kind and chunk of each pass under ZB-V (arXiv 2401.10241, section 6), for at least 2*pp-1 micro-batches."""
    f0, f1, i0, i1, w0, w1 = product(("forward", "input", "weight"), (0, 1))
    hops, most = layout.pp - rank, max(2 * layout.pp - 1, layout.gas)
    fill = most - layout.pp - hops + 1  # turns before the last forward of the first stage
    warm_up = [f0] * (2 * hops - 1) + [f1, f0] * rank + [f1, i1, w1] * hops
    turns = [f0, i0, w0, f1, i1, w1] * fill + [i0, w0, f1, i1, w1] * (most - layout.pp - fill)
    return iter(warm_up + turns + [i0, i1] * rank + [i0, w0] * hops + [w1] * rank + [w0] * rank)


def timeline(layout: Layout) -> list[TimedPass]:
    """Every pass of one step, at the earliest time that its order and its inputs allow; messages take no time.

    A forward waits for that of the stage before, and a backward for that of the stage after. The layout must keep
    the rules that `order` needs.
    """
    queues = [deque(passes) for passes in order(layout)]
    free, ready, done = [0.0] * layout.pp, [*range(layout.pp)], list[TimedPass]()
    ends, waiting = dict[tuple[int, int, int], float](), dict[tuple[int, int, int], int]()
    while ready:
        rank = ready.pop()
        queue, stages = queues[rank], layout.stages_of(rank)
        while queue:
            kind, number, chunk = queue[0]
            way, stage = {"forward": -1, "weight": 0}.get(kind, 1), stages[chunk]
            source = (way, stage + way, number)
            if way and 0 <= source[1] < layout.num_stages and source not in ends:
                waiting[source] = rank
                break
            start = max(free[rank], ends.get(source, 0.0))
            free[rank] = ends[way, stage, number] = start + COST[kind] / layout.virtual_stages
            done.append(TimedPass(rank, stage, kind, number, chunk, start, free[rank]))
            queue.popleft()
            if (way, stage, number) in waiting:
                ready.append(waiting.pop((way, stage, number)))
    assert not any(queues), f"the passes of {layout.label()} wait for one another"
    return sorted(done, key=lambda one: (one.rank, one.start))


def bubble_share(layout: Layout) -> float:
    """The part of a step for which the ranks wait, as a fraction, where all stages take the same time: `timeline` has it.

    A rank waits for the time of w micro-batches, which is w/(gas + w) of the step. w = pp-1 under AFAB and 1F1B;
    (pp-1)/v with v interleaved stages (arXiv 2104.04473, section 2.2), and more with less than pp micro-batches;
    (pp-1)/6 under ZB-V (arXiv 2401.10241), and more where gas - 1 forwards do not fill the first wait of 2(pp-1).
    """
    pp, gas, v, waits = layout.pp, layout.gas, layout.virtual_stages, layout.pp - 1.0
    if layout.pp_schedule == "interleaved":
        waits = (pp - 1 + (v - 1) * max(0, pp - gas)) / v
    elif layout.pp_schedule == "zbv":
        waits = max((pp - 1) / 2, 2 * (pp - 1) - (gas - 1)) / (COST["forward"] + COST["backward"])
    return waits / (gas + waits)
