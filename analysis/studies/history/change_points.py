"""Where the level of a series of numbers changes for good, by Student's test of all its segments.

docs/guide/history.md says how often a change is found, or seems to be one.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

MIN_LENGTH = 3
"""Smallest number of values of a level, so that one or two bad values are no level."""
NUM_RECENT = 2
"""Number of last values that may be the start of a level; the next value confirms or rejects it."""
_WINDOW, _OUTLIER_STDS = 5, 5.0
"""Number of values around an outlier, and its distance from their median in standard deviations."""


def outliers(values: Any) -> Any:
    """Whether each value is far from those around it, relative to the noise in the differences of neighbours.

    The NUM_RECENT last values may be a new level, so that they are no outliers if all are far off on one side.
    """
    if len(values) < 2 * MIN_LENGTH:
        return np.zeros(len(values), bool)
    # 1.4826 median absolute deviations are the standard deviation of a normal distribution.
    noise = 1.4826 * np.median(abs(np.diff(values))) / np.sqrt(2)
    windows = np.lib.stride_tricks.sliding_window_view(values, _WINDOW)
    window_numbers = np.clip(np.arange(len(values)) - _WINDOW // 2, 0, len(windows) - 1)
    deviations = values - np.median(windows, axis=1)[window_numbers]
    is_outlier = abs(deviations) > _OUTLIER_STDS * noise
    signs = np.sign(deviations[-NUM_RECENT:])
    is_outlier[-NUM_RECENT:] &= not (is_outlier[-NUM_RECENT:].all() and abs(signs.sum()) == NUM_RECENT)
    return is_outlier


def strongest(values: Any, min_last: int = NUM_RECENT) -> tuple[float, tuple[int, ...]]:
    """The p-value of the strongest change, and the numbers of the first values of the levels that it begins.

    A change lasts until the end, or ends again, so that a segment i:j differs from all other values. The p-value is
    that of Student's test, times the number of possible segments: half of the probability of error is for
    changes that last, half for those that end. It is 1 where there are too few values.

    Args:
        min_last: smallest number of values of a segment that lasts until the end; others have MIN_LENGTH.
    """
    if (n := len(values)) < 2 * MIN_LENGTH:
        return 1.0, ()
    centred = values - np.mean(values)
    sums = np.concatenate([[0.0], np.cumsum(centred)])
    first, end = np.triu_indices(n + 1, min_last)
    is_possible = (first >= MIN_LENGTH) & ((end == n) | (np.minimum(end - first, n - end) >= MIN_LENGTH))
    first, end = first[is_possible], end[is_possible]
    num_inside, num_outside = end - first, n - (end - first)
    squares_between = (sums[end] - sums[first]) ** 2 * n / (num_inside * num_outside)
    squares_within = np.maximum((centred**2).sum() - squares_between, np.finfo(float).tiny)
    is_lasting = end == n
    num_segments = np.where(is_lasting, is_lasting.sum(), (~is_lasting).sum())
    p_values = 4 * num_segments * stats.t.sf(np.sqrt(squares_between / squares_within * (n - 2)), n - 2)
    best = int(np.argmin(p_values))
    return float(min(1.0, p_values[best])), tuple(int(edge) for edge in (first[best], end[best]) if edge < n)


def change_points(values: Any, max_p: float, max_parts_p: float, min_last: int = NUM_RECENT) -> list[int]:
    """The numbers of the first values of new levels, in order, found in ever smaller parts.

    The last level may have fewer than MIN_LENGTH values; the next value confirms or rejects it.

    Args:
        max_p: largest p-value of the first change.
        max_parts_p: that of further ones, which the parts share by their lengths; it halves with each depth.
        min_last: smallest number of values of the last level.
    """
    p_value, edges = strongest(values, min_last)
    if p_value > max_p or not edges:
        return []
    changes = {*edges}
    for first, end in pairwise((0, *edges, len(values))):
        part_p_value = max_parts_p * (end - first) / len(values)
        min_length = min_last if end == len(values) else MIN_LENGTH
        part_changes = change_points(values[first:end], part_p_value, part_p_value / 2, min_length)
        changes |= {first + edge for edge in part_changes}
    return sorted(changes)
