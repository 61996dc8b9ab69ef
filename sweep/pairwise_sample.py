"""A few runs of a plan that differ from each other as much as they can."""

from collections.abc import Sequence
from itertools import combinations_with_replacement

from ultrabench.layout import AXES
from ultrabench.sweep.candidate import Candidate

Word = tuple[str, object]


def pairwise_sample(runs: Sequence[Candidate], count: int) -> tuple[Candidate, ...]:
    """At most `count` of `runs`, each the one that brings most values and pairs of values which none had before.

    Of equals the first counts. A mistake in a parallel form shows where it is used, or where it
    meets one other form, so pairs are what a small selection should hold.
    """
    left, chosen, seen = list(runs), list[Candidate](), set[tuple[Word, Word]]()
    while left and len(chosen) < count:
        best = max(left, key=lambda run: len(_pairs(run) - seen))  # max() keeps the first of equals
        left.remove(best)
        chosen.append(best)
        seen |= _pairs(best)
    return tuple(chosen)


def _pairs(run: Candidate) -> set[tuple[Word, Word]]:
    layout = run.layout
    words: list[Word] = [(name, getattr(layout, name)) for name in AXES if name not in ("dp", "mbs", "gas")]
    words += [("dp > 1", layout.dp > 1), ("mbs > 1", layout.mbs > 1), ("gas > 1", layout.gas > 1)]
    return {*combinations_with_replacement(words, 2)}
