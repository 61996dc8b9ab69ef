"""The time of the collectives of data parallelism in one optimizer step;
docs/design/prediction.md derives the terms.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ultrabench.layout import GroupAxes, Layout, crosses_nodes, ranks_in_node
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.time_constants import TimeConstants

BACKWARD_SHARE = 2 / 3
"""Share of backward in the time of a pass, forward and backward of a micro-batch."""


class ParamGroup(NamedTuple):
    """Parameters of a rank whose gradients the same ranks sum: those of its experts, or all others."""

    num_params: float
    """Number of these parameters that the rank holds."""
    num_ranks: int
    """Number of ranks that sum their gradients."""
    num_shards: int
    """Number of these among which a ZeRO stage shards."""
    axes: GroupAxes
    """Where these ranks are."""


def param_groups(
    layout: Layout, num_params: float, num_expert_params: float, rank_order: Sequence[str] | None = None
) -> tuple[ParamGroup, ...]:
    """The groups of a rank's parameters.

    Args:
        num_expert_params: the parameters of the experts that the rank holds.
        rank_order: how ranks are numbered, as for `Layout.stride`; the ranks of ep are neighbours in any order.
    """
    dp_axes = layout.group_axes("dp", "cp", rank_order=rank_order)
    groups = (ParamGroup(num_params, layout.dp * layout.cp, layout.zero_shards, dp_axes),)
    if not num_expert_params:
        return groups
    num_ranks = layout.expert_shards * layout.expert_copies
    expert_axes = ((num_ranks, layout.ep),)
    return *groups, ParamGroup(num_expert_params, num_ranks, layout.expert_shards, expert_axes)


def _split(axes: GroupAxes, num_ranks: int) -> tuple[GroupAxes, GroupAxes]:
    """The axes of a part of a group with its innermost `num_ranks` ranks, and those along which such parts lie."""
    inner: list[tuple[int, int]] = []
    outer: list[tuple[int, int]] = []
    for size, stride in axes:
        part = math.gcd(size, num_ranks)
        inner.append((part, stride))
        outer.append((size // part, stride * part))
        num_ranks //= part
    return tuple(inner), tuple(outer)


def dp_time_and_overlap(
    layout: Layout, groups: tuple[ParamGroup, ...], element_bytes: int, links: Network, c: TimeConstants
) -> tuple[float, float, float]:
    """Seconds of the collectives of data parallelism in a step, the passes that may hide them, and the hidden share.

    A pass is forward and backward of a micro-batch. The second value is the number of passes during which the
    collectives run, the third one the share of a pass behind which they can hide.

    Below ZeRO-1 one all-reduce sums the gradients. Above, a reduce-scatter gives each shard its part of the sum,
    an all-reduce adds the parts of the replicas, and all-gathers collect the parameters, several times in ZeRO-3.

    Args:
        groups: what `param_groups` returns.
        element_bytes: bytes of one parameter while it is gathered.
    """
    gas, zero_stage = layout.gas, layout.zero_stage
    group_times_s = [_group_s(layout, g, element_bytes, links, c) for g in groups if g.num_ranks > 1]
    if not group_times_s:
        return 0.0, 1.0, 0.0
    total_s, gathers_s = map(sum, zip(*group_times_s, strict=True))
    if zero_stage == 0:
        num_passes, hidden_share = BACKWARD_SHARE, 0.0 if links.slow else c.dp_overlap
    else:
        num_reduces, _ = num_reduces_and_gathers(layout)
        num_passes, hidden_share = float(gas if zero_stage == 3 or num_reduces > 1 else 1), c.zero_overlap
    if layout.dp_overlap == "off":  # only gathers of parameters are left to hide; an estimate
        hidden_share *= gathers_s / total_s
    return total_s, num_passes, hidden_share


def _group_s(
    layout: Layout, group: ParamGroup, element_bytes: int, links: Network, c: TimeConstants
) -> tuple[float, float]:
    """Seconds of all collectives of a group of parameters in a step, and of the gathers among them."""
    num_params, num_ranks, num_shards, axes = group
    grad_bytes, (shard_axes, replica_axes) = c.gradient_bytes * num_params, _split(axes, num_shards)

    def sum_s(num_bytes: float, num_ranks: int, axes: GroupAxes) -> float:
        return _transfer_s(num_bytes, num_ranks, axes, links, (c.dp_probe, links.allreduce_bytes_per_s), c)

    if layout.zero_stage == 0:
        total_s = 2 * sum_s(grad_bytes, num_ranks, axes)
        if c.dp_bucket_bytes and crosses_nodes(axes, links.nvlink_gpus):
            bucket_hops = c.dp_bucket_hops * num_ranks / math.sqrt(_node_share(axes, links))
            total_s += grad_bytes / c.dp_bucket_bytes * bucket_hops * links.allreduce_hop_s
        return total_s, 0.0
    num_reduces, num_gathers = num_reduces_and_gathers(layout)
    probe = c.dp_gather_probe, links.allgather_bytes_per_s
    gather_s = _transfer_s(element_bytes * num_params, num_shards, shard_axes, links, probe, c)
    total_s = (
        num_reduces * c.zero_crossings * sum_s(grad_bytes, num_shards, shard_axes) + num_gathers * gather_s
    )
    if num_shards < num_ranks:
        total_s += 2 * sum_s(grad_bytes / num_shards, num_ranks // num_shards, replica_axes)
    return total_s, num_gathers * gather_s


def num_reduces_and_gathers(layout: Layout) -> tuple[int, int]:
    """How often a step reduces gradients and gathers parameters with a ZeRO stage."""
    zero_stage, gas = layout.zero_stage, layout.gas
    if layout.pp > 1:  # a backward keeps its parameters for the next forward
        return 1, 1 + gas if zero_stage == 3 else 1
    return gas if zero_stage >= 2 else 1, 2 * gas if zero_stage == 3 else 1


def _transfer_s(
    num_bytes: float,
    num_ranks: int,
    axes: GroupAxes,
    links: Network,
    probe: tuple[float, ...],
    c: TimeConstants,
) -> float:
    """Seconds in which `num_bytes` bytes travel once round a ring of `num_ranks` ranks that lie along `axes`.

    Inside an NVLink domain, which is a node or several, the ring has the links of its GPUs. Between domains, rings
    share the ports of each domain by the number of their ranks in it, and a ring takes longer by a share of the
    seconds that the bytes would take in the probe;
    `probe` is that share and the bus bandwidth that the probe measured, in bytes per second.
    """
    moved_bytes = (num_ranks - 1) / num_ranks * num_bytes
    if not crosses_nodes(axes, links.nvlink_gpus):
        return moved_bytes / (links.link_bytes_per_s * c.tp_link_efficiency)
    node_share = _node_share(axes, links)
    num_near = ranks_in_node(axes, links.nvlink_gpus)
    node_bytes_per_s = links.leaving_bytes_per_s(num_near) * c.dp_link_efficiency
    probe_share, probe_bytes_per_s = probe
    added_s = probe_share * moved_bytes / (probe_bytes_per_s * math.sqrt(node_share))
    return moved_bytes / node_bytes_per_s + added_s


def _node_share(axes: GroupAxes, links: Network) -> float:
    """The part of a domain's GPUs that are in one group; others have groups of their own."""
    return ranks_in_node(axes, links.nvlink_gpus) / links.nvlink_gpus
