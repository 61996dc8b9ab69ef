"""Readers of config.json files by their `model_type`: each gives the fields of a shape.

A key that a reader neither reads nor names as unused is refused, since it may change the model.
Source of keys and of their values where a file lacks them: the configuration classes and models of transformers 5.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

from ultrabench.sweep.config.families.blocks import (
    Block,
    dense,
    gated_delta,
    grouped_query,
    latent,
    layers_of,
    rotation_fields,
    routed,
    words_of_layers,
)
from ultrabench.sweep.config.families.keys import ConfigKeys

FULL, SLIDING, LINEAR, CHUNKED = (
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "chunked_attention",
)
"""Words of `layer_types` in a config.json."""


def _common(
    keys: ConfigKeys, rotation: Block, *, eps: float = 1e-6, tied: bool = False, **words: Any
) -> Block:
    """The fields of a shape beside the types of its layers."""
    keys.unused(
        "rope_scaling", "rope_parameters", "quantization_config", "quantization", "num_nextn_predict_layers"
    )
    num_heads = keys.count("num_attention_heads")
    fields = {
        "hidden_size": keys.size("hidden_size"),
        "num_hidden_layers": words.get("num_hidden_layers") or keys.size("num_hidden_layers"),
        "num_attention_heads": num_heads, "num_key_value_heads": keys.get("num_key_value_heads", default=num_heads),
        "intermediate_size": keys.get("intermediate_size", "moe_intermediate_size"),
        "vocab_size": keys.size("vocab_size"),
        "tie_word_embeddings": keys.get("tie_word_embeddings", default=tied),
        "rms_norm_eps": keys.get("rms_norm_eps", "layer_norm_epsilon", "norm_eps", default=eps),
        "rope_theta": rotation["rope_theta"], "head_dim": keys.get("head_dim", "attention_head_dim"),
        **rotation_fields(rotation),
    }  # fmt: skip
    return fields | words


def _experts_fields(experts: Block) -> Block:
    """The fields of a shape that say how many experts it has."""
    names = "num_experts", "num_experts_per_tok", "moe_intermediate_size"
    return {name: experts["experts"][name] for name in names}


def _router_groups(keys: ConfigKeys) -> Block:
    """The groups of experts of a router, and what becomes of its scores."""
    return {
        "n_group": keys.get("n_group", default=1), "topk_group": keys.get("topk_group", default=1),
        "routed_scaling_factor": keys.get("routed_scaling_factor", default=1.0),
    }  # fmt: skip


def _deepseek(
    keys: ConfigKeys, *, scoring: str = "sigmoid", normalized: bool = True, has_index: bool = False
) -> Block:
    """Latent attention, and experts in all layers but the first ones: DeepSeek V2 to V3.2,
    Kimi K2, GLM-5, Mistral 4.
    """
    keys.only("mlp_bias", False)
    keys.only("moe_layer_freq", 1)
    keys.only("scoring_func", scoring)
    keys.unused("mscale")
    groups = _router_groups(keys)
    if keys.get("topk_method") == "greedy":  # the router of DeepSeek V2 that ignores its groups
        groups |= {"n_group": 1, "topk_group": 1}
    rotation, num_layers = keys.rotation(), keys.count("num_hidden_layers")
    words = words_of_layers(
        keys, ("mlp_layer_types",), num_layers,
        lambda n: "dense" if n < keys.count("first_k_dense_replace", default=0) else "sparse",
    )  # fmt: skip
    keys.unused("first_k_dense_replace")
    if {*words} - {"dense", "sparse"}:
        keys.refuse("mlp_layer_types", '"dense" or "sparse" in each layer')
    if {*keys.words("layer_types")} - {"indexed_attention", FULL}:
        keys.refuse("layer_types", f'"indexed_attention" or "{FULL}" in all layers')
    if {*keys.words("indexer_types")} - {"full"}:
        keys.refuse("indexer_types", '"full" in all layers')
    attention = latent(keys, rotation, has_index=has_index)
    width = keys.count("moe_intermediate_size")
    experts = routed(
        keys, width=width, shared_expert_intermediate_size=keys.count("n_shared_experts", default=0) * width,
        scoring_func=scoring, norm_topk_prob=keys.get("norm_topk_prob", default=normalized), **groups,
    )  # fmt: skip
    blocks = {"dense": dense(keys), "sparse": experts}
    layers = layers_of(keys, num_layers, lambda n: attention | blocks[words[n]], words.__getitem__)
    has_experts = "sparse" in words
    return _common(keys, rotation, head_dim=None) | (_experts_fields(experts) if has_experts else {}) | layers


def _deepseek_v2(keys: ConfigKeys) -> Block:
    return _deepseek(keys, scoring="softmax", normalized=False)


def _deepseek_v32(keys: ConfigKeys) -> Block:
    return _deepseek(keys, has_index=True)


def _mistral4(keys: ConfigKeys) -> Block:
    return _deepseek(keys, scoring="softmax")


def _gpt_oss(keys: ConfigKeys) -> Block:
    """Experts with biases, attention with sinks, and a window in every second layer."""
    keys.unused("experts_per_token", "initial_context_length", "swiglu_alpha")
    rotation, num_layers = keys.rotation(theta=150000.0), keys.count("num_hidden_layers")
    words = words_of_layers(keys, ("layer_types",), num_layers, lambda n: FULL if n % 2 else SLIDING)
    window, has_bias = keys.get("sliding_window", default=128), keys.get("attention_bias", default=True)
    limit = float(keys.get("swiglu_limit", default=7.0))
    experts = routed(
        keys, width=keys.size("intermediate_size"), expert_bias=True, router_bias=True, swiglu_limit=limit,
    )  # fmt: skip
    biases = {"attention_bias": has_bias, "output_bias": has_bias, "sinks": True}

    def type_of(n: int) -> Block:
        attention = grouped_query(keys, rotation, **biases, sliding_window=_window(keys, words[n], window))
        return attention | experts

    layers = layers_of(keys, num_layers, type_of, words.__getitem__)
    return _common(keys, rotation, eps=1e-5) | _experts_fields(experts) | layers


def _window(keys: ConfigKeys, word: str, window: Any) -> Any:
    """The window of a layer by its word in layer_types."""
    if word not in (FULL, SLIDING):
        keys.refuse("layer_types", f'"{FULL}" or "{SLIDING}" in each layer')
    return window if word == SLIDING else None


def _gemma3(keys: ConfigKeys) -> Block:
    """Five layers with a window to one without; norms before and after each block."""
    keys.only("use_bidirectional_attention", False)
    keys.unused("_sliding_window_pattern", "cache_implementation")
    rotation, num_layers = keys.rotation(FULL, theta=1e6), keys.count("num_hidden_layers")
    local_theta = (
        keys.rotation(SLIDING)["rope_theta"] if isinstance(keys.get("rope_parameters"), dict) else 1e4
    )
    local = {**rotation, "rope_theta": keys.get("rope_local_base_freq", default=local_theta)}
    period = keys.count("sliding_window_pattern", default=6, least=1)
    words = words_of_layers(
        keys, ("layer_types",), num_layers, lambda n: SLIDING if (n + 1) % period else FULL
    )
    head_dim, window = keys.get("head_dim", default=256), keys.get("sliding_window", default=4096)
    scalar = keys.get("query_pre_attn_scalar", default=256)
    if scalar <= 0:
        keys.refuse("query_pre_attn_scalar", "> 0")
    has_bias = keys.get("attention_bias", default=False)
    common = {
        "num_attention_heads": keys.get("num_attention_heads", default=8), "head_dim": head_dim,
        "num_key_value_heads": keys.get("num_key_value_heads", default=4), "qk_norm": "head",
        "attention_bias": has_bias,
        "output_bias": has_bias, "attention_multiplier": None if scalar == head_dim else scalar**-0.5,
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
    }  # fmt: skip
    block = {"feed_forward": {
        "intermediate_size": keys.size("intermediate_size"), "norms": "both",
        "hidden_act": keys.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
    }}  # fmt: skip
    norms = block["feed_forward"].pop("norms")

    def type_of(n: int) -> Block:
        turned = local if words[n] == SLIDING else rotation
        angles = {key: turned[key] for key in ("rope_theta", "partial_rotary_factor")}
        attention = {**common, **angles, "sliding_window": _window(keys, words[n], window)}
        return {"grouped_query": attention, **block, "norms": norms}

    fields = {
        "hidden_size": keys.size("hidden_size"), "num_hidden_layers": num_layers,
        "num_attention_heads": common["num_attention_heads"], "num_key_value_heads": common["num_key_value_heads"],
        "intermediate_size": keys.size("intermediate_size"), "vocab_size": keys.get("vocab_size", default=262208),
        "tie_word_embeddings": keys.get("tie_word_embeddings", default=True),
        "rms_norm_eps": keys.get("rms_norm_eps", default=1e-6), "rope_theta": rotation["rope_theta"],
        "head_dim": head_dim, "embedding_multiplier": sqrt(keys.count("hidden_size", least=1)),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }  # fmt: skip
    keys.unused("rope_scaling", "quantization_config", "rope_theta")
    return fields | rotation_fields(rotation) | layers_of(keys, num_layers, type_of, words.__getitem__)


def _llama4(keys: ConfigKeys) -> Block:
    """Chunks in three of four layers, no rotation in the fourth, and experts in some layers."""
    keys.only("router_jitter_noise", 0, 0.0)
    keys.unused("attn_temperature_tuning", "floor_scale", "attn_scale", "for_llm_compressor", "layer_types")
    rotation, num_layers = keys.rotation(theta=5e5), keys.count("num_hidden_layers")
    interval, step = (
        keys.count("no_rope_layer_interval", default=4, least=1),
        keys.count("interleave_moe_layer_step", default=1),
    )
    has_rope = words_of_layers(
        keys, ("no_rope_layers",), num_layers, lambda n: str(int((n + 1) % interval != 0))
    )
    chunk_words = words_of_layers(
        keys, ("layer_types",), num_layers, lambda n: CHUNKED if has_rope[n] == "1" else FULL
    )
    sparse_layers = keys.get("moe_layers", default=[*range(step - 1, num_layers, step)] if step else [])
    width, chunk = keys.count("intermediate_size"), keys.get("attention_chunk_size")
    has_norm, has_bias = keys.get("use_qk_norm", default=True), keys.get("attention_bias", default=False)
    experts = routed(
        keys, width=width, shared_expert_intermediate_size=width, scoring_func="sigmoid", norm_topk_prob=False
    )

    def type_of(n: int) -> Block:
        is_rotated = has_rope[n] == "1"
        turned = rotation if is_rotated else {**rotation, "partial_rotary_factor": 0.0}
        attention = grouped_query(
            keys, turned, qk_norm="l2" if is_rotated and has_norm else "none", attention_bias=has_bias,
            output_bias=has_bias, attention_chunk_size=chunk if chunk_words[n] == CHUNKED else None,
        )  # fmt: skip
        return attention | (experts if n in sparse_layers else dense(keys, "intermediate_size_mlp"))

    layers = layers_of(keys, num_layers, type_of, lambda n: (has_rope[n], chunk_words[n], n in sparse_layers))
    keys.unused("intermediate_size_mlp")
    return _common(keys, rotation, eps=1e-5) | (_experts_fields(experts) if sparse_layers else {}) | layers


def _qwen3_next(keys: ConfigKeys, *, has_experts: bool = True) -> Block:
    """Three layers of linear attention to one of gated attention: Qwen3-Next and Qwen3.5."""
    keys.only("attn_output_gate", True)
    keys.only("mtp_use_dedicated_embeddings", False)
    keys.unused("mtp_num_hidden_layers", "mamba_ssm_dtype", "output_gate_type")
    rotation, num_layers = keys.rotation(share=0.25), keys.count("num_hidden_layers")
    interval = keys.count("full_attention_interval", default=4, least=1)
    words = words_of_layers(
        keys, ("layer_types",), num_layers, lambda n: LINEAR if (n + 1) % interval else FULL
    )
    if {*words} - {FULL, LINEAR}:
        keys.refuse("layer_types", f'"{FULL}" or "{LINEAR}" in each layer')
    has_bias = keys.get("attention_bias", default=False)
    full = grouped_query(
        keys, rotation, qk_norm="head", output_gate="channel", attention_bias=has_bias, output_bias=has_bias
    )
    attention_by_word = {FULL: full, LINEAR: gated_delta(keys)}
    step, dense_layers = (
        keys.count("decoder_sparse_step", default=1, least=1),
        keys.get("mlp_only_layers", default=[]),
    )
    experts: Block = {}
    if has_experts:
        experts = routed(
            keys, width=keys.size("moe_intermediate_size"), shared_expert_gate=True,
            shared_expert_intermediate_size=keys.size("shared_expert_intermediate_size"),
            norm_topk_prob=keys.get("norm_topk_prob", default=True),
        )  # fmt: skip

    def is_sparse(n: int) -> bool:
        return has_experts and n not in dense_layers and (n + 1) % step == 0

    def type_of(n: int) -> Block:
        return attention_by_word[words[n]] | (experts if is_sparse(n) else dense(keys))

    layers = layers_of(keys, num_layers, type_of, lambda n: (words[n], is_sparse(n)))
    return _common(keys, rotation) | (_experts_fields(experts) if experts else {}) | layers


def _qwen3_5(keys: ConfigKeys) -> Block:
    return _qwen3_next(keys, has_experts=False)


def _minimax_m2(keys: ConfigKeys) -> Block:
    """Experts in all layers, and norms over all heads together."""
    keys.only("qk_norm_type", "per_layer")
    keys.only("router_jitter_noise", 0, 0.0)
    keys.only("scoring_func", "sigmoid")
    if {*keys.words("attn_type_list")} - {"1"}:
        keys.refuse("attn_type_list", "1 in all layers")
    keys.unused("use_mtp", "mtp_transformer_layers", "num_mtp_modules", "use_routing_bias")
    share = keys.get("rotary_dim", default=0) / keys.count("head_dim", least=1) or 1.0
    rotation, num_layers = keys.rotation(theta=5e6, share=share), keys.count("num_hidden_layers")
    attention = grouped_query(
        keys, rotation, qk_norm="all" if keys.get("use_qk_norm", default=True) else "none"
    )
    experts = routed(
        keys, width=keys.size("intermediate_size"), scoring_func="sigmoid",
        shared_expert_intermediate_size=keys.get("shared_intermediate_size", default=0),
    )  # fmt: skip
    layers = layers_of(keys, num_layers, lambda n: attention | experts, lambda n: 0)
    return _common(keys, rotation) | _experts_fields(experts) | layers


def _step3(keys: ConfigKeys) -> Block:
    """Windows in layers with more heads, a gate for each head, and experts in all layers but the first ones."""
    for name in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        keys.only(name, False)
    for name in ("use_qk_norm", "use_head_wise_attn_gate", "use_moe", "norm_expert_weight"):
        keys.only(name, True)
    for name in ("scoring_func", "moe_router_activation"):
        keys.only(name, "sigmoid")
    keys.only("n_shared_experts", 1)
    keys.only("query_pre_attn_scalar", keys.size("head_dim"))
    for name in ("swiglu_limits", "swiglu_limits_shared"):
        if any(keys.get(name, default=[])):
            keys.refuse(name, "0 or null in all layers")
    keys.unused(
        "use_moe_router_bias", "need_fp32_gate", "yarn_only_types", "mtp_layer_types", "mtp_mlp_layer_types",
        "per_layer_config", "num_local_experts", "att_impl_type",
    )  # fmt: skip
    num_layers, window = keys.count("num_hidden_layers"), keys.get("sliding_window")
    words = words_of_layers(keys, ("layer_types",), num_layers, lambda n: FULL)
    sparse_layers = {n for n in range(num_layers) if n >= keys.count("first_k_dense_replace", default=3)}
    listed_layers = keys.get("moe_layers_enum")
    if listed_layers is not None:
        numbers = listed_layers.split(",") if isinstance(listed_layers, str) else listed_layers
        if not isinstance(numbers, list) or not all(str(n).strip().isdecimal() for n in numbers):
            keys.refuse("moe_layers_enum", "a list of the numbers of layers")
        sparse_layers = {int(n) for n in numbers}
    blocks = words_of_layers(
        keys, ("mlp_layer_types",), num_layers, lambda n: "sparse" if n in sparse_layers else "dense"
    )
    if {*blocks} - {"dense", "sparse"}:
        keys.refuse("mlp_layer_types", '"dense" or "sparse" in each layer')
    rotations = [keys.rotation(word, layer=n) for n, word in enumerate(words)]
    num_kv_heads = keys.size("num_key_value_heads", "num_attention_groups")
    heads_by_word = {FULL: keys.count("num_attention_heads"), SLIDING: _windowed_heads(keys, num_kv_heads)}
    num_experts = keys.size("n_routed_experts", "num_experts", "moe_num_experts")
    experts = {"experts": {
        "num_experts": num_experts, "num_experts_per_tok": keys.size("num_experts_per_tok", "moe_top_k"),
        "moe_intermediate_size": keys.size("moe_intermediate_size"), "hidden_act": keys.activation("hidden_act"),
        "shared_expert_intermediate_size": keys.size("share_expert_dim", "share_expert_dims"),
        "scoring_func": "sigmoid", "routed_scaling_factor": float(keys.get("moe_router_scaling_factor", default=1.0)),
    }}  # fmt: skip

    def type_of(n: int) -> Block:
        layer_window = _window(keys, words[n], window)
        attention = grouped_query(
            keys, rotations[n], num_attention_heads=heads_by_word[words[n]], num_key_value_heads=num_kv_heads,
            qk_norm="head", output_gate="head", sliding_window=layer_window,
        )  # fmt: skip
        return attention | (experts if blocks[n] == "sparse" else dense(keys))

    def key_of(n: int) -> tuple[Any, ...]:
        return words[n], blocks[n], rotations[n]["rope_theta"], rotations[n]["partial_rotary_factor"]

    layers = layers_of(keys, num_layers, type_of, key_of)
    expert_fields = _experts_fields(experts) if "sparse" in blocks else {}
    sizes = {"num_key_value_heads": num_kv_heads}
    return _common(keys, rotations[0], eps=1e-5, **sizes) | expert_fields | layers


def _windowed_heads(keys: ConfigKeys, num_kv_heads: int) -> int:
    """Number of heads of layers with a window, which files give under either of two keys."""
    name = "attention_other_setting"
    settings = keys.get(name) or {}
    same_sizes = {
        "num_attention_groups": num_kv_heads, "head_dim": keys.size("head_dim"), "true_head_dim": keys.size("head_dim"),
        "attention_type": SLIDING,
    }  # fmt: skip
    if not isinstance(settings, dict) or any(
        settings.get(key, size) != size for key, size in same_sizes.items()
    ):
        keys.refuse(name, "with the key/value heads and the head_dim of the other layers")
    num_heads = settings.get("num_attention_heads", keys.count("num_attention_heads"))
    return keys.count("num_sliding_attention_heads", default=num_heads)


_NEMOTRON_WORDS = {
    "M": LINEAR, "mamba": LINEAR, "*": FULL, "attention": FULL, "-": "mlp", "E": "moe",
    **{word: word for word in (LINEAR, FULL, "mlp", "moe")},
}  # fmt: skip
"""Letter of hybrid_override_pattern, or word of a list -> the block of a layer."""


def _nemotron_h(keys: ConfigKeys) -> Block:
    """State space layers, attention without rotation and feed-forward blocks as layers of their own."""
    for name in ("attention_bias", "mamba_proj_bias", "residual_in_fp32"):
        keys.only(name, False)
    keys.only("mamba_hidden_act", "silu")
    keys.unused(
        "chunk_size", "expand", "num_logits_to_keep", "rescale_prenorm_residual", "time_step_floor", "time_step_max",
        "time_step_min", "time_step_limit", "time_step_rank", "use_mamba_kernels", "mamba_ssm_cache_dtype",
        "sliding_window",
        "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_shared_experts",
        "num_hidden_layers", "keep_mtp",
    )  # fmt: skip
    letters = keys.get("layers_block_type", "layer_types", "hybrid_override_pattern", default="")
    words = (
        [_NEMOTRON_WORDS.get(str(letter), "") for letter in letters]
        if isinstance(letters, str | list)
        else []
    )
    if not words or "" in words:
        keys.refuse("hybrid_override_pattern", "made of M, *, - and E")
    rotation = {**keys.rotation(), "partial_rotary_factor": 0.0}
    has_bias, act = keys.get("mlp_bias", default=False), keys.activation("mlp_hidden_act", default="relu2")
    state_space = {
        **{name: keys.size(name) for name in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")},
        "conv_kernel": keys.get("conv_kernel", default=4), "use_conv_bias": keys.get("use_conv_bias", default=True),
        "use_bias": keys.get("use_bias", default=False),
    }  # fmt: skip
    block_by_word: dict[str, Block] = {
        LINEAR: {"state_space": state_space},
        FULL: grouped_query(keys, rotation),
    }
    block_by_word["mlp"] = {"feed_forward": {
        "intermediate_size": keys.size("intermediate_size"), "gated": False, "hidden_act": act, "mlp_bias": has_bias,
    }}  # fmt: skip
    expert_fields: Block = {}
    if "moe" in words:
        block_by_word["moe"] = {"experts": {
            "num_experts": keys.size("n_routed_experts", "num_local_experts"),
            "num_experts_per_tok": keys.size("num_experts_per_tok"),
            "moe_intermediate_size": keys.size("moe_intermediate_size"), "gated": False, "hidden_act": act,
            "expert_bias": False, "moe_latent_size": keys.get("moe_latent_size"), "scoring_func": "sigmoid",
            "shared_expert_intermediate_size": keys.get("moe_shared_expert_intermediate_size", default=0),
            "norm_topk_prob": keys.get("norm_topk_prob", default=True), **_router_groups(keys),
        }}  # fmt: skip
        expert_fields = _experts_fields(block_by_word["moe"])
    keys.unused(*_EXPERT_KEYS)
    layers = layers_of(keys, len(words), lambda n: block_by_word[words[n]], words.__getitem__)
    unrotated = {**rotation, "rope_type": "default"}
    return _common(keys, unrotated, eps=1e-5, num_hidden_layers=len(words)) | expert_fields | layers


_EXPERT_KEYS = (
    "n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size",
    "n_group",
    "moe_shared_expert_intermediate_size", "norm_topk_prob", "topk_group", "routed_scaling_factor",
)  # fmt: skip
"""Keys of experts, which models of a family without experts may have, too."""


def _decoder(keys: ConfigKeys, **settings: Any) -> Block:
    """A dense decoder whose layers differ only in windows and rotations.

    Args:
        settings: words of the attention (`attention`), of the feed-forward block (`block`), of the layers (`norms`),
            of the shape (`shape`), of rotations (`rotation`), the rule of layers with a window (`windowed`),
            the usual window, and whether layers without a window are not rotated (`global_nope`).
    """
    rotation, num_layers = keys.rotation(**settings.get("rotation", {})), keys.count("num_hidden_layers")
    windowed: Callable[[int], bool] = settings.get("windowed", lambda n: False)
    words = words_of_layers(keys, ("layer_types",), num_layers, lambda n: SLIDING if windowed(n) else FULL)
    window = keys.get("sliding_window", default=settings.get("window"))
    if not keys.get("use_sliding_window", default=True):
        window = None
    rotated = [str(word) for word in settings.get("rotated", [1] * num_layers)]
    keys.unused("no_rope_layers", "no_rope_layer_interval", "sliding_window_pattern")
    block = dense(keys, **settings.get("block", {}))

    def is_rotated(n: int) -> bool:
        is_global_nope = settings.get("global_nope", False) and window is not None and words[n] == FULL
        return rotated[n] == "1" and not is_global_nope

    def type_of(n: int) -> Block:
        turned = rotation if is_rotated(n) else {**rotation, "partial_rotary_factor": 0.0}
        attention = grouped_query(
            keys, turned, sliding_window=_window(keys, words[n], window), **settings.get("attention", {})
        )
        return attention | block | {"norms": settings.get("norms", "before")}

    layers = layers_of(keys, num_layers, type_of, lambda n: (words[n], is_rotated(n)))
    return _common(keys, rotation, **settings.get("shape", {})) | layers


def _arcee(keys: ConfigKeys) -> Block:
    """Feed-forward blocks without a gate."""
    has_bias = keys.get("attention_bias", default=False)
    block = {
        "gated": False, "mlp_bias": keys.get("mlp_bias", default=False),
        "hidden_act": keys.activation("hidden_act", default="relu2"),
    }  # fmt: skip
    attention = {"attention_bias": has_bias, "output_bias": has_bias}
    return _decoder(keys, attention=attention, block=block, shape={"eps": 1e-5})


def _olmo3(keys: ConfigKeys) -> Block:
    has_bias = keys.get("attention_bias", default=False)
    attention = {"qk_norm": "all", "attention_bias": has_bias, "output_bias": has_bias}
    return _decoder(
        keys, attention=attention, norms="after", windowed=lambda n: (n + 1) % 4 != 0, window=4096,
        rotation={"theta": 5e5}, shape={"eps": 1e-5},
    )  # fmt: skip


def _phi3(keys: ConfigKeys) -> Block:
    keys.unused("original_max_position_embeddings", "full_attn_mod", "interpolate_factor", "lm_head_bias")
    keys.only("lm_head_bias", False)
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    has_window = keys.get("sliding_window") is not None
    return _decoder(keys, windowed=lambda n: has_window, shape={"eps": 1e-5})


def _smollm3(keys: ConfigKeys) -> Block:
    has_bias, interval = (
        keys.get("attention_bias", default=False),
        keys.count("no_rope_layer_interval", default=4, least=1),
    )
    num_layers = keys.count("num_hidden_layers")
    rotated = words_of_layers(
        keys, ("no_rope_layers",), num_layers, lambda n: str(int((n + 1) % interval != 0))
    )
    has_window = bool(keys.get("use_sliding_window", default=False))
    return _decoder(
        keys, attention={"attention_bias": has_bias, "output_bias": has_bias}, rotated=rotated,
        block={"mlp_bias": keys.get("mlp_bias", default=False)}, rotation={"theta": 2e6}, shape={"tied": True},
        windowed=lambda n: has_window and rotated[n] == "1",
    )  # fmt: skip


def _exaone4(keys: ConfigKeys) -> Block:
    pattern = keys.get("sliding_window_pattern") or 4
    if not (isinstance(pattern, str) or (type(pattern) is int and pattern > 0)):
        keys.refuse("sliding_window_pattern", "an integer >= 1 or a text of L and G")
    has_window = keys.get("sliding_window") is not None

    def is_windowed(n: int) -> bool:
        if isinstance(pattern, str):
            return pattern[n % len(pattern)] == "L"
        return has_window and (n + 1) % pattern != 0

    return _decoder(
        keys,
        attention={"qk_norm": "head"},
        norms="after",
        windowed=is_windowed,
        global_nope=True,
        shape={"eps": 1e-5},
    )


def _seed_oss(keys: ConfigKeys) -> Block:
    keys.unused("residual_dropout")
    attention = {
        "attention_bias": keys.get("attention_bias", default=True),
        "output_bias": keys.get("attention_out_bias", default=False),
    }
    return _decoder(keys, attention=attention, block={"mlp_bias": keys.get("mlp_bias", default=False)})


def _ernie(keys: ConfigKeys) -> Block:
    has_bias = keys.get("use_bias", default=False)
    keys.only("compression_ratio", 1, 1.0)
    return _decoder(
        keys, attention={"attention_bias": has_bias, "output_bias": has_bias}, block={"mlp_bias": has_bias},
        rotation={"theta": 5e5}, shape={"eps": 1e-5, "tied": True},
    )  # fmt: skip


def _ernie_moe(keys: ConfigKeys) -> Block:
    """Experts from some layer to another."""
    keys.only("use_bias", False)
    keys.unused(
        "moe_norm_min",
        "moe_capacity",
        "moe_gate",
        "moe_use_aux_free",
        "moe_layer_start_index",
        "moe_layer_end_index",
    )
    rotation, num_layers = keys.rotation(theta=5e5), keys.count("num_hidden_layers")
    first, last = keys.get("moe_layer_start_index", default=1), keys.get("moe_layer_end_index", default=-1)
    last, step = (
        (num_layers - 1 if last == -1 else last),
        keys.count("moe_layer_interval", default=1, least=1),
    )
    width, num_shared = keys.count("moe_intermediate_size"), keys.count("moe_num_shared_experts", default=0)
    experts = {"experts": {
        "num_experts": keys.size("moe_num_experts"), "num_experts_per_tok": keys.size("moe_k"),
        "moe_intermediate_size": width, "shared_expert_intermediate_size": num_shared * width,
        "hidden_act": keys.activation("hidden_act"),
    }}  # fmt: skip
    attention = grouped_query(keys, rotation)

    def is_sparse(n: int) -> bool:
        return (n + 1) % step == 0 and first <= n <= last

    layers = layers_of(
        keys, num_layers, lambda n: attention | (experts if is_sparse(n) else dense(keys)), is_sparse
    )
    keys.unused("intermediate_size")
    return _common(keys, rotation, eps=1e-5, tied=True) | _experts_fields(experts) | layers


def _granite(keys: ConfigKeys) -> Block:
    has_bias = keys.get("attention_bias", default=False)
    names = "embedding_multiplier", "residual_multiplier", "logits_scaling"
    attention = {
        "attention_bias": has_bias, "output_bias": has_bias,
        "attention_multiplier": keys.get("attention_multiplier", default=1.0),
    }  # fmt: skip
    return _decoder(
        keys, attention=attention, block={"mlp_bias": keys.get("mlp_bias", default=False)},
        shape={name: keys.get(name, default=1.0) for name in names},
    )  # fmt: skip


def _nemotron_nas(keys: ConfigKeys) -> Block:
    """Sizes of its own for each layer, some of which lack attention or a feed-forward block."""
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    configs, h, num_heads = (
        keys.size("block_configs"),
        keys.count("hidden_size"),
        keys.count("num_attention_heads"),
    )
    keys.unused("num_hidden_layers", "num_key_value_heads", "intermediate_size", "head_dim")
    rotation = keys.rotation()

    def type_of(n: int) -> Block:
        attention, ffn = configs[n]["attention"], configs[n]["ffn"]
        for part in (attention, ffn):
            if (
                part.get("replace_with_linear")
                or part.get("sparsify")
                or part.get("window_length")
                or part.get("num_sink_tokens")
            ):
                keys.refuse(
                    "block_configs",
                    "without replace_with_linear, sparsify, window_length and num_sink_tokens",
                )
        blocks: Block = {}
        if not attention["no_op"]:
            sizes = {
                "num_attention_heads": num_heads,
                "num_key_value_heads": num_heads // attention["n_heads_in_group"],
            }
            blocks["grouped_query"] = {
                **sizes,
                "head_dim": h // num_heads,
                "rope_theta": rotation["rope_theta"],
            }
        if not ffn["no_op"]:
            width = int(2 * ffn["ffn_mult"] * h / 3)
            blocks["feed_forward"] = {
                "intermediate_size": -(-width // 256) * 256,
                "hidden_act": keys.activation("hidden_act"),
            }
        return blocks

    layers = layers_of(keys, len(configs), type_of, lambda n: str(type_of(n)))
    widths = [t["feed_forward"]["intermediate_size"] for t in layers["layer_types"] if "feed_forward" in t]
    common = _common(keys, rotation, num_hidden_layers=len(configs), intermediate_size=max(widths, default=1))
    return common | layers


READERS: dict[str, Callable[[ConfigKeys], Block]] = {
    "deepseek_v2": _deepseek_v2, "deepseek_v3": _deepseek, "deepseek_v32": _deepseek_v32, "kimi_k2": _deepseek,
    "glm_moe_dsa": _deepseek_v32, "mistral4": _mistral4, "gpt_oss": _gpt_oss, "gemma3_text": _gemma3,
    "llama4_text": _llama4, "qwen3_next": _qwen3_next, "qwen3_5_text": _qwen3_5, "qwen3_5_moe_text": _qwen3_next,
    "minimax_m2": _minimax_m2, "nemotron_h": _nemotron_h, "olmo3": _olmo3, "phi3": _phi3, "smollm3": _smollm3,
    "exaone4": _exaone4, "seed_oss": _seed_oss, "ernie4_5": _ernie, "ernie4_5_moe": _ernie_moe, "granite": _granite,
    "nemotron-nas": _nemotron_nas, "arcee": _arcee, "step3p5": _step3, "step3p7": _step3,
}  # fmt: skip
"""model_type -> what reads the files of such models."""
TEXT_TYPES = {
    "gemma3": "gemma3_text", "llama4": "llama4_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "kimi_k25": "kimi_k2", "mistral3": "mistral4",
    "step3p7": "step3p5",
}  # fmt: skip
"""model_type of a model for texts and images -> that of its part for texts, which stands under `text_config`."""


def fields_of(values: dict[str, Any], model_type: str, where: str) -> Block:
    """The fields of the shape of a model.

    Raises:
        ConfigError: a key makes the model one that ultrabench cannot describe, or may do so because it is unknown.
    """
    keys = ConfigKeys(values, model_type, where)
    fields = READERS[model_type](keys)
    keys.require_all_read()
    return {name: value for name, value in fields.items() if value is not None}
