"""`ultrabench sweep launch` opens a sweep, asks whether its price is accepted, and follows the sweep."""

import math
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from types import FrameType

import typer
from rich.console import Console

from ultrabench.cli.sweep.consent import ask_for_budget
from ultrabench.cli.sweep.live import Display, panel
from ultrabench.cli.tables import hours, out, say, warn
from ultrabench.errors import ConfigError, counted
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
from ultrabench.store.kernel_secrets import hide
from ultrabench.store.state import SweepState, final_attempts, fold
from ultrabench.store.sweep_json import find_sweep_json, read_sweep_json
from ultrabench.sweep.config.load import config_from_tree, load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Plan, make_plan, require_runs
from ultrabench.sweep.running.attempts import Launch, next_attempts
from ultrabench.sweep.running.price import BUDGET_FACTOR, Price, committed_gpu_hours, reckon
from ultrabench.sweep.running.progress import progress

Handler = Callable[[int, FrameType | None], None] | signal.Handlers
TERMINATING = (signal.SIGTERM, signal.SIGHUP)


def run_launch(
    overrides: list[str], detach: bool, max_gpu_hours: float | None, yes: bool, reuse: str | None
) -> int:
    """Launches and follows a sweep; returns the exit code."""
    _require_finite(max_gpu_hours)
    config = load_config(overrides)
    require_program(config)
    folder = folder_of(config)
    if detach and config.launcher.name == "local":
        require_runs(make_plan(config))
        return _leave_in_background(folder, overrides, max_gpu_hours, reuse)
    launcher = choose_launcher(config, folder)
    plan, price = make_plan(config), None
    require_runs(plan)
    if config.launcher.name != "local":
        if untried := not_accepted(config):
            warn(untried)
        state = fold(read_journal(folder.journal, warn)) if find_sweep_json(folder) else SweepState()
        price = reckon(plan, state, launcher.limits.max_limit_s)
        used, following = committed_gpu_hours(plan, state, ()), bool(open_allocations(state))
        max_gpu_hours = ask_for_budget(plan, price, used, launcher.limits, max_gpu_hours, yes, following)
    sweep = open_sweep(plan, reuse=reuse, warn=warn, say=say, max_gpu_hours=max_gpu_hours)
    return follow(
        sweep,
        launcher,
        max_gpu_hours,
        words=_words(folder),
        price=price if sweep.plan is plan else None,
        detach=detach,
        ask=not yes,
    )


def folder_of(config: SweepConfig) -> SweepFolder:
    """The folder of the sweep of a configuration."""
    return SweepFolder(Path(config.results_dir).absolute() / config.name)


def _require_finite(max_gpu_hours: float | None) -> None:
    """Raises ConfigError for a budget that is infinite or not a number."""
    if max_gpu_hours is not None and not math.isfinite(max_gpu_hours):
        raise ConfigError(f"--max-gpu-hours {max_gpu_hours}; must be a number, such as 100")


def _words(folder: SweepFolder) -> str:
    """The words that name a sweep in commands for the user: its name, and where it is if not in ./results."""
    parent = folder.path.parent
    where = "" if parent == Path.cwd() / "results" else f" --results-dir {shlex.quote(str(parent))}"
    return folder.word + where


def continue_sweep(
    folder: SweepFolder,
    *,
    retry: Sequence[AttemptKey] = (),
    console: Console | None = None,
    detach: bool = False,
    max_gpu_hours: float | None = None,
) -> int:
    """Continues a sweep with the configuration of its latest launch; returns the exit code.

    Args:
        max_gpu_hours: budget of the sweep; None means that of the latest launch.
    """
    _require_finite(max_gpu_hours)
    state = fold(read_journal(folder.journal, warn))
    config = as_launched(folder, state)
    launched = state.launched or LaunchConfig(generation=0, config={})
    budget = launched.max_gpu_hours if max_gpu_hours is None else max_gpu_hours
    work_dir, words = launched.work_dir, _words(folder)
    if work_dir and Path(work_dir).is_dir():
        os.chdir(work_dir)  # a command of the user may name files of this folder
    launcher = choose_launcher(config, folder)
    sweep = open_sweep(make_plan(config), reuse="any", warn=warn, say=say, retry=retry, max_gpu_hours=budget)
    return follow(sweep, launcher, budget, words=words, console=console, detach=detach)


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
    """Whether a sweep has no attempts left to submit or to wait for."""
    return next_attempts(plan, state, launch=Launch(accepts=accepts, old=frozenset(state.attempts))).over


def follow(
    sweep: OpenSweep,
    launcher: Launcher,
    max_gpu_hours: float | None,
    *,
    words: str,
    price: Price | None = None,
    console: Console | None = None,
    detach: bool = False,
    ask: bool = True,
) -> int:
    """Follows an open sweep to its end, or leaves it after the first submission; returns the exit code.

    Args:
        words: words that name the sweep in commands for the user.
        price: the price of what is left, if it is known already.
        ask: whether the user may be asked to replace jobs of others.
    """
    config, before = sweep.config, {key.run_id for key in sweep.state().attempts}
    for line in _first_lines(sweep, price or reckon(sweep.plan, sweep.state())):
        say(line)
    taken = _asked_to_take_over(sweep, launcher) if ask else []
    try:
        _handle(_terminate, instead_of=signal.SIG_DFL)  # under nohup, SIGHUP stays ignored
        with Display(config.name, sweep.plan.runs, config.hardware.device) as display:
            reconciler = Reconciler(sweep, launcher, display.show, max_gpu_hours, display.say)
            reconciler.take_over(taken)
            state = reconciler.once()[0] if detach else reconciler.run()
    except (KeyboardInterrupt, Terminated) as stop:
        return _interrupted(sweep, launcher, stop, words)
    _handle(signal.SIG_DFL, instead_of=_terminate)  # the rest takes only a moment
    if detach and reconciler.submitted:
        _say_left(reconciler.submitted, words)
        return 0
    now = progress(config.name, sweep.plan.runs, state, config.hardware.device)
    (console or out()).print(panel(now, busy=False))
    for line in other_launches(state, {run.run_id for run in sweep.plan.runs}, before):
        say(line)
    if reconciler.stopped:
        if state.cancelled and config.launcher.name == "local":
            interrupt(sweep, launcher)  # ends what was submitted meanwhile
        _say_stopped(sweep, reconciler, state, words)
        return 1
    if Status.OK in now.by_status:
        say(f"next: ultrabench {'plot comm' if config.kernel.kind == 'probe' else 'heatmap'} {words}")
    return int(any(Status(s) not in ANSWERS for s in now.by_status if s not in ("running", "pending")))


def _say_left(jobs: int, words: str) -> None:
    """Tells what a detached launch has submitted, and how to follow the sweep again."""
    say(
        f"submitted {counted(jobs, 'job')} and left; what comes after them is submitted by whoever follows: "
        f"ultrabench sweep resume {words}, by the same user on any login node of this cluster"
    )


def _say_stopped(sweep: OpenSweep, reconciler: Reconciler, state: SweepState, words: str) -> None:
    """Tells why a sweep stopped; if it is over its budget, also the command that continues it."""
    say(f"stopped: {reconciler.stopped}")
    if reconciler.over_budget:
        left = BUDGET_FACTOR * reckon(sweep.plan, state).gpu_hours
        needed = committed_gpu_hours(sweep.plan, state, ()) + left
        say(f"go on with: ultrabench sweep resume {words} --max-gpu-hours {needed:.3g}")


def _first_lines(sweep: OpenSweep, price: Price) -> Iterator[str]:
    """The lines that a launch prints before it submits anything."""
    config, plan = sweep.config, sweep.plan
    runs, cost = counted(len(plan.runs), "run"), hours(price.gpu_hours)
    yield f"{config.name}: {runs}, {cost} GPU hours predicted, in {sweep.folder.path}"
    if not any(run.fits for run in plan.runs):
        yield "none of them is predicted to fit into the memory of a rank"
    if config.profile and settled(plan, sweep.state(), sweep.accepts):
        yield "profile=true, but all is measured: only new runs are profiled; add repeats=N or name=NAME"
    for other in living_launchers(sweep.folder, sweep.journal.path):
        yield f"{other} follows this sweep, too; both may go on: no run is made twice"


def other_launches(state: SweepState, planned: Set[str], before: Set[str]) -> Iterator[str]:
    """Lines about settled runs that are new in this launch, and about those of earlier launches only.

    Args:
        planned: run_ids of the runs of this launch.
        before: run_ids of the runs that had been attempted before this launch.
    """
    ends: dict[str, str] = {}
    for (run_id, _), attempt in sorted(final_attempts(state).items()):
        if attempt.result and ends.get(run_id) != Status.OK:
            ends[run_id] = attempt.result.status.value
    groups = {"new in this launch": planned - before, "and of earlier launches": before - planned}
    for name, runs in groups.items() if before else ():
        if counts := Counter(ends[run_id] for run_id in runs if run_id in ends):
            told = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
            yield f"{name}: {counted(counts.total(), 'run')} settled ({told})"


def _asked_to_take_over(sweep: OpenSweep, launcher: Launcher) -> list[str]:
    """Names of queued jobs of others that cannot be seen from here, if the user agrees to replace them.

    Jobs of others are never replaced without asking. Those that already run are waited for.
    """
    unended = ((n, a) for n, a in sweep.state().allocations.items() if a.ended is None and not a.agents)
    others = {name: held for name, held in unended if not sees(launcher.by, held.by)}
    if not others or sys.stdin is None or not sys.stdin.isatty():
        return []
    whose = {f"{a.by.get('user')} on {a.by.get('cluster') or a.by.get('host')}" for a in others.values()}
    text = f"{counted(len(others), 'job')} of {', '.join(sorted(whose))} have not started. Submit others in their place?"
    return sorted(others) if typer.confirm(text, err=True) else []


class Terminated(BaseException):
    """Raised on SIGTERM or SIGHUP; like KeyboardInterrupt it is no Exception, so that nothing catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


def _handle(handler: Handler, instead_of: Handler) -> None:
    """Makes `handler` handle SIGTERM and SIGHUP, if `instead_of` handles them now."""
    for number in TERMINATING:
        if signal.getsignal(number) == instead_of:
            signal.signal(number, handler)


def _all_signals(handler: Handler) -> None:
    for number in (signal.SIGINT, *TERMINATING):
        signal.signal(number, handler)


def _give_up(number: int, frame: FrameType | None) -> None:
    _all_signals(signal.SIG_IGN)  # comes first, so that a third Ctrl-C cannot interrupt this
    raise Terminated(number)


def _interrupted(
    sweep: OpenSweep, launcher: Launcher, stop: KeyboardInterrupt | Terminated, words: str
) -> int:
    """Tells what still runs and how to continue; returns the exit code.

    Jobs of Slurm go on. On this machine Ctrl-C ends all runs. A launcher that is ended by a signal, or
    whose terminal is gone, leaves its agents running for the next launch.
    """
    again = shlex.join(["ultrabench", *hide(sys.argv[1:], sweep.config.secrets)])
    number = stop.number if isinstance(stop, Terminated) else signal.SIGINT
    jobs_go_on = sweep.config.launcher.name != "local"
    if jobs_go_on or isinstance(stop, Terminated):
        why = "" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}: "
        rest = "its jobs go on" if jobs_go_on else "what runs here goes on"
        told = (
            f"{why}no longer followed; {rest}. Follow again: {again}; end it: ultrabench sweep cancel {words}"
        )
    else:
        told = f"interrupted; nothing that finished is lost, go on with: {again}"
        try:
            _all_signals(_give_up)
            say("stopping what runs on this machine")
            interrupt(sweep, launcher)
        except (KeyboardInterrupt, Terminated):
            told = told.replace("interrupted;", "interrupted again before all had ended;", 1)
    _all_signals(signal.SIG_IGN)
    say(told)
    return 128 + number


def _leave_in_background(
    folder: SweepFolder, overrides: list[str], max_gpu_hours: float | None, reuse: str | None
) -> int:
    """Starts a launcher in the background, with its output in launcher.log in the sweep's folder."""
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
    say(f"look with: ultrabench sweep status {_words(folder)} --watch")
    return 0
