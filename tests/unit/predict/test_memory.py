"""The predicted memory of other frameworks: known layouts, and what must hold of any."""

import operator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import divisors
from ultrabench.errors import ConfigError
from ultrabench.hardware import GIB
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout, default_schedule
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec, Workload
from ultrabench.stages import split_stages
from ultrabench.sweep.config.load import load_model, load_profile
from ultrabench.sweep.predict import ultrabench_memory
from ultrabench.sweep.predict.memory import memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.ultrabench_memory import static_bytes

H100 = 80 * GIB
KERNEL = KernelConfig(name="other", kind="command", command=("train",), precision="bf16")
EMBEDDED = KernelConfig(name="embedded", precision="bf16")
PROFILES = ("nanotron", "megatron", "ultrabench")
profile = cache(load_profile)


def constants(framework, **words):
    """The constants of the shipped profile, some of them with other values."""
    return replace(memory_constants(framework, profile(framework).memory), **words)


def run(shape, seq_len=4096, kernel=KERNEL, **axes):
    """A run of a layout on nodes of one GPU."""
    axes = {"dp": 1, "pp": 1, "gas": 1} | axes
    layout = Layout(**{"pp_schedule": default_schedule(axes["pp"], axes["gas"])} | axes)
    batch = Workload(seq_len=seq_len, gbs=layout.gbs)
    return RunSpec(
        shape=shape, workload=batch, layout=layout, kernel=kernel, nodes=layout.world_size, gpus_per_node=1
    )


@pytest.mark.parametrize(
    ("version", "model", "axes", "measured"),
    [
        ("latest", "1B", {"dp": 8, "gas": 16, "mbs": 2}, 50.18),
        ("latest", "1B", {"dp": 8, "gas": 32}, 36.67),
        ("latest", "8B", {"dp": 4, "tp": 4, "gas": 16, "mbs": 4, "zero_stage": 1}, 58.3),
        ("latest", "8B", {"dp": 128, "tp": 4, "mbs": 2}, 57.8),
        ("run-ahead", "80B", {"dp": 4, "tp": 4, "pp": 16, "gas": 64, "zero_stage": 1}, 64.2),
    ],
)
def test_nanotron_reserves_what_published_runs_did(version, model, axes, measured):
    """The reserved GiB of the Ultra-Scale Playbook's tables."""
    stages = predict_memory(run(load_model(model), **axes), constants("nanotron", version=version))
    assert stages[0].peak_bytes / GIB == pytest.approx(measured, rel=0.12)
    assert p_oom(stages, H100, constants("nanotron")) < 0.5


@pytest.mark.parametrize("axes", [{"gas": 32, "zero_stage": 1, "dp": 2}, {"gas": 4}, {"gas": 8, "tp": 4}])
def test_ranks_of_the_same_stage_are_computed_once_and_right(monkeypatch, axes):
    spec = run(load_model("llama3-70b"), kernel=EMBEDDED, pp=16, **axes)
    computed, stages_of, peak = [], ultrabench_memory.rank_stages, ultrabench_memory._peak
    monkeypatch.setattr(ultrabench_memory, "_peak", lambda *args: computed.append(args[-1]) or peak(*args))
    stages = predict_memory(spec, constants("ultrabench"))
    assert len(computed) < 8
    monkeypatch.setattr(
        ultrabench_memory, "rank_stages",
        lambda *key: [one._replace(like=-rank - 1) for rank, one in enumerate(stages_of(*key))],
    )  # fmt: skip
    assert predict_memory(spec, constants("ultrabench")) == stages
    few = predict_memory(spec, constants("ultrabench"), every_rank=False)
    assert 1 < len(few) < 5
    assert max(s.peak_bytes for s in few) == max(s.peak_bytes for s in stages)


@pytest.mark.parametrize(
    ("model", "axes", "static", "peak"),
    [
        ("llama3-8b", {"dp": 8, "zero_stage": 3}, 11.22, 35.76),
        ("llama3-8b", {"tp": 8}, 11.22, 16.34),
        ("llama3-70b", {"dp": 2, "tp": 8, "pp": 4, "zero_stage": 1, "gas": 8}, 13.29, 40.23),
    ],
)
def test_our_kernel_allocates_what_dry_runs_of_it_said(model, axes, static, peak):
    """The GiB of rank 0 that `ultrabench kernel dryrun` printed; tests/parity compares it with many small ones."""
    spec = run(load_model(model), kernel=EMBEDDED, **axes)
    assert static_bytes(spec)[0] / GIB == pytest.approx(static, rel=0.001)
    (most, *_) = predict_memory(spec, constants("ultrabench"))
    assert most.allocated_bytes / GIB == pytest.approx(peak, rel=0.001)


def test_fp64_takes_twice_the_bytes_of_fp32_and_zbv_a_margin():
    tiny, axes = load_model("tiny"), {"pp": 2, "gas": 4}
    narrow, wide = (
        predict_memory(run(tiny, 512, replace(EMBEDDED, precision=p), **axes), constants("ultrabench"))[0]
        for p in ("fp32", "fp64")
    )
    assert wide.activations == 2 * narrow.activations
    zbv = run(tiny, 512, EMBEDDED, pp_schedule="zbv", virtual_stages=2, **axes)
    plain, more = (predict_memory(zbv, constants("ultrabench", zbv_margin=m))[0] for m in (0.0, 0.5))
    assert more.activations == 1.5 * plain.activations


def test_what_cannot_fit_is_sure_to_run_out():
    stages = predict_memory(run(load_model("8B"), dp=8, mbs=8, gas=4), constants("nanotron"))
    assert stages[0].peak_bytes > 5 * H100
    assert p_oom(stages, H100, constants("nanotron")) > 0.999
    assert p_oom(stages, 100 * H100, constants("nanotron")) < 0.001


def test_older_versions_keep_gathered_tokens_and_cut_stages_by_the_older_rule():
    one = run(load_model("8B"), dp=2, tp=4, gas=128)
    latest, old = (predict_memory(one, constants("nanotron", version=v))[0] for v in ("latest", "old"))
    assert old.peak_bytes > latest.peak_bytes
    assert old.allocated_bytes == latest.allocated_bytes
    many = replace(one, shape=replace(one.shape, num_hidden_layers=80))  # the host is not so far ahead
    more = [predict_memory(many, constants("nanotron", version=v))[0].reserve for v in ("latest", "old")]
    assert more[1] - more[0] == pytest.approx(old.reserve - latest.reserve)
    layers = [split_stages(load_model("1B"), 2, ties_advance=ties)[0].num_layers for ties in (False, True)]
    assert layers == [11, 10]


@st.composite
def runs(draw):
    """A run with two ranks of dp, of a model whose matrices no padding of fully_shard enlarges."""
    heads = draw(st.sampled_from((4, 8, 16)))
    shape = ModelShape(
        name="drawn", hidden_size=64 * heads, num_hidden_layers=draw(st.integers(4, 40)),
        num_attention_heads=heads, num_key_value_heads=draw(divisors(heads)),
        intermediate_size=64 * draw(st.integers(2, 100)), vocab_size=512 * draw(st.integers(1, 250)),
        tie_word_embeddings=draw(st.booleans()),
    )  # fmt: skip
    pp = draw(st.sampled_from((1, 2, 4)))
    axes = {
        "dp": 2, "tp": draw(divisors(shape.num_key_value_heads)), "pp": pp, "gas": draw(st.integers(pp, 9)),
    }  # fmt: skip
    axes["recompute"] = draw(st.sampled_from(("none", "selective", "full", "every2")))
    return run(shape, 512, mbs=draw(st.integers(1, 4)), zero_stage=draw(st.integers(0, 3)), **axes)


def peaks(spec, framework, **words):
    """The peak of each rank, where the layout has some other values."""
    seq_len = words.pop("seq_len", spec.workload.seq_len)
    layout = replace(spec.layout, **words)
    workload = replace(spec.workload, gbs=layout.gbs, seq_len=seq_len)
    changed = replace(spec, layout=layout, workload=workload)
    return [stage.peak_bytes for stage in predict_memory(changed, constants(framework))]


@pytest.mark.parametrize("framework", PROFILES)
@given(data=st.data())
def test_more_tokens_need_more_memory_and_less_sharding_never_less(framework, data):
    spec = data.draw(runs())
    if framework == "ultrabench":
        spec = replace(spec, kernel=EMBEDDED)
    now = peaks(spec, framework)
    for larger in ({"mbs": spec.layout.mbs + 1}, {"seq_len": 1024}):
        then = peaks(spec, framework, **larger)
        assert sum(then) > sum(now)
        assert all(map(operator.ge, then, now))
    if spec.layout.zero_stage:
        assert max(peaks(spec, framework, zero_stage=spec.layout.zero_stage - 1)) >= max(now)


@given(data=st.data())
@pytest.mark.parametrize("framework", PROFILES)
def test_parts_add_up_to_the_peak(framework, data):
    spec = data.draw(runs())
    stages = predict_memory(replace(spec, kernel=EMBEDDED), constants(framework))
    assert [stage.pp_rank for stage in stages] == list(range(spec.layout.pp))
    for stage in stages:
        parts = stage[2:]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(stage.peak_bytes)


def test_a_constant_that_is_unknown_or_missing_is_named():
    values = dict(load_profile("nanotron").memory)
    with pytest.raises(ConfigError, match="logitz"):
        memory_constants("nanotron", values | {"logitz": 1.0})
    del values["logits"]
    with pytest.raises(ConfigError, match="memory lacks logits"):
        memory_constants("nanotron", values)
    limit = {"limit": {"share": 0.9, "pipeline_share": 0.9, "sigma": 0.0}}
    with pytest.raises(ConfigError, match="sigma=0"):
        memory_constants("megatron", load_profile("megatron").memory | limit)
