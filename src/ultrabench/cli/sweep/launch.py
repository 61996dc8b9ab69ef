"""`ultrabench sweep launch`: opens a sweep, asks for its price on a cluster, and follows it."""

import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console

from ultrabench.cli.sweep.consent import ask_for_budget
from ultrabench.cli.sweep.live import Display, panel
from ultrabench.cli.tables import hours, out, say, warn
from ultrabench.errors import ConfigError, counted
from ultrabench.kernel_env import hide
from ultrabench.launchers.choose import choose_launcher
from ultrabench.launchers.doctor.acceptance_file import not_accepted
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.open_sweep import OpenSweep, open_sweep, require_program
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.launchers.settle import interrupt, open_allocations
from ultrabench.result import ANSWERS, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import LaunchConfig
from ultrabench.store.folder import SweepFolder
from ultrabench.store.heartbeat import living_launchers
from ultrabench.store.jobs_seen import sees
from ultrabench.store.journal import read_journal
from ultrabench.store.state import SweepState, fold
from ultrabench.store.sweep_json import find_sweep_json, read_sweep_json
from ultrabench.sweep.config.load import config_from_tree, load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Plan, make_plan, require_runs
from ultrabench.sweep.running.attempts import next_attempts
from ultrabench.sweep.running.price import BUDGET_FACTOR, committed_gpu_hours, reckon
from ultrabench.sweep.running.progress import progress

Handler = Callable[[int, FrameType | None], None] | signal.Handlers
TERMINATING = (signal.SIGTERM, signal.SIGHUP)


def run_launch(
    overrides: list[str], detach: bool, max_gpu_hours: float | None, yes: bool, reuse: str | None
) -> int:
    """Launches and follows a sweep; the exit code."""
    _require_finite(max_gpu_hours)
    config = load_config(overrides)
    require_program(config)
    if detach and config.launcher.name == "local":
        return _leave_in_background(config, overrides, max_gpu_hours, reuse)
    folder = folder_of(config)
    launcher, predicted = choose_launcher(config, folder), None
    plan = make_plan(config)
    require_runs(plan)
    if launcher.outlives_us:
        if untried := not_accepted(config):
            warn(untried)
        max_gpu_hours, predicted = _budget(plan, folder, launcher, max_gpu_hours, yes)
    sweep = open_sweep(plan, reuse=reuse, warn=warn, say=say, max_gpu_hours=max_gpu_hours)
    known = predicted if sweep.plan is plan else None
    return follow(
        sweep, launcher, max_gpu_hours, where=_where(folder), detach=detach, yes=yes, predicted=known
    )


def folder_of(config: SweepConfig) -> SweepFolder:
    """Where the sweep of a configuration lies."""
    return SweepFolder(Path(config.results_dir).absolute() / config.name)


def _budget(
    plan: Plan, folder: SweepFolder, launcher: Launcher, given: float | None, yes: bool
) -> tuple[float, float]:
    """The GPU hours that the user agrees to, and those predicted; nothing has been written before that."""
    state = fold(read_journal(folder.journal, warn)) if find_sweep_json(folder) else SweepState()
    price = reckon(plan, state, launcher.limits.max_limit_s)
    used = committed_gpu_hours(plan, state, ())
    following = bool(open_allocations(state))
    return ask_for_budget(plan, price, used, launcher.limits, given, yes, following), price.gpu_hours


def _require_finite(max_gpu_hours: float | None) -> None:
    if max_gpu_hours is not None and not math.isfinite(max_gpu_hours):
        raise ConfigError(f"--max-gpu-hours {max_gpu_hours}; must be a number, such as 100")


def continue_sweep(
    folder: SweepFolder,
    *,
    retry: Sequence[AttemptKey] = (),
    reuse: str = "any",
    console: Console | None = None,
    detach: bool = False,
    max_gpu_hours: float | None = None,
) -> int:
    """Goes on with a sweep as it was launched last, within the GPU hours given or agreed to then."""
    _require_finite(max_gpu_hours)
    state = fold(read_journal(folder.journal, warn))
    config = as_launched(folder, state)
    launched = state.launched or LaunchConfig(generation=0, config={})
    budget = launched.max_gpu_hours if max_gpu_hours is None else max_gpu_hours
    work_dir, where = launched.work_dir, _where(folder)
    if work_dir and Path(work_dir).is_dir():
        os.chdir(work_dir)  # a command of the user's may name files beside it
    launcher = choose_launcher(config, folder)
    sweep = open_sweep(make_plan(config), reuse=reuse, warn=warn, say=say, retry=retry, max_gpu_hours=budget)
    return follow(sweep, launcher, budget, where=where, console=console, detach=detach)


def as_launched(folder: SweepFolder, state: SweepState) -> SweepConfig:
    """The configuration of a sweep's latest launch.

    Raises:
        SweepFolderError: sweep.json cannot be read.
    """
    told = state.config or read_sweep_json(folder).config
    return config_from_tree(told | {"name": folder.name, "results_dir": str(folder.path.parent)})


def settled(
    plan: Plan, state: SweepState, accepts: Callable[[RunResult], bool] = lambda result: True
) -> bool:
    """Whether a sweep has no attempts left to make or to wait for, in any repeat."""
    return next_attempts(plan, state, frozenset(), accepts=accepts, old=frozenset(state.attempts)).over


def follow(
    sweep: OpenSweep,
    launcher: Launcher,
    max_gpu_hours: float | None,
    *,
    where: str,
    console: Console | None = None,
    detach: bool = False,
    yes: bool = False,
    predicted: float | None = None,
) -> int:
    """Follows an open sweep to its end, or leaves it after the first submission; the exit code.

    Args:
        where: the option that says where the sweep is, for commands that are shown.
        predicted: GPU hours of what is left, when they have been reckoned already.
    """
    config = sweep.config
    planned, device = sweep.plan.runs, config.hardware.device
    if predicted is None:
        predicted = reckon(sweep.plan, sweep.state()).gpu_hours
    runs = counted(len(planned), "run")
    say(f"{config.name}: {runs}, {hours(predicted)} GPU hours predicted, in {sweep.folder.path}")
    if not any(run.fits for run in sweep.plan.runs):
        say("none of them is predicted to fit into the memory of a rank")
    if config.profile and settled(sweep.plan, sweep.state(), sweep.accepts):
        say(
            "profile=true, but all is measured: only what runs looks inside itself; add repeats=N or name=NAME"
        )
    for other in living_launchers(sweep.folder, sweep.journal.path):
        say(f"{other} follows this sweep, too; both may go on: no run is made twice")
    taken = _asked_to_take_over(sweep, launcher, ask=not yes)
    try:
        _handle(_terminate, instead_of=signal.SIG_DFL)  # nohup ignores SIGHUP, and so it stays
        with Display(config.name, planned, device) as display:
            reconciler = Reconciler(sweep, launcher, display.show, max_gpu_hours, display.say)
            reconciler.take_over(taken)
            state = reconciler.once()[0] if detach else reconciler.run()
    except (KeyboardInterrupt, Terminated) as stop:
        return _interrupted(sweep, launcher, stop, where)
    _handle(signal.SIG_DFL, instead_of=_terminate)  # what is left takes a moment
    if detach and reconciler.submitted:
        return _left(sweep, reconciler.submitted, where)
    now = progress(config.name, planned, state, device)
    (console or out()).print(panel(now, busy=False))
    if reconciler.stopped:
        if state.cancelled and not launcher.outlives_us:
            interrupt(sweep, launcher)  # what was submitted while the cancel was being written
        say(f"stopped: {reconciler.stopped}")
        if reconciler.over_budget:
            say(f"go on with: {_with_larger_budget(sweep, state, where)}")
        return 1
    if Status.OK in now.by_status:
        figure = "plot comm" if config.kernel.kind == "probe" else "heatmap"
        say(f"next: ultrabench {figure} {sweep.folder.word}{where}")
    return int(any(Status(s) not in ANSWERS for s in now.by_status if s not in ("running", "pending")))


def _with_larger_budget(sweep: OpenSweep, state: SweepState, where: str) -> str:
    """The command that goes on with GPU hours enough for what is left."""
    left = reckon(sweep.plan, state).gpu_hours
    needed = committed_gpu_hours(sweep.plan, state, ()) + BUDGET_FACTOR * left
    return f"ultrabench sweep resume {sweep.folder.word}{where} --max-gpu-hours {needed:.3g}"


def _asked_to_take_over(sweep: OpenSweep, launcher: Launcher, ask: bool) -> list[str]:
    """Names of others' jobs in a queue that cannot be seen from here, if a person allows to replace them.

    Nothing of theirs is ever ended or replaced unasked; what already runs is waited for.
    """
    unended = ((n, a) for n, a in sweep.state().allocations.items() if a.ended is None and not a.agents)
    others = {name: held for name, held in unended if not sees(launcher.by, held.by)}
    if not others or not ask or sys.stdin is None or not sys.stdin.isatty():
        return []
    whose = {f"{a.by.get('user')} on {a.by.get('cluster') or a.by.get('host')}" for a in others.values()}
    text = f"{counted(len(others), 'job')} of {', '.join(sorted(whose))} have not started. Submit others in their place?"
    return sorted(others) if typer.confirm(text, err=True) else []


class Terminated(BaseException):
    """SIGTERM or SIGHUP has come; like Ctrl-C, it passes through what handles errors."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


def _handle(handler: Handler, instead_of: Handler) -> None:
    for number in TERMINATING:
        if signal.getsignal(number) == instead_of:
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, *TERMINATING):
        signal.signal(number, signal.SIG_IGN)


def _give_up(number: int, frame: FrameType | None) -> None:
    _ignore_signals()  # first, so that a third Ctrl-C does not hit what handles the second
    raise Terminated(number)


def _interrupted(
    sweep: OpenSweep, launcher: Launcher, stop: KeyboardInterrupt | Terminated, where: str
) -> int:
    """Says what still runs and how to continue; the exit code.

    Jobs of Slurm go on. Here, Ctrl-C ends what runs; a launcher that is ended by somebody else, or
    whose terminal is gone, leaves its agents at work for the next launch.
    """
    again = shlex.join(["ultrabench", *hide(sys.argv[1:], sweep.config.secrets)])
    number = stop.number if isinstance(stop, Terminated) else signal.SIGINT
    why = "" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}: "
    end = f"ultrabench sweep cancel {sweep.folder.word}{where}"
    if launcher.outlives_us:
        told = f"{why}no longer followed; its jobs go on. Follow again: {again}; end them: {end}"
    elif isinstance(stop, Terminated):
        told = f"{why}no longer followed; what runs here goes on. Follow again: {again}; end it: {end}"
    else:
        told = f"interrupted; nothing that finished is lost, go on with: {again}"
        try:
            for each in (signal.SIGINT, *TERMINATING):
                signal.signal(each, _give_up)
            say("stopping what runs on this machine")
            interrupt(sweep, launcher)
        except (KeyboardInterrupt, Terminated):
            told = (
                f"interrupted again before all had ended; nothing that finished is lost, go on with: {again}"
            )
    _ignore_signals()
    say(told)
    return 128 + number


def _left(sweep: OpenSweep, jobs: int, where: str) -> int:
    say(
        f"submitted {counted(jobs, 'job')} and left; what comes after them is submitted by whoever follows: "
        f"ultrabench sweep resume {sweep.folder.word}{where}, by the same user on any login node of this cluster"
    )
    return 0


def _where(folder: SweepFolder) -> str:
    """The option that says where a sweep is, for a command that is typed in the present folder."""
    parent = folder.path.parent
    return "" if parent == Path.cwd() / "results" else f" --results-dir {shlex.quote(str(parent))}"


def _leave_in_background(
    config: SweepConfig, overrides: list[str], max_gpu_hours: float | None, reuse: str | None
) -> int:
    """Leaves a launcher in the background; its output goes to launcher.log in the sweep's folder."""
    require_runs(make_plan(config))
    folder = folder_of(config)
    find_sweep_json(folder)
    folder.create()
    command = [sys.executable, "-P", "-m", "ultrabench.cli.main", "sweep", "launch", *overrides]
    command += ["--max-gpu-hours", str(max_gpu_hours)] if max_gpu_hours is not None else []
    command += ["--reuse", reuse] if reuse else []
    with (folder.path / "launcher.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    say(f"launching in the background (process {process.pid}, output in {folder.path}/launcher.log)")
    say(f"look with: ultrabench sweep status {folder.word} --watch{_where(folder)}")
    return 0
