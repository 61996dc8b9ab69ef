"""The leading agent: it runs the tasks of the allocation, watches their ranks and writes the journal."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ultrabench.agent.agent_group import AgentGroup
from ultrabench.agent.connection import POLL_S
from ultrabench.agent.diagnose.hang_cause import find_hang_cause, hang_row
from ultrabench.agent.diagnose.outcome import classify, of_both_starts, step_times_of, without_unlike
from ultrabench.agent.diagnose.rank_cause import SHELL_SIGNAL_BASE
from ultrabench.agent.diagnose.signatures import CAUSE_BY_NAME
from ultrabench.agent.diagnose.suspects import evidence_of_ranks
from ultrabench.agent.disk_retry import log_line
from ultrabench.agent.ranks.compiler_locks import locks_text
from ultrabench.agent.ranks.node import CLEANING_S, Node
from ultrabench.agent.ranks.rank_progress import AttemptProgress, RankProgress
from ultrabench.column import SECONDS
from ultrabench.device_digest import dated_digests, differences
from ultrabench.errors import ClusterError, DiskError, counted
from ultrabench.layout import dominates
from ultrabench.node_health import Health, complaints, node_warnings, warning_lines
from ultrabench.partial_step import PartStart, pooled
from ultrabench.rank_report import CHECKPOINT_PHASE, TRACE_PHASE
from ultrabench.record import canonical_json, raw_json, to_dict
from ultrabench.result import (
    DISK_SLOW,
    LOCATED_STATUSES,
    NODE_FAILURE,
    SLOWER,
    STOPPED,
    UNMEASURED,
    RunResult,
    Status,
)
from ultrabench.run import Task, env_id
from ultrabench.standing import Repeat, near_best, standings
from ultrabench.start_up import LIMIT_FACTOR, with_measured_times
from ultrabench.store.allocation import is_in_window, window_text
from ultrabench.store.claim import claim, claim_content
from ultrabench.store.events import (
    BY_AGENT,
    BY_BATCH_SYSTEM,
    Claimed,
    EndCode,
    Ending,
    Event,
    Failed,
    Phase,
    Preflight,
    Result,
    Start,
    Started,
)
from ultrabench.store.journal import JournalWriter, read_journal
from ultrabench.store.state import fold
from ultrabench.variant import variables_of

LONGEST_GAP_FACTOR = 10.0
"""A run counts as hung only after this many times its own longest time without progress so far."""
STATUS_INTERVAL_S = 10.0
"""Seconds after which the measured steps of a run are written into the journal again, for `sweep status`."""
PEER_GRACE_S = 2.0
"""Seconds after the first failure for other ranks to report theirs, and for a signal from outside to reach agents."""
KILLED_CODES = frozenset(
    code for number in CAUSE_BY_NAME["killed"].signals for code in (-number, SHELL_SIGNAL_BASE + number)
)
"""Exit codes of ranks that a signal from outside ended; the end of a job signals ranks and agents one after another."""
UNFINISHED_STATUSES = (Status.HANG, Status.TIMEOUT, Status.CANCELLED)
"""Statuses of runs that have not ended by themselves, which may have waited for the lock of a compiler."""
TaskResult = tuple[Task, RunResult]
"""A task that was run, and how it ended."""
_TIME_OVER_TEXT = "its allocation ended at its time limit"
MIN_RACE_STEPS = 2
"""Number of measured steps after which a run may be ended as too slow; of parts of steps, one turn is enough."""


def owns(claims_folder: Path, allocation_name: str, claimant: dict[str, Any]) -> bool:
    """Whether the job `claimant` owns the allocation: it claims it now, or an earlier start of the job did."""
    if claim(claims_folder, allocation_name, claimant):
        return True
    owner_job = (claim_content(claims_folder, allocation_name) or {}).get("job")
    return isinstance(owner_job, dict) and owner_job.get("job_id") == (claimant["job"] or {}).get("job_id")


class Leader:
    """The agent of node 0, which runs the tasks of its allocation one after another."""

    def __init__(self, node: Node, group: AgentGroup, journal: JournalWriter) -> None:
        self._node = node
        self._allocation = node.allocation
        self._job_start = node.identity.job or Start()
        self._owner = node.identity.owner_facts(node.allocation.name)
        self._group = group
        self._journal = journal
        self._end_s = time.monotonic() + node.allocation.limit_s - node.allocation.warning_s
        self._task_results: list[TaskResult] = []
        """The runs of this allocation and how they ended."""

    def run(self) -> Ending:
        """Runs every task that nobody else has claimed; returns why the allocation ends."""
        self._write_lost_tasks()
        self._remove_left_checkpoints()
        ending = self._refuse_nodes() or self._why_not_now(self._allocation.tasks[0]) or self._run_preflight()
        for task in self._allocation.tasks:
            if ending := ending or self._why_not_now(self._with_measured_times(task)):
                return ending
            if may_fit(task, self._task_results) and self._claim(task):
                self._run(self._with_departure(task))
        return Ending(self._group.outage.reason if self._group.outage else "all tasks done")

    def _with_measured_times(self, task: Task) -> Task:
        return with_measured_times(task, [result for _, result in self._task_results])

    def _with_departure(self, task: Task) -> Task:
        """The task with the departure from a straight line that runs of its kind have measured, also those of this
        allocation; it needs no third size if that is certain enough.
        """
        if task.slice is None or task.slice.third is None:
            return task
        kind = task.spec.linearity_kind
        departures = (r.line_departure for run, r in self._task_results if run.spec.linearity_kind == kind)
        return task.with_departure(pooled((task.slice.departure, *departures)))

    def _write(self, event: Event) -> None:
        self._node.disk.retry(partial(self._journal.write, event))

    def _claim(self, task: Task) -> bool:
        return self._node.disk.retry(partial(claim, self._node.folder.claims, str(task.key), self._owner))

    def _write_lost_tasks(self) -> None:
        """After a requeue, records as lost the tasks that an earlier start of this job has claimed.

        The source is Slurm, so that a result that the earlier start has written counts more.
        """
        for task in self._allocation.tasks if self._job_start.restart else ():
            claim_owner = (
                self._node.disk.retry(partial(claim_content, self._node.folder.claims, str(task.key))) or {}
            )
            is_own = claim_owner.get("allocation") == self._allocation.name
            if is_own and claim_owner.get("job") != self._owner["job"]:
                reason = f"job {self._job_start.job_id} was requeued while it ran"
                self._write_result(task, RunResult(status=Status.LOST, reason=reason), BY_BATCH_SYSTEM)

    def _remove_left_checkpoints(self) -> None:
        """Removes the checkpoints of attempts that have ended, which agents that were killed have left."""
        checkpoint_paths = [task.checkpoint for task in self._allocation.tasks if task.checkpoint]
        if not checkpoint_paths:
            return
        folder, save_folder = self._node.folder, Path(checkpoint_paths[0]).parent
        # Earlier versions named checkpoints after the path of the sweep.
        sweep_ids = {self._allocation.sweep_id, ""}

        def remove() -> None:
            patterns = [folder.checkpoint(save_folder, sweep_id, "*") for sweep_id in sweep_ids]
            paths = {path for pattern in patterns for path in save_folder.glob(pattern.name)}
            attempts = fold(read_journal(folder.journal, log_line)).attempts if paths else {}
            ended_keys = [key for key, attempt in attempts.items() if attempt.result]
            obsolete = {folder.checkpoint(save_folder, i, key) for i in sweep_ids for key in ended_keys}
            for path in paths & obsolete:
                shutil.rmtree(path, ignore_errors=True)

        try:
            self._node.disk.retry(remove, CLEANING_S, subject=str(save_folder))
        except (ClusterError, OSError) as error:
            log_line(f"checkpoints of earlier runs may be left: {error}")

    def _refuse_nodes(self) -> Ending | None:
        """Why nothing may run on these nodes: foreign processes, full disks, faults,
        or other sources of the program.
        """
        nodes = [(str(facts["host"]), facts) for facts in self._group.node_facts]
        users_by_host = {host: ", ".join(facts["foreign"]) for host, facts in nodes if facts["foreign"]}
        users_by_host = {h: f"other processes use the GPUs: {users}" for h, users in users_by_host.items()}
        shortage_by_host = {host: facts["short_of_space"] for host, facts in nodes if facts["short_of_space"]}
        if fault_by_host := self._find_faults():
            self._write_preflight()
        if complaint_by_host := fault_by_host | shortage_by_host | users_by_host:
            cause = None if users_by_host else "disk_full" if shortage_by_host else NODE_FAILURE
            return self._give_up_hosts(complaint_by_host, cause)
        refusals = (self._mismatch(host, facts["kernel_digest"]) for host, facts in nodes)
        return next(filter(None, refusals), None)

    def _find_faults(self) -> dict[str, str]:
        """Host -> its fault, for faults that one observation proves; none where no preflight is wanted."""
        num_nodes, fault_by_host = self._allocation.nodes, dict[str, str]()
        for facts in self._group.node_facts if self._allocation.preflight else ():
            if fault_texts := complaints(facts.get("health", {}), Health.FAIL, num_nodes=num_nodes):
                fault_by_host[str(facts["host"])] = f"the node is faulty: {'; '.join(fault_texts.values())}"
        return fault_by_host

    def _give_up_hosts(self, complaint_by_host: dict[str, str], cause: str | None) -> Ending:
        """Gives up the hosts with these complaints, which the result of the first unclaimed task records."""
        for host, complaint in sorted(complaint_by_host.items()):
            self._group.give_up(host, complaint)
        reason = "; ".join(f"{host}: {complaint}" for host, complaint in sorted(complaint_by_host.items()))
        if task := next(filter(self._claim, self._allocation.tasks), None):
            result = RunResult(
                status=Status.NODE_FAIL, reason=reason, cause=cause, started_at=time.time(),
                suspect_hosts=tuple(sorted(complaint_by_host)), hostnames=tuple(self._group.hosts),
            )  # fmt: skip
            self._write_result(task, result)
        return Ending(reason)

    def _mismatch(self, host: str, digest: str) -> Ending | None:
        """Why nothing may run on a host whose training program differs from the sweep's; None if it does not."""
        expected_digest = self._allocation.kernel_digest
        mismatch_text = f"the training program on {host} has kernel_digest {digest}, not {expected_digest}"
        remedy = "launch the sweep again to use the new sources"
        return None if digest == expected_digest else Ending(f"{mismatch_text}; {remedy}")

    def _run_preflight(self) -> Ending | None:
        """Measures devices and links; returns why nothing may run if that fails or shows a fault."""
        if not self._allocation.preflight:
            self._write_preflight()
            return None
        result = self._measure(self._allocation.probe, -1)
        self._group.finish(keep_all=result.status != Status.OK)
        if result.status != Status.OK:
            return self._end_after_failed_preflight(result)
        for facts in self._group.node_facts:
            ranks_there = (rank for rank in self._group.progress.ranks if rank.host == facts["host"])
            facts["digests"] = [rank.digest for rank in ranks_there]
        self._write_preflight(probe=result.probe, environment=self._group.progress.environment)
        fault_by_host = self._find_faults()
        return self._give_up_hosts(fault_by_host, NODE_FAILURE) if fault_by_host else None

    def _end_after_failed_preflight(self, result: RunResult) -> Ending:
        """Why the allocation ends; a node on which alone the preflight failed is given up, since others pass it.

        A hang may come from a slow file system, so that it alone gives up no node.
        """
        reason = f"the preflight failed: {result.reason}"
        if result.status not in LOCATED_STATUSES:
            return Ending(reason)
        if result.status != Status.HANG:
            for host in result.suspect_hosts:
                self._group.give_up(host, reason)
        return Ending(reason, failed_on=result.began_on or tuple(self._group.hosts))

    def _write_preflight(self, **measurements: Any) -> None:
        """Writes what is known about the nodes into the journal, and warnings about them into the job's log."""
        name = self._allocation.name
        findings = {"nodes": self._group.node_facts, "allocation": name, **measurements}
        self._write(Preflight(allocation=name, restart=self._job_start.restart, found=findings))
        for facts in self._group.node_facts:
            for line in warning_lines(node_warnings([facts])):
                log_line(line)
        for difference in differences(dated_digests(self._group.node_facts, name, time.time())):
            log_line(f"{difference.dated.host}: {difference.text}")

    def _why_not_now(self, task: Task) -> Ending | None:
        """Why `task` must not begin now; None if it may."""
        self._group.listen(0.0)
        if self._group.end_reason:
            return Ending(self._group.end_reason)
        if time.monotonic() + min(task.limit_s, task.predicted_duration_s) > self._end_s:
            return Ending("no time left for the next run")
        if self._node.disk.retry(self._node.folder.pause.exists):
            return Ending("the sweep is paused", EndCode.PAUSED)
        if self._task_results and all(result.cause == UNMEASURED for _, result in self._task_results):
            return Ending("its program could not be measured")  # the launcher decides whether other tasks run
        allocation, now_s = self._allocation, time.time()
        if not is_in_window(allocation.window, now_s, allocation.utc_offset_s):
            window = window_text(allocation.window, allocation.utc_offset_s, now_s)
            return Ending(f"outside the window {window}", EndCode.OUTSIDE_WINDOW)
        return self._mismatch(self._node.identity.host, self._node.disk.retry(self._node.kernel_digest))

    def _run(self, task: Task) -> None:
        key_fields = {**task.key._asdict(), "allocation": self._allocation.name}
        job, prediction = self._node.identity.job, {"step_time_s": task.predicted_step_time_s}
        self._write(Claimed(**key_fields, job=job, spec=raw_json(task.spec), predicted=prediction))
        self._write(Started(**key_fields, scratch=str(self._node.scratch)))
        result = self._measure(task, self._index(task))
        self._write_result(task, result, is_claimed=True)
        self._task_results.append((task, result))
        self._group.finish(keep_all=result.status != Status.OK)

    def watch(self, task: Task) -> RunResult | None:
        """Watches the ranks of `task`; returns why ultrabench ends them, or None if they ended by themselves."""
        group, progress, last_phase, written_s, failure_s = self._group, self._group.progress, "", 0.0, 0.0
        while progress.running_ranks or any(rank.code in KILLED_CODES for rank in progress.ranks):
            now_s = group.listen(POLL_S)
            if progress.store_port is not None:
                group.order("write_store_port", port=progress.store_port)
                progress.store_port = None
            rank0 = progress.ranks[0]
            if (rank0.phase != last_phase or now_s - written_s >= STATUS_INTERVAL_S) and not task.probe:
                last_phase, written_s = rank0.phase, now_s
                self._write_phase(task, rank0, step_times_of(progress.reporter, task))
            end_reason = group.end_reason or (_TIME_OVER_TEXT if time.monotonic() > self._end_s else None)
            if end_reason:
                return RunResult(status=Status.CANCELLED, reason=end_reason, cause=STOPPED)
            if progress.has_failed:
                failure_s = failure_s or now_s
                if now_s - failure_s > PEER_GRACE_S:
                    return None
            elif overdue_result := result_if_overdue(task, progress, now_s):
                if overdue_result.status != Status.HANG:
                    return overdue_result
                if hang_result := _result_if_hung(group, task, overdue_result):
                    return hang_result
            elif slow_result := self._result_if_too_slow(task, progress.reporter):
                return slow_result
        return None

    def _write_phase(self, task: Task, rank: RankProgress, step_times_s: Sequence[float]) -> None:
        """Writes the phase of a run and the steps that its reporter has measured into the journal."""
        event_fields = {**task.key._asdict(), "name": rank.phase, "at": rank.phase_began_s}
        median_step_time_s = median(step_times_s) if step_times_s else None
        phase = Phase(**event_fields, steps=len(step_times_s) or None, step_time_s=median_step_time_s)

        def write_unless_full() -> None:  # `sweep status` alone reads it, and a run does not wait for that
            with contextlib.suppress(DiskError):
                self._journal.write(phase)

        self._node.disk.retry(write_unless_full)

    def _result_if_too_slow(self, task: Task, rank: RankProgress) -> RunResult | None:
        """The end of a run that is clearly slower than the best of its cell; None while it may still win.

        Controls and repeats may be slow. No run is ended before the step at which losses are compared.
        """
        measure, step_times_s = task.measure, step_times_of(rank, task)
        is_exempt = task.run_id == self._allocation.control or task.repeat > 0 or rank.done_line
        min_times = 1 if task.slice else MIN_RACE_STEPS
        has_few_steps = rank.num_steps < measure.loss_step or len(step_times_s) < min_times
        if measure.race is None or is_exempt or has_few_steps:
            return None
        best_s = best_step_time_s(task, self._task_results, self._allocation.control)
        if best_s is None or min(step_times_s) <= measure.race * best_s:
            return None
        steps_text = counted(len(step_times_s), "step" if task.slice is None or task.few_steps else "turn")
        reason = f"the fastest of {steps_text} took {SECONDS.text(min(step_times_s))}"
        reason += f"; the best of its cell takes {SECONDS.text(best_s)}"
        return RunResult(status=Status.OK, reason=reason, stopped=SLOWER)

    def _index(self, task: Task) -> int:
        """The index of a task in the list of its allocation."""
        return next(index for index, other in enumerate(self._allocation.tasks) if other.key == task.key)

    def _write_result(
        self, task: Task, result: RunResult, source: str = BY_AGENT, is_claimed: bool = False
    ) -> None:
        """Writes the result of a task, without its spec if the event Claimed of this agent has it."""
        key_fields = {**task.key._asdict(), "allocation": self._allocation.name}
        event_type = Result if result.status == Status.OK else Failed
        spec_fields = {} if is_claimed else to_dict(task.spec)
        event = event_type(**key_fields, source=source, spec=spec_fields, result=result)
        # What the run itself has left may be what fills the disk.
        self._node.disk.retry(partial(self._journal.write, event), free_space=self._node.remove_state)

    def _measure(self, task: Task, task_index: int) -> RunResult:
        """The result of a task, whose ranks start once, or twice for a slice of two starts.

        The first of two starts may take half of the time limit; a failure of either start is that of the attempt.
        """
        task = self._with_measured_times(task)
        if task.slice is None or not task.slice.two_starts:
            return self._measure_start(task, task_index)
        begin_s, first_part = time.monotonic(), PartStart(gas=task.slice.g1)
        first_start = replace(task.in_start(first_part), limit_s=task.limit_s / 2)
        first = self._measure_start(first_start, task_index)
        if first.status != Status.OK:
            return _of_start(first, first_part)
        first_times_s = tuple(self._group.progress.reporter.measured_seconds(task.measure))
        self._group.finish(keep_all=False)
        second_part = PartStart(gas=task.slice.g2, first_times_s=first_times_s)
        left_s = task.limit_s - (time.monotonic() - begin_s)
        second = self._measure_start(replace(task.in_start(second_part), limit_s=left_s), task_index)
        if second.status != Status.OK:
            return _of_start(second, second_part)
        return of_both_starts(first, second, task)

    def _measure_start(self, task: Task, task_index: int) -> RunResult:
        """Starts the ranks of a task, watches and kills them, and returns the result."""
        group = self._group
        group.start(task, task_index)
        forced_end, progress = self.watch(task), group.progress
        group.end_ranks()
        try:
            result = classify(progress, task, forced_end, group.outage)
            canonical_json(to_dict(result))  # fails where the journal would
        except Exception as error:  # ranks may report anything; the node is not to blame
            reason = f"the reports of the ranks cannot be classified: {type(error).__name__}: {error}"
            is_screened = task.is_screened or None
            result = RunResult(status=Status.INVALID, reason=reason, cause="bad_report", screened=is_screened)
        if progress.first_step_s is None and result.status in UNFINISHED_STATUSES and group.compiler_locks:
            result = replace(result, reason=f"{result.reason}; {locks_text(group.compiler_locks)}")
        digest, overrides = self._allocation.kernel_digest, variables_of(task.spec.variant)
        complete_result = replace(
            result,
            variables={name: value for name, value in result.variables.items() if name not in overrides},
            duration_s=time.monotonic() - progress.monotonic_start_s,
            **group.measured_fields(),
            hostnames=tuple(group.hosts),
            kernel_digest=digest,
            env_id=env_id(progress.environment, task.spec.kernel, digest, overrides),
        )
        return without_unlike(complete_result, task)


def _of_start(result: RunResult, part_start: PartStart) -> RunResult:
    """The failed result of one of two starts, which says in which of them it failed."""
    return replace(result, reason=f"{result.reason}; in the start with {part_start.gas} micro-batches a step")


def may_fit(task: Task, results: Sequence[TaskResult]) -> bool:
    """False for a task that needs at least as much memory as a run of its cell and variant that surely had too little.

    This allocation leaves it out; the launcher decides whether it is run elsewhere.
    """
    cell, variant = task.spec.cell, task.spec.variant
    misfits = (t.spec for t, r in results if r.confirmed and (t.spec.cell, t.spec.variant) == (cell, variant))
    return not any(dominates(spec.layout, task.spec.layout) for spec in misfits)


def best_step_time_s(task: Task, results: Sequence[TaskResult], control_id: str | None) -> float | None:
    """Step time that the best run of the task's cell would take now in this allocation, as far as this agent knows.

    Step times of another allocation, and those before the latest control run, are converted by the step times of the
    control run then and now, if both were measured.

    Args:
        results: the runs of this allocation and how they ended.
        control_id: run_id of the control run of the allocation.
    """
    ended_results, control_s = list[tuple[Task, RunResult, float | None, float | None]](), None
    for run, result in results:
        step_time_s = median(result.step_times_s) if result.step_times_s else None
        if step_time_s and run.run_id == control_id and result.status == Status.OK:
            control_s = step_time_s
        ended_results.append((run, result, step_time_s, control_s))
    best_elsewhere_s = task.best_step_time_s
    if control_s and task.best_control_ratio:
        best_elsewhere_s = control_s / task.best_control_ratio
    repeats = [
        Repeat(
            run_id=run.run_id, cell=run.spec.cell, status=r.status, stopped=r.stopped, suspect=r.throttled,
            screened=r.is_screened,
            rate=s and 1 / (s * control_s / control_then_s if control_s and control_then_s else s),
        )
        for run, r, s, control_then_s in ended_results
    ]  # fmt: skip
    if best_elsewhere_s:
        repeats.append(Repeat(run_id="", cell=task.spec.cell, status=Status.OK, rate=1 / best_elsewhere_s))
    fastest = next(iter(near_best(standings(repeats).get(task.spec.cell, []), 1)), None)
    # A suspect run is no reference, even if its cell has no other run; it may be suspect because it seems too fast.
    return 1 / fastest.rate if fastest and fastest.may_win and fastest.rate else None


def _result_if_hung(group: AgentGroup, task: Task, overdue_result: RunResult) -> RunResult | None:
    """Collects the evidence of a hang and finds its cause, before the ranks are killed.

    Returns None, and the run continues, if a rank moved meanwhile; the host was slow, so the next deadline is longer.
    """
    positions_before = group.progress.positions
    group.examine()
    if group.progress.positions != positions_before and not group.progress.has_failed:
        return None
    if not task.forked:
        group.abort_for_stacks()
    ranks = group.progress.ranks
    layout = None if task.probe else task.started_spec.layout
    cause = find_hang_cause(ranks, layout, task.spec.kernel.rank_order)
    evidence = {"hang_cause": cause.text, "hang_evidence": [hang_row(rank) for rank in ranks]}
    about_hosts = evidence_of_ranks(cause.culprits, ranks)
    reason = f"{cause.headline}; {overdue_result.reason}"
    return replace(overdue_result, reason=reason, evidence=evidence, **about_hosts._asdict())


def result_if_overdue(task: Task, progress: AttemptProgress, now_s: float) -> RunResult | None:
    """How a run ends that has missed a deadline at `now_s`, by the leader's time; None while there is time.

    Until a program of the user has reported something, only its time limit applies. A run that has measured
    enough steps until its time limit is ok. Checkpoints have a limit of their own, and their run stays ok.
    """
    measure, rank0, phase = task.measure, progress.ranks[0], progress.ranks[0].phase
    reporter = progress.reporter
    if phase == CHECKPOINT_PHASE:  # the steps are measured, and a slow file system is no hang
        if now_s - rank0.phase_since_s <= measure.checkpoint_limit_s:
            return None
        reason = f"saving and loading the state did not finish within {measure.checkpoint_limit_s:g} s"
        return RunResult(status=Status.OK, reason=reason, cause=DISK_SLOW)
    if now_s - progress.started_s > task.limit_s:
        reason = f"still in phase {phase} after its limit of {task.limit_s:g} s"
        reason += f"; {len(reporter.steps)} steps done" if reporter.steps else ""
        # Of a start in full, the whole steps count, which are few.
        min_steps = (measure.few_steps if task.few_steps else measure).min_steps
        has_enough_steps = len(reporter.measured_step_times_s(measure)) >= min_steps
        if has_enough_steps and reporter.num_steps >= measure.loss_step:
            return RunResult(status=Status.OK, reason=reason, stopped="time_limit")
        return RunResult(status=Status.TIMEOUT, reason=reason, cause="time_limit")
    # Writing a large trace may take as long as a start.
    if progress.first_step_s is None or phase == TRACE_PHASE:
        usual_deadline_s = max(measure.start_deadline_s, LONGEST_GAP_FACTOR * task.predicted_step_time_s)
        max_silence_s = max(usual_deadline_s, LIMIT_FACTOR * task.predicted_start_s)
    else:
        max_silence_s = max(measure.deadline_floor_s, LONGEST_GAP_FACTOR * progress.longest_gap_s)
    silence_s = now_s - max(rank.last_progress_s for rank in progress.ranks)
    if silence_s > max_silence_s and (progress.has_reported or task.forked):
        reason = f"no progress for {silence_s:.1f} s in phase {phase} (deadline {max_silence_s:.1f} s)"
        return RunResult(status=Status.HANG, reason=reason, cause="hang")
    return None
