"""The shape of a decoder: layers of one or several types, with the field names of a Hugging Face `config.json`."""

import functools
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from itertools import chain, cycle, islice
from typing import Annotated, Any, NamedTuple

from ultrabench.allowed import (
    Count,
    NonNegative,
    Positive,
    Size,
    at_least,
    between,
    matching,
    one_of,
    require_allowed,
)
from ultrabench.attention_type import GroupedQuery
from ultrabench.errors import ConfigError, ShapeError, counted
from ultrabench.feed_forward_type import Experts, FeedForward, broken_group_rules
from ultrabench.layer_type import LayerType
from ultrabench.record import content_id, non_default_values, values_of

RENAMED = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts", "use_qk_norm": "qk_norm"}
"""Key of a config.json -> the field of ModelShape that holds it, where their names differ."""
_ExpertSize = Annotated[int, between(0, 2**20)]
"""A number or a width of experts; predictions with skewed routing list them one by one."""
_EXPERT_SIZES = ("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace")
"""Fields that must be 0 in a model without experts."""
_TYPE_LETTERS = string.ascii_letters
"""The letters that stand for the types of layers in a layer_order, a for the first one."""
_ORDER_DESCRIPTION = (
    "a letter for each layer, with the part that repeats in parentheses, such as aaa(b) or (aaab)"
)
REPLACED_BY_TYPES = (
    "qk_norm", "qk_norm_across_heads", "attention_bias", "partial_rotary_factor", "sliding_window", "n_shared_experts",
    "first_k_dense_replace", "decoder_sparse_step", "scoring_func", "norm_topk_prob", "routed_scaling_factor",
    "n_group", "topk_group",
)  # fmt: skip
"""Fields that have no effect in a model with layer_types, which have fields of their own in their place."""
SIZES_OF_TYPES = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim", "rope_theta", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip
"""Fields that only give the types of a model with layer_types their usual sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotations are stretched for sequences longer than those of the pre-training.

    llama3 is that of Llama 3.1, and yarn that of arXiv 2309.00071. The rotations of all layers are stretched.
    """

    rope_type: Annotated[str, one_of("llama3", "yarn")]
    factor: Annotated[float, at_least(1.0)]
    """Frequencies with few turns in the original context are divided by this."""
    low_freq_factor: Positive | None = None
    """llama3 divides frequencies with fewer turns than this number by the whole factor."""
    high_freq_factor: Positive | None = None
    """llama3 keeps frequencies with more turns than this number."""
    original_max_position_embeddings: Count
    """Tokens of the original context."""
    beta_fast: Positive = 32.0
    """yarn keeps the frequencies of channels with more turns than this number."""
    beta_slow: Positive = 1.0
    """yarn divides the frequencies of channels with fewer turns than this number by the whole factor."""
    mscale: NonNegative = 0.0
    """yarn multiplies rotated queries and keys by a number in which log(factor) has this weight, or the weight 1 if
    this or mscale_all_dim is 0."""
    mscale_all_dim: NonNegative = 0.0
    """yarn divides rotated queries and keys by a number in which log(factor) has this weight, and multiplies all scores
    of latent attention by its square."""
    attention_factor: Positive | None = None
    """yarn multiplies rotated queries and keys by this, if given, instead of what follows from factor and mscale."""
    truncate: bool = True
    """Whether yarn rounds the first and the last channel between beta_fast and beta_slow to whole channels."""

    def __post_init__(self) -> None:
        require_allowed(self, "rope_scaling.")
        for name in needless_fields(self):
            fact = f"rope_scaling.{name}={getattr(self, name)} has no effect with rope_type={self.rope_type}"
            raise ConfigError(f"{fact}; leave it out")
        if self.rope_type == "yarn":
            if self.beta_fast < self.beta_slow:
                raise ConfigError(
                    f"rope_scaling.beta_fast={self.beta_fast:g}; must be at least beta_slow={self.beta_slow:g}"
                )
            return
        for name in _LLAMA3_FIELDS:
            if getattr(self, name) is None:
                raise ConfigError(
                    f"rope_scaling lacks the key {name}, which rope_type=llama3 needs; give it a value"
                )
        if self.high_freq_factor <= self.low_freq_factor:  # type: ignore[operator]
            bound_text = f"low_freq_factor={self.low_freq_factor:g}"
            raise ConfigError(
                f"rope_scaling.high_freq_factor={self.high_freq_factor:g}; must be above {bound_text}"
            )


_LLAMA3_FIELDS = ("low_freq_factor", "high_freq_factor")
"""Fields of a RopeScaling that only llama3 has; the others with defaults are those of yarn."""


def needless_fields(scaling: RopeScaling) -> list[str]:
    """The fields of a scaling that have a value without effect, since they belong to another rope_type."""
    changed_names = non_default_values(scaling).keys()
    optional_names = [field.name for field in fields(RopeScaling) if field.default is not MISSING]
    is_llama3 = scaling.rope_type == "llama3"
    return [n for n in optional_names if n in changed_names and (n in _LLAMA3_FIELDS) != is_llama3]


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
    n_group: Count = 1
    """Number of groups of experts, of which the router first chooses some."""
    topk_group: Count = 1
    """Number of groups that it chooses."""
    layer_types: tuple[LayerType, ...] = ()
    """The types of layers of a model that the fields above cannot describe; empty: these fields describe all layers."""
    layer_order: Annotated[str, matching(r"[A-Za-z]*(\([A-Za-z]+\)[A-Za-z]*)?", _ORDER_DESCRIPTION)] = ""
    """A letter for the type of each layer, a for the first of layer_types; what is in parentheses repeats until the
    layers are complete, such as `aaa(b)` for three layers of another type at the start. Empty:
    all types repeat in turn."""
    num_nextn_predict_layers: Annotated[int, at_least(0)] = 0
    """Number of modules behind the last layer that predict one more token each (arXiv 2412.19437, section 2.2)."""
    embedding_multiplier: Positive = 1.0
    """Factor of the embeddings."""
    residual_multiplier: Positive = 1.0
    """Factor of what each block adds to the residual stream."""
    logits_scaling: Positive = 1.0
    """Divisor of the logits."""
    final_logit_softcapping: Positive | None = None
    """Bound c of the logits, which are c*tanh(logit/c); None means that there is none."""
    rope_type: Annotated[str, one_of("default", "linear", "dynamic", "yarn", "longrope", "llama3")] = (
        "default"
    )
    """How rotations are stretched where rope_scaling does not say it; it changes neither sizes nor work."""

    def __post_init__(self) -> None:
        where = f"model {self.name}"
        require_allowed(self, f"{where}: ")
        rules = chain(self._broken_attention_rules(), self._broken_expert_rules())
        if rule := next(self._broken_type_rules() if self.layer_types else rules, None):
            raise ShapeError(where, rule, {field: field for field in RENAMED.values()})

    def __hash__(self) -> int:
        """The hash of the name, for which caches of predictions ask six times a layout: with all fields and types,
        the playbook's predictions took 1.2 times as long.
        """
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes one object of equal shapes that processes send each other: caches of predictions compare those which
        are not the same object in all fields, which took an eighth of the time.
        """
        return _shared_shape, tuple([getattr(self, f.name) for f in fields(self)])

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
            yield (
                f"{factor_text} rotates {self.rotary_width} channels of a head; "
                "choose a factor that gives an even number"
            )
        if self.qk_norm_across_heads and not self.qk_norm:
            yield "qk_norm_across_heads=true needs {qk_norm}=true"

    def _broken_type_rules(self) -> Iterator[str]:
        """A message for each rule that the types of layers break, with its numbers."""
        defaults = {field.name: field.default for field in fields(ModelShape)}
        for name in REPLACED_BY_TYPES:
            if (value := getattr(self, name)) != defaults[name]:
                yield f"{name}={value} has no effect beside layer_types; write it into these"
        yield from self._broken_order_rules()
        for experts in (layer_type.experts for layer_type in self.layer_types if layer_type.experts):
            for name in ("num_experts", "num_experts_per_tok"):
                if getattr(experts, name) != getattr(self, name):
                    type_text = f"layer_types has experts with {name}={getattr(experts, name)}"
                    yield f"{type_text}, and the model {name}={getattr(self, name)}; all layers must have equally many"
        if self.num_experts and not any(layer_type.experts for layer_type in self.layer_types):
            yield f"{{num_experts}}={self.num_experts}, and no type of layer_types has experts; leave it out"

    def _broken_order_rules(self) -> Iterator[str]:
        """A message for each rule that layer_order breaks."""
        num_types, order = len(self.layer_types), self.layer_order
        if num_types > len(_TYPE_LETTERS):
            yield f"layer_types has {num_types} types; at most {len(_TYPE_LETTERS)} are possible"
        known_letters = _TYPE_LETTERS[:num_types]
        for letter in order:
            if letter not in (*known_letters, "(", ")"):
                types_text = (
                    f"layer_types has {counted(num_types, 'type')}, {known_letters[0]} to {known_letters[-1]}"
                )
                yield f"layer_order={order} has the letter {letter}; {types_text}"
        num_letters = sum(map(str.isalpha, order))
        if order and "(" not in order and num_letters != self.num_hidden_layers:
            yield f"layer_order has {num_letters} letters; num_hidden_layers={self.num_hidden_layers}"
        if num_letters > self.num_hidden_layers:
            yield f"layer_order has {num_letters} letters; num_hidden_layers={self.num_hidden_layers} is less"

    def _broken_expert_rules(self) -> Iterator[str]:
        """A message for each rule that the sizes of the experts break;
        a size that files may rename stands in braces.
        """
        experts_text = f"{{num_experts}}={self.num_experts}"
        if not self.num_experts:
            group_names = (name for name in ("n_group", "topk_group") if getattr(self, name) > 1)
            needless_sizes = (*filter(lambda name: getattr(self, name), _EXPERT_SIZES), *group_names)
            yield from (
                f"{name}={getattr(self, name)} needs {{num_experts}} >= 1; {experts_text}"
                for name in needless_sizes
            )
            return
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            yield f"num_experts_per_tok={self.num_experts_per_tok}; must be in 1..{experts_text}"
        group_sizes = self.num_experts, self.num_experts_per_tok, self.n_group, self.topk_group
        yield from broken_group_rules(*group_sizes)
        if not self.moe_intermediate_size:
            yield f"moe_intermediate_size=0; {experts_text} needs a width >= 1"
        if not self.num_sparse_layers(0, self.num_hidden_layers):
            dense_text = (
                f"first_k_dense_replace={self.first_k_dense_replace}, "
                f"decoder_sparse_step={self.decoder_sparse_step}"
            )
            yield f"{dense_text} leave no sparse layer among {self.num_hidden_layers}; use smaller values"

    @property
    def model_id(self) -> str:
        """First 16 hex digits of the hash of the shape without its name: two models with equal ones train alike."""
        return content_id(self.identity())

    def identity(self) -> dict[str, Any]:
        """The fields that say what is trained: without the name, and without those of ADDED_LATER that
        have their default.
        """
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
        latent = self.layer(0).latent if self.layer_types else None
        return latent.qk_rope_head_dim if latent else int(self.head_width * self.partial_rotary_factor)

    @property
    def head_widths(self) -> tuple[int, int]:
        """Widths of the widest head of queries and keys, and of the widest head of values, that any layer has."""
        heads = [kind.grouped_query or kind.latent for kind in self.kinds]
        widths = [attention.head_widths for attention in heads if attention]
        return max((qk for qk, _ in widths), default=0), max((v for _, v in widths), default=0)

    def layer(self, number: int) -> LayerType:
        """The type of the layer of this number, counted from 0.

        Layers behind the last one, of modules that predict one more token each, have its type.
        """
        layers = _layers(self)
        return layers.kinds[layers.numbers[min(number, self.num_hidden_layers - 1)]]

    @property
    def kinds(self) -> tuple[LayerType, ...]:
        """The different types of its layers, in the order in which the layers first have them."""
        return _layers(self).kinds

    @property
    def kind_numbers(self) -> tuple[int, ...]:
        """For each layer the index of its type among `kinds`."""
        return _layers(self).numbers

    def num_by_kind(self, first_layer: int, num_layers: int) -> tuple[int, ...]:
        """How many of `num_layers` layers from layer `first_layer` on have each of `kinds`."""
        layers = _layers(self)
        num_by_number = Counter(layers.numbers[first_layer : first_layer + num_layers])
        return tuple(num_by_number[number] for number in range(len(layers.kinds)))

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer of this number, counted from 0, has experts in place of the feed-forward block."""
        return self.layer(layer).experts is not None

    def num_sparse_layers(self, first_layer: int, num_layers: int) -> int:
        """Number of the layers with experts among `num_layers` layers from layer `first_layer` on."""
        counts = zip(self.num_by_kind(first_layer, num_layers), self.kinds, strict=True)
        return sum(num for num, kind in counts if kind.experts)

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
        """Number of parameters of one expert of the first type of layer that has some; 0 without experts."""
        experts = next((kind.experts for kind in self.kinds if kind.experts), None)
        return experts.expert_params(self.hidden_size) if experts else 0

    def layer_matmul_params(self, *, sparse: bool = False) -> int:
        """Number of parameters of one decoder layer that take part in the matrix products of one token.

        Args:
            sparse: whether it is a layer with experts.
        """
        kinds = [kind for kind in self.kinds if (kind.experts is not None) == sparse]
        kind = kinds[0] if kinds else _dense_type(self)
        return kind.matmul_params(self.hidden_size)

    @property
    def embedding_params(self) -> int:
        """Number of parameters of the embedding; the lm_head has as many."""
        return self.vocab_size * self.hidden_size

    def params_of_layers(self, first_layer: int, num_layers: int) -> int:
        """Number of all parameters of `num_layers` layers from layer `first_layer` on."""
        counts = zip(self.num_by_kind(first_layer, num_layers), self.kinds, strict=True)
        return sum(num * kind.num_params(self.hidden_size) for num, kind in counts)

    def matmul_params_of_layers(self, first_layer: int, num_layers: int) -> int:
        """Number of parameters that take part in the products of one token in `num_layers` layers
        from `first_layer` on.
        """
        counts = zip(self.num_by_kind(first_layer, num_layers), self.kinds, strict=True)
        return sum(num * kind.matmul_params(self.hidden_size) for num, kind in counts)

    @property
    def num_predict_params(self) -> int:
        """Number of parameters of one module that predicts one more token: two norms, a product that joins the hidden
        states with the embeddings of that token, a layer of the last one's type, and a norm; tables are shared."""
        h = self.hidden_size
        return 2 * h * h + 3 * h + self.kinds[self.kind_numbers[-1]].num_params(h)

    @property
    def num_params(self) -> int:
        """Number of all trainable parameters; tied weights are counted once."""
        num_embedding_tables = 1 if self.tie_word_embeddings else 2
        return (
            num_embedding_tables * self.embedding_params
            + self.params_of_layers(0, self.num_hidden_layers)
            + self.num_nextn_predict_layers * self.num_predict_params
            + self.hidden_size
        )

    @property
    def num_active_params(self) -> int:
        """Number of parameters used for one token: num_params without the experts that the router does not choose."""
        h, num_unchosen = self.hidden_size, self.num_experts - self.num_experts_per_tok
        num_by_kind = [*self.num_by_kind(0, self.num_hidden_layers)]
        num_by_kind[self.kind_numbers[-1]] += self.num_nextn_predict_layers
        counts = zip(num_by_kind, self.kinds, strict=True)
        unchosen_params = (
            num * num_unchosen * kind.experts.expert_params(h) for num, kind in counts if kind.experts
        )
        return self.num_params - sum(unchosen_params)

    @property
    def num_matmul_params(self) -> int:
        """Number of parameters in the products of one token: those of the layers and the lm_head, not the embedding.

        A module that predicts one more token has its own, and the lm_head once more.
        """
        h = self.hidden_size
        predict_params = (
            2 * h * h + self.kinds[self.kind_numbers[-1]].matmul_params(h) + self.embedding_params
        )
        layer_params = self.matmul_params_of_layers(0, self.num_hidden_layers)
        return layer_params + self.embedding_params + self.num_nextn_predict_layers * predict_params

    def attention_flops(self, seq_len: int, formula: str = "palm") -> int:
        """FLOPs of attention in the first layer, forward and backward, for one token of a sequence of `seq_len`."""
        return round(self.layer(0).flops_per_token(self.hidden_size, seq_len, formula).core)

    def flops_per_token(self, seq_len: int, formula: str = "palm") -> int:
        """Model FLOPs of forward and backward for one token of a sequence of `seq_len`.

        The sum is 6*N and the FLOPs of the attention of each layer, of which `formula` counts some positions. 6*N is a
        multiply and an add for each of N parameters forward, and twice that backward. N is num_matmul_params.
        """
        num_by_kind = [*self.num_by_kind(0, self.num_hidden_layers)]
        num_by_kind[self.kind_numbers[-1]] += self.num_nextn_predict_layers
        core_flops = sum(
            num * kind.flops_per_token(self.hidden_size, seq_len, formula).core
            for num, kind in zip(num_by_kind, self.kinds, strict=True)
        )
        return 6 * self.num_matmul_params + round(core_flops)


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
    layers, field_items = _layers(shape), values_of(shape).items()
    if not shape.layer_types:
        return {
            k: _field_identity(v)
            for k, v in field_items
            if k != "name" and (k not in ADDED_LATER or v != ADDED_LATER[k])
        }
    left_out = {"name", "layer_types", "layer_order", *REPLACED_BY_TYPES, *SIZES_OF_TYPES}
    content = {
        k: _field_identity(v)
        for k, v in field_items
        if k not in left_out and (k not in ADDED_LATER or v != ADDED_LATER[k])
    }
    # However the types are numbered and their order is written, a model has one identity.
    kinds = [_type_identity(kind) for kind in layers.kinds]
    return content | {"layer_types": kinds, "layers": "".join(_TYPE_LETTERS[n] for n in layers.numbers)}


def _field_identity(value: Any) -> Any:
    """The value of a field; of a RopeScaling only what does not have its default, as before it had these fields."""
    return non_default_values(value) if isinstance(value, RopeScaling) else value


def _type_identity(layer_type: LayerType) -> dict[str, Any]:
    """The fields of a type, and of its blocks, that do not have their default."""
    blocks = non_default_values(layer_type)
    return {
        name: block if isinstance(block, str) else _block_identity(block) for name, block in blocks.items()
    }


def _block_identity(block: Any) -> dict[str, Any]:
    """The fields of a block that do not have their default."""
    return {
        name: non_default_values(value) if hasattr(value, "__dataclass_fields__") else value
        for name, value in non_default_values(block).items()
    }


@functools.lru_cache(maxsize=1024, typed=True)  # 1 and 1.0 are equal, but have other texts in run ids
def _shared_shape(*values: Any) -> ModelShape:
    """The shape with these values of its fields."""
    return ModelShape(**{f.name: value for f, value in zip(fields(ModelShape), values, strict=True)})


class _Layers(NamedTuple):
    """The types of the layers of a model."""

    kinds: tuple[LayerType, ...]
    numbers: tuple[int, ...]


@functools.lru_cache(maxsize=256)  # a prediction asks for the types of a stage a dozen times
def _layers(shape: ModelShape) -> _Layers:
    """The types of the layers of a model, and the index of that of each layer."""
    all_types = [*(_typed(shape) if shape.layer_types else _described_by_fields(shape))]
    kinds = tuple(dict.fromkeys(all_types))
    number_by_kind = {kind: number for number, kind in enumerate(kinds)}
    return _Layers(kinds, tuple(number_by_kind[layer_type] for layer_type in all_types))


def _typed(shape: ModelShape) -> Iterator[LayerType]:
    """The type of each layer of a model with layer_types."""
    num_layers, order = shape.num_hidden_layers, shape.layer_order
    start, _, rest = order.partition("(")
    repeated, _, end = rest.partition(")")
    period = repeated or ("" if order else _TYPE_LETTERS[: len(shape.layer_types)])
    num_repeated = num_layers - len(start) - len(end)
    for letter in chain(start, islice(cycle(period), num_repeated), end):
        yield shape.layer_types[_TYPE_LETTERS.index(letter)]


def _described_by_fields(shape: ModelShape) -> Iterator[LayerType]:
    """The type of each layer of a model without layer_types: dense, or with experts."""
    dense_type, sparse_type = _dense_type(shape), _sparse_type(shape) if shape.num_experts else None
    for n in range(shape.num_hidden_layers):
        is_sparse = n >= shape.first_k_dense_replace and (n + 1) % shape.decoder_sparse_step == 0
        yield sparse_type if sparse_type and is_sparse else dense_type


def _attention_of(shape: ModelShape) -> GroupedQuery:
    """The attention that the fields of a shape describe."""
    return GroupedQuery(
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_width,
        attention_bias=shape.attention_bias,
        qk_norm="all" if shape.qk_norm_across_heads else "head" if shape.qk_norm else "none",
        partial_rotary_factor=shape.partial_rotary_factor,
        rope_theta=shape.rope_theta,
        sliding_window=shape.sliding_window,
    )


def _dense_type(shape: ModelShape) -> LayerType:
    """The type of the dense layers that the fields of a shape describe."""
    feed_forward = FeedForward(intermediate_size=shape.intermediate_size)
    return LayerType(grouped_query=_attention_of(shape), feed_forward=feed_forward)


def _sparse_type(shape: ModelShape) -> LayerType:
    """The type of the layers with experts that the fields of a shape describe."""
    experts = Experts(
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_tok,
        moe_intermediate_size=shape.moe_intermediate_size,
        shared_expert_intermediate_size=shape.shared_expert_intermediate_size,
        scoring_func=shape.scoring_func,
        norm_topk_prob=shape.norm_topk_prob,
        routed_scaling_factor=shape.routed_scaling_factor,
        n_group=shape.n_group,
        topk_group=shape.topk_group,
    )
    return LayerType(grouped_query=_attention_of(shape), experts=experts)


def described_by_fields(shape: ModelShape) -> ModelShape:
    """The shape of this model without layer_types if its other fields can describe all layers, else the shape as it
    is.
    """
    if not shape.layer_types:
        return shape
    dense_type = next((kind for kind in shape.kinds if kind.feed_forward), None)
    sparse_type = next((kind for kind in shape.kinds if kind.experts), None)
    attention = shape.kinds[0].grouped_query
    if attention is None:
        return shape
    sparse_layers = [n for n in range(shape.num_hidden_layers) if shape.is_sparse(n)]
    step = sparse_layers[1] - sparse_layers[0] if len(sparse_layers) > 1 else 1
    settings: dict[str, Any] = {
        "layer_types": (), "layer_order": "", "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads, "head_dim": attention.head_dim,
        "attention_bias": attention.attention_bias, "qk_norm": attention.qk_norm in ("head", "all"),
        "qk_norm_across_heads": attention.qk_norm == "all", "rope_theta": attention.rope_theta,
        "partial_rotary_factor": attention.partial_rotary_factor, "sliding_window": attention.sliding_window,
    }  # fmt: skip
    if dense_type and dense_type.feed_forward:
        settings["intermediate_size"] = dense_type.feed_forward.intermediate_size
    if sparse_type and (experts := sparse_type.experts):
        names = (
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "scoring_func",
            "norm_topk_prob",
        )
        more_names = "routed_scaling_factor", "n_group", "topk_group"
        settings |= {name: getattr(experts, name) for name in (*names, *more_names)}
        settings["n_shared_experts"] = (
            experts.shared_expert_intermediate_size // experts.moe_intermediate_size
        )
        settings |= {
            "decoder_sparse_step": step,
            "first_k_dense_replace": sparse_layers[0] if step == 1 else 0,
        }
    try:
        candidate = replace(shape, **settings)
    except ConfigError:
        return shape
    layers, candidate_layers = _layers(shape), _layers(candidate)
    return candidate if layers == candidate_layers else shape
