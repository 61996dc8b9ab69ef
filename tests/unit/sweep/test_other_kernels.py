"""configs/kernel/torchtitan.yaml, megatron.yaml and nanotron.yaml: words to flags, and refusals."""

import subprocess
from dataclasses import fields, replace

import pytest
import yaml

from tests.strategies import LONG
from ultrabench.attention_type import GroupedQuery
from ultrabench.cli.sweep.show_as import (
    not_expressed,
    options_not_expressed,
    spec_for_kernel,
    without_other_models,
)
from ultrabench.feed_forward_type import FeedForward
from ultrabench.kernel_config import PRECISIONS, KernelConfig
from ultrabench.layer_type import LayerType
from ultrabench.layout import AXES, TEXT_AXES, USUAL, Layout
from ultrabench.model_shape import ModelShape
from ultrabench.record import values_of
from ultrabench.run import AttemptKey, RunSpec, Workload, fill_in
from ultrabench.sweep.config.load import load_config, load_model
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.refusals import refusal
from ultrabench.sweep.remedy import same_commands

SWEEP = [
    "sweep.models=[llama3-8b,llama3-70b]", "max_p_oom=1", "hardware=h100x8", "sweep.nodes=1", "sweep.tp=2",
    "sweep.pp=[1,2]",
    "sweep.zero_stage=[0,1,2,3]", "sweep.mbs=1", "sweep.gas=[1,2,4]", "sweep.gbs=8", "sweep.seq_len=4096",
]  # fmt: skip
CHOICES = {name: values for name, values in USUAL.items() if name in TEXT_AXES}
"""Axis whose values are words -> its usual values."""


def planned(kernel, *overrides):
    """The candidates that run, and the reasons of those that do not."""
    words = {override.partition("=")[0]: override for override in (*SWEEP, *overrides)}
    plan = make_plan(load_config([f"kernel={kernel}", *words.values()]))
    refused = {c.reason for c in plan.candidates if not c.runs and c.reason}
    return plan, [c.spec for c in plan.runs], refused


def command_of(spec, config):
    own_spec = replace(spec, kernel=without_other_models(spec, config.kernel))
    return fill_in(own_spec, AttemptKey("x", 0, 0), config.measure)


def told_to(spec, config):
    """The flags of the command with their values; it tells the program all that a run has."""
    command = command_of(spec, config)
    assert not [arg for arg in command if "{" in arg and "{files}" not in arg]
    assert list(not_expressed(spec, config.kernel)) == []
    return dict(arg.lstrip("-").partition("=")[::2] for arg in command)


def test_torchtitan_is_told_the_layout_and_trains_only_its_own_model():
    plan, runs, refused = planned("torchtitan")
    assert {(s.shape.name, s.layout.zero_stage) for s in runs} == {("llama3-8b", 3)}
    _, on_one, _ = planned("torchtitan", "sweep.tp=8", "sweep.pp=1", "sweep.gas=8")
    assert {(s.layout.dp, s.layout.zero_stage) for s in on_one} == {(1, 0)}, "one dp rank is any stage"
    assert "kernel torchtitan supports hidden_size in [4096]; hidden_size=8192" in refused
    flat, piped = (next(s for s in runs if s.layout.pp == pp) for pp in (1, 2))
    assert (piped.layout.dp, piped.layout.gas) == (2, 4)
    degrees = ("data-parallel-shard", "tensor-parallel", "pipeline-parallel")
    expected = {
        "torchtitan.train": "", "config": "llama3_8b", "activation-checkpoint:none": "",
        **{f"parallelism.{axis}-degree": "2" for axis in degrees},
        "parallelism.pipeline-parallel-microbatch-size": "1", "training.global-batch-size": "8",
        "training.local-batch-size": "4",  # a pipeline gets all micro-batches
        "training.steps": str(plan.config.measure.warmup_steps + plan.config.measure.max_steps),
    }  # fmt: skip
    assert told_to(piped, plan.config).items() >= expected.items()
    assert told_to(flat, plan.config)["training.local-batch-size"] == "1"
    alone = replace(flat, layout=replace(flat.layout, sequence_parallel="off"))
    assert command_of(alone, plan.config)[-2:] == [
        "--parallelism.no-enable-sequence-parallel", "activation-checkpoint:none"
    ], "after this word, torchtitan refuses options of other sections"  # fmt: skip


def test_torchtitan_after_0_3_0_is_told_batches_in_tokens_and_no_context_parallelism():
    plan, runs, _ = planned("torchtitan-main")
    flat, piped = (told_to(next(s for s in runs if s.layout.pp == pp), plan.config) for pp in (1, 2))
    counts = {"training.num-tokens-per-train-step": str(8 * 4096), "training.max-context-length": "4096",
              "training.num-tokens-per-microbatch-per-dp-rank": "4096", "config": "llama3_8b"}  # fmt: skip
    assert piped.items() >= {**counts, "parallelism.num-pp-microbatches": "4"}.items()
    assert flat.items() >= {**counts, "parallelism.num-pp-microbatches": "1"}.items()
    absent = {"training.seq-len", "training.global-batch-size", "parallelism.context-parallel-degree"}
    assert not absent & flat.keys()
    _, runs, refused = planned("torchtitan-main", "sweep.cp=2", "sweep.cp_exchange=[allgather]")
    assert not runs
    assert any("supports cp in [1]" in reason for reason in refused), refused


def test_megatron_is_told_layout_and_model():
    plan, runs, _ = planned("megatron")
    assert {s.layout.zero_stage for s in runs} == {1, 3}
    assert {s.shape.name for s in runs} == {"llama3-8b", "llama3-70b"}
    spec = next(
        s for s in runs if s.layout.pp == 2 and s.layout.zero_stage == 1 and s.shape.name == "llama3-70b"
    )
    expected = {
        "num-layers": 80, "hidden-size": 8192, "num-query-groups": 8, "tensor-model-parallel-size": 2,
        "seq-length": 4096,
        "pipeline-model-parallel-size": 2, "micro-batch-size": 1, "global-batch-size": 8,
        "use-distributed-optimizer": "",
    }  # fmt: skip
    flags = told_to(spec, plan.config)
    assert {name: flags[name] for name in expected} == {name: str(value) for name, value in expected.items()}


@pytest.mark.parametrize("kernel", ["torchtitan", "megatron", "nanotron"])
def test_no_command_of_another_program_runs_twice(kernel):
    choices = [f"sweep.{name}={[*values]}".replace("'", '"') for name, values in CHOICES.items()]
    plan, runs, refused = planned(kernel, "sweep.nodes=2", "sweep.cp=[1,2]", *choices)
    assert runs
    assert not [*same_commands(plan)]
    run_values = {name: {getattr(spec.layout, name) for spec in runs} for name in CHOICES}
    for name, value in {"dp_overlap": "off", "sequence_parallel": "off", "cp_exchange": "allgather"}.items():
        assert value in run_values[name] or any(f"{name}={value}" in reason for reason in refused), name
    assert run_values["sequence_parallel"] == ({"on"} if kernel == "nanotron" else {"on", "off"})


@pytest.mark.parametrize("name", ["torchtitan", "megatron", "nanotron"])
def test_a_precision_that_the_command_of_another_program_does_not_say_is_refused(name):
    """Steps in bf16 would stand in a cell of fp8."""
    model = "llama3-8b" if name == "nanotron" else "llama3.1-8b"  # without or with scaled rotations
    config, answers = load_config([f"kernel={name}", f"model={model}"]), {}
    for precision in PRECISIONS:
        spec = spec_in(precision, config)
        words = fill_in(spec, AttemptKey("r", 0, 0), config.measure)
        answers[precision] = words, refusal(spec.kernel, spec.layout, spec.shape, 8192, "cuda")
    words_of_bf16, reason = answers.pop("bf16")
    assert reason is None
    for words, reason in answers.values():
        assert words != words_of_bf16 or f"kernel {name} supports precision in [bf16" in reason


def spec_of(layout, shape, kernel, seq_len=4096):
    """A run on one node."""
    place = {"nodes": 1, "gpus_per_node": layout.world_size}
    workload = Workload(seq_len=seq_len, gbs=layout.gbs)
    return RunSpec(layout=layout, shape=shape, workload=workload, kernel=kernel, **place)


def with_variant_env(spec, values):
    """The run with other values of axes, sizes, batch and options of the kernel, on as many GPUs as it then needs."""
    records = {name: getattr(spec, name) for name in ("layout", "shape", "workload", "kernel")}
    changed = {
        name: replace(record, **{k: v for k, v in values.items() if k in values_of(record)})
        for name, record in records.items()
    }
    return replace(spec, **changed, gpus_per_node=changed["layout"].world_size)


def spec_in(precision, config):
    """A run of eight GPUs that each of these programs can do."""
    is_torchtitan = config.kernel.name == "torchtitan"
    axes = {"zero_stage": 3, "cp_exchange": "allgather"} if is_torchtitan else {"zero_stage": 1}
    return spec_of(Layout(dp=8, **axes), config.models[0], replace(config.kernel, precision=precision), 8192)


def test_an_axis_that_the_command_of_another_program_does_not_say_is_refused():
    spec = with_experts(Layout(dp=2, tp=2, gas=2, zero_stage=1, dp_overlap="off"))
    megatron = load_config(["kernel=megatron", "model=8B"]).kernel
    without = {name: table for name, table in megatron.flags.items() if name != "dp_overlap"}
    kernels = (megatron, replace(megatron, flags=without), replace(megatron, name="mine", flags=without))
    reasons = [refusal(kernel, spec.layout, spec.shape, 64, "cuda") for kernel in kernels]
    rule = "and would run as dp_overlap=on: add dp_overlap to kernel.flags"
    assert reasons == [None, f"kernel megatron has no word for dp_overlap=off {rule}", None]


@pytest.mark.parametrize(
    ("name", "copies"), [("megatron", True), ("nanotron", False), ("torchtitan", False), ("embedded", True)]
)
def test_more_ranks_than_key_value_heads_are_refused_for_programs_that_do_not_copy_heads(name, copies):
    config = load_config([f"kernel={name}", "model=llama3.1-8b", "sweep.nodes=[1]"])
    supports = {word: values for word, values in config.kernel.supports.items() if word == "kv_copies"}
    kernel = replace(config.kernel, supports=supports)
    shape, layout = replace(config.models[0], rope_scaling=None), Layout(dp=1, tp=16)
    reason = f"kernel {name} supports kv_copies in [1]; kv_copies=2 (tp=16, num_key_value_heads=8)"
    assert refusal(kernel, layout, shape, 4096, "cuda") == (None if copies else reason)


@pytest.mark.parametrize(
    ("step_rank", "is_refused"), [(3, False), (-1, False), ("any", False), (4, True), (99, True)]
)
def test_a_layout_without_the_rank_that_logs_is_refused(step_rank, is_refused):
    kernel = KernelConfig(name="x", kind="command", command=("x",), step_rank=step_rank)
    spec = with_experts(Layout(dp=4))
    reason = f"kernel.step_rank={step_rank}; the last of 4 ranks is 3: use -1 for the last rank"
    assert refusal(kernel, spec.layout, spec.shape, 64, "cpu") == (reason if is_refused else None)


def with_experts(layout=None, **changed):
    """A run of a small model with experts, sigmoid scores and a dense first layer."""
    shape = replace(load_model("tiny-moe"), scoring_func="sigmoid", **changed)
    layout = layout or Layout(dp=2, tp=2, ep=2, gas=2, zero_stage=1)
    return spec_of(layout, shape, KernelConfig(name="x", precision="bf16"), 64)


def test_megatron_is_told_how_experts_are_made_chosen_and_spread():
    config = load_config(["kernel=megatron", "model=8B"])
    sizes = {"n_shared_experts": 2, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5}
    spec = with_experts(attention_bias=True, **sizes)
    flags = dict(arg.lstrip("-").partition("=")[::2] for arg in command_of(spec, config))
    expected = {
        "num-experts": "8", "moe-router-topk": "2", "moe-ffn-hidden-size": "64", "ffn-hidden-size": "256",
        "moe-layer-freq": "[0,1,1,1]", "moe-shared-expert-intermediate-size": "128", "expert-model-parallel-size": "2",
        "expert-tensor-parallel-size": "1", "moe-router-score-function": "sigmoid", "moe-grouped-gemm": "",
        "moe-router-topk-scaling-factor": "2.5", "add-qkv-bias": "", "rotary-percent": "0.5",
    }  # fmt: skip
    assert flags.items() >= expected.items()
    assert list(not_expressed(spec, config.kernel)) == []
    own = replace(spec, kernel=config.kernel)
    assert "--moe-router-force-load-balancing" in command_of(own, config)
    other_routing = "kernel.routing={}".format
    learned = load_config(["kernel=megatron", "model=8B", other_routing("learned")])
    assert "--moe-router-force-load-balancing" not in command_of(replace(own, kernel=learned.kernel), learned)
    skewed = load_config(["kernel=megatron", "model=8B", other_routing('"skew=0.5"')]).kernel
    reason = "kernel megatron supports routing in [balanced, learned]; routing=skew=0.5"
    for layout in (spec.layout, replace(spec.layout, zero_stage=0)):  # also where no layout could mend it
        assert refusal(skewed, layout, spec.shape, 64, "cuda") == reason
    dense = replace(spec, shape=config.models[0], layout=replace(spec.layout, ep=1))
    arguments = [arg for arg in command_of(dense, config)[4:] if "moe" in arg or "expert" in arg]
    assert arguments == ["--moe-grouped-gemm"], "a model without experts does not care"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"norm_topk_prob": False}, "expert_weights in [softmax, softmax/sum, sigmoid/sum]; expert_weights=sigmoid"),
        ({"num_experts_per_tok": 1}, "expert_weights in [softmax, softmax/sum, sigmoid/sum]; expert_weights=1"),
        ({"qk_norm": True, "qk_norm_across_heads": True}, "qk_norm_across_heads in [False]; qk_norm_across_heads=True"),
    ],
)  # fmt: skip
def test_what_megatron_cannot_do_with_experts_is_refused_and_shown_without_changing_the_rest(changed, reason):
    config = load_config(["kernel=megatron", "model=8B"])
    spec = with_experts(**changed)
    reason = f"megatron supports {reason}"
    assert refusal(config.kernel, spec.layout, spec.shape, 64, "cuda") == f"kernel {reason}"
    assert reason in list(not_expressed(spec, config.kernel))
    assert {"--num-experts=8", "--untie-embeddings-and-output-weights"} <= {*command_of(spec, config)}


def test_torchtitan_is_told_ep_and_what_to_register_for_a_model_with_experts():
    config = load_config(["kernel=torchtitan", "model=llama3-8b"])
    spec = with_experts(Layout(dp=2, tp=2, ep=4, zero_stage=3))
    assert "--parallelism.expert-parallel-degree=4" in command_of(spec, config)
    (model,) = not_expressed(spec, config.kernel)
    assert "num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64" in model
    assert "scoring_func=sigmoid" in model
    assert "sliding_window" not in model
    assert "--debug.moe-force-load-balance" in spec_for_kernel(spec, config.kernel).kernel.command
    learned = replace(spec, kernel=replace(spec.kernel, routing="learned"))
    assert [*not_expressed(learned, config.kernel)][1].startswith("routing=learned: ")
    assert spec_for_kernel(learned, config.kernel).kernel.command == config.kernel.command
    command = command_of(spec, config)
    assert "--debug.moe-force-load-balance" not in command, "its router chooses in a run of its own"
    full = replace(config.models[0], num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
    reason = "kernel torchtitan supports num_experts in [0]; num_experts=8"
    assert refusal(config.kernel, spec.layout, full, 64, "cuda") == reason


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
OTHER = {
    "tp": 4, "cp": 2, "zero_stage": 2, "recompute": "every2", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 64, "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 512,
    "tie_word_embeddings": True, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "head_dim": 64, "qk_norm": True,
    "rope_scaling": replace(LONG, factor=32.0), "sliding_window": 128, "seq_len": 8192, "seed": 5, "precision": "fp32",
    "compile": True, "attention": "flash3", "sequence_parallel": "off", "dp_overlap": "off", "attention_bias": True,
    "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1, "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0, "final_logit_softcapping": 30.0, "rope_type": "yarn",
}  # fmt: skip
SINKS = GroupedQuery(num_attention_heads=32, num_key_value_heads=8, head_dim=128, sinks=True)
TYPES = tuple(
    LayerType(grouped_query=attention, feed_forward=FeedForward(intermediate_size=14336))
    for attention in (SINKS, replace(SINKS, sliding_window=128))
)
OTHER_VALUES = {name: {name: value} for name, value in OTHER.items()} | {
    "dp": {"dp": 4, "gbs": 16}, "pp": {"pp": 2, "pp_schedule": "1f1b"}, "pp_schedule": {"pp": 2, "pp_schedule": "afab"},
    "cp_exchange": {"cp": 2, "cp_exchange": "allgather"}, "dp_shard": {"dp_shard": 2, "dp": 4, "gbs": 16},
    "mbs": {"mbs": 2, "gbs": 16}, "gas": {"gas": 8, "gbs": 16},
    "virtual_stages": {"pp": 2, "pp_schedule": "interleaved", "virtual_stages": 2}, "gbs": {"gbs": 16, "gas": 8},
    "num_experts": EXPERTS, "pp_layout": {"pp": 2, "pp_schedule": "1f1b", "pp_layout": "even"},
    "layer_types": {"layer_types": TYPES},
}  # fmt: skip
OF_EXPERTS = {
    "ep": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "decoder_sparse_step": 2, "scoring_func": "sigmoid", "norm_topk_prob": False, "routed_scaling_factor": 2.5,
    "n_group": 4,
}  # fmt: skip
"""Another value of each word that needs a model with experts."""
CHANGES = [
    *(({}, name, values) for name, values in OTHER_VALUES.items()),
    *((EXPERTS, name, EXPERTS | {name: value}) for name, value in OF_EXPERTS.items()),
    ({"layer_types": TYPES}, "layer_order", {"layer_types": TYPES, "layer_order": "(aab)"}),
    (EXPERTS | {"n_group": 4}, "topk_group", EXPERTS | {"n_group": 4, "topk_group": 2}),
    ({"qk_norm": True}, "qk_norm_across_heads", {"qk_norm": True, "qk_norm_across_heads": True}),
]
"""The values of a run beside the usual ones, a word, and these values with another one of it."""


@pytest.mark.parametrize(("framework", "zero_stage"), [("megatron", 1), ("torchtitan", 3), ("nanotron", 1)])
def test_every_word_of_a_run_changes_the_command_or_is_named_beside_it(framework, zero_stage):
    config = load_config([f"kernel={framework}", "model=llama3.1-8b", "sweep.nodes=[1]"])
    (shape,), kernel = config.models, config.kernel
    if framework != "torchtitan":
        shape = replace(shape, rope_scaling=None)

    def shown(**changes):
        layout = Layout(dp=2, tp=2, gas=4, zero_stage=zero_stage)
        spec = with_variant_env(spec_of(layout, shape, KernelConfig(name="x", precision="bf16")), changes)
        return command_of(spec, config), list(not_expressed(spec, kernel))

    assert shown()[1] == []
    words = [*AXES, *(f.name for r in (ModelShape, Workload) for f in fields(r) if f.name != "name")]
    assert {*words, "precision", "compile", "attention"} == {field for _, field, _ in CHANGES}
    for before, field, after in CHANGES:
        (usual, _), (command, comments) = shown(**before), shown(**after)
        assert command != usual or any(field in comment for comment in comments), field
    flags = RECOMPUTE_FLAGS[framework]
    for recompute in ("none", "attention", "selective", "full", "every2"):
        command, comments = shown(recompute=recompute)
        passed = None if comments else set().union(*flags.values()) & {*command}
        assert passed == flags.get(recompute), recompute


RECOMPUTE_FLAGS = {
    "megatron": {
        "none": set(), "attention": {"--recompute-granularity=selective"},
        "full": {"--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"},
    },
    "nanotron": {"none": {"  recompute_layer: false"}, "full": {"  recompute_layer: true"}},
    "torchtitan": {mode: {f"activation-checkpoint:{mode}"} for mode in ("none", "selective", "full")},
}  # fmt: skip


def test_a_model_that_torchtitan_does_not_have_is_not_called_by_the_name_of_another():
    config = load_config(["kernel=torchtitan", "model=qwen3-8b", "sweep.nodes=[1]"])  # hidden_size=4096, too
    spec = spec_of(Layout(dp=2, zero_stage=3), config.models[0], config.kernel)
    assert not [arg for arg in command_of(spec, config) if "llama3_8b" in arg]
    (note,) = [line for line in not_expressed(spec, config.kernel) if line.startswith("the model")]
    advice = "register one with hidden_size=4096, num_hidden_layers=36"
    assert f"--config=llama3_8b selects another; {advice}" in note
    assert "qk_norm=True" in note


@pytest.mark.parametrize(("kernel", "zero_stage"), [("torchtitan", 3), ("megatron", 1)])
def test_a_pipeline_with_too_few_micro_batches_is_refused(kernel, zero_stage):
    overrides = ["sweep.models=[llama3-8b]", "sweep.pp=2", f"sweep.zero_stage={zero_stage}"]
    plan, _, _ = planned(kernel, *overrides, "sweep.mbs=2", "sweep.gas=1", "sweep.gbs=4")
    (candidate,) = plan.candidates
    assert candidate.layout.pp_schedule == "afab"
    assert "supports pp_schedule in" in candidate.reason


def test_nanotron_is_told_layout_and_model_by_the_lines_of_its_file():
    config = load_config(["kernel=nanotron", "model=llama3-8b", "sweep.nodes=[1]"])
    layout = Layout(dp=2, tp=2, pp=2, gas=4, mbs=2, zero_stage=1, recompute="full", pp_schedule="1f1b")
    spec = spec_of(layout, config.models[0], config.kernel)
    assert list(not_expressed(spec, config.kernel)) == []
    bash, option, script, *words = command_of(spec, config)
    shown = script.replace("exec python run_train.py --config-file", "cat")
    settings = yaml.safe_load(subprocess.check_output([bash, option, shown, *words], text=True))
    assert settings["parallelism"] == {
        "dp": 2, "tp": 2, "pp": 2, "tp_mode": "REDUCE_SCATTER", "tp_linear_async_communication": True,
        "recompute_layer": True, "pp_engine": "1f1b",
    }  # fmt: skip
    batch = {"sequence_length": 4096, "micro_batch_size": 2, "batch_accumulation_per_replica": 4}
    assert settings["tokens"].items() >= batch.items()
    assert settings["optimizer"]["zero_stage"] == 1
    shape = settings["model"]["model_config"]
    assert (shape["hidden_size"], shape["rms_norm_eps"], shape["rope_theta"]) == (4096, 1e-5, 5e5)
    assert (shape["tie_word_embeddings"], type(shape["rope_theta"])) == (False, float)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("llama3.1-8b", {"--use-rope-scaling", "--rope-scaling-factor=8", "--swiglu", "--num-query-groups=8"}),
        ("mistral-7b", {"--swiglu", "--position-embedding-type=rope", "--rotary-base=1000000"}),
        ("deepseek-v3", {"--multi-latent-attention", "--q-lora-rank=1536", "--qk-head-dim=128", "--v-head-dim=128",
                         "--moe-router-num-groups=8", "--moe-shared-expert-intermediate-size=2048"}),
        ("gpt-oss-120b", {"--softmax-type=learnable", "--window-size=127,0", "--quick-geglu",
                          "--activation-func-clamp-value=7"}),
        ("nemotron-3", {"--squared-relu", "--mamba-num-heads=64", "--position-embedding-type=none"}),
    ],
)  # fmt: skip
def test_megatron_is_told_the_types_of_layers(model, arguments):
    config = load_config(["kernel=megatron", f"model={model}", "sweep.nodes=[1]"])
    spec = spec_of(Layout(dp=8, zero_stage=1), config.models[0], config.kernel)
    assert refusal(spec.kernel, spec.layout, spec.shape, 4096, "cuda") is None
    command = command_of(spec, config)
    assert arguments <= {*command}
    hybrid = [word for word in command if word.startswith("--hybrid-layer-pattern=MEMEM*")]
    assert len(hybrid) == (model == "nemotron-3")
    assert ("--disable-bias-linear" in command) == (model != "gpt-oss-120b")


@pytest.mark.parametrize(
    ("model", "axes", "arguments"),
    [
        ("llama3-8b", {"virtual_stages": 2}, {"--num-virtual-stages-per-pipeline-rank=2"}),
        ("llama3-8b", {"pp_layout": "17-15"}, {f"--pipeline-model-parallel-layout=E{'t' * 17}|{'t' * 15}L"}),
        ("deepseek-v3", {"virtual_stages": 2, "pp_layout": "16-16-15-14"},
         {f"--pipeline-model-parallel-layout=E{'t' * 16}|{'t' * 16}|{'t' * 15}|{'t' * 14}mL", "--mtp-num-layers=1"}),
    ],
)  # fmt: skip
def test_megatron_is_told_the_stages_of_a_pipeline(model, axes, arguments):
    config = load_config(["kernel=megatron", f"model={model}", "sweep.nodes=[1]"])
    schedule = "interleaved" if "virtual_stages" in axes else "1f1b"
    layout = Layout(dp=4, pp=2, gas=4, zero_stage=1, pp_schedule=schedule, **axes)
    num_predicted = int("--mtp-num-layers=1" in arguments)
    shape = replace(config.models[0], num_nextn_predict_layers=num_predicted)
    spec = spec_of(layout, shape, config.kernel)
    assert refusal(spec.kernel, layout, shape, 4096, "cuda") is None
    commands = {*command_of(spec, config)}
    assert arguments <= commands
    about_stages = [word for word in commands if "virtual-stages" in word or "parallel-layout" in word]
    assert len(about_stages) == 1
    short_rounds = replace(layout, gas=3)
    if schedule == "interleaved":
        reason = "kernel megatron supports gas_modulo_pp in [0]; gas_modulo_pp=1"
        assert refusal(spec.kernel, short_rounds, shape, 4096, "cuda").startswith(reason)
        uneven = replace(layout, virtual_stages=5, pp_layout="auto")
        assert refusal(spec.kernel, uneven, shape, 4096, "cuda") == (
            "kernel megatron has equal stages with pp_layout=auto, and pp*virtual_stages=10 does not divide "
            f"num_hidden_layers={shape.num_hidden_layers}: use pp_layout=even"
        )
        assert refusal(spec.kernel, replace(uneven, pp_layout="even"), shape, 4096, "cuda") is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            "gemma3-27b",
            "kernel megatron has one rope_theta for all layers; the layers of gemma3-27b differ in it",
        ),
        ("llama4-scout", "kernel megatron has one partial_rotary_factor for all layers"),
        ("qwen3-next", "kernel megatron has no word for linear attention, which qwen3-next has"),
        ("deepseek-v3.2", "kernel megatron supports index in [None]; index="),
    ],
)
def test_models_whose_layers_megatron_cannot_be_told_are_refused_by_name(model, reason):
    config = load_config(["kernel=megatron", f"model={model}", "sweep.nodes=[1]"])
    assert reason in refusal(config.kernel, Layout(dp=8, zero_stage=1), config.models[0], 4096, "cuda")


def test_the_program_and_the_connections_of_megatron_follow_from_its_arguments(tmp_path):
    """The command runs as it is, with another python that writes its first word and a variable."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$1 $CUDA_DEVICE_MAX_CONNECTIONS"\n')
    python.chmod(0o755)
    config = load_config(["kernel=megatron-perf", "model=llama3-8b", "sweep.nodes=[1]"])

    def started(layout, model, kernel=config.kernel):
        words = fill_in(spec_of(layout, load_model(model), kernel), AttemptKey("x", 0, 0), config.measure)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.check_output(words, env=environment, text=True).strip()

    assert started(Layout(dp=8, zero_stage=1), "llama3-8b") == "pretrain_gpt.py 32"
    assert started(Layout(dp=4, tp=2, zero_stage=1), "llama3-8b") == "pretrain_gpt.py 1"
    assert started(Layout(dp=4, tp=2, zero_stage=3), "llama3-8b") == "pretrain_gpt.py 32"
    assert started(Layout(dp=8, zero_stage=1), "nemotron-3") == "pretrain_hybrid.py 32"
    megatron = load_config(["kernel=megatron", "model=llama3-8b"]).kernel
    assert started(Layout(dp=8, zero_stage=1), "llama3-8b", megatron) == "pretrain_gpt.py 1"


def test_options_of_a_run_stand_where_a_command_reads_them_or_are_named_beside_it():
    variant = {"flags.cuda_graph": "full_iteration", "flags.mine": "on", "env.A": "1"}
    layout, shape = Layout(dp=8, zero_stage=3, recompute="full"), load_model("llama3.1-8b")

    def command_and_notes(run_kernel, kernel):
        config = load_config([f"kernel={kernel}", "model=llama3.1-8b"])
        run = replace(spec_of(layout, shape, load_config([f"kernel={run_kernel}"]).kernel), variant=variant)
        run = replace(run, arguments=("--mine",))
        words = fill_in(spec_for_kernel(run, config.kernel), AttemptKey("x", 0, 0), config.measure)
        return words, {*options_not_expressed(run, config.kernel)}

    words, notes = command_and_notes("megatron", "megatron")
    assert {"--cuda-graph-impl=full_iteration", "--mine"} <= {*words}
    assert notes == set()
    words, notes = command_and_notes("megatron", "megatron-perf")
    assert ("--cuda-graph-impl=full_iteration" in words, "--mine" in words) == (True, False)
    assert notes == {"flags.mine"}
    words, notes = command_and_notes("megatron", "torchtitan")
    assert (words[-1], notes) == ("activation-checkpoint:full", {"flags.mine", "flags.cuda_graph"})
    assert command_and_notes("torchtitan", "torchtitan")[0][-2:] == ["--mine", "activation-checkpoint:full"]


def test_megatron_perf_has_other_usual_values_of_knobs():
    base, fast = (
        load_config([f"kernel={name}", "model=8B"]).kernel for name in ("megatron", "megatron-perf")
    )
    changed = {knob for knob in base.knobs if base.usual_knob_value(knob) != fast.usual_knob_value(knob)}
    assert changed == {*fast.knob_values}
    assert fast.command == base.command
    spec = spec_of(Layout(dp=8, zero_stage=1), load_model("llama3-8b"), fast)
    assert {"--grad-reduce-in-bf16", "--manual-gc", "--cross-entropy-loss-fusion"} <= {
        *fill_in(spec, AttemptKey("x", 0, 0), load_config(["kernel=megatron", "model=8B"]).measure)
    }
