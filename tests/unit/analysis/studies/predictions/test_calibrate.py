"""Profiles that are fitted to measured runs, and predictions that are compared with them."""

import math
import random
import re
from dataclasses import replace
from itertools import product
from statistics import median

import pandas as pd
import pytest
import yaml
from replay import cells_of

from tests.configs import refused
from tests.unit.predict.test_step_time import GPUS, PEAK, spec_of
from ultrabench.analysis.figures.picture import render
from ultrabench.analysis.results.cases import cases, default_profile, exclusions, for_profile
from ultrabench.analysis.results.measured import MeasuredRun
from ultrabench.analysis.results.nanotron_version import nanotron_version
from ultrabench.analysis.studies.predictions.calibrate import (
    are_clearly_better,
    calibrate,
    level_sd_of,
    moved_constants,
    moved_lines,
    to_yaml,
)
from ultrabench.analysis.studies.predictions.figure import validation_figure
from ultrabench.analysis.studies.predictions.fit import (
    FP8_NAMES,
    LEVEL_SD,
    FittedTime,
    fit_constants,
    fit_time,
    fitted_flags,
    fitted_names,
    intervals,
    log_errors,
)
from ultrabench.analysis.studies.predictions.nanotron import fit_memory, memory_runs
from ultrabench.analysis.studies.predictions.validate import (
    fp8_priors_warning,
    metrics,
    profiles_without_group,
    table,
)
from ultrabench.layout import Layout
from ultrabench.record import to_dict
from ultrabench.sweep.config.load import load_profile
from ultrabench.sweep.predict.memory import memory_constants
from ultrabench.sweep.predict.nanotron_memory import nanotron_memory
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.predict.profile import Quantiles
from ultrabench.sweep.predict.step_time import predict_step_time

BASE, NANOTRON = load_profile("ultrabench"), load_profile("nanotron")
NANOTRON_MEMORY = memory_constants("nanotron", NANOTRON.memory)
TRUTH = replace(
    BASE.time, gemm_efficiency=0.55, layer_launch_s=1.4e-3, layer_launch_tp_s=2e-3, dp_link_efficiency=0.5
)  # fmt: skip
"""A card of less power and a faster host than the profile knows."""


def run_of(spec, time_s, **columns):
    """A final run on H100s that ended ok, unless `columns` say otherwise."""
    values = {
        "run_id": spec.run_id, "spec": spec, "hardware": "h100x8", "peak_flops_per_s": 989e12, "is_final": True,
        "status": "ok", "step_time_s": time_s,
    }  # fmt: skip
    return MeasuredRun(**{**dict.fromkeys(MeasuredRun.__dataclass_fields__), **values, **columns})


def measured(constants, count, *, noise=0.01, seed=0):
    """Runs as they would be with these constants."""
    chance, runs = random.Random(seed), []
    choices = list(product(("1B", "8B"), (1, 2), (1, 2, 8), (1, 2, 4), (0, 1)))
    for model, nodes, tp, mbs, zero_stage in chance.sample(choices, count):
        dp = 8 * nodes // tp
        layout = Layout(dp=dp, tp=tp, mbs=mbs, gas=64 // dp, zero_stage=zero_stage if dp > 1 else 0)
        spec = spec_of(layout, model, nodes=nodes)
        time_s = predict_step_time(spec, GPUS, PEAK, network(GPUS, nodes), constants).total
        runs.append(run_of(spec, time_s * math.exp(chance.gauss(0, noise))))
    return cases(runs)[0]


def fit(cases_, base=BASE):
    return calibrate(cases_, base, name="mine", date="2026-11-22")


def changed(cases_, **columns):
    """The same cases with other values; a function makes the value from the run."""
    return cases([
        replace(case.run, **{k: v(case.run) if callable(v) else v for k, v in columns.items()}) for case in cases_
    ])[0]  # fmt: skip


def median_error(cases_, constants):
    return median(abs(case.log_error(constants)) for case in cases_)


@pytest.fixture(scope="module")
def fitted():
    return fit(measured(TRUTH, 20))


def test_a_few_runs_make_a_profile_that_predicts_others(fitted):
    others = measured(TRUTH, 30, seed=1)
    assert (fitted.fitted, fitted.memory) == ({"step_time": 20, "memory": 0}, {})
    assert "fitted to 20 runs, memory from profile ultrabench, intervals of 20" in fitted.profile.source
    assert fitted.after["median_error"] < fitted.before["median_error"] / 3
    assert median_error(others, fitted.profile.time) < 0.03 < 0.1 < median_error(others, BASE.time)
    assert fitted.profile.prior == "ultrabench"
    assert fitted.profile.quality["median_error"] == fitted.after["median_error"]


def test_the_file_of_a_profile_is_read_back(fitted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ultrabench" / "profiles" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(to_yaml(fitted.profile, BASE))
    read_back = load_profile("mine")
    assert (read_back.name, read_back.framework, read_back.memory) == ("mine", "ultrabench", BASE.memory)
    assert read_back.measured == fitted.profile.measured
    assert read_back.measured["tp"] == (1, 8)
    assert to_dict(read_back.time) == pytest.approx(to_dict(fitted.profile.time), rel=1e-3)


def test_constants_of_a_knob_are_fitted_where_its_value_varies():
    """A value with which matrix products are slower than the prior says, in more than half of the runs."""
    flags = {"recipe": {"blockwise": {"gemm_efficiency": 0.6}}}
    base = replace(BASE, flags=flags)

    def with_recipe(run):
        return replace(run.spec, variant={"flags.recipe": "blockwise"})

    slower = measured(replace(BASE.time, gemm_efficiency=0.35), 14, seed=1)
    plain, varied = measured(BASE.time, 8), changed(slower, spec=with_recipe)
    assert not fitted_flags(plain, flags), "no run has the value"
    calibration = fit([*plain, *varied], base)
    assert calibration.profile.flag_runs == {"recipe": {"blockwise": 14}}
    assert calibration.profile.flags["recipe"]["blockwise"]["gemm_efficiency"] == pytest.approx(
        0.35, abs=0.05
    )
    assert calibration.profile.time.gemm_efficiency == pytest.approx(BASE.time.gemm_efficiency, rel=0.1)
    assert calibration.after["median_error"] < calibration.before["median_error"]
    assert calibration.profile.measured["flags.recipe"] == ("blockwise",)
    text = to_yaml(calibration.profile, base)
    assert re.search(r'    "blockwise":\n      gemm_efficiency: [0-9.]+ +# 0.6 before\n', text)
    read_back = yaml.safe_load(text)
    assert (read_back["flags"].keys(), read_back["flag_runs"]) == ({"recipe"}, {"recipe": {"blockwise": 14}})


def in_fp8(cases_, constants):
    """The same cases in fp8, as they would be with these constants."""
    peak = GPUS.peak("fp8", 1, None, 1)

    def spec(run):
        return replace(run.spec, kernel=replace(run.spec.kernel, precision="fp8"))

    def time_s(run):
        return predict_step_time(spec(run), GPUS, peak, network(GPUS, run.spec.nodes), constants).total

    return changed(cases_, spec=spec, step_time_s=time_s, peak_flops_per_s=peak.flops_per_s)


def test_a_case_has_the_stages_of_its_profile():
    """By cost, the head counts as much as four layers, so the last of two stages has fewer of them."""
    layout = Layout(dp=4, pp=2, pp_schedule="1f1b", gas=4)
    spec, even = (spec_of(replace(layout, pp_layout=stages), "llama3.2-1b") for stages in ("auto", "even"))
    (case,) = cases([run_of(spec, 1.0)])[0]
    of_even, of_cost = (for_profile([case], replace(BASE, stages=stages))[0] for stages in ("even", "cost"))
    links = network(GPUS, 1)
    expected_s = predict_step_time(even, GPUS, PEAK, links, BASE.time, of_even.memory_share).total
    assert of_even.predict_s(BASE.time) == expected_s != of_cost.predict_s(BASE.time)


def test_runs_in_fp8_alone_tell_its_constants():
    cases = in_fp8(measured(BASE.time, 6, noise=0), replace(BASE.time, fp8_efficiency=0.4))
    assert {*fitted_names(cases, BASE.time)} - {*fitted_names(measured(BASE.time, 2), BASE.time)} == FP8_NAMES
    constants = fit_constants(
        BASE.time, ["fp8_efficiency"], lambda now: log_errors(cases, FittedTime(now)), scale=0.1, ridge=2.0
    )
    assert constants.fp8_efficiency == pytest.approx(0.4, rel=0.05)
    assert median_error(cases, constants) < median_error(cases, BASE.time) / 4
    knows_fp8 = replace(BASE, measured={"precision": ("bf16", "fp8")})
    assert [fp8_priors_warning(cases_, BASE) for cases_ in (cases[:2], measured(BASE.time, 2))] == [
        "2 rows in fp8: profile ultrabench was fitted without them, so fp8_cast_bytes=7, fp8_efficiency=0.61, "
        "fp8_launch_s=0.002 are priors",
        None,
    ]
    assert fp8_priors_warning(cases, knows_fp8) is None
    slices = metrics(table([*cases, *measured(BASE.time, 2)], lambda case: BASE))["all"]["by"]["precision"]
    assert {name: slice_["rows"] for name, slice_ in slices.items()} == {"bf16": 2, "fp8": 6}


@pytest.mark.parametrize(
    ("name", "start", "best"),
    [("smooth_power", 1.2, 0.4), ("gemm_efficiency", 0.9, 3), ("ep_overlap", 0.9, 3)],
)
def test_no_fit_leaves_the_range_of_a_constant(name, start, best):
    """GPU and host take at most the sum of both times, and nothing is faster than its peak."""
    prior = replace(BASE.time, **{name: start})
    constants = fit_constants(prior, [name], lambda now: [getattr(now, name) - best], scale=0.1, ridge=0.25)
    assert getattr(constants, name) == 1


def test_noise_alone_does_not_make_a_profile_worse():
    calibration = fit(measured(BASE.time, 8, noise=0.05))
    assert (calibration.fitted["step_time"], calibration.profile.time) == (0, BASE.time)
    assert calibration.profile.source.startswith("step time from profile ultrabench, ")


@pytest.mark.parametrize(
    ("new_errors", "old_errors", "is_better"),
    [
        ([0.06] * 9 + [1.5], [0.24] * 10, True),  # one run that is unlike all others
        ([0.06] * 7 + [1.5] * 3, [0.24] * 10, False),
        ([0.05] * 5, [0.06] * 5, True),
        ([0.05] * 4 + [0.07], [0.06] * 5, False),
        ([0.01] * 4 + [0.2], [0.6] * 4 + [0.1], True),  # the loss of all
    ],
)
def test_new_constants_are_better_than_chance_would_make_them(new_errors, old_errors, is_better):
    assert are_clearly_better(new_errors, old_errors) == is_better


def test_the_memory_of_nanotron_is_fitted_to_what_runs_reserved():
    truth = replace(NANOTRON_MEMORY, layer_hidden=30.0, base_bytes=5e8)

    def peak(run):
        return int(nanotron_memory(run.spec, truth)[0].peak_bytes)

    reserved = changed(measured(BASE.time, 40), peak_mem_reserved_rank0_bytes=peak)
    failed = replace(reserved[0].run, status="oom", peak_mem_reserved_rank0_bytes=10**9)
    runs = memory_runs([*(case.run for case in reserved), failed])
    assert failed not in runs
    constants = fit_memory(runs, NANOTRON_MEMORY)
    assert constants.layer_hidden == pytest.approx(30.0, rel=0.1)
    unfitted = ("layer_ffn", "logits", "latest_limit")
    assert all(getattr(constants, name) == getattr(NANOTRON_MEMORY, name) for name in unfitted)
    mine = fit(cases(runs[:10])[0], NANOTRON)
    assert mine.memory["after"]["median_error"] < mine.memory["before"]["median_error"] / 2
    written = yaml.safe_load(to_yaml(mine.profile, NANOTRON))["memory"]
    assert memory_constants("nanotron", written).layer_hidden > 26


def test_too_few_runs_are_one_line_with_the_remedy():
    runs = [case.run for case in measured(TRUTH, 7)]
    runs[0], runs[1] = (
        replace(runs[0], suspect_codes=["throttled"]),
        replace(runs[1], status="oom", step_time_s=None),
    )
    runs[2] = replace(runs[2], allreduce_intra_node_busbw_bytes_per_s=1e11)
    left_out = "1 in doubt: throttled, 1 with status oom and no step time, 1 with slow links in the node"
    message = f"4 healthy runs with a step time; a fit needs at least 5: .*; excluded: {left_out}"
    with refused(match=message):
        fit(cases(runs)[0])


@pytest.mark.parametrize("factor", [1000, 0.1])
def test_step_times_in_another_unit_make_no_profile(factor):
    scaled = changed(measured(BASE.time, 8), step_time_s=lambda run: factor * run.step_time_s)
    with refused(match=r"8 runs: profile .* is off by a median factor of .*; check the seconds, hardware"):
        fit(scaled)


def test_what_no_prediction_can_be_compared_with_is_counted():
    spec = spec_of(Layout(dp=8), "1B")
    compared, left_out = cases([
        run_of(spec, 1.0), run_of(spec, None, status="oom"), run_of(spec, None, status="crash"),
        run_of(spec, 1.0, suspect="other batch: gbs=16"), run_of(spec, 1.0, is_final=False),
        run_of(spec, -1.0), run_of(spec, 0.0), run_of(spec, math.nan),
    ])  # fmt: skip
    assert [case.run.status for case in compared] == ["ok", "oom", "ok"]
    assert left_out == {"status crash": 1, "not final": 1, "with a step time that is not above 0 s": 3}
    assert cells_of(compared[:1], BASE)
    assert not cells_of(compared[2:], BASE)  # nothing in doubt is replayed
    elsewhere, left_out = cases([run_of(spec, 1.0, hardware="h101x8"), run_of(spec, 1.0)])
    ((reason, number),) = left_out.items()
    assert (len(elsewhere), number) == (1, 1)
    assert reason.startswith("unknown hardware 'h101x8'; did you mean h100x8?")


def test_the_error_of_a_run_without_it_is_that_of_a_fit_without_it():
    """The leverage of a run gives it without another fit."""
    runs, prior = measured(TRUTH, 8), FittedTime(BASE.time)
    errors = fit_time(runs, prior).left_out_errors
    for left_out in (0, 5):
        kept_runs = [run for index, run in enumerate(runs) if index != left_out]
        (refitted,) = log_errors([runs[left_out]], fit_time(kept_runs, prior).constants)
        assert errors[left_out] == pytest.approx(refitted, abs=0.015)
    assert max(map(abs, errors)) > 0.02, "the comparison says something"


def test_constants_of_what_nobody_measured_may_move_further():
    runs = measured(BASE.time, 2)
    assert level_sd_of(runs, replace(BASE, errors=None)) == LEVEL_SD
    assert level_sd_of(runs, load_profile("jax")) > 1.5 * LEVEL_SD


def test_ten_runs_teach_the_order_of_layouts():
    """Where exposed calls of tp take three times as long, 10 runs lower the errors of other runs to less than half."""
    truth = replace(BASE.time, tp_calls=3 * BASE.time.tp_calls)
    learned = fit(measured(truth, 10, seed=2)).profile.time
    others = [case for case in measured(truth, 30, seed=3) if case.run.spec.layout.tp > 1]
    assert median_error(others, learned) < 0.5 * median_error(others, BASE.time)


def test_a_calibration_says_which_constants_moved_and_what_each_is_worth():
    """More exposed calls of tensor parallelism change the order of layouts, so that they may move far."""
    truth = replace(BASE.time, tp_calls=3 * BASE.time.tp_calls)
    runs = measured(truth, 12)
    moved = moved_constants(fit(runs).profile, BASE, runs)
    constant = moved[0]
    assert constant.name == "tp_calls"
    assert constant.after > 1.5 * constant.before == 1.5 * BASE.time.tp_calls
    assert constant.worth > 0.01
    assert next(moved_lines(moved)).startswith("tp_calls moved from 8 to ")
    assert moved_constants(BASE, BASE, runs) == []


def test_batches_within_two_percent_are_one_cell_ranked_by_tokens_per_second():
    """Two batches that differ little are compared at the smaller one; a third one is a cell of its own."""
    times_s = {50: 10.0, 51: 10.1, 55: 9.0}
    runs = [run_of(spec_of(Layout(dp=8, gas=gas)), time_s) for gas, time_s in times_s.items()]
    (near, near_runs), (far, far_runs) = cells_of(cases(runs)[0], BASE).items()
    assert (near.gbs, far.gbs, len(far_runs)) == (400, 440, 1)
    assert [run.step_time_s for run in near_runs] == [10.0, pytest.approx(10.1 * 50 / 51)]
    predicted = [run.prediction.step_time_s for run in near_runs]
    assert predicted[0] == pytest.approx(predicted[1], rel=0.01)


def test_the_profile_is_that_of_the_program_that_ran():
    spec = spec_of(Layout(dp=8), "1B")
    assert default_profile(cases([run_of(spec, 1.0)])[0]) == "ultrabench"
    other = replace(spec, kernel=replace(spec.kernel, name="nemo", kind="command", command=("nemo",)))
    with refused(match=r"the runs used nemo on cuda; .*--profile"):
        default_profile(cases([run_of(other, 1.0)])[0])


def test_health_follows_from_the_probe_of_the_job_alone():
    """Sizes that differ from those of other rows are no doubt: a run is predicted with its own."""
    spec, other = spec_of(Layout(dp=32), "1B", nodes=4), "other_architecture"
    links = {"allreduce_intra_node_busbw_bytes_per_s": 430e9, "allgather_busbw_bytes_per_s": 220e9}
    slower, in_node = "with slower links than other jobs", "with slow links in the node"
    runs = (
        ({"allreduce_busbw_bytes_per_s": 200e9, **links}, ""),
        ({"allreduce_busbw_bytes_per_s": 210e9, **links}, ""),
        ({"allreduce_busbw_bytes_per_s": 120e9, **links}, slower),
        ({"allreduce_intra_node_busbw_bytes_per_s": 200e9}, in_node),
        ({"step_time_s": 99.0}, ""),  # a slow run without a probe is no sign of ill links
        ({"suspect_codes": [other]}, ""),
        ({"suspect_codes": ["before the fix"]}, "in doubt: before the fix"),
        ({"suspect_codes": [other, "before the fix"]}, "in doubt: before the fix"),
        (
            {"suspect": "other programs used 40% of the cores", "suspect_codes": ["foreign_load"]},
            "in doubt: foreign_load",
        ),
        # Processes of one host have no links that could be broken.
        ({"hardware": "cpu", "allreduce_intra_node_busbw_bytes_per_s": 4e8}, ""),
    )
    compared, left_out = cases([run_of(spec, 1.0, **columns) for columns, _ in runs])
    assert (exclusions(compared), left_out) == ([reason for _, reason in runs], {})


def test_metrics_of_a_perfect_and_of_a_wrong_prediction(tmp_path):
    compared = measured(BASE.time, 30, noise=0)
    exact = metrics(table(compared, lambda case: BASE).assign(gbs=64))
    all_ = exact["all"]
    assert (all_["rows"], all_["excluded"], all_["more_than_twice"]) == (30, 0, 0)
    exactly = {"rows": 30, "median_error": 0, "p90_error": 0, "spearman_in_cell": 1}
    assert all_["step_time"] == pytest.approx(exactly)
    assert all_["planning"] == {"best_in_top5": 1.0, "top1_regret": 0.0}
    assert all_["interval"]["coverage"] == 1.0
    by = {name: sum(part["rows"] for part in parts.values()) for name, parts in all_["by"].items()}
    assert by == {"model": 30, "nodes": 30, "parallelism": 30}
    slow = replace(BASE, time=replace(BASE.time, gemm_efficiency=0.1))
    rows = table(compared, lambda case: slow)
    wrong = metrics(rows)["healthy"]
    assert wrong["step_time"]["median_error"] > 1
    assert wrong["interval"]["coverage"] < 0.2
    drawn, empty = (
        render(lambda rows=rows: validation_figure(rows, "ultrabench"), tmp_path / "f.svg")
        for rows in (rows, rows.assign(healthy=False))
    )
    assert b"30 runs: profile ultrabench" in drawn
    assert b"0 runs" in empty


def test_a_cell_has_runs_of_the_same_model_and_batch_and_enough_of_them():
    rows = table(measured(BASE.time, 30, noise=0), lambda case: BASE)
    of_8b = rows[(rows.model == "8B") & (rows.nodes == 1)].assign(gbs=64)
    for column in ("model_id", "gbs"):
        slow = of_8b.assign(step_time_s=9 * of_8b.step_time_s, **{column: 1})
        scores = metrics(pd.concat([of_8b, slow]))["all"]
        assert scores["step_time"]["spearman_in_cell"] == pytest.approx(1)
    few = metrics(of_8b.head(4))["all"]
    assert few["step_time"]["spearman_in_cell"] is None
    assert few["planning"] == {"best_in_top5": None, "top1_regret": None}


def test_a_model_that_is_left_out_is_scored_with_the_constants_of_the_others():
    exact = measured(TRUTH, 24)
    slow = {"1B": 1, "8B": 9}
    mixed = changed(exact, step_time_s=lambda run: run.step_time_s * slow[run.spec.shape.name])
    profiles = profiles_without_group(mixed, BASE, "model")
    right, wrong = ([c for c in exact if c.run.spec.shape.name == model] for model in ("8B", "1B"))
    assert median_error(right, profiles["8B"].time) < 0.1
    assert median_error(wrong, profiles["1B"].time) > 0.3


def test_the_memory_of_a_model_that_is_left_out_is_fitted_to_the_others():
    reserved = changed(measured(NANOTRON.time, 16), peak_mem_reserved_rank0_bytes=2**34)
    for model, profile in profiles_without_group(reserved, NANOTRON, "model").items():
        others = [case.run for case in reserved if case.run.spec.shape.name != model]
        assert profile.memory == to_dict(fit_memory(others, NANOTRON_MEMORY)) != to_dict(NANOTRON_MEMORY)


def test_intervals_hold_what_they_promise():
    noisy = measured(BASE.time, 60, noise=0.1)
    errors = [case.log_error(BASE.time) for case in noisy]
    ranges = intervals(noisy, errors)
    low, high = ranges["all"]
    assert sum(low <= error <= high for error in errors) / len(errors) == pytest.approx(0.8, abs=0.05)
    assert set(ranges) == {"all", "fast"}
    before = {"all": Quantiles(-0.4, 0.4), "slow": Quantiles(-0.6, 0.2)}
    few = intervals(noisy[:5], [0.01] * 5, before)
    assert few["all"] == pytest.approx((-0.4 * 30 / 35, (0.01 * 5 + 0.4 * 30) / 35))
    assert few["slow"] == pytest.approx((-0.6 * 30 / 35, (0.01 * 5 + 0.2 * 30) / 35))
    assert few["fast"][1] == pytest.approx((0.01 * 5 + few["all"][1] * 30) / 35)


FLAT = spec_of(Layout(dp=1, tp=8), "8B")
PIPELINE = spec_of(Layout(dp=1, tp=4, pp=2, gas=8, pp_schedule="1f1b"), "8B")


@pytest.mark.parametrize(
    ("spec", "job_id", "kernel_version", "version"),
    [
        (FLAT, "13500000", "before_pp_fix", "old"), (FLAT, "14113488", "after_pp_fix", "latest"),
        (PIPELINE, "13500000", "before_pp_fix", "before-fix"), (PIPELINE, "14099000", "after_pp_fix", "run-ahead"),
        (PIPELINE, "14113488", "after_pp_fix", "latest"), (FLAT, "", "before_pp_fix", "latest"),
    ],
)  # fmt: skip
def test_a_row_tells_the_version_that_made_it(spec, job_id, kernel_version, version):
    run = run_of(spec, 1.0, source="runs.csv", job_id=job_id, kernel_version=kernel_version)
    assert nanotron_version(run) == version
    assert nanotron_version(replace(run, source=None, kernel_version=None)) == "latest"  # of another cluster


def test_memory_is_compared_with_the_version_that_made_the_row():
    columns = {"peak_mem_reserved_rank0_bytes": 2**34, "source": "runs.csv", "kernel_version": "after_pp_fix"}
    runs = [
        run_of(PIPELINE, 1.0, job_id="14099000", suspect_codes=["broken_nvlink"], **columns),
        run_of(PIPELINE, 1.0, job_id="14113488", **columns),
        run_of(spec_of(Layout(dp=8, mbs=64), "8B"), None, status="oom"),
    ]
    rows = table(cases(runs)[0], lambda case: NANOTRON)
    ahead, latest, oom = rows.predicted_peak_mem_bytes
    assert ahead > latest
    assert oom == pytest.approx(0.967 * GPUS.mem_bytes)
    good, whole = metrics(rows).values()
    assert (good["rows"], good["excluded"], good["step_time"]["rows"]) == (2, 1, 1)
    assert (good["memory"], good["oom"]) == (whole["memory"], whole["oom"])  # ill links do not change memory
    expected = {"rows": 3, "accuracy": 1.0, "borderline_accuracy": None, "false_prune": 0.0, "caught": 1.0}
    assert whole["oom"] == expected
    assert whole["memory"]["rows"] == 2
    assert whole["memory"]["median_error"] == pytest.approx((ahead / 2**34 - 1 + latest / 2**34 - 1) / 2)
