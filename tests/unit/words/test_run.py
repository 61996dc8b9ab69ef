import json
from dataclasses import replace

import pytest
from hypothesis import given

from tests.configs import refused
from tests.strategies import LONG, results, run_specs
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.record import canonical_json, from_dict, to_dict
from ultrabench.result import RunResult
from ultrabench.run import RunSpec, Workload, env_id

SPEC = RunSpec(
    shape=ModelShape(
        name="small", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=96, vocab_size=128, tie_word_embeddings=True,
    ),
    workload=Workload(seq_len=128, gbs=8),
    layout=Layout(dp=2, tp=2, mbs=2, gas=2),
    kernel=KernelConfig(name="embedded", version=3),
    nodes=2,
    gpus_per_node=2,
)  # fmt: skip
FACTS = {
    "gpu_name": "NVIDIA H100 80GB HBM3", "torch_version": "2.13.0", "cuda_version": "13.0",
    "nccl_version": "2.27", "driver_version": "580", "variables": {"NCCL_ALGO": "Ring", "CUDA_CACHE": "1"},
}  # fmt: skip
MINE = KernelConfig(name="mine", kind="command", command=("a",), env={"X": "1"})


def changed(group, **values):
    """SPEC with other values in one of its records."""
    return replace(SPEC, **{group: replace(getattr(SPEC, group), **values)})


@given(run_specs())
def test_a_spec_survives_json(spec):
    back = from_dict(RunSpec, json.loads(json.dumps(to_dict(spec))))
    assert back == spec
    assert back.run_id == spec.run_id


@given(results())
def test_a_result_survives_json(result):
    assert from_dict(RunResult, json.loads(canonical_json(to_dict(result)))) == result


@pytest.mark.parametrize(
    ("spec", "run_id"),
    [
        (SPEC, "d1c7c1d7e97ee094"), (changed("shape", name="another"), "d1c7c1d7e97ee094"),
        (changed("kernel", attention="math"), "3561c7e50215b378"),
        (changed("layout", recompute="full"), "f627087a4ba7bde4"),
    ],
)  # fmt: skip
def test_ids_stay_those_of_the_results_that_exist(spec, run_id):
    """Whatever fields, defaults and words are added later, and wherever they stand."""
    assert spec.run_id == run_id


@pytest.mark.parametrize(
    "other",
    [
        changed("shape", rope_theta=5e5), changed("shape", num_key_value_heads=4), changed("shape", head_dim=32),
        changed("shape", qk_norm=True), changed("shape", rope_scaling=LONG),
        changed("shape", tie_word_embeddings=False),
        changed("workload", seed=1), changed("workload", seq_len=256), changed("layout", zero_stage=1),
        changed("layout", mbs=4, gas=1), changed("kernel", precision="bf16"), changed("kernel", version=99),
        replace(SPEC, kernel=MINE), replace(SPEC, nodes=1, gpus_per_node=4),
    ],
)  # fmt: skip
def test_whatever_changes_the_measurement_changes_run_id(other):
    assert other.run_id != SPEC.run_id


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_name": "NVIDIA H200"}, {"torch_version": "2.12.0"}, {"cuda_version": None}, {"nccl_version": "2.28"},
        {"driver_version": "581"}, {"variables": {"NCCL_ALGO": "Tree"}}, {"variables": {}},
    ],
)  # fmt: skip
def test_env_id_changes_with_each_fact(change):
    assert env_id({**FACTS, **change}, MINE, "d") != env_id(FACTS, MINE, "d")


def test_env_id_holds_the_kernel_and_its_declared_variables():
    base = env_id(FACTS, MINE, "d")
    variables = dict(reversed(FACTS["variables"].items()))
    assert base == env_id({**FACTS, "variables": variables, "hostname": "n1"}, MINE, "d")
    assert base != env_id(FACTS, MINE, "e")
    assert base != env_id(FACTS, replace(MINE, env={"X": "2"}), "d")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda v: v["layout"].update(ddp=2), "unknown field of RunSpec.layout 'ddp'; did you mean"),
        (lambda v: v.update(shap={}), "unknown field of RunSpec 'shap'; did you mean shape?"),
        (lambda v: v["workload"].pop("gbs"), "RunSpec.workload lacks the key gbs"),
        (lambda v: v["layout"].update(dp="2"), "RunSpec.layout.dp='2' is not an integer"),
        (lambda v: v["layout"].update(dp=True), "RunSpec.layout.dp=True is not an integer"),
        (lambda v: v["layout"].update(dp=2.5), "RunSpec.layout.dp=2.5 is not an integer"),
        (lambda v: v["kernel"].update(compile=1), "RunSpec.kernel.compile=1 is not a boolean"),
        (lambda v: v.update(layout=[]), "RunSpec.layout=[] is not a Layout"),
        (lambda v: v.update(nodes=4), "has 4 ranks; 4 nodes of 2 have 8"),
        (lambda v: v["workload"].update(gbs=9), "dp*mbs*gas=8 sequences; gbs=9"),
    ],
)
def test_what_is_no_spec_is_refused_in_one_line(change, line):
    values = to_dict(SPEC)
    change(values)
    with refused(line):
        from_dict(RunSpec, values)
