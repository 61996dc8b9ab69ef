"""The causes of results, those that are looked for in logs and those that docs/failures.md explains are the same."""

import re
from pathlib import Path

from ultrabench.agent.diagnose.signatures import BY_NAME
from ultrabench.result import CAUSES

PAGE = Path(__file__).parents[2] / "docs/failures.md"


def test_every_cause_is_known_and_explained():
    assert set(BY_NAME) <= set(CAUSES)
    table = PAGE.read_text().split("| cause | status |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(CAUSES)
    rows = [line.split("|") for line in table.splitlines()[2:]]
    for cause in BY_NAME.values():
        (row,) = (row for row in rows if f"`{cause.name}`" in row[1])
        assert cause.status.value in row[2]
        assert ("yes" in row[3]) == cause.blames_host
