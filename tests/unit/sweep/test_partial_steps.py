"""Which runs are measured by parts of a step, and by which."""

import pytest

from tests.configs import refused
from ultrabench.layout import Layout
from ultrabench.partial_step import Slice
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.partial_steps import auto_slice, listed_slice


def layout(gas, pp=1, schedule=None, **axes):
    return Layout(dp=1, pp=pp, gas=gas, pp_schedule=schedule or ("none" if pp == 1 else "1f1b"), **axes)


@pytest.mark.parametrize(("axes", "sizes"), [
    ({}, (2, 4, 6)),
    ({"pp": 4}, (4, 8, 12)),
    ({"pp": 4, "schedule": "interleaved", "virtual_stages": 2}, (8, 16, 24)),
    ({"pp": 4, "schedule": "zbv", "virtual_stages": 2}, (7, 14, 21)),
])  # fmt: skip
def test_auto_chooses_the_least_linear_size(axes, sizes):
    g1, g2, third = sizes
    least_gas = 3 * g2
    if axes.get("schedule") == "interleaved":
        least_gas = 64
    assert auto_slice(layout(least_gas, **axes)) == Slice(g1=g1, g2=g2, third=third, wider=third)
    assert f"is less than 3 * {g2} micro-batches" in auto_slice(layout(3 * g2 - 4, **axes))


def test_layouts_that_auto_measures_whole():
    assert "afab keeps all micro-batches" in auto_slice(layout(64, pp=4, schedule="afab"))
    # Torch cuts 66 micro-batches of pp=3 into 22 rounds of 3, and 64 of pp=5 into none of equal size.
    uneven = layout(33, pp=4, schedule="interleaved", virtual_stages=2)
    assert "is less than" in auto_slice(uneven) or "rounds of" in auto_slice(uneven)


@pytest.mark.parametrize(("axes", "pair", "expected"), [
    ({"gas": 8}, (2, 4), Slice(g1=2, g2=4, third=6)),
    ({"gas": 5}, (2, 4), Slice(g1=2, g2=4, third=5)),
    ({"gas": 4}, (2, 4), "gas=4 is not more than g2=4"),
    ({"gas": 16, "pp": 4}, (2, 4), "gas=2 is less than pp-1=3"),
    ({"gas": 32, "pp": 4, "schedule": "zbv", "virtual_stages": 2}, (4, 8), "needs 7 micro-batches; 4 given"),
    ({"gas": 32, "pp": 4, "schedule": "interleaved", "virtual_stages": 2}, (8, 12), Slice(g1=8, g2=12, third=16)),
    ({"gas": 32, "pp": 4, "schedule": "interleaved", "virtual_stages": 2}, (4, 12), "needs 8 micro-batches; 4 given"),
])  # fmt: skip
def test_listed_sizes_are_taken_where_the_schedule_allows_them(axes, pair, expected):
    slice_or_reason = listed_slice(layout(**axes), *pair)
    assert slice_or_reason == expected if isinstance(expected, Slice) else expected in slice_or_reason


@pytest.mark.parametrize(("value", "message"), [
    ("[4,4]", "measure.partial_steps=[4, 4]; needs [g1, g2] with 0 < g1 < g2"),
    ("[0,4]", "measure.partial_steps=[0, 4]; needs [g1, g2] with 0 < g1 < g2"),
    ("[2]", "must be off, auto or two numbers of micro-batches [g1, g2]"),
    ("yes", "measure.partial_steps='yes'; must be off, auto or two numbers of micro-batches [g1, g2]"),
])  # fmt: skip
def test_other_values_of_partial_steps_are_refused(value, message):
    with refused(message):
        load_config(["hardware=cpu", f"measure.partial_steps={value}"])


@pytest.mark.parametrize(
    ("value", "loaded"), [("off", "off"), ("auto", "auto"), ("[2,4]", (2, 4)), ("false", "off")]
)
def test_partial_steps_are_off_unless_asked_for(value, loaded):
    assert load_config(["hardware=cpu"]).measure.partial_steps == "off"
    assert load_config(["hardware=cpu", f"measure.partial_steps={value}"]).measure.partial_steps == loaded
