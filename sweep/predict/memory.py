"""Predicts the memory of a run, by part and by rank of its pipeline, and the chance that it does not fit."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

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


def p_oom(
    stages: Sequence[StageMemory],
    mem_bytes: float,
    constants: MemoryConstants,
    only_stage: StageMemory | None = None,
) -> float:
    """The probability that a run with this memory does not fit into devices of `mem_bytes`.

    P = Phi(ln(allocated / limit) / sigma), with the standard normal distribution Phi, the rank that allocates most,
    and the limit and sigma of the constants. What the allocator holds besides does not count.

    Args:
        only_stage: one of the stages, if only its own probability is meant.
    """
    most_bytes = max(stage.allocated_bytes for stage in ([only_stage] if only_stage else stages))
    log_excess = math.log(most_bytes / (limit_share(stages, constants) * mem_bytes))
    return 0.5 * math.erfc(-log_excess / (constants.limit.sigma * math.sqrt(2)))


def limit_share(stages: Sequence[StageMemory], constants: MemoryConstants) -> float:
    """The part of a device's memory at which one half of such runs fail."""
    return constants.limit.pipeline_share if len(stages) > 1 else constants.limit.share
