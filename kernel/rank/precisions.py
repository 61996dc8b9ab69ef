"""Reads from numbers in which precision they were computed.

The result of a sum or product fills all bits of the dtype in which it was computed, so numbers that fewer bits hold
exactly have been rounded, whatever the dtype of their tensor is. Where numbers are rounded on purpose, such as the
output of a norm, they are compared with the same computation in a wide and in a narrow precision.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from ultrabench.kernel.model import RmsNorm, rope_tables
from ultrabench.model_shape import ModelShape

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Precision -> dtype of as many bits, the narrowest first."""
MAX_SAMPLED = 1024
"""Largest number of values of a tensor that are read."""


def sample(tensor: Tensor) -> Tensor:
    """A copy of the first values of a tensor, so few that their memory does not count."""
    return tensor.detach().flatten()[:MAX_SAMPLED].clone()


def of_values(tensors: Iterable[Tensor]) -> str | None:
    """The precision of fewest bits that holds all values exactly; None where all of them are 0."""
    tensors = [tensor for tensor in tensors if tensor.any()]
    for precision, dtype in DTYPES.items():
        if tensors and all(torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) for tensor in tensors):
            return precision
    return None


def of_rotations(cos: Tensor, sin: Tensor, positions: Sequence[range], shape: ModelShape) -> str:
    """The precision in which the angles were computed whose cosines and sines these are."""
    tables = torch.stack((cos, sin))
    return _nearest(tables, lambda dtype: torch.stack(rope_tables(positions, shape, cos, computed_in=dtype)))


def of_norm(norm: RmsNorm, like: Tensor) -> str:
    """The precision in which a norm computes for an input with the dtype and the device of `like`."""
    x = torch.randn((2, MAX_SAMPLED), generator=torch.Generator().manual_seed(0)).to(like)

    def normed(dtype: torch.dtype) -> Tensor:
        converted_x = x.to(dtype)
        return converted_x * torch.rsqrt(converted_x.square().mean(-1, keepdim=True) + norm.eps)

    return _nearest(functional_call(norm, {"weight": torch.ones_like(x[0])}, (x,)), normed)


def _nearest(result: Tensor, reference: Callable[[torch.dtype], Tensor]) -> str:
    """The narrow precision if the result is nearly that of the narrow reference, else the wide one of its dtype."""
    narrow, wide = [name for name in DTYPES if name != "fp64" or result.dtype == torch.float64][-2:]
    references = {name: reference(DTYPES[name]).to(result.dtype).double() for name in (narrow, wide)}
    difference = (references[wide] - references[narrow]).norm()
    return narrow if (result.double() - references[narrow]).norm() < difference / 2 else wide
