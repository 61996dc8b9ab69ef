"""Finds the best runs of a cell by branch and bound: the first places of a plan without predicting all its candidates.

It begins with sets of layouts that differ in recomputation and ZeRO alone. No layout of a set is faster than its bound,
the step time without what these add, and none needs less memory than the one that recomputes and shards all. Layouts of
other micro-batches are not compared: one that accumulates no gradients may need less than one of smaller micro-batches.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import TypeVar

from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.candidate import Candidate, CellKey, expected_rate
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.grid import DERIVED_AXES, broken_rules, shards_of
from ultrabench.sweep.plan import CellPlan, rejections
from ultrabench.sweep.predict.predict import ADVISED_P_OOM, Occupancy
from ultrabench.sweep.refusals import model_refusal, refusal
from ultrabench.sweep.similar_layouts import SIMILAR_SPEED, Group, groups_of

Branch = Candidate | Callable[[], Iterable["Entry"]]
"""A run with its rate, or a function that splits a set of runs into smaller sets or single runs."""
Entry = tuple[float, tuple[int | str, ...], Branch]
"""Entry of a heap: minus the bound of the expected rate, the position of the layout in the grid, and the branch."""


def tokens_per_s_per_gpu(spec: RunSpec, step_time_s: float) -> float:
    """The tokens/s/GPU of a run with this step time."""
    return spec.tokens_per_step / spec.layout.world_size / step_time_s


def expected_rate_of(run: Candidate) -> float:
    """The expected rate of a run that is not measured, by which such runs are ranked."""
    rate = tokens_per_s_per_gpu(run.spec, run.prediction.step_time_s)
    return expected_rate(rate, run.prediction.p_oom)


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
    state_fits: bool = True
    """Whether a rank has room for its share of gradients and optimizer state; if not,
    `min_bytes` is that share alone."""
    fits_without_reserve: bool = False
    """Whether a layout that was rejected for its memory fits without the reserve of its allocator."""
    _fits_by_layout: dict[tuple[Layout, int], bool] = field(default_factory=dict)
    """Layout and index of the variant -> whether it fits."""

    def best(self) -> list[Candidate]:
        """The best run that is advised; none where none is."""
        return [*islice(_popped_runs(self._heap(), 0.0), 1)]

    def best_groups(self, count: int) -> list[Group]:
        """The `count` best groups of similar runs that are advised, in the order of their best runs;
        fewer if there are fewer.
        """
        heap = self._heap()
        runs = [*islice(_popped_runs(heap, 0.0), 1)]
        groups, min_rate = list[Group](), inf
        while runs:
            # A run with a high P(OOM) waits in the heap behind slower ones, but may be similar to a faster one.
            waiting_runs = (branch for _, _, branch in sorted(heap) if isinstance(branch, Candidate))
            groups = [*islice(groups_of([*runs, *waiting_runs]), count)]
            needed_rate = min(_least_rate(group[0]) for group in groups)
            if heap and len(groups) < count:
                needed_rate = min(needed_rate, (1 - SIMILAR_SPEED) * -heap[0][0])
            if not heap or needed_rate >= min_rate:
                break
            min_rate = needed_rate
            runs += _popped_runs(heap, min_rate)
        return groups

    def _heap(self) -> list[Entry]:
        """The heap with which a search begins."""
        heap = [*self._first_entries()]
        heapify(heap)
        return heap

    def _first_entries(self) -> Iterator[Entry]:
        """All sets that can hold a layout."""
        config, cell, axes = self.cell_plan.config, self.cell_plan.cell, self.cell_plan.config.axes
        fastest_values = {**axes.layout, "recompute": ("none",), "zero_stage": (0,), "dp_shard": ("all",)}
        gas_values, num_gpus = axes.layout.get("gas"), cell.nodes * config.hardware.gpus_per_node
        if axes.listed:
            yield from self._listed_entries()
            return
        least = self.cell_plan.predictor.least_occupancy(self.cell_plan.shape, num_gpus)
        state_fits = least is None or self._is_acceptable(least)
        self.min_bytes = inf  # until a layout is rejected for its memory
        all_layouts = self.cell_plan.layouts(replace(axes, layout=fastest_values))
        for index, layout in enumerate(all_layouts):
            if gas_values and layout.gas not in gas_values:
                continue
            for variant_index, spec in enumerate(self.cell_plan.specs(layout)):
                if reason := self._rejection_of_all(spec):
                    self.rejection = self.rejection or reason
                    continue
                if least and not state_fits:  # no layout helps, and at least this one can run otherwise
                    self.state_fits, self.min_bytes = False, least.peak_bytes
                    return
                split_set = partial(self._split_by_recomputation, spec, index, variant_index)
                yield -self._rate_bound(spec), (0, index, variant_index), split_set

    def _listed_entries(self) -> Iterator[Entry]:
        """The runs of the layouts that the sweep lists, which need no bounds."""
        for index, layout in enumerate(self.cell_plan.layouts()):
            for variant_index, spec in enumerate(self.cell_plan.specs(layout)):
                if rejection := next(rejections(self.cell_plan.config, spec), None):
                    self.rejection = self.rejection or rejection[1]
                else:
                    yield from self._predicted_entry(spec, (0, index, variant_index))

    def _rejection_of_all(self, spec: RunSpec) -> str | None:
        """Why no layout of the set can run; None where another value of recomputation or ZeRO may help."""
        for _, reason in broken_rules(spec.layout, spec.shape):
            return reason
        hardware, kernel = self.cell_plan.config.hardware, spec.kernel
        if not kernel.trains_itself:  # it may lack exactly these values
            return model_refusal(kernel, spec.shape)
        return refusal(kernel, spec.layout, spec.shape, spec.workload.seq_len, hardware.device, hardware)

    def _split_by_recomputation(self, spec: RunSpec, index: int, variant_index: int) -> Iterator[Entry]:
        """The parts of a set by recomputation, if the memory of one that computes all again may suffice."""
        if not self._may_fit(spec, "full", variant_index):
            return
        for recompute in {*self.cell_plan.config.axes.layout["recompute"]}:
            recomputing_spec = replace(spec, layout=replace(spec.layout, recompute=recompute))
            split_part = partial(self._split_by_sharding, recomputing_spec, index, variant_index)
            yield -self._rate_bound(recomputing_spec), (0, index, variant_index, recompute), split_part

    def _rate_bound(self, spec: RunSpec) -> float:
        """A rate that no ZeRO stage of the layout exceeds."""
        times = self.cell_plan.predictor.step_time(spec, ())
        return tokens_per_s_per_gpu(spec, times.total - times.dp - times.optimizer)

    def _split_by_sharding(self, spec: RunSpec, index: int, variant_index: int) -> Iterator[Entry]:
        """The runs of a part of a set, if memory may suffice, with the bounds of their rates."""
        axes, layout = self.cell_plan.config.axes.layout, spec.layout
        free_axes = [axis for axis in axes if axis not in DERIVED_AXES]
        ranks_in_node = max(1, spec.gpus_per_node // layout.tp)
        num_copies = layout.dp * layout.cp
        may_fit = self._may_fit(spec, layout.recompute, variant_index)
        for zero_stage in {*axes["zero_stage"]} if may_fit else ():
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
            yield -expected_rate_of(candidate), position, candidate

    def _may_fit(self, spec: RunSpec, recompute: str, variant_index: int) -> bool:
        """Whether the layout may fit with some ZeRO stage and this recomputation.

        Where gradients are reduced during backward, stage 3 needs least.
        """
        smallest = replace(spec.layout, zero_stage=3, recompute=recompute)
        return spec.layout.dp_overlap == "off" or self._fits(spec, smallest, variant_index)

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


def _popped_runs(heap: list[Entry], min_rate: float) -> Iterator[Candidate]:
    """Takes the runs from a heap in their order, until nothing in it can have an expected rate of `min_rate`."""
    while heap and -heap[0][0] >= min_rate:
        branch = heappop(heap)[2]
        if isinstance(branch, Candidate):
            yield branch
            continue
        for entry in branch():
            heappush(heap, entry)


def _least_rate(best: Candidate) -> float:
    """The rate down to which a search has to look for the runs of a group and for better ones than its best."""
    similar_rate = (1 - SIMILAR_SPEED) * tokens_per_s_per_gpu(best.spec, best.prediction.step_time_s)
    return min(similar_rate, expected_rate_of(best))


_Item = TypeVar("_Item")


def _advised(
    config: SweepConfig,
    shape: ModelShape,
    cell: CellKey,
    max_p_oom: float,
    search_for: Callable[[Search], list[_Item]],
) -> tuple[list[_Item], Search]:
    """What a search gives of the runs that `candidate.advised` gives for the cell,
    and the search that met all reasons.
    """
    search = cell_search(config, shape, cell, max_p_oom=max_p_oom)
    items = search_for(search)
    if not items and search.fits_without_reserve:
        items = search_for(cell_search(config, shape, cell, max_p_oom=max_p_oom, max_memory_share=inf))
    return items, search


def advised_run(
    config: SweepConfig, shape: ModelShape, cell: CellKey, *, max_p_oom: float = ADVISED_P_OOM
) -> Candidate | None:
    """The best of the runs that `candidate.advised` gives for the cell; None where there is none."""
    runs, _ = _advised(config, shape, cell, max_p_oom, Search.best)
    return next(iter(runs), None)


def advised_groups(
    config: SweepConfig, shape: ModelShape, cell: CellKey, count: int
) -> tuple[list[Group], Search]:
    """The `count` best groups of these runs, and the search that met all reasons why layouts cannot run."""
    return _advised(config, shape, cell, ADVISED_P_OOM, lambda search: search.best_groups(count))
