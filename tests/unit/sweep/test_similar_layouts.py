"""Which runs are similar, so that one of them stands for a group."""

from dataclasses import replace

import pytest

from ultrabench.layout import Layout
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.similar_layouts import groups_of, shown_runs

GBS = 192

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def any_run():
    """A predicted run, whose layout and prediction tests replace."""
    words = ["hardware=h100x8", "model=llama3-8b", "sweep.nodes=[1]", "sweep.tp=[2]", "sweep.mbs=[1]"]
    return make_plan(load_config(words)).runs[0]


@pytest.fixture
def run_of(any_run):
    """Makes a run from the slowdown of its prediction and its layout; `limit` and `variant` are those of its fields."""

    def make(slowdown, limit="compute", variant=None, **axes):
        prediction = replace(any_run.prediction, step_time_s=10 * slowdown, limited_by=limit)
        layout = Layout(**axes, gas=GBS // (axes["dp"] * axes.get("mbs", 1)))
        place = {"nodes": layout.world_size // 8, "workload": replace(any_run.spec.workload, gbs=GBS)}
        spec = replace(any_run.spec, layout=layout, variant=variant or {}, **place)
        return replace(any_run, run_id=spec.run_id, spec=spec, predicted=prediction)

    return make


def labels(groups):
    return [[run.layout.label() for run in group] for group in groups]


def test_a_group_trades_one_pair_of_degrees_doubling_by_doubling(run_of):
    """dp8 cp4 is two doublings from dp32, and belongs to its group through dp16 cp2, which is slower than dp8 cp4."""
    best, far, near = run_of(1, dp=32), run_of(1.01, dp=8, cp=4), run_of(1.02, dp=16, cp=2)
    two_pairs, tripled = run_of(1.02, dp=8, tp=2, cp=2), run_of(1.02, dp=32, cp=3)
    assert labels(groups_of([best, far, near, two_pairs])) == labels([(best, far, near), (two_pairs,)])
    assert labels(groups_of([best, far])) == labels([(best,), (far,)]), (
        "no layout of the group is between them"
    )
    assert len([*groups_of([run_of(1, dp=96), tripled])]) == 2


@pytest.mark.parametrize(
    ("changes", "is_similar"),
    [
        ({"slowdown": 1.029}, True), ({"slowdown": 1.04}, False), ({"slowdown": 0.975}, True),
        ({"slowdown": 0.96}, False),
        ({"zero_stage": 3, "mbs": 2, "recompute": "full"}, True), ({"limit": "memory"}, False),
        ({"variant": {"env.NCCL_ALGO": "Ring"}}, False), ({"cp": 1, "tp": 2}, True), ({"dp": 2, "tp": 2}, False),
    ],
)  # fmt: skip
def test_similar_runs_have_the_speed_limit_and_options_of_the_best(run_of, changes, is_similar):
    best, other = run_of(1, dp=8), run_of(**{"slowdown": 1.01, "dp": 4, "cp": 2} | changes)
    assert len([*groups_of([best, other])]) == (1 if is_similar else 2)


def test_measured_runs_are_compared_by_what_was_measured_and_others_by_predictions(run_of):
    best, measured, predicted = run_of(1, dp=8), run_of(1, dp=4, cp=2), run_of(1.02, dp=4, tp=2)
    rates = {best.run_id: 100.0, measured.run_id: 90.0}
    groups = [*groups_of([best, measured, predicted], rates)]
    assert labels(groups) == labels([(best, predicted), (measured,)])
    shown = [*shown_runs(groups, with_similar=False)]
    assert shown == [(best, {"group": 1, "similar": 1}), (measured, {"group": 2, "similar": 0})]
    assert [run for run, _ in shown_runs(groups, with_similar=True)] == [best, predicted, measured]


def test_runs_of_a_program_without_predictions_stand_alone(run_of):
    best, other = run_of(1, dp=8), run_of(1, dp=4, cp=2)
    kernel = replace(other.spec.kernel, kind="command", command=("train",), params="unknown")
    other = replace(other, spec=replace(other.spec, kernel=kernel))
    assert len([*groups_of([best, other])]) == 2
