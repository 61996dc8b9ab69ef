"""A status has one home, from which every list, colour and decision follows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ultrabench.result import STATUSES, Status

FAILURES_PAGE = Path(__file__).parents[3] / "docs/guide/failures.md"


def test_a_status_that_its_table_lists_appears_everywhere(tmp_path):
    command = [sys.executable, "-m", "tests.unit.analysis.new_status", str(tmp_path)]
    shown = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert shown == {
        "status": [{"melted": 1}, ["melted"]], "live": True, "terminal": "red", "retry": [True, 30.0],
        "figure": [["melted", "ok"], True, True], "heatmap": [1], "note": True, "top": [["ok", "melted"]],
        "compare": ["failing"], "page": [1, True],
    }  # fmt: skip


@pytest.mark.parametrize("status", [status for status in Status if status != Status.REJECTED])
def test_the_page_about_failures_explains_each_status(status):
    table = FAILURES_PAGE.read_text().partition("**Settled**")[0]
    assert f"`{status}`" in table


def test_the_table_has_every_status_and_looks_differ():
    assert [*STATUSES.keys() ^ {*Status}] == []
    assert len({(traits.colour, traits.hatch) for traits in STATUSES.values()}) == len(STATUSES)
