"""The output of a launch: a live table on a terminal, and a line for each attempt that has ended."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.analysis.results.numbers import formula_text, rate_text, too_wide, with_unit
from ultrabench.cli.tables import duration_text, output_console, style_of, table, three_digits
from ultrabench.column import GPU_HOURS, SECONDS
from ultrabench.device_rates import OPERATIONS, summary
from ultrabench.errors import counted
from ultrabench.hardware import low_peak, peak_suffix
from ultrabench.result import INTERRUPTED, SLOWER, UNSETTLED, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.standing import Standing
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.running.outliers import foreign_load_line
from ultrabench.sweep.running.progress import SweepProgress, progress_of, settled_runs
from ultrabench.variant import CELL_OPTIONS


class Display(Live):
    """Shows the progress of a sweep on stderr while its `with` block runs; the table only on a terminal."""

    def __init__(self, sweep_name: str, runs: Sequence[Candidate], device: str) -> None:
        self._console = output_console(stderr=True)
        super().__init__(console=self._console, transient=True)
        self._sweep_name, self._runs, self._device = sweep_name, runs, device
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

    def show(self, state: SweepState, living_allocations: frozenset[str]) -> None:
        """Shows a new state: a line for each attempt that has ended since and, on a terminal, the table.

        Each line begins with the number of settled runs and, if runs are repeated, that of their ended repeats; runs
        that are skipped from now on have one line together.
        The table shows an ETA only while there are `living_allocations`.
        """
        ended_keys = {key for key, attempt in state.attempts.items() if attempt.result is not None}
        is_first = self._ended_keys is None
        self._ended_keys = ended_keys if self._ended_keys is None else self._ended_keys
        new_keys = sorted(ended_keys - self._ended_keys)
        if not (new_keys or is_first or self.is_started):
            return
        self._old_keys = frozenset(ended_keys) if is_first else self._old_keys
        progress = progress_of(self._sweep_name, self._runs, state, self._device, self._old_keys)
        settled_ids = {*progress.settled} if is_first else {*self._settled_ids & progress.settled}
        for key in new_keys:
            self._ended_keys.add(key)
            if run := self._run_by_id.get(key.run_id):
                settled_ids |= progress.settled & {key.run_id}
                line_facts = progress.suspects.get(key), progress.pause_by_key.get(key), progress.cell_columns
                line = attempt_line(run, state.attempts[key], *line_facts)
                self._console.print_line(
                    Text(f"{self._count_text(settled_ids, state, progress)} ").append(line)
                )
        if skipped_runs := [run for run in self._runs if run.run_id in progress.skipped.keys() - settled_ids]:
            settled_ids |= {run.run_id for run in skipped_runs}
            run, num_skipped = skipped_runs[0], len(skipped_runs)
            num_text = f"{counted(num_skipped, 'run')} skipped, such as" if num_skipped > 1 else "skipped"
            run_text = f"{run.run_id} {_run_text(run, progress.cell_columns)}: {progress.skipped[run.run_id]}"
            count_text = self._count_text(settled_ids, state, progress)
            self._console.print_line(Text(f"{count_text} {num_text} {run_text}", style_of(Status.SKIPPED)))
        self._settled_ids = progress.settled
        self.update(panel(progress, bool(living_allocations), with_bar=True))

    def _count_text(self, settled_ids: set[str], state: SweepState, progress: SweepProgress) -> str:
        """A text such as `[6/6, repeats 1/6]`: settled runs of all, and the ended repeats that follow the first one.

        Runs that ended without a measurement have no repeats. Those of the best runs (measure.confirm) have no known
        total, so they are counted alone, and so are control runs that only serve for comparison.
        """
        num_planned = state.config.get("repeats", 1)
        status_by_run = settled_runs(state)
        unmeasured_ids = {i for i in settled_ids if status_by_run.get(i, Status.SKIPPED) != Status.OK}
        repeats = {
            (key.run_id, key.repeat)
            for key in self._ended_keys or ()
            if key.repeat
            and key.run_id in self._run_by_id.keys() - unmeasured_ids
            and key not in progress.pause_by_key
        }
        further_repeats = {repeat for repeat in repeats if repeat[1] >= num_planned}
        control_by_allocation = {name: allocation.control for name, allocation in state.allocations.items()}
        control_repeats = {
            (key.run_id, key.repeat)
            for key, attempt in state.attempts.items()
            if control_by_allocation.get(attempt.allocation or "") == key.run_id
        }
        num_controls = len(further_repeats & control_repeats)
        num_confirming = len(further_repeats) - num_controls
        num_repeats = (num_planned - 1) * (progress.runs - len(unmeasured_ids))
        texts = [f"{len(settled_ids)}/{progress.runs}"]
        texts += [f"repeats {len(repeats) - len(further_repeats)}/{num_repeats}"] if num_repeats else []
        texts += [f"control runs {num_controls}"] if num_controls else []
        texts += [f"repeats of the best {num_confirming}"] if num_confirming else []
        return f"[{', '.join(texts)}]"

    def say(self, note: str) -> None:
        """Prints a line above the table."""
        self._console.print_line(note)


def _run_text(run: Candidate, columns: Sequence[str]) -> str:
    """The model, nodes, layout and variant of a run, and of seq_len, gbs and precision those that vary in the sweep."""
    option_texts = [f"{name}={getattr(run.cell, name)}" for name in CELL_OPTIONS if name in columns]
    return " ".join((run.shape.name, counted(run.nodes, "node"), *option_texts, run.spec.label()))


def attempt_line(
    run: Candidate,
    attempt: AttemptState,
    caveat: str | None = None,
    retry_in_s: float | None = None,
    columns: Sequence[str] = (),
) -> Text:
    """One line about an attempt that has ended, in the colour of its status; a suspect number is marked.

    Args:
        retry_in_s: seconds until the run may be tried again; None where it is not.
        columns: what `cell_columns` returns for the cells of the sweep.
    """
    result, key = attempt.result, attempt.key
    assert result is not None
    if result.stopped == SLOWER:
        caveat = "stopped early: slower than the best of its cell"
    text = f"{run.run_id} {_run_text(run, columns)}"
    text += f" (repeat {key.repeat})" if key.repeat else ""
    text += f" (attempt {key.attempt})" if key.attempt else ""
    ending = _result_text(run, result) if result.status == Status.OK else f"{result.status}, {result.reason}"
    text += f": {ending}" + (f" ({caveat})" if caveat else "")
    if retry_in_s is not None:
        text += f"; will be retried{f' in {retry_in_s:.0f} s at the earliest' if retry_in_s else ''}"
    return Text(text, style_of(result.status, bool(caveat)))


def _result_text(run: Candidate, result: RunResult) -> str:
    """The measured numbers of an ok result."""
    if result.probe:
        probe_rates = summary(result.probe)
        columns = {name: f"{name}_busbw_bytes_per_s" for name in OPERATIONS}
        link_texts = {name: with_unit(c, probe_rates[c]) for name, c in columns.items() if probe_rates[c]}
        return ", ".join((Status.OK, *(f"{name} {text}" for name, text in link_texts.items())))
    rate = run.tokens_per_s_per_gpu(result)
    mfu = run.mfu(rate, result)
    mfu_text = None
    if mfu is not None and not low_peak(mfu):
        mfu_text = f"{with_unit('mfu', mfu)} {column_of('mfu').heading}{peak_suffix(run.cell.precision)}"
    step_text = with_unit("step_time_s", float(median(result.step_times_s)))
    speed_text = f"{rate_text(rate)}, step {step_text}"
    if result.screening_text:
        speed_text += f" by {result.screening_text}"
    return ", ".join(
        filter(
            None,
            (
                Status.OK,
                mfu_text,
                with_unit("peak_mem_reserved_bytes", result.peak_mem_reserved_bytes),
                speed_text,
            ),
        )
    )


def panel(progress: SweepProgress, is_active: bool, with_bar: bool = False) -> RenderableType:
    """The view of a sweep: counts, a bar if asked for, what runs, the best so far, failures and suspects.

    Args:
        is_active: whether a launcher follows the sweep, or jobs of it run; otherwise it has no ETA.
        with_bar: whether a progress bar is shown.
    """
    return Group(counts_line(progress, is_active), *_views_below_counts(progress, is_active, with_bar))


def counts_line(progress: SweepProgress, is_active: bool) -> Text:
    """A line such as `quick-cpu: 12 of 26 runs settled (10 ok, 2 oom), ETA 1m20s, 0.03 GPU hours`."""
    retried_counts = progress.retried_by_status
    settled_counts = Counter({s: n for s, n in progress.by_status.items() if s not in UNSETTLED})
    counters = (settled_counts - retried_counts, retried_counts)
    ended_text, retried_text = (", ".join(f"{n} {s}" for s, n in counter.items()) for counter in counters)
    total_gpu_hours = progress.useful_gpu_hours + progress.wasted_gpu_hours
    idle_gpu_hours = progress.wasted_by_status.get("between_runs", 0.0)
    statuses = {"in OOMs": str(Status.OOM)} | {f"in {s} runs": str(s) for s in sorted(INTERRUPTED)}
    hours_by_cause = {cause: progress.wasted_by_status.get(status, 0.0) for cause, status in statuses.items()}
    failed_gpu_hours = progress.wasted_gpu_hours - idle_gpu_hours - sum(hours_by_cause.values())
    hours_by_cause |= {"in failed runs": failed_gpu_hours, "between runs": idle_gpu_hours}
    min_hours = 0.005 * total_gpu_hours
    share_by_cause = {cause: h / total_gpu_hours for cause, h in hours_by_cause.items() if h >= min_hours > 0}
    wasted_text = "".join(f", {share:.0%} of them {cause}" for cause, share in share_by_cause.items())
    eta_s = progress.eta_s if progress.left and is_active else None
    eta_text = "" if eta_s is None else f", ETA {duration_text(eta_s)}"
    if eta_text and progress.runs_per_hour is not None:
        eta_text += f", lately {three_digits(progress.runs_per_hour)} runs an hour"
    text = f"{progress.sweep}: {progress.runs - progress.left} of {counted(progress.runs, 'run')} settled"
    text += f" ({ended_text})" if ended_text else ""
    text += f", {retried_text} to be retried" if retried_text else ""
    text += f", about {progress.to_go} to go" if progress.to_go < progress.left else ""
    return Text(f"{text}{eta_text}, {GPU_HOURS.brief_text(total_gpu_hours)}{wasted_text}")


def _phase_text(run: Candidate, attempt: AttemptState) -> str:
    """The phase of a running attempt and, once it measures, its step time beside the predicted one."""
    texts, predicted_text = (
        [attempt.phase or "start"],
        f"predicted {SECONDS.brief_text(run.prediction.step_time_s)}",
    )
    has_steps = attempt.step_time_s is not None and attempt.steps
    if has_steps:
        texts.append(
            f"{counted(attempt.steps or 0, 'step')} of {SECONDS.brief_text(attempt.step_time_s or 0.0)}"
        )
    if run.spec.kernel.is_predictable:
        texts.append(predicted_text if has_steps else f"{predicted_text} a step")
    return ", ".join(texts)


def _repeats_text(standing: Standing) -> str:
    """A text such as `3 repeats`, or `2 of 3 repeats` where one failed, is suspect or was stopped early."""
    num_competing, num_repeats = standing.num_competing, standing.num_repeats
    return (
        f"{num_competing} of {num_repeats} repeats"
        if num_competing < num_repeats
        else f"{num_repeats} repeats"
    )


def _views_below_counts(progress: SweepProgress, is_active: bool, with_bar: bool) -> Iterator[RenderableType]:
    """The lines and tables of the panel below its counts."""
    if with_bar:
        yield ProgressBar(total=progress.runs, completed=progress.runs - progress.left, width=40)
        yield Text("")
    for run, attempt in progress.running:
        yield Text(f"  running  {_run_text(run, progress.cell_columns)}: {_phase_text(run, attempt)}")
    if progress.num_waiting:
        yield Text(f"  pending  {counted(progress.num_waiting, 'allocation')}")
    elif is_active and progress.left and not progress.running:
        yield Text("  starting the next allocation")
    if progress.best:
        rows, columns = [], progress.cell_columns
        has_mfu = any(progress.mfu(run, standing) is not None for run, standing in progress.best)
        for run, standing in progress.best:
            rate, interval_text = standing.rate or 0.0, too_wide(standing.ci_reached, standing.ci95_rel)
            mark = "suspect" if standing.suspect else ""
            repeats_text = f"(median of {_repeats_text(standing)})" if standing.num_competing > 1 else ""
            speed_texts = (with_unit(RATE, rate), repeats_text, interval_text, mark)
            predicted_rate = run.spec.tokens_per_step / run.prediction.step_time_s / run.layout.world_size
            mfu, is_predicted = progress.mfu(run, standing), run.spec.kernel.is_predictable
            mfu_text = None if mfu is None else f"{with_unit('mfu', mfu)}{peak_suffix(run.cell.precision)}"
            number_texts = (
                " ".join(filter(None, speed_texts)),
                *((mfu_text,) if has_mfu else ()),
                f"{rate / predicted_rate:.2f}" * is_predicted,
            )
            rows.append((*(getattr(run.cell, name) for name in columns), run.spec.label(), *number_texts))
        cell_headings = ("model", *(f">{name}" for name in columns[1:]), "layout")
        shown_columns = (RATE, "mfu") if has_mfu else (RATE,)
        number_headings = (*(f">{column_of(name).heading}" for name in shown_columns), ">x predicted")
        headings = (*cell_headings, *number_headings)
        yield table("best so far", *headings, rows=rows)
        expert_runs = ((run, standing) for run, standing in progress.best if run.shape.num_experts)
        if formulas := {run.flops_formula for run, standing in expert_runs if progress.mfu(run, standing)}:
            yield Text(formula_text(formulas, has_experts=True))
    if progress.unconfirmed:
        cells_text = counted(progress.unconfirmed, "cell")
        yield Text(
            f"in {cells_text} the fastest run was only screened, and is measured in full before it is called the best"
        )
    if progress.failures:
        yield Text("last failures and OOMs")
    for run, attempt in progress.failures:
        yield Text("  ").append(attempt_line(run, attempt, columns=progress.cell_columns))
    for key, reason in [*progress.suspects.items()][:1]:
        yield Text(f"{counted(len(progress.suspects), 'suspect result')}, such as {key}: {reason}", "yellow")
    problems = {
        run.flops(result).problem
        for run, _ in progress.best
        if (result := progress.result_by_run.get(run.run_id))
    }
    problems |= {progress.mfu_problem} if progress.best else set()
    ok_loads = (result.foreign_load for result in progress.result_by_run.values())
    if not progress.suspects and (load_line := foreign_load_line(ok_loads)):
        yield Text(load_line)
    yield from (Text(f"no MFU: {problem}", "yellow") for problem in sorted(filter(None, problems)))
