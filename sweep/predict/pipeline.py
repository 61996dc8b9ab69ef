"""The order in which the ranks of a pipeline run their micro-batches, and when they wait for one another.

It is the order of torch.distributed.pipelining, which runs the schedules of our own kernel.
"""

from collections import Counter, deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from operator import le
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


class Turn(NamedTuple):
    """A state of a rank as a backward begins or a forward ends; tuples but `held` have an item for each of its stages."""

    chunk: int
    """Index of the stage at work."""
    forward: bool
    last: bool
    """Whether it is the stage's last backward in a step."""
    ended: tuple[int, ...]
    """0 before the first backward of a stage has ended, 2 after the last one, 1 between them."""
    gathered: tuple[bool, ...]
    """Whether a stage's parameters are there, which forwards free under ZeRO-3; before the first one they are."""
    held: tuple[tuple[int, ...], ...]
    """What it may hold, none less than another: micro-batches kept by each stage; and messages, of which are those
    received and not used up, and gradients sent that nothing has answered yet."""


@lru_cache(maxsize=1024)
def turns(pp: int, gas: int, virtual: int, schedule: str, frees: bool) -> list[list[Turn]]:
    """The turns of each rank under a schedule of several stages; forwards only where one before has freed parameters.

    `frees` says whether forwards free parameters, as under ZeRO-3.
    """
    layout = Layout(dp=1, pp=pp, gas=gas, virtual_stages=virtual, pp_schedule=schedule)
    found = list[list[Turn]]()
    for rank, passes in enumerate(with_messages(layout)):
        states = dict[Turn, set[tuple[int, ...]]]()
        for turn in _turns(layout, rank, passes, frees):
            states.setdefault(turn._replace(held=()), set()).update(turn.held)
        found.append([turn._replace(held=_largest(held)) for turn, held in states.items()])
    return found


def _largest(held: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those of which no other one is at least as large in every item."""
    return tuple(one for one in held if not any(one != other and all(map(le, one, other)) for other in held))


def _turns(layout: Layout, rank: int, passes: list[Pass | None], frees: bool) -> Iterator[Turn]:
    stages, gas, v, received = layout.stages_of(rank), layout.gas, layout.virtual_stages, 0
    kept, backwards, gathered = [0] * v, [0] * v, [True] * v
    for one in passes:
        if one is None:
            received += 1
            continue
        kind, _, chunk = one
        way, forward, ended = WAY[kind], kind == "forward", tuple((n > 0) + (n == gas) for n in backwards)
        kept[chunk] += forward
        if kind in ("backward", "input") or (forward and not gathered[chunk]):
            sent = sum(
                n > 0 for n, stage in zip(ended, stages, strict=True) if stage not in (0, stages[chunk])
            )
            last = kind == "backward" and backwards[chunk] == gas - 1
            yield Turn(chunk, forward, last, ended, tuple(gathered), ((*kept, received + sent),))
        received -= 0 <= stages[chunk] + way < layout.num_stages and stages[chunk] + way not in stages
        gathered[chunk] = not (forward and frees)
        kept[chunk] -= kind in ("backward", "weight")
        backwards[chunk] += kind in ("backward", "weight")


def with_messages(layout: Layout) -> list[list[Pass | None]]:
    """The passes of each rank, with None where torch makes the buffer of a message to it, under schedules of several stages.

    In turn each rank adds its next pass, if the pass before that in the model was added, and a message to the rank
    of the pass after it.
    """
    ends = [(kind, layout.gas - 1) for kind in ("backward", "weight")]
    # After the last pass of a stage two turns go to the reduction of its gradients and to freeing its parameters.
    queues = [
        deque(p for one in passes for p in (one, *[None, None] * (one[:2] in ends)))
        for passes in order(layout)
    ]
    ranks = {stage: rank for rank in range(layout.pp) for stage in layout.stages_of(rank)}
    lowered, done = [list[Pass | None]() for _ in queues], set[tuple[int, int, int]]()
    while any(queues):
        for rank, queue in enumerate(queues):
            if not queue:
                continue
            if (one := queue[0]) is None:
                queue.popleft()
                continue
            kind, number, chunk = one
            way, stage = WAY[kind], layout.stages_of(rank)[chunk]
            if way and stage + way in ranks and (way, stage + way, number) not in done:
                continue
            lowered[rank].append(one)
            queue.popleft()
            done.add((way, stage, number))
            if (peer := ranks.get(stage - way, rank)) != rank:
                lowered[peer].append(None)
    return lowered


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
            way, stage = WAY[kind], stages[chunk]
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
