"""Fits the constants of nanotron's memory to the peaks that measured runs reserved on their first rank."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ultrabench.analysis.measured import MeasuredRun
from ultrabench.analysis.predict.fit import fit_constants
from ultrabench.analysis.predict.nanotron_version import nanotron_version
from ultrabench.result import Status
from ultrabench.sweep.predict.nanotron_memory import VERSIONS, NanotronMemory, nanotron_memory

FITTED = (
    "layer_hidden", "work_hidden", "work_ffn", "work_gathered", "work_embedding", "logits", "gathered", "run_ahead",
    "backward_slack", "optimizer_slack", "base_bytes",
)  # fmt: skip
"""Constants that the fit may change. layer_ffn is known from the code, the limits from which runs failed."""
ERROR_SCALE = 0.04
"""Error of a prediction, as a logarithm, from which a run pulls the fit less."""
RIDGE = 0.5
"""Standard deviation of log(constant / prior)."""
NOT_FULL = 73 * 2**30
"""Reserved bytes above which the allocator of an 80 GiB device gives back what it would hold otherwise."""


def usable(given: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """The ok runs whose rank 0 reported a peak below NOT_FULL: only these tell how much memory a layout needs."""
    ok = (run for run in given if run.status == Status.OK)
    return [run for run in ok if 0 < (run.peak_mem_reserved_rank0_bytes or 0) < NOT_FULL]


def memory_errors(given: Sequence[MeasuredRun], constants: NanotronMemory) -> list[float]:
    """log(measured / predicted) of the memory that rank 0 of usable runs reserved, each with its own version."""
    versions = {version: replace(constants, version=version) for version in VERSIONS}
    return [
        math.log(run.peak_mem_reserved_rank0_bytes or 0)
        - math.log(nanotron_memory(run.spec, versions[nanotron_version(run)])[0].peak_bytes)
        for run in given
    ]


def fit_memory(given: Sequence[MeasuredRun], prior: NanotronMemory) -> NanotronMemory:
    """The constants that predict the reserved memory of usable runs best without moving far from `prior`."""
    return fit_constants(prior, FITTED, lambda now: memory_errors(given, now), ERROR_SCALE, RIDGE)
