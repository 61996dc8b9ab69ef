"""Finds the sweep that says most within a number of GPU hours, and what will be known after it and what will not."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ultrabench.column import GPU_HOURS
from ultrabench.errors import ConfigError, counted
from ultrabench.layout import Layout
from ultrabench.store.state import SweepState
from ultrabench.sweep.best_runs import expected_rate_of
from ultrabench.sweep.candidate import Candidate, CellKey, advised, cell_columns, cell_label
from ultrabench.sweep.config.listed_layouts import read_layouts, values_of_layouts
from ultrabench.sweep.config.sweep_config import Axes, SweepConfig
from ultrabench.sweep.config.sweep_file import entries_of
from ultrabench.sweep.plan import Plan, ReportProgress, planned_cells, with_strategy
from ultrabench.sweep.predict.search import MIN_CHANCE, MIN_GAIN
from ultrabench.sweep.running.cheaper import (
    PARTS_LOSS,
    Change,
    changed_in_turn,
    measured_briefly,
    measured_once,
    searched_adaptively,
)
from ultrabench.sweep.running.price import Price, price_of
from ultrabench.sweep.similar_layouts import groups_of
from ultrabench.variant import CELL_OPTIONS

NUMS_OF_LAYOUTS = (64, 48, 32, 24, 16, 12, 8, 6, 5, 4, 3, 2, 1)
"""Numbers of layouts of each cell that are tried, the largest first."""
MAX_NAMED_CELLS = 4
"""Number of cells without a run that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A sweep that fits a budget."""

    plan: Plan
    price: Price
    overrides: tuple[str, ...]
    """The overrides with which it differs from the sweep that was asked for, without its layouts."""
    num_layouts: int | None
    """Number of layouts of each cell that it lists; None where it has the axes that were asked for."""
    known: str
    """What it will say, in words that follow `you will know`."""
    unknown: tuple[str, ...]
    """What it will not say, in words that follow `you will not know`."""
    given_up: tuple[CellKey, ...] = ()
    """Cells of the sweep that was asked for of which it has no run, because the budget is too small."""

    @property
    def gpu_hours(self) -> float:
        """The GPU hours in which it is done even if all steps are as slow as their intervals allow."""
        return self.price.interval[1]


def proposal(
    plan: Plan,
    state: SweepState,
    max_gpu_hours: float,
    used_gpu_hours: float = 0.0,
    report_progress: ReportProgress = lambda done, total: None,
) -> Proposal:
    """The sweep that says most of those that are done within `max_gpu_hours`, also with slow steps.

    The sweep that was asked for comes first, then searches, then lists of layouts: a search with short runs says more
    than full measurements of a few layouts. Cells are given up last, because then a part of the question has no answer.
    Of each of these, the most exact measurements that fit are taken.

    Args:
        max_gpu_hours: GPU hours of the whole sweep.
        used_gpu_hours: those that the sweep has used before.
        report_progress: called with the number of cells whose adaptive search is foreseen, and of all.

    Raises:
        ConfigError: the cheapest sweep that says anything takes more.
    """
    cheapest: Proposal | None = None
    fitting_cells = {run.cell for run in plan.runs if run.fits}
    unfit_cells = [cell for _, cell in planned_cells(plan.config) if cell not in fitting_cells]
    for choice in _choices(plan, state, report_progress):
        if used_gpu_hours + choice.gpu_hours <= max_gpu_hours:
            given_up = tuple(cell for cell in choice.given_up if cell in fitting_cells)
            losses = (
                *_losses_of_cells(plan.config, given_up),
                *_losses_of_cells(plan.config, unfit_cells, ", where no layout is likely to fit"),
            )
            return replace(choice, unknown=(*choice.unknown, *losses), given_up=given_up)
        cheapest = choice if cheapest is None or choice.gpu_hours < cheapest.gpu_hours else cheapest
    assert cheapest is not None
    run, (low, high) = cheapest.plan.runs[0], map(GPU_HOURS.bare_text, cheapest.price.interval)
    used_text = f"{GPU_HOURS.bare_text(used_gpu_hours)} are used, and " if used_gpu_hours else ""
    fact = f"{used_text}the cheapest useful sweep, {run.spec.label()} of {cell_label(run.cell)}, takes"
    hours_text = f"{GPU_HOURS.brief_text(cheapest.price.gpu_hours)} ({low} to {high})"
    remedy = f"give at least {_rounded_up(used_gpu_hours + cheapest.gpu_hours)}"
    raise ConfigError(f"--max-gpu-hours {max_gpu_hours:g}: {fact} {hours_text}", remedy)


def _rounded_up(gpu_hours: float) -> str:
    """The smallest number of three digits that is not below `gpu_hours`."""
    digits = 2 - math.floor(math.log10(gpu_hours))
    return f"{math.ceil(gpu_hours * 10**digits) / 10**digits:g}"


def _choices(plan: Plan, state: SweepState, report_progress: ReportProgress) -> Iterator[Proposal]:
    """The sweeps that can be proposed, the one that says most first."""
    asked = Change(overrides=(), plan=plan, losses=())
    for grid in map(_with_losses_of_parts, _grids(asked)):
        known, searched_ids = _known_of_grid(grid.plan), None
        for change in _less_exact(grid):
            price = price_of(change.plan, state, searched_ids=searched_ids, report_progress=report_progress)
            searched_ids = price.searched_ids if change.plan.config.strategy == "adaptive" else None
            yield Proposal(
                plan=change.plan, price=price, overrides=change.overrides, num_layouts=None,
                known=known, unknown=change.losses,
            )  # fmt: skip
    layouts_by_cell = {cell: _best_layouts(runs) for cell, runs in plan.cells.items()}
    shortlists = [*_less_exact(_shortlist(asked, layouts_by_cell))]
    most = max(map(len, layouts_by_cell.values()))
    for num_layouts in (count for count in NUMS_OF_LAYOUTS if count <= most):
        chosen = {cell: layouts[:num_layouts] for cell, layouts in layouts_by_cell.items()}
        yield from _lists(shortlists, state, chosen, num_layouts)
    best_by_cell = {cell: layouts[:1] for cell, layouts in layouts_by_cell.items()}
    hours_by_cell = {
        cell: next(_lists(shortlists[-1:], state, {cell: layouts}, 1)).gpu_hours
        for cell, layouts in best_by_cell.items()
    }
    cells = sorted(best_by_cell, key=hours_by_cell.__getitem__)
    for num_cells in range(len(cells) - 1, 0, -1):
        chosen = {cell: best_by_cell[cell] for cell in cells[:num_cells]}
        yield from _lists(shortlists, state, chosen, 1)


def _grids(asked: Change) -> Iterator[Change]:
    """The sweep that was asked for, and the search among its runs."""
    yield asked
    if search := searched_adaptively(asked.plan):
        yield search


def _with_losses_of_parts(grid: Change) -> Change:
    """The change with what parts of steps do not say, where runs are screened by them."""
    if not any(run.slice for run in grid.plan.runs):
        return grid
    return replace(grid, losses=(*grid.losses, PARTS_LOSS))


def _less_exact(change: Change) -> Iterator[Change]:
    """The runs of a change measured in four ways, the most exact first: unchanged, measured once, fewer steps, both."""
    for other in (change, *changed_in_turn(change, (measured_briefly,))):
        yield from (other, *changed_in_turn(other, (measured_once,)))


def _shortlist(change: Change, layouts_by_cell: Mapping[CellKey, Sequence[Layout]]) -> Change:
    """The sweep with these layouts alone, of which lists are made; all of them are measured."""
    sets_by_cell = {cell: frozenset(layouts) for cell, layouts in layouts_by_cell.items()}
    runs = tuple(run for run in change.plan.runs if run.layout in sets_by_cell[run.cell])
    return replace(change, plan=with_strategy(replace(change.plan, candidates=runs), "exhaustive"))


def _known_of_grid(plan: Plan) -> str:
    """What a sweep of all these runs will say, or a search among them."""
    cells, runs_text = [*plan.cells], counted(len(plan.runs), "run")
    best_text = f"the fastest layout of each cell, of {runs_text} in {len(cells)} cells"
    if len(cells) == 1:
        best_text = f"the fastest layout of {runs_text} {_cells_text(cells, plan.config)}"
    if plan.config.strategy == "adaptive":
        chance_text = f"a {MIN_CHANCE:.0%} chance"
        if any(run.is_screened for run in plan.runs):
            chance_text = f"{chance_text}, and less where it is cheap to screen,"
        end_text = f"every other one has less than {chance_text} to be {MIN_GAIN:.0%} faster"
        return f"{best_text}: a search ends when {end_text}"
    return f"{best_text}, and what each axis costs (sweep effects)"


def _cells_text(cells: Sequence[CellKey], config: SweepConfig) -> str:
    """Where something is known: the name of a single cell, else the number of cells."""
    if len(cells) == 1:
        return f"for {cell_label(cells[0], _columns_of(config))}"
    return f"in each of {counted(len(cells), 'cell')}"


def _columns_of(config: SweepConfig) -> list[str]:
    """The names that tell the cells of a sweep apart."""
    return cell_columns(cell for _, cell in planned_cells(config))


def _best_layouts(runs: Sequence[Candidate]) -> list[Layout]:
    """The best layouts of the groups of similar ones of a cell that are advised, in the order of what is
    expected of them; else the likeliest one to fit.
    """
    advised_runs = sorted(advised(runs), key=expected_rate_of, reverse=True)
    layouts = dict[Layout, None]()
    for group in groups_of(advised_runs):
        layouts[group[0].layout] = None
        if len(layouts) == NUMS_OF_LAYOUTS[0]:
            break
    return [*layouts] or [min(runs, key=lambda run: run.prediction.p_oom).layout]


def _lists(
    shortlists: Iterable[Change],
    state: SweepState,
    layouts_by_cell: Mapping[CellKey, Sequence[Layout]],
    num_layouts: int,
) -> Iterator[Proposal]:
    """The sweeps of these layouts alone, one for each of `shortlists`, which measure the same runs differently."""
    axes: Axes | None = None
    for shortlist in shortlists:
        plan = shortlist.plan
        runs = tuple(run for run in plan.runs if run.layout in layouts_by_cell.get(run.cell, ()))
        axes = axes or _listed_axes(runs)
        chosen_plan = replace(plan, config=_listing(plan.config, runs, axes), candidates=runs)
        cells_of_fitting = {run.cell for run in runs if run.fits}
        known_cells = [cell for cell in layouts_by_cell if cell in cells_of_fitting] or [*layouts_by_cell]
        cells_text = _cells_text(known_cells, plan.config)
        known = f"which of up to {num_layouts} layouts that are not similar is the fastest, {cells_text}"
        if num_layouts == 1:
            known = f"how fast the layout predicted fastest is, {cells_text}"
        others_text = "another layout" if len(runs) == 1 else f"a layout outside these {len(runs):,} runs"
        yield Proposal(
            plan=chosen_plan,
            price=price_of(chosen_plan, state),
            overrides=shortlist.overrides,
            num_layouts=num_layouts,
            known=known,
            unknown=(f"whether {others_text} is faster", *shortlist.losses),
            given_up=tuple(cell for cell in plan.cells if cell not in layouts_by_cell),
        )


def _losses_of_cells(config: SweepConfig, cells: Sequence[CellKey], cause: str = "") -> Iterator[str]:
    """What is not known where these cells of a sweep have no run."""
    columns = _columns_of(config)
    names = [cell_label(cell, columns) for _, cell in planned_cells(config) if cell in cells]
    more_text = ""
    if (num_more := len(names) - MAX_NAMED_CELLS) > 0:
        more_text = f" and {counted(num_more, 'more cell')} (those without runs in the table)"
    if names:
        yield f"anything about {'; '.join(names[:MAX_NAMED_CELLS])}{more_text}{cause}"


def _listed_axes(runs: Sequence[Candidate]) -> Axes:
    """The axes of a sweep that lists the layouts of `runs`, as a sweep file that is written for them."""
    listed = read_layouts(entries_of(runs), ())
    nodes = tuple(sorted({run.nodes for run in runs}))
    return Axes(nodes=nodes, layout=values_of_layouts(listed), listed=listed)


def _listing(config: SweepConfig, runs: Sequence[Candidate], axes: Axes) -> SweepConfig:
    """The configuration of a sweep with these axes, which list the layouts of `runs`."""
    cells = {run.cell for run in runs}
    models = {cell.model for cell in cells}
    cell_values = {
        option: tuple(sorted({getattr(cell, option) for cell in cells})) for option in CELL_OPTIONS
    }
    return replace(
        config,
        axes=axes,
        models=tuple(shape for shape in config.models if shape.name in models),
        options=replace(config.options, values={**config.options.values, **cell_values}),
        workload=replace(config.workload, seq_len=cell_values["seq_len"][0], gbs=cell_values["gbs"][0]),
        strategy="exhaustive",
        scaling="strong",
        max_runs=None,
    )
