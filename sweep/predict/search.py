"""Chooses the layouts of a cell that are worth measuring, from predictions and from what was measured so far.

A Gaussian process over layouts corrects log(measured / predicted) of the step time; it is conditioned on one
measurement after the other. The chance that a layout does not fit moves with the runs that did and did not.

A profile is unproven for a run if its interval is wide. Then each layout has an error of its own, the errors of the
cell say how wide the interval really is, and each group of layouts with one mechanism that may win is tried once.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq
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
OWN_SD = 0.05
"""Standard deviation of the error that a layout shares with no other one, where the profile is unproven."""
PROVEN_SCALE = 0.5
"""Width of an interval, relative to that of BIAS_SD and SHAPE_SD, up to which a profile is proven for a run: its 80 %
interval is about 14 % to each side."""
INTERVAL_RUNS = 3
"""Number of runs as which an unproven interval counts, when the errors of the cell say how wide it should be."""
FIRST_RUNS = 3
"""Number of first step times of a cell from different mechanisms, where the profile is unproven."""
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
"""The search of a cell goes on while any layout that is left has this chance to be that much faster, or a smaller one
in proportion to what its measurement costs.

`python benchmarks/caution.py` chooses it on cells that are not among those it is judged by.
"""

_NORMAL = NormalDist()
_STANDARD_LOG_WIDTH = 2 * _NORMAL.inv_cdf(0.9) * math.hypot(BIAS_SD, SHAPE_SD)
"""Width of the 80 % interval of log(measured / predicted) that BIAS_SD and SHAPE_SD stand for."""
_MIN_SCALE = NOISE_SD / math.hypot(BIAS_SD, SHAPE_SD)
_SHARED_ERRORS = np.arange(-12, 13) / 4
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

    @property
    def options(self) -> Mapping[str, str]:
        """What its step time depends on beside the numbers and words of its layout."""

    @property
    def search_cost(self) -> float:
        """What a measurement of the run costs beside one by whole steps; 1 for those."""


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


@functools.lru_cache(2**17)
def mechanisms(layout: Layout) -> tuple[str, ...]:
    """The parts of a step that layouts have or lack, on which an unproven profile may be wrong in different ways."""
    divided = (axis for axis in ("tp", "pp", "cp", "ep") if getattr(layout, axis) > 1)
    gathers_params = "zero-3" if layout.zero_stage == 3 else ""
    return *divided, f"recompute-{layout.recompute}", gathers_params


class _Cell:
    """What is predicted of the runs of a cell, in arrays with one number for each run, in their order."""

    def __init__(self, runs: Sequence[Run]) -> None:
        predictions = [run.prediction for run in runs]
        self.run_ids = [run.run_id for run in runs]
        self.layouts = [run.layout for run in runs]
        self.index_by_id = {run_id: index for index, run_id in enumerate(self.run_ids)}
        log_ends = np.log([(p.step_time_low_s, p.step_time_high_s) for p in predictions])
        self.scales = np.maximum(_MIN_SCALE, (log_ends[:, 1] - log_ends[:, 0]) / _STANDARD_LOG_WIDTH)
        """Factor of BIAS_SD, SHAPE_SD and MAX_LOG_RATIO for each run."""
        self.log_times = log_ends.mean(axis=1)
        """Logarithm of the middle of each interval, which the known errors of a profile may have moved."""
        self.log_lows = log_ends[:, 0]
        """Logarithm of the lower end of each interval in seconds."""
        self.is_unproven = self.scales > PROVEN_SCALE
        self.costs = np.array([run.search_cost for run in runs])
        """What a measurement of each run costs beside one by whole steps."""
        self.own_variances = np.where(self.is_unproven, OWN_SD**2, 0.0)
        self._coordinates = np.array([coordinates(layout) for layout in self.layouts])
        option_names = sorted({name for run in runs for name in run.options})
        options = [tuple(run.options.get(name, "") for name in option_names) for run in runs]
        layout_words = map(words, self.layouts)
        self._axis_words = np.array([(*w, *of_run) for w, of_run in zip(layout_words, options, strict=True)])
        groups = dict[tuple[str, ...], int]()
        keys = [(*mechanisms(layout), *of_run) for layout, of_run in zip(self.layouts, options, strict=True)]
        self.groups = np.array([groups.setdefault(key, len(groups)) for key in keys])
        """Number of the group of each run; a group has the same mechanisms and options."""
        self._covariances_by_index, self._dominated_by_index = dict[int, Any](), dict[int, Any]()
        p_ooms = [min(max(prediction.p_oom, 1e-6), 1 - 1e-6) for prediction in predictions]
        distinct_p_ooms, self._score_indices = np.unique(p_ooms, return_inverse=True)
        scores = np.array([_NORMAL.inv_cdf(p_oom) for p_oom in distinct_p_ooms.tolist()])
        shared_errors = math.sqrt(SHARED_MEMORY_VARIANCE) * _SHARED_ERRORS
        own_sd = math.sqrt(1 - SHARED_MEMORY_VARIANCE)
        self._oom_chances = _cdf((scores[:, np.newaxis] + shared_errors) / own_sd)
        """P(OOM) for each distinct score and each error that the layouts of a cell may share."""

    def covariances(self, index: int) -> Any:
        """The covariance of each error with that of one run; a word that differs is as far as LENGTH_SCALE."""
        if index not in self._covariances_by_index:
            squared_distances = ((self._coordinates - self._coordinates[index]) ** 2).sum(axis=1)
            squared_distances += LENGTH_SCALE**2 * (self._axis_words != self._axis_words[index]).sum(axis=1)
            shape_covariances = SHAPE_SD**2 * np.exp(-squared_distances / (2 * LENGTH_SCALE**2))
            covariances = self.scales * self.scales[index] * (BIAS_SD**2 + shape_covariances)
            covariances[index] += self.own_variances[index]
            self._covariances_by_index[index] = covariances
        return self._covariances_by_index[index]

    def dominated(self, index: int) -> Any:
        """Whether each run needs at least as much memory as one that did not fit."""
        if index not in self._dominated_by_index:
            oom_layout = self.layouts[index]
            is_dominated = [dominates(oom_layout, layout) for layout in self.layouts]
            self._dominated_by_index[index] = np.array(is_dominated)
        return self._dominated_by_index[index]

    def p_ooms(self, tried: TriedRuns) -> Any:
        """P(OOM) of each run, given which runs of the cell did and did not fit.

        A run does not fit when x + sqrt(r)*s + sqrt(1 - r)*e > 0, with r = SHARED_MEMORY_VARIANCE,
        x the score from its predicted P(OOM), its own error e and the error s of the cell, both standard normal.
        Which s are likely follows from the runs tried.
        """
        weights = np.exp(-(_SHARED_ERRORS**2) / 2)
        for run_id in filter((tried.oom_ids | tried.times_s.keys()).__contains__, self.run_ids):
            oom_chances = self._oom_chances[self._score_indices[self.index_by_id[run_id]]]
            likelihoods = oom_chances if run_id in tried.oom_ids else 1 - oom_chances
            weights = weights * np.maximum(likelihoods, 1e-9)
        likely_weights = weights * (weights > weights.max() / 1000)
        return (self._oom_chances @ (likely_weights / weights.sum()))[self._score_indices]


_Measurement = tuple[int, float | None]
"""The index of a run and its log(measured / predicted) step time; None where that is taken as expected."""


class Beliefs:
    """What is expected of the runs of a cell, in arrays with one number for each run, in their order.

    `means` and `variances` are those of log(measured / predicted) step time. Each measurement adds one row to a
    Cholesky factorisation of the covariance of the measurements (Rasmussen and Williams, Gaussian Processes for
    Machine Learning, algorithm 2.1).
    """

    def __init__(self, cell: _Cell) -> None:
        self.index_by_id, self.p_ooms, self._cell = cell.index_by_id, cell.p_ooms(TriedRuns()), cell
        prior_variances = cell.scales**2 * (BIAS_SD**2 + SHAPE_SD**2) + cell.own_variances
        self._moments = [(np.zeros(len(cell.run_ids)), prior_variances)]
        """Means and variances before the first measurement, and after each one."""
        self._measurements = list[_Measurement]()
        self._squared_surprises = list[float | None]()
        """Surprise of each measurement in units of its variance; None where it is the expected one."""
        self._tried_groups = set[int]()
        """Groups of the runs that were tried or chosen."""
        self._scaled_covariances = list[Any]()
        """Covariance of all errors with each measurement, given those before it, in units of its standard deviation."""

    def condition(self, tried: TriedRuns) -> None:
        """Conditions all errors on the runs that were tried, in place of those on which they were before.

        The measurements with which both begin are not learned again.
        """
        cell, measurements = self._cell, list[_Measurement]()
        for run_id in filter(tried.times_s.__contains__, cell.run_ids):
            index = cell.index_by_id[run_id]
            clip = MAX_LOG_RATIO * cell.scales[index]
            log_error = math.log(tried.times_s[run_id]) - cell.log_times[index]
            measurements.append((index, max(-clip, min(clip, log_error))))
        measurements += [(cell.index_by_id[i], None) for i in cell.run_ids if i in tried.pending_ids]
        num_equal = sum(1 for _ in takewhile(bool, map(eq, self._measurements, measurements)))
        del (
            self._measurements[num_equal:],
            self._squared_surprises[num_equal:],
            self._scaled_covariances[num_equal:],
            self._moments[num_equal + 1 :],
        )
        for index, log_error in measurements[num_equal:]:
            self.learn(index, log_error)
        self.p_ooms = cell.p_ooms(tried)
        begun_ids = tried.begun_ids & cell.index_by_id.keys()
        self._tried_groups = {int(cell.groups[cell.index_by_id[run_id]]) for run_id in begun_ids}

    def learn(self, index: int, log_error: float | None = None) -> None:
        """Conditions all errors on that of a measured run; without `log_error`, on the one that is expected."""
        means, variances = self._moments[-1]
        surprise = 0.0 if log_error is None else log_error - means[index]
        usual_sd = math.sqrt(variances[index] + NOISE_SD**2)
        sd = max(usual_sd, abs(surprise) / MAX_SURPRISE_SDS)
        explained = sum(scaled[index] * scaled for scaled in self._scaled_covariances)
        scaled_covariances = (self._cell.covariances(index) - explained) / sd
        new_means = means + scaled_covariances * surprise / sd
        new_variances = np.maximum(0.0, variances - scaled_covariances**2)
        self._measurements.append((index, log_error))
        self._squared_surprises.append(None if log_error is None else (surprise / usual_sd) ** 2)
        self._tried_groups.add(int(self._cell.groups[index]))
        self._scaled_covariances.append(scaled_covariances)
        self._moments.append((new_means, new_variances))

    @property
    def means(self) -> Any:
        """Expected errors of the logarithms of the predicted step times."""
        return self._moments[-1][0]

    @property
    def variances(self) -> Any:
        """Variances of these errors; those of an unproven profile are as large as the errors of the cell say."""
        squares = [square for square in self._squared_surprises if square is not None]
        factor = (INTERVAL_RUNS + sum(squares)) / (INTERVAL_RUNS + len(squares))
        return self._moments[-1][1] * np.where(self._cell.is_unproven, factor, 1.0)

    @property
    def log_times(self) -> Any:
        """Expected logarithms of the step times in seconds."""
        return self._cell.log_times + self.means

    def p_better(self, best_s: float) -> Any:
        """Chance of each run that it fits and is faster than `best_s` seconds by the share MIN_GAIN."""
        log_gaps = math.log(best_s * (1 - MIN_GAIN)) - self.log_times
        return (1 - self.p_ooms) * _cdf(log_gaps / np.sqrt(self.variances))

    def expected_gains(self, best_s: float) -> Any:
        """Expected reduction of the logarithm of the best step time, `best_s` so far, by each run."""
        sds = np.sqrt(self.variances)
        log_gaps = (math.log(best_s) - self.log_times) / sds
        densities = np.exp(-(log_gaps**2) / 2) / math.sqrt(2 * math.pi)
        return (1 - self.p_ooms) * sds * (log_gaps * _cdf(log_gaps) + densities)

    def open_runs(self, tried: TriedRuns) -> Any:
        """Whether each run was not tried, and no run that did not fit dominates it."""
        is_open = np.full(len(self._cell.run_ids), True)
        is_open[[self.index_by_id[i] for i in tried.begun_ids if i in self.index_by_id]] = False
        for run_id in tried.oom_ids & self.index_by_id.keys():
            is_open &= ~self._cell.dominated(self.index_by_id[run_id])
        return is_open

    def best_time_s(self, tried: TriedRuns) -> float:
        """The best step time of a cell, measured or of a pending run expected, in seconds."""
        pending_indices = [self.index_by_id[i] for i in tried.pending_ids if i in self.index_by_id]
        return min((*tried.times_s.values(), *np.exp(self.log_times[pending_indices])), default=math.inf)

    def choose(self, is_open: Any, best_s: float, num_successes: int, max_p_oom: float) -> int | None:
        """The index of the run to make next; None when no run is worth it.

        A cheaper measurement is worth a smaller chance, and is made before one that gains as much.
        """
        allowed = np.flatnonzero(is_open & (self.p_ooms <= max_p_oom))
        if not allowed.size:
            return None
        if num_successes:
            untried = self._untried_mechanisms(allowed, best_s)
            costs = self._cell.costs
            is_promising = (self.p_better(best_s)[allowed] / costs[allowed]).max() >= MIN_CHANCE
            if not (is_promising or untried.size):
                return None
            if untried.size and (num_successes < FIRST_RUNS or not is_promising):
                allowed = untried
            gains = self.expected_gains(best_s)[allowed] / costs[allowed]
            return int(max(allowed[gains == gains.max()], key=self._cell.run_ids.__getitem__))
        likely = allowed[self.p_ooms[allowed] <= LIKELY_OOM]
        prices = self.log_times[likely] if likely.size else self.p_ooms[allowed]
        cheapest = (likely if likely.size else allowed)[prices == prices.min()]
        return int(min(cheapest, key=self._cell.run_ids.__getitem__))

    def _untried_mechanisms(self, allowed: Any, best_s: float) -> Any:
        """The indices among `allowed` of runs that may win by their own intervals and are likely to fit, and whose
        profile is unproven, if no run with their mechanisms and options was tried."""
        cell = self._cell
        is_untried = ~np.isin(cell.groups[allowed], [*self._tried_groups])
        may_win = cell.log_lows[allowed] < math.log(best_s * (1 - MIN_GAIN))
        is_likely = self.p_ooms[allowed] <= LIKELY_OOM
        return allowed[is_untried & may_win & is_likely & cell.is_unproven[allowed]]


_erf = np.frompyfunc(math.erf, 1, 1)


def _cdf(values: Any) -> Any:
    """The cumulative distribution function of the standard normal distribution."""
    return 0.5 * (1 + _erf(values / math.sqrt(2)).astype(float))


def beliefs_of(runs: Sequence[Run], tried: TriedRuns) -> Beliefs:
    """What is expected of the runs of a cell after those that were tried."""
    beliefs = Beliefs(_Cell(runs))
    beliefs.condition(tried)
    return beliefs


def propose(runs: Sequence[_Run], tried: TriedRuns, count: int = 1) -> list[_Run]:
    """The runs of a cell to make next, at most `count`; none when the search of the cell is over.

    Runs that are pending, and those proposed before in the same call, count as measured with the step time that
    is expected of them.

    Args:
        runs: all runs of the cell, also those that were tried.
    """
    return [runs[index] for index in _proposed_indices(Beliefs(_Cell(runs)), tried, count)] if runs else []


def _proposed_indices(beliefs: Beliefs, tried: TriedRuns, count: int) -> list[int]:
    """The indices of the runs of a cell to make next, at most `count`."""
    beliefs.condition(tried)
    chosen_indices = list[int]()
    is_open, best_s = beliefs.open_runs(tried), beliefs.best_time_s(tried)
    num_successes = len(tried.times_s) + len(tried.pending_ids)
    while len(chosen_indices) < count:
        index = beliefs.choose(is_open, best_s, num_successes + len(chosen_indices), tried.max_p_oom)
        if index is None:
            break
        chosen_indices.append(index)
        is_open[index] = False
        best_s = min(best_s, math.exp(beliefs.log_times[index]))
        beliefs.learn(index)
    return chosen_indices


def expected_runs(runs: Sequence[_Run], tried: TriedRuns, count: int = 1) -> Iterator[_Run]:
    """The runs that a search is expected to make from now on, if all measurements are as predicted."""
    if not runs:
        return
    times_s, oom_ids = dict(tried.times_s), set(tried.oom_ids)
    failed_ids = tried.failed_ids | tried.pending_ids
    tried = replace(tried, times_s=times_s, oom_ids=oom_ids, failed_ids=failed_ids, pending_ids=frozenset())
    beliefs = Beliefs(_Cell(runs))
    while proposed_indices := _proposed_indices(beliefs, tried, count):
        for run in (runs[index] for index in proposed_indices):
            if run.prediction.p_oom > LIKELY_OOM:
                oom_ids.add(run.run_id)
            else:
                times_s[run.run_id] = run.prediction.step_time_s
            yield run


def reasons(runs: Sequence[Run], tried: TriedRuns) -> dict[str, str]:
    """run_id -> why a run that was not tried is left out, for the runs of which this is known by now."""
    if not runs:
        return {}
    beliefs = beliefs_of(runs, tried)
    is_open, best_s, max_p_oom = beliefs.open_runs(tried), beliefs.best_time_s(tried), tried.max_p_oom
    num_successes = len(tried.times_s) + len(tried.pending_ids)
    is_over = beliefs.choose(is_open, best_s, num_successes, max_p_oom) is None
    left_out = np.flatnonzero(is_open & (is_over | (beliefs.p_ooms > max_p_oom))).tolist()
    p_ooms, log_times, chances = beliefs.p_ooms, beliefs.log_times, beliefs.p_better(best_s)

    def reason(index: int) -> str:
        if p_ooms[index] > max_p_oom or best_s == math.inf:
            return too_large_text(runs[index].prediction, p_ooms[index])
        slowdown = math.exp(log_times[index]) / best_s - 1
        slower_text = f"{100 * abs(slowdown):.0f} % {'slower' if slowdown >= 0 else 'faster'} than the best"
        return f"not promising: {slower_text}, P(better) {100 * chances[index]:.1f} %"

    return {runs[index].run_id: reason(index) for index in left_out}
