import json
import re
import subprocess
import sys

import pytest

from ultrabench import __version__
from ultrabench.cli import main as cli
from ultrabench.folder import SweepFolder
from ultrabench.journal import JournalWriter
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.sweep.config import load_config
from ultrabench.sweep.head import make_head
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.plan_table import write_plan

QUICK = make_plan(load_config(["model=tiny"]))
HEAD = make_head(QUICK.config, {"core_flops_per_s": 1e10, "cores": 2})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ULTRABENCH_CONFIG_DIR", str(tmp_path / "nobody"))


@pytest.fixture
def ultrabench(monkeypatch, capsys):
    """Runs a command line in this process: exit code, stdout, stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ultrabench", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    return run


@pytest.fixture
def sweep(tmp_path):
    """A sweep of which one run is ok, one crashed and the rest was never tried."""
    folder = SweepFolder(tmp_path / "results" / "quick-cpu")
    folder.create()
    folder.write_head(HEAD)
    write_plan(QUICK, folder.plan)
    writer = JournalWriter(folder.journal, "agent")
    writer.write("config", generation=1, config=QUICK.config.resolved)
    ends = (
        RunResult(status=Status.OK, step_times_s=(0.1,) * 6, duration_s=9.0, loss_final=3.0),
        RunResult(status=Status.CRASH, reason="rank 1: ValueError: [bold]no[/bold]", duration_s=4.0),
    )
    for run, result in zip(QUICK.runs, ends, strict=False):
        name = {"run_id": run.spec.run_id, "repeat": 0, "attempt": 0}
        writer.write("claimed", **name, allocation="n1", spec=to_dict(run.spec), predicted={})
        event = "result" if result.status == Status.OK else "failed"
        writer.write(event, **name, source="agent", result=to_dict(result))
    return folder


def one_line(run, *words, code=2):
    """The one line on stderr of a command that the user got wrong."""
    got, out, err = run(*words)
    assert got == code, err
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert err.startswith("ultrabench: ")
    return err[len("ultrabench: ") : -1]


@pytest.mark.parametrize(
    ("command", "overrides", "line"),
    [
        ("plan", ["model=tny"], "unknown model 'tny'; did you mean tiny?"),
        ("plan", ["model=[tiny,mini]"], "model takes one name; for several use sweep.models=[tiny,mini]"),
        ("plan", ["hardware=h100"], "unknown hardware 'h100'; did you mean h100x8?"),
        ("plan", ["sweep=playbok"], "unknown sweep 'playbok'; did you mean playbook?"),
        ("plan", ["sweep.node=[1]"], "unknown override 'sweep.node'; did you mean sweep.nodes?"),
        ("plan", ["nodes=[1]"], "unknown override 'nodes'; did you mean sweep.nodes?"),
        ("plan", ["sweep.nodes=0"], "sweep.nodes=[0]; each must be >= 1"),
        ("plan", ["sweep.tp=[3]"], "no tp*pp*cp divides 2 or 4 GPUs; choose divisors"),
        ("plan", ["sweep.gbs=7"], "sweep.gbs=7 is no dp*mbs*gas"),
        ("plan", ["sweep.nodes=[1]", "sweep.gbs=7", "sweep.tp=2"], "sweep.gbs=7 is no dp*mbs*gas"),
        ("plan", ["kernel=command", "kernel.command=[]"], "kernel.command is empty"),
        ("plan", ["kernel=command"], "kernel.command has no value; give it"),
        ("plan", ["model=tiny", "sweep.tp=[2]", "sweep.seq_len=3"], "tp=2 does not divide seq_len=3"),
        ("plan", ["model=1B", "sweep.cp=[2]", "sweep.tp=[1]"], "the embedded kernel supports cp=1 only"),
        ("plan", ["nonsense"], "'nonsense' is no override"),
        ("launch", ["model=tny"], "unknown model 'tny'; did you mean tiny?"),
        ("launch", ["sweep.tp=[3]"], "no tp*pp*cp divides 2 or 4 GPUs; choose divisors"),
        ("launch", ["kernel=command", "kernel.command=[]"], "kernel.command is empty"),
        ("launch", ["model=tiny", "sweep.tp=[2]", "sweep.seq_len=3"], "does not divide seq_len=3"),
    ],
)
def test_overrides_that_cannot_be_used(ultrabench, tmp_path, command, overrides, line):
    assert line in one_line(ultrabench, "sweep", command, *overrides)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["sweep", "launch", "sweep=playbook"], "hardware=h100x8 with launcher=local"),
        (["sweep", "launch", "results_dir=FILE/r"], "FILE/r"),
        (["sweep", "launch", "--detach", "results_dir=FILE/r"], "FILE/r"),
        (["sweep", "launch", "--max-gpu-hours", "-1"], "--max-gpu-hours"),
        (["sweep", "plan", "-o", "FILE/plan.parquet"], "cannot write FILE/plan.parquet"),
        (["sweep", "plan", "-o", "nowhere/plan.parquet"], "cannot write nowhere/plan.parquet"),
        (["sweep", "plan", "--top", "0"], "--top"),
        (["sweep", "plan", "--jsn"], "--jsn"),
        (["sweep", "status"], "no sweep in results/; start one with: ultrabench sweep launch"),
        (["sweep", "retry"], "no sweep in results/"),
        (["sweep", "cancel"], "no sweep in results/"),
        (["sweep", "show", "abc"], "no sweep in results/"),
        (["sweep", "logs", "abc"], "no sweep in results/"),
        (["collect"], "no sweep in results/"),
        (["heatmap"], "no sweep in results/"),
        (["heatmap", "none.parquet"], "none.parquet"),
        (["heatmap", "FILE.parquet"], "FILE.parquet"),
        (["configs", "modl"], "unknown config group 'modl'; did you mean model?"),
        (["swep"], "No such command 'swep'"),
        (["sweep", "plann"], "No such command 'plann'"),
        (["sweep", "show"], "run_id"),
        (["--nonsense"], "--nonsense"),
        (["kernel", "check", "dp"], "'dp' is no WORD=VALUE"),
        (["kernel", "check", "zero_stge=1"], "unknown word 'zero_stge'; did you mean zero_stage?"),
        (["kernel", "check", "dp=two"], "dp='two' is no whole number"),
        (["kernel", "check", "dp=0"], "dp=0; must be >= 1"),
        (["kernel", "check", "model=tny"], "unknown model 'tny'; did you mean tiny?"),
        (["kernel", "check", "dp=1", "zero_stage=1"], "zero_stage=1 needs dp > 1"),
        (["kernel", "check", "dp=128"], "the check runs up to 64"),
        (["kernel", "check", "dp=2", "--dump", "FILE/d"], "cannot write --dump FILE/d"),
    ],
)
def test_commands_that_cannot_be_done(ultrabench, tmp_path, words, line):
    for name in ("FILE", "FILE.parquet"):
        (tmp_path / name).write_text("a regular file\n")
    assert line in one_line(ultrabench, *words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["FILE", "FILE.parquet"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["sweep", "status", "quik-cpu"], "unknown sweep 'quik-cpu'; did you mean quick-cpu?"),
        (["sweep", "status", "--results-dir", "other"], "no sweep in other/"),
        (["sweep", "retry", "--only", "crsh"], "unknown status to retry 'crsh'; did you mean crash?"),
        (["sweep", "retry", "--only", "ok"], "unknown status to retry 'ok'"),
        (["sweep", "retry", "--run", "zzzz"], "no run of quick-cpu has an id that begins with 'zzzz'"),
        (["sweep", "show", "zzzz"], "has an id that begins with 'zzzz'"),
        (["sweep", "logs", "zzzz"], "has an id that begins with 'zzzz'"),
        (["sweep", "show", ""], "runs: "),
        (["sweep", "logs", "PENDING"], "has not been attempted yet; follow it with -f"),
        (["sweep", "launch", "model=tiny", "sweep.seq_len=32"], "workload.seq_len: "),
        (["sweep", "launch", "model=tiny", "hardware.gpus_per_node=1"], "gpus_per_node: 2 -> 1"),
        (["sweep", "launch", "model=tiny", "kernel.precision=bf16"], "another kernel (kernel.prec"),
        (["collect", "nothing"], "unknown sweep 'nothing'"),
        (
            ["collect", "-o", "results/quick-cpu/sweep.json/x.parquet"],
            "cannot write results/quick-cpu/sweep.json/x.parquet",
        ),
        (["heatmap", "-o", "map.docx"], "unknown kind of picture '.docx'"),
        (["heatmap", "--rank-by", "speed"], "speed"),
    ],
)
def test_sweeps_that_cannot_be_used(ultrabench, sweep, words, line):
    before = sorted(p.read_bytes() for p in sweep.path.rglob("*") if p.is_file())
    words = [w.replace("PENDING", QUICK.runs[5].spec.run_id) for w in words]
    assert line in one_line(ultrabench, *words)
    assert sorted(p.read_bytes() for p in sweep.path.rglob("*") if p.is_file()) == before


READERS = (
    ["sweep", "status"],
    ["sweep", "retry", "--dry-run"],
    ["sweep", "cancel"],
    ["sweep", "show", QUICK.runs[0].spec.run_id],
    ["sweep", "plan", "model=tiny", "--top", "1"],
    ["sweep", "launch", "model=tiny"],
    ["collect"],
    ["heatmap", "--json"],
)


@pytest.mark.parametrize("words", READERS, ids=" ".join)
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "cannot read "),
        ("[]", "sweep.json"),
        ("{}", "sweep.json"),
        (json.dumps({**HEAD, "schema_version": 2}), "has schema 2; this ultrabench reads up to 1"),
    ],
    ids=["torn", "list", "empty", "newer"],
)
def test_a_head_that_cannot_be_read(ultrabench, sweep, words, text, line):
    sweep.head.write_text(text)
    before = sorted(p.name for p in sweep.path.rglob("*"))
    assert line in one_line(ultrabench, *words)
    assert sorted(p.name for p in sweep.path.rglob("*")) == before


def test_a_journal_of_a_newer_schema_is_refused(ultrabench, sweep):
    (sweep.journal / "new.jsonl").write_text('{"v":2,"writer":"w","seq":0,"event":"cancel"}\n')
    assert "has schema 2" in one_line(ultrabench, "sweep", "status")


def test_a_plan_that_cannot_be_read(ultrabench, sweep):
    sweep.plan.write_bytes(b"no parquet")
    assert "cannot read" in one_line(ultrabench, "sweep", "status")


def test_corrupt_journal_lines_are_warned_of(ultrabench, sweep):
    (sweep.journal / "bad.jsonl").write_text("garbage\n")
    code, out, err = ultrabench("sweep", "status", "--json")
    assert code == 0
    assert json.loads(out)["by_status"]["ok"] == 1
    assert err.startswith("warning: bad.jsonl: skipped a corrupt line")
    assert err.count("\n") == 1


def as_json(run, *words):
    code, out, err = run(*words, "--json")
    assert code == 0, err
    return json.loads(out)


def test_plan_json_keeps_its_promise(ultrabench, tmp_path):
    plan = as_json(ultrabench, "sweep", "plan", "sweep=playbook", "model=1B")
    assert plan["sweep"] == "playbook-h100x8"
    assert plan["candidates"] == plan["valid"] + sum(plan["rejected"].values())
    assert (plan["valid"], plan["runs"]) == (1178, plan["runs"])
    assert plan["predicted_gpu_hours"] > 0
    assert [c["nodes"] for c in plan["cells"]] == [1, 2, 4, 8, 16, 32, 64]
    assert all(set(c) == {"model", "nodes", "candidates", "valid", "runs"} for c in plan["cells"])
    promised = {"sweep", "candidates", "valid", "rejected", "runs", "predicted_gpu_hours", "cells"}
    assert promised <= set(plan)
    assert list(tmp_path.iterdir()) == []


def test_plan_top_names_the_best_of_each_cell(ultrabench, sweep):
    plan = as_json(ultrabench, "sweep", "plan", "model=tiny", "--top", "2")
    assert [row["nodes"] for row in plan["top"]] == [1, 1, 2, 2]
    measured = [row for row in plan["top"] if row["why"] == "measured"]
    assert [row["run_id"] for row in measured] == [QUICK.runs[0].spec.run_id]
    assert measured[0]["step_time_s"] == pytest.approx(0.1)


def test_status_json_keeps_its_promise(ultrabench, sweep):
    status = as_json(ultrabench, "sweep", "status")
    total = len(QUICK.runs)
    assert (status["sweep"], status["runs"], status["attempts"]) == ("quick-cpu", total, 2)
    assert status["by_status"] == {"ok": 1, "crash": 1, "pending": total - 2}
    gpus = [r.layout.world_size for r in QUICK.runs[:2]]
    assert status["gpu_hours"]["useful"] == pytest.approx(9 * gpus[0] / 3600, abs=1e-6)
    assert status["gpu_hours"]["wasted"] == pytest.approx(4 * gpus[1] / 3600, abs=1e-6)


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
    assert {"model", "hardware", "sweep", "kernel", "launcher", "measure", "cluster"} == set(found)
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


@pytest.mark.parametrize(
    ("override", "word"),
    [("hardware.node_link_bytes_per_s=0", "node_link_bytes_per_s"), ("sweep=[quick,playbook]", "sweep")],
)
def test_overrides_that_nobody_thought_of(ultrabench, override, word):
    assert word in one_line(ultrabench, "sweep", "plan", override)


def test_a_head_that_lacks_its_hardware_is_not_continued(ultrabench, sweep):
    sweep.head.write_text(json.dumps({"schema_version": 1}))
    assert "sweep.json" in one_line(ultrabench, "sweep", "launch", "model=tiny")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["sweep", "plan", "+foo=1"], "unknown override 'foo'"),
        (["sweep", "plan", "kernel.command=[a]"], "choose another with kernel=NAME"),
        (["sweep", "plan", "kernel=command", "kernel.command=python"], "is no list; write [A,B]"),
        (
            ["sweep", "plan", "kernel=command", 'kernel.command=[python,"--tp={tpp}"]'],
            "unknown word in kernel.command '{tpp}'; did you mean tp?",
        ),
        (["sweep", "launch", "hardware=h100x8", "sweep.nodes=[1]"], "this machine has 0: use"),
        (["sweep", "plan", "-o", "x.csv"], "choose a name ending in .parquet"),
        (["sweep", "launch", "--reuse", "some"], "--reuse some; must be same"),
    ],
)
def test_more_mistakes_are_one_line(ultrabench, words, text):
    code, _, said = ultrabench(*words)
    assert code == 2
    assert text in said
    assert said.replace("looking at this machine\n", "").count("\n") == 1
