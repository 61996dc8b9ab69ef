import math
from dataclasses import replace
from functools import cache

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import layouts, shapes
from ultrabench.errors import ConfigError
from ultrabench.hardware import Peak
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.run import RunSpec, Workload
from ultrabench.sweep.config.compose import files
from ultrabench.sweep.config.load import load_config, load_model, load_profile
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.predict.profile import REGIMES, regime
from ultrabench.sweep.predict.step_time import predict_step_time

GPUS = load_config(["hardware=h100x8"]).hardware
PEAK = Peak(flops_per_s=989e12, source="table")
PROFILES = tuple(sorted(files("profiles")))
SLOW = {"allreduce_bytes_per_s": 13e9, "allgather_bytes_per_s": 6.5e9}
"""A probe of 64 nodes on slow links."""
profile_of = cache(load_profile)


def spec_of(layout, shape="1B", *, nodes=1, precision="bf16", seq_len=4096, compiled=False):
    return RunSpec(
        shape=load_model(shape) if isinstance(shape, str) else shape,
        workload=Workload(seq_len=seq_len, gbs=layout.gbs),
        layout=layout,
        kernel=KernelConfig(name="embedded", precision=precision, compile=compiled),
        nodes=nodes,
        gpus_per_node=layout.world_size // nodes,
    )


def step_time(spec, profile="nanotron", *, hides=True, **probe):
    """Without `hides`, collectives of data parallelism count in full, and cost the host nothing."""
    links, time = network(GPUS, spec.nodes, **probe), profile_of(profile).time
    alone = {"dp_overlap": 0.0, "zero_overlap": 0.0, "zero_layer_s": 0.0}
    return predict_step_time(spec, GPUS, PEAK, links, time if hides else replace(time, **alone))


@pytest.mark.parametrize("profile", PROFILES)
@given(layout=layouts(), shape=shapes(), slow=st.booleans(), compiled=st.booleans())
def test_parts_are_finite_and_add_up_to_a_positive_time(profile, layout, shape, slow, compiled):
    spec = spec_of(replace(layout, dp=2 * layout.dp), shape, nodes=2, compiled=compiled)
    probe = SLOW if slow else {}
    found, alone = step_time(spec, profile, **probe), step_time(spec, profile, hides=False, **probe)
    parts = found._asdict()
    assert all(math.isfinite(s) and s >= 0 for s in parts.values())
    assert sum(parts.values()) == pytest.approx(found.total)
    assert found.total > 0
    host_s = 1.500001 * layout.gas * profile_of(profile).time.zero_layer_s * shape.num_hidden_layers
    assert found.dp <= alone.dp + host_s


def test_zero_costs_the_host_as_often_as_it_reduces_and_gathers():
    time, links = load_profile("ultrabench-cpu").time, network(GPUS, 1)
    for zero_stage, times in ((0, 0), (1, 1), (2, 2.5), (3, 6)):
        spec = spec_of(Layout(dp=8, gas=4, zero_stage=zero_stage))
        more = replace(time, zero_layer_s=time.zero_layer_s + 1.0)
        without, with_ = (predict_step_time(spec, GPUS, PEAK, links, c).dp for c in (time, more))
        assert with_ - without == pytest.approx(times * spec.shape.num_hidden_layers)


@pytest.mark.parametrize("change", [
    {"mbs": 2}, {"recompute": "full"}, {"recompute": "selective"}, {"recompute": "every2"}
])  # fmt: skip
def test_more_work_takes_longer(change):
    layout = Layout(dp=8, mbs=1, gas=4)
    more = step_time(spec_of(replace(layout, **change), "8B"), "ultrabench")
    assert more.total > step_time(spec_of(layout, "8B"), "ultrabench").total


def test_communication_that_hides_counts_only_where_it_is_exposed():
    spec = spec_of(Layout(dp=8, gas=4, zero_stage=1), "8B")
    (few, few_alone), (many, many_alone) = (
        (step_time(spec, profile).dp, step_time(spec, profile, hides=False).dp)
        for profile in ("ultrabench", "nanotron")
    )
    assert few < few_alone / 2  # reduce-scatters run beside the last backward
    assert many > many_alone  # nanotron waits for all of them, and pays for each layer


def test_slow_links_cost_what_the_probe_says():
    layout = Layout(dp=64, tp=8, mbs=1, gas=4)
    fast, slow = (
        step_time(spec_of(layout, "8B", nodes=64)),
        step_time(spec_of(layout, "8B", nodes=64), **SLOW),
    )
    assert slow.dp > 2 * fast.dp
    assert slow.launch > 2 * fast.launch
    inside, across = (Layout(dp=8, tp=8), Layout(dp=4, tp=16))
    assert step_time(spec_of(across, "8B", nodes=8)).tp > 3 * step_time(spec_of(inside, "8B", nodes=8)).tp


def test_a_pipeline_waits_while_it_fills_and_less_so_with_more_micro_batches():
    few, many = (step_time(spec_of(Layout(dp=1, pp=8, gas=gas, pp_schedule="1f1b"), "8B")) for gas in (8, 32))
    assert few.bubble / few.total > 2 * many.bubble / many.total
    halved = Layout(dp=1, pp=8, gas=8, pp_schedule="interleaved", virtual_stages=2)
    assert step_time(spec_of(halved, "8B")).bubble < 0.7 * few.bubble


def test_what_a_rank_waits_for_makes_others_faster_where_they_share_processors():
    spec = spec_of(
        Layout(dp=1, pp=2, gas=4, pp_schedule="1f1b")
    )  # 1B has 10 layers on rank 0, and 6 with the head
    time, links = profile_of("nanotron").time, network(GPUS, 1)
    apart, half, shared = (
        predict_step_time(spec, GPUS, PEAK, links, replace(time, wait_shared=part))
        for part in (0.0, 0.5, 1.0)
    )
    assert apart == predict_step_time(spec, GPUS, PEAK, links, time)
    assert half.total - half.pp == pytest.approx((apart.total - apart.pp + shared.total - shared.pp) / 2)
    assert apart.pp < shared.pp  # ranks exchange while they wait, unless others use that time
    assert (shared.bubble, apart.bubble > 0) == (0.0, True)
    assert shared.gemm < apart.gemm
    alone = spec_of(Layout(dp=2, gas=4))
    assert step_time(alone) == predict_step_time(alone, GPUS, PEAK, links, replace(time, wait_shared=1.0))


def test_zbv_waits_for_a_sixth_of_1f1b_and_for_more_where_few_micro_batches_fill_it():
    zbv, plain = {"pp_schedule": "zbv", "virtual_stages": 2}, {"pp_schedule": "1f1b"}
    for gas, share in ((8, 1 / 3), (16, 1 / 6)):
        own, other = (
            step_time(spec_of(Layout(dp=1, pp=8, gas=gas, **words), "8B")) for words in (zbv, plain)
        )
        assert own.bubble / other.bubble == pytest.approx(share, rel=0.05)


def test_every_regime_has_a_name():
    pure, pipeline = Layout(dp=512), Layout(dp=64, pp=8, pp_schedule="1f1b", gas=8)
    found = {
        regime(spec_of(layout, nodes=nodes), network(GPUS, nodes, **probe))
        for layout, nodes in ((pure, 64), (pipeline, 64), (pure, 4), (pipeline, 4))
        for probe in ({}, SLOW | {"allgather_bytes_per_s": 98e9 if nodes == 4 else 6.5e9})
    }
    assert found == set(REGIMES)
    for name in PROFILES:
        low, high = load_profile(name).quantiles("slow")
        assert low <= 0 <= high


def test_a_profile_that_cannot_be_used_is_one_line_with_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"unknown profile 'nanotrn'; did you mean nanotron.*calibrate"):
        load_profile("nanotrn")
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "ultrabench" / "profiles" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    values = yaml.safe_load(files("profiles")["nanotron"].read_text())
    mine.write_text(yaml.safe_dump(values))
    assert load_profile("mine").time == load_profile("nanotron").time
    for change, message in (
        ({"framework": "jax"}, "framework='jax'; must be ultrabench, nanotron or megatron"),
        ({"time": values["time"] | {"rest_s": -1.0}}, "profile.time.rest_s=-1.0; must be >= 0"),
        ({"time": {}}, "profile.time lacks gemm_efficiency"),
        ({"interval": {"all": [0.1, 0.2]}}, r"interval.all=\[0.1, 0.2\]; must enclose 0"),
        ({"interval": {}}, "interval lacks all"),
        (
            {"interval": {"all": [-0.1, 0.1], "slwo": [-0.1, 0.1]}},
            "unknown regime of profile .*did you mean slow",
        ),
    ):
        mine.write_text(yaml.safe_dump(values | change))
        with pytest.raises(ConfigError, match=f"mine.yaml: .*{message}"):
            load_profile("mine")
