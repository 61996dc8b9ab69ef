"""Products in fp8 as they are defined: factors are rounded, made wide again and multiplied in fp32.

They are what the products of `products.py` are compared with, whose functions they do not use.
"""

import torch
from torch import Tensor

from ultrabench.kernel.fp8 import fp8_dtype
from ultrabench.kernel.model import Block, Decoder


def rounded(matrix: Tensor) -> Tensor:
    """The values that 8 bits hold of a matrix, in fp32, if each row has the largest power of two as its scale with which it fits."""
    dtype = fp8_dtype(matrix.device)
    dtype_max, row_max = torch.finfo(dtype).max, matrix.double().abs().amax(1, keepdim=True)
    exponent = torch.where(row_max > 0, torch.log2(dtype_max / row_max), 0).floor()
    return torch.ldexp(torch.ldexp(matrix.double(), exponent).float().to(dtype).double(), -exponent).float()


class _Linear(torch.autograd.Function):
    """A linear layer without bias, whose three products have rounded factors."""

    @staticmethod
    def forward(ctx, x_BSK: Tensor, weight_NK: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_BSK, weight_NK)
        y_TN = rounded(x_BSK.flatten(0, 1)) @ rounded(weight_NK).t()
        return y_TN.to(x_BSK.dtype).view(*x_BSK.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad_BSN: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        (x_BSK, weight_NK), grad_TN = ctx.saved_tensors, grad_BSN.flatten(0, 1)
        grad_x = rounded(grad_TN) @ rounded(weight_NK.t()).t()
        grad_weight = rounded(grad_TN.t()) @ rounded(x_BSK.flatten(0, 1).t()).t()
        return grad_x.to(x_BSK.dtype).view_as(x_BSK), grad_weight.to(weight_NK.dtype)


def linear(x_BSK: Tensor, weight_NK: Tensor) -> Tensor:
    """The product of x with a weight, with rounded factors in forward and backward."""
    y: Tensor = _Linear.apply(x_BSK, weight_NK)  # type: ignore[no-untyped-call]
    return y


def round_products(model: Decoder) -> None:
    """Gives all blocks of a plain model these products, in place."""
    for block in model.modules():
        if isinstance(block, Block):
            block.columns = lambda x, *weights: tuple(linear(x, weight) for weight in weights)
            block.row = linear
