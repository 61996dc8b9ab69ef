"""The causes of results, those that are looked for in logs and those that docs/failures.md explains are the same."""

import re
from pathlib import Path

import pytest

from ultrabench.agent.diagnose.signatures import BY_NAME
from ultrabench.errors import ConfigError
from ultrabench.result import CAUSES
from ultrabench.sweep.config.load import load_config

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


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("+retry.causes.segfalt=1", "did you mean segfault?"),
        ("retry.attempts.hang=x", "retry.attempts.hang='x' is no whole number"),
        ("retry.attempts.hang=999999", "must be 0 to 100"),
        ("retry.backoff_s=inf", "must be >= 0 and finite"),
        ("measure.deadline_floor_s=nan", "must be > 0 and finite"),
        ("measure.run_limit_s=inf", "must be > 0 and finite"),
        ("measure.race=inf", "must be > 1"),
        ("measure.confirm=1000", "must be 1 to 100"),
    ],
)
def test_senseless_values_are_refused_in_one_line(override, text):
    with pytest.raises(ConfigError) as error:
        load_config([override])
    assert text in str(error.value)
    assert "\n" not in str(error.value)
