"""`ultrabench history`: planted changes are found in the right night, and none where nothing changed for good."""

import json
import os
import re
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from tests.unit.analysis.tables import row, table_of
from tests.unit.cli.conftest import one_line, sweep, ultrabench  # noqa: F401
from ultrabench.analysis.results.collect import parquet
from ultrabench.analysis.studies.history.change_points import change_points, outliers, strongest
from ultrabench.analysis.studies.history.history import Night, history
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

FIRST = datetime(2026, 11, 1, 2, tzinfo=UTC)
NIGHT_12 = 11
CONTROL = "0"


def is_found(values):
    """Whether the only change of a series begins in night 12, where the last night before may be taken for one."""
    counted = np.flatnonzero(~outliers(values))
    return [abs(counted[n] - NIGHT_12) <= 2 for n in change_points(values[counted], 0.05, 0.02)] == [True]


def test_a_loss_of_5_percent_in_night_12_is_found_in_95_of_100_seeds_and_none_where_nothing_was_planted():
    num_found = num_false = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        noise = rng.normal(0, rng.uniform(0.01, 0.02), 20)
        num_found += is_found(noise + np.log(1 - 0.05 * (np.arange(20) >= NIGHT_12)))
        num_false += strongest(noise[~outliers(noise)])[0] <= 0.05
    assert num_found >= 95
    assert num_false <= 5


@pytest.mark.parametrize("loss", [0.04, 0.2])
def test_a_single_bad_night_is_no_change_wherever_it_is(loss):
    num_false = 0
    for seed in range(100):
        values = np.random.default_rng(seed).normal(0, 0.015, 20)
        values[seed % 20] -= loss
        num_false += bool(change_points(values[~outliers(values)], 0.05, 0.02))
    assert num_false <= 5


def test_a_gain_that_is_lost_again_is_two_changes():
    values = np.random.default_rng(1).normal(0, 0.01, 20)
    values[5:15] += 0.05
    assert change_points(values, 0.05, 0.02) == [5, 15]
    assert change_points(values[:5], 1.0, 1.0) == []
    assert strongest(np.zeros(8))[0] == 1


def made(number=20, slow=range(6), loss=0.05, first=NIGHT_12, controlled=False, changes=None):
    """A night for each of `number` tables, in which the runs `slow` of six are slower from night `first` on."""
    rng, nights = np.random.default_rng(7), []
    for night in range(number):
        rates = 1e4 * np.exp(rng.normal(0, 0.01, 6)) * (1 - loss * np.isin(range(6), slow) * (night >= first))
        start = FIRST + timedelta(days=night)
        common = {"sweep": f"n{night:02}", "started_at": start, "git_commit": "old"}
        common |= {"git_commit": "new", "kernel_version": "5"} if night >= first else {}
        rows = [
            row(str(n), rate, mbs=n + 1, **common)
            | ({"control": CONTROL, "control_ratio": rate / rates[0]} if controlled else {})
            | (changes or {}).get((night, n), {})
            for n, rate in enumerate(rates)
        ]
        nights.append(Night(name=f"{start:%Y-%m-%d %H:%M}", sweep=common["sweep"], table=table_of(*rows)))
    return nights


@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize("slow", [(0, 1, 2, 3, 4, 5), (3,), (0,)])
def test_runs_that_move_together_are_one_statement(slow, controlled):
    """Also where all but the control are measured relative to it: they or it alone may be what changed."""
    (move,) = history(made(slow=slow, controlled=controlled)).moves
    assert (move.night, move.series) == (NIGHT_12, slow)
    assert move.change == pytest.approx(-0.05, abs=0.015)


@pytest.mark.parametrize("loss", [0.05, 0.3])
def test_a_loss_of_the_last_2_nights_waits_for_one_more(loss):
    """It is blamed on no earlier night, and no single bad nights are told; the next night names the right one."""
    over_nights = history(made(14, first=12, loss=loss))
    assert over_nights.moves == []
    assert [s.bad_nights for s in over_nights.series] == [[]] * 6
    may_have = [
        note for note in over_nights.notes if "may have changed in the last 2 nights; one more" in note
    ]
    assert len(may_have) == 1
    assert [move.night for move in history(made(15, first=12, loss=loss)).moves] == [12]


IN_PARTS = {"measured_gas": "2,4", "screened": True, "extrapolation_error_rel": 0.08}
"""The columns of a run that parts of steps measured, whose straight line is uncertain by 8 %."""


def in_parts_from(first, **columns):
    """The changes of `made` that measure all runs by parts of steps from night `first` on."""
    return {(night, n): IN_PARTS | columns for night in range(first, 20) for n in range(6)}


@pytest.mark.parametrize(
    ("loss", "first_in_parts", "error", "num_moves"),
    [
        (0.05, 20, 0.08, 1),
        (0.05, NIGHT_12, 0.08, 0),  # the first nights by parts are within the error of the line
        (0.05, NIGHT_12, None, 0),
        (0.05, NIGHT_12, 0.02, 1),
        (0.25, NIGHT_12, 0.08, 1),
        (0.05, 0, 0.08, 0),
        (0.25, 0, 0.08, 1),
    ],
)
def test_a_change_exceeds_the_error_of_parts_of_steps(loss, first_in_parts, error, num_moves):
    changes = in_parts_from(first_in_parts, extrapolation_error_rel=error)
    over_nights = history(made(loss=loss, changes=changes))
    assert len(over_nights.moves) == num_moves
    notes = [note for note in over_nights.notes if "measured by parts of steps" in note]
    assert bool(notes) == (first_in_parts < 20)
    line_errors = json.loads(json.dumps(asdict(over_nights.series[0])))["line_errors"]
    assert line_errors == {str(night): error for night in range(first_in_parts, 20)}


@pytest.mark.parametrize(("error", "slow_runs"), [(0.02, (1, 4)), (0.2, ()), (None, ())])
def test_few_nights_count_the_error_of_parts_of_steps_as_well(error, slow_runs):
    """Two of six runs become 10 % slower, in the nights in which all are measured by parts of steps."""
    changes, rng = {}, np.random.default_rng(3)
    for night, n in np.ndindex(4, 6):
        steps_s = np.exp(rng.normal(0, 0.01, 20)) * (1.1 if night >= 2 and n in (1, 4) else 1.0)
        in_parts = IN_PARTS | {"extrapolation_error_rel": error} if night >= 2 else {}
        changes[night, n] = {"step_times_s": steps_s.tolist(), **in_parts}
    over_nights = history(made(4, loss=0, changes=changes))
    assert [number for move in over_nights.moves for number in move.series] == [*slow_runs]


def test_a_night_that_has_both_is_compared_by_what_all_nights_have():
    """Parts say 5 % less in all nights. The last ones have whole steps, too, and the first ones parts alone, or not."""
    nights, in_full = made(loss=0.05, changes=in_parts_from(NIGHT_12)), made(loss=0)
    both = [
        replace(night, table=pa.concat_tables([night.table, whole.table])) if number >= NIGHT_12 else night
        for number, (night, whole) in enumerate(zip(nights, in_full, strict=True))
    ]
    over_nights = history(both)
    assert (over_nights.moves, over_nights.series[0].line_errors) == ([], {})
    by_parts = made(loss=0, changes=in_parts_from(0, extrapolation_error_rel=0.0))
    both = [
        replace(night, table=pa.concat_tables([night.table, *[whole.table] * (number >= NIGHT_12)]))
        for number, (night, whole) in enumerate(zip(by_parts, made(loss=0.05), strict=True))
    ]
    over_nights = history(both)
    assert (over_nights.moves, len(over_nights.series[0].line_errors)) == ([], 20)


def test_suspects_and_failures_do_not_count_and_are_named():
    bad = {
        (19, 2): {"status": "oom"},
        (18, 3): {"suspect": "throttled"},
        (6, 4): {"tokens_per_s_per_gpu": 1e3},
    }
    over_nights = history(made(loss=0, changes=bad))
    assert over_nights.moves == []
    assert over_nights.series[2].rates[-1] is None
    assert over_nights.series[3].rates[-2] is None
    assert [s.bad_nights for s in over_nights.series] == [[], [], [], [], [6], []]
    assert any("2026-11-07 02:00 (1 run)" in note for note in over_nights.notes)
    assert any(
        "1 of 6 runs without a rate in the last night: dp8 tp1 pp1 z0 mbs3" in n for n in over_nights.notes
    )


def test_the_command_fails_a_night_with_a_loss(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for name, nights in {"all": made(), "few": made(5)}.items():
        tables = pa.concat_tables([night.table for night in reversed(nights)])
        Path(f"{name}.parquet").write_bytes(parquet(tables))
    code, out, err = ultrabench("history", "all.parquet", "-o", "nights.svg")
    assert code == 1
    assert "2026-11-12 02:00: all 6 runs are " in out
    assert "(since 2026-11-11 02:00: git_commit old -> new; kernel_version unknown -> 5)" in out
    assert "a loss of more than 2 %: 2026-11-12" in err
    assert "all 6 runs are" in (tmp_path / "nights.svg").read_text()
    code, out, _ = ultrabench("history", "all.parquet", "--fail-above", "8", "--json")
    document = json.loads(out)
    assert (code, len(document["moves"]), document["losses"]) == (0, 1, 0)
    assert document["nights"][NIGHT_12]["differing"]["git_commit"] == ["old", "new"]
    assert ultrabench("history", "all.parquet", "--since", "2026-11-12")[0] == 0
    code, _, err = ultrabench("history", "few.parquet")
    assert code == 0
    assert "not tested: 5 nights; fewer than 6 nights need more step times in each" in err
    Path("empty").mkdir()
    Path("nights").mkdir()
    for night in made():
        Path(f"nights/{night.sweep}.parquet").write_bytes(parquet(night.table))
    assert json.loads(ultrabench("history", "nights", "--json")[1])["moves"] == document["moves"]
    assert "empty holds no sweep and no .parquet file" in one_line(ultrabench, "history", "empty")
    assert "no night" in one_line(ultrabench, "history", "all.parquet", "--since", "2027-01-01")
    assert "write YYYY-MM-DD" in one_line(ultrabench, "history", "all.parquet", "--since", "2027")


def test_a_folder_of_folders_of_sweeps_is_read_once(sweep, ultrabench, tmp_path):  # noqa: F811
    code, out, err = ultrabench("history", str(tmp_path), str(sweep.path))
    assert code == 0
    assert out.startswith("1 night, ")
    assert ": 2 runs, not tested\n" in out or ": 1 run, not tested\n" in out
    assert "not tested: 1 night; " in err


@pytest.mark.parametrize(("number", "first"), [(2, 1), (3, 1), (3, 2), (2, None)])
def test_two_and_three_nights_are_tested_as_two_tables_are(ultrabench, tmp_path, monkeypatch, number, first):  # noqa: F811
    """Two of six runs become 10 % slower in night `first`, with steps that vary by 1 % as those of all runs do."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    for night in range(number):
        start, rows = FIRST + timedelta(days=night), []
        for n in range(6):
            is_slower = first is not None and night >= first and n < 2
            steps_s = (0.1 * (n + 1) * (1.1 if is_slower else 1) * np.exp(rng.normal(0, 0.01, 20))).tolist()
            numbers = {
                "step_times_s": steps_s,
                "step_time_s": float(np.median(steps_s)),
                "step_time_ci95_rel": 0.005,
            }
            rows.append(
                row(
                    str(n),
                    100 / np.median(steps_s),
                    mbs=n + 1,
                    sweep=f"n{night}",
                    started_at=start,
                    **numbers,
                )
            )
        Path(f"n{night}.parquet").write_bytes(parquet(table_of(*rows)))
    code, out, err = ultrabench("history", *(f"n{night}.parquet" for night in range(number)))
    if first is None:
        assert (code, ": 6 runs, 0 significant changes\n" in out) == (0, True), err
        return
    assert (code, ": 6 runs, 1 significant change\n" in out) == (1, True), out + err
    assert re.search(rf"2026-11-0{1 + first} 02:00: 2 of 6 runs are (8|9)\.\d % slower", out)
    assert "Fewer than 6 nights: step times are tested as in ultrabench compare." in out


def test_runs_with_too_few_steps_to_be_significant_are_not_tested(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    """As in compare: 3 steps on both sides, here of runs that were stopped early, give a p of 0.1 or more."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    for night, factor in (("a", 1.0), ("b", 3.0)):
        rows = []
        for n in range(20):
            is_stopped = n < 12
            steps_s = (factor * (1 + n / 9) * np.exp(rng.normal(0, 0.03, 3 if is_stopped else 20))).tolist()
            numbers = {"step_times_s": steps_s, "step_time_s": float(np.median(steps_s))}
            stopped = "slower_than_best" if is_stopped else None
            rows.append(row(str(n), 1 / np.median(steps_s), mbs=n + 1, stopped=stopped, **numbers))
        Path(f"{night}.parquet").write_bytes(parquet(table_of(*rows)))
    nights = json.loads(ultrabench("history", "a.parquet", "b.parquet", "--json")[1])
    assert {run["run_id"] for run in nights["runs"] if run["changes"]} == {str(n) for n in range(12, 20)}
    assert (nights["tested"], len(nights["runs"])) == (8, 20)


@pytest.mark.parametrize(("percent", "message"), [
    ("0.5", "write --fail-above 50 for 50 %, or --fail-above 0.5% for 0.5 %"),
    ("-1", "--fail-above -1 is not a percentage of 0 or more"),
])  # fmt: skip
def test_a_loss_is_given_in_percent(ultrabench, percent, message):  # noqa: F811
    assert message in one_line(ultrabench, "history", "a.parquet", "--fail-above", percent)


def test_the_files_of_a_night_are_ready_to_use(monkeypatch):
    folder = Path(__file__).parents[5] / "examples/nightly"
    monkeypatch.chdir(folder)
    plan = make_plan(load_config(["sweep=nightly"]))
    assert 2 <= len(plan.runs) <= 12
    assert plan.config.measure.race is None
    (job,) = yaml.safe_load((folder / "github-actions.yaml").read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    script = "examples/nightly/nightly.sh"
    lines = (folder / "scrontab").read_text().splitlines()
    assert script in commands[-1]
    assert script in lines[-1]
    assert lines[-1].startswith("0 2 * * * ")
    assert all(line.startswith(("# ", "#SCRON --")) for line in lines[:-1])
    assert os.access(folder.parents[1] / script, os.X_OK)
