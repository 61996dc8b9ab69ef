import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Polygon
from matplotlib.text import Text

from tests.unit.analysis.test_figures_runs import overlaps
from ultrabench.analysis.cells import Cell
from ultrabench.analysis.figures.heatmap import figure, wrap_reason
from ultrabench.analysis.figures.picture import render
from ultrabench.errors import ConfigError
from ultrabench.layout import AXES

GIB = 2**30


def cell(model="1B", nodes=1, **values):
    machine = {"hardware": "h100x8", "kernel": "embedded", "precision": "bf16", "seq_len": 4096, "gbs": 256}
    defaults = {
        "run_id": "a" * 16, "status": "ok", "reason": None, "mfu": 0.4321, "tokens_per_s_per_gpu": 41234.0,
        "layout": {"dp": 128, "tp": 32, "pp": 16, "zero_stage": 1, "mbs": 256, "gas": 256, "pp_schedule": "afab"},
        "peak_mem_reserved_bytes": int(41.8 * GIB), "num_runs": 3, "num_params": 1_340_000_000,
        "flops_formula": "palm",
    }  # fmt: skip
    known = machine | defaults | values
    return Cell(model=model, nodes=nodes, **{"shown_value": known["mfu"]} | known)


def failed(model, nodes, reason, status="crash"):
    return cell(model, nodes, status=status, reason=reason, run_id=None, mfu=None, layout={})


LONG = "3 crash: rank 5: RuntimeError: NCCL error in ProcessGroupNCCL.cpp:2093, unhandled " * 3


def grid(models, nodes):
    cells = [
        cell(f"{2**m}B", 2**n, mfu=0.6 / (n + m + 1), num_params=10**9 * 2**m)
        for m in range(models)
        for n in range(nodes)
    ]
    if len(cells) > 2:
        cells[1] = failed("1B", 2, LONG)
        del cells[-1]
    return cells


def texts_of(picture):
    """Visible texts of a figure with their boxes in pixels."""
    canvas = FigureCanvasAgg(picture)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = picture.findobj(lambda a: isinstance(a, matplotlib.text.Text) and a.get_text().strip())
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_visible()]


def test_the_caption_names_winners_whose_interval_is_wider_than_the_target():
    wide = [cell(nodes=n, ci_reached=False, step_time_ci95_rel=0.1 * n) for n in (1, 2)]
    met = cell(nodes=4, ci_reached=True, step_time_ci95_rel=0.9)
    (text,) = [t for t, _ in texts_of(figure([*wide, met], title="t")) if "wider than its target" in t]
    told = "2 of 3 cells the interval of the best is wider than its target, up to +- 20.0 % (1B on 2 nodes)."
    assert told in " ".join(text.split())
    weights = {t.get_text(): t.get_fontweight() for t in figure([wide[1], met], title="t").findobj(Text)}
    assert (weights["43.2 %"], weights["interval +- 20.0 %"]) == ("bold", "bold")
    weights = {t.get_text(): t.get_fontweight() for t in figure(wide, title="t").findobj(Text)}
    assert weights["43.2 %"] == "normal"
    assert not [t for t, _ in texts_of(figure([met], title="t")) if "wider" in t]


@pytest.mark.parametrize(("models", "nodes"), [(1, 1), (2, 2), (5, 7)])
@pytest.mark.parametrize("compared", [None, "last-week"])
def test_no_text_is_clipped_and_none_overlap(models, nodes, compared):
    cells = grid(models, nodes)
    if compared:
        more = {"ci_reached": False, "step_time_ci95_rel": 0.659, "compare_ratio": 1.08}
        cells = [c if c.mfu is None else replace(c, **more) for c in cells]
        crowded = {"num_runs": 4096, "num_oom": 1900, "num_failed": 1100, "as_good_as_best": ("b",) * 1000}
        cells = [replace(c, **crowded, compare_layout=cell().layout, varied_axes=AXES) for c in cells]
    picture = figure(cells, title="playbook-h100x8", notes="Layouts: 3 ok. " * 12, compared_with=compared)
    boxes = texts_of(picture)
    assert overlaps(picture) == ([], [])
    squares = picture.axes[0]
    for text, box in boxes:
        if text in [t.get_text() for t in squares.texts] and text.startswith(("dp", "3 crash", "mbs")):
            (x0, _), (x1, _) = squares.transData.inverted().transform([(box.x0, 0), (box.x1, 0)])
            assert int(x0) == int(x1), text


def test_svg_holds_the_words():
    cells = [
        cell(),
        failed("1B", 2, "all 12 oom", "oom"),
        cell("tiny", 2, mfu=None, num_params=295_000, tokens_per_s_per_gpu=1234.0),
        cell("tiny", 8, mfu=None, num_params=295_000, tokens_per_s_per_gpu=None),
        cell(
            "tiny", 16, mfu=0.0012, num_params=295_000, peak_mem_reserved_bytes=2**20, hardware="cpu",
            peak_source="measured",
        ),
        cell("tiny", 4, compare_ratio=1.08, num_params=295_000, as_good_as_best=("b",)),
        cell("1B", 4, peak_mem_reserved_bytes=None, peak_mem_reserved_rank0_bytes=3 * GIB),
    ]  # fmt: skip
    words = {"title": "quick & <dirty>", "notes": "Layouts: 2 ok.", "compared_with": "old"}
    svg = ET.fromstring(render(lambda: figure(cells, **words), Path("f.svg")))
    words = [" ".join("".join(e.itertext()).split()) for e in svg.iter() if e.tag.endswith("text")]
    for expected in (
        "Best layout per cell: quick & <dirty>", "43.2 %", "dp128 tp32 pp16 z1", "mbs256 gas256 afab",
        "41.8 GiB", "all 12 oom", "1.34 G params", "1.23 ktok/s", "1.08x of old", "MFU (% of peak)",
        "ok", "0.12 %", "1 MiB", "3.00 GiB (rank 0)", "measured", "FLOPs of MFU by the formula palm.", "In 1 of 7 cells other layouts are as good within the 95 % interval.",
    ):  # fmt: skip
        assert any(expected in word for word in words), (expected, words)


def test_a_square_counts_what_was_tried_and_marks_another_best_layout():
    degrees = {"dp": 8, "tp": 1, "pp": 1, "cp": 1, "zero_stage": 1, "dp_shard": 0}
    layout = degrees | {"mbs": 4, "gas": 8, "recompute": "none"}
    known = {"layout": layout | {"pp_schedule": "none", "virtual_stages": 1}, "num_runs": 1234}
    counts = {"num_oom": 20, "num_failed": 2, "as_good_as_best": ("b",), "num_repeats": 2}
    counts |= {"num_in_doubt": 3, "num_repeats_failed": 1}
    cells = [
        cell(**known, **counts, varied_axes=AXES, compare_layout=layout | {"tp": 2, "recompute": "every2"}),
        replace(failed("1B", 2, "all 3 oom"), compare_layout=layout, num_runs=3, num_oom=3),
        cell(nodes=4, **known),
    ]
    picture = figure(cells, title="t", compared_with="old")
    texts = [t.get_text() for t in picture.axes[0].texts]
    (first, second, third) = (
        [
            t.get_text()
            for t in picture.axes[0].texts
            if int(t.get_position()[0]) == column and t.get_position()[0] > 0
        ]
        for column in range(3)
    )
    assert first == [
        "43.2 %", "dp8 tp1 pp1 cp1 z1", "shard-all", "mbs4 gas8", "recompute-none", "41.8 GiB",
        "1 of 2 repeats failed", "1,234 tried, 1 as good", "20 oom, 2 failed", "3 in doubt",
        "other: dp8 tp2 pp1 cp1 z1", "shard-all mbs4 gas8", "recompute-every2",
    ]  # fmt: skip
    assert second == ["all 3 oom", "other: dp8 tp1 pp1 z1 mbs4", "gas8"]
    assert third == ["43.2 %", "dp8 tp1 pp1 z1", "mbs4 gas8", "41.8 GiB", "1,234 tried"]
    assert sum(isinstance(patch, Polygon) for patch in picture.axes[0].patches) == 2
    assert any("In 2 of 3 cells" in text for text, _ in texts_of(picture)), texts


def test_without_any_mfu_there_is_no_colour_bar():
    picture = figure([failed("1B", 1, "2 ok but suspect: hot", "ok")], title="t")
    assert len(picture.axes) == 1
    assert any(text.startswith("2 ok but suspect:") for text, _ in texts_of(picture))


@pytest.mark.parametrize(
    ("column", "value", "shown", "label"),
    [
        ("source_mfu", 0.443, "44.3 %", "source_mfu\n(% of peak)"),
        ("step_time_s", 12.5, "12.5 s", "step_time_s\nlowest wins"),
        ("peak_mem_reserved_bytes", 3 * GIB, "3.00 GiB", "peak_mem_reserved_bytes (GiB)\nlowest wins"),
        ("sm_clock_hz", 1.98e9, "1.98 GHz", "sm_clock_hz"),
    ],
)
def test_the_square_and_the_colour_bar_show_the_column_that_was_asked_for(column, value, shown, label):
    picture = figure([cell(shown_column=column, shown_value=value, mfu=0.38)], title="t")
    texts = [text for text, _ in texts_of(picture)]
    assert {shown, label} <= set(texts)
    assert not [text for text in texts if "38" in text or "formula" in text or "1e" in text]


def test_different_hardware_gets_its_own_panel():
    picture = figure([cell(), cell(hardware="h200x8"), cell(kernel="megatron", nodes=2)], title="t")
    titles = [text for text, _ in texts_of(picture) if "seq_len" in text]
    assert len(titles) == 3
    assert len(picture.axes) == 6


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_same_input_same_bytes_and_no_trace_in_the_settings(suffix, magic):
    odd = failed("$a$_{b}", 1, "cannot write $HOME/x^2_y \x1b[31mred\x1b[0m <tag> \u4f60")
    before = dict(matplotlib.rcParams)
    one, two = (
        render(lambda: figure([odd, cell(nodes=2)], title="$x", notes="a_b$c$"), Path(f"f.{suffix}"))
        for _ in range(2)
    )
    assert one == two
    assert dict(matplotlib.rcParams) == before
    assert one.startswith(magic)
    if suffix == "svg":
        ET.fromstring(one)
    if suffix == "pdf":
        assert b"/Type /Font" in one
        assert b"/TrueType" in one or b"CIDFontType2" in one
        assert b"CreationDate" not in one


def test_long_reasons_are_shortened():
    lines = wrap_reason(LONG + "x" * 200, 1.5)
    assert len(lines) == 6
    assert lines[-1].endswith("...")
    assert max(map(len, lines)) <= 23


def test_what_cannot_be_drawn():
    with pytest.raises(ConfigError, match=r"\.jpg; figures are written as \.png, \.svg or \.pdf"):
        render(lambda: figure([cell()], title="t"), Path("f.jpg"))
    with pytest.raises(ConfigError, match="no cells"):
        figure([], title="t")
    many = [cell(nodes=nodes, gbs=gbs) for gbs in range(25) for nodes in (1, 2)]
    with pytest.raises(
        ConfigError, match=r"^50 cells in 25 groups of .* holds 24 groups; .*ultrabench report"
    ):
        figure(many, title="t")
    assert figure(many[:-2], title="t").axes
