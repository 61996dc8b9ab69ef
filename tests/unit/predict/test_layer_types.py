"""What is predicted of models with several types of layers, and of the layers of pipeline stages."""

from dataclasses import replace

import pytest

from tests.configs import refused
from tests.unit.predict.test_memory import constants
from tests.unit.predict.test_step_time import spec_of, step_time
from ultrabench.layout import Layout
from ultrabench.stages import split_stages
from ultrabench.sweep.arguments import PREDICTION_DEFAULTS, read_run
from ultrabench.sweep.config.load import load_config, load_model
from ultrabench.sweep.grid import broken_rules
from ultrabench.sweep.plan import predictor
from ultrabench.sweep.predict.memory import predict_memory
from ultrabench.sweep.predict.ultrabench_memory import static_bytes

MODELS = (
    "deepseek-v3.2",
    "gpt-oss-20b",
    "qwen3-next",
    "llama4-scout",
    "gemma3-27b",
    "nemotron-3",
    "glm-5",
    "kimi-k2",
)
PIPELINE = Layout(dp=2, pp=4, gas=8, pp_schedule="1f1b", zero_stage=1)


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_every_parameter_of_every_type(name):
    shape = load_model(name)
    for layout in (Layout(dp=1), replace(PIPELINE, dp=1, zero_stage=0)):
        num_tables = 2 if shape.tie_word_embeddings and layout.pp > 1 else 1
        copies = (num_tables - 1) * shape.embedding_params
        state_bytes = sum(static_bytes(spec_of(layout, shape)))
        assert state_bytes == pytest.approx(12 * (shape.num_params + copies), rel=1e-3)
    sizes = [stage.num_params(shape) for stage in split_stages(shape, 4)]
    assert sum(sizes) == shape.num_params + copies


@pytest.mark.parametrize("name", MODELS)
def test_more_tokens_take_longer_and_more_memory(name):
    shape = load_model(name)
    layout = replace(PIPELINE, ep=2) if shape.num_experts else PIPELINE
    for profile in ("ultrabench", "megatron"):
        less, more = (spec_of(replace(layout, mbs=mbs), shape) for mbs in (1, 2))
        assert step_time(more, profile).total > step_time(less, profile).total
        peaks = [
            [stage.allocated_bytes for stage in predict_memory(spec, constants(profile))]
            for spec in (less, more)
        ]
        assert all(after > before for before, after in zip(*peaks, strict=True))


def test_windows_save_time_and_states_do_not_grow_with_the_sequence():
    windowed = load_model("gemma3-27b")
    full = replace(windowed, layer_types=windowed.layer_types[1:], layer_order="")
    attention_s = {
        seq_len: [
            step_time(spec_of(Layout(dp=1), shape, seq_len=seq_len)).attention for shape in (windowed, full)
        ]
        for seq_len in (4096, 32768)
    }
    assert attention_s[4096][0] < 0.7 * attention_s[4096][1]
    assert attention_s[32768][0] < 0.3 * attention_s[32768][1]
    states = load_model("nemotron-3")
    states = replace(states, layer_types=states.layer_types[:2], layer_order="(ab)")
    short, long = (
        step_time(spec_of(Layout(dp=1), states, seq_len=seq_len)).attention for seq_len in (4096, 32768)
    )
    assert long == pytest.approx(8 * short)


def test_a_module_for_multi_token_prediction_is_on_the_last_stage():
    shape = load_model("deepseek-v3")
    more = replace(shape, num_nextn_predict_layers=1)
    # 11.5 G of parameters beside the shared tables: DeepSeek-V3's technical report has 14 G with both of them.
    assert more.num_params - shape.num_params == pytest.approx(11.5e9, rel=0.02)
    # The last stage has a copy of the embedding.
    stage_params = sum(stage.num_params(more) for stage in split_stages(more, 4))
    assert stage_params == more.num_params + more.embedding_params
    plain, added = ([stage.num_params(s) for stage in split_stages(s, 4)] for s in (shape, more))
    assert [after - before for before, after in zip(plain, added, strict=True)][:3] == [0, 0, 0]
    spec, spec_more = spec_of(PIPELINE, shape), spec_of(PIPELINE, more)
    assert step_time(spec_more, "ultrabench").total > step_time(spec, "ultrabench").total
    assert more.flops_per_token(4096) > shape.flops_per_token(4096)


def layers_of(pp_layout, num_stages=4, model="llama3-8b"):
    return [stage.num_layers for stage in split_stages(load_model(model), num_stages, pp_layout=pp_layout)]


def test_layers_are_divided_as_asked():
    assert layers_of("even") == [8, 8, 8, 8]
    assert layers_of("even", 5) == [7, 7, 6, 6, 6]
    assert layers_of("9-9-9-5") == [9, 9, 9, 5]
    assert layers_of("auto") == layers_of("cost") == [9, 9, 8, 6]
    first, *_, last = split_stages(load_model("llama3-8b"), 4, pp_layout="0-16-16-0")
    assert (first.num_blocks, first.has_embedding, last.num_blocks, last.has_head) == (1, True, 4, True)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"pp_layout": "8-8-8-8"}, None), ({"pp_layout": "even"}, None),
        ({"pp_layout": "8-8-16"}, "pp_layout=8-8-16 lists 3 stages; pp*virtual_stages=4: list one number for each"),
        ({"pp_layout": "8-8-8-9"}, "pp_layout=8-8-8-9 has 33 layers; num_hidden_layers=32: their sum must be that"),
        ({"pp_layout": "8-8-8-8", "pp_schedule": "interleaved", "virtual_stages": 2},
         "pp_layout=8-8-8-8 lists 4 stages; pp*virtual_stages=8: list one number for each"),
        ({"pp_layout": "even", "pp": 1, "pp_schedule": "none"}, "pp_layout=even has no effect with pp=1"),
    ],
)  # fmt: skip
def test_a_division_that_does_not_fit_is_refused(words, reason):
    layout = replace(PIPELINE, **words)
    assert next(broken_rules(layout, load_model("llama3-8b")), (None, None))[1] == reason


def test_an_unset_division_is_that_of_the_program_and_no_part_of_an_id():
    spec = spec_of(PIPELINE, "llama3-8b")
    assert "pp_layout" not in spec.identity()["layout"]
    asked = replace(spec, layout=replace(PIPELINE, pp_layout="even"))
    assert asked.run_id != spec.run_id
    for profile, has_effect in (("megatron", False), ("ultrabench", True)):
        config = load_config(["model=llama3-8b", "hardware=h100x8", f"profile={profile}"])
        predicts = predictor(config, 1, config.hardware.peak("bf16", 1, None, 1))
        unset_s, even_s = (predicts.predict(s).step_time_s for s in (spec, asked))
        assert (unset_s != even_s) == has_effect


def test_a_division_is_read_as_a_list_or_as_a_text():
    for text in ("8-8-8-8", "[8,8,8,8]", "8,8,8,8"):
        spec, _ = read_run(["model=llama3-8b", "pp=4", "gas=4", f"pp_layout={text}"], PREDICTION_DEFAULTS)
        assert spec.layout.pp_layout == "8-8-8-8"
    for override in ("sweep.pp_layout=[8,8,8,8]", "sweep.pp_layout=[[8,8,8,8]]", "sweep.pp_layout=[8-8-8-8]"):
        config = load_config(["model=llama3-8b", "hardware=h100x8", override])
        assert config.axes.layout["pp_layout"] == ("8-8-8-8",)
    with refused("sweep.pp_layout='third'; must be auto, cost, even or the layers of each stage"):
        load_config(["model=llama3-8b", "hardware=h100x8", "sweep.pp_layout=third"])
