"""The commands `plot` and `report`: the kinds of figures, what is written, and what they say of mistakes."""

import pyarrow.parquet as pq
import pytest

from tests.unit.analysis.tables import PIPELINES, row, table_of
from tests.unit.cli.conftest import as_json, one_line
from ultrabench.analysis.figures.kinds import KINDS

OF_RESULTS = [kind for kind in KINDS if kind != "schedule"]


def test_list_shows_every_kind_in_a_line(ultrabench):
    code, out, _ = ultrabench("plot", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(KINDS)


def test_a_layout_is_drawn_without_results(ultrabench, tmp_path):
    code, _, said = ultrabench("plot", "schedule", "pp=2", "gas=3")
    assert (code, said) == (0, f"drew {tmp_path}/schedule.png\n")
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
    ("table", "told"),
    [(table_of(), "sweep launch"),
     (table_of(row("a", status="rejected", rule="heads")), "1 layout here, all rejected by a rule"),
     (table_of(row("p", model=None, kernel="probe")), "ultrabench plot comm")],
    ids=["empty", "rejected", "probes"],
)  # fmt: skip
def test_a_table_without_anything_to_draw_is_one_line(ultrabench, tmp_path, kind, table, told):
    pq.write_table(table, tmp_path / "t.parquet")
    words = ["tp=8"] if kind == "memory" else []
    said = one_line(ultrabench, "plot", kind, str(tmp_path / "t.parquet"), *words)
    assert (told if kind != "comm" else "no bandwidths by size here") in said


@pytest.mark.parametrize("kind", [kind for kind in OF_RESULTS if kind != "comm"])
def test_a_figure_is_drawn_without_the_columns_that_it_can_do_without(ultrabench, tmp_path, kind):
    """The missing columns are null, as those of rows of other programs are."""
    lacking = ["gas", "virtual_stages", "gbs", "num_params", "hardware", "precision", "mfu", "torch_version"]
    pq.write_table(table_of(*PIPELINES).drop_columns(lacking), tmp_path / "t.parquet")
    code, _, err = ultrabench("plot", kind, str(tmp_path / "t.parquet"), "-o", str(tmp_path / "f.svg"))
    assert (code, (tmp_path / "f.svg").exists()) == (0, True), err


def test_report_writes_the_page_beside_the_sweep_and_tells_a_script_what_it_wrote(ultrabench, sweep):
    told, path = as_json(ultrabench, "report"), sweep.path / "report.html"
    assert (told.pop("rows") > 0, told.pop("cells") > 0) == (True, True)
    assert told == {"path": str(path), "bytes": path.stat().st_size}
    assert path.read_text().startswith("<!DOCTYPE html>")
