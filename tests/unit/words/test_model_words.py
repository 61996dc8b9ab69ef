"""Words that describe the layers of a model and the stages of a pipeline to a program."""

from dataclasses import replace

import pytest

from ultrabench.attention_type import GroupedQuery
from ultrabench.feed_forward_type import FeedForward
from ultrabench.layer_type import LayerType
from ultrabench.layout import Layout
from ultrabench.model_words import MIXED, model_words, pipeline_words
from ultrabench.sweep.config.load import load_model

PIPELINE = Layout(dp=1, pp=4, gas=8, pp_schedule="1f1b")
VIRTUAL = replace(PIPELINE, pp_schedule="interleaved", virtual_stages=2)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("llama3-8b", {"attention_kinds": "grouped_query", "window": None, "activation": "silu gated",
                       "linear_biases": "none", "hybrid_pattern": "", "rope_factor": 1.0, "head_dim": None}),
        ("llama3.1-8b", {"rope_factor": 8.0}),
        ("qwen2.5-7b", {"linear_biases": "qkv", "attention_bias": True}),
        ("deepseek-v3", {"attention_kinds": "latent", "kv_lora_rank": 512, "n_group": 8, "scoring_func": "sigmoid",
                         "shared_expert_intermediate_size": 2048, "expert_weights": "sigmoid/sum"}),
        ("gpt-oss-20b", {"window": 128, "windowed_layers": f"[{','.join(['1,0'] * 12)}]", "sinks": True,
                         "linear_biases": "all", "activation": "silu gated limited", "head_dim": 64}),
        ("qwen3-next", {"attention_kinds": "grouped_query+linear", "qk_norm": True, "output_gate": "channel"}),
        ("gemma3-27b", {"norms": "both", "window": 1024, "rope_theta": MIXED, "sliding_window": MIXED}),
        ("llama4-scout", {"qk_norm": MIXED, "partial_rotary_factor": MIXED}),
    ],
)  # fmt: skip
def test_words_of_layers_follow_from_all_types_of_layers(model, words):
    all_words = model_words(load_model(model))
    assert {name: all_words[name] for name in words} == words


def test_layers_of_one_block_have_a_pattern_that_pipeline_stages_cut():
    shape = load_model("nemotron-3")
    pattern = model_words(shape)["hybrid_pattern"]
    assert (pattern[:6], len(pattern), {*pattern}) == ("MEMEM*", 52, {*"ME*"})
    cut = pipeline_words(shape, PIPELINE)
    assert cut["pipeline_division"] == "none"
    assert [len(stage) for stage in cut["hybrid_pattern"].split("|")] == [13] * 4
    assert cut["hybrid_pattern"].replace("|", "") == pattern


@pytest.mark.parametrize(
    ("layout", "division", "stages"),
    [
        (Layout(dp=1), "none", ""),
        (PIPELINE, "stages", None),
        (VIRTUAL, "virtual", None),
        (replace(PIPELINE, pp=3), "uneven", None),
        (replace(PIPELINE, pp=3, pp_layout="even"), "listed", "E" + "t" * 11 + "|" + "t" * 11 + "|" + "t" * 10 + "L"),
        (replace(PIPELINE, pp_layout="5-9-9-9"), "listed", "E" + "|".join("t" * n for n in (5, 9, 9, 9)) + "L"),
    ],
)  # fmt: skip
def test_stages_are_told_by_their_number_or_by_their_layers(layout, division, stages):
    words = pipeline_words(load_model("llama3-8b"), layout)
    assert words["pipeline_division"] == division
    assert stages is None or words["pipeline_layout"] == stages


def test_a_module_that_predicts_a_token_is_in_the_last_stage():
    shape = replace(load_model("llama3-8b"), num_nextn_predict_layers=1)
    words = pipeline_words(shape, replace(PIPELINE, pp_layout="9-9-9-5"))
    assert words["pipeline_layout"].split("|")[-1] == "tttttmL"


def test_interleaved_micro_batches_beyond_whole_rounds_are_counted():
    shape = load_model("llama3-8b")
    layouts = (VIRTUAL, replace(VIRTUAL, gas=10), replace(PIPELINE, gas=10))
    assert [pipeline_words(shape, layout)["gas_modulo_pp"] for layout in layouts] == [0, 2, 0]


def test_a_size_of_a_type_of_layer_counts_and_not_the_usual_one_of_the_model():
    attention = GroupedQuery(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    kind = LayerType(grouped_query=attention, feed_forward=FeedForward(intermediate_size=1024))
    shape = load_model("llama3-8b")
    assert model_words(replace(shape, layer_types=(kind,)))["intermediate_size"] == 1024
    wider = replace(kind, feed_forward=FeedForward(intermediate_size=2048))
    assert model_words(replace(shape, layer_types=(kind, wider)))["intermediate_size"] == MIXED
