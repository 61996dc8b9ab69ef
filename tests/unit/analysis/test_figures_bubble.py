"""The figure of bubbles: formulas, and measured runs against their like without a pipeline."""

import random

import pytest

from tests.unit.analysis.tables import row, table_of
from tests.unit.analysis.test_figures_runs import drawn
from ultrabench.analysis.figures.kinds import prepared
from ultrabench.analysis.figures.plots.bubble import points


def piped(run_id, pp=2, dp=4, rate=80.0, **more):
    """A run with a pipeline, whose like without has the rate 100 and dp=8."""
    return row(run_id, rate=rate, pp=pp, dp=dp, gas=256 // dp, **{"pp_schedule": "1f1b"} | more)


RUNS = [
    row("like", rate=100.0), piped("a"), piped("b", pp=4, dp=2, rate=50.0, pp_schedule="interleaved", virtual_stages=3),
    piped("c", mbs=2, rate=70.0), piped("d", rate=10.0, suspect="mfu 1.2 is above 1"), piped("e", status="oom", pp=8, dp=1),
]  # fmt: skip


def test_a_measured_share_is_against_the_run_that_differs_only_in_its_pipeline():
    found, _ = points(table_of(*RUNS))
    pairs = found[found["nodes"] > 0]
    assert pairs[["pp", "schedule"]].values.tolist() == [[2, "1f1b"], [4, "interleaved"]]
    assert [*pairs["share"]] == pytest.approx([0.2, 0.5])


def test_the_lines_are_of_every_pp_and_of_the_interleaved_stages_of_the_table():
    found, _ = points(table_of(*RUNS))
    lines = found[found["nodes"] == 0]
    assert {*zip(lines["pp"], lines["schedule"], lines["virtual_stages"], strict=True)} == {
        (pp, *series) for pp, v in ((2, 2), (4, 3), (8, 2)) for series in (("1f1b", 1), ("interleaved", v), ("zbv", 2))
    }  # fmt: skip
    at = lines.set_index(["pp", "schedule", "gas"])["share"]
    assert (at[2, "1f1b", 8], at[4, "interleaved", 8]) == pytest.approx((1 / 9, 3 / (3 * 8 + 3)))


def test_the_picture_tells_what_is_drawn_and_left_out_in_any_order_of_rows():
    told = drawn("bubble", *RUNS)[1]
    assert told == drawn("bubble", *random.Random(1).sample(RUNS, len(RUNS)))[1]
    words = "Points (2)", "1 measured run with", "and 1 ok row with pp", "measured, interleaved"
    assert [word for word in words if word not in told] == []


def test_a_panel_without_measured_pairs_says_so_and_every_point_is_inside_the_scale():
    figure = prepared("bubble", table_of(*RUNS, piped("fast", rate=120.0)), title="t")[1]()
    texts = {axes.get_title("left"): [text.get_text() for text in axes.texts] for axes in figure.axes}
    assert texts == {"pp=2": [], "pp=4": [], "pp=8": ["no pair of measured runs"]}
    assert figure.axes[0].get_ylim()[0] == pytest.approx(100 * (1 - 120 / 100) - 6)


def test_formulas_stand_alone_where_no_run_was_measured():
    shown, told = drawn("bubble", RUNS[-1])
    assert (shown["nodes"] == 0).all()
    assert "Points (0)" in told
