"""`ultrabench sweep plan` shows counts and price of a sweep, the layouts to try first, or a job script."""

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ultrabench.cli.sweep.consent import price_table
from ultrabench.cli.tables import print_json, say, show, table, warn
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.launchers.allocate import allocations, shapes
from ultrabench.launchers.open_sweep import folder_of, require_program
from ultrabench.launchers.slurm.script import array_script
from ultrabench.store.journal import read_journal
from ultrabench.store.state import SweepState, fold
from ultrabench.store.sweep_json import find_sweep_json
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Plan, make_plan, require_runs
from ultrabench.sweep.plan_table import Row, write_plan
from ultrabench.sweep.running.attempts import next_attempts
from ultrabench.sweep.running.outliers import with_loss_outliers
from ultrabench.sweep.running.price import MARGIN, START_S, Price, planned_jobs, reckon
from ultrabench.sweep.running.progress import doubtful, measured_rates

COUNTS = {"candidates": "candidates", "valid": "valid", "runs": "runs", "they fit": "predicted_to_fit"}
"""Column of the table -> key of a cell in the JSON document."""


def show_plan(overrides: list[str], as_json: bool, output: Path | None, top: int | None) -> None:
    """Prints the counts of a plan by cell and rule, its price, and the layouts to try first."""
    plan = require_runs(make_plan(load_config(overrides)))
    try:
        require_program(plan.config)
    except ConfigError as error:
        warn(f"a launch from here would be refused: {error}")
    if output is not None:
        if output.suffix != ".parquet":
            raise ConfigError(f"-o {output}: the plan is a parquet file; choose a name ending in .parquet")
        write_plan(plan.candidates, output)
        say(f"wrote {counted(len(plan.candidates), 'candidate')} to {output}")
    best = recommend(plan, top) if top else []
    price, summary = reckon(plan), plan.summary()
    notes = [*_nothing_fits(plan, best), _priced_for(plan.config, price)]
    if as_json:
        print_json(_document(summary, price, notes) | ({"top": best} if top else {}))
        return
    show(*_page(plan, price, summary, best), *notes)


def _document(summary: dict[str, Any], price: Price, notes: list[str]) -> dict[str, Any]:
    for cell in summary["cells"]:
        cost = price.runs.get((cell["model"], cell["nodes"]), (0, 0.0))[1]
        cell["predicted_gpu_hours"] = round(cost, 4)
    extra = ((what, number, round(cost, 4)) for what, (number, cost) in price.extra.items())
    beside = {what: {"count": number, "predicted_gpu_hours": cost} for what, number, cost in extra}
    return summary | {"predicted_gpu_hours": round(price.gpu_hours, 4), "beside_runs": beside, "notes": notes}


def _page(plan: Plan, price: Price, summary: dict[str, Any], best: list[Row]) -> Iterator[RenderableType]:
    """The tables of a plan: its price by cell, rejected and refused candidates, and layouts to try first."""
    cells = {(c["model"], c["nodes"]): [c[key] for key in COUNTS.values()] for c in summary["cells"]}
    yield price_table(plan, price, tuple(COUNTS), cells)
    if large := summary["runs"] - summary["predicted_to_fit"]:
        order = "they come last, and their price is that of their start"
        yield f"{large:,} of the runs are predicted to need more memory than a rank has: {order}"
    if rejected := summary["rejected"]:
        examples = {c.rule: c.reason for c in reversed(plan.candidates)}
        rows = [(rule, f"{count:,}", examples[rule]) for rule, count in rejected.items()]
        yield table("\nrejected, by rule", "rule", ">candidates", "for example", rows=rows)
    if refused := summary["refused_by_kernel"]:
        title = f"\nvalid, but not for kernel={plan.config.kernel.name}"
        counts = [(reason, f"{count:,}") for reason, count in refused.items()]
        yield table(title, "reason", ">candidates", rows=counts)
    if best:
        top = []
        for row in best:
            rate, step_s = f"{row['tokens_per_s_per_gpu']:,.0f}", f"{row['step_time_s']:.3g}"
            peak, place = f"{row['peak_mem_bytes'] / GIB:.1f}", (row["model"], row["nodes"], row["layout"])
            top.append((*place, rate, step_s, peak, row["why"], row["run_id"]))
        numbers = (">tokens/s/GPU", ">step s", ">peak GiB")
        yield table("\nlayouts to try first", "model", ">nodes", "layout", *numbers, "why", "run", rows=top)


def _priced_for(config: SweepConfig, price: Price) -> str:
    """One line that tells for which launcher the price holds, how runs share jobs, and the limit of a job."""
    launcher = config.launcher
    if launcher.pack:
        share = f"up to {counted(launcher.pack, 'run')} each (launcher.pack)"
    else:
        share = f"about {launcher.allocation_minutes:g} predicted minutes each (launcher.allocation_minutes)"
    limit = f"{launcher.time_minutes} minutes (launcher.time_minutes)"
    if launcher.time_minutes is None:
        start = f"{START_S / 60:g} minutes to start"
        limit = f"{MARGIN:g} x the predicted time of its runs + the time limit of one run + {start}"
    jobs = counted(len(price.jobs), "job")
    return f"priced for launcher={launcher.name}: {jobs} of {share}; the time limit of a job is {limit}"


def recommend(plan: Plan, top: int) -> list[Row]:
    """The `top` best runs of each cell, first by measured and then by predicted tokens/s/GPU.

    A run that is not measured must be predicted to fit. A measured run that may not win its cell, such as a
    suspect, is left out.
    """
    rates, best = _measured(plan), []
    for (model, nodes), runs in plan.cells.items():
        rows: list[Row] = []
        for run in runs:
            tokens = run.spec.tokens_per_step / run.layout.world_size
            predicted = tokens / run.prediction.step_time_s if run.fits else None
            if rate := rates.get(run.run_id, predicted):
                name = {"model": model, "nodes": nodes, "run_id": run.run_id, "layout": run.layout.label()}
                speed = {"tokens_per_s_per_gpu": rate, "step_time_s": tokens / rate}
                why = "measured" if run.run_id in rates else "predicted"
                rows.append({**name, **speed, "peak_mem_bytes": run.prediction.peak_mem_bytes, "why": why})
        best += sorted(rows, key=lambda row: (row["why"], -row["tokens_per_s_per_gpu"]))[:top]
    return best


def _measured(plan: Plan) -> dict[str, float | None]:
    """run_id -> tokens/s/GPU that the sweep of this name has measured; None for a run that may not win."""
    folder = folder_of(plan.config)
    known = find_sweep_json(folder)
    if known is None:
        return {}
    state, device = with_loss_outliers(fold(read_journal(folder.journal))), plan.config.hardware.device
    if known.core_flops_per_s and not plan.config.hardware.peak_flops_per_s:  # as measured for that sweep
        plan = make_plan(plan.config, core_flops_per_s=known.core_flops_per_s, cores=known.cores or 1)
    return measured_rates(plan.runs, state, doubtful(plan.runs, state, device))


def _nothing_fits(plan: Plan, best: list[Row]) -> Iterator[str]:
    """A line for each cell without a fitting or recommended run, with the memory of its smallest layout."""
    limit = plan.config.hardware.mem_bytes / GIB
    named = {(row["model"], row["nodes"]) for row in best}
    for (model, nodes), runs in sorted(plan.cells.items()):
        if (model, nodes) not in named and not any(run.fits for run in runs):
            smallest = min(runs, key=lambda run: run.prediction.peak_mem_bytes)
            needed = f"needs {smallest.prediction.peak_mem_bytes / GIB:,.0f} GiB of {limit:.0f}"
            told = f"nothing is predicted to fit; the smallest layout, {smallest.layout.label()}, {needed}"
            yield f"{model} on {counted(nodes, 'node')}: {told}"


def print_script(overrides: list[str]) -> None:
    """Prints the script that a launch would submit first; writes no file and does not call Slurm.

    Raises:
        ConfigError: the launcher has no scripts, or no candidate can run.
    """
    config = load_config(overrides)
    if config.launcher.name != "slurm":
        raise ConfigError(f"launcher={config.launcher.name} submits no script; add launcher=slurm")
    plan = require_runs(make_plan(config))
    jobs = [*planned_jobs(plan, next_attempts(plan, SweepState()), SweepState())]
    first = shapes(jobs[: config.launcher.max_jobs], sys.maxsize)[0]
    token, digest = uuid.uuid4().hex, config.kernel.digest()
    made = allocations(plan, folder_of(config), first, token=token, by={}, kernel_digest=digest)
    sys.stdout.write(array_script(made, config))
