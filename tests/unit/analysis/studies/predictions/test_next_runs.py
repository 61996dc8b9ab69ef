"""The runs that would teach a profile most, and rows of imported tables from which a calibration starts."""

from dataclasses import replace
from functools import cache

import pytest

from tests.configs import refused
from tests.unit.analysis.studies.predictions.test_calibrate import BASE, NANOTRON, measured
from ultrabench.analysis.studies.predictions.next_runs import SUBJECTS, candidates_of, next_runs, subject_of
from ultrabench.analysis.studies.predictions.start import imported_cases, start_of
from ultrabench.layout import AXES
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.predict.search import mechanisms
from ultrabench.sweep.predict.time_constants import FLAG_CONSTANTS

QUESTION = (
    "sweep=recommend", "model=1B", "hardware=h100x8", "sweep.nodes=[1]", "sweep.seq_len=2048", "sweep.gbs=64",
    "sweep.cp=[1]", "sweep.pp=[1,2]", "sweep.recompute=[none]", "sweep.zero_stage=[0,1]", "sweep.dp_shard=[all]",
    "sweep.mbs=[1,2,4]", "sweep.pp_schedule=[auto]",
)  # fmt: skip


@cache
def config():
    return load_config(QUESTION)


def without_tp():
    """Measured runs that say nothing about tensor parallelism."""
    return [case for case in measured(BASE.time, 30) if case.run.spec.layout.tp == 1]


def test_runs_teach_what_those_before_did_not():
    chosen = next_runs(without_tp(), BASE, 0.15, config())
    first = chosen[0]
    assert first.run.layout.tp > 1
    assert {subject for run in chosen for subject in run.teaches} >= {"exposed tp calls"}
    assert len({mechanisms(run.run.layout) for run in chosen}) == len(chosen) == 3
    left = [1.0, *(run.variance_left for run in chosen)]
    assert left == sorted(left, reverse=True)
    assert left[1] < 0.9


def test_measured_runs_are_not_proposed_again():
    """A measured run has nothing more to teach, even where only its name tells so."""
    runs = without_tp()
    first = next_runs(runs, BASE, 0.15, config(), count=1)[0].run
    again = replace(runs[0], run=replace(runs[0].run, spec=first.spec))
    assert next_runs([*runs, again], BASE, 0.15, config(), count=1)[0].run.layout != first.layout


def test_every_constant_has_one_subject():
    prefixes = [prefix for of_subject in SUBJECTS.values() for prefix in of_subject]
    assert {*map(subject_of, FLAG_CONSTANTS)} == {*SUBJECTS}
    assert len({*prefixes}) == len(prefixes)


def test_candidates_are_the_best_of_their_groups():
    (runs,) = candidates_of(config()).values()
    layouts = {tuple(getattr(run.layout, axis) for axis in AXES) for run in runs}
    assert len(layouts) == len(runs) > 3
    assert all(run.prediction.p_oom <= 0.1 for run in runs)


def renamed(cases, name):
    """The same cases as those of another program."""
    return [
        replace(case, run=replace(case.run, spec=replace(case.run.spec, kernel=replace(
            case.run.spec.kernel, name=name, kind="command", command=(name,)
        ))))
        for case in cases
    ]  # fmt: skip


def test_rows_of_the_same_program_and_accelerator_are_taken():
    rows = measured(BASE.time, 3)
    others = renamed(rows, "nemo")
    assert imported_cases([*rows, *others], rows, {}) == rows
    assert imported_cases([*rows, *others], [], {"kernel": "nemo", "hardware": "h100x8"}) == others
    assert imported_cases(others, [], {}) == others


@pytest.mark.parametrize(("parts", "line"), [
    ({"kernel": "nemo", "hardware": "b200x8"}, r"no row of nemo on B200; did you mean nemo on H100-SXM\? "
     r"\(known: .*embedded on H100-SXM.*\); name one of them with kernel= and hardware="),
    ({}, r"rows of .*embedded on H100-SXM \(3 rows\).*; choose one with kernel=NAME and hardware=NAME"),
])  # fmt: skip
def test_rows_of_other_programs_are_named(parts, line):
    rows = measured(BASE.time, 3)
    with refused(match=line):
        imported_cases([*rows, *renamed(rows, "nemo")], [], parts)


def test_a_program_without_profile_starts_from_the_nearest_one():
    rows, lines = renamed(measured(NANOTRON.time, 6), "nemo"), []
    assert start_of(rows, None, lines.append).name == "nanotron"
    assert lines == [
        "no profile of nemo: the fit starts from nanotron, whose median error is smallest (1 %); "
        "--profile NAME chooses another"
    ]
    assert start_of(rows, "jax", lines.append).name == "jax"
