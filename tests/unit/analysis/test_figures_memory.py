"""The figures of a layout: its predicted memory, with measured runs as points, and the timeline of its schedule."""

import random

import pytest

from tests.configs import refused
from tests.unit.analysis.tables import row, table_of
from ultrabench.analysis.figures.kinds import prepare_figure
from ultrabench.analysis.figures.plots.memory import points
from ultrabench.cli.predict.layout import document
from ultrabench.hardware import GIB
from ultrabench.sweep.arguments import PREDICTION_DEFAULTS, read_run
from ultrabench.sweep.predict.stage_memory import MEMORY_PARTS

LAYOUT = {"model": "8B", "tp": 2, "pp": 2, "gas": 8}
OVER_TP = {"model": "8B", "pp": 2, "gas": 8}
GPU_GIB = read_run(["model=8B"], PREDICTION_DEFAULTS)[1].hardware.mem_bytes / GIB


def predicted(**layout):
    """What `ultrabench predict` says of a layout."""
    return document(*read_run([f"{name}={value}" for name, value in layout.items()], PREDICTION_DEFAULTS))


def bars(axis, **layout):
    """The names and the peaks of the bars over an axis."""
    drawn, _ = points(layout, axis=axis)
    return {bar.value: bar.bytes for bar in drawn.itertuples() if bar.shown == "predicted"}


def drawn(kind, *rows, axis=None, **layout):
    """The points of a figure of a layout, the figure, and the texts above and below its panels."""
    shown, make = prepare_figure(kind, table_of(*rows) if rows else None, title="s", axis=axis, layout=layout)
    figure = make()
    above, _, below = (" ".join(text.get_text() for text in part.texts) for part in figure.subfigs)
    return shown, figure, f"{above}\n{below}".replace("\n", " ")


def test_a_bar_is_the_rank_that_needs_most_and_its_parts_are_those_of_predict():
    shown = points(OVER_TP, axis="tp")[0].set_index("value")
    prediction = predicted(**LAYOUT)
    assert shown.loc["2", "bytes"] == pytest.approx(prediction["peak_mem_bytes"], rel=1e-9)
    assert shown.loc["2", [*MEMORY_PARTS]].to_dict() == pytest.approx(prediction["memory"], abs=1)
    assert shown.loc["2", "p_oom"] == pytest.approx(prediction["p_oom"], abs=1e-6)
    assert [*shown.index] == ["1", "2", "4"]


def test_over_stages_every_rank_of_the_pipeline_has_a_bar_and_its_own_chance():
    peaks = [stage["peak_bytes"] for stage in predicted(**LAYOUT)["stages"]]
    assert [*bars("stage", **LAYOUT).values()] == pytest.approx(peaks, abs=1)
    large = {"model": "llama3-70b", "nodes": 4, "tp": 4, "pp": 4, "zero_stage": 1, "gas": 16}
    first, *others = points(large, axis="stage")[0].itertuples()
    assert first.p_oom == pytest.approx(predicted(**large)["p_oom"], abs=1e-6)
    assert first.p_oom > 0.5 > 0.01 > max(other.p_oom for other in others)


def test_a_value_of_the_axis_that_is_given_is_drawn_alone_or_refused_with_its_rule():
    assert [*bars("tp", **LAYOUT)] == ["2"]
    assert [*bars("mbs", tp=8, mbs=3)] == ["3"]
    with refused("no layout to draw: tp=3: tp*pp*cp=3 does not divide 8 GPUs (1 node of 8)"):
        points({"tp": 3}, axis="tp")


@pytest.mark.parametrize(
    ("axis", "layout", "names", "same_as"),
    [
        ("dp", {"tp": 8}, ["1", "2", "4", "8", "16", "32", "64", "128"], {"tp": 8, "nodes": 128}),
        ("pp", {"tp": 2, "gas": 4, "pp_schedule": "zbv"}, ["1", "2", "4"],
            {"tp": 2, "pp": 4, "gas": 4, "pp_schedule": "zbv"}),
        ("recompute", {"tp": 8}, ["none", "attention", "selective", "every2", "full"], {"tp": 8, "recompute": "full"}),
        ("mbs", {"tp": 8}, ["1", "2", "4", "8", "16", "32"], {"tp": 8, "mbs": 32}),
        ("ep", {"model": "tiny-moe", "tp": 2}, ["1", "2", "4", "8"], {"model": "tiny-moe", "tp": 2, "ep": 8}),
    ],
)  # fmt: skip
def test_what_follows_from_the_axis_changes_with_it(axis, layout, names, same_as):
    peaks = bars(axis, **layout)
    assert [*peaks] == names
    assert [*peaks.values()][-1] == pytest.approx(predicted(**same_as)["peak_mem_bytes"], abs=1)


def test_values_that_cannot_run_are_told_with_their_reasons():
    texts = drawn("memory", axis="zero_stage", pp=2, nodes=2)[2]
    assert "Cannot run: 2: zero_stage=2 with pp=2 would run as zero_stage=1." in texts
    with refused("no layout to draw: mbs=1: tp*pp*cp=3 does not divide 8 GPUs"):
        points({"tp": 3}, axis="mbs")


def of_layout(run_id, **columns):
    return row(run_id, **{"tp": 2, "pp": 2, "dp": 2, "gas": 8, "pp_schedule": "1f1b"} | columns)


RUNS = [
    of_layout("same", peak_mem_reserved_bytes=50 * GIB), of_layout("more gas", gas=128,
        peak_mem_reserved_bytes=51 * GIB),
    of_layout("less gas", gas=2), of_layout("doubt", suspect="mfu 1.2 is above 1"),
    of_layout("oom", tp=1, dp=4, status="oom"),
    of_layout("rank 0", tp=4, dp=1, peak_mem_reserved_bytes=None, peak_mem_reserved_rank0_bytes=20 * GIB),
    of_layout("other kernel", kernel="nanotron"), of_layout("other nodes", nodes=2, dp=4),
]  # fmt: skip


def test_measured_runs_of_the_layouts_are_marked_in_any_order_of_rows():
    shown, _, texts = drawn("memory", *RUNS, axis="tp", **OVER_TP)
    measured = shown[shown["shown"] != "predicted"]
    assert {*zip(measured["value"], measured["shown"], measured["bytes"].fillna(0) / GIB, strict=True)} == {
        ("2", "measured", 50),
        ("2", "measured", 51),
        ("1", "oom", GPU_GIB),
        ("4", "measured_rank0", 20),
        ("2", "suspect", 0),
    }
    assert "4 runs among 8 rows" in texts
    assert "1 more are suspect" in texts
    assert "; measured: s" in texts
    shuffled = drawn("memory", *random.Random(1).sample(RUNS, len(RUNS)), axis="tp", **OVER_TP)
    assert (shuffled[0].equals(shown), shuffled[2]) == (True, texts)
    assert "; measured" not in drawn("memory", RUNS[2], axis="tp", **OVER_TP)[2]


def test_the_zero_stage_is_that_of_most_rows():
    rows = [row(str(n), model="8B", tp=2, dp=4, zero_stage=stage) for n, stage in enumerate((0, 1, 1))]
    assert " zero_stage=1 " in points({}, table_of(*rows), axis="tp")[1]


def test_what_is_not_given_is_that_of_the_rows():
    large = row("a", model="8B", tp=2, dp=4, gas=16, kernel="nanotron", seq_len=2048)
    small = {"model": "1B", "num_params": 10**9, "hardware": "a100-80x8", "kernel": "nanotron"}
    rows = [large, *(row("b", nodes=2, tp=2, dp=8, mbs=4, gas=gas, **small) for gas in (4, 8))]
    shown, note = points({}, table_of(*rows), axis="tp")
    defaults = (
        "model=1B hardware=a100-80x8 profile=nanotron nodes=2 seq_len=4096 mbs=4 gas=8 "
        "zero_stage=0 recompute=none"
    )
    assert note.startswith(f"Defaults: {defaults}.\nThe rows have 2 values of model,")
    assert [*shown["shown"]].count("measured") == 2
    note = points({"model": "8B"}, table_of(*rows), axis="tp")[1]
    assert note.startswith("Defaults: hardware=h100x8 profile")
    unknown = table_of(row("d", model="mine", num_params=10**8, kernel="nanotron"))
    assert "Defaults: model=llama3-8b" in points({}, unknown, axis="tp")[1]


def test_a_measured_peak_far_above_the_prediction_is_inside_the_scale():
    layout = {"model": "tiny", "hardware": "cpu", "nodes": 2, "seq_len": 64, "gas": 8}
    measured = row("a", **layout, precision="fp32", dp=4, peak_mem_reserved_bytes=300 * 2**20)
    _, figure, texts = drawn("memory", measured, axis="tp", **layout)
    assert 300 < figure.axes[0].get_ylim()[1] < 400
    assert "resident set" in texts


def test_the_note_tells_defaults_moments_of_peaks_and_words_without_a_row():
    note = points({"model": "llama3-8b", "tp": 8}, axis="seq_len")[1]
    assert note.startswith("Defaults: hardware=h100x8 nodes=1 zero_stage=0 mbs=1 gas=pp recompute=none.")
    phase = "in the optimizer step, after activations and gathered weights are freed"
    assert f"peak of 1,024, 2,048: {phase}" in note
    note = points(LAYOUT | {"gas": 64, "seq_len": 8192}, table_of(*RUNS), axis="tp")[1]
    assert "No row has gas=64, seq_len=8192." in note
    assert "No row has" not in points(LAYOUT, table_of(*RUNS), axis="tp")[1]


def legend(figure):
    return [text.get_text() for text in figure.subfigs[1].legends[0].get_texts()]


def test_the_legend_tells_parts_that_are_too_thin_to_be_seen():
    names = legend(drawn("memory", axis="tp", model="llama3-8b")[1])
    assert "weights" in names
    assert [name for name in names if "buffers" in name] == ["buffers (at most 0.49 GiB)"]
    megatron = drawn("memory", axis="tp", model="llama3-8b", profile="megatron", seq_len=8192)[1]
    assert "buffers" not in str(legend(megatron))


@pytest.mark.parametrize(
    ("layout", "passes", "bubble"),
    [
        ({"pp": 4, "gas": 8}, 64, "schedule 1f1b, 8 micro-batches on 4 ranks: the bubble is 27.3 %"),
        ({"pp": 4, "pp_schedule": "interleaved"}, 128, "schedule interleaved, 8 micro-batches on 4 ranks: "
        "the bubble is 15.8 %"),
        ({"pp": 4, "gas": 8, "pp_schedule": "zbv"}, 192, "schedule zbv, 8 micro-batches on 4 ranks: "
        "the bubble is 5.9 %"),
        ({"pp": 4, "gas": 3}, 24, "schedule afab, 3 micro-batches on 4 ranks: the bubble is 50.0 %"),
        ({"pp": 1, "gas": 1}, 2, "schedule none, 1 micro-batch on 1 rank: the bubble is 0.0 %"),
    ],
)  # fmt: skip
def test_a_schedule_names_its_bubble_and_numbers_its_passes(layout, passes, bubble):
    shown, figure, texts = drawn("schedule", **layout)
    (axes,) = figure.axes
    assert bubble in texts
    assert sorted(text.get_text() for text in axes.texts) == sorted(map(str, shown["micro_batch"]))
    assert len(shown) == passes
    assert {"forward", "idle"} <= {*legend(figure)}


def test_boxes_that_are_too_small_have_no_numbers():
    assert not drawn("schedule", pp=8, gas=128)[1].axes[0].texts
