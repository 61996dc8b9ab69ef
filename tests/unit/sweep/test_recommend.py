"""A search by bounds names the same layouts as the predictions of all candidates, and explains a cell without any."""

import pytest

from ultrabench.layout import AXES
from ultrabench.sweep.candidate import advised, expected_rate
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan, planned_cells
from ultrabench.sweep.predict.predict import ADVISED_P_OOM
from ultrabench.sweep.recommend import recommendation, tokens_per_s_per_gpu

pytestmark = pytest.mark.usefixtures("alone")

PLACES = 3


def config_of(*overrides):
    batch = [] if any(override.startswith("sweep.gbs=") for override in overrides) else ["sweep.gbs=256"]
    return load_config(["sweep=recommend", *batch, *overrides])


def best_of_all(config):
    """The best runs of a cell as the predictions of all its candidates give them."""
    return sorted(
        advised(make_plan(config).runs),
        key=lambda run: (
            -expected_rate(tokens_per_s_per_gpu(run.spec, run.prediction.step_time_s), run.prediction.p_oom)
        ),
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=llama3-8b", "sweep.tp=[1,2]", "sweep.cp=[1,2]", "sweep.mbs=[1,2]"],
        ["model=llama3-8b", "sweep.nodes=[4]", "sweep.pp=[1,4]", "sweep.cp=[1]", "sweep.mbs=[1]", "kernel.precision=fp8"],
        ["model=llama3-70b", "sweep.nodes=[2]", "sweep.pp=[1,2,4]", "sweep.cp=[1]", "sweep.mbs=[1]"],
        ["model=mixtral-8x7b", "sweep.nodes=[4]", "sweep.pp=[1,2]", "sweep.cp=[1]", "sweep.mbs=[1]", "sweep.tp=[1]"],
        ["model=llama3-8b", "profile=nanotron", "kernel.compile=[true,false]", "sweep.cp=[1]", "sweep.pp=[1,2]", "sweep.mbs=[2]"],
    ],
)  # fmt: skip
def test_a_search_names_the_layouts_that_are_best_of_all(overrides):
    config = config_of(*overrides)
    (place,) = planned_cells(config)
    recommended = recommendation(config, PLACES, *place).runs
    assert [run.run_id for run in recommended] == [run.run_id for run in best_of_all(config)[:PLACES]]
    assert recommended


def test_a_cell_in_which_only_the_reserve_has_no_room_still_names_a_layout():
    config = config_of("model=llama3-70b", "sweep.nodes=[2]", "sweep.tp=[8]", "sweep.pp=[1]")
    (cell,) = (recommendation(config, 1, *place) for place in planned_cells(config))
    assert cell.runs[0].prediction.memory_share > 1
    assert cell.runs[0].prediction.p_oom <= ADVISED_P_OOM


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model=llama3-70b", "sweep.tp=[8]", "sweep.pp=[1]"], "try sweep.nodes=[2]"),
        (["model=llama3-8b", "sweep.tp=[1]", "sweep.pp=[1]", "sweep.cp=[1]", "sweep.zero_stage=[0]"], "sweep.zero_stage=[3]"),
        (["model=mixtral-8x7b", "kernel.precision=fp8"], "expert layers do not support fp8"),
        (["model=qwen3-30b-a3b", "sweep.nodes=[2]", "kernel.precision=fp8"], "expert layers do not support fp8"),
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
