"""Products in fp8: both factors are rounded to 8 bits with a scale for each row, sums are fp32, results bf16.

Shapes: T tokens, K inputs and N outputs of a linear layer. A product sums over the last dim of both factors,
and each of their rows is scaled by itself, so that an outlier costs only its own row precision:

y_TN = x_TK w_NK^T    a scale for each token of x, and for each output of w
    dx_TK = dy_TN w_KN^T  a scale for each token of dy, and for each input of w
    dw_NK = dy_NT x_KT^T  a scale for each output of dy, and for each input of x

All factors are e4m3, also gradients: where each row has its scale, the third bit of fraction of e4m3 is worth more to
them than the range of e5m2. Scales are powers of two, rounded down, so that scaling itself rounds nothing.
This is the recipe `rowwise` of torchao, which torchtitan uses
(docs.pytorch.org/ao/main/api_reference/generated/torchao.float8.Float8LinearRecipeName.html).

Forward keeps x and w in bf16, as a product in bf16 does. Weights are gathered in bf16, and tokens of other ranks as
well: factors are rounded after that.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ultrabench.kernel.compat import mark_as_kept
from ultrabench.kernel.fp8 import fp8_dtype, scaled_mm

SMALLEST_ROW_MAX = 1e-12
"""Values of a row that is smaller everywhere are scaled as if its largest were this; 0 has no scale of its own."""


class ScaledFactor(NamedTuple):
    """A factor of a product: its rows, each of which has been multiplied by a scale and rounded to 8 bits."""

    rows: Tensor
    inverse_scale: Tensor
    """What a row is multiplied by to undo its scale, M x 1 in fp32."""


def scale_rows(matrix: Tensor) -> ScaledFactor:
    """The rows of a matrix M x K, each times the largest power of two with which it fits into 8 bits."""
    dtype = fp8_dtype(matrix.device)
    row_max = torch.linalg.vector_norm(matrix, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / row_max.clamp(min=SMALLEST_ROW_MAX))))
    return ScaledFactor((matrix * scale.to(matrix.dtype)).to(dtype).contiguous(), scale.reciprocal())


def product(a: ScaledFactor, b: ScaledFactor, purpose: str) -> Tensor:
    """a b^T, M x N in bf16, of factors M x K and N x K; `purpose` is output or gradient."""
    return scaled_mm(a.rows, b.rows.t(), a.inverse_scale, b.inverse_scale.t(), purpose)


_kept_product = mark_as_kept(product)


def outputs(x_BSK: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The products of x with one or several weights N x K, by which a block begins.

    Selective recomputation keeps every second one, from the first on, as it does in other precisions.
    """
    scaled_x = scale_rows(x_BSK.flatten(0, 1))
    outputs_TN = [
        (product if i % 2 else _kept_product)(scaled_x, scale_rows(weight), "output")
        for i, weight in enumerate(weights)
    ]
    return tuple(y_TN.view(*x_BSK.shape[:-1], -1) for y_TN in outputs_TN)


def last_output(x_BSK: Tensor, weight: Tensor) -> Tensor:
    """The product of x with the weight N x K by which a block ends; selective recomputation does not keep it."""
    y_TN = product(scale_rows(x_BSK.flatten(0, 1)), scale_rows(weight), "output")
    return y_TN.view(*x_BSK.shape[:-1], -1)


def input_gradient(output_grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of x, T x K, from those of several outputs, T x N, and their weights."""
    grad_x, *summands = (
        product(scale_rows(output_grad), scale_rows(weight.t()), "gradient")
        for output_grad, weight in zip(output_grads, weights, strict=True)
    )
    for summand in summands:
        grad_x.add_(summand)
    return grad_x


def weight_gradients(output_grads: Sequence[Tensor], x_TK: Tensor) -> list[Tensor]:
    """The gradients of several weights, N x K, from those of their outputs, T x N."""
    scaled_x = scale_rows(x_TK.t())
    return [product(scale_rows(output_grad.t()), scaled_x, "gradient") for output_grad in output_grads]
