"""Recommends the best groups of similar runs of each cell of a sweep, or says why it has none and what would help."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from types import MappingProxyType

from ultrabench.column import BYTES, NUMBER, capacity_text
from ultrabench.model_shape import ModelShape
from ultrabench.sweep.best_runs import Search, advised_groups, advised_run, expected_rate_of
from ultrabench.sweep.candidate import Candidate, CellKey
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.grid import why_none
from ultrabench.sweep.plan import cell_sweep, planned_cells, process_map
from ultrabench.sweep.predict.predict import ADVISED_P_OOM
from ultrabench.sweep.remedy import Remedies
from ultrabench.sweep.similar_layouts import Group
from ultrabench.sweep.untrained import axes_advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The best groups of similar runs of a cell, or why there is no run."""

    shape: ModelShape
    cell: CellKey
    groups: tuple[Group, ...]
    """The best groups of similar runs, the best first. Where no run has room for the reserve of its allocator, of those
    that are likely to fit without it."""
    reason: str | None
    """Why there is no run, and what would help."""
    is_refused: bool
    """Whether there is no run for another reason than memory."""
    other_batch: "OtherBatch | None" = None
    """A batch of nearly the same size that is clearly faster; None where none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherBatch:
    """The best run of a cell with another batch of nearly the same size."""

    run: Candidate
    speedup: float
    """Its tokens/s/GPU divided by those of the best run of the cell, minus 1."""


MAX_BATCH_CHANGE = 0.1
"""Largest difference of another batch, as a part of the batch that was asked for."""
MIN_BATCH_SPEEDUP = 0.05
"""Speedup from which another batch is named."""


def recommendations(
    config: SweepConfig, count: int, short_keys: Mapping[str, str] = MappingProxyType({})
) -> list[Recommendation]:
    """The `count` best groups of each cell, in the order of the cells; two cores look at half of the cells each.

    Args:
        short_keys: full key of each override that the user wrote with a short key -> that key, for remedies.
    """
    cells_by_group = defaultdict[tuple[object, ...], list[tuple[ModelShape, CellKey]]](list)
    cells = [*planned_cells(config)]
    for shape, cell in cells:
        cells_by_group[cell._replace(nodes=0)].append((shape, cell))
    with process_map(len(cells_by_group)) as map_groups:
        recommend_group = partial(_group_recommendations, config, count, {**short_keys})
        groups_of_recommendations = map_groups(recommend_group, cells_by_group.values())
        by_cell = {advice.cell: advice for advice in chain.from_iterable(groups_of_recommendations)}
    return [by_cell[cell] for _, cell in cells]


def _group_recommendations(
    config: SweepConfig,
    count: int,
    short_keys: Mapping[str, str],
    cells: Sequence[tuple[ModelShape, CellKey]],
) -> list[Recommendation]:
    """The recommendations for cells that differ in their nodes alone, the most nodes first: fewer may advise them."""
    remedies = Remedies(short_keys=short_keys)
    return [recommendation(config, count, shape, cell, remedies) for shape, cell in reversed(cells)]


def recommendation(
    config: SweepConfig, count: int, shape: ModelShape, cell: CellKey, remedies: Remedies | None = None
) -> Recommendation:
    """The `count` best groups of a cell."""
    groups, search = advised_groups(config, shape, cell, count)
    best = groups[0][0] if groups else None
    remedies = Remedies() if remedies is None else remedies
    remedies.best[cell, ()] = best
    reason = None if best else _why_none(config, search, remedies)
    is_refused = best is None and search.min_bytes == inf
    return Recommendation(
        shape=shape,
        cell=cell,
        groups=tuple(groups),
        reason=reason,
        is_refused=is_refused,
        other_batch=_other_batch(config, shape, cell, best) if best else None,
    )


def _other_batch(config: SweepConfig, shape: ModelShape, cell: CellKey, best: Candidate) -> OtherBatch | None:
    """The best run with a batch that more layouts can divide, if it is clearly faster than the best of the cell."""
    gbs = rounder_batch(cell.gbs, cell.nodes * config.hardware.gpus_per_node)
    run = None if gbs == cell.gbs else advised_run(config, shape, cell._replace(gbs=gbs))
    speedup = expected_rate_of(run) / expected_rate_of(best) - 1 if run else 0.0
    return OtherBatch(run=run, speedup=speedup) if run and speedup >= MIN_BATCH_SPEEDUP else None


def rounder_batch(gbs: int, num_gpus: int) -> int:
    """The batch nearest to `gbs` that is a multiple of the GPUs or, if none is near, of a large power of two."""
    powers_of_two = (1 << n for n in reversed(range(gbs.bit_length())))
    for divisor in (num_gpus, *powers_of_two):
        multiple = max(1, round(gbs / divisor)) * divisor
        if abs(multiple - gbs) <= MAX_BATCH_CHANGE * gbs:
            return multiple
    return gbs


def _why_none(config: SweepConfig, search: Search, remedies: Remedies) -> str:
    cell_plan = search.cell_plan
    shape, cell = cell_plan.shape, cell_plan.cell
    if search.min_bytes < inf:
        is_strict = config.max_p_oom < ADVISED_P_OOM
        if likely_run := is_strict and advised_run(replace(config, max_p_oom=1.0), shape, cell):
            p_oom_text = f"the best layout has {NUMBER.bare_text(likely_run.prediction.p_oom)}"
            return (
                f"no layout has a P(OOM) of at most max_p_oom={config.max_p_oom:g}; {p_oom_text}: "
                f"use max_p_oom={ADVISED_P_OOM}"
            )
        changes = " or ".join(remedies.texts(cell_sweep(config, cell), shape, cell.nodes, search.max_p_oom))
        problem = f"no layout is likely to fit into {capacity_text(config.hardware.mem_bytes)}"
        extent = (
            "with the allocator's reserve" if search.state_fits else "for optimizer state and gradients alone"
        )
        least_text = f"a rank needs at least {BYTES.brief_text(search.min_bytes)} {extent}"
        if search.min_bytes < config.hardware.mem_bytes and not search.fits_without_reserve:
            least_text += f", and P(OOM) is above {search.max_p_oom:g}"
        return f"{problem}; {least_text}; try {changes or 'a smaller model'}"
    if search.rejection:
        return f"no layout can run: {search.rejection}{axes_advice(config.kernel, shape)}"
    workload = replace(config.workload, seq_len=cell.seq_len, gbs=cell.gbs)
    axes = replace(config.axes, nodes=(cell.nodes,))
    return f"no candidate: {why_none(axes, config.hardware.gpus_per_node, workload)}; choose divisors"
