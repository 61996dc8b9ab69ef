"""What each key of a config.json does to a model, compared with the configuration classes of transformers."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ultrabench.errors import misspelled_name
from ultrabench.model_shape import RENAMED, ModelShape
from ultrabench.sweep.config.checkpoint import shape_of
from ultrabench.sweep.config.model_types import (
    CLASSES,
    DEFAULTS,
    EXPERT_SIZES,
    FIXED_VALUES,
    GATED_TYPES,
    MODEL_TYPES,
    OTHER_TYPES,
    ROPE_KEYS,
    TRAINED_VALUES,
    is_harmless,
)

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
COUNTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
    "dots1": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
}  # fmt: skip
NO_DEFAULT = {
    *EXPERT_SIZES,
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
}
"""Sizes that a file must have."""


def config_of(model_type, **values):
    return CONFIG_MAPPING[model_type](**{**SIZES, **COUNTS.get(model_type, {}), **values})


def shapes_of(config):
    """The shapes of all tensors of the model, which is not allocated."""
    with torch.device("meta"):
        return {
            name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(config).state_dict().items()
        }


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_key_of_transformers_is_read_harmless_or_changes_the_model(model_type):
    read_keys = {*DEFAULTS, *MODEL_TYPES[model_type]}
    read_keys |= {key for key, field in RENAMED.items() if field in read_keys}
    keys = config_of(model_type).to_dict().keys()
    assert {
        key for key in keys if key not in read_keys and key not in TRAINED_VALUES and not is_harmless(key)
    } <= {"layer_types"}
    shape_of(config_of(model_type).to_dict(), "m", "m")  # as transformers writes it


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_absent_keys_have_the_defaults_of_transformers(model_type):
    config = CONFIG_MAPPING[model_type](use_sliding_window=True)
    defaults = {**DEFAULTS, **MODEL_TYPES[model_type]}
    rope = {"partial_rotary_factor": 1.0, **config.rope_parameters}
    names = {field: key for key, field in RENAMED.items() if hasattr(config, key)}
    theirs = {key: rope.get(key, getattr(config, names.get(key, key), None)) for key in defaults}
    compared = {*defaults} - NO_DEFAULT - {"use_sliding_window"}
    if defaults["head_dim"] is None:  # transformers computes it
        compared.remove("head_dim")
    if defaults["num_key_value_heads"] is None:  # one per head
        theirs["num_key_value_heads"] = (
            None if config.num_key_value_heads == config.num_attention_heads else 0
        )
    assert {key: defaults[key] for key in compared} == {key: theirs[key] for key in compared}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_harmless_keys_change_no_tensor(model_type):
    config = config_of(model_type)
    expected = shapes_of(config)
    other_values = {
        key: 7 if type(value) is int else 0.25 if type(value) is float else not value
        for key, value in config.to_dict().items()
        if is_harmless(key) and type(value) in (int, float, bool) and key not in ("use_cache", "return_dict")
    }
    assert len(other_values) > 5
    assert shapes_of(config_of(model_type, **other_values)) == expected


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_has_as_many_parameters_as_that_of_transformers(model_type):
    config = config_of(model_type)
    with torch.device("meta"):
        num_params = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    shape = shape_of({**config.to_dict(), "architectures": [CLASSES[model_type][0]]}, "m", "m")
    assert shape.num_params == num_params
    assert shape.num_params == shape_of(config.to_diff_dict() | SIZES, "m", "m").num_params


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_known_class_of_each_type_is_that_of_transformers(model_type):
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == CLASSES[model_type][0]


def test_no_other_type_of_transformers_is_taken_for_a_misspelling():
    hinted = {
        name for name in CONFIG_MAPPING if name not in MODEL_TYPES and misspelled_name(name, MODEL_TYPES)
    }
    assert hinted == OTHER_TYPES
    assert misspelled_name("mixtrall", MODEL_TYPES) == "mixtral"


@pytest.mark.parametrize("model_type", sorted(GATED_TYPES))
def test_sizes_stand_for_a_model_that_is_not_trained(model_type):
    """Its matrices have as many elements as those of the sizes, so that the advice to write them is right."""
    sizes = {**SIZES, "num_hidden_layers": 4, "pad_token_id": 0}
    config = CONFIG_MAPPING[model_type](**sizes)
    shape = ModelShape(
        name="m", tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        **{key: getattr(config, key, SIZES[key]) or SIZES[key] for key in SIZES},
    )  # fmt: skip
    with torch.device("meta"):
        matrices = [p for p in AutoModelForCausalLM.from_config(config).parameters() if p.dim() == 2]
    num_tables = 1 if shape.tie_word_embeddings else 2
    expected = num_tables * shape.embedding_params + 4 * shape.layer_matmul_params()
    assert sum(p.numel() for p in matrices) == expected


def test_rope_keys_and_fixed_values_belong_to_known_types():
    assert {"rope_theta", "rope_type"} <= ROPE_KEYS
    assert {*FIXED_VALUES, *CLASSES} <= {*MODEL_TYPES}
