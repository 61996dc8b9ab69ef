"""The constants of nanotron's memory that fit measured runs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ultrabench.analysis.results.measured import MeasuredRun
from ultrabench.analysis.results.nanotron_version import nanotron_version
from ultrabench.analysis.studies.predictions.fit import fit_constants
from ultrabench.result import Status
from ultrabench.sweep.predict.nanotron_memory import VERSIONS, NanotronMemory, nanotron_memory

FITTED_NAMES = (
    "layer_hidden", "work_hidden", "work_ffn", "work_gathered", "work_embedding", "gathered", "run_ahead",
    "backward_slack", "optimizer_slack", "base_bytes",
)  # fmt: skip
"""Constants that the fit may change. layer_ffn and logits are known from the code,
the limits from which runs failed."""
ERROR_SCALE = 0.04
"""Error of a prediction, as a logarithm, from which a run pulls the fit less."""
RIDGE = 0.5
"""Standard deviation of log(constant / prior)."""
MAX_UNFILLED_BYTES = 73 * 2**30
"""Reserved bytes above which the allocator of an 80 GiB device gives back what it would hold otherwise."""


def memory_runs(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """The ok runs whose rank 0 reported a peak below MAX_UNFILLED_BYTES:
    only these show how much memory a layout needs.
    """
    ok_runs = (run for run in runs if run.status == Status.OK)
    return [run for run in ok_runs if 0 < (run.peak_mem_reserved_rank0_bytes or 0) < MAX_UNFILLED_BYTES]


def memory_errors(runs: Sequence[MeasuredRun], constants: NanotronMemory) -> list[float]:
    """log(measured / predicted) of the memory that rank 0 reserved in runs that `memory_runs` gives,
    each with its own version.
    """
    constants_by_version = {version: replace(constants, version=version) for version in VERSIONS}
    return [
        math.log(run.peak_mem_reserved_rank0_bytes or 0)
        - math.log(nanotron_memory(run.spec, constants_by_version[nanotron_version(run)])[0].peak_bytes)
        for run in runs
    ]


def fit_memory(runs: Sequence[MeasuredRun], prior: NanotronMemory) -> NanotronMemory:
    """The constants that predict the reserved memory of runs that `memory_runs` gives best without
    moving far from `prior`.
    """
    return fit_constants(prior, FITTED_NAMES, lambda fitted: memory_errors(runs, fitted), ERROR_SCALE, RIDGE)
