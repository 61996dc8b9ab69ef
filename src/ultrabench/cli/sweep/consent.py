"""Shows the price of what is left of a sweep, and asks whether that much of a cluster may be used."""

import math
from collections.abc import Iterator, Mapping, Sequence

import typer

from ultrabench.analysis.numbers import count, params_text
from ultrabench.cli.tables import FittedTable, can_ask, duration, say, table, three_digits, warn
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.launchers.allocation_ends import open_allocations
from ultrabench.model_shape import ModelShape
from ultrabench.processes import busy_share
from ultrabench.routing import routing_text
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.store.state import SweepState
from ultrabench.sweep.candidate import CellKey, cell_columns
from ultrabench.sweep.config.sweep_config import WEAK, SweepConfig
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.price import (
    BUDGET_FACTOR,
    CONTROL_SHARE,
    TIME_LIMIT,
    Price,
    committed_gpu_hours,
)
from ultrabench.variant import shown

LONG_HOURS = 1.0
"""Predicted hours on this machine from which a launch asks first."""
BUSY = 0.3
"""Share of this machine's cores, used by other programs, from which a launch warns."""


def headline(config: SweepConfig) -> str:
    """One line with all that the runs of a sweep share, such as its models, hardware, batch and precision."""
    models, hardware = ", ".join(map(_size, config.models)), config.hardware.name
    listed = {name: " or ".join(map(shown, values)) for name, values in config.options.values.items()}
    routing = next(filter(None, map(config.kernel.routing_of, config.models)), None)
    texts = (listed["precision"], f"kernel {config.kernel.name}", routing_text(routing))
    with_what = ", ".join(filter(None, texts))
    if config.kernel.kind == "probe":
        return f"sweep {config.name}: links of {hardware}, {with_what}"
    seq_lens, batches = config.options.values["seq_len"], config.options.values["gbs"]
    nodes = config.axes.nodes
    tokens = [int(config.gbs_on(end(nodes), end(batches))) * end(seq_lens) for end in (min, max)]
    tokens_text = " to ".join(dict.fromkeys(map(count, tokens)))
    smallest = counted(min(nodes), "node")
    on_more = f" on {smallest}, scaled with the number of nodes" if config.scaling == WEAK else ""
    batch = f"sequences of {listed['seq_len']} tokens, global batch {listed['gbs']}{on_more} ({tokens_text} tokens)"
    variants = [f"{name} {listed[name]}" for name, of in config.options.of_variants.items() if len(of) > 1]
    varied = f"; varied: {', '.join(variants)}" if variants else ""
    return f"sweep {config.name}: {models} on {hardware}, {batch}, {with_what}{varied}"


def _size(shape: ModelShape) -> str:
    """The name of a model and its parameters, such as `tiny-moe (498 k parameters, 351 k active)`."""
    return f"{shape.name} ({params_text(shape.num_params, shape.num_active_params)})"


def price_table(
    plan: Plan, price: Price, names: Sequence[str], counts: Mapping[CellKey, Sequence[int]]
) -> FittedTable:
    """A table of GPU hours: a row for each cell with its `counts` and its interval, then other costs, then the sum.

    Args:
        names: names of the columns of `counts`.
    """
    rows = []
    columns = cell_columns(counts)
    for cell, of_cell in counts.items():
        gpus, (_, cost) = cell.nodes * plan.config.hardware.gpus_per_node, price.runs.get(cell, (0, 0.0))
        low, high = price.intervals.get(cell, (0.0, 0.0))
        ends = f"{three_digits(low)} to {three_digits(high)}" if low < high else ""
        place = (*(getattr(cell, name) for name in columns), gpus)
        rows.append((*place, *(f"{n:,}" for n in of_cell), three_digits(cost), ends))
    numbers = (f">{name}" for name in (*columns[1:], "GPUs", *names, "GPU hours", "interval"))
    shown_table = table("", "model", *numbers, rows=rows)
    shown_table.add_section()
    for purpose, (number, cost) in price.extra.items():
        shown_table.add_row(f"{purpose}: {number:,}", *("" for _ in (*columns, *names)), three_digits(cost))
    shown_table.add_section()
    sums = (f"{sum(column):,}" for column in zip(*counts.values(), strict=True))
    ends = " to ".join(map(three_digits, price.interval))
    shown_table.add_row("all", *("" for _ in columns), *sums, three_digits(price.gpu_hours), ends)
    return shown_table


def interval_line(price: Price) -> str:
    """One line that tells how far the price may be off, as step times are predicted with intervals."""
    low, high = map(three_digits, price.interval)
    return f"{three_digits(price.gpu_hours)} GPU hours, {low} to {high} with all step times at the ends of their intervals"


def jobs_line(price: Price, config: SweepConfig) -> str:
    """One line that tells how many jobs a price holds, how long they are, and why some are longer than asked."""
    launcher, predicted = config.launcher, [job.predicted_s / 60 for job in price.jobs]
    job_lengths = f"{counted(len(price.jobs), 'job')} of {_minutes(predicted, 'predicted ')}"
    why = f"launcher.allocation_minutes={launcher.allocation_minutes:g}"
    if launcher.pack:
        extra = " besides the control run" if launcher.control and launcher.pack > 1 else ""
        why += f", launcher.pack={launcher.pack}{extra}"
    if max(predicted) > launcher.allocation_minutes:
        share = f", or to keep its control run at {CONTROL_SHARE:.0%} or less" if launcher.control else ""
        why += f"; longer if one run needs it{share}"
    limits = _minutes([job.limit_s / 60 for job in price.jobs])
    source = " (launcher.time_minutes)" if launcher.time_minutes else ""
    return f"{job_lengths} ({why}), {'time limits' if ' to ' in limits else 'time limit'} {limits}{source}"


def too_long(plan: Plan) -> Iterator[str]:
    """A line about the runs that no job may be long enough for, if there are any."""
    reasons = [c.reason for c in plan.candidates if c.rule == TIME_LIMIT]
    if reasons:
        number = counted(len(reasons), "run")
        yield f"{number} of {len(reasons) + len(plan.runs):,} excluded, such as one for which {reasons[0]}"


def _minutes(values: Sequence[float], kind: str = "") -> str:
    """The range of some minutes, such as `1 minute` or `4.5 to 18 minutes`."""
    ends = dict.fromkeys(f"{v:.0f}" if v >= 10 else f"{v:.2g}" for v in (min(values), max(values)))
    return f"{' to '.join(ends)} {kind}{'minute' if [*ends] == ['1'] else 'minutes'}"


def ask_for_budget(
    plan: Plan, price: Price, state: SweepState, limits: JobLimits, max_gpu_hours: float | None, yes: bool
) -> float:
    """Shows the price of what is left to do and asks; returns the GPU hours that the sweep may use in all.

    Any budget that is given will do while jobs of the sweep are under way, because these leave something to do.

    Raises:
        ConfigError: there is no terminal to ask on and no --max-gpu-hours, or the budget is too small.
        typer.Abort: the answer is no.
    """
    used = committed_gpu_hours(plan, state, ())
    if not price.jobs:
        return max(used, 1e-9) if max_gpu_hours is None else max_gpu_hours
    _print_price(plan, price, limits, used)
    first = price.jobs[0].gpu_hours
    if max_gpu_hours is not None:
        if not open_allocations(state) and used + first > max_gpu_hours:
            why = f"{three_digits(used)} are used and the first job needs {three_digits(first)}"
            advice = f"give at least {used + first:.3g}, or a smaller launcher.allocation_minutes"
            raise ConfigError(f"--max-gpu-hours {max_gpu_hours:g}; {why}: {advice}")
        return max_gpu_hours
    budget = used + BUDGET_FACTOR * price.gpu_hours
    if not can_ask():
        number = f"{budget:.3g}" if budget < 100 else f"{math.ceil(budget)}"
        failure = f"{three_digits(price.gpu_hours)} GPU hours are predicted, and no terminal can confirm them"
        raise ConfigError(f"{failure}; set a budget: --max-gpu-hours {number}")
    if not yes:
        text = f"Launch, and stop at {three_digits(budget)} GPU hours ({BUDGET_FACTOR} x predicted)?"
        typer.confirm(text, abort=True, err=True)
    return budget


def ask_for_this_machine(plan: Plan, price: Price, yes: bool) -> None:
    """Warns that this machine is busy, and asks on a terminal before a sweep that takes hours or cannot fit.

    Raises:
        typer.Abort: the answer is no.
    """
    if plan.config.hardware.device == "cpu" and price.jobs and (busy := busy_share(0.2)) >= BUSY:
        fact = f"other programs use {busy:.0%} of this machine's cores"
        warn(f"{fact}: step times will be longer and vary more")
    took = sum(job.gpu_hours / job.nodes for job in price.jobs) / plan.config.hardware.gpus_per_node
    lines = [f"about {three_digits(took)} hours on this machine"] if took >= LONG_HOURS else []
    if not any(run.fits for run in plan.runs):
        needed = min(run.prediction.peak_mem_bytes for run in plan.runs) / GIB
        smallest = f"the smallest needs {needed:,.0f} GiB a rank"
        limit = plan.config.hardware.mem_bytes / GIB
        lines.append(f"no run is predicted to fit: {smallest}, and a rank has {limit:.0f}")
    if lines and not yes and price.jobs and can_ask():
        say(headline(plan.config))
        typer.confirm(f"{'; '.join(lines)}. Launch?", abort=True, err=True)


def _print_price(plan: Plan, price: Price, limits: JobLimits, used: float) -> None:
    cells = sorted(price.runs, key=lambda cell: (cell[1], cell[0]))
    say(headline(plan.config))
    say(price_table(plan, price, ("runs",), {cell: price.runs[cell][:1] for cell in cells}))
    jobs, per_node = price.jobs, plan.config.hardware.gpus_per_node
    together = min(limits.max_nodes, sum(job.nodes for job in jobs))
    longest_s = max(3600 * job.gpu_hours / (per_node * job.nodes) for job in jobs)
    earliest_s = max(3600 * price.gpu_hours / (per_node * together), longest_s)
    largest = counted(max(job.nodes for job in jobs), "node")
    say(interval_line(price), *too_long(plan), jobs_line(price, plan.config))
    at_a_time = f"{counted(limits.max_jobs, 'job')} and {counted(limits.max_nodes, 'node')} at a time"
    end = f"done in {duration(earliest_s)} at the earliest"
    say(f"at most {at_a_time}, {largest} per job; {end}; used so far: {three_digits(used)} GPU hours")
