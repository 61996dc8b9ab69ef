"""`ultrabench compare`: what is found when something was planted, and nothing where nothing changed."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.unit.cli.conftest import one_line, ultrabench  # noqa: F401
from ultrabench.analysis.collect import parquet
from ultrabench.analysis.compare import compare, corrected
from ultrabench.analysis.notebook import table_of
from ultrabench.errors import ConfigError

LAYOUTS = [(dp, mbs) for dp in (1, 2, 4, 8) for mbs in (1, 2, 4, 8, 16)]


def steps(rng, time_s, number=20, correlation=0.5, between=0.0):
    """Step times whose neighbours are alike, of a run that differs from other runs of the same layout."""
    noise = rng.normal(size=number)
    for at in range(1, number):
        noise[at] = correlation * noise[at - 1] + (1 - correlation**2) ** 0.5 * noise[at]
    return (time_s * np.exp(0.03 * noise + between * rng.normal())).tolist()


def table(seed, slow=(), factor=1.2, repeats=1, between=0.0, **columns):
    rng, rows = np.random.default_rng(seed), []
    for at, (dp, mbs) in enumerate(LAYOUTS):
        for repeat in range(repeats):
            found = steps(rng, (1 + at / 9) * (factor if at in slow else 1), between=between)
            rows.append({
                "run_id": f"{at:016x}", "repeat": repeat, "status": "ok", "is_final": True, "model": "8B", "num_params": 8,
                "nodes": 1, "seq_len": 64, "gbs": 16, "dp": dp, "tp": 1, "pp": 1, "cp": 1, "mbs": mbs, "gas": 1, "zero_stage": 0,
                "step_times_s": found, "step_time_s": float(np.median(found)), "tokens_per_s_per_gpu": 1 / np.median(found),
            } | columns)  # fmt: skip
    return table_of(pd.DataFrame(rows))


def slower(found):
    return sorted(int(run_id, 16) for run_id in found.rows.loc[found.rows["finding"] == "slower", "run_id_a"])


def test_planted_regressions_are_found_and_nothing_else():
    found = compare(table(1, between=0.01), table(2, slow=(3, 11), between=0.01), 0.05)
    assert slower(found) == [3, 11]
    assert found.regressions == 2
    assert len(found.findings) == 2
    assert compare(table(1), table(2, slow=(3, 11)), 0.5).regressions == 0  # the threshold allows them
    assert found.median_ratio == pytest.approx(1, abs=0.03)


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
    told, said = corrected(pairs)
    assert min(told["p_corrected"]) > 0.05
    assert "Repeats of a run differ by" in said[1]
    few, said = corrected([([p[0][0]], [p[1][0]]) for p in pairs])
    assert min(few["p_corrected"]) < 0.05
    assert "not in the test" in said[1]


def test_a_single_step_is_not_tested():
    a, b = (table(seed).drop(["step_times_s"]) for seed in (1, 2))
    found = compare(*(table_of(each.to_pandas()) for each in (a, b)), 0.05)
    assert found.rows["p_value"].isna().all()
    assert found.rows["ratio"].notna().all()
    assert "20 of them were not tested, because a side has a single step time." in found.notes


def test_stopped_runs_are_counted_and_a_lost_power_is_told(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    """3 steps on both sides give a p of 0.1 or more, however large the difference."""
    monkeypatch.chdir(tmp_path)
    for name, seed, slow in (("a", 1, ()), ("b", 2, range(20))):
        rows = table(seed, slow=slow, factor=3).to_pandas()
        rows.loc[:11, "stopped"] = "slower_than_best"
        rows["step_times_s"] = [each[:3] if at < 12 else each for at, each in enumerate(rows["step_times_s"])]
        (tmp_path / f"{name}.parquet").write_bytes(parquet(table_of(rows)))
    code, out, err = ultrabench("compare", "a.parquet", "b.parquet")
    assert code == 1  # for the 8 others
    assert "12 of them were stopped early in A or in B" in " ".join(out.split())
    assert "12 of them could not become significant" in " ".join(out.split())
    assert "largest ratios that are not significant (5 of " in out
    assert "12 of 20 layouts have too few measured steps" in " ".join(err.split())
    assert compare(table(1), table(2), 0.05).warning is None


def test_ends_suspects_and_winners():
    a, b = table(1).to_pandas(), table(2, slow=(0,), factor=1.5).to_pandas()
    b.loc[1, "status"], b.loc[2, "status"], a.loc[3, "status"] = "oom", "node_fail", "crash"
    b.loc[4, "suspect"] = "throttled"
    b.loc[[1, 2], "step_time_s"] = a.loc[3, "step_time_s"] = np.nan
    b["torch_version"], a["torch_version"], b["kernel"] = "2.13", "2.12", "mine"
    found = compare(table_of(a), table_of(b.sample(frac=1, random_state=1)), 0.05)
    findings = dict(zip(found.rows["run_id_a"].map(lambda r: int(r, 16)), found.rows["finding"], strict=True))
    assert {at: name for at, name in findings.items() if pd.notna(name)} == {
        0: "slower", 1: "failing", 3: "running again",
    }  # fmt: skip
    assert found.rows.loc[found.rows["run_id_a"] == f"{4:016x}", "status_b"].item() == "suspect"
    assert found.differing["torch_version"] == ("2.12", "2.13")
    (won,) = found.winners.to_dict("records")
    assert (won["best_a"], won["best_b"]) == ("dp1 tp1 pp1 z0 mbs1 gas1", "dp1 tp1 pp1 z0 mbs8 gas1")
    assert won["cost"] == pytest.approx(1.5 / (1 + 3 / 9), rel=0.05)


def test_several_kernels_in_a_table_are_compared_with_the_same():
    both = pd.concat([table(1, kernel="x").to_pandas(), table(2, kernel="y", slow=range(20)).to_pandas()])
    found = compare(table_of(both), table_of(both), 0.05)
    assert len(found.rows) == 40
    assert found.regressions == 0


def test_the_command_is_for_ci(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for name, made in {"a": table(1), "b": table(2, slow=(3,)), "c": table(1, seq_len=128)}.items():
        (tmp_path / f"{name}.parquet").write_bytes(parquet(made))
    code, out, _ = ultrabench("compare", "a.parquet", "b.parquet", "-o", "f.svg")
    assert code == 1
    assert "median ratio of step times 1.0" in out
    assert "1 slower, 0 faster, 0 failing" in out
    drawn = (tmp_path / "f.svg").read_bytes()
    assert b"slower, p &lt;= 0.05" in drawn
    assert b"step time of b / a" in drawn
    assert b"dp1 tp1 pp1 z0 mbs8 gas1" in drawn  # the slower one is named
    assert b"A is a, B is b. From A to B: no other hardware, kernel or precision known." in drawn
    code, out, _ = ultrabench("compare", "a.parquet", "b.parquet", "--json", "-o", "rows.parquet")
    told = json.loads(out)
    assert (code, told["regressions"], len(told["rows"]), told["only_a"]) == (1, 1, 20, 0)
    assert len(pd.read_parquet("rows.parquet")) == 20
    ultrabench("compare", "a.parquet", "b.parquet", "-o", "f.svg")
    assert (tmp_path / "f.svg").read_bytes() == drawn
    assert ultrabench("compare", "a.parquet", "a.parquet")[0] == 0
    assert "seq_len is 64 in A and 128 in B" in one_line(ultrabench, "compare", "a.parquet", "c.parquet")


def test_equal_names_and_another_machine_are_told_apart(ultrabench, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    rates = {"peak_flops_per_s": 1e10, "gemm_flops_per_s": 8e9, "sm_clock_hz": None}
    for name, own in (("old", rates), ("new", rates | {"gemm_flops_per_s": 4e9})):
        (tmp_path / name / "x").mkdir(parents=True)
        (tmp_path / name / "x/runs.parquet").write_bytes(parquet(table(1, **own)))
    code, out, _ = ultrabench("compare", "old/x/runs.parquet", "new/x/runs.parquet")
    assert code == 0
    assert "A is old, B is new;" in out
    told = "other rates, from which other step times may come: gemm_flops_per_s is 0.50 x."
    assert f"In B the machine has {told}" in out
    ultrabench("heatmap", "old/x/runs.parquet", "--compare", "new/x/runs.parquet", "-o", "f.svg")
    assert "as the best of new" in (tmp_path / "f.svg").read_text()
    assert "machine" not in " ".join(compare(table(1, **rates), table(2, **rates), 0.0).notes)


def test_one_run_of_them_was_stopped():
    rows = table(1).to_pandas()
    rows.loc[0, "stopped"] = "slower_than_best"
    notes = compare(table_of(rows), table(1), 0.05).notes
    assert "1 of them was stopped early in A or in B, as slower than the best of the cell." in notes


def test_nothing_in_common_names_the_columns():
    with pytest.raises(ConfigError, match="A has 20 tried runs, B 0, and no layout is in both"):
        compare(table(1), table(1).slice(0, 0), 0.05)
    with pytest.raises(ConfigError, match=r"no layout is in both: compare the same models and batch$"):
        compare(table(1, status="skipped"), table(1), 0.05)
