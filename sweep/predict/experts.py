"""How tokens spread over the experts of a layout, which decides what its slowest rank computes, sends and keeps."""

import math
from functools import lru_cache

from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape


def busiest_share(kernel: KernelConfig, layout: Layout, shape: ModelShape) -> float:
    """Rows of the busiest rank of ep over the mean of all; a row is a token on its way to one of its experts.

    It is 1 where routing keeps the experts in balance, and for a model without experts.
    """
    return _busiest(kernel.routing, layout.ep, shape.num_experts, shape.num_experts_per_tok)


@lru_cache(maxsize=1024)
def _busiest(routing: str, ep: int, experts: int, chosen: int) -> float:
    """The share of the first experts / ep experts, the ones that skew=A makes the most popular, times ep.

    Expert e gets a share in proportion to (e + 1)**-A. A token chooses an expert once, so that no rank gets more
    than experts / ep of its rows.
    """
    if not routing.startswith("skew=") or not experts:
        return 1.0
    power = float(routing.removeprefix("skew="))
    weights = [math.pow(expert + 1, -power) for expert in range(experts)]
    share = sum(weights[: experts // ep]) / sum(weights)
    return ep * min(share, experts / ep / chosen)
