"""Where the level of a series of numbers changes for good, by Student's test of all its segments.

docs/guide/compare.md says how often a change is found, or seems to be one.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

MIN_LENGTH = 3
"""Fewest values of a level, so that one or two bad values make none."""
MIN_LAST = 2
"""Fewest values of the last level of a series; the next value will confirm or reject it."""
_WINDOW, _OUTLIER_DEVIATIONS = 5, 5.0
"""A value is an outlier if it is more than this many standard deviations from the median of the _WINDOW values around it."""


def outliers(values: Any) -> Any:
    """Whether each value is far from those around it; the noise is that of the differences of neighbours.

    The MIN_LAST last values together may be a new level, so that they are no outliers if all are far off on one side.
    """
    if len(values) < 2 * MIN_LENGTH:
        return np.zeros(len(values), bool)
    # 1.4826 median absolute deviations are the standard deviation of a normal distribution.
    noise = 1.4826 * np.median(abs(np.diff(values))) / np.sqrt(2)
    windows = np.lib.stride_tricks.sliding_window_view(values, _WINDOW)
    window_numbers = np.clip(np.arange(len(values)) - _WINDOW // 2, 0, len(windows) - 1)
    deviations = values - np.median(windows, axis=1)[window_numbers]
    is_far = abs(deviations) > _OUTLIER_DEVIATIONS * noise
    is_far[-MIN_LAST:] &= not (
        is_far[-MIN_LAST:].all() and abs(np.sign(deviations[-MIN_LAST:]).sum()) == MIN_LAST
    )
    return is_far


def strongest(values: Any, min_last: int = MIN_LAST) -> tuple[float, tuple[int, ...]]:
    """The p-value of the strongest change, and the numbers of the first values of the levels that it begins.

    A change lasts until the end, or ends again, so that a segment i:j differs from all other values. The p-value is
    that of Student's test, times the number of possible segments: half of the probability of error is for
    changes that last, half for those that end. It is 1 where there are too few values.

    Args:
        min_last: fewest values of a segment that lasts until the end; others have at least MIN_LENGTH.
    """
    if (n := len(values)) < 2 * MIN_LENGTH:
        return 1.0, ()
    sums = np.concatenate([[0.0], np.cumsum(values - np.mean(values))])
    first, end = np.triu_indices(n + 1, min_last)
    is_valid = (first >= MIN_LENGTH) & ((end == n) | ((end - first >= MIN_LENGTH) & (n - end >= MIN_LENGTH)))
    first, end = first[is_valid], end[is_valid]
    num_inside, num_outside = end - first, n - (end - first)
    ss_between = (sums[end] - sums[first]) ** 2 * n / (num_inside * num_outside)
    ss_within = np.maximum(((values - np.mean(values)) ** 2).sum() - ss_between, np.finfo(float).tiny)
    is_lasting = end == n
    num_segments = np.where(is_lasting, is_lasting.sum(), (~is_lasting).sum())
    p_values = 4 * num_segments * stats.t.sf(np.sqrt(ss_between / ss_within * (n - 2)), n - 2)
    best = int(np.argmin(p_values))
    return float(min(1.0, p_values[best])), tuple(int(edge) for edge in (first[best], end[best]) if edge < n)


def change_points(values: Any, level: float, level_of_parts: float, min_last: int = MIN_LAST) -> list[int]:
    """The numbers of the first values of new levels, in order, found in ever smaller parts.

    The last level may have fewer than MIN_LENGTH values; the next value will confirm or reject it.

    Args:
        level: largest p-value of the first change.
        level_of_parts: that of further ones, which the parts share by their lengths; it halves with each depth.
        min_last: fewest values of the last level.
    """
    p_value, edges = strongest(values, min_last)
    if p_value > level or not edges:
        return []
    changes = {*edges}
    for first, end in pairwise((0, *edges, len(values))):
        part_level = level_of_parts * (end - first) / len(values)
        min_last_of_part = min_last if end == len(values) else MIN_LENGTH
        new_levels = change_points(values[first:end], part_level, part_level / 2, min_last_of_part)
        changes |= {first + edge for edge in new_levels}
    return sorted(changes)
