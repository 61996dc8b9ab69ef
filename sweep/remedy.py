"""Plans of which nothing can run or fit, and what would make layouts fit into memory."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import product
from math import gcd
from typing import Any

from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.model_shape import ModelShape
from ultrabench.run import AttemptKey, fill_in, fill_in_files, words_of
from ultrabench.sweep.candidate import Candidate, CellKey, by_cell, cell_columns, cell_label
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Plan, cell_sweep, make_plan
from ultrabench.sweep.predict.predict import ADVISED_P_OOM
from ultrabench.variant import variables_of

SAVING_SETTINGS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 3}, {"recompute": "full"}, {"zero_stage": 3, "recompute": "full"},
)  # fmt: skip
"""Axis -> the value that saves memory; the first of them that helps is named. In a model with experts the largest ep
that the ranks of a stage can have comes first, and all of them with it last."""
MAX_NODES = 1024
"""Largest number of nodes that is tried."""
MAX_COMPARED_COMMANDS = 1000
"""Number of runs whose commands are compared."""


def require_runs(plan: Plan) -> Plan:
    """The plan, which has at least one run.

    Raises:
        ConfigError: every candidate is rejected; the message lists the rules, the most frequent first. Where
            only memory is lacking, it says what would fit.
    """
    if plan.runs:
        return plan
    if reason := " | ".join(nothing_fits(plan)):
        raise ConfigError(f"{reason}; to run them anyway, set max_p_oom=1")
    example_by_rule = {c.rule: c.reason for c in reversed(plan.candidates)}
    rule_counts = Counter(c.rule for c in plan.candidates).most_common()
    reasons = ", ".join(f"{number:,} by {rule} ({example_by_rule[rule]})" for rule, number in rule_counts)
    candidates_text = counted(len(plan.candidates), "candidate")
    raise ConfigError(f"none of {candidates_text} can run; rejected: {reasons}; change the axes or the model")


def nothing_fits(
    plan: Plan, skipped_cells: Collection[CellKey] = (), advised_p_oom: float = ADVISED_P_OOM
) -> Iterator[str]:
    """A line for each cell in which no layout is predicted to fit: its smallest layout, and what would help.

    Args:
        skipped_cells: cells to leave out.
        advised_p_oom: P(OOM) above which a layout is no help.
    """
    limit_gib = plan.config.hardware.mem_bytes / GIB
    candidates_by_cell = by_cell(c for c in plan.candidates if c.trainable)
    for cell, candidates in sorted(candidates_by_cell.items()):
        if cell not in skipped_cells and not any(c.fits for c in candidates):
            smallest = min(candidates, key=lambda c: c.prediction.peak_mem_bytes)
            problem = f"{cell_label(cell, cell_columns(candidates_by_cell))}: no layout is likely to fit into {limit_gib:.4g} GiB"
            cell_config = cell_sweep(plan.config, cell)
            advice = " or ".join(remedies(cell_config, smallest.shape, cell.nodes, advised_p_oom))
            yield f"{problem}; the smallest is {_layout_text(smallest)}; try {advice or 'a smaller model'}"


def same_commands(plan: Plan) -> Iterator[str]:
    """A line if runs of a program have equal commands and variables, so that the program may not know what differs."""
    runs = plan.runs[:MAX_COMPARED_COMMANDS] if plan.config.kernel.kind == "command" else ()
    runs_by_command = defaultdict[tuple[object, ...], list[Candidate]](list)
    for run in runs:
        program = run.spec, AttemptKey("", 0, 0), plan.config.measure
        run_variables = sorted(variables_of(run.spec.variant).items(), key=str)
        texts = (*run_variables, *fill_in(*program), *fill_in_files(*program).items())
        runs_by_command[run.nodes, run.place, *texts].append(run)
    equal_runs = [command_runs for command_runs in runs_by_command.values() if len(command_runs) > 1]
    if equal_runs:
        num_equal_runs, (first, second, *_) = sum(map(len, equal_runs)), equal_runs[0]
        first_words, second_words = words_of(first.spec), words_of(second.spec)
        differing = ", ".join(name for name, value in first_words.items() if value != second_words[name])
        problem = f"{num_equal_runs:,} of {counted(len(runs), 'run')} have the same command as another run, such as {first.spec.label()} and"
        problem += f" {second.spec.label()}, which differ in {differing or 'flags with equal arguments'}"
        yield f"{problem}: add them to kernel.command, unless the program reads $ULTRABENCH_SPEC"


FindRun = Callable[[SweepConfig, ModelShape, int, dict[str, Any], float], Candidate | None]
"""Finds a run that is sure enough to fit where axes have these values only; None where there is none."""


def remedies(
    config: SweepConfig, shape: ModelShape, nodes: int, advised_p_oom: float, find_run: FindRun | None = None
) -> Iterator[str]:
    """What to change so that a layout is sure enough to fit, each with the memory of such a layout.

    First come settings of layouts on the same nodes, then the least of 2, 4, 8 and so on times the nodes, if need be
    with such settings.

    Args:
        find_run: chooses the layout that is named; by default the smallest.
    """
    find_run = find_run or _smallest_run
    all_settings = SAVING_SETTINGS
    if shape.num_experts:
        ranks_of_stage = nodes * config.hardware.gpus_per_node // min(config.axes.layout["pp"])
        largest_ep = {"ep": gcd(shape.num_experts, ranks_of_stage)}
        all_settings = (largest_ep, *SAVING_SETTINGS, *(setting | largest_ep for setting in SAVING_SETTINGS))
    values = config.axes.layout
    new_settings = ({k: v for k, v in setting.items() if v not in values[k]} for setting in all_settings)
    new_setting_items = dict.fromkeys(tuple(setting.items()) for setting in new_settings if setting)
    for axis_values in new_setting_items:
        if example_run := find_run(config, shape, nodes, dict(axis_values), advised_p_oom):
            yield f"{_overrides_text(axis_values)} ({_layout_text(example_run)})"
            break
    strongest_settings = list(new_setting_items)[-1:]  # with the one that saves most
    possible_doublings = range(1, (MAX_NODES // nodes).bit_length())
    for doublings, axis_values in product(possible_doublings, ((), *strongest_settings)):
        if example_run := find_run(config, shape, nodes << doublings, dict(axis_values), advised_p_oom):
            yield f"{_overrides_text((('nodes', nodes << doublings), *axis_values))} ({_layout_text(example_run)})"
            break


def _overrides_text(values: Iterable[tuple[str, Any]]) -> str:
    return " ".join(f"sweep.{axis}=[{value}]" for axis, value in values)


def _layout_text(run: Candidate) -> str:
    memory_text = f"{run.prediction.peak_mem_bytes / GIB:,.1f} GiB"
    return f"{run.layout.label()}, {memory_text}, P(OOM) {100 * run.prediction.p_oom:.0f} %"


def _smallest_run(
    config: SweepConfig, shape: ModelShape, nodes: int, value_by_axis: dict[str, Any], advised_p_oom: float
) -> Candidate | None:
    """The run of the smallest memory where axes have these values only; None where it has no room for its reserve."""
    # A single larger micro-batch may need less memory, but to plan all of them takes three times as long.
    smallest_mbs = {"mbs": min(config.axes.layout["mbs"])}
    set_values = {axis: (value,) for axis, value in (smallest_mbs | value_by_axis).items()}
    values_by_axis = {**config.axes.layout, **set_values}
    axes = replace(config.axes, nodes=(nodes,), layout=values_by_axis)
    try:
        planned_runs = make_plan(replace(config, models=(shape,), axes=axes)).runs
    except ConfigError:
        return None
    smallest = min(planned_runs, key=lambda run: run.prediction.peak_mem_bytes, default=None)
    if smallest is None or smallest.prediction.memory_share > 1 or smallest.prediction.p_oom > advised_p_oom:
        return None
    return smallest
