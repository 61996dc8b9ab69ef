"""configs/framework/: every word of a run is in the file or named beside it,
and the parser of each package accepts the file.
"""

import functools
import importlib
import json

import pytest
import yaml

from tests.unit.sweep.test_other_kernels import CHANGES, spec_of, with_variant_env
from ultrabench.cli.sweep.show_as import not_expressed, spec_for_kernel, with_precision
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.run import AttemptKey, fill_in
from ultrabench.sweep.config.framework import text_of
from ultrabench.sweep.config.load import load_config, load_framework

CONFIG = load_config(["model=llama3-8b", "sweep.nodes=[1]"])
USUAL = spec_of(
    Layout(dp=2, tp=2, gas=4, zero_stage=3), CONFIG.models[0], KernelConfig(name="x", precision="bf16")
)


framework_of = functools.cache(load_framework)


def shown(name, **changes):
    """The file of a framework for a run, and what it does not express."""
    framework, spec = framework_of(name), with_variant_env(USUAL, changes)
    kernel = with_precision(framework.kernel, spec.kernel.precision)
    words = fill_in(spec_for_kernel(spec, kernel), AttemptKey("x", 0, 0), CONFIG.measure)
    return text_of(words, framework.file), [*not_expressed(spec, kernel, framework.elsewhere)]


@pytest.mark.parametrize("name", ["deepspeed", "accelerate", "nemo"])
def test_every_word_of_a_run_changes_the_file_or_is_named_beside_it(name):
    for before, field, after in CHANGES:
        (usual, usual_comments), (text, comments) = shown(name, **before), shown(name, **after)
        changed = {*comments} ^ {*usual_comments}
        assert text != usual or any(field in comment for comment in changed), field


PIPELINE = {"pp": 2, "pp_schedule": "interleaved", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("name", "values", "line"),
    [
        ("deepspeed", {"cp": 2}, "cp=2: its Ulysses splits attention heads"),
        ("deepspeed", PIPELINE, "pp=2: its pipeline engine needs a PipelineModule in your code"),
        ("deepspeed", {"sequence_parallel": "on"}, "supports sequence_parallel in [off]"),
        ("deepspeed", {"precision": "fp8"}, "precision=fp8: its file sets precision=bf16"),
        ("accelerate", PIPELINE, "pp=2: it has no pipelines"),
        ("accelerate", {"zero_stage": 1}, "supports zero_stage in [2, 3]"),
        ("accelerate", {"dp": 4, "gbs": 16, "cp": 2, "dp_shard": 2}, "dp_shard=2 with cp=2: its groups"),
        ("nemo", {"zero_stage": 1, "precision": "fp8"}, "the scale per row"),
    ],
)
def test_what_a_framework_cannot_do_is_one_line(name, values, line):
    comments = shown(name, **values)[1]
    assert len([comment for comment in comments if line in comment]) == 1
    assert not [comment for comment in comments if comment.startswith("kernel ")]


def test_accelerate_accepts_its_file(tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig

    in_fp32 = {"precision": "fp32", "zero_stage": 2}
    for changes in (in_fp32, {"dp": 4, "gbs": 16, "dp_shard": 2}, {"cp": 2, "recompute": "full"}):
        (tmp_path / "fsdp.yaml").write_text(text := shown("accelerate", **changes)[0])
        config = load_config_from_file(str(tmp_path / "fsdp.yaml"))
        sizes = {
            key.removeprefix("parallelism_config_"): size
            for key, size in config.parallelism_config.items()
            if key.endswith("_size")
        }
        assert (
            ParallelismConfig(**sizes).total_size
            == config.num_processes
            == yaml.safe_load(text)["num_processes"]
        )
        command = launch_command_parser().parse_args(
            ["--config_file", str(tmp_path / "fsdp.yaml"), "train.py"]
        )
        args, _, _ = _validate_launch_command(command)
        assert (args.use_fsdp, args.fsdp_version, args.use_parallelism_config) == (True, 2, True)
        assert args.parallelism_config_tp_size == 2
        assert args.fsdp_reshard_after_forward is (changes.get("zero_stage") != 2)
        fields = vars(args).keys()
        assert {*config.fsdp_config, *config.parallelism_config} <= fields


def test_deepspeed_accepts_its_file():
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    settings = json.loads(shown("deepspeed", dp=1, gbs=8, gas=8, zero_stage=3)[0])
    parsed = config.DeepSpeedConfig(settings)
    assert (parsed.train_micro_batch_size_per_gpu, parsed.gradient_accumulation_steps) == (1, 8)
    assert (parsed.zero_optimization_stage, parsed.zero_config.overlap_comm) == (3, True)
    assert (parsed.bfloat16_config.enabled, parsed.gradient_clipping) == (True, 1.0)
    assert parsed.tensor_parallel_config.autotp_size == 2
    assert not parsed.zero_config.model_extra


def test_the_keys_of_nemo_are_fields_of_its_model():
    parallel = pytest.importorskip(
        "megatron.core.transformer.transformer_config", reason="megatron-core is not installed"
    )
    ddp = importlib.import_module("megatron.core.distributed.distributed_data_parallel_config")
    fields = {
        "model": parallel.TransformerConfig.__dataclass_fields__.keys(),
        "ddp": ddp.DistributedDataParallelConfig.__dataclass_fields__.keys(),
    }
    of_rotations, shared = {"rotary_base", "rotary_percent"}, "share_embeddings_and_output_weights"
    for changes in ({}, PIPELINE, {"recompute": "full"}):
        for line in shown("nemo", zero_stage=1, **changes)[0].splitlines():
            group, _, key = line.partition("=")[0].partition(".")
            assert group not in fields or key in {
                *fields[group],
                *of_rotations,
                "seq_length",
                "vocab_size",
                shared,
            }, key
