"""Cases of the corpus as the classifier gets them, alone and mixed."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.configs import measure
from ultrabench.agent.diagnose.outcome import classify
from ultrabench.agent.ranks.rank_progress import AttemptProgress
from ultrabench.result import RunResult, Status

HERE = Path(__file__).parent
MEASURE = measure(warmup_steps=2, loss_step=3)
STACK = 'Traceback (most recent call last):\n  File "/src/train.py", line 88, in <module>\n    main()\n'


@dataclass
class Rank:
    """What is heard of one rank."""

    rank_events: list[dict[str, Any]]
    killed_by_us: bool = False


@dataclass
class Case:
    name: str
    expected: dict[str, Any]
    ranks: list[Rank]
    stopped: RunResult | None = None
    order: list[int] = field(default_factory=list)
    """The order in which their ends become known; empty: rank by rank."""

    def judged(self, hosts: tuple[str, ...] = ("gpu01", "gpu02")) -> RunResult:
        progress = AttemptProgress(len(self.ranks), hosts)
        for number in self.order or range(len(self.ranks)):
            progress.ranks[number].killed_by_us = self.ranks[number].killed_by_us
            progress.add([{**item, "rank": number} for item in self.ranks[number].rank_events])
        return classify(progress, MEASURE, self.stopped)


def made() -> list[Case]:
    """The faults made for real."""
    cases = []
    for path in sorted(HERE.glob("*.json")):
        if path.name != "quoted.json":
            kept = json.loads(path.read_text())
            ranks = [Rank([], False) for _ in range(1 + max(item["rank"] for item in kept["rank_events"]))]
            for item in kept["rank_events"]:
                ranks[item["rank"]].rank_events.append(item)
            for number in kept["killed_by_us"]:
                ranks[number].killed_by_us = True
            stopped = kept["stopped"]
            overdue = stopped and RunResult(
                status=Status(stopped["status"]), reason=stopped["reason"], cause=stopped["status"]
            )
            order = [item["rank"] for item in kept["rank_events"] if "code" in item]
            cases.append(Case(path.stem, kept["expected"], ranks, overdue, order))
    return cases


def quoted() -> list[Case]:
    """Public error texts of GPUs: rank 1 of 2 says one, its peer what gloo says when a peer is gone."""
    peer = next(c for c in made() if c.name == "sigkill").ranks[0]
    return [
        Case(
            q["name"],
            {"rank": None if q["status"] == "comm_error" else 1, **q},
            [said(q) if q["status"] == "comm_error" else peer, said(q)],
        )
        for q in json.loads((HERE / "quoted.json").read_text())
    ]


def said(quote: dict[str, Any]) -> Rank:
    stack = STACK if quote["code"] > 0 else ""
    return Rank([{"code": quote["code"], "tail": stack + "\n".join(quote["text"]) + "\n"}])


def mixed(count: int, seed: int) -> list[Case]:
    """A root on one of 8 ranks, consequences on the others, heard in any order."""
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
        order = chance.sample(range(8), 8)
        cases.append(Case(root.name, {**root.expected, "rank": place}, ranks, root.stopped, order))
    return cases
