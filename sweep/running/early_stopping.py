"""What early stopping leaves of the pairs of runs from which `sweep effects` says what a value of an option is worth.

The adaptive search does not make all runs, and runs that are clearly slower than the best are not measured to the end.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrabench.errors import counted
from ultrabench.layout import AXES, FOLLOWING, default_schedule
from ultrabench.sweep.candidate import Candidate, CellKey, by_cell
from ultrabench.sweep.config.options import Options
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.progress import SweepProgress
from ultrabench.variant import value_text

FEWEST_PAIRS = 3
"""Fewest differences whose spread gives an interval; the spread of two can be of any size by chance."""
SPARE_PAIRS = 1
"""Pairs that an adaptive search must be expected to make beyond those needed: it tries a value with the best layouts
alone, so a run that fails or is slower than predicted leaves too few."""
ALL_RUNS, IN_FULL = "sweep.strategy=exhaustive", "measure.race=null"
"""The settings with which a sweep makes all of its runs, and measures each to the end."""


def have_interval(num_pairs: int, num_repeats: int = 1) -> bool:
    """Whether so many pairs give the interval of an effect; the repeats of a single pair do, too."""
    return num_pairs >= FEWEST_PAIRS or (num_pairs == 1 and num_repeats >= FEWEST_PAIRS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TooFewPairs:
    """A value of an axis or option for which early stopping leaves too few pairs."""

    axis: str
    value: Any
    pairs: int
    """Number of pairs with the baseline that it leaves."""
    possible_pairs: int
    """Number of pairs if all runs are made and measured to the end."""
    settings: tuple[str, ...]
    """The overrides that give enough pairs, such as ALL_RUNS."""


def expected_too_few_pairs(
    plan: Plan,
    progress: SweepProgress,
    runs_to_make: Collection[str],
    rate_by_run: Mapping[str, float | None],
) -> list[TooFewPairs]:
    """The values of options for which early stopping is expected to leave too few pairs.

    Runs that failed or are unlikely to fit into memory make no pairs. Step times are expected as predicted.

    Args:
        progress: how far the sweep is.
        runs_to_make: run_ids of the runs that the sweep is expected to make yet.
        rate_by_run: run_id -> measured tokens/s/GPU; None for a run that may not win, such as one that was stopped.
    """
    config, options, race = plan.config, plan.config.options, plan.config.measure.race
    failed_ids = progress.settled - progress.skipped.keys() - rate_by_run.keys()
    candidates = (run for run in plan.runs if run.fits and run.spec.kernel.is_predictable)
    fitting_runs = [run for run in candidates if run.run_id not in failed_ids]
    best_s = {cell: min(_step_s(r) for r in runs) for cell, runs in by_cell(fitting_runs).items()}

    def is_in_full(run: Candidate) -> bool:
        if run.run_id in rate_by_run:
            return bool(rate_by_run[run.run_id])
        return race is None or _step_s(run) <= race * best_s[run.cell]

    made = [r for r in fitting_runs if r.run_id in runs_to_make or rate_by_run.get(r.run_id)]
    possible_pairs = num_option_pairs(fitting_runs, options)
    pairs_by_settings = {
        (): num_option_pairs(filter(is_in_full, made), options),
        (IN_FULL,): num_option_pairs(made, options),
        (ALL_RUNS,): num_option_pairs(filter(is_in_full, fitting_runs), options),
    }
    all_too_few = list[TooFewPairs]()
    num_spare = _num_spare(config)
    for (axis, value), num_possible in possible_pairs.items():
        has_enough = {
            settings: have_interval(
                pairs[axis, value] - (0 if ALL_RUNS in settings else num_spare), config.repeats
            )
            for settings, pairs in pairs_by_settings.items()
        }
        if not has_enough.pop(()) and have_interval(num_possible, config.repeats):
            too_few = TooFewPairs(
                axis=axis,
                value=value,
                pairs=pairs_by_settings[()][axis, value],
                possible_pairs=num_possible,
                settings=next((s for s, is_enough in has_enough.items() if is_enough), (ALL_RUNS, IN_FULL)),
            )
            all_too_few.append(too_few)
    return all_too_few


def _num_spare(config: SweepConfig) -> int:
    """Number of pairs that a plan must expect beyond those needed."""
    return SPARE_PAIRS if config.strategy == "adaptive" else 0


def num_option_pairs(runs: Iterable[Candidate], options: Options) -> Counter[tuple[str, Any]]:
    """Option and value -> number of pairs of runs that differ only in it,
    one with this value and one with the first.
    """
    varied = {name: values for name, values in options.values.items() if len(values) > 1}
    values_by_block = defaultdict[tuple[Any, ...], set[Any]](set)
    for run in runs if varied else ():
        value_by_option = {name: _value_of(run, name) for name in varied}
        for name, value in value_by_option.items():
            others = frozenset((value_by_option | {name: None}).items())
            values_by_block[name, run.shape.name, run.nodes, _equal_axes(run), others].add(value)
    counts = Counter[tuple[str, Any]]({(name, v): 0 for name, values in varied.items() for v in values[1:]})
    for (name, *_), values in values_by_block.items():
        baseline = varied[name][0]
        counts.update((name, value) for value in values - {baseline} if baseline in values)
    return counts


def _equal_axes(run: Candidate) -> tuple[Any, ...]:
    """The values of the axes in which the runs of a pair are equal; few micro-batches make afab of 1f1b."""
    layout = run.layout
    is_default = layout.pp_schedule == default_schedule(layout.pp, layout.gas)
    schedule = default_schedule(layout.pp, layout.pp) if is_default else layout.pp_schedule
    axes = (name for name in AXES if name not in (*FOLLOWING, "pp_schedule"))
    return schedule, *(getattr(layout, name) for name in axes)


def _value_of(run: Candidate, option: str) -> Any:
    """The value of an option in a run."""
    return getattr(run.cell, option) if option in CellKey._fields else run.spec.variant.get(option)


def _step_s(run: Candidate) -> float:
    return run.prediction.step_time_s


MAX_NAMED = 6
"""Largest number of values that a line names."""


def expected_too_few_text(all_too_few: Sequence[TooFewPairs], config: SweepConfig) -> str:
    """What early stopping will leave, or may leave where no more pairs are expected than are needed."""
    is_certain = not any(have_interval(lack.pairs) for lack in all_too_few)
    return too_few_text(all_too_few, "will leave" if is_certain else "may leave", _num_spare(config))


def too_few_text(all_too_few: Sequence[TooFewPairs], verb: str, num_spare: int = 0) -> str:
    """What early stopping leaves or has left, without what to do; the values with most pairs to gain come first.

    Args:
        num_spare: number of pairs that must be expected beyond those needed.
    """
    ranked = sorted(all_too_few, key=lambda lack: lack.pairs - lack.possible_pairs)
    value_texts = [
        f"{lack.axis}={value_text(lack.value)} ({lack.pairs} of {lack.possible_pairs:,})"
        for lack in ranked[:MAX_NAMED]
    ]
    num_more = len(ranked) - MAX_NAMED
    more_text = f" and {counted(num_more, 'more value')}" if num_more > 0 else ""
    need = f"an interval of sweep effects needs {FEWEST_PAIRS} pairs of runs that differ only in one setting"
    if num_spare:
        need += (
            f", and an adaptive search {num_spare} more, because a run may fail or be slower than predicted"
        )
    return f"{need}; early stopping {verb} too few for {', '.join(value_texts)}{more_text}"


def all_settings(all_too_few: Iterable[TooFewPairs]) -> list[str]:
    """The settings that give enough pairs for all of these values."""
    needed = {setting for lack in all_too_few for setting in lack.settings}
    return sorted(needed, key=lambda setting: (setting != ALL_RUNS, setting != IN_FULL))
