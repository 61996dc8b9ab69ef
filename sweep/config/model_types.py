"""The models of config.json files, by their `model_type`: what each key of such a file does.

Every key is read (DEFAULTS, MODEL_TYPES), changes the model unless it has one value (TRAINED_VALUES), or is harmless.
Another key may do anything, so a file that has one is refused.
"""

import re
from typing import Any

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")),
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_key_value_heads": None,
    "head_dim": None, "sliding_window": None, "use_sliding_window": None,
}  # fmt: skip
"""The keys that models of all types read -> the usual value of an absent key; None if there is none."""
_WINDOW_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096}
MODEL_TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_window_layers": 28, **_WINDOW_DEFAULTS},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28, **_WINDOW_DEFAULTS},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts": None,
        "num_experts_per_tok": None},
    "olmoe": {"rms_norm_eps": 1e-5, "num_experts": None, "num_experts_per_tok": None, "norm_topk_prob": False},
    "qwen3_moe": {
        "num_key_value_heads": 4, **_WINDOW_DEFAULTS, "num_experts": None, "num_experts_per_tok": None,
        "moe_intermediate_size": None,
        "decoder_sparse_step": 1, "norm_topk_prob": False,
    },
    "glm4_moe": {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": False, "qk_norm": False,
        "partial_rotary_factor": 0.5, "num_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": None,
        "n_shared_experts": None, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
    },
    "dots1": {
        "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62, "num_experts": None,
        "num_experts_per_tok": None, "moe_intermediate_size": None, "n_shared_experts": None,
        "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1,
    },
}  # fmt: skip
"""model_type -> the keys that models of this type read beside DEFAULTS, with their values where a key is absent.

Sizes of experts have no such value: a file without them is more likely incomplete than meant for the usual model.

Only models of these types can be trained. The layers for multi-token prediction (num_nextn_predict_layers) are
read and left out, as transformers leaves them out in training.
Source: LlamaConfig, MistralConfig and so on of transformers, which also give the values of DEFAULTS.
"""
FIXED_VALUES: dict[str, dict[str, Any]] = {
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "olmoe": {"qk_norm": True, "qk_norm_across_heads": True},
    "qwen3_moe": {"qk_norm": True},
    "glm4_moe": {"scoring_func": "sigmoid"},
    "dots1": {"scoring_func": "sigmoid", "qk_norm": True},
}
"""model_type -> what is the same in all models of this type, whatever their keys say.

Source: Qwen2Attention, Glm4MoeTopkRouter and so on of transformers.
"""
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
"""The sizes that a file of a model_type which reads them must have."""
TRAINED_VALUES: dict[str, Any] = {
    "hidden_act": "silu", "rope_type": "llama3", "partial_rotary_factor": 1.0, "num_experts_per_tok": 0,
    **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "qkv_bias", "use_qk_norm", "qk_norm"), False),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts"), 0),
    **dict.fromkeys(("shared_expert_intermediate_size", "router_jitter_noise"), 0), "mlp_only_layers": [],
    **dict.fromkeys(("n_group", "topk_group", "moe_layer_freq"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "n_embd", "no_rope_layers")),
    "num_nextn_predict_layers": 0,
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv")),
    "quantization_config": {}, "quantization": {}, "use_mrope": False, "rope_interleaved": False,
    **dict.fromkeys(("moe_intermediate_size", "first_k_dense_replace"), 0), "pruned_heads": {},
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "parallel_residual"), False),
    **dict.fromkeys(("enable_moe_block", "attention_k_eq_v"), False), "share_expert_dim": 0,
}  # fmt: skip
"""Keys that change the model, each with the value that ultrabench can train;
a key may be absent or null, and 0 for null.

MODEL_TYPES names the types whose models may have other values of some of these keys.
"""
PREDICTION_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys for the number of modules that predict more tokens, by the model_type; a shape of such a file has none."""
TRAINED_ROPE_TYPES = ("llama3", "yarn")
"""The ways of stretching rotations that ultrabench trains: those of a RopeScaling."""
CLASSES: dict[str, tuple[str, ...]] = {
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "mixtral": ("MixtralForCausalLM",),
    "olmoe": ("OlmoeForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "glm4_moe": ("Glm4MoeForCausalLM",),
    "dots1": ("Dots1ForCausalLM",),
}
"""model_type -> the names in `architectures` that mean the model which ultrabench trains:
with a head for the next token.

Another class of the same type has another head or other layers, such as LlamaForSequenceClassification.
"""
LABEL_KEYS: dict[str, Any] = {
    "num_labels": 2, "problem_type": None, "finetuning_task": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
}  # fmt: skip
"""Keys of models with a head for labels -> the value that files of other models may have, too.

They are harmless where `architectures` names a model for the next token.
"""
TEXT_VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    "glm4_moe": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "dots1": {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)},
}
"""model_type -> key that a file may have although transformers does not read it -> its values that
mean the same model."""
ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
"""Keys of `rope_scaling` or `rope_parameters`, beside those of the rotations that ultrabench trains."""
EXTRA_ROPE_KEYS = frozenset({
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "mscale",
    "mscale_all_dim", "truncate", "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale",
    "max_position_embeddings", "llama_4_scaling_beta", "mrope_section", "mrope_interleaved", "finetuned",
})  # fmt: skip
"""Keys of rotations that change neither sizes nor work of a model."""

_TOKENS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "decoder_start", "forced_bos", "forced_eos")
_DROPOUTS = (
    "attention_dropout", "hidden_dropout", "resid_dropout", "embedding_dropout", "attn_pdrop", "resid_pdrop",
    "embd_pdrop",
    "classifier_dropout", "dropout",
)  # fmt: skip
_GENERATION = (
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature",
    "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "max_new_tokens",
)  # fmt: skip
HARMLESS_KEYS = frozenset({
    "model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "initializer_range",
    "max_position_embeddings", "max_sequence_length", "model_max_length", "seq_length", "pretraining_tp",
    "chunk_size_feed_forward",
    "output_attentions", "output_hidden_states", "output_router_logits", "router_aux_loss_coef", "return_dict",
    "torchscript",
    "use_bfloat16", "tf_legacy_loss", "gradient_checkpointing", "attn_implementation", "use_flash_attention",
    "use_flash_attn",
    *LABEL_KEYS, "task_specific_params", "tokenizer_class", "prefix",
    "is_decoder", "tie_encoder_decoder", "max_window_layers", "cross_attention_hidden_size", "is_llama_config",
    "rope_scaling", "rope_parameters",
    "transformers.js_config", "aux_loss_alpha", "seq_aux", "ep_size", "rope_type", "type", "source", "license",
    "base_model",
    *(f"{token}_token_id" for token in _TOKENS), *_DROPOUTS, *_GENERATION,
})  # fmt: skip
"""Keys that change neither sizes nor work, whatever their values: names, tokens, data types, dropout,
losses, generation.

Source: PretrainedConfig and the configuration classes of MODEL_TYPES in transformers 4 and 5, and published files.
"""
HARMLESS_KEY = re.compile(r"_|unsloth_|generation_")
"""Matches the beginning of more harmless keys: those of transformers' own use, and marks of other libraries."""
SAME_SIZE_KEYS = frozenset({
    "hidden_act", "rope_type", "partial_rotary_factor", "attention_bias", "mlp_bias", "bias", "qkv_bias", "use_qk_norm",
    "qk_norm",
    "n_group", "topk_group", "layer_types", "no_rope_layers", "attn_logit_softcapping", "final_logit_softcapping",
    "query_pre_attn_scalar", "clip_qkv", "quantization_config", "quantization", "router_jitter_noise", "use_mrope",
    "rope_interleaved",
})  # fmt: skip
"""Keys of TRAINED_VALUES that leave the matrices of a model as large as they are."""
GATED_TYPES = frozenset({
    "gemma", "gemma2", "olmo", "olmo2", "cohere", "cohere2", "helium", "smollm3",
    "glm", "glm4", "stablelm", "ministral", "hunyuan_v1_dense", "ernie4_5",
})  # fmt: skip
"""Types of dense models that ultrabench does not train, whose matrices are those of their sizes in a ModelShape.

Others may have a feed-forward of two matrices (starcoder2, opt, nemotron), for which these sizes would count three.
"""
OTHER_TYPES = frozenset({"glm4v_moe", "llava", "mllama", "olmo", "pixtral"})
"""Types of transformers whose names are one edit from one of MODEL_TYPES, although they are other models."""


def is_harmless(key: str) -> bool:
    """Whether a key of a config.json changes neither the sizes nor the work of a model."""
    return key in HARMLESS_KEYS or HARMLESS_KEY.match(key) is not None
