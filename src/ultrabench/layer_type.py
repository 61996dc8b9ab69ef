"""A type of layer: its attention and its feed-forward block, with the parameters, FLOPs and bytes of both."""

from dataclasses import dataclass
from itertools import chain
from typing import Annotated, NamedTuple

from ultrabench.allowed import one_of, require_allowed
from ultrabench.attention_type import Attention, GroupedQuery, Latent, Linear, StateSpace
from ultrabench.errors import ConfigError
from ultrabench.feed_forward_type import Experts, FeedForward, FeedForwardBlock
from ultrabench.layer_products import Channels, Product, Vector, num_params, num_vector_params

BLOCK_TYPES: dict[str, type] = {
    "grouped_query": GroupedQuery, "latent": Latent, "linear": Linear, "state_space": StateSpace,
    "feed_forward": FeedForward, "experts": Experts,
}  # fmt: skip
"""Field of a `LayerType` -> the record of a block that it may hold."""
FEED_FORWARD_KINDS = ("feed_forward", "experts")
"""Those of them of which at most one is set."""
ATTENTION_KINDS = tuple(name for name in BLOCK_TYPES if name not in FEED_FORWARD_KINDS)
"""The others, of which at most one is set, too."""


class ProductFlops(NamedTuple):
    """FLOPs of a token in forward and backward of a layer."""

    products: int
    """Those of products with weights."""
    core: float
    """Those of attention beside them: scores and values, or the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerType:
    """An attention and a feed-forward block; a layer may lack one of them."""

    grouped_query: GroupedQuery | None = None
    latent: Latent | None = None
    linear: Linear | None = None
    state_space: StateSpace | None = None
    feed_forward: FeedForward | None = None
    experts: Experts | None = None
    norms: Annotated[str, one_of("before", "after", "both")] = "before"
    """Where each block has an RMSNorm: before it, after it, or both."""

    def __post_init__(self) -> None:
        require_allowed(self, "layer_types.")
        for kinds in (ATTENTION_KINDS, FEED_FORWARD_KINDS):
            set_kinds = [kind for kind in kinds if getattr(self, kind) is not None]
            if len(set_kinds) > 1:
                raise ConfigError(
                    f"a layer type has {' and '.join(set_kinds)}; give one of {', '.join(kinds)}"
                )
        if not self.num_blocks:
            kinds_text = ", ".join((*ATTENTION_KINDS, *FEED_FORWARD_KINDS))
            raise ConfigError(f"a layer type has no block; give at least one of {kinds_text}")

    @property
    def attention(self) -> Attention | None:
        """What mixes tokens; None where nothing does."""
        return self.grouped_query or self.latent or self.linear or self.state_space

    @property
    def ffn(self) -> FeedForwardBlock | None:
        """What works on each token alone; None where nothing does."""
        return self.feed_forward or self.experts

    @property
    def name(self) -> str:
        """What the type is called in tables, such as `window 128 | 4 of 128 experts, silu gated 2,880`."""
        return " | ".join(block.name for block in (self.attention, self.ffn) if block)

    @property
    def num_blocks(self) -> int:
        """1 or 2."""
        return (self.attention is not None) + (self.ffn is not None)

    @property
    def num_norms(self) -> int:
        """Number of norms over the hidden size."""
        return self.num_blocks * (2 if self.norms == "both" else 1)

    def products(self, h: int) -> tuple[Product, ...]:
        """The products of every token with weights, without those of the experts among which a router chooses."""
        attention = self.attention.products(h) if self.attention else ()
        return (*attention, *(self.ffn.products(h) if self.ffn else ()))

    def vectors(self, h: int) -> tuple[Vector, ...]:
        """The weights of its norms, and the parameters of its blocks beside the weights of products."""
        blocks = (block.vectors(h) for block in (self.attention, self.ffn) if block)
        return *((Vector(h),) * self.num_norms), *chain.from_iterable(blocks)

    def num_expert_params(self, h: int) -> int:
        """Number of parameters of all experts among which a router chooses."""
        return self.experts.num_experts * self.experts.expert_params(h) if self.experts else 0

    def matmul_params(self, h: int) -> int:
        """Number of parameters that take part in the matrix products of one token."""
        passed_params = num_params(self.products(h))
        if self.experts:
            passed_params += self.experts.num_experts_per_tok * num_params(self.experts.expert_products(h))
        return passed_params

    def num_params(self, h: int) -> int:
        """Number of all its parameters: matrices, biases, convolutions and the weights of its norms."""
        vector_params = num_vector_params(self.vectors(h))
        return num_params(self.products(h)) + self.num_expert_params(h) + vector_params

    def num_active_params(self, h: int) -> int:
        """Number of its parameters that a token uses: without the experts that the router does not choose."""
        if self.experts is None:
            return self.num_params(h)
        num_unchosen = self.experts.num_experts - self.experts.num_experts_per_tok
        return self.num_params(h) - num_unchosen * self.experts.expert_params(h)

    def flops_per_token(self, h: int, seq_len: int, formula: str) -> ProductFlops:
        """FLOPs of a token of a sequence, forward and backward.

        A product has a multiplication and an addition for each weight in forward, and twice that in backward.
        """
        core_flops = self.attention.core_flops(seq_len, formula) if self.attention else 0
        return ProductFlops(6 * self.matmul_params(h), 3 * core_flops)

    def norm_channels(self, h: int) -> int:
        """Numbers of a token that its norms and the residual stream keep for backward:
        what each block and its norms get.
        """
        return self.num_blocks * h * (3 if self.norms == "both" else 2)

    def kept(self, h: int) -> Channels:
        """The numbers of a token that its blocks keep for backward, with those of its chosen experts."""
        blocks = [block.kept(h) for block in (self.attention, self.ffn) if block]
        rows = self.experts.num_experts_per_tok * self.experts.row_channels(h) if self.experts else 0
        return Channels(sum(b.cut for b in blocks), sum(b.whole for b in blocks) + rows)

    def kept_channels(self, h: int) -> int:
        """All numbers of a token that it keeps for backward without recomputation."""
        return self.norm_channels(h) + sum(self.kept(h))
