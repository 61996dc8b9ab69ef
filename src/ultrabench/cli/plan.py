"""`ultrabench sweep plan`."""

from pathlib import Path
from typing import Any

from ultrabench.cli.tables import hours, out, print_json, say, table
from ultrabench.errors import ConfigError
from ultrabench.sweep.config import load_config
from ultrabench.sweep.plan import Candidate, Plan, make_plan, require_runs

GIB = 2**30
MEASURED, PREDICTED, TOO_LARGE = ORDER = ("measured", "predicted", "predicted, too large for memory")
"""Why a layout is recommended, the best reason first."""


def show_plan(overrides: list[str], as_json: bool, output: Path | None, top: int | None) -> None:
    """Prints the plan's counts by cell and rule, and the layouts to try first."""
    plan = make_plan(load_config(overrides))
    require_runs(plan)
    if output is not None:
        if output.suffix != ".parquet":
            raise ConfigError(f"-o {output}: the plan is a parquet file; choose a name ending in .parquet")
        from ultrabench.sweep.plan_table import write_plan

        write_plan(plan, output)
        say(f"wrote {len(plan.candidates)} candidates to {output}")
    best = recommend(plan, top) if top else []
    if as_json:
        document = plan.summary()
        if top:
            document["top"] = best
        print_json(document)
        return
    _print_cells(plan)
    _print_reasons(plan)
    if top:
        _print_top(best)


def _print_cells(plan: Plan) -> None:
    summary = plan.summary()
    numbers = ("nodes", "GPUs", "candidates", "valid", "runs", "GPU hours")
    made = table(f"sweep {plan.config.name}", "model", *numbers, right=numbers)
    per_node = plan.config.hardware.gpus_per_node
    price: dict[tuple[str, int], float] = {}
    for run in plan.runs:
        key = (run.shape.name, run.nodes)
        price[key] = price.get(key, 0.0) + run.gpu_hours(plan.steps) * plan.config.repeats
    for cell in summary["cells"]:
        key = (cell["model"], cell["nodes"])
        made.add_row(
            cell["model"], str(cell["nodes"]), str(cell["nodes"] * per_node),
            *(f"{cell[k]:,}" for k in ("candidates", "valid", "runs")), hours(price.get(key, 0.0)),
        )  # fmt: skip
    made.add_section()
    made.add_row(
        "all", "", "", *(f"{summary[k]:,}" for k in ("candidates", "valid", "runs")),
        hours(plan.gpu_hours()),
    )  # fmt: skip
    out().print(made)


def _print_reasons(plan: Plan) -> None:
    summary = plan.summary()
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

    Layouts whose predicted memory exceeds the accelerator's come last. What was measured and may not
    win a cell of the heatmap, as a suspect, is left out.
    """
    rates = _measured(plan)
    unfit = {run_id for run_id, rate in rates.items() if rate is None}
    cells: dict[tuple[str, int], list[tuple[str, float, Candidate]]] = {}
    limit = plan.config.hardware.rank_mem_bytes
    for run in (run for run in plan.runs if run.run_id not in unfit):
        tokens = run.spec.tokens_per_step / run.layout.world_size
        measured = rates.get(run.run_id)
        rate = measured if measured is not None else tokens / run.prediction.step_time_s
        fits = run.prediction.peak_mem_bytes <= limit
        why = MEASURED if measured is not None else (PREDICTED if fits else TOO_LARGE)
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
    from ultrabench.analysis.head import read_head
    from ultrabench.folder import SweepFolder
    from ultrabench.journal import read_journal
    from ultrabench.state import fold
    from ultrabench.sweep.losses import judged
    from ultrabench.sweep.plan_table import planned_runs
    from ultrabench.sweep.progress import doubtful, measured_rates

    folder = SweepFolder(Path(plan.config.results_dir) / plan.config.name)
    if folder.read_head() is None:
        return {}
    state, device = judged(fold(read_journal(folder.journal))), plan.config.hardware.device
    planned = read_head(folder).with_peaks(planned_runs(plan), state)
    return measured_rates(planned, state, doubtful(planned, state, device))


def _print_top(best: list[dict[str, Any]]) -> None:
    numbers = ("nodes", "tokens/s/GPU", "step s", "peak GiB")
    made = table(
        "\nlayouts to try first", "model", "nodes", "layout", *numbers[1:], "why", "run", right=numbers
    )
    for row in best:
        made.add_row(
            row["model"], str(row["nodes"]), row["layout"], f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['step_time_s']:.3g}", f"{row['peak_mem_bytes'] / GIB:.1f}", row["why"], row["run_id"],
        )  # fmt: skip
    out().print(made)
