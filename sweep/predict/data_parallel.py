"""The time of the collectives of data parallelism in one optimizer step; docs/design/prediction.md derives the terms."""

import math
from typing import NamedTuple

from ultrabench.layout import Layout
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.time_constants import TimeConstants

BACKWARD_SHARE = 2 / 3
"""Share of backward in the time of a pass, forward and backward of a micro-batch."""


class ParamGroup(NamedTuple):
    """Parameters of a rank that the same ranks share; those of experts are apart from the rest."""

    params: float
    ranks: int
    """Number of ranks that sum their gradients."""
    shards: int
    """Number of these among which a ZeRO stage shards."""
    stride: int
    """Distance of neighbours among them."""


def param_groups(layout: Layout, params: float, expert_params: float) -> tuple[ParamGroup, ...]:
    """The groups of a rank's parameters; `expert_params` are those of the experts that it holds."""
    groups = (ParamGroup(params, layout.dp * layout.cp, layout.zero_shards, layout.tp),)
    if not expert_params:
        return groups
    ranks = layout.expert_shards * layout.expert_copies
    return *groups, ParamGroup(expert_params, ranks, layout.expert_shards, layout.ep)


def data_parallel(
    layout: Layout, groups: tuple[ParamGroup, ...], word_bytes: int, links: Network, c: TimeConstants
) -> tuple[float, float, float]:
    """Seconds of the collectives of data parallelism in a step, and what hides them.

    The second value is the number of passes, forward and backward of a micro-batch, beside which they are made; the
    third one the share of a pass that hides them.

    Args:
        groups: what `param_groups` returns.

    Below ZeRO-1 one all-reduce sums the gradients. Above, they are scattered among the shards and their parts
    summed over the replicas, and the parameters are gathered, more than once in ZeRO-3.
    """
    gas, stage = layout.gas, layout.zero_stage
    times = [_group_s(layout, group, word_bytes, links, c) for group in groups if group.ranks > 1]
    if not times:
        return 0.0, 1.0, 0.0
    total_s, gathers_s = map(sum, zip(*times, strict=True))
    if stage == 0:
        passes, overlap = BACKWARD_SHARE, 0.0 if links.slow else c.dp_overlap
    else:
        reduces, _ = reduces_and_gathers(layout)
        passes, overlap = float(gas if stage == 3 or reduces > 1 else 1), c.zero_overlap
    if layout.dp_overlap == "off":  # only gathers of parameters are left to hide; an estimate
        overlap *= gathers_s / total_s
    return total_s, passes, overlap


def _group_s(
    layout: Layout, group: ParamGroup, word_bytes: int, links: Network, c: TimeConstants
) -> tuple[float, float]:
    """Seconds of all collectives of a group of parameters in a step, and of the gathers among them."""
    params, ranks, shards, group_stride = group
    gradients = c.gradient_bytes * params

    def summed(size: float, ranks: int, stride: int = group_stride) -> float:
        return _crossing_s(size, ranks, stride, links, c.dp_probe, links.allreduce_bytes_per_s, c)

    if layout.zero_stage == 0:
        total_s = 2 * summed(gradients, ranks)
        if c.dp_bucket_bytes and ranks * group_stride > links.gpus_per_node:
            hops = c.dp_bucket_hops * ranks / math.sqrt(_share(group_stride, links))
            total_s += gradients / c.dp_bucket_bytes * hops * links.allreduce_hop_s
        return total_s, 0.0
    reduces, gathers = reduces_and_gathers(layout)
    probe, busbw = c.dp_gather_probe, links.allgather_bytes_per_s
    gather_s = _crossing_s(word_bytes * params, shards, group_stride, links, probe, busbw, c)
    total_s = reduces * c.zero_crossings * summed(gradients, shards) + gathers * gather_s
    if shards < ranks:
        total_s += 2 * summed(gradients / shards, ranks // shards, group_stride * shards)
    return total_s, gathers * gather_s


def reduces_and_gathers(layout: Layout) -> tuple[int, int]:
    """How often a step reduces gradients and gathers parameters with a ZeRO stage."""
    stage, gas = layout.zero_stage, layout.gas
    if layout.pp > 1:  # a backward keeps its parameters for the next forward
        return 1, 1 + gas if stage == 3 else 1
    return gas if stage >= 2 else 1, 2 * gas if stage == 3 else 1


def _crossing_s(
    size: float, ranks: int, stride: int, links: Network, probe: float, busbw: float, c: TimeConstants
) -> float:
    """Seconds in which `size` bytes cross the links once, in a ring of `ranks` ranks that are `stride` apart.

    A ring in a node has the links of its GPUs. One between nodes has the share of the node's links that its
    ranks on the node are of all, and adds `probe` of the time that the probe's rate `busbw` gives.
    """
    moved_bytes = (ranks - 1) / ranks * size
    if ranks * stride <= links.gpus_per_node:
        return moved_bytes / (links.link_bytes_per_s * c.tp_link_efficiency)
    share = _share(stride, links)
    node_bytes_per_s = links.node_link_bytes_per_s * links.gpus_per_node * c.dp_link_efficiency
    return moved_bytes / (node_bytes_per_s * share) + probe * moved_bytes / (busbw * math.sqrt(share))


def _share(stride: int, links: Network) -> float:
    """The part of a node's GPUs that are in one group whose ranks are `stride` apart; others have groups of their own."""
    return max(1, links.gpus_per_node // stride) / links.gpus_per_node
