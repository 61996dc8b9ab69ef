import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from matplotlib.patches import Polygon
from matplotlib.text import Text

from tests.configs import refused
from tests.unit.analysis.test_figures_runs import overlaps
from ultrabench.analysis.figures.heatmap import figure, wrap_reason
from ultrabench.analysis.figures.picture import render
from ultrabench.analysis.results.cells import Cell
from ultrabench.layout import AXES

GIB = 2**30


def cell(model="1B", nodes=1, **values):
    fields = {
        "hardware": "h100x8", "kernel": "embedded", "precision": "bf16", "seq_len": 4096, "gbs": 256,
        "run_id": "a" * 16, "status": "ok", "reason": None, "mfu": 0.4321, "tokens_per_s_per_gpu": 41234.0,
        "layout": {"dp": 128, "tp": 32, "pp": 16, "zero_stage": 1, "mbs": 256, "gas": 256, "pp_schedule": "afab"},
        "peak_mem_reserved_bytes": int(41.8 * GIB), "num_runs": 3, "num_params": 1_340_000_000,
        "flops_formula": "palm",
    } | values  # fmt: skip
    return Cell(model=model, nodes=nodes, **{"shown_value": fields["mfu"]} | fields)


def failed(model, nodes, reason, status="crash"):
    return cell(model, nodes, status=status, reason=reason, run_id=None, mfu=None, layout={})


LONG = "3 crash: rank 5: RuntimeError: NCCL error in ProcessGroupNCCL.cpp:2093, unhandled " * 3


ODD = failed("$a$_{b}", 1, "cannot write $HOME/x^2_y \x1b[31mred\x1b[0m <tag> \u4f60")


def texts_of(picture):
    return [text.get_text() for text in picture.findobj(Text) if text.get_text().strip()]


def weights_of(*cells):
    return {text.get_text(): text.get_fontweight() for text in figure(cells, title="t").findobj(Text)}


def test_the_caption_names_winners_whose_interval_is_wider_than_the_target():
    narrow, wide = (cell(nodes=n, ci_reached=False, step_time_ci95_rel=0.1 * n) for n in (1, 2))
    met = cell(nodes=4, ci_reached=True, step_time_ci95_rel=0.9)
    caption = "2 of 3 cells the interval of the best layout is wider than its target, up to +- 20.0 % (1B on 2 nodes)."
    assert caption in " ".join(" ".join(texts_of(figure([narrow, wide, met], title="t"))).split())
    weights = weights_of(wide, met)
    assert (weights["43.2 %"], weights["interval +- 20.0 %"]) == ("bold", "bold")
    assert weights_of(narrow, wide)["43.2 %"] == "normal"
    assert "wider" not in " ".join(weights_of(met))


@pytest.mark.parametrize(("models", "nodes"), [(1, 1), (2, 2), (5, 7)])
@pytest.mark.parametrize("compared", [None, "last-week"])
def test_no_text_is_clipped_and_none_overlap(models, nodes, compared):
    crowded = {
        "ci_reached": False, "step_time_ci95_rel": 0.659, "compare_ratio": 1.08, "num_runs": 4096, "num_oom": 1900,
        "num_failed": 1100, "as_good_as_best": ("b",) * 1000, "compare_layout": cell().layout, "varied_axes": AXES,
    }  # fmt: skip
    cells = [
        cell(f"{2**m}B", 2**n, mfu=0.6 / (n + m + 1), num_params=10**9 * 2**m, **(crowded if compared else {}))
        for m in range(models) for n in range(nodes)
    ]  # fmt: skip
    if len(cells) > 2:
        cells[1:] = [failed("1B", 2, LONG), *cells[2:-1]]
    picture = figure(cells, title="playbook-h100x8", notes="Layouts: 3 ok. " * 12, compared_name=compared)
    assert overlaps(picture) == ([], [])
    squares = picture.axes[0]
    to_squares = squares.transData.inverted()
    inside = [text for text in squares.texts if text.get_text().startswith(("dp", "3 crash", "mbs"))]
    ends = [text.get_window_extent().transformed(to_squares) for text in inside]
    assert ends
    assert [int(end.x0) for end in ends] == [int(end.x1) for end in ends]


def test_svg_holds_the_words():
    tiny = {"model": "tiny", "num_params": 295_000}
    cells = [
        cell(), failed("1B", 2, "all 12 oom", "oom"), cell(nodes=2, mfu=None, tokens_per_s_per_gpu=1234.0, **tiny),
        cell(nodes=8, mfu=None, tokens_per_s_per_gpu=None, **tiny),
        cell(nodes=16, mfu=0.0012, peak_mem_reserved_bytes=2**20, hardware="cpu", peak_source="measured", **tiny),
        cell(nodes=4, compare_ratio=1.08, as_good_as_best=("b",), suspect="hot", **tiny),
        cell(nodes=4, peak_mem_reserved_bytes=None, peak_mem_reserved_rank0_bytes=3 * GIB), ODD,
        cell(precision="fp8", mfu=0.301),
    ]  # fmt: skip
    options = {"title": "quick & <dirty> $x", "notes": "Layouts: 2 ok.", "compared_name": "old"}
    svg = ET.fromstring(render(lambda: figure(cells, **options), Path("f.svg")))
    content = "\n".join(" ".join("".join(e.itertext()).split()) for e in svg.iter() if e.tag.endswith("text"))
    expected = (
        "Best layout per cell: quick & <dirty> $x", "$a$_{b}", "$HOME/x^2_y", "43.2 %",
        "dp128 tp32 pp16 z1", "mbs256 gas256 afab", "41.8 GiB", "all 12 oom", "1.34 G params", "1.23 ktok/s",
        "1.08x of old", "MFU (% of peak)", "MFU of fp8 (% of",
        "\nok\n", "0.12 %", "\n1 MiB", "3.00 GiB (rank 0)", "measured", "MFU uses the FLOPs formula palm.",
        "In 1 of 9 cells several layouts tie for best: their 95 % intervals overlap.",
        "Factors such as 1.00x (in 1 of 9 cells): tokens/s/GPU relative to the best of old.",
        "In 1 of 9 cells the layout shown is suspect, such as tiny on 4 nodes: hot.",
    )  # fmt: skip
    assert [text for text in expected if text not in content] == []


def test_a_square_counts_what_was_tried_and_marks_another_best_layout():
    degrees = {"dp": 8, "tp": 1, "pp": 1, "cp": 1, "zero_stage": 1, "dp_shard": 0}
    layout = degrees | {"mbs": 4, "gas": 8, "recompute": "none"}
    fields = {"layout": layout | {"pp_schedule": "none", "virtual_stages": 1}, "num_runs": 1234}
    counts = {"num_oom": 20, "num_failed": 2, "as_good_as_best": ("b",), "num_repeats": 2}
    counts |= {"num_in_doubt": 3, "num_repeats_failed": 1}
    cells = [
        cell(**fields, **counts, varied_axes=AXES, compare_layout=layout | {"tp": 2, "recompute": "every2"}),
        replace(failed("1B", 2, "all 3 oom"), compare_layout=layout, num_runs=3, num_oom=3),
        cell(nodes=4, **fields),
    ]
    picture = figure(cells, title="t", compared_name="old")
    texts = [(text.get_position()[0], text.get_text()) for text in picture.axes[0].texts]
    assert [[text for x, text in texts if column < x < column + 1] for column in range(3)] == [
        ["43.2 %", "dp8 tp1 pp1 cp1 z1", "shard-all", "mbs4 gas8", "recompute-none", "41.8 GiB",
         "1 of 2 repeats failed", "1,234 tried, 1 as good", "20 oom, 2 failed, 3 suspect",
         "other: dp8 tp2 pp1 cp1 z1", "shard-all mbs4 gas8", "recompute-every2"],
        ["all 3 oom", "other: dp8 tp1 pp1 z1 mbs4", "gas8"],
        ["43.2 %", "dp8 tp1 pp1 z1", "mbs4 gas8", "41.8 GiB", "1,234 tried"],
    ]  # fmt: skip
    assert sum(isinstance(patch, Polygon) for patch in picture.axes[0].patches) == 2
    note = "In 2 of 3 cells, marked by a corner, old has a different best layout"
    assert note in " ".join(texts_of(picture))


@pytest.mark.parametrize(
    ("column", "value", "shown", "label"),
    [
        ("source_mfu", 0.443, "44.3 %", "source_mfu\n(% of peak)"),
        ("step_time_s", 12.5, "12.5 s", "step_time_s\nlower is better"),
        ("peak_mem_reserved_bytes", 3 * GIB, "3.00 GiB", "peak_mem_reserved_bytes (GiB)\nlower is better"),
        ("sm_clock_hz", 1.98e9, "1.98 GHz", "sm_clock_hz"),
    ],
)
def test_the_square_and_the_colour_bar_show_the_column_that_was_asked_for(column, value, shown, label):
    picture = figure([cell(shown_column=column, shown_value=value, mfu=0.38)], title="t")
    picture.draw_without_rendering()
    texts = texts_of(picture)
    assert {shown, label} <= set(texts)
    assert not [text for text in texts if "38" in text or "formula" in text or "1e" in text]


def test_different_hardware_gets_its_own_panel_and_a_panel_without_mfu_no_colour_bar():
    cells = [cell(), cell(hardware="h200x8"), failed("1B", 2, "2 ok but suspect: hot")]
    picture = figure([*cells, cell(kernel="megatron", mfu=None)], title="t")
    assert len([text for text in texts_of(picture) if "seq_len" in text]) == 3
    assert len(picture.axes) == 3 + 2


@pytest.mark.parametrize(
    ("suffix", "holds"),
    [("svg", rb"<\?xml"), ("pdf", rb"%PDF.*(/TrueType|CIDFontType2)"), ("png", rb"\x89PNG")],
)
def test_same_input_same_bytes_and_no_trace_in_the_settings(suffix, holds):
    before, paths = dict(matplotlib.rcParams), [Path(f"f.{suffix}")] * 2
    first, second = (
        render(lambda: figure([ODD, cell(nodes=2)], title="$x", notes="a_b$c$"), path) for path in paths
    )
    assert first == second
    assert dict(matplotlib.rcParams) == before
    assert re.match(holds, first, re.DOTALL)
    assert b"CreationDate" not in first


def test_long_reasons_are_shortened():
    lines = wrap_reason(LONG + "x" * 200, 1.5)
    assert (len(lines), lines[-1][-3:]) == (6, "...")
    assert max(map(len, lines)) <= 23


def test_what_cannot_be_drawn():
    with refused("no cells"):
        figure([], title="t")
    cells = [cell(gbs=gbs) for gbs in range(25)]
    groups = "25 cells in 25 groups of hardware, kernel, precision, routing, seq_len and gbs"
    with refused(f"{groups}; a heatmap holds at most 24 groups"):
        figure(cells, title="t")
    assert len(figure(cells[1:], title="t").axes) == 48
