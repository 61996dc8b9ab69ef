"""Products in fp8 as they are defined: factors are rounded, made wide again and multiplied in fp32.

They are what the products of `products.py` are compared with, whose functions they do not use.
"""

import torch
from torch import Tensor

from ultrabench.kernel.fp8 import fp8_dtype
from ultrabench.kernel.model import Block, Decoder, part_widths


def round_rows(matrix: Tensor) -> Tensor:
    """The values that 8 bits hold of a matrix, in fp32, if each row has the largest power of two as its scale
    with which it fits.
    """
    dtype = fp8_dtype(matrix.device)
    dtype_max, row_max = torch.finfo(dtype).max, matrix.double().abs().amax(1, keepdim=True)
    exponent = torch.where(row_max > 0, torch.log2(dtype_max / row_max), 0).floor()
    return torch.ldexp(torch.ldexp(matrix.double(), exponent).float().to(dtype).double(), -exponent).float()


class _RoundedLinear(torch.autograd.Function):
    """A linear layer without bias, whose three products have rounded factors."""

    @staticmethod
    def forward(ctx, x_BSK: Tensor, weight_NK: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x_BSK, weight_NK)
        y_TN = round_rows(x_BSK.flatten(0, 1)) @ round_rows(weight_NK).t()
        return y_TN.to(x_BSK.dtype).view(*x_BSK.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad_BSN: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        (x_BSK, weight_NK), grad_TN = ctx.saved_tensors, grad_BSN.flatten(0, 1)
        grad_x = round_rows(grad_TN) @ round_rows(weight_NK.t()).t()
        grad_weight = round_rows(grad_TN.t()) @ round_rows(x_BSK.flatten(0, 1).t()).t()
        return grad_x.to(x_BSK.dtype).view_as(x_BSK), grad_weight.to(weight_NK.dtype)


def rounded_linear(x_BSK: Tensor, weight_NK: Tensor) -> Tensor:
    """The product of x with a weight, with rounded factors in forward and backward."""
    y_BSN: Tensor = _RoundedLinear.apply(x_BSK, weight_NK)  # type: ignore[no-untyped-call]
    return y_BSN


def _rounded_part_products(x_BSC: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    *parts, rest = torch.split(x_BSC, part_widths(x_BSC, weights), dim=-1)
    return *map(rounded_linear, parts, weights), rest


def round_products(model: Decoder) -> None:
    """Gives all blocks of a plain model these products, in place."""
    for block in model.modules():
        if isinstance(block, Block):
            block.column_products = lambda x, *weights: tuple(rounded_linear(x, weight) for weight in weights)
            block.part_products = _rounded_part_products
            block.whole_product = block.row_product = rounded_linear
