"""Reads from numbers in which precision they were computed.

The result of a sum or product fills all bits of the dtype in which it was computed, so numbers that fewer bits hold
exactly have been rounded, whatever the dtype of their tensor is. Where numbers are rounded on purpose, such as the
output of a norm, they are compared with the same computation in a wide and in a narrow precision.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from ultrabench.kernel.model import RmsNorm
from ultrabench.kernel.moe import SparseFeedForward
from ultrabench.kernel.rope import Rotation, rope_tables

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Precision -> dtype of as many bits, the narrowest first."""
MAX_READ_VALUES = 1024
"""Largest number of values of a tensor that are read."""


def leading_values(tensor: Tensor) -> Tensor:
    """A copy of the first values of a tensor, so few that their memory does not count."""
    return tensor.detach().flatten()[:MAX_READ_VALUES].clone()


def value_precision(tensors: Iterable[Tensor]) -> str | None:
    """The precision of fewest bits that holds all values exactly; None where all of them are 0."""
    tensors = [tensor for tensor in tensors if tensor.any()]
    for precision, dtype in DTYPES.items():
        if tensors and all(torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) for tensor in tensors):
            return precision
    return None


def rotation_precision(cos: Tensor, sin: Tensor, positions: Sequence[range], rotation: Rotation) -> str:
    """The precision in which the angles were computed whose cosines and sines these are."""
    cos_and_sin = torch.stack((cos, sin))
    return _nearest_precision(cos_and_sin, lambda d: torch.stack(rope_tables(positions, rotation, cos, d)))


def norm_precision(norm: RmsNorm, input_like: Tensor) -> str:
    """The precision in which a norm computes for an input with the dtype and the device of `input_like`."""
    x = torch.randn((2, MAX_READ_VALUES), generator=torch.Generator().manual_seed(0)).to(input_like)

    def reference_norm(dtype: torch.dtype) -> Tensor:
        converted_x = x.to(dtype)
        return converted_x * torch.rsqrt(converted_x.square().mean(-1, keepdim=True) + norm.eps)

    return _nearest_precision(functional_call(norm, {"weight": torch.ones_like(x[0])}, (x,)), reference_norm)


def score_precision(block: SparseFeedForward, input_like: Tensor) -> str | None:
    """The precision in which a router computes scores from logits with the dtype and the device of `input_like`."""
    logits_TE = torch.randn((MAX_READ_VALUES, len(block.balance)), generator=torch.Generator().manual_seed(0))
    return value_precision([block.scores_of(logits_TE.to(input_like))])


def _nearest_precision(result: Tensor, compute_reference: Callable[[torch.dtype], Tensor]) -> str:
    """The precision in which a result was computed: fp32 or fp64 for a result in fp64, else bf16 or fp32.

    `compute_reference` computes the same in a given dtype. The narrower precision is returned if the result is nearer
    to its reference than half the distance of the two references.
    """
    precisions = [name for name in DTYPES if name != "fp64" or result.dtype == torch.float64][-2:]
    narrow, wide = (compute_reference(DTYPES[name]).to(result.dtype).double() for name in precisions)
    is_narrow = (result.double() - narrow).norm() < (wide - narrow).norm() / 2
    return precisions[0] if is_narrow else precisions[1]
