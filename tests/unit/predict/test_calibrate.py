import math
import random
from dataclasses import replace
from itertools import product

import pandas as pd
import pytest
import yaml

from tests.unit.predict.test_step_time import GPUS, PEAK, spec_of
from ultrabench.analysis.figures.picture import render
from ultrabench.analysis.figures.plots.predicted import validated
from ultrabench.analysis.measured import MeasuredRun
from ultrabench.analysis.predict.calibrate import calibrate, to_yaml
from ultrabench.analysis.predict.cases import cases, default_profile, exclusions
from ultrabench.analysis.predict.fit import fit_constants, fit_time, intervals
from ultrabench.analysis.predict.nanotron import fit_memory, nanotron_version, usable
from ultrabench.analysis.predict.replay import cells_of
from ultrabench.analysis.predict.validate import metrics, table, without_own_group
from ultrabench.errors import ConfigError
from ultrabench.layout import Layout
from ultrabench.record import to_dict
from ultrabench.sweep.config.load import load_profile
from ultrabench.sweep.predict.memory import memory_constants
from ultrabench.sweep.predict.nanotron_memory import nanotron_memory
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.predict.profile import Quantiles
from ultrabench.sweep.predict.step_time import predict_step_time

BASE = load_profile("ultrabench")
TRUTH = replace(
    BASE.time, gemm_efficiency=0.55, layer_launch_s=1.4e-3, layer_launch_tp_s=2e-3, dp_link_efficiency=0.5
)
"""A card of less power and a faster host than the profile knows."""


def run_of(spec, time_s, **columns):
    empty = dict.fromkeys(MeasuredRun.__dataclass_fields__)
    given = {
        "run_id": spec.run_id, "spec": spec, "hardware": "h100x8", "peak_flops_per_s": 989e12,
        "is_final": True,
    }  # fmt: skip
    return MeasuredRun(**{**empty, **given, "status": "ok", "step_time_s": time_s, **columns})


def measured(constants, count, *, noise=0.01, seed=0):
    """Runs as they would be with these constants."""
    chance, runs = random.Random(seed), []
    choices = list(product(("1B", "8B"), (1, 2), (1, 2, 8), (1, 2, 4), (0, 1)))
    for model, nodes, tp, mbs, zero_stage in chance.sample(choices, count):
        dp = 8 * nodes // tp
        spec = spec_of(
            Layout(dp=dp, tp=tp, mbs=mbs, gas=64 // dp, zero_stage=zero_stage if dp > 1 else 0),
            model,
            nodes=nodes,
        )
        time_s = predict_step_time(spec, GPUS, PEAK, network(GPUS, nodes), constants).total
        runs.append(run_of(spec, time_s * math.exp(chance.gauss(0, noise))))
    return cases(runs)[0]


def median_error(given, constants):
    return pd.Series([abs(case.log_error(constants)) for case in given]).median()


@pytest.fixture(scope="module")
def fitted():
    return calibrate(measured(TRUTH, 20), BASE, name="mine", date="2026-11-22")


def test_a_few_runs_make_a_profile_that_predicts_others(fitted):
    others = measured(TRUTH, 30, seed=1)
    assert fitted.fitted == {"step_time": 20, "memory": 0}
    assert "fitted to 20 runs, memory of profile ultrabench, intervals of 20" in fitted.profile.source
    assert fitted.after["median_error"] < fitted.before["median_error"] / 3
    assert median_error(others, BASE.time) > 0.1
    assert median_error(others, fitted.profile.time) < 0.03
    assert fitted.profile.prior == "ultrabench"
    assert fitted.profile.quality["median_error"] == fitted.after["median_error"]


def test_the_file_of_a_profile_is_read_back(fitted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ultrabench" / "profiles" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(to_yaml(fitted.profile, BASE))
    again = load_profile("mine")
    assert (again.name, again.framework, again.memory) == ("mine", "ultrabench", BASE.memory)
    assert again.measured == fitted.profile.measured
    specs = [case.run.spec for case in measured(TRUTH, 20)]
    assert again.measured["tp"] == (min(s.layout.tp for s in specs), max(s.layout.tp for s in specs))
    assert median_error(measured(TRUTH, 9, seed=2), again.time) < 0.03
    assert again.time.gemm_efficiency == pytest.approx(fitted.profile.time.gemm_efficiency, rel=1e-3)


def test_the_soft_maximum_of_gpu_and_host_is_at_most_their_sum():
    prior = replace(BASE.time, smooth_power=1.2)
    found = fit_constants(
        prior, ["smooth_power"], lambda now: [now.smooth_power - 0.4], scale=0.1, ridge=0.25
    )
    assert found.smooth_power == 1


def test_noise_alone_does_not_make_a_profile_worse():
    for seed in range(2):
        found = calibrate(measured(BASE.time, 8, noise=0.05, seed=seed), BASE, name="mine", date="2026-11-22")
        assert median_error(measured(BASE.time, 40, noise=0, seed=9), found.profile.time) < 0.03
        if found.after["median_error"] >= found.before["median_error"]:
            assert found.fitted["step_time"] == 0
            assert found.profile.source.startswith("step time of profile ultrabench, ")
            assert found.profile.time == BASE.time


def test_the_memory_of_nanotron_is_fitted_to_what_runs_reserved(fitted):
    prior = memory_constants("nanotron", load_profile("nanotron").memory)
    truth = replace(prior, layer_hidden=30.0, base_bytes=5e8)
    runs = []
    for case in measured(BASE.time, 40):
        peak = int(nanotron_memory(case.run.spec, truth)[0].peak_bytes)
        runs.append(replace(case.run, peak_mem_reserved_rank0_bytes=peak))
    failed = replace(runs[0], status="oom", peak_mem_reserved_rank0_bytes=10**9)
    known = usable([*runs, failed])
    assert failed not in known
    found = fit_memory(known, prior)
    assert found.layer_hidden == pytest.approx(30.0, rel=0.1)
    given = ("layer_ffn", "logits", "latest_limit")
    assert all(getattr(found, name) == getattr(prior, name) for name in given)
    few, nanotron = cases(known[:10])[0], load_profile("nanotron")
    mine = calibrate(few, nanotron, name="mine", date="2026-11-22")
    assert mine.memory["after"]["median_error"] < mine.memory["before"]["median_error"] / 2
    written = yaml.safe_load(to_yaml(mine.profile, nanotron))["memory"]
    assert memory_constants("nanotron", written).layer_hidden > 26
    assert fitted.memory == {}


def test_too_few_runs_are_one_line_with_the_remedy():
    with pytest.raises(ConfigError, match="4 healthy runs with a step time; a fit needs at least 5"):
        calibrate(measured(TRUTH, 4), BASE, name="mine", date="2026-11-22")
    runs = [case.run for case in measured(TRUTH, 7)]
    runs[0], runs[1] = replace(runs[0], suspect="throttled"), replace(runs[1], status="oom", step_time_s=None)
    runs[2] = replace(runs[2], allreduce_intra_node_busbw_bytes_per_s=1e11)
    left_out = "1 in doubt: throttled, 1 with status oom and no step time, 1 with slow links in the node"
    with pytest.raises(ConfigError, match=left_out):
        calibrate(cases(runs)[0], BASE, name="mine", date="2026-11-22")


@pytest.mark.parametrize("factor", [1000, 0.1])
def test_step_times_in_another_unit_make_no_profile(factor):
    runs = [replace(case.run, step_time_s=factor * case.run.step_time_s) for case in measured(BASE.time, 20)]
    with pytest.raises(ConfigError, match=r"half of 20 runs are off by .* check the seconds, hardware"):
        calibrate(cases(runs)[0], BASE, name="mine", date="2026-11-22")


def test_no_efficiency_is_above_1():
    fast = replace(BASE.time, gemm_efficiency=0.99, attention_efficiency=0.99)
    runs = [replace(case.run, step_time_s=0.6 * case.run.step_time_s) for case in measured(fast, 30)]
    found = fit_time(cases(runs)[0], fast)
    assert found.gemm_efficiency == 1
    with pytest.raises(ConfigError, match=r"gemm_efficiency=30.0; must be 0 to 1"):
        replace(BASE.time, gemm_efficiency=30.0)


def test_what_no_prediction_can_be_compared_with_is_counted():
    spec = spec_of(Layout(dp=8), "1B")
    given, left_out = cases([
        run_of(spec, 1.0), run_of(spec, None, status="oom"), run_of(spec, None, status="crash"),
        run_of(spec, 1.0, suspect="other batch: gbs=16"), run_of(spec, 1.0, is_final=False),
        run_of(spec, -1.0), run_of(spec, 0.0), run_of(spec, math.nan),
    ])  # fmt: skip
    assert [case.run.status for case in given] == ["ok", "oom", "ok"]
    assert left_out == {"status crash": 1, "not final": 1, "with a step time that is not above 0 s": 3}
    assert not cells_of(given[2:], BASE)  # nothing in doubt is replayed
    assert cells_of(given[:1], BASE)
    assert default_profile(given) == "ultrabench"
    with pytest.raises(ConfigError, match="unknown hardware 'h101x8'; did you mean h100x8"):
        cases([run_of(spec, 1.0, hardware="h101x8")])
    other = spec_of(Layout(dp=8), "1B")
    other = replace(other, kernel=replace(other.kernel, name="nemo", kind="command", command=("nemo",)))
    with pytest.raises(ConfigError, match=r"runs are of nemo on cuda; .*--profile"):
        default_profile(cases([run_of(other, 1.0)])[0])


def test_health_follows_from_the_probe_of_the_job_alone():
    spec = spec_of(Layout(dp=32), "1B", nodes=4)
    rates = {"allreduce_intra_node_busbw_bytes_per_s": 430e9, "allgather_busbw_bytes_per_s": 220e9}
    runs = [run_of(spec, 1.0, allreduce_busbw_bytes_per_s=rate, **rates) for rate in (200e9, 210e9, 120e9)]
    runs.append(run_of(spec, 1.0, allreduce_intra_node_busbw_bytes_per_s=200e9))
    runs.append(run_of(spec, 99.0))  # a slow run without a probe is no sign of ill links
    other = "other architecture: num_key_value_heads=8"  # it is predicted with its own sizes
    doubts = other, "before the fix", f"{other}; before the fix"
    runs += [run_of(spec, 1.0, suspect=doubt) for doubt in doubts]
    slower, in_node, doubt = (
        "with slower links than other jobs",
        "with slow links in the node",
        "in doubt: before the fix",
    )
    assert exclusions(cases(runs)[0]) == ["", "", slower, in_node, "", "", doubt, doubt]
    simulated = run_of(
        spec_of(Layout(dp=2), "1B"), 1.0, hardware="cpu", allreduce_intra_node_busbw_bytes_per_s=4e8
    )
    assert exclusions(cases([simulated])[0]) == [
        ""
    ]  # processes of one host have no links that could be broken


def test_metrics_of_a_perfect_and_of_a_wrong_prediction(tmp_path):
    given = measured(BASE.time, 30, noise=0)
    exact = metrics(table(given, lambda case: BASE).assign(gbs=64))
    assert set(exact) == {"healthy", "all"}
    all_ = exact["all"]
    assert (all_["rows"], all_["excluded"], all_["more_than_twice"]) == (30, 0, 0)
    assert all_["step_time"] == {
        "rows": 30, "median_error": 0.0, "p90_error": 0.0, "spearman_in_cell": pytest.approx(1),
    }  # fmt: skip
    assert all_["planning"] == {"best_in_top5": 1.0, "top1_regret": 0.0}
    assert all_["interval"]["coverage"] == 1.0
    assert set(all_["by"]) == {"model", "nodes", "parallelism"}
    assert set(all_["by"]["model"]) == {"1B", "8B"}
    assert all_["by"]["nodes"]["1"]["rows"] + all_["by"]["nodes"]["2"]["rows"] == 30
    slow = replace(BASE, time=replace(BASE.time, gemm_efficiency=0.1))
    rows = table(given, lambda case: slow)
    wrong = metrics(rows)["healthy"]
    assert wrong["step_time"]["median_error"] > 1
    assert wrong["interval"]["coverage"] < 0.2
    drawn = render(lambda: validated(rows, "ultrabench"), tmp_path / "f.svg")
    for word in (b"30 runs: profile ultrabench", b"predicted step time (s)", b"measured / predicted", b"8B"):
        assert word in drawn
    assert b"0 runs" in render(
        lambda: validated(rows.assign(healthy=False), "ultrabench"), tmp_path / "f.svg"
    )


def test_a_cell_has_runs_of_the_same_model_and_batch_and_enough_of_them():
    rows = table(measured(BASE.time, 30, noise=0), lambda case: BASE)
    of_8b = rows[(rows.model == "8B") & (rows.nodes == 1)].assign(gbs=64)
    for column in ("num_params", "gbs"):
        slow = of_8b.assign(step_time_s=9 * of_8b.step_time_s, **{column: 1})
        found = metrics(pd.concat([of_8b, slow]))["all"]
        assert found["step_time"]["spearman_in_cell"] == pytest.approx(1)
    few = metrics(of_8b.head(4))["all"]
    assert few["step_time"]["spearman_in_cell"] is None
    assert few["planning"] == {"best_in_top5": None, "top1_regret": None}


def test_a_model_that_is_left_out_is_scored_with_the_constants_of_the_others():
    given = measured(TRUTH, 24)
    mixed = [
        case
        if case.run.spec.shape.name == "1B"
        else replace(case, run=replace(case.run, step_time_s=9 * case.run.step_time_s))
        for case in given
    ]
    fitted = without_own_group(mixed, BASE, "model")
    assert median_error([c for c in given if c.run.spec.shape.name == "8B"], fitted["8B"].time) < 0.1
    assert median_error([c for c in given if c.run.spec.shape.name == "1B"], fitted["1B"].time) > 0.3


def test_the_memory_of_a_model_that_is_left_out_is_fitted_to_the_others():
    nanotron = load_profile("nanotron")
    prior = memory_constants("nanotron", nanotron.memory)
    runs = [replace(case.run, peak_mem_reserved_rank0_bytes=2**34) for case in measured(nanotron.time, 16)]
    fitted = without_own_group(cases(runs)[0], nanotron, "model")
    for own, other in (("1B", "8B"), ("8B", "1B")):
        others = [run for run in runs if run.spec.shape.name == other]
        assert fitted[own].memory == to_dict(fit_memory(others, prior))
        assert fitted[own].memory != to_dict(prior)


def test_intervals_hold_what_they_promise():
    given = measured(BASE.time, 60, noise=0.1)
    errors = [case.log_error(BASE.time) for case in given]
    found = intervals(given, errors)
    low, high = found["all"]
    assert sum(low <= error <= high for error in errors) / len(errors) == pytest.approx(0.8, abs=0.05)
    assert set(found) == {"all", "fast"}
    before = {"all": Quantiles(-0.4, 0.4), "slow": Quantiles(-0.6, 0.2)}
    few = intervals(given[:5], [0.01] * 5, before)
    assert few["all"] == pytest.approx((-0.4 * 30 / 35, (0.01 * 5 + 0.4 * 30) / 35))
    assert few["slow"] == pytest.approx((-0.6 * 30 / 35, (0.01 * 5 + 0.2 * 30) / 35))
    assert few["fast"][1] == pytest.approx((0.01 * 5 + few["all"][1] * 30) / 35)


def test_memory_is_compared_with_the_version_that_made_the_row():
    spec, pipeline = (
        spec_of(Layout(dp=1, tp=8), "8B"),
        spec_of(Layout(dp=1, tp=4, pp=2, gas=8, pp_schedule="1f1b"), "8B"),
    )
    versions = [
        nanotron_version(run_of(given, 1.0, source="runs.csv", job_id=job, kernel_version=version))
        for given, job, version in (
            (spec, "13500000", "before_pp_fix"), (spec, "14113488", "after_pp_fix"),
            (pipeline, "13500000", "before_pp_fix"), (pipeline, "14099000", "after_pp_fix"),
            (pipeline, "14113488", "after_pp_fix"),
        )
    ]  # fmt: skip
    assert versions == ["old", "latest", "before-fix", "run-ahead", "latest"]
    assert nanotron_version(run_of(spec, 1.0, job_id="12")) == "latest"  # a job of another cluster
    profile = load_profile("nanotron")
    held = {"peak_mem_reserved_rank0_bytes": 2**34, "source": "runs.csv"}
    runs = [
        run_of(pipeline, 1.0, job_id=job, suspect=doubt, kernel_version="after_pp_fix", **held)
        for job, doubt in (("14099000", "broken NVLink"), ("14113488", None))
    ]
    failed = run_of(spec_of(Layout(dp=8, mbs=64), "8B"), None, status="oom")
    rows = table(cases([*runs, failed])[0], lambda case: profile)
    ahead, latest, oom = rows.predicted_peak_mem_bytes
    assert ahead > latest
    assert oom == pytest.approx(0.956 * GPUS.mem_bytes)
    good, found = metrics(rows).values()
    assert (good["rows"], good["excluded"], good["step_time"]["rows"]) == (2, 1, 1)
    assert (good["memory"], good["oom"]) == (found["memory"], found["oom"])  # ill links do not change memory
    assert found["memory"]["rows"] == 2
    oom = {"rows": 3, "accuracy": 1.0, "borderline_accuracy": None, "false_prune": 0.0, "caught": 1.0}
    assert found["oom"] == oom
    assert found["memory"]["median_error"] == pytest.approx((ahead / 2**34 - 1 + latest / 2**34 - 1) / 2)
