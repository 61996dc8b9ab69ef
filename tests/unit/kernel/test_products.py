"""Products in fp8 are those of rounded factors, each row of which has a scale of its own."""

from unittest import mock

import pytest
import torch

from ultrabench.kernel import products
from ultrabench.kernel.check import rounded_products
from ultrabench.kernel.fp8 import fp8_dtype

TOKENS, INPUTS, OUTPUTS = 32, 48, (64, 16, 16)
ROUNDED = 2**-8
"""Half the distance of neighbours in bf16, in which a product is rounded."""
EIGHT_BITS = 2**-4
"""Half the distance of neighbours in e4m3, in which the factors are rounded."""


def numbers(*size):
    """Random numbers whose rows and columns have sizes from 2**-8 to 2**8."""
    exponents = [torch.randint(-8, 8, shape).float().exp2() for shape in ((size[0], 1), (1, size[1]))]
    return (torch.randn(size) * exponents[0] * exponents[1]).bfloat16()


def relative(value, reference):
    """The L2 norm of a difference, relative to that of what is right."""
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


def factors():
    """The input of a layer, several weights, and the gradients of their outputs."""
    torch.manual_seed(0)
    x, weights = numbers(TOKENS, INPUTS), [numbers(n, INPUTS) for n in OUTPUTS]
    return x, weights, [numbers(TOKENS, n) for n in OUTPUTS]


def test_products_are_those_of_rounded_factors():
    """Outputs and both gradients, within the rounding of their sums to bf16."""
    x, weights, grads = factors()
    x.requires_grad_()
    for weight in weights:
        weight.requires_grad_()
    expected = [rounded_products.rounded_linear(x[None], weight)[0] for weight in weights]
    torch.autograd.backward(expected, grads)
    with torch.no_grad():
        outputs = [y[0] for y in products.outputs(x[None], *weights)]
        input_gradients = [products.input_gradient([g], [w]) for g, w in zip(grads, weights, strict=True)]
        weight_gradients = products.weight_gradients(grads, x)
        together = products.input_gradient(grads, weights)
    for output, value in zip(outputs, expected, strict=True):
        assert output.dtype == torch.bfloat16
        assert relative(output, value) < ROUNDED
    for gradient, weight in zip(weight_gradients, weights, strict=True):
        assert relative(gradient, weight.grad) < ROUNDED
    assert relative(together, sum(gradient.double() for gradient in input_gradients)) < 2 * ROUNDED
    assert relative(together, x.grad) < 2 * ROUNDED


def test_an_outlier_costs_the_precision_of_its_own_row():
    """All rows of each product are as precise as 8 bits are, although one has numbers a million times as large."""
    torch.manual_seed(0)
    x, weight, grad = torch.randn(TOKENS, INPUTS), torch.randn(INPUTS, INPUTS), torch.randn(TOKENS, INPUTS)
    x[3], grad[7] = 2e6 * x[3], 2e6 * grad[7]
    x, weight, grad = x.bfloat16(), weight.bfloat16(), grad.bfloat16()
    (y,), grad_x = products.outputs(x[None], weight), products.input_gradient([grad], [weight])
    (grad_weight,) = products.weight_gradients([grad.t().contiguous()], weight)
    exact = x.double() @ weight.double().t(), grad.double() @ weight.double()
    for value, right in zip((*y[0], *grad_x, *grad_weight), (*exact[0], *exact[1], *exact[1]), strict=True):
        assert relative(value, right) < EIGHT_BITS


def test_small_gradients_lose_nothing():
    """Those of real models are about 1e-6: the results are those of larger ones, times the same power of two."""
    x, weights, grads = factors()
    scale = 2.0**-30
    small_grads = [grad * scale for grad in grads]
    (expected, result), (expected_weights, weight_results) = (
        [function(g) for g in (grads, small_grads)]
        for function in (
            lambda g: products.input_gradient(g, weights),
            lambda g: products.weight_gradients(g, x),
        )
    )
    assert torch.equal(result, expected * scale)
    for weight_result, weight_expected in zip(weight_results, expected_weights, strict=True):
        assert torch.equal(weight_result, weight_expected * scale)


def test_products_of_8_bits_are_asked_for_as_gpus_take_them():
    """Rows of the left and columns of the right factor lie in memory, a scale each in fp32, and sums are fast ones."""
    calls, (x, weights, grads), scaled_mm = [], factors(), torch._scaled_mm

    def record(*args, **kwargs):
        calls.append((*args, kwargs))
        return scaled_mm(*args, **kwargs)

    with mock.patch.object(torch, "_scaled_mm", record):
        products.outputs(x[None], *weights)
        products.last_output(x[None], weights[0])
        products.input_gradient(grads, weights)
        products.weight_gradients(grads, x)
    assert len(calls) == 4 + 3 + 3
    for a, b, scale_a, scale_b, options in calls:
        assert (a.stride(1), b.stride(0), scale_a.dtype, scale_b.dtype) == (
            1,
            1,
            torch.float32,
            torch.float32,
        )
        assert (scale_a.shape, scale_b.shape) == ((len(a), 1), (1, b.shape[1]))
        assert options == {"out_dtype": torch.bfloat16, "use_fast_accum": True}


def test_no_range_is_wasted():
    """The largest number of each row is in the upper half of the range, scales are powers of two,
    and rounding is to 8 bits.
    """
    torch.manual_seed(0)
    matrix = numbers(64, 32)
    matrix[0] = 448.0 * 2**-20
    rows, inverse = products.scale_rows(matrix)
    assert rows.dtype == fp8_dtype(matrix.device)
    largest, limit = rows.float().abs().amax(1), torch.finfo(rows.dtype).max
    assert (largest > 0.49 * limit).all()
    assert (largest <= limit).all()
    assert torch.equal(inverse.log2(), inverse.log2().round())
    assert (rows.float()[0] == limit).all()
    assert torch.equal(rows.float() * inverse, rounded_products.round_rows(matrix))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(value):
    x, weight = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    x[1], x[2, 3] = 0.0, value
    (y,) = products.outputs(x[None], weight)
    assert (y[0, 1] == 0).all()
    assert not y[0, 2].isfinite().any()
    assert y[0, 3:].isfinite().all()
