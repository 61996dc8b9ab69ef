"""The causes of real faults and of public error texts, also among the errors of 7 peers, and their page."""

import json
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.configs import measure
from tests.unit.agent.one_node import task
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.diagnose.signatures import CAUSE_BY_NAME
from ultrabench.agent.ranks.rank_progress import AttemptProgress
from ultrabench.result import CAUSES, RunResult, Status

CORPUS = Path(__file__).parents[2] / "corpus"
PAGE = Path(__file__).parents[3] / "docs/reference/rules.md"
TASK = replace(task("x.py", "cpu"), measure=measure(warmup_steps=2, loss_step=3))
TEXT_FILES = ("quoted", "families")
"""Files of public texts, which no run made."""
STACK = 'Traceback (most recent call last):\n  File "/src/train.py", line 88, in <module>\n    main()\n'


@dataclass
class Case:
    """What an agent received, as the classifier gets it."""

    name: str
    expected: dict[str, Any]
    ranks: list[tuple[list[dict[str, Any]], bool]]
    """The events of each rank, and whether the agent killed it."""
    order: list[int]
    """The order in which the ends of the ranks become known."""
    end: RunResult | None = None

    def result(self, hosts=("gpu01", "gpu02")):
        progress = AttemptProgress(len(self.ranks), hosts)
        for second, number in enumerate(self.order, start=1):
            events, progress.ranks[number].killed_by_us = self.ranks[number]
            progress.add([{**event, "rank": number} for event in events], now_s=float(second))
        return classify(progress, TASK, self.end)


def read_case(path):
    """A fault that was committed for real."""
    case = json.loads(path.read_text())
    events, end = case["rank_events"], case["stopped"]
    ranks = [([e for e in events if e["rank"] == n], n in case["killed_by_us"]) for n in range(case["ranks"])]
    end = end and RunResult(status=Status(end["status"]), reason=end["reason"], cause=end["status"])
    return Case(path.stem, case["expected"], ranks, [e["rank"] for e in events if "code" in e], end)


def quoted(quote, peer):
    """A public error text of GPUs on rank 1 of 2; on rank 0 what gloo reports of a lost peer, or the same text."""
    lost = quote["status"] == "comm_error"
    tail = "\n".join(quote["text"]) + "\n"
    rank = [{"code": quote["code"], "tail": (STACK if quote["code"] > 0 else "") + tail}], False
    return Case(quote["name"], {"rank": None if lost else 1, **quote}, [rank if lost else peer, rank], [0, 1])


MADE = [read_case(path) for path in sorted(CORPUS.glob("*.json")) if path.stem not in TEXT_FILES]
LOST_PEER = next(case for case in MADE if case.name == "sigkill").ranks[0]
CASES = MADE + [quoted(quote, LOST_PEER) for quote in json.loads((CORPUS / "quoted.json").read_text())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_gets_its_name(case):
    result, expected = case.result(), case.expected
    assert (result.status, result.cause) == (expected["status"], expected["cause"]), result.reason
    if result.status != "ok":
        assert "\n" not in result.reason
        assert expected["rank"] is None or f"rank {expected['rank']} on gpu0" in result.reason
    assert result.confirmed == expected.get("confirmed", result.confirmed)
    assert list(result.suspect_hosts) == expected.get("suspect_hosts", list(result.suspect_hosts))


def test_roots_are_found_among_their_consequences():
    """A root is on one of 8 ranks, consequences are on the others, and they become known in any order."""
    chance, wrong = random.Random(4), []
    roots = [c for c in CASES if c.expected["status"] not in ("ok", "comm_error") and c.expected["rank"]]
    peers = [
        rank
        for case in CASES
        for number, rank in enumerate(case.ranks)
        if case.expected["status"] == "comm_error" or (case in roots and number != case.expected["rank"])
    ]
    for _ in range(200):
        root, place = chance.choice(roots), chance.randrange(8)
        ranks = [chance.choice(peers) for _ in range(8)]
        ranks[place] = root.ranks[root.expected["rank"]]
        result = replace(root, ranks=ranks, order=chance.sample(range(8), 8)).result()
        is_named = f"rank {place} on " in (result.reason or "")
        if (result.status, result.cause, is_named) != (root.expected["status"], root.expected["cause"], True):
            wrong.append((root.name, result.cause, result.reason))
    assert len(wrong) <= 2, wrong


def test_fingerprints_are_of_the_fault_not_of_the_place():
    cases = [c for c in CASES if c.expected["rank"] is not None]
    prints = {c.name: c.result().fingerprint for c in cases}
    assert {c.name: c.result(("a7", "a9")).fingerprint for c in cases} == prints
    fingerprints = [p for p in prints.values() if p is not None]
    shared = {n for n, p in prints.items() if p is not None and fingerprints.count(p) > 1}
    # The same fault, whatever becomes of the peers.
    assert shared == {"exception", "exit_early", "exception_while_peers_sleep", "early_while_peers_sleep"}


def test_every_cause_is_known_and_explained():
    assert set(CAUSE_BY_NAME) <= set(CAUSES)
    table = PAGE.read_text().split("| cause | status |")[1].split("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines()[2:]]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[1])) == sorted(CAUSES)
    for cause in CAUSE_BY_NAME.values():
        (row,) = (row for row in rows if f"`{cause.name}`" in row[1])
        assert cause.status.value in row[2]
        assert ("proof" in row[3]) == cause.proves_fault
