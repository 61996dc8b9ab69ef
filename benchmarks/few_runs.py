"""What few runs teach a profile: errors and order of the other runs before and after `ultrabench predict calibrate`.

`python benchmarks/few_runs.py FILE.parquet...` reads tables that `ultrabench import` made with the maps of
examples/import. It draws runs of each source, program and GPU with MIN_GROUP runs at random, calibrates the profile of
the program with them, and predicts the other runs with the old and the new constants. The rank correlation is that of
the step times of these runs. A draw hurts if the median error grows by more than HURT, and hurts much from MUCH on.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pandas as pd

from ultrabench.analysis.results.cases import Case, healthy_timed, open_cases_by_profile
from ultrabench.analysis.studies.predictions.calibrate import calibrate, quality_of
from ultrabench.analysis.studies.predictions.fit import FittedTime, log_errors
from ultrabench.analysis.studies.predictions.start import Program, program_of
from ultrabench.cli.tables import say, show, table, warn
from ultrabench.sweep.predict.profile import Profile

MIN_GROUP = 12
"""Number of runs from which runs of a source, program and GPU are drawn."""
NUM_RUNS = (5, 10)
"""Numbers of runs that are drawn."""
MIN_OTHERS, MAX_OTHERS = 4, 60
"""Smallest and largest number of other runs that are predicted."""
HURT, MUCH = 0.002, 0.01
"""Increase of the median error, as a fraction, from which a draw hurts and hurts much."""


class Draw(NamedTuple):
    """The errors of the runs that were not drawn."""

    before: float
    """Median error, as a fraction, with the old constants."""
    after: float
    order_before: float
    """Rank correlation of measured and predicted step times."""
    order_after: float
    is_kept: bool
    """Whether the old constants were kept."""


def groups_in(paths: Sequence[str]) -> Iterator[tuple[str, Program, list[Case], Profile]]:
    """Source, program and accelerator of the runs of each group, and the profile of the program."""
    for path in paths:
        for cases, profile in open_cases_by_profile(path, None, Path(), say, warn):
            groups = defaultdict[tuple[str, Program], list[Case]](list)
            for case in healthy_timed(cases)[0]:
                groups[str(case.run.source), program_of(case)].append(case)
            for (source, program), members in groups.items():
                if len(members) >= MIN_GROUP:
                    yield source, program, members, profile


def draws_of(cases: Sequence[Case], profile: Profile, num_runs: int, num_draws: int) -> Iterator[Draw]:
    """The errors of the other runs for each of `num_draws` random draws of `num_runs` runs."""
    for seed in range(num_draws):
        shuffled = random.Random(seed).sample(cases, len(cases))
        drawn, others = shuffled[:num_runs], shuffled[num_runs:][:MAX_OTHERS]
        calibration = calibrate(drawn, profile, name="mine", date="2026-01-01")
        constants = (profile, calibration.profile)
        errors = [log_errors(others, FittedTime(used.time, used.flags)) for used in constants]
        medians = (quality_of(of_constants)["median_error"] for of_constants in errors)
        orders = (order_of(others, used) for used in constants)
        yield Draw(*medians, *orders, is_kept=not calibration.fitted["step_time"])


def order_of(cases: Sequence[Case], used: Profile) -> float:
    """Rank correlation of measured and predicted step times."""
    measured = pd.Series([case.run.step_time_s for case in cases])
    predicted = pd.Series([case.predict_s(used.time, used.flags) for case in cases])
    return float(measured.rank().corr(predicted.rank()))


def texts_of(draws: Sequence[Draw]) -> Iterator[str]:
    """The columns of the table."""
    yield f"{100 * fmean(draw.before for draw in draws):.1f}"
    yield f"{100 * fmean(draw.after for draw in draws):.1f}"
    for limit in (HURT, MUCH):
        yield f"{100 * fmean(draw.after > draw.before + limit for draw in draws):.0f}"
    yield f"{fmean(draw.order_before for draw in draws):.2f}"
    yield f"{fmean(draw.order_after for draw in draws):.2f}"
    yield f"{100 * fmean(draw.is_kept for draw in draws):.0f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE.parquet")
    parser.add_argument("--draws", type=int, default=20, help="number of random draws")
    parser.add_argument("--source", default="", help="part of the name of a source; others are left out")
    arguments = parser.parse_args()
    rows = list[tuple[str, ...]]()
    for source, program, cases, profile in groups_in(arguments.files):
        for num_runs in NUM_RUNS if arguments.source in source else ():
            if len(cases) >= num_runs + MIN_OTHERS:
                draws = [*draws_of(cases, profile, num_runs, arguments.draws)]
                rows.append((source, str(program), str(len(cases)), str(num_runs), *texts_of(draws)))
                say(" ".join(rows[-1]))
    columns = ("before %", "after %", "hurt %", "much %", "order before", "after", "kept %")
    heads = ("source", "program", ">rows", ">runs", *(f">{column}" for column in columns))
    show(table("median errors of the other runs", *heads, rows=rows), "")


if __name__ == "__main__":
    sys.exit(main())
