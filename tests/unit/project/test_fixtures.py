"""What earlier versions wrote and said: run ids, a folder of schema 2, and the messages of the configuration."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from tests.unit.sweep.test_config import refusal
from ultrabench.analysis.collect import collect
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import read_journal
from ultrabench.store.state import fold
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

FIXTURES = Path(__file__).parents[2] / "fixtures"


def fixture(name):
    return json.loads((FIXTURES / name).read_text())


RUN_IDS = [
    case for number, case in enumerate(fixture("run_ids.json"))
    if number // 5 % 3 == (number // 15 + number) % 3
]  # fmt: skip
"""Of 4 models on 3 kinds of hardware in 5 forms each model in each form, on one of the hardware, which run ids do not hold."""


@pytest.mark.parametrize("case", RUN_IDS, ids=lambda case: " ".join(case["overrides"]))
def test_run_ids_stay(case):
    plan = make_plan(load_config([*case["overrides"], "launcher=slurm"]))
    ids = sorted(candidate.run_id for candidate in plan.candidates)
    assert (len(ids), ids[0]) == (case["candidates"], case["first"])
    assert sha256("\n".join(ids).encode()).hexdigest()[:16] == case["all"]


@pytest.mark.parametrize("case", fixture("messages.json"), ids=lambda case: " ".join(case["overrides"]))
def test_what_the_configuration_refuses_it_refuses_in_these_words(case, alone):
    assert refusal(*case["overrides"]) == case["message"]


def test_a_folder_of_schema_2_is_read_as_it_was_written():
    expected, warnings = fixture("schema2_rows.json"), []
    rows = collect([SweepFolder(FIXTURES / "schema2")], warnings.append).to_pylist()
    assert [{name: row[name] for name in case} for row, case in zip(rows, expected, strict=True)] == expected
    assert not warnings


@pytest.mark.parametrize("sweep", ["slurm", "local"])
def test_a_folder_of_version_0_2_0_is_read_as_it_was_written(sweep):
    expected, warnings = fixture("v0.2.0/rows.json")[sweep], []
    rows = collect([SweepFolder(FIXTURES / "v0.2.0/results" / sweep)], warnings.append).to_pylist()
    assert [{name: row[name] for name in case} for row, case in zip(rows, expected, strict=True)] == expected
    assert not warnings


@pytest.mark.parametrize(("sweep", "allocations"), [("slurm", 12), ("local", 3)])
def test_the_journal_of_version_0_2_0_has_all_its_events(sweep, allocations):
    folder, warnings = SweepFolder(FIXTURES / "v0.2.0/results" / sweep), []
    state = fold(read_journal(folder.journal, warnings.append))
    assert not warnings
    assert len(state.allocations) == allocations
    assert all(a.ended and a.submitting_at and a.agents for a in state.allocations.values())
    assert all(attempt.result and attempt.spec_as(dict) for attempt in state.attempts.values())
