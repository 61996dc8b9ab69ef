"""Reads the measured runs that the commands `ultrabench predict ...` compare with predictions."""

from collections.abc import Sequence
from pathlib import Path

from ultrabench.analysis.collect import open_results
from ultrabench.analysis.measured import MeasuredRun, measured_runs
from ultrabench.analysis.predict.cases import Case, cases, default_profile, usual_profiles, with_memory
from ultrabench.cli.tables import say, warn
from ultrabench.errors import ConfigError, counted
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
    return with_memory(usable_cases, used_profile), used_profile


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
    return [(with_memory(profile_cases, profile), profile) for profile, profile_cases in profiles]


def _usable_cases(sources: Sequence[str | None], results_dir: Path) -> list[Case]:
    """The runs that predictions can be compared with; the others are counted on stderr."""
    runs, names_by_reason = list[MeasuredRun](), dict[str, list[str]]()
    for source in sources:
        runs_of_source, unusable_names = measured_runs(open_results(source, results_dir, warn)[2])
        runs += runs_of_source
        for reason, row_names in unusable_names.items():
            names_by_reason.setdefault(reason, []).extend(row_names)
    for reason, row_names in sorted(names_by_reason.items(), key=lambda pair: -len(pair[1]))[:MAX_REASONS]:
        example_text = f"such as {row_names[0]}" if len(row_names) > 1 else row_names[0]
        say(f"{counted(len(row_names), 'row')} cannot be predicted, {example_text}: {reason}")
    usable_cases, excluded_by_reason = cases(runs)
    exclusions_text = "; ".join(f"{n:,} {reason}" for reason, n in excluded_by_reason.most_common())
    say(f"{counted(len(usable_cases), 'run')}; excluded: {exclusions_text or 'none'}")
    if not usable_cases:
        rows_text = counted(len(runs) + sum(map(len, names_by_reason.values())), "row")
        fact = f"none of {rows_text} is a run that can be predicted and ended ok or oom"
        raise ConfigError(fact, "give other results")
    return usable_cases
