"""Which departure from a straight line a run by parts of steps gets from the runs before it in its allocation."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.unit.agent.one_node import task
from ultrabench.agent.agent_group import AgentGroup
from ultrabench.agent.lead import Leader
from ultrabench.layout import Layout
from ultrabench.partial_step import Departure, Slice
from ultrabench.record import from_dict
from ultrabench.result import RunResult, Status

PAIR = Slice(g1=2, g2=4, third=6)
TASK = replace(task("x.py", "cpu"), slice=PAIR)
OTHER_KIND = replace(TASK, spec=replace(TASK.spec, layout=Layout(dp=1, gas=1, zero_stage=1)))


def ended(value, error, of=TASK):
    return of, RunResult(status=Status.OK, departure=value, departure_error=error)


def slice_after(*results, known=None):
    """The slice of a task after these results in its allocation."""
    leader = SimpleNamespace(_task_results=results)
    return Leader._with_departure(leader, replace(TASK, slice=replace(PAIR, departure=known))).slice


def test_runs_of_one_kind_share_a_departure():
    certain, noisy = (0.02, 0.001), (0.1, 0.2)
    assert slice_after(ended(*certain)) == Slice(g1=2, g2=4, departure=Departure(value=0.02, error=0.001))
    assert slice_after(ended(*certain, of=OTHER_KIND), ended(None, None)) == PAIR
    assert [slice_after(*[ended(*noisy)] * n).third for n in (1, 2, 3)] == [6, 6, None]
    both = slice_after(ended(*noisy), known=Departure(value=0.0, error=0.1, num_runs=2))
    assert (both.third, both.departure.num_runs) == (None, 3)
    assert both.departure.value == pytest.approx(0.1 / 0.04 / (1 / 0.04 + 1 / 0.01)), (
        "with that of other allocations"
    )


def test_all_nodes_of_a_run_get_its_departure():
    """The order to start ranks travels as JSON."""
    orders = []
    group = SimpleNamespace(
        _node=SimpleNamespace(address=""), hosts=("a",), listen=float, _address_book=None,
        order=lambda name, **arguments: orders.append(json.loads(json.dumps(arguments))),
    )  # fmt: skip
    started = replace(
        TASK, slice=replace(PAIR, third=None, departure=Departure(value=0.1, error=0.2, num_runs=3))
    )
    for each in (started, replace(TASK, slice=None)):
        AgentGroup.start(group, replace(each, probe=True), 0)
    first, second = (order["departure"] for order in orders)
    assert TASK.with_departure(from_dict(Departure, first)) == started
    assert second is None
