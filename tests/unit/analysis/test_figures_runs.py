"""The figures of runs, from tables made by hand."""

import itertools
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from tests.configs import refused
from tests.unit.analysis.tables import PIPELINES, SAVED, piped, row, table_of
from tests.unit.cli.conftest import ultrabench  # noqa: F401
from ultrabench.analysis.figures.kinds import KINDS, prepare_figure, runs_drawn
from ultrabench.analysis.figures.picture import figure_style, render
from ultrabench.analysis.figures.plots.bubble import points as bubble_points
from ultrabench.analysis.figures.runs import final_rows, ok_runs
from ultrabench.analysis.results.measured import spec_of
from ultrabench.analysis.results.ranking import rank
from ultrabench.sweep.config.load import load_hardware, load_profile
from ultrabench.sweep.predict.memory import memory_constants, p_oom, predict_memory

SEVERAL = [
    row("a", rate=200.0), row("b", nodes=2, rate=150.0),
    row("c", nodes=2, rate=900.0, suspect="mfu 1.2 is above 1"),
    row("d", nodes=4, rate=120.0, stopped="slower_than_best"), row("e", nodes=4, status="oom"),
    row("f", nodes=4, status="rejected", rule="heads"), row("g", nodes=4, status=None),
    row("h", model="80B", num_params=80_000_000_000, nodes=4, rate=10.0),
]  # fmt: skip
CANNOT_WIN = "2 of 5 ok runs, suspect or stopped early as slower."
OTHERS = ("comm", "effect", "nodes", "bubble", "schedule", "memory")
RUNS = [name for name in KINDS if name not in OTHERS]


def drawn(kind, *rows, **options):
    """The points of a figure of these rows, and its texts, one a line; it is not laid out, which takes the longest."""
    points, make = prepare_figure(kind, table_of(*rows), title="sweep", **options)
    with figure_style():
        figure = make()
    return points, "\n".join(text.get_text() for text in figure.findobj(Text))


def by_run(kind, *rows, **options):
    """The points of a figure of these rows by their run_id."""
    return prepare_figure(kind, table_of(*rows), title="sweep", **options)[0].set_index("run_id")


def panels_of(*rows):
    return [*final_rows(table_of(*rows))["panel"].unique()]


def lacking(words, text):
    return [phrase for phrase in words if phrase not in text]


def as_svg(kind, *rows):
    """The SVG of a figure of these rows."""
    return render(prepare_figure(kind, table_of(*rows), title="sweep")[1], Path("f.svg")).decode()


def test_a_run_is_its_repeat_nearest_to_the_median_and_a_good_one_counts():
    rows = [row("a", rate=rate, repeat=n) for n, rate in enumerate((100.0, 130.0, 110.0))]
    rows += [row("b", rate=90.0, suspect="x"), row("b", rate=80.0, repeat=1), row("c", status="oom")]
    runs = ok_runs(final_rows(table_of(*rows, row("a", rate=500.0, repeat=3, is_final=False))))
    assert runs.set_index("run_id")["tokens_per_s_per_gpu"].to_dict() == {"a": 110.0, "b": 80.0}
    assert runs["may_win"].all()


def test_panels_tell_what_cannot_be_compared_apart_and_keep_doubts_of_a_publisher():
    """An imported row whose doubt is its batch is in the panel of the others, as in rankings."""
    other = row("b", hardware="a100x8", rate=50.0)
    assert panels_of(row("a"), other) == ["8B | a100x8", "8B | h100x8"]
    doubted = row("b", gbs=128, source="playbook", suspect="other batch")
    assert panels_of(row("a", source="playbook"), doubted) == ["8B"]
    assert panels_of(row("a"), row("b", gbs=128)) == ["8B | gbs 128", "8B | gbs 256"]


@pytest.mark.parametrize(
    ("kind", "rows", "words"),
    [
        ("scatter", SEVERAL, ["MFU and throughput of 5 runs over nodes: sweep",
            "nodes (largest marker: 14.4 ktokens/s)",
                     "cannot win", "80B", f"Drawn as crosses: {CANNOT_WIN}"]),
        ("scaling", SEVERAL, [f"Not drawn: {CANNOT_WIN}"]),
        ("pareto", SEVERAL, [f"Not drawn: {CANNOT_WIN}", "1 node: dp8 tp1 pp1 z0 mbs1 gas32",
                             "2 nodes: dp16 tp1 pp1 z0 mbs1 gas16", "the Pareto front of 3 runs"]),
        ("predicted", SEVERAL, [f"Not drawn: {CANNOT_WIN}", "Predicted against measured, 3 runs: sweep",
            "not predicted",
                                "measured step time (s)", "predicted peak memory (GiB)",
                                "The predictions were made before the runs. For those of the current profile"]),
        ("failures", SEVERAL, ["How 7 runs ended, over nodes: sweep", "out of memory", "ok but suspect",
            "pending or running"]),
        ("largest-batch", SEVERAL, ["Predicted: 80B", "Measured: 8B", "at most gbs / dp", "(0 of 2 squares)"]),
        ("checkpoint", [row("a", **SAVED), row("b", nodes=2, **SAVED), *SEVERAL],
         ["Checkpoints over node counts: sweep", "GB/s per node", "steps lost during",
             "5 runs without checkpoint: 4 not requested, 1 stopped early as slower"]),
        ("bubble", PIPELINES, ["Points (2)", "1 measured run with", "and 1 ok row with pp", "measured, interleaved"]),
    ],
)  # fmt: skip
def test_the_picture_tells_what_is_drawn_and_left_out_in_any_order_of_rows(kind, rows, words):
    svg = as_svg(kind, *rows)
    assert svg == as_svg(kind, *random.Random(1).sample(rows, len(rows)))
    assert lacking(words, svg) == []


@pytest.mark.parametrize(
    ("kind", "options", "columns", "message"),
    [
        ("scatter", {}, {"tokens_per_s_per_gpu": None}, "1 row, none of an ok run with a speed"),
        ("scatter", {"by": "mfu"}, {}, "the figure scatter takes no column; remove --by"),
        ("scaling", {}, {"suspect": "x"}, "1 run, none can win: 1 suspect"),
        ("scaling", {"axis": "tp"}, {"tp": None}, "1 run, none with tp"),
        ("failures", {"axis": "tp"}, {"tp": None}, "1 run, none with tp"),
        ("checkpoint", {}, {}, "1 run, none with checkpoint; measure it with: "
        "ultrabench sweep launch measure.checkpoint=true"),
        ("pareto", {}, {"peak_mem_reserved_bytes": None}, "1 run, none with peak memory"),
        ("pareto", {"by": "power_w_mean"}, {}, "1 run, none with power_w_mean; choose another --by"),
        ("predicted", {}, {"predicted_step_time_s": None}, "ultrabench predict validate FILE.parquet -o"),
        ("bubble", {}, {}, "1 row, none of a run with pp > 1; plan some with"),
    ],
)  # fmt: skip
def test_a_figure_without_anything_to_draw_says_what_to_do(kind, options, columns, message):
    with refused(message):
        prepare_figure(kind, table_of(row("a", **columns)), title="sweep", **options)


def test_scaling_over_an_axis_that_regroups_ranks_changes_nothing_else():
    """Of the degrees dp follows, so that thin lines join runs of several dp; from ep nothing follows."""
    balanced = partial(row, routing="balanced")
    runs = balanced("a", ep=1), balanced("b", 120.0, ep=2), balanced("c", 90.0, ep=2, dp=4, tp=2)
    runs = *runs, row("d", 80.0, ep=1, routing="learned")
    points, texts = drawn("scaling", *runs, axis="ep")
    equal = points.groupby("equal_group")["run_id"].apply(set).tolist()
    assert sorted(map(sorted, equal)) == [["a", "b"], ["c"], ["d"]]
    assert {*points[points["is_best"]]["run_id"]} == {"a", "b", "d"}
    assert "Thin lines: runs that differ only in ep. Reserved" in texts


@pytest.mark.parametrize(("kind", "axis"), [("scaling", "tp"), ("failures", "tp"), ("pareto", None)])
def test_runs_that_lack_what_a_figure_shows_are_counted(kind, axis):
    points, texts = drawn(kind, row("a"), row("b", tp=None, peak_mem_reserved_bytes=None), axis=axis)
    assert len(points) == 1
    assert "Excluded: 1 run without" in texts


def test_scatter_has_mfu_as_height_or_the_speed_where_it_is_not_comparable():
    assert drawn("scatter", row("a", rate=200.0))[0]["height"].tolist() == pytest.approx([20.0])
    assert set(drawn("scatter", row("a"), row("b", flops_formula="megatron"))[0]["height"]) == {100.0}
    assert "tokens/s/GPU" in drawn("scatter", row("a", mfu=None))[1]


def test_failures_count_runs_by_how_they_ended():
    counts = drawn("failures", *SEVERAL)[0].set_index(["panel", "nodes", "shown_status"])["runs"]
    ends = [(1, "ok"), (2, "ok"), (2, "suspect"), (4, "ok"), (4, "oom"), (4, "pending")]
    assert counts.to_dict() == dict.fromkeys([*(("8B", *end) for end in ends), ("80B", 4, "ok")], 1)
    assert drawn("failures", *SEVERAL, axis="dp")[0]["dp"].max() == 32
    points, texts = drawn("failures", *SEVERAL, row("a", repeat=1))
    assert (points["repeats"].sum(), runs_drawn(points)) == (8, "8 repeats")
    assert "How 8 repeats ended" in texts
    with refused("2 repeats, none with tp, pp and mbs that ended ok"):
        drawn("largest-batch", row("a", mbs=None), row("a", mbs=None, repeat=1))


def test_scaling_has_the_best_of_each_value_and_what_is_equal_but_for_the_axis():
    rows = [
        row("a", rate=200.0), row("b", tp=2, dp=4, gas=64, rate=180.0), row("c", nodes=2, rate=150.0),
        row("d", nodes=2, mbs=2, gas=8, rate=160.0), row("e", nodes=2, rate=900.0, suspect="mfu 1.2 is above 1"),
        row("f", pp=2, dp=4, gas=64, pp_schedule="1f1b", virtual_stages=None, rate=170.0),
    ]  # fmt: skip
    points = by_run("scaling", *rows)
    assert list(points.index[points["is_best"]]) == ["a", "d"]
    assert points["equal_group"]["a"] == points["equal_group"]["c"] != points["equal_group"]["d"]
    assert points["memory_gib"]["a"] == 100.0
    points, texts = drawn("scaling", *rows, axis="tp")
    points = points.set_index("run_id")
    assert list(points.index[points["is_best"]]) == ["b", "a", "d"]
    assert points["equal_group"]["a"] == points["equal_group"]["b"] != points["equal_group"]["c"]
    words = ("over tp", "best on 1 node\n", "best on 2 nodes", "all else equal", "largest of all ranks")
    assert lacking(words, texts) == []
    points = by_run("scaling", *rows, axis="pp")
    assert points["equal_group"]["a"] == points["equal_group"]["f"]


def test_scaling_over_tp_draws_runs_with_and_without_sequence_parallelism_apart():
    rows = [
        row(f"{degree}{sp}", rate, tp=degree, dp=8 // degree, sequence_parallel=sp)
        for degree, sp, rate in ((2, "on", 100.0), (4, "on", 90.0), (2, "off", 80.0), (4, "off", 60.0))
    ]
    points, texts = drawn("scaling", *rows, axis="tp")
    assert points.set_index("run_id")["line"].to_dict() == {"2on": 1, "4on": 1, "2off": 1.5, "4off": 1.5}
    assert points["is_best"].all()
    assert [texts.count(line) for line in ("best on 1 node", "best on 1 node, TP without SP")] == [2, 1]
    assert set(drawn("scaling", *rows)[0]["line"]) == {0}


def test_scaling_says_which_memory_it_shows_and_where_no_line_has_two_values():
    imported = row("a", peak_mem_reserved_bytes=None, peak_mem_reserved_rank0_bytes=2**30)
    assert "of rank 0" in drawn("scaling", imported)[1]
    assert "not recorded" in drawn("scaling", row("a", peak_mem_reserved_bytes=None))[1]
    rows = row("a"), row("b", nodes=2, tp=2)
    assert "No line has two values of tp" in drawn("scaling", *rows, axis="tp")[1]
    assert "No line has" not in drawn("scaling", *rows, row("c", tp=2, dp=4), axis="tp")[1]


EFFICIENCY = ["efficiency", "efficiency_low", "efficiency_high"]


def weak_row(run_id, nodes, rate, ci, **columns):
    """A row of weak scaling, with half its relative 95 % interval."""
    batch = {"gbs": 256 * nodes, "gas": 32, "scaling": "weak"}
    return row(run_id, rate, nodes=nodes, step_time_ci95_rel=ci, **batch, **columns)


def test_panels_are_in_the_order_of_their_numbers():
    rows = [row(f"{s} {g}", seq_len=s, gbs=g) for s in (128, 64) for g in (1024, 8)]
    weak = [row(f"{n} {g}", gbs=n * g, nodes=n, scaling="weak", model="9B") for n in (2, 1) for g in (16, 8)]
    strong_panels = [f"8B | seq_len {s} | gbs {g}" for s in (64, 128) for g in ("8", "1,024")]
    weak_panels = [f"9B | seq_len 4,096 | gbs {g} per node" for g in (8, 16)]
    assert panels_of(*rows, *weak) == [*strong_panels, *weak_panels]


def test_the_batches_of_weak_scaling_share_a_panel():
    weak = [weak_row("a", 1, 200.0, 0.0), weak_row("b", 2, 150.0, 0.0)]
    assert panels_of(*weak) == ["8B"]
    assert len({cell.panel for cell in rank(table_of(*weak))}) == 1
    strong = row("c", 100.0, nodes=2, gbs=256, scaling="strong")
    assert {*panels_of(*weak, strong)} == {"8B | gbs 256 per node", "8B | gbs 256"}
    assert "nodes (weak: gbs 256 per node)" in drawn("scaling", *weak)[1]
    texts = drawn("scaling", *weak, strong)[1]
    assert lacking(("Strong and weak scaling", "nodes (strong: gbs 256)"), texts) == []


def test_efficiency_is_against_the_smallest_number_of_nodes_with_the_intervals_of_both():
    rows = weak_row("a", 2, 200.0, 0.03), weak_row("b", 4, 150.0, 0.04), weak_row("slow", 4, 80.0, 0.0, tp=2)
    points, texts = drawn("scaling", *rows)
    runs = points.set_index("run_id")
    assert runs["efficiency"]["a"] == 100
    assert math.isnan(runs["efficiency_low"]["a"])
    down, up = math.hypot(math.log(1.04), math.log(0.97)), math.hypot(math.log(0.96), math.log(1.03))
    assert [*runs.loc["b", EFFICIENCY]] == pytest.approx([75, 75 * math.exp(-down), 75 * math.exp(up)])
    assert math.isnan(runs["efficiency"]["slow"])
    assert math.isnan(runs["efficiency_equal"]["slow"])
    assert runs["efficiency_equal"]["b"] == 75
    assert lacking(("efficiency (% of 2 nodes)", "Weak scaling"), texts) == []


def test_the_interval_of_an_efficiency_holds_all_repeats_of_its_runs():
    repeats = [weak_row("b", 2, rate, 0.0, repeat=n) for n, rate in enumerate((90.0, 100.0, 120.0))]
    runs = by_run("scaling", weak_row("a", 1, 200.0, 0.0), *repeats)
    assert [*runs.loc["b", EFFICIENCY]] == pytest.approx([50, 45, 60])
    runs = by_run("scaling", weak_row("a", 1, 200.0, 0.0), weak_row("b", 2, 100.0, 1.5))
    assert [*runs.loc["b", EFFICIENCY]] == pytest.approx([50, 20, 500])


def test_the_largest_batch_is_predicted_by_the_memory_model_and_bounded_by_runs():
    large = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
             "intermediate_size": 14336, "vocab_size": 131072, "tp": 8, "dp": 1}  # fmt: skip
    ends = [("crash", 4), ("ok", 1), ("ok", 2), ("oom", 8), ("oom", 16)]
    rows = [row(f"{mbs}", status=status, mbs=mbs, gas=256 // mbs, **large) for status, mbs in ends]
    rows.append(row("x", status="ok", mbs=128, gas=2, suspect="other batch", **large))
    square = drawn("largest-batch", *rows)[0].iloc[0]
    assert (square["measured"], square["oom"], square["runs"]) == (2, 8, 4)
    profile, hardware = load_profile("ultrabench"), load_hardware("h100x8")
    constants, spec = memory_constants("ultrabench", profile.memory), spec_of(rows[0])
    chances = {}
    for mbs in (2**n for n in range(9)):
        with_mbs = replace(spec, layout=replace(spec.layout, mbs=mbs, gas=256 // mbs))
        chances[mbs] = p_oom(predict_memory(with_mbs, constants), hardware.mem_bytes, constants)
    assert square["predicted"] == max(mbs for mbs, chance in chances.items() if chance <= 0.5)
    assert square["contradicted"] == (not 2 <= square["predicted"] < 8)
    tiny = [row("a", status="oom", mbs=1), row("b", status="oom", mbs=1, tp=2, dp=4, gas=64, kernel="mine")]
    by_tp = drawn("largest-batch", *tiny)[0].set_index("tp")
    assert (by_tp["predicted"][1], by_tp["measured"][1], bool(by_tp["contradicted"][1])) == (32, 0, True)
    assert math.isnan(by_tp["predicted"][2])
    assert not by_tp["contradicted"][2]
    squares = drawn("largest-batch", row("a", status="oom", mbs=4, gas=8))[0]
    assert math.isnan(squares["measured"][0])
    assert squares["oom"][0] == 4


def test_pareto_marks_the_runs_that_no_other_beats():
    rows = [
        row("fast", rate=200.0, dp_shard=None),
        row("small", nodes=2, rate=90.0, peak_mem_reserved_bytes=2**30, virtual_stages=None),
        row("equal", rate=90.0, peak_mem_reserved_bytes=2**30 + 1), row("worse", rate=80.0),
        row("unknown", rate=999.0, peak_mem_reserved_bytes=None), row("doubtful", rate=999.0, suspect="mfu 1.2"),
    ]  # fmt: skip
    front = {"fast": True, "small": True, "equal": False, "worse": False}
    assert by_run("pareto", *rows)["is_on_front"].to_dict() == front


def test_pareto_by_another_column_has_the_front_where_rankings_have_the_best():
    rows = [
        row("saves", energy_j_per_step=50.0, tokens_per_j=4.0),
        row("small", energy_j_per_step=70.0, tokens_per_j=3.0, peak_mem_reserved_bytes=2**30),
        row("worse", energy_j_per_step=80.0, tokens_per_j=2.0), row("unknown"),
    ]  # fmt: skip
    for by, words in (("energy_j_per_step", " (lower is better)"), ("tokens_per_j", "")):
        points, texts = drawn("pareto", *rows, by=by)
        assert points.set_index("run_id")["is_on_front"].to_dict() == {
            "saves": True,
            "small": True,
            "worse": False,
        }
        assert by + words in texts.splitlines()


def test_pareto_says_how_many_runs_of_a_front_have_no_name():
    rows = [row(f"{n}", rate=100.0 * n, peak_mem_reserved_bytes=n * 2**30) for n in range(1, 21)]
    texts = drawn("pareto", *rows, row("close", rate=1999.0, peak_mem_reserved_bytes=20 * 2**30 - 1))[1]
    assert "Unlabelled: 6 runs of the front" in texts
    assert texts.count("1 node: ") == 15


def test_predicted_has_the_runs_that_may_win_and_have_a_prediction():
    rows = [
        row("a", rate=200.0, predicted_peak_mem_bytes=2**36), row("b", rate=150.0),
        row("c", predicted_step_time_s=None),
        row("d", suspect="x"), row("e", status="oom", predicted_step_time_s=1.0),
    ]  # fmt: skip
    predicted_gib = by_run("predicted", *rows)["predicted_gib"]
    assert (sorted(predicted_gib.index), predicted_gib.dropna().to_dict()) == (["a", "b"], {"a": 64.0})


def test_long_names_of_models_do_not_hide_what_tells_panels_apart():
    name = "meta-llama/Llama-3.1-8B-Instruct-" + 60 * "x"
    lines = drawn("failures", row("a", model=name), row("b", model=name, gbs=128))[1].splitlines()
    assert {"gbs 128", "gbs 256"} <= {*lines}


def test_the_lines_are_of_every_pp_and_stages_and_a_share_is_against_the_run_that_differs_only_in_its_pipeline():
    points, _ = bubble_points(table_of(*PIPELINES))
    pairs, lines = points[points["nodes"] > 0], points[points["nodes"] == 0]
    assert pairs[["pp", "schedule"]].values.tolist() == [[2, "1f1b"], [4, "interleaved"]]
    assert [*pairs["share"]] == pytest.approx([0.2, 0.5])
    assert {*zip(lines["pp"], lines["schedule"], lines["virtual_stages"], strict=True)} == {
        (pp, *series) for pp, v in ((2, 2), (4, 3), (8, 2)) for series in (("1f1b", 1), ("interleaved", v), ("zbv", 2))
    }  # fmt: skip
    shares = lines.set_index(["pp", "schedule", "gas"])["share"]
    assert (shares[2, "1f1b", 8], shares[4, "interleaved", 8]) == pytest.approx((1 / 9, 3 / (3 * 8 + 3)))


@pytest.mark.parametrize("facts", [{"kernel_version": "2"}, {"env_id": "y", "torch_version": "2"}])
def test_runs_of_two_versions_are_no_pair(facts):
    rows = row("like", env_id=facts.get("env_id") and "x"), piped("a", **facts)
    assert (bubble_points(table_of(*rows))[0]["nodes"] == 0).all()
    assert drawn("scaling", *rows, axis="pp")[0]["equal_group"].nunique() == 2


def test_a_panel_without_measured_pairs_says_so_and_every_point_is_inside_the_scale():
    figure = prepare_figure("bubble", table_of(*PIPELINES, piped("fast", 120.0)), title="t")[1]()
    texts = {axes.get_title("left"): [text.get_text() for text in axes.texts] for axes in figure.axes}
    assert texts == {"pp=2": [], "pp=4": [], "pp=8": ["no measured pairs"]}
    assert figure.axes[0].get_ylim()[0] == pytest.approx(100 * (1 - 120 / 100) - 6)


def test_formulas_stand_alone_where_no_run_was_measured():
    shown, texts = drawn("bubble", PIPELINES[-1])
    assert (shown["nodes"] == 0).all()
    assert "Points (0)" in texts


def overlaps(figure):
    """Texts of a figure that its edge cuts, and pairs of texts that lie over each other."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # places all texts
    axes = [(axis, axis.get_view_interval()) for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    unseen = {
        tick.label1 for axis, ends in axes for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        if not min(ends) <= tick.get_loc() <= max(ends)
    }  # fmt: skip
    texts = {text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()} - unseen
    boxes = [(text.get_text(), Text.get_window_extent(text, renderer).padded(-1)) for text in texts]
    edge, shown = figure.bbox.padded(1), [(text, box) for text, box in boxes if box.width > 0]
    cut = [text for text, box in shown if not (edge.contains(*box.min) and edge.contains(*box.max))]
    pairs = [(a, b) for (a, a_box), (b, b_box) in itertools.combinations(boxes, 2) if a_box.overlaps(b_box)]
    return cut, pairs


@pytest.mark.parametrize("models", [1, 8])
@pytest.mark.parametrize(("kind", "axis"), [*((kind, None) for kind in RUNS), ("failures", "dp")])
def test_no_text_is_cut_or_overlaps(kind, axis, models):
    rows = [
        row(f"{m}.{n}", 900.0 / (n + 1), nodes=2**n, model=f"model-{m}", num_params=10**9 * (m + 1),
            predicted_peak_mem_bytes=2**36, **SAVED)
        for m in range(models) for n in range(9 if models > 1 else 1)
    ]  # fmt: skip
    with figure_style():
        figure = prepare_figure(kind, table_of(*rows), title="a-sweep", axis=axis)[1]()
        assert overlaps(figure) == ([], [])
