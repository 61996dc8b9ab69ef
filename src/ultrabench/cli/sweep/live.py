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
from ultrabench.hardware import peak_suffix
from ultrabench.result import INTERRUPTED, SLOWER, UNSETTLED, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.running.outliers import low_peak
from ultrabench.sweep.running.progress import SweepProgress, progress_of
from ultrabench.variant import CELL_OPTIONS


class Display(Live):
    """Shows the progress of a sweep on stderr while its `with` block runs; the table only on a terminal."""

    def __init__(self, sweep: str, runs: Sequence[Candidate], device: str) -> None:
        self._console = out(stderr=True)
        super().__init__(console=self._console, transient=True)
        self._sweep, self._runs, self._device = sweep, runs, device
        self._run_by_id = {run.run_id: run for run in runs}
        self._ended_keys: set[AttemptKey] | None = None
        """Attempts whose end was shown, and those that had ended before the first state; None before that."""
        self._old_keys = frozenset[AttemptKey]()
        """Attempts that had ended before the first state."""
        self._settled_ids = frozenset[str]()
        """run_ids of the runs that were settled when lines were last printed."""

    def start(self, refresh: bool = False) -> None:
        """Starts the table if stderr is a terminal."""
        if sys.stderr.isatty():
            super().start(refresh)

    def show(self, state: SweepState, alive: frozenset[str]) -> None:
        """Shows a new state: a line for each attempt that has ended since and, on a terminal, the table.

        Each line begins with the number of settled runs; runs that are skipped from now on have one together.
        """
        ended_keys = {key for key, attempt in state.attempts.items() if attempt.result is not None}
        is_first = self._ended_keys is None
        self._ended_keys = ended_keys if self._ended_keys is None else self._ended_keys
        new_keys = sorted(ended_keys - self._ended_keys)
        if not (new_keys or is_first or self.is_started):
            return
        self._old_keys = frozenset(ended_keys) if is_first else self._old_keys
        progress = progress_of(self._sweep, self._runs, state, self._device, self._old_keys)
        settled = {*progress.settled} if is_first else {*self._settled_ids & progress.settled}
        for key in new_keys:
            self._ended_keys.add(key)
            if run := self._run_by_id.get(key.run_id):
                settled |= progress.settled & {key.run_id}
                facts = progress.suspects.get(key), progress.pause_by_key.get(key), progress.cell_columns
                line = attempt_line(run, state.attempts[key], *facts)
                self._console.print_line(Text(f"[{len(settled)}/{progress.runs}] ").append(line))
        if skips := [run for run in self._runs if run.run_id in progress.skipped.keys() - settled]:
            settled |= {run.run_id for run in skips}
            introduction = f"{counted(len(skips), 'run')} skipped, such as" if len(skips) > 1 else "skipped"
            run_text = f"{skips[0].run_id} {_name(skips[0], progress.cell_columns)}"
            skip_text = f"[{len(settled)}/{progress.runs}] {introduction} {run_text}: {progress.skipped[skips[0].run_id]}"
            self._console.print_line(Text(skip_text, style_of("skipped")))
        self._settled_ids = progress.settled
        self.update(panel(progress, bool(alive), bar=True))

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
    mfu_text = None if mfu is None else f"{percent(mfu)} MFU{peak_suffix(run.cell.precision)}"
    speed_text = f"{rate:,.0f} tokens/s/GPU, step {median(result.step_times_s):.4g} s"
    return ", ".join(filter(None, ("ok", mfu_text, memory(result.peak_mem_reserved_bytes), speed_text)))


def panel(progress: SweepProgress, busy: bool, bar: bool = False) -> RenderableType:
    """The view of a sweep: counts, a bar if asked for, what runs, the best so far, failures and suspects."""
    return Group(counts_line(progress, busy), *_below_counts(progress, busy, bar))


def counts_line(progress: SweepProgress, busy: bool) -> Text:
    """A line such as `quick-cpu: 12 of 26 runs settled (10 ok, 2 oom), ETA 1m20s, 0.03 GPU hours`."""
    retried_counts = progress.retried_by_status
    ended_counts = (
        Counter({s: n for s, n in progress.by_status.items() if s not in UNSETTLED}) - retried_counts
    )
    counters = (ended_counts, retried_counts)
    ended_text, retried_text = (", ".join(f"{n} {s}" for s, n in counts.items()) for counts in counters)
    total_hours = progress.useful_gpu_hours + progress.wasted_gpu_hours
    wasted_hours = progress.wasted_by_status
    between_hours = wasted_hours.get("between_runs", 0.0)
    status_by_label = {"in OOMs": "oom"} | {f"in {s} runs": str(s) for s in sorted(INTERRUPTED)}
    hours = {cause: wasted_hours.get(status, 0.0) for cause, status in status_by_label.items()}
    failed_hours = progress.wasted_gpu_hours - between_hours - sum(hours.values())
    hours |= {"in failed runs": failed_hours, "between runs": between_hours}
    shares = {cause: h / total_hours for cause, h in hours.items() if h >= 0.005 * total_hours > 0}
    lost_text = "".join(f", {share:.0%} of them {cause}" for cause, share in shares.items())
    eta = f", ETA {duration(progress.eta_s)}" if progress.left and busy and progress.eta_s is not None else ""
    if eta and progress.runs_per_hour is not None:
        eta += f" at {three_digits(progress.runs_per_hour)} runs an hour"
    text = f"{progress.sweep}: {progress.runs - progress.left} of {counted(progress.runs, 'run')} settled"
    text += f" ({ended_text})" if ended_text else ""
    text += f", {retried_text} to be retried" if retried_text else ""
    text += f", about {progress.to_go} to go" if progress.to_go < progress.left else ""
    return Text(f"{text}{eta}, {three_digits(total_hours)} GPU hours{lost_text}")


def _doing(run: Candidate, attempt: AttemptState) -> str:
    """The phase of a running attempt and, once it measures, its step time beside the predicted one."""
    phase, predicted_text = attempt.phase or "start", f"predicted {run.prediction.step_time_s:.3g} s"
    if attempt.step_time_s is None or not attempt.steps:
        return f"{phase}, {predicted_text} a step"
    return f"{phase}, {counted(attempt.steps, 'step')} of {attempt.step_time_s:.3g} s, {predicted_text}"


def _below_counts(progress: SweepProgress, busy: bool, bar: bool) -> Iterator[RenderableType]:
    if bar:
        yield ProgressBar(total=progress.runs, completed=progress.runs - progress.left, width=40)
        yield Text("")
    for run, attempt in progress.running:
        yield Text(f"  running  {_name(run, progress.cell_columns)}: {_doing(run, attempt)}")
    if progress.num_waiting:
        yield Text(f"  pending  {counted(progress.num_waiting, 'allocation')}")
    elif busy and progress.left and not progress.running:
        yield Text("  starting the next allocation")
    if progress.best:
        rows, columns = [], progress.cell_columns
        for run, standing in progress.best:
            width, rate = progress.width_by_run.get(run.run_id), standing.rate or 0.0
            mark = "suspect" if standing.suspect else ""
            repeats = f"(median of {standing.num_competing})" if standing.num_competing > 1 else ""
            speed = " ".join(filter(None, (f"{rate:,.0f}", repeats, too_wide(width is None, width), mark)))
            predicted_rate = run.spec.tokens_per_step / run.prediction.step_time_s / run.layout.world_size
            mfu = run.mfu(rate)
            mfu_text = None if mfu is None else f"{percent(mfu)}{peak_suffix(run.cell.precision)}"
            number_texts = speed, mfu_text, f"{rate / predicted_rate:.2f}"
            rows.append((*(getattr(run.cell, name) for name in columns), run.spec.label(), *number_texts))
        cell_heads = ("model", *(f">{name}" for name in columns[1:]))
        heads = (*cell_heads, "layout", ">tokens/s/GPU", ">MFU", ">x predicted")
        yield table("best so far", *heads, rows=rows)
        expert_runs = (run for run, _ in progress.best if run.shape.num_experts and run.peak_flops_per_s)
        if formulas := {run.flops_formula for run in expert_runs}:
            yield Text(formula_text(formulas, has_experts=True))
    if progress.failures:
        yield Text("last failures and OOMs")
    for run, attempt in progress.failures:
        yield Text("  ").append(attempt_line(run, attempt, columns=progress.cell_columns))
    for key, reason in [*progress.suspects.items()][:1]:
        yield Text(f"{counted(len(progress.suspects), 'suspect result')}, such as {key}: {reason}", "yellow")
    mfus = (run.mfu(standing.rate or 0.0) or 0.0 for run, standing in progress.best if not standing.suspect)
    yield from (Text(reason, "yellow") for reason in low_peak(max(mfus, default=None)))
