"""Reads the measured runs that the commands `ultrabench predict ...` compare with predictions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ultrabench.analysis.collect import open_results
from ultrabench.analysis.measured import measured_runs
from ultrabench.analysis.predict.cases import Case, cases, default_profile, with_memory
from ultrabench.cli.tables import say, warn
from ultrabench.errors import ConfigError, counted
from ultrabench.sweep.config.load import load_profile
from ultrabench.sweep.predict.profile import Profile


def open_cases(
    sources: Sequence[str | None], profile: str | None, results_dir: Path
) -> tuple[list[Case], Profile]:
    """The runs of sweeps and files that predictions can be compared with, and the profile of these predictions.

    The other runs are counted on stderr.

    Args:
        profile: its name; None means that of the program which the runs used.
    """
    runs, unknown = [], Counter[str]()
    for source in sources:
        runs_with_results, unusable = measured_runs(open_results(source, results_dir, warn)[2])
        runs += runs_with_results
        unknown += unusable
    if unknown:
        reasons = "; ".join(f"{n:,}: {reason}" for reason, n in unknown.most_common(5))
        say(f"{counted(unknown.total(), 'row')} cannot be predicted ({reasons})")
    usable_cases, others = cases(runs)
    exclusions = "; ".join(f"{n:,} {reason}" for reason, n in others.most_common())
    say(f"{counted(len(usable_cases), 'run')}; left out: {exclusions or 'none'}")
    if not usable_cases:
        rows = counted(len(runs) + unknown.total(), "row")
        raise ConfigError(f"none of {rows} is of a run that can be predicted and ended ok or out of memory")
    constants = load_profile(profile or default_profile(usable_cases))
    return with_memory(usable_cases, constants), constants
