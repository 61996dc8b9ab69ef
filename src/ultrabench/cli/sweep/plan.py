"""`ultrabench sweep plan`."""

import math
from pathlib import Path
from typing import Any

from ultrabench.cli.tables import hours, out, print_json, say, table
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import Plan, make_plan, require_runs
from ultrabench.sweep.running.price import Price, reckon

MEASURED, PREDICTED = ORDER = ("measured", "predicted")
"""Why a layout is recommended, the best reason first."""


def show_plan(overrides: list[str], as_json: bool, output: Path | None, top: int | None) -> None:
    """Prints the plan's counts by cell and rule, and the layouts to try first."""
    plan = make_plan(load_config(overrides))
    require_runs(plan)
    if output is not None:
        if output.suffix != ".parquet":
            raise ConfigError(f"-o {output}: the plan is a parquet file; choose a name ending in .parquet")
        from ultrabench.sweep.plan_table import write_plan

        write_plan(plan.candidates, output)
        say(f"wrote {counted(len(plan.candidates), 'candidate')} to {output}")
    best = recommend(plan, top) if top else []
    price, summary = reckon(plan), plan.summary()
    if as_json:
        document = summary | {"predicted_gpu_hours": round(price.gpu_hours, 4)}
        document["predicted_gpu_hours_beside_runs"] = {k: round(h, 4) for k, (_, h) in price.extra.items()}
        if top:
            document["top"] = best
        print_json(document)
        return
    _print_cells(plan, price, summary)
    _print_reasons(plan, summary)
    if top:
        _print_top(plan, best)


def _print_cells(plan: Plan, price: Price, summary: dict[str, Any]) -> None:
    counts = ("candidates", "valid", "runs", "predicted_to_fit")
    numbers = ("nodes", "GPUs", *counts[:3], "they fit", "GPU hours")
    made = table(f"sweep {plan.config.name}", "model", *numbers, right=numbers)
    per_node = plan.config.hardware.gpus_per_node
    for cell in summary["cells"]:
        _, cost = price.runs.get((cell["model"], cell["nodes"]), (0, 0.0))
        gpus = str(cell["nodes"] * per_node)
        made.add_row(cell["model"], str(cell["nodes"]), gpus, *(f"{cell[k]:,}" for k in counts), hours(cost))
    made.add_section()
    for what, (number, cost) in price.extra.items():
        if number:
            made.add_row(f"{number:,} {what}", "", "", "", "", "", "", hours(cost))
    made.add_section()
    made.add_row("all", "", "", *(f"{summary[k]:,}" for k in counts), hours(price.gpu_hours))
    out().print(made)
    if large := summary["runs"] - summary["predicted_to_fit"]:
        out().print(
            f"{large:,} of the runs are predicted to need more memory than a rank has: they come last, and their price is "
            "that of their start",
            soft_wrap=True,
        )


def _print_reasons(plan: Plan, summary: dict[str, Any]) -> None:
    if summary["rejected"]:
        made = table("\nrejected, by rule", "rule", "candidates", "for example", right=("candidates",))
        for rule, count in summary["rejected"].items():
            example = next(c.reason for c in plan.candidates if c.rule == rule)
            made.add_row(rule, f"{count:,}", example)
        out().print(made)
    if summary["refused_by_kernel"]:
        title = f"\nvalid, but not for kernel={plan.config.kernel.name}"
        made = table(title, "reason", "candidates", right=("candidates",))
        for reason, count in summary["refused_by_kernel"].items():
            made.add_row(reason, f"{count:,}")
        out().print(made)


def recommend(plan: Plan, top: int) -> list[dict[str, Any]]:
    """The `top` runs of each cell: by measured tokens/s/GPU where this sweep has them, else predicted.

    What is not measured has to be predicted to fit. What was measured and may not win a cell of the
    heatmap, as a suspect, is left out.
    """
    rates = _measured(plan)
    unfit = {run_id for run_id, rate in rates.items() if rate is None}
    cells: dict[tuple[str, int], list[tuple[str, float, Candidate]]] = {}
    for run in (run for run in plan.runs if run.run_id not in unfit):
        tokens = run.spec.tokens_per_step / run.layout.world_size
        measured = rates.get(run.run_id)
        if measured is None and not run.fits:
            continue
        rate = measured if measured is not None else tokens / run.prediction.step_time_s
        why = PREDICTED if measured is None else MEASURED
        cells.setdefault((run.shape.name, run.nodes), []).append((why, rate, run))
    found = []
    for (model, nodes), options in cells.items():
        options.sort(key=lambda option: (ORDER.index(option[0]), -option[1]))
        for why, rate, run in options[:top]:
            found.append(
                {
                    "model": model,
                    "nodes": nodes,
                    "run_id": run.run_id,
                    "layout": run.layout.label(),
                    "tokens_per_s_per_gpu": rate,
                    "step_time_s": run.spec.tokens_per_step / run.layout.world_size / rate,
                    "peak_mem_bytes": run.prediction.peak_mem_bytes,
                    "why": why,
                }
            )
    return found


def _measured(plan: Plan) -> dict[str, float | None]:
    """run_id -> tokens/s/GPU of what the sweep of that name has already measured; None where it may not win."""
    from ultrabench.store.folder import SweepFolder
    from ultrabench.store.journal import read_journal
    from ultrabench.store.state import fold
    from ultrabench.store.sweep_json import find_sweep_json
    from ultrabench.sweep.running.losses import with_loss_outliers
    from ultrabench.sweep.running.progress import doubtful, measured_rates

    folder = SweepFolder(Path(plan.config.results_dir) / plan.config.name)
    known = find_sweep_json(folder)
    if known is None:
        return {}
    state, device = with_loss_outliers(fold(read_journal(folder.journal))), plan.config.hardware.device
    if known.core_flops_per_s and not plan.config.hardware.peak_flops_per_s:  # as measured for that sweep
        plan = make_plan(plan.config, core_flops_per_s=known.core_flops_per_s, cores=known.cores or 1)
    return measured_rates(plan.runs, state, doubtful(plan.runs, state, device))


def _print_top(plan: Plan, best: list[dict[str, Any]]) -> None:
    numbers = ("nodes", "tokens/s/GPU", "step s", "peak GiB")
    made = table(
        "\nlayouts to try first", "model", "nodes", "layout", *numbers[1:], "why", "run", right=numbers
    )
    for row in best:
        made.add_row(
            row["model"], str(row["nodes"]), row["layout"], f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['step_time_s']:.3g}", f"{row['peak_mem_bytes'] / GIB:.1f}", row["why"], row["run_id"],
        )  # fmt: skip
    if best:
        out().print(made)
    smallest: dict[tuple[str, int], float] = {}
    for run in plan.runs:
        cell = (run.shape.name, run.nodes)
        smallest[cell] = min(smallest.get(cell, math.inf), run.prediction.peak_mem_bytes)
    limit = plan.config.hardware.rank_mem_bytes / GIB
    for model, nodes in sorted(smallest.keys() - {(row["model"], row["nodes"]) for row in best}):
        out().print(
            f"{model} on {counted(nodes, 'node')}: nothing is predicted to fit; the smallest layout needs "
            f"{smallest[model, nodes] / GIB:,.0f} GiB of {limit:.0f}",
            soft_wrap=True,
        )
