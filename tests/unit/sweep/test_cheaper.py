"""What a sweep costs with other settings, how long it takes, and which sweep fits a budget."""

import math
import re
from dataclasses import replace

import pytest

from tests.configs import refused
from tests.unit.allocations import PLAN, told
from ultrabench.errors import ConfigError
from ultrabench.result import Status
from ultrabench.store.events import Launched
from ultrabench.store.state import SweepState
from ultrabench.sweep.config.compose import with_overrides
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running import budget, cheaper
from ultrabench.sweep.running.price import price_of, with_unmeasured_cores
from ultrabench.sweep.running.schedule import schedule

GRID = [
    "launcher=slurm",
    "hardware=h100x8",
    "model=llama3-8b",
    "sweep.nodes=[1,2]",
    "sweep.tp=[1,2]",
    "sweep.pp=[1,2]",
]
ASKED = make_plan(load_config(GRID))
PRICE = price_of(ASKED)
NEW = SweepState()


@pytest.mark.parametrize(
    ("asked", "count"), [([], 7), (["sweep.strategy=adaptive", "repeats=2"], 5),
        (["measure=quick", "sweep.gbs=[128,256]"], 5), (["measure.partial_steps=auto"], 6)]
)  # fmt: skip
def test_a_saving_is_what_planning_with_its_overrides_says(asked, count):
    plan = make_plan(load_config([*GRID, *asked]))
    price = price_of(plan)
    all_savings = cheaper.savings(plan, price, NEW)
    assert len(all_savings) == count
    for saving in all_savings:
        planned = price_of(make_plan(load_config(with_overrides([*GRID, *asked], saving.overrides))))
        assert saving.price.gpu_hours == pytest.approx(planned.gpu_hours, rel=1e-3)
        assert saving.share == pytest.approx(1 - planned.gpu_hours / price.gpu_hours, abs=1e-3)
        assert saving.share >= cheaper.MIN_SAVING
    shares = [saving.share for saving in all_savings if saving.losses]
    assert shares == sorted(shares, reverse=True)
    assert shares


def test_parts_that_cost_more_than_whole_steps_have_these_among_the_savings():
    """With short steps a further start in full costs more than parts save."""
    overrides = [
        "hardware=cpu",
        "model=tiny",
        "sweep.gbs=128",
        "sweep.nodes=[1]",
        "sweep.mbs=[1,2]",
        "sweep.gas=null",
    ]
    plan = make_plan(load_config([*overrides, "measure.partial_steps=[16,40]"]))
    saving_by_overrides = {saving.overrides: saving for saving in cheaper.savings(plan, price_of(plan), NEW)}
    whole_saving, parts_saving = (
        saving_by_overrides[f"measure.partial_steps={value}",] for value in ("off", "auto")
    )
    assert (whole_saving.losses, parts_saving.losses) == ((), (cheaper.PARTS_LOSS,))
    at_once = price_of(make_plan(load_config([*overrides, "measure.partial_steps=off"])))
    assert whole_saving.price.gpu_hours == pytest.approx(at_once.gpu_hours)


def test_a_sweep_that_has_begun_keeps_its_batch_and_saves_of_what_is_left():
    begun = SweepState(launched=Launched(generation=1, config=ASKED.config.resolved))
    for run in ASKED.runs[:5]:
        told(begun, run, Status.OK, step_times_s=(3 * run.prediction.step_time_s,) * 6)
    all_savings = cheaper.savings(ASKED, price_of(ASKED, begun), begun)
    assert not any("gbs" in override for saving in all_savings for override in saving.overrides)
    brief = next(saving for saving in all_savings if saving.overrides[0].startswith("measure.warmup"))
    config = load_config([*GRID, *brief.overrides])
    assert brief.price.gpu_hours == pytest.approx(price_of(make_plan(config), begun).gpu_hours, rel=1e-3)
    assert cheaper.savings(ASKED, replace(PRICE, jobs=()), NEW) == []


@pytest.mark.parametrize("hours", [2.0, 5.0, 8.0, 20.0, 40.0, 1000.0])
def test_a_proposal_is_done_within_the_budget_even_if_steps_are_slow(hours):
    choice = budget.proposal(ASKED, NEW, hours)
    assert price_of(choice.plan).gpu_hours == pytest.approx(choice.price.gpu_hours)
    assert choice.price.interval[1] <= hours
    cells = {run.cell for run in ASKED.runs}
    left_out = [loss for loss in choice.unknown if loss.startswith("anything about")]
    assert bool(left_out) == ({run.cell for run in choice.plan.runs} != cells)
    if choice.num_layouts:
        assert "fastest" in choice.known
        assert choice.plan.config.axes.listed
    config = load_config([*GRID, *choice.overrides])
    assert choice.plan.config.measure == config.measure


def test_more_hours_never_say_less():
    def value(hours):
        choice = budget.proposal(ASKED, NEW, hours)
        return len(choice.plan.cells), choice.num_layouts or math.inf, -len(choice.unknown)

    values = [value(hours) for hours in (2, 3, 4, 6, 9, 14, 20, 30, 45, 70, 100, 1000)]
    assert values == sorted(values)
    assert values[-1] == (2, math.inf, 0), "the sweep as it was asked for"


def test_less_than_the_cheapest_useful_sweep_is_refused_with_its_price():
    line = (
        r"^--max-gpu-hours 0.1: the cheapest useful sweep, dp\d.* of llama3-8b on 1 node, "
        r"takes [\d.]+ GPU hours .*; give at least ([\d.]+)$"
    )
    with refused(match=line):
        budget.proposal(ASKED, NEW, 0.1)
    with pytest.raises(ConfigError) as raised:
        budget.proposal(ASKED, NEW, 0.1)
    least = float(re.search(line, str(raised.value))[1])
    assert len(budget.proposal(ASKED, NEW, least).plan.runs) == 1
    with pytest.raises(ConfigError):
        budget.proposal(ASKED, NEW, 0.98 * least)
    with refused("50 are used, and the cheapest useful sweep"):
        budget.proposal(ASKED, NEW, 50, used_gpu_hours=50)


def wall_clock_s(*arguments, **limits):
    return schedule(*arguments, **limits).end_s


def test_jobs_share_the_nodes_that_the_limits_allow():
    jobs = PRICE.jobs
    seconds = [3600 * job.gpu_hours / (8 * job.nodes) for job in jobs]
    assert len(jobs) > 3
    assert wall_clock_s(jobs, 8, max_jobs=1) == pytest.approx(sum(seconds))
    assert wall_clock_s(jobs, 8, max_jobs=1000) == pytest.approx(max(seconds))
    assert wall_clock_s(jobs, 8, max_jobs=1000, max_nodes=1) == pytest.approx(sum(seconds)), (
        "the larger ones run alone"
    )
    by_cell = {}
    for job, job_s in zip(jobs, seconds, strict=True):
        cell = job.attempts[-1].candidate.cell
        by_cell[cell] = by_cell.get(cell, 0.0) + job_s
    assert wall_clock_s(jobs, 8, max_jobs=1000, one_by_one=True) == pytest.approx(max(by_cell.values()))
    some = wall_clock_s(jobs, 8, max_jobs=2)
    assert sum(seconds) / 2 <= some < sum(seconds)
    assert schedule((), 8, max_jobs=2) == (0.0, 0)
    assert schedule(jobs, 8, max_jobs=1000).most_nodes == sum(job.nodes for job in jobs)
    assert schedule(jobs, 8, max_jobs=1).most_nodes == max(job.nodes for job in jobs) == 2
    assert schedule(jobs, 8, max_jobs=1000, max_nodes=3).most_nodes <= 3


def test_the_price_of_a_machine_that_is_not_measured_holds_for_slow_and_fast_cores():
    guessed = price_of(PLAN)
    price = with_unmeasured_cores(guessed, PLAN, NEW, cores=8)
    assert price.gpu_hours == guessed.gpu_hours
    for rate, cores in ((1e9, 1), (3e9, 2), (5e10, 2), (1e11, 8)):
        measured = price_of(make_plan(PLAN.config, core_flops_per_s=rate, cores=cores))
        assert price.interval[0] <= measured.interval[0] <= measured.interval[1] <= price.interval[1]
    assert sum(job.interval[1] for job in price.jobs) == pytest.approx(price.interval[1])


ONCE, FEW_STEPS = ("measure.confirm=1",), ("measure.warmup_steps=2", "measure.max_steps=8")


@pytest.mark.parametrize("strategy", ["exhaustive", "adaptive"])
def test_a_budget_gives_up_no_more_than_it_must(strategy):
    """Whichever of two savings alone is enough is taken alone, the one that costs less knowledge first."""
    plan = make_plan(load_config([*GRID, f"sweep.strategy={strategy}"]))
    ends = [
        price_of(make_plan(load_config([*GRID, f"sweep.strategy={strategy}", *overrides]))).interval[1]
        for overrides in ((), ONCE, FEW_STEPS, (*ONCE, *FEW_STEPS))
    ]
    assert ends == sorted(ends, reverse=True)
    proposals = [budget.proposal(plan, NEW, 1.001 * end).overrides for end in ends]
    assert [{*overrides} for overrides in proposals] == [{*()}, {*ONCE}, {*FEW_STEPS}, {*ONCE, *FEW_STEPS}]
    few = budget.proposal(plan, NEW, 0.9 * ends[-1])
    assert few.num_layouts or few.plan.config.strategy != strategy
    # A list of layouts is measured by whole steps, whatever the sweep that was asked for.
    assert {run.is_screened for run in few.plan.runs} == {few.plan.config.strategy == "adaptive"}


def test_a_proposal_says_which_cells_have_no_layout_that_fits():
    grid = ["sweep.models=[llama3-8b,llama3-70b]", *(word for word in GRID if not word.startswith("model="))]
    plan = make_plan(load_config([*grid, "sweep.zero_stage=[3]", "max_p_oom=1"]))
    lost = {f"llama3-70b on {nodes}" for nodes in ("1 node", "2 nodes")}
    assert not any(run.shape.name == "llama3-70b" for run in plan.runs if run.fits)
    for hours in (4.0, 1000.0):
        *_, loss = budget.proposal(plan, NEW, hours).unknown
        assert loss.startswith("anything about ")
        assert loss.endswith(", where no layout is likely to fit")
        assert {*loss.removeprefix("anything about ").partition(",")[0].split("; ")} == lost
