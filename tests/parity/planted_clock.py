"""Faults of how a step is measured: training is correct, and its time or its peak is not."""

from tests.parity.fault import changed, planted
from ultrabench.kernel import worker
from ultrabench.kernel.rank import clock, memory

CLOCK = "test_timing.test_a_step_is_timed_from_an_idle_device_to_an_idle_device"
PEAK = "test_timing.test_the_peak_is_the_largest_of_the_steps"


@planted(worker, "run_timed", unit=CLOCK)
def busy_start(right, device, work):
    """The clock starts while the device still works on what came before."""
    start = clock.time.perf_counter()
    out = work()
    clock.torch.get_device_module(device).synchronize()
    return clock.time.perf_counter() - start, out


@planted(worker, "run_timed", unit=CLOCK)
def busy_end(right, device, work):
    """The clock is read while the device still works on the step."""
    clock.torch.get_device_module(device).synchronize()
    start = clock.time.perf_counter()
    out = work()
    return clock.time.perf_counter() - start, out


@planted(worker.Timing, "_train", unit=CLOCK)
def untimed_optimizer(right, self, number, batch):
    """The optimizer runs after the clock is read."""
    record = type(self)._record

    def update_and_record(number, seconds, loss):
        self.trainer.update(loss)
        record(self, number, seconds, loss)

    self._record = update_and_record
    return self.trainer.accumulate(*batch)


@planted(worker.Timing, "_train", unit=CLOCK)
def timed_data(right, self, number, batch):
    """The time of a step includes making its data."""
    return right(self, number, self.trainer.batch(number))


@planted(worker, "gc", unit="test_timing.test_no_garbage_is_collected_while_steps_are_measured")
def collected_garbage(right):
    """Garbage is collected during measured steps."""
    return changed(right, disable=lambda: None)


@planted(memory, "reset_peak", unit=PEAK)
def peak_of_the_build(right, *_):
    """The peak is not reset, so that it is that of the initial values."""


@planted(memory, "peak", unit=PEAK)
def current_for_peak(right, device):
    """What is allocated now passes for the largest that was allocated."""
    return right(device) | {"allocated_bytes": memory.torch.cuda.memory_allocated()}
