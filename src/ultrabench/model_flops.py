"""The FLOPs of a token in the model that a program trains, which may be another one than `model=` of its sweep."""

import math
from typing import NamedTuple

from ultrabench.kernel_config import UNKNOWN, KernelConfig
from ultrabench.model_shape import ModelShape
from ultrabench.result import RunResult

PARAMS_TOLERANCE = 0.02
"""Relative difference of two numbers of parameters up to which they are those of one model."""
FLOPS_PER_PARAM = 6
"""FLOPs of a token for each parameter: a product forward and two backward, each a multiplication and an addition."""


class ModelFlops(NamedTuple):
    """What MFU is computed from."""

    per_token: float | None
    """FLOPs of a token; None where nothing says them."""
    formula: str | None = None
    """The formula by which the sizes of `model=` give them; None where something else does."""
    problem: str | None = None
    """Why they are unknown."""


def is_same_number(num_params: float, expected: float, num_ranks: int = 1) -> bool:
    """Whether a number of parameters is the expected one, or that of an equal part on one of the ranks."""
    divisors = (part for part in range(1, num_ranks + 1) if num_ranks % part == 0)
    return any(abs(num_params * part / expected - 1) <= PARAMS_TOLERANCE for part in divisors)


def nearest_number(printed: list[int], expected: float) -> int | None:
    """The number of parameters among those that a program printed that is nearest to the expected one."""
    return min(printed, key=lambda number: abs(math.log(number / expected)), default=None)


def model_flops(
    kernel: KernelConfig,
    shape: ModelShape,
    seq_len: int,
    formula: str,
    result: RunResult | None = None,
    num_ranks: int = 1,
) -> ModelFlops:
    """The FLOPs of a token: those that the kernel or its log gives, else those of its parameters,
    else those of the model.

    Args:
        formula: how the FLOPs follow from the sizes of the model.
        result: a run of the program, whose log may say more; None before the first.
        num_ranks: the ranks of this run.
    """
    printed_params = result.source_num_params if result else None
    if kernel.pattern("flops_per_token"):
        flops = result.source_flops_per_token if result else None
        return ModelFlops(flops, None, None if flops else "kernel.flops_per_token matches no line of the log")
    if flops := kernel.number("flops_per_token"):
        return ModelFlops(flops)
    if kernel.params == UNKNOWN:
        return ModelFlops(None, None, "kernel.params=unknown")
    num_params, name = kernel.number("params"), "kernel.params"
    if kernel.reads_params:
        num_params = printed_params
        if result and num_params is None:
            return ModelFlops(None, None, "kernel.params matches no line of the log")
    elif num_params is None:
        num_params, name = shape.num_params, f"model={shape.name}"
    if num_params and printed_params and not is_same_number(printed_params, num_params, num_ranks):
        problem = f"the program prints {printed_params:,} parameters, {name} has {num_params:,.0f}"
        return ModelFlops(None, None, f"{problem}: set kernel.params")
    if num_params is None or is_same_number(num_params, shape.num_params):
        return ModelFlops(shape.flops_per_token(seq_len, formula), formula)
    return ModelFlops(FLOPS_PER_PARAM * num_params)
