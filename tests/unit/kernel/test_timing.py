"""What of a step is measured, when the warm-up of a run ends, and when enough steps have been measured."""

import gc
import itertools
import time
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.configs import measure
from tests.parity.fault import changed
from ultrabench.kernel import worker
from ultrabench.kernel.rank import clock, memory
from ultrabench.kernel.worker import MAX_COMPILING_STEPS, Timing
from ultrabench.partial_step import Slice, part_times

MEASURE = measure(warmup_steps=2, min_steps=6, max_steps=20, min_s=3.0, target_ci95_rel=0.05)
UNEVEN = [0.1, 0.3]


class Compiling(Timing):
    """Steps of one rank that take no time and compile a graph each, until `last`."""

    def __init__(self, last=0):
        trainer = SimpleNamespace(device=torch.device("cpu"), compiler=SimpleNamespace(num_graphs=0))
        super().__init__(SimpleNamespace(measure=MEASURE, slice=None), trainer, None)
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


GIB = 2**30
WHOLE_GAS = 16
BUILD_S, DATA_S, PASSES_S, UPDATE_S, LAUNCH_S = 7.0, 0.5, 1.0, 0.25, 0.001


class FakeGpu:
    """A GPU that works beside the host, with the clock of the host and the memory that is allocated."""

    def __init__(self):
        self.host_s = self.busy_until_s = 0.0
        self.allocated = self.peak = 0
        self.reports, self.collects_garbage = [], []
        self.gas, self.next_s, self.noise = 1, PASSES_S, None
        """Micro-batches of a step, seconds of the next one's micro-batches, and factors on those of the following."""
        self.compiler, self.device, self.gradient_norm = (
            SimpleNamespace(num_graphs=0),
            torch.device("cuda"),
            1.0,
        )

    def launch(self, seconds, temporary_bytes):
        """The host goes on at once; the GPU works when it has done what came before."""
        self.host_s += LAUNCH_S
        self.busy_until_s = max(self.busy_until_s, self.host_s) + seconds
        self.peak = max(self.peak, self.allocated + temporary_bytes)

    def synchronize(self):
        """The host waits for the GPU."""
        self.host_s = max(self.host_s, self.busy_until_s)

    def reset_peak(self):
        """From now on the peak is that of later allocations."""
        self.peak = self.allocated

    def build(self, *_, **options):
        """A trainer, whose initial values need more memory than its steps."""
        self.launch(BUILD_S, 64 * GIB)
        self.allocated = 16 * GIB
        return self

    def batch(self, number):
        """The data of a step, copied while the host goes on."""
        self.launch(DATA_S, GIB)
        return torch.empty(0), torch.empty(0)

    def set_gas(self, gas):
        """The next steps have so many micro-batches."""
        self.gas = gas

    @property
    def layout(self):
        """The layout of the next step."""
        return SimpleNamespace(gas=self.gas)

    def accumulate(self, inputs, targets):
        """Forward and backward."""
        self.collects_garbage.append(gc.isenabled())
        self.launch(self.gas * self.next_s, 8 * GIB)
        self.next_s = PASSES_S * next(self.noise) if self.noise else PASSES_S
        return torch.ones(())

    def update(self, loss):
        """The optimizer."""
        self.launch(UPDATE_S, GIB)
        return loss

    def cuda(self):
        """The module torch.cuda of this GPU."""
        return SimpleNamespace(
            empty_cache=lambda: None, reset_peak_memory_stats=self.reset_peak,
            reset_accumulated_memory_stats=lambda: None,
            memory_allocated=lambda: self.allocated, max_memory_allocated=lambda: self.peak,
            max_memory_reserved=lambda: self.peak, memory_stats=lambda: {"num_alloc_retries": 0},
        )  # fmt: skip


def run_on(gpu, slice_=None, measurement=MEASURE):
    """Builds and measures a run on a fake GPU; all steps are recorded in its `reports`."""
    report = SimpleNamespace(
        enter_part=lambda *_: None, phase=lambda _: None, microbatch=None,
        write=lambda event, **facts: gpu.reports.append({"event": event, **facts}),
    )  # fmt: skip
    spec = SimpleNamespace(
        layout=SimpleNamespace(recompute="none", gas=WHOLE_GAS), compiles=False, tokens_per_step=WHOLE_GAS
    )
    task = SimpleNamespace(
        spec=spec, largest_spec=spec, measure=measurement, slice=slice_, traced=False, checkpoint=None
    )
    host_clock = changed(time, perf_counter=lambda: gpu.host_s)
    fakes = {
        "torch": changed(torch, tensor=lambda v, device, dtype=None: torch.tensor(v, dtype=dtype)),
        "time": host_clock, "dist": mock.MagicMock(), "TrainStep": gpu.build,
        "build_mesh": mock.Mock(), "device_progress": mock.Mock(), "require_equal_replicas": mock.Mock(),
        "reduce_over_ranks": lambda value, *_: value, "observe_steps": lambda _: nullcontext(),
        "require_requested_options": lambda *_: {},
    }  # fmt: skip
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(worker, name, fake))
        gpu_module = changed(torch, get_device_module=lambda _: gpu)
        stack.enter_context(mock.patch.multiple(clock, torch=gpu_module, time=host_clock))
        stack.enter_context(mock.patch.object(memory, "torch", changed(torch, cuda=gpu.cuda())))
        worker._train(task, gpu.device, report)


def test_a_step_is_timed_from_an_idle_device_to_an_idle_device():
    """Without the work before it, such as making its data, and with all of its own."""
    gpu = FakeGpu()
    run_on(gpu)
    steps = [report for report in gpu.reports if report["event"] == "step"]
    assert {round(step["seconds"], 9) for step in steps} == {PASSES_S + UPDATE_S + LAUNCH_S}
    assert [step["measured"] for step in steps] == [False] * 2 + [True] * 6


def measured_parts(gpu):
    """Turn, micro-batches and seconds of each measured step."""
    steps = [line for line in gpu.reports if line["event"] == "step" and line["measured"]]
    assert {line["whole_gas"] for line in steps} == {WHOLE_GAS}
    assert all(line["tokens"] == line["gas"] for line in steps), "tokens of the part"
    return [(line["turn"], line["gas"], line["seconds"]) for line in steps]


def test_parts_of_a_step_are_measured_in_turns():
    """Each turn backwards after the one before, all sizes once in the warm-up, and no loss to compare."""
    gpu = FakeGpu()
    run_on(gpu, Slice(g1=2, g2=4, third=6))
    parts = measured_parts(gpu)
    assert [size for _, size, _ in parts] == [2, 4, 6, 6, 4, 2] * 3
    assert [turn for turn, _, _ in parts] == [n for n in range(6) for _ in range(3)]
    times = part_times(parts, WHOLE_GAS)
    assert times.whole_step_times_s == pytest.approx([WHOLE_GAS * PASSES_S + UPDATE_S + LAUNCH_S] * 6)
    assert (times.slice.text, times.departure) == ("2,4", pytest.approx(0))
    done = next(line for line in gpu.reports if line["event"] == "done")
    assert (done["stopped"], done["loss_final"]) == ("interval", None)


def test_a_wider_slice_follows_an_interval_that_misses_its_target():
    gpu = FakeGpu()
    gpu.noise = itertools.cycle([1.0, 1.3, 0.8, 1.1, 0.9])
    few = measure(warmup_steps=2, min_steps=6, max_steps=7, target_ci95_rel=0.001)
    run_on(gpu, Slice(g1=2, g2=4, wider=6), few)
    parts = measured_parts(gpu)
    assert [size for _, size, _ in parts] == [2, 4, 4, 2] * 3 + [2, 4] + [6, 2, 2, 6] * 3 + [6, 2]
    times = part_times(parts, WHOLE_GAS)
    assert (times.slice.text, len(times.turns), times.departure) == ("2,6", 7, None)
    assert next(line for line in gpu.reports if line["event"] == "done")["stopped"] == "max_steps"


def test_a_turn_that_was_cut_off_does_not_count():
    turns = [(0, 2, 1.0), (0, 4, 2.0), (0, 6, 3.0), (1, 6, 3.0), (1, 4, 2.0)]
    assert part_times(turns[:1], WHOLE_GAS) is None
    assert (
        part_times(turns, WHOLE_GAS).whole_step_times_s == part_times(turns[:3], WHOLE_GAS).whole_step_times_s
    )


def test_no_garbage_is_collected_while_steps_are_measured():
    """One rank that does makes all others wait."""
    gpu = FakeGpu()
    run_on(gpu)
    assert gpu.collects_garbage == [True] * 2 + [False] * 6
    assert gc.isenabled()


def test_the_peak_is_the_largest_of_the_steps():
    """Not that of initial values, nor what is allocated when it is asked for."""
    gpu = FakeGpu()
    run_on(gpu)
    peaks = {report["allocated_bytes"] for report in gpu.reports if report["event"] == "memory"}
    assert peaks == {24 * GIB}
