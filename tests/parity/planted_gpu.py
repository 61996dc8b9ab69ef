"""Faults of what only GPUs do, which CPUs see by a fake GPU or by running the branches of GPUs themselves."""

from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.parity.fault import changed, planted
from ultrabench.kernel import compile as compiled_layers
from ultrabench.kernel import ep, model, products, tp, worker
from ultrabench.kernel.dryrun import counts
from ultrabench.kernel.rank import checkpoint, clock, memory, probe, progress, trace

CLOCK = "test_timing.test_a_step_is_timed_from_an_idle_device_to_an_idle_device"
CALLS = "test_timing.test_a_step_calls_the_device_for_nothing_else"
PEAK = "test_timing.test_the_peak_is_the_largest_of_the_steps"
FLOPS = "test_timing.test_the_flops_are_those_of_one_step_of_all_ranks"
DEVICES = "test_measurements.test_a_probe_measures_products_copies_and_clocks"
LINKS = "test_measurements.test_a_probe_measures_the_links"
SAVES = "test_measurements.test_a_checkpoint_is_timed_on_the_slowest_rank_from_idle_to_idle"
BITS = "test_measurements.test_a_state_that_differs_by_a_bit_is_found"
TRACE = "test_measurements.test_a_trace_has_the_times_of_two_steps_and_the_bytes_of_another"
MICRO_BATCH = "test_rank.test_a_micro_batch_counts_when_its_gpu_has_finished_it"
GROUPED = "test_cuda_branches.test_grouped_products_are_those_of_each_expert"
GENERATED_LOSS = "test_cuda_branches.test_generated_code_of_the_loss_gets_the_ranks_of_tp"


# Steps.


@planted(clock, "torch", unit=f"{CLOCK}, {SAVES}")
def other_gpu(right):
    """The host waits for GPU 0, whichever GPU the rank uses."""
    waiting = SimpleNamespace(synchronize=lambda: torch.cuda.synchronize(0))
    return changed(right, get_device_module=lambda _: waiting)


@planted(worker, "run_timed", unit=CALLS)
def additional_wait(right, device, work):
    """The host waits for the device once more after each step."""
    result = right(device, work)
    torch.cuda.synchronize()
    return result


@planted(worker.Timing, "_record", unit=CALLS)
def emptied_cache(right, self, *args):
    """Each step gives memory back to the driver, which the next one takes again."""
    torch.cuda.empty_cache()
    right(self, *args)


@planted(worker.Timing, "stop_reason", unit=CALLS)
def peak_of_the_last_step(right, self):
    """The peak is reset after each measured step."""
    memory.reset_peak(self.device)
    return right(self)


@planted(memory, "peak", unit=PEAK)
def reserved_for_allocated(right, device):
    """What the allocator holds passes for what tensors need."""
    numbers = right(device)
    return numbers | {"allocated_bytes": numbers["reserved_bytes"]}


@planted(worker.Timing, "_count_step_flops", unit=FLOPS)
def flops_of_one_rank(right, self):
    """The FLOPs of a step are those of one rank."""
    return right(self) / dist.get_world_size()


@planted(
    worker.Timing, "_count_whole_step_flops", unit="test_timing.test_parts_of_a_step_are_measured_in_turns"
)
def flops_of_a_part(right, self):
    """Where parts of a step are measured, its FLOPs are those of the smallest part."""
    return self._count_step_flops(self.slice.g1) if self.slice else right(self)


@planted(progress, "device_progress", unit=MICRO_BATCH)
def launched_for_finished(right, device, count_microbatch):
    """Micro-batches count when they are launched."""
    return count_microbatch


# The probe.


@planted(probe, "median", unit=f"{DEVICES}, {LINKS}")
def fastest_call(right, times_s):
    """The shortest time counts instead of the median."""
    return min(times_s)


@planted(probe, "GEMM_DTYPE", unit=DEVICES)
def products_in_fp32(right):
    """GPUs multiply matrices of fp32 numbers."""
    return right | {"cuda": torch.float32}


@planted(probe, "_copy_rates", unit=DEVICES)
def bytes_read_only(right, device, measuring_s):
    """A copy counts the bytes that it reads, not those that it writes."""
    return [rate / 2 for rate in right(device, measuring_s)]


@planted(probe, "_present_clock_hz", unit=DEVICES)
def clock_of_idle_gpu(right, device):
    """The clock is read when the GPU has done its work."""
    torch.cuda.synchronize()
    return right(device)


class _OwnTimes:
    """torch.distributed, except that the largest of all ranks' values is that of this rank."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None):
        if op != dist.ReduceOp.MAX:
            dist.all_reduce(tensor, op, group)


@planted(probe, "dist", unit=LINKS)
def times_of_this_rank(right):
    """The times of a collective are those of this rank, not those of the slowest one."""
    return _OwnTimes()


@planted(probe, "_measure_collectives", unit=LINKS)
def first_rounds_count(right, device, group, settings, report_progress):
    """The rounds in which connections are made count."""
    rounds = settings.warmup + settings.iterations
    return right(device, group, replace(settings, warmup=0, iterations=rounds), report_progress)


# Checkpoints and traces.


@planted(checkpoint, "reduce_over_ranks", unit=SAVES)
def saved_by_this_rank(right, value, *_):
    """The times of a checkpoint are those of this rank, not those of the slowest one."""
    return float(value)


@planted(checkpoint, "run_timed", unit=SAVES)
def copies_under_way(right, device, work):
    """A save ends when its last copy is launched."""
    torch.cuda.synchronize()
    start_s = clock.time.perf_counter()
    result = work()
    return clock.time.perf_counter() - start_s, result


@planted(checkpoint, "have_same_bits", unit=BITS)
def values_for_bits(right, a, b):
    """A loaded state may differ in its bits where its values are equal."""
    return torch.equal(a, b)


@planted(trace, "torch", unit=TRACE)
def unfinished_steps(right):
    """A traced step ends before the device has done its work."""
    return changed(right, get_device_module=lambda _: SimpleNamespace(synchronize=lambda: None))


@planted(trace, "schedule", unit=TRACE)
def traced_warm_up(right, *, wait, warmup, active, repeat):
    """The step in which the profiler starts is traced, too."""
    return right(wait=wait, warmup=0, active=warmup + active, repeat=repeat)


@planted(trace, "reset_peak", unit=TRACE)
def peak_of_traced_steps(right, device):
    """The memory in a trace is that of the profiler's steps, too."""


# Branches for tensors of GPUs.


@planted(ep, "grouped_mm", unit=GROUPED)
def copied_weights(right, rows, weights, ends):
    """The weights of experts are copied into another layout for their products."""
    return right(rows, weights.contiguous() if weights.dim() == 3 else weights, ends)


@planted(ep, "grouped_mm", unit=GROUPED)
def starts_for_ends(right, rows, weights, ends):
    """Products get the first row of each expert in place of the row after its last one."""
    starts = ends.roll(1)
    starts[0] = 0
    return right(rows, weights, starts)


@planted(counts.ExecutedFlops, "record", unit=GROUPED)
def uncounted_grouped_products(right, self, func, *args):
    """Grouped products have no FLOPs."""
    if "_grouped_mm" not in func._schema.name:
        right(self, func, *args)


@planted(products, "scaled_mm", unit="test_products.test_products_of_8_bits_are_asked_for_as_gpus_take_them")
def exact_sums(right, a, b, scale_a, scale_b, _):
    """Products in fp8 add up in fp32, which is slow on GPUs."""
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=False)


@planted(products, "SMALLEST_ROW_MAX", unit="test_products.test_small_gradients_lose_nothing")
def small_gradients_vanish(right):
    """Rows of fp8 whose numbers are below 1e-4 are scaled as if they were larger."""
    return 1e-4


@planted(tp, "head_loss", unit=GENERATED_LOSS)
def generated_loss_of_own_columns(right, x, weight, targets, shared, group, *args, **options):
    """Generated code takes the softmax over the columns of its own rank."""
    return right(x, weight, targets, shared, None if "to_gradient" in options else group, *args, **options)


@planted(compiled_layers, "apply_compile", unit=GENERATED_LOSS)
def loss_never_compiled(right, decoder, backend):
    """The gradient of the logits runs eagerly, whatever compiles the layers."""
    right(decoder, SimpleNamespace(backend_name="aot_eager"))


@planted(model, "functional", unit="test_cuda_branches.test_norms_of_gpus_are_those_of_cpus")
def eps_of_torch(right):
    """The norms of GPUs have the eps of torch, whatever the shape says."""
    return changed(right, rms_norm=lambda x, shape, weight, _: right.rms_norm(x, shape, weight))
