"""The leading agent: takes the allocation through its tasks and writes its journal."""

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ultrabench.agent.classify import classify
from ultrabench.agent.gang import Gang
from ultrabench.agent.gathering import Gathering
from ultrabench.agent.node import Node
from ultrabench.agent.place import Place
from ultrabench.agent.root_cause import findings, last_line
from ultrabench.agent.watch import Watched, explained, watch
from ultrabench.allocation import Allocation
from ultrabench.claim import claim, owner
from ultrabench.dominance import dominates
from ultrabench.folder import SweepFolder
from ultrabench.journal import JournalWriter
from ultrabench.record import canonical_json, to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import RunSpec, Task, env_id
from ultrabench.shape import ModelShape
from ultrabench.window import inside


def owns(claims: Path, name: str, me: dict[str, Any]) -> bool:
    """Whether the job `me` owns the allocation `name`: it claims it now, or an earlier start of it did."""
    if claim(claims, name, me):
        return True
    held = owner(claims, name) or {}
    job = held.get("job")
    return isinstance(job, dict) and job.get("job_id") == (me["job"] or {}).get("job_id")


class Leader:
    """Node 0 of an allocation."""

    def __init__(
        self, allocation: Allocation, node: Node, place: Place, gang: Gang, journal: JournalWriter,
        me: dict[str, Any],
    ) -> None:  # fmt: skip
        """`me` is what claims name as their owner: {allocation, host, job}."""
        self._allocation = allocation
        self._node = node
        self._place = place
        self._gang = gang
        self._journal = journal
        self._me = me
        self._insist = node.patience.insist
        self._folder = SweepFolder(Path(allocation.sweep_dir))
        self._ends = time.monotonic() + allocation.limit_s - allocation.warning_s
        self._best_s: dict[ModelShape, float] = {}
        """Fastest step time of each model in this allocation."""
        self._misfits: list[RunSpec] = []
        """What had not enough memory for sure."""

    def run(self) -> str:
        """Runs every task that nobody else has claimed; gives the reason why it ended."""
        self._bury_earlier_start()
        first = self._allocation.tasks[0]
        reason = self._unfit() or self._not_now(first) or self._preflight()
        for task in self._allocation.tasks:
            reason = reason or self._not_now(task)
            if reason:
                return reason
            if self._may_fit(task) and self._insist(claim, self._folder.claims, task.key, self._me):
                self._run(task)
            reason = self._gang.lost
        return reason or "all tasks done"

    def _bury_earlier_start(self) -> None:
        """After a requeue: what an earlier start of this job claimed and did not finish is lost.

        It is told with the weight of Slurm's word, so that a result which that start did write wins.
        """
        for task in self._allocation.tasks if self._place.restart else ():
            held = self._insist(owner, self._folder.claims, task.key) or {}
            if held.get("allocation") == self._allocation.name and held.get("job") != self._place.job:
                reason = f"job {self._place.job_id} was requeued while it ran"
                self._tell_end(task, RunResult(status=Status.LOST, reason=reason), "slurm")

    def _unfit(self) -> str | None:
        """Why nothing may run on these nodes: foreign work on their devices, or other sources."""
        foreign = {str(f["host"]): f["foreign"] for f in self._gang.facts if f["foreign"]}
        if foreign:
            self._gang.avoid.extend(sorted(foreign))
            shown = "; ".join(f"{host}: {', '.join(found)}" for host, found in sorted(foreign.items()))
            reason = f"not ours on its devices: {shown}"
            self._refuse(reason, tuple(sorted(foreign)))
            return reason
        wanted = self._allocation.kernel_digest
        for facts in self._gang.facts:
            if facts["kernel_digest"] != wanted:
                return self._other_sources(str(facts["host"]), str(facts["kernel_digest"]))
        return None

    def _other_sources(self, host: str, digest: str) -> str:
        return (
            f"the training program on {host} has kernel_digest {digest}, the sweep was submitted with "
            f"{self._allocation.kernel_digest}: launch it again to use the new sources"
        )

    def _refuse(self, reason: str, suspects: tuple[str, ...]) -> None:
        """Has the first task of this allocation that is free say why it could not run here."""
        for task in self._allocation.tasks:
            if self._insist(claim, self._folder.claims, task.key, self._me):
                hosts = tuple(self._gang.hosts)
                refused = RunResult(
                    status=Status.NODE_FAIL, reason=reason, hostnames=hosts, suspects=suspects,
                    started_at=time.time(),
                )  # fmt: skip
                self._tell_end(task, refused, "agent")
                return

    def _preflight(self) -> str | None:
        """Measures devices and links; says why nothing may run when that fails."""
        found: dict[str, Any] = {"nodes": self._gang.facts, "allocation": self._allocation.name}
        if self._allocation.preflight:
            probe = self._allocation.probe
            gathering = self._gang.start(probe, -1)
            seen = watch(self._gang, probe, gathering, self._ends, lambda gathering: None)
            self._gang.end_ranks(gathering)
            failed = seen.ended or (seen.missed and seen.missed.reason) or failure_of(gathering)
            self._gang.finish(keep_all=bool(failed))
            if failed:
                return f"the preflight failed: {failed}"
            found["probe"], found["environment"] = gathering.probe, gathering.environment
        name = {"allocation": self._allocation.name, "restart": self._place.restart}
        self._insist(self._journal.write, "preflight", **name, found=found)
        return None

    def _not_now(self, task: Task) -> str | None:
        """Why `task` must not begin."""
        self._gang.listen(Gathering(task.spec.layout.world_size), 0.0)
        reason = self._gang.interrupted
        if reason is None and time.monotonic() + min(task.limit_s, task.predicted_duration_s) > self._ends:
            reason = "no time left"
        if reason is None and self._insist(self._folder.pause.exists):
            reason = "the sweep is paused"
        if reason is None and not inside(self._allocation.window, time.time()):
            reason = f"outside the window {self._allocation.window}"
        digest = self._insist(self._node.digest)
        if reason is None and digest != self._allocation.kernel_digest:
            reason = self._other_sources(self._node.host, digest)
        return reason

    def _run(self, task: Task) -> None:
        name = _name(task)
        self._insist(
            self._journal.write, "claimed", **name, allocation=self._allocation.name, job=self._place.job,
            spec=to_dict(task.spec), predicted={"step_time_s": task.predicted_step_time_s},
        )  # fmt: skip
        self._insist(
            self._journal.write, "started", **name, allocation=self._allocation.name,
            scratch=str(self._node.scratch),
        )  # fmt: skip
        gathering = self._gang.start(task, self._allocation.tasks.index(task))

        def tell_phase(gathering: Gathering) -> None:
            at = gathering.ranks[0].phase_at
            self._insist(self._journal.write, "phase", **name, name=gathering.phase, at=at)

        watched = watch(self._gang, task, gathering, self._ends, tell_phase, self._race_s(task))
        result = self._finish(task, gathering, watched)
        self._tell_end(task, result, "agent")
        self._learn(task.spec, result)

    def _race_s(self, task: Task) -> float | None:
        """The step time beyond which `task` has lost; controls and repeats are measured to the end."""
        known = [t for t in (task.best_step_time_s, self._best_s.get(task.spec.shape)) if t is not None]
        exempt = task.run_id == self._allocation.control or task.repeat > 0
        return None if exempt or not known or task.measure.race is None else task.measure.race * min(known)

    def _learn(self, spec: RunSpec, result: RunResult) -> None:
        """Remembers what makes later tasks of this allocation short or needless."""
        if result.status == Status.OK and result.step_times_s:
            step_s = median(result.step_times_s)
            self._best_s[spec.shape] = min(step_s, self._best_s.get(spec.shape, step_s))
        elif result.status == Status.OOM and result.confirmed:
            self._misfits.append(spec)

    def _may_fit(self, task: Task) -> bool:
        """False for what needs more memory than a run that had not enough; who follows the sweep decides
        whether it is left out for good."""
        spec = task.spec
        return not any(m.shape == spec.shape and dominates(m.layout, spec.layout) for m in self._misfits)

    def _tell_end(self, task: Task, result: RunResult, source: str) -> None:
        event = "result" if result.status == Status.OK else "failed"
        self._insist(
            self._journal.write, event, **_name(task), allocation=self._allocation.name, source=source, spec=to_dict(task.spec),
            result=to_dict(result),
        )  # fmt: skip

    def _finish(self, task: Task, gathering: Gathering, watched: Watched) -> RunResult:
        """Ends the ranks, saves their logs and judges."""
        gang = self._gang
        gang.end_ranks(gathering)
        try:
            result = classify(
                gathering, task.measure, stopped=watched.missed, ended=watched.ended, lost=gang.lost,
                hosts=gang.hosts, gpu_names=task.gpu_names,
            )  # fmt: skip
            result = explained(result, watched)
            canonical_json(to_dict(result))  # else the journal could not take it
        except Exception as error:  # of what ranks reported; it says nothing about a node
            reason = f"what the ranks reported cannot be judged: {type(error).__name__}: {error}"
            result = RunResult(status=Status.INVALID, reason=reason, cause="bad_report")
        lost_logs = gang.finish(keep_all=result.status != Status.OK)
        if lost_logs:
            result = replace(result, evidence={**result.evidence, "logs": lost_logs})
        sm_clock_hz, throttled = gang.clocks()
        digest = self._allocation.kernel_digest
        return replace(
            result,
            duration_s=time.monotonic() - gathering.started,
            sm_clock_hz=sm_clock_hz,
            throttled=throttled,
            hostnames=tuple(gang.hosts),
            kernel_digest=digest,
            env_id=env_id(gathering.environment, task.spec.kernel, digest),
        )


def _name(task: Task) -> dict[str, Any]:
    return {"run_id": task.run_id, "repeat": task.repeat, "attempt": task.attempt}


def failure_of(gathering: Gathering) -> str | None:
    """What went wrong with a preflight whose ranks have all ended; None when all of them did it.

    It is told of the rank that failed first, since those that waited for it have nothing to say.
    """
    if gathering.fault is not None:
        return gathering.fault
    found = [f"rank {finding.rank}: {finding.line}" for finding in findings(gathering.ranks)]
    found += [
        f"rank {number} ended with code {rank.code} in phase {rank.phase}: {last_line(rank.tail)}"
        for number, rank in enumerate(gathering.ranks)
        if rank.done is None
    ]
    return found[0] if found else None
