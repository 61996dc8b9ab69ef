"""Writes `errors` and `interval` of the profiles in configs/profiles from measured runs.

    python benchmarks/profile_errors.py published.parquet benchmarks/h100/unseen.parquet

Give it all imported tables and results at once, since what programs have in common is estimated from all of them.
Profiles whose constants were fitted (`quality`) keep their interval; a program without runs gets the spread over
programs. It prints how many of the runs are inside their interval if the runs of their setting, or of their source,
are left out.
"""

import argparse
import re
from datetime import UTC, datetime
from pathlib import Path

from ultrabench.analysis.results.cases import healthy_timed, open_cases_by_profile
from ultrabench.analysis.studies.predictions.calibrate import errors_lines
from ultrabench.analysis.studies.predictions.error_factors import (
    ErrorRow,
    cross_validated,
    error_row,
    fit_effects,
    has_own_interval,
    with_errors,
)
from ultrabench.sweep.config.load import load_profile
from ultrabench.sweep.predict.profile import Profile

PROFILES = Path(__file__).parents[1] / "configs" / "profiles"
PROGRAMS = {
    "ultrabench": "our kernel",
    "nanotron": "nanotron",
    "megatron": "Megatron",
    "megatron-perf": "Megatron (NVIDIA's recipes)",
    "megatron-deepspeed": "Megatron-DeepSpeed",
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


def main() -> None:
    """Reads the runs, fits the errors, and writes them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE.parquet")
    files, rows, profiles = parser.parse_args().files, list[ErrorRow](), dict[str, Profile]()
    for file in files:
        for cases, profile in open_cases_by_profile(file, None, Path(), print, print):
            profiles[profile.name] = profile
            rows += [error_row(case, profile) for case in healthy_timed(cases)[0]]
    check = cross_validated(rows, [*profiles.values()])
    pooled = fit_effects([row for row in rows if not has_own_interval(profiles[row.profile])])
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    for name, program in PROGRAMS.items():
        profile = profiles.get(name) or load_profile(name)
        write(with_errors(profile, pooled, rows, program=program, date=date, check=check))
    for group_kind, runs in check.runs_by_group.items():
        print(f"{group_kind} left out: {sum(run.is_inside for run in runs)} of {len(runs)} inside")


if __name__ == "__main__":
    main()
