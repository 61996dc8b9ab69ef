"""The commands that act on a launched sweep: `ultrabench sweep retry`, `pause`, `resume` and `cancel`."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from ultrabench.cli.sweep.launch import follow
from ultrabench.cli.sweep.live import counts_line
from ultrabench.cli.sweep.tracking import require_tracker
from ultrabench.cli.tables import print_json, say, show, table, warn
from ultrabench.errors import ClusterError, ConfigError, require_known
from ultrabench.launchers.allocation_ends import open_allocations
from ultrabench.launchers.choose import choose_launcher
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.open_sweep import OpenSweep, open_sweep
from ultrabench.processes import own_name
from ultrabench.result import FAILURES, Status
from ultrabench.run import AttemptKey
from ultrabench.store.claim import give_up
from ultrabench.store.events import BY_LAUNCHER, AllocationEnded, Cancel, Launched, Pause
from ultrabench.store.folder import SweepFolder, write_whole
from ultrabench.store.identity import ensure_identity
from ultrabench.store.jobs_seen import is_same_site
from ultrabench.store.journal import JournalWriter, read_journal
from ultrabench.store.lease import living_launchers
from ultrabench.store.state import AttemptState, SweepState, final_attempts, fold
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.config.load import config_from_tree
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Plan, make_plan
from ultrabench.sweep.plan_table import read_rows
from ultrabench.sweep.running.attempts import is_settled
from ultrabench.sweep.running.blame import Blame, blame_of
from ultrabench.sweep.running.outliers import for_answers
from ultrabench.sweep.running.progress import progress_of
from ultrabench.sweep.running.retry import decide_retry


def run_retry(
    folder: SweepFolder, status_list: str | None, run_id_prefix: str | None, dry_run: bool, as_json: bool
) -> int:
    """Tries failed runs again, even where the retry policy would not; returns the exit code.

    Args:
        status_list: the statuses to retry with commas between them; None means all failures except a lack of memory.
        run_id_prefix: beginning of the ids of the runs to retry; None means all runs.
    """
    state, plan = _state_and_plan(folder)
    state = for_answers(state)
    attempts = _attempts_to_retry(folder, state, status_list, run_id_prefix)
    blame = blame_of(state, plan.config.retry)
    retry_rows = [_retry_row(attempt, state, plan, blame) for attempt in attempts]
    if as_json:
        print_json(retry_rows)
    if not as_json and (dry_run or attempts):
        for node, line in blame.node_lines.items():
            say(f"{line}; retry.forgive=[{node}] uses it again")
    if not attempts:
        say(f"nothing to retry: {f'no run has status {status_list}' if status_list else 'no run failed'}")
        return 0
    if not dry_run:
        require_tracker(plan.config)
    if not as_json:
        title = f"{'would be' if dry_run else 'are'} retried, whatever the retry policy says"
        columns = ("run", ">repeat", ">attempt", "was", "on", "reason", "retry policy")
        show(table(title, *columns, rows=[row.values() for row in retry_rows]))
    if dry_run:
        return 0
    retry_keys = [attempt.key for attempt in attempts]
    return follow(*_reopen(folder, state, plan, retry_keys, None), detach=False, ask=True, stderr=as_json)


def _attempts_to_retry(
    folder: SweepFolder, state: SweepState, status_list: str | None, run_id_prefix: str | None
) -> list[AttemptState]:
    """The failed final attempts that the user asked for; a lack of memory only if its status or its run was named."""
    usual_statuses = FAILURES if run_id_prefix else FAILURES - {Status.OOM}
    statuses = {name.strip() for name in status_list.split(",")} if status_list else usual_statuses
    require_known("status to retry", FAILURES, *sorted(statuses))
    planned_ids = {row["run_id"] for row in read_rows(folder.plan, runs_only=True)}
    chosen_ids = {run_id for run_id in planned_ids if run_id.startswith(run_id_prefix or "")}
    if run_id_prefix is not None and not chosen_ids:
        fact = f"no run id of {folder.name} begins with {run_id_prefix!r}"
        raise ConfigError(f"{fact}; see ultrabench sweep top -n 100")
    attempts = (a for (run_id, _), a in sorted(final_attempts(state).items()) if run_id in chosen_ids)
    return [attempt for attempt in attempts if attempt.result and attempt.result.status in statuses]


def _retry_row(attempt: AttemptState, state: SweepState, plan: Plan, blame: Blame) -> dict[str, object]:
    """The table row of an attempt to make: its run, how that ended before, and what the retry policy says."""
    result, key = attempt.result, attempt.key
    assert result is not None
    memory_share = next((run.prediction.memory_share for run in plan.runs if run.run_id == key.run_id), 1.0)
    attempts_of_repeat = [a for a in state.by_run()[key.run_id] if a.key.repeat == key.repeat]
    decision = decide_retry(attempts_of_repeat, plan.config.retry, blame=blame, memory_share=memory_share)
    return {
        "run_id": key.run_id,
        "repeat": key.repeat,
        "attempt": key.attempt + 1,
        "was": result.status.value,
        "on": ",".join(result.hostnames),
        "reason": result.reason,
        "policy": f"{'retry' if decision.retry else 'no retry'}; {decision.why}",
    }


def run_pause(folder: SweepFolder) -> None:
    """Pauses a sweep: running allocations end after their current run, and queued ones are cancelled."""
    state, plan = _state_and_plan(folder)
    if is_settled(plan, state):
        say(f"nothing to pause: every run of {folder.name} is settled")
        return
    if state.cancelled:
        say(f"nothing to pause: {folder.name} is cancelled; run the launch command again to continue")
        return
    ensure_identity(folder, say)
    state = fold(read_journal(folder.journal))  # a copy has no jobs any more
    if not state.paused:
        JournalWriter(folder.journal, "pause").write(Pause(generation=state.generation + 1))
    # The file is written after the journal, because the resume that removes it needs the event.
    write_whole(folder.pause, "ultrabench sweep resume removes this file\n")
    _end_allocations(folder, state, plan, queued_only=True)
    resume_command = f"ultrabench sweep resume {folder.display_name}"
    say(f"Pausing: current runs will finish, no new ones will start. To continue: {resume_command}")


def run_resume(folder: SweepFolder, detach: bool, max_gpu_hours: float | None) -> int:
    """Lifts a pause and continues the sweep with its latest configuration; returns the exit code."""
    state, plan = _state_and_plan(folder)
    require_tracker(plan.config)
    ensure_identity(folder, say)
    folder.pause.unlink(missing_ok=True)
    if state.paused:
        JournalWriter(folder.journal, "pause").write(Pause(generation=state.generation + 1, on=False))
    return follow(*_reopen(folder, state, plan, (), max_gpu_hours), detach=detach, ask=True, stderr=False)


def run_cancel(folder: SweepFolder) -> None:
    """Cancels a sweep: no new allocation is submitted, and all queued and running ones are ended."""
    state, plan = _state_and_plan(folder)
    if is_settled(plan, state) and not open_allocations(state):
        say(f"nothing to cancel: every run of {folder.name} is settled")
        return
    ensure_identity(folder, say)
    state = fold(read_journal(folder.journal))  # a copy has no jobs any more
    JournalWriter(folder.journal, "cancel").write(Cancel(generation=state.generation + 1))
    try:
        _end_allocations(folder, state, plan, queued_only=False)
    except ClusterError as error:
        launchers = living_launchers(folder, writes=True)
        if not launchers:
            remedy = (
                "The cancel is recorded, but no launcher carries it out: "
                "run this command again where its jobs can be ended"
            )
            raise ClusterError(f"{error}. {remedy}") from error
        say(f"{error}. {launchers[0]} follows this sweep and retries until the jobs have ended")
        return
    end_state = fold(read_journal(folder.journal))
    progress = progress_of(folder.name, plan.runs, end_state, plan.config.hardware.device)
    say(counts_line(progress, is_active=False))
    say("Cancelled. Results are kept; run the launch command again to continue.")


def _state_and_plan(folder: SweepFolder) -> tuple[SweepState, Plan]:
    """The state of a sweep, and the plan of its latest launch.

    Raises:
        SweepFolderError: the sweep cannot be read.
    """
    state = fold(read_journal(folder.journal, warn))
    return state, make_plan(launched_config(folder, state))


def launched_config(folder: SweepFolder, state: SweepState) -> SweepConfig:
    """The configuration of the latest launch of a sweep, which is in this folder now.

    Raises:
        SweepFolderError: the sweep cannot be read.
    """
    first_config = read_sweep_json(folder).config
    location = {"name": folder.name, "results_dir": str(folder.path.parent)}
    return config_from_tree((state.config or first_config) | location)


def _reopen(
    folder: SweepFolder, state: SweepState, plan: Plan, retry_keys: Sequence[AttemptKey], budget: float | None
) -> tuple[OpenSweep, Launcher, str]:
    """A sweep opened with the configuration of its latest launch, its launcher, and its name in commands.

    Args:
        retry_keys: failed attempts to repeat even if the retry policy would not repeat them.
        budget: the GPU hours that the sweep may use; None means the budget of the latest launch.
    """
    latest_launch, display_name = state.launched or Launched(generation=0, config={}), folder.display_name
    budget = latest_launch.max_gpu_hours if budget is None else budget
    if latest_launch.work_dir and Path(latest_launch.work_dir).is_dir():
        os.chdir(latest_launch.work_dir)  # a command of the user may name files of this folder
    launcher = choose_launcher(plan.config, folder)
    max_limit_s = launcher.limits.max_limit_s
    sweep = open_sweep(
        plan, reuse="any", warn=warn, say=say, retry=retry_keys, max_gpu_hours=budget, max_limit_s=max_limit_s
    )
    return sweep, launcher, display_name


def _end_allocations(folder: SweepFolder, state: SweepState, plan: Plan, *, queued_only: bool) -> None:
    """Ends the open allocations of a sweep that this user has submitted.

    Those that have not started are given up first, so that a job that is being submitted now runs nothing.

    Raises:
        ClusterError: some of them cannot be ended from here.
    """
    allocations = open_allocations(state)
    other_users = {str(a.by["user"]) for a in allocations.values() if a.by and a.by.get("user") != own_name()}
    if other_users:
        say(f"jobs of {', '.join(sorted(other_users))} are still active: only their owner can end them")
    launcher = choose_launcher(plan.config, folder, submits=False)
    own_allocations = {n: a for n, a in allocations.items() if a.by.get("user", own_name()) == own_name()}
    unended, given_up_names = {} if queued_only else own_allocations, list[str]()
    for name in [name for name, allocation in unended.items() if not allocation.agents]:
        with contextlib.suppress(OSError):
            if give_up(folder.claims, name):
                by = unended.pop(name).by
                given_up_names += [name] if is_same_site(launcher.origin, by) else []
    launcher.cancel(allocations, queued_only=queued_only)
    if launcher.origin["cluster"]:
        return  # jobs of a cluster are ended by their names, from every host
    if given_up_names and not living_launchers(folder):  # nobody else records that they are over
        journal, reason = JournalWriter(folder.journal, "cancel"), "cancelled before it started"
        for name in given_up_names:
            journal.write(AllocationEnded(allocation=name, reason=reason, source=BY_LAUNCHER, held_s=0.0))
    if hidden := {n: a for n, a in unended.items() if not is_same_site(launcher.origin, a.by)}:
        names, places = ", ".join(hidden), ", ".join(sorted({a.by["host"] for a in hidden.values()}))
        raise ClusterError(f"{names} runs on {places}, whose processes cannot be ended from here")
