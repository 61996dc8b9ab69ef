"""Chooses the implementation of attention, and gives every layer the chosen one.

Torch picks an implementation for each call by itself. A run names one and pins it, so that layouts with and
without context parallelism run the same implementation.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel

from ultrabench.kernel.compat import (
    activate_flash3,
    attention_backward,
    attention_forward,
    pads_values,
    prefers_cudnn_attention,
)
from ultrabench.kernel.compile import as_operator
from ultrabench.kernel.cp import empty_output, ring_attention
from ultrabench.kernel.model import Decoder, Layer, causal_attention
from ultrabench.kernel_config import KernelConfig, auto_attention
from ultrabench.layout import AUTO

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
"""Our word for an implementation -> torch's; flash3 replaces the kernels of torch's flash attention."""


def choose_backend(kernel: KernelConfig, head_widths: tuple[int, int], device: torch.device) -> str:
    """The implementation that runs where `kernel` asks for one: cudnn, flash, flash3 or math.

    For auto, cuDNN must be new enough, and both widths of a head, of keys and of values, multiples of 8 up to 128.

    Raises:
        ConfigError: flash3 is asked for and not installed.
    """
    if kernel.attention == "flash3":
        activate_flash3()
    if kernel.attention != AUTO:
        return kernel.attention
    fits_cudnn = device.type == "cuda" and all(width % 8 == 0 and width <= 128 for width in head_widths)
    prefers_cudnn = fits_cudnn and kernel.in_16_bits and prefers_cudnn_attention(device)
    return auto_attention(device.type, kernel.in_16_bits, prefers_cudnn)


def pinned_attention(backend: str, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """What `causal_attention` computes, by `backend`; raises where that one cannot."""
    if pads_values(backend) and v_BKSD.shape[-1] < q_BNSD.shape[-1]:
        out: Tensor = _PaddedAttention.apply(q_BNSD, k_BKSD, v_BKSD, backend)  # type: ignore[no-untyped-call]
        return out
    with sdpa_kernel(BACKENDS[backend]):
        return causal_attention(q_BNSD, k_BKSD, v_BKSD)


def _empty_padded_results(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    return empty_output(q, v), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@as_operator(_empty_padded_results)
def _padded_forward(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Attention by an implementation that pads values, and the log of its softmax sums.

    A compiler that saw the padding would keep padded values for backward.
    """
    return attention_forward(backend, q, k, v, causal=True)


def _empty_padded_gradients(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (q, k, v)]


@as_operator(_empty_padded_gradients)
def _padded_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, backend: str
) -> list[Tensor]:
    """The gradients of q, k and v."""
    return [*attention_backward(backend, grad_out, q, out, log_sum, k, v, causal=True)]


PADDED_FORWARD = torch.ops.ultrabench.padded_forward.default
"""The operator that runs `_padded_forward` in compiled layers."""


class _PaddedAttention(torch.autograd.Function):
    """Attention by an implementation that pads values; what is kept for backward has no padding."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:  # type: ignore[no-untyped-def]
        out, log_sum = _padded_forward(q, k, v, backend)
        ctx.backend = backend
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def]
        return *_padded_backward(grad_out, *ctx.saved_tensors, ctx.backend), None


def apply_attention(model: Decoder, backend: str, ring_group: ProcessGroup | None, cp_exchange: str) -> None:
    """Makes every layer of `model` attend by `backend`, with the ranks of `ring_group` if given."""
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        layer.attention.core = partial(pinned_attention, backend)
        if ring_group is not None:
            layer.attention.core = partial(ring_attention, ring_group.group_name, cp_exchange, backend)
