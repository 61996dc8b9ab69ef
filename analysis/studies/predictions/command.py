"""The commands `ultrabench predict validate` and `calibrate`, which check predictions against runs and fit them."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ultrabench.cli.options import (
    RESULTS,
    Force,
    Json,
    Output,
    ResultsDir,
    SweepOrFile,
    WriteSweep,
    require_parquet,
    require_write,
)
from ultrabench.cli.output import draw, write_result
from ultrabench.errors import ConfigError, require_known

if TYPE_CHECKING:
    from ultrabench.sweep.predict.profile import Profile

DEFAULT_PROFILE_FILE = Path("ultrabench/profiles/mine.yaml")
"""The file that `calibrate` writes without -o."""
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME", help="Default: the profile of the program of the runs."),
]
_LEAVE_OUT_HELP = "Leave out each model or node count, fit to the others, and score on it."


def validate(
    source: SweepOrFile = None,
    profile_name: ProfileName = None,
    rows_path: Path | None = typer.Option(
        None, "--rows", callback=require_parquet, help="Write all rows with their predictions (.parquet)."
    ),
    leave_out: str | None = typer.Option(None, metavar="model or nodes", help=_LEAVE_OUT_HELP),
    output: Output = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Prints how far predictions are from measured runs, writes them, and draws them."""
    import pandas as pd

    from ultrabench.analysis.results.cases import healthy_timed, open_cases, open_cases_by_profile
    from ultrabench.analysis.studies.predictions.error_factors import error_row, errors_by_factor
    from ultrabench.analysis.studies.predictions.error_tables import show_errors_by_factor, show_validation
    from ultrabench.analysis.studies.predictions.validate import (
        GROUPS,
        error_records,
        fit_notes,
        metrics,
        profiles_without_group,
        start_profile,
        table,
    )
    from ultrabench.cli.tables import print_json, say, warn

    factor_errors = None
    if leave_out is None:
        case_groups = open_cases_by_profile(source, profile_name, results_dir, say, warn)
        tables = [table(cases, partial(_same_profile, profile)) for cases, profile in case_groups]
        predictions = pd.concat(tables, ignore_index=True)
        profiles = [profile for _, profile in case_groups]
        timed_groups = [(healthy_timed(cases)[0], profile) for cases, profile in case_groups]
        error_rows = [error_row(case, profile) for cases, profile in timed_groups for case in cases]
        factor_errors = errors_by_factor(error_rows, profiles)
        say(*(note for group in case_groups for note in fit_notes(*group)))
    else:
        require_known("group for --leave-out", GROUPS, leave_out)
        source_cases, profile = open_cases([source], profile_name, results_dir, say, warn)
        profiles, start = [profile], start_profile(profile)
        memory_text = " and memory (not its limits)" if profile.framework == "nanotron" else ""
        start_text = f"starting from profile {start.name}"
        say(f"--leave-out {leave_out}: step time{memory_text} refitted without each, {start_text}")
        profile_by_group = profiles_without_group(source_cases, start, leave_out)
        predictions = table(source_cases, lambda case: profile_by_group[GROUPS[leave_out](case)])
    profile_names = ", ".join(profile.name for profile in profiles)
    metrics_by_scope, run_errors = metrics(predictions), error_records(predictions)
    if rows_path is not None:
        import pyarrow as pa

        from ultrabench.analysis.results.collect import parquet

        write_result(rows_path, parquet(pa.Table.from_pandas(predictions, preserve_index=False)))
    if output is not None:
        from ultrabench.analysis.studies.predictions.figure import validation_figure

        draw(output, lambda: validation_figure(predictions, profile_names))
    if json_:
        profile_records = [
            {"name": p.name, "source": p.source, "prior": p.prior, "leave_out": leave_out} for p in profiles
        ]
        by_factor = {"errors_by_factor": factor_errors}
        print_json(metrics_by_scope | by_factor | {"profiles": profile_records, "rows": run_errors})
        return
    show_validation(metrics_by_scope, run_errors, profile_names)
    if factor_errors:
        show_errors_by_factor(factor_errors)


def _same_profile(profile: "Profile", case: object) -> "Profile":
    """The profile, whatever the case is."""
    return profile


def calibrate(
    words: list[str] | None = typer.Argument(
        None,
        metavar="[SWEEP or FILE.parquet]... [OVERRIDES]...",
        help="Runs to fit to (default: the newest sweep), and the sweep about which the next runs are to teach.",
    ),
    profile_name: ProfileName = None,
    imported: list[str] | None = typer.Option(
        None,
        "--from",
        metavar="FILE.parquet...",
        help="Fit to imported rows of this program and GPU first (kernel=, hardware=).",
    ),
    output: Path = typer.Option(DEFAULT_PROFILE_FILE, "-o", "--output", help="Profile to write."),
    write: WriteSweep = None,
    force: Force = False,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Writes a profile that is fitted to measured runs, and names the runs that would teach most next."""
    if output.suffix != ".yaml":
        raise ConfigError(f"{output}: a profile is a YAML file; give a name that ends in .yaml")
    require_write(write, force=force)
    from ultrabench.analysis.studies.predictions.run_calibrate import run_calibrate

    run_calibrate(words or [], imported or [], profile_name, output, json_, write, results_dir, force=force)
