"""The columns of results that come from a candidate or an attempt."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.configs import refused
from tests.sweep_folder import write
from tests.unit.analysis.sweeps import (
    OK,
    PREDICTED,
    SPECS,
    TINY,
    attempted,
    make_sweep,
    rows_of,
    spec_of,
    swept,
    values,
)
from ultrabench.analysis.results import measured
from ultrabench.errors import SweepFolderError
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.store.events import AllocationPlanned, Launched, Preflight, Result, Submitted
from ultrabench.store.journal import read_journal
from ultrabench.store.state import fold
from ultrabench.sweep.candidate import PRUNED, Candidate
from ultrabench.sweep.config.load import read_hardware
from ultrabench.sweep.running.outliers import with_loss_outliers
from ultrabench.sweep.running.standings import suspects_of


def test_speed_and_mfu_by_hand(tmp_path):
    folder = swept(tmp_path, specs=SPECS[:1])
    submitted = Submitted(allocation="a0", job={"job_id": 4711, "host": "login"})
    write(folder, submitted, *attempted(SPECS[0], OK))
    (row,) = rows_of(folder)
    # 16,384 tokens in 0.2 s on 8 GPUs. A layer multiplies by 4*64*64 + 3*64*128 = 40,960
    # parameters; two of them and a head of 256*64 have N = 98,304.
    rate = (6 * 98_304 + 12 * 2 * 64 * 128) * 10_240
    expected = {
        "step_time_s": 0.2, "tokens_per_s": 81_920, "tokens_per_s_per_gpu": 10_240, "num_steps_measured": 3,
        "model_flops_per_s_per_gpu": rate, "mfu": rate / 989e12, "hfu": 4e12 / 0.2 / 8 / 989e12,
        "peak_flops_per_s": 989e12, "gpu_hours": 90 * 8 / 3600, "num_params": SPECS[0].shape.num_params,
        "predicted_step_time_s": 0.4, "predicted_peak_mem_bytes": 2000,
    }  # fmt: skip
    assert values(row, expected) == pytest.approx(expected)
    exact = {
        "flops_formula": "palm", "job_id": "4711", "git_commit": "abc", "kernel_digest": "digest",
        "step_times_s": [0.3, 0.1, 0.2], "step_time_ci95_rel": None,
    }  # fmt: skip
    assert values(row, exact) == exact
    assert row["started_at"].isoformat() == "1970-01-01T00:00:00+00:00"
    # The formula of the latest launch counts: Megatron's halves the attention.
    write(folder, Launched(generation=1, config={"measure": {"flops_formula": "megatron"}}))
    (row,) = rows_of(folder)
    halved = (6 * 98_304 + 6 * 2 * 64 * 128) * 10_240
    assert (row["flops_formula"], row["mfu"]) == ("megatron", pytest.approx(halved / 989e12))


ADDED = replace(SPECS[0], shape=replace(TINY, name="added", vocab_size=512))
"""A run of a model that the first launch does not know, with 10,240 tokens/s/GPU."""


@pytest.mark.parametrize(
    ("config", "column", "before", "after"),
    [
        ({"sweep": {"scaling": "weak"}}, "scaling", "strong", "weak"),
        ({"cluster": {"price_per_gpu_hour": 3.6864}}, "cost_per_billion_tokens", None, pytest.approx(100.0)),
        ({"models": [to_dict(ADDED.shape)]}, "num_params", None, ADDED.shape.num_params),
    ],
)
def test_the_latest_launch_says_how_the_batch_scales_what_tokens_cost_and_what_models_are(
    tmp_path, config, column, before, after
):
    folder = swept(tmp_path, OK, specs=[ADDED])
    assert [row[column] for row in rows_of(folder)] == [before]
    write(folder, Launched(generation=1, config=config))
    assert [row[column] for row in rows_of(folder)] == [after]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (OK, {"status": "ok", "attempt": 0, "evidence": None, "throttled": None, "suspect": None}),
        (replace(OK, sm_clock_hz=1.9e9), {"sm_clock_hz": 1.9e9, "throttled": False}),
        (replace(OK, sm_clock_hz=1.4e9, throttled="thermal"), {"sm_clock_hz": 1.4e9, "throttled": True}),
        (replace(OK, power_w_mean=500.0), {  # of 8 GPUs
            "power_w_mean": 500.0, "energy_j_per_step": 500.0 * 8 * 0.2, "tokens_per_j": 10_240 / 500}),
        (replace(OK, status=Status.INVALID, reason="loss is NaN"), {
            "status": "invalid", "gpu_hours": 0.2, "step_time_s": None, "mfu": None, "step_times_s": None,
            "flops_formula": None}),
        (None, {"status": None, "attempt": 0, "step_time_s": None, "mfu": None, "gpu_hours": None}),
        (RunResult(status=Status.CRASH, evidence={"ranks": [{"rank": 1, "code": 3}]}),
         {"status": "crash", "mfu": None, "evidence": '{"ranks": [{"code": 3, "rank": 1}]}'}),
        (replace(OK, step_times_s=(1e-9,), rank_step_times_s={"0": 1.0, "7": 2.0}, suspect_hosts=("n1",)), {
            "status": "ok", "suspect_hosts": ["n1"], "confirmed": None,
            "suspect": "rank 7 took 2.00 x the step time of rank 0; "
                       "mfu 1628.53 is above 1: the step time or the peak is measured wrongly"}),
    ],
    ids=["ok", "clock", "throttled", "energy", "invalid", "running", "crash", "in doubt"],
)  # fmt: skip
def test_the_row_of_an_attempt_tells_its_result(tmp_path, result, expected):
    assert values(rows_of(swept(tmp_path, result))[0], expected) == expected


@pytest.mark.parametrize(("share", "suspect"), [(0.99, False), (1.01, True)])
def test_a_run_faster_than_plain_matrix_products_is_suspect(tmp_path, share, suspect):
    """Its attention counts only below the diagonal, and the slowest device of its allocation decides."""
    folder = swept(tmp_path, OK, specs=SPECS[:1])
    least = (6 * 98_304 + 6 * 2 * 64 * 128) * 10_240  # as in the test of mfu by hand
    probe = {"gemm_flops_per_s": [least / share, *[1.1 * least] * 7], "memory_copy_bytes_per_s": [1.0] * 8}
    planned = AllocationPlanned(allocation="a0", nodes=1, limit_s=60.0, tasks=())
    write(folder, planned, Preflight(allocation="a0", found={"probe": probe}))
    (row,) = rows_of(folder)
    assert row["suspect_codes"] == (["above_gemm"] if suspect else None)
    state = with_loss_outliers(fold(read_journal(folder.journal)))
    run = Candidate(run_id=SPECS[0].run_id, spec=SPECS[0], predicted=PREDICTED, flops_formula="palm")
    suspects = suspects_of({run.run_id: run}, state, "cuda")
    assert [*suspects.values()] == ([row["suspect"]] if suspect else [])


def test_layers_with_a_split_backward_pass_are_never_compiled(tmp_path):
    kernel = KernelConfig(name="embedded", compile=True, precision="bf16")
    split = Layout(dp=4, pp=2, gas=4, pp_schedule="zbv", virtual_stages=2)
    specs = [spec_of(Layout(dp=4, pp=2, gas=4, pp_schedule="1f1b"), kernel), spec_of(split, kernel)]
    rows = rows_of(make_sweep(tmp_path / "s", specs, kernel=kernel))
    assert [row["compile"] for row in rows] == [spec.compiles for spec in specs] == [True, False]


def test_a_model_with_experts_is_read_again_from_its_row(tmp_path):
    """A dense one has nulls, as rows of earlier versions have."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    layers = {"first_k_dense_replace": 1, "decoder_sparse_step": 1}
    kernel = KernelConfig(name="embedded", precision="bf16", routing="learned")
    sparse = replace(spec_of(Layout(dp=8, ep=4, gas=16), kernel), shape=replace(TINY, **experts, **layers))
    folder = make_sweep(tmp_path / "sparse", [sparse], kernel=kernel, models=(sparse.shape,))
    write(folder, *attempted(sparse, OK))
    (row,) = rows_of(folder)
    assert values(row, experts | layers) == experts | layers
    assert (row["ep"], row["routing"]) == (4, "learned")
    assert measured.spec_of(row).run_id == sparse.run_id
    assert row["num_active_params"] < row["num_params"] == sparse.shape.num_params
    # MFU counts 98,304 parameters as in a dense model, but in one of two layers those of the router and of 2 + 1
    # experts for the feed-forward block.
    active = 98_304 - 3 * 64 * 128 + 64 * 8 + 3 * 3 * 64 * 32
    rate = (6 * active + 12 * 2 * 64 * 128) * 10_240
    assert (row["model_flops_per_s_per_gpu"], row["mfu"]) == pytest.approx((rate, rate / 989e12))
    (dense,) = rows_of(make_sweep(tmp_path / "dense", SPECS[:1]))
    assert {dense[name] for name in (*experts, *layers, "routing")} == {None}
    assert measured.spec_of(dense).run_id == SPECS[0].run_id


@pytest.mark.parametrize("core_rate", [1e10, None])
def test_peak_of_a_laptop_is_measured_or_unknown(tmp_path, core_rate):
    spec = spec_of(Layout(dp=4, gas=4), KernelConfig(name="embedded"), nodes=2, gpus_per_node=2)
    peak = {"core_flops_per_s": core_rate, "cores": 2}
    laptop = read_hardware({"name": "laptop", "gpu": "cpu"})
    folder = make_sweep(tmp_path / "s", [spec], (), laptop, peak, precision="fp32")
    write(folder, *attempted(spec, replace(OK, hardware_flops_per_step=None)))
    (row,) = rows_of(folder)
    assert (row["tokens_per_s"] is not None, row["hfu"]) == (True, None)
    peak_and_mfu = row["peak_flops_per_s"], row["peak_source"], row["mfu"]
    mfu = pytest.approx(row["model_flops_per_s_per_gpu"] / 5e9)
    assert peak_and_mfu == ((1e10 * 2 / 4, "measured", mfu) if core_rate else (None, None, None))


def test_candidates_without_an_attempt_say_why_and_hold_no_numbers(tmp_path):
    why = [(None, None), ("tp_heads", "tp=3 does not divide heads=32"), (PRUNED, "predicted 112 GiB of 80")]
    rows = rows_of(make_sweep(tmp_path / "s", SPECS[:3], why))
    assert [row["status"] for row in rows] == [None, "rejected", "skipped"]
    assert [(row["rule"], row["reason"]) for row in rows] == why
    expected = {"is_final": True, "predicted_step_time_s": 0.5, "num_params": SPECS[0].shape.num_params}
    expected |= dict.fromkeys(
        ("repeat", "attempt", "mfu", "step_times_s", "gpu_hours", "hostnames", "env_id", "num_steps_measured",
         "peak_mem_reserved_bytes", "throttled")
    )  # fmt: skip
    assert [values(row, expected) for row in rows] == [expected] * 3


def test_what_another_run_dominates_is_skipped_and_says_by_whom(tmp_path):
    small, large = (spec_of(Layout(dp=8, zero_stage=1, mbs=m, gas=16 // m)) for m in (1, 2))
    oom = RunResult(status=Status.OOM, confirmed=True)
    folder = swept(tmp_path, oom, specs=(small, large))
    write(folder, *attempted(small, oom, attempt=1))
    row = rows_of(folder)[-1]
    assert (row["run_id"], row["status"], row["attempt"]) == (large.run_id, "skipped", None)
    assert row["dominated_by"] == small.run_id
    assert row["reason"].startswith(f"dominated by {small.run_id}")


def test_an_outlying_loss_is_an_invalid_row_that_keeps_its_numbers(tmp_path):
    ends = [replace(OK, loss_final=loss, loss_step=5) for loss in (5.0, 5.0, 5.0, 9.0)]
    folder = swept(tmp_path, *ends)
    row = rows_of(folder)[3]
    assert (row["status"], row["is_final"], row["step_time_s"]) == ("invalid", True, 0.2)
    assert row["reason"].startswith("loss 9 at step 5; the other 3 layouts")
    write(folder, *attempted(SPECS[3], ends[0], attempt=1))
    assert [(r["status"], r["is_final"]) for r in rows_of(folder)[3:5]] == [("invalid", False), ("ok", True)]


@pytest.mark.parametrize("seed", range(3))
def test_every_candidate_is_a_row_and_one_row_is_final(tmp_path, seed):
    choose = random.Random(seed)
    folder = swept(tmp_path, specs=SPECS[:6])
    attempts = Counter()
    for spec in SPECS:
        for repeat in range(choose.randrange(3)):
            for attempt in range(choose.randint(1, 3)):
                result = choose.choice([None, OK, RunResult(status=Status.HANG, reason="silent")])
                write(folder, *attempted(spec, result, repeat, attempt))
                attempts[spec.run_id] += 1
    rows = rows_of(folder)
    assert rows == rows_of(folder)
    assert Counter(row["run_id"] for row in rows) == Counter(spec.run_id for spec in SPECS[:6]) | attempts
    finals = {(row["run_id"], row["repeat"]): row for row in rows if row["is_final"]}
    assert len(finals) == sum(row["is_final"] for row in rows)
    for row in rows:
        stands = finals[row["run_id"], row["repeat"]]
        assert row["status"] != "ok" or stands["status"] == "ok"


def test_runs_no_longer_in_the_plan_are_read_from_their_claims(tmp_path):
    folder = swept(tmp_path, specs=SPECS[:1])
    other = replace(SPECS[1], shape=replace(SPECS[0].shape, name="other", num_hidden_layers=3))
    write(folder, *attempted(other, OK))
    row = rows_of(folder)[1]
    assert (row["run_id"], row["model"], row["num_hidden_layers"]) == (other.run_id, "other", 3)
    assert (row["dp"], row["mbs"], row["precision"], row["gpus"]) == (8, 2, "bf16", 8)
    assert row["mfu"] is not None


def test_a_lost_claim_loses_no_result(tmp_path):
    folder = swept(tmp_path, specs=SPECS[:1])
    write(
        folder, *(Result(run_id=name, repeat=0, attempt=0, result=OK) for name in (SPECS[0].run_id, "f" * 16))
    )
    warnings = []
    claimed, unclaimed = rows_of(folder, warn=warnings.append)
    assert claimed["mfu"] is not None
    assert (unclaimed["status"], unclaimed["model"], unclaimed["mfu"]) == ("ok", None, None)
    assert len(warnings) == 1


def test_a_lost_plan_is_told_and_several_sweeps_follow_each_other(tmp_path):
    first, second = (make_sweep(tmp_path / name, [SPECS[n]]) for n, name in enumerate(("one", "two")))
    assert [(row["sweep"], row["run_id"]) for row in rows_of(second, first)] == [
        ("two", SPECS[1].run_id), ("one", SPECS[0].run_id),
    ]  # fmt: skip
    second.plan.unlink()
    warnings = []
    assert [row["sweep"] for row in rows_of(second, first, warn=warnings.append)] == ["one"]
    assert warnings == ["two: no plan.parquet; candidates that were never attempted are missing"]
    second.sweep_json.unlink()
    with refused(f"no sweep.json in {second.path}; is it a sweep folder?", SweepFolderError):
        rows_of(second)
