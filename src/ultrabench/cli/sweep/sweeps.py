"""The commands on whole sweeps: `ultrabench sweep list`, `rm` and `rename`."""

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.analysis.results.numbers import with_unit
from ultrabench.cli.sweep.control import launched_config
from ultrabench.cli.sweep.status import activity, num_starts_left
from ultrabench.cli.tables import can_ask, duration_text, print_json, say, show, table, warn
from ultrabench.errors import ClusterError, ConfigError, SweepFolderError, counted
from ultrabench.launchers.allocation_ends import live_allocations, open_allocations
from ultrabench.launchers.choose import choose_launcher
from ultrabench.launchers.local import GRACE_S
from ultrabench.record import value_from
from ultrabench.standing import Standing
from ultrabench.store.allocation import read_allocation
from ultrabench.store.damage import one_line_if_damaged, read_each
from ultrabench.store.folder import SweepFolder, last_written_s, newest_first, sweep_dirs
from ultrabench.store.identity import ensure_identity, lines_of_new_copy
from ultrabench.store.journal import read_journal
from ultrabench.store.lease import living_launchers
from ultrabench.store.state import SweepState, fold
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.store.sweep_moves import remove_sweep, rename_sweep, require_own_folder
from ultrabench.sweep.candidate import Candidate, by_cell
from ultrabench.sweep.config.sweep_config import SWEEP_NAME
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.running.progress import SweepProgress, progress_of

DAY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSummary:
    """What `sweep list` says about one sweep."""

    folder: SweepFolder
    num_cells: int
    progress: SweepProgress
    activity: str
    """A key of REASON_BY_ACTIVITY of status.py."""
    age_s: float
    """Seconds since its journal was last written."""

    @property
    def best(self) -> tuple[Candidate, Standing] | None:
        """The fastest of the best runs of the cells; the one with the largest mfu where tokens need different FLOPs."""
        has_equal_tokens = len({(run.shape, run.cell.seq_len) for run, _ in self.progress.best}) == 1

        def sort_key(best_of_cell: tuple[Candidate, Standing]) -> tuple[bool, float, float]:
            run, standing = best_of_cell
            mfu = 0.0 if has_equal_tokens else self.progress.mfu(run, standing) or 0.0
            return standing.suspect is None, mfu, standing.rate or 0.0

        return max(self.progress.best, key=sort_key, default=None)

    def as_json(self) -> dict[str, Any]:
        """The entry of `sweep list --json`; `best` has the best run of every cell, as in `sweep status --json`."""
        document = self.progress.as_json()
        return {
            "path": str(self.folder.path), "cells": self.num_cells, "activity": self.activity,
            "age_s": round(self.age_s, 1),
            **{key: document[key] for key in ("sweep", "runs", "settled", "by_status", "best")},
        }  # fmt: skip


def show_sweeps(results_dir: Path, as_json: bool) -> None:
    """Prints a line for each sweep, the one that was written last first; one that cannot be read gives a warning."""
    folders = [SweepFolder(path.absolute()) for path in newest_first(sweep_dirs(results_dir))]
    summary_by_folder = read_each(
        folders, _sweep_summary, warn, path_of=lambda folder: folder.path, may_be_empty=True
    )
    summaries = [*summary_by_folder.values()]
    if as_json:
        print_json([summary.as_json() for summary in summaries])
    elif summaries:
        headings = (
            "sweep",
            ">cells",
            ">runs settled",
            "best",
            f">{column_of(RATE).heading}",
            f">{column_of('mfu').heading}",
            ">age",
            "activity",
        )
        show(table(f"sweeps in {results_dir}", *headings, rows=map(_table_row, summaries)))
    else:
        say(f"no sweep in {results_dir}/; start one with: ultrabench sweep launch")


def _sweep_summary(folder: SweepFolder) -> SweepSummary:
    """Reads a sweep and summarizes it."""
    sweep_json, lines = read_sweep_json(folder), read_journal(folder.journal, warn)
    state = fold([*lines, *lines_of_new_copy(folder)])
    runs = [*runs_of(sweep_json, read_rows(folder.plan, runs_only=True, warn=warn), state)]
    progress = progress_of(folder.name, runs, state, sweep_json.hardware.device)
    num_left = num_starts_left(folder, runs, state, progress)
    return SweepSummary(
        folder=folder, num_cells=len(by_cell(runs)), progress=progress,
        activity=activity(folder, progress, state, num_left),
        age_s=max(0.0, time.time() - last_written_s(folder.path)),
    )  # fmt: skip


def _table_row(summary: SweepSummary) -> tuple[str | Text | None, ...]:
    """The row of `sweep list` for one sweep."""
    progress = summary.progress
    best_texts: tuple[str | None, ...] = (None, None, None)
    settled_text = f"{len(progress.settled)} of {progress.runs}"
    if summary.best:
        run, standing = summary.best
        best_text = f"{run.spec.label()}{' (suspect)' if standing.suspect else ''}"
        best_texts = (
            best_text,
            with_unit(RATE, standing.rate or 0.0),
            with_unit("mfu", progress.mfu(run, standing)),
        )
    age_days = summary.age_s / DAY_S
    age_text = f"{age_days:.0f} d" if age_days >= 2 else duration_text(summary.age_s)
    return progress.sweep, str(summary.num_cells), settled_text, *best_texts, age_text, summary.activity


def run_rm(folder: SweepFolder, yes: bool, is_cluster_gone: bool = False) -> None:
    """Deletes a sweep for good.

    Args:
        is_cluster_gone: whether the user says that its batch system no longer exists, so that none of its jobs lives.

    Raises:
        SweepFolderError: its jobs may live, it is no folder of its own, or it could not be deleted.
        typer.Abort: the answer is no.
    """
    folder = require_own_folder(folder)
    # A sweep can also be deleted if its sweep.json is damaged or its disk is full; it may then be a copy.
    is_identified = False
    with contextlib.suppress(OSError, SweepFolderError):
        ensure_identity(folder, say)
        is_identified = True
    _require_idle(folder, "deleted", is_cluster_gone)
    state = fold(read_journal(folder.journal))
    checkpoints = _left_checkpoints(folder, state) if is_identified else []
    checkpoint_text = f" and {', '.join(map(str, checkpoints))}" if checkpoints else ""
    attempts = counted(len(state.attempts), "attempt")
    _confirm(f"Permanently delete {folder.path} ({attempts}, logs and results){checkpoint_text}?", yes)
    _require_idle(folder, "deleted", is_cluster_gone)  # a launch may have begun meanwhile
    for path in checkpoints:
        shutil.rmtree(path, ignore_errors=True)
    if left_paths := [str(path) for path in checkpoints if path.exists()]:
        raise SweepFolderError(f"cannot delete {', '.join(left_paths)}; make them writable, then rm again")
    remove_sweep(folder)
    say(f"deleted {folder.path}{checkpoint_text}")


def _left_checkpoints(folder: SweepFolder, state: SweepState) -> list[Path]:
    """The checkpoints that killed runs of a sweep have left in `measure.checkpoint_folder`."""
    paths = set[Path]()
    for name in (name for name, allocation in state.allocations.items() if not allocation.is_copied):
        with contextlib.suppress(SweepFolderError):
            tasks = read_allocation(folder.allocations / name).tasks
            paths |= {Path(task.checkpoint) for task in tasks if task.checkpoint}
    return sorted(path for path in paths if path.exists() and folder.path not in path.parents)


def run_rename(folder: SweepFolder, new_name: str, yes: bool) -> None:
    """Renames a sweep, which can be continued under its new name.

    Raises:
        ConfigError: no sweep can have that name.
        SweepFolderError: its jobs may live, it is no folder of its own, or the name is taken.
        typer.Abort: the answer is no.
    """
    value_from(Annotated[str, SWEEP_NAME], new_name, "NEW")
    folder = require_own_folder(folder)
    ensure_identity(folder, say)
    _require_idle(folder, "renamed")
    _confirm(f"Exported files keep the old name. Rename {folder.path} to {new_name}?", yes)
    _require_idle(folder, "renamed")
    renamed_folder = rename_sweep(folder, new_name)
    command = f"ultrabench sweep resume {renamed_folder.display_name}"
    say(f"renamed {folder.name} to {new_name}; to continue it: {command}")


def _confirm(question: str, yes: bool) -> None:
    """Asks the user unless `yes` is set; raises ConfigError without a terminal, and typer.Abort if the answer is no."""
    if yes:
        return
    if not can_ask():
        raise ConfigError("no terminal can confirm this; add --yes")
    typer.confirm(question, abort=True, err=True)


QUIET_S = 900.0
"""Seconds without a sign of life of agents after which none lives, where the batch system cannot be asked any more."""


def _require_idle(folder: SweepFolder, participle: str, is_cluster_gone: bool = False) -> None:
    """Raises SweepFolderError if a launcher follows a sweep, or a job of it may live.

    Args:
        participle: what is done to the sweep in words of the message, such as `deleted`.
        is_cluster_gone: whether the user says that its batch system no longer exists; then the journal must be silent.
    """
    with one_line_if_damaged(folder.path):
        state = fold(read_journal(folder.journal))
    if is_cluster_gone and (silent_s := time.time() - last_written_s(folder.path)) < QUIET_S:
        fact = f"an agent or a launcher of {folder.name} wrote to its journal {silent_s:.0f} s ago"
        raise SweepFolderError(f"{fact}; --cluster-gone needs {QUIET_S / 60:g} minutes of silence")
    user_texts = [f"{launcher} follows it" for launcher in living_launchers(folder, writes=True)]
    if not user_texts and open_allocations(state) and not is_cluster_gone:
        config = launched_config(folder, state)
        try:
            launcher = choose_launcher(config, folder)  # it knows the cluster, by which jobs differ
        except ClusterError as error:
            num_open = counted(len(open_allocations(state)), "job")
            fact = f"{error.fact}; {num_open} of {folder.name} may still run or wait"
            option = " If that cluster no longer exists: ultrabench sweep rm --cluster-gone"
            way_out = f"{option} {folder.display_name}" if participle == "deleted" else ""
            raise ClusterError(
                f"{fact}. Run this on a node of the cluster, where its commands work.{way_out}"
            ) from error
        jobs = live_allocations(launcher, state, GRACE_S + config.launcher.grace_s + launcher.look_pause_s)
        user_texts = [_job_text(name, job.job, job.by) for name, job in jobs.items()]
    if user_texts:
        rule = f"only an idle sweep can be {participle}"
        more_text = f" and {len(user_texts) - 3} more" if len(user_texts) > 3 else ""
        fact = f"{folder.name} is in use ({'; '.join(user_texts[:3])}{more_text})"
        raise SweepFolderError(f"{fact}; {rule}. To end it: ultrabench sweep cancel {folder.display_name}")


def _job_text(name: str, job: dict[str, Any] | None, by: dict[str, Any]) -> str:
    """An allocation in words, such as `job 17_0 (n1-c0ffee.0) of ann on big`; `by` says who submitted it from where."""
    text = f"job {job['job_id']} ({name})" if job and "job_id" in job else f"allocation {name}"
    return f"{text} of {by['user']} on {by.get('cluster') or by.get('host')}" if by.get("user") else text
