"""Chooses the implementation of attention, and gives every layer the chosen one.

Torch picks an implementation for each call by itself. A run names one and pins it, so that layouts with and
without context parallelism run the same implementation.
"""

from functools import partial

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
from ultrabench.kernel.cp import ring_attention
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


class _PaddedAttention(torch.autograd.Function):
    """Attention by an implementation that pads values; what is kept for backward has no padding."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:  # type: ignore[no-untyped-def]
        out, log_sum = attention_forward(backend, q, k, v, causal=True)
        ctx.backend = backend
        ctx.save_for_backward(q, out, log_sum, k, v)
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def]
        return *attention_backward(ctx.backend, grad_out, *ctx.saved_tensors, causal=True), None


def apply_attention(model: Decoder, backend: str, ring_group: ProcessGroup | None, cp_exchange: str) -> None:
    """Makes every layer of `model` attend by `backend`, with the ranks of `ring_group` if given."""
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        layer.attention.core = partial(pinned_attention, backend)
        if ring_group is not None:
            layer.attention.core = partial(ring_attention, ring_group.group_name, cp_exchange, backend)
