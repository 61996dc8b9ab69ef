"""The command `report`."""

import json

from tests.unit.cli.conftest import one_line


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
