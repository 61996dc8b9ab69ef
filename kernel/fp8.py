"""What torch has of fp8: its dtypes and the product of scaled factors, of which each is counted.

The product is a private function, as those of compat.py are, which says of each item when it can go.
"""

from collections import Counter

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from ultrabench.kernel.device import kind_of

SCALED_PRODUCTS = Counter[str]()
"""Purpose -> number of products of fp8 in this process, other than those of compiled layers:
see `count_scaled_products`."""


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The dtype of 8 bits, with 3 of them for the fraction, that products on `device` take.

    That of AMD's gfx942 has no infinity and no negative 0, and half the range.
    Goes when torch says which dtype a device takes.
    """
    if torch.version.hip is None or not kind_of(device).has_gpus:
        return torch.float8_e4m3fn
    gpu_architecture = torch.cuda.get_device_properties(device).gcnArchName
    return torch.float8_e4m3fnuz if gpu_architecture.startswith("gfx94") else torch.float8_e4m3fn


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, purpose: str) -> Tensor:
    """The product M x N in bf16 of a, M x K, and b, K x N, whose columns lie in memory one after the other.

    scale_a multiplies rows, M x 1, and scale_b columns, 1 x N. The sums of GPUs are those that their fp8 units make,
    without which the kernel for rows would be slow. It is counted for its purpose, output or gradient.
    Stays: torch has no public product of scaled fp8 in all supported versions.
    """
    if not torch.compiler.is_compiling():
        SCALED_PRODUCTS[purpose] += 1
    with annotate({"purpose": purpose}):
        return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


def count_scaled_products(layer: torch.fx.GraphModule) -> Counter[str]:
    """Purpose -> number of products of fp8 in a traced layer and its nested graphs, in forward and backward.

    Each counts once, also where backward computes it again. Those in operators of ours are in SCALED_PRODUCTS.
    Stays with `scaled_mm`.
    """
    graphs = (module.graph for module in layer.modules() if isinstance(module, torch.fx.GraphModule))
    nodes = (node for graph in graphs for node in graph.nodes if node.target is torch._scaled_mm)
    return Counter(node.meta["custom"]["purpose"] for node in nodes)
