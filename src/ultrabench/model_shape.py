"""The shape of a Llama-style decoder, in the words of a Hugging Face `config.json`."""

from dataclasses import dataclass

from ultrabench.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Every number that decides what a model costs to train."""

    name: str
    """What people call it; not part of a run's identity."""
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    """Equal to num_attention_heads: multi-head; smaller: grouped-query attention."""
    intermediate_size: int
    """Width of the SwiGLU feed-forward block."""
    vocab_size: int
    tie_word_embeddings: bool
    """Embedding and lm_head are one matrix, counted once."""
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "intermediate_size", "vocab_size")  # fmt: skip
        for field in sizes:
            if getattr(self, field) < 1:
                raise ConfigError(f"model {self.name}: {field}={getattr(self, field)}; must be >= 1")
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            raise ConfigError(
                f"model {self.name}: num_attention_heads={self.num_attention_heads} must cut "
                f"hidden_size={self.hidden_size} into heads of an even width"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"model {self.name}: num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def layer_matmul_params(self) -> int:
        """Parameters of one decoder layer that take part in a matrix product.

        q and out projections h*h each, k and v h*(kv/heads)*h each, gate, up and down h*f each.
        """
        h = self.hidden_size
        kv_width = self.num_key_value_heads * self.head_dim
        return 2 * h * h + 2 * h * kv_width + 3 * h * self.intermediate_size

    @property
    def layer_params(self) -> int:
        """All parameters of one decoder layer: its matrices and two RMSNorm weights."""
        return self.layer_matmul_params + 2 * self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding; the lm_head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All trainable parameters, tied weights counted once."""
        tables = 1 if self.tie_word_embeddings else 2
        body = self.num_hidden_layers * self.layer_params + self.hidden_size
        return tables * self.embedding_params + body

    @property
    def num_active_params(self) -> int:
        """Parameters used for one token; equal to num_params in a dense model."""
        return self.num_params

    @property
    def num_matmul_params(self) -> int:
        """Parameters in matrix products: the layers and the lm_head once, no input embedding."""
        return self.num_hidden_layers * self.layer_matmul_params + self.embedding_params

    def flops_per_token(self, seq_len: int, formula: str = "matmul-v1") -> int:
        """Model FLOPs of forward and backward for one token of a sequence of `seq_len`.

        6*N: a multiply and an add forward, twice that backward, for every parameter of N.
        12*L*h*seq_len: the two attention products (scores and values), not halved for the
        causal mask, forward once and backward twice (PaLM, arXiv 2204.02311, appendix B).
        `matmul-v1` takes N = num_matmul_params, `nanotron` N = num_params.

        Raises:
            ConfigError: an unknown formula.
        """
        attention = 12 * self.num_hidden_layers * self.hidden_size * seq_len
        if formula == "matmul-v1":
            return 6 * self.num_matmul_params + attention
        if formula == "nanotron":
            return 6 * self.num_params + attention
        raise ConfigError(f"unknown FLOPs formula {formula!r} (known: matmul-v1, nanotron)")
