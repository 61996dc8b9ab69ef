"""The predicted time of a step, by part: what must hold of any layout, and what makes each part larger or smaller."""

import math
from dataclasses import replace
from functools import cache

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import refused
from tests.strategies import layouts, shapes
from ultrabench.hardware import Peak
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout, default_schedule
from ultrabench.run import RunSpec, Workload
from ultrabench.sweep.config.files import files, read_yaml
from ultrabench.sweep.config.load import load_config, load_model, load_profile
from ultrabench.sweep.extrapolation import beyond_fit
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.predict.profile import REGIMES, regime
from ultrabench.sweep.predict.step_time import communication_ratios, predict_step_time

GPUS = load_config(["hardware=h100x8"]).hardware
PEAK = Peak(flops_per_s=989e12, source="table")
PROFILES = tuple(name for name, path in sorted(files("profiles").items()) if "base" not in read_yaml(path))
"""Profiles that do not build on others, whose forms they share."""
SLOW = {"allreduce_bytes_per_s": 13e9, "allgather_bytes_per_s": 6.5e9}
"""A probe of 64 nodes on slow links."""
profile_of = cache(load_profile)


def spec_of(layout, shape="1B", *, nodes=1, precision="bf16", seq_len=4096, compiled=False):
    """The run of a layout by our kernel; `shape` may be the name of a model."""
    return RunSpec(
        shape=load_model(shape) if isinstance(shape, str) else shape, layout=layout, nodes=nodes,
        workload=Workload(seq_len=seq_len, gbs=layout.gbs), gpus_per_node=layout.world_size // nodes,
        kernel=KernelConfig(name="embedded", precision=precision, compile=compiled),
    )  # fmt: skip


def step_time(spec, profile="nanotron", *, probe=None, **constants):
    """The time of a step on GPUS with the constants of a profile, some of them with other values."""
    links, time = network(GPUS, spec.nodes, **(probe or {})), replace(profile_of(profile).time, **constants)
    return predict_step_time(spec, GPUS, PEAK, links, time)


EXPOSED = {"dp_overlap": 0.0, "zero_overlap": 0.0, "zero_layer_s": 0.0}
"""Constants with which collectives of data parallelism count in full and cost the host nothing."""


@pytest.mark.parametrize("profile", PROFILES)
@given(layout=layouts(), shape=shapes(), probe=st.sampled_from(({}, SLOW)), compiled=st.booleans())
def test_parts_are_finite_and_add_up_to_a_positive_time(profile, layout, shape, probe, compiled):
    spec = spec_of(replace(layout, dp=2 * layout.dp), shape, nodes=2, compiled=compiled)
    parts, alone = step_time(spec, profile, probe=probe), step_time(spec, profile, probe=probe, **EXPOSED)
    assert all(math.isfinite(s) and s >= 0 for s in parts)
    assert sum(parts) == pytest.approx(parts.total)
    assert parts.total > 0
    host_s = 1.500001 * layout.gas * profile_of(profile).time.zero_layer_s * shape.num_hidden_layers
    assert parts.dp <= alone.dp + host_s


@pytest.mark.parametrize(
    ("zero_stage", "pp", "times"),
    [(0, 1, 0), (1, 1, 1), (2, 1, 2.5), (3, 1, 6), (1, 2, 11 / 16), (3, 2, 33 / 16)],
)
def test_zero_costs_the_host_as_often_as_it_reduces_and_gathers(zero_stage, pp, times):
    """The first of two stages has 11 of 16 layers."""
    spec = spec_of(Layout(dp=8, gas=4, zero_stage=zero_stage, pp=pp, pp_schedule=default_schedule(pp, 4)))
    fast, slow = (step_time(spec, "ultrabench-cpu", zero_layer_s=s).dp for s in (1.0, 2.0))
    assert slow - fast == pytest.approx(times * spec.shape.num_hidden_layers)
    fast, slow = (step_time(spec, "ultrabench-cpu", zero_rank_s=s).dp for s in (1.0, 2.0))
    assert slow - fast == pytest.approx(8 if zero_stage else 0)


@pytest.mark.parametrize("profile", PROFILES)
@given(layout=layouts(), shape=shapes(), extra=st.integers(1, 64))
def test_more_micro_batches_and_without_a_pipeline_more_layers_take_longer(profile, layout, shape, extra):
    longer, flat = (
        replace(layout, gas=layout.gas + extra),
        replace(layout, pp=1, pp_schedule="none", virtual_stages=1),
    )
    deeper = replace(shape, num_hidden_layers=shape.num_hidden_layers + extra)
    assert step_time(spec_of(longer, shape), profile).total > step_time(spec_of(layout, shape), profile).total
    assert step_time(spec_of(flat, deeper), profile).total > step_time(spec_of(flat, shape), profile).total


@pytest.mark.parametrize("words", [{"mbs": 2}, *({"recompute": r} for r in ("full", "selective", "every2"))])
def test_larger_micro_batches_and_layers_that_are_computed_anew_take_longer(words):
    slow, fast = (step_time(spec_of(Layout(dp=8, gas=4, **w), "8B"), "ultrabench").total for w in (words, {}))
    assert slow > fast


def test_communication_that_hides_counts_only_where_it_is_exposed():
    spec = spec_of(Layout(dp=8, gas=4, zero_stage=1), "8B")
    hidden, exposed = (step_time(spec, profile).dp for profile in ("ultrabench", "nanotron"))
    assert (
        hidden < step_time(spec, "ultrabench", **EXPOSED).dp / 2
    )  # reduce-scatters run beside the last backward
    assert exposed > step_time(spec, **EXPOSED).dp  # nanotron waits for all of them, and pays for each layer


def fp8_time(layout, shape="llama3-8b", **words):
    """The time of a step in fp8 on GPUs, by our kernel."""
    spec, own_peak = spec_of(layout, shape, precision="fp8", **words), GPUS.peak("fp8", 1, None, 1)
    return predict_step_time(spec, GPUS, own_peak, network(GPUS, 1), profile_of("ultrabench").time)


def test_fp8_gains_about_what_torchtitan_published_of_scales_for_each_row():
    """8B on 8 H100, compiled: 6,412 to 6,424 instead of 5,760 tokens/s/GPU; pytorch/torchtitan, commit 7a04053."""
    layout = Layout(dp=8, zero_stage=3, recompute="selective")
    bf16 = step_time(spec_of(layout, "llama3-8b", seq_len=8192, compiled=True), "ultrabench")
    assert bf16.total / fp8_time(layout, seq_len=8192, compiled=True).total == pytest.approx(1.115, abs=0.01)
    eager = step_time(spec_of(layout, "llama3-8b", seq_len=8192), "ultrabench")
    assert (
        0.9 < eager.total / fp8_time(layout, seq_len=8192).total < 1
    )  # scaling and casting are kernels of their own


def test_fp8_is_in_linear_layers_alone_and_costs_casts():
    layout, time = Layout(dp=8), profile_of("ultrabench").time
    bf16, fp8 = step_time(spec_of(layout, "llama3-8b"), "ultrabench"), fp8_time(layout)
    shape = spec_of(layout, "llama3-8b").shape
    peaks = 989e12 * time.gemm_efficiency, 1978.9e12 * time.fp8_efficiency
    sides = ((6144, 4096), (4096, 4096), (2 * 14336, 4096), (4096, 14336))
    m0, n0, k0 = time.gemm_m0, time.gemm_n0, time.gemm_k0
    flops = 32 * 3 * sum(2 * (4096 + m0) * (n + n0) * (k + k0) for n, k in sides)
    assert bf16.gemm - fp8.gemm == pytest.approx(flops / peaks[0] - flops / peaks[1])
    numbers = sum(
        4096 * k + k * n + 4096 * n for n, k in sides
    )  # inputs, weights and gradients, each in two products
    cast_s = shape.num_hidden_layers * 2 * numbers * 7 / (GPUS.hbm_bytes_per_s * time.hbm_efficiency)
    assert fp8.memory_bound - bf16.memory_bound == pytest.approx(cast_s)
    others = ("attention", "dp", "tp", "optimizer", "rest")
    assert [getattr(fp8, part) for part in others] == [getattr(bf16, part) for part in others]


def test_backward_that_computes_a_layer_anew_casts_a_third_of_its_operands_again():
    none, full, attention = (fp8_time(Layout(dp=8, recompute=mode)) for mode in ("none", "full", "attention"))
    wide = step_time(spec_of(Layout(dp=8, recompute="full"), "llama3-8b"), "ultrabench")
    narrow = step_time(spec_of(Layout(dp=8), "llama3-8b"), "ultrabench")
    casts = none.memory_bound - narrow.memory_bound
    assert full.memory_bound - wide.memory_bound == pytest.approx(casts * 4 / 3)
    assert none.memory_bound == attention.memory_bound


def test_the_host_launches_more_in_fp8_unless_layers_are_compiled():
    layout, launch_s = Layout(dp=1), 32 * profile_of("ultrabench").time.fp8_launch_s
    few = {"seq_len": 64}  # tokens, so that the GPU waits for its host
    more_s = [
        fp8_time(layout, compiled=compiled, **few).total
        - step_time(spec_of(layout, "llama3-8b", compiled=compiled, **few), "ultrabench").total
        for compiled in (False, True)
    ]
    assert more_s == pytest.approx([launch_s, 0], abs=0.1 * launch_s)


def ratios(spec, **constants):
    """The ratios of communication to computing of a run on GPUS."""
    time = replace(profile_of("ultrabench").time, **constants)
    return communication_ratios(spec, GPUS, PEAK, network(GPUS, spec.nodes), time).by_axis


def test_scores_that_are_written_to_memory_cost_their_traffic():
    """Forward and backward have 3.5 times the scores of forward, and once more where backward computes them again."""
    plain, again = (spec_of(Layout(dp=8, tp=2, gas=1, recompute=mode)) for mode in ("none", "full"))
    shape, rate = plain.shape, GPUS.hbm_bytes_per_s * profile_of("megatron").time.hbm_efficiency
    forward_s = 8 * shape.num_attention_heads * 4096**2 / 2 / rate * shape.num_hidden_layers
    for spec, forwards in ((plain, 3.5), (again, 4.5)):
        flash, scores = (step_time(spec, "megatron", score_bytes=size).attention for size in (0.0, 8.0))
        assert scores - flash == pytest.approx(forwards * forward_s)


def test_ratios_are_those_of_the_parts_of_a_step_where_nothing_hides_communication():
    spec = spec_of(Layout(dp=4, tp=2), "8B")
    parts = step_time(spec, "ultrabench", **EXPOSED)
    backward_s = (parts.gemm + parts.attention + parts.memory_bound) * 2 / 3
    expected = {"dp": parts.dp / backward_s, "tp": parts.tp / parts.gemm}
    assert ratios(spec) == pytest.approx(expected)
    assert ratios(spec, **EXPOSED) == pytest.approx(expected)  # what hides them changes no ratio
    assert ratios(spec_of(Layout(dp=1), "8B")) == {}
    assert ratios(spec_of(Layout(dp=1, cp=2), "8B")).keys() == {
        "dp",
        "cp",
    }  # gradients are summed over cp, too


def test_ratios_depend_on_sizes_as_in_the_appendix_of_the_playbook():
    ideal = {"tp_call_s": 0.0, "pp_call_s": 0.0, "gemm_m0": 0.0, "gemm_n0": 0.0, "gemm_k0": 0.0}
    of_mbs_1, of_mbs_4 = (ratios(spec_of(Layout(dp=2, tp=4, mbs=mbs), "8B"), **ideal) for mbs in (1, 4))
    assert of_mbs_1["tp"] == pytest.approx(of_mbs_4["tp"])
    # (TP - 1) / TP * seq * mbs * h bytes against seq * mbs * h^2 / TP operations: TP - 1 alone remains.
    of_two, of_eight = (ratios(spec_of(Layout(dp=8 // tp, tp=tp), "8B"), **ideal)["tp"] for tp in (2, 8))
    assert of_eight / of_two == pytest.approx(7, rel=0.01)
    short, long = (ratios(spec_of(Layout(dp=8, mbs=mbs), "1B"), **ideal)["dp"] for mbs in (1, 8))
    assert 4 < short / long < 8.5  # the gradients are the same, and computing grows with the batch
    shallow, deep = (
        ratios(spec_of(Layout(dp=1, pp=pp, gas=8, pp_schedule="1f1b"), "8B"), **ideal)["pp"] for pp in (8, 2)
    )
    assert shallow > 3 * deep


def test_the_order_of_ranks_decides_which_groups_cross_nodes():
    spec = spec_of(Layout(dp=4, tp=2, pp=2, gas=8, pp_schedule="1f1b"), nodes=2)
    kernel = replace(spec.kernel, rank_order=("tp", "cp", "pp", "dp"))
    ours, other = ratios(spec), ratios(replace(spec, kernel=kernel))
    assert other["pp"] < ours["pp"], "its pipelines are on one node"
    assert other["dp"] > ours["dp"], "its replicas are on both"
    assert other["tp"] == ours["tp"]


def test_slow_links_cost_what_the_probe_says():
    spec = spec_of(Layout(dp=64, tp=8, gas=4), "8B", nodes=64)
    fast, slow = step_time(spec), step_time(spec, probe=SLOW)
    assert slow.dp > 2 * fast.dp
    assert slow.launch > 2 * fast.launch
    inside, across = (step_time(spec_of(Layout(dp=64 // tp, tp=tp), "8B", nodes=8)).tp for tp in (8, 16))
    assert across > 3 * inside


def test_a_pipeline_waits_while_it_fills_and_less_so_with_more_micro_batches():
    plain, halved = {"pp_schedule": "1f1b"}, {"pp_schedule": "interleaved", "virtual_stages": 2}
    gas_8, gas_32, interleaved = (
        step_time(spec_of(Layout(dp=1, pp=8, gas=gas, **words), "8B"))
        for gas, words in ((8, plain), (32, plain), (8, halved))
    )
    assert gas_8.bubble / gas_8.total > 2 * gas_32.bubble / gas_32.total
    assert interleaved.bubble < 0.7 * gas_8.bubble


def test_what_a_rank_waits_for_makes_others_faster_where_they_share_processors():
    spec = spec_of(Layout(dp=1, pp=2, gas=4, pp_schedule="1f1b"))  # 10 layers on rank 0, and 6 with the head
    apart, half, shared = (step_time(spec, wait_shared=part) for part in (0.0, 0.5, 1.0))
    assert apart == step_time(spec)
    assert half.total - half.pp == pytest.approx((apart.total - apart.pp + shared.total - shared.pp) / 2)
    assert apart.pp < shared.pp  # ranks exchange while they wait, unless others use that time
    assert (shared.bubble, apart.bubble > 0) == (0.0, True)
    assert shared.gemm < apart.gemm
    alone = spec_of(Layout(dp=2, gas=4))
    assert step_time(alone) == step_time(alone, wait_shared=1.0)


GRAPHS = {"graph": {"full": {"layer_launch_s": 1e-4, "layer_launch_tp_s": 1e-4}, "none": {}}}
"""What a profile says of two values of a knob, of which one changes constants."""


def with_knob(spec, **variant):
    """The run by a program with the knob graph, whose usual value is none; `variant` has values of flags."""
    kernel = KernelConfig(
        name="mine", kind="command", command=("train",), precision="bf16", knobs={"graph": "what is captured"},
        flags={"graph": {"none": (), "full": ("--graph",), "local": ("--local",)}},
    )  # fmt: skip
    return replace(spec, kernel=kernel, variant={f"flags.{name}": value for name, value in variant.items()})


def test_a_value_of_a_knob_has_constants_of_its_own_or_a_wider_interval():
    spec, links = spec_of(Layout(dp=4, tp=2, gas=2, mbs=1)), network(GPUS, 1)
    profile = replace(profile_of("ultrabench"), flags=GRAPHS, errors=None)
    usual, none, full, local = (
        with_knob(spec, **words) for words in ({}, *({"graph": v} for v in ("none", "full", "local")))
    )
    assert (
        profile.time_of(usual, GPUS.gpu)
        == profile.time_of(none, GPUS.gpu)
        == profile.time_of(local, GPUS.gpu)
        == profile.time
    )
    assert profile.time_of(full, GPUS.gpu) == replace(
        profile.time, layer_launch_s=1e-4, layer_launch_tp_s=1e-4
    )
    assert (
        predict_step_time(full, GPUS, PEAK, links, profile.time_of(full, GPUS.gpu)).launch
        < step_time(spec, "ultrabench").launch
    )
    intervals = [profile.interval_of(run, GPUS.gpu, links) for run in (usual, none, full, local)]
    assert intervals[0] == intervals[1] == intervals[2]
    assert intervals[3].high == pytest.approx(math.hypot(intervals[0].high, 0.09 * 5**0.5), rel=1e-3)
    assert beyond_fit([local], profile, GPUS.gpu)[-1] == "flags.graph=local (none, full)"
    assert not any(
        "graph" in text for run in (usual, none, full) for text in beyond_fit([run], profile, GPUS.gpu)
    )
    silent = profile_of("ultrabench")
    assert [bool(silent.unmeasured(run, GPUS.gpu).get("flags.graph")) for run in (usual, none, full)] == [
        False,
        False,
        True,
    ]
    # A profile without a fit knows the first value alone, whatever the file of the kernel sets.
    priors, set_full = profile_of("megatron"), replace(usual.kernel, knob_values={"graph": "full"})
    first, other = (
        priors.interval_of(run, GPUS.gpu, links) for run in (usual, replace(usual, kernel=set_full))
    )
    assert other.low < first.low < 0 < first.high < other.high
    # The usual value of another file of the same program, and a flag that no file declares.
    usual_full = replace(usual, kernel=replace(usual.kernel, knob_values={"graph": "full"}))
    assert profile.time_of(usual_full, GPUS.gpu) == profile.time_of(full, GPUS.gpu)
    undeclared = replace(full, kernel=replace(full.kernel, knobs={}, flags={}))
    assert profile.time_of(undeclared, GPUS.gpu) == profile.time_of(full, GPUS.gpu)


def test_a_gpu_multiplies_constants_that_a_profile_names():
    spec, links = spec_of(Layout(dp=4, tp=2, gas=2, mbs=1)), network(GPUS, 1)
    profile = replace(profile_of("ultrabench"), gpu_factors={GPUS.gpu: {"gemm_efficiency": 0.5}})
    assert profile.time_of(spec, "another GPU") == profile.time
    time = profile.time_of(spec, GPUS.gpu)
    assert time.gemm_efficiency == profile.time.gemm_efficiency / 2
    slow, usual = (predict_step_time(spec, GPUS, PEAK, links, c).gemm for c in (time, profile.time))
    assert slow == pytest.approx(2 * usual)
    with refused("gpu_factors.A: profile.time.gemm_efficiency=1.552"):
        replace(profile, gpu_factors={"A": {"gemm_efficiency": 2.0}})
    with refused("did you mean gemm_efficiency?"):
        replace(profile, gpu_factors={"A": {"gemm_efficency": 2.0}})


def test_every_regime_has_a_name():
    pure, pipeline = Layout(dp=512), Layout(dp=64, pp=8, pp_schedule="1f1b", gas=8)
    regimes = {
        regime(spec_of(layout, nodes=nodes), network(GPUS, nodes, **probe))
        for layout in (pure, pipeline)
        for nodes, slow in ((64, SLOW), (4, SLOW | {"allgather_bytes_per_s": 98e9}))
        for probe in ({}, slow)
    }
    assert regimes == set(REGIMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"framework": "jax"}, "framework='jax'; must be ultrabench, nanotron or megatron"),
        ({"time": {"rest_s": -1.0}}, "profile.time.rest_s=-1.0; must be >= 0"),
        ({"time": {"gemm_efficiency": 30.0}}, "gemm_efficiency=30.0; must be 0 to 1"),
        ({"time": None}, "profile.time lacks the keys gemm_efficiency"),
        ({"interval": {"all": [0.1, 0.2]}}, r"interval.all=\[0.1, 0.2\]; must contain 0"),
        ({"interval": None}, "interval lacks the key"),
        ({"interval": {"slwo": [-0.1, 0.1]}}, "unknown regime of profile .*did you mean slow"),
        (
            {"flags": {"graph": {"full": {"layer_lunch_s": 1e-4}}}},
            "unknown constant of time in .*flags.graph.full: 'layer_lunch_s'; did you mean layer_launch_s",
        ),
        (
            {"flags": {"graph": {"full": {"gemm_efficiency": 7.0}}}},
            "flags.graph.full: .*gemm_efficiency=7.0; must be 0 to 1",
        ),
        (
            {"flags": {"graph": {"full": {"rest_s": 0.1}}, "gc": {"manual": {"rest_s": 0.2}}}},
            "flags.gc and flags.graph both change rest_s; leave it to one of them",
        ),
        (
            {"flag_runs": {"graph": {"full": 7}}},
            "flag_runs.graph.full has no constants in flags; leave it out",
        ),
        (None, r"unknown profile 'nanotrn'; did you mean nanotron.*calibrate"),
    ],
)
def test_a_profile_that_cannot_be_used_is_one_line_with_the_remedy(tmp_path, monkeypatch, change, message):
    """Its file is read from the folder of the user's profiles; None stands for an empty table, or a wrong name."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "ultrabench" / "profiles" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    values = yaml.safe_load(files("profiles")["nanotron"].read_text())
    mine.write_text(yaml.safe_dump(values))
    assert load_profile("mine").time == load_profile("nanotron").time
    for name, value in (change or {}).items():
        values[name] = values.get(name, {}) | value if isinstance(value, dict) else value or {}
    mine.write_text(yaml.safe_dump(values))
    with refused(match="mine.yaml: .*" * bool(change) + message):
        load_profile("mine" if change else "nanotrn")


def test_a_profile_builds_on_another_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ultrabench" / "profiles"
    folder.mkdir(parents=True)

    def write(name, **settings):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))

    write("mine", base="megatron", time={"gemm_efficiency": 0.5}, gpu_factors={}, memory={"gradients": 2.0})
    mine, base = load_profile("mine"), load_profile("megatron")
    assert mine.time == replace(base.time, gemm_efficiency=0.5)
    assert (mine.gpu_factors, mine.memory) == ({}, base.memory | {"gradients": 2.0})
    assert (mine.flags, mine.interval, mine.name) == (base.flags, base.interval, "mine")
    write("mine", base="yours")
    write("yours", base="mine")
    with refused("the profiles mine, yours build on each other; leave one base out"):
        load_profile("mine")
    write("mine", base="megatrom")
    with refused("did you mean megatron?"):
        load_profile("mine")
