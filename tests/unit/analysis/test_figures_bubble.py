"""The figure of bubbles: formulas, and measured runs against their like without a pipeline."""

import random

import pytest

from tests.unit.analysis.test_figures_runs import drawn, row, table_of
from ultrabench.analysis.figures.kinds import prepared
from ultrabench.analysis.figures.plots.bubble import points
from ultrabench.errors import ConfigError


def piped(run_id, pp=2, dp=4, rate=80.0, **more):
    """A run with a pipeline, whose like without has the rate 100 and dp=8."""
    schedule = {"pp_schedule": "1f1b"} if "pp_schedule" not in more else {}
    return row(run_id, rate=rate, pp=pp, dp=dp, gas=256 // dp, **schedule, **more)


LIKE = row("like", rate=100.0)
RUNS = [
    LIKE, piped("a"), piped("b", pp=4, dp=2, rate=50.0, pp_schedule="interleaved", virtual_stages=3),
    piped("c", mbs=2, rate=70.0), piped("d", rate=10.0, suspect="mfu 1.2 is above 1"),
    row("e", status="oom", pp=8, dp=1, gas=256, pp_schedule="1f1b"),
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
    told = drawn("bubble", table_of(*RUNS))[1]
    assert told == drawn("bubble", table_of(*random.Random(1).sample(RUNS, len(RUNS))))[1]
    for text in ("Points (2)", "1 measured run with", "and 1 ok row with pp", "measured, interleaved"):
        assert text in told.replace("\n", " ")


def test_a_panel_without_measured_pairs_says_so_and_every_point_is_inside_the_scale():
    runs = [*RUNS, piped("fast", rate=120.0)]
    figure = prepared("bubble", table_of(*runs), title="t")[1]()
    texts = {axes.get_title("left"): [text.get_text() for text in axes.texts] for axes in figure.axes}
    assert texts == {"pp=2": [], "pp=4": [], "pp=8": ["no pair of measured runs"]}
    assert figure.axes[0].get_ylim()[0] == pytest.approx(100 * (1 - 120 / 100) - 6)


def test_formulas_stand_alone_where_no_run_was_measured():
    points_, told = drawn("bubble", table_of(RUNS[-1]))
    assert (points_["nodes"] == 0).all()
    assert "Points (0)" in told


def test_no_pipeline_is_an_error_that_says_what_to_do():
    with pytest.raises(ConfigError, match="no run with pp > 1 among 1 row; plan them with"):
        points(table_of(LIKE))
