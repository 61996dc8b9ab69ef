"""A search by bounds names the same layouts as the predictions of all candidates, and explains a cell without any."""

from math import inf

import pytest

from ultrabench.layout import AXES
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan, planned_cells
from ultrabench.sweep.predict.predict import ADVISED_P_OOM
from ultrabench.sweep.recommend import cell_search, expected_rate, recommendation

pytestmark = pytest.mark.usefixtures("alone")

PLACES = 3


def config_of(*overrides):
    batch = [] if any(word.startswith("sweep.gbs=") for word in overrides) else ["sweep.gbs=256"]
    return load_config(["sweep=recommend", *batch, *overrides])


def best_of_all(config, most_share):
    """The best runs of a cell as the predictions of all its candidates give them."""
    runs = [run for run in make_plan(config).runs if run.prediction.p_oom <= ADVISED_P_OOM]
    return sorted(
        (run for run in runs if run.prediction.memory_share <= most_share),
        key=lambda run: -expected_rate(run),
    )


@pytest.mark.parametrize(
    ("overrides", "most_share"),
    [
        (["model=llama3-8b", "sweep.tp=[1,2]", "sweep.cp=[1,2]", "sweep.mbs=[1,2]"], 1.0),
        (["model=llama3-8b", "sweep.nodes=[4]", "sweep.pp=[1,4]", "sweep.cp=[1]", "sweep.mbs=[1]", "kernel.precision=fp8"], 1.0),
        (["model=llama3-70b", "sweep.nodes=[2]", "sweep.pp=[1,2,4]", "sweep.cp=[1]", "sweep.mbs=[1]"], inf),
        (["model=mixtral-8x7b", "sweep.nodes=[4]", "sweep.pp=[1,2]", "sweep.cp=[1]", "sweep.mbs=[1]", "sweep.tp=[1]"], 1.0),
        (["model=llama3-8b", "profile=nanotron", "kernel.compile=[true,false]", "sweep.cp=[1]", "sweep.pp=[1,2]", "sweep.mbs=[2]"], 1.0),
    ],
)  # fmt: skip
def test_a_search_names_the_layouts_that_are_best_of_all(overrides, most_share):
    config = config_of(*overrides)
    ((shape, cell),) = planned_cells(config)
    named = cell_search(config, shape, cell, most_share=most_share).best(PLACES)
    assert [run.run_id for run in named] == [run.run_id for run in best_of_all(config, most_share)[:PLACES]]
    assert named


def test_a_cell_in_which_only_the_reserve_has_no_room_still_names_a_layout():
    config = config_of("model=llama3-70b", "sweep.nodes=[2]", "sweep.tp=[8]", "sweep.pp=[1]")
    (cell,) = (recommendation(config, 1, *place) for place in planned_cells(config))
    assert cell.runs[0].prediction.memory_share > 1
    assert cell.runs[0].prediction.p_oom <= ADVISED_P_OOM


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model=llama3-70b", "sweep.tp=[8]", "sweep.pp=[1]"], "what would fit: sweep.nodes=[4]"),
        (["model=llama3-8b", "sweep.tp=[1]", "sweep.pp=[1]", "sweep.cp=[1]", "sweep.zero_stage=[0]"], "sweep.zero_stage=[3]"),
        (["model=mixtral-8x7b", "kernel.precision=fp8"], "products of experts have no fp8"),
        (["model=llama3-8b", "sweep.gbs=7", "sweep.tp=[1]", "sweep.pp=[1]", "sweep.cp=[1]"], "gbs=7 is not divisible by dp*mbs"),
        (["model=llama3-8b", "sweep.tp=[16]"], "8 GPUs are not divisible by tp=16"),
    ],
)  # fmt: skip
def test_a_cell_without_a_layout_says_why(overrides, reason):
    config = config_of(*overrides)
    (cell,) = (recommendation(config, 1, *place) for place in planned_cells(config))
    assert not cell.runs
    assert reason in cell.reason


def test_the_default_axes_are_all_axes():
    assert {*config_of().axes.layout} == {*AXES[1:]} - {"gas"}
