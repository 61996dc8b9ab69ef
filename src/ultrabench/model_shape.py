"""The shape of a Llama-style decoder, dense or with experts, with the field names of a Hugging Face `config.json`."""

import functools
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from itertools import chain
from typing import Annotated, Any

from ultrabench.allowed import Count, Positive, Size, at_least, between, one_of, require_allowed
from ultrabench.errors import ConfigError, ShapeError
from ultrabench.record import content_id, values_of

FLOPS_FORMULAS = {"palm": 12, "megatron": 6}
"""Formula -> FLOPs of attention for each pair of a token and a position, in each channel of the query heads.

The two products of attention (scores and values) are 4 FLOPs forward and 8 backward. palm counts all positions
(PaLM, arXiv 2204.02311, appendix B), as torchtitan and nanotron do. megatron counts the half that the causal mask
leaves (num_floating_point_operations of Megatron-LM).
"""

RENAMED = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts", "use_qk_norm": "qk_norm"}
"""Key of a config.json -> the field of ModelShape that holds it, where their names differ."""
_ExpertSize = Annotated[int, between(0, 2**20)]
"""A number or a width of experts; predictions with skewed routing list them one by one."""
_EXPERT_SIZES = ("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace")
"""Fields that must be 0 in a model without experts."""


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
            bound_text = f"low_freq_factor={self.low_freq_factor:g}"
            raise ConfigError(
                f"rope_scaling.high_freq_factor={self.high_freq_factor:g}; must be above {bound_text}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """All sizes of a model that decide its memory and its FLOPs."""

    name: str
    """Usual name of the model; it is no part of a run's identity."""
    hidden_size: Size
    num_hidden_layers: Annotated[int, between(1, 10_000)]
    num_attention_heads: Size
    num_key_value_heads: Size
    """Number of key/value heads; fewer than num_attention_heads means grouped-query attention."""
    intermediate_size: Size
    """Width of the SwiGLU feed-forward block."""
    vocab_size: Size
    tie_word_embeddings: bool
    """Whether embedding and lm_head are one matrix, which is then counted once."""
    rope_theta: Positive = 10000.0
    rms_norm_eps: Positive = 1e-5
    head_dim: Size | None = None
    """Width of one attention head where it is given; None means hidden_size / num_attention_heads."""
    qk_norm: bool = False
    """Whether queries and keys are normalised before their rotation: in each head, as in Qwen3, or across heads."""
    qk_norm_across_heads: bool = False
    """Whether this norm is one over all heads together, as in OLMoE."""
    attention_bias: bool = False
    """Whether the projections to queries, keys and values have biases, as in Qwen2."""
    partial_rotary_factor: Annotated[float, between(0.0, 1.0)] = 1.0
    """Share of the channels of a head that are rotated, the first ones; the others stay as they are."""
    rope_scaling: RopeScaling | None = None
    sliding_window: Count | None = None
    """Number of positions that a token attends to, its own included; None means all earlier ones."""
    num_experts: _ExpertSize = 0
    """Number of experts of a sparse layer, among which its router chooses; 0 means that all layers are dense."""
    num_experts_per_tok: _ExpertSize = 0
    """Number of experts that the router chooses for a token."""
    moe_intermediate_size: _ExpertSize = 0
    """Width of one expert, which is a SwiGLU feed-forward block."""
    n_shared_experts: _ExpertSize = 0
    """Number of experts that every token passes in addition, as one block of so many times the width."""
    first_k_dense_replace: Annotated[int, at_least(0)] = 0
    """Number of the first layers that are dense."""
    decoder_sparse_step: Count = 1
    """n if of the other layers only every n-th one of the model is sparse."""
    scoring_func: Annotated[str, one_of("softmax", "sigmoid")] = "softmax"
    """How the router turns the product with its weights into the scores of the experts."""
    norm_topk_prob: bool = True
    """Whether the scores of the chosen experts are divided by their sum."""
    routed_scaling_factor: Positive = 1.0
    """Factor by which the scores of the chosen experts are multiplied in the end."""

    def __post_init__(self) -> None:
        where = f"model {self.name}"
        require_allowed(self, f"{where}: ")
        if rule := next(chain(self._broken_attention_rules(), self._broken_expert_rules()), None):
            raise ShapeError(where, rule, {field: field for field in RENAMED.values()})

    def _broken_attention_rules(self) -> Iterator[str]:
        """A message for each rule that the sizes of the attention break, with its numbers."""
        heads_text = f"num_attention_heads={self.num_attention_heads}"
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            yield f"{heads_text} does not divide hidden_size={self.hidden_size}; change one of them or give head_dim"
        if self.head_width % 2:
            yield f"head_dim={self.head_width}; rotary embeddings need an even head_dim: choose another"
        if self.num_attention_heads % self.num_key_value_heads:
            yield f"num_key_value_heads={self.num_key_value_heads} must divide {heads_text}"
        if self.rotary_width % 2:
            factor_text = f"partial_rotary_factor={self.partial_rotary_factor:g}"
            yield f"{factor_text} rotates {self.rotary_width} channels of a head; choose a factor that gives an even number"
        if self.qk_norm_across_heads and not self.qk_norm:
            yield "qk_norm_across_heads=true needs {qk_norm}=true"

    def _broken_expert_rules(self) -> Iterator[str]:
        """A message for each rule that the sizes of the experts break; a size that files may rename stands in braces."""
        experts_text = f"{{num_experts}}={self.num_experts}"
        if not self.num_experts:
            needless_sizes = (name for name in _EXPERT_SIZES if getattr(self, name))
            yield from (
                f"{name}={getattr(self, name)} needs {{num_experts}} >= 1; {experts_text}"
                for name in needless_sizes
            )
            return
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            yield f"num_experts_per_tok={self.num_experts_per_tok}; must be in 1..{experts_text}"
        if not self.moe_intermediate_size:
            yield f"moe_intermediate_size=0; {experts_text} needs a width >= 1"
        if not self.num_sparse_layers(0, self.num_hidden_layers):
            dense_text = f"first_k_dense_replace={self.first_k_dense_replace}, decoder_sparse_step={self.decoder_sparse_step}"
            yield f"{dense_text} leave no sparse layer among {self.num_hidden_layers}; use smaller values"

    @property
    def model_id(self) -> str:
        """First 16 hex digits of the hash of the shape without its name: two models with equal ones train alike."""
        return content_id(self.identity())

    def identity(self) -> dict[str, Any]:
        """The fields that say what is trained: without the name, and without those of ADDED_LATER that have their default."""
        return dict(_identity(self))

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
    def rotary_width(self) -> int:
        """Number of channels of a head that are rotated."""
        return int(self.head_width * self.partial_rotary_factor)

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer of this number, counted from 0, has experts in place of the feed-forward block."""
        return self.num_sparse_layers(layer, 1) == 1

    def num_sparse_layers(self, first_layer: int, num_layers: int) -> int:
        """Number of the layers with experts among `num_layers` layers from layer `first_layer` on."""
        step, end_layer = self.decoder_sparse_step, first_layer + num_layers
        start_layer = min(max(first_layer, self.first_k_dense_replace), end_layer)
        return end_layer // step - start_layer // step if self.num_experts else 0

    @property
    def sparse_layers(self) -> str:
        """A 1 for each layer with experts and a 0 for each other one, such as `[0,1,1,1]`."""
        return f"[{','.join(str(int(self.is_sparse(layer))) for layer in range(self.num_hidden_layers))}]"

    @property
    def shared_expert_intermediate_size(self) -> int:
        """Width of the block of the shared experts together; 0 means that there are none."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def expert_weights(self) -> str:
        """What weighs the chosen experts of a token: scoring_func, and `/sum` where the weights add up to 1.

        It is `1` where this leaves one expert the weight 1, whatever its score.
        """
        if self.norm_topk_prob and self.num_experts_per_tok == 1:
            return "1"
        return f"{self.scoring_func}/sum" if self.norm_topk_prob else self.scoring_func

    @property
    def expert_params(self) -> int:
        """Number of parameters of one expert: gate, up and down."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    def layer_matmul_params(self, *, sparse: bool = False) -> int:
        """Number of parameters of one decoder layer that take part in the matrix products of one token.

        The q and out projections have h*q_width each, k and v h*kv_width each, and gate, up and down h*f each. A
        sparse layer has instead of these three the router with h*E, and the experts that a token passes.
        """
        h = self.hidden_size
        attention_params = h * (2 * self.q_width + 2 * self.kv_width)
        if not sparse:
            return attention_params + 3 * h * self.intermediate_size
        num_passed_experts = self.num_experts_per_tok + self.n_shared_experts
        return attention_params + h * self.num_experts + num_passed_experts * self.expert_params

    def layer_params(self, *, sparse: bool = False) -> int:
        """Number of all parameters of one decoder layer: its matrices, biases and the weights of its RMSNorms."""
        norm_width = self.q_width + self.kv_width if self.qk_norm_across_heads else 2 * self.head_width
        vector_params = 2 * self.hidden_size + norm_width * self.qk_norm
        vector_params += (self.q_width + 2 * self.kv_width) * self.attention_bias
        unchosen_params = (self.num_experts - self.num_experts_per_tok) * self.expert_params if sparse else 0
        return self.layer_matmul_params(sparse=sparse) + unchosen_params + vector_params

    @property
    def embedding_params(self) -> int:
        """Number of parameters of the embedding; the lm_head has as many."""
        return self.vocab_size * self.hidden_size

    def params_of_layers(self, first_layer: int, num_layers: int) -> int:
        """Number of all parameters of `num_layers` layers from layer `first_layer` on."""
        num_sparse = self.num_sparse_layers(first_layer, num_layers)
        return num_sparse * self.layer_params(sparse=True) + (num_layers - num_sparse) * self.layer_params()

    def matmul_params_of_layers(self, first_layer: int, num_layers: int) -> int:
        """Number of parameters that take part in the products of one token in `num_layers` layers from `first_layer` on."""
        num_sparse = self.num_sparse_layers(first_layer, num_layers)
        return (
            num_sparse * self.layer_matmul_params(sparse=True)
            + (num_layers - num_sparse) * self.layer_matmul_params()
        )

    @property
    def num_params(self) -> int:
        """Number of all trainable parameters; tied weights are counted once."""
        num_embedding_tables = 1 if self.tie_word_embeddings else 2
        return (
            num_embedding_tables * self.embedding_params
            + self.params_of_layers(0, self.num_hidden_layers)
            + self.hidden_size
        )

    @property
    def num_active_params(self) -> int:
        """Number of parameters used for one token: num_params without the experts that the router does not choose."""
        num_sparse = self.num_sparse_layers(0, self.num_hidden_layers)
        return (
            self.num_params - num_sparse * (self.num_experts - self.num_experts_per_tok) * self.expert_params
        )

    @property
    def num_matmul_params(self) -> int:
        """Number of parameters in the products of one token: those of the layers and the lm_head, not the embedding."""
        return self.matmul_params_of_layers(0, self.num_hidden_layers) + self.embedding_params

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
        attention_flops = self.num_hidden_layers * self.attention_flops(seq_len, formula)
        return 6 * self.num_matmul_params + attention_flops


ADDED_LATER: dict[str, Any] = {
    field.name: field.default
    for field in fields(ModelShape)
    if field.default is not MISSING and field.name not in ("rope_theta", "rms_norm_eps")
}
"""Name -> default of each field that was added to the identity after version 1. A field with its default is
left out of the hash, so that old ids stay valid."""


@functools.lru_cache(maxsize=64)  # because a plan hashes the shape with each of its candidates
def _identity(shape: ModelShape) -> dict[str, Any]:
    """What `ModelShape.identity` returns."""
    field_items = values_of(shape).items()
    return {k: v for k, v in field_items if k != "name" and (k not in ADDED_LATER or v != ADDED_LATER[k])}
