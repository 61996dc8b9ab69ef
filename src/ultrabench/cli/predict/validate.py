"""What `ultrabench predict validate` prints and writes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ultrabench.analysis.collect import parquet
from ultrabench.analysis.numbers import percent
from ultrabench.analysis.predict.validate import GROUPS, metrics, table, without_own_group
from ultrabench.cli.predict.calibrate import open_cases
from ultrabench.cli.results import draw, require_parquet, write_result
from ultrabench.cli.tables import print_json, say, show
from ultrabench.cli.tables import table as rich_table
from ultrabench.errors import require_known
from ultrabench.sweep.config.load import load_profile


def run_validate(
    source: str | None,
    profile: str | None,
    rows: Path | None,
    leave_out: str | None,
    output: Path | None,
    json_: bool,
    results_dir: Path,
) -> None:
    """Prints the metrics of a profile on measured runs, and writes its rows and figure where asked for."""
    if rows is not None:
        require_parquet(rows)
    if leave_out is not None:
        require_known("group for --leave-out", GROUPS, leave_out)
    given, used = open_cases([source], profile, results_dir)
    if leave_out is None:
        found = table(given, lambda case: used)
        if used.prior:
            fit = f"profile {used.name}: {used.source}; the errors of runs that it was fitted to are those of the fit"
            say(f"{fit}: --leave-out model or nodes fits without them")
    else:
        prior = load_profile(used.prior) if used.prior else used
        limits = {name: value for name, value in used.memory.items() if name.endswith("limit")}
        memory = " and memory (not its limits)" if used.framework == "nanotron" else ""
        say(f"--leave-out {leave_out}: step time{memory} fitted anew without each, from profile {prior.name}")
        fitted = without_own_group(given, replace(prior, memory=prior.memory | limits), leave_out)
        found = table(given, lambda case: fitted[GROUPS[leave_out](case)])
    measured = metrics(found)
    if rows is not None:
        import pyarrow as pa

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
    title: str,
    columns: tuple[str, ...],
    all_: dict[str, Any],
    cells: Callable[[dict[str, Any]], tuple[str, ...]],
) -> None:
    """Prints one line for all rows and one for each value of a slice."""
    by = {f"{name} {value}": m for name, slices in all_["by"].items() for value, m in slices.items()}
    rows = [(name.removeprefix("parallelism "), *cells(m)) for name, m in ({"all": all_} | by).items()]
    show(rich_table(title, "rows of", *(f">{head}" for head in columns), rows=rows), "")


def _time(m: dict[str, Any]) -> tuple[str, ...]:
    """The texts of one line, in the order of TIME."""
    time, planning, correlation = m["step_time"], m["planning"], m["step_time"]["spearman_in_cell"]
    return (
        f"{m['rows']:,}", f"{m['more_than_twice']:,}", _percent(time["median_error"]), _percent(time["p90_error"]),
        _percent(m["interval"]["coverage"]), "-" if correlation is None else f"{correlation:.3f}",
        _percent(planning["best_in_top5"]), _percent(planning["top1_regret"]),
    )  # fmt: skip


def _memory(m: dict[str, Any]) -> tuple[str, ...]:
    """The texts of one line, in the order of MEMORY."""
    memory, oom = m["memory"], m["oom"]
    shares = (oom[name] for name in ("accuracy", "borderline_accuracy", "false_prune", "caught"))
    return (*map(_percent, (memory["median_error"], memory["p90_error"], *shares)),)


def _percent(share: float | None) -> str:
    return percent(share) or "-"
