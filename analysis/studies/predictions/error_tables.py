"""The tables of errors that `ultrabench predict validate` and `calibrate` print."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.analysis.results.numbers import percent, with_unit
from ultrabench.analysis.studies.predictions.calibrate import Calibration
from ultrabench.analysis.studies.predictions.next_runs import NextRun
from ultrabench.cli.tables import show, table
from ultrabench.errors import counted
from ultrabench.sweep.candidate import cell_columns

Metrics = dict[str, Any]
"""Errors of predictions, as `validate.metrics` gives them."""
TIME_COLUMNS = ("runs", "> 2x", "median", "90 %", "in 80 %", "rank corr.", "top 5", "regret")
"""Columns of the errors of step times; `> 2x` counts rows that took more than twice as long as predicted."""
MEMORY_COLUMNS = ("median", "90 %", "OOM right", "borderline", "wrong prune", "OOM caught")
"""Columns of the errors of memory."""
MAX_LISTED_RUNS = 30
"""Largest number of runs that `validate` lists one by one; --json lists all, and --rows writes them."""


def show_validation(
    metrics_by_scope: Mapping[str, Metrics], run_errors: Sequence[Mapping[str, Any]], profile_names: str
) -> None:
    """Prints the errors of a few runs one by one, then those of step times and of memory in all runs.

    Args:
        metrics_by_scope: what `validate.metrics` returns.
        run_errors: what `validate.error_records` returns.
        profile_names: the names of the profiles that predicted.
    """
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
    num_by_kind = metrics_by_scope["all"]["memory"]["rows_by_kind"]
    kinds_text = ", ".join(f"{kind} {num:,}" for kind, num in num_by_kind.items()) or "not measured"
    title = f"memory ({kinds_text}) and OOM of all rows, profile {profile_names}"
    _show_metrics(title, MEMORY_COLUMNS, metrics_by_scope["all"], _memory_texts)


def show_errors_by_factor(errors: Metrics) -> None:
    """Prints the errors of step times by program, GPU and other factors, if runs of several settings can be left out.

    Args:
        errors: what `error_factors.errors_by_factor` returns.
    """
    if errors["settings_left_out"] is None:
        return
    factors = {"all": {"": errors}, **errors["by"]}
    rows = [
        (f"{factor} {value}".strip(), *_factor_texts(group))
        for factor, errors_by_value in factors.items()
        for value, group in errors_by_value.items()
    ]
    columns = ("runs", "settings", "predicted / measured", "median", "90 %")
    inside_columns = ("in 80 %", "setting left out", "source left out")
    title = "step time of healthy rows by factor of the interval; in 80 %, also without the setting or source"
    show(table(title, "rows of", *(f">{head}" for head in (*columns, *inside_columns)), rows=rows), "")


def _factor_texts(errors: Metrics) -> tuple[str, ...]:
    """The texts of one table row about a value of a factor."""
    shares = ("median_error", "p90_error", "inside", "settings_left_out", "sources_left_out")
    return (
        f"{errors['rows']:,}",
        f"{errors['settings']:,}",
        f"{errors['median_ratio']:.2f}",
        *(_share_text(errors[name]) for name in shares),
    )


def _show_errors(run_errors: Sequence[Mapping[str, Any]]) -> None:
    """Prints what was measured and predicted of each run, in tokens/s/GPU, and the error of its step time."""
    rows = []
    for run in run_errors:
        measured_text, predicted_text, low_text, high_text = (
            with_unit(RATE, run[f"{prefix}{RATE}"]) for prefix in ("", "predicted_", "low_", "high_")
        )
        run_text = f"{run['model']} {run['precision']}{' compiled' * run['compile']}"
        nodes_text = f"{counted(run['nodes'], 'node')} {run['hardware']}"
        interval_text = f"{low_text}-{high_text}{'' if run['inside'] else ' (outside)'}"
        speed_texts = (measured_text, predicted_text, interval_text)
        rows.append((run_text, nodes_text, run["layout"], *speed_texts, f"{run['step_time_error']:+.0%}"))
    columns = ("run", "on", "layout", ">measured", ">predicted", ">80 % interval", ">step time error")
    show(table(f"{column_of(RATE).heading} of each run", *columns, rows=rows), "")


def _show_metrics(
    title: str, columns: tuple[str, ...], metrics: Metrics, texts_of: Callable[[Metrics], tuple[str, ...]]
) -> None:
    """Prints a table of errors: one row for all runs, and one for each slice of them such as `model tiny`.

    Args:
        texts_of: gives the texts of `columns` for the errors of one slice.
    """
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
    return percent(share) or "-"


def show_calibration(calibration: Calibration, prior_name: str) -> None:
    """Prints the errors on runs that were left out of the fit, with the prior's constants and with the fitted ones."""
    errors_by_quantity = {
        "step_time": {"before": calibration.before, "after": calibration.after},
        "memory": calibration.memory,
    }
    rows = []
    for quantity, errors_by_constants in errors_by_quantity.items():
        fit_text = "fitted" if calibration.fitted[quantity] else "fitted, not used"
        constants_text = {"before": f"profile {prior_name}", "after": fit_text}
        for constants, errors in errors_by_constants.items():
            error_texts = (f"{100 * errors[key]:.1f} %" for key in ("median_error", "p90_error"))
            rows.append((quantity.replace("_", " "), constants_text[constants], *error_texts))
    title = f"error on runs left out of the fit ({counted(calibration.runs, 'healthy run')})"
    show(table(title, "of", "constants", ">median", ">90 %", rows=rows), "")


def show_next_runs(runs: Sequence[NextRun]) -> None:
    """Prints the runs that would teach most next, what they teach, and how uncertain predictions are after each."""
    cells = [run.run.cell for run in runs]
    keys = cell_columns(cells)
    rows = [
        (
            *(getattr(run.run.cell, key) for key in keys),
            run.run.spec.label(),
            ", ".join(run.teaches),
            _share_text(run.variance_left),
        )
        for run in runs
    ]
    heads = [key if key == "model" else f">{key}" for key in keys]
    columns = (*heads, "layout", "teaches most about", ">variance left")
    runs_text = f"the {counted(len(runs), 'run')} that would teach most next"
    title = f"\n{runs_text}, and the variance of the predicted step times that each leaves"
    show(table(title, *columns, rows=rows), "")
