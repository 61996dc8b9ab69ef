"""The output of a launch: a live table on a terminal, and a line for each attempt that has ended."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from ultrabench.analysis.numbers import formula_text, memory, percent, too_wide
from ultrabench.cli.tables import duration, out, style_of, table, three_digits
from ultrabench.device_rates import OPERATIONS, summary
from ultrabench.errors import counted
from ultrabench.hardware import of_peak
from ultrabench.result import INTERRUPTED, SLOWER, UNSETTLED, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.running.outliers import low_peak
from ultrabench.sweep.running.progress import SweepProgress, progress
from ultrabench.variant import CELL_OPTIONS


class Display(Live):
    """Shows the progress of a sweep on stderr while its `with` block runs; the table only on a terminal."""

    def __init__(self, sweep: str, planned: Sequence[Candidate], device: str) -> None:
        self._console = out(stderr=True)
        super().__init__(console=self._console, transient=True)
        self._sweep, self._planned, self._device = sweep, planned, device
        self._by_id = {run.run_id: run for run in planned}
        self._ended: set[AttemptKey] | None = None
        """Attempts whose end was shown, and those that had ended before the first state; None before that."""
        self._old = frozenset[AttemptKey]()
        """Attempts that had ended before the first state."""
        self._settled = frozenset[str]()
        """run_ids of the runs that were settled when lines were last printed."""

    def start(self, refresh: bool = False) -> None:
        """Starts the table if stderr is a terminal."""
        if sys.stderr.isatty():
            super().start(refresh)

    def show(self, state: SweepState, alive: frozenset[str]) -> None:
        """Shows a new state: a line for each attempt that has ended since and, on a terminal, the table.

        Each line begins with the number of settled runs; runs that are skipped from now on have one together.
        """
        ended = {key for key, attempt in state.attempts.items() if attempt.result is not None}
        first, self._ended = self._ended is None, ended if self._ended is None else self._ended
        new = sorted(ended - self._ended)
        if not (new or first or self.is_started):
            return
        self._old = frozenset(ended) if first else self._old
        now = progress(self._sweep, self._planned, state, self._device, self._old)
        settled = {*now.settled} if first else {*self._settled & now.settled}
        for key in new:
            self._ended.add(key)
            if run := self._by_id.get(key.run_id):
                settled |= now.settled & {key.run_id}
                facts = now.suspects.get(key), now.pause_by_key.get(key), now.cell_columns
                line = attempt_line(run, state.attempts[key], *facts)
                self._console.print_line(Text(f"[{len(settled)}/{now.runs}] ").append(line))
        if skipped := [run for run in self._planned if run.run_id in now.skipped.keys() - settled]:
            settled |= {run.run_id for run in skipped}
            introduction = (
                f"{counted(len(skipped), 'run')} skipped, such as" if len(skipped) > 1 else "skipped"
            )
            name = f"{skipped[0].run_id} {_name(skipped[0], now.cell_columns)}"
            skip = f"[{len(settled)}/{now.runs}] {introduction} {name}: {now.skipped[skipped[0].run_id]}"
            self._console.print_line(Text(skip, style_of("skipped")))
        self._settled = now.settled
        self.update(panel(now, bool(alive), bar=True))

    def say(self, note: str) -> None:
        """Prints a line above the table."""
        self._console.print_line(note)


def _name(run: Candidate, columns: Sequence[str]) -> str:
    """The model, nodes, layout and variant of a run, and of seq_len, gbs and precision those that vary in the sweep."""
    options = [f"{name}={getattr(run.cell, name)}" for name in CELL_OPTIONS if name in columns]
    return " ".join((run.shape.name, counted(run.nodes, "node"), *options, run.spec.label()))


def attempt_line(
    run: Candidate,
    attempt: AttemptState,
    caveat: str | None = None,
    again_s: float | None = None,
    columns: Sequence[str] = (),
) -> Text:
    """One line about an attempt that has ended, in the colour of its status; a suspect number is marked.

    Args:
        again_s: seconds until the run may be tried again; None where it is not.
        columns: what `cell_columns` returns for the cells of the sweep.
    """
    result, key = attempt.result, attempt.key
    assert result is not None
    if result.stopped == SLOWER:
        caveat = "stopped early: slower than the best of its cell"
    text = f"{run.run_id} {_name(run, columns)}"
    text += f" (repeat {key.repeat})" if key.repeat else ""
    text += f" (attempt {key.attempt})" if key.attempt else ""
    end = _numbers(run, result) if result.status == Status.OK else f"{result.status}, {result.reason}"
    text += f": {end}" + (f" ({caveat})" if caveat else "")
    if again_s is not None:
        text += f"; will be retried{f' in {again_s:.0f} s at the earliest' if again_s else ''}"
    return Text(text, style_of(result.status, bool(caveat)))


def _numbers(run: Candidate, result: RunResult) -> str:
    """The measured numbers of an ok result."""
    if result.probe:
        rates = summary(result.probe)
        links = ((name, rates[f"{name}_busbw_bytes_per_s"]) for name in OPERATIONS)
        return ", ".join(("ok", *(f"{name} {rate / 1e9:.3g} GB/s" for name, rate in links if rate)))
    rate = run.tokens_per_s_per_gpu(result)
    mfu = run.mfu(rate)
    of_rate = None if mfu is None else f"{percent(mfu)} MFU{of_peak(run.cell.precision)}"
    speed = f"{rate:,.0f} tokens/s/GPU, step {median(result.step_times_s):.4g} s"
    return ", ".join(filter(None, ("ok", of_rate, memory(result.peak_mem_reserved_bytes), speed)))


def panel(now: SweepProgress, busy: bool, bar: bool = False) -> RenderableType:
    """The view of a sweep: counts, a bar if asked for, what runs, the best so far, failures and suspects."""
    return Group(counts_line(now, busy), *_below_counts(now, busy, bar))


def counts_line(now: SweepProgress, busy: bool) -> Text:
    """A line such as `quick-cpu: 12 of 26 runs settled (10 ok, 2 oom), ETA 1m20s, 0.03 GPU hours`."""
    over = Counter({s: n for s, n in now.by_status.items() if s not in UNSETTLED}) - now.retried_by_status
    both = (over, now.retried_by_status)
    ended, retried = (", ".join(f"{n} {s}" for s, n in counts.items()) for counts in both)
    total = now.useful_gpu_hours + now.wasted_gpu_hours
    spent, between = now.wasted_by_status, now.wasted_by_status.get("between_runs", 0.0)
    status_by_label = {"in OOMs": "oom"} | {f"in {s} runs": str(s) for s in sorted(INTERRUPTED)}
    parts = {how: spent.get(status, 0.0) for how, status in status_by_label.items()}
    failed = now.wasted_gpu_hours - between - sum(parts.values())
    parts |= {"in failed runs": failed, "between runs": between}
    lost = (f", {part / total:.0%} of them {how}" for how, part in parts.items() if part >= 0.005 * total > 0)
    eta = f", ETA {duration(now.eta_s)}" if now.left and busy and now.eta_s is not None else ""
    if eta and now.runs_per_hour is not None:
        eta += f" at {three_digits(now.runs_per_hour)} runs an hour"
    text = f"{now.sweep}: {now.runs - now.left} of {counted(now.runs, 'run')} settled"
    text += f" ({ended})" if ended else ""
    text += f", {retried} to be retried" if retried else ""
    text += f", about {now.to_go} to go" if now.to_go < now.left else ""
    return Text(f"{text}{eta}, {three_digits(total)} GPU hours{''.join(lost)}")


def _doing(run: Candidate, attempt: AttemptState) -> str:
    """The phase of a running attempt and, once it measures, its step time beside the predicted one."""
    phase, predicted = attempt.phase or "start", f"predicted {run.prediction.step_time_s:.3g} s"
    if attempt.step_time_s is None or not attempt.steps:
        return f"{phase}, {predicted} a step"
    return f"{phase}, {counted(attempt.steps, 'step')} of {attempt.step_time_s:.3g} s, {predicted}"


def _below_counts(now: SweepProgress, busy: bool, bar: bool) -> Iterator[RenderableType]:
    if bar:
        yield ProgressBar(total=now.runs, completed=now.runs - now.left, width=40)
        yield Text("")
    for run, attempt in now.running:
        yield Text(f"  running  {_name(run, now.cell_columns)}: {_doing(run, attempt)}")
    if now.num_waiting:
        yield Text(f"  pending  {counted(now.num_waiting, 'allocation')}")
    elif busy and now.left and not now.running:
        yield Text("  starting the next allocation")
    if now.best:
        rows, columns = [], now.cell_columns
        for run, standing in now.best:
            width, rate = now.width_by_run.get(run.run_id), standing.rate or 0.0
            mark = "suspect" if standing.suspect else ""
            of_repeats = f"(median of {standing.num_competing})" if standing.num_competing > 1 else ""
            speed = " ".join(filter(None, (f"{rate:,.0f}", of_repeats, too_wide(width is None, width), mark)))
            promised = run.spec.tokens_per_step / run.prediction.step_time_s / run.layout.world_size
            mfu = run.mfu(rate)
            share = None if mfu is None else f"{percent(mfu)}{of_peak(run.cell.precision)}"
            numbers = speed, share, f"{rate / promised:.2f}"
            rows.append((*(getattr(run.cell, name) for name in columns), run.spec.label(), *numbers))
        of_cell = ("model", *(f">{name}" for name in columns[1:]))
        heads = (*of_cell, "layout", ">tokens/s/GPU", ">MFU", ">x predicted")
        yield table("best so far", *heads, rows=rows)
        with_experts = (run for run, _ in now.best if run.shape.num_experts and run.peak_flops_per_s)
        if formulas := {run.flops_formula for run in with_experts}:
            yield Text(formula_text(formulas, has_experts=True))
    if now.failures:
        yield Text("last failures and OOMs")
    for run, attempt in now.failures:
        yield Text("  ").append(attempt_line(run, attempt, columns=now.cell_columns))
    for key, why in [*now.suspects.items()][:1]:
        yield Text(f"{counted(len(now.suspects), 'suspect result')}, such as {key}: {why}", "yellow")
    mfus = (run.mfu(standing.rate or 0.0) or 0.0 for run, standing in now.best if not standing.suspect)
    yield from (Text(why, "yellow") for why in low_peak(max(mfus, default=None)))
