"""The commands `ultrabench predict ...`, which check predictions against runs and fit them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ultrabench.allowed import Count
from ultrabench.cli.options import (
    RESULTS,
    Json,
    ResultsDir,
    SweepOrFile,
    number_option,
    require_parquet,
    words_argument,
)
from ultrabench.cli.results import Output, draw, write_result
from ultrabench.errors import ConfigError, counted, require_known

if TYPE_CHECKING:
    from ultrabench.analysis.predict.cases import Case
    from ultrabench.sweep.predict.profile import Profile

Metrics = dict[str, Any]
"""Errors of predictions, as `ultrabench.analysis.predict.validate.metrics` gives them."""

TIME_COLUMNS = ("runs", "> 2x", "median", "90 %", "in 80 %", "rank corr.", "top 5", "regret")
"""Columns of the errors of step times; `> 2x` counts rows that took more than twice as long as predicted."""
MEMORY_COLUMNS = ("median", "90 %", "OOM right", "borderline", "wrong prune", "OOM caught")
"""Columns of the errors of memory."""
MAX_LISTED_RUNS = 30
"""Largest number of runs that `validate` lists one by one; --json lists all, and --rows writes them."""
DEFAULT_PROFILE_FILE = Path("ultrabench/profiles/mine.yaml")
"""The file that `calibrate` writes without -o."""
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME", help="Default: the profile of the program of the runs."),
]


class _LayoutByDefault(TyperGroup):
    """The group `predict`, whose command `layout` need not be named before NAME=VALUE.

    Its other commands take `profile=NAME` like all of ultrabench, besides `--profile NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with `layout` in front where they begin with no command."""
        if args[:1] and args[0] in self.commands.keys() - {"layout"}:
            args = [f"--{argument}" if argument.startswith("profile=") else argument for argument in args]
        names_no_command = args[:1] and args[0] not in (*self.commands, "--help")
        is_layout = names_no_command and any("=" in argument for argument in args)
        return super().parse_args(ctx, ["layout", *args] if is_layout else args)


predict_app = typer.Typer(
    cls=_LayoutByDefault, no_args_is_help=True, rich_markup_mode=None,
    help="Predict a layout; validate and calibrate predictions.\n\nFor example: "
    "ultrabench predict model=llama3-8b tp=4.",
)  # fmt: skip
_LAYOUT_HELP = (
    "Layout, such as tp=2 pp=2 gas=4 recompute=full; also model, hardware, nodes, seq_len, "
    "kernel and profile."
)
MaxParallelRuns = Annotated[int, number_option("--batch", Count, "Number of concurrent runs.")]
_LEAVE_OUT_HELP = "Leave out each model or node count, fit to the others, and score on it."
Arguments = Annotated[list[str], words_argument("[NAME=VALUE]...", _LAYOUT_HELP)]


@predict_app.command()
def layout(arguments: Arguments, json_: Json = False, results_dir: ResultsDir = RESULTS) -> None:
    """Predict the memory and step time of a layout, part by part.

    It also shows P(OOM) and the most similar measured runs."""
    from ultrabench.cli.predict.layout import run_predict

    run_predict(arguments, json_, results_dir)


@predict_app.command()
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
    """Compare predictions with measured runs; -o draws a figure."""
    import pandas as pd

    from ultrabench.analysis.predict.validate import (
        GROUPS,
        error_records,
        fp8_priors_warning,
        metrics,
        profiles_without_group,
    )
    from ultrabench.analysis.predict.validate import table as predict_table
    from ultrabench.cli.predict.cases import open_cases, open_cases_by_profile
    from ultrabench.cli.tables import print_json, say, show
    from ultrabench.sweep.config.load import load_profile

    if leave_out is None:
        case_groups = open_cases_by_profile(source, profile_name, results_dir)
        tables = [predict_table(cases, partial(_same_profile, profile)) for cases, profile in case_groups]
        predictions = pd.concat(tables, ignore_index=True)
        profiles = [profile for _, profile in case_groups]
        for cases, profile in case_groups:
            if warning := fp8_priors_warning(cases, profile):
                say(warning)
            if profile.prior:
                fit_text = (
                    f"profile {profile.name}: {profile.source}; for the runs of that fit, "
                    "the errors are fit errors"
                )
                say(f"{fit_text}: for unseen runs, add --leave-out model or nodes")
    else:
        require_known("group for --leave-out", GROUPS, leave_out)
        source_cases, profile = open_cases([source], profile_name, results_dir)
        profiles = [profile]
        prior = load_profile(profile.prior) if profile.prior else profile
        memory_limits = {name: value for name, value in profile.memory.items() if name.endswith("limit")}
        memory_text = " and memory (not its limits)" if profile.framework == "nanotron" else ""
        start_text = f"starting from profile {prior.name}"
        say(f"--leave-out {leave_out}: step time{memory_text} refitted without each, {start_text}")
        start_profile = replace(prior, memory=prior.memory | memory_limits)
        profile_by_group = profiles_without_group(source_cases, start_profile, leave_out)
        predictions = predict_table(source_cases, lambda case: profile_by_group[GROUPS[leave_out](case)])
    profile_names = ", ".join(profile.name for profile in profiles)
    metrics_by_scope, run_errors = metrics(predictions), error_records(predictions)
    if rows_path is not None:
        import pyarrow as pa

        from ultrabench.analysis.collect import parquet

        write_result(rows_path, parquet(pa.Table.from_pandas(predictions, preserve_index=False)))
    if output is not None:
        from ultrabench.analysis.figures.plots.predicted import validation_figure

        draw(output, lambda: validation_figure(predictions, profile_names))
    if json_:
        profile_records = [
            {"name": p.name, "source": p.source, "prior": p.prior, "leave_out": leave_out} for p in profiles
        ]
        print_json(metrics_by_scope | {"profiles": profile_records, "rows": run_errors})
        return
    if len(run_errors) <= MAX_LISTED_RUNS:
        _show_errors(run_errors)
    for scope, scope_metrics in metrics_by_scope.items():
        if scope == "all" and not metrics_by_scope["healthy"]["excluded"]:
            show("step time of all rows: as above, because no row is excluded", "")
            continue
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in scope_metrics["excluded_by_reason"].items())
        runs_text = (
            f"{counted(scope_metrics['step_time']['rows'], 'run')} ({scope_metrics['excluded']:,} excluded)"
        )
        title = f"step time of {scope} rows, profile {profile_names}: {runs_text}"
        _show_metrics(f"{title}: {reasons}" if reasons else title, TIME_COLUMNS, scope_metrics, _time_texts)
        share_by_regime = scope_metrics["interval"]["regimes"]
        shares_text = ", ".join(f"{name} {_share_text(share)}" for name, share in share_by_regime.items())
        show(f"{scope} rows inside their 80 % interval, by regime: {shares_text or 'none'}", "")
    title = f"memory and OOM of all rows, profile {profile_names}"
    _show_metrics(title, MEMORY_COLUMNS, metrics_by_scope["all"], _memory_texts)


def _same_profile(profile: "Profile", case: object) -> "Profile":
    """The profile, whatever the case is."""
    return profile


def _show_errors(run_errors: list[dict[str, Any]]) -> None:
    """Prints what was measured and predicted of each run, in tokens/s/GPU, and the error of its step time."""
    from ultrabench.cli.tables import show, table

    rows = []
    for run in run_errors:
        measured_text, predicted_text, low_text, high_text = (
            f"{run[f'{prefix}tokens_per_s_per_gpu']:,.0f}" for prefix in ("", "predicted_", "low_", "high_")
        )
        run_text = f"{run['model']} {run['precision']}{' compiled' * run['compile']}"
        nodes_text = f"{counted(run['nodes'], 'node')} {run['hardware']}"
        interval_text = f"{low_text}-{high_text}{'' if run['inside'] else ' (outside)'}"
        speed_texts = (measured_text, predicted_text, interval_text)
        rows.append((run_text, nodes_text, run["layout"], *speed_texts, f"{run['step_time_error']:+.0%}"))
    columns = ("run", "on", "layout", ">measured", ">predicted", ">80 % interval", ">step time error")
    show(table("tokens/s/GPU of each run", *columns, rows=rows), "")


def _show_metrics(
    title: str, columns: tuple[str, ...], metrics: Metrics, texts_of: Callable[[Metrics], tuple[str, ...]]
) -> None:
    """Prints a table of errors: one row for all runs, and one for each slice of them such as `model tiny`.

    Args:
        texts_of: gives the texts of `columns` for the errors of one slice.
    """
    from ultrabench.cli.tables import show, table

    slices = {"all": metrics}
    for name, metrics_by_value in metrics["by"].items():
        slices |= {f"{name} {value}": slice_ for value, slice_ in metrics_by_value.items()}
    rows = [(name.removeprefix("parallelism "), *texts_of(slice_)) for name, slice_ in slices.items()]
    show(table(title, "rows of", *(f">{head}" for head in columns), rows=rows), "")


def _time_texts(metrics: Metrics) -> tuple[str, ...]:
    """The texts of one table row about step times, in the order of TIME_COLUMNS."""
    step_time, planning = metrics["step_time"], metrics["planning"]
    correlation = step_time["spearman_in_cell"]
    return (
        f"{step_time['rows']:,}", f"{metrics['more_than_twice']:,}", _share_text(step_time["median_error"]),
        _share_text(step_time["p90_error"]),
        _share_text(metrics["interval"]["coverage"]), "-" if correlation is None else f"{correlation:.3f}",
        _share_text(planning["best_in_top5"]), _share_text(planning["top1_regret"]),
    )  # fmt: skip


def _memory_texts(metrics: Metrics) -> tuple[str, ...]:
    """The texts of one table row about memory, in the order of MEMORY_COLUMNS."""
    memory, oom = metrics["memory"], metrics["oom"]
    oom_shares = (oom[name] for name in ("accuracy", "borderline_accuracy", "false_prune", "caught"))
    return (*map(_share_text, (memory["median_error"], memory["p90_error"], *oom_shares)),)


def _share_text(share: float | None) -> str:
    """A share from 0 to 1 as percent; a dash where it is unknown."""
    from ultrabench.analysis.numbers import percent

    return percent(share) or "-"


@predict_app.command()
def calibrate(
    sources: list[str] | None = typer.Argument(
        None, metavar="[SWEEP or FILE.parquet]...", help="Default: the newest sweep."
    ),
    profile_name: ProfileName = None,
    output: Path = typer.Option(DEFAULT_PROFILE_FILE, "-o", "--output", help="Profile to write."),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Fit a profile to measured runs.

    It shows the errors on runs that were left out of the fit."""
    if output.suffix != ".yaml":
        raise ConfigError(f"{output}: a profile is a YAML file; give a name that ends in .yaml")
    from ultrabench.analysis.predict.calibrate import calibrate as fit_profile
    from ultrabench.analysis.predict.calibrate import to_yaml
    from ultrabench.cli.predict.cases import open_cases
    from ultrabench.cli.tables import print_json, say, show, table

    fitted_cases, prior = open_cases(sources or [None], profile_name, results_dir)
    calibration = fit_profile(fitted_cases, prior, name=output.stem, date=f"{datetime.now(UTC):%Y-%m-%d}")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_result(output, to_yaml(calibration.profile, prior).encode())
    if json_:
        fields = ("runs", "fitted", "before", "after", "memory")
        values = {name: getattr(calibration, name) for name in fields}
        print_json({"profile": str(output), "prior": prior.name, **values})
        return
    errors_by_quantity = {
        "step_time": {"before": calibration.before, "after": calibration.after},
        "memory": calibration.memory,
    }
    rows = []
    for quantity, errors_by_constants in errors_by_quantity.items():
        fit_text = "fitted" if calibration.fitted[quantity] else "fitted, not used"
        constants_text = {"before": f"profile {prior.name}", "after": fit_text}
        for constants, errors in errors_by_constants.items():
            error_texts = (f"{100 * errors[key]:.1f} %" for key in ("median_error", "p90_error"))
            rows.append((quantity.replace("_", " "), constants_text[constants], *error_texts))
    title = f"error on runs left out of the fit ({counted(calibration.runs, 'healthy run')})"
    show(table(title, "of", "constants", ">median", ">90 %", rows=rows), "")
    _say_knobs(calibration.profile, fitted_cases)
    say(f"wrote {output}: {calibration.profile.source}; to use it in a sweep: profile={output.stem}")


def _say_knobs(profile: "Profile", cases: Sequence["Case"]) -> None:
    """Says which values of knobs have fitted constants, and which values share those of `time`."""
    from ultrabench.cli.tables import say

    fitted_texts = [
        f"{knob}={value} ({counted(num_runs, 'run')})"
        for knob, runs_by_value in profile.flag_runs.items()
        for value, num_runs in runs_by_value.items()
    ]
    if fitted_texts:
        say(f"constants of knobs fitted: {', '.join(fitted_texts)}")
    values_by_knob = dict[str, dict[str, None]]()
    for case in cases:
        for knob, knob_value in case.run.spec.flag_values.items():
            values_by_knob.setdefault(knob, {})[str(knob_value)] = None
    for knob, values in values_by_knob.items():
        unknown_values = [value for value in values if value not in profile.flags.get(knob, {})]
        if len(unknown_values) > 1:  # the constants of time are for one of them
            advice = f"say in flags.{knob} of the profile what each changes, and calibrate again"
            say(f"the same constants predict {knob}={', '.join(unknown_values)}: {advice}")


@predict_app.command()
def replay(
    source: SweepOrFile = None,
    strategy: str = typer.Option(
        "adaptive", metavar="NAME", help="adaptive, exhaustive, random or predicted."
    ),
    max_parallel_runs: MaxParallelRuns = 1,
    profile_name: ProfileName = None,
    output: Output = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Replay a finished sweep with a search strategy.

    It shows the GPU hours and the regret of the strategy; -o FILE.png draws them."""
    from ultrabench.analysis.predict.replay import STRATEGIES, cells_of
    from ultrabench.analysis.predict.replay import replay as replay_cells
    from ultrabench.cli.predict.cases import open_cases
    from ultrabench.cli.tables import print_json, say, show, table
    from ultrabench.sweep.config.load import load_config

    require_known("strategy", STRATEGIES, strategy)
    source_cases, profile = open_cases([source], profile_name, results_dir)
    cells = cells_of(source_cases, profile)
    if not cells:
        raise ConfigError(f"no layout of {source or 'the sweep'} has an ok run; replay a finished sweep")
    document = replay_cells(cells, strategy, max_parallel_runs, load_config().max_p_oom)
    if output is not None:
        from ultrabench.analysis.figures.replayed import figure

        draw(output, lambda: figure(document, str(source or "sweep")))
    if json_:
        print_json(document)
        return
    rows = [
        (c["model"], c["nodes"], c["layouts"], c["runs"], f"{c['gpu_hours_share']:.1%}",
         "none found" if c["regret"] is None else f"{c['regret']:.1%}")
        for c in document["cells"]
    ]  # fmt: skip
    title = f"strategy {strategy}, batch {max_parallel_runs}, profile {profile.name}"
    show(table(title, "model", ">nodes", ">layouts", ">runs", ">GPU hours", ">regret", rows=rows), "")
    num_near_best = sum(c["regret"] is not None and c["regret"] <= 0.02 for c in document["cells"])
    cost_text = (
        f"{document['runs']:,} runs, {document['gpu_hours_share']:.1%} of the GPU hours of all layouts"
    )
    say(f"{cost_text}; within 2 % of the best in {num_near_best} of {len(rows)} cells")
