"""`ultrabench sweep launch`, `retry` and `cancel`."""

import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from ultrabench.cli.live import Display, counts_line, panel
from ultrabench.cli.tables import err, hours, out, print_json, say, table, warn
from ultrabench.errors import ConfigError, unknown_name
from ultrabench.folder import SweepFolder, find_sweep
from ultrabench.journal import JournalWriter, read_journal
from ultrabench.launchers.follow import Follower, interrupt, open_allocations
from ultrabench.launchers.local import LocalLauncher
from ultrabench.launchers.prepare import OpenSweep, open_sweep
from ultrabench.result import ANSWERS, Status
from ultrabench.state import AttemptState, SweepState, final_attempts, fold
from ultrabench.sweep.config import SweepConfig, config_from_tree, load_config
from ultrabench.sweep.plan import make_plan, require_runs
from ultrabench.sweep.plan_table import planned_runs, read_plan
from ultrabench.sweep.progress import progress


def run_launch(overrides: list[str], detach: bool, max_gpu_hours: float | None, reuse: str | None) -> int:
    """Launches and follows a sweep; the exit code."""
    config = load_config(overrides)
    if detach:
        return _detach(config, overrides, max_gpu_hours, reuse)
    return _follow(open_sweep(config, reuse=reuse, warn=warn, say=say), max_gpu_hours)


def _follow(sweep: OpenSweep, max_gpu_hours: float | None, console: Console | None = None) -> int:
    config, launcher = sweep.config, LocalLauncher()
    planned = planned_runs(sweep.plan)
    price = hours(sweep.plan.gpu_hours())
    say(f"{config.name}: {len(planned)} runs, {price} GPU hours predicted, in {sweep.folder.path}")
    try:
        with Display(config.name, planned) as display:
            follower = Follower(sweep, launcher, display.show, max_gpu_hours)
            state = follower.run()
    except KeyboardInterrupt:
        say("stopping what runs on this machine")
        interrupt(sweep, launcher)
        again = shlex.join(["ultrabench", *sys.argv[1:]])
        say(f"interrupted; nothing that finished is lost, go on with: {again}")
        return 130
    now = progress(config.name, planned, state)
    (console or out()).print(panel(now, busy=False))
    if follower.stopped:
        if state.cancelled:
            interrupt(sweep, launcher)  # what was submitted while the cancel was being written
        say(f"stopped: {follower.stopped}")
        return 1
    if Status.OK in now.by_status:
        say(f"next: ultrabench heatmap {config.name}" + _where(sweep.folder.path.parent))
    return int(any(Status(s) not in ANSWERS for s in now.by_status if s not in ("running", "pending")))


def _where(parent: Path) -> str:
    return "" if parent == Path("results").absolute() else f" --results-dir {parent}"


def _detach(config: SweepConfig, overrides: list[str], max_gpu_hours: float | None, reuse: str | None) -> int:
    """Leaves a launcher in the background; its output goes to launcher.log in the sweep's folder."""
    require_runs(make_plan(config))
    folder = SweepFolder(Path(config.results_dir).absolute() / config.name)
    folder.read_head()
    folder.create()
    command = [sys.executable, "-P", "-m", "ultrabench.cli.main", "sweep", "launch", *overrides]
    command += ["--max-gpu-hours", str(max_gpu_hours)] if max_gpu_hours is not None else []
    command += ["--reuse", reuse] if reuse else []
    with (folder.path / "launcher.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    say(f"launching in the background (process {process.pid}, output in {folder.path}/launcher.log)")
    say(f"look with: ultrabench sweep status {config.name} --watch" + _where(folder.path.parent))
    return 0


def run_retry(
    sweep: str | None, only: str | None, run: str | None, dry_run: bool, as_json: bool, results: Path
) -> int:
    """Runs failed runs again, whatever the policy had settled; the exit code."""
    folder = find_sweep(sweep, results)
    head = folder.read_head()
    assert head is not None
    state = fold(read_journal(folder.journal, warn))
    chosen = _failed(folder, state, only, run)
    if as_json:
        print_json([_retry_row(a) for a in chosen])
    elif chosen:
        made = table(f"{'would run' if dry_run else 'runs'} again", "run", "attempt", "was", "reason")
        for a in chosen:
            made.add_row(*(str(v) for v in _retry_row(a).values()))
        out().print(made)
    if not chosen:
        say("nothing to retry: no run ended in " + (only or "a failure"))
    if dry_run or not chosen:
        return 0
    tree = dict((state.config or head)["config"])
    config = config_from_tree(tree | {"name": folder.name, "results_dir": str(folder.path.parent)})
    opened = open_sweep(config, reuse="any", warn=warn, say=say, retry=[a.key for a in chosen])
    return _follow(opened, None, err() if as_json else None)


def _retry_row(attempt: AttemptState) -> dict[str, object]:
    result = attempt.result
    assert result is not None
    return {
        "run_id": attempt.key.run_id,
        "attempt": attempt.key.attempt + 1,
        "was": result.status.value,
        "reason": result.reason,
    }


def _failed(folder: SweepFolder, state: SweepState, only: str | None, run: str | None) -> list[AttemptState]:
    """The final attempts that failed and were asked for."""
    answers = {Status.OK, Status.SKIPPED, Status.REJECTED}
    names = [s.value for s in Status if s not in answers]
    wanted = [w.strip() for w in only.split(",")] if only else names
    for name in wanted:
        if name not in names:
            raise ConfigError(unknown_name("status to retry", name, names))
    planned = {r.run_id for r in read_plan(folder.plan)}
    if run is not None and not any(r.startswith(run) for r in planned):
        raise ConfigError(f"no run of {folder.name} has an id that begins with {run!r}; see sweep status")
    return [
        a
        for (run_id, _), a in sorted(final_attempts(state).items())
        if a.result and a.result.status.value in wanted and run_id in planned and run_id.startswith(run or "")
    ]


def run_cancel(sweep: str | None, results: Path) -> None:
    """Cancels a sweep: no new allocation, and what runs on this machine ends."""
    folder = find_sweep(sweep, results)
    folder.read_head()
    state = fold(read_journal(folder.journal, warn))
    left = progress(folder.name, read_plan(folder.plan), state).by_status
    if not (left.get("pending") or left.get("running") or open_allocations(state)):
        say(f"nothing to cancel: every run of {folder.name} is settled")
        return
    JournalWriter(folder.journal, "cancel").write("cancel", generation=state.generation + 1)
    launcher = LocalLauncher()
    for name in open_allocations(state):
        launcher.kill(folder.allocations / name)
    state = fold(read_journal(folder.journal))
    err().print(counts_line(progress(folder.name, read_plan(folder.plan), state)))
    say("cancelled; results stay, and the same launch command goes on from here")
