"""Shows the price of what is left of a sweep, and asks whether that much of a cluster may be used."""

import math
import sys
from collections.abc import Mapping, Sequence

import typer

from ultrabench.cli.tables import FittedTable, duration, hours, say, table
from ultrabench.errors import ConfigError, counted
from ultrabench.launchers.settle import open_allocations
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.store.state import SweepState
from ultrabench.sweep.plan import CellKey, Plan
from ultrabench.sweep.running.price import BUDGET_FACTOR, Price, committed_gpu_hours


def price_table(
    plan: Plan, price: Price, names: Sequence[str], counts: Mapping[CellKey, Sequence[int]]
) -> FittedTable:
    """A table of GPU hours: a row for each cell with its `counts`, then other costs, then the sum.

    Args:
        names: names of the columns of `counts`.
    """
    rows = []
    for (model, nodes), of_cell in counts.items():
        gpus, (_, cost) = nodes * plan.config.hardware.gpus_per_node, price.runs.get((model, nodes), (0, 0.0))
        rows.append((model, nodes, gpus, *(f"{n:,}" for n in of_cell), hours(cost)))
    numbers = (f">{name}" for name in ("nodes", "GPUs", *names, "GPU hours"))
    made = table(f"sweep {plan.config.name}", "model", *numbers, rows=rows)
    made.add_section()
    for what, (number, cost) in price.extra.items():
        made.add_row(f"{number:,} {what}", "", "", *("" for _ in names), hours(cost))
    made.add_section()
    sums = (f"{sum(column):,}" for column in zip(*counts.values(), strict=True))
    made.add_row("all", "", "", *sums, hours(price.gpu_hours))
    return made


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


def _print_price(plan: Plan, price: Price, limits: JobLimits, used: float) -> None:
    cells = sorted(price.runs, key=lambda cell: (cell[1], cell[0]))
    say(price_table(plan, price, ("runs",), {cell: price.runs[cell][:1] for cell in cells}))
    jobs, per_node = price.jobs, plan.config.hardware.gpus_per_node
    together = min(limits.max_nodes, sum(job.nodes for job in jobs))
    longest_s = max(3600 * job.gpu_hours / (per_node * job.nodes) for job in jobs)
    earliest_s = max(3600 * price.gpu_hours / (per_node * together), longest_s)
    largest, longest = max(job.nodes for job in jobs), duration(max(job.limit_s for job in jobs))
    shape = f"{counted(len(jobs), 'job')}, the largest of {counted(largest, 'node')} for up to {longest}"
    most = f"{counted(limits.max_jobs, 'job')} and {counted(limits.max_nodes, 'node')} at a time"
    done = f"done in {duration(earliest_s)} at the earliest; used so far: {hours(used)} GPU hours"
    say(f"{shape}; at most {most}; {done}")
