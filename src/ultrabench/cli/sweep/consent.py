"""Shows the price of what is left of a sweep, and asks whether that much of a cluster may be used."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence

import typer

from ultrabench.analysis.numbers import count
from ultrabench.cli.tables import FittedTable, duration, hours, say, table, warn
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.launchers.settle import open_allocations
from ultrabench.processes import busy_share
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.store.state import SweepState
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import CellKey, Plan
from ultrabench.sweep.running.price import (
    BUDGET_FACTOR,
    CONTROL_SHARE,
    TIME_LIMIT,
    Price,
    committed_gpu_hours,
)

LONG_HOURS = 1.0
"""Predicted hours on this machine from which a launch asks first."""
BUSY = 0.3
"""Share of this machine's cores, used by other programs, from which a launch warns."""


def headline(config: SweepConfig) -> str:
    """One line with all that the runs of a sweep share, such as its models, hardware, batch and precision."""
    sizes = (f"{shape.name} ({count(shape.num_params)} parameters)" for shape in config.models)
    models, hardware = ", ".join(sizes), config.hardware.name
    workload, with_what = config.workload, f"{config.kernel.precision}, kernel {config.kernel.name}"
    if config.kernel.kind == "probe":
        return f"sweep {config.name}: links of {hardware}, {with_what}"
    tokens = count(workload.gbs * workload.seq_len)
    batch = f"sequences of {workload.seq_len} tokens, global batch {workload.gbs} ({tokens} tokens)"
    return f"sweep {config.name}: {models} on {hardware}, {batch}, {with_what}"


def price_table(
    plan: Plan, price: Price, names: Sequence[str], counts: Mapping[CellKey, Sequence[int]]
) -> FittedTable:
    """A table of GPU hours: a row for each cell with its `counts` and its interval, then other costs, then the sum.

    Args:
        names: names of the columns of `counts`.
    """
    rows = []
    for (model, nodes), of_cell in counts.items():
        gpus, (_, cost) = nodes * plan.config.hardware.gpus_per_node, price.runs.get((model, nodes), (0, 0.0))
        low, high = price.intervals.get((model, nodes), (0.0, 0.0))
        ends = f"{hours(low)} to {hours(high)}" if low < high else ""
        rows.append((model, nodes, gpus, *(f"{n:,}" for n in of_cell), hours(cost), ends))
    numbers = (f">{name}" for name in ("nodes", "GPUs", *names, "GPU hours", "interval"))
    made = table("", "model", *numbers, rows=rows)
    made.add_section()
    for what, (number, cost) in price.extra.items():
        made.add_row(f"{what}: {number:,}", "", "", *("" for _ in names), hours(cost))
    made.add_section()
    sums = (f"{sum(column):,}" for column in zip(*counts.values(), strict=True))
    made.add_row("all", "", "", *sums, hours(price.gpu_hours), " to ".join(map(hours, price.interval)))
    return made


def interval_line(price: Price) -> str:
    """One line that tells how far the price may be off, as step times are predicted with intervals."""
    low, high = map(hours, price.interval)
    return f"{hours(price.gpu_hours)} GPU hours, {low} to {high} if all step times are at an end of their intervals"


def jobs_line(price: Price, config: SweepConfig) -> str:
    """One line that tells how many jobs a price holds, how long they are, and why some are longer than asked."""
    launcher, predicted = config.launcher, [job.predicted_s / 60 for job in price.jobs]
    told = f"{counted(len(price.jobs), 'job')} of {_minutes(predicted, 'predicted ')}"
    why = f"launcher.allocation_minutes={launcher.allocation_minutes:g}"
    if launcher.pack:
        extra = " besides the control run" if launcher.control and launcher.pack > 1 else ""
        why += f", launcher.pack={launcher.pack}{extra}"
    if max(predicted) > launcher.allocation_minutes:
        share = f", or so that its control run takes at most {CONTROL_SHARE:.0%}" if launcher.control else ""
        why += f"; longer where one run needs it{share}"
    limits = _minutes([job.limit_s / 60 for job in price.jobs])
    source = " (launcher.time_minutes)" if launcher.time_minutes else ""
    return f"{told} ({why}), {'time limits' if ' to ' in limits else 'time limit'} {limits}{source}"


def too_long(plan: Plan) -> Iterator[str]:
    """A line about the runs that no job may be long enough for, if there are any."""
    reasons = [c.reason for c in plan.candidates if c.rule == TIME_LIMIT]
    if reasons:
        number = counted(len(reasons), "run")
        yield f"{number} of {len(reasons) + len(plan.runs):,} left out, since no job may be long enough: {reasons[0]}"


def _minutes(values: Sequence[float], kind: str = "") -> str:
    """The range of some minutes, such as `1 minute` or `4.5 to 18 minutes`."""
    ends = dict.fromkeys(f"{v:.0f}" if v >= 10 else f"{v:.2g}" for v in (min(values), max(values)))
    return f"{' to '.join(ends)} {kind}{'minute' if [*ends] == ['1'] else 'minutes'}"


def ask_for_budget(
    plan: Plan, price: Price, state: SweepState, limits: JobLimits, given: float | None, yes: bool
) -> float:
    """Shows the price of what is left to do and asks; returns the GPU hours that the sweep may use in all.

    Any budget that is given will do while jobs of the sweep are under way, because these leave something to do.

    Raises:
        ConfigError: there is no terminal to ask on and no --max-gpu-hours, or the budget is too small.
        typer.Abort: the answer is no.
    """
    used = committed_gpu_hours(plan, state, ())
    if not price.jobs:
        return given if given is not None else max(used, 1e-9)
    _print_price(plan, price, limits, used)
    first = price.jobs[0].gpu_hours
    if given is not None:
        if not open_allocations(state) and used + first > given:
            why = f"{hours(used)} are used and the first job needs {hours(first)}"
            advice = f"give at least {used + first:.3g}, or a smaller launcher.allocation_minutes"
            raise ConfigError(f"--max-gpu-hours {given:g}; {why}: {advice}")
        return given
    budget = used + BUDGET_FACTOR * price.gpu_hours
    if sys.stdin is None or not sys.stdin.isatty():
        number = f"{budget:.3g}" if budget < 100 else f"{math.ceil(budget)}"
        failure = f"no terminal to ask whether {hours(price.gpu_hours)} predicted GPU hours may be used"
        raise ConfigError(f"{failure}; give the most that may: --max-gpu-hours {number}")
    if not yes:
        text = f"Launch, and stop at {hours(budget)} GPU hours ({BUDGET_FACTOR} x predicted)?"
        typer.confirm(text, abort=True, err=True)
    return budget


def ask_for_this_machine(plan: Plan, price: Price, yes: bool) -> None:
    """Warns that this machine is busy, and asks on a terminal before a sweep that takes hours or cannot fit.

    Raises:
        typer.Abort: the answer is no.
    """
    if plan.config.hardware.device == "cpu" and price.jobs and (busy := busy_share(0.2)) >= BUSY:
        told = f"other programs use {busy:.0%} of this machine's cores"
        warn(f"{told}: step times will be longer and vary more")
    took = sum(job.gpu_hours / job.nodes for job in price.jobs) / plan.config.hardware.gpus_per_node
    lines = [f"about {hours(took)} hours on this machine"] if took >= LONG_HOURS else []
    if not any(run.fits for run in plan.runs):
        needed = min(run.prediction.peak_mem_bytes for run in plan.runs) / GIB
        smallest = f"the smallest needs {needed:,.0f} GiB a rank"
        limit = plan.config.hardware.mem_bytes / GIB
        lines.append(f"no run is predicted to fit: {smallest}, which has {limit:.0f}")
    if lines and not yes and price.jobs and sys.stdin is not None and sys.stdin.isatty():
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
    most = f"{counted(limits.max_jobs, 'job')} and {counted(limits.max_nodes, 'node')} at a time"
    done = f"done in {duration(earliest_s)} at the earliest; used so far: {hours(used)} GPU hours"
    say(f"at most {most}, and {largest} in a job; {done}")
