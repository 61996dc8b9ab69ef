"""The output of a launch: a live table on a terminal, and a line for each attempt that has ended."""

import sys
from collections.abc import Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from ultrabench.analysis.cells import memory, percent
from ultrabench.cli.tables import duration, err, hours, style_of, table
from ultrabench.device_rates import OPERATIONS, summary
from ultrabench.errors import counted
from ultrabench.result import SLOWER, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.plan import Candidate
from ultrabench.sweep.running.losses import with_loss_outliers
from ultrabench.sweep.running.progress import SweepProgress, doubtful, progress


class Display:
    """Shows the progress of a sweep on stderr while its `with` block runs."""

    def __init__(self, sweep: str, planned: Sequence[Candidate], device: str) -> None:
        self._sweep = sweep
        self._planned = planned
        self._device = device
        self._labels = {r.run_id: r for r in planned}
        self._told: set[AttemptKey] | None = None
        self._console = err()
        self._live = None
        if sys.stderr.isatty():
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, state: SweepState, alive: frozenset[str] = frozenset()) -> None:
        """Shows a new state: a line for each attempt that has ended and, on a terminal, the table."""
        self._print_ended(state)
        if self._live:
            now = progress(self._sweep, self._planned, state, self._device)
            self._live.update(panel(now, bool(alive), bar=True))

    def say(self, note: str) -> None:
        """Prints a line above the table."""
        self._console.print_line(note)

    def _print_ended(self, state: SweepState) -> None:
        """Prints a line for each attempt that has ended since the last call; the first call prints none."""
        ended = {k for k, a in state.attempts.items() if a.result is not None}
        if self._told is None:
            self._told = ended
            return
        new = sorted(ended - self._told)
        doubts = doubtful(self._planned, with_loss_outliers(state), self._device) if new else {}
        for key in new:
            self._told.add(key)
            run = self._labels.get(key.run_id)
            if run is not None:
                settled = len({k.run_id for k in self._told} & self._labels.keys())
                line = Text(f"[{settled}/{len(self._planned)}] ")
                line.append(attempt_line(run, state.attempts[key], doubts.get(key)))
                self._console.print_line(line)


def attempt_line(run: Candidate, attempt: AttemptState, doubt: str | None = None) -> Text:
    """One line about an attempt that has ended, in the colour of its status; a doubtful number is marked."""
    result = attempt.result
    assert result is not None
    doubt = "slower than the best of its cell, stopped early" if result.stopped == SLOWER else doubt
    marked = f" ({doubt})" if doubt else ""
    return Text(_told(run, attempt, result) + marked, style_of(result.status, bool(doubt)))


def _told(run: Candidate, attempt: AttemptState, result: RunResult) -> str:
    head = f"{run.run_id} {run.shape.name} {counted(run.nodes, 'node')} {run.layout.label()}"
    if attempt.key.repeat:
        head += f" (repeat {attempt.key.repeat})"
    if attempt.key.attempt:
        head += f" (attempt {attempt.key.attempt})"
    if result.status == Status.OK and result.probe:
        rates = summary(result.probe)
        told = ((name, rates[f"{name}_busbw_bytes_per_s"]) for name in OPERATIONS)
        return f"{head}: ok" + "".join(f", {name} {rate / 1e9:.3g} GB/s" for name, rate in told if rate)
    if result.status == Status.OK:
        rate = run.tokens_per_s_per_gpu(result)
        used = [f"{percent(mfu)} MFU"] if (mfu := run.mfu(rate)) is not None else []
        used += [held] if (held := memory(result.peak_mem_reserved_bytes)) else []
        step = f"{rate:,.0f} tokens/s/GPU, step {median(result.step_times_s):.4g} s"
        return ", ".join((f"{head}: ok", *used, step))
    return f"{head}: {result.status.value}, {result.reason}"


def panel(now: SweepProgress, busy: bool = True, bar: bool = False) -> RenderableType:
    """The view of a sweep: counts, a bar if asked for, what runs, the best so far, failures and doubts."""
    left = sum(now.by_status.get(name, 0) for name in ("pending", "running"))
    line = (ProgressBar(total=now.runs, completed=now.runs - left, width=40), Text("")) if bar else ()
    told = (*_running(now, busy), *_best(now), *_failures(now), *_doubts(now))
    return Group(counts_line(now, busy), *line, *told)


def counts_line(now: SweepProgress, busy: bool = True) -> Text:
    """A line such as `quick-cpu: 12 of 26 runs settled (10 ok, 2 oom), ETA 1m20s, 0.03 GPU hours`."""
    settled = {k: v for k, v in now.by_status.items() if k not in ("pending", "running")}
    shown = ", ".join(f"{v} {k}" for k, v in settled.items())
    total = now.useful_gpu_hours + now.wasted_gpu_hours
    between, ooms = (now.wasted_by_status.get(name, 0.0) for name in ("between_runs", "oom"))
    failed = now.wasted_gpu_hours - between - ooms
    shares = {"in OOMs": ooms, "in failed runs": failed, "between runs": between}
    lost = "".join(
        f", {part / total:.0%} of them {how}" for how, part in shares.items() if part / (total or 1) >= 0.005
    )
    left = now.by_status.get("pending", 0) + now.by_status.get("running", 0)
    eta = f", ETA {duration(now.eta_s)}" if left and busy and now.eta_s is not None else ""
    text = f"{now.sweep}: {sum(settled.values())} of {counted(now.runs, 'run')} settled"
    return Text(f"{text}{f' ({shown})' if shown else ''}{eta}, {hours(total)} GPU hours{lost}")


def _running(now: SweepProgress, busy: bool) -> list[RenderableType]:
    lines = [f"  running  {r.shape.name} {r.nodes}n {r.layout.label()}: {phase}" for r, phase in now.running]
    if now.waiting:
        lines.append(f"  waiting  {counted(now.waiting, 'allocation')} to start")
    if not lines and busy and now.by_status.get("pending"):
        lines = ["  running  starting the next allocation"]
    return [Text(line) for line in lines]


def _best(now: SweepProgress) -> list[RenderableType]:
    if not now.best:
        return []
    numbers = ("nodes", "tokens/s/GPU", "MFU")
    made = table("best so far", "model", "nodes", "layout", *numbers[1:], right=numbers)
    for run, rate in now.best:
        mfu = run.mfu(rate)
        shown = "" if mfu is None else percent(mfu)
        made.add_row(run.shape.name, str(run.nodes), run.layout.label(), f"{rate:,.0f}", shown)
    return [made]


def _failures(now: SweepProgress) -> list[RenderableType]:
    if not now.failures:
        return []
    return [Text("last failures and OOMs"), *(Text("  ").append(attempt_line(r, a)) for r, a in now.failures)]


def _doubts(now: SweepProgress) -> list[RenderableType]:
    told = f"{len(now.suspects)} suspect and winning no cell, such as "
    return [Text(f"{told}{key}: {why}", "yellow") for key, why in [*now.suspects.items()][:1]]
