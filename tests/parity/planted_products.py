"""Faults of products in fp8."""

from types import SimpleNamespace

import torch

from tests.parity.fault import planted
from ultrabench.kernel import model, products, tp


@planted(
    products, "scale_rows",
    unit="test_products.test_an_outlier_costs_the_precision_of_its_own_row, test_products.test_no_range_is_wasted",
)  # fmt: skip
def scale_of_the_tensor(right, rows):
    """All rows have the scale of the largest."""
    whole = right(rows.reshape(1, -1))
    return products.ScaledFactor(whole.rows.view(rows.shape), whole.inverse_scale.repeat(len(rows), 1))


@planted(products, "scale_rows", parity="gas=1 fp8, tp=2 fp8")
def scale_undone_twice(right, rows):
    """Products are divided by their scales twice."""
    factor = right(rows)
    return factor._replace(inverse_scale=factor.inverse_scale.square())


@planted(products, "scale_rows", parity="gas=1 fp8, pp=2 gas=2 zbv fp8")
def scales_of_columns(right, matrix):
    """Square factors are scaled along their columns, and these scales are undone along their rows."""
    if matrix.shape[0] != matrix.shape[1]:
        return right(matrix)
    columns, rows = right(matrix.t()), right(matrix)
    return rows._replace(rows=columns.rows.t().contiguous(), inverse_scale=columns.inverse_scale)


@planted(products, "weight_gradients", parity="gas=1 fp8, tp=2 pp=2 gas=4 zbv fp8")
def gradients_in_the_wrong_layout(right, grads, x):
    """The products of weights' gradients read the gradients of outputs as if each output were a row in memory."""
    return right([grad.contiguous().view(grad.shape[::-1]).t() for grad in grads], x)


@planted(products, "input_gradient", parity="tp=2 fp8")
def gradient_of_the_first(right, grads, weights):
    """What several weights multiply gets the gradient of the first product only."""
    first, *others = grads
    return right([first, *(torch.zeros_like(grad) for grad in others)], weights)


@planted(tp, "_weight_gradients", ignored="gas=1 fp8, tp=2 full fp8")
def wide_weight_gradients(right, ranks, grads, x):
    """The gradients of weights are products of bf16."""
    return [torch.mm(grad.t(), x) for grad in grads]


@planted(tp.TensorParallel, "__init__", ignored="gas=1 fp8")
def no_fp8(right, self, group, sequence_parallel=True, fp8=False, **options):
    """Layers compute in bf16."""
    right(self, group, sequence_parallel, False, **options)


@planted(model, "head_loss", ignored="gas=1 fp8")
def head_in_fp8(right, x, weight, targets, *_):
    """The products of the head are in fp8, too."""
    alone = tp.TensorParallel(SimpleNamespace(size=lambda: 1), fp8=True)
    (logits,) = tp._ColumnProducts.apply(alone, True, x, weight)
    return model.cross_entropy(logits, targets)
