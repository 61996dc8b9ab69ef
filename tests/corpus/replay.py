"""Cases of the corpus as the classifier gets them, alone and mixed."""

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.configs import measure as measure_of
from tests.unit.agent.one_node import task
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.ranks.rank_progress import AttemptProgress
from ultrabench.result import RunResult, Status

HERE = Path(__file__).parent
MEASURE = measure_of(warmup_steps=2, loss_step=3)
TASK = replace(task("x.py", "cpu"), measure=MEASURE)
STACK = 'Traceback (most recent call last):\n  File "/src/train.py", line 88, in <module>\n    main()\n'
RankHistory = tuple[list[dict[str, Any]], bool]
"""The events of one rank, and whether the agent killed it."""


@dataclass
class Case:
    name: str
    expected: dict[str, Any]
    ranks: list[RankHistory]
    end: RunResult | None = None
    order: list[int] = field(default_factory=list)
    """The order in which the ends of the ranks become known; empty: rank by rank."""

    def result(self, hosts: tuple[str, ...] = ("gpu01", "gpu02")) -> RunResult:
        progress = AttemptProgress(len(self.ranks), hosts)
        for number in self.order or range(len(self.ranks)):
            events, progress.ranks[number].killed_by_us = self.ranks[number]
            progress.add([{**item, "rank": number} for item in events])
        return classify(progress, TASK, self.end)


def made() -> list[Case]:
    """The faults that were committed for real."""
    cases = []
    for path in sorted(set(HERE.glob("*.json")) - {HERE / "quoted.json"}):
        kept = json.loads(path.read_text())
        events, killed = kept["rank_events"], kept["killed_by_us"]
        ranks = [([e for e in events if e["rank"] == n], n in killed) for n in range(kept["ranks"])]
        if end := kept["stopped"]:
            end = RunResult(status=Status(end["status"]), reason=end["reason"], cause=end["status"])
        order = [item["rank"] for item in events if "code" in item]
        cases.append(Case(path.stem, kept["expected"], ranks, end, order))
    return cases


def quoted() -> list[Case]:
    """Public error texts of GPUs on rank 1 of 2; on rank 0 what gloo reports when a peer is gone, or the same text."""
    peer = next(case for case in made() if case.name == "sigkill").ranks[0]
    cases = []
    for quote in json.loads((HERE / "quoted.json").read_text()):
        lost = quote["status"] == "comm_error"
        tail = "\n".join(quote["text"]) + "\n"
        said = [{"code": quote["code"], "tail": (STACK if quote["code"] > 0 else "") + tail}], False
        expected = {"rank": None if lost else 1, **quote}
        cases.append(Case(quote["name"], expected, [said if lost else peer, said]))
    return cases


def mixed(count: int, seed: int) -> list[Case]:
    """A root on one of 8 ranks and consequences on the others, which become known in any order."""
    chance = random.Random(seed)
    everything = made() + quoted()
    roots = [c for c in everything if c.expected["status"] not in ("ok", "comm_error") and c.expected["rank"]]
    peers = [
        rank
        for case in everything
        for number, rank in enumerate(case.ranks)
        if case.expected["status"] == "comm_error" or (case in roots and number != case.expected["rank"])
    ]
    cases = []
    for _ in range(count):
        root, place = chance.choice(roots), chance.randrange(8)
        ranks = [chance.choice(peers) for _ in range(8)]
        ranks[place] = root.ranks[root.expected["rank"]]
        cases.append(
            Case(root.name, {**root.expected, "rank": place}, ranks, root.end, chance.sample(range(8), 8))
        )
    return cases
