"""The figures of a layout: the timeline of its schedule."""

from pathlib import Path

import pytest

from ultrabench.analysis.figures.kinds import prepared
from ultrabench.analysis.figures.picture import render


def drawn(kind, table=None, axis=None, **layout):
    """The points of a figure of a layout, and the figure."""
    points, make = prepared(kind, table, title="", axis=axis, layout=layout)
    return points, make()


@pytest.mark.parametrize(
    ("layout", "passes", "told"),
    [
        ({"pp": 4, "gas": 8}, 64, "schedule 1f1b, 8 micro-batches on 4 ranks: the bubble is 27.3 %"),
        ({"pp": 4, "pp_schedule": "interleaved"}, 128, "schedule interleaved, 8 micro-batches on 4 ranks: the bubble is 15.8 %"),
        ({"pp": 4, "gas": 8, "pp_schedule": "zbv"}, 192, "schedule zbv, 8 micro-batches on 4 ranks: the bubble is 5.9 %"),
        ({"pp": 4, "gas": 3}, 24, "schedule afab, 3 micro-batches on 4 ranks: the bubble is 50.0 %"),
        ({"pp": 1, "gas": 1}, 2, "schedule none, 1 micro-batch on 1 rank: the bubble is 0.0 %"),
    ],
)  # fmt: skip
def test_a_schedule_names_its_bubble_and_numbers_its_passes(layout, passes, told):
    points, figure = drawn("schedule", **layout)
    texts = [text.get_text() for part in figure.subfigs for text in part.texts]
    (axes,) = figure.axes
    assert told in texts[0].replace("\n", " ")
    assert sorted(text.get_text() for text in axes.texts) == sorted(map(str, points["micro_batch"]))
    assert len(points) == passes


def test_boxes_that_are_too_small_have_no_numbers():
    assert not drawn("schedule", pp=8, gas=128)[1].axes[0].texts


def test_equal_layouts_give_equal_bytes():
    one, two = (
        render(prepared("schedule", None, title="", layout={"pp": 4})[1], Path("x.svg")) for _ in range(2)
    )
    assert one == two
    assert b">idle</text>" in one
