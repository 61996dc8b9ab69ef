"""Runs an open sweep to its end: observes, asks `decide` what to do, does it, and observes again."""

import functools
import math
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from ultrabench.errors import ClusterError, ConfigError, SweepFolderError, counted, may_pass
from ultrabench.launchers.allocate import array_groups, make_allocations
from ultrabench.launchers.allocation_ends import EndRecorder, LaunchMemory, visible_to
from ultrabench.launchers.job_log import telling_line
from ultrabench.launchers.launcher import Launcher, NotTakenError, Say
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.launchers.refusals import Refusals
from ultrabench.node_health import node_warnings, warning_lines
from ultrabench.store.events import Submitted, Submitting
from ultrabench.store.jobs_seen import JobsSeen
from ultrabench.store.state import SweepState
from ultrabench.sweep.running.attempts import Launch
from ultrabench.sweep.running.decide import Actions, DeadEnd, decide
from ultrabench.sweep.running.price import PlannedJob

DISK_PATIENCE_S = 300.0
"""Seconds to keep retrying a full, read-only or unresponsive results folder."""
DISK_PAUSE_S = 2.0
"""Seconds between two tries to use such a results folder."""
CANCEL_PAUSE_S = 10.0
"""Seconds between two attempts to cancel jobs."""
REDECIDE_S = 5.0
"""Seconds until `decide` is asked again if nothing has changed, since some decisions depend on the time."""
SAY_AGAIN_S = 600.0
"""Seconds after which the user is told again what a launch waits for before it submits jobs."""

Show = Callable[[SweepState, frozenset[str]], None]
"""Shows the user the state of a sweep; its second argument is the names of the living allocations."""


class Reconciler:
    """Follows one launch of a sweep."""

    def __init__(
        self, sweep: OpenSweep, launcher: Launcher, show: Show, say: Say, memory: LaunchMemory | None = None
    ) -> None:
        """`show` gets the state and the living allocations in every round, `say` messages for the user.

        `memory` is what the launch remembers if it has begun before; None makes a new launch.
        """
        self.sweep, self.launcher = sweep, launcher
        self.show, self.say = show, say
        self.limits = replace(launcher.limits, max_gpu_hours=sweep.max_gpu_hours)
        self.stop_reason: str | None = None
        """Why the launch ended before all runs were done; None if it did not."""
        self.over_budget = False
        """Whether the launch ended because the next job costs more than what is left of the budget."""
        if memory is None:
            attempts = sweep.state().attempts
            ended_keys = frozenset(key for key, attempt in attempts.items() if attempt.result is not None)
            launch = Launch(name=sweep.journal.name, by=launcher.origin, accepts=sweep.accepts)
            memory = LaunchMemory(
                launch=replace(launch, old_attempts=ended_keys, begun_attempts=frozenset(attempts))
            )
        self.memory = memory
        self.refusals = Refusals(60.0 * sweep.config.launcher.refused_minutes)
        self._told_waits: dict[str, float] = {}
        """What the user was told that this launch waits for -> when."""
        self._tells_waits = False
        """Whether the latest line about submissions says that this launch waits."""
        self._say_once = functools.cache(say)
        self.recorder = EndRecorder(sweep, launcher, memory, self._say_once)
        self._warned_checks = set[tuple[str, str]]()
        """Checks and hosts whose warnings were said."""
        self._decision: tuple[float, object, Actions] | None = None
        """The time of the latest decision, the observations it rests on, and the decided actions."""

    def run(self, *, until_submitted: bool = False) -> SweepState:
        """Continues until nothing is left to do, or somebody stops the sweep; returns the last state.

        Args:
            until_submitted: whether to end after the first submission.

        Raises:
            ClusterError: allocations end again and again without running anything.
        """
        failing_since_s = math.inf
        while True:
            try:
                state, is_busy = self.run_once()
            except (OSError, SweepFolderError) as error:
                failing_since_s = min(failing_since_s, time.monotonic())
                self._wait_for_disk(error, failing_since_s)
                continue
            failing_since_s = math.inf
            is_refused = self.refusals.latest is not None or self.memory.unanswered_names
            if not is_busy or (until_submitted and not is_refused):
                return state
            time.sleep(self.launcher.look_pause_s)

    def run_once(self) -> tuple[SweepState, bool]:
        """Observes, decides and acts once; returns the state and whether there is anything to wait for.

        Raises:
            ClusterError: allocations end again and again without running what was asked for.
        """
        if self.sweep.renew_lapsed_lease():
            self.say("this launcher was suspended or its disk did not answer; it looks at the sweep again")
        jobs_seen, state = self.recorder.look()
        self.show(state, jobs_seen.alive)
        self._settle_unanswered(state, jobs_seen)
        self.refusals.look(jobs_seen.alive - self.memory.unanswered_names, time.monotonic())
        actions = self._decide(state, jobs_seen)
        warnings = (*self._other_commits(state), *self._node_warnings(state))
        for note in (*jobs_seen.notes, *warnings, *actions.notes):
            self._say_once(note)
        is_busy = self._act(actions, state, jobs_seen)
        return state, is_busy or (bool(jobs_seen.leaving & jobs_seen.running) and not state.cancelled)

    def _decide(self, state: SweepState, jobs_seen: JobsSeen) -> Actions:
        """What to do now; it is decided again after a change, and otherwise every REDECIDE_S."""
        now_s, memory = time.monotonic(), self.memory
        if state.paused or state.cancelled:
            memory.excuse(state.allocations.keys())
        for key, attempt in state.attempts.items():
            if attempt.result is not None and key not in memory.launch.old_attempts:
                memory.ended_at.setdefault(key, now_s)
        observations = (self.sweep.fold.num_lines, jobs_seen.alive, jobs_seen.leaving)
        if self._decision and self._decision[1] == observations and now_s - self._decision[0] < REDECIDE_S:
            return self._decision[2]
        seconds_since_end = {key: now_s - ended_at for key, ended_at in memory.ended_at.items()}
        launch = replace(memory.launch, since_end_s=seconds_since_end)
        actions = decide(self.sweep.plan, state, jobs_seen, self.limits, launch, time.time())
        self._decision = (now_s, observations, actions)
        return actions

    def _act(self, actions: Actions, state: SweepState, jobs_seen: JobsSeen) -> bool:
        """Carries out the decided actions; returns whether there is anything to wait for."""
        self.stop_reason, self.over_budget = actions.stop_reason, actions.over_budget
        if actions.unstartable:
            for reason in dict.fromkeys(actions.unstartable.values()):
                num_runs = len({key.run_id for key, text in actions.unstartable.items() if text == reason})
                self.say(f"{counted(num_runs, 'run')} failed: {reason}")
            self.recorder.record_unstartable(actions.unstartable)
            return True
        if actions.dead_end:
            raise ClusterError(self._dead_end_message(actions.dead_end))
        if actions.end_jobs:
            return self._cancel(state, jobs_seen)
        if not actions.submit:
            self.refusals.rest()
        elif not self.memory.unanswered_names and self.refusals.may_submit(time.monotonic()):
            self._submit(actions, state)
        return bool(jobs_seen.alive) or (actions.wait and self.stop_reason is None)

    def _cancel(self, state: SweepState, jobs_seen: JobsSeen) -> bool:
        """Cancels the visible allocations, every CANCEL_PAUSE_S; returns whether any live."""
        visible_allocations = visible_to(self.launcher, {n: state.allocations[n] for n in jobs_seen.alive})
        if visible_allocations and time.monotonic() - self.memory.cancelled_at >= CANCEL_PAUSE_S:
            self.memory.cancelled_at = time.monotonic()
            try:
                self.launcher.cancel(visible_allocations)
            except ClusterError as error:
                self._say_once(f"cannot cancel: {error}; retrying until the jobs have ended")
        return bool(visible_allocations)

    def _submit(self, actions: Actions, state: SweepState) -> None:
        """Submits jobs, unless the training program changed or some of their attempts are already claimed."""
        old_digest, digest = self.sweep.kernel_digest, self.sweep.config.kernel.digest()
        if old_digest != digest:
            change = f"the training program changed during the sweep (kernel_digest {old_digest} -> {digest})"
            self.stop_reason = f"{change}; launch again to continue with the new one"
            return
        if self.recorder.record_claimed((a.key for job in actions.submit for a in job.attempts), state):
            return  # the next rounds first record the ends of the claimed attempts
        for host, line in actions.bad_nodes.items():
            if host not in self.memory.avoided_hosts:  # its row of the table grows with each run
                self.say(line)
        for host in sorted(self.memory.avoided_hosts - actions.bad_nodes.keys()):
            self.say(f"node {host} is used again: later results do not point at it")
        self.memory.avoided_hosts = {*actions.bad_nodes}
        jobs = actions.submit[: self.refusals.max_jobs]
        for array in array_groups(jobs, self.limits.max_array):
            if not self._submit_array(array, [*dict.fromkeys((*actions.bad_nodes, *array[0].avoid))]):
                return

    def _submit_array(self, jobs: Sequence[PlannedJob], bad_hosts: list[str]) -> bool:
        """Submits jobs as one array; returns whether the batch system took them."""
        sweep, journal = self.sweep, self.sweep.journal
        token = uuid.uuid4().hex
        new_allocations = make_allocations(
            sweep.plan, sweep.folder, jobs, token=token, origin=self.launcher.origin, kernel_digest=sweep.kernel_digest,
            sweep_id=sweep.sweep_id, git_commit=sweep.git_commit, num_cores=sweep.environment.get("cores"),
        )  # fmt: skip
        try:
            for allocation in new_allocations:
                allocation.write()
            for allocation in new_allocations:
                self.recorder.record_planned(allocation)
                journal.write(Submitting(allocation=allocation.name, token=token))
        except OSError:  # such as a full disk: nothing was submitted, and the next try makes new folders
            for allocation in new_allocations:
                shutil.rmtree(allocation.folder, ignore_errors=True)
            raise
        if sweep.has_lapsed:  # others may have taken this launcher for dead: the next round looks again
            self.recorder.record_refused(new_allocations, "not submitted: this launcher was suspended")
            return False
        try:
            job_by_name = self.launcher.submit(new_allocations, bad_hosts, self._say_once)
        except NotTakenError as refusal:
            if refusal.may_exist:
                self.memory.unanswered_names |= {allocation.name for allocation in new_allocations}
            else:
                self.recorder.record_refused(
                    new_allocations, f"not submitted: {refusal.waits_for} ({refusal})"
                )
            try:
                self._wait(refusal, len(new_allocations))
            except (ClusterError, ConfigError) as error:
                self.recorder.withdraw(self.memory.unanswered_names, f"not submitted: {error}")
                raise
            return False
        except (ClusterError, ConfigError) as error:
            # A launcher that cannot see jobs of this cluster would wait for these for ever.
            self.recorder.withdraw((a.name for a in new_allocations), f"not submitted: {error}")
            raise
        for name, job in job_by_name.items():
            journal.write(Submitted(allocation=name, job=job))
        self._accept(len(new_allocations))
        return True

    def _accept(self, num_jobs: int) -> None:
        """Takes note that the batch system took jobs."""
        self.memory.num_submitted += num_jobs
        self.refusals.accept(num_jobs)
        if self._tells_waits:
            self._tells_waits = False
            self.say("jobs are submitted again")

    def _wait(self, refusal: NotTakenError, num_jobs: int) -> None:
        """Takes note of a refusal, and tells the user what this launch waits for.

        Raises:
            ConfigError: the batch system has taken no job for longer than launcher.refused_minutes.
            ClusterError: it has taken no job of this launch, for reasons that are not known to pass.
        """
        refusals, now_s = self.refusals, time.monotonic()
        refusals.add(refusal, num_jobs, now_s)
        if refusals.are_unknown and not self.memory.num_submitted:
            advice = "fix launcher.* (ultrabench doctor says how) or the cluster, then launch again; results are kept"
            raise ClusterError(refusal.complaint, advice) from refusal
        minutes_text = f"{self.sweep.config.launcher.refused_minutes:g} minutes"
        if refusals.has_waited_enough(now_s):
            advice = (
                "launch again when it takes jobs, or set launcher.refused_minutes= to wait longer; "
                "results are kept"
            )
            raise ConfigError(f"{refusal.complaint}; waited {minutes_text}", advice) from refusal
        if now_s - self._told_waits.get(refusal.waits_for, -math.inf) >= SAY_AGAIN_S:
            self._told_waits[refusal.waits_for], self._tells_waits = now_s, True
            stop_command = f"ultrabench sweep pause {shlex.quote(self.sweep.config.name)}"
            self.say(
                f"waiting to submit jobs: {refusal.waits_for} ({refusal}); the launch ends after {minutes_text}"
                f" in which no job of this sweep is alive. To stop: Ctrl-C or {stop_command}"
            )

    def _settle_unanswered(self, state: SweepState, jobs_seen: JobsSeen) -> None:
        """Records jobs that the batch system took without saying so; the recorder ends those that it did not take."""
        num_taken = 0
        for name in sorted(self.memory.unanswered_names):
            allocation, job = state.allocations[name], jobs_seen.jobs.get(name)
            is_taken = job is not None or bool(allocation.agents)
            if not is_taken and allocation.ended is None:
                continue
            self.memory.unanswered_names.remove(name)
            num_taken += is_taken
            if job is not None:
                self.sweep.journal.write(Submitted(allocation=name, job=job))
            if not is_taken:
                self.memory.excuse((name,))
        if num_taken:
            self._accept(num_taken)

    def _other_commits(self, state: SweepState) -> list[str]:
        """A message for each node that runs another commit than this launcher."""
        sha = self.sweep.git_commit
        if not sha:
            return []
        node_facts = [n for a in state.allocations.values() for n in a.preflight.get("nodes") or ()]
        other_commits = {(n["host"], c) for n in node_facts if (c := n.get("git_commit")) and c != sha}
        return [f"{host} runs commit {c[:12]}, this launcher {sha[:12]}" for host, c in sorted(other_commits)]

    def _node_warnings(self, state: SweepState) -> list[str]:
        """A line for each check that new nodes fail; each check of a node is warned of once."""
        warnings = node_warnings(state.node_facts())
        new_warnings = {key: warnings[key] for key in warnings.keys() - self._warned_checks}
        self._warned_checks |= new_warnings.keys()
        return [f"warning: {line}" for line in warning_lines(new_warnings)]

    def _dead_end_message(self, dead_end: DeadEnd) -> str:
        """The message that says why the launch gives up, with the line of a job's log that says it."""
        log_path, log_line = telling_line(self.sweep.folder.allocations / dead_end.allocation.name)
        reason = str(dead_end.allocation.ended)
        if log_line and log_line[:200] not in reason:
            reason += f"; its log says: {log_line[:200]}"
        message = (
            f"{dead_end.num_allocations} allocations in a row ended without running "
            f"{dead_end.missing_run} ({reason})"
        )
        return f"{message}; see {log_path}, then launch again"

    def _wait_for_disk(self, error: OSError | SweepFolderError, failing_since_s: float) -> None:
        """Pauses while the results folder is unusable; raises if that cannot pass or lasts too long.

        Args:
            failing_since_s: since when it has been unusable, by the monotonic clock.
        """
        self.sweep.folder.require_present()
        cause = error.__cause__ if isinstance(error, SweepFolderError) else error
        if not may_pass(error) and not (cause and may_pass(cause)):
            raise error
        if time.monotonic() - failing_since_s > DISK_PATIENCE_S:
            problem = f"{error}; waited {DISK_PATIENCE_S / 60:g} minutes"
            raise ClusterError(f"{problem}; jobs continue: fix the folder, then launch again") from error
        self._say_once(f"cannot use {self.sweep.folder.path} ({cause}); retrying, running jobs continue")
        time.sleep(DISK_PAUSE_S)
