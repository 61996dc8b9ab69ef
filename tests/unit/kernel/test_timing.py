"""When the warm-up of a run ends, and when enough steps have been measured."""

from types import SimpleNamespace

import pytest
import torch

from tests.configs import measure
from ultrabench.kernel.worker import MOST_COMPILING_STEPS, Timing

MEASURE = measure(warmup_steps=2, min_steps=6, max_steps=20, min_s=3.0, target_ci95_rel=0.05)
UNEVEN = [0.1, 0.3]


class Compiling(Timing):
    """Steps of one rank that take no time and compile a graph each, until `last`."""

    def __init__(self, last=0):
        trainer = SimpleNamespace(device=torch.device("cpu"), compiler=SimpleNamespace(graphs=0))
        super().__init__(SimpleNamespace(measure=MEASURE), trainer, None)
        self.last = last
        self._any_rank, self._of_rank_0 = bool, float

    def step(self):
        """One more step."""
        self.done_steps += 1
        self.compiled = self.done_steps <= self.last
        self.trainer.compiler.graphs += self.compiled


@pytest.mark.parametrize(
    ("step_times_s", "stopped"),
    [
        ([1.0] * 5, None),  # too few for an interval
        ([1.0] * 6, "interval"),
        ([0.1] * 29, None),  # a narrow interval, but too short
        ([0.1] * 31, "interval"),
        (UNEVEN * 4, None),
        (UNEVEN * 10, "max_steps"),
        ([0.001, 0.002] * 30, None),  # more than max_steps, but too short
        ([0.01, 0.03] * 151, "max_steps"),
    ],
)
def test_steps_and_seconds_decide(step_times_s, stopped):
    timing = Compiling()
    timing.step_times_s = step_times_s
    assert timing.stopped() == stopped


@pytest.mark.parametrize(
    ("words", "step_time_s", "seconds"),
    [({}, 2.0, 20), ({"warmup_s": 5.0, "min_s": 10.0}, 0.1, 15), ({"warmup_s": 5.0, "min_s": 10.0}, 2.0, 21)],
)
def test_the_price_counts_steps_and_seconds(words, step_time_s, seconds):
    assert measure(warmup_steps=2, min_steps=6, max_steps=10, **words).priced_s(step_time_s) == seconds


@pytest.mark.parametrize(("last", "steps"), [(0, 2), (1, 2), (2, 3), (5, 6)])
def test_the_warm_up_goes_on_while_graphs_are_compiled(last, steps):
    """So that no measured step compiles."""
    timing = Compiling(last)
    timing._warm_up()
    assert timing.done_steps == steps


def test_compilation_without_an_end_is_told():
    """In place of a measurement."""
    told = r"step 12 still compiled layers, 12 graphs in all; take kernel.compile"
    with pytest.raises(RuntimeError, match=told):
        Compiling(2 + MOST_COMPILING_STEPS)._warm_up()
