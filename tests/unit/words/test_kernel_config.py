"""What the digest of a kernel holds, and secrets among its variables."""

import ast
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import ultrabench
from tests.configs import refused
from ultrabench.kernel_config import KernelConfig, rank_sources
from ultrabench.launchers.open_sweep import require_same, sweep_json_of
from ultrabench.store.kernel_secrets import REDACTED, redact_arguments, redact_env, reveal_env, write_secrets
from ultrabench.sweep.config.load import config_from_tree, load_config

ROOT = Path(ultrabench.__file__).parent


@pytest.mark.parametrize("form", ["{}", "--config={}", "train.config={}"])
def test_a_file_that_is_edited_gives_another_digest(tmp_path, form):
    file = tmp_path / "conf.yaml"
    file.write_text("lr: 1")
    kernel = KernelConfig(name="mine", kind="command", command=("python", "train", form.format(file)))
    before = kernel.digest()
    assert kernel.digest() == before
    file.write_text("lr: 2")
    assert kernel.digest() != before


def test_a_folder_and_files_change_the_digest_only_where_they_are_set(tmp_path):
    (tmp_path / "train.py").write_text("one")
    kernel = KernelConfig(name="mine", kind="command", command=("x", "train.py"))
    assert kernel.digest() == "3413ec7e2c2e8156", "as version 0.2.0 computed it"
    others = [{"folder": str(tmp_path)}, {"files": {"a": "1"}}, {"files": {"a": "2"}}, {"files": {"b": "1"}}]
    assert len({replace(kernel, **options).digest() for options in ({}, *others)}) == 5
    in_folder = replace(kernel, folder=str(tmp_path))
    before = in_folder.digest()
    (tmp_path / "train.py").write_text("two")
    assert in_folder.digest() != before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, f"kernel.files has the name '{name}'; a name is a path below the folder of the files, "
        "without a leading")
          for name in ("/etc/a.json", "../a", "a/../b", "./a", "a/", "a//b", ".", "")),
        ("x" * 256, "kernel.files has a name of 256 bytes, 'xxxxxxxxxxxxxxxxxxxx'...; Linux takes at most 255"),
        ("conf", "kernel.files has conf and conf/b.json, so that conf would be a file and a folder; "
        "rename one of them"),
    ],
)  # fmt: skip
def test_a_name_of_a_file_stays_in_its_folder(name, message):
    with refused(message):
        KernelConfig(name="mine", kind="command", command=("x",), files={"conf/b.json": "", name: ""})


@pytest.mark.parametrize("option", [{"files": {"a": ""}}, {"folder": "x"}])
def test_our_own_kernel_has_no_files(option):
    name = next(iter(option))
    with refused(f"kernel.{name} with kernel=embedded; only a program of your own has it"):
        KernelConfig(name="embedded", **option)


def test_only_what_starts_ranks_changes_the_digest_of_a_command():
    kernel = KernelConfig(name="mine", kind="command", command=("./train", "{tp}"))
    assert kernel.digest() == "1c9e02f2237a6b80", "as before there was launch_per"
    assert replace(kernel, rank_order=("tp", "cp", "pp", "dp"), step_rank=0).digest() == kernel.digest()
    assert replace(kernel, launch_per="node").digest() != kernel.digest()


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("rank_order=[tp,cp,ppp,dp]", "unknown degree in kernel.rank_order 'ppp'; did you mean pp?"),
        ("rank_order=[tp,pp]", "kernel.rank_order=[tp,pp]; it must name each of tp, cp, dp, pp once, "
        "first the one in which neighb"),
        ("launch_per=nodes", "kernel.launch_per='nodes'; must be rank or node; did you mean node?"),
        ("step_rank=last", "kernel.step_rank='last'; must be the number of a rank, any or last_stage"),
        ("step_rank=-2", "kernel.step_rank=-2; must be the number of a rank, -1 (the last rank), any or last_stage"),
    ],
)  # fmt: skip
def test_how_ranks_are_started_and_numbered_has_few_values(option, line):
    with refused(line):
        load_config(["kernel=command", "kernel.command=[train]", f"kernel.{option}"])


def imported_files(path, root):
    """The files of the package at `root` that a file imports, wherever in it the imports are."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        files = (root.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names)
        yield from (file for file in files if file.is_file() and file.is_relative_to(root))


def test_every_file_that_a_rank_may_import_counts():
    queue, reached = [*(ROOT / "kernel").rglob("*.py")], set()
    while queue:
        path = queue.pop()
        if path not in reached:
            reached.add(path)
            queue += imported_files(path, ROOT)
    assert reached <= set(rank_sources(ROOT))
    assert len(reached) > 60


@pytest.mark.campaign  # the test above reads the same imports without running them
def test_every_file_that_a_rank_imports_counts():
    code = (
        "import sys, importlib, pathlib, ultrabench\n"
        "root = pathlib.Path(ultrabench.__file__).parent\n"
        "for path in sorted((root / 'kernel').rglob('*.py')):\n"
        "    parts = path.relative_to(root.parent).with_suffix('').parts\n"
        "    importlib.import_module('.'.join(parts).removesuffix('.__init__'))\n"
        "print(*(m.__file__ for n, m in list(sys.modules.items()) if n.startswith('ultrabench.')))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {Path(name).resolve() for name in process.stdout.split() if not name.endswith("__init__.py")}
    assert imported <= {path.resolve() for path in rank_sources(ROOT)}
    assert len(imported) > 25


def test_each_source_changes_the_digest(tmp_path, monkeypatch):
    root = Path(shutil.copytree(ROOT, tmp_path / "ultrabench"))
    monkeypatch.setattr(ultrabench, "__file__", str(root / "__init__.py"))
    kernel = KernelConfig(name="embedded")
    digests = {kernel.digest()}
    for path in rank_sources(root):
        path.write_text(path.read_text() + "# changed\n")
        digests.add(kernel.digest())
    assert len(digests) == len(rank_sources(ROOT)) + 1


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_KEY", "apiKey", "DB_PASSWORD", "wandb_api_key"])
def test_names_of_secrets_are_known(name):
    assert redact_env({name: "hunter2", "LEVEL": "3"}) == ({name: REDACTED, "LEVEL": "3"}, {name: "hunter2"})
    assert redact_env({name: REDACTED}) == ({name: REDACTED}, {})


def test_values_are_kept_for_their_owner_and_found_again(tmp_path):
    file, env = tmp_path / "secrets.json", {"A_TOKEN": REDACTED, "B_KEY": REDACTED, "LEVEL": "3"}
    with refused(f"{file} has no value for kernel.env.B_KEY; give it again"):
        write_secrets(env, file, {"A_TOKEN": "1"})
    for secrets in ({"A_TOKEN": "1", "B_KEY": "2"}, {"B_KEY": "3"}, {}):
        write_secrets(env, file, secrets)
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text()) == {"A_TOKEN": "1", "B_KEY": "3"}
    assert reveal_env(env, file) == {"A_TOKEN": "1", "B_KEY": "3", "LEVEL": "3"}
    assert reveal_env({"LEVEL": "3"}, tmp_path / "nothing") == {"LEVEL": "3"}


@pytest.mark.parametrize("text", ["kernel.env={T: a.b}", 'kernel.env={T: "a.b"}', "kernel.env={T: 'a.b'}"])
def test_a_command_line_without_its_secret_can_be_used_again(text):
    assert redact_arguments(["x", text], {"T": "a.b"}) == ["x", f"kernel.env={{T: '{REDACTED}'}}"]


def test_a_renewed_secret_is_the_same_sweep(tmp_path, monkeypatch):
    def config(value):
        env = f"kernel.env={{A_TOKEN: {value}, L: x}}"
        return load_config(["kernel=command", "kernel.command=[python,x.py]", env])

    monkeypatch.setenv("MY_TOKEN", "hunter3")
    first, second = config("hunter2"), config('"${oc.env:MY_TOKEN}"')
    assert "hunter" not in repr((first, second))
    assert (first.secrets, second.secrets) == ({"A_TOKEN": "hunter2"}, {"A_TOKEN": "hunter3"})
    assert first.kernel == second.kernel
    recorded = sweep_json_of(first, {})
    require_same(recorded, second, tmp_path)
    assert config_from_tree(recorded.config).secrets == {}
