"""How much of a prediction layouts share: the number of times that its parts are computed, not seconds."""

import math
import pickle
import sys
from collections import Counter
from contextlib import contextmanager

import pytest

from tests.unit.predict.test_step_time import GPUS, SLOW
from ultrabench.sweep.config.load import load_config, load_model
from ultrabench.sweep.plan import CellPlan, planned_cells
from ultrabench.sweep.predict.block_time import block_times
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.predict.param_bytes import _stage_work, rank_bytes
from ultrabench.sweep.predict.stage_params import _stage_params, params_of_ranks
from ultrabench.sweep.predict.step_time import micro_batch_times, step_times
from ultrabench.sweep.predict.ultrabench_memory import _backward, _rank_activations

SWEEP = ("sweep=playbook", "model=1B", "sweep.nodes=[1,2,4]", "sweep.tp=[1,2]", "sweep.pp=[1,2]")
CACHED = (block_times, _stage_params, params_of_ranks, rank_bytes, _stage_work, _rank_activations, _backward)
MAX_COMPUTED = {
    "_stage_params": 15,
    "params_of_ranks": 30,
    "rank_bytes": 60,
    "_stage_work": 130,
    "_rank_activations": 64,
    "_backward": 128,
}
"""Function -> how often it may compute its value for the layouts of SWEEP: a quarter more often than it does. The first
depends on no number of shards, and the fourth on one only where gradients are reduced."""


MAX_CALLS = 170
"""Calls of Python functions for the prediction of one of these layouts on average: a tenth more than there are."""


@contextmanager
def counted_calls(num_by_function):
    """Counts the calls of each Python function meanwhile."""

    def count(frame, event, _):
        if event == "call":
            num_by_function[frame.f_code] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def test_layouts_share_what_they_have_in_common():
    for cached in (*CACHED, micro_batch_times, step_times):
        cached.cache_clear()
    config, layouts, num_calls = load_config(SWEEP), [], Counter()
    for shape, cell in planned_cells(config):
        peak = config.hardware.peak(cell.precision, cell.nodes, None, 1)
        cell_plan = CellPlan(config=config, shape=shape, cell=cell, peak=peak)
        for layout in cell_plan.layouts():
            (spec,) = cell_plan.specs(layout)
            with counted_calls(num_calls):
                cell_plan.predictor.predict(spec)
            layouts.append(layout)
    assert num_calls.total() / len(layouts) < MAX_CALLS
    num_computed = {cached.__name__: cached.cache_info().misses for cached in CACHED}
    # Neither nodes, dp and ZeRO nor pp and gas decide the time of a block.
    assert num_computed.pop("block_times") == len({(layout.tp, layout.mbs) for layout in layouts})
    assert len(layouts) > 100
    assert {name: num for name, num in num_computed.items() if num > MAX_COMPUTED[name]} == {}


def test_layouts_that_are_equally_far_from_the_fit_share_an_interval():
    config = load_config(SWEEP)
    ((shape, cell), *_) = planned_cells(config)
    peak = config.hardware.peak(cell.precision, cell.nodes, None, 1)
    cell_plan = CellPlan(config=config, shape=shape, cell=cell, peak=peak)
    layouts = [*cell_plan.layouts()]
    for layout in layouts:
        (spec,) = cell_plan.specs(layout)
        prediction = cell_plan.predictor.predict(spec)
        links, gpu = cell_plan.predictor.links, config.hardware.gpu_at_limit
        low, high = config.profile.interval_of(spec, gpu, links)
        assert prediction.step_time_low_s == pytest.approx(prediction.step_time_s * math.exp(low), rel=1e-12)
        assert prediction.step_time_high_s == pytest.approx(
            prediction.step_time_s * math.exp(high), rel=1e-12
        )
    assert len(cell_plan.predictor._quantiles) < len(layouts) / 2


def test_shapes_from_another_process_are_one_object():
    shape = load_model("nemotron-3")
    first, second = (pickle.loads(pickle.dumps(shape)) for _ in range(2))
    assert first is second
    assert (first, first.identity()) == (shape, shape.identity())


def test_times_of_blocks_need_no_rates_of_all_ranks():
    for rates in ({}, SLOW):
        links = network(GPUS, 4, **rates)
        shared = links.without_all_ranks
        assert shared.slow == links.slow
        assert shared.leaving_bytes_per_s(2) == links.leaving_bytes_per_s(2)
