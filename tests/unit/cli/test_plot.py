"""The commands `plot` and `report`: the kinds of figures, what is written, and what they say of mistakes."""

import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.unit.analysis.tables import PIPELINES, row, table_of
from tests.unit.cli.conftest import as_json, one_line
from ultrabench.analysis.figures.kinds import KINDS

ROOT = Path(__file__).parents[3]
GALLERY = runpy.run_path(str(ROOT / "examples/gallery/draw.py"))["commands"]()
"""The words of each command of examples/gallery/README.md."""
OF_RESULTS = [kind for kind in KINDS if kind != "schedule"]
OVER_ANY_AXIS = ["--axis", "pp"]
"""Words for a figure that is drawn over any axis."""


def test_list_shows_every_kind_in_a_line(ultrabench):
    code, out, _ = ultrabench("plot", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(KINDS)


def test_every_kind_of_figure_is_in_the_gallery():
    assert {words[1] for words in GALLERY if words[0] == "plot"} == {*KINDS}


@pytest.mark.parametrize("words", GALLERY, ids=lambda words: Path(words[-1]).name)
def test_a_command_of_the_gallery_draws_its_picture(ultrabench, words, tmp_path, monkeypatch):
    drawn, picture = tmp_path / Path(words[-1]).name, ROOT / words[-1]
    monkeypatch.chdir(ROOT)
    code, _, err = ultrabench(*words[:-1], str(drawn))
    assert code == 0, err
    assert drawn.stat().st_size > 5000
    assert picture.exists() or picture.suffix == ".html", "draw it: make gallery"


def test_a_layout_is_drawn_without_results(ultrabench, tmp_path):
    code, _, err = ultrabench("plot", "schedule", "pp=2", "gas=3")
    assert (code, err) == (0, f"drew {tmp_path}/schedule.png\n")
    assert (tmp_path / "schedule.png").stat().st_size > 10_000


def test_figures_of_two_tables_and_of_two_axes_have_names_of_their_own(ultrabench, tmp_path, sweep):
    ultrabench("collect")
    for name in ("a", "runs"):
        pq.write_table(table_of(*PIPELINES), tmp_path / f"{name}.parquet")
    for table, begin in (("a", "a-"), ("runs", "runs-"), ("results/quick-cpu/runs", "results/quick-cpu/")):
        assert ultrabench("report", f"{table}.parquet")[2].endswith(f" to {begin}report.html\n")
        assert f" to {begin}heatmap.png" in ultrabench("heatmap", f"{table}.parquet")[2]
    for axis in ("tp", "dp"):
        assert f" to a-scaling-{axis}.png" in ultrabench("plot", "scaling", "a.parquet", "--axis", axis)[2]
    assert "quick-cpu: ultrabench report" in (sweep.path / "report.html").read_text()


@pytest.mark.parametrize("kind", OF_RESULTS)
@pytest.mark.parametrize(
    ("table", "message"),
    [(table_of(), "sweep launch"),
     (table_of(row("a", status="rejected", rule="heads")), "1 layout, all rejected by rules"),
     (table_of(row("p", model=None, kernel="probe")), "ultrabench plot comm")],
    ids=["empty", "rejected", "probes"],
)  # fmt: skip
def test_a_table_without_anything_to_draw_is_one_line(ultrabench, tmp_path, kind, table, message):
    pq.write_table(table, tmp_path / "t.parquet")
    words = ["tp=8"] if kind == "memory" else OVER_ANY_AXIS if KINDS[kind].takes_any_axis else []
    line = one_line(ultrabench, "plot", kind, str(tmp_path / "t.parquet"), *words)
    assert (message if kind != "comm" else "the table has no bandwidths by size") in line


@pytest.mark.parametrize("kind", [kind for kind in OF_RESULTS if kind not in ("comm", "nodes")])
def test_a_figure_is_drawn_without_the_columns_that_it_can_do_without(ultrabench, tmp_path, kind):
    """The missing columns are null, as those of rows of other programs are."""
    lacking = ["gas", "virtual_stages", "gbs", "num_params", "hardware", "precision", "mfu", "torch_version"]
    pq.write_table(table_of(*PIPELINES).drop_columns(lacking), tmp_path / "t.parquet")
    words = OVER_ANY_AXIS if KINDS[kind].takes_any_axis else []
    code, _, err = ultrabench("plot", kind, "t.parquet", *words, "-o", "f.svg")
    assert (code, (tmp_path / "f.svg").exists()) == (0, True), err


def test_report_writes_the_page_beside_the_sweep_and_tells_a_script_what_it_wrote(ultrabench, sweep):
    report, path = as_json(ultrabench, "report"), sweep.path / "report.html"
    assert (report.pop("rows") > 0, report.pop("cells") > 0) == (True, True)
    assert report == {"path": str(path), "bytes": path.stat().st_size}
    assert path.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("words", "message"),
    [("zero_stag t.parquet", "did you mean zero_stage? (known: pp, mbs, "),
     ("tp t.parquet", "tp did not vary in these runs; axes that varied: pp, mbs, pp_schedule"),
     ("gas t.parquet", "gas follows from the other axes and the batch; choose another axis; axes that varied: pp"),
     ("t.parquet", "no axis given; give one, as in ultrabench plot effect AXIS; axes that varied: pp"),
     ("pp_schedule t.parquet", "no pairs for pp_schedule: no two runs differ only in it; "
     "to list the axes that have pairs: ultrabench sweep effects")],
)  # fmt: skip
def test_an_effect_that_cannot_be_drawn_is_one_line_with_the_axes_that_varied(
    ultrabench, tmp_path, words, message
):
    pq.write_table(table_of(*PIPELINES), tmp_path / "t.parquet")
    line = one_line(ultrabench, "plot", "effect", *words.split())
    assert message.replace("mbs, pp_schedule", "") in line


def test_a_name_without_its_group_is_understood(ultrabench, tmp_path):
    rows = row("a", variant='{"words.etp": 1}'), row("b", variant='{"words.etp": 8}')
    pq.write_table(table_of(*rows), tmp_path / "t.parquet")
    line = one_line(ultrabench, "plot", "effect", "etp", "t.parquet")
    assert "unknown axis 'etp'; did you mean words.etp?" in line


def test_effects_are_a_table_a_document_and_a_figure(ultrabench, tmp_path):
    stopped = row("s", mbs=4, gas=8, stopped="slower_than_best")
    pq.write_table(table_of(*PIPELINES, stopped), tmp_path / "t.parquet")
    code, out, err = ultrabench("sweep", "effects", "t.parquet")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (code, lines[1]) == (0, "axis value baseline speedup 98 % interval pairs")
    assert "pp 2 1 0.800 too few pairs (need 3) 1" in lines
    assert "No pairs for pp_schedule: no two runs differ only in it." in err
    assert "The baseline is the first value listed in the sweep, or the most frequent value" in err
    excluded = "1 out of memory or failed, 1 suspect, 1 stopped early as slower than the best"
    assert f"Runs excluded: {excluded}." in err
    document = as_json(ultrabench, "sweep", "effects", "t.parquet")
    first = {"axis": "pp", "value": 2, "against": 1, "ratio": pytest.approx(0.8), "low": None, "high": None}
    assert next(e for e in document["effects"] if e["axis"] == "pp") == {
        **first,
        "pairs": 1,
        "proven": False,
        "predicted": False,
    }
    assert document["left_out"] == {"failed": 1, "suspect": 1, "stopped": 1}
    assert set(document["without_pairs"]) >= {"dp", "gas", "pp_schedule"}
    assert ultrabench("plot", "effect", "pp", "t.parquet")[2] == "drew t-effect-pp.png\n"
    ultrabench("plot", "effect", "pp", "t.parquet", "-o", "f.svg")
    drawn = (tmp_path / "f.svg").read_text()
    for text in ("Speedup by pp, all else equal: t, 8B", "speed relative to pp=1", "1 pair", "baseline"):
        assert text in drawn
