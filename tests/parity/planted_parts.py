"""Faults of runs that are measured by parts of a step: of training, of turns, of the interval and of the best."""

import msgspec

from tests.parity.fault import planted
from ultrabench import partial_step, result, run, standing
from ultrabench.agent.diagnose import outcome
from ultrabench.agent.ranks import rank_progress
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
    self.turns.append(turn)
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


@planted(
    partial_step,
    "biased_half_width",
    unit="words.test_partial_step.test_one_noisy_departure_counts_little_and_one_lucky_one_is_not_certain",
)
def lucky_line(right, bias, error):
    """The departure from the straight line that one run has measured counts as exact, also one of 0 by luck."""
    return right(bias, 0.0)


@planted(standing, "_standing", unit="words.test_partial_step.test_no_screened_run_is_the_best")
def unconfirmed_winner(right, *args):
    """A run that was only screened, by parts or by few whole steps, may be the best."""
    return msgspec.structs.replace(right(*args), screened=False)


@planted(run, "only_screens", unit="words.test_partial_step.test_what_only_screens_a_run")
def few_steps_in_full(right, slice_, few_steps):
    """A number of few whole steps passes for one that was measured in full, so that it wins unconfirmed."""
    return slice_ is not None and not few_steps


@planted(standing, "_full_ones", unit="words.test_partial_step.test_no_screened_run_is_the_best")
def lucky_screening(right, repeats):
    """The number that chose a run counts beside the one that confirms it."""
    return [*repeats]


@planted(
    standing,
    "failed_in_full",
    unit="words.test_partial_step.test_a_run_whose_start_in_full_has_failed_stands_as_that_start_ended",
)
def failed_contender(right, ends):
    """A run stays a contender although its start in full has failed, so that no other one takes its place."""
    return False


@planted(
    standing,
    "_half_width",
    unit="words.test_partial_step.test_a_single_start_decides_only_beyond_what_starts_differ_in",
)
def certain_start(right, contender):
    """A contender needs no second start if the steps of a single one say that it is slower."""
    low, high = contender.interval
    return abs(high - low) / abs(2 * contender.value)


@planted(
    standing,
    "_as_whole",
    unit="words.test_partial_step.test_parts_of_other_starts_show_what_starts_differ_in",
)
def raw_parts(right, repeat, ratio, control_ratio):
    """Parts of other starts stand beside whole steps as they are, without the ratio of a start with both."""
    return repeat


@planted(
    rank_progress.RankProgress,
    "measured_steps",
    unit="test_timing.test_few_whole_steps_come_before_their_parts",
)
def mixed_steps(right, self, measure):
    """Parts of a step count as whole steps where a start has measured both."""
    return self._all_measured_steps(measure)


@planted(outcome, "two_starts_error_rel", unit="agent.test_two_starts.test_both_starts_make_one_result")
def equal_starts(right, slice_, turns, gas):
    """What the two starts of a program differ in is not in the interval of its whole steps."""
    return 0.0


@planted(run.Task, "in_start", unit="agent.test_two_starts.test_both_starts_make_one_result")
def whole_start(right, self, part_start):
    """A program that starts twice runs whole steps each time."""
    return self
