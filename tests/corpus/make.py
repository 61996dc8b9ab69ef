"""Makes the cases of real faults: `python -m tests.corpus.make [CASE...]`, from the root of the repository.

Each case runs ranks under an agent's node and group, lets them fail, and stores the input of the classifier:
the events of the ranks, and which ranks were killed by the agent.
"""

import json
import os
import signal
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.configs import measure as measure_of
from tests.corpus.cases import CASES, Case
from tests.unit import one_node
from ultrabench.agent.agent_group import AgentGroup, StopRequest
from ultrabench.agent.node_identity import NodeIdentity
from ultrabench.agent.ranks.node import Node
from ultrabench.agent.ranks.watch import watch
from ultrabench.kernel.check_spec import TINY
from ultrabench.kernel_config import KernelConfig
from ultrabench.processes import become_subreaper, descendants
from ultrabench.run import Task
from ultrabench.store.allocation import Allocation

HERE = Path(__file__).parent
TAIL = 2500
"""Largest number of characters of a log that are stored; the agent sends more."""
MEASURE = measure_of(
    warmup_steps=2, max_steps=4000, target_ci95_rel=1e-9, deadline_floor_s=4.0, start_deadline_s=120.0
)


class Recorder(Node):
    """A node that remembers its rank events."""

    def __init__(self, allocation: Allocation, identity: NodeIdentity) -> None:
        super().__init__(allocation, identity)
        self.heard = list[dict[str, Any]]()

    def rank_events(self) -> list[dict[str, Any]]:
        found = super().rank_events()
        self.heard += [item for item in found if "line" in item or "code" in item]
        return found


def task_of(case: Case) -> Task:
    task = one_node.task(str(HERE / "faulty.py"), "cpu")
    layout = replace(task.spec.layout, dp=case.ranks)
    kernel = replace(task.spec.kernel, command=(*task.spec.kernel.command, case.fault))
    if case.fault.startswith("embedded"):
        kernel = KernelConfig(name="embedded")
    workload = replace(task.spec.workload, gbs=layout.gbs)
    spec = replace(
        task.spec, shape=TINY, workload=workload, layout=layout, kernel=kernel, gpus_per_node=case.ranks
    )
    memory = 2**22 if case.fault == "embedded_oom" else task.rank_mem_bytes
    return replace(task, spec=spec, run_id=spec.run_id, measure=MEASURE, rank_mem_bytes=memory)


def run(case: Case, folder: Path) -> dict[str, Any]:
    task = task_of(case)
    allocation = one_node.allocation(folder, task)
    node = Recorder(allocation, NodeIdentity(node=0, host="local-0"))
    group = AgentGroup(node, node.facts(), {}, StopRequest(), "127.0.0.1", folder / "journal.jsonl")
    progress = group.start(task, 0)

    def strike(phase: str, at: float | None) -> None:
        """Sends the signal of the case to our youngest process, the last rank, when it begins to measure."""
        if case.signal and phase == "measure":
            os.kill(max(descendants(os.getpid())), case.signal)

    end = watch(group, task, progress, float("inf"), strike)
    group.end_ranks(progress)
    group.order("finish", keep_all=False)
    node.close()
    return {
        "how": case.how,
        "expected": {"status": case.status, "cause": case.cause, "rank": case.rank},
        "stopped": end and {"status": end.status, "reason": end.reason},
        "killed_by_us": [n for n, rank in enumerate(progress.ranks) if rank.killed_by_us],
        "rank_events": shortened(node.heard, folder, node.scratch),
    }


def shortened(rank_events: list[dict[str, Any]], *folders: Path) -> list[dict[str, Any]]:
    """The events without names of this machine, without most steps and without the environment."""
    kept, steps = [], dict[int, int]()
    for item in rank_events:
        event = item.get("line", {}).get("event")
        steps[item["rank"]] = steps.get(item["rank"], 0) + (event == "step")
        if event == "environment" or (event == "step" and steps[item["rank"]] > 3 and item["rank"] != 0):
            continue
        kept.append({**item, **({"tail": item["tail"][-TAIL:]} if "tail" in item else {})})
    text = json.dumps(kept)
    for folder in folders:
        text = text.replace(str(folder), "/tmp/run")
    text = text.replace(str(HERE.parents[1]), "/src").replace(sys.prefix, "/src/venv")
    return json.loads(text.replace(sys.base_prefix, "/usr").replace(socket.gethostname(), "localhost"))


def as_text(found: dict[str, Any]) -> str:
    """JSON with one rank event a line."""
    rank_events = ",\n".join(json.dumps(item) for item in found["rank_events"])
    head = json.dumps({k: v for k, v in found.items() if k != "rank_events"})
    return f'{head[:-1]},\n"rank_events": [\n{rank_events}\n]}}\n'


def main(names: list[str]) -> None:
    become_subreaper()
    for name, case in CASES.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = run(case, Path(folder))
        (HERE / f"{name}.json").write_text(as_text(found))
        codes = {item["rank"]: item["code"] for item in found["rank_events"] if "code" in item}
        print(name, codes, "killed by us:", found["killed_by_us"], flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main(sys.argv[1:])
