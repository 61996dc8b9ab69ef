"""Plans of which nothing can run or fit, and what would make layouts fit into memory."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd
from typing import Any

from ultrabench.column import BYTES, capacity_text
from ultrabench.errors import ConfigError, counted
from ultrabench.model_shape import ModelShape
from ultrabench.run import AttemptKey, fill_in, fill_in_files, words_of
from ultrabench.sweep.best_runs import advised_run, expected_rate_of
from ultrabench.sweep.candidate import (
    NO_ROOM,
    UNSELECTED,
    Candidate,
    CellKey,
    advised,
    cell_columns,
    cell_label,
)
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.grid import divisors, why_none
from ultrabench.sweep.plan import Plan, cell_sweep, planned_cells
from ultrabench.sweep.predict.predict import ADVISED_P_OOM, oom_text
from ultrabench.sweep.untrained import axes_advice
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
    advices = {axes_advice(plan.config.kernel, shape) for shape in plan.config.models}
    raise ConfigError(f"none of {candidates_text} can run; rejected: {reasons}{max(advices)}")


def nothing_fits(
    plan: Plan, skipped_cells: Collection[CellKey] = (), advised_p_oom: float = ADVISED_P_OOM
) -> Iterator[str]:
    """A line for each cell in which no layout is predicted to fit; see `reasons_without_fit`."""
    reason_by_cell = reasons_without_fit(plan, skipped_cells, advised_p_oom)
    columns = cell_columns({c.cell for c in plan.candidates if c.trainable})
    yield from (f"{cell_label(cell, columns)}: {reason}" for cell, reason in reason_by_cell.items())


def reasons_without_candidates(plan: Plan) -> dict[CellKey, str]:
    """Cell -> why it has no layout that the kernel can train, and what to change."""
    config, candidates_by_cell = plan.config, plan.candidates_by_cell
    reasons = dict[CellKey, str]()
    for shape, cell in planned_cells(config) if config.kernel.trains else ():
        candidates = candidates_by_cell.get(cell, [])
        if candidates and not any(c.trainable for c in candidates):
            ((reason, num_rejected),) = Counter(c.reason for c in candidates).most_common(1)
            reasons_text = f"{num_rejected:,} of {counted(len(candidates), 'candidate')}: {reason}"
            advice = axes_advice(config.kernel, shape)
            reasons[cell] = f"no layout can run, {reasons_text}{advice}"
        elif not candidates and config.axes.listed:
            reasons[cell] = (
                "no candidate: sweep.layouts lists none for this cell; list one, or ignore the cell"
            )
        elif not candidates:
            workload = replace(config.workload, seq_len=cell.seq_len, gbs=cell.gbs)
            axes = replace(config.axes, nodes=(cell.nodes,))
            rule = why_none(axes, config.hardware.gpus_per_node, workload)
            reasons[cell] = f"no candidate: {rule}; choose divisors"
    return reasons


def reasons_without_fit(
    plan: Plan, skipped_cells: Collection[CellKey] = (), advised_p_oom: float = ADVISED_P_OOM
) -> dict[CellKey, str]:
    """Cell in which no layout is predicted to fit -> its smallest layout, and what would help.

    Args:
        skipped_cells: cells to leave out.
        advised_p_oom: P(OOM) above which a layout is no help.
    """
    limit_text = capacity_text(plan.config.hardware.mem_bytes)
    trainable_by_cell = {
        cell: [c for c in candidates if c.trainable] for cell, candidates in plan.candidates_by_cell.items()
    }
    remedies, reasons = _remedies_of(plan, advised_p_oom), dict[CellKey, str]()
    for cell, candidates in sorted(trainable_by_cell.items(), reverse=True):  # more nodes may help fewer
        if candidates and cell not in skipped_cells and not any(c.fits for c in candidates):
            smallest = min(candidates, key=lambda c: c.prediction.peak_mem_bytes)
            problem = f"no layout is likely to fit into {limit_text}"
            cell_config = cell_sweep(plan.config, cell)
            changes = " or ".join(remedies.texts(cell_config, smallest.shape, cell.nodes, advised_p_oom))
            advice = f"the smallest is {_layout_text(smallest)}; try {changes or 'a smaller model'}"
            reasons[cell] = f"{problem}; {advice}"
    return dict(reversed(reasons.items()))


def _remedies_of(plan: Plan, advised_p_oom: float) -> "Remedies":
    """Remedies that know the best run of each cell of which a plan has all runs."""
    partial_cells, runs_by_cell = {c.cell for c in plan.candidates if c.rule == UNSELECTED}, plan.cells
    remedies = Remedies()
    for cell in plan.candidates_by_cell.keys() - partial_cells:
        advised_in_cell = advised(runs_by_cell.get(cell, ()), advised_p_oom)
        remedies.best[cell, ()] = max(advised_in_cell, key=expected_rate_of, default=None)
    return remedies


def same_commands(plan: Plan) -> Iterator[str]:
    """A line if runs of a program have equal commands and variables, so that the program may not know what differs."""
    runs = () if plan.config.kernel.forks else plan.runs[:MAX_COMPARED_COMMANDS]
    runs_by_command = defaultdict[tuple[object, ...], list[Candidate]](list)
    for run in runs:
        program = run.spec, AttemptKey("", 0, 0), plan.config.measure
        run_variables = sorted(variables_of(run.spec.variant).items(), key=str)
        texts = (*run_variables, *fill_in(*program), *fill_in_files(*program).items())
        runs_by_command[run.nodes, run.runtime, *texts].append(run)
    equal_runs = [command_runs for command_runs in runs_by_command.values() if len(command_runs) > 1]
    if equal_runs:
        num_equal_runs, (first, second, *_) = sum(map(len, equal_runs)), equal_runs[0]
        first_words, second_words = words_of(first.spec), words_of(second.spec)
        differing = ", ".join(name for name, value in first_words.items() if value != second_words[name])
        problem = (
            f"{num_equal_runs:,} of {counted(len(runs), 'run')} have the same command as another "
            f"run, such as {first.spec.label()} and"
        )
        problem += f" {second.spec.label()}, which differ in {differing or 'flags with equal arguments'}"
        yield f"{problem}: add them to kernel.command, unless the program reads $ULTRABENCH_SPEC"


@dataclass(slots=True)
class Remedies:
    """Finds what would make a layout fit, by the best run on other nodes or with other values of axes.

    It looks for each such run only once.
    """

    best: dict[tuple[CellKey, tuple[tuple[str, Any], ...]], Candidate | None] = field(default_factory=dict)
    """Cell and values of axes -> the best run that is advised; None where none is."""
    short_keys: Mapping[str, str] = field(default_factory=dict)
    """Full key of each override that the user wrote with a short key -> that key."""

    def texts(self, config: SweepConfig, shape: ModelShape, nodes: int, max_p_oom: float) -> Iterator[str]:
        """What to change so that a layout is sure enough to fit, each with the best of such layouts.

        First come settings of layouts on the same nodes, then the least of 2, 4, 8 and so on times the nodes, if need
        be with such settings; not for a CPU.

        Args:
            config: the sweep of one cell's workload and precision.
            max_p_oom: P(OOM) above which a layout is no help.
        """
        all_settings = () if config.axes.listed else SAVING_SETTINGS  # listed layouts have no other values
        if shape.num_experts and all_settings:
            ranks_of_stage = nodes * config.hardware.gpus_per_node // min(divisors(config.axes, "pp", 1))
            largest_ep = {"ep": gcd(shape.num_experts, ranks_of_stage)}
            all_settings = (
                largest_ep,
                *SAVING_SETTINGS,
                *(setting | largest_ep for setting in SAVING_SETTINGS),
            )
        values = config.axes.layout
        new_settings = ({k: v for k, v in setting.items() if v not in values[k]} for setting in all_settings)
        new_setting_items = dict.fromkeys(tuple(setting.items()) for setting in new_settings if setting)
        for axis_values in new_setting_items:
            if run := self._best_run(config, shape, nodes, axis_values, max_p_oom):
                yield f"{self._overrides_text(axis_values)} ({_layout_text(run)})"
                break
        strongest_settings = list(new_setting_items)[-1:]  # with the one that saves most
        # The nodes of a CPU are simulated on this machine: more of them have no more memory.
        max_nodes = MAX_NODES if not config.hardware.shares_host else nodes
        possible_doublings = range(1, (max_nodes // nodes).bit_length())
        for doublings, axis_values in product(possible_doublings, ((), *strongest_settings)):
            if run := self._best_run(config, shape, nodes << doublings, axis_values, max_p_oom):
                values_text = self._overrides_text((("nodes", nodes << doublings), *axis_values))
                yield f"{values_text} ({_layout_text(run)})"
                break

    def _best_run(
        self,
        config: SweepConfig,
        shape: ModelShape,
        nodes: int,
        axis_values: tuple[tuple[str, Any], ...],
        max_p_oom: float,
    ) -> Candidate | None:
        """The best run on this number of nodes where axes have these values only; None where none is advised."""
        layout = {**config.axes.layout, **{name: (value,) for name, value in axis_values}}
        axes = replace(config.axes, nodes=(nodes,), layout=layout)
        changed_config = replace(config, axes=axes, models=(shape,))
        key = next(planned_cells(changed_config))[1], axis_values
        if key not in self.best:
            self.best[key] = advised_run(changed_config, shape, key[0], max_p_oom=max_p_oom)
        return self.best[key]

    def _overrides_text(self, values: Iterable[tuple[str, Any]]) -> str:
        """The overrides of axes in the form that the user wrote, such as nodes=2 or sweep.nodes=[2]."""
        keys_and_values = ((f"sweep.{axis}", value) for axis, value in values)
        return " ".join(
            f"{self.short_keys[key]}={value}" if key in self.short_keys else f"{key}=[{value}]"
            for key, value in keys_and_values
        )


def _layout_text(run: Candidate) -> str:
    memory_text = BYTES.brief_text(run.prediction.peak_mem_bytes)
    has_no_room = run.prediction.memory_share > 1 and run.fits
    room_text = f", {NO_ROOM}" if has_no_room else ""
    return f"{run.layout.label()}, {memory_text}, {oom_text(run.prediction.p_oom)}{room_text}"
