"""configs/kernel/torchtitan.yaml and megatron.yaml: words to flags, refusals, and lines as the programs log them.

The lines are quoted: torchtitan's from pytorch/torchtitan#3393 (May 2026) and, the second, from version 0.3.0 as
it ran under ultrabench; Megatron-LM's from NVIDIA/Megatron-LM#756 (April 2024).
"""

import re
from dataclasses import fields, replace

import pytest

from tests.strategies import LONG
from ultrabench.cli.sweep.show_as import not_expressed, without_other_models
from ultrabench.errors import ConfigError
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import AXES, Layout
from ultrabench.model_shape import ModelShape
from ultrabench.record import values_of
from ultrabench.run import AttemptKey, RunSpec, Workload, fill_in
from ultrabench.step_line import parse_log_line
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

SWEEP = [
    "sweep.models=[llama3-8b,llama3-70b]", "max_p_oom=1", "hardware=h100x8", "sweep.nodes=1", "sweep.tp=2", "sweep.pp=[1,2]",
    "sweep.zero_stage=[0,1,2,3]", "sweep.mbs=1", "sweep.gas=[1,2,4]", "sweep.gbs=8", "sweep.seq_len=4096",
]  # fmt: skip
TORCHTITAN = (
    "[rank0]:[titan] 2026-05-18 16:04:46,338 - root - INFO - step: 14  loss:  3.24405  grad_norm:  0.8319  "
    "memory:  9.46GiB(64.99%)  tps: 7,282  tflops: 0.52  mfu: 0.17%"
)
ON_CPUS = (
    "[titan] 2026-11-21 16:03:54,469 - root - INFO - step:  3  loss:  6.29930  grad_norm:  3.2757  "
    "memory: -0.00GiB(-0.00%)  tps: 39  tflops: 0.00  mfu: 0.00%"
)
MEGATRON = (
    " [2024-04-06 02:59:36] iteration       43/     100 | consumed samples:         5504 | elapsed time per "
    "iteration (ms): 5444.9 | throughput per GPU (TFLOP/s/GPU): 239.8 | learning rate: 8.600000E-06 | global batch "
    "size:   128 | lm loss: 1.825991E+00 | load_balancing_loss: 1.019746E+00 | loss scale: 1.0 | grad norm: 1.426 | "
    "num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
OTHERS = (
    "[titan] 2026-11-21 15:53:23,735 - root - INFO - Training starts at step 1",
    "[titan] 2025-07-21 15:57:42,774 - root - INFO - validate step: 10  loss:  4.9925  memory:  0.00GiB(0.00%)  tps: 9",
    "(min, max) time across ranks (ms): forward-backward: (5444.9, 5445.0)",
)


def planned(kernel, *more):
    """The candidates that run, and the reasons of those that do not."""
    words = {word.partition("=")[0]: word for word in (*SWEEP, *more)}
    plan = make_plan(load_config([f"kernel={kernel}", *words.values()]))
    refused = {c.reason for c in plan.candidates if not c.runs and c.reason}
    return plan, [c.spec for c in plan.runs], refused


def command_of(spec, config):
    there = replace(spec, kernel=without_other_models(spec, config.kernel))
    return fill_in(there, AttemptKey("x", 0, 0), config.measure)


def told_to(spec, config):
    """The flags of the command with their values; it tells the program all that a run has."""
    words = command_of(spec, config)
    assert not [word for word in words if "{" in word]
    assert list(not_expressed(spec, config.kernel)) == []
    return dict(word.lstrip("-").partition("=")[::2] for word in words)


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


def test_megatron_is_told_layout_and_model():
    plan, runs, _ = planned("megatron")
    assert {s.layout.zero_stage for s in runs} == {1}
    assert {s.shape.name for s in runs} == {"llama3-8b", "llama3-70b"}
    spec = next(s for s in runs if s.layout.pp == 2 and s.shape.name == "llama3-70b")
    expected = {
        "num-layers": 80, "hidden-size": 8192, "num-query-groups": 8, "tensor-model-parallel-size": 2, "seq-length": 4096,
        "pipeline-model-parallel-size": 2, "micro-batch-size": 1, "global-batch-size": 8, "use-distributed-optimizer": "",
    }  # fmt: skip
    told = told_to(spec, plan.config)
    assert {name: told[name] for name in expected} == {name: str(value) for name, value in expected.items()}


OTHER = {
    "tp": 4, "cp": 2, "zero_stage": 2, "recompute": "every2", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 64, "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 512,
    "tie_word_embeddings": True, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "head_dim": 64, "qk_norm": True,
    "rope_scaling": replace(LONG, factor=32.0), "sliding_window": 128, "seq_len": 8192, "seed": 5, "precision": "fp32",
    "compile": True, "attention": "flash3",
}  # fmt: skip
OTHER_VALUES = {word: {word: value} for word, value in OTHER.items()} | {
    "dp": {"dp": 4, "gbs": 16}, "pp": {"pp": 2, "pp_schedule": "1f1b"}, "pp_schedule": {"pp": 2, "pp_schedule": "afab"},
    "dp_shard": {"dp_shard": 2, "dp": 4, "gbs": 16}, "mbs": {"mbs": 2, "gbs": 16}, "gas": {"gas": 8, "gbs": 16},
    "virtual_stages": {"pp": 2, "pp_schedule": "interleaved", "virtual_stages": 2}, "gbs": {"gbs": 16, "gas": 8},
}  # fmt: skip


@pytest.mark.parametrize(("framework", "zero_stage"), [("megatron", 1), ("torchtitan", 3)])
def test_every_word_of_a_run_changes_the_command_or_is_named_beside_it(framework, zero_stage):
    config = load_config([f"kernel={framework}", "model=llama3.1-8b", "sweep.nodes=[1]"])
    (shape,), kernel = config.models, config.kernel
    if framework == "megatron":
        shape = replace(shape, rope_scaling=None)

    def shown(**more):
        layout = {"dp": 2, "tp": 2, "gas": 4, "zero_stage": zero_stage}
        records = (
            Layout(**layout), shape, Workload(seq_len=4096, gbs=8), KernelConfig(name="x", precision="bf16"),
        )  # fmt: skip
        made = [replace(r, **{k: v for k, v in more.items() if k in values_of(r)}) for r in records]
        spec = RunSpec(layout=made[0], shape=made[1], workload=made[2], kernel=made[3], nodes=1,
                       gpus_per_node=made[0].world_size)  # fmt: skip
        return command_of(spec, config), list(not_expressed(spec, kernel))

    usual, nothing = shown()
    assert nothing == []
    words = [*AXES, *(f.name for r in (ModelShape, Workload) for f in fields(r) if f.name != "name")]
    assert {*words, "precision", "compile", "attention"} == OTHER_VALUES.keys()
    for word, more in OTHER_VALUES.items():
        command, comments = shown(**more)
        assert command != usual or any(word in comment for comment in comments), word
    flags = RECOMPUTE_FLAGS[framework]
    for recompute in ("none", "attention", "selective", "full", "every2"):
        command, comments = shown(recompute=recompute)
        told = None if comments else set().union(*flags.values()) & {*command}
        assert told == flags.get(recompute), recompute


RECOMPUTE_FLAGS = {
    "megatron": {
        "none": set(), "attention": {"--recompute-granularity=selective"},
        "full": {"--recompute-granularity=full", "--recompute-method=uniform", "--recompute-num-layers=1"},
    },
    "torchtitan": {word: {f"activation-checkpoint:{word}"} for word in ("none", "selective", "full")},
}  # fmt: skip


def test_a_model_that_torchtitan_does_not_have_is_not_called_by_the_name_of_another():
    config = load_config(["kernel=torchtitan", "model=qwen3-8b", "sweep.nodes=[1]"])  # hidden_size=4096, too
    (shape,), layout = config.models, Layout(dp=2, zero_stage=3)
    spec = RunSpec(layout=layout, shape=shape, workload=Workload(seq_len=4096, gbs=2), kernel=config.kernel,
                   nodes=1, gpus_per_node=2)  # fmt: skip
    assert not [word for word in command_of(spec, config) if "llama3_8b" in word]
    (told,) = [line for line in not_expressed(spec, config.kernel) if line.startswith("the model")]
    assert "--config=llama3_8b is another; register one with hidden_size=4096, num_hidden_layers=36" in told
    assert "qk_norm=True" in told


@pytest.mark.parametrize(("kernel", "zero_stage"), [("torchtitan", 3), ("megatron", 1)])
def test_a_pipeline_with_too_few_micro_batches_is_refused(kernel, zero_stage):
    more = ["sweep.models=[llama3-8b]", "sweep.pp=2", f"sweep.zero_stage={zero_stage}"]
    plan, _, _ = planned(kernel, *more, "sweep.mbs=2", "sweep.gas=1", "sweep.gbs=4")
    (candidate,) = plan.candidates
    assert candidate.layout.pp_schedule == "afab"
    assert "supports pp_schedule in" in candidate.reason


@pytest.mark.parametrize(
    ("kernel", "line", "seconds", "loss"),
    [("torchtitan", TORCHTITAN, 4096 / 7282, 3.24405), ("torchtitan", ON_CPUS, 4096 / 39, 6.2993),
     ("megatron", MEGATRON, 5.4449, 1.825991)],
)  # fmt: skip
def test_a_real_line_tells_time_and_loss_and_other_lines_are_no_steps(kernel, line, seconds, loss):
    choice = load_config([f"kernel={kernel}", "model=llama3-8b"]).kernel
    assert choice.step_rank == -1
    pattern = re.compile(choice.step_line or "")
    step = parse_log_line(line, pattern, tokens_per_gpu=4096)
    assert step == {"event": "step", "measured_by": "log", "loss": loss, "seconds": pytest.approx(seconds)}
    assert [parse_log_line(other, pattern, 4096) for other in OTHERS] == [None] * len(OTHERS)


def test_a_time_that_no_group_tells_or_that_is_no_time_is_not_a_step():
    with pytest.raises(ConfigError, match=r"lacks a group, one of .*milliseconds"):
        KernelConfig(name="x", kind="command", command=("x",), step_line="(?P<loss>.)")
    for text in ("tps: 0", "tps: ,"):
        assert parse_log_line(text, re.compile(r"tps: (?P<tokens_per_s_per_gpu>[\d,]+)"), 10.0) is None
