"""A Hugging Face config.json is a model as it is; what would be another model is refused by its key."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.configs import refused
from tests.strategies import LONG
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.sweep.config.load import config_from_tree, load_config, load_model
from ultrabench.sweep.grid import refusal

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


def write(path, change=(), without=(), base=LLAMA):
    values = {k: v for k, v in {**base, **dict(change)}.items() if k not in without}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(values))
    return str(path)


@pytest.mark.parametrize(("values", "name"), [(LLAMA, "llama3.1-8b"), (QWEN, "qwen3-0.6b")])
def test_a_config_json_is_a_model_as_it_is(values, name):
    assert load_model(write(f"{name}/config.json", base=values)) == load_model(name)


@pytest.mark.parametrize(
    ("variable", "folder"),
    [("HF_HUB_CACHE", "."), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub"), ("HOME", ".cache/huggingface/hub")],
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
OLD_SCALING = {k: v for k, v in SCALING.items() if k != "rope_type"} | {"type": "llama3"}
ROPE = ("rope_scaling", "rope_theta")


@pytest.mark.parametrize(
    ("change", "without", "read"),
    [
        # What is absent is what transformers takes.
        ({}, (*KV, "tie_word_embeddings", "rms_norm_eps", "rope_theta"),
         {"num_key_value_heads": 32, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}),
        (ALONE, KV, {"num_key_value_heads": 8}), ({**ALONE, "num_key_value_heads": None}, (), {"num_key_value_heads": 32}),
        ({"model_type": "qwen3", "hidden_size": 2048}, KV, {"num_key_value_heads": 32, "head_dim": 128, "qk_norm": True}),
        ({"tie_word_embeddings": True}, (), {"tie_word_embeddings": True}),
        # Rotations are read in the words of any version.
        ({}, (), {"rope_theta": 5e5, "rope_scaling": LONG}), ({"rope_scaling": OLD_SCALING}, (), {"rope_scaling": LONG}),
        ({"rope_parameters": {**SCALING, "rope_theta": 7.0}}, ROPE, {"rope_theta": 7.0, "rope_scaling": LONG}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, ROPE, {"rope_theta": 7.0, "rope_scaling": None}),
        ({"rope_scaling": None}, (), {"rope_scaling": None}), ({"rope_scaling": {"type": "default"}}, (), {"rope_scaling": None}),
    ],
)  # fmt: skip
def test_sizes_and_rotations_of_any_version_are_read(change, without, read):
    shape = load_model(write("m.json", change, without))
    assert {name: getattr(shape, name) for name in read} == read


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 128}, {"sliding_window": None}, {"max_window_layers": 3}, {"layer_types": ["full_attention"] * 32}, {"num_experts": 0},
        {"sliding_window": 4096, "use_sliding_window": False}, {"partial_rotary_factor": 1}, {"dtype": "float32"},
    ],
)  # fmt: skip
def test_what_changes_nothing_is_taken(change):
    assert load_model(write("m.json", change)).num_params == 8_030_261_248


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"attention_bias": True}, "attention_bias is true; ultrabench trains models whose attention_bias is"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, 'whose hidden_act is "silu": for its sizes alone write them to ./ultrabench/'),
        ({"rope_scaling": {"rope_type": "yarn"}}, '"yarn"; ultrabench trains models whose rope_type is "llama3"'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 'rope_type is "linear"'),
        ({"rope_scaling": "dynamic"}, 'rope_type is "dynamic"'),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling lacks factor, low_freq_factor"),
        ({"rope_scaling": {**SCALING, "low_freq_factor": 4}}, "above low_freq_factor=4"),
        ({"rope_scaling": {**SCALING, "factor": 0.5}}, "rope_scaling.factor=0.5; must be >= 1"),
        ({"head_dim": 127}, "head_dim=127; rotations need an even width of heads"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is "),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"), ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"n_routed_experts": 64}, "n_routed_experts is 64"), ({"kv_lora_rank": 512}, "kv_lora_rank is 512"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe'; ultrabench trains the decoders of llama, mistral, qwen3"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "model_type 'gemma2' (attn_logit_softcapping is 50.0)"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "model_type 'mixtral' (num_local_experts is 8)"),
        ({"quantization_config": {"quant_method": "awq"}}, """quantization_config is {"quant_method": "awq"}; ultrabench"""),
        *(({"model_type": kind}, f"model_type {kind!r}") for kind in ("qwen2", None, ["llama"])),
        ({"hidden_size": "4096"}, "hidden_size='4096' is not an integer"), ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads=0; must be >= 1"),
    ],
)  # fmt: skip
def test_what_would_be_another_model_is_refused_by_name(change, line):
    with refused(line):
        load_model(write("m.json", change))


def test_a_window_is_refused_where_it_hides_positions():
    shape = load_model(write("m.json", {"model_type": "mistral"}))
    assert shape.sliding_window == 4096
    kernel, layout = KernelConfig(name="embedded"), Layout(dp=1)
    assert refusal(kernel, layout, shape, 4096, "cpu") is None
    use = "sliding_window=4096 is in use with seq_len=4097; attention has no window: "
    assert refusal(kernel, layout, shape, 4097, "cpu") == f"{use}take seq_len <= 4096 or another model"


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
