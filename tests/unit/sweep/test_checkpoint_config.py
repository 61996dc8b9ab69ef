"""A Hugging Face config.json is a model as it is; what would be another model is refused by its key."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.configs import refused, write_config
from tests.strategies import LONG
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.sweep.config.load import config_from_tree, load_config, load_model
from ultrabench.sweep.refusals import refusal

pytestmark = pytest.mark.usefixtures("alone")

# The files of config.json as their publishers have them on the hub.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 152064,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "model_type": "glm4_moe",
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024, "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304,
}  # fmt: skip
DOTS = {
    "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "model_type": "dots1",
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000, "routed_scaling_factor": 2.5,
    "sliding_window": 5120, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED = {
    "llama3.1-8b": LLAMA, "qwen3-0.6b": QWEN, "qwen2.5-7b": QWEN2, "mixtral-8x7b": MIXTRAL, "qwen3-30b-a3b": QWEN_MOE,
    "glm4.5-air": GLM, "olmoe-1b-7b": OLMOE,
}  # fmt: skip


def write(path, change=(), without=(), base=LLAMA):
    """Writes a config.json; one whose change names another type has no class, unless the change names one."""
    values = {k: v for k, v in {**base, **dict(change)}.items() if k not in without}
    if "model_type" in dict(change) and "architectures" not in dict(change):
        values.pop("architectures", None)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(values))
    return str(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_json_is_a_model_as_it_is(name):
    assert load_model(write(f"{name}/config.json", base=PUBLISHED[name])) == load_model(name)


def test_dots_has_its_published_sizes():
    """142 billion parameters, 14 billion of them active (arXiv 2506.05767)."""
    shape = load_model(write("dots.json", base=DOTS))
    assert (shape.num_params, shape.num_active_params) == (142_774_373_888, 14_016_581_120)
    assert (shape.scoring_func, shape.qk_norm, shape.sliding_window) == ("sigmoid", True, None)


def test_a_config_json_that_transformers_5_wrote_is_read():
    """It has num_local_experts for every type, and rotations in rope_parameters."""
    rope = {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5}
    change = {"num_local_experts": 128, "rope_parameters": rope}
    path = write("glm/config.json", change, ("n_routed_experts", "partial_rotary_factor", "rope_theta"), GLM)
    assert load_model(path) == replace(load_model("glm4.5-air"), name="glm")


@pytest.mark.parametrize(
    ("variable", "folder"),
    [("HF_HUB_CACHE", "."), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub")],
)  # fmt: skip
def test_the_config_json_of_a_model_on_the_hub_is_read_from_the_cache(
    variable, folder, monkeypatch, tmp_path
):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "cache"))
    where = tmp_path / "cache" / folder / "models--meta-llama--Llama-3.1-8B"
    name = "meta-llama/Llama-3.1-8B"
    with refused(f"({where}); run: hf download {name} config.json, or give the path"):
        load_model(name)
    write(where / "snapshots/d04e592b/config.json")
    with refused(f"run: hf download {name} config.json"):  # the revision that is wanted is not known
        load_model(name)
    (where / "refs").mkdir()
    (where / "refs/main").write_text("d04e592b\n")
    shape = load_model(name)
    assert shape.name == "Llama-3.1-8B"
    assert shape == replace(load_model("llama3.1-8b"), name="Llama-3.1-8B")
    write(f"{name}/config.json", {"num_hidden_layers": 2})
    assert load_model(name).num_hidden_layers == 2, "an existing folder of that path wins"


@pytest.mark.parametrize(
    ("path", "change", "name"),
    [
        ("mine.json", {}, "mine"), ("a b/config.json", {}, "a b"), ("x/config.json", {"_name_or_path": ""}, "x"),
        ("x/config.json", {"_name_or_path": "meta-llama/Llama-3.1-8B"}, "Llama-3.1-8B"),
        ("x/config.json", {"_name_or_path": "/fsx/runs/step 10/"}, "step 10"),
    ],
)  # fmt: skip
def test_the_models_name(path, change, name):
    assert load_config([f"model={write(path, change)}"]).models[0].name == name


KV = ("num_key_value_heads",)
ALONE = {"model_type": "mistral", "sliding_window": None}
SCALING = LLAMA["rope_scaling"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
OLD_SCALING = {k: v for k, v in SCALING.items() if k != "rope_type"} | {"type": "llama3"}
ROPE = ("rope_scaling", "rope_theta")


@pytest.mark.parametrize(
    ("base", "change", "without", "read"),
    [
        # What is absent is what transformers takes.
        (QWEN2, {"num_attention_heads": 32, "hidden_size": 4096}, KV, {"num_key_value_heads": 32}),
        (MIXTRAL, {}, ("rope_theta", "rms_norm_eps"), {"rope_theta": 1e6, "rms_norm_eps": 1e-5,
            "norm_topk_prob": True}),
        (QWEN_MOE, {}, ("norm_topk_prob", "head_dim"), {"norm_topk_prob": False, "head_width": 64}),
        (GLM, {}, ("first_k_dense_replace", "partial_rotary_factor", "attention_bias", "norm_topk_prob"),
         {"first_k_dense_replace": 1, "rotary_width": 64, "attention_bias": False, "norm_topk_prob": True}),
        (OLMOE, {}, ("norm_topk_prob", "num_key_value_heads"),
         {"norm_topk_prob": False, "num_key_value_heads": 16, "moe_intermediate_size": 1024}),
        (DOTS, {}, ("norm_topk_prob", "first_k_dense_replace", "routed_scaling_factor"),
         {"norm_topk_prob": False, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0}),
        *((LLAMA, *row) for row in [
            ({}, (*KV, "tie_word_embeddings", "rms_norm_eps", "rope_theta"),
             {"num_key_value_heads": 32, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}),
            (ALONE, KV, {"num_key_value_heads": 8}), ({**ALONE, "num_key_value_heads": None}, (),
                {"num_key_value_heads": 32}),
            ({"model_type": "qwen3", "hidden_size": 2048}, KV,
                {"num_key_value_heads": 32, "head_dim": 128, "qk_norm": True}),
            ({"tie_word_embeddings": True}, (), {"tie_word_embeddings": True}),
            # Rotations are read in the words of any version.
            ({}, (), {"rope_theta": 5e5, "rope_scaling": LONG}),
            ({"rope_scaling": OLD_SCALING}, (), {"rope_scaling": LONG}),
            ({"rope_parameters": {**SCALING, "rope_theta": 7.0}}, ROPE, {"rope_theta": 7.0, "rope_scaling": LONG}),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, ROPE,
                {"rope_theta": 7.0, "rope_scaling": None}),
            ({"rope_scaling": None}, (), {"rope_scaling": None}),
            ({"rope_scaling": {"type": "default"}}, (), {"rope_scaling": None}),
        ]),
    ],
)  # fmt: skip
def test_sizes_and_rotations_of_any_version_are_read(base, change, without, read):
    shape = load_model(write("m.json", change, without, base))
    assert {name: getattr(shape, name) for name in read} == read


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 128}, {"sliding_window": None}, {"max_window_layers": 3}, {"layer_types": ["full_attention"] * 32},
        {"num_experts": 0},
        {"sliding_window": 4096, "use_sliding_window": False}, {"partial_rotary_factor": 1}, {"dtype": "float32"},
    ],
)  # fmt: skip
def test_what_changes_nothing_is_taken(change):
    assert load_model(write("m.json", change)).num_params == 8_030_261_248


REFUSED = [
    *((LLAMA, "", change, line) for change, line in [
        ({"attention_bias": True}, "attention_bias is true; ultrabench trains llama models only with attention_bias "),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, 'only with hidden_act "silu"; to benchmark its sizes only, '
        'write them to ./ultrabench/'),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling lacks the keys factor, original_max_position"),
        ({"rope_scaling": {**SCALING, "rope_type": "yarn"}}, "rope_scaling.low_freq_factor=1.0 has no effect with "
        "rope_type=yarn; leave it out"),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "rope_scaling.beta_fast=0.5; must be at least beta_slow=1"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_type is "linear"; ultrabench trains llama models '
        'only with rope_type "llama3" or "yarn" or "default";'),
        ({"rope_scaling": "dynamic"}, 'rope_type is "dynamic"'),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling lacks the keys factor, original_max_position"),
        ({"rope_scaling": {**SCALING, "low_freq_factor": None}}, "rope_scaling lacks the key low_freq_factor, which "
        "rope_type=llama3 needs"),
        ({"rope_scaling": {**SCALING, "low_freq_factor": 4}}, "above low_freq_factor=4"),
        ({"rope_scaling": {**SCALING, "factor": 0.5}}, "rope_scaling.factor=0.5; must be >= 1"),
        ({"head_dim": 127}, "head_dim=127; rotary embeddings need an even head_dim"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is "),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"n_routed_experts": 64}, "n_routed_experts is 64"),
        ({"kv_lora_rank": 512}, "only with kv_lora_rank null; choose another model, "
        "or write its sizes as layer_types to ./ultrabench/"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0},
            "model_type 'gemma2' (attn_logit_softcapping is 50.0)"),
        ({"model_type": "gemma4_text", "enable_moe_block": True},
            "model_type 'gemma4_text' (enable_moe_block is true); ultrabench knows llama, "),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"] * 12},
            'layer_types is ["sliding_attention", "full_attention", ...); '),
        ({"model_type": "mixtrall"}, "model_type 'mixtrall'; did you mean mixtral? ultrabench knows"),
        ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632},
            "'qwen2_moe' (shared_expert_intermediate_size is 5632)"),
        ({"model_type": "minicpm3", "kv_lora_rank": 512}, "model_type 'minicpm3' (kv_lora_rank is 512)"),
        ({"quantization_config": {"quant_method": "awq"}},
         """quantization_config is {"quant_method": "awq"}; ultrabench"""),
        *(({"model_type": kind}, f"model_type {kind!r}") for kind in (None, ["llama"])),
        ({"hidden_size": "4096"}, "hidden_size='4096' is not an integer"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "model=m.json: num_attention_heads=0; must be 1 to 1,073,741,824"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000; must be 1 to 10,000"),
        ({"tie_word_embeddings": 1}, "m.json: tie_word_embeddings=1"),
        ({"rope_theta": -5}, "rope_theta=-5; must be > 0 and finite"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan; must be > 0 and finite"),
    ]),
    *((base, "", change, line) for base, change, line in [
        (QWEN_MOE, {"attention_bias": True}, "attention_bias is true; ultrabench trains qwen3_moe models only "
        "with attention_bias false"),
        (QWEN_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers is [0]; ultrabench trains qwen3_moe models only "
        "with mlp_only_layers []"),
        (GLM, {"n_group": 3}, "n_group=3 must divide num_experts=128"),
        (GLM, {"topk_group": 4}, "topk_group=4; must be in 1..n_group=1"),
        (GLM, {"n_group": 32, "topk_group": 1}, "num_experts_per_tok=8; topk_group=1 groups have 4 experts"),
        (DOTS, {"attention_bias": True}, "dots1 models only with"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0; ultrabench trains olmoe models only with clip_qkv null; "),
        (MIXTRAL, {"router_jitter_noise": 0.01}, "router_jitter_noise is 0.01"),
        (QWEN, {"num_experts": 8}, "num_experts is 8; ultrabench trains qwen3 models only with num_experts 0"),
        (MIXTRAL, {"num_local_experts": 1}, "model=m.json: num_experts_per_tok=2; must be in 1..num_local_experts=1"),
    ]),
    (MIXTRAL, "num_local_experts", {}, "lacks num_experts or num_local_experts or n_routed_experts (a size of "
    "its experts); add it"),
    (MIXTRAL, "", {"num_local_experts": 2**30}, "model=m.json: num_local_experts=1073741824; must be 0 to 1,048,576"),
    (MIXTRAL, "num_local_experts", {"num_local_expert": 8}, "(a size of its experts); "
    "is num_local_expert a misspelling?"),
    (MIXTRAL, "num_experts_per_tok", {}, "model=m.json lacks num_experts_per_tok ("),
    (GLM, "n_shared_experts", {}, "lacks n_shared_experts ("),
    (QWEN_MOE, "moe_intermediate_size", {"moe_intermediate_sizes": 768},
        "lacks moe_intermediate_size (a size of its experts); is moe_intermediate_sizes a misspelling"),
]  # fmt: skip
"""Published config.json, a key that it lacks, other values of keys, and a part of the refusal."""


@pytest.mark.parametrize(("base", "without", "change", "line"), REFUSED)
def test_what_would_be_another_model_or_lacks_a_size_is_refused_by_its_key(base, without, change, line):
    with refused(line):
        load_model(write("m.json", change, (without,), base))


OWN_CODE = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
NO_SIZES = "choose another model, since ultrabench knows no sizes that stand for this one"


@pytest.mark.parametrize(
    ("base", "change", "line"),
    [
        # Classes.
        *((LLAMA, {"architectures": classes}, f'architectures has "{name}"; ultrabench trains llama models only '
        'as LlamaForCausalLM or ')
          for classes, name in [
              (["LlamaForTokenClassification"], "LlamaForTokenClassification"), (["LlamaModel"], "LlamaModel"),
              (["LlamaForCausalLM", "OwnHead"], "OwnHead"), ("OwnForCausalLM", "OwnForCausalLM"),
          ]),
        (QWEN_MOE, {"architectures": ["Qwen3ForCausalLM"]}, "ultrabench trains qwen3_moe models only as "
        "Qwen3MoeForCausalLM; choose another model"),
        # Code of their own.
        *((LLAMA, {"auto_map": OWN_CODE, "architectures": classes},
            'auto_map is {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, so the model')
          for classes in (None, [])),
        # Heads for labels, without a class.
        *((LLAMA, {"architectures": None, key: value}, f"{key} is {json.dumps(value)}, "
        "as in models that classify or reward")
          for key, value in (("num_labels", 1), ("problem_type", "regression"), ("id2label", {"0": "score"}))),
        # Unknown keys.
        (LLAMA, {"num_kv_heads": 8}, "num_kv_heads is 8; ultrabench knows no such key of llama models, "
        "so it may change the model; remove"),
        (LLAMA, {"intermediate_sizes_of_layers": [4096] * 32}, "intermediate_sizes_of_layers is [4096, "),
        (LLAMA, {"draft_vocab_size": 4000}, "draft_vocab_size is 4000"),
        (LLAMA, {"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0"),
        (QWEN, {"vision_config": {"depth": 2}}, 'vision_config is {"depth": 2}'),
        (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_"),
        (LLAMA, {"num_key_value_head": 4}, "num_key_value_head is 4; ultrabench knows no such key of llama "
        "models, so it may change the model; did you mean num_key_value_heads?"),
        (LLAMA, {"moe_intermediate_size": 1024}, "moe_intermediate_size is 1024; ultrabench trains llama models "
        "only with moe_intermediate_size 0"),
        (QWEN, {"norm_topk_prob": True}, "norm_topk_prob is true; ultrabench knows no such key of qwen3 models"),
        (QWEN2, {"use_mrope": True}, "use_mrope is true; ultrabench trains qwen2 models only with use_mrope false"),
        (DOTS, {"scoring_func": "softmax"}, "ultrabench trains dots1 models only with scoring_func "
        "sigmoid or noaux_tc"),
        (LLAMA, {"rope_scaling": {**SCALING, "mrope_section": [2, 3]}}, "rope_scaling has mrope_section [2, 3]"),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "attention_factors": 1.2}},
            "rope_scaling has attention_factors 1.2"),
        # Types.
        (LLAMA, {"model_type": "llama4"}, "lacks text_config, which llama4 models have; give"),
        (LLAMA, {"model_type": "olmo"}, "'olmo'; ultrabench knows"),
        (LLAMA, {"model_type": "qwen3_own"}, "'qwen3_own'; ultrabench knows"),
        (LLAMA, {"model_type": "mistal"}, "did you mean mistral? ultrabench knows"),
        # Advice.
        (LLAMA, {"model_type": "opt", "hidden_act": "relu"}, NO_SIZES), (LLAMA, {"num_local_experts": 8}, NO_SIZES),
        (LLAMA, {"model_type": "own"}, NO_SIZES),
        *((LLAMA, {"model_type": name, "hidden_act": "gelu"}, NO_SIZES) for name in ("starcoder2", "nemotron",
            "gpt_neox", "phi", "apertus")),
        (LLAMA, {"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "to benchmark its sizes only"),
        (LLAMA, {"mlp_bias": True}, "to benchmark its sizes only"),
    ],
)  # fmt: skip
def test_what_may_be_another_model_is_refused_by_its_class_or_key(base, change, line):
    with refused(line):
        load_model(write("m.json", change, base=base))


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (LLAMA, {"auto_map": OWN_CODE}), (LLAMA, {"architectures": None}),
        (LLAMA, {"architectures": ["LLaMAForCausalLM"]}),
        (LLAMA, {"architectures": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "num_labels": 2}),
        (LLAMA, {"num_labels": 1}),
        (LLAMA, {"is_llama_config": True, "rope_interleaved": False}),
        (LLAMA, {"unsloth_version": "2025.1", "_attn_implementation": "sdpa"}),
        (LLAMA, {"transformers.js_config": {"dtype": "q4"}, "max_sequence_length": 2048, "temperature": 0.6}),
        (LLAMA, {"num_kv_heads": None}),
        (LLAMA, {"quantization_config": {}, "pruned_heads": {}, "id2label": {"0": "LABEL_0"}, "eos_token_id": [1, 2]}),
        (DOTS, {"scoring_func": "noaux_tc", "topk_method": "noaux_tc", "n_group": 1}),
        (QWEN_MOE, {"n_shared_experts": 0, "shared_expert_intermediate_size": 0}),
    ],
)  # fmt: skip
def test_keys_that_are_known_to_change_nothing_are_taken(base, change):
    assert load_model(write("m.json", change, base=base)) == load_model(write("m.json", base=base))


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_a_model_in_yaml_may_have_the_words_of_any_config_json(key):
    sizes = {**SMALL, key: 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    write_config("model/small", yaml.safe_dump(sizes))
    assert load_model("small").num_experts == 8
    write_config("model/small", yaml.safe_dump({**sizes, "num_experts": 8, "num_local_experts": 8}))
    with refused("num_local_experts and "):
        load_model("small")


def test_a_window_is_refused_where_it_hides_positions():
    shape = load_model(write("m.json", {"model_type": "mistral"}))
    assert shape.sliding_window == 4096
    kernel, layout = KernelConfig(name="embedded"), Layout(dp=1)
    assert refusal(kernel, layout, shape, 4096, "cpu") is None
    use = "sliding_window=4096 is shorter than seq_len=4097; ultrabench's attention has no window: "
    assert refusal(kernel, layout, shape, 4097, "cpu") == f"{use}use seq_len <= 4096 or another model"


@pytest.mark.parametrize(("text", "line"), [("{", "cannot read model=m.json"), ("[]", "holds no sizes")])
def test_what_is_no_config_json_is_told(text, line):
    Path("m.json").write_text(text)
    with refused(line):
        load_config(["model=m.json"])


@pytest.mark.parametrize("folder", [".", "hf"])
def test_a_folder_is_a_model_and_the_file_that_it_lacks_is_named(folder):
    Path("hf").mkdir()
    path = Path(folder).absolute() / "config.json"
    with refused(f"cannot read model={folder}: {path}: No such file"):
        load_config([f"model={folder}"])
    with refused(f"cannot read model={path}: No such file"):
        load_config([f"model={path}"])
    write(str(path), {"hidden_size": 512})
    assert [m.hidden_size for m in load_config([f"model={folder}"]).models] == [512]


def test_a_launched_sweep_does_not_need_the_file():
    config = load_config([f"sweep.models=[{write('small.json', {'hidden_size': 512})},tiny]"])
    Path("small.json").unlink()
    assert [m.name for m in config.models] == ["small", "tiny"]
    assert config_from_tree(config.resolved).models == config.models


def test_two_models_of_one_name_are_refused():
    write("tiny/config.json")
    with refused("two models are called tiny"):
        load_config(["sweep.models=[tiny,tiny/config.json]"])
