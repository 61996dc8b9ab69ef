"""`ultrabench sweep plan` shows counts and price of a sweep, the layouts to try first, or a job script."""

import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ultrabench.cli.sweep.consent import headline, interval_line, jobs_line, price_table, too_long
from ultrabench.cli.tables import out, print_json, say, show, table, three_digits, warn
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.launchers.allocate import array_groups, make_allocations
from ultrabench.launchers.choose import require_max_nodes
from ultrabench.launchers.open_sweep import acceptance, folder_of, in_force, require_same, require_same_launch
from ultrabench.launchers.required_programs import require_local, require_program
from ultrabench.launchers.slurm.script import array_script
from ultrabench.store.journal import read_journal
from ultrabench.store.state import SweepState, fold
from ultrabench.store.sweep_json import find_sweep_json
from ultrabench.sweep.candidate import (
    NO_ROOM,
    PRUNED,
    UNSELECTED,
    Candidate,
    CellKey,
    advised,
    cell_columns,
    expected_rate,
)
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.extrapolation import against_published, best_published, beyond_fit, published_mfu
from ultrabench.sweep.plan import PARALLEL_FROM, Plan, make_plan, planned_cells
from ultrabench.sweep.plan_table import Row, write_plan
from ultrabench.sweep.predict.predict import ADVISED_P_OOM
from ultrabench.sweep.remedy import nothing_fits, require_runs, same_commands
from ultrabench.sweep.running.attempts import next_attempts
from ultrabench.sweep.running.other_shapes import other_shapes
from ultrabench.sweep.running.outliers import for_answers
from ultrabench.sweep.running.price import Price, planned_jobs, price_of, within_limit
from ultrabench.sweep.running.progress import SweepProgress, progress_of
from ultrabench.sweep.running.standings import measured_rates

COUNTS = {
    "candidates": "candidates",
    "valid": "valid",
    "runs": "runs_at_most",
    "likely to fit": "predicted_to_fit",
}
"""Column of the table -> key of a cell in the JSON document."""
SEARCHED = {"expected runs": "runs"}
"""Column of the table -> key of a cell in the JSON document, for the adaptive search, which makes only some runs."""


def plan_with_bar(config: SweepConfig, **peak_rate: Any) -> Plan:
    """The plan of a sweep; on a terminal a large one shows a bar on stderr.

    Raises:
        ConfigError: no candidate can run.
    """
    console = out(stderr=True)
    columns = TextColumn("candidates"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=total >= PARALLEL_FROM)

        return require_runs(make_plan(config, advance=advance, **peak_rate))


def show_plan(
    overrides: list[str], as_json: bool, output: Path | None, top: int | None, advise_p_oom: float | None
) -> None:
    """Prints the counts of a plan by cell and rule, the price of what is left, and the layouts to try first."""
    config = in_force(load_config(overrides), warn)
    advised_p_oom = ADVISED_P_OOM if advise_p_oom is None else advise_p_oom
    folder, state, peak_rate = folder_of(config), SweepState(), dict[str, Any]()
    sweep_json = find_sweep_json(folder)
    try:
        if sweep_json is not None:
            require_same(sweep_json, config, folder.path)
            state = for_answers(fold(read_journal(folder.journal, warn)))
            if not config.hardware.peak_flops_per_s:  # as measured for that sweep
                peak_rate = {"core_flops_per_s": sweep_json.core_flops_per_s, "cores": sweep_json.cores or 1}
            require_same_launch(state, config, folder.path)
            if config.kernel.kind == "command":  # whether our own kernel has changed, only torch can tell
                acceptance(config, {}, state, None)
        require_local(config)
        require_max_nodes(config)
        require_program(config)
    except ConfigError as error:
        warn(f"sweep launch would refuse this plan: {error}")
    plan = within_limit(plan_with_bar(config, **peak_rate))
    if output is not None:
        write_plan(plan.candidates, output, config.hardware.name)
        say(f"wrote {counted(len(plan.candidates), 'candidate')} to {output}")
    progress = progress_of(config.name, plan.runs, state, config.hardware.device)
    rates = measured_rates(plan.runs, state, config.hardware.device)
    best = layouts_to_try(plan, top, rates, advised_p_oom) if top else []
    price = price_of(plan, state)
    summary = _summary(plan, price, progress)
    advised_cells = {key_of(row) for row in best if row["advised"]}
    notes = [*nothing_fits(plan, advised_cells, advised_p_oom), *other_shapes(config.models, state)]
    notes += same_commands(plan)
    unmeasured_runs = [run for run in plan.runs if run.run_id not in rates]
    specs = (run.spec for run in unmeasured_runs)
    summary["unmeasured"] = beyond_fit(specs, config.profile, config.hardware.gpu_at_limit)
    notes += _extrapolation(plan, unmeasured_runs, summary["unmeasured"], best)
    if progress.settled:
        price_note = "the price covers the rest" if price.jobs else "nothing is left to run"
        notes.append(f"{len(progress.settled):,} of {counted(len(plan.runs), 'run')} settled: {price_note}")
    if price.jobs:
        price_text = f"price for launcher={config.launcher.name}: {jobs_line(price, config)}"
        notes += [interval_line(price), *too_long(plan), price_text]
    notes += _chosen_ep(plan)
    if as_json:
        print_json(summary | {"notes": notes} | ({"top": best} if top else {}))
        return
    show(*_page(plan, price, summary, best), *notes)


def _summary(plan: Plan, price: Price, progress: SweepProgress) -> dict[str, Any]:
    """The document of `sweep plan --json` without what is said about predictions.

    `runs` is the expected number of runs, and `runs_at_most` the largest possible one.
    """
    summary, settled_ids = plan.summary(), progress.settled - progress.skipped.keys()
    num_settled_by_cell = Counter(run.cell for run in plan.runs if run.run_id in settled_ids)
    for cell in summary["cells"]:
        key = key_of(cell)
        num_runs, gpu_hours = price.runs.get(key, (0, 0.0))
        cell["runs_at_most"] = cell["runs"]
        if plan.config.strategy == "adaptive":
            cell["runs"] = num_runs + num_settled_by_cell[key]
        cell.update(_rounded(gpu_hours, price.intervals.get(key, (0.0, 0.0))))
    counts = {"settled": len(progress.settled), "runs_at_most": summary["runs"]}
    counts |= {"runs": sum(cell["runs"] for cell in summary["cells"])}
    costs = price.extra.items()
    extras = {name: {"count": n, "predicted_gpu_hours": round(cost, 4)} for name, (n, cost) in costs}
    return summary | counts | _rounded(price.gpu_hours, price.interval) | {"beside_runs": extras}


def _rounded(gpu_hours: float, interval: tuple[float, float]) -> dict[str, Any]:
    rounded_ends = [round(end, 4) for end in interval]
    return {"predicted_gpu_hours": round(gpu_hours, 4), "predicted_gpu_hours_interval": rounded_ends}


def _chosen_ep(plan: Plan) -> Iterator[str]:
    """A line for each model with experts, which says what sweep.ep=auto means for it."""
    for shape in plan.config.models:
        if shape.num_experts and "auto" in plan.config.axes.layout["ep"]:
            values = sorted({c.layout.ep for c in plan.candidates if c.spec.shape == shape})
            yield f"sweep.ep=auto selects {', '.join(map(str, values))} for the {shape.num_experts} experts of {shape.name}"


def _extrapolation(
    plan: Plan, runs: Sequence[Candidate], unmeasured: list[str], best: list[Row]
) -> Iterator[str]:
    """Lines about predictions beyond what was measured; marks those among the rows of `best`.

    Args:
        runs: the runs of the plan that are not measured.
        unmeasured: their features that no run of the fit had.
    """
    config, profile, gpu = plan.config, plan.config.profile, plan.config.hardware.gpu_at_limit
    if unmeasured:
        num_extrapolated = sum(bool(profile.unmeasured(run.spec, gpu)) for run in runs)
        extrapolation_text = f"extrapolated beyond the values that profile {profile.name} was fitted to"
        yield f"{num_extrapolated:,} of {counted(len(runs), 'run')} {'is' if num_extrapolated == 1 else 'are'} {extrapolation_text} (in brackets), with wider intervals: {'; '.join(unmeasured)}"
    best_rate, mfus = best_published(config), dict[str, float]()
    specs = {run.run_id: run.spec for run in runs}
    for run in runs:
        if run.fits and run.peak_flops_per_s and config.hardware.device == "cuda":
            time_s, peak = run.prediction.step_time_s, run.peak_flops_per_s
            mfus[run.run_id] = published_mfu(run.spec, time_s, peak, best_rate)
    for row in best:
        spec, mfu = specs.get(row["run_id"]), mfus.get(row["run_id"], 0.0)
        row["unmeasured"] = beyond_fit([spec], profile, gpu) if spec else []
        row["above_published"] = best_rate is not None and best_rate.below(mfu)
    if mfus and (line := against_published(config, max(mfus.values()), best_rate)):
        yield line


def _page(plan: Plan, price: Price, summary: dict[str, Any], best: list[Row]) -> Iterator[RenderableType]:
    """The tables of a plan: its price by cell, rejected and refused candidates, and layouts to try first."""
    columns = COUNTS | (SEARCHED if plan.config.strategy == "adaptive" else {})
    cells = {key_of(cell): [cell[key] for key in columns.values()] for cell in summary["cells"]}
    yield headline(plan.config)
    yield price_table(plan, price, tuple(columns), cells)
    if pruned := summary["pruned"]:
        max_p_oom = plan.config.max_p_oom
        example = next(c for c in plan.candidates if c.rule == PRUNED)
        fact = f"{pruned:,} valid layouts are excluded because P(OOM) is above max_p_oom={max_p_oom:g}"
        yield f"{fact}, such as {example.layout.label()}: {example.reason}"
    if unselected := [c for c in plan.candidates if c.rule == UNSELECTED]:
        yield f"{len(unselected):,} valid layouts are excluded: {unselected[0].reason}"
    if num_large := summary["runs_at_most"] - summary["predicted_to_fit"]:
        consequence = "they run last and are priced at start-up only"
        yield f"{num_large:,} of the {summary['runs_at_most']:,} runs are unlikely to fit into memory: {consequence}"
    if rejected := summary["rejected"]:
        examples = {c.rule: c.reason for c in reversed(plan.candidates)}
        rows = [(rule, f"{count:,}", examples[rule]) for rule, count in rejected.items()]
        yield table("\nrejected, by rule", "rule", ">candidates", "for example", rows=rows)
    if refused := summary["refused_by_kernel"]:
        title = f"\nvalid, but kernel={plan.config.kernel.name} cannot run them"
        counts = [(reason, f"{count:,}") for reason, count in refused.items()]
        yield table(title, "reason", ">candidates", rows=counts)
    for missing in summary["without_candidates"]:
        yield f"sweep.{missing['axis']}={missing['value']} has no candidate: {missing['reason']}"
    if best:
        lines, names = [], cell_columns(cells)
        for row in best:
            low, high = (three_digits(row[f"step_time_{end}_s"]) for end in ("low", "high"))
            rate, step = f"{row['tokens_per_s_per_gpu']:,.0f}", three_digits(row["step_time_s"])
            mfu = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
            step, p_oom = (f"{step} ({low}-{high})", _percent(row["p_oom"])) if low != high else (step, "")
            peak, cell = f"{row['peak_mem_bytes'] / GIB:.1f}", (*(row[n] for n in names), row["layout"])
            note = row["why"] if row["advised"] else "most likely to fit, not advised"
            note += f", {NO_ROOM}" * (not row["has_room"])
            note += ", extrapolated" * bool(row["unmeasured"]) + ", above published" * row["above_published"]
            lines.append((*cell, rate, mfu, step, peak, p_oom, row["limited_by"], note, row["run_id"]))
        numbers = (">tokens/s/GPU", ">MFU", ">step s", ">peak GiB", ">P(OOM)", "limited by")
        heads = ("model", *(f">{name}" for name in names[1:]), "layout")
        yield table("\nlayouts to try first", *heads, *numbers, "why", "run", rows=lines)


def key_of(cell: Mapping[str, Any]) -> CellKey:
    """The cell that an entry of the summary of a plan describes."""
    return CellKey(*(cell[name] for name in CellKey._fields))


def _percent(share: float) -> str:
    return "<1 %" if share < 0.01 else f"{100 * share:.0f} %"


def layouts_to_try(
    plan: Plan, top: int, rates: Mapping[str, float | None], advised_p_oom: float = ADVISED_P_OOM
) -> list[Row]:
    """The `top` best runs of each cell, in the order of the cells in the sweep, first by measured and then by expected tokens/s/GPU.

    What is expected of a run that is not measured is its predicted rate times the probability that it fits. Where
    no run of a cell is advised, the most likely one to fit stands alone, with `advised` False. A measured run
    that may not win its cell, such as a suspect, is left out, and the interval of the others is their step time alone.

    Args:
        rates: run_id -> measured tokens/s/GPU; None for a run that may not win.
        advised_p_oom: P(OOM) above which a run that is not measured is not advised.
    """
    best = list[Row]()
    runs_by_cell = plan.cells
    for _, cell in planned_cells(plan.config):
        rows, runs = list[Row](), runs_by_cell.get(cell, [])
        unmeasured_runs = (run for run in runs if run.run_id not in rates)
        likely_ids = {run.run_id for run in advised(unmeasured_runs, advised_p_oom)}
        for run in runs:
            prediction, tokens_per_gpu = run.prediction, run.spec.tokens_per_step / run.layout.world_size
            is_measured = run.run_id in rates
            if rate := rates.get(run.run_id, tokens_per_gpu / prediction.step_time_s):
                time_s, p_oom = tokens_per_gpu / rate, 0 if is_measured else prediction.p_oom
                rows.append(
                    {
                        **cell._asdict(),
                        "run_id": run.run_id,
                        "layout": run.spec.label(),
                        "tokens_per_s_per_gpu": rate,
                        "mfu": run.mfu(rate),
                        "expected_tokens_per_s_per_gpu": expected_rate(rate, p_oom),
                        "step_time_s": time_s,
                        "step_time_low_s": time_s if is_measured else prediction.step_time_low_s,
                        "step_time_high_s": time_s if is_measured else prediction.step_time_high_s,
                        "peak_mem_bytes": prediction.peak_mem_bytes,
                        "p_oom": prediction.p_oom,
                        "limited_by": prediction.limited_by,
                        "why": "measured" if is_measured else "predicted",
                        "advised": is_measured or run.run_id in likely_ids,
                        "has_room": prediction.memory_share <= 1,
                    }
                )
        candidates = [row for row in rows if row["advised"]]
        candidates = candidates or sorted(rows, key=lambda row: float(row["p_oom"]))[:1]
        best += sorted(candidates, key=lambda row: (row["why"], -row["expected_tokens_per_s_per_gpu"]))[:top]
    return best


def print_script(overrides: list[str]) -> None:
    """Prints the script that a launch would submit first; writes no file and does not call Slurm.

    Raises:
        ConfigError: the launcher has no scripts, or no candidate can run.
    """
    config = load_config(overrides)
    if config.launcher.name != "slurm":
        raise ConfigError(f"launcher={config.launcher.name} submits no script; add launcher=slurm")
    plan = within_limit(plan_with_bar(config))
    jobs = [*planned_jobs(plan, next_attempts(plan, SweepState()), SweepState())]
    group = array_groups(jobs[: config.launcher.max_jobs], sys.maxsize)[0]
    token, digest = uuid.uuid4().hex, config.kernel.digest()
    array = make_allocations(plan, folder_of(config), group, token=token, origin={}, kernel_digest=digest)
    sys.stdout.write(array_script(array, config))
