"""What of a step is measured, when the warm-up of a run ends, and when enough steps have been measured."""

import gc
import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.configs import measure
from tests.unit.kernel.fake_gpu import (
    FRAGMENTED_BYTES,
    INDEX,
    LAUNCH_S,
    PASSES_BYTES,
    PASSES_FLOPS,
    PASSES_S,
    STATE_BYTES,
    UPDATE_FLOPS,
    UPDATE_S,
    FakeGpu,
    FakeRanks,
    FakeTrainer,
)
from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.kernel import worker
from ultrabench.kernel.rank import environment
from ultrabench.kernel.worker import MAX_COMPILING_STEPS, Timing
from ultrabench.partial_step import Slice, part_times, step_s

MEASURE = measure(warmup_steps=2, min_steps=6, max_steps=20, min_s=3.0, target_ci95_rel=0.05)
UNEVEN = [0.1, 0.3]


class Compiling(Timing):
    """Steps of one rank that take no time and compile a graph each, until `last`."""

    def __init__(self, last=0):
        trainer = SimpleNamespace(device=torch.device("cpu"), compiler=SimpleNamespace(num_graphs=0))
        super().__init__(SimpleNamespace(measure=MEASURE, slice=None, few_steps=False), trainer, None)
        self.last = last
        self._value_of_rank_0 = float

    def step(self):
        """One more step."""
        self.num_steps += 1
        self.has_compiled = self.num_steps <= self.last
        self.trainer.compiler.num_graphs += self.has_compiled


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
    assert timing.stop_reason() == stopped


@pytest.mark.parametrize(
    ("turns", "stopped"),
    [
        ([{2: 0.1, 4: 0.2}] * 9, None),  # whole steps by these turns take 7.2 s, but the parts 2.7 s
        ([{2: 0.1, 4: 0.2}] * 11, "interval"),
        ([{2: 0.2, 4: 0.35}, {2: 0.1, 4: 0.2}] * 7, None),
        # The mean is sure, although the time by a turn is not.
        ([{2: 0.2, 4: 0.4}, {2: 0.1, 4: 0.2}] * 10, "interval"),
        ([{2: 0.1, 4: 0.2}] * 16 + [{2: 0.1, 4: 0.4}] * 4, "max_steps"),
    ],
)
def test_turns_seconds_and_the_interval_of_their_mean_decide(turns, stopped):
    timing = Compiling()
    timing.task.spec = SimpleNamespace(layout=SimpleNamespace(gas=WHOLE_GAS))
    timing.slice, timing.turns = Slice(g1=2, g2=4), turns
    timing.part_times_s = [seconds for turn in turns for seconds in turn.values()]
    timing.step_times_s = [step_s(timing.slice, turn, WHOLE_GAS) for turn in turns]
    assert timing.stop_reason() == stopped


@pytest.mark.parametrize(
    ("words", "step_time_s", "seconds"),
    [({}, 2.0, 20), ({"warmup_s": 5.0, "min_s": 10.0}, 0.1, 15), ({"warmup_s": 5.0, "min_s": 10.0}, 2.0, 21)],
)
def test_the_price_counts_steps_and_seconds(words, step_time_s, seconds):
    assert measure(warmup_steps=2, min_steps=6, max_steps=10, **words).priced_s(step_time_s) == seconds


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(worker, "reduce_over_ranks", lambda value, *_: value)


@pytest.mark.parametrize(("last", "steps"), [(0, 2), (1, 2), (2, 3), (5, 6)])
def test_the_warm_up_goes_on_while_graphs_are_compiled(one_rank, last, steps):
    """So that no measured step compiles."""
    timing = Compiling(last)
    timing._warm_up()
    assert timing.num_steps == steps


def test_compilation_without_an_end_is_told(one_rank):
    """In place of a measurement."""
    message = r"step 12 still compiled layers \(12 graphs so far\); use kernel.compile"
    with pytest.raises(RuntimeError, match=message):
        Compiling(2 + MAX_COMPILING_STEPS)._warm_up()


WHOLE_GAS = 16
STEP_CALLS = ["batch", "synchronize", "passes", "update", "synchronize"]
"""What the host asks a GPU for in a step: nothing else, since all else takes time or makes the host wait."""


class MeasuredRun:
    """A run that has been built and measured on the first of two ranks, each with a GPU."""

    def __init__(
        self, recompute="none", compiles=False, measure=MEASURE, slice_=None, few_steps=False, pace=None
    ):
        self.gpu, self.reports, self.collects_garbage = FakeGpu(), [], []
        self.trainer = FakeTrainer(self.gpu)
        if pace:
            self.trainer.pace = itertools.cycle(pace)
        passes = self.trainer.accumulate
        self.trainer.accumulate = lambda *args: self.collects_garbage.append(gc.isenabled()) or passes(*args)
        report = SimpleNamespace(
            enter_part=lambda *_: None, phase=lambda _: None, microbatch=None,
            write=lambda event, **facts: self.reports.append({"event": event, **facts}),
        )  # fmt: skip
        layout = SimpleNamespace(recompute=recompute, gas=WHOLE_GAS)
        spec = SimpleNamespace(layout=layout, compiles=compiles, tokens_per_step=WHOLE_GAS)
        task = SimpleNamespace(
            spec=spec,
            largest_spec=spec,
            measure=measure,
            slice=slice_,
            few_steps=few_steps,
            traced=False,
            checkpoint=None,
        )
        fakes = {
            "TrainStep": self.trainer.build, "build_mesh": mock.Mock(), "device_progress": mock.Mock(),
            "require_equal_replicas": mock.Mock(), "observe_steps": lambda _: nullcontext(),
            "require_requested_options": lambda *_: {},
        }  # fmt: skip
        with (
            mock.patch.multiple(worker, **fakes),
            self.gpu.installed(),
            FakeRanks(self.gpu, 0, 2).installed(),
        ):
            worker._train(task, environment.use_device("cuda", INDEX), report)

    def events(self, name):
        """The reports of this event."""
        return [report for report in self.reports if report["event"] == name]


def test_a_step_is_timed_from_an_idle_device_to_an_idle_device():
    """Without the work before it, such as making its data, and with all of its own."""
    steps = MeasuredRun().events("step")
    assert {round(step["seconds"], 9) for step in steps} == {PASSES_S + UPDATE_S + LAUNCH_S}
    assert [step["measured"] for step in steps] == [False] * 2 + [True] * 6


def measured_parts(run):
    """Turn, micro-batches and seconds of each measured step."""
    steps = [step for step in run.events("step") if step["measured"]]
    assert {step["whole_gas"] for step in steps} == {WHOLE_GAS}
    assert all(step["tokens"] == step["gas"] for step in steps), "tokens of the part"
    return [(step["turn"], step["gas"], step["seconds"]) for step in steps]


def test_parts_of_a_step_are_measured_in_turns():
    """Each turn backwards after the one before, all sizes once in the warm-up, and no loss to compare.

    Their times and FLOPs are those of a whole step.
    """
    run = MeasuredRun(slice_=Slice(g1=2, g2=4, third=6))
    parts = measured_parts(run)
    assert [size for _, size, _ in parts] == [2, 4, 6, 6, 4, 2] * 3
    assert [turn for turn, _, _ in parts] == [n for n in range(6) for _ in range(3)]
    times = part_times(parts, WHOLE_GAS)
    assert times.whole_step_times_s == pytest.approx([WHOLE_GAS * PASSES_S + UPDATE_S + LAUNCH_S] * 6)
    assert (times.slice.text, times.departure.value) == ("2,4", pytest.approx(0))
    (done,) = run.events("done")
    assert (done["stopped"], done["loss_final"]) == ("interval", None)
    assert done["hardware_flops_per_step"] == 2 * (WHOLE_GAS * PASSES_FLOPS + UPDATE_FLOPS)


def test_few_whole_steps_come_before_their_parts():
    """They are those of a whole run, with its loss, and stand alone for the step time."""
    run = MeasuredRun(slice_=Slice(g1=2, g2=4), few_steps=True, measure=replace(MEASURE, warmup_steps=5))
    steps = run.events("step")
    whole, parts = [s for s in steps if "gas" not in s], [s for s in steps if "gas" in s]
    assert [step["measured"] for step in whole] == [False] * 2 + [True] * 6
    assert [step["gas"] for step in parts] == [2, 4] + [2, 4, 4, 2] * 3
    assert [step["measured"] for step in parts] == [False] * 2 + [True] * 12
    assert run.events("done")[0]["stopped"] == "interval"
    progress = RankProgress(steps=steps)
    assert progress.measured_step_times_s(MEASURE) == [step["seconds"] for step in whole[2:]]
    assert progress.part_times(MEASURE).whole_step_times_s == pytest.approx(
        [WHOLE_GAS * PASSES_S + UPDATE_S + LAUNCH_S] * 6
    )


def test_few_whole_steps_end_after_the_fewest_with_an_interval():
    uneven = [1.0, 1.5, 0.7, 1.2, 0.9, 1.3]
    run = MeasuredRun(
        few_steps=True, measure=replace(MEASURE, max_steps=50, target_ci95_rel=1e-9), pace=uneven
    )
    assert [step["measured"] for step in run.events("step")] == [False] * 2 + [True] * 6
    assert run.events("done")[0]["stopped"] == "max_steps"


def test_a_wider_slice_follows_an_interval_that_misses_its_target():
    few = measure(warmup_steps=2, min_steps=6, max_steps=7, target_ci95_rel=0.001)
    run = MeasuredRun(measure=few, slice_=Slice(g1=2, g2=4, wider=6), pace=[1.0, 1.0, 1.3, 0.8, 1.1, 0.9])
    parts = measured_parts(run)
    assert [size for _, size, _ in parts] == [2, 4, 4, 2] * 3 + [2, 4] + [6, 2, 2, 6] * 3 + [6, 2]
    times = part_times(parts, WHOLE_GAS)
    assert (times.slice.text, len(times.turns), times.departure) == ("2,6", 7, None)
    assert run.events("done")[0]["stopped"] == "max_steps"


def test_a_turn_that_was_cut_off_does_not_count():
    turns = [(0, 2, 1.0), (0, 4, 2.0), (0, 6, 3.0), (1, 6, 3.0), (1, 4, 2.0)]
    assert part_times(turns[:1], WHOLE_GAS) is None
    assert (
        part_times(turns, WHOLE_GAS).whole_step_times_s == part_times(turns[:3], WHOLE_GAS).whole_step_times_s
    )


def test_a_step_calls_the_device_for_nothing_else():
    """No wait is lost or added, no cache is emptied, and no peak is reset but before the first step."""
    run = MeasuredRun()
    assert run.gpu.calls == ["build", "empty_cache", "reset_peak", "reset_retries", *STEP_CALLS * 8]
    assert run.trainer.step_numbers == [*range(1, 9)]


def test_no_garbage_is_collected_while_steps_are_measured():
    """One rank that does makes all others wait."""
    assert MeasuredRun().collects_garbage == [True] * 2 + [False] * 6
    assert gc.isenabled()


def test_the_peak_is_the_largest_of_the_steps():
    """Not that of initial values, nor what is allocated when it is asked for, nor what the allocator holds."""
    before, after = MeasuredRun().events("memory")
    peaks = {
        "allocated_bytes": STATE_BYTES + PASSES_BYTES,
        "reserved_bytes": STATE_BYTES + PASSES_BYTES + FRAGMENTED_BYTES,
    }  # fmt: skip
    assert before == {"event": "memory", "allocator_retries": 0} | peaks
    assert after == {"event": "memory", "allocator_retries": 1} | peaks


def test_the_flops_are_those_of_one_step_of_all_ranks():
    """Unknown where torch hides a part of them: in compiled layers that compute attention again."""
    for options, hides in (
        ({}, False), ({"compiles": True}, False), ({"recompute": "full"}, False),
        ({"compiles": True, "recompute": "full"}, True), ({"measure": replace(MEASURE, warmup_steps=1)}, True),
    ):  # fmt: skip
        (done,) = MeasuredRun(**options).events("done")
        assert done["hardware_flops_per_step"] == (None if hides else 2 * (PASSES_FLOPS + UPDATE_FLOPS))
