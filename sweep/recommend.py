"""Finds the best runs of a cell by branch and bound: the first places of a plan without predicting all its candidates.

A group holds the layouts that differ in recomputation and ZeRO alone. No layout of it is faster than its bound, the
step time without what these add, and none needs less memory than the one that recomputes and shards all.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from ultrabench.hardware import GIB
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.candidate import Candidate, CellKey
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.grid import DERIVED, broken_rules, layouts, shards_of, why_none
from ultrabench.sweep.plan import CellPlan, cell_plan, narrowed, planned_cells, rejections
from ultrabench.sweep.predict.predict import ADVISED_P_OOM, Prediction
from ultrabench.sweep.refusals import refusal
from ultrabench.sweep.remedy import remedies

Node = Candidate | Callable[[], Iterable["Entry"]]
"""A run whose rate is exact, or what finds the entries of the runs that are still together in one."""
Entry = tuple[float, tuple[int | str, ...], Node]
"""The bound of the expected rate, negative, the place of the layout in the grid, and the node."""


def expected_rate(run: Candidate) -> float:
    """The predicted tokens/s/GPU times the probability that the run fits into memory."""
    prediction = run.prediction
    return rate(run.spec, prediction.step_time_s) * (1 - prediction.p_oom)


def rate(spec: RunSpec, step_time_s: float) -> float:
    """The tokens/s/GPU of a run with this step time."""
    return spec.tokens_per_step / spec.layout.world_size / step_time_s


@dataclass(slots=True, kw_only=True)
class Search:
    """The search for the best runs of one cell."""

    planned: CellPlan
    most_p_oom: float
    """P(OOM) above which no run is taken."""
    most_share: float = 1.0
    """Share of a GPU's memory, the reserve of its allocator included, above which no run is taken."""
    reason: str | None = None
    """Why a layout cannot run, of the last one that a rule or the kernel rejected."""
    least_bytes: float = inf
    """The least memory that a layout needs among those that the search rejected for their memory."""

    def best(self, count: int = 1) -> list[Candidate]:
        """The `count` best runs that are advised, in the order of the plan; fewer where fewer are advised."""
        heap, runs = [*self._groups()], list[Candidate]()
        heapify(heap)
        while heap and len(runs) < count:
            node = heappop(heap)[2]
            if isinstance(node, Candidate):
                runs.append(node)
                continue
            for entry in node():
                heappush(heap, entry)
        return runs

    def _groups(self) -> Iterator[Entry]:
        """All groups that can hold a layout."""
        planned, cell, axes = self.planned, self.planned.cell, self.planned.config.axes
        least = {**axes.layout, "recompute": ("none",), "zero_stage": (0,), "dp_shard": ("all",)}
        per_node, listed = planned.config.hardware.gpus_per_node, axes.layout.get("gas")
        of_groups = layouts(
            replace(axes, layout=least), planned.shape, cell.nodes * per_node, per_node, cell.gbs
        )
        for index, layout in enumerate(of_groups):
            if listed and layout.gas not in listed:
                continue
            for variant, spec in enumerate(planned.specs(layout)):
                if reason := self._reason_of_group(spec):
                    self.reason = reason
                    continue
                times = planned.predictor.step_time(spec, ())
                bound = rate(spec, times.total - times.dp - times.optimizer)
                yield -bound, (0, index, variant), partial(self._members, spec, index, variant)

    def _reason_of_group(self, spec: RunSpec) -> str | None:
        """Why no layout of the group can run; None where another value of recomputation or ZeRO may help."""
        for _, reason in broken_rules(spec.layout, spec.shape):
            return reason
        hardware, kernel = self.planned.config.hardware, spec.kernel
        if kernel.kind != "embedded":  # it may lack exactly these values
            return None
        return refusal(kernel, spec.layout, spec.shape, spec.workload.seq_len, hardware.device, hardware)

    def _members(self, spec: RunSpec, index: int, variant: int) -> Iterator[Entry]:
        """The runs of a group for which memory may suffice, with the bounds of their rates."""
        if not self._may_fit(spec):
            return
        axes, layout = self.planned.config.axes.layout, spec.layout
        free = [name for name in axes if name not in DERIVED]
        in_node = max(1, spec.gpus_per_node // layout.tp)
        for recompute in {*axes["recompute"]}:
            if not self._may_fit(spec, recompute):
                continue
            for stage in {*axes["zero_stage"]}:
                shards = (shards_of(word, layout.dp * layout.cp, in_node, stage) for word in axes["dp_shard"])
                for order, dp_shard in enumerate(dict.fromkeys(shards)):
                    member = replace(
                        spec, layout=replace(layout, recompute=recompute, zero_stage=stage, dp_shard=dp_shard)
                    )
                    if rejection := next(rejections(self.planned.config, member), None):
                        self.reason = rejection[1]
                        continue
                    place = (*(getattr(member.layout, name) for name in free), index, order, variant)
                    bound = rate(member, self.planned.predictor.step_time(member, ()).total)
                    yield -bound, place, partial(self._settled, member, place)

    def _settled(self, spec: RunSpec, place: tuple[int | str, ...]) -> Iterator[Entry]:
        """The run with its rate, if it is advised."""
        run = self.planned.candidate(spec)
        if self._may_be_taken(run.prediction) and run.runs:
            yield -expected_rate(run), place, run

    def _may_fit(self, spec: RunSpec, recompute: str = "full") -> bool:
        """Whether the layout of a group that shards all and recomputes so is advised."""
        least = replace(spec, layout=replace(spec.layout, recompute=recompute, zero_stage=3))
        return self._may_be_taken(self.planned.predictor.predict(least))

    def _may_be_taken(self, prediction: Prediction) -> bool:
        if prediction.p_oom <= self.most_p_oom and prediction.memory_share <= self.most_share:
            return True
        self.least_bytes = min(self.least_bytes, prediction.peak_mem_bytes)
        return False


def cell_search(
    config: SweepConfig,
    shape: ModelShape,
    cell: CellKey,
    *,
    most_p_oom: float = ADVISED_P_OOM,
    most_share: float = 1.0,
) -> Search:
    """The search for the best runs of a cell."""
    peak = config.hardware.peak(cell.precision, cell.nodes, None, os.cpu_count() or 1)
    planned = cell_plan(config, shape, cell, peak)
    return Search(planned=planned, most_p_oom=min(most_p_oom, config.max_p_oom), most_share=most_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The best runs of a cell, or why there is none."""

    shape: ModelShape
    cell: CellKey
    runs: tuple[Candidate, ...]
    """The best first. Where no run has room for the reserve of its allocator, those that are likely to fit without it."""
    reason: str | None
    """Why there is no run, and what would help."""


def recommendation(config: SweepConfig, count: int, shape: ModelShape, cell: CellKey) -> Recommendation:
    """The `count` best runs of a cell."""
    for most_share in (1.0, inf):
        search = cell_search(config, shape, cell, most_share=most_share)
        if runs := search.best(count):
            return Recommendation(shape=shape, cell=cell, runs=tuple(runs), reason=None)
    return Recommendation(shape=shape, cell=cell, runs=(), reason=_why_none(config, search))


def _why_none(config: SweepConfig, search: Search) -> str:
    planned = search.planned
    shape, cell, limit = planned.shape, planned.cell, config.hardware.mem_bytes / GIB
    if search.least_bytes < inf:
        remedy = " or ".join(remedies(narrowed(config, cell), shape, cell.nodes, search.most_p_oom, _best))
        needed = f"nothing is predicted to fit into {limit:.4g} GiB; a GPU needs at least {search.least_bytes / GIB:,.1f} GiB"
        return f"{needed}; what would fit: {remedy or 'a smaller model'}"
    workload = replace(config.workload, seq_len=cell.seq_len, gbs=cell.gbs)
    axes = replace(config.axes, nodes=(cell.nodes,))
    return search.reason or why_none(axes, config.hardware.gpus_per_node, workload)


def _best(
    config: SweepConfig, shape: ModelShape, nodes: int, values: dict[str, Any], most_p_oom: float
) -> Candidate | None:
    """The best run on this number of nodes where axes have these values only; None where none is advised."""
    axes = replace(config.axes, layout={**config.axes.layout, **{name: (of,) for name, of in values.items()}})
    of_nodes = replace(config, axes=replace(axes, nodes=(nodes,)))
    _, cell = next(planned_cells(replace(of_nodes, models=(shape,))))
    return next(iter(cell_search(of_nodes, shape, cell, most_p_oom=most_p_oom).best()), None)
