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
    sources: Sequence[str | None], profile: str | None, results_dir: Path
) -> tuple[list[Case], Profile]:
    """The runs of sweeps and files that predictions can be compared with, and the profile of these predictions.

    The other runs are counted on stderr.

    Args:
        profile: its name; None means that of the program which the runs used.
    """
    usable_cases = _usable_cases(sources, results_dir)
    used_profile = load_profile(profile or default_profile(usable_cases))
    return with_memory(usable_cases, used_profile), used_profile


def open_cases_by_profile(
    source: str | None, profile: str | None, results_dir: Path
) -> list[tuple[list[Case], Profile]]:
    """The runs of a sweep or file that predictions can be compared with, by the profile of these predictions.

    Args:
        profile: its name; None means for each run that of the program which it used.
    """
    usable_cases = _usable_cases([source], results_dir)
    profile_by_program = {} if profile else usual_profiles(usable_cases)
    cases_by_name: dict[str, list[Case]] = {}
    for case in usable_cases:
        cases_by_name.setdefault(profile or profile_by_program[case.run.spec.kernel.name], []).append(case)
    profiles = {name: load_profile(name) for name in cases_by_name}
    return [
        (with_memory(cases_of_profile, profiles[name]), profiles[name])
        for name, cases_of_profile in cases_by_name.items()
    ]


def _usable_cases(sources: Sequence[str | None], results_dir: Path) -> list[Case]:
    """The runs that predictions can be compared with; the others are counted on stderr."""
    runs, names_by_reason = list[MeasuredRun](), dict[str, list[str]]()
    for source in sources:
        runs_with_results, unusable_by_reason = measured_runs(open_results(source, results_dir, warn)[2])
        runs += runs_with_results
        for reason, names in unusable_by_reason.items():
            names_by_reason.setdefault(reason, []).extend(names)
    for reason, names in sorted(names_by_reason.items(), key=lambda pair: -len(pair[1]))[:MAX_REASONS]:
        example = f"such as {names[0]}" if len(names) > 1 else names[0]
        say(f"{counted(len(names), 'row')} cannot be predicted, {example}: {reason}")
    num_unpredictable = sum(map(len, names_by_reason.values()))
    usable_cases, excluded_by_reason = cases(runs)
    exclusions_text = "; ".join(f"{n:,} {reason}" for reason, n in excluded_by_reason.most_common())
    say(f"{counted(len(usable_cases), 'run')}; excluded: {exclusions_text or 'none'}")
    if not usable_cases:
        rows_text = counted(len(runs) + num_unpredictable, "row")
        raise ConfigError(
            f"none of {rows_text} is a run that can be predicted and ended ok or oom; give other results"
        )
    return usable_cases
