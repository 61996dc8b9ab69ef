"""The errors of programs by factor: that they are found again, and that intervals hold for runs that are left out."""

import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from tests.unit.predict.test_step_time import spec_of
from ultrabench.analysis.studies.predictions.calibrate import errors_lines
from ultrabench.analysis.studies.predictions.error_factors import (
    ErrorRow,
    cross_validated,
    errors_by_factor,
    fit_effects,
    with_errors,
)
from ultrabench.layout import Layout
from ultrabench.record import from_dict
from ultrabench.sweep.config.load import load_hardware, load_profile
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.predict.profile_errors import FACTORS, ProfileErrors, kind_of

HARDWARE = {name: load_hardware(name) for name in ("h100x8", "b200x8", "a100-80x8")}
PROFILES = [
    replace(load_profile("megatron"), name=name, errors=None, measured={})
    for name in ("alpha", "beta", "gamma")
]
MEAN = {"alpha": 0.1, "beta": -0.1, "gamma": 0.0, "b200x8": 0.3, "h100x8": 0.0, "a100-80x8": -0.05}
"""Program or hardware -> the mean error that it adds."""
SD = {"none": 0.08, "some": 0.25}
"""Without and with experts -> the spread of the errors."""
SPECS = {
    "8B": spec_of(Layout(dp=16), "8B", nodes=2),
    "qwen3-30b-a3b": spec_of(Layout(dp=16, ep=8), "qwen3-30b-a3b", nodes=2),
}


def runs(seed, num_settings=60, rows_per_setting=3, correlation=0.5):
    """Errors of three programs on three GPUs; those of one setting are alike by `correlation`."""
    draw = random.Random(seed)
    rows = []
    for setting in range(num_settings):
        program, hardware = draw.choice(PROFILES).name, HARDWARE[draw.choice([*HARDWARE])]
        model = draw.choice(["8B", "8B", "qwen3-30b-a3b"])
        spec = SPECS[model]
        links = network(hardware, 2)
        kind = kind_of(spec, hardware.gpu_at_limit, links.nvlink_gpus)
        shared = draw.gauss(0, math.sqrt(correlation))
        for _ in range(rows_per_setting):
            noise = SD[kind.experts] * (shared + draw.gauss(0, math.sqrt(1 - correlation)))
            case = SimpleNamespace(run=SimpleNamespace(spec=spec), hardware=hardware, links=links)
            log_error = MEAN[program] + MEAN[hardware.name] + noise
            rows.append(
                ErrorRow(
                    case=case, profile=program, setting=(f"{model}-{setting}", kind.gpu, 16),
                    source=f"{program}-{setting % 5}", kind=kind, log_error=log_error, source_log_error=log_error,
                )
            )  # fmt: skip
    return rows


def test_a_value_adds_what_the_errors_of_its_runs_have_more_than_those_of_others():
    rows = runs(1, num_settings=200)
    effects = fit_effects(rows)
    for kind in {row.kind for row in rows}:
        factors = [("program", "gamma"), *((factor, getattr(kind, factor)) for factor in FACTORS)]
        variance = effects.variance + sum(effects.variances[key] for key in factors)
        errors = [row.log_error for row in rows if (row.kind, row.profile) == (kind, "gamma")]
        assert math.sqrt(variance) == pytest.approx(math.hypot(*errors) / math.sqrt(len(errors)), abs=0.06)
    assert effects.over_values("gpu") == math.sqrt(max(effects.variance, effects.variances["gpu", "B200"]))


def test_runs_of_one_setting_count_as_two_at_most():
    rows = runs(2, num_settings=1, rows_per_setting=50, correlation=1)
    many, few = (fit_effects([*rows[:n], *runs(3)]) for n in (50, 3))
    for key, variance in few.variances.items():
        assert many.variances[key] == pytest.approx(variance, abs=0.003)


def test_intervals_hold_for_other_settings_and_are_wider_for_other_programs():
    rows = runs(4)
    check = cross_validated(rows, PROFILES)
    shares = {
        kind: sum(run.is_inside for run in found) / len(found) for kind, found in check.runs_by_group.items()
    }
    assert all(0.75 <= share <= 0.95 for share in shares.values()), shares
    pooled = fit_effects(rows)
    shifted = [with_errors(p, pooled, rows, program=p.name, date="2026-11-29", check=check) for p in PROFILES]
    by_name = {profile.name: profile for profile in shifted}
    other_rows = runs(5, num_settings=100)
    is_inside = Counter()
    for row in other_rows:
        spec, links = row.case.run.spec, row.case.links
        low, high = by_name[row.profile].interval_of(spec, row.kind.gpu, links)
        is_inside[row.kind.experts, low <= row.log_error <= high] += 1
    for experts in SD:
        assert (
            0.72 <= is_inside[experts, True] / (is_inside[experts, True] + is_inside[experts, False]) <= 0.93
        )
    new = with_errors(load_profile("jax"), pooled, rows, program="JAX", date="2026-11-29", check=check)
    row = next(row for row in rows if (row.kind.experts, row.kind.gpu) == ("none", "H100-SXM"))
    spec, links = row.case.run.spec, row.case.links
    widths = [
        high - low
        for low, high in (p.interval_of(spec, row.kind.gpu, links) for p in (new, by_name["alpha"]))
    ]
    assert widths[0] > 1.5 * widths[1]
    assert new.errors.unproven(row.kind) == "no measurement of JAX"


def test_knobs_of_measured_runs_stay_known_where_errors_are_estimated_again():
    case = runs(7, num_settings=1)[0].case
    spec = replace(case.run.spec, variant={"flags.cuda_graph": "local"})
    with_knob = SimpleNamespace(run=SimpleNamespace(spec=spec), hardware=case.hardware, links=case.links)
    rows, profile = (
        [row._replace(profile="alpha", case=with_knob) for row in runs(7, num_settings=1)],
        PROFILES[0],
    )
    for _ in range(2):
        profile = with_errors(profile, fit_effects(rows), rows, program="Alpha", date="2026-11-29")
        assert profile.errors.knobs == {"cuda_graph": ("local",)}


def test_a_profile_with_an_interval_of_its_own_keeps_it():
    rows = [row._replace(profile="fitted") for row in runs(6, num_settings=3)]
    fitted = replace(PROFILES[0], name="fitted", quality={"median_error": 0.05})
    assert cross_validated(rows, [fitted]).runs_by_group == {"setting": [], "source": []}
    changed = with_errors(fitted, fit_effects(runs(4)), rows, program="fitted", date="2026-11-29")
    assert changed.interval == fitted.interval
    assert {*map(changed.errors.spread_of, changed.errors.kinds)} == {0.0}
    far = replace(changed.errors.kinds[0], gpu="MI300X")
    assert changed.errors.spread_of(far) == changed.errors.over_programs["gpu"] > 0.1


def test_errors_by_factor_name_each_value_and_what_is_left_out():
    rows = runs(4, num_settings=30)
    errors = errors_by_factor(rows, PROFILES)
    assert (errors["rows"], errors["settings"]) == (90, 30)
    assert errors["by"].keys() == {"program", "gpu", "experts", "precision", "pp", "ep", "seq_len"}
    assert sum(group["rows"] for group in errors["by"]["gpu"].values()) == 90
    usual, sparse = (errors["by"]["experts"][value] for value in ("none", "some"))
    assert usual["median_error"] < sparse["median_error"]
    assert all(0 <= sparse[name] <= 1 for name in ("inside", "settings_left_out", "sources_left_out"))
    one = errors_by_factor(rows[:3], PROFILES)
    assert one["settings_left_out"] is one["log_half_widths"]["settings_left_out"] is None


def test_the_errors_of_a_file_are_those_that_were_written():
    profile = with_errors(PROFILES[0], fit_effects(runs(4)), runs(4), program="Alpha", date="2026-11-29")
    text = "\n".join(errors_lines(profile.errors))
    read = from_dict(ProfileErrors, yaml.safe_load(text)["errors"], where="errors")
    assert read.kinds == profile.errors.kinds
    for kind in read.kinds:
        assert read.spread_of(kind) == pytest.approx(profile.errors.spread_of(kind), abs=3e-3)
