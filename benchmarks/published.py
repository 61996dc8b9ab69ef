"""Errors of predictions on tables that others publish, by source, program, GPU, dense or experts, and precision.

`python benchmarks/published.py FILE.parquet... [--leave-out setting|source]` reads tables that `ultrabench import` made
with the maps of examples/import. It prints how many rows can be predicted and why others cannot, then the errors of
step times and of memory, and the rows that ran and that are predicted not to fit.

The constants of FITTED have values in profiles that come from such rows. With --leave-out, they are fitted again
without each part of the settings (model, GPU and number of GPUs; in NUM_PARTS parts) or without each source, and each
row is predicted with constants that it did not decide. Fits start from the values that the constants have without them.
"""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ultrabench.analysis.results.cases import Case, open_cases_by_profile
from ultrabench.analysis.studies.predictions.fit import ERROR_SCALE, fit_values
from ultrabench.analysis.studies.predictions.validate import table
from ultrabench.cli.tables import say, show, warn
from ultrabench.cli.tables import table as text_table
from ultrabench.result import Status
from ultrabench.sweep.predict.predict import LIKELY_OOM
from ultrabench.sweep.predict.profile import Profile
from ultrabench.sweep.predict.time_constants import with_changes

NUM_PARTS = 8
"""Parts of the settings, each of which is left out once."""
RIDGE = 0.5
"""Standard deviation of log(constant / start) of these fits, which have few constants and many rows."""
LAUNCH_RIDGE = 0.15
"""Standard deviation of log(constant / start) of the times of launches, which only small models have: rows of other
programs and clusters than theirs have few of them, and a wide one moved launches to twice what a source that was left
out shows."""
MAX_SOURCE_ROWS = 40
"""Rows of a source from which each of its rows weighs less, so that a source weighs as much as so many rows."""


class Place(NamedTuple):
    """Where a profile has a constant: in `time`, in the factors of a GPU, or in the values of a knob."""

    section: str
    """time, a GPU, or KNOB=VALUE."""
    name: str
    start: float
    """Its value before a fit: an estimate, or that of a program without this term."""
    ridge: float = RIDGE
    """Standard deviation of log(value / start)."""


_A100, _H100_96 = ("A100-SXM-80GB", "A100-SXM-40GB"), "H100-SXM-96GB"
FITTED: Mapping[str, tuple[Place, ...]] = {
    "megatron": (
        Place("time", "gemm_efficiency", 0.7),
        Place("time", "layer_launch_s", 0.002, LAUNCH_RIDGE),
        Place("time", "layer_launch_tp_s", 0.002, LAUNCH_RIDGE),
        Place("time", "expert_efficiency", 0.7),
        Place("B200", "gemm_efficiency", 0.8),
    ),
    "megatron-perf": (Place("time", "fp8_cast_bytes", 4.0), Place("time", "expert_efficiency", 0.7)),
    "torchtitan": (
        Place("fp8_recipe=rowwise", "fp8_efficiency", 0.61),
        Place("tp_overlap=on", "tp_calls", 8.0),
        *(
            Place(gpu, f"{part}_efficiency", 0.9)
            for gpu in (_H100_96, *_A100)
            for part in ("gemm", "attention")
        ),
    ),
}
"""Profile -> its constants that are fitted to published rows; profiles that build on it share them."""


CasesByProfile = Sequence[tuple[Sequence[Case], Profile]]
"""Runs and the profile that predicts them."""


def fit_family(groups: CasesByProfile, places: Sequence[Place]) -> Mapping[Place, float]:
    """The values of `places` with which the profiles of a family predict their runs best, each near its start."""
    cases = [case for group_cases, _ in groups for case in group_cases]
    weights = _weights(cases)

    def errors_of(values: Mapping[Place, float]) -> list[float]:
        fitted = [(group_cases, with_values(profile, values)) for group_cases, profile in groups]
        errors = [_log_error(case, profile) for group_cases, profile in fitted for case in group_cases]
        return [weight * error for weight, error in zip(weights, errors, strict=True)]

    known_sections = {"time", *(case.hardware.gpu for case in cases)}
    known_sections |= {f"{k}={v}" for case in cases for k, v in case.run.spec.flag_values.items()}
    start = {place: place.start for place in places if place.section in known_sections}
    ridges = {place: place.ridge for place in start}
    fitted_values = fit_values(start, errors_of, ERROR_SCALE, ridges, name_of=lambda place: place.name)
    return {place: place.start for place in places} | fitted_values


def _log_error(case: Case, profile: Profile) -> float:
    factors = tuple(profile.gpu_factors.get(case.hardware.gpu, {}).items())
    return replace(case, gpu_factors=factors).log_error(profile.time, profile.flags)


def _weights(cases: Sequence[Case]) -> list[float]:
    num_by_source = pd.Series([case.run.source for case in cases]).value_counts()
    return [min(1.0, MAX_SOURCE_ROWS / num_by_source[case.run.source]) ** 0.5 for case in cases]


def with_values(profile: Profile, values: Mapping[Place, float]) -> Profile:
    """The profile with other values of these constants."""
    time = with_changes(profile.time, tuple((p.name, v) for p, v in values.items() if p.section == "time"))
    factors = {gpu: dict(of_gpu) for gpu, of_gpu in profile.gpu_factors.items()}
    flags = {knob: {v: dict(c) for v, c in by_value.items()} for knob, by_value in profile.flags.items()}
    for place, value in values.items():
        knob, _, knob_value = place.section.partition("=")
        if knob_value:
            flags[knob][knob_value][place.name] = value
        elif place.section != "time":
            factors.setdefault(place.section, {})[place.name] = value
    return replace(profile, time=time, flags=flags, gpu_factors=factors)


def family_of(profile: Profile) -> str:
    """The profile whose fit this one shares: itself, or the one that it builds on."""
    bases = {"megatron-deepspeed": "megatron", "internevo": "megatron", "llm-foundry": "torchtitan"}
    return bases.get(profile.name, profile.name)


GROUPS: Mapping[str, Callable[[Case], Hashable]] = {
    "setting": lambda case: (case.run.spec.shape.name, case.hardware.name, case.run.spec.layout.world_size),
    "source": lambda case: str(case.run.source),
}


def part_by_group(cases: Sequence[Case], group_kind: str) -> dict[Hashable, int]:
    """Group of cases -> the number of the part that is left out with it; each source is a part of its own."""
    groups = sorted({GROUPS[group_kind](case) for case in cases}, key=str)
    return {group: n if group_kind == "source" else n % NUM_PARTS for n, group in enumerate(groups)}


def values_left_out(groups: CasesByProfile, family: str, group_kind: str) -> dict[int, Mapping[Place, float]]:
    """Part of the settings -> the values of FITTED without the rows of this part.

    Args:
        groups: the runs of the profiles of a family.
    """
    parts, places = part_by_group([case for cases, _ in groups for case in cases], group_kind), FITTED[family]
    values_by_part = dict[int, Mapping[Place, float]]()
    for part in sorted({*parts.values()}):
        kept_groups = [
            ([case for case in cases if is_timed(case) and parts[GROUPS[group_kind](case)] != part], profile)
            for cases, profile in groups
        ]
        values_by_part[part] = fit_family(kept_groups, places)
        texts = [f"{p.section} {p.name}={v:.3g}" for p, v in values_by_part[part].items()]
        say(f"{family} without part {part}: {', '.join(texts)}")
    return values_by_part


def is_timed(case: Case) -> bool:
    """Whether a run has a step time to which constants can be fitted."""
    return bool(case.run.step_time_s) and case.run.status == Status.OK


def predictions(paths: Sequence[str], group_kind: str | None) -> pd.DataFrame:
    """The table of `validate.table` of all rows, with `gpu`, `kind` and the left-out constants if asked for."""
    tables, case_profiles = list[pd.DataFrame](), list[tuple[list[Case], Profile]]()
    for path in paths:
        say(f"{path}:")
        case_profiles += open_cases_by_profile(path, None, Path(), say, warn)
    for family in dict.fromkeys(family_of(profile) for _, profile in case_profiles):
        members = [(cases, profile) for cases, profile in case_profiles if family_of(profile) == family]
        family_cases = [case for cases, _ in members for case in cases]
        values_by_part: dict[int, Mapping[Place, float]] = {}
        if group_kind and family in FITTED:
            values_by_part = values_left_out(members, family, group_kind)
        parts = part_by_group(family_cases, group_kind) if values_by_part and group_kind else {}
        for cases, profile in members:
            for case in cases:
                used_profile = profile
                if parts and group_kind:
                    used_profile = with_values(profile, values_by_part[parts[GROUPS[group_kind](case)]])
                factors = tuple(used_profile.gpu_factors.get(case.hardware.gpu, {}).items())
                tables.append(_row_of(replace(case, gpu_factors=factors), used_profile))
    return pd.concat(tables, ignore_index=True)


def _row_of(case: Case, profile: Profile) -> pd.DataFrame:
    row = table([case], partial(_same, profile))
    kind = "experts" if case.run.spec.shape.num_experts else "dense"
    return row.assign(kind=kind, gpu=case.hardware.gpu, routing=case.run.spec.kernel.routing)


def _same(profile: Profile, case: object) -> Profile:
    return profile


ERROR_HEADS = (">rows", ">median %", ">90 %", ">bias %", ">in 80 %", ">memory rows", ">memory median %")


def error_texts(rows: pd.DataFrame) -> tuple[str, ...]:
    """The errors of rows, in the order of ERROR_HEADS."""
    timed = rows[
        (rows.status == Status.OK) & rows.step_time_s.notna() & ~rows.exclusion.fillna("").astype(bool)
    ]
    errors = 100 * (timed.predicted_step_time_s / timed.step_time_s - 1).astype(float)
    inside = 100 * timed.step_time_s.between(timed.predicted_low_s, timed.predicted_high_s)
    with_memory = rows[(rows.status == Status.OK) & rows.peak_mem_bytes.notna()]
    memory_errors = 100 * (with_memory.predicted_peak_mem_bytes / with_memory.peak_mem_bytes - 1).astype(
        float
    )
    numbers = (errors.abs().median(), errors.abs().quantile(0.9), errors.median(), inside.mean())
    texts = [
        "-" if pd.isna(number) else f"{number:.1f}" for number in (*numbers, memory_errors.abs().median())
    ]
    return str(len(timed)), *texts[:4], str(len(memory_errors)), texts[4]


def show_errors(frame: pd.DataFrame) -> None:
    """Prints the errors by each factor and the rows that ran although they are predicted not to fit."""
    factors: tuple[Any, ...] = ("kind", "profile", "gpu", "precision", "routing", "memory_kind")
    for factor in (*factors, ["source", "profile", "gpu", "kind", "precision"]):
        lines = [(str(value), *error_texts(rows)) for value, rows in frame.groupby(factor, dropna=True)]
        lines = [(name.strip("()").replace("'", ""), *texts) for name, *texts in lines]
        title = factor if isinstance(factor, str) else ", ".join(factor)
        show(text_table(title, title, *ERROR_HEADS, rows=lines), "")
    show(text_table("all", "all", *ERROR_HEADS, rows=[("all", *error_texts(frame))]), "")
    unfit = frame[(frame.status == Status.OK) & (frame.p_oom > LIKELY_OOM)]
    num_by_source = unfit.source.value_counts()
    texts = [f"{source} {num}" for source, num in num_by_source.items()]
    show(f"{len(unfit)} rows ran and have P(OOM) above {LIKELY_OOM:.0%}: {', '.join(texts) or 'none'}")


def main(arguments: Sequence[str]) -> None:
    """Prints the errors of the tables that the command line names."""
    words, group_kind = list(arguments), None
    if "--leave-out" in words:
        place = words.index("--leave-out")
        group_kind = words[place + 1] if place + 1 < len(words) else ""
        del words[place : place + 2]
    if not words or (group_kind is not None and group_kind not in GROUPS):
        sys.exit("usage: python benchmarks/published.py FILE.parquet... [--leave-out setting|source]")
    show_errors(predictions(words, group_kind))


if __name__ == "__main__":
    main(sys.argv[1:])
