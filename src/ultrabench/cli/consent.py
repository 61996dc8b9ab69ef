"""What a launch on a cluster will cost, and the question whether it may."""

import math
import sys
from collections.abc import Sequence

import typer

from ultrabench.cli.tables import duration, err, hours, say, table
from ultrabench.errors import ConfigError, counted
from ultrabench.launchers.launcher import Launcher
from ultrabench.sweep.decide import Todo
from ultrabench.sweep.pack import allocation_limit_s, pack
from ultrabench.sweep.plan import Plan

BUDGET_FACTOR = 1.5
"""Without --max-gpu-hours a launch stops at this many times the predicted price."""


def ask_for_budget(
    plan: Plan, todo: Sequence[Todo], used: float, launcher: Launcher, given: float | None, yes: bool,
    following: bool = False,
) -> float:  # fmt: skip
    """Shows the price of what is left to do and asks; the GPU hours that the sweep may use in all.

    Args:
        following: jobs of the sweep are under way, so there is something to do within any budget.

    Raises:
        ConfigError: there is nobody to ask and no --max-gpu-hours.
        typer.Abort: the answer is no.
    """
    config, steps = plan.config, plan.steps
    cells: dict[tuple[str, int], list[float]] = {}
    for item in todo:
        run = item.candidate
        cells.setdefault((run.shape.name, run.nodes), []).append(run.gpu_hours(steps))
    price = sum(sum(prices) for prices in cells.values())
    if not todo:
        return given if given is not None else max(used, 1e-9)
    groups = pack(todo, config, steps)
    _print_price(plan, groups, cells, launcher, used)
    budget = given if given is not None else used + BUDGET_FACTOR * price
    first = sum(t.candidate.gpu_hours(steps) for t in groups[0])
    if given is not None and not following and used + first > given:
        raise ConfigError(
            f"--max-gpu-hours {given:g}; {hours(used)} are used and the first job needs {hours(first)}: give at "
            f"least {used + first:.3g}, or a smaller launcher.allocation_minutes"
        )
    if given is not None:
        return budget
    if sys.stdin is None or not sys.stdin.isatty():
        number = f"{budget:.3g}" if budget < 100 else f"{math.ceil(budget)}"
        raise ConfigError(
            f"no terminal to ask whether {hours(price)} predicted GPU hours may be used; "
            f"give the most that may: --max-gpu-hours {number}"
        )
    if not yes:
        text = f"Launch, and stop at {hours(budget)} GPU hours ({BUDGET_FACTOR} x predicted)?"
        typer.confirm(text, abort=True, err=True)
    return budget


def _print_price(
    plan: Plan, groups: Sequence[Sequence[Todo]], cells: dict[tuple[str, int], list[float]],
    launcher: Launcher, used: float,
) -> None:  # fmt: skip
    config, steps = plan.config, plan.steps
    per_node = config.hardware.gpus_per_node
    todo = [item for group in groups for item in group]
    price = sum(sum(prices) for prices in cells.values())
    numbers = ("nodes", "GPUs", "runs", "GPU hours")
    made = table(f"sweep {config.name}", "model", *numbers, right=numbers)
    for (model, nodes), prices in sorted(cells.items(), key=lambda cell: (cell[0][1], cell[0][0])):
        made.add_row(model, str(nodes), str(nodes * per_node), f"{len(prices):,}", hours(sum(prices)))
    made.add_section()
    made.add_row("all", "", "", f"{len(todo):,}", hours(price))
    err().print(made)
    nodes = max(run.candidate.nodes for run in todo)
    longest_s = max(allocation_limit_s(group, config, steps) for group in groups)
    limit_s = min(longest_s, launcher.max_limit_s)
    earliest_s = max(
        3600 * price / (per_node * min(launcher.max_nodes, sum(g[0].candidate.nodes for g in groups))),
        max(sum(t.candidate.duration_s(steps) for t in group) for group in groups),
    )
    say(
        f"{_many(len(groups), 'job')}, the largest of {_many(nodes, 'node')} for up to {duration(limit_s)}; at most "
        f"{counted(launcher.max_jobs, 'job')} and {counted(launcher.max_nodes, 'node')} at a time; done in {duration(earliest_s)} at "
        f"the earliest; used so far: {hours(used)} GPU hours"
    )


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
