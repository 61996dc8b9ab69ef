"""Compares predictions with measured runs: how far off they are, and what a search that trusts them would lose."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ultrabench.analysis.predict.cases import Case, exclusions, healthy_timed
from ultrabench.analysis.predict.fit import FP8_NAMES, fit_time, intervals
from ultrabench.analysis.predict.nanotron import fit_memory, of_version, usable
from ultrabench.errors import ConfigError, counted
from ultrabench.layout import AXES, DEGREES, DIVIDES
from ultrabench.record import to_dict
from ultrabench.result import Status
from ultrabench.sweep.predict.memory import limit_share, memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.nanotron_memory import NanotronMemory
from ultrabench.sweep.predict.predict import LIKELY_OOM
from ultrabench.sweep.predict.profile import Profile

GROUPS: Mapping[str, Callable[[Case], Hashable]] = {
    "model": lambda case: case.run.spec.shape.name,
    "nodes": lambda case: case.run.spec.nodes,
}
"""What `--leave-out` can leave out -> the group of a case."""
SLICES = ("model", "nodes", "parallelism")
"""Columns of the table, for each value of which there are metrics; those of precision only where it differs."""
CELL = ["model_id", "gbs", "nodes"]
"""Columns of the table whose values the runs of a cell share: they train the same model on the same nodes."""
ROW_COLUMNS = (
    "run_id",
    "source",
    "profile",
    "hardware",
    "nodes",
    "model",
    "precision",
    "layout",
    "compile",
    "exclusion",
)
"""Columns of the table that say which run `row_errors` describes."""
MIN_RANKED = 5
"""Fewest runs with a step time in a cell for which their order is evaluated."""
TOP_LAYOUTS = 5
"""Number of the fastest predicted layouts among which the best one is looked for."""
PRUNED_P_OOM = 0.9
"""P(OOM) above which a plan leaves a layout out."""
BORDERLINE = (46 / 79.11, 92 / 79.11)
"""Allocated bytes / memory of the device between which P(OOM) is hard to tell: 46 and 92 GiB of an H100."""
ALLOCATABLE_SHARE = 0.967
"""Largest share of a device's memory that an allocator can hold: 76.5 of 79.1 GiB, CUDA and NCCL need the rest."""


def priors_of_fp8(cases: Sequence[Case], profile: Profile) -> str | None:
    """A sentence about rows in fp8 where no run of the profile's fit had it; None where there are none."""
    num_rows = sum(case.run.spec.kernel.precision == "fp8" for case in cases)
    if not num_rows or "fp8" in profile.measured.get("precision", ()):
        return None
    priors = ", ".join(f"{name}={getattr(profile.time, name):g}" for name in sorted(FP8_NAMES))
    return f"{counted(num_rows, 'row')} in fp8: profile {profile.name} was fitted without fp8, so {priors} are priors"


def without_own_group(cases: Sequence[Case], prior: Profile, by: str) -> dict[Hashable, Profile]:
    """Group -> the profile that is fitted to the runs of all other groups, starting from `prior`.

    Step times are fitted to healthy runs; the intervals come from their errors, each with the constants that were
    fitted without its group. Memory is fitted for nanotron only, but not the limits behind P(OOM).

    Raises:
        ConfigError: the healthy runs are in fewer than two groups, so that none are left to fit to.
    """
    group = GROUPS[by]
    timed, _ = healthy_timed(cases)
    healthy_groups = sorted({str(group(case)) for case in timed})
    if len(healthy_groups) < 2:
        values_text = f"{by}={', '.join(healthy_groups) or 'none'}"
        fact = f"--leave-out {by} needs healthy runs with at least 2 values of {by}; these have {values_text}"
        raise ConfigError(fact, "give results with more values")
    memory = memory_constants(prior.framework, prior.memory)
    groups = sorted({group(case) for case in cases}, key=str)
    constants_by_group = {
        name: fit_time([case for case in timed if group(case) != name], prior.time) for name in groups
    }
    case_errors = [(case, case.log_error(constants_by_group[group(case)])) for case in timed]
    profile_by_group: dict[Hashable, Profile] = {}
    for group_left_out in groups:
        kept_errors = [(case, error) for case, error in case_errors if group(case) != group_left_out]
        interval = intervals([case for case, _ in kept_errors], [error for _, error in kept_errors])
        profile = replace(prior, time=constants_by_group[group_left_out], interval=interval)
        if isinstance(memory, NanotronMemory):
            runs = usable(case.run for case in cases if group(case) != group_left_out)
            profile = replace(profile, memory=to_dict(fit_memory(runs, memory)))
        profile_by_group[group_left_out] = profile
    return profile_by_group


def table(cases: Sequence[Case], profile_of: Callable[[Case], Profile]) -> pd.DataFrame:
    """One row for each case: its layout, what was measured, and what its profile predicts with its interval."""
    reasons = exclusions(cases)
    rows = pd.DataFrame([_row(case, profile_of(case)) for case in cases])
    return rows.assign(healthy=[not reason for reason in reasons], exclusion=reasons)


def _row(case: Case, profile: Profile) -> dict[str, Any]:
    run, spec = case.run, case.run.spec
    time_s, low_s, high_s = case.interval_s(profile)
    layout = {name: getattr(spec.layout, name) for name in AXES}
    return {
        "run_id": run.run_id,
        "job_id": run.job_id,
        "source": run.source,
        "profile": profile.name,
        "hardware": case.hardware.name,
        "model": spec.shape.name,
        "model_id": spec.shape.model_id,
        "num_params": spec.shape.num_params,
        "gbs": spec.workload.gbs,
        "nodes": spec.nodes,
        **layout,
        "precision": spec.kernel.precision,
        "parallelism": " ".join(axis for axis in (*DEGREES, *DIVIDES) if layout[axis] > 1) or "one rank",
        "layout": spec.label(),
        "status": str(run.status),
        "regime": case.regime,
        "compile": spec.kernel.compile,
        "step_time_s": run.step_time_s,
        "tokens_per_s_per_gpu": run.step_time_s
        and spec.tokens_per_step / run.step_time_s / spec.layout.world_size,
        "predicted_step_time_s": time_s,
        "predicted_low_s": low_s,
        "predicted_high_s": high_s,
        "peak_mem_reserved_bytes": run.peak_mem_reserved_rank0_bytes or run.peak_mem_reserved_bytes,
        **_memory(case, profile),
    }


def _memory(case: Case, profile: Profile) -> dict[str, float]:
    """The columns about memory; that of rank 0 is compared where the row has no other."""
    constants = of_version(memory_constants(profile.framework, profile.memory), case.run)
    stages, device_bytes = predict_memory(case.run.spec, constants), case.hardware.mem_bytes
    # An allocator gives back its reserve before it fails.
    limit_bytes, most_bytes = limit_share(stages, constants) * device_bytes, ALLOCATABLE_SHARE * device_bytes
    peaks = [min(s.peak_bytes, max(s.allocated_bytes, limit_bytes), most_bytes) for s in stages]
    return {
        "predicted_peak_mem_bytes": peaks[0] if case.run.peak_mem_reserved_rank0_bytes else max(peaks),
        "allocated_share": max(s.allocated_bytes for s in stages) / device_bytes,
        "p_oom": p_oom(stages, device_bytes, constants),
    }


def row_errors(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """What is measured and predicted of each run that has a step time, in tokens/s/GPU, as JSON values.

    `step_time_error` is predicted / measured step time - 1, whose size the summaries have; `inside` says whether the
    measured speed lies in the 80 % interval.
    """
    timed = rows[(rows.status == Status.OK) & rows.step_time_s.notna()]
    tokens_per_gpu = timed.tokens_per_s_per_gpu * timed.step_time_s
    speeds = {
        "predicted_tokens_per_s_per_gpu": tokens_per_gpu / timed.predicted_step_time_s,
        "low_tokens_per_s_per_gpu": tokens_per_gpu / timed.predicted_high_s,
        "high_tokens_per_s_per_gpu": tokens_per_gpu / timed.predicted_low_s,
        "step_time_error": timed.predicted_step_time_s / timed.step_time_s - 1,
        "inside": timed.step_time_s.between(timed.predicted_low_s, timed.predicted_high_s),
    }
    described = timed.assign(**speeds)[[*ROW_COLUMNS, "tokens_per_s_per_gpu", *speeds]]
    return [{str(name): value for name, value in row.items()} for row in described.to_dict("records")]


def metrics(rows: pd.DataFrame) -> dict[str, Any]:
    """The metrics of docs/design/prediction.md for the healthy rows and for all, as JSON values.

    Excluded rows do not count for step times; for memory and P(OOM) all rows do, because links do not change them.
    """
    return {"healthy": _metrics(rows.assign(timed=rows.healthy)), "all": _metrics(rows.assign(timed=True))}


def _metrics(rows: pd.DataFrame) -> dict[str, Any]:
    slices = (*SLICES, "precision") if rows.precision.nunique() > 1 else SLICES
    errors = {name: {str(value): _errors(part) for value, part in rows.groupby(name)} for name in slices}
    num_by_reason = rows.exclusion[~rows.timed].value_counts().to_dict()
    return _errors(rows) | {"by": errors, "excluded_by_reason": num_by_reason}


def _errors(rows: pd.DataFrame) -> dict[str, Any]:
    ok_rows = rows[rows.status == Status.OK]
    timed_rows = ok_rows[ok_rows.timed & ok_rows.step_time_s.notna()]
    ratios = timed_rows.step_time_s / timed_rows.predicted_step_time_s
    cells = [cell for _, cell in timed_rows.groupby(CELL) if len(cell) >= MIN_RANKED]
    is_inside = timed_rows.step_time_s.between(timed_rows.predicted_low_s, timed_rows.predicted_high_s)
    memory_rows = ok_rows[ok_rows.predicted_peak_mem_bytes.notna() & ok_rows.peak_mem_reserved_bytes.notna()]
    return {
        "rows": int(rows.timed.sum()),
        "excluded": int((~rows.timed).sum()),
        "more_than_twice": int((ratios > 2).sum()),
        "step_time": _quantiles(timed_rows.predicted_step_time_s, timed_rows.step_time_s)
        | {"spearman_in_cell": _mean(map(_rank_correlation, cells))},
        "interval": {
            "coverage": _mean(is_inside),
            "regimes": {str(name): _mean(part) for name, part in is_inside.groupby(timed_rows.regime)},
        },
        "memory": _quantiles(memory_rows.predicted_peak_mem_bytes, memory_rows.peak_mem_reserved_bytes),
        "oom": _oom(rows[rows.p_oom.notna()]),
        "planning": _planning(cells),
    }


def _quantiles(predicted: pd.Series, measured: pd.Series) -> dict[str, float | None]:
    """The number of rows, and the median and 90 % quantile of |predicted / measured - 1|."""
    relative_errors = (predicted / measured - 1).astype(float).abs()
    return {
        "rows": len(relative_errors),
        "median_error": _known(float(relative_errors.median())),
        "p90_error": _known(float(relative_errors.quantile(0.9))),
    }


def _rank_correlation(cell: pd.DataFrame) -> float:
    return float(cell.predicted_step_time_s.rank().corr(cell.step_time_s.rank()))


def _oom(rows: pd.DataFrame) -> dict[str, float | None]:
    """How often P(OOM) > LIKELY_OOM is right, overall and near the limit, and which share of each outcome PRUNED_P_OOM prunes."""
    is_oom, is_pruned = rows.status == Status.OOM, rows.p_oom > PRUNED_P_OOM
    is_right = (rows.p_oom > LIKELY_OOM) == is_oom
    return {
        "rows": len(rows),
        "accuracy": _mean(is_right),
        "borderline_accuracy": _mean(is_right[rows.allocated_share.between(*BORDERLINE)]),
        "false_prune": _mean(is_pruned[~is_oom]),
        "caught": _mean(is_pruned[is_oom]),
    }


def _planning(cells: Sequence[pd.DataFrame]) -> dict[str, float | None]:
    """How good the layouts are that a search finds if it runs the fastest predicted ones of each cell first."""
    hits, regrets = [], []
    for cell in cells:
        times_s = cell.sort_values("predicted_step_time_s").step_time_s
        hits.append(times_s.iloc[:TOP_LAYOUTS].min() <= times_s.min())
        regrets.append(times_s.iloc[0] / times_s.min() - 1)
    return {"best_in_top5": _mean(hits), "top1_regret": _mean(regrets)}


def _mean(values: Iterable[float]) -> float | None:
    """The mean of the values that are known; None without any."""
    return _known(float(pd.Series(list(values), dtype=float).mean()))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
