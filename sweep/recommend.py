"""Finds the best runs of a cell by branch and bound: the first places of a plan without predicting all its candidates.

A group holds the layouts that differ in recomputation and ZeRO alone. No layout of it is faster than its bound, the
step time without what these add, and none needs less memory than the one that recomputes and shards all. Layouts of
other micro-batches are not compared: one that accumulates no gradients may need less than one of smaller micro-batches.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf
from typing import Any

from ultrabench.hardware import GIB
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.candidate import Candidate, CellKey, expected_rate
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.grid import DERIVED_AXES, broken_rules, layouts, shards_of, why_none
from ultrabench.sweep.plan import CellPlan, cell_sweep, planned_cells, process_map, rejections
from ultrabench.sweep.predict.predict import ADVISED_P_OOM, Occupancy
from ultrabench.sweep.refusals import refusal
from ultrabench.sweep.remedy import remedies

Branch = Candidate | Callable[[], Iterable["Entry"]]
"""A run with its rate, or a function that splits a set of runs into smaller sets or single runs."""
Entry = tuple[float, tuple[int | str, ...], Branch]
"""Entry of a heap: minus the bound of the expected rate, the position of the layout in the grid, and the branch."""


def tokens_per_s_per_gpu(spec: RunSpec, step_time_s: float) -> float:
    """The tokens/s/GPU of a run with this step time."""
    return spec.tokens_per_step / spec.layout.world_size / step_time_s


@dataclass(slots=True, kw_only=True)
class Search:
    """The search for the best runs of one cell."""

    cell_plan: CellPlan
    max_p_oom: float
    """P(OOM) above which no run is taken."""
    max_memory_share: float = 1.0
    """Share of a GPU's memory, the reserve of its allocator included, above which no run is taken."""
    rejection: str | None = None
    """Why the first layout cannot run that a rule or the kernel rejected: the one of the smallest degrees."""
    min_bytes: float = inf
    """The least memory that a layout needs among those that the search rejected for their memory."""
    fits_without_reserve: bool = False
    """Whether a layout that was rejected for its memory fits without the reserve of its allocator."""
    _fits_by_layout: dict[tuple[Layout, int], bool] = field(default_factory=dict)
    """Layout and index of the variant -> whether it fits."""

    def best(self, count: int = 1) -> list[Candidate]:
        """The `count` best runs that are advised, in the order of the plan; fewer where fewer are advised."""
        heap, runs = [*self._group_entries()], list[Candidate]()
        heapify(heap)
        while heap and len(runs) < count:
            branch = heappop(heap)[2]
            if isinstance(branch, Candidate):
                runs.append(branch)
                continue
            for entry in branch():
                heappush(heap, entry)
        return runs

    def _group_entries(self) -> Iterator[Entry]:
        """All groups that can hold a layout."""
        config, cell, axes = self.cell_plan.config, self.cell_plan.cell, self.cell_plan.config.axes
        fastest_values = {**axes.layout, "recompute": ("none",), "zero_stage": (0,), "dp_shard": ("all",)}
        gpus_per_node, gas_values = config.hardware.gpus_per_node, axes.layout.get("gas")
        num_gpus, axes = cell.nodes * gpus_per_node, replace(axes, layout=fastest_values)
        all_layouts = layouts(axes, self.cell_plan.shape, num_gpus, gpus_per_node, cell.gbs)
        for index, layout in enumerate(all_layouts):
            if gas_values and layout.gas not in gas_values:
                continue
            for variant_index, spec in enumerate(self.cell_plan.specs(layout)):
                if reason := self._group_rejection(spec):
                    self.rejection = self.rejection or reason
                    continue
                split_group = partial(self._split_by_recomputation, spec, index, variant_index)
                yield -self._rate_bound(spec), (0, index, variant_index), split_group

    def _group_rejection(self, spec: RunSpec) -> str | None:
        """Why no layout of the group can run; None where another value of recomputation or ZeRO may help."""
        for _, reason in broken_rules(spec.layout, spec.shape):
            return reason
        hardware, kernel = self.cell_plan.config.hardware, spec.kernel
        if kernel.kind != "embedded":  # it may lack exactly these values
            return None
        return refusal(kernel, spec.layout, spec.shape, spec.workload.seq_len, hardware.device, hardware)

    def _split_by_recomputation(self, spec: RunSpec, index: int, variant_index: int) -> Iterator[Entry]:
        """The parts of a group by recomputation."""
        for recompute in {*self.cell_plan.config.axes.layout["recompute"]}:
            recomputing_spec = replace(spec, layout=replace(spec.layout, recompute=recompute))
            split_part = partial(self._split_by_sharding, recomputing_spec, index, variant_index)
            yield -self._rate_bound(recomputing_spec), (0, index, variant_index, recompute), split_part

    def _rate_bound(self, spec: RunSpec) -> float:
        """A rate that no ZeRO stage of the layout exceeds."""
        times = self.cell_plan.predictor.step_time(spec, ())
        return tokens_per_s_per_gpu(spec, times.total - times.dp - times.optimizer)

    def _split_by_sharding(self, spec: RunSpec, index: int, variant_index: int) -> Iterator[Entry]:
        """The runs of a part of a group, if memory may suffice, with the bounds of their rates."""
        axes, layout = self.cell_plan.config.axes.layout, spec.layout
        free_axes = [axis for axis in axes if axis not in DERIVED_AXES]
        ranks_in_node = max(1, spec.gpus_per_node // layout.tp)
        num_copies = layout.dp * layout.cp
        for zero_stage in {*axes["zero_stage"]} if self._may_fit(spec, variant_index) else ():
            shards = (shards_of(value, num_copies, ranks_in_node, zero_stage) for value in axes["dp_shard"])
            for shard_index, dp_shard in enumerate(dict.fromkeys(shards)):
                run_spec = replace(spec, layout=replace(layout, zero_stage=zero_stage, dp_shard=dp_shard))
                if rejection := next(rejections(self.cell_plan.config, run_spec), None):
                    self.rejection = self.rejection or rejection[1]
                    continue
                free_values = (getattr(run_spec.layout, axis) for axis in free_axes)
                position = (*free_values, index, shard_index, variant_index)
                step_time_s = self.cell_plan.predictor.step_time(run_spec, ()).total
                rate_bound = tokens_per_s_per_gpu(run_spec, step_time_s)
                yield -rate_bound, position, partial(self._predicted_entry, run_spec, position)

    def _predicted_entry(self, spec: RunSpec, position: tuple[int | str, ...]) -> Iterator[Entry]:
        """The run with its rate, if it is advised."""
        candidate = self.cell_plan.candidate(spec)
        prediction = candidate.prediction
        occupancy = Occupancy(prediction.peak_mem_bytes, prediction.memory_share, prediction.p_oom)
        if self._is_acceptable(occupancy) and candidate.runs:
            rate = tokens_per_s_per_gpu(spec, prediction.step_time_s)
            yield -expected_rate(rate, prediction.p_oom), position, candidate

    def _may_fit(self, spec: RunSpec, variant_index: int) -> bool:
        """Whether the layout may fit with some ZeRO stage; where gradients are reduced during backward, stage 3 needs least."""
        smallest = replace(spec.layout, zero_stage=3)
        return spec.layout.dp_overlap == "off" or all(
            self._fits(spec, replace(smallest, recompute=recompute), variant_index)
            for recompute in ("full", spec.layout.recompute)
        )

    def _fits(self, spec: RunSpec, layout: Layout, variant_index: int) -> bool:
        """Whether the first and the last rank of a layout's pipeline fit."""
        if (layout, variant_index) not in self._fits_by_layout:
            occupancy = self.cell_plan.predictor.smallest_occupancy(replace(spec, layout=layout))
            self._fits_by_layout[layout, variant_index] = self._is_acceptable(occupancy)
        return self._fits_by_layout[layout, variant_index]

    def _is_acceptable(self, occupancy: Occupancy) -> bool:
        if occupancy.p_oom <= self.max_p_oom and occupancy.memory_share <= self.max_memory_share:
            return True
        self.min_bytes = min(self.min_bytes, occupancy.peak_bytes)
        self.fits_without_reserve |= occupancy.p_oom <= self.max_p_oom
        return False


def cell_search(
    config: SweepConfig,
    shape: ModelShape,
    cell: CellKey,
    *,
    max_p_oom: float = ADVISED_P_OOM,
    max_memory_share: float = 1.0,
) -> Search:
    """The search for the best runs of a cell."""
    peak = config.hardware.peak(cell.precision, cell.nodes, None, os.cpu_count() or 1)
    cell_plan = CellPlan(config=config, shape=shape, cell=cell, peak=peak)
    max_p_oom = min(max_p_oom, config.max_p_oom)
    return Search(cell_plan=cell_plan, max_p_oom=max_p_oom, max_memory_share=max_memory_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The best runs of a cell, or why there is none."""

    shape: ModelShape
    cell: CellKey
    runs: tuple[Candidate, ...]
    """The best first. Where no run has room for the reserve of its allocator, those that are likely to fit without it."""
    reason: str | None
    """Why there is no run, and what would help."""
    is_refused: bool
    """Whether there is no run for another reason than memory."""


@dataclass(slots=True)
class Remedy:
    """Finds the best run on other nodes or with other values of axes, and looks for each only once."""

    best: dict[tuple[CellKey, tuple[tuple[str, Any], ...]], Candidate | None] = field(default_factory=dict)
    """Cell and values of axes -> the best run that is advised; None where none is."""

    def __call__(
        self, config: SweepConfig, shape: ModelShape, nodes: int, values: dict[str, Any], max_p_oom: float
    ) -> Candidate | None:
        """The best run on this number of nodes where axes have these values only; None where none is advised."""
        layout = {**config.axes.layout, **{name: (value,) for name, value in values.items()}}
        axes = replace(config.axes, nodes=(nodes,), layout=layout)
        changed_config = replace(config, axes=axes, models=(shape,))
        key = next(planned_cells(changed_config))[1], tuple(values.items())
        if key not in self.best:
            runs, _ = _advised(changed_config, shape, key[0], max_p_oom=max_p_oom)
            self.best[key] = next(iter(runs), None)
        return self.best[key]


def recommendations(config: SweepConfig, count: int) -> list[Recommendation]:
    """The `count` best runs of each cell, in the order of the cells; two cores look at half of the cells each."""
    cells_by_group = defaultdict[tuple[object, ...], list[tuple[ModelShape, CellKey]]](list)
    cells = [*planned_cells(config)]
    for shape, cell in cells:
        cells_by_group[cell._replace(nodes=0)].append((shape, cell))
    with process_map(len(cells_by_group)) as map_groups:
        recommend_group = partial(_group_recommendations, config, count)
        groups_of_recommendations = map_groups(recommend_group, cells_by_group.values())
        by_cell = {advice.cell: advice for advice in chain.from_iterable(groups_of_recommendations)}
    return [by_cell[cell] for _, cell in cells]


def _group_recommendations(
    config: SweepConfig, count: int, cells: Sequence[tuple[ModelShape, CellKey]]
) -> list[Recommendation]:
    """The recommendations for cells that differ in their nodes alone, the most nodes first: fewer may advise them."""
    remedy = Remedy()
    return [recommendation(config, count, shape, cell, remedy) for shape, cell in reversed(cells)]


def recommendation(
    config: SweepConfig, count: int, shape: ModelShape, cell: CellKey, remedy: Remedy | None = None
) -> Recommendation:
    """The `count` best runs of a cell."""
    runs, search = _advised(config, shape, cell, count)
    remedy = remedy or Remedy()
    remedy.best[cell, ()] = next(iter(runs), None)
    reason = None if runs else _why_none(config, search, remedy)
    is_refused = not runs and search.min_bytes == inf
    return Recommendation(shape=shape, cell=cell, runs=tuple(runs), reason=reason, is_refused=is_refused)


def _advised(
    config: SweepConfig, shape: ModelShape, cell: CellKey, count: int = 1, *, max_p_oom: float = ADVISED_P_OOM
) -> tuple[list[Candidate], Search]:
    """The `count` best of the runs that `candidate.advised` gives for the cell, and the search that met all reasons."""
    search = cell_search(config, shape, cell, max_p_oom=max_p_oom)
    runs = search.best(count)
    if not runs and search.fits_without_reserve:
        runs = cell_search(config, shape, cell, max_p_oom=max_p_oom, max_memory_share=inf).best(count)
    return runs, search


def _why_none(config: SweepConfig, search: Search, remedy: Remedy) -> str:
    cell_plan = search.cell_plan
    shape, cell, limit_gib = cell_plan.shape, cell_plan.cell, config.hardware.mem_bytes / GIB
    if search.min_bytes < inf:
        is_strict = config.max_p_oom < ADVISED_P_OOM
        if likely_runs := is_strict and _advised(replace(config, max_p_oom=1.0), shape, cell)[0]:
            p_oom_text = f"the best layout has {likely_runs[0].prediction.p_oom:.2g}"
            return f"no layout has a P(OOM) of at most max_p_oom={config.max_p_oom:g}; {p_oom_text}: use max_p_oom={ADVISED_P_OOM}"
        changes = " or ".join(remedies(cell_sweep(config, cell), shape, cell.nodes, search.max_p_oom, remedy))
        problem = f"no layout is likely to fit into {limit_gib:.4g} GiB; a rank needs at least {search.min_bytes / GIB:,.1f} GiB with the allocator's reserve"
        return f"{problem}; try {changes or 'a smaller model'}"
    if search.rejection:
        return f"no layout can run: {search.rejection}; change the axes or the model"
    workload = replace(config.workload, seq_len=cell.seq_len, gbs=cell.gbs)
    axes = replace(config.axes, nodes=(cell.nodes,))
    return f"no candidate: {why_none(axes, config.hardware.gpus_per_node, workload)}; choose divisors"
