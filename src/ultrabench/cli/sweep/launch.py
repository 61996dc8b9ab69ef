"""`ultrabench sweep launch` opens a sweep, asks whether its price is accepted, and follows the sweep."""

import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from subprocess import DEVNULL, Popen
from types import FrameType

import typer

from ultrabench.cli.sweep.consent import ask_for_budget, ask_for_this_machine, headline
from ultrabench.cli.sweep.live import Display, panel
from ultrabench.cli.sweep.planning import SEARCHED_CELLS, plan_with_bar, shown_progress
from ultrabench.cli.sweep.rereads import ask_to_measure_again, read_again
from ultrabench.cli.sweep.screening import screening_lines
from ultrabench.cli.sweep.tracking import require_tracker, tracked
from ultrabench.cli.tables import can_ask, say, show, warn
from ultrabench.column import GPU_HOURS
from ultrabench.errors import UltrabenchError, counted
from ultrabench.launchers.allocation_ends import interrupt
from ultrabench.launchers.choose import choose_launcher
from ultrabench.launchers.doctor.acceptance import acceptance_warning
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.open_sweep import (
    OpenSweep,
    folder_of,
    in_force,
    measured_cores,
    open_sweep,
    require_reuse,
)
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.launchers.required_programs import require_checkpoint_folder, require_local, require_program
from ultrabench.launchers.starters import starter_warnings
from ultrabench.processes import own_name
from ultrabench.result import ANSWERS, UNSETTLED, Status
from ultrabench.store.folder import SweepFolder
from ultrabench.store.jobs_seen import sees
from ultrabench.store.journal import read_journal
from ultrabench.store.kernel_secrets import redact_arguments
from ultrabench.store.lease import living_launchers
from ultrabench.store.state import SweepState, fold
from ultrabench.store.sweep_json import find_sweep_json
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.remedy import same_commands
from ultrabench.sweep.running.attempts import is_settled
from ultrabench.sweep.running.cheaper import savings
from ultrabench.sweep.running.other_shapes import other_shapes
from ultrabench.sweep.running.price import (
    BUDGET_FACTOR,
    Price,
    committed_gpu_hours,
    price_of,
    with_measured_times,
    within_limit,
)
from ultrabench.sweep.running.progress import progress_of, settled_runs

SignalHandler = Callable[[int, FrameType | None], None] | signal.Handlers
TERMINATING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals by which others end a launch, as when its terminal is gone."""
ENDING_SIGNALS = (signal.SIGINT, *TERMINATING_SIGNALS)
"""All signals that end a launch."""
NOTHING_RUNNING = "nothing was running"
"""What goes on after a launch whose jobs have all ended."""


def run_launch(
    overrides: list[str], detach: bool, max_gpu_hours: float | None, yes: bool, reuse: str | None
) -> int:
    """Launches and follows a sweep; returns the exit code."""
    require_reuse(reuse)
    config = in_force(load_config(overrides), warn)
    require_program(config)
    require_tracker(config)
    require_local(config)  # before the plan, which may take seconds
    require_checkpoint_folder(config)
    folder = folder_of(config)
    folder.require_writable()  # before this machine is measured, which takes seconds
    state = fold(read_journal(folder.journal)) if find_sweep_json(folder) else SweepState()
    rereads = read_again(config, folder, state, keep=reuse == "any")
    if rereads.line:
        say(rereads.line)
    if detach and not config.launcher.survives_us:
        plan_with_bar(config)
        if not yes:
            ask_to_measure_again(rereads)
        return _leave_in_background(folder)
    launcher = choose_launcher(config, folder)
    max_limit_s = launcher.limits.max_limit_s
    state = rereads.apply(state)
    plan = plan_with_bar(config)
    if cores := measured_cores(config, say):  # first, so that the price is that of this machine
        plan = plan_with_bar(config, **cores)
    plan = within_limit(with_measured_times(plan, state), max_limit_s)
    with shown_progress(SEARCHED_CELLS) as report:
        price = price_of(plan, state, max_limit_s, report_progress=report)
    for note in (*other_shapes(config.models, state), *same_commands(plan), *starter_warnings(config)):
        warn(note)
    if not config.launcher.holds_nodes:
        if not yes:
            ask_to_measure_again(rereads)
        ask_for_this_machine(plan, price, yes)
    else:
        if acceptance_note := acceptance_warning(config):
            warn(acceptance_note)
        with shown_progress(SEARCHED_CELLS) as report:
            all_savings = savings(plan, price, state, max_limit_s, report)
        max_gpu_hours = ask_for_budget(plan, price, state, launcher.limits, max_gpu_hours, yes, all_savings)
    used_gpu_hours = committed_gpu_hours(plan, state, ())
    asked_gpu_hours = used_gpu_hours + price.gpu_hours
    low_gpu_hours, high_gpu_hours = (used_gpu_hours + end for end in price.interval)
    sweep = open_sweep(
        plan,
        reuse=reuse,
        warn=warn,
        say=say,
        max_gpu_hours=max_gpu_hours,
        max_limit_s=max_limit_s,
        rereads=rereads.events,
        asked=(asked_gpu_hours, low_gpu_hours, high_gpu_hours),
    )
    known_price = price if sweep.plan is plan else None
    return follow(sweep, launcher, folder.display_name, known_price, detach=detach, ask=not yes, stderr=False)


def follow(
    sweep: OpenSweep,
    launcher: Launcher,
    display_name: str,
    price: Price | None = None,
    *,
    detach: bool,
    ask: bool,
    stderr: bool,
    ends_jobs: bool = False,
) -> int:
    """Follows an open sweep to its end, or leaves it after the first submission; returns the exit code.

    Args:
        display_name: the name of the sweep in commands for the user.
        price: the price of what is left, if it is known already.
        ask: whether the user may be asked to replace jobs of others.
        stderr: whether the final table goes to stderr, because stdout holds a JSON document.
        ends_jobs: whether the caller ends the jobs when a signal ends this command, and says so; from the first
            signal on, further ones are ignored.
    """
    config, runs = sweep.config, sweep.plan.runs
    old_settled_ids = settled_runs(sweep.state()).keys()
    say(*first_lines(sweep, price or price_of(sweep.plan, sweep.state())))
    replaced_jobs = _ask_to_replace_jobs(sweep, launcher) if ask else []
    # Under nohup SIGHUP is ignored, and stays so.
    caught_signals = [number for number in TERMINATING_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    try:
        _set_handler(_raise_interrupt, caught_signals)
        tracker = config.launcher.track
        if detach and tracker:
            say(f"--detach does not track runs; to export them later: ultrabench export {tracker}")
            tracker = None
        with tracked(tracker, sweep.folder), Display(config.name, runs, config.hardware.device) as display:
            reconciler = Reconciler(sweep, launcher, display.show, display.say)
            reconciler.recorder.withdraw(replaced_jobs, f"taken over by {own_name()}")
            state = reconciler.run(until_submitted=detach)
    except KeyboardInterrupt as interruption:
        signal_number = int((*interruption.args, signal.SIGINT)[0])
        if ends_jobs:
            ignore_signals()
            return 128 + signal_number
        return _report_interruption(sweep, launcher, signal_number, display_name)
    _set_handler(signal.SIG_DFL, caught_signals)  # the rest takes only a moment
    if detach and reconciler.memory.num_submitted:
        fact = f"Submitted {counted(reconciler.memory.num_submitted, 'job')}; later ones need a launcher"
        say(f"{fact}: ultrabench sweep resume {display_name} (same user, any login node of the cluster)")
        return 0
    progress = progress_of(config.name, runs, state, config.hardware.device)
    show(panel(progress, is_active=False), stderr=stderr)
    say(*launch_differences(state, {run.run_id for run in runs}, old_settled_ids))
    if reconciler.stop_reason:
        if state.cancelled and not config.launcher.survives_us:
            interrupt(sweep, launcher)  # ends what was submitted meanwhile
        _print_stop_reason(reconciler, state, display_name)
        return 1
    failures = ((run.run_id, attempt.result) for run, attempt in progress.failures)
    if failed_ids := [run_id for run_id, result in failures if result and result.status not in ANSWERS]:
        show_hint = f"ultrabench sweep show {failed_ids[-1]} {display_name} shows why that run failed"
        say(f"next: {show_hint}; ultrabench sweep retry {display_name} tries failed runs again")
    if Status.OK in progress.by_status:
        say(f"next: ultrabench {'heatmap' if config.kernel.trains else 'plot comm'} {display_name}")
    return int(any(Status(name) not in ANSWERS for name in progress.by_status if name not in UNSETTLED))


def _print_stop_reason(reconciler: Reconciler, state: SweepState, display_name: str) -> None:
    """Prints why a sweep stopped and, if it is over its budget, the command that continues it."""
    say(f"stopped: {reconciler.stop_reason}")
    if reconciler.over_budget:
        plan = reconciler.sweep.plan
        budget = committed_gpu_hours(plan, state, ()) + BUDGET_FACTOR * price_of(plan, state).gpu_hours
        say(f"To continue: ultrabench sweep resume {display_name} --max-gpu-hours {budget:.3g}")


def first_lines(sweep: OpenSweep, price: Price) -> Iterator[str]:
    """The lines that a launch prints before it submits anything."""
    config, runs, state = sweep.config, sweep.plan.runs, sweep.state()
    progress = progress_of(config.name, runs, state, config.hardware.device)
    left_texts = [progress.left_text] if progress.left else []
    if price.num_repeated:
        left_texts.append(f"repeats of {counted(price.num_repeated, 'measured run')} left")
    left_text = ", ".join(left_texts) or f"all {counted(len(runs), 'run')} settled"
    yield headline(config)
    cost_text, (low, high) = GPU_HOURS.brief_text(price.gpu_hours), map(GPU_HOURS.bare_text, price.interval)
    interval_text = f" ({low} to {high})" if price.jobs and config.kernel.is_predictable else ""
    yield f"{config.name}: {left_text}, {cost_text} predicted{interval_text}, in {sweep.folder.path}"
    if price.jobs:
        yield from screening_lines(sweep.plan, state)
    if not any(run.fits for run in runs):
        yield "no run is predicted to fit into the memory of a rank"
    is_set_by_setting = {"trace=true": config.trace, "measure.checkpoint=true": config.measure.checkpoint}
    if any(is_set_by_setting.values()) and is_settled(sweep.plan, sweep.state(), sweep.accepts):
        settings_text = " ".join(setting for setting, is_set in is_set_by_setting.items() if is_set)
        yield f"{settings_text} applies to new runs only, and all runs are measured; add repeats=N or name=NAME"
    for launcher_text in living_launchers(sweep.folder, sweep.lease):
        yield f"{launcher_text} also follows this sweep; both can continue: no run is made twice"


def launch_differences(state: SweepState, planned_ids: Set[str], old_settled_ids: Set[str]) -> Iterator[str]:
    """Lines about settled runs that are new in this launch, and about those of earlier launches only.

    Args:
        planned_ids: run_ids of the runs of this launch.
        old_settled_ids: run_ids of the runs that were settled before this launch.
    """
    status_by_run = settled_runs(state)
    ids_by_group = {
        "new in this launch": planned_ids - old_settled_ids,
        "in earlier launches only": old_settled_ids - planned_ids,
    }
    for group, run_ids in ids_by_group.items() if old_settled_ids else ():
        if num_by_status := Counter(status_by_run[run_id] for run_id in run_ids if run_id in status_by_run):
            counts_text = ", ".join(f"{num} {status}" for status, num in sorted(num_by_status.items()))
            yield f"{group}: {counted(num_by_status.total(), 'run')} settled ({counts_text})"


def _ask_to_replace_jobs(sweep: OpenSweep, launcher: Launcher) -> list[str]:
    """Names of queued jobs of others that cannot be seen from here, if the user agrees to replace them.

    Jobs of others are never replaced without asking. Those that already run are waited for.
    """
    waiting_allocations = (a for a in sweep.state().allocations.values() if a.ended is None and not a.agents)
    hidden_allocations = [a for a in waiting_allocations if not sees(launcher.origin, a.by)]
    if not hidden_allocations or not can_ask():
        return []
    owners = {f"{a.by.get('user')} on {a.by.get('cluster') or a.by.get('host')}" for a in hidden_allocations}
    question = (
        f"{counted(len(hidden_allocations), 'job')} of {', '.join(sorted(owners))} have not "
        "started. Replace them?"
    )
    return sorted(a.name for a in hidden_allocations) if typer.confirm(question, err=True) else []


def _raise_interrupt(signal_number: int, frame: FrameType | None) -> None:
    """The handler of a signal: raises KeyboardInterrupt with the number of the signal."""
    ignore_signals()  # comes first, so that another signal cannot interrupt what follows
    raise KeyboardInterrupt(signal_number)


def ignore_signals() -> None:
    """Makes this process ignore the signals that end it, while it ends its jobs."""
    _set_handler(signal.SIG_IGN, ENDING_SIGNALS)


def _set_handler(handler: SignalHandler, signals: Iterable[int]) -> None:
    """Makes `handler` handle these signals."""
    for signal_number in signals:
        signal.signal(signal_number, handler)


def _report_interruption(sweep: OpenSweep, launcher: Launcher, signal_number: int, display_name: str) -> int:
    """Prints what still runs and how to continue after signal `signal_number`; returns the exit code.

    Jobs of Slurm go on. On this machine Ctrl-C ends all runs. A launcher that is ended by a signal, or
    whose terminal is gone, leaves its agents running for the next launch.
    """
    # A second retry of the same runs has nothing to retry.
    is_retry = sys.argv[1:3] == ["sweep", "retry"]
    arguments = ["sweep", "resume", display_name] if is_retry else sys.argv[1:]
    next_command = shlex.join(["ultrabench", *redact_arguments(arguments, sweep.config.secrets)])
    jobs_continue = sweep.config.launcher.survives_us
    if jobs_continue or signal_number != signal.SIGINT:
        signal_name = signal.Signals(signal_number).name
        signal_text = "" if signal_number == signal.SIGINT else f"ended by {signal_name}: "
        jobs_text = what_continues(sweep, jobs_continue)
        next_text = f"To follow again: {next_command}"
        if jobs_text != NOTHING_RUNNING:
            next_text += f"; to end them: ultrabench sweep cancel {display_name}"
        message = f"{signal_text}stopped following the sweep; {jobs_text}. {next_text}"
    else:
        end_text = "interrupted"
        try:
            _set_handler(_raise_interrupt, ENDING_SIGNALS)
            say("stopping the runs on this machine")
            interrupt(sweep, launcher)
        except KeyboardInterrupt:
            end_text = "interrupted again before all runs had ended"
        message = f"{end_text}; finished runs are kept. To continue: {next_command}"
    _set_handler(signal.SIG_IGN, ENDING_SIGNALS)
    say(message)
    return 128 + signal_number


def what_continues(sweep: OpenSweep, jobs_continue: bool) -> str:
    """What goes on after a launch has ended by a signal, as far as the journal knows of jobs and agents."""
    continuing_text = "submitted jobs keep running" if jobs_continue else "runs on this machine continue"
    try:
        allocations = sweep.state().allocations.values()
    except (OSError, UltrabenchError):  # the disk may be why the user ends the launch
        return continuing_text
    open_ones = [allocation for allocation in allocations if allocation.ended is None]
    if any(allocation.job or allocation.agents for allocation in open_ones):
        return continuing_text
    return "what was being submitted may still start" if open_ones else NOTHING_RUNNING


def _leave_in_background(folder: SweepFolder) -> int:
    """Starts this command without --detach in the background, with its output in the sweep's launcher.log."""
    find_sweep_json(folder)
    folder.create()
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    command = [sys.executable, "-P", "-m", "ultrabench.cli.main", *arguments]
    log_path = folder.path / "launcher.log"
    with log_path.open("ab") as log:
        process = Popen(command, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)
    say(f"launching in the background (process {process.pid}, output in {log_path})")
    say(f"to watch: ultrabench sweep status {folder.display_name} --watch")
    return 0
