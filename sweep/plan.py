"""The plan of a sweep: every candidate, whether it runs, the reason if not, and the order of the runs."""

import contextlib
import gc
import heapq
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement, product
from multiprocessing import get_context
from typing import Any

from ultrabench.errors import ConfigError
from ultrabench.hardware import PEAK_GUESSED, Peak
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import AXES, BATCH, DEGREES, Layout
from ultrabench.model_shape import ModelShape
from ultrabench.partial_step import Slice
from ultrabench.run import AttemptKey, RunSpec, Workload, fill_in, fill_in_files, idle_knobs, words_of
from ultrabench.sweep.candidate import (
    PRUNED,
    UNSELECTED,
    Candidate,
    CellKey,
    by_cell,
    cell_columns,
    cell_label,
)
from ultrabench.sweep.config.options import Options
from ultrabench.sweep.config.sweep_config import WEAK, Axes, ListedLayout, SweepConfig
from ultrabench.sweep.grid import broken_rules, layouts, require_countable, why_none, without_candidates
from ultrabench.sweep.partial_steps import (
    MEMORY_TOLERANCE,
    WholeSteps,
    by_two_starts,
    partial_steps_of,
    slice_of,
    whole_steps_of_any_run,
)
from ultrabench.sweep.predict.memory import memory_constants
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.predict.predict import Predictor, start_s, too_large_text
from ultrabench.sweep.refusals import refusal
from ultrabench.variant import CELL_OPTIONS, FLAGS, KERNEL_OPTIONS, Value, Variant, options_in_group

MIN_PARALLEL_CANDIDATES = 10_000
"""Number of candidates from which a plan is made by one process for each core; fewer take less than five seconds."""
CANDIDATES_PER_TASK = 250
"""Number of candidates that a process makes at a time."""
GAS_NOT_LISTED = "gas_not_listed"
"""The rule of layouts whose gas follows from the batch, but is not among the values of sweep.gas."""
ReportProgress = Callable[[int, int], None]
"""Called with the number of parts of a work that are done, and of all."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All candidates of a sweep, those that run first.

    The runs are sorted by price, the cheapest first. Runs that are unlikely to fit into memory come after
    the others, sorted by memory, the smallest first. Those with a P(OOM) above `max_p_oom` are no runs.
    """

    config: SweepConfig
    candidates: tuple[Candidate, ...]
    core_flops_per_s: float | None = None
    """Measured rate of a CPU core with which it was made; None where the hardware has a rate, or none was measured."""
    cores: int = 2
    """Number of CPU cores of the host for which it was made."""

    @cached_property
    def runs(self) -> tuple[Candidate, ...]:
        """The candidates that run."""
        return tuple(c for c in self.candidates if c.runs)

    @cached_property
    def cells(self) -> Mapping[CellKey, Sequence[Candidate]]:
        """CellKey -> its runs in the order of the plan."""
        return by_cell(self.runs)

    @cached_property
    def candidates_by_cell(self) -> Mapping[CellKey, Sequence[Candidate]]:
        """CellKey -> all its candidates in the order of the plan."""
        return by_cell(self.candidates)

    def summary(self, cells: Iterable[CellKey] | None = None) -> dict[str, Any]:
        """The document of `sweep plan --json`.

        Args:
            cells: the cells that it lists, also without candidates; None lists those of the sweep.
        """
        count_by_rule = Counter(c.rule for c in self.candidates if not c.valid)
        count_by_refusal = Counter(c.reason for c in self.candidates if c.rule == "kernel")
        candidates_by_cell, config = self.candidates_by_cell, self.config
        cells = (cell for _, cell in planned_cells(config)) if cells is None else cells
        cells_json = [cell._asdict() | _candidate_counts(candidates_by_cell.get(cell, [])) for cell in cells]
        all_options = config.options.values.items()
        value_by_option = {name: values[0] if len(values) == 1 else [*values] for name, values in all_options}
        return {
            "sweep": config.name,
            "hardware": config.hardware.name,
            **{option: value_by_option.pop(option) for option in CELL_OPTIONS},
            "scaling": config.scaling,
            "partial_steps": partial_steps_of(config),
            "options": value_by_option,
            "kernel": config.kernel.name,
            **_candidate_counts(self.candidates),
            "rejected": dict(sorted(count_by_rule.items())),
            "refused_by_kernel": dict(sorted(count_by_refusal.items())),
            "without_candidates": [*self._values_without_candidates()],
            "cells": cells_json,
        }

    def _values_without_candidates(self) -> Iterator[dict[str, Any]]:
        """Each value of an axis that no candidate has, whatever the batch."""
        config, all_batches = self.config, [*batches(self.config)]
        num_lacking_batches = Counter[tuple[str, int | str]]()
        for axes, workload in all_batches:
            nodes_and_layouts = [
                (c.nodes, c.layout)
                for c in self.candidates
                if c.nodes in axes.nodes and (c.spec.workload.gbs == workload.gbs or not config.kernel.trains)
            ]
            gpus_per_node = config.hardware.gpus_per_node
            for axis, value, reason in without_candidates(axes, gpus_per_node, workload, nodes_and_layouts):
                num_lacking_batches[axis, value] += 1
                if num_lacking_batches[axis, value] == sum(
                    axis != "nodes" or value in batch_axes.nodes for batch_axes, _ in all_batches
                ):
                    yield {"axis": axis, "value": value, "reason": reason}


def _candidate_counts(candidates: Sequence[Candidate]) -> dict[str, int]:
    return {
        "candidates": len(candidates),
        "valid": sum(c.valid for c in candidates),
        "runs": sum(c.runs for c in candidates),
        "pruned": sum(c.rule == PRUNED for c in candidates),
        "predicted_to_fit": sum(c.runs and c.fits for c in candidates),
    }


def make_plan(
    config: SweepConfig,
    *,
    core_flops_per_s: float | None = None,
    cores: int = 2,
    report_progress: ReportProgress = lambda done, total: None,
) -> Plan:
    """The plan of a sweep: all candidates with reasons and predictions, in the order in which they run.

    Args:
        core_flops_per_s: measured rate of a CPU core; needed only for hardware without a rate in its file.
        cores: number of CPU cores of the host.
        report_progress: called with the number of candidates that are made and of all, a few times a second.

    Raises:
        ConfigError: the axes give no candidate.
    """
    num_variants = sum(1 for _ in variants_of(config.options))
    gpus_per_node = config.hardware.gpus_per_node
    cells = (
        (shape, cell.nodes * gpus_per_node, gpus_per_node, cell.gbs) for shape, cell in planned_cells(config)
    )
    require_countable(config.axes, num_variants, cells)
    require_layouts(config)
    cell_plans_and_layouts = [*_layout_chunks(config, core_flops_per_s, cores)]
    num_candidates = sum(len(layout_chunk) for _, layout_chunk in cell_plans_and_layouts) * num_variants
    candidates = list[Candidate]()
    if not num_candidates:
        axes, workload = next(batches(config))
        reason = why_none(axes, config.hardware.gpus_per_node, workload)
        raise ConfigError(f"no candidate: {reason}; choose divisors")
    with process_map(os.cpu_count() or 1 if num_candidates >= MIN_PARALLEL_CANDIDATES else 1) as map_chunks:
        for chunk_candidates in map_chunks(_candidates, cell_plans_and_layouts):
            candidates += chunk_candidates
            report_progress(len(candidates), num_candidates)
    if config.kernel.command:  # an unknown word is reported now, not later on the nodes
        first_of_variant = {frozenset(c.spec.variant.items()): c for c in reversed(candidates)}
        for candidate in reversed(first_of_variant.values()):
            for fill in (fill_in, fill_in_files):
                fill(candidate.spec, AttemptKey(candidate.run_id, 0, 0), config.measure)
    candidates = _in_order(candidates, config.max_runs)
    return Plan(config=config, candidates=tuple(candidates), core_flops_per_s=core_flops_per_s, cores=cores)


def _in_order(candidates: Iterable[Candidate], max_runs: int | None) -> list[Candidate]:
    """The runs among the candidates in the order in which they run, of which all but `max_runs` are rejected, and the
    other candidates.
    """
    all_candidates = [*candidates]
    # sorted() is stable: runs of equal price keep the order of the grid, so equal input gives an equal plan.
    runs = sorted((c for c in all_candidates if c.runs), key=run_order)
    if max_runs is not None:
        runs = with_unselected_rejected(runs, max_runs)
    return [*runs, *(c for c in all_candidates if not c.runs)]


def with_strategy(plan: Plan, strategy: str) -> Plan:
    """The plan of a sweep with another strategy, whose runs are measured by parts or whole as it says."""
    config = replace(plan.config, strategy=strategy)
    if partial_steps_of(config) == partial_steps_of(plan.config):
        return replace(plan, config=config)
    cell_plan_by_cell = dict[CellKey, CellPlan]()
    for shape, cell in planned_cells(config):
        peak = config.hardware.peak(cell.precision, cell.nodes, plan.core_flops_per_s, plan.cores)
        cell_plan_by_cell[cell] = CellPlan(config=config, shape=shape, cell=cell, peak=peak)
    # Runs that max_runs left out because others were cheaper may be among the cheapest now.
    candidates = (replace(c, rule=None, reason=None) if c.rule == UNSELECTED else c for c in plan.candidates)
    candidates = (cell_plan_by_cell[c.cell].screened(c) if c.runs else c for c in candidates)
    return replace(plan, config=config, candidates=tuple(_in_order(candidates, config.max_runs)))


def require_layouts(config: SweepConfig) -> None:
    """Raises for the first entry of sweep.layouts that is impossible in one of its cells, or the same as another.

    Raises:
        ConfigError: the message names the entry.
    """
    entry_by_layout: dict[tuple[CellKey, Layout], ListedLayout] = {}
    cells = [*planned_cells(config)] if config.axes.listed else []
    for entry in config.axes.listed:
        places = [(shape, cell) for shape, cell in cells if entry.runs_in(cell)]
        if not places:
            cell_text = ", ".join(f"{key}={value}" for key, value in entry.cell.items())
            fact = f"{entry.name}: the sweep has no cell of {cell_text}"
            raise ConfigError(fact, "add it to the sweep, or leave the entry out", setting="sweep.layouts")
        for shape, cell in places:
            layout, reason = _layout_of(config, shape, cell, entry)
            cell_text = cell_label(cell, cell_columns([cell for _, cell in cells]))
            if layout is None or reason:
                remedy = "change the entry" if entry.cell else "change the entry, or limit it with nodes: N"
                fact = f"{entry.name} cannot run for {cell_text}: {reason}"
                raise ConfigError(fact, remedy, setting="sweep.layouts")
            if (other := entry_by_layout.setdefault((cell, layout), entry)) is not entry:
                fact = f"{entry.name} is the same layout as {other.name} for {cell_text}"
                raise ConfigError(fact, "leave one of them out", setting="sweep.layouts")


def _layout_of(
    config: SweepConfig, shape: ModelShape, cell: CellKey, entry: ListedLayout
) -> tuple[Layout | None, str | None]:
    """The layout of an entry of sweep.layouts in a cell, and why it cannot run there, if it cannot."""
    peak = config.hardware.peak(cell.precision, cell.nodes, None, 1)
    cell_plan = CellPlan(config=config, shape=shape, cell=cell, peak=peak)
    layout = next(cell_plan.layouts(replace(config.axes, listed=(entry,))), None)
    if layout is None:
        workload = replace(config.workload, seq_len=cell.seq_len, gbs=cell.gbs)
        axes = Axes(nodes=(cell.nodes,), layout=entry.layout)
        return None, why_none(axes, config.hardware.gpus_per_node, workload)
    spec = next(cell_plan.specs(layout))
    return layout, next(rejections(config, spec), (None, None))[1]


@contextlib.contextmanager
def process_map(num_processes: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A map that `num_processes` processes share, at most one for each core of this process;
    with one it is the usual map.

    Python's collector of cyclic garbage rests meanwhile: predictions make no cycles, and it took an eighth of their
    time.
    """
    num_processes = min(num_processes, len(os.sched_getaffinity(0)))
    if num_processes < 2:
        with _without_collector():
            yield map
        return
    ignore_ctrl_c_args = signal.SIGINT, signal.SIG_IGN  # Ctrl-C reaches this process, which ends the others
    with _without_collector():  # the processes begin as this one is
        pool = ProcessPoolExecutor(num_processes, get_context("fork"), signal.signal, ignore_ctrl_c_args)
        try:
            yield pool.map
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_order(run: Candidate) -> tuple[bool, float]:
    """Sort key: GPU hours of a run that fits; a run that does not fit comes later, sorted by memory."""
    return (False, run.gpu_hours) if run.fits else (True, run.prediction.memory_share)


def with_unselected_rejected(runs: Sequence[Candidate], max_runs: int) -> list[Candidate]:
    """All `runs`, of which all but `max_runs` are rejected; those left cover many values and pairs of
    values of the axes.

    Each choice is the run that adds the most new values and pairs; among equal runs it is the first. A fault
    of a form of parallelism shows where it is used alone or together with one other form, so a small
    selection should cover the pairs.
    """
    pairs_of_run, covered_pairs, selected_indices = [pairs_of(run) for run in runs], set[object](), set[int]()
    # A run adds no more pairs later than now, so its entry needs an update only when it comes first.
    queue = [(-len(pairs), index) for index, pairs in enumerate(pairs_of_run)]
    heapq.heapify(queue)
    while queue and len(selected_indices) < max_runs:
        num_new_pairs, index = len(pairs_of_run[queue[0][1]] - covered_pairs), queue[0][1]
        if num_new_pairs == -queue[0][0]:
            heapq.heappop(queue)
            selected_indices.add(index)
            covered_pairs |= pairs_of_run[index]
        else:
            heapq.heapreplace(queue, (-num_new_pairs, index))
    reason = f"not among the sweep.max_runs={max_runs} that cover most pairs of axis values"
    return [
        run if index in selected_indices else replace(run, rule=UNSELECTED, reason=reason)
        for index, run in enumerate(runs)
    ]


def pairs_of(run: Candidate) -> set[object]:
    """The pairs of axis values of a run, each with its cell; a value paired with itself stands for the value alone.

    Of dp, mbs and gas only whether they are above 1 counts.
    """
    value_by_axis = {axis: getattr(run.layout, axis) for axis in AXES}
    value_by_axis |= {axis: value_by_axis[axis] > 1 for axis in (DEGREES[0], *BATCH)}
    return {(run.cell, *pair) for pair in combinations_with_replacement(value_by_axis.items(), 2)}


def batches(config: SweepConfig) -> Iterator[tuple[Axes, Workload]]:
    """The axes and the workload of each batch of a sweep; with weak scaling each number of nodes
    has its own batches.
    """
    node_counts = sorted({*config.axes.nodes})
    single_count_groups = [(num_nodes,) for num_nodes in node_counts]
    node_count_groups = single_count_groups if config.scaling == WEAK else [tuple(node_counts)]
    for node_count_group, gbs_option in product(node_count_groups, config.options.values["gbs"]):
        workload = replace(config.workload, gbs=int(config.gbs_on(node_count_group[0], gbs_option)))
        yield replace(config.axes, nodes=node_count_group), workload


def planned_cells(config: SweepConfig) -> Iterator[tuple[ModelShape, CellKey]]:
    """All cells of a sweep with their models, in their order."""
    option_values = config.options.values
    option_combinations = [*product(*(option_values[name] for name in CELL_OPTIONS))]
    for shape in config.models:
        for nodes in sorted(set(config.axes.nodes)):
            for seq_len, gbs_option, precision in option_combinations:
                # A probe trains nothing, so its batch is one sequence for each rank on any number of nodes.
                trains, num_ranks = config.kernel.trains, nodes * config.hardware.gpus_per_node
                cell_gbs = int(config.gbs_on(nodes, gbs_option)) if trains else num_ranks
                yield shape, CellKey(shape.name, nodes, seq_len, cell_gbs, precision)


def _layout_chunks(
    config: SweepConfig, core_flops_per_s: float | None, cores: int
) -> Iterator[tuple["CellPlan", list[Layout]]]:
    """All layouts of the grid, in its order, as chunks of one cell, each with what makes its candidates."""
    for shape, cell in planned_cells(config):
        peak = config.hardware.peak(cell.precision, cell.nodes, core_flops_per_s, cores)
        cell_plan = CellPlan(config=config, shape=shape, cell=cell, peak=peak)
        cell_layouts = [*cell_plan.layouts()]
        for first_index in range(0, len(cell_layouts), CANDIDATES_PER_TASK):
            yield cell_plan, cell_layouts[first_index : first_index + CANDIDATES_PER_TASK]


def cell_sweep(config: SweepConfig, cell: CellKey) -> SweepConfig:
    """The configuration of a sweep of this cell's workload and precision alone,
    with the first value of other options.
    """
    values_by_option = {option: values[:1] for option, values in config.options.values.items()}
    values_by_option |= {option: (getattr(cell, option),) for option in CELL_OPTIONS}
    return replace(
        config,
        scaling="strong",
        options=replace(config.options, values=values_by_option),
        workload=replace(config.workload, seq_len=cell.seq_len, gbs=cell.gbs),
        kernel=replace(config.kernel, precision=cell.precision),
    )


def variants_of(options: Options) -> Iterator[dict[str, Value]]:
    """All combinations of the options of variants; that of the first values is the first."""
    names, values = [*options.of_variants], options.of_variants.values()
    return (dict(zip(names, combination, strict=True)) for combination in product(*values))


def kernel_of(kernel: KernelConfig, precision: str, variant: Variant) -> KernelConfig:
    """The kernel of a sweep with the options of one run."""
    run_options: dict[str, Any] = {option: variant[option] for option in KERNEL_OPTIONS if option in variant}
    return replace(kernel, precision=precision, **run_options)


@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """Makes the candidates of one cell."""

    config: SweepConfig
    shape: ModelShape
    cell: CellKey
    peak: Peak

    @cached_property
    def predictor(self) -> Predictor:
        """What predicts the runs of the cell."""
        return predictor(self.config, self.cell.nodes, self.peak)

    @cached_property
    def variants_with_kernels(self) -> list[tuple[dict[str, Value], KernelConfig, tuple[str, ...]]]:
        """Variant, kernel and arguments of each combination of the options of variants."""
        kernel, options = self.config.kernel, self.config.options
        return [
            (variant, kernel_of(kernel, self.cell.precision, variant), options.arguments_of(variant))
            for variant in variants_of(options)
        ]

    def layouts(self, axes: Axes | None = None) -> Iterator[Layout]:
        """The layouts of the grid in this cell; by default those of the axes of the sweep."""
        axes, cell, gpus_per_node = axes or self.config.axes, self.cell, self.config.hardware.gpus_per_node
        if axes.listed and not (listed := tuple(entry for entry in axes.listed if entry.runs_in(cell))):
            return iter(())
        axes = replace(axes, listed=listed) if axes.listed else axes
        return layouts(axes, self.shape, cell.nodes * gpus_per_node, gpus_per_node, cell.gbs)

    def specs(self, layout: Layout) -> Iterator[RunSpec]:
        """The runs of a layout, one for each variant."""
        cell, config = self.cell, self.config
        workload = replace(config.workload, seq_len=cell.seq_len, gbs=cell.gbs)
        for variant, kernel, arguments in self.variants_with_kernels:
            yield RunSpec(
                shape=self.shape,
                workload=workload,
                layout=layout,
                kernel=kernel,
                variant=variant,
                arguments=arguments,
                nodes=cell.nodes,
                gpus_per_node=config.hardware.gpus_per_node,
            )

    def candidate(self, spec: RunSpec) -> Candidate:
        """The candidate of a run, with its prediction and the rule that rejects it."""
        config, peak = self.config, self.peak
        trains_model = config.kernel.trains
        rule, reason = next(rejections(config, spec), (None, None))
        prediction = self.predictor.predict(spec) if rule in (None, "kernel") else None
        if prediction and rule is None and prediction.p_oom > config.max_p_oom:
            rule, reason = PRUNED, too_large_text(prediction, prediction.p_oom)
        return Candidate(
            run_id=spec.run_id,
            spec=spec,
            rule=rule,
            reason=reason,
            predicted=prediction,
            peak_flops_per_s=peak.flops_per_s if trains_model and peak.source != PEAK_GUESSED else None,
            flops_formula=config.measure.flops_formula,
        )

    def screened(self, run: Candidate) -> Candidate:
        """The run with the parts of a step, or the few whole steps, by which measure.partial_steps screens it."""
        measure, partial_steps = self.config.measure, partial_steps_of(self.config)
        if run.is_screened or run.whole_steps:  # by another value
            neutral = {"slice": None, "few_steps": False, "whole_steps": None, "turn_share": 1.0}
            run = run.measured_by(measure, **neutral, second_start_s=0.0, dear_two_starts=None)
        if partial_steps == "off":
            return run
        if whole_steps := whole_steps_of_any_run(self.config):
            return replace(run, whole_steps=whole_steps)
        slice_ = slice_of(run.layout, partial_steps)
        if isinstance(slice_, Slice) and not run.spec.kernel.trains_itself:
            slice_ = by_two_starts(slice_)
            slice_ = self._unable_to_start(run, slice_) or slice_
        if isinstance(slice_, WholeSteps):
            few_steps = run.spec.kernel.trains_itself
            return run.measured_by(measure, few_steps=few_steps, whole_steps=slice_)
        part_by_size = {size: self.predictor.predict(run.spec.with_gas(size)) for size in slice_.sizes}
        prediction = run.prediction
        turn_s = sum(part.step_time_s for part in part_by_size.values())
        # Larger parts are not run in every start.
        peak_ratio = prediction.peak_mem_bytes / part_by_size[slice_.g2].peak_mem_bytes
        slice_ = replace(slice_, keeps_memory=peak_ratio <= 1 + MEMORY_TOLERANCE)
        in_parts = run.measured_by(
            measure,
            slice=slice_,
            turn_share=turn_s / prediction.step_time_s,
            second_start_s=start_s(self.config.hardware, run.nodes) if slice_.two_starts else 0.0,
        )
        return in_parts.unless_dearer(measure)

    def _unable_to_start(self, run: Candidate, slice_: Slice) -> WholeSteps | None:
        """Why a program cannot be started with steps of the sizes of a slice; None if it can."""
        key, measure = AttemptKey(run.run_id, 0, 0), self.config.measure

        def texts_of(spec: RunSpec) -> tuple[list[str], dict[str, str]]:
            return fill_in(spec, key, measure), fill_in_files(spec, key, measure)

        whole_texts = texts_of(run.spec)
        for size in slice_.sizes:
            part = run.spec.with_gas(size)
            refusals = (reason for rule, reason in rejections(self.config, part) if rule != GAS_NOT_LISTED)
            if reason := next(refusals, None):
                return WholeSteps("program", f"with gas={size}: {reason}")
            if texts_of(part) == whole_texts:
                command_text = f"the command and the files of kernel {run.spec.kernel.name}"
                return WholeSteps("command", f"{command_text} are the same with other gas and gbs")
        return None


def _candidates(cell_plan_and_layouts: tuple[CellPlan, list[Layout]]) -> list[Candidate]:
    """The candidates of a chunk of the layouts of a cell."""
    cell_plan, layout_chunk = cell_plan_and_layouts
    candidates = (cell_plan.candidate(spec) for layout in layout_chunk for spec in cell_plan.specs(layout))
    return [cell_plan.screened(candidate) if candidate.runs else candidate for candidate in candidates]


def predictor(config: SweepConfig, nodes: int, peak: Peak) -> Predictor:
    """What predicts the runs of a sweep on this number of nodes, whose links are those of the data sheet."""
    profile = config.profile
    return Predictor(
        hardware=config.hardware,
        peak=peak,
        measure=config.measure,
        profile=profile,
        memory=memory_constants(profile.framework, profile.memory),
        links=network(config.hardware, nodes),
    )


def rejections(config: SweepConfig, spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Each rule that rejects a run, with its reason; the rule is `kernel` where the kernel refuses it."""
    hardware, layout, shape = config.hardware, spec.layout, spec.shape
    gas_values = config.axes.layout.get("gas", (layout.gas,))
    yield from broken_rules(layout, shape)
    if layout.gas not in gas_values:
        yield GAS_NOT_LISTED, f"gas={layout.gas} is not in sweep.gas={list(gas_values)}"
    value_by_word = words_of(spec) if config.options.rules else {}
    for word_rule in config.options.rules:
        if reason := word_rule.broken(value_by_word):
            yield "word_rule", f"{reason} ({word_rule.text})"
    seq_len = spec.workload.seq_len
    if reason := refusal(
        spec.kernel, layout, shape, seq_len, hardware.device, hardware, variant=spec.variant
    ):
        yield "kernel", reason
    if config.kernel.knobs and (reason := _idle_knob(config.options, spec)):
        yield "kernel", reason


def _idle_knob(options: Options, spec: RunSpec) -> str | None:
    """Why a run repeats another one: a knob that changes nothing here does not have its first value; else None."""
    first_values = options_in_group(options.first_variant, FLAGS)
    varied_values = options_in_group(spec.variant, FLAGS)
    other_knobs = [knob for knob, value in varied_values.items() if value != first_values[knob]]
    if not other_knobs:
        return None
    idle = idle_knobs(spec)
    knob = next((knob for knob in other_knobs if knob in idle), None)
    if knob is None:
        return None
    return (
        f"{knob}={varied_values[knob]} changes nothing in this run: "
        f"the one with {knob}={first_values[knob]} has the same command"
    )
