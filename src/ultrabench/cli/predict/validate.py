"""What `ultrabench predict validate` prints and writes."""

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
        found = table(given, used, lambda case: (used.time, used.interval))
    else:
        say(f"fitting anew without each of the {leave_out}, from the constants of {used.prior or used.name}")
        prior = load_profile(used.prior).time if used.prior else used.time
        fitted = without_own_group(given, prior, leave_out)
        found = table(given, used, lambda case: fitted[GROUPS[leave_out](case)])
    measured = metrics(found)
    if rows is not None:
        import pyarrow as pa

        write_result(rows, parquet(pa.Table.from_pandas(found, preserve_index=False)))
    if output is not None:
        from ultrabench.analysis.figures.plots.predicted import validated

        draw(output, lambda: validated(found, used.name))
    if json_:
        print_json(measured)
        return
    for scope, all_ in measured.items():
        lines = [("all", "", all_)]
        lines += [(k, v, m) for k, slices in all_["by"].items() for v, m in slices.items()]
        title = f"{scope} rows, profile {used.name}: {all_['rows']:,} ({all_['excluded']:,} excluded); memory and OOM of all"
        heads = ("slice", "", *(f">{head}" for head in COLUMNS))
        show(rich_table(title, *heads, rows=[(k, v, *_cells(m)) for k, v, m in lines]), "")
        told = ", ".join(f"{k} {_percent(v)}" for k, v in all_["interval"]["regimes"].items())
        show(f"{scope} rows in their 80 % interval by regime: {told or 'none'}", "")


COLUMNS = (
    "rows", "> 2x slow", "time: median", "90 %", "in interval", "rank corr.", "best in 5", "regret",
    "memory: median", "90 %", "OOM right", "borderline", "wrongly pruned", "OOM caught",
)  # fmt: skip


def _cells(m: dict[str, Any]) -> tuple[str, ...]:
    """The texts of one line, in the order of COLUMNS."""
    time, memory, oom, planning = m["step_time"], m["memory"], m["oom"], m["planning"]
    correlation = time["spearman_in_cell"]
    return (
        f"{m['rows']:,}", f"{m['more_than_twice']:,}", _percent(time["median_error"]), _percent(time["p90_error"]),
        _percent(m["interval"]["coverage"]), "-" if correlation is None else f"{correlation:.3f}",
        _percent(planning["best_in_top5"]), _percent(planning["top1_regret"]),
        _percent(memory["median_error"]), _percent(memory["p90_error"]), _percent(oom["accuracy"]),
        _percent(oom["borderline_accuracy"]), _percent(oom["false_prune"]), _percent(oom["caught"]),
    )  # fmt: skip


def _percent(share: float | None) -> str:
    return percent(share) or "-"
