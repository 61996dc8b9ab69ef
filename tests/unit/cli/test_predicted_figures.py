"""Figures and pages of a plan: predictions that title, hatch and file names mark."""

import json
import re

from tests.unit.cli.conftest import one_line
from ultrabench.analysis.collect import open_results
from ultrabench.analysis.figures import heatmap
from ultrabench.analysis.ranking import rank

PLAN = (
    "sweep",
    "plan",
    "model=llama3-8b",
    "hardware=h100x8",
    "sweep.tp=[1,2]",
    "sweep.pp=[1]",
    "-o",
    "plan.parquet",
    "--top",
    "1",
)


def test_a_heatmap_of_a_plan_shows_its_first_layout_and_says_that_it_is_predicted(ultrabench, tmp_path):
    (first,) = json.loads(ultrabench(*PLAN, "--advise-p-oom", "0.1", "--json")[1])["top"]
    name, begin, table = open_results("plan.parquet", tmp_path, print)
    assert (name, begin) == ("plan, predicted", "plan-predicted-")
    ended = {row["run_id"]: row for row in table.to_pylist()}
    assert ended[first["run_id"]]["status"] == "ok"
    assert ended[first["run_id"]]["step_time_s"] == first["step_time_s"]
    assert abs(ended[first["run_id"]]["mfu"] / first["mfu"] - 1) < 1e-9
    assert "oom" in {row["status"] for row in ended.values()}
    cells = rank(table)
    plain, hatched = (heatmap.figure(cells, title=name, predicted=predicted) for predicted in (False, True))
    assert len(hatched.axes[0].collections) == len(plain.axes[0].collections) + len(cells)


def test_commands_that_draw_take_a_plan(ultrabench, tmp_path):
    ultrabench(*PLAN)
    for words in (["heatmap"], ["plot", "pareto"], ["report"]):
        code, _, err = ultrabench(*words, "plan.parquet")
        assert code == 0, err
    assert {"plan-predicted-heatmap.png", "plan-predicted-pareto.png"} < {
        path.name for path in tmp_path.iterdir()
    }
    assert re.search(r"<title>[^<]*plan, predicted", (tmp_path / "plan-predicted-report.html").read_text())


def test_a_plan_of_a_sweep_folder_that_names_no_hardware_is_refused(ultrabench, sweep):
    assert "does not say for which hardware" in one_line(ultrabench, "heatmap", str(sweep.plan))
