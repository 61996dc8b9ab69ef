"""Rates that follow from measured step times: tokens a second, mfu, hfu."""

from statistics import median
from typing import Any

from ultrabench.hardware import Peak
from ultrabench.model_shape import ModelShape
from ultrabench.result import RunResult
from ultrabench.step_time import ci95_rel

FLOPS_FORMULA = "matmul-v1"


def speed_columns(
    result: RunResult, *, shape: ModelShape | None, peak: Peak | None, seq_len: int, gbs: int, gpus: int
) -> dict[str, Any]:
    """Columns from `step_time_s` to `model_flops_per_s_per_gpu` of an ok result.

    mfu = FLOPs of a token * tokens a second a GPU / peak. A column is absent where its inputs are
    unknown; without a measured step all are.
    """
    if not result.step_times_s:
        return {}
    step_time_s = median(result.step_times_s)
    tokens_per_s = gbs * seq_len / step_time_s
    out: dict[str, Any] = {
        "step_time_s": step_time_s,
        "step_times_s": list(result.step_times_s),
        "step_time_ci95_rel": ci95_rel(result.step_times_s),
        "num_steps_measured": len(result.step_times_s),
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / gpus,
    }
    if shape is not None:
        rate = shape.flops_per_token(seq_len, FLOPS_FORMULA) * tokens_per_s / gpus
        out["model_flops_per_s_per_gpu"] = rate
        out["flops_formula"] = FLOPS_FORMULA
        if peak is not None:
            out["mfu"] = rate / peak.flops_per_s
    if result.hardware_flops_per_step is not None and peak is not None:
        executed = result.hardware_flops_per_step / step_time_s / gpus
        out["hfu"] = executed / peak.flops_per_s
    return out
