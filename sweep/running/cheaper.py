"""Settings with which a sweep costs less, what each costs in knowledge, and the plan of the sweep that has it."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ultrabench.errors import ConfigError, counted
from ultrabench.measure import Measure, PartialSteps
from ultrabench.store.state import SweepState
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.partial_steps import partial_steps_of
from ultrabench.sweep.plan import (
    MIN_PARALLEL_CANDIDATES,
    Plan,
    ReportProgress,
    make_plan,
    run_order,
    with_strategy,
)
from ultrabench.sweep.running.price import Price, price_of, with_step_factor, within_limit

FEW_STEPS = {"warmup_steps": 2, "min_steps": 6, "max_steps": 8}
"""Settings of `measure` with which runs are short; an interval needs 6 steps."""
MIN_SAVING = 0.05
"""Share of the price from which a setting is named."""
MAX_BATCH_DIVISOR = 4
"""Largest divisor of the batch that is tried: with much smaller ones, other layouts become the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a sweep that makes it cheaper."""

    overrides: tuple[str, ...]
    """The overrides that make it."""
    plan: Plan
    """The plan of the changed sweep."""
    losses: tuple[str, ...]
    """What the changed sweep does not say, in words that follow `you will not know`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What one change, or several together, save of the price of a sweep."""

    overrides: tuple[str, ...]
    price: Price
    """The price of the changed sweep."""
    share: float
    """Saved share of the price."""
    losses: tuple[str, ...]
    """What the changed sweep does not say; empty for changes that stand for themselves, too."""


def searched_adaptively(plan: Plan) -> Change | None:
    """Only runs that may still be the fastest; None where a sweep is so anyway, or has nothing to search."""
    config = plan.config
    if config.strategy == "adaptive" or not config.kernel.trains or not config.kernel.is_predictable:
        return None
    loss = (
        "what each axis costs (sweep effects), since only layouts that may still be the fastest are measured"
    )
    return Change(
        overrides=("sweep.strategy=adaptive",), plan=with_strategy(plan, "adaptive"), losses=(loss,)
    )


def measured_once(plan: Plan) -> Change | None:
    """One measurement of each run, also of the fastest ones; None where a sweep makes no others."""
    config = plan.config
    values = {"repeats": config.repeats, "measure.confirm": config.measure.confirm}
    overrides = tuple(f"{key}=1" for key, value in values.items() if value > 1)
    if not overrides:
        return None
    config = replace(config, repeats=1, measure=replace(config.measure, confirm=1))
    loss = "which of two close layouts is faster on other nodes, since each is measured in one job"
    return Change(overrides=overrides, plan=replace(plan, config=config), losses=(loss,))


def measured_briefly(plan: Plan) -> Change | None:
    """Fewer steps of each run; None where runs are as short anyway, or may not be."""
    measure = plan.config.measure
    values: dict[str, Any] = {
        name: value for name, value in FEW_STEPS.items() if getattr(measure, name) > value
    }
    if not values or not plan.config.kernel.trains:
        return None
    try:
        new_measure = replace(measure, **values)
    except ConfigError:  # measure.loss_step is later
        return None
    loss = f"small differences of speed, since {new_measure.max_steps} measured steps give wider intervals"
    return Change(
        overrides=tuple(f"measure.{name}={value}" for name, value in values.items()),
        plan=_with_measure(plan, new_measure),
        losses=(loss,),
    )


def _with_measure(plan: Plan, measure: Measure) -> Plan:
    """The plan of a sweep that measures runs otherwise, which changes their durations alone."""
    old_measure = plan.config.measure

    def run_with_measure(run: Candidate) -> Candidate:
        if not run.fits:
            return run
        prediction, step_time_s = run.prediction, run.prediction.step_time_s
        saved_s = run.priced_s(old_measure, step_time_s) - run.priced_s(measure, step_time_s)
        run = replace(run, predicted=replace(prediction, duration_s=prediction.duration_s - saved_s))
        return with_step_factor(run, run.step_factor, measure)

    runs = sorted(map(run_with_measure, plan.runs), key=run_order)
    others = (c for c in plan.candidates if not c.runs)
    return replace(plan, config=replace(plan.config, measure=measure), candidates=(*runs, *others))


PARTS_LOSS = (
    "the exact speed, losses and power of layouts that are not near the best, whose steps are extrapolated"
)
"""What a sweep by parts of steps does not say, in words that follow `you will not know`."""


def screened_by_parts(plan: Plan) -> Change | None:
    """Parts of steps of each run, and whole steps of the fastest ones; None where runs are so anyway, or have no parts.

    The parts are predicted anew, so a plan that takes long has none.
    """
    new_plan = _with_partial_steps(plan, "auto")
    if new_plan is None or not any(run.slice for run in new_plan.runs):
        return None
    return Change(overrides=("measure.partial_steps=auto",), plan=new_plan, losses=(PARTS_LOSS,))


def measured_whole(plan: Plan) -> Change | None:
    """Whole steps of each run at once: where steps are short, they take less than parts and a further start in full."""
    new_plan = _with_partial_steps(plan, "off")
    if new_plan is None:
        return None
    return Change(overrides=("measure.partial_steps=off",), plan=new_plan, losses=())


def _with_partial_steps(plan: Plan, value: PartialSteps) -> Plan | None:
    """The plan with another value of measure.partial_steps; None where it has this value, or takes long to make."""
    config = plan.config
    if partial_steps_of(config) == value or len(plan.candidates) >= MIN_PARALLEL_CANDIDATES:
        return None
    changed = replace(config, measure=replace(config.measure, partial_steps=value))
    try:
        return within_limit(make_plan(changed, core_flops_per_s=plan.core_flops_per_s, cores=plan.cores))
    except ConfigError:  # no job is long enough for a start in full
        return None


def on_fewer_nodes(plan: Plan) -> Change | None:
    """The sweep without its largest number of nodes; None where it has one alone, or chooses runs among all cells."""
    config, node_counts = plan.config, sorted({*plan.config.axes.nodes})
    left_counts = tuple(node_counts[:-1])
    candidates = tuple(c for c in plan.candidates if c.nodes in left_counts)
    if config.max_runs is not None or config.axes.listed or not any(c.runs for c in candidates):
        return None
    config = replace(config, axes=replace(config.axes, nodes=left_counts))
    return Change(
        overrides=(f"sweep.nodes=[{','.join(map(str, left_counts))}]",),
        plan=replace(plan, config=config, candidates=candidates),
        losses=(f"anything about {counted(node_counts[-1], 'node')}",),
    )


def with_smaller_batch(plan: Plan) -> Change | None:
    """The sweep with a half or a quarter of its global batch, if that is one sequence for each GPU or more.

    Its layouts are predicted anew, so a plan that takes long has none.
    """
    config, all_gbs = plan.config, plan.config.options.values["gbs"]
    num_gpus = max(config.axes.nodes) * config.hardware.gpus_per_node
    if len(all_gbs) > 1 or not config.kernel.trains or len(plan.candidates) >= MIN_PARALLEL_CANDIDATES:
        return None
    for divisor in (MAX_BATCH_DIVISOR, MAX_BATCH_DIVISOR // 2):
        gbs = all_gbs[0] // divisor
        if gbs * divisor != all_gbs[0] or gbs < num_gpus:
            continue
        options = replace(config.options, values={**config.options.values, "gbs": (gbs,)})
        try:
            changed = replace(config, options=options, workload=replace(config.workload, gbs=gbs))
            new_plan = within_limit(
                make_plan(changed, core_flops_per_s=plan.core_flops_per_s, cores=plan.cores)
            )
        except ConfigError:  # the values of axes, or listed layouts, do not divide it
            continue
        if len({run.cell.nodes for run in new_plan.runs}) == len({run.cell.nodes for run in plan.runs}):
            loss = (
                f"which layout is the fastest with gbs={all_gbs[0]}, where pipelines have more micro-batches"
            )
            return Change(overrides=(f"sweep.gbs={gbs}",), plan=new_plan, losses=(loss,))
    return None


SAME_QUESTION: tuple[Callable[[Plan], Change | None], ...] = (
    searched_adaptively,
    measured_once,
    measured_briefly,
)
"""The changes after which a sweep still has all its cells."""
PricedChange = tuple[Change, Price]
"""A change and the price of the sweep that has it."""


def savings(
    plan: Plan,
    price: Price,
    state: SweepState,
    max_limit_s: float = math.inf,
    report_progress: ReportProgress = lambda done, total: None,
) -> list[Saving]:
    """What the changes save that help most, the largest saving first; those that ask the same question together, too.

    Args:
        price: the price of `plan`.
        max_limit_s: the longest time limit of a job that the site allows.
        report_progress: called with the number of cells whose adaptive search is foreseen, and of all.
    """
    if not price.jobs:
        return []
    of_parts = [screened_by_parts, measured_whole]
    changes = [*SAME_QUESTION, *of_parts, on_fewer_nodes]
    changes += [] if state.launched else [with_smaller_batch]  # another batch is another sweep
    priced_changes = list[PricedChange]()
    for change_of in changes:
        if change := change_of(plan):
            is_new_search = change_of in (with_smaller_batch, *of_parts)
            is_same_search = plan.config.strategy == "adaptive" and not is_new_search
            new_price = price_of(
                change.plan,
                state,
                max_limit_s,
                searched_ids=price.searched_ids if is_same_search else None,
                report_progress=report_progress,
            )
            priced_changes.append((change, new_price))
    all_savings = [
        Saving(
            overrides=change.overrides,
            price=new_price,
            share=_saved_share(price, new_price),
            losses=change.losses,
        )
        for change, new_price in priced_changes
    ]
    helpful = sorted(
        (saving for saving in all_savings if saving.share >= MIN_SAVING), key=lambda saving: -saving.share
    )
    together = _together(plan, priced_changes, price, state, max_limit_s)
    is_more = together is not None and sum(o in together.overrides for s in helpful for o in s.overrides) > 1
    return [*helpful, *([together] if together and is_more else [])]


def changed_in_turn(
    change: Change, next_changes: Iterable[Callable[[Plan], Change | None]]
) -> Iterator[Change]:
    """The sweep after a change and the first of the next ones, then after the first two of these, and so on."""
    for change_of in next_changes:
        if next_change := change_of(change.plan):
            change = Change(
                overrides=(*change.overrides, *next_change.overrides),
                plan=next_change.plan,
                losses=(*change.losses, *next_change.losses),
            )
            yield change


def _together(
    plan: Plan, priced_changes: Sequence[PricedChange], price: Price, state: SweepState, max_limit_s: float
) -> Saving | None:
    """What all changes save together after which a sweep still has all its cells."""
    unchanged = Change(overrides=(), plan=plan, losses=())
    # A search is taken from those that are priced, because parts of steps are predicted for it.
    changes = (change for change, _ in priced_changes)
    search = next((c for c in changes if c.plan.config.strategy != plan.config.strategy), unchanged)
    *_, combined = search, *changed_in_turn(search, SAME_QUESTION)
    if combined is unchanged:
        return None
    searched_ids = next(
        (new_price.searched_ids for _, new_price in priced_changes if new_price.searched_ids), None
    )
    is_search = combined.plan.config.strategy == "adaptive"
    new_price = price_of(combined.plan, state, max_limit_s, searched_ids=searched_ids if is_search else None)
    return Saving(
        overrides=combined.overrides, price=new_price, share=_saved_share(price, new_price), losses=()
    )


def _saved_share(price: Price, new_price: Price) -> float:
    return 1 - new_price.gpu_hours / price.gpu_hours
