"""The command `ultrabench predict calibrate`, which fits a profile to measured runs."""

from datetime import UTC, datetime
from pathlib import Path

import typer

from ultrabench.cli.options import RESULTS, Json, ProfileName, ResultsDir
from ultrabench.cli.results import write_result
from ultrabench.errors import ConfigError, counted

MINE = Path("ultrabench/profiles/mine.yaml")


def calibrate(
    sources: list[str] | None = typer.Argument(
        None, metavar="[SWEEP or FILE.parquet]...", help="Default: the newest sweep."
    ),
    profile: ProfileName = None,
    output: Path = typer.Option(MINE, "-o", "--output", help="The profile to write."),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Fit a profile to measured runs.

    It tells the errors on runs left out of the fit."""
    if output.suffix != ".yaml":
        raise ConfigError(f"{output} is no name of a profile; end it in .yaml")
    from ultrabench.analysis.predict.calibrate import calibrate as calibrated
    from ultrabench.analysis.predict.calibrate import to_yaml
    from ultrabench.cli.predict.cases import open_cases
    from ultrabench.cli.tables import print_json, say, show, table

    given, base = open_cases(sources or [None], profile, results_dir)
    found = calibrated(given, base, name=output.stem, date=f"{datetime.now(UTC):%Y-%m-%d}")
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
