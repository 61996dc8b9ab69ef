"""Searches on paper that measure parts of steps: what they pay, and who wins."""

import random

import pytest
from partial_replay import SimulatedRun, search, shares_of

from ultrabench.layout import Layout
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.predict.predict import Prediction

MEASURE = load_config(["sweep=layouts"]).measure
START_S, SHARE, THIRD = 60.0, 0.1, 0.05


def run(name, whole_s, estimate_s, tp, share=SHARE):
    """A run whose whole steps take `whole_s` and whose parts say `estimate_s`."""
    prediction = Prediction(
        step_time_s=whole_s, step_time_low_s=whole_s / 1.3, step_time_high_s=whole_s * 1.3, p_oom=0.0,
        limited_by="compute", peak_mem_bytes=2**30, memory_share=0.1, duration_s=START_S,
    )  # fmt: skip
    return SimulatedRun(
        run_id=name, layout=Layout(dp=8, tp=tp), prediction=prediction, step_time_s=estimate_s, oom=False,
        whole_s=whole_s, start_s=START_S, measure=MEASURE, pair_share=share, third_share=THIRD,
    )  # fmt: skip


def test_whole_steps_of_contenders_choose_the_winner_that_parts_got_wrong():
    runs = [run("a", 100.0, 97.0, 1), run("b", 90.0, 98.0, 2)]
    bill = search(runs, "partial", 3, 1.0, random.Random(0))
    assert (bill.runs, bill.regrets) == (2, [0.0])
    slow, fast = (MEASURE.priced_beside_parts_s(whole_s, SHARE * whole_s) for whole_s in (100.0, 90.0))
    # Whole steps of the slow one are so far behind that it needs no third start.
    gpu_s = 8 * slow + 16 * (fast + MEASURE.priced_s(SHARE * 90.0))
    assert bill.confirm_step_h == pytest.approx(gpu_s / 3600)
    assert bill.confirm_start_h == pytest.approx((8 + 2 * 16) * START_S / 3600)


def test_the_first_run_of_a_kind_pays_for_its_third_size_and_no_other_does():
    runs = [run("a", 100.0, 100.0, 1), run("b", 99.0, 99.0, 2)]
    bill = search(runs, "partial", 1, 1.0, random.Random(0))
    first, second = runs[::-1]
    shares = {first.run_id: SHARE + THIRD, second.run_id: SHARE}
    gpu_s = sum(run.layout.world_size * MEASURE.priced_s(shares[run.run_id] * run.whole_s) for run in runs)
    assert bill.step_h == pytest.approx(gpu_s / 3600)


def test_runs_without_a_slice_are_screened_by_few_whole_steps():
    runs = [run("a", 100.0, 100.0, 1, share=None), run("b", 99.0, 99.0, 2, share=None)]
    partial, adaptive = (search(runs, name, 1, 1.0, random.Random(0)) for name in ("partial", "adaptive"))
    assert partial.runs == adaptive.runs == 2
    assert adaptive.confirm_step_h == 0
    in_full_s = 8 * MEASURE.priced_s(100.0) + 16 * MEASURE.priced_s(99.0)
    assert partial.confirm_step_h == pytest.approx(in_full_s / 3600), "contenders in full"
    assert partial.step_h < 0.5 * adaptive.step_h


def test_the_shares_of_parts_follow_their_times_and_none_are_where_steps_are_short():
    assert shares_of(Layout(dp=1, gas=64), lambda gas: 2.0 + gas) == pytest.approx((10 / 66, 8 / 66))
    assert shares_of(Layout(dp=1, gas=8), lambda gas: 2.0 + gas) is None
