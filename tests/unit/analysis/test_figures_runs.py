"""The figures of runs: scatter and failures, from tables made by hand and from published measurements."""

import itertools
import random
from functools import cache
from pathlib import Path

import pyarrow as pa
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from tests.configs import refused
from tests.published import PLAYBOOK, needs
from ultrabench.analysis.figures.kinds import KINDS, prepared
from ultrabench.analysis.figures.picture import render, styled
from ultrabench.analysis.figures.runs import final, measured
from ultrabench.analysis.importing.import_table import import_csv
from ultrabench.analysis.importing.table_map import built_in, read_map
from ultrabench.analysis.schema import SCHEMA
from ultrabench.errors import ConfigError

USUAL = {
    "schema_version": 1, "is_final": True, "model": "8B", "num_params": 8_000_000_000, "kernel": "embedded",
    "hardware": "h100x8", "precision": "bf16", "seq_len": 4096, "gbs": 256, "tp": 1, "pp": 1, "cp": 1, "mbs": 1,
    "zero_stage": 0, "dp_shard": 0, "pp_schedule": "none", "virtual_stages": 1, "recompute": "none",
    "flops_formula": "palm",
}  # fmt: skip


def row(run_id, nodes=1, rate=100.0, status="ok", **more):
    """A row of a run; `rate` in tokens/s/GPU gives its other numbers."""
    gpus, ok = 8 * nodes, status == "ok"
    speeds = {
        "tokens_per_s_per_gpu": rate,
        "tokens_per_s": rate * gpus,
        "mfu": rate / 1000,
        "step_time_s": 1e3 / rate,
    }
    layout = {"dp": gpus, "gas": 256 // gpus, "nodes": nodes, "gpus": gpus, "repeat": 0, "attempt": 0}
    held = {"peak_mem_reserved_bytes": int(rate * 2**29), "predicted_step_time_s": 900 / rate}
    return USUAL | layout | {"run_id": run_id, "status": status} | (speeds | held if ok else {}) | more


def table_of(*rows):
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


SEVERAL = [
    row("a", rate=200.0), row("b", nodes=2, rate=150.0),
    row("c", nodes=2, rate=900.0, suspect="mfu 1.2 is above 1"),
    row("d", nodes=4, rate=120.0, stopped="slower_than_best"), row("e", nodes=4, status="oom"),
    row("f", nodes=4, status="rejected", rule="heads"), row("g", nodes=4, status=None),
    row("h", model="80B", num_params=80_000_000_000, nodes=4, rate=10.0),
]  # fmt: skip
RUNS = [kind for kind in KINDS if kind in ("scatter", "scaling", "pareto", "predicted", "failures")]


def drawn(kind, table, suffix=".svg", **options):
    points, make = prepared(kind, table, title="sweep", **options)
    return points, render(make, Path(f"f{suffix}")).decode("utf8" if suffix == ".svg" else "latin1")


def test_a_run_is_its_repeat_nearest_to_the_median_and_a_good_one_counts():
    rows = [row("a", rate=rate, repeat=n) for n, rate in enumerate((100.0, 130.0, 110.0))]
    rows += [row("b", rate=90.0, suspect="x"), row("b", rate=80.0, repeat=1), row("c", status="oom")]
    found = measured(final(table_of(*rows, row("a", rate=500.0, repeat=3, is_final=False))))
    assert found.set_index("run_id")["tokens_per_s_per_gpu"].to_dict() == {"a": 110.0, "b": 80.0}
    assert found["good"].all()


def test_panels_tell_what_cannot_be_compared_apart_and_keep_doubts_of_a_publisher():
    """An imported row whose doubt is its batch is in the panel of the others, as in rankings."""
    other = row("b", hardware="a100x8", rate=50.0)
    assert list(final(table_of(row("a"), other))["panel"]) == ["8B | a100x8", "8B | h100x8"]
    doubted = row("b", gbs=128, source="playbook", suspect="other batch")
    assert set(final(table_of(row("a", source="playbook"), doubted))["panel"]) == {"8B"}
    assert set(final(table_of(row("a"), row("b", gbs=128)))["panel"]) == {"8B | gbs 128", "8B | gbs 256"}


@cache
def several(kind):
    return drawn(kind, table_of(*SEVERAL))


@pytest.mark.parametrize("kind", RUNS)
def test_the_order_of_rows_changes_no_byte(kind):
    shuffled = table_of(*random.Random(1).sample(SEVERAL, len(SEVERAL)))
    assert several(kind)[1] == drawn(kind, shuffled)[1]
    if kind == "scatter":  # pixels follow from what an SVG holds
        assert drawn(kind, table_of(*SEVERAL), ".png")[1] == drawn(kind, shuffled, ".png")[1]


def test_without_a_speed_there_is_nothing_to_draw():
    with refused("no ok run with a speed among 2 rows"):
        prepared(
            "scatter", table_of(row("a", status="oom"), row("b", tokens_per_s_per_gpu=None)), title="sweep"
        )


def test_scatter_shows_runs_that_cannot_win_as_crosses():
    points, text = several("scatter")
    assert list(points[~points["good"]].sort_values("run_id")["run_id"]) == ["c", "d"]
    assert points.set_index("run_id")["height"]["a"] == pytest.approx(20.0)
    title, axis = "MFU and throughput of 5 runs over nodes: sweep", "nodes (largest marker: 14.4 ktokens/s)"
    for word in (title, axis, "cannot win", "80B"):
        assert word in text


@pytest.mark.parametrize("kind", ["scatter", "scaling", "pareto", "predicted"])
def test_the_note_counts_ok_runs_that_cannot_win(kind):
    how = "Drawn as crosses" if kind == "scatter" else "Not drawn"
    assert f"{how}: 2 of 5 ok runs, suspect or stopped early as slower." in several(kind)[1]


def test_scatter_without_comparable_mfu_has_the_speed_as_height():
    mixed = [row("a"), row("b", flops_formula="megatron")]
    assert set(drawn("scatter", table_of(*mixed))[0]["height"]) == {100.0}
    assert "tokens/s/GPU" in drawn("scatter", table_of(row("a", mfu=None)))[1]


def test_failures_count_runs_by_how_they_ended():
    points, text = several("failures")
    found = points.set_index(["panel", "nodes", "end"])["runs"].to_dict()
    assert found == {
        ("8B", 1, "ok"): 1, ("8B", 2, "ok"): 1, ("8B", 2, "suspect"): 1, ("8B", 4, "ok"): 1, ("8B", 4, "oom"): 1,
        ("8B", 4, "pending"): 1, ("80B", 4, "ok"): 1,
    }  # fmt: skip
    for word in ("How 7 runs ended, over nodes: sweep", "out of memory", "ok, but suspect", "waits or runs"):
        assert word in text
    assert drawn("failures", table_of(*SEVERAL), axis="dp")[0]["dp"].max() == 32


def test_scaling_has_the_best_of_each_value_and_what_is_equal_but_for_the_axis():
    rows = [
        row("a", rate=200.0),
        row("b", tp=2, dp=4, gas=64, rate=180.0),
        row("c", nodes=2, rate=150.0),
        row("d", nodes=2, mbs=2, gas=8, rate=160.0),
        row("e", nodes=2, rate=900.0, suspect="mfu 1.2 is above 1"),
        row("f", pp=2, dp=4, gas=64, pp_schedule="1f1b", virtual_stages=None, rate=170.0),
    ]
    found = drawn("scaling", table_of(*rows))[0].set_index("run_id")
    assert list(found.index[found["best"]]) == ["a", "d"]
    assert found["equal"]["a"] == found["equal"]["c"] != found["equal"]["d"]
    assert found["memory_gib"]["a"] == 100.0
    found, text = drawn("scaling", table_of(*rows), axis="tp")
    found = found.set_index("run_id")
    assert list(found.index[found["best"]]) == ["b", "a", "d"]
    assert found["equal"]["a"] == found["equal"]["b"] != found["equal"]["c"]
    for word in ("over tp", "best on 1 node<", "best on 2 nodes", "all else equal", "largest of all ranks"):
        assert word in text
    found = drawn("scaling", table_of(*rows), axis="pp")[0].set_index("run_id")
    assert found["equal"]["a"] == found["equal"]["f"]


def test_scaling_says_which_memory_it_shows_and_when_none_is_known():
    imported = row("a", peak_mem_reserved_bytes=None, peak_mem_reserved_rank0_bytes=2**30)
    assert "of rank 0" in drawn("scaling", table_of(imported))[1]
    assert "not recorded" in drawn("scaling", table_of(row("a", peak_mem_reserved_bytes=None)))[1]
    with pytest.raises(ConfigError, match="1 run here, all suspect or stopped early"):
        drawn("scaling", table_of(row("a", suspect="x")))


def test_scaling_says_that_no_line_has_two_values():
    rows = [row("a"), row("b", nodes=2, tp=2)]
    told = "No line has two values of tp"
    assert told in drawn("scaling", table_of(*rows), axis="tp")[1]
    assert told not in drawn("scaling", table_of(*rows, row("c", tp=2, dp=4)), axis="tp")[1]


def test_pareto_marks_and_names_the_runs_that_no_other_beats():
    rows = [
        row("fast", rate=200.0, dp_shard=None),
        row("small", nodes=2, rate=90.0, peak_mem_reserved_bytes=2**30, virtual_stages=None),
        row("equal", rate=90.0, peak_mem_reserved_bytes=2**30 + 1),
        row("worse", rate=80.0),
        row("unknown", rate=999.0, peak_mem_reserved_bytes=None),
        row("doubtful", rate=999.0, suspect="mfu 1.2 is above 1"),
    ]
    points, text = drawn("pareto", table_of(*rows))
    assert sorted(points[points["front"]]["run_id"]) == ["fast", "small"]
    assert len(points) == 4
    for word in (
        "1 node: dp8 tp1 pp1 z0 mbs1 gas32",
        "2 nodes: dp16 tp1 pp1 z0 mbs1 gas16",
        "the front of 4 runs",
    ):
        assert word in text
    with pytest.raises(ConfigError, match="1 run here, none with its peak memory"):
        drawn("pareto", table_of(rows[4]))


def test_pareto_says_how_many_runs_of_a_front_have_no_name():
    rows = [row(f"{n}", rate=100.0 * n, peak_mem_reserved_bytes=n * 2**30) for n in range(1, 21)]
    close = row("close", rate=1999.0, peak_mem_reserved_bytes=20 * 2**30 - 1)
    text = drawn("pareto", table_of(*rows, close))[1]
    assert "Without a name: 6 runs of the front" in text
    assert text.count("1 node: ") == 15


def test_predicted_has_runs_with_a_prediction_and_says_what_is_missing():
    rows = [
        row("a", rate=200.0, predicted_peak_mem_bytes=2**36),
        row("b", rate=150.0),
        row("c", predicted_step_time_s=None),
        row("d", suspect="x"),
        row("e", status="oom", predicted_step_time_s=1.0),
    ]
    points, text = drawn("predicted", table_of(*rows))
    assert points.set_index("run_id")["predicted_gib"].dropna().to_dict() == {"a": 64.0}
    assert sorted(points["run_id"]) == ["a", "b"]
    for word in (
        "Predicted against measured, 2 runs: sweep",
        "measured step time (s)",
        "predicted peak memory (GiB)",
        "Predictions of the table, made before the runs; those of a profile of today",
    ):
        assert word in text
    assert "not predicted" in drawn("predicted", table_of(rows[1]))[1]
    with pytest.raises(ConfigError, match=r"ultrabench predict validate FILE\.parquet -o"):
        drawn("predicted", table_of(rows[2]))


@pytest.mark.parametrize(("kind", "axis"), [("scaling", "tp"), ("failures", "tp"), ("pareto", None)])
def test_runs_that_lack_what_a_figure_shows_are_counted(kind, axis):
    lacking = row("b", tp=None, peak_mem_reserved_bytes=None)
    points, text = drawn(kind, table_of(row("a"), lacking), axis=axis)
    assert len(points) == 1
    assert "Left out: 1 run without" in text
    with pytest.raises(ConfigError, match="1 run here, none with its"):
        drawn(kind, table_of(lacking), axis=axis)


def test_long_names_of_models_do_not_hide_what_tells_panels_apart():
    name = "meta-llama/Llama-3.1-8B-Instruct-" + 60 * "x"
    text = drawn("failures", table_of(row("a", model=name), row("b", model=name, gbs=128)))[1]
    assert ">gbs 128<" in text
    assert ">gbs 256<" in text


def overlaps(figure):
    """Pairs of texts of a figure that lie over each other, and texts that its edge cuts."""
    renderer = figure.canvas.get_renderer()
    axes = [(axis, axis.get_view_interval()) for held in figure.axes for axis in (held.xaxis, held.yaxis)]
    ticks = [
        (tick, ends) for axis, ends in axes for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
    ]
    unseen = {tick.label1 for tick, ends in ticks if not min(ends) <= tick.get_loc() <= max(ends)}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    texts = [text for text in texts if text not in unseen]
    boxes = [(text.get_text(), Text.get_window_extent(text, renderer).padded(-1)) for text in texts]
    edge = figure.bbox.padded(1)
    cut = [
        told for told, box in boxes if box.width > 0 and not edge.contains(*box.min) | edge.contains(*box.max)
    ]
    pairs = [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]
    return cut, pairs


@pytest.mark.parametrize("models", [1, 8])
@pytest.mark.parametrize(("kind", "axis"), [*((kind, None) for kind in RUNS), ("failures", "dp")])
def test_no_text_is_cut_or_overlaps(kind, axis, models):
    rows = [
        row(f"{m}.{n}", 2**n, 900.0 / (n + 1), model=f"model-{m}", num_params=10**9 * (m + 1), predicted_peak_mem_bytes=2**36)
        for m in range(models) for n in range(9 if models > 1 else 1)
    ]  # fmt: skip
    with styled():
        figure = prepared(kind, table_of(*rows), title="a-sweep", axis=axis)[1]()
        FigureCanvasAgg(figure).draw()
        assert overlaps(figure) == ([], [])


@needs(PLAYBOOK)
def test_published_runs_are_all_drawn_or_counted():
    """896 of the 1,945 rows are ok, 310 of these in doubt."""
    table = import_csv(PLAYBOOK, read_map(built_in("nanotron"))).table
    scatter, failures = (prepared(kind, table, title="playbook")[0] for kind in ("scatter", "failures"))
    assert (len(scatter), int(scatter["good"].sum())) == (896, 586)
    assert failures.groupby("end")["runs"].sum().to_dict() == {
        "ok": 586, "suspect": 310, "oom": 824, "crash": 225,
    }  # fmt: skip
    assert list(scatter.sort_values("num_params")["panel"].unique()) == ["1B", "8B", "80B"]
