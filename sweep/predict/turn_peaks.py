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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrabench.layout import Layout
from ultrabench.sweep.predict.micro_batch import MicroBatch
from ultrabench.sweep.predict.pipeline import turns
from ultrabench.sweep.predict.rank_state import RankState, StageSizes, rank_stages
from ultrabench.sweep.predict.stage_memory import OPTIMIZER

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Moment = tuple[str, float, float, float, float, float]
"""Phase, and bytes of gathered weights, gradients, activations, logits and buffers."""
MOST_ROUNDS = 4
"""Number of rounds of a schedule that are looked at; what comes later is like the first ones."""


class Kind(NamedTuple):
    """What the moments of a turn depend on, beside the activations in flight."""

    stage: StageSizes
    summed: bool
    """Whether the stage has gradients of earlier micro-batches."""
    gathered: bool
    last: bool
    forward: bool


class RankTurns(NamedTuple):
    """The turns of all ranks, those of a rank one after another; T turns in which H combinations are held."""

    held: Floats
    """[H, v+1] micro-batches that each stage of the rank keeps, and messages."""
    ranks: Ints
    """[H] the rank of each."""
    starts: Ints
    """[T] the first combination of each turn."""
    ends: list[int]
    """For each rank the number of turns up to its last one."""
    others_weights: Floats
    """[T] gathered parameters of the other stages of the rank."""
    others_gradients: Floats
    """[T] bytes of gradients of the other stages of the rank."""
    kinds: list[Kind]
    kind: Ints
    """[T] index of the kind of each turn."""
    stages: list[StageSizes]
    """The stages that keep different activations."""
    stage: Ints
    """[ranks, v] index of the stage that keeps as much."""


def rounds_looked_at(layout: Layout) -> int:
    """The number of micro-batches whose turns are looked at."""
    rounds = max(1, layout.gas // layout.pp)
    return layout.gas // rounds * min(rounds, MOST_ROUNDS)


def turn_peaks(
    layout: Layout, m: MicroBatch, key: tuple[Any, ...], moments: Callable[[RankState], list[Moment]]
) -> list[Moment]:
    """The largest moment of each rank of the pipeline axis.

    Args:
        key: the arguments of `rank_stages`.
        moments: the moments of a state, among which only those of the phase `optimizer` do not grow with `kept`.
    """
    t = _rank_turns(
        key, layout.pp, rounds_looked_at(layout), layout.pp_schedule, layout.zero_stage == 3, m.full
    )
    bytes_of = np.array([m.kept_by(s.stage) for s in t.stages])
    own = np.column_stack([bytes_of[t.stage], np.full(layout.pp, m.hidden)])
    kept = np.maximum.reduceat((t.held * own[t.ranks]).sum(axis=1), t.starts)
    others = m.word * t.others_weights + t.others_gradients
    found = [moments(_state(m, kind)) for kind in t.kinds]
    most = [
        [
            max((a + b + c + d + e for p, a, b, c, d, e in some if (p == OPTIMIZER) is fixed), default=-inf)
            for some in found
        ]
        for fixed in (False, True)
    ]
    grows, stays = np.array(most)
    total = np.maximum(kept + grows[t.kind], stays[t.kind]) + others

    def largest(at: int) -> Moment:
        held, weights, gradients = float(kept[at]), float(t.others_weights[at]), float(t.others_gradients[at])
        some = [(*each[:3], each[3] + held * (each[0] != OPTIMIZER), *each[4:]) for each in found[t.kind[at]]]
        phase, a, b, c, d, e = max(some, key=lambda each: sum(each[1:]))
        return phase, a + m.word * weights, b + gradients, c, d, e

    return [largest(begin + int(total[begin:end].argmax())) for begin, end in pairwise((0, *t.ends))]


def _state(m: MicroBatch, kind: Kind) -> RankState:
    """The state of a turn of this kind, as if nothing was in flight."""
    s = kind.stage
    return RankState(
        s, 0.0, m.left_by(s.stage) - m.kept_by(s.stage), 4.0 * s.whole * kind.summed, forward=s.stage.has_head,
        reduces=kind.last, frees=kind.last, gathered=kind.gathered, ends_forward=kind.forward,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _rank_turns(key: tuple[Any, ...], pp: int, gas: int, schedule: str, late: bool, every: int) -> RankTurns:
    """The turns of all ranks; `late` is ZeRO-3, and each `every`-th layer keeps its input only."""
    ranks = rank_stages(*key)
    of_ranks = turns(pp, gas, len(ranks[0].stages), schedule, late and ranks[0].stages[0].shards > 1)
    kinds, stages = dict[Kind, int](), dict[StageSizes, int]()
    held, held_by, starts, ends, kind = (
        list[Sequence[int]](),
        list[int](),
        list[int](),
        list[int](),
        list[int](),
    )
    weights, gradients = list[int](), list[int]()
    alike = [[_alike(s, every) for s in rank.stages] for rank in ranks]
    for rank, (own, of_rank) in enumerate(zip(alike, of_ranks, strict=True)):
        for turn in of_rank:
            starts.append(len(held))
            held += turn.held
            held_by += [rank] * len(turn.held)
            at, s = turn.chunk, own[turn.chunk]
            made = Kind(s, turn.ended[at] > 0, turn.gathered[at], turn.last, turn.forward)
            kind.append(kinds.setdefault(made, len(kinds)))
            others = [n for n in range(len(own)) if n != at]
            there = ((own[n].whole if turn.gathered[n] else own[n].last) for n in others if turn.ended[n] < 2)
            weights.append(sum(there))
            gradients.append(sum(4 * (0, own[n].whole, own[n].shard)[turn.ended[n]] for n in others))
        ends.append(len(starts))
    stage = [[stages.setdefault(s, len(stages)) for s in own] for own in alike]
    return RankTurns(
        np.array(held, float), np.array(held_by), np.array(starts), ends, np.array(weights, float),
        np.array(gradients, float), [*kinds], np.array(kind), [*stages], np.array(stage),
    )  # fmt: skip


def _alike(s: StageSizes, every: int) -> StageSizes:
    """The same value for stages that differ only in their place in the model."""
    return s._replace(stage=replace(s.stage, index=0, first_layer=s.stage.first_layer % (every or 1)))
