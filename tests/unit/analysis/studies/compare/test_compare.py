"""`ultrabench compare`: what is found when something was planted, and nothing where nothing changed."""

import json
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.configs import refused
from tests.unit.analysis.tables import row, table_of
from tests.unit.cli.conftest import one_line, ultrabench  # noqa: F401
from ultrabench.analysis.results.collect import parquet
from ultrabench.analysis.results.significance import corrected
from ultrabench.analysis.studies.compare.compare import compare

LAYOUTS = [(dp, mbs) for dp in (1, 2, 4, 8) for mbs in (1, 2, 4, 8, 16)]


def steps(rng, time_s, number=20, correlation=0.5, between=0.0):
    """Step times whose neighbours are alike, of a run that differs from other runs of the same layout."""
    noise = rng.normal(size=number)
    for step in range(1, number):
        noise[step] = correlation * noise[step - 1] + (1 - correlation**2) ** 0.5 * noise[step]
    return (time_s * np.exp(0.03 * noise + between * rng.normal())).tolist()


def rows_of(seed, slow=(), factor=1.2, between=0.0, **columns):
    """A row for each layout, of which those with the numbers `slow` take `factor` times as long as others."""
    rng, rows = np.random.default_rng(seed), []
    for number, (dp, mbs) in enumerate(LAYOUTS):
        times = steps(rng, (1 + number / 9) * (factor if number in slow else 1), between=between)
        values = {"step_times_s": times, "step_time_s": float(np.median(times))} | columns
        rows.append(row(str(number), 1 / np.median(times), dp=dp, mbs=mbs, gas=1, **values))
    return rows


def compared(a, b, threshold=0.05):
    return compare(table_of(*a), table_of(*b), threshold)


def findings_of(comparison):
    return comparison.findings.set_index("run_id_a")["finding"].to_dict()


def write(path, rows):
    Path(path).write_bytes(parquet(table_of(*rows)))


def test_planted_regressions_are_found_and_nothing_else():
    comparison = compared(rows_of(1, between=0.01), rows_of(2, slow=(3, 11), between=0.01))
    assert findings_of(comparison) == {"3": "slower", "11": "slower"}
    assert comparison.regressions == 2
    assert comparison.median_ratio == pytest.approx(1, abs=0.03)
    allowed = compared(rows_of(1), rows_of(2, slow=(3, 11)), threshold=0.5)
    assert (allowed.regressions, allowed.warning) == (0, None)


@pytest.mark.parametrize(("repeats", "between"), [(1, 0.0), (1, 0.03), (2, 0.03)])
def test_the_same_code_has_findings_no_more_often_than_stated(repeats, between):
    """Without a threshold; 8 seeds with 5 % each have more than 3 with a probability of 0.04 %."""
    alarms = 0
    for seed in range(8):
        rng = np.random.default_rng(seed)
        pairs = [
            tuple([steps(rng, 1.0, between=between) for _ in range(repeats)] for _ in range(2))
            for _ in range(16)
        ]
        alarms += min(corrected(pairs)[0]["p_corrected"]) <= 0.05
    assert alarms <= 3


def test_differences_between_repeats_count_as_chance():
    """Steps that are sure of themselves are no proof where the runs of a layout differ as much."""
    rng = np.random.default_rng(3)
    far = [[steps(rng, 1.0, between=0.15) for _ in range(2)] for _ in range(12)]
    pairs = list(zip(far[::2], far[1::2], strict=True))
    p_values, notes = corrected(pairs)
    assert min(p_values["p_corrected"]) > 0.05
    assert "Repeats of a run vary by" in notes[1]
    single_p_values, notes = corrected([([p[0][0]], [p[1][0]]) for p in pairs])
    assert min(single_p_values["p_corrected"]) < 0.05
    assert "the test ignores noise between runs" in notes[1]


def test_checkpoints_are_compared_where_both_have_them(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    a = rows_of(1, checkpoint_save_s=2.0, checkpoint_async_lost_steps=-0.5)
    b = rows_of(2, checkpoint_save_s=3.0, checkpoint_async_lost_steps=1.0, checkpoint_load_s=1.0)
    b[0]["checkpoint_save_s"] = None
    for name, rows in (("a.parquet", a), ("b.parquet", b)):
        write(name, rows)
    code, out, _ = ultrabench("compare", "a.parquet", "b.parquet")
    lines = [line.split() for line in out.splitlines() if line.startswith("checkpoint_")]
    assert lines == [
        ["checkpoint_save_s", "2", "s", "3", "s", "19"],
        ["checkpoint_async_lost_steps", "-0.5", "1", "20"],
    ]
    assert code == 0, "they are no finding"
    assert compared(rows_of(1), rows_of(2)).checkpoints == []


def test_a_single_step_is_not_tested():
    comparison = compared(*(rows_of(seed, step_times_s=None) for seed in (1, 2)))
    assert comparison.rows["p_value"].isna().all()
    assert comparison.rows["ratio"].notna().all()
    assert "20 of them were not tested because one side has a single step time." in comparison.notes


def test_stopped_runs_are_counted_and_a_lost_power_is_told(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    """3 steps on both sides give a p of 0.1 or more, however large the difference."""
    monkeypatch.chdir(tmp_path)
    for name, rows in (("a.parquet", rows_of(1)), ("b.parquet", rows_of(2, slow=range(20), factor=3))):
        for run in rows[:12]:
            run.update(stopped="slower_than_best", step_times_s=run["step_times_s"][:3])
        write(name, rows)
    code, out, err = ultrabench("compare", "a.parquet", "b.parquet")
    assert code == 1  # for the 8 others
    text = " ".join(out.split())
    assert "12 of them were stopped early in A or B" in text
    assert "12 of them were not tested: too few steps to be significant, whatever the difference" in text
    assert "largest differences that are no findings (5 of 12)" in text
    in_reverse = ultrabench("compare", "b.parquet", "a.parquet")[1]
    assert "largest differences that are no findings (5 of 12)" in in_reverse, "faster ones, too"
    assert "12 of 20 layouts: too few measured steps to be significant, whatever" in " ".join(err.split())


def test_ends_suspects_and_winners():
    a, b = (
        rows_of(1, torch_version="2.12"),
        rows_of(2, slow=(0,), factor=1.5, torch_version="2.13", kernel="mine"),
    )
    a[3].update(status="crash", step_time_s=None)
    b[1].update(status="oom", step_time_s=None)
    b[2].update(status="node_fail", step_time_s=None)
    b[4]["suspect"] = "throttled"
    a[5]["stopped"] = "slower_than_best"
    comparison = compared(a, random.Random(1).sample(b, len(b)))
    assert findings_of(comparison) == {"0": "slower", "1": "failing", "3": "running again"}
    assert comparison.rows.set_index("run_id_a")["status_b"]["4"] == "suspect"
    assert comparison.differing["torch_version"] == ("2.12", "2.13")
    assert "1 of them was stopped early in A or B as slower than the best of the cell." in comparison.notes
    (winner,) = comparison.winners.to_dict("records")
    assert (winner["best_a"], winner["best_b"]) == ("dp1 tp1 pp1 z0 mbs1 gas1", "dp1 tp1 pp1 z0 mbs8 gas1")
    assert winner["cost"] == pytest.approx(1.5 / (1 + 3 / 9), rel=0.05)


def by_parts(seed, error=0.02, **columns):
    """Rows of runs that were screened by parts of steps, whose straight line has this error."""
    return rows_of(seed, measured_gas="4,8", screened=True, extrapolation_error_rel=error, **columns)


def with_parts(seed, error=0.3, **columns):
    """Rows of starts in full: few whole steps, and parts after them."""
    return rows_of(seed, extrapolation_error_rel=error, parts_step_time_s=1.0, **columns)


SLOW = {"slow": (3,), "factor": 1.2}
NO_ERROR, UNKNOWN = 0.0, "measured by parts of steps with an unknown error: no difference is a finding"


@pytest.mark.parametrize(("a", "b", "is_slower", "errors"), [
    (by_parts(1), by_parts(2, **SLOW), True, {0.0283}),
    (by_parts(1, 0.15), by_parts(2, 0.15, **SLOW), False, {0.2121}),
    (rows_of(1), rows_of(2, **SLOW), True, {NO_ERROR}),
    (with_parts(1), with_parts(2, **SLOW), True, {NO_ERROR}),
    (rows_of(1), rows_of(2, screened=True, **SLOW), True, {NO_ERROR}),
    (rows_of(1), by_parts(2, 0.02, **SLOW), True, {0.02}),
    (with_parts(1), by_parts(2, 0.25, **SLOW), False, {0.25}),
    (rows_of(1), by_parts(2, None, **SLOW), False, {None}),
    (by_parts(1, None), by_parts(2, 0.02, **SLOW), False, {None}),
    # Both sides have parts, and both have whole steps: these are compared.
    (by_parts(3, 0.3) + with_parts(1), by_parts(4, None) + with_parts(2, **SLOW), True, {NO_ERROR}),
    (by_parts(3, 0.3) + rows_of(1), rows_of(2, screened=True, **SLOW), True, {NO_ERROR}),
    # Only A has whole steps, so parts are compared with parts.
    (by_parts(1) + rows_of(3, slow=range(20), factor=2), by_parts(2, **SLOW), True, {0.0283}),
    # One start of a layout knows the error of its line, another one does not.
    (by_parts(1, None) + by_parts(1, 0.02), by_parts(2, **SLOW), True, {0.0283}),
])  # fmt: skip
def test_a_difference_must_exceed_the_error_of_the_parts_that_are_compared(a, b, is_slower, errors):
    comparison = compared(a, b)
    found = {None if pd.isna(e) else round(e, 4) for e in comparison.rows["extrapolation_error_rel"]}
    assert found == errors
    assert findings_of(comparison) == ({"3": "slower"} if is_slower else {})
    part_notes = [note for note in comparison.notes if "measured by parts" in note]
    assert bool(part_notes) == comparison.rows["by_parts"].any() == (errors != {NO_ERROR})
    assert all((UNKNOWN in note) == (errors == {None}) for note in part_notes)


def test_parts_of_steps_on_a_straight_line_are_counted():
    """An error of 0 is known: the notes say that parts were compared, and the threshold decides."""
    comparison = compared(by_parts(1, 0.0), by_parts(2, 0.0, **SLOW))
    assert findings_of(comparison) == {"3": "slower"}
    assert "20 layouts measured by parts of steps: whole steps follow from them" in " ".join(comparison.notes)


def test_layouts_that_one_side_has_only_screened_are_counted():
    comparisons = (
        compared(rows_of(1), rows_of(2, screened=True)),
        compared(by_parts(3, 0.3) + rows_of(1), by_parts(2)),
        compared(rows_of(1), rows_of(2)),
    )
    texts = [" ".join(comparison.notes) for comparison in comparisons]
    start = "Only screened, by parts of steps or few whole steps: 0 of the layouts in A, 20 in B."
    assert [start in text for text in texts] == [True, True, False]
    assert "Only screened" not in texts[2]


def beside_controls(**times_s):
    """Rows of runs x and y, each in an allocation with the control layout; values are the times of run and control."""
    for repeat, (run_id, (time_s, control_s)) in enumerate(times_s.items()):
        common = {"control": "c", "allocation": run_id}
        yield row(
            "c", 1 / control_s, repeat=repeat, step_times_s=[control_s] * 9, control_ratio=1.0, **common
        )
        mbs = {"mbs": 2 + 2 * repeat, "gas": 16 // (1 + repeat)}
        yield row(
            run_id, 1 / time_s, step_times_s=[time_s] * 9, control_ratio=control_s / time_s, **mbs, **common
        )


def test_another_winner_costs_what_ranks_its_cell():
    """In B y takes longer than x, but its allocation was slower: it gains more on the control layout."""
    a, b = beside_controls(x=(0.8, 1.0), y=(0.9, 1.0)), beside_controls(x=(0.8, 1.0), y=(1.5, 2.0))
    (winner,) = compared(a, b).winners.to_dict("records")
    assert ("mbs2" in winner["best_a"], "mbs4" in winner["best_b"]) == (True, True)
    assert winner["cost"] == pytest.approx((2.0 / 1.5) / (1.0 / 0.8))


def test_several_kernels_in_a_table_are_compared_with_the_same():
    rows = rows_of(1, kernel="x") + rows_of(2, kernel="y", slow=range(20))
    comparison = compared(rows, rows)
    assert (len(comparison.rows), comparison.regressions) == (40, 0)


def test_versions_of_the_kernel_are_compared_by_layout():
    """Another version gives runs other ids."""
    newer = [row | {"run_id": f"new {row['run_id']}"} for row in rows_of(2, slow=(3,), kernel_version="4")]
    comparison = compared(rows_of(1, kernel_version="3"), newer)
    assert (len(comparison.rows), comparison.num_only) == (20, (0, 0))
    assert findings_of(comparison) == {"3": "slower"}
    assert comparison.differing["kernel_version"] == ("3", "4")


def test_the_command_is_for_ci(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for name, rows in {"a": rows_of(1), "b": rows_of(2, slow=(3,)), "c": rows_of(1, seq_len=128)}.items():
        write(f"{name}.parquet", rows)
    code, out, _ = ultrabench("compare", "a.parquet", "b.parquet", "-o", "f.svg")
    assert code == 1
    assert "median ratio of step times 1.0" in out
    assert "1 slower, 0 faster, 0 failing" in out
    drawn = (tmp_path / "f.svg").read_bytes()
    assert b"slower, p &lt;= 0.05" in drawn
    assert b"step time of b / a" in drawn
    assert b"dp1 tp1 pp1 z0 mbs8 gas1" in drawn  # the slower one is named
    assert b"A: a. B: b. No known change of hardware, kernel or precision." in drawn
    code, out, _ = ultrabench("compare", "a.parquet", "b.parquet", "--json", "-o", "rows.parquet")
    document = json.loads(out)
    assert (code, document["regressions"], len(document["rows"]), document["only_a"]) == (1, 1, 20, 0)
    assert len(pd.read_parquet("rows.parquet")) == 20
    ultrabench("compare", "a.parquet", "b.parquet", "-o", "f.svg")
    assert (tmp_path / "f.svg").read_bytes() == drawn
    assert ultrabench("compare", "a.parquet", "a.parquet")[0] == 0
    difference = "seq_len is 4096 in A and 128 in B: compare tables with the same models and batch"
    assert difference in one_line(ultrabench, "compare", "a.parquet", "c.parquet")
    line = one_line(ultrabench, "heatmap", "a.parquet", "--compare", "c.parquet")
    assert line == f"no cell has a speed in both A (1 cell with a speed) and B (1); {difference}"
    line = one_line(ultrabench, "compare", "a.parquet", "a.parquet", "-o", "f.csv")
    assert line.startswith("-o f.csv does not end in .parquet, .png, .svg or .pdf; ")


def test_equal_names_and_another_machine_are_told_apart(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    rates = {"peak_flops_per_s": 1e10, "gemm_flops_per_s": 8e9, "sm_clock_hz": None}
    monkeypatch.chdir(tmp_path)
    for name, columns in (("old", rates), ("new", rates | {"gemm_flops_per_s": 4e9})):
        Path(name, "x").mkdir(parents=True)
        write(f"{name}/x/runs.parquet", rows_of(1, **columns))
    code, out, _ = ultrabench("compare", "old/x/runs.parquet", "new/x/runs.parquet")
    assert code == 0
    assert "A is old, B is new;" in out
    difference = "which may explain other step times: gemm_flops_per_s is 0.50 x."
    assert f"The machine itself differs in B, {difference}" in out
    ultrabench("heatmap", "old/x/runs.parquet", "--compare", "new/x/runs.parquet", "-o", "f.svg")
    assert "relative to the best of new" in (tmp_path / "f.svg").read_text()
    assert "machine" not in " ".join(compared(rows_of(1, **rates), rows_of(2, **rates), 0.0).notes)


def test_variants_that_only_one_side_has_are_named():
    tree, ring, unset = '{"env.ALGO": "Tree"}', '{"env.ALGO": "Ring"}', None
    a, b = (
        table_of(row("a", variant=tree), row("b", variant=unset)),
        table_of(row("c", variant=ring), row("b", variant=unset)),
    )
    assert (
        "Not compared: layouts with ALGO=Tree (1) only in A and ALGO=Ring (1) only in B."
        in compare(a, b, 0.05).notes
    )
    with refused(
        "with the same variant: ALGO=Tree (1) only in A and no variant (1), ALGO=Ring (1) only in B"
    ):
        compare(table_of(row("a", variant=tree)), b, 0.05)


def test_nothing_in_common_names_the_columns():
    with refused("B is a plan: formulas have no noise, so no difference can be tested; for their ratios: "):
        compared(rows_of(1), rows_of(1, source="predicted"))
    with refused("no layout is in both A (20 tried runs) and B (0)"):
        compared(rows_of(1), [])
    with refused("and B (20): compare tables with the same models and batch"):
        compared(rows_of(1, status="skipped"), rows_of(1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "a.parquet", "b.parquet", "--threshold", "0.03"),
            "write --threshold 3 for 3 %, or --threshold 0.03%"),
        (("compare", "a.parquet", "b.parquet", "--threshold", "many"), "--threshold many is not a percentage"),
    ],
)  # fmt: skip
def test_a_share_is_given_in_percent(ultrabench, words, message):  # noqa: F811
    assert message in one_line(ultrabench, *words)


def test_percentages_may_have_their_sign(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for name, seed in (("a.parquet", 1), ("b.parquet", 2)):
        write(name, rows_of(seed))
    for share, threshold in (((), 0.05), (("3",), 0.03), (("3%",), 0.03), (("0.5%",), 0.005), (("0",), 0)):
        words = ("--threshold", *share) * bool(share)
        document = json.loads(ultrabench("compare", "a.parquet", "b.parquet", "--json", *words)[1])
        assert document["threshold"] == pytest.approx(threshold)


def test_nothing_comparable_is_refused_and_an_option_of_the_kernel_tells_layouts_apart():
    suspect = table_of(row("a", suspect="hot"), row("b", mbs=2, status="oom"))
    with refused(
        "nothing to compare: 2 layouts in both A and B, none with a step time in both (1 suspect, 1 oom in A; "
        "1 suspect, 1 oom in B); suspect runs are not compared; ultrabench collect writes why"
    ):
        compare(suspect, suspect, 0.05)
    compiled = table_of(row("a", 100.0, compile=True), row("b", 80.0, compile=False))
    rows = compare(compiled, compiled, 0.05).rows.sort_values("layout")
    assert [layout.split()[-1] for layout in rows["layout"]] == ["compile=false", "compile=true"]
    assert rows["step_time_a_s"].tolist() == pytest.approx([12.5, 10.0])
