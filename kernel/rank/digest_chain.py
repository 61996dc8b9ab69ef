"""A fixed chain of operations whose results GPUs of the same kind must have in common, bit by bit.

`python -P -m ultrabench.kernel.rank.digest_chain cuda` prints the digests of all GPUs as JSON; `cpu` that of the CPU.

Every operation is deterministic for fixed shapes on one stream: torch.mm calls cuBLAS, which gives the same bits on
GPUs of the same architecture and number of multiprocessors
(https://docs.nvidia.com/cuda/cublas/#results-reproducibility), and no kernel here adds with atomics. Inputs come from
integers, which no rounding can change. The chain covers tensor cores and other arithmetic units (products and
reductions), most of the free device memory (patterns) and the copies between host and device. It covers no link
between GPUs. On CPUs it is small, and shows that the comparison works.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ultrabench.device_digest import CHAIN_VERSION
from ultrabench.hardware import DEVICE_KINDS
from ultrabench.kernel import fp8
from ultrabench.kernel.device import kind_of
from ultrabench.kernel.rank import environment

DIGEST_DIGITS = 12
"""Hex digits of the digest of a part; a GPU that errs has another one with probability 1 - 16**-12."""
MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407
"""Constants of Knuth's linear congruential generator of 64 bits."""
SETUP_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "MKL_CBWR")
"""Environment variables by which libraries choose other kernels, so that results of equal GPUs may differ."""
MEMORY_SHARE = 0.75
"""Share of the free memory of a GPU to which patterns are written."""


class ChainSize(NamedTuple):
    """How much a type of device computes."""

    narrow_rows: int
    """Rows and columns of the matrices of 16 and 8 bits, a power of 4."""
    wide_rows: int
    """Rows and columns of the matrices of 32 and 64 bits, a power of 4."""
    num_products: int
    """Products that follow each other, each of the result of the one before."""
    block_bytes: int
    """Bytes of a block of memory that is written and read back at once."""


SIZES = {"cuda": ChainSize(4096, 4096, 16, 2**28), "cpu": ChainSize(64, 64, 4, 2**16)}
"""Device type -> the size of its chain, which takes under 5 s on a GPU and under 0.1 s on a core."""


def seeded_matrix(num_rows: int, seed: int, device: torch.device) -> Tensor:
    """A square matrix in fp32 of multiples of 2**-15 between -1 and 1, which depend on `seed` only."""
    numbers = torch.arange(num_rows**2, device=device) + seed * num_rows**2
    for _ in range(2):
        numbers = numbers * MULTIPLIER + INCREMENT
        numbers = numbers ^ (numbers >> 29)
    return ((numbers >> 20) % 2**16 - 2**15).to(torch.float32).div_(2**15).view(num_rows, num_rows)


def _chain_of_products(device: torch.device, num_rows: int, dtype: torch.dtype) -> Tensor:
    """x W W ... W in `dtype`, where the factor keeps the size of the numbers: it is a power of 2."""
    x = seeded_matrix(num_rows, 1, device).to(dtype)
    weight = (seeded_matrix(num_rows, 2, device) * (2 / num_rows**0.5)).to(dtype)
    for _ in range(SIZES[device.type].num_products):
        x = torch.mm(x, weight)
    return x


def _chain_of_fp8_products(device: torch.device, num_rows: int) -> Tensor:
    """As `_chain_of_products`, with factors of fp8 and scales of 1."""
    dtype, ones = fp8.fp8_dtype(device), torch.ones(num_rows, 1, device=device)
    x, weight = seeded_matrix(num_rows, 3, device).to(dtype), seeded_matrix(num_rows, 4, device).to(dtype)
    for _ in range(SIZES[device.type].num_products):
        product = fp8.scaled_mm(x, weight.t(), ones, ones.t(), "output")
        x = (product * (2 / num_rows**0.5)).to(dtype)
    return x


def _reductions(device: torch.device, num_rows: int) -> Tensor:
    """Sums along both dims of a softmax, and of what norms and activations compute, in fp32."""
    x = seeded_matrix(num_rows, 5, device) * 8
    results = (
        x.softmax(-1),
        torch.rsqrt(x.square() + 1e-5),
        torch.sigmoid(x) * x,
        x.logsumexp(0, keepdim=True),
    )
    return torch.cat([result.sum(dim) for result in results for dim in (0, 1)])


def _wrong_words(device: torch.device, pass_number: int) -> Tensor:
    """Block of memory and number of its words that do not hold what was written, for blocks with such words.

    All blocks are written before the first is read. The second pass writes the complement of the first, so that a
    bit that cannot change is wrong in one of them.
    """
    mask = -(pass_number % 2)  # no bits or all bits
    blocks = _written_blocks(device, mask)
    num_wrong = [(block != _pattern(device, number, mask)).sum() for number, block in enumerate(blocks)]
    counts = torch.stack(num_wrong)
    bad_blocks = counts.nonzero()
    return torch.cat((bad_blocks, counts[bad_blocks]), 1)


def _written_blocks(device: torch.device, mask: int) -> list[Tensor]:
    """Blocks of memory with a pattern each, on a GPU most of its free memory."""
    num_blocks, block_bytes = 1, SIZES[device.type].block_bytes
    if kind_of(device).has_gpus:
        torch.cuda.empty_cache()  # what torch keeps is free
        num_blocks = max(1, int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE) // block_bytes)
    return [_pattern(device, number, mask) for number in range(num_blocks)]


def _pattern(device: torch.device, block_number: int, mask: int) -> Tensor:
    """What a block of memory must hold: other words than all other blocks, with the bits of `mask` inverted."""
    num_words = SIZES[device.type].block_bytes // 8
    words = torch.arange(block_number * num_words, (block_number + 1) * num_words, device=device)
    return words.mul_(MULTIPLIER).bitwise_xor_(mask)


def _copies(device: torch.device) -> Tensor:
    """A block that went from the host to the device, to another place there, and back."""
    num_words, has_gpus = SIZES[device.type].block_bytes // 8, kind_of(device).has_gpus
    on_host = torch.arange(num_words, pin_memory=has_gpus).mul_(MULTIPLIER)
    return on_host.to(device, copy=True).clone().to("cpu", copy=True)


def _has_fp8(device: torch.device) -> bool:
    """Whether products of fp8 with scales of rows run on the device."""
    if not kind_of(device).has_gpus:
        return True
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith(("gfx94", "gfx95"))
    return torch.cuda.get_device_capability(device) >= (9, 0)


def parts_of(device: torch.device) -> dict[str, Callable[[int], Tensor]]:
    """Part of the chain -> the function that computes it in the pass of this number."""
    narrow_rows, wide_rows, *_ = SIZES[device.type]
    parts: dict[str, Callable[[int], Tensor]] = {
        "bf16 products": lambda _: _chain_of_products(device, narrow_rows, torch.bfloat16),
        "fp32 products": lambda _: _chain_of_products(device, wide_rows, torch.float32),
        "fp64 products": lambda _: _chain_of_products(device, wide_rows // 4, torch.float64),
        "reductions": lambda _: _reductions(device, wide_rows),
        "memory": lambda pass_number: _wrong_words(device, pass_number),
        "copies": lambda _: _copies(device),
    }
    if _has_fp8(device):
        parts["fp8 products"] = lambda _: _chain_of_fp8_products(device, narrow_rows)
    return parts


@contextmanager
def _fixed_arithmetic() -> Iterator[None]:
    """Inside the `with` block sums have one order: one thread on CPUs, neither TF32 nor sums in bf16 on GPUs."""
    num_threads, matmul = torch.get_num_threads(), torch.backends.cuda.matmul
    precision, reduces_narrow = (
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
    )
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        matmul.allow_bf16_reduced_precision_reduction = reduces_narrow


def tensor_digest(tensor: Tensor) -> str:
    """First hex digits of a hash of the bits of a tensor."""
    numbers = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:DIGEST_DIGITS]


def setup_of(device: torch.device) -> str:
    """What must be equal on two devices whose digests are compared, as a text."""
    facts = environment.facts()
    if kind_of(device).has_gpus:
        properties = torch.cuda.get_device_properties(device)
        model_text = f"{properties.name}, {properties.multi_processor_count} multiprocessors"
    else:
        model_text = f"{facts['gpu_name']}, {torch.backends.cpu.get_cpu_capability()}"
    driver_text = f"driver {facts['driver_version'] or 'unknown'}"
    variables = [f"{name}={os.environ[name]}" for name in SETUP_VARIABLES if name in os.environ]
    versions = driver_text, f"torch {facts['torch_version']}", f"chain {CHAIN_VERSION}"
    return ", ".join((model_text, *versions, *variables))


def device_digest(device: torch.device) -> dict[str, Any]:
    """Computes the chain twice; returns a `DeviceDigest` as a JSON value."""
    parts = parts_of(device)
    with _fixed_arithmetic():
        first, second = (
            {part: tensor_digest(compute(pass_number)) for part, compute in parts.items()}
            for pass_number in range(2)
        )
    uuid = None
    if kind_of(device).has_gpus:
        torch.cuda.empty_cache()
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return {
        "device": f"GPU-{uuid}" if uuid else "",
        "setup": setup_of(device),
        "parts": first,
        "second": {part: digest for part, digest in second.items() if digest != first[part]},
    }


def digests_here(device_type: str) -> list[dict[str, Any]]:
    """The digests of all devices of a type that this process sees, one after the other."""
    num_devices = torch.cuda.device_count() if DEVICE_KINDS[device_type].has_gpus else 1
    return [device_digest(environment.use_device(device_type, index)) for index in range(num_devices)]


if __name__ == "__main__":
    print(json.dumps(digests_here(sys.argv[1])))
