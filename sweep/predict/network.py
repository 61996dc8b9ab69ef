"""The links that the collectives of a layout use: their rates and what a hop costs."""

import math
from dataclasses import dataclass, replace

from ultrabench.hardware import Hardware

PROBE_BYTES = 2**28
"""Size S of the collectives whose bus bandwidth a probe reports."""
SLOW_HOP_S = 25e-6
"""Seconds of a hop above which links count as slow; the two periods of the playbook's cluster lie at 10 and 80 us."""
SHEET_ALLREDUCE = 0.9
"""Share of the rate in a data sheet that a large all-reduce reaches; 8 H100 reach 436 of 450 GB/s in a node."""
SHEET_ALLGATHER = 0.6
"""Share of the rate in a data sheet that a large all-gather reaches; 8 H100 reach 263 of 450 GB/s in a node."""

SHEET_ALLTOALL = 0.75
"""Share of the rate in a data sheet that a large all-to-all reaches; an estimate, not measured."""

LINK_RATE_COLUMNS = (
    "allreduce_busbw_bytes_per_s",
    "allgather_busbw_bytes_per_s",
    "alltoall_busbw_bytes_per_s",
    "alltoall_intra_node_busbw_bytes_per_s",
)
"""Columns of the bus bandwidths that `network` takes from a measurement, in the order of its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Rates of the links that join `nodes` nodes; `network` makes one from a data sheet and a probe.

    Bus bandwidths are those of nccl-tests, in bytes per second (see `ultrabench.device_rates`).
    """

    nodes: int
    gpus_per_node: int
    nvlink_gpus: int
    """Number of GPUs that links of link_bytes_per_s join: those of an NVLink domain, of one or several nodes."""
    link_bytes_per_s: float
    """Rate of a GPU to the others of its domain in the data sheet, in one direction."""
    node_link_bytes_per_s: float
    """Rate of a GPU to other domains in the data sheet, in one direction."""
    allreduce_bytes_per_s: float
    """Bus bandwidth of an all-reduce of all ranks."""
    allgather_bytes_per_s: float
    """Bus bandwidth of an all-gather of all ranks."""
    expert_link_bytes_per_s: float
    """Rate in one direction that a GPU reaches to the others of its domain in an all-to-all."""
    expert_node_link_bytes_per_s: float
    """Rate in one direction that a GPU reaches to other domains in an all-to-all."""
    hop_s: float = 0.0
    """Seconds that a hop of a ring through all ranks needs beside the transfer of its bytes."""

    @property
    def allreduce_hop_s(self) -> float:
        """Seconds that an all-reduce needs for each of its N ranks beside the transfer of its bytes."""
        num_ranks = self.nodes * self.gpus_per_node
        node_bytes_per_s = SHEET_ALLREDUCE * self.link_bytes_per_s
        return max(0.0, 2 * PROBE_BYTES * (1 / self.allreduce_bytes_per_s - 1 / node_bytes_per_s) / num_ranks)

    def alltoall_s(
        self,
        sent_bytes: float,
        num_ranks: int,
        num_copies: float = 1.0,
        node_copies: float = 0.0,
        groups: tuple[int, int] = (1, 1),
    ) -> float:
        """Seconds in which each of `num_ranks` consecutive ranks sends `sent_bytes` / `num_ranks` bytes to
        each of the others.

        What stays in a domain travels while the rest leaves it, so that the slower of both counts. A domain of
        several nodes holds as many whole nodes of each group as divide those of the group. A token may be sent once to
        each of the n domains where it may have some of its k experts, on average n (1 - (1 - 1/n)^k), and forwarded
        there. With a router that first chooses groups of experts, n counts the domains that hold a chosen group.

        Args:
            num_copies: the k experts of a token, whose copies `sent_bytes` are.
            node_copies: 1 if a token is sent once to each domain, 0 if once to each expert.
            groups: number of groups of experts, and of those that the router chooses for a token.
        """
        ranks_of_node = math.gcd(num_ranks, self.gpus_per_node)
        nodes_of_group, nodes_of_domain = num_ranks // ranks_of_node, self.nvlink_gpus // self.gpus_per_node
        num_near_nodes = next(n for n in range(nodes_of_domain, 0, -1) if nodes_of_group % n == 0)
        num_near = num_near_nodes * ranks_of_node
        near_share, far_share = (num_near - 1) / num_ranks, (num_ranks - num_near) / num_ranks
        if node_copies and far_share:
            num_domains, (num_groups, num_chosen) = num_ranks / num_near, groups
            missed_share = (1 - num_chosen / num_groups) ** max(1.0, num_groups / num_domains)
            reachable = max(1.0, num_domains * (1 - missed_share))
            domains_per_copy = reachable * (1 - (1 - 1 / reachable) ** num_copies) / num_copies
            far_share *= 1 - node_copies * (1 - domains_per_copy)
            near_share *= 1 + node_copies * (num_domains - 1)
        return max(
            near_share * sent_bytes / self.expert_link_bytes_per_s,
            far_share * sent_bytes / self.expert_node_link_bytes_per_s,
        )

    def leaving_bytes_per_s(self, num_near: int) -> float:
        """Rate in one direction of a ring that leaves a domain through the ports of its `num_near` GPUs there, in the
        data sheet; within a domain of several nodes, the ring is no faster than the links of a GPU."""
        bytes_per_s = self.node_link_bytes_per_s * num_near
        return (
            min(bytes_per_s, self.link_bytes_per_s) if self.nvlink_gpus > self.gpus_per_node else bytes_per_s
        )

    @property
    def slow(self) -> bool:
        """Whether latency, not bandwidth, decides how long collectives between nodes take."""
        return self.nodes > 1 and self.hop_s > SLOW_HOP_S

    @property
    def without_all_ranks(self) -> "Network":
        """These links without what decides collectives of all ranks only, so that runs on several numbers of nodes have
        the same ones."""
        return replace(
            self, nodes=2 if self.slow else 1, allreduce_bytes_per_s=0.0, allgather_bytes_per_s=0.0
        )


def network(
    hardware: Hardware,
    nodes: int,
    allreduce_bytes_per_s: float | None = None,
    allgather_bytes_per_s: float | None = None,
    alltoall_bytes_per_s: float | None = None,
    alltoall_intra_node_bytes_per_s: float | None = None,
) -> Network:
    """The links of `nodes` nodes.

    An all-gather of S bytes over N ranks takes t = S/busbw * (N-1)/N and has N-1 hops. What is left of t/(N-1)
    when S/N bytes have travelled at the rate that the all-gather reaches inside a node is the time of a hop.

    In an all-to-all over N ranks in domains of g GPUs, (N-g)/N of the S bytes of a rank leave its domain, so that their
    rate is busbw * (N-g)/(N-1). Where it was not measured, links between nodes reach as much less of their data sheet
    as they do in the all-reduce.

    Args:
        allreduce_bytes_per_s: bus bandwidth of all ranks, measured in the allocation; None where it was not
            measured. Then it follows from the data sheet, and a hop takes no time.
        allgather_bytes_per_s: the same of an all-gather.
        alltoall_bytes_per_s: the same of an all-to-all.
        alltoall_intra_node_bytes_per_s: bus bandwidth of an all-to-all of the ranks of a node.
    """
    near_gpus, num_ranks, hop_s = hardware.nvlink_gpus, nodes * hardware.gpus_per_node, 0.0
    leaves_domain = num_ranks > near_gpus
    node_bytes_per_s = hardware.node_link_bytes_per_s * near_gpus if leaves_domain else math.inf
    sheet_bytes_per_s = min(hardware.link_bytes_per_s, node_bytes_per_s)
    if allgather_bytes_per_s:
        inside_bytes_per_s = SHEET_ALLGATHER * hardware.link_bytes_per_s
        shard_bytes = PROBE_BYTES / num_ranks
        hop_s = max(0.0, shard_bytes / allgather_bytes_per_s - shard_bytes / inside_bytes_per_s)
    allreduce_share = (allreduce_bytes_per_s or math.inf) / (SHEET_ALLREDUCE * sheet_bytes_per_s)
    leaving_bytes_per_s = SHEET_ALLTOALL * hardware.node_link_bytes_per_s * min(1.0, allreduce_share)
    if alltoall_bytes_per_s and leaves_domain:
        leaving_bytes_per_s = alltoall_bytes_per_s * (num_ranks - near_gpus) / (num_ranks - 1)
    if not leaves_domain and nodes > 1:  # all ranks are as near as those of a node
        alltoall_intra_node_bytes_per_s = alltoall_bytes_per_s or alltoall_intra_node_bytes_per_s
    return Network(
        nodes=nodes,
        gpus_per_node=hardware.gpus_per_node,
        nvlink_gpus=near_gpus,
        link_bytes_per_s=hardware.link_bytes_per_s,
        node_link_bytes_per_s=hardware.node_link_bytes_per_s,
        allreduce_bytes_per_s=allreduce_bytes_per_s or SHEET_ALLREDUCE * sheet_bytes_per_s,
        allgather_bytes_per_s=allgather_bytes_per_s or SHEET_ALLGATHER * sheet_bytes_per_s,
        expert_link_bytes_per_s=alltoall_intra_node_bytes_per_s or SHEET_ALLTOALL * hardware.link_bytes_per_s,
        expert_node_link_bytes_per_s=leaving_bytes_per_s,
        hop_s=hop_s,
    )
