"""Compares predictions with measured runs: how far off they are, and what a search that trusts them would lose."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ultrabench.analysis.results.cases import Case, exclusions, healthy_timed
from ultrabench.analysis.results.nanotron_version import with_version
from ultrabench.analysis.studies.predictions.fit import FP8_NAMES, FittedTime, fit_time, intervals
from ultrabench.analysis.studies.predictions.nanotron import fit_memory, memory_runs
from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import SCALED_PRECISIONS
from ultrabench.layout import AXES, DEGREES, DIVIDES
from ultrabench.record import to_dict
from ultrabench.result import Status
from ultrabench.sweep.config.load import load_profile
from ultrabench.sweep.predict.memory import limit_share, memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.nanotron_memory import NanotronMemory
from ultrabench.sweep.predict.predict import LIKELY_OOM
from ultrabench.sweep.predict.profile import Profile
from ultrabench.sweep.predict.stage_memory import DEVICE_BYTES

GROUPS: Mapping[str, Callable[[Case], Hashable]] = {
    "model": lambda case: case.run.spec.shape.name,
    "nodes": lambda case: case.run.spec.nodes,
}
"""Value of `--leave-out` -> function that gives the group of a case, such as its model."""
SLICE_COLUMNS = ("model", "nodes", "parallelism")
"""Columns of the table for whose values there are metrics of their own; `precision` is one more where it varies."""
CELL_COLUMNS = ["model_id", "gbs", "nodes"]
"""Columns of the table whose values the runs of a cell share: they train the same model on the same nodes."""
RUN_COLUMNS = (
    "run_id", "source", "profile", "hardware", "nodes", "model", "precision", "layout", "compile",
    "exclusion",
)  # fmt: skip
"""Columns of the table that say which run `error_records` describes."""
MIN_RANKED = 5
"""Fewest runs with a step time in a cell for which the order of their predictions is evaluated."""
TOP_LAYOUTS = 5
"""Number of layouts with the shortest predicted step times among which the best one should be."""
PRUNING_P_OOM = 0.9
"""P(OOM) above which these metrics count a layout as pruned."""
BORDERLINE_SHARES = (46 / 79.11, 92 / 79.11)
"""Fractions of the device's memory between which predicted allocated memory makes P(OOM) hard to tell:
46 and 92 GiB of an H100."""
RESERVED, ALLOCATED, DEVICE = "reserved", "allocated", "device"
"""Kinds of memory that a row may have, each of which is compared with a prediction of its kind."""
ALLOCATABLE_SHARE = 0.967
"""Largest fraction of a device's memory that an allocator can hold: 76.5 of 79.1 GiB, CUDA and NCCL need the rest."""


def fp8_priors_warning(cases: Sequence[Case], profile: Profile) -> str | None:
    """A warning about rows in fp8 if the profile was fitted without fp8; None if there are no such rows."""
    precisions = [case.run.spec.kernel.precision for case in cases]
    num_rows = sum(precision in SCALED_PRECISIONS for precision in precisions)
    if not num_rows or {*SCALED_PRECISIONS} & {*profile.measured.get("precision", ())}:
        return None
    priors_text = ", ".join(f"{name}={getattr(profile.time, name):g}" for name in sorted(FP8_NAMES))
    return (
        f"{counted(num_rows, 'row')} in {' or '.join(p for p in SCALED_PRECISIONS if p in precisions)}: "
        f"profile {profile.name} was fitted without them, "
        f"so {priors_text} are priors"
    )


def fit_notes(cases: Sequence[Case], profile: Profile) -> Iterator[str]:
    """Lines that say when errors of these predictions are not those of unseen runs."""
    if warning := fp8_priors_warning(cases, profile):
        yield warning
    if profile.prior:
        fit_text = (
            f"profile {profile.name}: {profile.source}; for the runs of that fit, the errors are fit errors"
        )
        yield f"{fit_text}: for unseen runs, add --leave-out model or nodes"


def start_profile(profile: Profile) -> Profile:
    """The profile from which a fit without some of the runs starts.

    It is the one from which `profile` was fitted, with the limits of memory of `profile`, which no fit changes.
    """
    prior = load_profile(profile.prior) if profile.prior else profile
    memory_limits = {name: value for name, value in profile.memory.items() if name.endswith("limit")}
    return replace(prior, memory=prior.memory | memory_limits)


def profiles_without_group(cases: Sequence[Case], prior: Profile, group_kind: str) -> dict[Hashable, Profile]:
    """Group, such as a model -> the profile that is fitted to the runs of all other groups, starting from `prior`.

    `group_kind` is a key of GROUPS.

    The constants of step time are fitted to healthy runs. The intervals come from the errors of healthy runs, each
    predicted with the constants that were fitted without its own group. Memory is fitted for nanotron only, but not
    the limits behind P(OOM).

    Raises:
        ConfigError: the healthy runs are in fewer than two groups, so that none are left to fit to.
    """
    group_of = GROUPS[group_kind]
    timed_cases, _ = healthy_timed(cases)
    healthy_groups = sorted({str(group_of(case)) for case in timed_cases})
    if len(healthy_groups) < 2:
        groups_text = f"{group_kind}={', '.join(healthy_groups) or 'none'}"
        problem = (
            f"--leave-out {group_kind} needs healthy runs with at least 2 values of {group_kind}; "
            f"these have {groups_text}"
        )
        raise ConfigError(problem, "give results with more values")
    prior_memory = memory_constants(prior.framework, prior.memory)
    groups = sorted({group_of(case) for case in cases}, key=str)
    constants_by_left_out = {
        group: fit_time(
            [case for case in timed_cases if group_of(case) != group], FittedTime(prior.time, prior.flags)
        ).constants
        for group in groups
    }
    case_error_pairs = [
        (case, case.log_error(*constants_by_left_out[group_of(case)])) for case in timed_cases
    ]
    profile_by_group: dict[Hashable, Profile] = {}
    for group_left_out in groups:
        kept_pairs = [pair for pair in case_error_pairs if group_of(pair[0]) != group_left_out]
        interval = intervals([case for case, _ in kept_pairs], [log_error for _, log_error in kept_pairs])
        time, flags = constants_by_left_out[group_left_out]
        profile = replace(prior, time=time, flags=to_dict(flags), interval=interval)
        if isinstance(prior_memory, NanotronMemory):
            runs = memory_runs(case.run for case in cases if group_of(case) != group_left_out)
            profile = replace(profile, memory=to_dict(fit_memory(runs, prior_memory)))
        profile_by_group[group_left_out] = profile
    return profile_by_group


def table(cases: Sequence[Case], profile_of: Callable[[Case], Profile]) -> pd.DataFrame:
    """The table of cases, one row each: its layout, what was measured, and what its profile predicts
    with its interval.
    """
    reasons = exclusions(cases)
    frame = pd.DataFrame([_row(case, profile_of(case)) for case in cases])
    return frame.assign(healthy=[not reason for reason in reasons], exclusion=reasons)


def _row(case: Case, profile: Profile) -> dict[str, Any]:
    run, spec = case.run, case.run.spec
    predicted_s, low_s, high_s = case.interval_s(profile)
    value_by_axis = {axis: getattr(spec.layout, axis) for axis in AXES}
    return {
        "run_id": run.run_id, "job_id": run.job_id, "source": run.source, "profile": profile.name,
        "hardware": case.hardware.name, "model": spec.shape.name, "model_id": spec.shape.model_id,
        "num_params": spec.shape.num_params, "gbs": spec.workload.gbs, "nodes": spec.nodes, **value_by_axis,
        "precision": spec.kernel.precision,
        "parallelism": " ".join(axis for axis in (*DEGREES, *DIVIDES) if value_by_axis[axis] > 1) or "one rank",
        "layout": spec.label(), "status": str(run.status), "regime": case.regime,
        "compile": spec.kernel.compile, "step_time_s": run.step_time_s,
        "tokens_per_s_per_gpu": run.step_time_s and spec.tokens_per_step / run.step_time_s / spec.layout.world_size,
        "predicted_step_time_s": predicted_s, "predicted_low_s": low_s, "predicted_high_s": high_s,
        **_memory_columns(case, profile),
    }  # fmt: skip


def _memory_columns(case: Case, profile: Profile) -> dict[str, Any]:
    """The columns about memory, in bytes and fractions of the device.

    The predicted peak is of the same kind as the measured one: what rank 0 reserved or else what any rank reserved,
    allocated, or held with all that its driver counts, the first of these that was measured.
    """
    constants = with_version(memory_constants(profile.framework, profile.memory), case.run)
    stages = predict_memory(profile.as_divided(case.run.spec), constants)
    mem_bytes = case.hardware.mem_bytes
    # Above limit_bytes, where half of the runs fail, an allocator gives back its reserve and keeps what is allocated.
    limit_bytes, allocatable_bytes = limit_share(stages, constants) * mem_bytes, ALLOCATABLE_SHARE * mem_bytes
    peaks = [min(s.peak_bytes, max(s.allocated_bytes, limit_bytes), allocatable_bytes) for s in stages]
    run, largest_bytes = case.run, max(s.allocated_bytes for s in stages)
    device_bytes = getattr(constants, "device_bytes", DEVICE_BYTES)
    kinds = (
        (RESERVED, run.peak_mem_reserved_rank0_bytes, peaks[0]),
        (RESERVED, run.peak_mem_reserved_bytes, max(peaks)),
        (ALLOCATED, run.peak_mem_allocated_bytes, largest_bytes),
        (DEVICE, run.peak_mem_device_bytes, max(peaks) + device_bytes),
    )
    kind, measured_bytes, predicted_bytes = next((of for of in kinds if of[1]), (None, None, max(peaks)))
    return {
        "memory_kind": kind,
        "peak_mem_bytes": measured_bytes,
        "predicted_peak_mem_bytes": predicted_bytes,
        "allocated_share": largest_bytes / mem_bytes,
        "p_oom": p_oom(stages, mem_bytes, constants),
    }


def error_records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A record of JSON values for each ok run with a step time: RUN_COLUMNS,
    measured and predicted tokens/s/GPU, and errors.

    `step_time_error` is predicted / measured step time - 1; `inside` says whether the measured step time lies in the
    predicted 80 % interval.
    """
    timed_rows = frame[(frame.status == Status.OK) & frame.step_time_s.notna()]
    tokens_per_gpu = timed_rows.tokens_per_s_per_gpu * timed_rows.step_time_s
    new_columns = {
        "predicted_tokens_per_s_per_gpu": tokens_per_gpu / timed_rows.predicted_step_time_s,
        "low_tokens_per_s_per_gpu": tokens_per_gpu / timed_rows.predicted_high_s,
        "high_tokens_per_s_per_gpu": tokens_per_gpu / timed_rows.predicted_low_s,
        "step_time_error": timed_rows.predicted_step_time_s / timed_rows.step_time_s - 1,
        "inside": timed_rows.step_time_s.between(timed_rows.predicted_low_s, timed_rows.predicted_high_s),
    }
    described_rows = timed_rows.assign(**new_columns)[[*RUN_COLUMNS, "tokens_per_s_per_gpu", *new_columns]]
    return [{str(name): value for name, value in row.items()} for row in described_rows.to_dict("records")]


def metrics(frame: pd.DataFrame) -> dict[str, Any]:
    """The metrics of docs/design/prediction.md for the healthy rows and for all, as JSON values.

    The metrics of step times use the rows marked by the column `is_counted`; those of memory and P(OOM) use all rows,
    because slow links do not change them.
    """
    healthy_marked, all_marked = frame.assign(is_counted=frame.healthy), frame.assign(is_counted=True)
    return {"healthy": _metrics_by_slice(healthy_marked), "all": _metrics_by_slice(all_marked)}


def _metrics_by_slice(frame: pd.DataFrame) -> dict[str, Any]:
    slice_columns = (*SLICE_COLUMNS, "precision") if frame.precision.nunique() > 1 else SLICE_COLUMNS
    metrics_by_column = {
        column: {str(value): _slice_metrics(rows) for value, rows in frame.groupby(column)}
        for column in slice_columns
    }
    num_by_reason = frame.exclusion[~frame.is_counted].value_counts().to_dict()
    return _slice_metrics(frame) | {"by": metrics_by_column, "excluded_by_reason": num_by_reason}


def _slice_metrics(frame: pd.DataFrame) -> dict[str, Any]:
    ok_rows = frame[frame.status == Status.OK]
    timed_rows = ok_rows[ok_rows.is_counted & ok_rows.step_time_s.notna()]
    measured_over_predicted = timed_rows.step_time_s / timed_rows.predicted_step_time_s
    rows_of_cells = [rows for _, rows in timed_rows.groupby(CELL_COLUMNS) if len(rows) >= MIN_RANKED]
    is_inside = timed_rows.step_time_s.between(timed_rows.predicted_low_s, timed_rows.predicted_high_s)
    memory_rows = ok_rows[ok_rows.predicted_peak_mem_bytes.notna() & ok_rows.peak_mem_bytes.notna()]
    return {
        "rows": int(frame.is_counted.sum()),
        "excluded": int((~frame.is_counted).sum()),
        "more_than_twice": int((measured_over_predicted > 2).sum()),
        "step_time": _error_quantiles(timed_rows.predicted_step_time_s, timed_rows.step_time_s)
        | {"spearman_in_cell": _mean(map(_rank_correlation, rows_of_cells))},
        "interval": {
            "coverage": _mean(is_inside),
            "regimes": {str(name): _mean(flags) for name, flags in is_inside.groupby(timed_rows.regime)},
        },
        "memory": _error_quantiles(memory_rows.predicted_peak_mem_bytes, memory_rows.peak_mem_bytes)
        | {"rows_by_kind": memory_rows.memory_kind.value_counts().to_dict()},
        "oom": _oom_metrics(frame[frame.p_oom.notna()]),
        "planning": _planning_metrics(rows_of_cells),
    }


def _error_quantiles(predicted: pd.Series, measured: pd.Series) -> dict[str, float | None]:
    """The number of rows, and the median and 90 % quantile of |predicted / measured - 1|."""
    relative_errors = (predicted / measured - 1).astype(float).abs()
    return {
        "rows": len(relative_errors),
        "median_error": _none_if_nan(float(relative_errors.median())),
        "p90_error": _none_if_nan(float(relative_errors.quantile(0.9))),
    }


def _rank_correlation(cell_rows: pd.DataFrame) -> float:
    return float(cell_rows.predicted_step_time_s.rank().corr(cell_rows.step_time_s.rank()))


def _oom_metrics(frame: pd.DataFrame) -> dict[str, float | None]:
    """How often P(OOM) > LIKELY_OOM is right, overall and near the limit, and which share of each outcome P(OOM) >
    PRUNING_P_OOM prunes.
    """
    is_oom, is_pruned = frame.status == Status.OOM, frame.p_oom > PRUNING_P_OOM
    is_right = (frame.p_oom > LIKELY_OOM) == is_oom
    return {
        "rows": len(frame),
        "accuracy": _mean(is_right),
        "borderline_accuracy": _mean(is_right[frame.allocated_share.between(*BORDERLINE_SHARES)]),
        "false_prune": _mean(is_pruned[~is_oom]),
        "caught": _mean(is_pruned[is_oom]),
    }


def _planning_metrics(rows_of_cells: Sequence[pd.DataFrame]) -> dict[str, float | None]:
    """How good the layouts are that a search finds if it runs the fastest predicted ones of each cell first."""
    is_best_in_top5, regrets = [], []
    for cell_rows in rows_of_cells:
        times_s = cell_rows.sort_values("predicted_step_time_s").step_time_s
        is_best_in_top5.append(times_s.iloc[:TOP_LAYOUTS].min() <= times_s.min())
        regrets.append(times_s.iloc[0] / times_s.min() - 1)
    return {"best_in_top5": _mean(is_best_in_top5), "top1_regret": _mean(regrets)}


def _mean(values: Iterable[float]) -> float | None:
    """The mean of the values that are known; None without any."""
    return _none_if_nan(float(pd.Series(list(values), dtype=float).mean()))


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
