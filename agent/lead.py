"""The leading agent: takes the allocation through its tasks and writes its journal."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ultrabench.agent.classify import classify
from ultrabench.agent.deadline import Overdue, overdue
from ultrabench.agent.gathering import Gathering
from ultrabench.agent.link import Line, wait_readable
from ultrabench.agent.node import Node
from ultrabench.agent.port import free_port
from ultrabench.agent.stop import StopRequest
from ultrabench.allocation import Allocation
from ultrabench.claim import claim
from ultrabench.folder import SweepFolder
from ultrabench.journal import JournalWriter
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import Task, env_id

POLL_S = 0.05
PEER_GRACE_S = 2.0
"""After the first failure of a rank its peers get this long to say what they know."""
EXIT_GRACE_S = 15.0
LOST_BEATS = 3


class Leader:
    """Node 0 of an allocation."""

    def __init__(
        self, allocation: Allocation, node: Node, peers: dict[int, Line], journal: JournalWriter,
        stop: StopRequest, address: str,
    ) -> None:  # fmt: skip
        self._allocation = allocation
        self._node = node
        self._peers = peers
        self._journal = journal
        self._stop = stop
        self._address = address
        self._folder = SweepFolder(Path(allocation.sweep_dir))
        self._ends = time.monotonic() + allocation.limit_s
        self._hosts = [node.host, *(peers[n].host for n in sorted(peers))]
        self._lost: str | None = None
        self._ending_peer: str | None = None

    def run(self) -> str:
        """Runs every task that nobody else has claimed; gives the reason why it ended."""
        for task in self._allocation.tasks:
            self._listen(Gathering(task.spec.layout.world_size), 0.0)
            reason = self._interrupted()
            if reason:
                return reason
            if time.monotonic() + min(task.limit_s, 60.0) > self._ends:
                return "no time left"
            owner = {"allocation": self._allocation.name, "host": self._node.host}
            if claim(self._folder.claims, task.key, owner):
                self._run(task)
            if self._lost:
                return self._lost
        return "all tasks done"

    def _interrupted(self) -> str | None:
        return self._stop.reason or self._ending_peer or self._lost

    def _run(self, task: Task) -> None:
        name = {"run_id": task.run_id, "repeat": task.repeat, "attempt": task.attempt}
        self._journal.write(
            "claimed", **name, allocation=self._allocation.name, spec=to_dict(task.spec),
            predicted={"step_time_s": task.predicted_step_time_s},
        )  # fmt: skip
        embedded = task.spec.kernel.kind == "embedded"
        port = 0 if embedded else free_port(self._address)
        self._journal.write(
            "started", **name, allocation=self._allocation.name, scratch=str(self._node.scratch)
        )
        gathering = Gathering(task.spec.layout.world_size)
        index = self._allocation.tasks.index(task)
        self._tell({"do": "start", "task": index, "address": self._address, "port": port})
        self._node.start(task, self._address, port)
        overdue_, ended = self._follow(task, gathering, name)
        result = self._finish(task, gathering, overdue_, ended)
        event = "result" if result.status == Status.OK else "failed"
        self._journal.write(event, **name, source="agent", result=to_dict(result))

    def _follow(
        self, task: Task, gathering: Gathering, name: dict[str, Any]
    ) -> tuple[Overdue | None, str | None]:
        """Until the ranks are gone, or have to go: (missed deadline, why the allocation ended)."""
        told_port, phase, failed_at = False, "", 0.0
        limit_s = min(task.limit_s, self._ends - time.monotonic())
        while gathering.running:
            self._listen(gathering, POLL_S)
            if gathering.port is not None and not told_port:
                told_port = True
                self._node.tell_port(gathering.port)
                self._tell({"do": "store", "port": gathering.port})
            if gathering.phase != phase:
                phase = gathering.phase
                self._journal.write("phase", **name, name=phase, at=gathering.ranks[0].phase_at)
            now = time.monotonic()
            if self._interrupted():
                return None, self._interrupted()
            if gathering.failed:
                failed_at = failed_at or now
                if now - failed_at > PEER_GRACE_S:
                    return None, None
                continue
            missed = overdue(
                now=now,
                started=gathering.started,
                moved=gathering.moved,
                first_step=gathering.first_step,
                slowest_gap_s=gathering.slowest_gap_s,
                phase=gathering.phase,
                spoke=gathering.spoke or task.spec.kernel.kind == "embedded",
                predicted_step_time_s=task.predicted_step_time_s,
                limit_s=limit_s,
                measure=task.measure,
            )
            if missed:
                return missed, None
        return None, None

    def _finish(
        self, task: Task, gathering: Gathering, missed: Overdue | None, ended: str | None
    ) -> RunResult:
        """Kills what is left, waits for every exit, saves logs and judges."""
        for rank in gathering.running:
            gathering.ranks[rank].killed_by_us = True
        self._tell({"do": "kill"})
        left = self._node.kill()
        end = time.monotonic() + EXIT_GRACE_S
        while gathering.running and not self._lost and time.monotonic() < end:
            self._listen(gathering, POLL_S)
        result = classify(gathering, task.measure, stopped=missed, ended=ended, gpu_names=task.gpu_names)
        if self._lost and result.status != Status.OK:
            result = replace(result, status=Status.NODE_FAIL, reason=self._lost)
        if left:
            self._lost = f"{self._node.host}: processes {left} cannot be killed"
        self._node.finish(keep_all=result.status != Status.OK)
        self._tell({"do": "finish", "keep_all": result.status != Status.OK})
        digest = self._allocation.kernel_digest
        return replace(
            result,
            duration_s=time.monotonic() - gathering.started,
            hostnames=tuple(self._hosts),
            kernel_digest=digest,
            env_id=env_id(gathering.environment, task.spec.kernel, digest),
        )

    def _tell(self, message: dict[str, Any]) -> None:
        for line in self._peers.values():
            line.send(message)

    def _listen(self, gathering: Gathering, seconds: float) -> None:
        """Takes in what all nodes say within `seconds`, and notices who has gone silent."""
        for line in wait_readable(list(self._peers.values()), seconds):
            for message in line.receive():
                self._ending_peer = message.get("ending", self._ending_peer)
                gathering.hear(message.get("news", []))
        gathering.hear(self._node.news())
        silence = LOST_BEATS * self._allocation.heartbeat_s
        for node, line in self._peers.items():
            if line.closed or time.monotonic() - line.heard > silence:
                self._lost = self._lost or f"the agent of node {node} ({self._hosts[node]}) is gone"
