"""`ultrabench sweep plan` shows counts and price of a sweep, the layouts to try first, or a job script."""

import os
import shlex
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.analysis.results.numbers import with_interval, with_unit
from ultrabench.cli.sweep.consent import (
    cores_line,
    cost_lines,
    headline,
    interval_line,
    jobs_line,
    price_table,
    savings_lines,
    time_limit_lines,
    time_line,
)
from ultrabench.cli.sweep.layout_notes import layout_notes
from ultrabench.cli.sweep.planning import SEARCHED_CELLS, plan_with_bar, shown_progress
from ultrabench.cli.sweep.rereads import read_again
from ultrabench.cli.sweep.run_command import start_lines, start_of
from ultrabench.cli.sweep.screening import screening_lines
from ultrabench.cli.tables import print_json, say, show, table, warn
from ultrabench.cli.written import written_lines
from ultrabench.column import GPU_HOURS
from ultrabench.errors import ConfigError, SweepFolderError, are, counted
from ultrabench.launchers.allocate import array_groups, make_allocations
from ultrabench.launchers.choose import require_max_nodes, script_of
from ultrabench.launchers.open_sweep import (
    acceptance,
    folder_of,
    in_force,
    measured_cores,
    require_same,
    require_same_launch,
)
from ultrabench.launchers.required_programs import require_local, require_program
from ultrabench.launchers.starters import starter_warnings
from ultrabench.layout import AUTO
from ultrabench.run import AttemptKey
from ultrabench.store.journal import read_journal
from ultrabench.store.kernel_secrets import redact_arguments
from ultrabench.store.state import SweepState, fold
from ultrabench.store.sweep_json import find_sweep_json
from ultrabench.sweep.best_runs import expected_rate_of, tokens_per_s_per_gpu
from ultrabench.sweep.candidate import (
    NO_ROOM,
    PRUNED,
    UNSELECTED,
    Candidate,
    CellKey,
    advised,
    cell_columns,
    cell_label,
)
from ultrabench.sweep.config.compose import parts_of, with_overrides
from ultrabench.sweep.config.launcher_config import CLUSTER_LAUNCHER, WITH_SCRIPTS
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.config.sweep_file import require_writable_name
from ultrabench.sweep.config.widest import WIDEST, unsearched_values
from ultrabench.sweep.extrapolation import (
    against_published,
    best_published,
    beyond_fit,
    published_mfu,
    unproven,
)
from ultrabench.sweep.plan import Plan, planned_cells
from ultrabench.sweep.plan_table import Row, write_plan
from ultrabench.sweep.predict.predict import ADVISED_P_OOM
from ultrabench.sweep.remedy import reasons_without_candidates, reasons_without_fit, same_commands
from ultrabench.sweep.running.attempts import next_attempts
from ultrabench.sweep.running.budget import Proposal, proposal
from ultrabench.sweep.running.cheaper import Saving, savings
from ultrabench.sweep.running.early_stopping import (
    all_settings,
    expected_too_few_pairs,
    expected_too_few_text,
)
from ultrabench.sweep.running.other_shapes import other_shapes
from ultrabench.sweep.running.outliers import for_answers
from ultrabench.sweep.running.price import (
    Price,
    committed_gpu_hours,
    planned_jobs,
    price_of,
    with_measured_times,
    with_unmeasured_cores,
    within_limit,
)
from ultrabench.sweep.running.progress import SweepProgress, progress_of
from ultrabench.sweep.running.rereads import Rereads
from ultrabench.sweep.running.standings import measured_rates, standings_of
from ultrabench.sweep.similar_layouts import group_column, group_lines, groups_of, shown_runs

KEY_BY_COLUMN = {
    "candidates": "candidates", "valid": "valid", "runs": "runs_at_most", "likely to fit": "predicted_to_fit"
}  # fmt: skip
"""Column of the table -> key of an entry of `cells` in the JSON document."""
SEARCH_KEY_BY_COLUMN = {"expected runs": "runs"}
"""Further column of the table of an adaptive search, which makes only some of the runs -> key in the JSON document."""


def show_plan(
    overrides: list[str],
    as_json: bool,
    output: Path | None,
    top: int | None,
    with_similar: bool,
    advise_p_oom: float | None,
    file_name: str | None = None,
    *,
    force: bool = False,
    max_gpu_hours: float | None = None,
) -> None:
    """Prints the counts of a plan by cell and rule, the price of what is left, and the layouts to try first.

    Args:
        top: number of groups of layouts to try first in each cell; None shows none.
        with_similar: whether all layouts of these groups are shown and written.
        file_name: name of the sweep that is written with the layouts to try first, or with what `max_gpu_hours` leaves
            of the sweep; None writes none.
        force: whether a file of that name is replaced.
        max_gpu_hours: GPU hours within which the sweep has to be done; the plan is that of the sweep that says most.
    """
    path = None if file_name is None else require_writable_name(file_name, force=force)
    config = in_force(load_config(overrides), warn)
    if max_gpu_hours is not None and config.hardware.has_gpus and "launcher" not in parts_of(overrides):
        overrides = [*overrides, f"launcher={CLUSTER_LAUNCHER}"]  # as in the file that is written
        config = in_force(load_config(overrides), warn)
    advised_p_oom = ADVISED_P_OOM if advise_p_oom is None else advise_p_oom
    folder, state, peak_rate, rereads = folder_of(config), SweepState(), dict[str, Any](), Rereads()
    sweep_json = find_sweep_json(folder)
    try:
        if sweep_json is not None:
            require_same(sweep_json, config, folder.path)
            state = fold(read_journal(folder.journal, warn))
            rereads = read_again(config, folder, state, keep=False)
            state = for_answers(rereads.apply(state))
            if not config.hardware.peak_flops_per_s:  # as measured for that sweep
                peak_rate = {"core_flops_per_s": sweep_json.core_flops_per_s, "cores": sweep_json.cores or 1}
            require_same_launch(state, config, folder.path)
            if not config.kernel.forks:  # whether our own kernel has changed, only torch can tell
                acceptance(config, {}, state, None)
        require_local(config)
        require_max_nodes(config)
        require_program(config)
        folder.require_writable()
    except (ConfigError, SweepFolderError) as error:
        warn(f"sweep launch would refuse this plan: {error}")
    has_known_peak = bool(config.hardware.peak_flops_per_s or peak_rate)
    if max_gpu_hours is not None and not has_known_peak:
        peak_rate, has_known_peak = measured_cores(config, say), True
    plan = within_limit(with_measured_times(plan_with_bar(config, **peak_rate), state))
    asked_plan, choice = plan, None
    if max_gpu_hours is not None:
        used_gpu_hours = committed_gpu_hours(plan, state, ())
        with shown_progress(SEARCHED_CELLS) as report:
            choice = proposal(plan, state, max_gpu_hours, used_gpu_hours, report)
        plan = choice.plan
        overrides = with_overrides(overrides, choice.overrides)
        config = plan.config
    if output is not None:
        write_plan(plan.candidates, output, config)
        say(f"wrote {counted(len(plan.candidates), 'candidate')} to {output}")
    progress = progress_of(config.name, plan.runs, state, config.hardware.device)
    rate_by_run = measured_rates(plan.runs, state, config.hardware.device)
    best_rows = list[Row]()
    if top:
        best_rows = layouts_to_try(plan, top, rate_by_run, advised_p_oom, with_similar=with_similar)
        rankings = standings_of(plan.runs, state, config.hardware.device)
        screened_ids = {s.run_id for ranking in rankings.values() for s in ranking if s.screened}
        for row in best_rows:
            if row["run_id"] in screened_ids:
                row["why"] = "only screened"
    with shown_progress(SEARCHED_CELLS) as report:
        price = choice.price if choice else price_of(plan, state, report_progress=report)
        all_savings = [] if choice else savings(plan, price, state, report_progress=report)
    if not has_known_peak and not config.hardware.has_gpus:
        price = with_unmeasured_cores(price, plan, state, len(os.sched_getaffinity(0)))
    asked_cells = [cell for _, cell in planned_cells(asked_plan.config)]
    summary = _summary_document(plan, asked_cells, price, progress) | _cost_document(plan, price, all_savings)
    advised_cells = {cell_key(row) for row in best_rows if row["advised"]}
    reason_by_cell = reasons_without_fit(asked_plan, advised_cells, advised_p_oom)
    reason_by_cell |= reasons_without_candidates(asked_plan)
    columns = cell_columns(asked_cells)
    notes = [f"{cell_label(cell, columns)}: {reason}" for cell, reason in reason_by_cell.items()]
    for cell in choice.given_up if choice else ():
        reason_by_cell[cell] = (
            f"given up to stay within --max-gpu-hours {max_gpu_hours:g}; cheaper cells come first"
        )
    for entry in summary["cells"]:
        entry["reason"] = reason_by_cell.get(cell_key(entry))
    notes += other_shapes(config.models, state)
    notes += [*([rereads.line] if rereads.line else []), *same_commands(plan), *starter_warnings(config)]
    unmeasured_runs = [run for run in plan.runs if run.run_id not in rate_by_run]
    if not config.kernel.is_predictable:
        notes.append(
            f"kernel.params={config.kernel.params}: the price assumes model=, and nothing else is predicted"
        )
        unmeasured_runs = []
    specs = [run.spec for run in unmeasured_runs]
    summary["unmeasured"] = beyond_fit(specs, config.profile, config.hardware.gpu_at_limit)
    summary["unproven"] = unproven(specs, config.profile, config.hardware)
    notes += _extrapolation_lines(plan, unmeasured_runs, summary["unmeasured"], best_rows)
    runs_to_make = {attempt.key.run_id for job in price.jobs for attempt in job.attempts}
    too_few = expected_too_few_pairs(plan, progress, runs_to_make, rate_by_run)
    summary["too_few_pairs"] = [asdict(lack) for lack in too_few]
    if too_few:
        settings_text = " ".join(all_settings(too_few))
        notes.append(
            f"{expected_too_few_text(too_few, config)}; to have enough, plan again with {settings_text}"
        )
    if progress.settled:
        price_note = "the price covers the rest" if price.jobs else "nothing is left to run"
        notes.append(f"{len(progress.settled):,} of {counted(len(plan.runs), 'run')} settled: {price_note}")
    if price.jobs:
        price_text = f"price for launcher={config.launcher.name}: {jobs_line(price, config)}"
        hours_line = interval_line(price) if has_known_peak else cores_line(price)
        notes += [hours_line] * config.kernel.is_predictable
        notes += [time_line(price, config), *cost_lines(price, config)]
        notes += [*time_limit_lines(plan), price_text]
    notes += _auto_ep_lines(plan)
    notes += screening_lines(plan, state)
    advice = [*savings_lines(all_savings, price), *_unsearched_lines(asked_plan)]
    best_ids = [row["run_id"] for row in best_rows]
    run_by_id = {run.run_id: run for run in plan.runs}
    best_runs = [run_by_id[run_id] for run_id in best_ids]
    launch_lines, choice_lines = list[str](), list[str]()
    if choice:
        assert max_gpu_hours is not None
        choice_lines = [*proposal_lines(choice, max_gpu_hours)]
        listed_runs = plan.runs if choice.num_layouts else None
        arguments = f" --max-gpu-hours {max_gpu_hours:g}"
        if path:
            launch_lines = written_lines(path, load_config(overrides), overrides, listed_runs, arguments)
        else:
            launch_lines = [*_launch_lines(choice, overrides, config, arguments)]
        summary["proposal"] = proposal_document(choice, max_gpu_hours)
    elif path and best_runs:
        launch_lines = written_lines(path, config, overrides, best_runs)
    if as_json:
        written = {"written": str(path)} if path and launch_lines else {}
        print_json(summary | {"notes": notes} | ({"top": best_rows} if top else {}) | written)
        return
    page = _page(plan, price, summary, best_rows, with_similar=with_similar)
    show(*choice_lines, *page, *notes, *advice, *launch_lines)


def proposal_lines(choice: Proposal, max_gpu_hours: float) -> Iterator[str]:
    """What the sweep is that fits the budget, and what will be known after it."""
    sweep_text = "the sweep as asked"
    if choice.num_layouts:
        sweep_text = "the layout predicted fastest of each cell"
        if choice.given_up:
            num_cells = len(choice.plan.cells)
            cells_text = "the cheapest cell" if num_cells == 1 else f"each of the {num_cells} cheapest cells"
            sweep_text = f"the layout predicted fastest of {cells_text}"
        if choice.num_layouts > 1:
            sweep_text = f"up to {choice.num_layouts} layouts of each cell, the fastest that are not similar"
    if choice.overrides:
        sweep_text += f", with {' '.join(choice.overrides)}"
    price_text = GPU_HOURS.brief_text(choice.price.gpu_hours)
    low, high = map(GPU_HOURS.bare_text, choice.price.interval)
    yield f"within {max_gpu_hours:,g} {GPU_HOURS.symbol}: {sweep_text}: {price_text} ({low} to {high})"
    yield f"you will know {choice.known}"
    yield from (f"you will not know {loss}" for loss in choice.unknown)


def proposal_document(choice: Proposal, max_gpu_hours: float) -> dict[str, Any]:
    """What `sweep plan --max-gpu-hours --json` says of the sweep that it proposes."""
    return {
        "max_gpu_hours": max_gpu_hours,
        "overrides": [*choice.overrides],
        "layouts_per_cell": choice.num_layouts,
        "known": choice.known,
        "unknown": [*choice.unknown],
    }


def _launch_lines(
    choice: Proposal, overrides: Sequence[str], config: SweepConfig, arguments: str
) -> Iterator[str]:
    """The command that launches the proposed sweep; where it lists layouts, the one that writes it first."""
    words = redact_arguments(overrides, config.secrets)
    if choice.num_layouts:
        yield "\nto measure these layouts, write them as a sweep first:"
        yield shlex.join(["ultrabench", "sweep", "plan", *words]) + f"{arguments} --write within-budget"
        return
    yield "\nto launch this sweep:"
    yield shlex.join(["ultrabench", "sweep", "launch", *words]) + arguments


def _unsearched_lines(plan: Plan) -> Iterator[str]:
    """A line about the forms of parallelism that the sweep does not search, and the sweep that does."""
    if values_by_axis := unsearched_values(plan.config):
        values_text = " ".join(
            f"{axis}={','.join(map(str, values))}" for axis, values in values_by_axis.items()
        )
        yield f"not searched: {values_text}. To search them, too: sweep={WIDEST} sweep.strategy=adaptive"


def _cost_document(plan: Plan, price: Price, all_savings: Sequence[Saving]) -> dict[str, Any]:
    """Fields of the document about money, and about settings with which the sweep would cost less."""
    gpu_hour_price, costs = plan.config.price_per_gpu_hour, dict[str, Any]()
    if gpu_hour_price is not None:
        costs["predicted_cost"] = round(price.gpu_hours * gpu_hour_price, 2)
        costs["predicted_cost_interval"] = [round(end * gpu_hour_price, 2) for end in price.interval]
    savings_json = [
        {"overrides": [*s.overrides], "predicted_gpu_hours": round(s.price.gpu_hours, 4),
         "share": round(s.share, 4), "unknown": [*s.losses]}
        for s in all_savings
    ]  # fmt: skip
    return costs | {"savings": savings_json, "not_searched": unsearched_values(plan.config)}


def _summary_document(
    plan: Plan, cells: Iterable[CellKey], price: Price, progress: SweepProgress
) -> dict[str, Any]:
    """The document of `sweep plan --json` without what is said about predictions.

    `runs` is the expected number of runs, and `runs_at_most` the largest possible one.

    Args:
        cells: those of the sweep that was asked for, of which a proposal within a budget may lack some.
    """
    summary, settled_ids = plan.summary(cells), progress.settled - progress.skipped.keys()
    num_settled_by_cell = Counter(run.cell for run in plan.runs if run.run_id in settled_ids)
    for entry in summary["cells"]:
        key = cell_key(entry)
        num_runs, gpu_hours = price.runs.get(key, (0, 0.0))
        entry["runs_at_most"] = entry["runs"]
        if plan.config.strategy == "adaptive":
            entry["runs"] = num_runs + num_settled_by_cell[key]
        entry.update(_rounded_hours(gpu_hours, price.intervals.get(key, (0.0, 0.0))))
    run_counts = {"settled": len(progress.settled), "runs_at_most": summary["runs"]}
    run_counts |= {"runs": sum(entry["runs"] for entry in summary["cells"])}
    cost_by_purpose = {
        purpose: {"count": num, "predicted_gpu_hours": round(hours, 4)} for purpose, (num, hours) in price.extra.items()
    }  # fmt: skip
    hours = _rounded_hours(price.gpu_hours, price.interval)
    return summary | run_counts | hours | {"beside_runs": cost_by_purpose}


def _rounded_hours(gpu_hours: float, interval: tuple[float, float]) -> dict[str, Any]:
    """Predicted GPU hours and the ends of their interval, as fields of the document."""
    rounded_interval = [round(end, 4) for end in interval]
    return {"predicted_gpu_hours": round(gpu_hours, 4), "predicted_gpu_hours_interval": rounded_interval}


def _auto_ep_lines(plan: Plan) -> Iterator[str]:
    """A line for each model with experts, which says what sweep.ep=auto means for it."""
    for shape in plan.config.models:
        if shape.num_experts and AUTO in plan.config.axes.layout["ep"]:
            ep_values = sorted({c.layout.ep for c in plan.candidates if c.spec.shape == shape})
            yield (
                f"sweep.ep=auto selects {', '.join(map(str, ep_values))} for the {shape.num_experts} "
                f"experts of {shape.name}"
            )


def _extrapolation_lines(
    plan: Plan, runs: Sequence[Candidate], unmeasured_features: list[str], best_rows: list[Row]
) -> Iterator[str]:
    """Lines about predictions beyond what was measured; sets `unmeasured`, `unproven` and
    `above_published` of `best_rows`.

    Args:
        runs: the runs of the plan that are not measured.
        unmeasured_features: features of these runs that no run of the fit had.
        best_rows: rows of the layouts to try first.
    """
    config, profile, gpu = plan.config, plan.config.profile, plan.config.hardware.gpu_at_limit
    if unmeasured_features:
        num_extrapolated = sum(bool(profile.unmeasured(run.spec, gpu)) for run in runs)
        extrapolation_text = f"extrapolated beyond the values that profile {profile.name} was fitted to"
        yield (
            f"{num_extrapolated:,} of {counted(len(runs), 'run')} "
            f"{are(num_extrapolated)} {extrapolation_text} (in brackets), "
            f"with wider intervals: {'; '.join(unmeasured_features)}"
        )
    yield from (
        f"unproven: {fact}" for fact in unproven((run.spec for run in runs), profile, config.hardware)
    )
    best_rate, mfu_by_run = best_published(config, config.kernel.precision), dict[str, float]()
    spec_by_run = {run.run_id: run.spec for run in runs}
    for run in runs:
        if run.fits and run.peak_flops_per_s and config.hardware.is_rated:
            step_time_s, peak_flops_per_s = run.prediction.step_time_s, run.peak_flops_per_s
            mfu_by_run[run.run_id] = published_mfu(run.spec, step_time_s, peak_flops_per_s, best_rate)
    for row in best_rows:
        spec, mfu = spec_by_run.get(row["run_id"]), mfu_by_run.get(row["run_id"], 0.0)
        row["unmeasured"] = beyond_fit([spec], profile, gpu) if spec else []
        row["unproven"] = unproven([spec], profile, config.hardware) if spec else []
        row["above_published"] = best_rate is not None and best_rate.below(mfu)
    if mfu_by_run and (line := against_published(config, max(mfu_by_run.values()), best_rate)):
        yield line


def _page(
    plan: Plan, price: Price, summary: dict[str, Any], layouts: list[Row], *, with_similar: bool
) -> Iterator[RenderableType]:
    """The tables of a plan: its price by cell, rejected and refused candidates, and the `layouts` to try first.

    Args:
        with_similar: whether `layouts` has all layouts of their groups.
    """
    key_by_column = KEY_BY_COLUMN | (SEARCH_KEY_BY_COLUMN if plan.config.strategy == "adaptive" else {})
    counts = {cell_key(entry): [entry[key] for key in key_by_column.values()] for entry in summary["cells"]}
    yield headline(plan.config)
    yield price_table(plan, price, tuple(key_by_column), counts)
    if num_pruned := summary["pruned"]:
        max_p_oom = plan.config.max_p_oom
        pruned_run = next(c for c in plan.candidates if c.rule == PRUNED)
        fact = f"{num_pruned:,} valid layouts are excluded because P(OOM) is above max_p_oom={max_p_oom:g}"
        yield f"{fact}, such as {pruned_run.layout.label()}: {pruned_run.reason}"
    if unselected_runs := [c for c in plan.candidates if c.rule == UNSELECTED]:
        yield f"{len(unselected_runs):,} valid layouts are excluded: {unselected_runs[0].reason}"
    if num_large := summary["runs_at_most"] - summary["predicted_to_fit"]:
        consequence = "they run last and are priced at start-up only"
        yield f"{num_large:,} of the {summary['runs_at_most']:,} runs are unlikely to fit into memory: {consequence}"
    if num_by_rule := summary["rejected"]:
        reason_by_rule = {c.rule: c.reason for c in reversed(plan.candidates)}
        rows = [(rule, f"{count:,}", reason_by_rule[rule]) for rule, count in num_by_rule.items()]
        yield table("\nrejected, by rule", "rule", ">candidates", "for example", rows=rows)
    if num_by_reason := summary["refused_by_kernel"]:
        title = f"\nvalid, but kernel={plan.config.kernel.name} cannot run them"
        reason_rows = [(reason, f"{count:,}") for reason, count in num_by_reason.items()]
        yield table(title, "reason", ">candidates", rows=reason_rows)
    for missing in summary["without_candidates"]:
        yield f"sweep.{missing['axis']}={missing['value']} has no candidate: {missing['reason']}"
    if layouts:
        table_rows, group_key = [], group_column(with_similar=with_similar)
        cell_keys = [key for key in cell_columns(counts) if key != "model" or len(plan.config.models) > 1]
        step_column, peak_column = map(column_of, ("step_time_s", "predicted_peak_mem_bytes"))
        for row in layouts:
            step_ends_s = row["step_time_low_s"], row["step_time_high_s"]
            is_measured = step_ends_s[0] == step_ends_s[1]
            speed_texts = (
                *(with_unit(name, row[name]) or "" for name in (RATE, "mfu")),
                with_interval(step_column.name, row["step_time_s"], *step_ends_s),
            )
            oom_text = "" if is_measured else with_unit("p_oom", row["p_oom"])
            note = row["why"] if row["advised"] else "most likely to fit, not advised"
            note += f", {NO_ROOM}" * (not row["has_room"])
            note += ", extrapolated" * bool(row["unmeasured"]) + ", unproven" * bool(row["unproven"])
            note += ", above published" * row["above_published"]
            peak_text = peak_column.unit.bare_text(row["peak_mem_bytes"])
            numbers = (*speed_texts, peak_text, oom_text, row["limited_by"])
            cell_texts = (row[key] for key in (*cell_keys, "layout", group_key))
            table_rows.append((*cell_texts, *numbers, note, row["run_id"]))
        number_headings = (
            *(column_of(name).heading for name in (RATE, "mfu")),
            step_column.bare_heading,
            peak_column.bare_heading,
            column_of("p_oom").heading,
        )
        number_columns = (*(f">{heading}" for heading in number_headings), "limited by")
        cell_headings = (key if key == "model" else f">{key}" for key in cell_keys)
        columns = (*cell_headings, "layout", f">{group_key}", *number_columns, "why", "run")
        layout_table = table("\nlayouts to try first", *columns, rows=table_rows)
        layout_table.note_by_column = layout_notes(plan.config)
        yield layout_table
        yield from group_lines(layouts, with_similar=with_similar)


def cell_key(entry: Mapping[str, Any]) -> CellKey:
    """The cell that an entry of the summary of a plan describes."""
    return CellKey(*(entry[name] for name in CellKey._fields))


def layouts_to_try(
    plan: Plan,
    top: int,
    rate_by_run: Mapping[str, float | None],
    advised_p_oom: float = ADVISED_P_OOM,
    *,
    with_similar: bool = False,
) -> list[Row]:
    """The best runs of the `top` best groups of each cell, in the order of the cells in the sweep.

    Measured runs come first, by tokens/s/GPU, then others by expected tokens/s/GPU: the predicted rate times the
    probability that they fit. Where no run of a cell is advised, the most likely one to fit stands alone, with
    `advised` False. A measured run that may not win its cell, such as a suspect, is left out, and the interval of the
    others is their step time alone.

    Args:
        rate_by_run: run_id -> measured tokens/s/GPU; None for a run that may not win.
        advised_p_oom: P(OOM) above which a run that is not measured is not advised.
        with_similar: whether all runs of these groups are returned.
    """
    best_rows = list[Row]()
    runs_by_cell = plan.cells
    for _, cell in planned_cells(plan.config):
        runs = [run for run in runs_by_cell.get(cell, []) if _is_answer(run, rate_by_run)]
        unmeasured_runs = [run for run in runs if run.run_id not in rate_by_run]
        advised_ids = rate_by_run.keys() | {run.run_id for run in advised(unmeasured_runs, advised_p_oom)}
        ranked_runs = [run for run in runs if run.run_id in advised_ids]
        ranked_runs.sort(key=lambda run: (run.run_id not in rate_by_run, -_expected_rate(run, rate_by_run)))
        ranked_runs = ranked_runs or sorted(runs, key=lambda run: run.prediction.p_oom)[:1]
        groups = [*islice(groups_of(ranked_runs, rate_by_run), top)]
        for run, group_keys in shown_runs(groups, with_similar=with_similar):
            run_row = _row(run, rate_by_run)
            best_rows.append(run_row | {"advised": run.run_id in advised_ids} | group_keys)
    return best_rows


def _is_answer(run: Candidate, rate_by_run: Mapping[str, float | None]) -> bool:
    """Whether a run may win its cell by its measured rate, or by its prediction."""
    return bool(rate_by_run.get(run.run_id, run.spec.kernel.is_predictable))


def _expected_rate(run: Candidate, rate_by_run: Mapping[str, float | None]) -> float:
    """Measured tokens/s/GPU of a run, or what is expected of it."""
    return rate_by_run.get(run.run_id) or expected_rate_of(run)


def _row(run: Candidate, rate_by_run: Mapping[str, float | None]) -> Row:
    """The row of a layout to try first, without the keys `advised`, `group` and `similar`."""
    prediction, measured_rate = run.prediction, rate_by_run.get(run.run_id)
    rate = measured_rate or tokens_per_s_per_gpu(run.spec, prediction.step_time_s)
    step_time_s = run.spec.tokens_per_step / run.layout.world_size / rate
    return {
        **run.cell._asdict(),
        "run_id": run.run_id,
        "layout": run.spec.label(),
        "tokens_per_s_per_gpu": rate,
        "mfu": run.mfu(rate),
        "expected_tokens_per_s_per_gpu": _expected_rate(run, rate_by_run),
        "step_time_s": step_time_s,
        "step_time_low_s": step_time_s if measured_rate else prediction.step_time_low_s,
        "step_time_high_s": step_time_s if measured_rate else prediction.step_time_high_s,
        "peak_mem_bytes": prediction.peak_mem_bytes,
        "p_oom": prediction.p_oom,
        "limited_by": prediction.limited_by,
        "why": "measured" if measured_rate else "predicted",
        "has_room": prediction.memory_share <= 1,
    }


def print_command(overrides: list[str], as_json: bool) -> None:
    """Prints the command and the files of the first run of a plan.

    Raises:
        ConfigError: our own kernel trains the runs, or no candidate can run.
    """
    config = in_force(load_config(overrides), warn)
    run = within_limit(plan_with_bar(config)).runs[0]
    start = start_of(run.spec, AttemptKey(run.run_id, 0, 0), config, run.slice)
    if as_json:
        print_json({"sweep": config.name, "run_id": run.run_id, "layout": run.spec.label(), **start})
        return
    cell_text = f"{run.shape.name} on {counted(run.nodes, 'node')}, {run.spec.label()}"
    show(Text(f"# run {run.run_id}: {cell_text}"), *start_lines(start))


def print_script(overrides: list[str]) -> None:
    """Prints the script that a launch would submit first; writes no file and does not call the batch system.

    Raises:
        ConfigError: the launcher has no scripts, or no candidate can run.
    """
    config = load_config(overrides)
    if not config.launcher.submits_scripts:
        raise ConfigError(f"launcher={config.launcher.name} submits no script; add {WITH_SCRIPTS}")
    plan = within_limit(plan_with_bar(config))
    jobs = [*planned_jobs(plan, next_attempts(plan, SweepState()), SweepState())]
    group = array_groups(jobs[: config.launcher.max_jobs], sys.maxsize)[0]
    token, digest = uuid.uuid4().hex, config.kernel.digest()
    array = make_allocations(plan, folder_of(config), group, token=token, origin={}, kernel_digest=digest)
    sys.stdout.write(script_of(array, config))
