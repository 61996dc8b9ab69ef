"""What a user can get wrong: one line that says what was given, the rule, and what to do; nothing is written."""

import json
import os
import shlex
from pathlib import Path

import pytest

from tests.unit.cli.conftest import QUICK, as_json, content, one_line
from ultrabench import __version__
from ultrabench.run import AttemptKey, fill_in
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

MISTAKES = [
    ("configs modl", "unknown config group 'modl'; did you mean model?"),
    ("doctor --deep sweep=quick", "--deep runs its own sweep (acceptance); leave out sweep=quick"),
    ("heatmap nope.parquet", "cannot read nope.parquet: no such file"),
    ("heatmap x.jsonl", "x.jsonl is not a parquet file; convert it first: ultrabench import x.jsonl"),
    ("heatmap x.csv", "x.csv is not a parquet file; convert it first: ultrabench import x.csv"),
    ("kernel check zero_stge=1", "unknown argument 'zero_stge'; did you mean zero_stage?"),
    ("kernel check dp=128", "the check runs at most 64"),
    ("kernel check --device gpu", "device='gpu'; must be cuda or cpu"),
    ("kernel check cp=2 --device cuda", "cp=2 needs precision=bf16 or fp8 on GPUs, not fp64; "
    "choose another layout, or precision bf16"),
    ("sweep show 1 --as megatorn", "unknown framework 'megatorn'; did you mean megatron? (known: megatron, "
    "megatron-perf, "
    "torchtitan, torchtitan-main, accelerate, nemo, nanotron, deepspeed)"),
    ("kernel check model=llama3-70b", "needs at least 5,257 GiB (70,5"),
    ("kernel check dp=2 --dump FILE/d", "cannot write --dump FILE/d"),
    ("kernel dryrun tp", "'tp' is not NAME=VALUE; write, for example, model=llama3-8b nodes=8 tp=8"),
    ("kernel dryrun nodes=0", "nodes=0; must be >= 1"),
    ("kernel dryrun nodes=2 tp=3", "tp*pp*cp=3 does not divide 16 GPUs (2 nodes of 8)"),
    ("kernel dryrun dp=3", "dp=3 with tp*pp*cp=1 needs 3 GPUs, not 8 GPUs (1 node of 8): give dp=8, leave dp out"),
    ("kernel dryrun gbs=8", "gbs = dp*mbs*gas; give mbs and gas"),
    ("kernel check precision=bf16", "precision=bf16: this is an option; write --precision bf16"),
    ("kernel check tp=2,4", "tp='2,4' is not an integer; give one layout, such as tp=2"),
    ("plan", "did you mean: ultrabench sweep plan?"),
    ("sweep show 1 --sweep runs.parquet", "ultrabench sweep top runs.parquet, or ultrabench report runs.parquet"),
    ("collect mine", "no sweep 'mine': there is no sweep in results/; start one with: ultrabench sweep launch"),
    ("sweep plan --tensor-model-parallel-size 2", "write settings without dashes: sweep.tp=[2]"),
    ("kernel dryrun pp=4 zero_stage=2", "cannot run: zero_stage=2 with pp=4 would run as zero_stage=1"),
    ("kernel dryrun cp=8 seq_len=4100", "cannot run: 2*cp=16 does not divide seq_len=4100"),
    ("predict pp=4 pp_schedule=interleaved virtual_stages=4 gas=4",
        "pp*virtual_stages=16 is too large for num_hidden_layers=32 and a head of the size of 2.4 layers: "
        "stage 15 has no parameters"),
    ("predict kernel=megatron cp=8 seq_len=4", "cannot run: cp=8 does not divide seq_len=4; choose another layout"),
    ("sweep plan sweep.nodes=[8] sweep.tp=[1] sweep.pp=[1] sweep.cp=[16] sweep.mbs=[1] sweep.zero_stage=[0] "
    "sweep.gas=null sweep.seq_len=8",
        "1 by kernel (2*cp=32 does not divide seq_len=8)"),
    ("sweep launch --results-dir 'FILE/r, s'", "FILE/r, s"),
    ("sweep launch measure.checkpoint=true measure.checkpoint_folder=lustre/me",
        "measure.checkpoint_folder=lustre/me is not a folder on this machine; create it first"),
    ("sweep launch measure.checkpoint=true measure.checkpoint_folder=/proc/self",
        "measure.checkpoint_folder=/proc/self cannot be written from this machine"),
    ("sweep launch results_dir=/proc/r", "cannot write the results folder /proc/r/quick-cpu"),
    ("sweep launch --reuse some", "--reuse some; must be same"),
    ("sweep launch launcher=slurm kernel=command kernel.command=[/opt/no-such/python]",
     "kernel.command: /opt/no-such/python does not exist here"),
    ("sweep launch launcher=slurm cluster=mine",
     "`ultrabench doctor --write` writes the configuration for cluster=mine"),
    ("sweep plan sweep.tp=[3]", "no candidate: 2 or 4 GPUs are not divisible by tp=3; choose divisors"),
    ("sweep plan sweep.gbs=7", "gas=7 is not in sweep.gas=[2, 4]"),
    ("sweep plan model=tiny sweep.tp=[2] sweep.seq_len=3", "tp=2 does not divide seq_len/cp=3"),
    ("sweep plan 'hardware={gpu: X}'", "a sweep has one hardware"),
    ("sweep plan hardware=here/big.yaml", "put the file into ./ultrabench/hardware/ and write hardware=big"),
    ("sweep plan model.hidden_size=4", "write ultrabench/model/NAME.yaml and give model=NAME"),
    ("sweep plan -o nowhere/plan.parquet", "cannot write nowhere/plan.parquet"),
    ("sweep plan --top 0", "--top=0; must be >= 1"),
    ("sweep top -n x", "-n='x' is not an integer"),
    ("recommend --tokens inf", "--tokens=inf; must be >= 1 and finite"),
    ("compare FILE.parquet", "Missing argument 'B'"),
    ("sweep top FILE.parquet", "cannot read FILE.parquet: Parquet magic bytes not found"),
    ("predict model=tiny nodes=1000000000", "gbs=dp*mbs*gas=8000000000; must be 1 to 1,073,741,824"),
    ("sweep plan sweep.gbs=1e99", "sweep.gbs=999999999999999967...2608739868455469056; must be 1 to"),
    ("sweep plan 'hardware.peak_flops_per_s={fp32:1e11}'", "add it: '+hardware.peak_flops_per_s={fp32:1e11}'"),
    ("sweep plan hardware.peak_flops_per_s.fp32=1e11", "add it: +hardware.peak_flops_per_s.fp32=1e11"),
    ("sweep plan hardware=a100-80x8 kernel.precision=[bf16,fp8]", "A100-SXM-80GB is sm_80: use precision=bf16"),
    ("sweep plan kernel=command kernel.command=python", "is not a list; write [A,B]"),
    ("sweep plan kernel=command 'kernel.command=[python,\"--tp={tpp}\"]'",
     "unknown word in kernel.command of kernel=command '{tpp}'; did you mean tp?"),
    ("sweep plan -o x.csv", "give a name that ends in .parquet"),
    ("sweep plan sweep.nodes=[1] model=tiny sweep.nodes=[2]",
        "sweep.nodes=[1] sweep.nodes=[2]: sweep.nodes is given twice; leave one out"),
    ("predict tp=2 tp=4", "tp=2 tp=4: tp is given twice"),
    ("predict profile=mime", "unknown profile 'mime'"),
    ("predict calibrat", "No such command 'calibrat'"),
    ("plot schedule pp=2 pp=4", "pp is given twice"),
    ("sweep plan foo=1", "(known: max_p_oom, model, profile, trace, sweep,"),
    ("sweep plan launcher.sbtch=1", "did you mean launcher.sbatch? (known: launcher.sbatch, launcher.track,"),
    ("sweep plan --show-script --json", "leave out --json, -o, --top and --max-gpu-hours"),
    ("sweep status", "no sweep in results/; start one with: ultrabench sweep launch"),
    ("sweep plan --show-script", "launcher=local submits no script; add launcher=slurm"),
    ("sweep plan --show-script launcher=slurm model=1B sweep.cp=[2] sweep.tp=[1] sweep.seq_len=4098", "can run"),
]  # fmt: skip
"""A command, and a part of the one line that refuses it."""
REJECTED = next(run.run_id for run in QUICK.candidates if not run.runs)
WITH_A_SWEEP = [
    ("sweep status quik-cpu", "unknown sweep 'quik-cpu'; did you mean quick-cpu?"),
    ("sweep status --results-dir other", "no sweep in other/"),
    ("sweep retry --only ok", "unknown status to retry 'ok' (known: "),
    ("sweep retry --run zzzz", "no run id of quick-cpu begins with 'zzzz'"),
    (f"sweep show {REJECTED} --as megatron", f"run {REJECTED} of quick-cpu is not in the plan: "),
    ("sweep show zzzz", "has that rank, or an id that begins with 'zzzz'"),
    ("sweep show ''", "runs: "),
    (f"sweep logs {QUICK.runs[5].run_id}", "has not been attempted yet; add -f to wait for it"),
    ("sweep launch model=tiny hardware.gpus_per_node=1", "gpus_per_node: 2 -> 1"),
    ("sweep launch model=tiny kernel.precision=bf16", "a different kernel (kernel.prec"),
    ("collect -o results/quick-cpu/sweep.json/x.parquet",
     "cannot write results/quick-cpu/sweep.json/x.parquet"),
    ("heatmap -o results", "-o results does not end in .png, .svg or .pdf; give a file"),
    ("sweep top --by model", "unknown column to rank by 'model' (known: tokens_per_s_per_gpu, mfu, "),
    ("heatmap --rank-by dp", "cannot rank by dp: it is unknown whether higher or lower values are better; "
    "choose another"),
    ("heatmap --rank-by energy_j_per_step", "no ok run has a value in energy_j_per_step; rank by another column of"),
    ("sweep rename quick-cpu x.parquet --yes", "NEW='x.parquet'; must be a text of at most 100 ASCII characters that"),
    ("sweep show 99", "no rank 99 in quick-cpu, which has 29"),
    ("report -o page.pdf", "give a name that ends in .html"),
    ("plot com", "unknown figure 'com'; did you mean comm?"),
    ("plot comm x.yml", "x.yml is not a parquet file; give a sweep or a .parquet file of"),
    ("plot comm a b", "a b: give one sweep or file"),
    ("plot comm nodez=4", "unknown column 'nodez'; did you mean nodes"),
    ("plot comm nodes=3", "no rows have nodes=3; values of nodes: "),
    ("plot schedule quick-cpu", "the figure schedule shows a layout, not results"),
    ("plot schedule tp=2", "unknown setting of the figure schedule 'tp'"),
    ("plot schedule pp=4 gas=3 pp_schedule=1f1b", "1f1b needs gas >= pp; gas=3, pp=4"),
    ("plot schedule pp=4 gas=9 pp_schedule=interleaved", "interleaved needs gas divisible by gas // pp = 2; gas=9"),
    ("plot schedule virtual_stages=2", "virtual_stages=2 with pp_schedule=1f1b; must be 1"),
    ("plot schedule pp=100 gas=101", "pp=100, gas=101 has 20,200 passes; a figure holds at most 20,000"),
    ("plot memory tpp=3", "unknown argument 'tpp'; did you mean tp"),
    ("plot memory --axis ppp", "unknown axis of the figure memory 'ppp'; did you mean pp"),
    ("plot comm",
     "the table has no bandwidths by size; measure them with: ultrabench sweep launch sweep=comm"),
]  # fmt: skip
"""The same beside a sweep."""
COMMANDS = (
    "sweep status", "sweep retry --dry-run", "sweep cancel", f"sweep show {QUICK.runs[0].run_id}",
    "sweep plan model=tiny --top 1", "sweep launch model=tiny", "sweep launch model=tiny --detach",
    "sweep pause", "sweep resume", "collect", "heatmap --json",
)  # fmt: skip
"""Commands that read a sweep."""
GLOBAL = "# @package _global_\n"
AXES = "nodes: [1], seq_len: 64, gbs: 8, tp: [1], pp: [1], cp: [1], zero_stage: [0], mbs: [1]"
FILES = [
    ("sweep/mine.yaml", "sweep: {models: [tiny]}\n", "sets sweep: and needs this first line"),
    ("sweep/mine.yaml", "nodes: [1]\n", "/sweep/mine.yaml: sweep lacks the keys seq_len, gbs"),
    ("sweep/mine.yaml", f"{GLOBAL}sweep: {{model: tiny, {AXES}}}\n",
        "/sweep/mine.yaml: unknown field of sweep 'model'; did you mean models?"),
    ("sweep/mine.yaml", f"{GLOBAL}sweep: {{models: [tiny], dp: [8], {AXES}}}\n",
        "/sweep/mine.yaml: sweep.dp is not an axis"),
    ("sweep/mine.yaml", f"{GLOBAL}sweeps: {{models: [tiny], {AXES}}}\n",
        "/sweep/mine.yaml: unknown override 'sweeps'; did you mean sweep?"),
    *(("sweep/mine.yaml", f"{GLOBAL}sweep: {{models: [tiny], {AXES}}}\n{group}: {name}\n", f"- override /{group}: NAME")
      for group, name in {"hardware": "h100x8", "launcher": "slurm", "kernel": "null", "retry": "default"}.items()),
    *(("sweep/mine.yaml", f"{GLOBAL}defaults: [{line}]\n",
       "/sweep/mine.yaml: to choose another hardware in a sweep file, write under defaults: "
       "'- override /hardware: NAME'")
      for line in ("override hardware: h100x8", "override /hardware h100x8")),
    ("sweep/mine.yaml", f"{GLOBAL}defaults: [override /hardware: h100]\n",
        "/sweep/mine.yaml: unknown hardware 'h100'; did"),
    ("sweep/mine.yaml", f"{GLOBAL}defaults: [playbok]\n", "/sweep/mine.yaml: defaults: unknown sweep 'playbok'; "
    "did you mean playb"),
    ("hardware/mine.yaml", "gpu: H100-SXM\nmem: 4\n", "/hardware/mine.yaml: unknown field of hardware 'mem'"),
    ("model/mine.yaml", "hidden: 4\n", "/ultrabench/model/mine.yaml: unknown field of model mine 'hidden'"),
    ("model/mine.yaml", "hidden_size: [", "/ultrabench/model/mine.yaml is not valid YAML: while parsing"),
    ("model/mine.yaml", "- a\n- b\n", "/ultrabench/model/mine.yaml holds no settings; write them as in configs/model/"),
    ("model/mine.yaml", "", "model mine lacks the keys hidden_size"),
    ("model/mine.yaml", "\xff\xfe", "cannot read "),
    *((f"{group}/mine.yml", "a: 1\n", f"/ultrabench/{group}/mine.yml is not read, "
    "because its name does not end in .yaml")
      for group in ("sweep", "model")),
]  # fmt: skip
"""A file of the user's, its text, and a part of the line that refuses it."""


@pytest.mark.parametrize(("command", "line"), MISTAKES)
def test_a_mistake_is_one_line(ultrabench, tmp_path, command, line):
    for name in ("FILE", "FILE.parquet"):
        (tmp_path / name).write_text("a regular file\n")
    assert line in one_line(ultrabench, *shlex.split(command))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["FILE", "FILE.parquet"]


def test_gpus_that_are_not_here_are_refused(ultrabench, tmp_path):
    code, _, err = ultrabench("sweep", "launch", "hardware=h100x8", "sweep.nodes=[1]")
    advice = "add launcher=slurm to run on a cluster, or use hardware=cpu"
    assert (code, f"torch sees none on this machine: {advice}" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_nodes_that_are_not_here_are_refused_before_anything_is_planned(ultrabench, monkeypatch):
    monkeypatch.setattr("ultrabench.cli.sweep.launch.plan_with_bar", lambda config: pytest.fail("planned"))
    line = "up to 64 of hardware=h100x8 with launcher=local, which uses this machine only; add launcher=slurm"
    assert line in one_line(ultrabench, "sweep", "launch", "sweep=playbook")


@pytest.mark.parametrize(("command", "line"), WITH_A_SWEEP)
def test_a_mistake_beside_a_sweep_is_one_line(ultrabench, sweep, command, line):
    before = content(sweep)
    assert line in one_line(ultrabench, *shlex.split(command))
    assert content(sweep) == before


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [("sweep.json", "{", "sweep.json is damaged (Expecting"), ("sweep.json", "[]", "sweep.json has no schema_version"),
     ("sweep.json", '{"schema_version": 2}', "sweep.json is damaged (sweep.json lacks the keys sweep"),
     ("plan.parquet", "no parquet", "; to write it again, launch the sweep again"),
     ("journal/new.jsonl", '{"v":3,"writer":"w","seq":0,"event":"cancel"}\n', "has schema 3")],
)  # fmt: skip
def test_a_file_of_a_sweep_that_cannot_be_read(ultrabench, sweep, name, text, line):
    (sweep.path / name).write_text(text)
    before = content(sweep)
    assert line in one_line(ultrabench, "sweep", "status")
    assert content(sweep) == before


def test_status_waits_for_the_plan_of_a_launch_and_names_a_missing_file(ultrabench, sweep):
    sweep.plan.unlink()
    code, out, _ = ultrabench("sweep", "status")
    assert (code, "The launch has not written its plan yet." in out) == (0, True)
    assert as_json(ultrabench, "sweep", "status")["runs"] == 0
    for journal in sweep.journal.iterdir():
        os.utime(journal, (1e9, 1e9))
    assert "plan.parquet is missing; wait if a launch is starting" in one_line(ultrabench, "sweep", "status")
    sweep.sweep_json.unlink()
    line = one_line(ultrabench, "sweep", "status", str(sweep.path))
    assert line.startswith(
        f"{sweep.sweep_json} is missing; wait if a launch is starting, else run the launch"
    )


def test_a_file_of_a_sweep_that_cannot_be_removed(ultrabench, sweep):
    sweep.pause.mkdir()
    line = f"cannot use {sweep.pause}: Is a directory; free or unlock the folder of the sweep, or copy it"
    assert line in one_line(ultrabench, "sweep", "resume")


@pytest.mark.parametrize(
    ("command", "schema"), [("sweep status", 3), *((command, 1) for command in COMMANDS)]
)
def test_a_sweep_of_another_version_is_refused(ultrabench, sweep, command, schema):
    old = {"schema_version": schema, "sweep": "quick-cpu", "provenance": {"version": "0.1.0"}}
    sweep.sweep_json.write_text(json.dumps(old))
    before = content(sweep)
    line = one_line(ultrabench, *command.split())
    assert f"quick-cpu/sweep.json has schema {schema}, written by ultrabench 0.1.0; " in line
    assert f"ultrabench {__version__} reads schema 2 only: read it with the version that wrote it, or" in line
    assert line.endswith("launch again into another folder with name=NAME")
    assert content(sweep) == before


def configuration(name, text):
    path = Path("ultrabench") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("latin-1"))


@pytest.mark.parametrize(("name", "text", "line"), FILES)
def test_a_mistake_in_a_file_is_one_line(ultrabench, name, text, line):
    configuration(name, text)
    assert line in one_line(ultrabench, "sweep", "plan", f"{name.partition('/')[0]}=mine")


def test_a_folder_in_place_of_a_model_is_no_model(ultrabench):
    Path("ultrabench/model/x.yaml").mkdir(parents=True)
    assert "unknown model 'x'" in one_line(ultrabench, "sweep", "plan", "model=x")
    assert ultrabench("configs", "model")[0] == 0


def test_configs_prints_what_a_name_holds(ultrabench):
    configuration("model/mine.yaml", "# Mine.\nhidden_size: 64  # wide\n")
    path = Path("ultrabench/model/mine.yaml").absolute()
    assert ultrabench("configs", "model", "mine") == (0, "# Mine.\nhidden_size: 64  # wide\n", f"{path}\n")


def test_a_working_folder_that_is_gone(ultrabench, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "cannot use the working folder" in one_line(ultrabench, "sweep", "plan")
    monkeypatch.chdir(tmp_path)


def test_a_folder_that_slurm_cannot_write_to(ultrabench, tmp_path, monkeypatch):
    work = tmp_path / "back\\slash"
    work.mkdir()
    monkeypatch.chdir(work)
    assert "has a backslash or a line break" in one_line(ultrabench, "sweep", "launch", "launcher=slurm")
    assert list(work.iterdir()) == []


def test_where_slurm_is_not_installed(ultrabench, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    line = one_line(ultrabench, "sweep", "launch", "launcher=slurm", "--detach", code=3)
    programs = "not on PATH: sbatch, squeue, scontrol, scancel"
    advice = "log in to a node of the cluster or `module load slurm`; or set launcher=local"
    assert line == f"cannot query Slurm: {programs}; {advice}"
    assert list(tmp_path.iterdir()) == []


def test_the_shell_of_the_node_gets_its_variables():
    config = load_config(["kernel=command", 'kernel.command=[bash,-c,"echo \\${HOME} {tp}"]', "model=tiny"])
    run = make_plan(config).runs[0]
    assert fill_in(run.spec, AttemptKey(run.run_id, 0, 0), config.measure) == ["bash", "-c", "echo ${HOME} 1"]
