"""The causes of real faults and of public error texts, also among the errors of 7 peers, and their page."""

import re
from pathlib import Path

import pytest

from tests.corpus.replay import made, mixed, quoted
from ultrabench.agent.diagnose.signatures import BY_NAME
from ultrabench.result import CAUSES


@pytest.mark.parametrize("case", made() + quoted(), ids=lambda case: case.name)
def test_every_case_gets_its_name(case):
    found, expected = case.result(), case.expected
    assert (found.status, found.cause) == (expected["status"], expected["cause"]), found.reason
    if found.status != "ok":
        assert "\n" not in found.reason
        assert expected["rank"] is None or f"rank {expected['rank']} on gpu0" in found.reason
    for name in ("confirmed", "suspect_hosts"):
        if name in expected:
            said = getattr(found, name)
            assert (list(said) if name == "suspect_hosts" else said) == expected[name]


def test_roots_are_found_among_their_consequences():
    cases = mixed(200, seed=4)
    wrong = []
    for case in cases:
        found, expected = case.result(), case.expected
        named = f"rank {expected['rank']} on " in (found.reason or "")
        if (found.status, found.cause) != (expected["status"], expected["cause"]) or not named:
            wrong.append((case.name, found.cause, found.reason))
    assert len(wrong) <= 2, wrong


def test_fingerprints_are_of_the_fault_not_of_the_place():
    cases = [c for c in made() + quoted() if c.expected["rank"] is not None]
    prints = {c.name: c.result().fingerprint for c in cases}
    assert {c.name: c.result(("a7", "a9")).fingerprint for c in cases} == prints
    told = [p for p in prints.values() if p is not None]
    same = [n for n, p in prints.items() if p is not None and told.count(p) > 1]
    # The same fault, whatever becomes of the peers.
    twins = ["exception", "exit_early"]
    assert sorted(same) == sorted([*twins, "exception_while_peers_sleep", "early_while_peers_sleep"])


PAGE = Path(__file__).parents[3] / "docs/failures.md"


def test_every_cause_is_known_and_explained():
    assert set(BY_NAME) <= set(CAUSES)
    table = PAGE.read_text().split("| cause | status |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= set(CAUSES)
    rows = [line.split("|") for line in table.splitlines()[2:]]
    for cause in BY_NAME.values():
        (row,) = (row for row in rows if f"`{cause.name}`" in row[1])
        assert cause.status.value in row[2]
        assert ("yes" in row[3]) == cause.blames_host
