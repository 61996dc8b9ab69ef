"""The memory of one rank of a pipeline, by part, and what all forms of its prediction share."""

from dataclasses import dataclass
from typing import NamedTuple

from ultrabench.allowed import Positive, require_allowed
from ultrabench.layout import Layout

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")
"""The fields of `StageMemory` that add up to its peak."""
FORWARD, BACKWARD, OPTIMIZER = "forward end", "backward", "optimizer"
"""The phases of a step that can make its peak: the last forward before a backward, with the loss; the backward of
a layer; the reduction of the last gradients and the update."""

DEVICE_BYTES = 2.5e9
"""Bytes that CUDA, its libraries and NCCL hold beside the allocator, where a profile has no others; an estimate."""
EVERY, LARGEST, ENDS = "every", "largest", "ends"
"""Ranks whose memory is asked for: every one; without those that need no more than an earlier one, but never all of a
pipeline but one; the first and the last alone, whose memory is a lower bound of the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """How many bytes of tensors a device holds before a run runs out of memory.

    The logarithm of allocated bytes / limit at which runs fail is about normal.
    """

    share: Positive
    """The part of the memory of a device at which one half of the runs without a pipeline fail."""
    pipeline_share: Positive
    """The part at which one half of the runs with a pipeline fail. It is above 1 where the form adds up what is
    never alive at once."""
    sigma: Positive
    """Standard deviation of the logarithm."""

    def __post_init__(self) -> None:
        require_allowed(self, "memory.limit.")


class StageMemory(NamedTuple):
    """Bytes of one rank of the pipeline axis at the moment of a step in which they are most.

    It is a named tuple, since planning makes a hundred thousand of them.
    """

    pp_rank: int
    phase: str
    """The phase that makes the peak: forward end, backward or optimizer."""
    weights: float
    """Parameters: shards or whole copies, and gathered copies of them."""
    gradients: float
    """Gradients, of one micro-batch and summed over several."""
    optimizer: float
    """Master weights and the moments of Adam."""
    activations: float
    """What forward keeps for backward, of all micro-batches in flight."""
    logits: float
    """Logits, their gradients and the copies of them."""
    buffers: float
    """Temporary results of the layer at work, messages, and the batch."""
    reserve: float
    """What the allocator holds beyond the tensors at this moment, and gives back before it fails."""

    @property
    def allocated_bytes(self) -> float:
        """Bytes of all tensors."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def peak_bytes(self) -> float:
        """Bytes that the allocator holds."""
        return self.allocated_bytes + self.reserve


def in_flight(layout: Layout, pp_rank: int) -> float:
    """Largest number of micro-batches whose activations a rank keeps at once, at least 1.

    It is min(gas, pp - rank) under 1F1B (arXiv 2006.09503), and gas where all forwards come first. With v stages on
    a rank the 2*(pp - rank - 1) + (v - 1)*pp + 1 forwards of the warm-up (arXiv 2104.04473) are of one stage each.
    """
    in_flight: float = layout.pp - pp_rank
    if layout.pp_schedule == "afab":
        return layout.gas
    if (v := layout.virtual_stages) > 1:
        in_flight = max(1.0, (2 * (in_flight - 1) + (v - 1) * layout.pp + 1) / v)
    return min(layout.gas, in_flight)
