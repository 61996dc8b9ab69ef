"""The figures of a layout: its predicted memory, with measured runs as points, and the timeline of its schedule."""

import random
from pathlib import Path

import pytest

from tests.unit.analysis.test_figures_runs import row, table_of
from ultrabench.analysis.figures.kinds import prepared
from ultrabench.analysis.figures.picture import render
from ultrabench.analysis.figures.plots.memory import points
from ultrabench.cli.predict.layout import document
from ultrabench.errors import ConfigError
from ultrabench.hardware import GIB
from ultrabench.sweep.arguments import PREDICTED, read_run
from ultrabench.sweep.predict.stage_memory import PARTS

_SVG = Path("x.svg")
LAYOUT = {"model": "8B", "tp": 2, "pp": 2, "gas": 8}


def predicted(**layout):
    """What `ultrabench predict` says of a layout."""
    return document(*read_run([f"{name}={value}" for name, value in layout.items()], PREDICTED))


def bars(axis, **layout):
    """The names and the peaks of the bars over an axis."""
    drawn, _ = points(layout, axis=axis)
    return {bar.value: bar.bytes for bar in drawn.itertuples() if bar.shown == "predicted"}


def test_a_bar_is_the_rank_that_needs_most_and_its_parts_are_those_of_predict():
    drawn = points(LAYOUT, axis="tp")[0].set_index("value")
    told = predicted(**LAYOUT)
    assert drawn.loc["2", "bytes"] == pytest.approx(told["peak_mem_bytes"], rel=1e-9)
    assert drawn.loc["2", [*PARTS]].to_dict() == pytest.approx(told["memory"], abs=1)
    assert drawn.loc["2", "p_oom"] == pytest.approx(told["p_oom"], abs=1e-6)
    assert [*drawn.index] == ["1", "2", "4"]


def test_over_stages_every_rank_of_the_pipeline_has_a_bar():
    told = [stage["peak_bytes"] for stage in predicted(**LAYOUT)["stages"]]
    assert [*bars("stage", **LAYOUT).values()] == pytest.approx(told, abs=1)


@pytest.mark.parametrize(
    ("axis", "layout", "names", "same_as"),
    [
        ("dp", {"tp": 8}, ["1", "2", "4", "8", "16", "32", "64", "128"], {"tp": 8, "nodes": 128}),
        ("pp", {"tp": 2, "gas": 4, "pp_schedule": "zbv"}, ["1", "2", "4"], {"tp": 2, "pp": 4, "gas": 4, "pp_schedule": "zbv"}),
        ("recompute", {"tp": 8, "recompute": "every3"}, ["none", "attention", "selective", "every2", "full", "every3"], {"tp": 8, "recompute": "every3"}),
        ("mbs", {"tp": 8, "mbs": 3}, ["1", "2", "3", "4", "8", "16", "32"], {"tp": 8, "mbs": 32}),
    ],
)  # fmt: skip
def test_what_follows_from_the_axis_changes_with_it(axis, layout, names, same_as):
    found = bars(axis, **layout)
    assert [*found] == names
    assert [*found.values()][-1] == pytest.approx(predicted(**same_as)["peak_mem_bytes"], abs=1)


def test_values_that_cannot_run_are_told_with_their_reasons():
    _, make = prepared("memory", None, title="", axis="zero_stage", layout={"pp": 2, "nodes": 2})
    (below,) = [
        part.texts[0].get_text() for part in make().subfigs if "Predicted with" in str(part.texts[:1])
    ]
    assert "Cannot run: 2: zero_stage=2 with pp=2 would run as zero_stage=1." in below.replace("\n", " ")
    with pytest.raises(ConfigError, match=r"no layout to draw: mbs=1: .*=3 does not divide the 8 GPUs"):
        points({"tp": 3}, axis="mbs")


RUNS = [
    row("same", tp=2, pp=2, dp=2, gas=8, pp_schedule="1f1b", peak_mem_reserved_bytes=50 * GIB),
    row("more gas", tp=2, pp=2, dp=2, gas=128, pp_schedule="1f1b", peak_mem_reserved_bytes=51 * GIB),
    row("less gas", tp=2, pp=2, dp=2, gas=2, pp_schedule="1f1b", peak_mem_reserved_bytes=40 * GIB),
    row("doubt", tp=2, pp=2, dp=2, gas=8, pp_schedule="1f1b", suspect="mfu 1.2 is above 1"),
    row("oom", tp=1, pp=2, dp=4, gas=8, pp_schedule="1f1b", status="oom"),
    row("rank 0", tp=4, pp=2, dp=1, gas=8, pp_schedule="1f1b", peak_mem_reserved_bytes=None,
        peak_mem_reserved_rank0_bytes=20 * GIB),
    row("other kernel", tp=2, pp=2, dp=2, gas=8, pp_schedule="1f1b", kernel="nanotron"),
    row("other nodes", nodes=2, tp=2, pp=2, dp=4, gas=8, pp_schedule="1f1b"),
]  # fmt: skip


def test_measured_runs_of_the_layouts_are_marked_in_any_order_of_rows():
    drawn, _ = points(LAYOUT, table_of(*RUNS), axis="tp")
    found = drawn[drawn["shown"] != "predicted"]
    assert {*zip(found["value"], found["shown"], found["bytes"].fillna(0) / GIB, strict=True)} == {
        ("2", "measured", 50), ("2", "measured", 51), ("1", "oom", 80), ("4", "measured_rank0", 20), ("2", "suspect", 0),
    }  # fmt: skip
    one, two = (
        render(prepared("memory", table_of(*rows), title="s", axis="tp", layout=LAYOUT)[1], _SVG)
        for rows in (RUNS, random.Random(1).sample(RUNS, len(RUNS)))
    )
    assert one == two
    assert b"4 runs among 8 rows" in one
    none = prepared("memory", table_of(RUNS[6]), title="s", axis="tp", layout=LAYOUT)[1]()
    assert "; measured" not in none.subfigs[0].texts[0].get_text()
    assert b"1 more are suspect" in one


def test_what_is_not_given_is_that_of_the_rows():
    rows = [
        row("a", model="8B", tp=2, dp=4, gas=16, kernel="nanotron", seq_len=2048),
        row("b", model="1B", num_params=10**9, tp=2, dp=8, gas=4, nodes=2, mbs=4, kernel="nanotron", hardware="a100-80x8"),
        row("c", model="1B", num_params=10**9, tp=2, dp=8, gas=8, nodes=2, mbs=4, kernel="nanotron", hardware="a100-80x8"),
        row("d", model="mine", num_params=10**8, kernel="nanotron"),
    ]  # fmt: skip
    found, told = points({}, table_of(*rows), axis="tp")
    defaults = "model=1B hardware=a100-80x8 profile=nanotron nodes=2 seq_len=4096 mbs=4 gas=8"
    assert told.startswith(
        f"Defaults: {defaults} zero_stage=0 recompute=none.\nThe rows have 2 values of model,"
    )
    assert [*found["shown"]].count("measured") == 2
    assert points({"model": "8B"}, table_of(*rows), axis="tp")[1].startswith(
        "Defaults: hardware=h100x8 profile"
    )
    assert "Defaults: model=llama3-8b" in points({}, table_of(rows[3]), axis="tp")[1]


def test_a_measured_peak_far_above_the_prediction_is_inside_the_scale():
    held = {
        "hardware": "cpu", "precision": "fp32", "model": "tiny", "seq_len": 64, "nodes": 2, "dp": 4, "gas": 8,
    }  # fmt: skip
    table = table_of(row("a", **(held | {"nodes": 2}), peak_mem_reserved_bytes=300 * 2**20))
    layout = {"model": "tiny", "hardware": "cpu", "nodes": 2, "seq_len": 64, "gas": 8}
    figure = prepared("memory", table, title="s", axis="tp", layout=layout)[1]()
    assert 300 < figure.axes[0].get_ylim()[1] < 400
    assert "resident set" in figure.subfigs[2].texts[0].get_text()


def test_the_note_tells_defaults_moments_of_peaks_and_words_without_a_row():
    told = points({"model": "llama3-8b", "tp": 8}, axis="seq_len")[1]
    assert told.startswith("Defaults: hardware=h100x8 nodes=1 mbs=1 gas=pp zero_stage=0 recompute=none.")
    assert "1,024, 2,048: in the update, when activations and gathered weights are freed" in told
    told = points(LAYOUT | {"gas": 64, "seq_len": 8192}, table_of(*RUNS), axis="tp")[1]
    assert "No row has gas=64, seq_len=8192." in told
    assert "No row has" not in points(LAYOUT, table_of(*RUNS), axis="tp")[1]


def test_the_legend_tells_parts_that_are_too_thin_to_be_seen():
    figure = drawn("memory", axis="tp", model="llama3-8b")[1]
    names = [text.get_text() for text in figure.subfigs[1].legends[0].get_texts()]
    assert "weights" in names
    assert [name for name in names if "buffers" in name] == ["buffers (at most 0.36 GiB)"]
    megatron = drawn("memory", axis="tp", model="llama3-8b", profile="megatron", seq_len=8192)[1]
    assert "buffers" not in str(megatron.subfigs[1].legends[0].get_texts())


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
