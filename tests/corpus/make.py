"""Makes the cases of real faults again: `python -m tests.corpus.make [CASE...]`, from the root of the repository.

The head of a case in tests/corpus/CASE.json says which fault of faulty.py, or which signal from outside, one of so
many ranks gets. The ranks run under an agent's node and group and fail; then the file holds the input of the
classifier: the events of the ranks, and which ranks were killed by the agent. For a new case write the head.
"""

import json
import os
import socket
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.configs import measure as measure_of
from tests.unit.agent import one_node
from ultrabench.agent.agent_group import AgentGroup, StopRequest
from ultrabench.agent.lead import Leader
from ultrabench.agent.node_identity import NodeIdentity
from ultrabench.agent.ranks.node import Node
from ultrabench.kernel_config import KernelConfig
from ultrabench.processes import become_subreaper, descendants
from ultrabench.run import Task
from ultrabench.store.events import Event, Phase
from ultrabench.store.journal import JournalWriter

HERE = Path(__file__).parent
HEAD = ("how", "fault", "ranks", "signal", "expected")
TAIL = 2500
"""Largest number of characters of a log that are stored; the agent sends more."""
MEASURE = measure_of(
    warmup_steps=2, max_steps=4000, target_ci95_rel=1e-9, deadline_floor_s=4.0, start_deadline_s=120.0
)


class Recorder(Node):
    """A node that remembers its rank events."""

    heard: list[dict[str, Any]]

    def rank_events(self) -> list[dict[str, Any]]:
        found = super().rank_events()
        self.heard += [item for item in found if item.keys() & {"line", "code", "log"}]
        return found


class Striker(Leader):
    """A leader without a journal; it kills our youngest process, the last rank, when that begins to measure."""

    signal: int | None = None

    def _write(self, event: Event) -> None:
        if self.signal and isinstance(event, Phase) and event.name == "measure":
            os.kill(max(descendants(os.getpid())), self.signal)


def task_of(fault: str, ranks: int) -> Task:
    task = one_node.task(str(HERE / "faulty.py"), "cpu")
    layout = replace(task.spec.layout, dp=ranks)
    kernel = replace(task.spec.kernel, command=(*task.spec.kernel.command, fault))
    if fault.startswith("embedded"):
        kernel = KernelConfig(name="embedded")
    workload = replace(task.spec.workload, gbs=layout.gbs)
    spec = replace(task.spec, workload=workload, layout=layout, kernel=kernel, gpus_per_node=ranks)
    memory = 2**22 if fault == "embedded_oom" else task.rank_mem_bytes
    return replace(task, spec=spec, run_id=spec.run_id, measure=MEASURE, rank_mem_bytes=memory)


def run(head: dict[str, Any], folder: Path) -> dict[str, Any]:
    task = task_of(head["fault"], head["ranks"])
    node = Recorder(one_node.allocation(folder, task), NodeIdentity(node_index=0, host="local-0"))
    node.heard = []
    group = AgentGroup(node, node.own_facts(), {}, StopRequest())
    leader = Striker(node, group, JournalWriter(folder, "agent"))
    leader.signal = head["signal"]
    group.start(task, 0)
    end = leader.watch(task)
    group.end_ranks()
    node.close()
    stopped = end and {"status": end.status, "reason": end.reason}
    killed = [rank.number for rank in group.progress.ranks if rank.killed_by_us]
    events = shortened(node.heard, folder, node.scratch)
    return {**head, "stopped": stopped, "killed_by_us": killed, "rank_events": events}


def shortened(rank_events: list[dict[str, Any]], *folders: Path) -> list[dict[str, Any]]:
    """The events without names of this machine, without most steps and without the environment."""
    kept, steps = [], Counter[int]()
    for item in rank_events:
        event = item.get("line", {}).get("event")
        steps[item["rank"]] += event == "step"
        if event != "environment" and (event != "step" or steps[item["rank"]] <= 3 or item["rank"] == 0):
            shortened_tail = {"tail": item["tail"][-TAIL:]} if "tail" in item else {}
            if "log" in item:
                shortened_tail = {"log": {**item["log"], "tail": item["log"]["tail"][-TAIL:]}}
            kept.append({**item, **shortened_tail})
    text = json.dumps(kept)
    for folder in folders:
        text = text.replace(str(folder), "/tmp/run")
    text = text.replace(str(HERE.parents[1]), "/src").replace(sys.prefix, "/src/venv")
    return json.loads(text.replace(sys.base_prefix, "/usr").replace(socket.gethostname(), "localhost"))


def main(names: list[str]) -> None:
    become_subreaper()
    for path in sorted(HERE.glob("*.json")):
        if path.stem in ("quoted", "families") or (names and path.stem not in names):
            continue  # public texts, which no run makes
        kept = json.loads(path.read_text())
        with tempfile.TemporaryDirectory() as folder:
            found = run({name: kept[name] for name in HEAD}, Path(folder))
        events = ",\n".join(json.dumps(item) for item in found.pop("rank_events"))
        path.write_text(f'{json.dumps(found)[:-1]},\n"rank_events": [\n{events}\n]}}\n')
        print(path.stem, "killed by us:", found["killed_by_us"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
