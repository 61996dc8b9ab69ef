"""Chooses the layouts of a cell that are worth measuring, from predictions and from what was measured so far.

A Gaussian process over layouts corrects log(measured / predicted) of the step time; it is conditioned on one
measurement after the other. The chance that a layout does not fit moves with the runs that did and did not.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Protocol, TypeVar

import numpy as np

from ultrabench.layout import AXES, FOLLOWING, TEXT_AXES, Layout, dominates
from ultrabench.sweep.predict.predict import LIKELY_OOM, Prediction, too_large

BIAS_SD = 0.15
"""Standard deviation of the error of log step time that all layouts of a cell share."""
SHAPE_SD = 0.15
"""Standard deviation of the error that layouts share the more, the closer they are."""
LENGTH = 1.5
"""Distance between layouts at which they share exp(-1/2) of that error; a doubled degree is 1."""
NOISE_SD = 0.03
"""Standard deviation of log step time between measurements."""
CLIP = 0.7
"""Largest absolute value of log(measured / predicted) that is believed; what is beyond is an accident.

BIAS_SD, SHAPE_SD and CLIP are those of a prediction whose 80 % interval has the width that the first two stand for.
They are in proportion to the interval of each prediction, but no prediction counts as surer than a measurement.
"""
SURPRISE = 3.0
"""Standard deviations beyond which a measurement is taken for an accident and counts as a less exact one."""
SHARED_VARIANCE = 0.25
"""Part of the variance of predicted memory that the layouts of a cell share."""
BETTER = 0.02
"""A layout is worth a run for being faster than the best by this share."""
CHANCE = 0.04
"""The search of a cell goes on while any layout that is left has this chance to be that much faster.

`python benchmarks/caution.py` chooses it on cells that are not among those it is judged by.
"""

_NORMAL = NormalDist()
_WIDTH = 2 * _NORMAL.inv_cdf(0.9) * math.hypot(BIAS_SD, SHAPE_SD)
"""Width of the 80 % interval of log(measured / predicted) that BIAS_SD and SHAPE_SD stand for."""
_LEAST_SCALE = NOISE_SD / math.hypot(BIAS_SD, SHAPE_SD)
_SHIFTS = [step / 4 for step in range(-12, 13)]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """How the runs of a cell that were tried so far ended, by run_id."""

    times_s: Mapping[str, float] = field(default_factory=dict)
    """Step times of the runs that fit into memory, in seconds."""
    oom: Set[str] = frozenset()
    failed: Set[str] = frozenset()
    """Runs that gave no step time for another reason than memory."""
    pending: Set[str] = frozenset()
    """Runs that have not ended; their step times are taken as predicted."""
    max_p_oom: float = 1.0
    """P(OOM) above which no run is made."""

    @property
    def begun(self) -> Set[str]:
        """All runs that were tried, also those that have not ended."""
        return self.times_s.keys() | self.oom | self.failed | self.pending


@dataclass(slots=True)
class Belief:
    """What is expected of one run. `mean` and `variance` are those of log(measured / predicted) step time."""

    run: Run
    p_oom: float
    place: tuple[float, ...]
    words: tuple[str, ...]
    scale: float
    """Factor of BIAS_SD, SHAPE_SD and CLIP."""
    variance: float
    mean: float = 0.0

    @property
    def log_time(self) -> float:
        """Expected logarithm of the step time in seconds."""
        return math.log(self.run.prediction.step_time_s) + self.mean

    def p_better(self, best_s: float) -> float:
        """Chance that the run fits and is faster than `best_s` seconds by the share BETTER."""
        gap = math.log(best_s * (1 - BETTER)) - self.log_time
        return (1 - self.p_oom) * _NORMAL.cdf(gap / math.sqrt(self.variance))

    def improvement(self, best_s: float) -> float:
        """Expected reduction of the logarithm of the best step time, `best_s` so far."""
        sd = math.sqrt(self.variance)
        gap = (math.log(best_s) - self.log_time) / sd
        return (1 - self.p_oom) * sd * (gap * _NORMAL.cdf(gap) + _NORMAL.pdf(gap))


_COORDINATES: dict[str, Callable[[Layout], float]] = {
    "zero_stage": lambda layout: LENGTH * layout.zero_stage,
    # The replicas of each shard, which are 1 without ZeRO.
    "dp_shard": lambda layout: (
        math.log2(layout.dp * layout.cp // layout.zero_shards) * (layout.zero_stage > 0)
    ),
}
"""Axes whose numbers are not compared by their doublings, since they may be 0 -> the coordinate of a layout."""
_NUMBERS = tuple(name for name in AXES if name not in (*FOLLOWING, *TEXT_AXES))
_WORDS = tuple(name for name in AXES if name in TEXT_AXES)
_ALIKE = {"pp_schedule": ("none", "1f1b", "afab", "interleaved")}
"""Axis -> words that count as one, because they differ in what the prediction knows well: the bubble."""


def coordinates(layout: Layout) -> tuple[float, ...]:
    """The place of a layout in the space in which the search measures distances, one coordinate for each number.

    Raises:
        ValueError: a number without an entry in _COORDINATES is 0, so that it has no number of doublings.
    """
    return tuple(
        _COORDINATES[name](layout) if name in _COORDINATES else _doublings(name, getattr(layout, name))
        for name in _NUMBERS
    )


def _doublings(name: str, value: int) -> float:
    if value < 1:
        raise ValueError(f"{name}={value} has no number of doublings; give {name} an entry in _COORDINATES")
    return math.log2(value)


def words(layout: Layout) -> tuple[str, ...]:
    """The words of a layout that the search compares, one for each axis of words."""
    value_by_axis = {name: getattr(layout, name) for name in _WORDS}
    return tuple("" if value in _ALIKE.get(name, ()) else value for name, value in value_by_axis.items())


def _belief(run: Run, p_oom: float) -> Belief:
    width = math.log(run.prediction.step_time_high_s / run.prediction.step_time_low_s)
    scale = max(_LEAST_SCALE, width / _WIDTH)
    place, names = coordinates(run.layout), words(run.layout)
    return Belief(run, p_oom, place, names, scale, scale**2 * (BIAS_SD**2 + SHAPE_SD**2))


class _Errors:
    """The errors of the predictions of a cell's runs: what is expected of each, and how they vary together.

    Each measurement adds one row to a Cholesky factorisation of the covariance of the measurements (Rasmussen and
    Williams, Gaussian Processes for Machine Learning, algorithm 2.1).
    """

    def __init__(self, beliefs: Mapping[str, Belief]) -> None:
        self.beliefs, self._index = beliefs, {run_id: index for index, run_id in enumerate(beliefs)}
        self._places = np.array([belief.place for belief in beliefs.values()])
        self._words = np.array([belief.words for belief in beliefs.values()])
        self._scales = np.array([belief.scale for belief in beliefs.values()])
        self._means = np.zeros(len(beliefs))
        self._variances = np.array([belief.variance for belief in beliefs.values()])
        self._shares = list[Any]()
        """Covariance of all errors with each measurement, given those before it, in units of its standard deviation."""

    def learn(self, run_id: str, error: float | None = None) -> None:
        """Conditions all errors on that of a measured run; without `error`, on the one that is expected."""
        index = self._index[run_id]
        expected = self._means[index]
        surprise = 0.0 if error is None else error - expected
        sd = max(math.sqrt(self._variances[index] + NOISE_SD**2), abs(surprise) / SURPRISE)
        explained = sum(share[index] * share for share in self._shares)
        share = (self._covariances(index) - explained) / sd
        self._shares.append(share)
        self._means += share * surprise / sd
        self._variances = np.maximum(0.0, self._variances - share**2)

    def _covariances(self, index: int) -> Any:
        """The covariance of each error with that of one run; a word that differs is as far as LENGTH."""
        squares = ((self._places - self._places[index]) ** 2).sum(axis=1)
        squares += LENGTH**2 * (self._words != self._words[index]).sum(axis=1)
        shape = SHAPE_SD**2 * np.exp(-squares / (2 * LENGTH**2))
        return self._scales * self._scales[index] * (BIAS_SD**2 + shape)

    def update(self) -> None:
        """Writes what was learned into the beliefs."""
        numbers = zip(self._means.tolist(), self._variances.tolist(), strict=True)
        for belief, (mean, variance) in zip(self.beliefs.values(), numbers, strict=True):
            belief.mean, belief.variance = mean, variance


def _chances(runs: Sequence[Run], tried: Tried) -> list[float]:
    """P(OOM) of each run, given which runs of the cell did and did not fit.

    A run does not fit when x + sqrt(r)*s + sqrt(1 - r)*e > 0, with r = SHARED_VARIANCE, x from its predicted
    P(OOM), its own error e and the error s of the cell, both standard normal. Which s are likely follows from the
    runs tried.
    """
    shared, own_sd = math.sqrt(SHARED_VARIANCE), math.sqrt(1 - SHARED_VARIANCE)
    scores = [_NORMAL.inv_cdf(min(max(run.prediction.p_oom, 1e-6), 1 - 1e-6)) for run in runs]
    weights = [_NORMAL.pdf(s) for s in _SHIFTS]
    for run, score in zip(runs, scores, strict=True):
        if run.run_id in tried.oom or run.run_id in tried.times_s:
            sign = 1 if run.run_id in tried.oom else -1
            likelihoods = (_NORMAL.cdf(sign * (score + shared * s) / own_sd) for s in _SHIFTS)
            weights = [weight * max(p, 1e-9) for weight, p in zip(weights, likelihoods, strict=True)]
    weight_sum, min_weight = sum(weights), max(weights) / 1000
    likely_shifts = [
        (weight / weight_sum, shared * s)
        for weight, s in zip(weights, _SHIFTS, strict=True)
        if weight > min_weight
    ]
    return [sum(w * _NORMAL.cdf((score + s) / own_sd) for w, s in likely_shifts) for score in scores]


def beliefs_of(runs: Sequence[Run], tried: Tried) -> Mapping[str, Belief]:
    """run_id -> what is expected of each run of a cell after those that were tried."""
    return _errors_of(runs, tried).beliefs


def _errors_of(runs: Sequence[Run], tried: Tried) -> _Errors:
    """The errors of a cell's predictions after the runs that were tried."""
    chances = _chances(runs, tried)
    beliefs = {run.run_id: _belief(run, p) for run, p in zip(runs, chances, strict=True)}
    errors = _Errors(beliefs)
    for run_id in filter(tried.times_s.__contains__, beliefs):
        belief = beliefs[run_id]
        error = math.log(tried.times_s[run_id] / belief.run.prediction.step_time_s)
        clip = CLIP * belief.scale
        errors.learn(run_id, max(-clip, min(clip, error)))
    for run_id in filter(tried.pending.__contains__, beliefs):
        errors.learn(run_id)
    errors.update()
    return errors


def _left(beliefs: Mapping[str, Belief], tried: Tried) -> list[Belief]:
    """The beliefs about runs that were not tried and that no run that did not fit dominates."""
    oom = [beliefs[run_id].run.layout for run_id in tried.oom if run_id in beliefs]
    begun = tried.begun
    untried = (belief for run_id, belief in beliefs.items() if run_id not in begun)
    return [b for b in untried if not any(dominates(layout, b.run.layout) for layout in oom)]


def _best_s(beliefs: Mapping[str, Belief], tried: Tried) -> float:
    """The best step time of a cell, measured or of a pending run expected, in seconds."""
    expected = (math.exp(beliefs[run_id].log_time) for run_id in tried.pending if run_id in beliefs)
    return min((*tried.times_s.values(), *expected), default=math.inf)


def _choose(untried: Sequence[Belief], best_s: float, num_successes: int, max_p_oom: float) -> Belief | None:
    """The run to make next; None when no run is worth it."""
    fitting = [belief for belief in untried if belief.p_oom <= max_p_oom]
    probable = [belief for belief in fitting if belief.p_oom <= LIKELY_OOM]
    best_chance = max((belief.p_better(best_s) for belief in fitting), default=0.0)
    if not fitting or (num_successes and best_chance < CHANCE):
        return None
    if not num_successes:
        return min(probable or fitting, key=lambda b: (b.log_time if probable else b.p_oom, b.run.run_id))
    return max(fitting, key=lambda b: (b.improvement(best_s), b.run.run_id))


def propose(runs: Sequence[_Run], tried: Tried, count: int = 1) -> list[_Run]:
    """The runs of a cell to make next, at most `count`; none when the search of the cell is over.

    Runs that are pending, and those proposed before in the same call, count as measured with the step time that
    is expected of them.

    Args:
        runs: all runs of the cell, also those that were tried.
    """
    errors, chosen_runs = _errors_of(runs, tried), list[_Run]()
    beliefs, run_by_id = errors.beliefs, {run.run_id: run for run in runs}
    untried, best_s = _left(beliefs, tried), _best_s(beliefs, tried)
    num_successes = len(tried.times_s) + len(tried.pending)
    while len(chosen_runs) < count:
        if (chosen := _choose(untried, best_s, num_successes + len(chosen_runs), tried.max_p_oom)) is None:
            break
        chosen_runs.append(run_by_id[chosen.run.run_id])
        untried.remove(chosen)
        best_s = min(best_s, math.exp(chosen.log_time))
        errors.learn(chosen.run.run_id)
        errors.update()
    return chosen_runs


def expected_runs(runs: Sequence[_Run], tried: Tried, count: int = 1) -> Iterator[_Run]:
    """The runs that a search is expected to make from now on, if all measurements are as predicted."""
    times_s, oom = dict(tried.times_s), set(tried.oom)
    state = replace(tried, times_s=times_s, oom=oom, failed=tried.failed | tried.pending, pending=frozenset())
    while proposed := propose(runs, state, count):
        for run in proposed:
            if run.prediction.p_oom > LIKELY_OOM:
                oom.add(run.run_id)
            else:
                times_s[run.run_id] = run.prediction.step_time_s
        yield from proposed


def reasons(runs: Sequence[Run], tried: Tried) -> dict[str, str]:
    """run_id -> why a run that was not tried is left out, for the runs of which this is known by now."""
    beliefs = beliefs_of(runs, tried)
    untried, best_s = _left(beliefs, tried), _best_s(beliefs, tried)
    max_p_oom = tried.max_p_oom
    is_over = _choose(untried, best_s, len(tried.times_s) + len(tried.pending), max_p_oom) is None
    return {b.run.run_id: _reason(b, best_s, max_p_oom) for b in untried if is_over or b.p_oom > max_p_oom}


def _reason(belief: Belief, best_s: float, max_p_oom: float) -> str:
    if belief.p_oom > max_p_oom or best_s == math.inf:
        return too_large(belief.run.prediction, belief.p_oom)
    ratio = math.exp(belief.log_time) / best_s - 1
    slower_text = f"{100 * abs(ratio):.0f} % {'slower' if ratio >= 0 else 'faster'} than the best"
    return f"not promising: {slower_text}, P(better) {100 * belief.p_better(best_s):.1f} %"
