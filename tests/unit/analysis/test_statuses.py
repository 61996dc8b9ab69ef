"""A status has one home, from which every list, colour and decision follows."""

import json
import subprocess
import sys
from pathlib import Path

from tests.configs import retry
from ultrabench.result import STATUSES, Status

PAGE = Path(__file__).parents[3] / "docs/reference/rules.md"


def test_a_status_that_its_table_lists_appears_everywhere(tmp_path):
    command = [sys.executable, "-m", "tests.unit.analysis.new_status", str(tmp_path)]
    shown = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert shown == {
        "status": [{"melted": 1}, ["melted"]], "live": True, "terminal": "red", "retry": [True, 30.0],
        "figure": [["melted", "ok"], True, True], "heatmap": [1], "note": True, "top": [["ok", "melted"]],
        "compare": ["failing"], "page": [1, True],
    }  # fmt: skip


def test_the_page_of_rules_has_each_status_with_its_number_of_further_attempts():
    table = PAGE.read_text().split("| status | meaning |")[1].split("\n\n")[0]
    rows = (line.split("|") for line in table.splitlines()[2:])
    further = {row[1].strip(" `"): int(row[3].split()[0]) for row in rows}
    assert further == {status: retry().attempts.get(status, 0) for status in Status}


def test_the_table_has_every_status_and_looks_differ():
    assert [*STATUSES.keys() ^ {*Status}] == []
    assert len({(traits.colour, traits.hatch) for traits in STATUSES.values()}) == len(STATUSES)
