"""`ultrabench predict LAYOUT` and `kernel dryrun`: one layout by part, in a table or as JSON."""

import pytest

from tests.unit.cli.conftest import QUICK, as_json, one_line
from ultrabench.cli.kernel.dryrun import dryrun_spec
from ultrabench.cli.predict.layout import distance

WORDS = ("model=llama3-70b", "nodes=8", "tp=8", "pp=4", "zero_stage=1", "gas=16")
PROMISED = {"peak_mem_bytes", "memory", "p_oom", "step_time_s", "time", "tokens_per_s_per_gpu", "mfu"}


def test_predict_json_keeps_its_promise(ultrabench):
    found = as_json(ultrabench, "predict", *WORDS)
    assert found.keys() >= PROMISED
    assert found["label"].startswith("dp2 tp8 pp4 z1 mbs1 gas16")
    assert sum(found["memory"].values()) == pytest.approx(found["peak_mem_bytes"], rel=1e-6)
    assert max(stage["peak_bytes"] for stage in found["stages"]) == pytest.approx(
        found["peak_mem_bytes"], rel=1e-6
    )
    assert len(found["stages"]) == 4
    for memory in (found["memory"], *found["stages"]):
        assert not [name for name, value in memory.items() if isinstance(value, float)]  # bytes
    assert found["p_oom"] == round(found["p_oom"], 6)
    assert sum(found["time"].values()) == pytest.approx(found["step_time_s"])
    assert found["step_time_low_s"] < found["step_time_s"] < found["step_time_high_s"]
    tokens = found["spec"]["workload"]["gbs"] * 4096 / found["step_time_s"] / 64
    assert found["tokens_per_s_per_gpu"] == pytest.approx(tokens)
    assert 0 < found["mfu"] < 1


def test_another_profile_and_kernel_predict_something_else(ultrabench):
    ours, nanotron, megatron = (
        as_json(ultrabench, "predict", "model=8B", "tp=2", "zero_stage=1", "gas=8", word)
        for word in ("kernel=embedded", "profile=nanotron", "kernel=megatron")
    )
    profiles = [found["profile"] for found in (ours, nanotron, megatron)]
    assert profiles == ["ultrabench", "nanotron", "megatron"]
    assert len({found["step_time_s"] for found in (ours, nanotron, megatron)}) == 3


def test_predict_tells_what_no_run_of_the_fit_had(ultrabench):
    words = ("predict", "model=8B", "profile=nanotron")
    assert as_json(ultrabench, *words, "tp=4", "zero_stage=1")["unmeasured"] == []
    told = as_json(ultrabench, *words, "zero_stage=3", "hardware=b200x8")["unmeasured"]
    assert told == ["gpu=B200 (H100-SXM)", "zero_stage=3 (0 to 1)"]
    assert (
        f"no run of that fit had {', '.join(told)}"
        in ultrabench(*words, "zero_stage=3", "hardware=b200x8")[1]
    )
    assert "no run of that fit" not in ultrabench("predict", "profile=megatron", "zero_stage=1")[1]


def test_predict_draws_bars_and_says_what_limits_the_layout(ultrabench):
    out = ultrabench("predict", *WORDS)[1]
    assert "llama3-70b, dp2 tp8 pp4" in out.splitlines()[0]
    assert "memory at its peak (pipeline rank 0, " in out
    assert any(line.startswith("gemm ") and line.endswith("\u2588" * 40) for line in out.splitlines())
    assert "P(OOM) " in out
    assert "tokens/s/GPU, MFU " in out
    assert "; limited by " in out


def test_predict_shows_measured_runs_that_are_like_the_layout(ultrabench, sweep):
    measured = QUICK.runs[0]
    words = [f"{n}={getattr(measured.layout, n)}" for n in ("tp", "pp", "mbs", "gas", "zero_stage")]
    some = ("predict", "model=tiny", "hardware=cpu", f"nodes={measured.nodes}", "seq_len=64", *words)
    (run,) = as_json(ultrabench, *some)["nearest"]
    assert (run["run_id"], run["step_time_s"]) == (measured.run_id, pytest.approx(0.1))
    assert (run["seq_len"], run["predicted_step_time_s"]) == (64, measured.prediction.step_time_s)
    told = ultrabench(*some)[1]
    assert "measured runs that are most alike" in told
    assert "a core is taken to reach 50 GFLOP/s; a sweep measures it first" in told
    assert distance(measured.spec, measured.spec) == 0 < distance(measured.spec, QUICK.runs[1].spec)


def test_a_layout_that_is_impossible_or_a_wrong_word_is_one_line(ultrabench):
    assert "dp=3 with tp*pp*cp=1 needs 3 GPUs" in one_line(ultrabench, "predict", "dp=3")
    assert "unknown profile 'mime'" in one_line(ultrabench, "predict", "profile=mime")
    assert "No such command 'calibrat'" in one_line(ultrabench, "predict", "calibrat")


@pytest.mark.parametrize(
    ("words", "label", "precision"),
    [("", "dp8 tp1 pp1 z0 mbs1 gas1", "bf16"),
     ("nodes=8 tp=8 zero_stage=3", "dp8 tp8 pp1 z3 mbs1 gas1", "bf16"),
     ("pp=4 mbs=2", "dp2 tp1 pp4 z0 mbs2 gas4", "bf16"),
     ("pp=4 pp_schedule=zbv", "dp2 tp1 pp4 z0 mbs1 gas4 zbv x2", "bf16"),
     ("pp=2 pp_schedule=interleaved virtual_stages=4", "dp4 tp1 pp2 z0 mbs1 gas2 interleaved x4", "bf16"),
     ("hardware=cpu model=tiny nodes=2 cp=2", "dp2 tp1 pp1 cp2 z0 mbs1 gas1", "fp32")],
)  # fmt: skip
def test_what_is_not_said_follows(words, label, precision):
    spec, _ = dryrun_spec(words.split())
    assert (spec.layout.label(), spec.kernel.precision) == (label, precision)
