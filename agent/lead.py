"""The leading agent: takes the allocation through its tasks and writes its journal."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ultrabench.agent.classify import classify, last_line
from ultrabench.agent.deadline import Overdue, overdue
from ultrabench.agent.gathering import Gathering
from ultrabench.agent.link import Line, wait_readable
from ultrabench.agent.node import Node
from ultrabench.agent.place import Place
from ultrabench.agent.port import free_port
from ultrabench.agent.stop import StopRequest
from ultrabench.allocation import Allocation
from ultrabench.claim import claim, owner
from ultrabench.folder import SweepFolder
from ultrabench.journal import JournalWriter
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import Task, env_id
from ultrabench.window import inside

POLL_S = 0.05
PEER_GRACE_S = 2.0
"""After the first failure of a rank its peers get this long to say what they know."""
EXIT_GRACE_S = 15.0
LOST_BEATS = 3


class Leader:
    """Node 0 of an allocation."""

    def __init__(
        self, allocation: Allocation, node: Node, place: Place, peers: dict[int, Line],
        journal: JournalWriter, stop: StopRequest, address: str,
    ) -> None:  # fmt: skip
        self._allocation = allocation
        self._node = node
        self._place = place
        self._peers = peers
        self._journal = journal
        self._stop = stop
        self._address = address
        self._folder = SweepFolder(Path(allocation.sweep_dir))
        self._ends = time.monotonic() + allocation.limit_s - allocation.warning_s
        self._facts = [node.facts(), *(peers[n].facts for n in sorted(peers))]
        self._hosts = [str(facts["host"]) for facts in self._facts]
        self.avoid: list[str] = []
        """Nodes that should not be used again."""
        self._lost: str | None = None
        self._ending_peer: str | None = None

    def run(self) -> str:
        """Runs every task that nobody else has claimed; gives the reason why it ended."""
        self._bury_earlier_start()
        reason = self._unfit() or self._not_now(self._allocation.tasks[0]) or self._preflight()
        for task in self._allocation.tasks:
            reason = reason or self._not_now(task)
            if reason:
                return reason
            if claim(self._folder.claims, task.key, self._owner()):
                self._run(task)
            reason = self._lost
        return reason or "all tasks done"

    def _owner(self) -> dict[str, Any]:
        return {"allocation": self._allocation.name, "host": self._node.host, "job": self._place.job}

    def _bury_earlier_start(self) -> None:
        """After a requeue: what an earlier start of this job claimed and did not finish is lost.

        It is told with the weight of Slurm's word, so that a result which that start did write wins.
        """
        for task in self._allocation.tasks if self._place.restart else ():
            held = owner(self._folder.claims, task.key) or {}
            if held.get("allocation") == self._allocation.name and held.get("job") != self._place.job:
                reason = f"job {self._place.job_id} was requeued while it ran"
                self._tell_end(task, RunResult(status=Status.LOST, reason=reason), "slurm")

    def _unfit(self) -> str | None:
        """Why nothing may run on these nodes: foreign work on their devices, or other sources."""
        foreign = {str(f["host"]): f["foreign"] for f in self._facts if f["foreign"]}
        if foreign:
            self.avoid = sorted(foreign)
            shown = "; ".join(f"{host}: {', '.join(found)}" for host, found in sorted(foreign.items()))
            reason = f"not ours on its devices: {shown}"
            self._refuse(reason)
            return reason
        wanted = self._allocation.kernel_digest
        for facts in self._facts:
            if facts["kernel_digest"] != wanted:
                return self._other_sources(str(facts["host"]), str(facts["kernel_digest"]))
        return None

    def _other_sources(self, host: str, digest: str) -> str:
        return (
            f"the training program on {host} has kernel_digest {digest}, the sweep was submitted with "
            f"{self._allocation.kernel_digest}: launch it again to use the new sources"
        )

    def _refuse(self, reason: str) -> None:
        """Has the first task of this allocation that is free say why it could not run here."""
        for task in self._allocation.tasks:
            if claim(self._folder.claims, task.key, self._owner()):
                hosts = tuple(self._hosts)
                refused = RunResult(
                    status=Status.NODE_FAIL, reason=reason, hostnames=hosts, started_at=time.time()
                )
                self._tell_end(task, refused, "agent")
                return

    def _preflight(self) -> str | None:
        """Measures devices and links; says why nothing may run when that fails."""
        found: dict[str, Any] = {"nodes": self._facts, "allocation": self._allocation.name}
        if self._allocation.preflight:
            probe = self._allocation.probe
            gathering, missed, ended = self._execute(probe, -1, None)
            failed = ended or (missed and missed.reason) or _failure_of(gathering)
            self._end_ranks(gathering)
            self._save_logs(keep_all=bool(failed))
            if failed:
                return f"the preflight failed: {failed}"
            found["probe"], found["environment"] = gathering.probe, gathering.environment
        name = {"allocation": self._allocation.name, "restart": self._place.restart}
        self._journal.write("preflight", **name, found=found)
        return None

    def _not_now(self, task: Task) -> str | None:
        """Why `task` must not begin."""
        self._listen(Gathering(task.spec.layout.world_size), 0.0)
        reason = self._interrupted()
        if reason is None and time.monotonic() + min(task.limit_s, task.predicted_duration_s) > self._ends:
            reason = "no time left"
        if reason is None and self._folder.pause.exists():
            reason = "the sweep is paused"
        if reason is None and not inside(self._allocation.window, time.time()):
            reason = f"outside the window {self._allocation.window}"
        digest = self._node.digest()
        if reason is None and digest != self._allocation.kernel_digest:
            reason = self._other_sources(self._node.host, digest)
        return reason

    def _interrupted(self) -> str | None:
        return self._stop.reason or self._ending_peer or self._lost

    def _run(self, task: Task) -> None:
        name = _name(task)
        self._journal.write(
            "claimed", **name, allocation=self._allocation.name, job=self._place.job,
            spec=to_dict(task.spec), predicted={"step_time_s": task.predicted_step_time_s},
        )  # fmt: skip
        self._journal.write(
            "started", **name, allocation=self._allocation.name, scratch=str(self._node.scratch)
        )
        index = self._allocation.tasks.index(task)
        gathering, overdue_, ended = self._execute(task, index, name)
        self._tell_end(task, self._finish(task, gathering, overdue_, ended), "agent")

    def _tell_end(self, task: Task, result: RunResult, source: str) -> None:
        event = "result" if result.status == Status.OK else "failed"
        self._journal.write(
            event, **_name(task), allocation=self._allocation.name, source=source, spec=to_dict(task.spec),
            result=to_dict(result),
        )  # fmt: skip

    def _execute(
        self, task: Task, index: int, name: dict[str, Any] | None
    ) -> tuple[Gathering, Overdue | None, str | None]:
        """Has all nodes start their ranks and follows them; `name` is what phases are told under."""
        port = 0 if task.forked else free_port(self._address)
        gathering = Gathering(task.spec.layout.world_size)
        self._tell({"do": "start", "task": index, "address": self._address, "port": port})
        self._node.start(task, self._address, port)
        return gathering, *self._follow(task, gathering, name)

    def _follow(
        self, task: Task, gathering: Gathering, name: dict[str, Any] | None
    ) -> tuple[Overdue | None, str | None]:
        """Until the ranks are gone, or have to go: (missed deadline, why the allocation ended)."""
        told_port, told_phase, failed_at = False, "", 0.0
        while gathering.running:
            self._listen(gathering, POLL_S)
            if gathering.port is not None and not told_port:
                told_port = True
                self._node.tell_port(gathering.port)
                self._tell({"do": "store", "port": gathering.port})
            phase = gathering.phase
            if name and phase != told_phase:
                told_phase = phase
                self._journal.write("phase", **name, name=phase, at=gathering.ranks[0].phase_at)
            now = time.monotonic()
            ended = self._interrupted() or ("the time of its allocation ended" if now > self._ends else None)
            if ended:
                return None, ended
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
                spoke=gathering.spoke or task.forked,
                predicted_step_time_s=task.predicted_step_time_s,
                limit_s=task.limit_s,
                measure=task.measure,
            )
            if missed:
                return missed, None
        return None, None

    def _finish(
        self, task: Task, gathering: Gathering, missed: Overdue | None, ended: str | None
    ) -> RunResult:
        """Ends the ranks, saves their logs and judges."""
        left = self._end_ranks(gathering)
        result = classify(gathering, task.measure, stopped=missed, ended=ended, gpu_names=task.gpu_names)
        if self._lost and result.status != Status.OK:
            result = replace(result, status=Status.NODE_FAIL, reason=self._lost)
        if left:
            self._lost = f"{self._node.host}: processes {left} cannot be killed"
            self.avoid = [self._node.host]
        self._save_logs(keep_all=result.status != Status.OK)
        digest = self._allocation.kernel_digest
        return replace(
            result,
            duration_s=time.monotonic() - gathering.started,
            hostnames=tuple(self._hosts),
            kernel_digest=digest,
            env_id=env_id(gathering.environment, task.spec.kernel, digest),
        )

    def _end_ranks(self, gathering: Gathering) -> list[int]:
        """Kills what is left on all nodes and waits for every exit; gives back what would not die."""
        for rank in gathering.running:
            gathering.ranks[rank].killed_by_us = True
        self._tell({"do": "kill"})
        left = self._node.kill()
        end = time.monotonic() + EXIT_GRACE_S
        while gathering.running and not self._lost and time.monotonic() < end:
            self._listen(gathering, POLL_S)
        return left

    def _save_logs(self, keep_all: bool) -> None:
        self._node.finish(keep_all=keep_all)
        self._tell({"do": "finish", "keep_all": keep_all})

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


def _name(task: Task) -> dict[str, Any]:
    return {"run_id": task.run_id, "repeat": task.repeat, "attempt": task.attempt}


def _failure_of(gathering: Gathering) -> str | None:
    """What went wrong with a preflight; None when all ranks did it."""
    for number, rank in enumerate(gathering.ranks):
        if rank.done is None:
            told = (rank.error or {}).get("message") or last_line(rank.tail)
            return f"rank {number}: {told}"
    return None
