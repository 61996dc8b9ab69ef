"""Faults of the chain of operations that GPUs have in common, and of the comparison of what they compute."""

import os
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import torch

from tests.parity.fault import planted
from ultrabench import device_digest
from ultrabench.kernel.rank import digest_chain, environment

TESTS = "test_device_digest"


@planted(digest_chain, "_reductions")  # tests/parity/test_worker.py
def flipped_result_bit(right, *args):
    """The GPU of rank 1 flips one bit of one result."""
    results = right(*args)
    if os.environ["RANK"] == "1":
        results.view(dtype=digest_chain.torch.int32)[7] ^= 1
    return results


@planted(digest_chain, "tensor_digest", unit=f"{TESTS}.test_every_bit_of_a_result_counts")
def digest_of_the_first_values(right, tensor):
    """Only the first values of a result are compared."""
    return right(tensor.flatten()[:16])


@planted(digest_chain, "tensor_digest", unit=f"{TESTS}.test_every_bit_of_a_result_counts")
def digest_of_the_sum(right, tensor):
    """The sum of a result is compared instead of its bits."""
    return right(tensor.double().sum().view(1))


@planted(
    digest_chain, "_wrong_words", unit=f"{TESTS}.test_a_bit_of_memory_that_cannot_change_is_seen_by_one_of_two_passes"
)  # fmt: skip
def same_pattern_twice(right, device, pass_number):
    """Both passes write the same pattern to memory."""
    return right(device, 0)


@planted(digest_chain, "_fixed_arithmetic", unit=f"{TESTS}.test_the_order_of_sums_is_fixed")
def free_arithmetic(right):
    """The chain runs with the threads and the precision of products that the process has."""
    return nullcontext()


@planted(device_digest, "_majorities", unit=f"{TESTS}.test_of_two_gpus_that_differ_none_is_blamed")
def first_of_two(right, digests):
    """Of two GPUs that differ, the first one passes for the majority."""
    first_of_all = {
        (dated.digest.setup, part): device_digest._Majority(value, 1, 2)
        for dated in reversed(digests)
        for part, value in dated.digest.parts.items()
    }
    return first_of_all | right(digests)


@planted(device_digest, "MIN_CONFIRMING", unit=f"{TESTS}.test_a_minority_of_three_or_more_is_blamed")
def confirmed_at_once(right):
    """One preflight is enough to exclude a node."""
    return 1


@planted(device_digest, "_majorities", unit=f"{TESTS}.test_gpus_of_different_drivers_are_not_compared")
def all_setups_alike(right, digests):
    """GPUs are compared whatever their driver is."""
    setups = {dated.digest.setup for dated in digests}
    alike = [d._replace(digest=replace(d.digest, setup="")) for d in digests]
    return {(setup, part): majority for (_, part), majority in right(alike).items() for setup in setups}


# The chain on GPUs.

ON_GPU = "test_device_digest.test_the_chain_of_a_gpu_fills_its_free_memory_and_crosses_to_the_host"


@planted(digest_chain, "_copies", unit=ON_GPU)
def copies_on_the_host(right, device):
    """A block of memory is copied on the host only."""
    return right(torch.device("cpu"))


@planted(digest_chain, "MEMORY_SHARE", unit=ON_GPU)
def little_memory(right):
    """Patterns are written to a twentieth of the free memory."""
    return 0.05


@planted(digest_chain, "_written_blocks", unit=ON_GPU)
def memory_that_torch_holds(right, device, mask):
    """What torch holds without need is not written to."""
    with mock.patch.object(torch.cuda, "empty_cache"):
        return right(device, mask)


@planted(digest_chain, "_has_fp8", unit=ON_GPU)
def products_that_gpus_lack(right, device):
    """GPUs without products in fp8 are asked for them."""
    return True


@planted(environment, "facts", unit=ON_GPU)
def driver_unknown(right):
    """GPUs are compared whatever their driver is, since it is not read."""
    return right() | {"driver_version": None}


@planted(
    digest_chain, "_chain_of_products", unit="test_device_digest.test_each_part_computes_what_its_name_says"
)
def narrow_products(right, device, num_rows, dtype):
    """Products in fp64 are computed in fp32."""
    return right(device, num_rows, torch.float32 if dtype == torch.float64 else dtype)
