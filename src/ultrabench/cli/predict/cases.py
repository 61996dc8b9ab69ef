"""Reads the measured runs that the commands `ultrabench predict ...` compare with predictions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from ultrabench.analysis.collect import open_results
from ultrabench.analysis.measured import MeasuredRun, measured_runs
from ultrabench.analysis.planned import is_predicted
from ultrabench.analysis.predict.cases import Case, cases, default_profile, for_profile, usual_profiles
from ultrabench.cli.tables import say, warn
from ultrabench.errors import ConfigError, counted
from ultrabench.result import Status
from ultrabench.sweep.config.load import load_profile
from ultrabench.sweep.predict.profile import Profile

MAX_REASONS = 5
"""Largest number of reasons that are printed for rows that cannot be predicted."""


def open_cases(
    sources: Sequence[str | None], profile_name: str | None, results_dir: Path
) -> tuple[list[Case], Profile]:
    """The runs of sweeps and files that predictions can be compared with, and the profile of these predictions.

    The other runs are counted on stderr.

    Args:
        profile_name: its name; None means that of the program which the runs used.
    """
    usable_cases = _usable_cases(sources, results_dir)
    used_profile = load_profile(profile_name or default_profile(usable_cases))
    return for_profile(usable_cases, used_profile), used_profile


def open_cases_by_profile(
    source: str | None, profile_name: str | None, results_dir: Path
) -> list[tuple[list[Case], Profile]]:
    """The runs of a sweep or file that predictions can be compared with, by the profile of these predictions.

    Args:
        profile_name: its name; None means for each run that of the program which it used.
    """
    usable_cases = _usable_cases([source], results_dir)
    name_by_program = {} if profile_name else usual_profiles(usable_cases)
    cases_by_profile: dict[str, list[Case]] = {}
    for case in usable_cases:
        name = profile_name or name_by_program[case.run.spec.kernel.name]
        cases_by_profile.setdefault(name, []).append(case)
    profiles = ((load_profile(name), profile_cases) for name, profile_cases in cases_by_profile.items())
    return [(for_profile(profile_cases, profile), profile) for profile, profile_cases in profiles]


def unusable_lines(table: pa.Table) -> list[str]:
    """Lines that say which rows of a table `ultrabench predict validate` cannot use, and why."""
    runs, names_by_reason = measured_runs(table)
    usable_cases, excluded_by_reason = cases(runs)
    timed_runs = [case.run for case in usable_cases if case.run.status == Status.OK]
    if num_untimed := sum(run.step_time_s is None for run in timed_runs):
        excluded_by_reason["with status ok and no step time"] = num_untimed
    lines = _unusable_lines(names_by_reason)
    if excluded_by_reason:
        lines.append(f"excluded: {_exclusions_text(excluded_by_reason)}")
    columns = table.select(
        ["peak_mem_allocated_bytes", "peak_mem_reserved_bytes", "peak_mem_reserved_rank0_bytes"]
    )
    num_allocated, *num_reserved = (len(column) - column.null_count for column in columns.columns)
    if num_allocated and not any(num_reserved):
        lines.append(
            "memory: the table has only allocated memory, and predictions of reserved memory are validated"
        )
    try:
        usual_profiles(usable_cases)
    except ConfigError as error:
        lines.append(str(error))
    return [f"predict validate: {line}" for line in lines]


def _unusable_lines(names_by_reason: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each of the most frequent reasons why rows cannot be predicted, and one for the others."""
    sorted_reasons = sorted(names_by_reason.items(), key=lambda pair: -len(pair[1]))
    lines = []
    for reason, row_names in sorted_reasons[:MAX_REASONS]:
        example_text = f"such as {row_names[0]}" if len(row_names) > 1 else row_names[0]
        lines.append(f"{counted(len(row_names), 'row')} cannot be predicted, {example_text}: {reason}")
    if num_others := sum(len(row_names) for _, row_names in sorted_reasons[MAX_REASONS:]):
        lines.append(f"{counted(num_others, 'row')} cannot be predicted for other reasons")
    return lines


def _exclusions_text(num_by_reason: Counter[str]) -> str:
    return "; ".join(f"{n:,} {reason}" for reason, n in num_by_reason.most_common())


def _usable_cases(sources: Sequence[str | None], results_dir: Path) -> list[Case]:
    """The runs that predictions can be compared with; the others are counted on stderr."""
    runs, names_by_reason = list[MeasuredRun](), dict[str, list[str]]()
    for source in sources:
        name, _, result_table = open_results(source, results_dir, warn)
        if is_predicted(result_table):
            raise ConfigError(
                f"{name}: nothing was measured", "give a sweep that ran, or a file of ultrabench collect"
            )
        runs_of_source, unusable_names = measured_runs(result_table)
        runs += runs_of_source
        for reason, row_names in unusable_names.items():
            names_by_reason.setdefault(reason, []).extend(row_names)
    say(*_unusable_lines(names_by_reason))
    usable_cases, excluded_by_reason = cases(runs)
    say(f"{counted(len(usable_cases), 'run')}; excluded: {_exclusions_text(excluded_by_reason) or 'none'}")
    if not usable_cases:
        rows_text = counted(len(runs) + sum(map(len, names_by_reason.values())), "row")
        fact = f"none of {rows_text} is a run that can be predicted and ended ok or oom"
        raise ConfigError(fact, "give other results")
    return usable_cases
