"""Which version of nanotron made a measured run, since versions differ in the memory that they need."""

from dataclasses import replace

from ultrabench.analysis.results.measured import MeasuredRun
from ultrabench.sweep.predict.memory import MemoryConstants
from ultrabench.sweep.predict.nanotron_memory import NanotronMemory

GATHERS_KEPT_JOBS = ((0, 14_017_000), (14_102_400, 14_103_000))
"""Job ids of runs without a pipeline that kept gathered tokens."""
RUN_AHEAD_JOBS = (14_098_500, 14_110_000)
"""Job ids of runs with a pipeline whose host ran ahead of the device, so that more was allocated at once."""


def nanotron_version(run: MeasuredRun) -> str:
    """The `version` of NanotronMemory for an imported run; `latest` unless its job id falls into the
    period of another one.

    The periods were found from the reserved memory of the runs; a pipeline before the fix is marked in the row itself.
    """
    has_pipeline = run.spec.layout.pp > 1
    if has_pipeline and run.kernel_version == "before_pp_fix":
        return "before-fix"
    job_id = int(run.job_id) if run.job_id and run.job_id.isdecimal() and run.source else RUN_AHEAD_JOBS[1]
    if has_pipeline:
        return "run-ahead" if RUN_AHEAD_JOBS[0] < job_id < RUN_AHEAD_JOBS[1] else "latest"
    return "old" if any(low <= job_id < high for low, high in GATHERS_KEPT_JOBS) else "latest"


def with_version(constants: MemoryConstants, run: MeasuredRun) -> MemoryConstants:
    """The constants of nanotron's memory for the version that made a run; those of other programs as they are."""
    if not isinstance(constants, NanotronMemory):
        return constants
    return replace(constants, version=nanotron_version(run))
