"""The shape of a Llama-style decoder, with the field names of a Hugging Face `config.json`."""

from dataclasses import dataclass

from ultrabench.allowed import Count, require_allowed
from ultrabench.errors import ConfigError


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

    def __post_init__(self) -> None:
        require_allowed(self, f"model {self.name}: ")
        heads = f"num_attention_heads={self.num_attention_heads}"
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            cut = f"hidden_size={self.hidden_size} into heads of an even width"
            raise ConfigError(f"model {self.name}: {heads} must cut {cut}")
        if self.num_attention_heads % self.num_key_value_heads:
            groups = f"num_key_value_heads={self.num_key_value_heads}"
            raise ConfigError(f"model {self.name}: {groups} must divide {heads}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def layer_matmul_params(self) -> int:
        """Number of parameters of one decoder layer that take part in matrix products.

        The q and out projections have h*h each, k and v h*(kv/heads)*h each, and gate, up and down h*f each.
        """
        h = self.hidden_size
        kv_width = self.num_key_value_heads * self.head_dim
        return 2 * h * h + 2 * h * kv_width + 3 * h * self.intermediate_size

    @property
    def layer_params(self) -> int:
        """Number of all parameters of one decoder layer: its matrices and two RMSNorm weights."""
        return self.layer_matmul_params + 2 * self.hidden_size

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

    def flops_per_token(self, seq_len: int) -> int:
        """Model FLOPs of forward and backward for one token of a sequence of `seq_len`.

        The sum has two terms. 6*N is a multiply and an add for each of N parameters forward, and twice that
        backward. 12*L*h*seq_len are the two products of attention (scores and values), once forward and twice
        backward, not halved for the causal mask (PaLM, arXiv 2204.02311, appendix B). N is num_matmul_params.
        """
        return 6 * self.num_matmul_params + 12 * self.num_hidden_layers * self.hidden_size * seq_len
