"""Statistics of step times: the median and its confidence interval."""

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import NormalDist, median

MIN_SAMPLES = 6
"""Smallest number of samples whose extremes enclose the median with 95 % confidence (1 - 2/2**6)."""
START_SD = 0.01
"""Standard deviation of the speed of a run between its starts, relative to it, as long as few starts have shown it."""

TWO_SIDED = NormalDist().inv_cdf(0.975)
"""Standard deviations from the mean within which 95 % of a normal distribution lie."""


@functools.cache  # most runs measure as many steps, and a rank takes longer than all else here
def _order_statistic(n: int) -> int:
    """Largest k for which the k-th smallest and the k-th largest of n samples enclose the median at 95 %."""
    log_factor = math.lgamma(n + 1) - n * math.log(2)
    # Each share is binomial(n, k) / 2**n.
    probabilities = (math.exp(log_factor - math.lgamma(k + 1) - math.lgamma(n - k + 1)) for k in range(n + 1))
    return sum(2 * tail_probability <= 0.05 for tail_probability in accumulate(probabilities))


def ci95_rel(step_times_s: Sequence[float], error_s: float = 0.0) -> float | None:
    """Half-width of the 95 % interval of the median step time, relative to the median.

    The interval needs no assumption about the distribution: it lies between two order statistics, whose ranks
    follow from the binomial distribution. The result is None below 6 samples and when the median is 0.

    Args:
        error_s: how much each time may be wrong in either direction, in seconds; it widens the interval.
    """
    n = len(step_times_s)
    if n < MIN_SAMPLES or not (median_s := median(step_times_s)):
        return None
    sorted_times_s, k = sorted(step_times_s), _order_statistic(n)
    return ((sorted_times_s[n - k] - sorted_times_s[k - 1]) / 2 + error_s) / median_s


def t_quantile(dof: int) -> float:
    """The 97.5 % quantile of Student's distribution with 3 or more degrees of freedom, within 0.2 %.

    It is the expansion around the quantile of the normal distribution (Abramowitz and Stegun, 26.7.5).
    """
    z = TWO_SIDED
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / dof**power for power, term in enumerate(terms, 1))


def with_error(own_ci95_rel: float | None, error_rel: float | None) -> float | None:
    """Half-width of an interval with another, independent error added in quadrature; None where one is unknown."""
    return None if own_ci95_rel is None or error_rel is None else math.hypot(own_ci95_rel, error_rel)


def extreme_medians_s(step_times_s: Sequence[Sequence[float]]) -> dict[str, float]:
    """Rank -> median step time, for the fastest and the slowest rank; empty unless two ranks have steps.

    Args:
        step_times_s: the step times of each rank; a rank with a step of 0 s is left out.
    """
    ranks_and_times_s = ((str(rank), times_s) for rank, times_s in enumerate(step_times_s))
    medians_s = {rank: median(times_s) for rank, times_s in ranks_and_times_s if times_s and min(times_s) > 0}
    if len(medians_s) < 2:
        return {}
    extreme_ranks = {min(medians_s, key=medians_s.__getitem__), max(medians_s, key=medians_s.__getitem__)}
    return {rank: medians_s[rank] for rank in sorted(extreme_ranks)}
