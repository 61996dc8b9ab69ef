"""Models whose layers are of several types: their config.json compared with the models of transformers,
and their names.
"""

from collections import Counter

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from tests.configs import refused
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import RopeScaling
from ultrabench.sweep.config.checkpoint import shape_from, shape_of
from ultrabench.sweep.config.families.readers import READERS, TEXT_TYPES
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.refusals import refusal

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128, "head_dim": 16, "pad_token_id": 0, "attention_bias": False,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 2, "num_key_value_heads": 4,
}  # fmt: skip
INDEX = {
    "index_n_heads": 3,
    "index_head_dim": 16,
    "index_topk": 32,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6,
}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
SHARED = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
STATES = {
    "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 20, "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 56, "num_hidden_layers": None,
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp", "moe"],
}  # fmt: skip
STEP = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "share_expert_dim": 40,
    "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 4, "num_sliding_attention_heads": 6,
}  # fmt: skip
MODELS = {
    "deepseek_v2": [LATENT, {**LATENT, "q_lora_rank": None}],
    "deepseek_v3": [LATENT, {**LATENT, "attention_bias": True}],
    "deepseek_v32": [LATENT | INDEX], "glm_moe_dsa": [LATENT | INDEX], "mistral4": [LATENT],
    "gpt_oss": [{"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}],
    "gemma3_text": [{}, {"tie_word_embeddings": False}],
    "llama4_text": [
        {"num_local_experts": 4, "intermediate_size_mlp": 112, "interleave_moe_layer_step": step} for step in (1, 2)
    ],
    "qwen3_next": [LINEAR | SHARED, LINEAR | SHARED | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}],
    "qwen3_5_text": [LINEAR], "qwen3_5_moe_text": [LINEAR | SHARED],
    "minimax_m2": [{"num_local_experts": 4, "num_experts_per_tok": 2}],
    "nemotron_h": [STATES, {**STATES, "moe_latent_size": 32, "mlp_bias": False, "use_bias": True}],
    "olmo3": [{}], "phi3": [{"head_dim": None}], "smollm3": [{}, {"mlp_bias": True, "attention_bias": True}],
    "exaone4": [{}, {"sliding_window": None}],
    "seed_oss": [{"attention_bias": True}, {"attention_out_bias": True, "mlp_bias": True}],
    "ernie4_5": [{}, {"use_bias": True}],
    "ernie4_5_moe": [{
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 2,
        "moe_layer_end_index": 6,
    }],
    "arcee": [{}, {"mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}],
    "step3p5": [STEP, {**STEP, "mlp_layer_types": ["sparse"] * 8}],
    "granite": [{"head_dim": None}, {"head_dim": None, "mlp_bias": True, "embedding_multiplier": 12.0}],
}  # fmt: skip
CASES = [(model_type, words) for model_type, cases in MODELS.items() for words in cases]
BUFFERS = {"e_score_correction_bias", "moe_statics"}
"""Parts of names of tensors that no gradient trains."""


def config_of(model_type, words):
    values = {key: value for key, value in (SIZES | words).items() if value is not None}
    return CONFIG_MAPPING[model_type](**values)


def test_every_reader_is_compared_with_transformers():
    without_class = {"kimi_k2", "nemotron-nas", "step3p7"}
    assert READERS.keys() - MODELS.keys() == without_class
    assert {*TEXT_TYPES.values()} <= READERS.keys()


@pytest.mark.parametrize(("model_type", "words"), CASES)
def test_a_model_has_the_parameters_of_that_of_transformers(model_type, words):
    config = config_of(model_type, words)
    classes = {"mistral4": Mistral4ForCausalLM, "step3p5": Step3p7TextModel}
    with torch.device("meta"):
        named_params = classes.get(model_type, AutoModelForCausalLM.from_config)(config).named_parameters()
    trained = [p.numel() for name, p in named_params if not any(part in name for part in BUFFERS)]
    if model_type == "step3p5":  # its class with a head is one of images, too
        trained.append(config.vocab_size * config.hidden_size)
    values = config.to_dict()
    shape = shape_of(values, "m", "m")
    assert shape.num_params == sum(trained)
    assert sum(shape.num_by_kind(0, shape.num_hidden_layers)) == shape.num_hidden_layers


def test_the_layers_of_a_file_are_of_the_types_that_its_keys_say():
    shape = shape_of(config_of("nemotron_h", STATES).to_dict(), "m", "m")
    assert [shape.layer(n).name.partition(",")[0] for n in range(6)] == [
        "state space", "3 of 8 experts", "state space", "full attention", "relu2 96", "3 of 8 experts",
    ]  # fmt: skip
    assert shape.layer_order == "abacdb"
    gemma = shape_of(config_of("gemma3_text", {"num_hidden_layers": 14}).to_dict(), "m", "m")
    assert gemma.layer_order == "(aaaaab)"
    assert Counter(gemma.layer(n).attention.sliding_window for n in range(14)) == {4096: 12, None: 2}
    assert (gemma.layer(0).norms, gemma.embedding_multiplier) == ("both", 8.0)


def test_the_keys_of_published_step_files_say_the_same_as_those_of_transformers():
    """Published files list rotations of layers, and give the heads of layers with a window in a setting of its own."""
    listed = {key: value for key, value in STEP.items() if key != "num_sliding_attention_heads"} | {
        "rope_theta": [5e6, 1e4] * 4, "partial_rotary_factors": [0.5, 1.0] * 4, "moe_layers_enum": "3,4,5,6,7",
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6, "head_dim": 16},
    }  # fmt: skip
    config = config_of("step3p5", listed)
    flat = {key: value for key, value in (SIZES | listed).items() if key != "pad_token_id"}
    flat |= {"model_type": "step3p7", "tie_word_embeddings": False}
    shape = shape_of(flat, "m", "m")
    assert shape_of({"model_type": "step3p7", "text_config": config.to_dict()}, "m", "m") == shape
    assert shape.layer_order == "aba(cd)"
    heads = [
        (t.grouped_query.num_attention_heads, t.grouped_query.partial_rotary_factor) for t in shape.kinds
    ]
    assert heads == [(4, 0.5), (6, 1.0), (6, 1.0), (4, 0.5)]
    for change, line in (
        ({"swiglu_limits_shared": [0.0] * 7 + [16.0]}, "only with swiglu_limits_shared 0 or null in all layers"),
        ({"rope_theta": [5e6] * 7}, "must have a number for layer 7"),
        ({"attention_other_setting": {"num_attention_groups": 3}}, "only with attention_other_setting with the"),
        ({"moe_layers_enum": "x"}, "only with moe_layers_enum a list of the numbers of layers"),
        ({"model_type": "gemma4"}, "unsupported model_type 'gemma4'"),
    ):  # fmt: skip
        with refused(line):
            shape_of(flat | change, "m", "m")


def test_sizes_of_each_layer_are_read():
    """Attention of two widths, and layers that lack it or the block after it; a width is a multiple of 256."""
    attention = [
        {"no_op": False, "n_heads_in_group": 2},
        {"no_op": True},
        {"no_op": False, "n_heads_in_group": 4},
    ]
    blocks = [{"no_op": False, "ffn_mult": 2.0}, {"no_op": False, "ffn_mult": 5.25}, {"no_op": True}]
    values = {
        "model_type": "nemotron-nas", **SIZES, "num_hidden_layers": 3, "num_key_value_heads": None,
        "intermediate_size": None,
        "block_configs": [{"attention": a, "ffn": f} for a, f in zip(attention, blocks, strict=True)],
    }  # fmt: skip
    shape = shape_of(values, "m", "m")
    kv_heads = [kind.grouped_query and kind.grouped_query.num_key_value_heads for kind in shape.kinds]
    widths = [kind.feed_forward and kind.feed_forward.intermediate_size for kind in shape.kinds]
    assert (kv_heads, widths) == ([2, None, 1], [256, 256, None])
    values["block_configs"][1]["attention"]["replace_with_linear"] = True
    with refused("only with block_configs without replace_with_linear"):
        shape_of(values, "m", "m")


DEEPSEEK = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **SIZES, **LATENT,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def test_the_text_part_of_a_model_for_images_is_read():
    text = config_of("qwen3_5_text", LINEAR).to_dict()
    nested = {
        "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text,
        "vision_config": {"depth": 27}, "image_token_id": 7, "tie_word_embeddings": False,
    }  # fmt: skip
    assert shape_of(nested, "m", "m") == shape_of(text, "m", "m")
    assert shape_of({**nested, "tie_word_embeddings": True, "text_config": {
        key: value for key, value in text.items() if key != "tie_word_embeddings"
    }}, "m", "m").tie_word_embeddings  # fmt: skip


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; ultrabench knows deepseek_v3 models only with moe_layer_freq 1"),
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"; ultrabench knows deepseek_v3 models only with '
        'scoring_func "sigmoid"'),
        ({"kv_lora_rank": None}, "model=m lacks kv_lora_rank; add it"),
        ({"hidden_act": "relu"}, 'hidden_act is "relu"'),
        ({"num_experts_per_token": 2}, "num_experts_per_token is 2; ultrabench knows no such key of "
        "deepseek_v3 models"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9; must be in 1..num_experts=8"),
        ({"topk_group": 3}, "topk_group=3; must be in 1..n_group=2"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers='8'; must be an integer"),
        ({"n_group": 3}, "n_group=3 must divide num_experts=8"),
        ({"layer_types": ["sliding_attention"] * 8}, 'layer_types is ["sliding_attention", '),
        ({"mlp_layer_types": ["dense"]}, "with at least num_hidden_layers=8 entries"),
        ({"architectures": ["DeepseekV3ForSequenceClassification"]},
            'architectures has "DeepseekV3ForSequenceClassification"; ultrabench knows deepseek_v3'),
        ({"rope_scaling": {"type": "yarn", "stretch": 2}}, "rope_scaling has stretch 2; ultrabench knows no such "
        "key of rotations"),
        ({"norm_topk_prob": "yes"}, 'norm_topk_prob is "yes"; must be true or false'),
        ({"hidden_act": ["silu"]}, 'hidden_act is ["silu"]'),
        ({"mlp_layer_types": ["moe"] * 8}, 'only with mlp_layer_types "dense" or "sparse" in each layer'),
        ({"routed_scaling_factor": "x"}, "must be a number"),
        ({"model_type": "deepseek_v33"}, "unsupported model_type 'deepseek_v33'"),
    ],
)  # fmt: skip
def test_what_no_type_of_layer_has_is_refused_by_its_key(change, line):
    with refused(line):
        shape_of({**DEEPSEEK, **change}, "m", "m")


def test_one_model_has_one_identity():
    """However its types are numbered, its order is written, and its sizes are given."""
    windowed = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
    full = {key: size for key, size in windowed.items() if key != "sliding_window"}
    block = {"feed_forward": {"intermediate_size": 96}}
    sizes = {key: SIZES[key] for key in SIZES if key not in ("pad_token_id", "attention_bias")} | {
        "tie_word_embeddings": False
    }
    a, b = {"grouped_query": windowed, **block}, {"grouped_query": full, **block}
    spellings = [
        {"layer_types": [a, b]}, {"layer_types": [b, a], "layer_order": "(ba)"},
        {"layer_types": [a, b], "layer_order": "abababab"},
        {"layer_types": [a, b, a], "layer_order": "cb(ab)"},
        {"layer_types": [{"grouped_query": {"sliding_window": 8}, "feed_forward": {}},
            {"grouped_query": {}, "feed_forward": {}}]},
    ]  # fmt: skip
    shapes = [shape_from({"name": f"m{n}", **sizes, **words}, "m") for n, words in enumerate(spellings)]
    assert len({shape.model_id for shape in shapes}) == 1
    assert shapes[0].kinds == shapes[1].kinds
    # The width of a head is the usual one where neither the block nor the model gives it.
    no_width = {name: size for name, size in sizes.items() if name != "head_dim"}
    assert shape_from({"name": "m", **no_width, **spellings[-1]}, "m").model_id == shapes[0].model_id
    # Types that the other fields can describe are those fields.
    assert shape_from({"name": "m", **sizes, "layer_types": [b]}, "m") == shape_from(
        {"name": "m", **sizes}, "m"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"layer_order": "aab"}, "layer_order=aab has the letter b; layer_types has 1 type, a to a"),
        ({"layer_order": "aaa"}, "layer_order has 3 letters; num_hidden_layers=8"),
        ({"layer_order": "a)"}, "must be a letter for each layer"),
        ({"qk_norm": True}, "qk_norm=True has no effect beside layer_types; write it into these"),
        ({"layer_types": [{}]}, "a layer type has no block"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
            "no type of layer_types has experts"),
        ({"layer_types": [{"grouped_query": {}, "latent": {"kv_lora_rank": 8, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 8}}]},
         "a layer type has grouped_query and latent; give one of"),
        ({"layer_types": [{"grouped_query": {"sinks": 3}}]}, "sinks=3 is not a boolean"),
        ({"layer_types": [{"grouped_query": {"window": 3}}]}, "window"),
    ],
)  # fmt: skip
def test_types_that_cannot_be_are_refused(words, line):
    sizes = {key: SIZES[key] for key in SIZES if key not in ("pad_token_id", "attention_bias")} | {
        "tie_word_embeddings": False
    }
    with refused(line):
        shape_from(
            {"name": "m", **sizes, "layer_types": [{"grouped_query": {"sinks": True}}], **words}, "model m"
        )


OTHER_KERNELS = "use another kernel, such as kernel=megatron or kernel=command, or another model"


def test_the_embedded_kernel_refuses_by_name_what_a_command_runs():
    shape = shape_of(DEEPSEEK | INDEX | {"model_type": "deepseek_v32"}, "m", "m")
    reason = refusal(KernelConfig(name="embedded"), Layout(dp=1), shape, 64, "cpu")
    feature = "the index of sparse attention"
    assert reason == f"the embedded kernel does not train {feature}, which m has: {OTHER_KERNELS}"
    nanotron = load_config(["kernel=nanotron", "model=tiny", "hardware=h100x8"]).kernel
    reason = refusal(nanotron, Layout(dp=2, zero_stage=1), shape, 64, "cuda")
    told = "use kernel=command with a command that trains this model"
    assert reason == f"kernel nanotron has no word for latent attention, which m has: {told}"
    command = KernelConfig(name="command", kind="command", command=("true",), step_line="(?P<seconds>x)")
    assert refusal(command, Layout(dp=1), shape, 64, "cpu") is None


def test_a_program_without_words_for_a_part_that_the_embedded_kernel_trains_is_refused():
    kernels = (
        KernelConfig(name="embedded"),
        load_config(["kernel=nanotron", "model=tiny", "hardware=h100x8"]).kernel,
    )
    for model_type, words, feature in (
        ("arcee", {}, "feed-forward blocks without a gate"),
        ("llama", {"rope_scaling": DEEPSEEK["rope_scaling"], "head_dim": 16}, "yarn rotations"),
    ):
        shape = shape_of(config_of(model_type, words).to_dict(), "m", "m")
        ours, theirs = (refusal(kernel, Layout(dp=2, zero_stage=1), shape, 64, "cuda") for kernel in kernels)
        assert ours is None
        assert f"kernel nanotron has no word for {feature}, which m has" in theirs


def test_a_rotation_with_another_key_is_not_trained_as_yarn():
    yarn = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    other = {**yarn, "llama_4_scaling_beta": 0.1}
    scalings = [shape_of({**DEEPSEEK, "rope_scaling": rope}, "m", "m").rope_scaling for rope in (yarn, other)]
    assert scalings == [RopeScaling(**yarn), None]
    shape = shape_of({**DEEPSEEK, "rope_scaling": other}, "m", "m")
    reason = refusal(KernelConfig(name="embedded"), Layout(dp=1), shape, 64, "cpu")
    assert "the embedded kernel does not train rotations of its rope_type, which m has" in reason


def test_layers_that_the_embedded_kernel_cannot_tell_apart_or_cut_are_refused():
    embedded, advice = KernelConfig(name="embedded"), f"which m has: {OTHER_KERNELS}"
    sizes = {key: SIZES[key] for key in SIZES if key not in ("pad_token_id", "attention_bias")}
    window = {"grouped_query": {"sliding_window": 16}, "feed_forward": {}}
    full = {"grouped_query": {}, "feed_forward": {}}
    few_heads = {"grouped_query": {"num_attention_heads": 2}, "feed_forward": {}}
    for types, reason in (
        ([few_heads, full], f"the embedded kernel does not train layers with different attention, {advice}"),
        (
            [window, full],
            "sliding_window=16 is shorter than seq_len=64; ultrabench's attention has no window",
        ),
    ):
        words = {"name": "m", **sizes, "tie_word_embeddings": False, "layer_types": types}
        assert reason in refusal(embedded, Layout(dp=1), shape_from(words, "model m"), 64, "cpu")
    shared = shape_of(DEEPSEEK | {"n_shared_experts": 1, "moe_intermediate_size": 42}, "m", "m")
    reason = refusal(embedded, Layout(dp=1, tp=4), shared, 64, "cpu", any_model=True)
    assert reason == "tp=4 does not divide shared_expert_intermediate_size=42"
