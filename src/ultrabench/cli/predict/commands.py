"""The commands `ultrabench predict ...`, which check predictions against runs and fit them."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ultrabench.analysis.numbers import percent
from ultrabench.cli.options import RESULTS, Json, ResultsDir, Source, require_parquet, words
from ultrabench.cli.results import Output, draw, write_result
from ultrabench.errors import ConfigError, counted, require_known

if TYPE_CHECKING:
    from ultrabench.sweep.predict.profile import Profile

Metrics = dict[str, Any]
"""Errors of predictions, as `ultrabench.analysis.predict.validate.metrics` gives them."""

TIME_COLUMNS = ("runs", "> 2x", "median", "90 %", "in 80 %", "rank corr.", "top 5", "regret")
"""Columns of the errors of step times; `> 2x` counts rows that took more than twice as long as predicted."""
MEMORY_COLUMNS = ("median", "90 %", "OOM right", "borderline", "wrong prune", "OOM caught")
"""Columns of the errors of memory."""
MAX_LISTED_RUNS = 30
"""Largest number of runs that `validate` lists one by one; --json lists all, and --rows writes them."""
DEFAULT_OUTPUT = Path("ultrabench/profiles/mine.yaml")
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME", help="Default: the profile of the program of the runs."),
]


class _LayoutFirst(TyperGroup):
    """The group `predict`, whose command `layout` need not be named before NAME=VALUE.

    Its other commands take `profile=NAME` like all of ultrabench, besides `--profile NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with `layout` in front where they begin with no command."""
        if args[:1] and args[0] in self.commands.keys() - {"layout"}:
            args = [f"--{argument}" if argument.startswith("profile=") else argument for argument in args]
        is_argument = args[:1] and args[0] not in (*self.commands, "--help")
        names_layout = is_argument and any("=" in argument for argument in args)
        return super().parse_args(ctx, ["layout", *args] if names_layout else args)


predict_app = typer.Typer(
    cls=_LayoutFirst, no_args_is_help=True, rich_markup_mode=None,
    help="Predict a layout; validate and calibrate predictions.\n\nFor example: ultrabench predict model=llama3-8b tp=4.",
)  # fmt: skip
_LAYOUT = "Layout, such as tp=2 pp=2 gas=4 recompute=full; also model, hardware, nodes, seq_len, kernel and profile."
_LEAVE_OUT = "Leave out each model or node count, fit to the others, and score on it."
Arguments = Annotated[list[str], words("[NAME=VALUE]...", _LAYOUT)]


@predict_app.command()
def layout(arguments: Arguments, json_: Json = False, results_dir: ResultsDir = RESULTS) -> None:
    """Predict the memory and step time of a layout, part by part.

    It also shows P(OOM) and the most similar measured runs."""
    from ultrabench.cli.predict.layout import run_predict

    run_predict(arguments, json_, results_dir)


@predict_app.command()
def validate(
    source: Source = None,
    profile_name: ProfileName = None,
    rows: Path | None = typer.Option(
        None, callback=require_parquet, help="Write all rows with their predictions (.parquet)."
    ),
    leave_out: str | None = typer.Option(None, metavar="model or nodes", help=_LEAVE_OUT),
    output: Output = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Compare predictions with measured runs; -o draws a figure."""
    import pandas as pd

    from ultrabench.analysis.predict.validate import (
        GROUPS,
        metrics,
        priors_of_fp8,
        row_errors,
        without_own_group,
    )
    from ultrabench.analysis.predict.validate import table as predicted
    from ultrabench.cli.predict.cases import open_cases, open_cases_by_profile
    from ultrabench.cli.tables import print_json, say, show
    from ultrabench.sweep.config.load import load_profile

    if leave_out is not None:
        require_known("group for --leave-out", GROUPS, leave_out)
    if leave_out is None:
        groups = open_cases_by_profile(source, profile_name, results_dir)
        tables = [predicted(cases, partial(_same, profile)) for cases, profile in groups]
        predictions = pd.concat(tables, ignore_index=True)
        profiles = [profile for _, profile in groups]
        for cases, profile in groups:
            if priors := priors_of_fp8(cases, profile):
                say(priors)
            if profile.prior:
                fit_text = f"profile {profile.name}: {profile.source}; for the runs of that fit, the errors are fit errors"
                say(f"{fit_text}: for unseen runs, add --leave-out model or nodes")
    else:
        cases_of_file, profile = open_cases([source], profile_name, results_dir)
        profiles = [profile]
        prior = load_profile(profile.prior) if profile.prior else profile
        limits = {name: value for name, value in profile.memory.items() if name.endswith("limit")}
        memory_text = " and memory (not its limits)" if profile.framework == "nanotron" else ""
        say(
            f"--leave-out {leave_out}: step time{memory_text} refitted without each, starting from profile {prior.name}"
        )
        refits = without_own_group(cases_of_file, replace(prior, memory=prior.memory | limits), leave_out)
        predictions = predicted(cases_of_file, lambda case: refits[GROUPS[leave_out](case)])
    names = ", ".join(profile.name for profile in profiles)
    metrics_by_scope, errors = metrics(predictions), row_errors(predictions)
    if rows is not None:
        import pyarrow as pa

        from ultrabench.analysis.collect import parquet

        write_result(rows, parquet(pa.Table.from_pandas(predictions, preserve_index=False)))
    if output is not None:
        from ultrabench.analysis.figures.plots.predicted import validation_figure

        draw(output, lambda: validation_figure(predictions, names))
    if json_:
        profile_records = [
            {"name": p.name, "source": p.source, "prior": p.prior, "leave_out": leave_out} for p in profiles
        ]
        print_json(metrics_by_scope | {"profiles": profile_records, "rows": errors})
        return
    if len(errors) <= MAX_LISTED_RUNS:
        _show_rows(errors)
    for scope, scores in metrics_by_scope.items():
        if scope == "all" and not metrics_by_scope["healthy"]["excluded"]:
            show("step time of all rows: as above, because no row is excluded", "")
            continue
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in scores["excluded_by_reason"].items())
        runs_text = f"{scores['step_time']['rows']:,} runs ({scores['excluded']:,} excluded)"
        title = f"step time of {scope} rows, profile {names}: {runs_text}"
        _show(f"{title}: {reasons}" if reasons else title, TIME_COLUMNS, scores, _time)
        shares_text = ", ".join(f"{k} {_percent(v)}" for k, v in scores["interval"]["regimes"].items())
        show(f"{scope} rows inside their 80 % interval, by regime: {shares_text or 'none'}", "")
    _show(f"memory and OOM of all rows, profile {names}", MEMORY_COLUMNS, metrics_by_scope["all"], _memory)


def _same(profile: "Profile", case: object) -> "Profile":
    """The profile, whatever the case is."""
    return profile


def _show_rows(errors: list[dict[str, Any]]) -> None:
    """Prints what was measured and predicted of each run, in tokens/s/GPU, and the error of its step time."""
    from ultrabench.cli.tables import show, table

    rows = []
    for e in errors:
        speed, predicted, low, high = (
            f"{e[f'{end}tokens_per_s_per_gpu']:,.0f}" for end in ("", "predicted_", "low_", "high_")
        )
        run = f"{e['model']} {e['precision']}{' compiled' * e['compile']}"
        nodes = f"{counted(e['nodes'], 'node')} {e['hardware']}"
        interval = f"{low}-{high}{'' if e['inside'] else ' (outside)'}"
        rows.append((run, nodes, e["layout"], speed, predicted, interval, f"{e['step_time_error']:+.0%}"))
    heads = ("run", "on", "layout", ">measured", ">predicted", ">80 % interval", ">step time error")
    show(table("tokens/s/GPU of each run", *heads, rows=rows), "")


def _show(
    title: str, columns: tuple[str, ...], scores: Metrics, cells: Callable[[Metrics], tuple[str, ...]]
) -> None:
    """Prints one line for all rows and one for each value of a slice."""
    from ultrabench.cli.tables import show, table

    parts = {f"{name} {value}": m for name, slices in scores["by"].items() for value, m in slices.items()}
    rows = [(name.removeprefix("parallelism "), *cells(m)) for name, m in ({"all": scores} | parts).items()]
    show(table(title, "rows of", *(f">{head}" for head in columns), rows=rows), "")


def _time(m: Metrics) -> tuple[str, ...]:
    """The texts of one line, in the order of TIME."""
    time, planning, correlation = m["step_time"], m["planning"], m["step_time"]["spearman_in_cell"]
    return (
        f"{time['rows']:,}", f"{m['more_than_twice']:,}", _percent(time["median_error"]), _percent(time["p90_error"]),
        _percent(m["interval"]["coverage"]), "-" if correlation is None else f"{correlation:.3f}",
        _percent(planning["best_in_top5"]), _percent(planning["top1_regret"]),
    )  # fmt: skip


def _memory(m: Metrics) -> tuple[str, ...]:
    """The texts of one line, in the order of MEMORY."""
    memory, oom = m["memory"], m["oom"]
    shares = (oom[name] for name in ("accuracy", "borderline_accuracy", "false_prune", "caught"))
    return (*map(_percent, (memory["median_error"], memory["p90_error"], *shares)),)


def _percent(share: float | None) -> str:
    return percent(share) or "-"


@predict_app.command()
def calibrate(
    sources: list[str] | None = typer.Argument(
        None, metavar="[SWEEP or FILE.parquet]...", help="Default: the newest sweep."
    ),
    profile: ProfileName = None,
    output: Path = typer.Option(DEFAULT_OUTPUT, "-o", "--output", help="Profile to write."),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Fit a profile to measured runs.

    It shows the errors on runs that were left out of the fit."""
    if output.suffix != ".yaml":
        raise ConfigError(f"{output}: a profile is a YAML file; give a name that ends in .yaml")
    from ultrabench.analysis.predict.calibrate import calibrate as calibrated
    from ultrabench.analysis.predict.calibrate import to_yaml
    from ultrabench.cli.predict.cases import open_cases
    from ultrabench.cli.tables import print_json, say, show, table

    fitted_cases, prior = open_cases(sources or [None], profile, results_dir)
    calibration = calibrated(fitted_cases, prior, name=output.stem, date=f"{datetime.now(UTC):%Y-%m-%d}")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_result(output, to_yaml(calibration.profile, prior).encode())
    if json_:
        summary = {
            "profile": str(output),
            "prior": prior.name,
            "runs": calibration.runs,
            "fitted": calibration.fitted,
        }
        print_json(
            summary | {"before": calibration.before, "after": calibration.after, "memory": calibration.memory}
        )
        return
    errors_by_part = {
        "step_time": {"before": calibration.before, "after": calibration.after},
        "memory": calibration.memory,
    }
    rows = []
    for part, errors in errors_by_part.items():
        fitted = "fitted" if calibration.fitted[part] else "fitted, not used"
        constants_text = {"before": f"profile {prior.name}", "after": fitted}
        for stage in errors:
            shares = (f"{100 * errors[stage][key]:.1f} %" for key in ("median_error", "p90_error"))
            rows.append((part.replace("_", " "), constants_text[stage], *shares))
    title = f"error on runs left out of the fit ({counted(calibration.runs, 'healthy run')})"
    show(table(title, "of", "constants", ">median", ">90 %", rows=rows), "")
    say(f"wrote {output}: {calibration.profile.source}; to use it in a sweep: profile={output.stem}")


@predict_app.command()
def replay(
    source: Source = None,
    strategy: str = typer.Option(
        "adaptive", metavar="NAME", help="adaptive, exhaustive, random or predicted."
    ),
    batch: int = typer.Option(1, min=1, help="Number of concurrent runs."),
    profile_name: ProfileName = None,
    output: Output = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Replay a finished sweep with a search strategy.

    It shows the GPU hours and the regret of the strategy; -o FILE.png draws them."""
    from ultrabench.analysis.predict.replay import STRATEGIES, cells_of
    from ultrabench.analysis.predict.replay import replay as replayed
    from ultrabench.cli.predict.cases import open_cases
    from ultrabench.cli.tables import print_json, say, show, table
    from ultrabench.sweep.config.load import load_config

    require_known("strategy", STRATEGIES, strategy)
    replayed_cases, profile = open_cases([source], profile_name, results_dir)
    cells = cells_of(replayed_cases, profile)
    if not cells:
        raise ConfigError(f"no layout of {source or 'the sweep'} has an ok run; replay a finished sweep")
    replays = replayed(cells, strategy, batch, load_config().max_p_oom)
    if output is not None:
        from ultrabench.analysis.figures.replayed import figure

        draw(output, lambda: figure(replays, str(source or "sweep")))
    if json_:
        print_json(replays)
        return
    rows = [
        (c["model"], c["nodes"], c["layouts"], c["runs"], f"{c['gpu_hours_share']:.1%}",
         "none found" if c["regret"] is None else f"{c['regret']:.1%}")
        for c in replays["cells"]
    ]  # fmt: skip
    title = f"strategy {strategy}, batch {batch}, profile {profile.name}"
    show(table(title, "model", ">nodes", ">layouts", ">runs", ">GPU hours", ">regret", rows=rows), "")
    num_near = sum(c["regret"] is not None and c["regret"] <= 0.02 for c in replays["cells"])
    say(
        f"{replays['runs']:,} runs, {replays['gpu_hours_share']:.1%} of the GPU hours of all layouts; "
        f"within 2 % of the best in {num_near} of {len(rows)} cells"
    )
