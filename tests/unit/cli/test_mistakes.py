import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import QUICK, one_line
from ultrabench import __version__
from ultrabench.errors import counted
from ultrabench.run import fill_in
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan


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
        ("plan", ["sweep.gbs=7"], "gas=7 is not in sweep.gas=[2, 4]"),
        ("plan", ["sweep.nodes=[1]", "sweep.gbs=7", "sweep.tp=2"], "gas=7 is not in sweep.gas=[2, 4]"),
        ("plan", ["kernel=command", "kernel.command=[]"], "kernel.command is empty"),
        ("plan", ["kernel=command"], "kernel.command has no value; give it"),
        ("plan", ["model=tiny", "sweep.tp=[2]", "sweep.seq_len=3"], "tp=2 does not divide seq_len/cp=3"),
        (
            "plan",
            ["model=1B", "sweep.cp=[2]", "sweep.tp=[1]", "sweep.seq_len=4098"],
            "2*cp=4 does not divide seq_len=4098",
        ),
        ("plan", ["nonsense"], "'nonsense' is no override"),
        ("launch", ["model=tny"], "unknown model 'tny'; did you mean tiny?"),
        ("launch", ["sweep.tp=[3]"], "no tp*pp*cp divides 2 or 4 GPUs; choose divisors"),
        ("launch", ["kernel=command", "kernel.command=[]"], "kernel.command is empty"),
        ("launch", ["model=tiny", "sweep.tp=[2]", "sweep.seq_len=3"], "does not divide seq_len/cp=3"),
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
        (["doctor", "--deep", "sweep=quick"], "sweep=quick with --deep, which has a sweep of its own"),
        (["swep"], "No such command 'swep'"),
        (["sweep", "plann"], "No such command 'plann'"),
        (["sweep", "show"], "run_id"),
        (["--nonsense"], "--nonsense"),
        (["kernel", "check", "dp"], "'dp' is no WORD=VALUE"),
        (["kernel", "check", "zero_stge=1"], "unknown word 'zero_stge'; did you mean zero_stage?"),
        (["kernel", "check", "dp=two"], "dp='two' is no whole number"),
        (["kernel", "check", "dp=0"], "dp=0; must be >= 1"),
        (["kernel", "check", "model=tny"], "unknown model 'tny'; did you mean tiny?"),
        (["kernel", "check", "dp=1", "zero_stage=1"], "zero_stage=1 needs dp*cp > 1"),
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
        (["plot", "com"], "unknown figure 'com'; did you mean comm?"),
        (
            ["plot", "comm"],
            "no bandwidths over node counts here; measure them with: ultrabench sweep launch sweep=comm",
        ),
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
        ('{"schema_version": 2}', "sweep.json lacks sweep"),
    ],
    ids=["torn", "list", "empty", "bare"],
)
def test_a_sweep_json_that_cannot_be_read(ultrabench, sweep, words, text, line):
    sweep.sweep_json.write_text(text)
    before = sorted(p.name for p in sweep.path.rglob("*"))
    assert line in one_line(ultrabench, *words)
    assert sorted(p.name for p in sweep.path.rglob("*")) == before


OPENERS = (
    *READERS, ["sweep", "launch", "model=tiny"], ["sweep", "launch", "model=tiny", "--detach"], ["sweep", "pause"],
    ["sweep", "resume"], ["sweep", "cancel"], ["sweep", "retry"],
)  # fmt: skip


@pytest.mark.parametrize(("schema", "version"), [(1, "0.1.0"), (3, "0.9")])
@pytest.mark.parametrize("words", OPENERS, ids=" ".join)
def test_a_sweep_of_another_version_is_refused(ultrabench, sweep, words, schema, version):
    old = {"schema_version": schema, "sweep": "quick-cpu", "provenance": {"version": version}}
    sweep.sweep_json.write_text(json.dumps(old))
    before = sorted(p.name for p in sweep.path.rglob("*"))
    line = one_line(ultrabench, *words)
    assert f"quick-cpu/sweep.json has schema {schema}, written by ultrabench {version}; " in line
    assert f"ultrabench {__version__} reads schema 2 only: read it with the version that wrote it, or" in line
    assert line.endswith("launch again into another folder with name=NAME")
    assert sorted(p.name for p in sweep.path.rglob("*")) == before


def test_a_journal_of_a_newer_schema_is_refused(ultrabench, sweep):
    (sweep.journal / "new.jsonl").write_text('{"v":3,"writer":"w","seq":0,"event":"cancel"}\n')
    assert "has schema 3" in one_line(ultrabench, "sweep", "status")


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


@pytest.mark.parametrize(
    ("override", "word"),
    [("hardware.node_link_bytes_per_s=0", "node_link_bytes_per_s"), ("sweep=[quick,playbook]", "sweep")],
)
def test_overrides_that_nobody_thought_of(ultrabench, override, word):
    assert word in one_line(ultrabench, "sweep", "plan", override)


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
        (
            ["sweep", "launch", "hardware=h100x8", "sweep.nodes=[1]"],
            "torch sees none on this machine: use hardware=cpu",
        ),
        (["sweep", "plan", "-o", "x.csv"], "choose a name ending in .parquet"),
        (["sweep", "launch", "--reuse", "some"], "--reuse some; must be same"),
        (["sweep", "plan", "sweep.nodes=[1,", "2]"], "write a list without them: sweep.nodes=[1,2]"),
        (["sweep", "plan", "sweep.nodes=1,2"], "several values are a list; write sweep.nodes=[1,2]"),
        (["sweep", "plan", "hardware.mem_bytes=80GB"], "is no whole number of bytes, such as 80000000000"),
        (["heatmap", "nope.parquet"], "cannot read nope.parquet: there is no such file"),
        (["heatmap", "x.csv"], "x.csv is no parquet file"),
        (["sweep", "plan", "foo=1"], "(known: cluster, hardware, kernel, launcher, measure, model, name,"),
        (["sweep", "plan", "launcher.sbtch=1"], "did you mean launcher.sbatch? (known: launcher.sbatch,"),
        (["sweep", "plan", "retry.attempts.hung=3"], "did you mean retry.attempts.hang?"),
        (["kernel", "dryrun", "pp=34", "nodes=17", "tp=4"], "pp=34 is too large for num_hidden_layers=32"),
        (["sweep", "plan", f"sweep.seq_len={10**24}"], "both must be <= 1,073,741,824"),
        (["sweep", "plan", "--show-script", "--json"], "leave out --json, -o and --top"),
        (["sweep", "plan", "--show-script", "--top", "3"], "leave out --json, -o and --top"),
        (
            ["sweep", "plan", "kernel=command", 'kernel.command=[bash,-c,"echo ${HOME}"]'],
            "for a variable of the shell on the nodes write \\${HOME}",
        ),
        (["sweep", "launch", "kernel=command", "kernel.command=[./nope]"], "names ./nope, which is not here"),
        (
            ["sweep", "launch", "launcher=slurm", "kernel=command", "kernel.command=[/opt/no-such/python]"],
            "kernel.command names /opt/no-such/python, which is not here",
        ),
        (["sweep", "launch", "kernel=command", "kernel.command=[no-such]"], "names no-such, which is not"),
        (["sweep", "launch", "kernel=command", "kernel.command=[python,no.py]"], "names no.py, which is not"),
        (["configs", "model", "tny"], "unknown model 'tny'; did you mean tiny?"),
        (["configs", "modl", "tiny"], "unknown config group 'modl'"),
    ],
)
def test_more_mistakes_are_one_line(ultrabench, words, text):
    code, _, said = ultrabench(*words)
    assert code == 2
    assert text in said
    assert said.replace("looking at this machine\n", "").count("\n") == 1


def configuration(name, text):
    path = Path("ultrabench") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("latin-1"))


@pytest.mark.parametrize(
    ("name", "text", "words", "line"),
    [
        ("sweep/mine.yaml", "sweep: {models: [tiny]}\n", ["sweep=mine"], "sets sweep: and so needs a first line"),
        ("sweep/mine.yaml", "measure: {min_steps: 6}\n", ["sweep=mine"], "needs a first line of its own: # @package _global_"),
        ("sweep/mine.yaml", "nodes: [1]\n", ["sweep=mine"], "sweep.models is empty"),
        ("sweep/mine.yaml", "", ["sweep=mine"], "sweep.models is empty"),
        ("model/x.yaml", "\xff\xfe", ["model=x"], "cannot read "),
    ],
)  # fmt: skip
def test_configuration_that_cannot_be_used_is_one_line(ultrabench, name, text, words, line):
    configuration(name, text)
    assert line in one_line(ultrabench, "sweep", "plan", *words)


def test_a_folder_in_place_of_a_model_is_no_model(ultrabench):
    Path("ultrabench/model/x.yaml").mkdir(parents=True)
    assert "unknown model 'x'" in one_line(ultrabench, "sweep", "plan", "model=x")
    assert ultrabench("configs", "model")[0] == 0


def test_a_sweep_of_ones_own(ultrabench):
    configuration("sweep/flat.yaml", "models: [tiny]\nnodes: [1]\nseq_len: 64\ngbs: 4\ntp: [1]\npp: [1]\ncp: [1]\n"
                  "zero_stage: [0]\nmbs: [1]\ngas: [2]\n")  # fmt: skip
    assert ultrabench("sweep", "plan", "sweep=flat", "sweep.tp=[1,2]")[0] == 0


def test_a_working_folder_that_is_gone(ultrabench, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "the working folder cannot be used" in one_line(ultrabench, "sweep", "plan")
    monkeypatch.chdir(tmp_path)


def test_configs_prints_what_a_name_holds(ultrabench):
    configuration("model/mine.yaml", "# Mine.\nhidden_size: 64  # wide\n")
    code, out, err = ultrabench("configs", "model", "mine")
    assert (code, out) == (0, "# Mine.\nhidden_size: 64  # wide\n")
    assert err.strip() == str(Path("ultrabench/model/mine.yaml").absolute())


def test_the_shell_of_the_node_gets_its_variables(ultrabench):
    config = load_config(["kernel=command", 'kernel.command=[bash,-c,"echo \\${HOME} {tp}"]', "model=tiny"])
    plan = make_plan(config)
    assert fill_in(plan.runs[0].spec, 0, 0, config.measure) == ["bash", "-c", "echo ${HOME} 1"]


def test_python_m_ultrabench_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "ultrabench", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __version__


@pytest.mark.parametrize(
    ("number", "noun", "said"), [(1, "run", "1 run"), (2, "run", "2 runs"), (3, "process", "3 processes")]
)
def test_one_is_no_plural(number, noun, said):
    assert counted(number, noun) == said
