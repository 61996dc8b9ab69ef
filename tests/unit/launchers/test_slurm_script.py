"""The job script, read as sbatch and as bash read it, and the environment that it inherits."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.configs import refused
from tests.unit.allocations import CONFIG, jobs_of, open_sweep, with_launcher
from tests.unit.allocations import made_of as allocations_of
from ultrabench.launchers.slurm.launcher import inherited
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
    lines = [line for line in script.split("\n") if line.startswith("#SBATCH")]
    pairs = (_words(line.removeprefix("#SBATCH")) for line in lines)
    return {key: value if eq else True for (word,) in pairs for key, eq, value in [word[2:].partition("=")]}


def _words(line):
    """As sbatch splits a line of options (get_argument in its opt.c): a backslash escapes in quotes, too."""
    words, word, quote, escaped = [], None, "", False
    for c in line:
        if escaped:
            word, escaped = (word or "") + c, False
        elif c == "\\":
            word, escaped = word or "", True
        elif quote:
            word, quote = (word, "") if c == quote else (word + c, quote)
        elif c in "'\"":
            word, quote = word or "", c
        elif c == "#":
            break
        elif c.isspace():
            words, word = (words if word is None else [*words, word]), None
        else:
            word = (word or "") + c
    assert not quote
    assert not escaped
    return words if word is None else [*words, word]


def executed(script, folder):
    """Runs the script with a fake srun on PATH: its words, environment and folder."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/srun").write_text(SPY)
    (folder / "bin/srun").chmod(0o755)
    (folder / "job.sh").write_text(script)
    subprocess.run(["bash", "-n", folder / "job.sh"], check=True)
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": "/nowhere", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["bash", folder / "job.sh"], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert not (folder / "PWNED").exists()
    told = {name: (folder / name).read_bytes().decode().split("\0")[:-1] for name in ("argv", "env", "cwd")}
    return told["argv"], dict(line.split("=", 1) for line in told["env"]), told["cwd"][0]


def test_the_options_of_a_plain_sweep(tmp_path):
    script, first = scripted(tmp_path, count=3, partition="hopper", exclude="gpu[03,07]", avoid=("gpu05",))
    found = options(script)
    assert found.pop("comment").endswith("to give the nodes back: ultrabench sweep pause sweep")
    assert found == {
        "array": "0-2%3", "job-name": f"ub-sweep-{array_name(first)}", "nodes": "1", "ntasks-per-node": "1",
        "time": str(-(-int(first.limit_s) // 60)), "chdir": str(Path.cwd()), "partition": "hopper",
        "exclude": "gpu[03,07],gpu05", "exclusive": True, "nice": "1000", "no-requeue": True,
        "open-mode": "append", "signal": found["signal"],
        "output": f"{tmp_path}/sweep/allocations/{array_name(first)}.%a/job.log",
    }  # fmt: skip
    assert found["signal"].startswith("USR2@")


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
    found = options(scripted(tmp_path, hardware=hardware, **launcher)[0])
    assert has.items() <= found.items()
    assert not lacks & set(found)


@pytest.mark.parametrize("value", NASTY)
def test_sbatch_reads_every_value_as_it_was_given(tmp_path, value):
    words = ("partition", "account", "qos", "mem", "gres", "exclude")
    script, _ = scripted(tmp_path, **dict.fromkeys(words, value), sbatch={"mail-user": value})
    found = options(script)
    assert {found[word] for word in (*words, "mail-user")} == {value}


@pytest.mark.parametrize("name", [n for n in NASTY if "\\" not in n])
def test_folders_may_be_called_anything(tmp_path, name, monkeypatch):
    folder = tmp_path / f"x{name}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    script, first = scripted(folder)
    found = options(script)
    assert found["chdir"] == str(folder)
    assert str(folder / "sweep") in found["comment"]
    shared = str(first.folder).removesuffix(".0")
    assert found["output"] == f"{shared.replace('%', '%%')}.%a/job.log"
    argv, _, _ = executed(script, folder)
    assert argv[-5:] == [sys.executable, "-P", "-m", "ultrabench.agent", shared]
    assert [w for w in argv if w.startswith("--output=")] == [f"--output={found['output']}"]


def test_bash_reads_every_word_as_it_was_given(tmp_path):
    script, first = scripted(tmp_path, python=("apptainer", *NASTY, "python"), srun=("--a=1", *NASTY), cpus=3)
    argv, environ, _ = executed(script, tmp_path)
    ours = ["--unbuffered", "--kill-on-bad-exit=1", "--wait=60", "--open-mode=append", argv[4], "--cpu-bind=none",
            "--cpus-per-task=3"]  # fmt: skip
    agent = ["-P", "-m", "ultrabench.agent", str(first.folder).removesuffix(".0")]
    assert argv == [*ours, "--a=1", *NASTY, "apptainer", *NASTY, "python", *agent]
    assert environ["PYTHONSAFEPATH"] == "1"


LINES = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=9)


@settings(max_examples=10)
@given(words=st.lists(LINES, max_size=5))
def test_any_words_arrive(tmp_path_factory, words):
    folder = tmp_path_factory.mktemp("any")
    script, _ = scripted(folder, srun=tuple(words), partition=" ".join(words))
    assert executed(script, folder)[0][6:][: len(words)] == words
    assert options(script)["partition"] == " ".join(words)


def test_only_setup_lines_are_shell(tmp_path):
    setup = ("export A=$(echo made)", "B='b c'; export B", "cd /", "cd - > /dev/null")
    _, environ, folder = executed(scripted(tmp_path, setup=setup)[0], tmp_path)
    assert (environ["A"], environ["B"], folder) == ("made", "b c", str(tmp_path))
    lines = scripted(tmp_path, setup=setup)[0].splitlines()
    at = lines.index(setup[0])
    assert tuple(lines[at : at + 8 : 2]) == setup
    assert at < lines.index("export SUBMITIT_EXECUTOR=slurm")


def test_a_setup_line_that_fails_ends_the_job_and_is_named(tmp_path):
    setup = ("true", "module load 'it'", "touch reached")
    path = tmp_path / "job.sh"
    path.write_text(scripted(tmp_path, setup=setup)[0])
    done = subprocess.run(["bash", path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 127
    assert done.stderr.splitlines()[-1] == "line 2 of launcher.setup failed: module load 'it'"
    assert not (tmp_path / "reached").exists()


@pytest.mark.parametrize("name", ["a b'$;%#", "a\\b", "a\nb", "a\rb"])
def test_folders_that_slurm_cannot_write_to_are_refused(name):
    if "$" in name:
        require_plain(Path("/x") / name)
        return
    with refused("backslash or a line break"):
        require_plain(Path("/x") / name)


NAMES = st.sampled_from(("PATH", "NCCL_ALGO", "HF_TOKEN")) | st.text("HFNCL_10", min_size=1, max_size=9)


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "TMPDIR", "SLURM_CONF", "NCCL_DEBUG",
     "NCCL_IB_HCA", "FI_PROVIDER", "UCX_TLS", "GLOO_SOCKET_IFNAME", "MODULEPATH", "LMOD_CMD", "CUDA_HOME",
     "BASH_ENV", "BASH_FUNC_module%%", "BASH_FUNC_module()", "BASH_FUNC_ml%%", "LOADEDMODULES", "_LMFILES_",
     "_ModuleTable001_", "__LMOD_REF_COUNT_PATH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS",
     "TORCHINDUCTOR_MAX_AUTOTUNE", "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_FLASH_ATTN"],
)  # fmt: skip
def test_what_programs_need_goes_along(name):
    assert inherited({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "GITHUB_TOKEN", "SLURM_JOB_ID",
     "SLURM_NODEID", "SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "PYTHONPATH", "CUDA_VISIBLE_DEVICES",
     "LD_PRELOAD", "MY_PATH", "PATHS", "path", "XNCCL_DEBUG", "NCCL", "BASH_FUNC_ls%%", "SUBMITIT_LOCAL_GLOBALID"],
)  # fmt: skip
def test_everything_else_stays(name):
    assert inherited({name: "x"}) == {}


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        (["HF_TOKEN"], {"HF_TOKEN"}), (["HF_*"], {"HF_TOKEN", "HF_HOME"}), (["hf_*"], set()), (["HF"], set()),
        (["*"], {"HF_TOKEN", "HF_HOME", "SECRET"}), ([""], set()),
    ],
)  # fmt: skip
def test_further_names_are_taken_when_asked_for(more, taken):
    environ = dict.fromkeys(("HF_TOKEN", "HF_HOME", "SECRET"), "x")
    assert set(inherited(environ, more)) == taken


@given(environ=st.dictionaries(NAMES, st.text(max_size=5)), more=st.lists(NAMES, max_size=3))
def test_values_are_never_touched(environ, more):
    found = inherited(environ, more)
    assert found.items() <= environ.items()
    assert set(more) & set(environ) <= set(found)
    assert inherited(found, more) == found


def test_the_module_command_of_a_login_shell_works_in_a_job(tmp_path):
    """Sites define it as a function, which scripts get through the environment."""
    login = "module() { echo loaded $2; }; export -f module; env -0"
    told = subprocess.run(["bash", "-c", login], capture_output=True, text=True, check=True).stdout
    environ = dict(line.split("=", 1) for line in told.split("\0") if line)
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nmodule load cuda\n")
    done = subprocess.run(["bash", script], env=inherited(environ), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("loaded cuda\n", "")
