"""The order of a pipeline's passes is that of torch's schedules; waits and micro-batches in flight follow from it."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from ultrabench.kernel.pp import SCHEDULE_CLASSES
from ultrabench.layout import Layout
from ultrabench.sweep.predict.pipeline import PASS_TIME, bubble_share, loads, passes_by_rank, timeline
from ultrabench.sweep.predict.stage_memory import in_flight
from ultrabench.sweep.refusals import schedule_refusals

KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input",
    "BACKWARD_WEIGHT": "weight",
}
EVERY_SCHEDULE = pytest.mark.parametrize(
    ("schedule", "v"), [("afab", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)]
)


def layouts(schedule, v):
    """Layouts of a schedule with few and many micro-batches, also numbers that pp does not divide."""
    for pp in (2, 3, 4):
        for gas in sorted({pp - 1, pp, pp + 1, 2 * pp, 3 * pp + 1, 4 * pp}):
            layout = Layout(dp=1, pp=pp, gas=gas, pp_schedule=schedule, virtual_stages=v)
            if not [*schedule_refusals(layout)]:
                yield layout


class Recorder:
    """A stage that runs nothing and writes down the passes that a schedule asks for."""

    is_first = is_last = False
    device = torch.device("cpu")

    def __init__(self, layout, rank):
        self.num_stages = self.group_size = layout.pp
        self.stage_index = self.group_rank = rank
        self.passes = []

    def __getattr__(self, name):
        return lambda *_, **__: []

    def forward_one_chunk(self, number, *_, **__):
        self.passes.append(("forward", number, 0))

    def backward_one_chunk(self, number, **_):
        self.passes.append(("backward", number, 0))


def torch_order(layout):
    """The passes of each rank in torch's schedule of a layout."""
    make, gas = SCHEDULE_CLASSES[layout.pp_schedule], layout.gas
    if layout.virtual_stages == 1:
        stages = [Recorder(layout, rank) for rank in range(layout.pp)]
        for stage in stages:
            make(stage, n_microbatches=gas)._step_microbatches([()] * gas, [{}] * gas)
        return [stage.passes for stage in stages]
    group = {"group_size": layout.pp, "group_rank": 0, "num_stages": layout.num_stages}
    first = [SimpleNamespace(**group, stage_index=n, submod=torch.nn.Identity()) for n in layout.stages_of(0)]
    schedule = SCHEDULE_CLASSES[layout.pp_schedule](first, n_microbatches=gas)
    return [
        [(KINDS[a.computation_type.name], a.microbatch_index, layout.stages_of(rank).index(a.stage_index))
         for a in actions if a.computation_type.name in KINDS]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    ]  # fmt: skip


@EVERY_SCHEDULE
def test_the_order_is_that_of_torch(schedule, v):
    for layout in layouts(schedule, v):
        assert passes_by_rank(layout) == torch_order(layout), layout


@EVERY_SCHEDULE
def test_the_bubble_is_the_time_for_which_the_ranks_wait(schedule, v):
    for layout in layouts(schedule, v):
        work = layout.gas * (PASS_TIME["forward"] + PASS_TIME["backward"])
        step = max(span.end for span in timeline(layout))
        assert bubble_share(layout) == pytest.approx(1 - work / step), layout


def test_known_bubbles():
    shares = {("1f1b", 1): 3 / 11, ("afab", 1): 3 / 11, ("interleaved", 2): 3 / 19, ("zbv", 2): 3 / 51}
    for (schedule, v), share in shares.items():
        layout = Layout(dp=1, pp=4, gas=8, pp_schedule=schedule, virtual_stages=v)
        assert bubble_share(layout) == pytest.approx(share)


@EVERY_SCHEDULE
def test_predicted_memory_counts_the_micro_batches_in_flight(schedule, v):
    for layout in layouts(schedule, v):
        for rank, passes in enumerate(passes_by_rank(layout)):
            max_held = max(accumulate({"forward": 1, "input": 0}.get(kind, -1) for kind, *_ in passes))
            loads_by_work = dict(loads(layout.pp, layout.gas, v, schedule, rank, True, True))
            in_flights = [sum(load[:v]) for of_work in loads_by_work.values() for load in of_work]
            assert max(in_flights) == max_held, (layout, rank)
            assert {work.chunk for work in loads_by_work} == set(range(v))
            if v == 1:
                assert in_flight(layout, rank) == max_held, (layout, rank)
                last = [not work.has_sums for work in loads_by_work if work.is_last]
                assert last == [layout.gas == 1], (layout, rank)
