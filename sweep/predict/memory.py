"""Predicts the memory of a run, by part and by rank of its pipeline, and the chance that it does not fit."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict
from ultrabench.sweep.predict.megatron_memory import MegatronMemory, megatron_memory
from ultrabench.sweep.predict.nanotron_memory import NanotronMemory, nanotron_memory
from ultrabench.sweep.predict.profile import DividedRun
from ultrabench.sweep.predict.stage_memory import EVERY, StageMemory
from ultrabench.sweep.predict.ultrabench_memory import UltrabenchMemory, least_rank, ultrabench_memory

MemoryConstants = UltrabenchMemory | NanotronMemory | MegatronMemory
CONSTANTS_BY_FRAMEWORK: dict[str, type[MemoryConstants]] = {
    "ultrabench": UltrabenchMemory, "nanotron": NanotronMemory, "megatron": MegatronMemory,
}  # fmt: skip
"""Framework -> the constants of its form of memory."""


def memory_constants(framework: str, values: Mapping[str, Any]) -> MemoryConstants:
    """The constants of a framework's form of memory: `memory` of a profile.

    Raises:
        ConfigError: a constant is unknown, is missing, or is no number.
    """
    return from_dict(CONSTANTS_BY_FRAMEWORK[framework], values, where="memory")


def predict_memory(
    spec: DividedRun, constants: MemoryConstants, ranks: str = EVERY
) -> tuple[StageMemory, ...]:
    """The memory of each rank of the pipeline axis, in its order; `StageMemory.phase` says what makes its peak.

    Args:
        ranks: EVERY, LARGEST or ENDS; a form may give more ranks than it is asked for.
    """
    if isinstance(constants, UltrabenchMemory):
        return ultrabench_memory(spec, constants, ranks)
    if isinstance(constants, MegatronMemory):
        return megatron_memory(spec, constants)
    return nanotron_memory(spec, constants)


def least_memory(shape: ModelShape, num_ranks: int, constants: MemoryConstants) -> StageMemory | None:
    """A rank that needs no more than the one which needs most, whatever the layout; None where a form has none."""
    return least_rank(shape, num_ranks) if isinstance(constants, UltrabenchMemory) else None


class LargestStage(NamedTuple):
    """What the ranks of a pipeline need at most."""

    allocated_bytes: float
    """The largest bytes of tensors of a rank."""
    peak_bytes: float
    """The largest bytes that the allocator of a rank holds."""
    is_pipelined: bool


def largest_stage(stages: Sequence[StageMemory]) -> LargestStage:
    """The most that one of these ranks needs."""
    max_allocated = max_peak = 0.0
    for stage in stages:
        allocated_bytes = stage.allocated_bytes
        max_allocated = max(max_allocated, allocated_bytes)
        max_peak = max(max_peak, allocated_bytes + stage.reserve)
    return LargestStage(max_allocated, max_peak, len(stages) > 1)


def p_oom(
    stages: Sequence[StageMemory],
    mem_bytes: float,
    constants: MemoryConstants,
    only_stage: StageMemory | None = None,
) -> float:
    """The probability that a run with this memory does not fit into devices of `mem_bytes`, as `p_oom_of` says.

    Args:
        only_stage: one of the stages, if only its own probability is meant.
    """
    largest = largest_stage(stages)
    if only_stage:
        largest = largest._replace(allocated_bytes=only_stage.allocated_bytes)
    return p_oom_of(largest, mem_bytes, constants)


def p_oom_of(largest: LargestStage, mem_bytes: float, constants: MemoryConstants) -> float:
    """The probability that a run with this largest memory does not fit into devices of `mem_bytes`.

    P = Phi(ln(allocated / limit) / sigma), with the standard normal distribution Phi, the rank that allocates most,
    and the limit and sigma of the constants. What the allocator holds besides does not count.
    """
    limit_bytes = _limit_share(constants, is_pipelined=largest.is_pipelined) * mem_bytes
    log_excess = math.log(largest.allocated_bytes / limit_bytes)
    return 0.5 * math.erfc(-log_excess / (constants.limit.sigma * math.sqrt(2)))


def limit_share(stages: Sequence[StageMemory], constants: MemoryConstants) -> float:
    """The part of a device's memory at which one half of such runs fail."""
    return _limit_share(constants, is_pipelined=len(stages) > 1)


def _limit_share(constants: MemoryConstants, *, is_pipelined: bool) -> float:
    return constants.limit.pipeline_share if is_pipelined else constants.limit.share
