"""The command `report`."""

from tests.unit.cli.conftest import one_line


def test_report_writes_the_page_beside_the_sweep(ultrabench, sweep):
    code, _, err = ultrabench("report")
    assert code == 0, err
    assert (sweep.path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_report_writes_html_only(ultrabench, sweep):
    assert "name a file that ends in .html" in one_line(ultrabench, "report", "-o", "page.pdf")
