"""What `sweep launch` says of earlier launches of the same sweep."""

from types import SimpleNamespace

from tests.unit.cli.conftest import QUICK, record
from ultrabench.cli.sweep.launch import first_lines, other_launches
from ultrabench.result import Status
from ultrabench.store.journal import read_journal
from ultrabench.store.state import fold
from ultrabench.sweep.running.price import price_of
from ultrabench.sweep.running.progress import settled_runs


def test_a_launch_tells_its_new_runs_and_those_of_earlier_launches_apart(sweep):
    ids = [run.run_id for run in QUICK.runs]
    for run in QUICK.runs[2:4]:
        record(sweep, run, status=Status.OOM, reason="no memory")
    state = fold(read_journal(sweep.journal))
    assert [*other_launches(state, set(ids), before=set())] == []
    assert [*other_launches(state, set(ids[1:]), before=set(ids[:2]))] == [
        "new in this launch: 2 runs settled (2 oom)",
        "and of earlier launches: 1 run settled (1 ok)",
    ]


def test_a_launch_tells_how_many_runs_are_left(sweep):
    record(sweep, interrupted := QUICK.runs[2], status=Status.CANCELLED, reason="ended by SIGTERM")
    state, total = fold(read_journal(sweep.journal)), len(QUICK.runs)
    assert interrupted.run_id not in settled_runs(state)
    journal = SimpleNamespace(path=next(sweep.journal.iterdir()))
    opened = SimpleNamespace(config=QUICK.config, plan=QUICK, folder=sweep, journal=journal)
    assert f": {total} runs, " in [*first_lines(opened, price_of(QUICK))][1]
    assert f": {total - 2} of {total} runs left, " in [*first_lines(opened, price_of(QUICK, state))][1]
