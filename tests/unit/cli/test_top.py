"""`sweep top` ranks as the heatmap does, and `sweep show` finds its runs."""

import os
import re
from dataclasses import replace

import pytest
from pyarrow import parquet

from tests.unit.analysis.tables import row, table_of
from tests.unit.cli.conftest import HEAD, QUICK, as_json, record
from ultrabench.cli.sweep.top import SHOWN_AS
from ultrabench.errors import counted
from ultrabench.store.folder import SweepFolder
from ultrabench.store.sweep_json import write_sweep_json

NODES = QUICK.runs[0].nodes
CELL = [run for run in QUICK.runs if run.nodes == NODES]
BEST, CRASHED = QUICK.runs[:2]
DOUBTED, SLOW = [run for run in CELL if run not in (BEST, CRASHED)][:2]


@pytest.fixture
def results(sweep):
    """The sweep with a suspect and a run that was slower, both faster than the best."""
    for run, values in ((DOUBTED, {"throttled": "hot"}), (SLOW, {"stopped": "slower_than_best"})):
        record(sweep, run, step_times_s=(0.09,) * 6, peak_mem_reserved_bytes=3 << 29, **values)
    return sweep


def test_top_shows_the_numbers_of_each_run_in_peoples_units(ultrabench, results):
    code, out, err = ultrabench("sweep", "top", "-n", "3")
    assert code == 0
    table = out.split(f"{NODES} node")[1]
    best, doubted, slow = (
        next(line for line in table.splitlines() if run.run_id in line) for run in (BEST, DOUBTED, SLOW)
    )
    assert re.search(r" 0.1 s \+- 0 % .* best ", best)
    assert re.search(" 1.50 GiB .* suspect ", doubted)
    assert " slower " in slow
    assert f"{len(CELL) - 3} more" in table
    assert "suspect (wins only a cell without other results)" in err
    assert "MFU uses the FLOPs formula palm" in err
    assert "RANK --sweep quick-cpu; ranks continue across cells" in err


def test_the_title_of_a_table_names_what_sets_its_cell_apart(ultrabench, tmp_path):
    weak = [{"nodes": n, "gbs": 8 * n, "scaling": "weak"} for n in (1, 2)]
    weak += [{"nodes": 1, "gbs": 8, "scaling": "weak", "status": "oom", "repeat": 1, "run_id": f"{0:016x}"}]
    sizes = [{"model": "mini", "seq_len": s, "gbs": g} for s in (64, 128) for g in (8, 16)]
    rows = [row(**{"run_id": f"{n:016x}"} | of) for n, of in enumerate((*weak, *sizes))]
    parquet.write_table(table_of(*rows), tmp_path / "runs.parquet")
    code, out, err = ultrabench("sweep", "top", str(tmp_path / "runs.parquet"))
    assert code == 0, err
    for cell in ("on 1 node, gbs 8", "on 2 nodes, gbs 16", "seq_len 64, gbs 16", "seq_len 128, gbs 16"):
        assert f"{cell}, by tokens" in " ".join(out.split())


def test_top_says_which_numbers_follow_from_parts_of_steps(ultrabench, tmp_path):
    parts, few = {"measured_gas": "2,4", "screened": True}, {"screened": True}
    rows = [
        row("a" * 16, 90.0, suspect="hot", **parts), row("b" * 16, 80.0, **parts), row("c" * 16, 70.0),
        row("d" * 16, 60.0, stopped="slower_than_best", **parts), row("e" * 16, 85.0, **few),
    ]  # fmt: skip
    parquet.write_table(table_of(*rows), tmp_path / "runs.parquet")
    code, out, err = ultrabench("sweep", "top", str(tmp_path / "runs.parquet"))
    assert code == 0, err
    marks = {line.split()[-1][0]: line for line in out.splitlines() if re.search(r"([abcde])\1{15}", line)}
    for run, mark in {
        "a": "suspect, in parts",
        "b": "in parts",
        "c": "best",
        "d": "slower, in parts",
        "e": "few steps",
    }.items():
        assert f" {mark} " in marks[run]
    assert (
        "4 of 5 rows screened (3 by parts of steps, 1 by few whole steps); only runs measured in full" in err
    )


def test_a_winner_whose_interval_missed_the_target_is_marked(ultrabench, results):
    assert "best +-" not in ultrabench("sweep", "top")[1]
    uneven = (0.045, 0.045, 0.09, 0.09, 0.135, 0.135)
    record(results, CELL[-1], step_times_s=uneven, ci_reached=False)
    best = next(line for line in ultrabench("sweep", "top")[1].splitlines() if CELL[-1].run_id in line)
    assert "best +- 50.0 %" in best
    rate = CELL[-1].spec.tokens_per_step / 0.09 / CELL[-1].layout.world_size
    assert f"{rate:,.0f} +- 50.0 %" in ultrabench("sweep", "status")[1]
    (winner,) = [cell for cell in as_json(ultrabench, "heatmap") if cell["nodes"] == NODES]
    assert (winner["ci_reached"], winner["step_time_ci95_rel"]) == (False, pytest.approx(0.5))


def test_the_last_line_is_a_command_that_shows_the_run_of_the_table(ultrabench, results):
    newer = SweepFolder(results.path.parent / "newer")
    newer.create()
    write_sweep_json(newer, replace(HEAD, sweep="newer"))
    os.utime(newer.path / "sweep.json", (9e9, 9e9))
    line = ultrabench("sweep", "top", "quick-cpu")[2].splitlines()[-1]
    words = line.partition(": ultrabench ")[2].partition(";")[0].replace("RANK", "1").split()
    assert ultrabench(*words)[1].splitlines()[0].endswith("of quick-cpu")
    assert ultrabench("collect", "quick-cpu")[0] == 0
    assert "ultrabench sweep show" not in ultrabench("sweep", "top", str(results.path / "runs.parquet"))[2]
    assert "show RUN_ID --sweep quick-cpu" in ultrabench("sweep", "top", "quick-cpu", "--by", "mfu")[2]


def test_the_column_that_is_ranked_by_is_in_the_table(ultrabench, results, monkeypatch):
    record(results, CELL[-1], init_time_s=3.25)
    monkeypatch.setattr("ultrabench.cli.tables.PIPE_WIDTH", 50)
    out = ultrabench("sweep", "top", "quick-cpu", "--by", "init_time_s")[1]
    assert {"init_time_s", "status"} <= set(out.split())
    assert "3.25 s" in out
    assert SHOWN_AS["mfu"] in ultrabench("sweep", "top", "quick-cpu", "--by", "mfu")[1].split()
    runs = as_json(ultrabench, "sweep", "top", "--by", "step_time_s", "-n", "2")
    assert runs == as_json(ultrabench, "sweep", "top", "--rank-by", "step_time_s", "-n", "2")
    heatmaps = (as_json(ultrabench, "heatmap", name, "step_time_s") for name in ("--by", "--rank-by"))
    assert len({str(cells) for cells in heatmaps}) == 1
    assert "--by" not in ultrabench("heatmap", "--help")[1]
    assert "--rank-by" not in ultrabench("sweep", "top", "--help")[1]
    assert {row["ranked_by"] for row in runs if row["nodes"] == NODES} == {"step_time_s"}
    assert len(runs) == 2 * len({run.nodes for run in QUICK.runs})


def test_the_heatmap_says_first_where_several_layouts_are_as_good(ultrabench, results):
    assert "tie for best" not in ultrabench("heatmap")[2]
    record(results, CELL[-1])
    first = ultrabench("heatmap")[2].splitlines()[0]
    assert "; in 1 of them, several layouts tie for best" in first


@pytest.mark.parametrize(
    "words", ["RANK", DOUBTED.run_id[:9], f"{DOUBTED.run_id} quick-cpu", "RANK --sweep quick-cpu"]
)
def test_show_takes_a_rank_and_begins_with_the_numbers_of_the_table(ultrabench, results, words):
    rank = next(r["rank"] for r in as_json(ultrabench, "sweep", "top") if r["run_id"] == DOUBTED.run_id)
    out = ultrabench("sweep", "show", *words.replace("RANK", str(rank)).split())[1].splitlines()
    assert out[0] == f"run {DOUBTED.run_id} of quick-cpu"
    assert " ".join(out[1].split()) == f"rank {rank}, tiny on {counted(NODES, 'node')}"
    numbers = dict(line.split(maxsplit=1) for line in out[2:10] if " " in line)
    assert (numbers["memory"], numbers["status"]) == ("1.50 GiB", "suspect")
