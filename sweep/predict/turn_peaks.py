"""The peaks of ranks that hold several stages, over the turns of their schedule.

A turn adds the activations of micro-batches in flight, the parameters and gradients of the other stages, and what the
stage at work has beyond them. The last part is the same for all ranks with such a stage, so that it is computed once
for each kind of turn; the others are matrix products.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.stages import Stage
from ultrabench.sweep.predict.micro_batch import MicroBatch
from ultrabench.sweep.predict.pipeline import turns
from ultrabench.sweep.predict.rank_state import RankStages, RankState, StageSizes, stages_of_ranks
from ultrabench.sweep.predict.stage_memory import OPTIMIZER

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Moment = tuple[str, float, float, float, float, float]
"""Phase, and bytes of gathered weights, gradients, activations, logits and buffers."""
MOST_ROUNDS = 4
"""Number of rounds of a schedule that are looked at; what comes later is like the first ones."""


class Kind(NamedTuple):
    """What the moments of a turn depend on, beside the activations in flight and the sizes of its stage."""

    rank: int
    chunk: int
    """The first stage, as an index among those of the rank, which differs from that of the turn only in its place."""
    summed: bool
    """Whether the stage has gradients of earlier micro-batches."""
    gathered: bool
    last: bool
    forward: bool


class RankTurns(NamedTuple):
    """The turns of all ranks, those of a rank one after another: T turns in which H combinations are held."""

    held: Floats
    """[H, v+1] micro-batches that each stage of the rank keeps, and messages."""
    held_by: Ints
    """[H] the rank of each."""
    starts: Ints
    """[T] the first combination of each turn."""
    ends: tuple[int, ...]
    """For each rank the number of turns up to its last one."""
    ranks: Ints
    """[T] the rank of each turn."""
    others: Floats
    """[4, T, v] 1 for each other stage of the rank of which, in this order: all parameters are gathered, the last
    group is, gradients are summed, and gradients are reduced."""
    kinds: tuple[Kind, ...]
    kind: Ints
    """[T] index of the kind of each turn."""
    stages: tuple[tuple[int, int], ...]
    """Rank and chunk of each stage that keeps different activations."""
    stage: Ints
    """[ranks, v] index of the stage that keeps as much."""


def rounds_looked_at(layout: Layout) -> int:
    """The number of micro-batches whose turns are looked at."""
    rounds = max(1, layout.gas // layout.pp)
    return layout.gas // rounds * min(rounds, MOST_ROUNDS)


def turn_peaks(
    layout: Layout,
    m: MicroBatch,
    shape: ModelShape,
    ranks: tuple[RankStages, ...],
    moments: Callable[[RankState], list[Moment]],
) -> list[Moment]:
    """The largest moment of each rank of the pipeline axis.

    Args:
        ranks: the stages of each rank.
        moments: the moments of a state. All but a last one of the phase `optimizer` grow with its `kept`.
    """
    frees, pp = layout.zero_stage == 3 and ranks[0].stages[0].shards > 1, layout.pp
    t = _rank_turns(
        shape, pp, rounds_looked_at(layout), layout.virtual_stages, layout.pp_schedule, frees, m.full
    )
    bytes_of = np.array([m.kept_by(ranks[rank].stages[chunk].stage) for rank, chunk in t.stages])
    own = np.column_stack([bytes_of[t.stage], np.full(pp, m.hidden)])
    kept = np.maximum.reduceat((t.held * own[t.held_by]).sum(axis=1), t.starts)
    sizes = np.array([[(s.whole, s.last, s.whole, s.shard) for s in rank.stages] for rank in ranks], float)
    whole, last, summed, reduced = (t.others * sizes[t.ranks].transpose(2, 0, 1)).sum(axis=2)
    weights, gradients = m.word * (whole + last), 4 * (summed + reduced)
    found = [moments(_state(m, ranks[kind.rank].stages[kind.chunk], kind)) for kind in t.kinds]
    grow, stay = list[float](), list[float]()
    for some in found:
        totals = [a + b + c + d + e for _, a, b, c, d, e in some]
        stay.append(totals.pop() if some[-1][0] == OPTIMIZER else -inf)
        grow.append(max(totals))
    total = np.maximum(kept + np.array(grow)[t.kind], np.array(stay)[t.kind]) + weights + gradients

    def largest(at: int) -> Moment:
        held, some = float(kept[at]), found[t.kind[at]]
        all_bytes = [a + b + c + d + e + held * (p != OPTIMIZER) for p, a, b, c, d, e in some]
        phase, a, b, c, d, e = some[all_bytes.index(max(all_bytes))]
        return phase, a + float(weights[at]), b + float(gradients[at]), c + held * (phase != OPTIMIZER), d, e

    return [largest(begin + int(total[begin:end].argmax())) for begin, end in pairwise((0, *t.ends))]


def _state(m: MicroBatch, s: StageSizes, kind: Kind) -> RankState:
    """The state of a turn of this kind, as if nothing was in flight."""
    return RankState(
        s, 0.0, m.left_by(s.stage) - m.kept_by(s.stage), 4.0 * s.whole * kind.summed, forward=s.stage.has_head,
        reduces=kind.last, frees=kind.last, gathered=kind.gathered, ends_forward=kind.forward,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _rank_turns(
    shape: ModelShape, pp: int, gas: int, virtual: int, schedule: str, frees: bool, every: int
) -> RankTurns:
    """The turns of all ranks; each `every`-th layer keeps its input only."""
    kinds, stages = dict[Kind, int](), dict[Stage, tuple[int, int]]()
    held, held_by, starts = list[Sequence[int]](), list[int](), list[int]()
    ranks, ends, kind, others = list[int](), list[int](), list[int](), list[list[tuple[bool, ...]]]()
    places = [
        # What a stage keeps does not depend on its place, but on which of its layers are recomputed.
        [replace(s, index=0, first_layer=s.first_layer % (every or 1)) for s in own]
        for own in stages_of_ranks(shape, pp, virtual, schedule)
    ]
    for rank, own in enumerate(places):
        for chunk, place in enumerate(own):
            stages.setdefault(place, (rank, chunk))
    for rank, of_rank in enumerate(turns(pp, gas, virtual, schedule, frees)):
        for turn in of_rank:
            at, own = turn.chunk, places[rank]
            starts.append(len(held))
            held += turn.held
            held_by += [rank] * len(turn.held)
            ranks.append(rank)
            made = Kind(*stages[own[at]], turn.ended[at] > 0, turn.gathered[at], turn.last, turn.forward)
            kind.append(kinds.setdefault(made, len(kinds)))
            others.append([
                (n != at and ended < 2 and there, n != at and ended < 2 and not there, n != at and ended == 1, n != at and ended == 2)
                for n, (ended, there) in enumerate(zip(turn.ended, turn.gathered, strict=True))
            ])  # fmt: skip
        ends.append(len(starts))
    number = {place: n for n, place in enumerate(stages)}
    return RankTurns(
        np.array(held, float), np.array(held_by), np.array(starts), tuple(ends), np.array(ranks),
        np.array(others, float).transpose(2, 0, 1).copy(), tuple(kinds), np.array(kind), tuple(stages.values()),
        np.array([[number[place] for place in own] for own in places]),
    )  # fmt: skip
