import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import refused
from tests.strategies import LONG, results, run_specs
from ultrabench import run
from ultrabench.errors import ConfigError
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.record import canonical_json, content_id, from_dict, to_dict
from ultrabench.result import RunResult
from ultrabench.run import RunSpec, Workload, env_id

SPEC = RunSpec(
    shape=ModelShape(
        name="small", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, vocab_size=128, tie_word_embeddings=True,
    ),
    workload=Workload(seq_len=128, gbs=8),
    layout=Layout(dp=2, tp=2, mbs=2, gas=2),
    kernel=KernelConfig(name="embedded"),
    nodes=2,
    gpus_per_node=2,
)  # fmt: skip
FACTS = {
    "gpu_name": "NVIDIA H100 80GB HBM3", "torch_version": "2.13.0", "cuda_version": "13.0",
    "nccl_version": "2.27", "driver_version": "580", "variables": {"NCCL_ALGO": "Ring"},
}  # fmt: skip


def shuffled(value, random):
    """The same JSON value with the keys of every object in another order."""
    if isinstance(value, dict):
        keys = list(value)
        random.shuffle(keys)
        return {k: shuffled(value[k], random) for k in keys}
    return [shuffled(v, random) for v in value] if isinstance(value, list) else value


@given(run_specs())
def test_a_spec_survives_json(spec):
    back = from_dict(RunSpec, json.loads(json.dumps(to_dict(spec))))
    assert back == spec
    assert back.run_id == spec.run_id


@given(results())
def test_a_result_survives_json(result):
    assert from_dict(RunResult, json.loads(canonical_json(to_dict(result)))) == result


@given(spec=run_specs(), random=st.randoms(use_true_random=False))
def test_run_id_does_not_depend_on_the_order_of_keys(spec, random):
    assert from_dict(RunSpec, shuffled(to_dict(spec), random)).run_id == spec.run_id


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, shape=replace(SPEC.shape, rope_theta=5e5)),
        replace(SPEC, shape=replace(SPEC.shape, num_key_value_heads=4)),
        replace(SPEC, shape=replace(SPEC.shape, head_dim=32)),
        replace(SPEC, shape=replace(SPEC.shape, qk_norm=True)),
        replace(SPEC, shape=replace(SPEC.shape, rope_scaling=LONG)),
        replace(SPEC, shape=replace(SPEC.shape, tie_word_embeddings=False)),
        replace(SPEC, workload=replace(SPEC.workload, seed=1)),
        replace(SPEC, workload=replace(SPEC.workload, seq_len=256)),
        replace(SPEC, layout=replace(SPEC.layout, zero_stage=1)),
        replace(SPEC, layout=replace(SPEC.layout, mbs=4, gas=1)),
        replace(SPEC, layout=replace(SPEC.layout, recompute="full")),
        replace(SPEC, kernel=KernelConfig(name="embedded", precision="bf16")),
        replace(SPEC, kernel=KernelConfig(name="embedded", version=99)),
        replace(SPEC, kernel=KernelConfig(name="mine", kind="command", command=("a",))),
        replace(SPEC, nodes=1, gpus_per_node=4),
    ],
)
def test_whatever_changes_the_measurement_changes_run_id(other):
    assert other.run_id != SPEC.run_id


def test_the_id_is_the_hash_of_the_identity_and_names_are_left_out():
    assert SPEC.run_id == content_id(SPEC.identity())
    assert (len(SPEC.run_id), int(SPEC.run_id, 16) >= 0) == (16, True)
    assert replace(SPEC, shape=replace(SPEC.shape, name="another")).run_id == SPEC.run_id
    assert SPEC.tokens_per_step == 8 * 128


def test_defaults_are_written_out_before_hashing():
    values = to_dict(SPEC)
    for group, name in (("layout", "virtual_stages"), ("kernel", "attention"), ("workload", "seed")):
        del values[group][name]
    assert from_dict(RunSpec, values).run_id == SPEC.run_id


def test_models_of_the_first_version_keep_their_ids():
    sizes = ("hidden_size", "intermediate_size", "vocab_size")
    others = ("tie_word_embeddings", "rope_theta", "rms_norm_eps")
    counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert SPEC.identity()["shape"] == {
        name: getattr(SPEC.shape, name) for name in (*sizes, *others, *counts)
    }


def test_recomputation_keeps_the_ids_that_it_had_as_an_option_of_the_kernel():
    full = replace(SPEC, layout=replace(SPEC.layout, recompute="full")).identity()
    assert full["kernel"]["recompute"] == "full"
    assert "recompute" not in full["layout"]


def test_a_field_added_later_keeps_old_ids(monkeypatch):
    old = SPEC.run_id
    cp2 = replace(SPEC, layout=Layout(dp=1, tp=2, cp=2, mbs=2, gas=4))
    with_cp = cp2.run_id
    monkeypatch.setattr(run, "ADDED_LATER", {**run.ADDED_LATER, "layout.cp": 1})
    assert "cp" not in SPEC.identity()["layout"]
    assert SPEC.run_id != old  # as if `cp` had never been hashed
    assert cp2.identity()["layout"]["cp"] == 2
    assert cp2.run_id == with_cp


def test_auto_attention_is_hashed_by_its_first_name():
    assert SPEC.kernel.attention == "auto"
    assert SPEC.identity()["kernel"]["attention"] == "sdpa"
    math = replace(SPEC, kernel=replace(SPEC.kernel, attention="math"))
    assert math.identity()["kernel"]["attention"] == "math"
    with pytest.raises(ConfigError, match="attention='sdpa'; must be auto, cudnn, flash, flash3 or math"):
        replace(SPEC.kernel, attention="sdpa")


def test_every_field_added_later_exists():
    for dotted in run.ADDED_LATER:
        group, _, name = dotted.partition(".")
        assert name in to_dict(SPEC)[group]


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_name": "NVIDIA H200"}, {"torch_version": "2.12.0"}, {"cuda_version": None}, {"nccl_version": "2.28"},
        {"driver_version": "581"}, {"variables": {"NCCL_ALGO": "Tree"}}, {"variables": {}},
    ],
)  # fmt: skip
def test_env_id_changes_with_each_fact(change):
    kernel = KernelConfig(name="embedded")
    assert env_id({**FACTS, **change}, kernel, "d") != env_id(FACTS, kernel, "d")


def test_env_id_holds_the_kernel_and_its_declared_variables():
    kernel = KernelConfig(name="mine", kind="command", command=("a",), env={"X": "1"})
    here = env_id(FACTS, kernel, "d")
    assert here == env_id(dict(reversed(FACTS.items())), kernel, "d")
    assert here == env_id({**FACTS, "hostname": "n1"}, kernel, "d")
    assert here != env_id(FACTS, kernel, "e")
    assert here != env_id(FACTS, replace(kernel, env={"X": "2"}), "d")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda v: v["layout"].update(ddp=2), "unknown field of RunSpec.layout 'ddp'; did you mean"),
        (lambda v: v.update(shap={}), "unknown field of RunSpec 'shap'; did you mean shape?"),
        (lambda v: v["workload"].pop("gbs"), "RunSpec.workload lacks gbs"),
        (lambda v: v["layout"].update(dp="2"), "RunSpec.layout.dp='2' is no whole number"),
        (lambda v: v["layout"].update(dp=True), "RunSpec.layout.dp=True is no whole number"),
        (lambda v: v["layout"].update(dp=2.5), "RunSpec.layout.dp=2.5 is no whole number"),
        (lambda v: v["kernel"].update(compile=1), "RunSpec.kernel.compile=1 is no truth value"),
        (lambda v: v.update(layout=[]), "RunSpec.layout=[] is no value of type Layout"),
    ],
)
def test_what_is_no_spec_is_refused_in_one_line(change, line):
    values = to_dict(SPEC)
    change(values)
    with refused(line):
        from_dict(RunSpec, values)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"nodes": 4}, "has 4 ranks; 4 nodes of 2 have 8"),
        ({"workload": Workload(seq_len=128, gbs=9)}, "dp*mbs*gas=8 sequences; gbs=9"),
    ],
)
def test_a_spec_fits_its_nodes_and_batch(change, line):
    with refused(line):
        replace(SPEC, **change)
