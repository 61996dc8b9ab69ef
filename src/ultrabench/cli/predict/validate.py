"""The command `ultrabench predict validate`, which compares predictions with measured runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from ultrabench.analysis.numbers import percent
from ultrabench.cli.options import RESULTS, Json, ProfileName, ResultsDir, Source, require_parquet
from ultrabench.cli.results import Output, draw, write_result
from ultrabench.errors import require_known

Metrics = dict[str, Any]
"""Errors of predictions, as `ultrabench.analysis.predict.validate.metrics` gives them."""


def validate(
    source: Source = None,
    profile: ProfileName = None,
    rows: Path | None = typer.Option(
        None, callback=require_parquet, help="Write each row with its prediction, as .parquet."
    ),
    leave_out: str | None = typer.Option(
        None,
        metavar="model or nodes",
        help="Fit anew without each model or number of nodes, and score on it.",
    ),
    output: Output = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Compare predictions with measured runs; -o draws them."""
    from ultrabench.analysis.predict.validate import GROUPS, metrics, without_own_group
    from ultrabench.analysis.predict.validate import table as predicted
    from ultrabench.cli.predict.cases import open_cases
    from ultrabench.cli.tables import print_json, say, show
    from ultrabench.sweep.config.load import load_profile

    if leave_out is not None:
        require_known("group for --leave-out", GROUPS, leave_out)
    given, used = open_cases([source], profile, results_dir)
    if leave_out is None:
        found = predicted(given, lambda case: used)
        if used.prior:
            fit = f"profile {used.name}: {used.source}; the errors of runs that it was fitted to are those of the fit"
            say(f"{fit}: --leave-out model or nodes fits without them")
    else:
        prior = load_profile(used.prior) if used.prior else used
        limits = {name: value for name, value in used.memory.items() if name.endswith("limit")}
        memory = " and memory (not its limits)" if used.framework == "nanotron" else ""
        say(f"--leave-out {leave_out}: step time{memory} fitted anew without each, from profile {prior.name}")
        fitted = without_own_group(given, replace(prior, memory=prior.memory | limits), leave_out)
        found = predicted(given, lambda case: fitted[GROUPS[leave_out](case)])
    measured = metrics(found)
    if rows is not None:
        import pyarrow as pa

        from ultrabench.analysis.collect import parquet

        write_result(rows, parquet(pa.Table.from_pandas(found, preserve_index=False)))
    if output is not None:
        from ultrabench.analysis.figures.plots.predicted import validated

        draw(output, lambda: validated(found, used.name))
    if json_:
        scored = {"name": used.name, "source": used.source, "prior": used.prior, "leave_out": leave_out}
        print_json(measured | {"profile": scored})
        return
    for scope, all_ in measured.items():
        reasons = ", ".join(f"{n:,} {why}" for why, n in all_["excluded_by_reason"].items())
        title = f"step time of {scope} rows, profile {used.name}: {all_['rows']:,} rows ({all_['excluded']:,} excluded)"
        _show(f"{title}: {reasons}" if reasons else title, TIME, all_, _time)
        told = ", ".join(f"{k} {_percent(v)}" for k, v in all_["interval"]["regimes"].items())
        show(f"{scope} rows in their 80 % interval by regime: {told or 'none'}", "")
    _show(f"memory and OOM of all rows, profile {used.name}", MEMORY, measured["all"], _memory)


TIME = ("rows", "> 2x", "median", "90 %", "in 80 %", "rank corr.", "top 5", "regret")
"""Columns of the errors of step times; `> 2x` counts rows that took more than twice as long as predicted."""
MEMORY = ("median", "90 %", "OOM right", "borderline", "wrong prune", "OOM caught")
"""Columns of the errors of memory."""


def _show(
    title: str, columns: tuple[str, ...], all_: Metrics, cells: Callable[[Metrics], tuple[str, ...]]
) -> None:
    """Prints one line for all rows and one for each value of a slice."""
    from ultrabench.cli.tables import show, table

    by = {f"{name} {value}": m for name, slices in all_["by"].items() for value, m in slices.items()}
    rows = [(name.removeprefix("parallelism "), *cells(m)) for name, m in ({"all": all_} | by).items()]
    show(table(title, "rows of", *(f">{head}" for head in columns), rows=rows), "")


def _time(m: Metrics) -> tuple[str, ...]:
    """The texts of one line, in the order of TIME."""
    time, planning, correlation = m["step_time"], m["planning"], m["step_time"]["spearman_in_cell"]
    return (
        f"{m['rows']:,}", f"{m['more_than_twice']:,}", _percent(time["median_error"]), _percent(time["p90_error"]),
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
