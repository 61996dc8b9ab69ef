"""What `import ultrabench` offers notebooks, and the examples of docs/guide/results.md."""

import importlib
import random
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import ultrabench
from tests.configs import refused
from tests.sweep_folder import write
from tests.unit.analysis import tables
from tests.unit.analysis.sweeps import OK, SPECS, attempted, make_sweep
from tests.unit.analysis.tables import row
from ultrabench.analysis.notebook import table_of
from ultrabench.analysis.results.collect import collect
from ultrabench.errors import UltrabenchError

PAGE = Path(__file__).parents[3] / "docs/guide/results.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A sweep in ./results with an ok run and runs that were never tried."""
    monkeypatch.chdir(tmp_path)
    sweep = make_sweep(tmp_path / "results/quick-cpu", SPECS)
    write(sweep, *attempted(SPECS[0], OK))
    return sweep


def test_import_alone_imports_neither_pandas_nor_a_figure():
    code = "import sys, ultrabench; assert not {'pandas', 'matplotlib', 'pyarrow'} & {*sys.modules}; ultrabench.read"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert {"read", "best", "plot"} <= {*dir(ultrabench)}
    assert importlib.import_module("ultrabench.checkout") is ultrabench.checkout
    with pytest.raises(AttributeError, match="no attribute 'red'"):
        _ = ultrabench.red


def test_a_frame_is_the_table_again_whatever_its_order(folder):
    rows = ultrabench.read()
    assert table_of(rows).equals(collect([folder], pytest.fail))
    assert rows.dp.dtype == pd.Int64Dtype()
    best = ultrabench.best(rows)
    pd.testing.assert_frame_equal(best, ultrabench.best(rows.sample(frac=1, random_state=1)))
    assert best.run_id[0] == SPECS[0].run_id


def test_a_frame_may_be_filtered_lack_columns_and_hold_floats(folder):
    rows = ultrabench.read("quick-cpu")
    names = ["run_id", "model", "nodes", "status", "is_final", "dp", "tokens_per_s_per_gpu"]
    best = ultrabench.best(rows[rows.mbs == 1][names].astype({"dp": float, "nodes": float}).assign(mine="x"))
    assert (best.run_id[0], best.dp[0], best.num_runs[0]) == (SPECS[0].run_id, 8, 1)
    assert ultrabench.best(rows.iloc[:0]).columns.tolist() == ultrabench.best(rows).columns.tolist()


def test_plot_draws_as_the_command_does(folder):
    drawn = ultrabench.plot("heatmap", ultrabench.read(), rank_by="step_time_s")
    assert "quick-cpu" in drawn.texts[0].get_text()
    assert len(ultrabench.plot("schedule", layout={"pp": 2, "gas": 2}).axes[0].texts) == 8


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda rows: ultrabench.best(rows.drop(columns=["is_final", "status"])),
         "lacks status, is_final; ranking and figures need run_id, model"),
        (lambda rows: ultrabench.best(pd.concat([rows, rows[["dp"]]], axis=1)), "has dp twice; rename or drop"),
        (lambda rows: ultrabench.best(rows.assign(dp="two")), "column dp of the DataFrame needs values of type int64"),
        (lambda rows: ultrabench.plot("heatmop", rows), "did you mean heatmap"),
        (lambda rows: ultrabench.plot("heatmap"), "the figure heatmap needs result rows"),
        (lambda rows: ultrabench.plot("scatter"), "the figure scatter needs result rows"),
        (lambda rows: ultrabench.plot("schedule", layout={"pp": 2}, axis="tp"), "takes no axis"),
    ],
)  # fmt: skip
def test_mistakes_say_what_to_do(folder, mistake, message):
    with refused(message, UltrabenchError):
        mistake(ultrabench.read())


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # duckdb uses it
def test_the_examples_of_the_page_run(folder):
    pytest.importorskip("duckdb", reason="duckdb is not installed: pip install -e .[dev]")
    names = {}
    for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(example, str(PAGE), "exec"), names)
    assert Path("heatmap.svg").stat().st_size > 1000
    assert len(names["narrow"]) < len(names["rows"])
    assert names["spent"]["ok"] == pytest.approx(0.2)


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # duckdb uses it
def test_the_query_of_the_page_finds_the_runs_that_best_finds():
    """Cells of three runs, of which 1 to 4 repeats are ok; two in three cells are ranked by ratios to one control."""
    pytest.importorskip("duckdb", reason="duckdb is not installed: pip install -e .[dev]")
    draw = random.Random(3)
    rows = [
        row(
            f"{n}{run}", draw.choice((90.0, 100.0, 110.0, 111.0)), nodes=n, repeat=repeat,
            control=f"c{n}" if n % 3 else None,
            control_ratio=draw.randint(90, 110) / 100 if n % 3 else None, gbs=256 if n % 2 else 512,
            status=draw.choice(("ok", "ok", "crash")), stopped=draw.choice((None, None, "slower_than_best")),
            suspect=draw.choice((None, None, "hot")),
        )
        for n in range(1, 20) for run in "abc" for repeat in range(draw.randint(1, 4))
    ]  # fmt: skip
    names = {"rows": tables.table_of(*rows).to_pandas()}
    (example,) = re.findall(
        r"import duckdb\n\n(fastest = .*?)narrow", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    exec(f"import duckdb\n{example}", names)
    best = ultrabench.best(names["rows"])
    trusted = best[best["run_id"].notna() & best["suspect"].isna()].sort_values("nodes")
    columns = ["nodes", "run_id", "tokens_per_s_per_gpu", "ranked_value"]
    found = names["fastest"].sort_values("nodes")[columns].to_numpy().tolist()
    assert len(found) > 10
    assert found == trusted[columns].to_numpy().tolist()
