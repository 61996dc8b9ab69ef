"""Faults of runs that are measured by parts of a step: of training, of turns, of the interval and of the best."""

import msgspec

from tests.parity.fault import planted
from ultrabench import result, standing
from ultrabench.kernel import step, worker
from ultrabench.kernel.rank import clock

TURNS = "test_timing.test_parts_of_a_step_are_measured_in_turns"


@planted(step.TrainStep, "set_gas", parity="dp=2 zero_stage=1 gas=8 sizes=2-4, pp=2 gas=8 sizes=4-2")
def stale_divisor(right, self, gas):
    """The losses of a step of another size are divided by the number of micro-batches of the size before."""
    before = self.layout.gas
    right(self, gas)
    accumulate = type(self).accumulate
    self.accumulate = lambda *batch: accumulate(self, *batch) * gas / before


@planted(worker, "run_timed", unit=TURNS)
def lost_sync(right, device, work):
    """The clock of a part starts while the device still works on the part of another size before."""
    start = clock.time.perf_counter()
    out = work()
    return clock.time.perf_counter() - start, out


@planted(worker.Timing, "_measure_turn", unit=TURNS)
def wrong_pair(right, self):
    """Parts of a step are paired with those of the turn before."""
    if self.slice is None:
        right(self)
        return
    turn = {}
    for size in self.slice.order(self.num_turns):
        turn[size] = self.step(size)
        self.num_turns += size == self.slice.g1
    self.part_times_s += turn.values()
    self.step_times_s.append(worker.step_s(self.slice, turn, self.task.spec.layout.gas))


@planted(
    result,
    "with_error",
    unit="words.test_partial_step.test_the_interval_of_a_result_holds_the_error_of_the_line",
)
def certain_line(right, own_ci95_rel, error_rel):
    """The interval of a run that is measured by parts lacks the error of the straight line through them."""
    return own_ci95_rel


@planted(standing, "_standing", unit="words.test_partial_step.test_no_part_is_the_best")
def unconfirmed_winner(right, *args):
    """A run that is measured by parts alone may be the best."""
    return msgspec.structs.replace(right(*args), partial=False)
