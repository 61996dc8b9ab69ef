"""A study is its folder: nothing else imports it, and without the folder everything else works as before."""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ultrabench.analysis.study import studies

ROOT = Path(__file__).parents[3]
ROOMS = ("agent", "analysis", "kernel", "launchers", "src", "sweep")
STUDIES = [study.name for study in studies()]
ONE = "history" if "history" in STUDIES else STUDIES[0]
"""The study that is deleted alone."""
LISTS = """
import json, sys
import typer
from tests.unit.analysis.page_tables import small
from ultrabench.analysis.figures.kinds import KINDS
from ultrabench.analysis.page.page import page
from ultrabench.analysis.page.rows import document
from ultrabench.cli.main import app
shown = document(small(), public=False)
assert page(shown, title="t").startswith("<!DOCTYPE html>")
command = typer.main.get_command(app)
groups = {"": command, **{name: c for name, c in command.commands.items() if hasattr(c, "commands")}}
json.dump({
    "commands": {name: [*group.commands] for name, group in groups.items()},
    "kinds": [*KINDS], "sections": [section["title"] for section in shown["sections"]],
    "imported": [name for name in sys.modules if name.startswith("ultrabench.analysis.studies.")],
}, sys.stdout)
"""
"""A program that prints what the command line, `ultrabench plot` and the page list, and which studies it imported."""


def imported_modules(path):
    """The modules that a source imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_source_outside_a_study_imports_it():
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    importers = {
        (module.split(".")[3], str(path.relative_to(ROOT)))
        for path in sources
        for module in imported_modules(path)
        if module.startswith("ultrabench.analysis.studies.")
    }
    strangers = {pair for pair in importers if not pair[1].startswith(f"analysis/studies/{pair[0]}/")}
    assert importers, "studies import their own modules"
    assert not strangers


def package_without(names, folder):
    """Makes a package `ultrabench` in a folder, of links to the sources, that lacks the studies of these names."""
    for package, left_out in (
        ("src/ultrabench", {"analysis"}), ("analysis", {"studies"}), ("analysis/studies", {*names}),
    ):  # fmt: skip
        made = folder / "ultrabench" / package.removeprefix("src/ultrabench")
        made.mkdir()
        for path in (ROOT / package).iterdir():
            if path.name not in left_out:
                (made / path.name).symlink_to(path.resolve())


def lists_without(names, folder):
    """What the command line, the figures and the page list without the studies of these names."""
    folder.mkdir()
    package_without(names, folder)
    paths = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-c", LISTS]
    answer = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": paths}
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_a_deleted_folder_takes_its_commands_figures_and_sections_and_nothing_else(tmp_path):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(LISTS, {})
    before = json.loads(printed.getvalue())
    for n, names in enumerate(((ONE,), STUDIES)):
        after = lists_without(names, tmp_path / f"{n}")
        assert not [name for name in after["imported"] if name.endswith((".command", ".figure"))]
        gone = [study for study in studies() if study.name in names]
        commands = {(c.group, c.name) for study in gone for c in study.commands}
        assert after["commands"] == {
            group: [name for name in listed if (group, name) not in commands]
            for group, listed in before["commands"].items()
        }
        kinds = {study.kind.name for study in gone if study.kind}
        assert after["kinds"] == [name for name in before["kinds"] if name not in kinds]
        has_sections = {"effects": "Effect of each setting, all else equal", "nodes": "Nodes"}
        titles = {title for name, title in has_sections.items() if name in names}
        assert after["sections"] == [title for title in before["sections"] if title not in titles]


def test_the_help_of_a_command_begins_with_a_sentence_for_the_list():
    for study in studies():
        for command in study.commands:
            first_line = command.help.splitlines()[0]
            assert re.fullmatch(r"[A-Z][^.]+\.( [A-Z].*)?", first_line.replace(".png, .svg or .pdf", "")), (
                first_line
            )
            assert study.module("command") is not None


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_the_tests_of_analysis_and_command_line_pass_without_a_study(tmp_path):
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "build", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    shutil.rmtree(copy / "analysis/studies" / ONE)
    shutil.rmtree(copy / "tests/unit/analysis/studies" / ONE)
    paths = os.pathsep.join([str(copy / "src"), str(copy)])
    # The commands that tests start read the byte code of the copy, which has none yet.
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": ""}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/unit/analysis",
        "tests/unit/cli",
    ]
    answer = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout[-5000:]
