"""Which version of nanotron and its environment made a run of the Ultra-Scale Playbook."""

from dataclasses import replace

from ultrabench.analysis.measured import MeasuredRun
from ultrabench.sweep.predict.memory import MemoryConstants
from ultrabench.sweep.predict.nanotron_memory import NanotronMemory

GATHERS_KEPT = ((0, 14_017_000), (14_102_400, 14_103_000))
"""Job ids of runs without a pipeline that kept gathered tokens."""
RUN_AHEAD = (14_098_500, 14_110_000)
"""Job ids of runs with a pipeline whose host ran ahead of the device, so that more was allocated at once."""


def nanotron_version(run: MeasuredRun) -> str:
    """The `version` of NanotronMemory for an imported run; latest where its job id does not tell another.

    The periods were found in the reserved memory of the runs: a pipeline before the fix is told by the row itself.
    """
    pipeline = run.spec.layout.pp > 1
    if pipeline and run.kernel_version == "before_pp_fix":
        return "before-fix"
    job = int(run.job_id) if run.job_id and run.job_id.isdecimal() and run.source else RUN_AHEAD[1]
    if pipeline:
        return "run-ahead" if RUN_AHEAD[0] < job < RUN_AHEAD[1] else "latest"
    return "old" if any(low <= job < high for low, high in GATHERS_KEPT) else "latest"


def of_version(constants: MemoryConstants, run: MeasuredRun) -> MemoryConstants:
    """The constants of nanotron's memory for the version that made a run; those of other programs as they are."""
    if not isinstance(constants, NanotronMemory):
        return constants
    return replace(constants, version=nanotron_version(run))
