"""The memory by part that is predicted for measured runs."""

import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis.measured import measured_runs
from ultrabench.analysis.predict.cases import cases, default_profile
from ultrabench.errors import ConfigError
from ultrabench.result import Status
from ultrabench.sweep.config.load import load_profile
from ultrabench.sweep.predict.memory import memory_constants, predict_memory
from ultrabench.sweep.predict.stage_memory import PARTS


def predicted_parts(table: pa.Table) -> dict[str, dict[str, int]]:
    """Run id -> part of PARTS -> bytes, for runs that ended ok or out of memory; of the rank that needs most.

    They follow from the profile of the kernel as it is now, also where a run was planned with another one.
    Runs of a kernel or hardware without a profile, and those that do not tell their model and layout in full,
    are left out.
    """
    ended = pc.field("is_final") & pc.field("status").isin([Status.OK, Status.OOM])
    runs, _ = measured_runs(table.filter(ended))
    found = {}
    for program in dict.fromkeys((run.spec.kernel.name, run.hardware) for run in runs):
        mine = [run for run in runs if (run.spec.kernel.name, run.hardware) == program]
        try:
            profile = load_profile(default_profile(cases(mine[:1])[0]))
        except ConfigError:
            continue
        constants = memory_constants(profile.framework, profile.memory)
        for run in mine:
            stages = predict_memory(run.spec, constants, every_rank=False)
            stage = max(stages, key=lambda one: one.peak_bytes)
            found[run.run_id] = {part: round(getattr(stage, part)) for part in PARTS}
    return found
