"""What `sweep launch` says while it runs, and of earlier launches of the same sweep."""

from types import SimpleNamespace

from tests.unit.allocations import told
from tests.unit.cli.conftest import QUICK, record
from ultrabench.cli.sweep.launch import first_lines, other_launches
from ultrabench.cli.sweep.live import Display
from ultrabench.result import Status
from ultrabench.store.events import Launched
from ultrabench.store.journal import read_journal
from ultrabench.store.state import SweepState, fold
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


def test_lines_of_a_launch_count_settled_runs_and_tell_what_is_tried_again_or_skipped(capsys):
    state = SweepState(launched=Launched(generation=1, config=QUICK.config.resolved))
    display, (run, too_large), total = Display("q", QUICK.runs, "cpu"), QUICK.runs[1:3], len(QUICK.runs)

    def lines(*attempt, **result):
        display.show(told(state, *attempt, **result), frozenset())
        return [line.partition("] ") for line in capsys.readouterr().err.splitlines()]

    assert lines(QUICK.runs[-1], None) == []
    ((counter, _, line),) = lines(run, Status.CRASH, cause="killed")
    assert counter == f"[0/{total}"
    assert line.endswith("; trying again in 30 s at the earliest")
    ((counter, _, line),) = lines(run, Status.CRASH, attempt=1, cause="killed")
    assert counter == f"[1/{total}"
    assert "again" not in line
    ((counter, _, line),) = lines(too_large, Status.OOM, confirmed=True)
    assert counter == f"[1/{total}"
    assert line.endswith("; trying again")
    oom, skipped = lines(too_large, Status.OOM, attempt=1, confirmed=True)
    assert oom[0] == f"[2/{total}"
    assert skipped[0] == f"[3/{total}"
    assert f"skipped {QUICK.runs[0].run_id} " in skipped[2]
    assert f": dominated by {too_large.run_id}, which had not enough memory" in skipped[2]
