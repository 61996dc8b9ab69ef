"""What earlier versions wrote and said: run ids, sweeps and a table of version 0.2.0,
and the messages of the configuration.
"""

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from tests.unit.sweep.test_config import refusal
from ultrabench.analysis.results.collect import collect, read_parquet
from ultrabench.store.events import EndCode
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
"""Of 4 models on 3 kinds of hardware in 5 forms each model in each form, on one of the hardware,
which run ids do not hold."""


@pytest.mark.parametrize("case", RUN_IDS, ids=lambda case: " ".join(case["overrides"]))
def test_run_ids_stay(case):
    # The values that the sweep of these ids listed; it lists more today.
    overridden = {override.partition("=")[0] for override in case["overrides"]}
    listed = [
        axis
        for axis in ("sweep.pp=[1,2,4,8]", "sweep.mbs=[1,2,4]")
        if axis.partition("=")[0] not in overridden
    ]
    plan = make_plan(load_config([*case["overrides"], *listed, "launcher=slurm"]))
    ids = sorted(candidate.run_id for candidate in plan.candidates)
    assert (len(ids), ids[0]) == (case["candidates"], case["first"])
    assert sha256("\n".join(ids).encode()).hexdigest()[:16] == case["all"]


@pytest.mark.parametrize("case", fixture("messages.json"), ids=lambda case: " ".join(case["overrides"]))
def test_what_the_configuration_refuses_it_refuses_in_these_words(case, alone):
    assert refusal(*case["overrides"]) == case["message"]


@pytest.mark.parametrize(("sweep", "source"), [
    ("slurm", "results/slurm"), ("local", "results/local"), ("slurm", "slurm.parquet"),
])  # fmt: skip
def test_what_version_0_2_0_wrote_is_read_as_it_was_written(sweep, source):
    expected, warnings = fixture("v0.2.0/rows.json")[sweep], []
    path = FIXTURES / "v0.2.0" / source
    table = collect([SweepFolder(path)], warnings.append) if path.is_dir() else read_parquet(path)
    rows = table.to_pylist()
    assert [{name: row[name] for name in case} for row, case in zip(rows, expected, strict=True)] == expected
    assert not warnings


@pytest.mark.parametrize(("sweep", "allocations", "paused"), [("slurm", 12, 0), ("local", 3, 1)])
def test_the_journal_of_version_0_2_0_has_all_its_events(sweep, allocations, paused):
    folder, warnings = SweepFolder(FIXTURES / "v0.2.0/results" / sweep), []
    state = fold(read_journal(folder.journal, warnings.append))
    assert not warnings
    assert len(state.allocations) == allocations
    assert all(a.ended and a.submitting_at and a.agents for a in state.allocations.values())
    assert all(attempt.result and attempt.spec_as(dict) for attempt in state.attempts.values())
    codes = Counter(allocation.end.code for allocation in state.allocations.values())
    assert codes == Counter({EndCode.PAUSED: paused, EndCode.OTHER: allocations - paused})
