"""Every command that the manual prints exists, with its options, and its overrides make a configuration."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from ultrabench.cli.main import app
from ultrabench.cli.run_recommend import with_full_keys
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))]
PLACEHOLDER = re.compile(r"\.\.\.|[A-Z]{2,}[\w.]*|\[.*")
"""A word that stands for what a reader has to write."""
NOT_HERE = (
    "profile=mine", "cluster=mine", "model=meta-llama/", "model=~/", "./my-model", "kernel=mine", "kernel=titan",
    "sweep=mine", "sweep=llama70b", "sweep=deepseek", "kernel=bridge",
)  # fmt: skip
"""Beginnings of names whose files a reader makes first."""


def commands(page):
    """The words of each command of a page, without `ultrabench` and what the shell does with it."""
    _, *blocks = page.read_text(encoding="utf-8").split("```")
    for block in blocks[::2]:
        for line in block.replace("\\\n", " ").splitlines():
            inner = re.search(r"\$\((.*?)\)", line)
            for part in (inner[1],) if inner else line.split(" && "):
                if part.startswith("ultrabench "):
                    yield shlex.split(part.partition(" > ")[0], comments=True)[1:]


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


def parsed(words):
    """The name of the command that these words call, and its arguments; an unknown option fails."""
    command, path = typer.main.get_command(app), []
    while hasattr(command, "commands"):
        assert words, f"{' '.join(path)} needs a command"
        name, *words = words
        if name not in command.commands and path == ["predict"]:  # the words of a layout
            return path, []
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
        path.append(name)
    if "--help" in words:
        return path, []
    context = command.make_context(" ".join(path), [*words])
    return path, [
        text for value in context.params.values() if isinstance(value, list | tuple) for text in value
    ]


def test_the_manual_has_commands():
    assert len(COMMANDS) > 90
    assert len({page for page, _ in COMMANDS}) > 10


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page.stem}-{' '.join(words)}" for page, words in COMMANDS]
)
def test_a_command_of_the_manual_exists_with_its_options_and_overrides(page, words):
    path, overrides = parsed([text for text in words if text != "..."])
    if any(PLACEHOLDER.fullmatch(text) for text in overrides):
        return
    takes_overrides = path in (["sweep", "plan"], ["sweep", "launch"], ["recommend"], ["doctor"])
    if takes_overrides and not any(start in text for text in overrides for start in NOT_HERE):
        load_config(with_full_keys(overrides) if path == ["recommend"] else overrides)


@pytest.mark.usefixtures("alone")
def test_each_recipe_of_megatron_has_runs_that_fit():
    page = ROOT / "docs/start/your-program.md"
    recipes = re.findall(
        r"```yaml\n# \./(ultrabench/(sweep|kernel)/(\w+)\.yaml)(.*?)```",
        page.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert len(recipes) == 3
    for file_name, group, name, text in recipes:
        Path(file_name).parent.mkdir(parents=True, exist_ok=True)
        Path(file_name).write_text(f"#{text}", encoding="utf-8")
        words = next(words for other, words in COMMANDS if other == page and f"{group}={name}" in words)
        plan = make_plan(load_config([word for word in words[2:] if not word.startswith("--")]))
        assert plan.runs
        assert any(run.fits for run in plan.runs)
    line = (
        "[Rank 0] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 31.3 | mem-max-allocated-gigabytes: 52.7 "
        "| mem-max-active-gigabytes: 52.7 | mem-max-reserved-gigabytes: 60.02 | mem-alloc-retires: 0"
    )
    memory = re.search(plan.config.kernel.memory_line, line)
    assert memory.groupdict() == {"allocated_gb": "52.7", "reserved_gb": "60.02"}


@pytest.mark.parametrize("name", ["guide/choose.md", "start/your-model.md"])
def test_the_first_table_of_recommend_is_what_the_command_prints(name):
    page = ROOT / "docs" / name
    words = next(words for other, words in COMMANDS if other == page and words[0] == "recommend")
    words = ["model=llama3-8b" if word.startswith("model=") else word for word in words]
    command = [sys.executable, "-m", "ultrabench", *words]
    printed = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "300"}
    ).stdout
    rows = re.findall(r"^    8 .*", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 2
    for row in rows:
        row_words = {*row.split()} - {"..."}
        assert any(row_words <= {*line.replace(";", " ").split()} for line in printed.splitlines()), row


def test_the_names_in_how_to_add_stand_in_the_files_of_their_row():
    missing, num_names, page = [], 0, ROOT / "docs/design/how-to-add.md"
    for row in page.read_text(encoding="utf-8").splitlines():
        if row.startswith("| "):
            linked = re.findall(r"\]\(([^)#]+\.(?:py|js))\)", row)
            text = "".join((page.parent / path).read_text() for path in linked)
            names = re.findall(r"`(\w+)`", row)
            num_names += len(names)
            missing += [f"{name}: {row}" for name in names if not re.search(rf"\b{name}\b", text)]
    assert num_names > 30
    assert not missing
