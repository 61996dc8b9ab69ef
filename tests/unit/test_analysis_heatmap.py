import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ultrabench.analysis.cells import Cell
from ultrabench.analysis.figures.heatmap import figure, wrap_reason
from ultrabench.analysis.figures.picture import render
from ultrabench.errors import ConfigError

GIB = 2**30


def cell(model="1B", nodes=1, **values):
    machine = {"hardware": "h100x8", "kernel": "embedded", "precision": "bf16", "seq_len": 4096, "gbs": 256}
    defaults = {
        "run_id": "a" * 16, "status": "ok", "reason": None, "mfu": 0.4321, "tokens_per_s_per_gpu": 41234.0,
        "layout": {"dp": 128, "tp": 32, "pp": 16, "zero_stage": 1, "mbs": 256, "gas": 256, "pp_schedule": "afab"},
        "peak_mem_reserved_bytes": int(41.8 * GIB), "num_runs": 3, "num_params": 1_340_000_000,
        "flops_formula": "palm",
    }  # fmt: skip
    return Cell(model=model, nodes=nodes, **machine | defaults | values)


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


@pytest.mark.parametrize(("models", "nodes"), [(1, 1), (1, 2), (2, 2), (5, 7)])
@pytest.mark.parametrize("compared", [None, "last-week"])
def test_no_text_is_clipped_and_none_overlap(models, nodes, compared):
    cells = grid(models, nodes)
    if compared:
        cells = [c if c.mfu is None else cell(c.model, c.nodes, num_params=c.num_params, compare_ratio=1.08)
                 for c in cells]  # fmt: skip
    picture = figure(cells, title="playbook-h100x8", notes="Layouts: 3 ok. " * 12, compared_with=compared)
    boxes = texts_of(picture)
    width, height = picture.bbox.width, picture.bbox.height
    for text, box in boxes:
        assert 0 <= box.x0 <= box.x1 <= width, text
        assert 0 <= box.y0 <= box.y1 <= height, text
    squares = picture.axes[0]
    for text, box in boxes:
        if text in [t.get_text() for t in squares.texts] and text.startswith(("dp", "3 crash", "mbs")):
            (x0, _), (x1, _) = squares.transData.inverted().transform([(box.x0, 0), (box.x1, 0)])
            assert int(x0) == int(x1), text
    for i, (text, box) in enumerate(boxes):
        for other, another in boxes[i + 1 :]:
            assert not box.shrunk(0.98, 0.95).overlaps(another.shrunk(0.98, 0.95)), (text, other)


def test_svg_holds_the_words():
    cells = [
        cell(),
        failed("1B", 2, "all 12 oom", "oom"),
        cell("tiny", 2, mfu=None, num_params=295_000, tokens_per_s_per_gpu=1234.0),
        cell("tiny", 8, mfu=None, num_params=295_000, tokens_per_s_per_gpu=None),
        cell(
            "tiny",
            16,
            mfu=0.0012,
            num_params=295_000,
            peak_mem_reserved_bytes=2**20,
            hardware="cpu",
            peak_source="measured",
        ),
        cell("tiny", 4, compare_ratio=1.08, num_params=295_000, as_good_as_best=("b",)),
    ]
    words = {"title": "quick & <dirty>", "notes": "Layouts: 2 ok.", "compared_with": "old"}
    svg = ET.fromstring(render(lambda: figure(cells, **words), Path("f.svg")))
    words = [" ".join("".join(e.itertext()).split()) for e in svg.iter() if e.tag.endswith("text")]
    for expected in (
        "Best layout per cell: quick & <dirty>", "43.2 %", "dp128 tp32 pp16 z1", "mbs256 gas256 afab",
        "41.8 GiB", "all 12 oom", "1.34 G params", "1.23 ktok/s", "1.08x of old", "MFU (% of peak)",
        "ok", "0.12 %", "1 MiB", "measured", "FLOPs of MFU by the formula palm.", "In 1 of 6 cells other layouts are as good within the 95 % interval.",
    ):  # fmt: skip
        assert any(expected in word for word in words), (expected, words)


def test_without_any_mfu_there_is_no_colour_bar():
    picture = figure([failed("1B", 1, "2 ok but suspect: hot", "ok")], title="t")
    assert len(picture.axes) == 1
    assert any(text.startswith("2 ok but suspect:") for text, _ in texts_of(picture))


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
    with pytest.raises(ConfigError, match=r"\.jpg.*known: \.pdf, \.png, \.svg"):
        render(lambda: figure([cell()], title="t"), Path("f.jpg"))
    with pytest.raises(ConfigError, match="no cells"):
        figure([], title="t")
