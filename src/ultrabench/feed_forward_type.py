"""The kinds of feed-forward blocks that a layer may have: sizes, and what follows from them.

Field names are those of a Hugging Face `config.json` where it has them. h is the hidden size of the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Protocol

from ultrabench.allowed import Count, Positive, Size, at_least, between, one_of, require_allowed
from ultrabench.errors import ConfigError
from ultrabench.layer_products import COLUMNS, ROWS, WHOLE, Channels, Product, Vector, num_params

Activation = Annotated[str, one_of("silu", "gelu", "gelu_tanh", "relu2")]
"""gelu_tanh is the approximation of gelu by tanh (arXiv 1606.08415), and relu2 the square of relu."""


def block_products(h: int, width: int, *, gated: bool) -> tuple[Product, ...]:
    """The products of a block: gate and up together, or up alone, and down."""
    up = Product(2 * width, h, COLUMNS, 0.5, (width, width)) if gated else Product(width, h, COLUMNS, 1.0)
    return up, Product(h, width, ROWS)


def kept_channels(width: int, *, gated: bool) -> int:
    """Numbers of a token that a block keeps: gate, up, the activation of gate and its product with up, or up and its
    activation."""
    return (4 if gated else 2) * width


def broken_group_rules(
    num_experts: int, num_experts_per_tok: int, n_group: int, topk_group: int
) -> Iterator[str]:
    """A message for each rule that the groups of experts break, with its numbers."""
    if num_experts % n_group:
        yield f"n_group={n_group} must divide num_experts={num_experts}"
    if topk_group > n_group:
        yield f"topk_group={topk_group}; must be in 1..n_group={n_group}"
    num_candidates = topk_group * num_experts // n_group
    if num_candidates < num_experts_per_tok:
        yield f"num_experts_per_tok={num_experts_per_tok}; topk_group={topk_group} groups have {num_candidates} experts"


class FeedForwardBlock(Protocol):
    """What every kind of feed-forward block says of itself."""

    @property
    def name(self) -> str:
        """What it is called in tables and messages."""

    def products(self, h: int) -> tuple[Product, ...]:
        """Its products of every token with weights, without those of the experts among which a router chooses."""

    def vectors(self, h: int) -> tuple[Vector, ...]:
        """Its parameters beside the weights of products, without those of the experts."""

    def kept(self, h: int) -> Channels:
        """The numbers of a token that it keeps for backward, without those of the experts among
        which a router chooses.
        """

    def tp_sizes(self) -> dict[str, int]:
        """Name -> each size that the ranks of tensor parallelism divide among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """A block of two or, with a gate, three matrices."""

    intermediate_size: Size
    gated: bool = True
    """Whether the activation is that of a second product, by which the first is multiplied (arXiv 2002.05202)."""
    hidden_act: Activation = "silu"
    mlp_bias: bool = False
    """Whether its products have biases."""

    def __post_init__(self) -> None:
        require_allowed(self, "feed_forward.")

    @property
    def name(self) -> str:
        """Its kind and width."""
        return f"{self.hidden_act}{' gated' * self.gated} {self.intermediate_size:,}"

    def products(self, h: int) -> tuple[Product, ...]:
        """Up and down."""
        return block_products(h, self.intermediate_size, gated=self.gated)

    def vectors(self, h: int) -> tuple[Vector, ...]:
        """Biases."""
        up_bias = Vector((1 + self.gated) * self.intermediate_size, True)
        return (up_bias, Vector(h)) if self.mlp_bias else ()

    def kept(self, h: int) -> Channels:
        """What both products need."""
        return Channels(kept_channels(self.intermediate_size, gated=self.gated))

    def tp_sizes(self) -> dict[str, int]:
        """The width."""
        return {"intermediate_size": self.intermediate_size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A router that chooses experts for each token, and experts that every token passes."""

    num_experts: Size
    num_experts_per_tok: Size
    """Number of experts that the router chooses for a token."""
    moe_intermediate_size: Size
    """Width of one expert."""
    gated: bool = True
    """Whether experts have a gate, as the blocks of `FeedForward`."""
    hidden_act: Activation = "silu"
    expert_bias: bool = False
    """Whether the products of the experts have biases."""
    router_bias: bool = False
    """Whether the router's product has a bias that is trained by its gradient."""
    moe_latent_size: Size | None = None
    """Width of the tokens that experts get; None means the hidden size."""
    n_group: Count = 1
    """Number of groups of experts, of which the router first chooses some: by the sum of their two best scores with
    scoring_func=sigmoid (arXiv 2412.19437, section 2.1.2), by their best score with softmax (arXiv 2405.04434)."""
    topk_group: Count = 1
    """Number of groups that it chooses."""
    shared_expert_intermediate_size: Annotated[int, at_least(0)] = 0
    """Width of the block that every token passes; 0 means that there is none."""
    shared_expert_gate: bool = False
    """Whether the output of that block is multiplied by a sigmoid of the input."""
    scoring_func: Annotated[str, one_of("softmax", "sigmoid")] = "softmax"
    """How the router turns the product with its weights into the scores of the experts."""
    norm_topk_prob: bool = True
    """Whether the scores of the chosen experts are divided by their sum."""
    routed_scaling_factor: Positive = 1.0
    """Factor by which the scores of the chosen experts are multiplied in the end."""
    swiglu_limit: Annotated[float, between(0.0, 1e6)] = 0.0
    """Bound of gate and up before the activation; 0 means that there is none."""

    def __post_init__(self) -> None:
        require_allowed(self, "experts.")
        if self.num_experts_per_tok > self.num_experts:
            experts_text = f"num_experts={self.num_experts}"
            raise ConfigError(
                f"experts.num_experts_per_tok={self.num_experts_per_tok}; must be in 1..{experts_text}"
            )
        group_sizes = self.num_experts, self.num_experts_per_tok, self.n_group, self.topk_group
        if rule := next(broken_group_rules(*group_sizes), None):
            raise ConfigError(f"experts.{rule}")
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            raise ConfigError("experts.shared_expert_gate=true needs shared_expert_intermediate_size >= 1")

    @property
    def name(self) -> str:
        """How many of how many experts a token passes, with their width."""
        shared = (
            f" + {self.shared_expert_intermediate_size:,}" if self.shared_expert_intermediate_size else ""
        )
        experts_text = f"{self.num_experts_per_tok} of {self.num_experts} experts"
        return (
            f"{experts_text}, {self.hidden_act}{' gated' * self.gated} {self.moe_intermediate_size:,}{shared}"
        )

    def row_width(self, h: int) -> int:
        """Width of a token on its way to an expert."""
        return self.moe_latent_size or h

    def expert_products(self, h: int) -> tuple[Product, ...]:
        """The products of one expert, which tensor parallelism does not cut."""
        products = block_products(self.row_width(h), self.moe_intermediate_size, gated=self.gated)
        return tuple(product._replace(cut=WHOLE) for product in products)

    def expert_bias_params(self, h: int) -> int:
        """Number of the biases of one expert."""
        return ((1 + self.gated) * self.moe_intermediate_size + self.row_width(h)) * self.expert_bias

    def expert_params(self, h: int) -> int:
        """Number of parameters of one expert."""
        return num_params(self.expert_products(h)) + self.expert_bias_params(h)

    def shared_products(self, h: int) -> tuple[Product, ...]:
        """The products of the block that every token passes; empty where there is none."""
        width = self.shared_expert_intermediate_size
        return block_products(h, width, gated=self.gated) if width else ()

    def products(self, h: int) -> tuple[Product, ...]:
        """The router, the way to narrower tokens and back, and the block that every token passes."""
        latent = self.moe_latent_size
        to_latent = (Product(latent, h, WHOLE), Product(h, latent, WHOLE)) if latent else ()
        gate = (Product(1, h, WHOLE),) if self.shared_expert_gate else ()
        return Product(self.num_experts, h, WHOLE), *to_latent, *gate, *self.shared_products(h)

    def vectors(self, h: int) -> tuple[Vector, ...]:
        """The bias of the router."""
        return (Vector(self.num_experts),) if self.router_bias else ()

    def kept(self, h: int) -> Channels:
        """What the products of the block need that every token passes, and narrower tokens."""
        latent = 2 * self.moe_latent_size if self.moe_latent_size else 0
        return Channels(kept_channels(self.shared_expert_intermediate_size, gated=self.gated), latent)

    @property
    def kept_of_experts(self) -> int:
        """Numbers that an expert keeps for each of its channels: gate, up and their product,
        or up and its activation.
        """
        return 3 if self.gated else 2

    def row_channels(self, h: int) -> int:
        """Numbers that an expert keeps of each token that it gets, its input included."""
        return self.row_width(h) + self.kept_of_experts * self.moe_intermediate_size

    def tp_sizes(self) -> dict[str, int]:
        """The width of the block that every token passes."""
        return {"shared_expert_intermediate_size": self.shared_expert_intermediate_size}
