"""A cell as the adaptive search sees it: how its runs ended, and which variants are tried after its layouts."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple

from ultrabench.errors import ConfigError
from ultrabench.hardware import Hardware, Peak
from ultrabench.layout import Layout
from ultrabench.record import from_dict
from ultrabench.result import NOT_STARTED, Status
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.candidate import Candidate, by_cell
from ultrabench.sweep.predict.network import LINK_RATE_COLUMNS, network
from ultrabench.sweep.predict.predict import with_links
from ultrabench.sweep.predict.profile import Profile
from ultrabench.sweep.predict.search import MIN_GAIN, TriedRuns, propose
from ultrabench.sweep.running import outliers
from ultrabench.sweep.running.retry import has_failed_in_full
from ultrabench.variant import Runtime, Value

NUM_BEST_LAYOUTS = 3
"""Number of layouts of a cell with which other variants are tried."""
NUM_LATEST_ALLOCATIONS = 3
"""Number of latest allocations whose median rate counts: so many that a single slow one does not decide, and so few
that a change of the cluster soon does."""


class SearchedCell(NamedTuple):
    """A cell as the adaptive search sees it."""

    runs: list[Candidate]
    """Its runs of the variant whose layouts are searched."""
    tried: TriedRuns
    """How those of them that were tried ended."""
    other_runs: list[Candidate]
    """Its runs of other variants."""
    tried_others: TriedRuns

    def is_over(self) -> bool:
        """Whether nothing is left to make or to wait for, neither of its layouts nor of its other variants."""
        return not (propose(self.runs, self.tried) or self.tried.pending_ids or self.next_variants())

    def next_variants(self) -> list[Candidate]:
        """The runs of other variants to make next, once the search of layouts is over."""
        return self._worth_trying({})

    def expected_variants(self) -> list[Candidate]:
        """The runs of other variants that are expected, as if the fastest layouts by prediction were the best."""
        return self._worth_trying({run.run_id: run.prediction.step_time_s for run in self.runs if run.fits})

    def _worth_trying(self, predicted_s: Mapping[str, float]) -> list[Candidate]:
        times_s = {**predicted_s, **self.tried.times_s, **self.tried_others.times_s}
        return worth_trying(self.runs, self.other_runs, times_s, self.tried_others.begun_ids)


def outcomes(runs: Iterable[Candidate], state: SweepState, max_p_oom: float) -> Iterator[SearchedCell]:
    """For each cell its runs, and how those that were tried ended, for the adaptive search.

    The step time of a run is the median over its measurements, also those that were stopped as slower; numbers that
    only screened a run do not count beside those of starts in full, nor do parts beside whole steps.
    What is predicted is that of `with_measured_links`. Runs whose container or interpreter has not started in spite of
    tries are left out, if their cell has others: a search that begins with them would never come to these.
    """
    attempts_by_run, link_rates = state.by_run(), outliers.preflight_rates(state)
    searched_runs = [*runs]
    unstarted_runtimes = runtimes_not_started(searched_runs, attempts_by_run)
    for cell_runs in by_cell(searched_runs).values():
        startable_runs = [run for run in cell_runs if run.runtime not in unstarted_runtimes]
        cell_runs = startable_runs or cell_runs
        usual_runs, other_runs = split_by_variant(with_measured_links(cell_runs, state.config, link_rates))
        tried = _tried(usual_runs, attempts_by_run, max_p_oom)
        tried_others = _tried(other_runs, attempts_by_run, max_p_oom)
        yield SearchedCell(usual_runs, tried, other_runs, tried_others)


def runtimes_not_started(
    runs: Iterable[Candidate], attempts_by_run: Mapping[str, Sequence[AttemptState]]
) -> frozenset[Runtime]:
    """The runtimes of which jobs were tried, and none has started an agent."""
    unstarted_runtimes, started_runtimes = set[Runtime](), set[Runtime]()
    for run in runs:
        for attempt in attempts_by_run.get(run.run_id, ()):
            is_unstarted = attempt.result is not None and attempt.result.cause == NOT_STARTED
            (unstarted_runtimes if is_unstarted else started_runtimes).add(run.runtime)
    return frozenset(unstarted_runtimes - started_runtimes)


def _tried(
    runs: Sequence[Candidate], attempts_by_run: Mapping[str, list[AttemptState]], max_p_oom: float
) -> TriedRuns:
    """How the runs that were tried ended."""
    tries = {run.run_id: attempts_by_run.get(run.run_id, []) for run in runs}
    medians = {run_id: _medians_s(attempts) for run_id, attempts in tries.items()}
    times_s = {run_id: median(run_medians_s) for run_id, run_medians_s in medians.items() if run_medians_s}
    pending_ids = {i for i in tries if any(a.result is None for a in tries[i])} - times_s.keys()
    failed_or_new_ids = tries.keys() - times_s.keys() - pending_ids
    failures = {i: [a.result for a in tries[i] if not a.ok] for i in failed_or_new_ids}
    last_results = {run_id: results[-1] for run_id, results in failures.items() if results}
    oom_ids = {i for i, result in last_results.items() if result and result.status == Status.OOM}
    failed_ids = last_results.keys() - oom_ids
    return TriedRuns(times_s, oom_ids, failed_ids, pending_ids, max_p_oom)


def _medians_s(attempts: Sequence[AttemptState]) -> list[float]:
    """The median step times of the attempts of a run that the search believes: of those in full if there are any, else
    of those by few whole steps, else of those by parts; none of a run whose start in full has failed.
    """
    if has_failed_in_full(attempts):
        return []
    results = [attempt.ok for attempt in attempts if attempt.ok and attempt.ok.step_times_s]
    in_full = [result for result in results if not result.is_screened]
    by_whole_steps = [result for result in results if not result.is_partial]
    return [median(result.step_times_s) for result in in_full or by_whole_steps or results]


def with_measured_links(
    runs: list[Candidate], config: Mapping[str, Any], rates: Mapping[tuple[int, str], Mapping[str, float]]
) -> list[Candidate]:
    """The runs of a cell with the step times that are predicted for the links that allocations have measured.

    The median of the latest allocations of as many nodes counts. Where none of them has measured its links,
    or the launch was of a version with other constants, the step times are those of the plan,
    with the links of the data sheet.

    Args:
        config: the configuration of the latest launch, which holds hardware and profile.
        rates: what `preflight_rates` returns.
    """
    nodes, peak = runs[0].nodes, runs[0].peak_flops_per_s
    all_rates = ([*rates.get((nodes, name), {}).values()] for name in LINK_RATE_COLUMNS)
    latest_rates = [column_rates[-NUM_LATEST_ALLOCATIONS:] for column_rates in all_rates]
    median_rates = (median(link_rates) if link_rates else None for link_rates in latest_rates)
    if any(latest_rates) and peak is not None:
        with contextlib.suppress(ConfigError, KeyError):
            hardware = from_dict(Hardware, config["hardware"])
            profile = from_dict(Profile, config["profile"], skip_unknown=True)
            links = network(hardware, nodes, *median_rates)
            cluster = hardware, Peak(flops_per_s=peak, source="plan"), links, profile
            return [replace(r, predicted=with_links(r.prediction, r.spec, *cluster)) for r in runs]
    return runs


def split_by_variant(runs: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """The runs of the variant that most layouts have, of which the first in the order of the runs, and the others."""
    num_by_variant = Counter(_variant_key(run) for run in runs)
    # max() keeps the first of equals.
    usual_variant = max(num_by_variant, key=lambda key: num_by_variant[key], default=())
    usual_runs = [run for run in runs if _variant_key(run) == usual_variant]
    return usual_runs, [run for run in runs if _variant_key(run) != usual_variant]


def _variant_key(run: Candidate) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(run.spec.variant.items()))


def worth_trying(
    usual: Sequence[Candidate], others: Sequence[Candidate], times_s: Mapping[str, float], begun_ids: Set[str]
) -> list[Candidate]:
    """The runs of other variants to make next; none when all that are worth it have been made.

    First each option is changed alone, with the best layouts of the usual variant. Then the values that made these
    layouts faster are tried together.

    Args:
        usual: the runs of the cell with the variant that most layouts have, whose search is over.
        others: its other runs.
        times_s: run_id -> step time in seconds, of the runs that were measured.
        begun_ids: run_ids of the runs that were tried, whatever their end.
    """
    timed_runs = [run for run in usual if run.run_id in times_s]
    best_runs = sorted(timed_runs, key=lambda run: times_s[run.run_id])[:NUM_BEST_LAYOUTS]
    base_by_layout = {run.layout: run for run in best_runs}
    runs_of_best = [run for run in others if run.layout in base_by_layout]
    changes = {run.run_id: _changes(run, base_by_layout[run.layout]) for run in runs_of_best}
    single_changes = [run for run in others if len(changes.get(run.run_id, ())) == 1]
    if untried_runs := [run for run in single_changes if run.run_id not in begun_ids]:
        return untried_runs
    faster_values = dict(_faster_values(single_changes, base_by_layout, times_s))
    combined = (run for run in others if len(faster_values) > 1 and changes.get(run.run_id) == faster_values)
    return [run for run in combined if run.run_id not in begun_ids]


def _changes(run: Candidate, base: Candidate) -> dict[str, Value]:
    """Option -> value, for the options in which a run differs from another one."""
    base_variant = base.spec.variant
    return {option: value for option, value in run.spec.variant.items() if base_variant.get(option) != value}


def _faster_values(
    runs: Sequence[Candidate], base_by_layout: Mapping[Layout, Candidate], times_s: Mapping[str, float]
) -> Iterator[tuple[str, Value]]:
    """The best value of each option that makes layouts faster by the share MIN_GAIN, on average over those measured."""
    log_ratios: dict[str, dict[Value, list[float]]] = {}
    for run in runs:
        if run.run_id in times_s:
            base = base_by_layout[run.layout]
            ((option, value),) = _changes(run, base).items()
            log_ratio = math.log(times_s[run.run_id] / times_s[base.run_id])
            log_ratios.setdefault(option, {}).setdefault(value, []).append(log_ratio)
    for option, log_ratios_by_value in log_ratios.items():
        best_value = min(log_ratios_by_value, key=lambda value: fmean(log_ratios_by_value[value]))
        if fmean(log_ratios_by_value[best_value]) < math.log(1 - MIN_GAIN):
            yield option, best_value
