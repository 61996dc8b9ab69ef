"""The job script, read as sbatch and as bash read it, and the environment that it inherits."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.configs import refused
from tests.unit.allocations import CONFIG, jobs_of, open_sweep, with_launcher
from tests.unit.allocations import made_of as allocations_of
from ultrabench.launchers.slurm.launcher import inherited_env
from ultrabench.launchers.slurm.script import array_name, array_script, require_plain
from ultrabench.sweep.config.load import load_config

NASTY = ["a b", "a'b", 'a"b', "a;touch PWNED", "$(touch PWNED)", "`touch PWNED`", "$HOME", "a\\b", "a\\", "#c", "a #c",
         "*", "~", "{a,b}", "a&b|c>d<e", "%j%u%%", "-x", "--help", "=", "\u00fc\u4f60", "a\tb", "!x", "''"]  # fmt: skip
SPY = r"""#!/bin/bash
printf '%s\0' "$@" > argv; env -0 > env; printf '%s\0' "$PWD" > cwd
"""
GPUS = load_config(["hardware=h100x8"]).hardware


def scripted(folder, count=1, hardware=CONFIG.hardware, avoid=(), **launcher):
    """The script of an array, and its first allocation."""
    sweep = open_sweep(folder / "sweep")
    array = allocations_of(sweep, jobs_of(sweep)[:1] * count)
    config = with_launcher(replace(CONFIG, hardware=hardware), **launcher)
    return array_script(array, config, avoid), array[0]


def options(script):
    """What sbatch makes of the script's options: the last of a name counts."""
    parsed = {}
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            lexer = shlex.shlex(line.removeprefix("#SBATCH"), posix=True)
            # In sbatch (get_argument in its opt.c) a backslash escapes within single quotes, too.
            lexer.whitespace_split, lexer.escapedquotes = True, "'\""
            (option,) = lexer
            key, eq, value = option[2:].partition("=")
            parsed[key] = value if eq else True
    return parsed


def executed(script, folder):
    """Runs the script with a fake srun on PATH: its words, environment and folder."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/srun").write_text(SPY)
    (folder / "bin/srun").chmod(0o755)
    (folder / "job.sh").write_text(script)
    subprocess.run(["bash", "-n", folder / "job.sh"], check=True)
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": "/nowhere", "LC_ALL": "C.UTF-8"}
    process = subprocess.run(
        ["bash", folder / "job.sh"], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    assert process.stderr == ""
    assert not (folder / "PWNED").exists()
    output = {name: (folder / name).read_bytes().decode().split("\0")[:-1] for name in ("argv", "env", "cwd")}
    return output["argv"], dict(line.split("=", 1) for line in output["env"]), output["cwd"][0]


def test_the_options_of_a_plain_sweep(tmp_path):
    script, first = scripted(tmp_path, count=3, partition="hopper", exclude="gpu[03,07]", avoid=("gpu05",))
    parsed = options(script)
    assert parsed.pop("comment").endswith("to free the nodes: ultrabench sweep pause sweep")
    assert parsed == {
        "array": "0-2%3", "job-name": f"ub-sweep-{array_name(first)}", "nodes": "1", "ntasks-per-node": "1",
        "time": str(-(-int(first.limit_s) // 60)), "chdir": str(Path.cwd()), "partition": "hopper",
        "exclude": "gpu[03,07],gpu05", "exclusive": True, "nice": "1000", "no-requeue": True,
        "open-mode": "append", "signal": parsed["signal"],
        "output": f"{tmp_path}/sweep/allocations/{array_name(first)}.%a/job.log",
    }  # fmt: skip
    assert parsed["signal"].startswith("USR2@")


@pytest.mark.parametrize(
    ("launcher", "hardware", "has", "lacks"),
    [
        ({}, GPUS, {"gpus-per-node": "8"}, {"gres"}),
        ({"gres": "gpu:h100:8"}, GPUS, {"gres": "gpu:h100:8"}, {"gpus-per-node"}),
        ({}, CONFIG.hardware, {}, {"gpus-per-node", "gres", "mem", "account", "cpus-per-task", "exclude"}),
        ({"nice": None, "exclusive": False}, GPUS, {}, {"nice", "exclusive"}),
        ({"nice": 0}, GPUS, {"nice": "0"}, set()),
        ({"requeue": True}, GPUS, {"requeue": True}, {"no-requeue"}),
        ({"cpus": 6, "mem": "0", "account": "1"}, GPUS, {"cpus-per-task": "6", "mem": "0", "account": "1"}, set()),
        ({"sbatch": {"exclusive": "user", "mail-type": "FAIL", "hold": ""}}, GPUS,
         {"exclusive": "user", "mail-type": "FAIL", "hold": True}, set()),
    ],
)  # fmt: skip
def test_options_that_come_and_go(tmp_path, launcher, hardware, has, lacks):
    parsed = options(scripted(tmp_path, hardware=hardware, **launcher)[0])
    assert has.items() <= parsed.items()
    assert not lacks & set(parsed)


@pytest.mark.parametrize("value", NASTY)
def test_sbatch_bash_and_folders_take_every_value_as_it_was_given(tmp_path, monkeypatch, value):
    folder = tmp_path / f"x{value}".replace("\\", "")
    folder.mkdir()
    monkeypatch.chdir(folder)
    require_plain(folder)
    texts = dict.fromkeys(("partition", "account", "qos", "gres", "exclude"), value)
    words = {"python": ("apptainer", value, "python"), "srun": ("--a=1", value), "cpus": 3}
    script, first = scripted(folder, **texts, **words, sbatch={"mail-user": value})
    parsed, shared = options(script), str(first.folder).removesuffix(".0")
    assert {parsed[name] for name in (*texts, "mail-user")} == {value}
    assert parsed["chdir"] == str(folder)
    assert str(folder / "sweep") in parsed["comment"]
    assert parsed["output"] == f"{shared.replace('%', '%%')}.%a/job.log"
    argv, environ, _ = executed(script, folder)
    assert argv == [
        "--unbuffered", "--kill-on-bad-exit=1", "--wait=60", "--open-mode=append", f"--output={parsed['output']}",
        "--cpu-bind=none", "--cpus-per-task=3", "--a=1", value, "apptainer", value, "python", "-P", "-m",
        "ultrabench.agent", shared,
    ]  # fmt: skip
    assert environ["PYTHONSAFEPATH"] == "1"


def test_only_setup_lines_are_shell(tmp_path):
    setup = ("export A=$(echo made)", "B='b c'; export B", "cd /", "cd - > /dev/null")
    script, _ = scripted(tmp_path, setup=setup)
    argv, environ, folder = executed(script, tmp_path)
    assert (argv[-5], environ["A"], environ["B"], folder) == (sys.executable, "made", "b c", str(tmp_path))
    lines = script.splitlines()
    start = lines.index(setup[0])
    assert tuple(lines[start : start + 8 : 2]) == setup
    assert start < lines.index("# command")


def test_a_setup_line_that_fails_ends_the_job_and_is_named(tmp_path):
    setup = ("true", "module load 'it'", "touch reached")
    path = tmp_path / "job.sh"
    path.write_text(scripted(tmp_path, setup=setup)[0])
    process = subprocess.run(["bash", path], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 127
    assert process.stderr.splitlines()[-1] == "line 2 of launcher.setup failed: module load 'it'"
    assert not (tmp_path / "reached").exists()


@pytest.mark.parametrize("name", ["a\\b", "a\nb", "a\rb"])
def test_folders_that_slurm_cannot_write_to_are_refused(name):
    with refused("backslash or a line break"):
        require_plain(Path("/x") / name)


NEEDED = [
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "TMPDIR", "SLURM_CONF", "NCCL_DEBUG",
    "NCCL_IB_HCA", "FI_PROVIDER", "UCX_TLS", "GLOO_SOCKET_IFNAME", "MODULEPATH", "LMOD_CMD", "CUDA_HOME",
    "BASH_ENV", "BASH_FUNC_module%%", "BASH_FUNC_module()", "BASH_FUNC_ml%%", "LOADEDMODULES", "_LMFILES_",
    "_ModuleTable001_", "__LMOD_REF_COUNT_PATH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS",
    "TORCHINDUCTOR_MAX_AUTOTUNE", "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_FLASH_ATTN",
]  # fmt: skip
OTHERS = [
    "HF_TOKEN", "HF_HOME", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "SLURM_JOB_ID", "SLURM_NODEID",
    "SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "MY_PATH",
    "PATHS", "path", "XNCCL_DEBUG", "NCCL", "BASH_FUNC_ls%%", "SUBMITIT_LOCAL_GLOBALID",
]  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "inherited"),
    [([], []), (["HF_TOKEN"], ["HF_TOKEN"]), (["HF_*"], ["HF_TOKEN", "HF_HOME"]), (["hf_*"], []), (["HF", ""], []),
     (["*"], OTHERS)],
)  # fmt: skip
def test_jobs_inherit_what_programs_need_and_what_is_asked_for(extra, inherited):
    environ = {name: f"value of {name}" for name in (*NEEDED, *OTHERS)}
    assert inherited_env(environ, extra) == {name: environ[name] for name in (*NEEDED, *inherited)}
