"""What `ultrabench predict calibrate` does: it fits a profile, writes it, and names the runs to measure next."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ultrabench.analysis.results.cases import Case, cases_in, for_profile, healthy_timed
from ultrabench.analysis.studies.predictions.calibrate import (
    calibrate,
    knob_lines,
    level_sd_of,
    moved_constants,
    moved_lines,
    to_yaml,
)
from ultrabench.analysis.studies.predictions.error_tables import show_calibration, show_next_runs
from ultrabench.analysis.studies.predictions.next_runs import NextRun, next_runs
from ultrabench.analysis.studies.predictions.start import imported_cases, start_of
from ultrabench.cli.output import write_result
from ultrabench.cli.tables import print_json, say, show, warn
from ultrabench.cli.written import written_lines
from ultrabench.errors import ConfigError
from ultrabench.sweep.config.compose import parts_of
from ultrabench.sweep.config.files import files, user_file
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.config.sweep_file import require_writable_name
from ultrabench.sweep.predict.profile import Profile


def run_calibrate(
    words: Sequence[str],
    imported: Sequence[str],
    profile_name: str | None,
    output: Path,
    as_json: bool,
    file_name: str | None,
    results_dir: Path,
    *,
    force: bool,
) -> None:
    """Fits a profile to runs, writes it, and prints its errors, what moved, and the runs to measure next.

    Args:
        words: sweeps and files of the user's runs, and overrides of the sweep about which the next runs are to teach.
        imported: files of imported tables, to whose rows of the same program and GPU the profile is fitted first.
        profile_name: name of the profile from which the fit starts; None chooses that of the program.
        output: the file of the profile.
        file_name: name of the sweep that is written with the runs to measure next; None writes none.
        force: whether a file of that name is replaced.
    """
    path = None if file_name is None else require_writable_name(file_name, force=force)
    overrides = [word for word in words if "=" in word and not word.endswith(".parquet")]
    sources: list[str | None] = [word for word in words if word not in overrides]
    question = [] if asks_for_nothing(overrides) else overrides
    if question:
        load_config(question)  # a mistake is found before the fit
    if not (sources or imported):
        sources = [None]
    own_cases = cases_in(sources, results_dir, say, warn) if sources else []
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    rows = list[Case]()
    if imported:
        rows = imported_cases(cases_in(imported, results_dir, say, warn), own_cases, parts_of(overrides))
    start = start_of(rows or own_cases, profile_name, say)
    prior, calibration = start, None
    for fitted_cases in filter(None, (rows, own_cases)):
        prior = start if calibration is None else calibration.profile
        fitted_cases = for_profile(fitted_cases, prior)
        calibration = calibrate(fitted_cases, prior, name=output.stem, date=date)
        if not as_json:
            show_calibration(calibration, prior.name)
    assert calibration is not None, "cases_in returns at least one case"
    profile = replace(calibration.profile, prior=start.name)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_result(output, to_yaml(profile, start).encode())
    moved = moved_constants(profile, start, fitted_cases)
    runs, config, question, reason = _next_runs(question, fitted_cases, profile, start, output)
    launch_lines = []
    if path and not runs:
        raise ConfigError(f"--write {file_name}: {reason or 'all layouts of the sweep are measured'}")
    if path and config:
        launch_lines = written_lines(path, config, question, [run.run for run in runs])
    if as_json:
        fields = ("runs", "fitted", "before", "after", "memory")
        document: dict[str, Any] = {"profile": str(output), "prior": start.name}
        document |= {name: getattr(calibration, name) for name in fields}
        document |= {"moved": [constant._asdict() for constant in moved], "next": [*map(_record_of, runs)]}
        print_json(document | ({"written": str(path)} if launch_lines else {}))
        return
    if not calibration.fitted["step_time"]:
        say(
            f"kept the constants of {prior.name}: fitted ones are not clearly better on runs left out of the fit"
        )
    say(*moved_lines(moved))
    say(*knob_lines(profile, fitted_cases))
    say(f"wrote {output}: {profile.source}; to use it in a sweep: profile={output.stem}")
    if runs:
        show_next_runs(runs)
        show(*(launch_lines or ["\nto measure them, add --write NAME: it writes them as a sweep"]))
    elif reason:
        say(f"no runs to measure next: {reason}")


def asks_for_nothing(overrides: Sequence[str]) -> bool:
    """Whether overrides only name the program and the GPU of a calibration, and no sweep."""
    return not parts_of(overrides).keys() - {"kernel", "hardware"}


def _next_runs(
    question: Sequence[str], cases: Sequence[Case], profile: Profile, start: Profile, output: Path
) -> tuple[list[NextRun], SweepConfig | None, list[str], str]:
    """The runs that would teach most about a sweep, its configuration, its overrides, and why there are no runs.

    Args:
        question: overrides of the sweep; without any, it is the cell that most runs have.
        start: the profile before the fits, whose errors say how uncertain constants are.
    """
    timed_cases, _ = healthy_timed(cases)
    overrides = [*question] or usual_question(timed_cases)
    parts = parts_of(overrides)
    defaults = {"sweep": "recommend", "hardware": timed_cases[0].hardware.name}
    kernel = timed_cases[0].run.spec.kernel.name
    defaults |= {"kernel": kernel} if kernel in files("kernel") else {}
    overrides = [*(f"{k}={v}" for k, v in defaults.items() if k not in parts), *overrides]
    if output.resolve() == user_file("profiles", output.stem).resolve():
        overrides = [*overrides, f"profile={output.stem}"]
    if not parts:
        model = timed_cases[0].run.spec.shape.name
        return (
            [],
            None,
            overrides,
            f"{model} or {kernel} is not a file; add model=NAME and kernel=NAME of a sweep",
        )
    try:
        config = replace(load_config(overrides), profile=profile)
        runs = next_runs(timed_cases, profile, level_sd_of(timed_cases, start), config)
    except ConfigError as error:
        if question:
            raise
        return [], None, overrides, str(error)
    return runs, config, overrides, "" if runs else "no layout of the sweep is likely to fit"


def usual_question(timed_cases: Sequence[Case]) -> list[str]:
    """The overrides of the cell that most of these runs have, of those whose model and kernel are files."""
    cells = Counter(
        (
            f"model={spec.shape.name}",
            f"kernel={spec.kernel.name}",
            f"hardware={case.hardware.name}",
            *_batch(spec),
        )
        for case in timed_cases
        for spec in [case.run.spec]
        if spec.shape.name in files("model") and spec.kernel.name in files("kernel")
    )
    return [*cells.most_common(1)[0][0]] if cells else []


def _batch(spec: Any) -> Iterator[str]:
    """The overrides of the size of a run."""
    yield f"sweep.nodes=[{spec.nodes}]"
    yield f"sweep.seq_len={spec.workload.seq_len}"
    yield f"sweep.gbs={spec.workload.gbs}"
    yield f"kernel.precision={spec.kernel.precision}"


def _record_of(run: NextRun) -> Mapping[str, Any]:
    """A run to measure next, as --json prints it."""
    spec = run.run.spec
    return {
        **run.run.cell._asdict(),
        "layout": spec.label(),
        "run_id": run.run.run_id,
        "teaches": list(run.teaches),
        "variance_left": run.variance_left,
    }
