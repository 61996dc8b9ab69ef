"""Figures and pages of a plan: predictions that title, hatch and file names mark."""

import json
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.text import Text
from pyarrow import parquet

from tests.unit.cli.conftest import one_line
from ultrabench.analysis.figures import heatmap
from ultrabench.analysis.figures.kinds import prepare_figure
from ultrabench.analysis.figures.plots import memory
from ultrabench.analysis.page.rows import document
from ultrabench.analysis.results.collect import open_results, read_parquet
from ultrabench.analysis.results.ranking import rank

PLAN = (
    "sweep", "plan", "model=llama3-8b", "hardware=h100x8", "sweep.tp=[1,2]", "sweep.pp=[1]", "-o", "plan.parquet",
    "--top", "1",
)  # fmt: skip


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
    measured = [replace(cell, predicted=False) for cell in cells]
    plain, hatched = (heatmap.figure(drawn, title=name) for drawn in (measured, cells))
    assert len(hatched.axes[0].collections) == len(plain.axes[0].collections) + len(cells)


def test_figures_of_a_plan_say_that_nothing_was_measured(ultrabench, tmp_path):
    ultrabench(*PLAN)
    table = open_results("plan.parquet", tmp_path, print)[2]
    words = {}
    for kind in ("pareto", "scaling"):
        _, make = prepare_figure(kind, table, title="plan")
        words[kind] = "\n".join(text.get_text() for text in make().findobj(Text))
        note = r"nothing was measured.*: \d+ planned, \d+ predicted out of memory"
        assert re.search(note, words[kind].replace("\n", " "))
    assert "GPU memory" in words["pareto"]
    assert "nodes (strong: gbs " in words["scaling"]
    best = table.filter(pc.field("run_id") == rank(table)[0].run_id).to_pylist()[0]
    bars, note = memory.points({}, table, axis="mbs")
    (bar,) = (bar for bar in bars.itertuples() if bar.value == str(best["mbs"]))
    assert (bar.shown, bar.tp, bar.zero_stage) == ("predicted", best["tp"], best["zero_stage"])
    assert abs(bar.bytes - best["predicted_peak_mem_bytes"]) < 2
    assert {*bars["shown"]} == {"predicted"}
    assert "from the best layout of the plan" in note
    assert all(cell["predicted"] for cell in json.loads(ultrabench("heatmap", "plan.parquet", "--json")[1]))
    assert "no layout of the plan has tp=8" in one_line(ultrabench, "plot", "memory", "plan.parquet", "tp=8")


def test_a_layout_of_a_plan_is_shown_as_a_command_of_a_framework(ultrabench, tmp_path):
    plan = [argument.replace("llama3-8b", "llama3.1-8b") for argument in PLAN]
    ultrabench(*plan)
    first = json.loads(ultrabench("sweep", "top", "plan.parquet", "--json")[1])[0]
    words = "plan.parquet", "--as", "megatron", "--json"
    by_rank = json.loads(ultrabench("sweep", "show", "1", *words)[1])
    assert by_rank == json.loads(ultrabench("sweep", "show", first["run_id"][:8], *words)[1])
    assert by_rank["run_id"] == first["run_id"]
    assert "--use-rope-scaling" in by_rank["command"]
    expected = {f"--tensor-model-parallel-size={first['tp']}", f"--micro-batch-size={first['mbs']}"}
    assert expected <= {*by_rank["command"]}
    for run in ("0", "9999", "zz"):
        line = one_line(ultrabench, "sweep", "show", run, *words)
        assert line.startswith(f"'{run}' matches 0 runs of plan.parquet; give a rank up to ")


def test_commands_that_draw_take_a_plan(ultrabench, tmp_path):
    ultrabench(*PLAN)
    for words, suffix in ((["heatmap"], ".png"), (["plot", "pareto"], ".png"), (["report"], ".html")):
        code, _, err = ultrabench(*words, "plan.parquet")
        assert code == 0, err
        assert (tmp_path / f"plan-predicted-{words[-1]}").with_suffix(suffix).is_file()
    assert re.search(r"<title>[^<]*plan, predicted", (tmp_path / "plan-predicted-report.html").read_text())


def test_a_plan_of_a_sweep_folder_that_names_no_hardware_is_refused(ultrabench, sweep):
    line = one_line(ultrabench, "heatmap", str(sweep.plan))
    assert "does not name its hardware or names an unknown model" in line


def test_all_commands_rank_a_plan_by_the_expected_rate(ultrabench, tmp_path):
    """Not by the predicted rate alone, and layouts without room for the allocator's reserve come last."""
    words = (*PLAN[:-1], "100", "--all", "--json", "--advise-p-oom", "0.1")
    top = json.loads(ultrabench(*words)[1])["top"]
    ids = [row["run_id"] for row in sorted(top, key=lambda row: -row["expected_tokens_per_s_per_gpu"])]

    def ok_rows():
        rows = json.loads(ultrabench("sweep", "top", "plan.parquet", "--json")[1])
        (cell,) = json.loads(ultrabench("heatmap", "plan.parquet", "--json")[1])
        columns = document(read_parquet(tmp_path / "plan.parquet"), public=False)["columns"]
        assert {cell["run_id"], columns["run_id"]["values"][0]} == {rows[0]["run_id"]}
        assert cell["ranked_by"] == rows[0]["ranked_by"] == "expected_tokens_per_s_per_gpu"
        return [row for row in rows if row["status"] == "ok"]

    ok = ok_rows()
    assert [row["run_id"] for row in ok] == ids
    assert sorted(ok, key=lambda row: -row["tokens_per_s_per_gpu"]) != ok
    assert ok[0]["ranked_value"] == ok[0]["tokens_per_s_per_gpu"] * (1 - ok[0]["p_oom"])
    assert "by expected_tokens_per_s_per_gpu" in ultrabench("sweep", "top", "plan.parquet")[1]
    plan = parquet.read_table("plan.parquet")
    # A layout without room does not win its cell, but stands among the others by its rate.
    for without_room, order in ((ids[:1], [ids[1], ids[0], *ids[2:]]), (ids, ids)):
        full = pc.if_else(pc.is_in(plan["run_id"], pa.array(without_room)), 1.01, 0.9)
        column = plan.column_names.index("predicted_memory_share")
        parquet.write_table(plan.set_column(column, "predicted_memory_share", full), "plan.parquet")
        assert [row["run_id"] for row in ok_rows()] == order
