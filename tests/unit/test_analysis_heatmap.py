import json
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ultrabench.analysis.cells import Cell
from ultrabench.analysis.figures.heatmap import figure
from ultrabench.analysis.figures.heatmap_cell import wrap_reason
from ultrabench.analysis.figures.picture import render
from ultrabench.errors import ConfigError
from ultrabench.layout import AXES

GIB = 2**30


def draw(cells, path, **words):
    path.write_bytes(render(lambda: figure(cells, **words), path))


def cell(model="1B", nodes=1, **values):
    defaults = {
        "run_id": "a" * 16, "status": "ok", "reason": None, "dp": 128, "tp": 32, "pp": 16, "cp": 1,
        "zero_stage": 1, "mbs": 256, "gas": 256, "mfu": 0.4321, "tokens_per_s_per_gpu": 41234.0,
        "peak_mem_reserved_bytes": int(41.8 * GIB), "num_runs": 3, "hardware": "h100x8",
        "kernel": "embedded", "precision": "bf16", "seq_len": 4096, "gbs": 256,
        "num_params": 1_340_000_000, "pp_schedule": "afab", "peak_source": "https://example.org",
    }  # fmt: skip
    given = defaults | values
    layout = {name: given.pop(name) for name in AXES if given.get(name) is not None}
    return Cell(model=model, nodes=nodes, layout=layout, **{k: v for k, v in given.items() if k not in AXES})


def failed(model, nodes, reason, status="crash"):
    nothing = dict.fromkeys(
        ("run_id", "dp", "tp", "pp", "cp", "zero_stage", "mbs", "gas", "mfu", "pp_schedule",
         "tokens_per_s_per_gpu", "peak_mem_reserved_bytes", "peak_source")
    )  # fmt: skip
    return cell(model, nodes, status=status, reason=reason, **nothing)


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
    for i, (text, box) in enumerate(boxes):
        for other, another in boxes[i + 1 :]:
            assert not box.shrunk(0.98, 0.95).overlaps(another.shrunk(0.98, 0.95)), (text, other)


def test_texts_of_a_cell_stay_inside_its_square():
    picture = figure(grid(5, 7), title="t", notes="n")
    axes = picture.axes[0]
    boxes = texts_of(picture)
    for text, box in boxes:
        if text in [t.get_text() for t in axes.texts] and text.startswith(("dp", "3 crash", "mbs")):
            (x0, _), (x1, _) = axes.transData.inverted().transform([(box.x0, 0), (box.x1, 0)])
            assert int(x0) == int(x1), text


def test_svg_holds_the_words(tmp_path):
    cells = [
        cell(),
        failed("1B", 2, "all 12 oom", "oom"),
        cell("tiny", 2, mfu=None, num_params=295_000, tokens_per_s_per_gpu=1234.0),
        cell("tiny", 4, compare_ratio=1.08, num_params=295_000, as_good_as_best=("b",)),
    ]
    path = tmp_path / "f.svg"
    draw(cells, path, title="quick & <dirty>", notes="Layouts: 2 ok.", compared_with="old")
    words = [" ".join("".join(e.itertext()).split()) for e in ET.parse(path).iter() if e.tag.endswith("text")]
    for expected in (
        "Best layout per cell: quick & <dirty>", "43.2 %", "dp128 tp32 pp16 z1", "mbs256 gas256 afab",
        "41.8 GiB", "all 12 oom", "1.34 G params", "1.23 ktok/s", "1.08x of old", "MFU (% of peak)",
        "In 1 of 4 cells other layouts are as good within the 95 % interval.",
    ):  # fmt: skip
        assert any(expected in word for word in words), (expected, words)


def test_a_cell_of_suspects_only_shows_its_reason(tmp_path):
    draw([failed("1B", 1, "2 ok but suspect: hot", "ok")], tmp_path / "f.svg", title="t")
    words = (tmp_path / "f.svg").read_text()
    assert "2 ok but suspect" in words
    assert "None" not in words


def test_without_any_mfu_there_is_no_colour_bar():
    assert len(figure([failed("1B", 1, "pending 4", None)], title="t").axes) == 1


def test_measured_peak_is_told(tmp_path):
    draw([cell(peak_source="measured")], tmp_path / "f.svg", title="t")
    assert "measured" in (tmp_path / "f.svg").read_text()


def test_different_hardware_gets_its_own_panel():
    picture = figure([cell(), cell(hardware="h200x8"), cell(kernel="megatron", nodes=2)], title="t")
    titles = [text for text, _ in texts_of(picture) if "seq_len" in text]
    assert len(titles) == 3
    assert len(picture.axes) == 6


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_same_input_same_bytes_and_no_trace_in_the_settings(tmp_path, suffix):
    before = dict(matplotlib.rcParams)
    pictures = []
    for name in ("a", "b"):
        path = tmp_path / (name + suffix)
        draw(grid(1, 2), path, title="t", notes="n")
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]
    assert dict(matplotlib.rcParams) == before
    magic = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG"}
    assert pictures[0].startswith(magic[suffix])
    if suffix == ".pdf":
        assert b"/Type /Font" in pictures[0]
        assert b"/TrueType" in pictures[0] or b"CIDFontType2" in pictures[0]
        assert b"CreationDate" not in pictures[0]


def test_words_that_drawing_could_misread(tmp_path):
    odd = failed("$a$_{b}", 1, "cannot write $HOME/x^2_y \x1b[31mred\x1b[0m <tag> \u4f60")
    for suffix in ("svg", "png", "pdf"):
        draw([odd], tmp_path / f"f.{suffix}", title="$x", notes="a_b$c$")
    ET.parse(tmp_path / "f.svg")


def test_long_reasons_are_shortened():
    lines = wrap_reason(LONG + "x" * 200, 1.5)
    assert len(lines) == 6
    assert lines[-1].endswith("...")
    assert max(map(len, lines)) <= 23


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(ConfigError, match=r"\.jpg.*known: \.pdf, \.png, \.svg"):
        draw([cell()], tmp_path / "f.jpg", title="t")
    with pytest.raises(ConfigError, match="no cells"):
        draw([], tmp_path / "f.png", title="t")


def test_cells_are_json():
    assert json.loads(json.dumps(cell().to_json()))["mfu"] == 0.4321
