"""The shape of a Llama-style decoder, with the field names of a Hugging Face `config.json`."""

from dataclasses import dataclass
from typing import Annotated

from ultrabench.allowed import Count, Positive, at_least, one_of, require_allowed
from ultrabench.errors import ConfigError

FLOPS_FORMULAS = {"palm": 12, "megatron": 6}
"""Formula -> FLOPs of attention for each pair of a token and a position, in each channel of the query heads.

The two products of attention (scores and values) are 4 FLOPs forward and 8 backward. palm counts all positions
(PaLM, arXiv 2204.02311, appendix B), as torchtitan and nanotron do. megatron counts the half that the causal mask
leaves (num_floating_point_operations of Megatron-LM).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotations are stretched for sequences longer than those of the pre-training, as Llama 3.1 does."""

    rope_type: Annotated[str, one_of("llama3")]
    factor: Annotated[float, at_least(1.0)]
    """Frequencies with less than low_freq_factor turns in the original context are divided by this."""
    low_freq_factor: Positive
    high_freq_factor: Positive
    """Frequencies with more than this number of turns in the original context stay as they are."""
    original_max_position_embeddings: Count
    """Tokens of the original context."""

    def __post_init__(self) -> None:
        require_allowed(self, "rope_scaling.")
        if self.high_freq_factor <= self.low_freq_factor:
            low = f"low_freq_factor={self.low_freq_factor:g}"
            raise ConfigError(f"rope_scaling.high_freq_factor={self.high_freq_factor:g}; must be above {low}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """All sizes of a model that decide its memory and its FLOPs."""

    name: str
    """Usual name of the model; it is no part of a run's identity."""
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    """Number of key/value heads; fewer than num_attention_heads means grouped-query attention."""
    intermediate_size: Count
    """Width of the SwiGLU feed-forward block."""
    vocab_size: Count
    tie_word_embeddings: bool
    """Whether embedding and lm_head are one matrix, which is then counted once."""
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    head_dim: Count | None = None
    """Width of one attention head where it is given; None means hidden_size / num_attention_heads."""
    qk_norm: bool = False
    """Whether queries and keys are normalised in each head, before their rotation, as in Qwen3."""
    rope_scaling: RopeScaling | None = None
    sliding_window: Count | None = None
    """Number of positions that a token attends to, its own included; None means all earlier ones."""

    def __post_init__(self) -> None:
        require_allowed(self, f"model {self.name}: ")
        heads = f"num_attention_heads={self.num_attention_heads}"
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            rule = f"does not divide hidden_size={self.hidden_size}; change one of them or give head_dim"
            raise ConfigError(f"model {self.name}: {heads} {rule}")
        if self.head_width % 2:
            rotated = "rotations need an even width of heads"
            raise ConfigError(f"model {self.name}: head_dim={self.head_width}; {rotated}: choose another")
        if self.num_attention_heads % self.num_key_value_heads:
            groups = f"num_key_value_heads={self.num_key_value_heads}"
            raise ConfigError(f"model {self.name}: {groups} must divide {heads}")

    @property
    def head_width(self) -> int:
        """Width of one attention head: head_dim where it is given."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_width

    @property
    def layer_matmul_params(self) -> int:
        """Number of parameters of one decoder layer that take part in matrix products.

        The q and out projections have h*q_width each, k and v h*kv_width each, and gate, up and down h*f each.
        """
        return self.hidden_size * (2 * self.q_width + 2 * self.kv_width + 3 * self.intermediate_size)

    @property
    def layer_params(self) -> int:
        """Number of all parameters of one decoder layer: its matrices and the weights of its RMSNorms."""
        return self.layer_matmul_params + 2 * self.hidden_size + 2 * self.head_width * self.qk_norm

    @property
    def embedding_params(self) -> int:
        """Number of parameters of the embedding; the lm_head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Number of all trainable parameters; tied weights are counted once."""
        tables = 1 if self.tie_word_embeddings else 2
        body = self.num_hidden_layers * self.layer_params + self.hidden_size
        return tables * self.embedding_params + body

    @property
    def num_active_params(self) -> int:
        """Number of parameters used for one token, which is num_params in a dense model."""
        return self.num_params

    @property
    def num_matmul_params(self) -> int:
        """Number of parameters in matrix products: those of the layers and the lm_head, not the embedding."""
        return self.num_hidden_layers * self.layer_matmul_params + self.embedding_params

    def attention_flops(self, seq_len: int, formula: str = "palm") -> int:
        """FLOPs of attention in one layer, forward and backward, for one token of a sequence of `seq_len`.

        They are f * q_width * seq_len, with the factor f of the formula in FLOPS_FORMULAS.
        """
        return FLOPS_FORMULAS[formula] * self.q_width * seq_len

    def flops_per_token(self, seq_len: int, formula: str = "palm") -> int:
        """Model FLOPs of forward and backward for one token of a sequence of `seq_len`.

        The sum is 6*N + L*attention_flops. 6*N is a multiply and an add for each of N parameters forward, and
        twice that backward. N is num_matmul_params.
        """
        attention = self.num_hidden_layers * self.attention_flops(seq_len, formula)
        return 6 * self.num_matmul_params + attention
