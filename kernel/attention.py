"""Chooses the implementation of attention, and gives every layer the chosen one.

Torch picks an implementation for each call by itself. A run names one and pins it, so that layouts with and
without context parallelism run the same implementation.
"""

from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention import SDPBackend, sdpa_kernel

from ultrabench.kernel.compat import activate_flash3, prefers_cudnn_attention
from ultrabench.kernel.cp import ring_attention
from ultrabench.kernel.model import Decoder, Layer, causal_attention
from ultrabench.kernel_config import KernelConfig, auto_attention
from ultrabench.layout import AUTO

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
"""Our word for an implementation -> torch's; flash3 replaces the kernels of torch's flash attention."""


def choose_backend(kernel: KernelConfig, head_width: int, device: torch.device) -> str:
    """The implementation that runs where `kernel` asks for one: cudnn, flash, flash3 or math.

    For auto, cuDNN must be new enough, and head_width a multiple of 8 up to 128.

    Raises:
        ConfigError: flash3 is asked for and not installed.
    """
    if kernel.attention == "flash3":
        activate_flash3()
    if kernel.attention != AUTO:
        return kernel.attention
    fits_cudnn = device.type == "cuda" and head_width % 8 == 0 and head_width <= 128
    prefers_cudnn = fits_cudnn and kernel.in_16_bits and prefers_cudnn_attention(device)
    return auto_attention(device.type, kernel.in_16_bits, prefers_cudnn)


def pinned_attention(backend: str, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """What `causal_attention` computes, by `backend`; raises where that one cannot."""
    with sdpa_kernel(BACKENDS[backend]):
        return causal_attention(q_BNSD, k_BKSD, v_BKSD)


def apply_attention(model: Decoder, backend: str, ring_group: ProcessGroup | None, cp_exchange: str) -> None:
    """Makes every layer of `model` attend by `backend`, with the ranks of `ring_group` if given."""
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        layer.attention.core = partial(pinned_attention, backend)
        if ring_group is not None:
            layer.attention.core = partial(ring_attention, ring_group.group_name, cp_exchange, backend)
