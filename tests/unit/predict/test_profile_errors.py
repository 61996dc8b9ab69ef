"""The errors of a profile: what they add to an interval, and which layouts they call unproven."""

import math
import re
from dataclasses import replace

import pytest

from tests.unit.predict.test_step_time import spec_of
from ultrabench.errors import ConfigError
from ultrabench.layout import Layout
from ultrabench.sweep.config.load import load_hardware, load_profile
from ultrabench.sweep.extrapolation import unproven
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.predict.profile import Quantiles
from ultrabench.sweep.predict.profile_errors import SD_80, LayoutKind, ProfileErrors, kind_of

H100 = load_hardware("h100x8")
USUAL = LayoutKind(
    gpu="H100-SXM", experts="none", precision="bf16", pp="some", ep="none", seq_len="usual", rows=9
)
SPARSE = replace(USUAL, gpu="B200", experts="some", pp="none", ep="inside", rows=3)
OVER_PROGRAMS = {"gpu": 0.3, "experts": 0.2, "precision": 0.1, "pp": 0.05, "ep": 0.15, "seq_len": 0.12}
ERRORS = ProfileErrors(
    program="Megatron",
    date="2026-11-29",
    settings=4,
    kinds=(USUAL, SPARSE),
    spread={"gpu": {"H100-SXM": 0.04, "B200": 0.06}, "experts": {"none": 0.03, "some": 0.08},
            "precision": {"bf16": 0.0}, "pp": {"some": 0.0, "none": 0.0}, "ep": {"none": 0.0, "inside": 0.0},
            "seq_len": {"usual": 0.0}},
    over_programs=OVER_PROGRAMS,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "spreads"),
    [
        ({}, (0.04, 0.03)),
        ({"experts": "some"}, (0.04, 0.08)),
        ({"gpu": "H200"}, (0.3, 0.03)),
        (
            {"gpu": "H200", "ep": "across", "precision": "fp8", "seq_len": "long"},
            (0.3, 0.03, 0.15, 0.1, 0.12),
        ),
    ],
)
def test_the_errors_of_the_values_of_a_kind_add_up_and_unmeasured_ones_differ_as_over_programs(
    changes, spreads
):
    assert ERRORS.spread_of(replace(USUAL, **changes)) == pytest.approx(math.hypot(*spreads))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        ({"experts": "some", "ep": "inside", "gpu": "B200"}, None),
        ({"gpu": "H200"}, "Megatron on H200"),
        ({"gpu": "H200", "experts": "some", "ep": "inside"}, "Megatron with experts on H200"),
        ({"experts": "some", "ep": "inside"}, "Megatron with experts on H100-SXM"),
        ({"gpu": "B200"}, "Megatron with a dense model on B200"),
        ({"precision": "fp8"}, "Megatron in fp8"),
        ({"gpu": "B200", "experts": "some", "ep": "across", "seq_len": "long"},
         "Megatron with ep over several NVLink domains with sequences of more than 8,192 tokens"),
        ({"gpu": "H200", "experts": "some", "ep": "inside", "precision": "fp8"},
         "Megatron with experts in fp8 on H200"),
    ],
)  # fmt: skip
def test_a_kind_is_unproven_where_a_value_or_its_gpu_with_such_a_model_was_not_measured(changes, sentence):
    fact = ERRORS.unproven(replace(USUAL, **changes))
    assert fact == (sentence and f"no measurement of {sentence}")


def test_an_interval_has_the_spread_of_its_kind():
    profile = replace(
        load_profile("megatron"), interval={"all": Quantiles(-0.1, 0.2)}, errors=ERRORS, measured={}
    )
    spec, links = spec_of(Layout(dp=4, pp=2, pp_schedule="1f1b", gas=4)), network(H100, 1)
    width = SD_80 * 0.05
    quantiles = profile.interval_of(spec, "H100-SXM", links)
    assert quantiles == pytest.approx((-math.hypot(0.1, width), math.hypot(0.2, width)))
    assert unproven([spec], profile, H100) == []
    assert unproven([spec], profile, load_hardware("h200x8")) == ["no measurement of Megatron on H200-SXM"]
    assert unproven([spec], replace(profile, errors=None), H100) == []


@pytest.mark.parametrize(
    ("ep", "nvlink_gpus", "value"), [(1, 8, "none"), (8, 8, "inside"), (16, 8, "across"), (16, 72, "inside")]
)
def test_the_kind_of_a_run_says_where_its_experts_are(ep, nvlink_gpus, value):
    kind = kind_of(spec_of(Layout(dp=16, ep=ep), "qwen3-30b-a3b", nodes=2), "H100-SXM", nvlink_gpus)
    assert (kind.experts, kind.ep, kind.pp, kind.seq_len) == ("some", value, "none", "usual")


def test_fitted_constants_have_their_errors_in_the_interval_of_the_fit():
    fitted = ERRORS.fitted_to([replace(USUAL, gpu="H200"), USUAL])
    assert fitted.rows == 14
    assert fitted.spread_of(USUAL) == fitted.spread_of(replace(USUAL, gpu="H200")) == 0
    assert fitted.spread_of(replace(USUAL, gpu="B200")) == pytest.approx(0.06)
    assert fitted.unproven(replace(USUAL, gpu="H200")) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spread": {"gpus": {"B200": 0.1}}}, "unknown factor of errors.spread 'gpus'"),
        ({"over_programs": {"gpu": 0.3}}, "errors.over_programs lacks experts, precision, pp, ep, seq_len"),
    ],
)
def test_errors_name_factors_that_exist(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        replace(ERRORS, **changes)
