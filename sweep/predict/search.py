"""Chooses the layouts of a cell that are worth measuring, from predictions and from what was measured so far.

A Gaussian process over layouts corrects log(measured / predicted) of the step time; it is conditioned on one
measurement after the other. The chance that a layout does not fit moves with the runs that did and did not.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Protocol, TypeVar

import numpy as np

from ultrabench.layout import AXES, FOLLOWING, TEXT_AXES, Layout, dominates
from ultrabench.sweep.predict.predict import LIKELY_OOM, Prediction, too_large_text

BIAS_SD = 0.15
"""Standard deviation of the error of log step time that all layouts of a cell share."""
SHAPE_SD = 0.15
"""Standard deviation of the error that layouts share the more, the closer they are."""
LENGTH_SCALE = 1.5
"""Distance between layouts at which they share exp(-1/2) of that error; a doubled degree is 1."""
NOISE_SD = 0.03
"""Standard deviation of log step time between measurements."""
MAX_LOG_RATIO = 0.7
"""Largest absolute value of log(measured / predicted) that is believed; what is beyond is an accident.

BIAS_SD, SHAPE_SD and MAX_LOG_RATIO are those of a prediction whose 80 % interval has the width that the first two
stand for. They are in proportion to the interval of each prediction, but no prediction counts as surer
than a measurement.
"""
MAX_SURPRISE_SDS = 3.0
"""Standard deviations beyond which a measurement is taken for an accident and counts as a less exact one."""
SHARED_MEMORY_VARIANCE = 0.25
"""Part of the variance of the error of predicted memory that the layouts of a cell share."""
MIN_GAIN = 0.02
"""A layout is worth a run for being faster than the best by this share."""
MIN_CHANCE = 0.04
"""The search of a cell goes on while any layout that is left has this chance to be that much faster.

`python benchmarks/caution.py` chooses it on cells that are not among those it is judged by.
"""

_NORMAL = NormalDist()
_STANDARD_LOG_WIDTH = 2 * _NORMAL.inv_cdf(0.9) * math.hypot(BIAS_SD, SHAPE_SD)
"""Width of the 80 % interval of log(measured / predicted) that BIAS_SD and SHAPE_SD stand for."""
_MIN_SCALE = NOISE_SD / math.hypot(BIAS_SD, SHAPE_SD)
_SHARED_ERRORS = [step / 4 for step in range(-12, 13)]
"""Errors of predicted memory that the layouts of a cell may share, in standard deviations."""


class Run(Protocol):
    """A candidate, or a measured run that is replayed."""

    @property
    def run_id(self) -> str:
        """The run_id, which names the run."""

    @property
    def layout(self) -> Layout:
        """The layout of the run."""

    @property
    def prediction(self) -> Prediction:
        """The predicted memory and time of the run."""


_Run = TypeVar("_Run", bound=Run)


@dataclass(frozen=True, slots=True)
class TriedRuns:
    """How the runs of a cell that were tried so far ended, by run_id; sets hold run_ids."""

    times_s: Mapping[str, float] = field(default_factory=dict)
    """Step times of the runs that fit into memory, in seconds."""
    oom_ids: Set[str] = frozenset()
    failed_ids: Set[str] = frozenset()
    """Runs that gave no step time for another reason than memory."""
    pending_ids: Set[str] = frozenset()
    """Runs that have not ended; their step times are taken as predicted."""
    max_p_oom: float = 1.0
    """P(OOM) above which no run is made."""

    @property
    def begun_ids(self) -> Set[str]:
        """All runs that were tried, also those that have not ended."""
        return self.times_s.keys() | self.oom_ids | self.failed_ids | self.pending_ids


@dataclass(slots=True)
class Belief:
    """What is expected of one run. `mean` and `variance` are those of log(measured / predicted) step time.

    `coordinates` and `axis_words` are what the functions `coordinates` and `words` return for its layout.
    """

    run: Run
    p_oom: float
    coordinates: tuple[float, ...]
    axis_words: tuple[str, ...]
    scale: float
    """Factor of BIAS_SD, SHAPE_SD and MAX_LOG_RATIO."""
    variance: float
    mean: float = 0.0

    @property
    def log_time(self) -> float:
        """Expected logarithm of the step time in seconds."""
        return math.log(self.run.prediction.step_time_s) + self.mean

    def p_better(self, best_s: float) -> float:
        """Chance that the run fits and is faster than `best_s` seconds by the share MIN_GAIN."""
        log_gap = math.log(best_s * (1 - MIN_GAIN)) - self.log_time
        return (1 - self.p_oom) * _NORMAL.cdf(log_gap / math.sqrt(self.variance))

    def expected_gain(self, best_s: float) -> float:
        """Expected reduction of the logarithm of the best step time, `best_s` so far."""
        sd = math.sqrt(self.variance)
        log_gap = (math.log(best_s) - self.log_time) / sd
        return (1 - self.p_oom) * sd * (log_gap * _NORMAL.cdf(log_gap) + _NORMAL.pdf(log_gap))


_AXIS_COORDINATES: dict[str, Callable[[Layout], float]] = {
    "zero_stage": lambda layout: LENGTH_SCALE * layout.zero_stage,
    # The replicas of each shard, which are 1 without ZeRO.
    "dp_shard": lambda axes: math.log2(axes.dp * axes.cp // axes.zero_shards) * (axes.zero_stage > 0),
}
"""Axes whose numbers are not compared by their doublings, since they may be 0 -> the coordinate of a layout."""
_NUMBER_AXES = tuple(axis for axis in AXES if axis not in (*FOLLOWING, *TEXT_AXES))
_WORD_AXES = tuple(axis for axis in AXES if axis in TEXT_AXES)
_EQUAL_WORDS = {"pp_schedule": ("none", "1f1b", "afab", "interleaved")}
"""Axis -> words that count as one, because they differ in what the prediction knows well: the bubble."""


@functools.lru_cache(2**17)  # a search asks for those of all runs of a cell before each of its choices
def coordinates(layout: Layout) -> tuple[float, ...]:
    """The place of a layout in the space in which the search measures distances, one coordinate for each number.

    Raises:
        ValueError: a number without an entry in _AXIS_COORDINATES is 0, so that it has no number of doublings.
    """
    return tuple(
        _AXIS_COORDINATES.get(axis, functools.partial(_doublings, axis))(layout) for axis in _NUMBER_AXES
    )


def _doublings(axis: str, layout: Layout) -> float:
    value = getattr(layout, axis)
    if value < 1:
        advice = f"give {axis} an entry in _AXIS_COORDINATES"
        raise ValueError(f"{axis}={value} has no number of doublings; {advice}")
    return math.log2(value)


@functools.lru_cache(2**17)
def words(layout: Layout) -> tuple[str, ...]:
    """The words of a layout that the search compares, one for each axis of words."""
    values = ((axis, getattr(layout, axis)) for axis in _WORD_AXES)
    return tuple("" if value in _EQUAL_WORDS.get(axis, ()) else value for axis, value in values)


def _prior_belief(run: Run, p_oom: float) -> Belief:
    log_width = math.log(run.prediction.step_time_high_s / run.prediction.step_time_low_s)
    scale = max(_MIN_SCALE, log_width / _STANDARD_LOG_WIDTH)
    position, axis_words = coordinates(run.layout), words(run.layout)
    return Belief(run, p_oom, position, axis_words, scale, scale**2 * (BIAS_SD**2 + SHAPE_SD**2))


class _Errors:
    """The errors of the predictions of a cell's runs: what is expected of each, and how they vary together.

    Each measurement adds one row to a Cholesky factorisation of the covariance of the measurements (Rasmussen and
    Williams, Gaussian Processes for Machine Learning, algorithm 2.1).
    """

    def __init__(self, beliefs: Mapping[str, Belief]) -> None:
        self.beliefs, self._index_by_id = beliefs, {run_id: index for index, run_id in enumerate(beliefs)}
        self._coordinates = np.array([belief.coordinates for belief in beliefs.values()])
        self._axis_words = np.array([belief.axis_words for belief in beliefs.values()])
        self._scales = np.array([belief.scale for belief in beliefs.values()])
        self._means = np.zeros(len(beliefs))
        self._variances = np.array([belief.variance for belief in beliefs.values()])
        self._scaled_covariances = list[Any]()
        """Covariance of all errors with each measurement, given those before it, in units of its standard deviation."""

    def learn(self, run_id: str, log_error: float | None = None) -> None:
        """Conditions all errors on that of a measured run; without `log_error`, on the one that is expected."""
        run_index = self._index_by_id[run_id]
        expected_error = self._means[run_index]
        surprise = 0.0 if log_error is None else log_error - expected_error
        sd = max(math.sqrt(self._variances[run_index] + NOISE_SD**2), abs(surprise) / MAX_SURPRISE_SDS)
        explained = sum(scaled[run_index] * scaled for scaled in self._scaled_covariances)
        scaled_covariances = (self._covariances(run_index) - explained) / sd
        self._scaled_covariances.append(scaled_covariances)
        self._means += scaled_covariances * surprise / sd
        self._variances = np.maximum(0.0, self._variances - scaled_covariances**2)

    def _covariances(self, run_index: int) -> Any:
        """The covariance of each error with that of one run; a word that differs is as far as LENGTH_SCALE."""
        squared_distances = ((self._coordinates - self._coordinates[run_index]) ** 2).sum(axis=1)
        squared_distances += LENGTH_SCALE**2 * (self._axis_words != self._axis_words[run_index]).sum(axis=1)
        shape_covariances = SHAPE_SD**2 * np.exp(-squared_distances / (2 * LENGTH_SCALE**2))
        return self._scales * self._scales[run_index] * (BIAS_SD**2 + shape_covariances)

    def update(self) -> None:
        """Writes what was learned into the beliefs."""
        means_and_variances = zip(self._means.tolist(), self._variances.tolist(), strict=True)
        for belief, (mean, variance) in zip(self.beliefs.values(), means_and_variances, strict=True):
            belief.mean, belief.variance = mean, variance


def _oom_chances(runs: Sequence[Run], tried: TriedRuns) -> list[float]:
    """P(OOM) of each run, given which runs of the cell did and did not fit.

    A run does not fit when x + sqrt(r)*s + sqrt(1 - r)*e > 0, with r = SHARED_MEMORY_VARIANCE,
    x the score from its predicted P(OOM), its own error e and the error s of the cell, both standard normal.
    Which s are likely follows from the runs tried.
    """
    shared_sd, own_sd = math.sqrt(SHARED_MEMORY_VARIANCE), math.sqrt(1 - SHARED_MEMORY_VARIANCE)
    scores = [_NORMAL.inv_cdf(min(max(run.prediction.p_oom, 1e-6), 1 - 1e-6)) for run in runs]
    weights = [_NORMAL.pdf(s) for s in _SHARED_ERRORS]
    for run, score in zip(runs, scores, strict=True):
        if run.run_id in tried.oom_ids or run.run_id in tried.times_s:
            sign = 1 if run.run_id in tried.oom_ids else -1
            likelihoods = (_NORMAL.cdf(sign * (score + shared_sd * s) / own_sd) for s in _SHARED_ERRORS)
            weights = [weight * max(p, 1e-9) for weight, p in zip(weights, likelihoods, strict=True)]
    weight_sum, min_weight = sum(weights), max(weights) / 1000
    likely_errors = [
        (weight / weight_sum, shared_sd * s)
        for weight, s in zip(weights, _SHARED_ERRORS, strict=True)
        if weight > min_weight
    ]
    # Phi(z) = (1 + erf(z / sqrt(2))) / 2; written out, because a plan computes hundreds of thousands.
    divisor, erf = own_sd * math.sqrt(2), math.erf
    return [sum([w * 0.5 * (1 + erf((x + s) / divisor)) for w, s in likely_errors]) for x in scores]


def beliefs_of(runs: Sequence[Run], tried: TriedRuns) -> Mapping[str, Belief]:
    """run_id -> what is expected of each run of a cell after those that were tried."""
    return _errors_of(runs, tried).beliefs


def _errors_of(runs: Sequence[Run], tried: TriedRuns) -> _Errors:
    """The errors of a cell's predictions after the runs that were tried."""
    oom_chances = _oom_chances(runs, tried)
    beliefs = {run.run_id: _prior_belief(run, p_oom) for run, p_oom in zip(runs, oom_chances, strict=True)}
    errors = _Errors(beliefs)
    for run_id in filter(tried.times_s.__contains__, beliefs):
        belief = beliefs[run_id]
        log_error = math.log(tried.times_s[run_id] / belief.run.prediction.step_time_s)
        clip = MAX_LOG_RATIO * belief.scale
        errors.learn(run_id, max(-clip, min(clip, log_error)))
    for run_id in filter(tried.pending_ids.__contains__, beliefs):
        errors.learn(run_id)
    errors.update()
    return errors


def _open_beliefs(beliefs: Mapping[str, Belief], tried: TriedRuns) -> list[Belief]:
    """The beliefs about runs that were not tried and that no run that did not fit dominates."""
    oom_layouts = [beliefs[run_id].run.layout for run_id in tried.oom_ids if run_id in beliefs]
    begun_ids = tried.begun_ids
    untried = (belief for run_id, belief in beliefs.items() if run_id not in begun_ids)
    return [b for b in untried if not any(dominates(layout, b.run.layout) for layout in oom_layouts)]


def _best_time_s(beliefs: Mapping[str, Belief], tried: TriedRuns) -> float:
    """The best step time of a cell, measured or of a pending run expected, in seconds."""
    pending_times_s = (math.exp(beliefs[i].log_time) for i in tried.pending_ids if i in beliefs)
    return min((*tried.times_s.values(), *pending_times_s), default=math.inf)


def _choose(untried: Sequence[Belief], best_s: float, num_successes: int, max_p_oom: float) -> Belief | None:
    """The run to make next; None when no run is worth it."""
    allowed = [belief for belief in untried if belief.p_oom <= max_p_oom]
    likely = [belief for belief in allowed if belief.p_oom <= LIKELY_OOM]
    best_chance = max((belief.p_better(best_s) for belief in allowed), default=0.0)
    if not allowed or (num_successes and best_chance < MIN_CHANCE):
        return None
    if not num_successes:
        return min(likely or allowed, key=lambda b: (b.log_time if likely else b.p_oom, b.run.run_id))
    return max(allowed, key=lambda b: (b.expected_gain(best_s), b.run.run_id))


def propose(runs: Sequence[_Run], tried: TriedRuns, count: int = 1) -> list[_Run]:
    """The runs of a cell to make next, at most `count`; none when the search of the cell is over.

    Runs that are pending, and those proposed before in the same call, count as measured with the step time that
    is expected of them.

    Args:
        runs: all runs of the cell, also those that were tried.
    """
    errors, chosen_runs = _errors_of(runs, tried), list[_Run]()
    beliefs, run_by_id = errors.beliefs, {run.run_id: run for run in runs}
    untried, best_s = _open_beliefs(beliefs, tried), _best_time_s(beliefs, tried)
    num_successes = len(tried.times_s) + len(tried.pending_ids)
    while len(chosen_runs) < count:
        if (belief := _choose(untried, best_s, num_successes + len(chosen_runs), tried.max_p_oom)) is None:
            break
        chosen_runs.append(run_by_id[belief.run.run_id])
        untried.remove(belief)
        best_s = min(best_s, math.exp(belief.log_time))
        errors.learn(belief.run.run_id)
        errors.update()
    return chosen_runs


def expected_runs(runs: Sequence[_Run], tried: TriedRuns, count: int = 1) -> Iterator[_Run]:
    """The runs that a search is expected to make from now on, if all measurements are as predicted."""
    times_s, oom_ids = dict(tried.times_s), set(tried.oom_ids)
    failed_ids = tried.failed_ids | tried.pending_ids
    tried = replace(tried, times_s=times_s, oom_ids=oom_ids, failed_ids=failed_ids, pending_ids=frozenset())
    while proposed_runs := propose(runs, tried, count):
        for run in proposed_runs:
            if run.prediction.p_oom > LIKELY_OOM:
                oom_ids.add(run.run_id)
            else:
                times_s[run.run_id] = run.prediction.step_time_s
        yield from proposed_runs


def reasons(runs: Sequence[Run], tried: TriedRuns) -> dict[str, str]:
    """run_id -> why a run that was not tried is left out, for the runs of which this is known by now."""
    beliefs = beliefs_of(runs, tried)
    untried, best_s = _open_beliefs(beliefs, tried), _best_time_s(beliefs, tried)
    max_p_oom = tried.max_p_oom
    is_over = _choose(untried, best_s, len(tried.times_s) + len(tried.pending_ids), max_p_oom) is None
    return {b.run.run_id: _reason(b, best_s, max_p_oom) for b in untried if is_over or b.p_oom > max_p_oom}


def _reason(belief: Belief, best_s: float, max_p_oom: float) -> str:
    if belief.p_oom > max_p_oom or best_s == math.inf:
        return too_large_text(belief.run.prediction, belief.p_oom)
    slowdown = math.exp(belief.log_time) / best_s - 1
    slower_text = f"{100 * abs(slowdown):.0f} % {'slower' if slowdown >= 0 else 'faster'} than the best"
    return f"not promising: {slower_text}, P(better) {100 * belief.p_better(best_s):.1f} %"
