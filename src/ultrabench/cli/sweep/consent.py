"""Shows the price of what is left of a sweep, and asks whether that much of a cluster may be used."""

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import typer

from ultrabench.analysis.results.columns import column_of
from ultrabench.analysis.results.numbers import count, params_text
from ultrabench.cli.tables import FittedTable, can_ask, duration_text, say, table, three_digits, warn
from ultrabench.column import BYTES, FLOPS_PER_S, GPU_HOURS
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import CPU_FLOPS_PER_S_RANGE
from ultrabench.launchers.allocation_ends import open_allocations
from ultrabench.model_shape import ModelShape
from ultrabench.processes import busy_share
from ultrabench.routing import routing_text
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.store.state import SweepState
from ultrabench.sweep.candidate import CellKey, cell_columns
from ultrabench.sweep.config.sweep_config import WEAK, SweepConfig
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.cheaper import Saving
from ultrabench.sweep.running.price import (
    BUDGET_FACTOR,
    CONTROL_SHARE,
    TIME_LIMIT,
    PlannedJob,
    Price,
    committed_gpu_hours,
)
from ultrabench.sweep.running.schedule import Schedule, schedule
from ultrabench.variant import value_text

MIN_ASKED_HOURS = 1.0
"""Predicted hours on this machine from which a launch asks first."""
BUSY_SHARE = 0.3
"""Share of this machine's cores, used by other programs, from which a launch warns."""


def headline(config: SweepConfig) -> str:
    """One line with all that the runs of a sweep share, such as its models, hardware, batch and precision."""
    models_text, hardware_name = ", ".join(map(_size_text, config.models)), config.hardware.name
    option_texts = {
        name: " or ".join(map(value_text, values)) for name, values in config.options.values.items()
    }
    routing_name = next(filter(None, map(config.kernel.routing_of, config.models)), None)
    setup_texts = (option_texts["precision"], f"kernel {config.kernel.name}", routing_text(routing_name))
    setup_text = ", ".join(filter(None, setup_texts))
    if not config.kernel.trains:
        return f"sweep {config.name}: links of {hardware_name}, {setup_text}"
    nodes, seq_lens, gbs = config.axes.nodes, config.options.values["seq_len"], config.options.values["gbs"]
    step_tokens = [int(config.gbs_on(pick(nodes), pick(gbs))) * pick(seq_lens) for pick in (min, max)]
    tokens_text = " to ".join(dict.fromkeys(map(count, step_tokens)))
    nodes_text = counted(min(nodes), "node")
    scaling_text = f" on {nodes_text}, scaled with the number of nodes" if config.scaling == WEAK else ""
    batch_text = (
        f"sequences of {option_texts['seq_len']} tokens, "
        f"global batch {option_texts['gbs']}{scaling_text} ({tokens_text} tokens)"
    )
    varied_names = [name for name, values in config.options.of_variants.items() if len(values) > 1]
    varied_text = ", ".join(f"{name} {option_texts[name]}" for name in varied_names)
    setup_text += f"; varied: {varied_text}" if varied_text else ""
    return f"sweep {config.name}: {models_text} on {hardware_name}, {batch_text}, {setup_text}"


def _size_text(shape: ModelShape) -> str:
    """The name of a model and its parameters, such as `tiny-moe (498 k parameters, 351 k active)`."""
    return f"{shape.name} ({params_text(shape.num_params, shape.num_active_params)})"


def price_table(
    plan: Plan, price: Price, count_names: Sequence[str], counts_by_cell: Mapping[CellKey, Sequence[int]]
) -> FittedTable:
    """A table of GPU hours with intervals: a row for each cell with its counts, then other costs, then the sum.

    Args:
        count_names: names of the columns with the counts of a cell.
    """
    rows, cell_keys = [], cell_columns(counts_by_cell)
    for cell, cell_counts in counts_by_cell.items():
        num_gpus = cell.nodes * plan.config.hardware.gpus_per_node
        _, gpu_hours = price.runs.get(cell, (0, 0.0))
        low, high = price.intervals.get(cell, (0.0, 0.0))
        interval_text = f" ({GPU_HOURS.bare_text(low)}-{GPU_HOURS.bare_text(high)})" if low < high else ""
        cell_values = (*(getattr(cell, key) for key in cell_keys), num_gpus)
        hours_text = GPU_HOURS.bare_text(gpu_hours) + interval_text
        rows.append((*cell_values, *(f"{n:,}" for n in cell_counts), hours_text))
    columns = (
        f">{name}" for name in (*cell_keys[1:], "GPUs", *count_names, column_of("gpu_hours").bare_heading)
    )
    shown_table = table("", "model", *columns, rows=rows)
    shown_table.add_section()
    empty_cells = [""] * len((*cell_keys, *count_names))
    for purpose, (num_runs, gpu_hours) in price.extra.items():
        shown_table.add_row(f"{purpose}: {num_runs:,}", *empty_cells, GPU_HOURS.bare_text(gpu_hours))
    shown_table.add_section()
    count_sums = (f"{sum(counts):,}" for counts in zip(*counts_by_cell.values(), strict=True))
    total_text = (
        f"{GPU_HOURS.bare_text(price.gpu_hours)} ({'-'.join(map(GPU_HOURS.bare_text, price.interval))})"
    )
    shown_table.add_row("all", *empty_cells[: len(cell_keys)], *count_sums, total_text)
    return shown_table


def interval_line(price: Price) -> str:
    """One line that says how far the price may be off, because step times are predicted with intervals."""
    low, high = map(GPU_HOURS.bare_text, price.interval)
    return (
        f"{GPU_HOURS.brief_text(price.gpu_hours)}, {low} to {high} with all step times at the ends "
        "of their intervals"
    )


def cores_line(price: Price) -> str:
    """One line that says how far the price may be off while the cores of this machine are not measured."""
    low, high = map(GPU_HOURS.bare_text, price.interval)
    slow, fast = map(FLOPS_PER_S.text, CPU_FLOPS_PER_S_RANGE)
    range_text = f"{low} to {high} on cores of {slow} to {fast}"
    return (
        f"{GPU_HOURS.brief_text(price.gpu_hours)}, {range_text}: sweep launch measures this machine "
        "before it starts"
    )


def planned_schedule(
    price: Price,
    config: SweepConfig,
    limits: JobLimits,
    gpu_hours_of: Callable[[PlannedJob], float] = lambda job: job.gpu_hours,
) -> Schedule:
    """When the jobs of a price are done under these limits, if none waits in a queue."""
    return schedule(
        price.jobs,
        config.hardware.gpus_per_node,
        max_jobs=limits.max_jobs,
        max_nodes=limits.max_nodes,
        one_by_one=config.strategy == "adaptive",
        gpu_hours_of=gpu_hours_of,
    )


def time_text(price: Price, config: SweepConfig, limits: JobLimits) -> str:
    """How long all jobs take on the nodes, such as `3h10m (2h20m to 4h30m)`, if none waits in a queue."""
    gpu_hour_functions = (lambda job: job.gpu_hours, lambda job: job.interval[0], lambda job: job.interval[1])
    end_s, low_s, high_s = (
        planned_schedule(price, config, limits, gpu_hours_of).end_s for gpu_hours_of in gpu_hour_functions
    )
    return f"{duration_text(end_s)} ({duration_text(low_s)} to {duration_text(high_s)})"


def planned_limits(config: SweepConfig) -> JobLimits:
    """The limits of jobs that the configuration sets, without those of a site that is not asked."""
    launcher = config.launcher
    if not launcher.holds_nodes:
        return JobLimits(max_jobs=1)
    return JobLimits(max_jobs=launcher.max_jobs, max_nodes=launcher.max_nodes or sys.maxsize)


def time_line(price: Price, config: SweepConfig) -> str:
    """One line that says how long the nodes work before the limits of the site are known."""
    if not config.launcher.holds_nodes:
        return f"about {time_text(price, config, planned_limits(config))} on this machine"
    num_jobs, max_nodes = config.launcher.max_jobs, config.launcher.max_nodes
    limits = planned_limits(config)
    limits_text = f"with {counted(num_jobs, 'job')} at a time (launcher.max_jobs)"
    if max_nodes:
        limits_text += f" on up to {counted(max_nodes, 'node')} (launcher.max_nodes)"
    else:
        most_nodes = planned_schedule(price, config, limits).most_nodes
        limits_text += (
            f" if it gets {counted(most_nodes, 'node')} at once (launcher.max_nodes is not set; "
            "a launch takes at most a quarter of the partition)"
        )
    waiting_text = "without waiting in the queue"
    if config.launcher.window is not None:
        waiting_text += f" or for launcher.window={config.launcher.window}"
    return f"about {time_text(price, config, limits)} on the nodes {limits_text}, {waiting_text}"


def cost_lines(price: Price, config: SweepConfig) -> Iterator[str]:
    """A line with the cost at the price of the cluster; on GPUs without a price, how to give one."""
    if (gpu_hour_price := config.price_per_gpu_hour) is not None:
        cost, low, high = (three_digits(h * gpu_hour_price) for h in (price.gpu_hours, *price.interval))
        yield f"cost {cost} ({low} to {high}) at {gpu_hour_price:g} per GPU hour"
    elif config.hardware.has_gpus:
        yield (
            "cost unknown: add +cluster.price_per_gpu_hour=VALUE, or price_per_gpu_hour: "
            "VALUE to the file of the cluster"
        )


def savings_lines(all_savings: Sequence[Saving], price: Price) -> Iterator[str]:
    """The settings that save most, each with the price that it leads to, and what it costs in knowledge."""
    if all_savings:
        yield f"to get by with less than {GPU_HOURS.brief_text(price.gpu_hours)}, add:"
    for saving in all_savings:
        settings_text = " ".join(map(shlex.quote, saving.overrides))
        hours_text = f"{GPU_HOURS.brief_text(saving.price.gpu_hours)} (-{saving.share:.0%})"
        loss_text = "".join(f"; you will not know {loss}" for loss in saving.losses)
        yield f"  {settings_text}  {hours_text}{loss_text or (', together' if len(saving.overrides) > 1 else '')}"


def jobs_line(price: Price, config: SweepConfig) -> str:
    """One line that says how many jobs a price holds, how long they are, and why some are longer than asked."""
    launcher, job_minutes = config.launcher, [job.predicted_s / 60 for job in price.jobs]
    lengths_text = f"{counted(len(price.jobs), 'job')} of {_minutes_text(job_minutes, 'predicted ')}"
    reason_text = f"launcher.allocation_minutes={launcher.allocation_minutes:g}"
    if launcher.pack:
        extra_text = " besides the control run" if launcher.control and launcher.pack > 1 else ""
        reason_text += f", launcher.pack={launcher.pack}{extra_text}"
    if max(job_minutes) > launcher.allocation_minutes:
        share_text = (
            f", or to keep its control run at {CONTROL_SHARE:.0%} or less" if launcher.control else ""
        )
        reason_text += f"; longer if one run needs it{share_text}"
    limits_text = _minutes_text([job.limit_s / 60 for job in price.jobs])
    source_text = " (launcher.time_minutes)" if launcher.time_minutes else ""
    limit_noun = "time limits" if " to " in limits_text else "time limit"
    return f"{lengths_text} ({reason_text}), {limit_noun} {limits_text}{source_text}"


def time_limit_lines(plan: Plan) -> Iterator[str]:
    """A line about the runs that no job may be long enough for, if there are any."""
    reasons = [c.reason for c in plan.candidates if c.rule == TIME_LIMIT]
    if reasons:
        runs_text = counted(len(reasons), "run")
        yield f"{runs_text} of {len(reasons) + len(plan.runs):,} excluded, such as one for which {reasons[0]}"


def _minutes_text(minutes: Sequence[float], adjective: str = "") -> str:
    """The range of these minutes, such as `1 minute` or, with the adjective `predicted `,
    `4.5 to 18 predicted minutes`.
    """
    end_texts = dict.fromkeys(f"{v:.0f}" if v >= 10 else f"{v:.2g}" for v in (min(minutes), max(minutes)))
    noun = "minute" if [*end_texts] == ["1"] else "minutes"
    return f"{' to '.join(end_texts)} {adjective}{noun}"


def ask_for_budget(
    plan: Plan,
    price: Price,
    state: SweepState,
    limits: JobLimits,
    max_gpu_hours: float | None,
    yes: bool,
    all_savings: Sequence[Saving] = (),
) -> float:
    """Shows the price of what is left to do and asks; returns the GPU hours that the sweep may use in all.

    While jobs of the sweep are queued or running, any budget is accepted, because they use it without a new job.

    Args:
        all_savings: the settings with which the sweep would cost less.

    Raises:
        ConfigError: there is no terminal to ask on and no --max-gpu-hours, or the budget is too small.
        typer.Abort: the answer is no.
    """
    used_gpu_hours = committed_gpu_hours(plan, state, ())
    if not price.jobs:
        return max(used_gpu_hours, 1e-9) if max_gpu_hours is None else max_gpu_hours
    _print_price(plan, price, limits, used_gpu_hours, all_savings)
    job_gpu_hours = price.jobs[0].gpu_hours
    if max_gpu_hours is not None:
        if not open_allocations(state) and used_gpu_hours + job_gpu_hours > max_gpu_hours:
            used_text, job_text = map(GPU_HOURS.bare_text, (used_gpu_hours, job_gpu_hours))
            fact = f"{used_text} are used and the first job needs {job_text}"
            least_text = _option_text(used_gpu_hours + job_gpu_hours)
            remedy = f"give at least {least_text}, or a smaller launcher.allocation_minutes"
            raise ConfigError(f"--max-gpu-hours {max_gpu_hours:g}; {fact}: {remedy}")
        return max_gpu_hours
    budget = used_gpu_hours + BUDGET_FACTOR * price.gpu_hours
    if not can_ask():
        fact = f"{GPU_HOURS.brief_text(price.gpu_hours)} are predicted, and no terminal can confirm them"
        raise ConfigError(f"{fact}; set a budget: --max-gpu-hours {_option_text(budget)}")
    if not yes:
        question = f"Launch, and stop at {GPU_HOURS.brief_text(budget)} ({BUDGET_FACTOR} x predicted)?"
        typer.confirm(question, abort=True, err=True)
    return budget


def ask_for_this_machine(plan: Plan, price: Price, yes: bool) -> None:
    """Warns that this machine is busy, and asks on a terminal before a sweep that takes hours or cannot fit.

    Raises:
        typer.Abort: the answer is no.
    """
    busy_core_share = busy_share(0.2) if plan.config.hardware.shares_host and price.jobs else 0.0
    if busy_core_share >= BUSY_SHARE:
        fact = f"other programs use {busy_core_share:.0%} of this machine's cores"
        warn(f"{fact}: step times will be longer and vary more")
    hours = sum(job.gpu_hours / job.nodes for job in price.jobs) / plan.config.hardware.gpus_per_node
    concerns = [f"about {three_digits(hours)} hours on this machine"] if hours >= MIN_ASKED_HOURS else []
    if not any(run.fits for run in plan.runs):
        needed_bytes = min(run.prediction.peak_mem_bytes for run in plan.runs)
        smallest_text = f"the smallest needs {BYTES.text(needed_bytes)} a rank"
        limit_text = BYTES.text(plan.config.hardware.mem_bytes)
        concerns.append(f"no run is predicted to fit: {smallest_text}, and a rank has {limit_text}")
    if concerns and not yes and price.jobs and can_ask():
        say(headline(plan.config))
        typer.confirm(f"{'; '.join(concerns)}. Launch?", abort=True, err=True)


def _option_text(hours: float) -> str:
    """Hours as a value of `--max-gpu-hours`: three digits, or the next whole number from 100 on."""
    return f"{hours:.3g}" if hours < 100 else f"{math.ceil(hours)}"


def _print_price(
    plan: Plan, price: Price, limits: JobLimits, used_gpu_hours: float, all_savings: Sequence[Saving]
) -> None:
    """Prints what is left to run, its price, its jobs, and how soon it can be done under the limits of the site."""
    cells = sorted(price.runs, key=lambda cell: (cell[1], cell[0]))
    say(headline(plan.config))
    say(price_table(plan, price, ("runs",), {cell: price.runs[cell][:1] for cell in cells}))
    largest_text = counted(max(job.nodes for job in price.jobs), "node")
    say(interval_line(price), *cost_lines(price, plan.config), *savings_lines(all_savings, price))
    say(*time_limit_lines(plan), jobs_line(price, plan.config))
    limits_text = f"{counted(limits.max_jobs, 'job')} and {counted(limits.max_nodes, 'node')} at a time"
    end_text = f"done in {time_text(price, plan.config, limits)} if no job waits in the queue"
    used_text = f"used so far: {GPU_HOURS.brief_text(used_gpu_hours)}"
    say(f"at most {limits_text}, {largest_text} per job; {end_text}; {used_text}")
