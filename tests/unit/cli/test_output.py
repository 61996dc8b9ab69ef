import json
import re
import subprocess
import sys

import pytest

from tests.unit.cli.conftest import QUICK, as_json
from ultrabench import __version__
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.store.events import Claimed, Failed, Result
from ultrabench.store.journal import JournalWriter


def test_plan_json_keeps_its_promise(ultrabench, tmp_path):
    plan = as_json(ultrabench, "sweep", "plan", "sweep=playbook", "model=1B")
    assert plan["sweep"] == "playbook-h100x8"
    assert plan["candidates"] == plan["valid"] + sum(plan["rejected"].values())
    assert (plan["valid"], plan["runs"]) == (1178, plan["runs"])
    assert plan["predicted_gpu_hours"] > 0
    assert [c["nodes"] for c in plan["cells"]] == [1, 2, 4, 8, 16, 32, 64]
    assert all(
        set(c) == {"model", "nodes", "candidates", "valid", "runs", "predicted_to_fit"} for c in plan["cells"]
    )
    promised = {"sweep", "candidates", "valid", "rejected", "runs", "predicted_gpu_hours", "cells"}
    assert promised <= set(plan)
    assert list(tmp_path.iterdir()) == []


def test_plan_top_names_the_best_of_each_cell(ultrabench, sweep):
    plan = as_json(ultrabench, "sweep", "plan", "model=tiny", "--top", "2")
    assert [row["nodes"] for row in plan["top"]] == [1, 1, 2, 2]
    measured = [row for row in plan["top"] if row["why"] == "measured"]
    assert [row["run_id"] for row in measured] == [QUICK.runs[0].spec.run_id]
    assert measured[0]["step_time_s"] == pytest.approx(0.1)


def test_plan_top_names_only_what_fits(ultrabench):
    words = ("sweep", "plan", "sweep=playbook", "sweep.models=[80B,8B]", "sweep.nodes=[1]", "--top", "2")
    _, out, _ = ultrabench(*words, "--json")
    document = json.loads(out)
    assert [(row["model"], row["peak_mem_bytes"] < 80 * 2**30) for row in document["top"]] == [
        ("8B", True)
    ] * 2
    assert (document["cells"][0]["runs"], document["cells"][0]["predicted_to_fit"]) == (115, 0)
    _, out, _ = ultrabench(*words)
    assert re.search(
        r"80B on 1 node: nothing is predicted to fit; the smallest layout needs \d+ GiB of 80", out
    )


def test_status_json_keeps_its_promise(ultrabench, sweep):
    status = as_json(ultrabench, "sweep", "status")
    total = len(QUICK.runs)
    assert (status["sweep"], status["runs"], status["attempts"]) == ("quick-cpu", total, 2)
    assert status["by_status"] == {"ok": 1, "crash": 1, "pending": total - 2}
    gpus = [r.layout.world_size for r in QUICK.runs[:2]]
    assert status["gpu_hours"]["useful"] == pytest.approx(9 * gpus[0] / 3600, abs=1e-6)
    assert status["gpu_hours"]["wasted"] == pytest.approx(4 * gpus[1] / 3600, abs=1e-6)


def test_status_and_collect_tell_of_doubtful_and_invalid_numbers(ultrabench, sweep):
    told = ultrabench("sweep", "status")[1] + ultrabench("collect")[2]
    assert "suspect" not in told
    assert "invalid" not in told
    writer = JournalWriter(sweep.journal, "agent")
    odd = {"rank_step_times_s": {"0": 0.1, "1": 0.5}}
    for run, loss, more in zip(QUICK.runs[2:5], (3.0, 3.0, 9.0), (odd, {}, {}), strict=True):
        result = RunResult(status=Status.OK, step_times_s=(0.1,), loss_final=loss, **more)
        name = {"run_id": run.run_id, "repeat": 0, "attempt": 0}
        writer.write(Result(**name, source="agent", spec=to_dict(run.spec), result=result))
    status = as_json(ultrabench, "sweep", "status")
    assert status["by_status"]["invalid"] == 1
    reason = "rank 1 took 5.00 x the step time of rank 0"
    assert status["suspects"] == {f"{QUICK.runs[2].run_id}.0.0": reason}
    out = ultrabench("sweep", "status")[1]
    assert f"1 suspect and winning no cell, such as {QUICK.runs[2].run_id}.0.0: {reason}" in " ".join(
        out.split()
    )
    err = ultrabench("collect")[2]
    assert f"rows: suspect and wins no cell, such as {QUICK.runs[2].run_id}: {reason}" in err
    assert f"rows: invalid, such as {QUICK.runs[4].run_id}: loss 9; the other 3 layouts" in err
    assert as_json(ultrabench, "sweep", "retry", "--dry-run", "--only", "invalid")[0]["was"] == "invalid"
    shown = as_json(ultrabench, "sweep", "show", QUICK.runs[4].run_id)
    assert shown["attempts"][0]["result"]["reason"].startswith("loss 9; the other 3 layouts")


def test_retry_json_names_what_failed(ultrabench, sweep):
    crashed = QUICK.runs[1].spec.run_id
    rows = as_json(ultrabench, "sweep", "retry", "--dry-run")
    assert [(r["run_id"], r["attempt"], r["was"]) for r in rows] == [(crashed, 1, "crash")]
    assert as_json(ultrabench, "sweep", "retry", "--dry-run", "--only", "hang,timeout") == []
    assert as_json(ultrabench, "sweep", "retry", "--dry-run", "--run", crashed[:6]) == rows


def test_show_json_holds_everything(ultrabench, sweep):
    run = QUICK.runs[1]
    shown = as_json(ultrabench, "sweep", "show", run.spec.run_id[:10])
    assert shown["run_id"] == run.spec.run_id
    assert shown["spec"] == to_dict(run.spec)
    assert shown["plan"]["mbs"] == run.layout.mbs
    assert [a["result"]["status"] for a in shown["attempts"]] == ["crash"]


def test_heatmap_json_is_a_list_of_cells(ultrabench, sweep):
    cells = as_json(ultrabench, "heatmap")
    assert {(c["model"], c["nodes"]) for c in cells} == {("tiny", 1), ("tiny", 2)}
    best = {c["nodes"]: c for c in cells}[QUICK.runs[0].nodes]
    assert (best["run_id"], best["status"]) == (QUICK.runs[0].spec.run_id, "ok")


def test_configs_json_names_every_group(ultrabench):
    found = as_json(ultrabench, "configs")
    assert {"model", "hardware", "sweep", "kernel", "launcher", "measure", "retry", "cluster"} == set(found)
    assert "tiny" in found["model"]
    assert set(as_json(ultrabench, "configs", "sweep")) == {"sweep"}


@pytest.mark.parametrize(
    "words",
    [
        ["sweep", "plan", "--top", "2"],
        ["sweep", "status"],
        ["sweep", "show", QUICK.runs[1].spec.run_id],
        ["sweep", "retry", "--dry-run"],
        ["configs"],
    ],
    ids=" ".join,
)
def test_tables_go_to_stdout(ultrabench, sweep, words):
    code, out, err = ultrabench(*words)
    assert (code, err) == (0, "")
    assert out.count("\n") >= 3


def test_reasons_are_shown_as_they_are(ultrabench, sweep):
    """Square brackets of a message are no markup."""
    for words in (["sweep", "status"], ["sweep", "retry", "--dry-run"],
                  ["sweep", "show", QUICK.runs[1].spec.run_id]):  # fmt: skip
        assert "[bold]no[/bold]" in ultrabench(*words)[1], words


def test_cancel_leaves_results_and_says_so(ultrabench, sweep):
    code, out, err = ultrabench("sweep", "cancel")
    assert (code, out) == (0, "")
    assert "cancelled; results stay" in err
    assert as_json(ultrabench, "sweep", "status")["by_status"]["ok"] == 1


def test_plan_touches_nothing(ultrabench, tmp_path):
    assert ultrabench("sweep", "plan")[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_version(ultrabench):
    assert ultrabench("--version")[:2] == (0, f"{__version__}\n")


@pytest.mark.parametrize("words", [["--help"], ["sweep", "--help"], ["sweep", "launch", "--help"],
                                   ["kernel", "check", "--help"], ["heatmap", "--help"]],
                         ids=" ".join)  # fmt: skip
def test_help_goes_to_stdout(ultrabench, words):
    code, out, err = ultrabench(*words)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: ") or re.match(r"\s*Usage: ", out)


def modules_after(tmp_path, *lines):
    """Heavy modules loaded after each command line, all run in one fresh process."""
    code = (
        "import contextlib, io, json, sys\n"
        "from ultrabench.cli.main import main\n"
        "heavy = ('torch', 'pandas', 'matplotlib', 'seaborn', 'hydra', 'submitit', 'numpy')\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['ultrabench', *line]\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):\n"
        "        main()\n"
        "    assert said.getvalue(), line\n"
        "    print(json.dumps([name for name in heavy if name in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(lines)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_help_imports_nothing_heavy(tmp_path):
    for loaded in modules_after(tmp_path, ["--help"], ["sweep", "launch", "--help"]):
        assert loaded == []


def test_reading_commands_never_import_torch(tmp_path, sweep):
    commands = (
        ["sweep", "status", "--json"],
        ["sweep", "plan", "--json"],
        ["sweep", "show", QUICK.runs[0].spec.run_id, "--json"],
        ["heatmap", "--json"],
    )
    for words, loaded in zip(commands, modules_after(tmp_path, *commands), strict=True):
        assert not {"torch", "matplotlib", "seaborn", "submitit"} & set(loaded), words


def test_collect_never_imports_torch(tmp_path, sweep):
    loaded = modules_after(tmp_path, ["configs", "--json"], ["sweep", "status", "--json"])
    assert "torch" not in loaded[-1]
    code = (
        "import contextlib, sys\n"
        "from ultrabench.cli.main import main\n"
        "sys.argv = ['ultrabench', 'collect']\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)
    assert (sweep.path / "runs.parquet").is_file()


def test_a_plain_retry_leaves_answers_alone(ultrabench, sweep):
    writer = JournalWriter(sweep.journal, "agent")
    for run, confirmed in zip(QUICK.runs[2:4], (True, False), strict=True):
        result = RunResult(status=Status.OOM, cause="cpu_oom", confirmed=confirmed, reason="no memory")
        name = {"run_id": run.run_id, "repeat": 0, "attempt": 0}
        writer.write(Failed(**name, source="agent", spec=to_dict(run.spec), result=result))
    again = {row["run_id"] for row in as_json(ultrabench, "sweep", "retry", "--dry-run")}
    assert QUICK.runs[2].run_id not in again
    assert QUICK.runs[3].run_id in again
    asked = as_json(ultrabench, "sweep", "retry", "--dry-run", "--only", "oom")
    assert {row["run_id"] for row in asked} == {run.run_id for run in QUICK.runs[2:4]}
    named = as_json(ultrabench, "sweep", "retry", "--dry-run", "--run", QUICK.runs[2].run_id)
    assert len(named) == 1


def test_a_sweep_that_is_named_twice_counts_once(ultrabench, sweep):
    once = ultrabench("collect", "quick-cpu")[2]
    twice = ultrabench("collect", "quick-cpu", str(sweep.path), "-o", "both.parquet")[2]
    assert once.split(" to ")[0] == twice.split(" to ")[0]


def test_results_are_not_written_into_a_file_of_another_kind(ultrabench, sweep, tmp_path):
    code, _, err = ultrabench("collect", "-o", "a.csv")
    assert (code, err) == (
        2,
        "ultrabench: -o a.csv; results are written as parquet: name a file that ends in .parquet\n",
    )
    assert not (tmp_path / "a.csv").exists()


def test_time_of_ooms_and_failures_is_told_apart_and_not_called_wasted(ultrabench, sweep):
    spec = QUICK.runs[2].spec
    key = {"run_id": spec.run_id, "repeat": 0, "attempt": 0}
    writer = JournalWriter(sweep.journal, "agent")
    writer.write(Claimed(**key, allocation="a0", spec=to_dict(spec)))
    writer.write(Failed(**key, result=RunResult(status=Status.OOM, duration_s=2.0)))
    out = ultrabench("sweep", "status")[1]
    assert re.search(r"GPU hours, \d+% of them in OOMs, \d+% of them in failed runs", out)
    assert "wasted" not in out


@pytest.fixture
def outrun(sweep):
    """The sweep with faster runs that win no cell: one in doubt, one above its peak, one that was slower."""
    writer = JournalWriter(sweep.journal, "agent")
    odd = (
        {"rank_step_times_s": {"0": 0.05, "1": 0.5}},
        {"step_times_s": (1e-9,) * 6},
        {"stopped": "slower_than_best"},
    )
    cell = [run for run in QUICK.runs[2:] if run.nodes == QUICK.runs[0].nodes]
    for run, more in zip(cell, odd, strict=False):
        known = {"step_times_s": (0.09,) * 6, "loss_final": 3.0, "peak_mem_reserved_bytes": 3 << 28}
        name = {"run_id": run.run_id, "repeat": 0, "attempt": 0}
        result = RunResult(status=Status.OK, **(known | more))
        writer.write(Result(**name, source="agent", spec=to_dict(run.spec), result=result))
    return [run.run_id for run in cell[:3]]


def test_what_may_not_win_a_cell_is_named_as_best_by_no_command(ultrabench, sweep, outrun):
    nodes, best = QUICK.runs[0].nodes, QUICK.runs[0].run_id
    (cell,) = [c for c in as_json(ultrabench, "heatmap") if c["nodes"] == nodes]
    assert cell["run_id"] == best
    table = ultrabench("sweep", "status")[1].split("best so far")[1]
    assert f"{QUICK.runs[0].spec.tokens_per_step / 0.1 / QUICK.runs[0].layout.world_size:,.0f}" in table
    top = as_json(ultrabench, "sweep", "plan", "model=tiny", "--top", "99")["top"]
    assert [row["run_id"] for row in top if row["why"] == "measured"] == [best]
    assert not {row["run_id"] for row in top} & set(outrun)
    assert set(as_json(ultrabench, "sweep", "status")["suspects"]) == {f"{i}.0.0" for i in outrun[:2]}
