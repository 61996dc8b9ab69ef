"""Writes `errors` and `interval` of the profiles in configs/profiles from measured runs.

    python benchmarks/profile_errors.py published.parquet benchmarks/h100/unseen.parquet

Give it all imported tables and results at once, since what programs have in common is estimated from all of them.
The constants that are fitted to published rows (benchmarks/published.py) are fitted again without the setting of each,
and without its source where intervals without sources are checked.
Profiles with the quality of a fit keep their interval; a program without runs gets the spread over programs. It prints
the errors by factor, and how many runs are inside their interval, also if the runs of their setting, or of their
source, are left out.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from published import FITTED, GROUPS, family_of, part_by_group, values_left_out, with_values

from ultrabench.analysis.results.cases import Case, healthy_timed, open_cases_by_profile
from ultrabench.analysis.studies.predictions.calibrate import errors_lines
from ultrabench.analysis.studies.predictions.error_factors import (
    ErrorRow,
    cross_validated,
    error_row,
    errors_by_factor,
    fit_effects,
    has_own_interval,
    with_errors,
)
from ultrabench.analysis.studies.predictions.error_tables import show_errors_by_factor
from ultrabench.sweep.config.load import load_profile
from ultrabench.sweep.predict.profile import Profile

PROFILES = Path(__file__).parents[1] / "configs" / "profiles"
PROGRAMS = {
    "ultrabench": "our kernel",
    "nanotron": "nanotron",
    "megatron": "Megatron",
    "megatron-perf": "Megatron (NVIDIA's recipes)",
    "megatron-deepspeed": "Megatron-DeepSpeed",
    "internevo": "InternEvo",
    "torchtitan": "torchtitan",
    "llm-foundry": "LLM Foundry",
    "jax": "JAX",
}
"""Name of a profile -> how sentences call its program."""


def replaced_section(text: str, key: str, lines: list[str]) -> str:
    """The text of a YAML file with these lines in place of the section of a key, or at its end."""
    section = re.compile(rf"^{key}:.*\n(?:[ #].*\n)*", re.M)
    new_text = "\n".join(lines) + "\n"
    return section.sub(lambda _: new_text, text) if section.search(text) else text + new_text


def write(profile: Profile) -> None:
    """Writes the errors of a profile, and its interval if they give it."""
    path = PROFILES / f"{profile.name}.yaml"
    text = path.read_text()
    assert profile.errors is not None
    if not has_own_interval(profile):
        low, high = profile.interval["all"]
        comment = "regime: 10 and 90 % quantile of log(measured / predicted), beside errors"
        text = replaced_section(
            text, "interval", [f"interval:  # {comment}", f"  all: [{low:.2f}, {high:.2f}]"]
        )
    path.write_text(replaced_section(text, "errors", [*errors_lines(profile.errors)]))


def left_out_rows(groups: Sequence[tuple[Sequence[Case], Profile]]) -> Iterator[ErrorRow]:
    """The errors of runs, each with constants that were fitted without its setting, or without its source, where they
    are fitted to such runs.

    Args:
        groups: runs and the profile that predicts them.
    """
    for family in dict.fromkeys(family_of(profile) for _, profile in groups):
        members = [(cases, profile) for cases, profile in groups if family_of(profile) == family]
        family_cases = [case for cases, _ in members for case in cases]
        parts = {kind: part_by_group(family_cases, kind) for kind in GROUPS}
        values_by_part = {
            kind: values_left_out(members, family, kind) if family in FITTED else {} for kind in GROUPS
        }

        for cases, profile in members:
            for case in cases:
                values = [
                    values_by_part[kind].get(parts[kind][group_of(case)], {})
                    for kind, group_of in GROUPS.items()
                ]
                yield error_row(case, *(with_values(profile, of_kind) for of_kind in values))


def main() -> None:
    """Reads the runs, fits the errors, and writes them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE.parquet")
    groups = [
        (healthy_timed(cases)[0], profile)
        for file in parser.parse_args().files
        for cases, profile in open_cases_by_profile(file, None, Path(), print, print)
    ]
    profiles, rows = {profile.name: profile for _, profile in groups}, [*left_out_rows(groups)]
    check = cross_validated(rows, [*profiles.values()])
    estimated_rows = [row for row in rows if not has_own_interval(profiles[row.profile])]
    pooled = fit_effects(estimated_rows)
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    for name, program in PROGRAMS.items():
        profile = profiles.get(name) or load_profile(name)
        write(with_errors(profile, pooled, rows, program=program, date=date, check=check))
    written = [load_profile(name) for name in profiles]
    show_errors_by_factor(errors_by_factor(estimated_rows, written))


if __name__ == "__main__":
    main()
