"""Lines that say which runs of a sweep are screened by parts of steps, and why others are not."""

from collections import defaultdict
from collections.abc import Iterator

from ultrabench.errors import are, counted
from ultrabench.store.state import SweepState
from ultrabench.sweep.partial_steps import partial_steps_of, whole_steps_of_any_run
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.attempts import runs_with_too_little


def screening_lines(plan: Plan, state: SweepState) -> Iterator[str]:
    """Lines about the runs that are screened by parts of steps, why others are not, and measured runs that are measured
    again since only parts of their steps were."""
    config = plan.config
    setting = partial_steps_of(config)
    setting_text = setting if isinstance(setting, str) else f"[{setting[0]},{setting[1]}]"
    if runs_again := runs_with_too_little(plan, state):
        reasons = [run.whole_steps.reason for run in runs_again if run.whole_steps]
        reason = reasons[0] if reasons else f"measure.partial_steps={setting_text}"
        yield f"{counted(len(runs_again), 'measured run')} {are(len(runs_again))} measured again in full: {reason}"
    if setting == "off":
        is_auto_elsewhere = config.measure.partial_steps is None and config.strategy == "adaptive"
        if is_auto_elsewhere and config.kernel.trains_itself and (why := whole_steps_of_any_run(config)):
            yield f"every run is measured in full: {why.reason}"
        return
    num_parts = sum(run.slice is not None for run in plan.runs)
    fact = f"measure.partial_steps={setting_text}: {num_parts:,} of {counted(len(plan.runs), 'run')}"
    full_text = ""
    if any(run.is_screened for run in plan.runs):
        full_text = "; the best of each cell and those near it are measured in full, too"
    yield f"{fact} {are(num_parts)} screened by parts of steps{full_text}"
    if num_two_starts := sum(run.has_two_starts for run in plan.runs):
        kernel_text = f"kernel {config.kernel.name} runs steps of one size"
        starts_text = f"{num_two_starts:,} of them start" if num_two_starts > 1 else "1 of them starts"
        yield f"{starts_text} twice, once for each number of micro-batches: {kernel_text}"
    if prices := [run.dear_two_starts for run in plan.runs if run.dear_two_starts]:
        nearest = min(prices, key=lambda price: price.two_starts_s / price.whole_s)
        full_text = f"{len(prices):,} {are(len(prices))} measured in full"
        yield f"{full_text}, since two starts would take no less; the nearest: {nearest.text}"
    yield from _whole_step_lines(plan)
    if config.measure.partial_steps is None:
        yield "to measure every run in full, add measure.partial_steps=off"


def _whole_step_lines(plan: Plan) -> Iterator[str]:
    """A line for each rule by which no parts of steps stand for some runs."""
    reasons_by_rule = defaultdict[tuple[bool, str], list[str]](list)
    for run in plan.runs:
        if run.whole_steps and not run.dear_two_starts:
            reasons_by_rule[run.few_steps, run.whole_steps.rule].append(run.whole_steps.reason)
    num_steps_text = counted(plan.config.measure.few_steps.min_steps, "whole step")
    for (few_steps, _), reasons in sorted(reasons_by_rule.items(), key=lambda item: -len(item[1])):
        how_text = f"screened by {num_steps_text}" if few_steps else "measured in full"
        reason_text = f": {reasons[0]}" if len({*reasons}) == 1 else f", the first since {reasons[0]}"
        yield f"{len(reasons):,} {are(len(reasons))} {how_text}{reason_text}"
    if any(len({*reasons}) > 1 for reasons in reasons_by_rule.values()):
        yield "to have the reason of each: ultrabench sweep plan -o FILE.parquet (column whole_reason)"
