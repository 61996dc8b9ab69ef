"""The commands `plot` and `report`: the kinds of figures, what is written, and what they say of mistakes."""

import json

import pyarrow.parquet as pq
import pytest

from tests.unit.analysis.test_figures_bubble import RUNS
from tests.unit.analysis.test_figures_runs import row, table_of
from tests.unit.cli.conftest import one_line
from ultrabench.analysis.figures.kinds import KINDS
from ultrabench.analysis.schema import VERSION_KEY

OF_RESULTS = [kind for kind in KINDS if kind != "schedule"]


def test_list_shows_every_kind_in_a_line(ultrabench):
    code, out, _ = ultrabench("plot", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(KINDS)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["com"], "unknown figure 'com'; did you mean comm?"),
        (["comm", "x.yml"], "x.yml is no parquet file; results are read from a sweep or a .parquet file of"),
        (["comm", "x.csv"], "ultrabench collect or import: ultrabench import x.csv --map MAP.yaml"),
        (["comm", "a", "b"], "a b: name one sweep or file"),
        (["comm", "nodez=4"], "unknown column 'nodez'; did you mean nodes"),
        (["comm", "nodes=3"], "unknown value of nodes in these rows '3'"),
        (["schedule", "x.parquet"], "cannot read x.parquet"),
        (["schedule", "quick-cpu"], "the figure schedule shows a layout, no results"),
        (["schedule", "tp=2"], "unknown word of the figure schedule 'tp'"),
        (["schedule", "pp=4", "gas=2", "pp_schedule=interleaved"], "cannot run: gas=2 is less than pp-1=3"),
        (["schedule", "pp=4", "gas=3", "pp_schedule=1f1b"], "1f1b needs gas >= pp; gas=3, pp=4"),
        (["schedule", "pp=4", "gas=9", "pp_schedule=interleaved"], "a multiple of its 2 rounds; gas=9"),
        (["schedule", "virtual_stages=2"], "virtual_stages=2 with pp_schedule=1f1b; must be 1"),
        (["schedule", "pp=100", "gas=101"], "pp=100, gas=101 has 20,200 passes; a figure holds 20,000"),
        (["memory", "tpp=3"], "unknown argument 'tpp'; did you mean tp"),
        (["memory", "--axis", "ppp"], "unknown axis of the figure memory 'ppp'; did you mean pp"),
        (["comm", "--axis", "tp"], "--axis tp: the figure comm has no choice of axis"),
    ],
)
def test_a_mistake_is_one_line(ultrabench, sweep, words, told):
    assert told in one_line(ultrabench, "plot", *words)


def test_a_layout_is_drawn_without_results(ultrabench, tmp_path):
    code, _, said = ultrabench("plot", "schedule", "pp=2", "gas=3")
    assert (code, said) == (0, f"drew {tmp_path}/schedule.png\n")
    assert (tmp_path / "schedule.png").stat().st_size > 10_000


def test_figures_of_two_tables_and_of_two_axes_have_names_of_their_own(ultrabench, tmp_path, sweep):
    ultrabench("collect")
    for name in ("a", "b", "runs"):
        pq.write_table(table_of(*RUNS), tmp_path / f"{name}.parquet")
    pairs = [("a", "a-"), ("b", "b-"), ("runs", "runs-"), ("results/quick-cpu/runs", "results/quick-cpu/")]
    for table, begin in pairs:
        assert ultrabench("report", f"{table}.parquet")[2].endswith(f" to {begin}report.html\n")
        assert f" to {begin}heatmap.png" in ultrabench("heatmap", f"{table}.parquet")[2]
    for axis in ("tp", "dp"):
        assert f" to a-scaling-{axis}.png" in ultrabench("plot", "scaling", "a.parquet", "--axis", axis)[2]
    assert "quick-cpu: ultrabench report" in (sweep.path / "report.html").read_text()


@pytest.mark.parametrize("kind", OF_RESULTS)
@pytest.mark.parametrize(
    ("table", "told"),
    [
        (table_of(*RUNS).replace_schema_metadata({VERSION_KEY: "99"}), "t.parquet has schema 99"),
        (table_of(*RUNS).drop_columns("run_id"), "t.parquet is no result table; make one"),
        (table_of(), "sweep launch"),
        (table_of(row("a", status="rejected", rule="heads")), "1 layout here, all rejected by a rule"),
        (table_of(row("p", model=None, kernel="probe")), "ultrabench plot comm"),
    ],
    ids=["newer", "no run_id", "empty", "rejected", "probes"],
)
def test_a_table_without_anything_to_draw_is_one_line(ultrabench, tmp_path, kind, table, told):
    pq.write_table(table, tmp_path / "t.parquet")
    words = ["tp=8"] if kind == "memory" else []
    said = one_line(ultrabench, "plot", kind, str(tmp_path / "t.parquet"), *words)
    assert (told if kind != "comm" or "t.parquet" in told else "no bandwidths by size here") in said


@pytest.mark.parametrize("kind", [kind for kind in OF_RESULTS if kind != "comm"])
def test_a_figure_is_drawn_without_the_columns_that_it_can_do_without(ultrabench, tmp_path, kind):
    """The missing columns are null, as those of rows of other programs are."""
    lacking = ["gas", "virtual_stages", "gbs", "num_params", "hardware", "precision", "mfu", "torch_version"]
    pq.write_table(table_of(*RUNS).drop_columns(lacking), tmp_path / "t.parquet")
    code, _, err = ultrabench("plot", kind, str(tmp_path / "t.parquet"), "-o", str(tmp_path / "f.svg"))
    assert (code, (tmp_path / "f.svg").exists()) == (0, True), err


def test_report_writes_the_page_beside_the_sweep(ultrabench, sweep):
    code, _, err = ultrabench("report")
    assert code == 0, err
    assert (sweep.path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_report_tells_a_script_what_it_wrote(ultrabench, sweep):
    code, out, err = ultrabench("report", "--json")
    path = sweep.path / "report.html"
    told = json.loads(out)
    assert (code, err, told.pop("rows") > 0, told.pop("cells") > 0) == (0, "", True, True)
    assert told == {"path": str(path), "bytes": path.stat().st_size}


def test_report_writes_html_only(ultrabench, sweep):
    assert "name a file that ends in .html" in one_line(ultrabench, "report", "-o", "page.pdf")
