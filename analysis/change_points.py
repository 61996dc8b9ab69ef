"""Where the level of a series of numbers changes for good, by Student's test of all its segments.

docs/guide/compare.md says how often a change is found, or seems to be one.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

LEAST = 3
"""Fewest values of a level, so that one or two bad values make none."""
RECENT = 2
"""Number of last values that may begin a level, which the next value will tell."""
_WINDOW, _FAR = 5, 5.0
"""A value is an outlier at so many standard deviations from the median of the so many values around it."""


def outliers(values: Any) -> Any:
    """Whether each value is far from those around it; the noise is that of the differences of neighbours.

    The RECENT last values together may be a new level, so that they are no outliers if all are far off on one side.
    """
    if len(values) < 2 * LEAST:
        return np.zeros(len(values), bool)
    # 1.4826 median absolute deviations are the standard deviation of a normal distribution.
    noise = 1.4826 * np.median(abs(np.diff(values))) / np.sqrt(2)
    windows = np.lib.stride_tricks.sliding_window_view(values, _WINDOW)
    window_of = np.clip(np.arange(len(values)) - _WINDOW // 2, 0, len(windows) - 1)
    off = values - np.median(windows, axis=1)[window_of]
    far = abs(off) > _FAR * noise
    far[-RECENT:] &= not (far[-RECENT:].all() and abs(np.sign(off[-RECENT:]).sum()) == RECENT)
    return far


def strongest(values: Any, recent: int = RECENT) -> tuple[float, tuple[int, ...]]:
    """The p-value of the strongest change, and the numbers of the first values of the levels that it begins.

    A change lasts until the end, or ends again, so that a segment i:j differs from all other values. The p-value is
    that of Student's test, times the number of possible segments: half of the probability of error is for
    changes that last, half for those that end. It is 1 where there are too few values.

    Args:
        recent: fewest values of a segment that lasts until the end; others have at least LEAST.
    """
    if (n := len(values)) < 2 * LEAST:
        return 1.0, ()
    sums = np.concatenate([[0.0], np.cumsum(values - np.mean(values))])
    first, end = np.triu_indices(n + 1, recent)
    possible = (first >= LEAST) & ((end == n) | ((end - first >= LEAST) & (n - end >= LEAST)))
    first, end = first[possible], end[possible]
    inside, outside = end - first, n - (end - first)
    between = (sums[end] - sums[first]) ** 2 * n / (inside * outside)
    within = np.maximum(((values - np.mean(values)) ** 2).sum() - between, np.finfo(float).tiny)
    lasts = end == n
    number_of_segments = np.where(lasts, lasts.sum(), (~lasts).sum())
    p_values = 4 * number_of_segments * stats.t.sf(np.sqrt(between / within * (n - 2)), n - 2)
    best = int(np.argmin(p_values))
    return float(min(1.0, p_values[best])), tuple(int(edge) for edge in (first[best], end[best]) if edge < n)


def change_points(values: Any, level: float, level_of_parts: float, recent: int = RECENT) -> list[int]:
    """The numbers of the first values of new levels, in order, found in ever smaller parts.

    The last level may have fewer than LEAST values: whether it lasts, the next value will tell.

    Args:
        level: largest p-value of the first change.
        level_of_parts: that of further ones, which the parts share by their lengths; it halves with each depth.
        recent: fewest values of the last level.
    """
    p_value, edges = strongest(values, recent)
    if p_value > level or not edges:
        return []
    changes = {*edges}
    for first, end in pairwise((0, *edges, len(values))):
        share = level_of_parts * (end - first) / len(values)
        fewest = recent if end == len(values) else LEAST
        parts = change_points(values[first:end], share, share / 2, fewest)
        changes |= {first + edge for edge in parts}
    return sorted(changes)
