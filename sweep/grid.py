"""Enumerates the layouts of a sweep, and tells which of them cannot exist.

They are all combinations of the values of its axes that use all GPUs and make up the whole batch.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from math import gcd, lcm, prod
from typing import Any

from ultrabench.attention_type import KV_HEADS
from ultrabench.errors import ConfigError, counted
from ultrabench.layout import (
    AUTO,
    BATCH,
    DEGREES,
    DIVIDES,
    FOLLOWING,
    NEUTRAL,
    OTHER_DEGREES,
    SWEEP_VALUES,
    Layout,
    default_schedule,
    default_virtual_stages,
    details_of,
)
from ultrabench.model_shape import ModelShape
from ultrabench.run import Workload
from ultrabench.stages import split_stages
from ultrabench.sweep.config.sweep_config import Axes
from ultrabench.sweep.refusals import schedule_refusals

MAX_OF_AUTO = {"pp": 16, "mbs": 12, "ep": 64}
"""Axis -> the largest value that auto takes."""
MAX_COMBINATIONS = 1_000_000
"""Largest number of combinations of a sweep. With more, planning takes minutes and gigabytes."""
DERIVED_AXES = (FOLLOWING[-1], *(axis for axis in SWEEP_VALUES if axis not in ("pp", "mbs")))
"""Axes whose values in a layout depend on those of other axes."""

_DETAILS = {axis: [detail for detail in details_of(axis) if detail not in DERIVED_AXES] for axis in NEUTRAL}
"""Axis -> the axes that a sweep lists and that have no effect at its neutral value."""


def require_countable(
    axes: Axes, num_other_values: int, cells: Iterable[tuple[ModelShape, int, int, int]]
) -> None:
    """Raises when the axes have too many combinations.

    Combinations that do not use all GPUs, or do not make up the whole batch, do not count, as they cost nothing.

    Args:
        num_other_values: number of combinations of what a sweep varies beside layouts in each cell.
        cells: model, number of GPUs, GPUs of a node and global batch of each cell.

    Raises:
        ConfigError: the axes have more than MAX_COMBINATIONS combinations.
    """
    num_combinations = prod(len(axes.layout[axis]) for axis in DEGREES[1:])
    for shape, num_gpus, gpus_per_node, gbs in cells if num_combinations <= MAX_COMBINATIONS else ():
        for degree_by_axis, _, eps, value_lists in _degree_choices(axes, shape, num_gpus, gpus_per_node, gbs):
            num_schedules = len([*_pipelines(axes, shape, degree_by_axis["pp"], gbs)])
            num_choices = prod(map(len, (eps, axes.layout["dp_shard"], *value_lists.values())))
            num_combinations += num_schedules * num_choices * num_other_values
    if num_combinations > MAX_COMBINATIONS:
        num_values = {axis: len({*values}) for axis, values in axes.layout.items()}
        longest_axes = sorted(num_values, key=lambda axis: -num_values[axis])[:3]
        longest_text = ", ".join(
            f"sweep.{axis} ({counted(num_values[axis], 'value')})" for axis in longest_axes
        )
        rule = f"a sweep may have at most {MAX_COMBINATIONS:,}: narrow {longest_text}"
        raise ConfigError(f"the axes have over {MAX_COMBINATIONS:,} combinations; {rule}")


def layouts(axes: Axes, shape: ModelShape, num_gpus: int, gpus_per_node: int, gbs: int) -> Iterator[Layout]:
    """All different layouts of a model whose degrees multiply to `num_gpus`, with dp*mbs*gas = gbs.

    dp follows from the other degrees, and gas from gbs, dp and mbs. Structural rules are applied later.
    """
    for entry in axes.listed:
        entry_axes = Axes(nodes=axes.nodes, layout=entry.layout)
        gas_values = entry.layout.get("gas")
        for layout in layouts(entry_axes, shape, num_gpus, gpus_per_node, gbs):
            if not gas_values or layout.gas in gas_values:
                yield layout
    if axes.listed:
        return
    choices = _degree_choices(axes, shape, num_gpus, gpus_per_node, gbs)
    for degree_by_axis, ranks_in_node, eps, value_lists in choices:
        dp, pp, cp = (degree_by_axis[degree] for degree in ("dp", "pp", "cp"))
        for values in product(*value_lists.values()):
            value_by_axis = dict(zip(value_lists, values, strict=True))
            gas = gbs // (dp * value_by_axis["mbs"])
            shards = [
                shards_of(shard_value, dp * cp, ranks_in_node, value_by_axis["zero_stage"])
                for shard_value in axes.layout["dp_shard"]
            ]
            pipelines = _pipelines(axes, shape, pp, gas)
            for (schedule, virtual_stages), dp_shard, ep in dict.fromkeys(product(pipelines, shards, eps)):
                value_by_axis |= {"pp_schedule": schedule, "virtual_stages": virtual_stages}
                yield Layout(gas=gas, dp_shard=dp_shard, ep=ep, **degree_by_axis, **value_by_axis)


def _degree_choices(
    axes: Axes, shape: ModelShape, num_gpus: int, gpus_per_node: int, gbs: int
) -> Iterator[tuple[dict[str, Any], int, list[int], dict[str, list[Any]]]]:
    """Each combination of degrees that uses all GPUs.

    Yields:
        The degrees with dp; the number of groups of tp ranks on a node; the degrees of expert parallelism; and the
        values of each other axis that does not follow from others, of mbs those with which dp makes up the batch.
    """
    value_lists = {axis: sorted({*values}) for axis, values in axes.layout.items() if axis not in DERIVED_AXES} | {
        "pp": divisors(axes, "pp", num_gpus), "mbs": divisors(axes, "mbs", gbs)
    }  # fmt: skip
    degree_lists = [value_lists.pop(degree) for degree in DEGREES[1:]]
    for degrees in product(*degree_lists):
        dp, gpus_left = divmod(num_gpus, prod(degrees))
        if gpus_left or not dp:
            continue
        degree_by_axis = dict(zip(DEGREES, (dp, *degrees), strict=True))
        ranks_in_node = max(1, gpus_per_node // degree_by_axis["tp"])
        eps = _ep_values(axes, num_gpus // degree_by_axis["pp"], shape)
        mbs_values = [mbs for mbs in value_lists["mbs"] if gbs % (dp * mbs) == 0]
        yield degree_by_axis, ranks_in_node, eps, value_lists | {"mbs": mbs_values}


def divisors(axes: Axes, axis: str, whole: int) -> list[int]:
    """The values of pp or mbs that a sweep lists, sorted; auto means those up to MAX_OF_AUTO that divide `whole`,
    which is the number of GPUs or the global batch.
    """
    up_to_max = range(1, MAX_OF_AUTO[axis] + 1)
    values = (([n for n in up_to_max if whole % n == 0] if v == AUTO else [v]) for v in axes.layout[axis])
    return sorted({*chain(*values)})


def _ep_values(axes: Axes, num_ranks: int, shape: ModelShape) -> list[int]:
    """The degrees of expert parallelism that the axes ask for among the `num_ranks` ranks of a pipeline stage.

    auto means 1 and, for a model with experts, all powers of two that divide their number and the ranks, up to
    MAX_OF_AUTO.
    """
    largest_ep = gcd(shape.num_experts, num_ranks, MAX_OF_AUTO["ep"]) if shape.num_experts else 1
    powers_of_two = [2**n for n in range(largest_ep.bit_length())]
    return [*chain(*(powers_of_two if value == AUTO else [value] for value in axes.layout["ep"]))]


def shards_of(shard_value: int | str, num_copies: int, ranks_in_node: int, zero_stage: int) -> int:
    """The dp_shard of a layout for a value of the axis; `node` means all where that is the same."""
    if shard_value == "node":
        return ranks_in_node if zero_stage and ranks_in_node < num_copies else 0
    return 0 if shard_value == "all" else int(shard_value)


def _pipelines(axes: Axes, shape: ModelShape, pp: int, gas: int) -> Iterator[tuple[str, int]]:
    """The pairs of schedule and virtual stages that the axes ask for."""
    for schedule_name in axes.layout["pp_schedule"] if pp > 1 else (AUTO,):
        if schedule_name == "interleaved":
            for value in axes.layout["virtual_stages"]:
                all_values = _virtual_stages(shape, pp) if value == AUTO else (value,)
                yield from ((schedule_name, virtual_stages) for virtual_stages in all_values)
        else:
            schedule = default_schedule(pp, gas) if schedule_name == AUTO else schedule_name
            yield schedule, default_virtual_stages(schedule)


@lru_cache(maxsize=256)
def _virtual_stages(shape: ModelShape, pp: int) -> tuple[int, ...]:
    """The numbers of stages of a rank that auto stands for: with them, all stages have equally many layers, also if
    embedding and head count as one layer each.
    """
    num_layers = shape.num_hidden_layers
    divided = (num_layers, num_layers + 2)
    return tuple(v for v in range(2, num_layers // pp + 1) if any(n % (pp * v) == 0 for n in divided))


def broken_rules(layout: Layout, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Each structural rule that rejects a layout, with the reason why the layout cannot exist.

    The order matters, because a candidate is counted under the first rule that rejects it.
    """
    # Each tensor-parallel rank holds whole attention heads, and whole key/value heads or a copy of one.
    for size_name, size in _head_sizes(shape):
        size_text = f"{size_name}={size}"
        if size_name != KV_HEADS and size % layout.tp:
            yield "tp_divides_heads", f"tp={layout.tp} does not divide {size_text}"
        if size_name == KV_HEADS and size % layout.tp and layout.tp % size:
            yield "tp_fits_kv_heads", f"tp={layout.tp} neither divides {size_text} nor is a multiple of it"
    # ZeRO shards over dp*cp ranks; with only one such rank every stage would be the same as ZeRO-0.
    if layout.zero_stage > 0 and layout.dp * layout.cp == 1:
        yield "zero_needs_dp", f"zero_stage={layout.zero_stage} needs dp*cp > 1; dp=1, cp=1"
    # Shards and replicas fill dp*cp ranks; one shard would be ZeRO-0, and as many as ranks are all of them.
    num_copies, shards_text = layout.dp * layout.cp, f"dp_shard={layout.dp_shard}"
    if layout.dp_shard and layout.zero_stage == 0:
        yield "dp_shard_divides_dp", f"{shards_text} needs zero_stage > 0; zero_stage=0 shards nothing"
    if layout.dp_shard == 1:
        problem = f"{shards_text} shards nothing (dp_shard=node means 1 where tp={layout.tp} fills a node)"
        yield "dp_shard_divides_dp", f"{problem}; use a smaller tp or dp_shard=all"
    if layout.dp_shard == num_copies:
        yield "dp_shard_divides_dp", f"{shards_text} equals dp*cp={num_copies}; leave dp_shard out or use all"
    if layout.dp_shard and num_copies % layout.dp_shard:
        common_divisor = gcd(layout.dp_shard, num_copies)
        problem = f"{shards_text} does not divide dp*cp={num_copies} (dp={layout.dp}, cp={layout.cp})"
        advice = f"use dp_shard={common_divisor if 1 < common_divisor < num_copies else 'all'}"
        yield "dp_shard_divides_dp", f"{problem}; {advice}"
    if layout.dp_overlap == "off" and num_copies == 1:
        yield "dp_overlap_needs_dp", "dp_overlap=off needs dp*cp > 1; dp=1, cp=1"
    for axis, details in _DETAILS.items():
        if getattr(layout, axis) == NEUTRAL[axis]:
            for detail in details:
                if (value := getattr(layout, detail)) != NEUTRAL[detail]:
                    reason = f"{detail}={value} has no effect with {axis}={NEUTRAL[axis]}"
                    yield f"{detail}_needs_{axis}", reason
    for axis, degrees in DIVIDES.items():
        num_ranks, axis_value = prod(getattr(layout, degree) for degree in degrees), getattr(layout, axis)
        if num_ranks % axis_value:
            rule = f"{axis}_divides_{'_'.join(degrees)}"
            yield rule, f"{axis}={axis_value} does not divide {'*'.join(degrees)}={num_ranks}"
    yield from _broken_by_experts(layout, shape)
    if layout.gas < layout.pp - 1:
        yield "enough_micro_batches", next(schedule_refusals(layout))
    yield from _broken_by_stages(layout, shape)
    # Every pipeline stage holds at least one block.
    for stage in split_stages(shape, layout.num_stages, pp_layout=layout.pp_layout):
        if stage.num_blocks == 0:
            problem = f"{layout.num_stages_text} leaves stage {stage.index} empty ({shape.num_hidden_layers} layers)"
            yield "no_empty_stage", problem


def _broken_by_stages(layout: Layout, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Each structural rule that the layers of the stages break, with the reason."""
    if not (stage_layers := layout.stage_layers):
        return
    list_text = f"pp_layout={layout.pp_layout}"
    if len(stage_layers) != layout.num_stages:
        stages_text = f"pp*virtual_stages={layout.num_stages}"
        yield (
            "pp_layout_fits",
            f"{list_text} lists {counted(len(stage_layers), 'stage')}; {stages_text}: list one number for each",
        )
    elif sum(stage_layers) != shape.num_hidden_layers:
        layers_text = f"num_hidden_layers={shape.num_hidden_layers}"
        yield (
            "pp_layout_fits",
            f"{list_text} has {counted(sum(stage_layers), 'layer')}; {layers_text}: their sum must be that",
        )


@lru_cache(maxsize=256)  # a plan asks for those of a few models for each of its candidates
def _head_sizes(shape: ModelShape) -> tuple[tuple[str, int], ...]:
    """Name and value of each number of heads, or of groups of heads, that ranks of tp divide among them."""
    sizes_of_kinds = (kind.attention.tp_sizes().items() for kind in shape.kinds if kind.attention)
    return tuple(dict.fromkeys(chain(*sizes_of_kinds)))


def _broken_by_experts(layout: Layout, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Each structural rule of expert parallelism that rejects a layout, with the reason."""
    ep = layout.ep
    if ep > 1 and not shape.num_experts:
        yield "ep_needs_experts", f"ep={ep} needs a model with experts; {shape.name} has none"
    elif shape.num_experts % ep:
        # Each rank holds whole experts.
        yield "ep_divides_experts", f"ep={ep} does not divide num_experts={shape.num_experts}"
    # The ranks that share the experts fill shard groups, or a shard group fills several of them.
    num_sharing_ranks = layout.zero_shards * layout.tp
    if shape.num_experts and layout.zero_stage and num_sharing_ranks % ep and ep % num_sharing_ranks:
        shards_text = f"tp*{'dp_shard' if layout.dp_shard else 'dp*cp'}={num_sharing_ranks}"
        yield "ep_fits_dp_shard", f"ep={ep} neither divides {shards_text} nor is a multiple of it"


def why_none(axes: Axes, gpus_per_node: int, workload: Workload) -> str:
    """The reason why axes give no candidate, with the numbers that do not divide one another."""
    gpu_counts = [n * gpus_per_node for n in sorted({*axes.nodes})]
    values_by_axis = {
        **axes.layout,
        "pp": divisors(axes, "pp", lcm(*gpu_counts)),
        "mbs": divisors(axes, "mbs", workload.gbs),
    }
    degrees = {axis: values_by_axis[axis] for axis in DEGREES[1:]}
    other_products = [*map(prod, product(*degrees.values()))]
    dp_values = {gpus // other for gpus, other in product(gpu_counts, other_products) if gpus % other == 0}
    if not dp_values:

        def divides_none(axis: str) -> bool:
            return all(gpus % degree for gpus, degree in product(gpu_counts, degrees[axis]))

        axis = next(filter(divides_none, degrees), None)
        all_text = f"{OTHER_DEGREES} with {_values_text(degrees)}"
        factor_text = _values_text({axis: degrees[axis]}) if axis else all_text
        return f"{' or '.join(map(str, gpu_counts))} GPUs are not divisible by {factor_text}"
    dp_and_mbs = {"dp": sorted(dp_values)} | {"mbs": values_by_axis["mbs"]}
    parallel_sequences = [*map(prod, product(*dp_and_mbs.values()))]
    if all(workload.gbs % sequences for sequences in parallel_sequences):
        multiples = (max(1, round(workload.gbs / sequences)) * sequences for sequences in parallel_sequences)
        nearest_gbs = min(multiples, key=lambda gbs: abs(gbs - workload.gbs))
        return f"gbs={workload.gbs} is not divisible by dp*mbs with {_values_text(dp_and_mbs)} (gbs={nearest_gbs} is)"
    return f"gbs={workload.gbs} is not dp*mbs*gas with {_values_text(dp_and_mbs | {'gas': values_by_axis['gas']})}"


def _values_text(axes: Mapping[str, Sequence[int]]) -> str:
    """The values of axes as a text such as `tp=3, pp in [1, 2]`."""
    items = axes.items()
    return ", ".join(f"{axis}={v[0]}" if len(v) == 1 else f"{axis} in {[*v]}" for axis, v in items)


def without_candidates(
    axes: Axes, gpus_per_node: int, workload: Workload, candidates: Collection[tuple[int, Layout]]
) -> Iterator[tuple[str, int | str, str]]:
    """Each value of an axis that no candidate has, as the name of the axis, the value and the reason.

    Args:
        candidates: number of nodes and layout of each candidate.
    """
    for nodes in sorted({*axes.nodes} - {nodes for nodes, _ in candidates}):
        if axes.listed:
            yield "nodes", nodes, "no entry of sweep.layouts is for it"
            continue
        yield "nodes", nodes, why_none(replace(axes, nodes=(nodes,)), gpus_per_node, workload)
    for axis in () if axes.listed else (*DEGREES[1:], *BATCH, *details_of("pp")):
        listed = axes.layout.get(axis, ())
        for value in sorted({*listed} - {getattr(layout, axis) for _, layout in candidates} - {AUTO}):
            if axis == "pp_schedule":
                yield axis, value, "no candidate has pp > 1"
            elif axis != "virtual_stages":
                single_value = replace(axes, layout={**axes.layout, axis: (value,)})
                yield axis, value, why_none(single_value, gpus_per_node, workload)
            elif len(listed) > 1:  # a single value is usually the default, which only interleaved uses
                yield axis, value, "no candidate has pp_schedule=interleaved"
