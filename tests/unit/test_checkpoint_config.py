"""A Hugging Face config.json is a model as it is; what would be another model is refused by its key."""

import json
from pathlib import Path

import pytest

from ultrabench.errors import ConfigError
from ultrabench.sweep.config.load import config_from_tree, load_config, load_model

LLAMA = {  # as the hub has it for an 8B model of 2024
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.43.0",
    "vocab_size": 128256,
}


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ULTRABENCH_CONFIG_DIR", str(tmp_path / "nobody"))


def write(path, change=(), without=()):
    values = {k: v for k, v in {**LLAMA, **dict(change)}.items() if k not in without}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(values))
    return str(path)


def test_a_config_json_is_a_model_as_it_is():
    shape = load_model(write("Llama-3.1-8B/config.json"))
    assert (shape.name, shape.num_params) == ("Llama-3.1-8B", 8_030_261_248)
    assert (shape.rope_theta, shape.rms_norm_eps) == (500000.0, 1e-5)


@pytest.mark.parametrize(
    ("path", "change", "name"),
    [
        ("mine.json", {}, "mine"),
        ("a b/config.json", {}, "a b"),
        ("x/config.json", {"_name_or_path": "meta-llama/Llama-3.1-8B"}, "Llama-3.1-8B"),
        ("x/config.json", {"_name_or_path": "/fsx/runs/step 10/"}, "step 10"),
        ("x/config.json", {"_name_or_path": ""}, "x"),
    ],
)
def test_the_models_name(path, change, name):
    assert load_config([f"model={write(path, change)}"]).models[0].name == name


def test_the_folder_of_a_checkpoint_will_do():
    write("Llama-3.1-8B/config.json")
    assert load_model("./Llama-3.1-8B").hidden_size == 4096


def test_what_is_absent_is_what_transformers_takes():
    llama = load_model(
        write("a.json", without=("num_key_value_heads", "tie_word_embeddings", "rms_norm_eps", "rope_theta"))
    )
    assert (llama.num_key_value_heads, llama.tie_word_embeddings) == (32, False)
    assert (llama.rms_norm_eps, llama.rope_theta) == (1e-6, 10000.0)
    mistral = {"model_type": "mistral", "sliding_window": None}
    assert load_model(write("b.json", mistral, without=("num_key_value_heads",))).num_key_value_heads == 8
    assert load_model(write("c.json", {**mistral, "num_key_value_heads": None})).num_key_value_heads == 32
    assert (
        load_model(
            write("d.json", {"rope_parameters": {"rope_theta": 7.0}}, without=("rope_theta",))
        ).rope_theta
        == 7
    )
    assert load_model(write("e.json", {"tie_word_embeddings": True})).tie_word_embeddings


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 128}, {"sliding_window": None}, {"layer_types": ["full_attention"] * 32}, {"num_experts": 0},
        {"sliding_window": 4096, "use_sliding_window": False}, {"partial_rotary_factor": 1}, {"dtype": "float32"},
    ],
)  # fmt: skip
def test_what_changes_nothing_is_taken(change):
    assert load_model(write("m.json", change)).num_params == 8_030_261_248


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"attention_bias": True},
            "attention_bias is true; ultrabench trains models whose attention_bias is false",
        ),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"head_dim": 256}, "head_dim is 256; ultrabench trains models whose head_dim is 128"),
        (
            {"sliding_window": 4096},
            "sliding_window is 4096; ultrabench trains models whose sliding_window is null",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is "),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"n_routed_experts": 64}, "n_routed_experts is 64"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512"),
        (
            {"model_type": "qwen3"},
            "model_type 'qwen3'; ultrabench trains the decoder of llama and mistral only",
        ),
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "model_type ['llama']"),
        ({"hidden_size": "4096"}, "hidden_size='4096' is no whole number"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads=0; must be >= 1"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(change, line):
    with pytest.raises(ConfigError) as raised:
        load_model(write("m.json", change))
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_mistral_that_names_no_window_has_one():
    with pytest.raises(ConfigError, match="sliding_window is 4096"):
        load_model(write("m.json", {"model_type": "mistral"}))


@pytest.mark.parametrize(
    ("text", "line"), [("{", "cannot read model=m.json"), ("[]", "holds no sizes"), (None, "No such file")]
)
def test_what_is_no_config_json_is_told(text, line):
    if text is not None:
        Path("m.json").write_text(text)
    with pytest.raises(ConfigError, match=line):
        load_config(["model=m.json"])


def test_a_launched_sweep_does_not_need_the_file():
    config = load_config([f"sweep.models=[{write('small.json', {'hidden_size': 512})},tiny]"])
    Path("small.json").unlink()
    assert [m.name for m in config.models] == ["small", "tiny"]
    assert config_from_tree(config.resolved).models == config.models


def test_two_models_of_one_name_are_refused():
    write("tiny/config.json")
    with pytest.raises(ConfigError, match="two models are called tiny"):
        load_config(["sweep.models=[tiny,tiny/config.json]"])
