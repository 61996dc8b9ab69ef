"""What `ultrabench predict calibrate` prints and writes."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ultrabench.analysis.collect import open_results
from ultrabench.analysis.measured import measured_runs
from ultrabench.analysis.predict.calibrate import calibrate, to_yaml
from ultrabench.analysis.predict.cases import Case, cases, default_profile
from ultrabench.cli.results import write_result
from ultrabench.cli.tables import print_json, say, show, table, warn
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
        found, unusable = measured_runs(open_results(source, results_dir, warn)[2])
        runs += found
        unknown.update({reason.partition(": ")[0]: n for reason, n in unusable.items()})
    if unknown:
        reasons = "; ".join(f"{n:,}: {reason}" for reason, n in unknown.most_common(5))
        say(f"{counted(unknown.total(), 'row')} cannot be predicted ({reasons})")
    given, others = cases(runs)
    told = "; ".join(f"{n:,} {reason}" for reason, n in others.most_common())
    say(f"{counted(len(given), 'run')}; left out: {told or 'none'}")
    if not given:
        rows = counted(len(runs) + unknown.total(), "row")
        raise ConfigError(f"none of {rows} is of a run that can be predicted and ended ok or out of memory")
    return given, load_profile(profile or default_profile(given))


def run_calibrate(
    sources: Sequence[str | None], profile: str | None, output: Path, json_: bool, results_dir: Path
) -> None:
    """Fits a profile, writes its file and prints the errors on runs left out of the fit."""
    if output.suffix != ".yaml":
        raise ConfigError(f"{output} is no name of a profile; end it in .yaml")
    given, base = open_cases(sources, profile, results_dir)
    found = calibrate(given, base, name=output.stem, date=f"{datetime.now(UTC):%Y-%m-%d}")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_result(output, to_yaml(found.profile, base).encode())
    if json_:
        made = {"profile": str(output), "prior": base.name, "runs": found.runs, "fitted": found.fitted}
        print_json(made | {"before": found.before, "after": found.after, "memory": found.memory})
        return
    told = {"step_time": {"before": found.before, "after": found.after}, "memory": found.memory}
    rows = []
    for part, errors in told.items():
        names = {
            "before": f"profile {base.name}",
            "after": "fitted" + ", not used" * (not found.fitted[part]),
        }
        for when in errors:
            shares = (f"{100 * errors[when][key]:.1f} %" for key in ("median_error", "p90_error"))
            rows.append((part.replace("_", " "), names[when], *shares))
    title = f"error on runs left out of the fit ({counted(found.runs, 'healthy run')})"
    show(table(title, "of", "constants", ">median", ">90 %", rows=rows), "")
    say(f"wrote {output}: {found.profile.source}; sweeps use it with profile={output.stem}")
