"""A search by bounds names the same groups as the predictions of all candidates, and explains a cell without any."""

import random
from itertools import islice

import pytest

from ultrabench.layout import AXES
from ultrabench.sweep.best_runs import cell_search, tokens_per_s_per_gpu
from ultrabench.sweep.candidate import advised, expected_rate
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan, planned_cells
from ultrabench.sweep.predict.predict import ADVISED_P_OOM
from ultrabench.sweep.recommend import recommendation
from ultrabench.sweep.remedy import nothing_fits
from ultrabench.sweep.similar_layouts import groups_of

pytestmark = pytest.mark.usefixtures("alone")

PLACES = 3


def config_of(*overrides):
    batch = [] if any(override.startswith("sweep.gbs=") for override in overrides) else ["sweep.gbs=256"]
    return load_config(["sweep=recommend", *batch, *overrides])


def best_of_all(plan):
    """The best groups of a cell as the predictions of all its candidates give them."""
    return [*islice(groups_of(sorted(advised(plan.runs), key=rate_of, reverse=True)), PLACES)]


def rates(groups):
    """The expected rates of the runs of each group; runs of equal rates have no order."""
    return [[rate_of(run) for run in group] for group in groups]


def rate_of(run):
    """The expected rate of a run, by which runs are ranked."""
    return expected_rate(tokens_per_s_per_gpu(run.spec, run.prediction.step_time_s), run.prediction.p_oom)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=llama3-8b", "sweep.tp=[1,2]", "sweep.cp=[1,2]", "sweep.mbs=[1,2]"],
        ["model=llama3-8b", "sweep.nodes=[4]", "sweep.pp=[1,4]", "sweep.cp=[1]", "sweep.mbs=[1]",
            "kernel.precision=fp8"],
        ["model=llama3-70b", "sweep.nodes=[2]", "sweep.pp=[1,2,4]", "sweep.cp=[1]", "sweep.mbs=[1]"],
        ["model=mixtral-8x7b", "sweep.nodes=[4]", "sweep.pp=[1,2]", "sweep.cp=[1]", "sweep.mbs=[1]", "sweep.tp=[1]"],
        ["model=llama3-8b", "profile=nanotron", "kernel.compile=[true,false]", "sweep.cp=[1]", "sweep.pp=[1,2]",
            "sweep.mbs=[2]"],
        # A single micro-batch accumulates no gradients, so it may need less memory than two smaller ones.
        ["model=qwen3-32b", "sweep.gbs=16", "sweep.tp=[1]", "sweep.cp=[1]", "sweep.mbs=[1,2]"],
        ["model=llama3-70b", "hardware=h200x8", "sweep.nodes=[2]", "sweep.gbs=64", "sweep.seq_len=512", "sweep.pp=[2]",
         "sweep.cp=[1]", "sweep.tp=[8]", "sweep.mbs=[1,3,8]", "kernel.precision=fp8"],
        ["model=qwen3-30b-a3b", "hardware=l40s-x8", "sweep.nodes=[2]", "sweep.gbs=16", "sweep.pp=[2,4]",
            "sweep.cp=[1,2]",
         "sweep.tp=[1,8]", "sweep.mbs=[1,3,4]"],
    ],
)  # fmt: skip
def test_a_search_names_the_layouts_that_are_best_of_all(overrides):
    config = config_of(*overrides)
    (place,) = planned_cells(config)
    recommended, best_groups = recommendation(config, PLACES, *place).groups, best_of_all(make_plan(config))
    assert [group[0].run_id for group in recommended] == [group[0].run_id for group in best_groups]
    assert rates(recommended) == rates(best_groups)
    assert recommended


TIGHT_CELLS = (
    ("qwen3-32b", "h100x8", 1), ("llama3-8b", "l40s-x8", 1), ("llama3-70b", "h200x8", 2), ("llama3-70b", "h100x8", 2),
    ("qwen3-30b-a3b", "l40s-x8", 2), ("mixtral-8x7b", "a100-80x8", 2),
)  # fmt: skip
"""Model, hardware and nodes of cells with hardly enough memory."""


def tight_cell(rng):
    """A small grid with hardly enough memory, at whose batch few micro-batches are accumulated."""
    model, hardware, nodes = rng.choice(TIGHT_CELLS)
    has_fp8 = model in ("qwen3-32b", "llama3-70b") and "a100" not in hardware
    choices = {
        "tp": [1, 2, 4, 8], "pp": [1, 2, 4], "cp": [1, 2, 4], "mbs": [1, 2, 3, 4, 6, 8],
        "recompute": ["none", "selective", "full"], "dp_shard": ["all", "node"], "dp_overlap": ['"on"', '"off"'],
    }  # fmt: skip
    values = {
        axis: sorted(rng.sample(choice, min(2 + (axis == "mbs"), len(choice))))
        for axis, choice in choices.items()
    }
    axes = [f"sweep.{axis}=[{','.join(map(str, listed))}]" for axis, listed in values.items()]
    batch = [f"sweep.gbs={rng.choice((16, 24, 48))}", f"sweep.seq_len={rng.choice((512, 2048, 8192))}"]
    precision = rng.choice(("bf16", "fp8")) if has_fp8 else "bf16"
    return [
        f"model={model}",
        f"hardware={hardware}",
        f"sweep.nodes=[{nodes}]",
        f"kernel.precision={precision}",
        *batch,
        *axes,
    ]


@pytest.mark.parametrize("seed", range(10))
def test_a_search_finds_the_best_of_any_cell_with_hardly_enough_memory(seed):
    config = config_of(*tight_cell(random.Random(seed)))
    (place,) = planned_cells(config)
    shape, cell = place
    recommended, plan = recommendation(config, PLACES, *place).groups, make_plan(config)
    assert rates(recommended) == rates(best_of_all(plan))
    least = cell_search(config, shape, cell).cell_plan.predictor.least_occupancy(shape, 8 * cell.nodes)
    occupancies = [c.prediction for c in plan.candidates if c.predicted]
    assert least.peak_bytes <= min(occupancy.peak_mem_bytes for occupancy in occupancies)
    assert least.p_oom <= min(occupancy.p_oom for occupancy in occupancies)


@pytest.mark.parametrize(
    "overrides", [["model=llama3-70b", "sweep.tp=[8]"], ["model=qwen3-32b", "sweep.zero_stage=[1]"]]
)
def test_a_plan_and_a_recommendation_give_the_same_remedy(overrides):
    config = config_of(*overrides, "sweep.mbs=[1,2]", "sweep.cp=[1]")
    ((shape, cell),) = planned_cells(config)
    reason = recommendation(config, 1, shape, cell).reason
    (line,) = nothing_fits(make_plan(config))
    assert reason.partition("; try ")[2] == line.partition("; try ")[2].strip()
    assert "sweep.nodes=[2]" in reason


def test_a_cell_in_which_only_the_reserve_has_no_room_still_names_a_layout():
    config = config_of("model=llama3-70b", "sweep.nodes=[2]", "sweep.tp=[8]", "sweep.pp=[1]")
    (cell,) = (recommendation(config, 1, *place) for place in planned_cells(config))
    best = cell.groups[0][0].prediction
    assert (best.memory_share > 1, best.p_oom <= ADVISED_P_OOM) == (True, True)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model=llama3-70b", "sweep.tp=[8]", "sweep.pp=[1]"], "try sweep.nodes=[2]"),
        (["model=llama3-8b", "sweep.tp=[1]", "sweep.pp=[1]", "sweep.cp=[1]", "sweep.zero_stage=[0]"],
            "sweep.zero_stage=[3]"),
        (["model=mixtral-8x7b", "kernel.precision=fp8"], "expert layers do not support fp8"),
        (["model=qwen3-30b-a3b", "sweep.nodes=[2]", "kernel.precision=fp8"], "expert layers do not support fp8"),
        (["model=llama3-8b", "sweep.gbs=7", "sweep.tp=[1]", "sweep.pp=[1]", "sweep.cp=[1]"],
            "gbs=7 is not divisible by dp*mbs"),
        (["model=llama3-8b", "sweep.seq_len=8191", "kernel.precision=fp8"], "mbs*seq_len/cp=8191: use precision=bf16"),
        (["model=llama3-8b", "max_p_oom=0"], "P(OOM) of at most max_p_oom=0; the best layout has 8.87e-14: "
        "use max_p_oom=0.1"),
        (["model=llama3-8b", "sweep.tp=[16]"], "8 GPUs are not divisible by tp=16"),
    ],
)  # fmt: skip
def test_a_cell_without_a_layout_says_why(overrides, reason):
    config = config_of(*overrides)
    (cell,) = (recommendation(config, 1, *place) for place in planned_cells(config))
    assert not cell.groups
    assert reason in cell.reason


def test_the_default_axes_are_all_axes():
    assert {*config_of().axes.layout} == {*AXES[1:]} - {"gas"}
