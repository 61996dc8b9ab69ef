"""The commands `ultrabench sweep pause`, `resume` and `cancel`."""

from pathlib import Path

from ultrabench.cli.sweep.launch import as_launched, continue_sweep, settled
from ultrabench.cli.sweep.live import counts_line
from ultrabench.cli.tables import err, say, warn
from ultrabench.errors import ClusterError
from ultrabench.launchers.choose import choose_launcher
from ultrabench.launchers.settle import open_allocations
from ultrabench.processes import own_name
from ultrabench.store.events import Cancel, Pause
from ultrabench.store.folder import SweepFolder, find_sweep, write_whole
from ultrabench.store.heartbeat import living_launchers
from ultrabench.store.journal import JournalWriter, read_journal
from ultrabench.store.state import SweepState, fold
from ultrabench.store.sweep_json import read_sweep_json
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.plan_table import read_rows, runs_of
from ultrabench.sweep.running.progress import progress


def run_pause(sweep: str | None, results: Path) -> None:
    """Pauses a sweep: running allocations end after their current run, and queued ones are cancelled."""
    folder, state = _find(sweep, results)
    if settled(make_plan(as_launched(folder, state)), state):
        say(f"nothing to pause: every run of {folder.name} is settled")
        return
    if not state.paused:
        writer = JournalWriter(folder.journal, "pause")
        writer.write(Pause(generation=state.generation + 1))
    # The file is written after the journal, because the resume that removes it needs the event.
    write_whole(folder.pause, "ultrabench sweep resume takes this file away\n")
    _end(folder, state, queued_only=True)
    say(f"paused: runs under way end, nothing begins; go on with: ultrabench sweep resume {folder.word}")


def run_resume(sweep: str | None, results: Path, detach: bool, max_gpu_hours: float | None) -> int:
    """Lifts a pause and continues the sweep with its latest configuration; returns the exit code."""
    folder, state = _find(sweep, results)
    folder.pause.unlink(missing_ok=True)
    if state.paused:
        JournalWriter(folder.journal, "pause").write(Pause(generation=state.generation + 1, on=False))
    return continue_sweep(folder, detach=detach, max_gpu_hours=max_gpu_hours)


def run_cancel(sweep: str | None, results: Path) -> None:
    """Cancels a sweep: no new allocation is submitted, and all queued and running ones are ended."""
    folder, state = _find(sweep, results)
    if settled(make_plan(as_launched(folder, state)), state) and not open_allocations(state):
        say(f"nothing to cancel: every run of {folder.name} is settled")
        return
    writer = JournalWriter(folder.journal, "cancel")
    writer.write(Cancel(generation=state.generation + 1))
    try:
        _end(folder, state, queued_only=False)
    except ClusterError as error:
        followed = living_launchers(folder, writer.path)
        if not followed:
            raise ClusterError(
                f"{error}. The cancel is written down, but nobody follows it: run it again"
            ) from error
        say(f"{error}. {followed[0]} follows this sweep and tries again until it is done")
        return
    state = fold(read_journal(folder.journal))
    runs = [*runs_of(read_sweep_json(folder), read_rows(folder.plan, runs_only=True), state)]
    err().print(counts_line(progress(folder.name, runs, state)))
    say("cancelled; results stay, and the same launch command goes on from here")


def _find(sweep: str | None, results: Path) -> tuple[SweepFolder, SweepState]:
    folder = find_sweep(sweep, results)
    read_sweep_json(folder)
    return folder, fold(read_journal(folder.journal, warn))


def _end(folder: SweepFolder, state: SweepState, *, queued_only: bool) -> None:
    config = as_launched(folder, state)
    open_now = open_allocations(state)
    others = {str(a.by["user"]) for a in open_now.values() if a.by and a.by.get("user") != own_name()}
    if others:
        say(f"jobs of {', '.join(sorted(others))} are under way: only whoever submitted them can end them")
    choose_launcher(config, folder, submits=False).cancel(open_now, queued_only=queued_only)
