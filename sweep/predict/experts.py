"""How tokens spread over the experts of a layout, which decides what its slowest rank computes, sends and keeps."""

from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.routing import LEARNED_ROUTING, LEARNED_SKEW, SKEW_PREFIX, expert_shares


def busiest_share(kernel: KernelConfig, layout: Layout, shape: ModelShape) -> float:
    """Rows of the busiest rank of ep over the mean of all; a row is a token on its way to one of its experts.

    It is 1 where routing keeps the experts in balance, and for a model without experts. The first experts are the most
    popular ones. A learned router is predicted as LEARNED_SKEW.
    """
    routing = LEARNED_SKEW if kernel.routing == LEARNED_ROUTING else kernel.routing
    if layout.ep == 1 or not shape.num_experts or not routing.startswith(SKEW_PREFIX):
        return 1.0
    shares = expert_shares(routing, shape.num_experts, shape.num_experts_per_tok)
    return sum(shares[: shape.num_experts // layout.ep]) * layout.ep / shape.num_experts_per_tok
