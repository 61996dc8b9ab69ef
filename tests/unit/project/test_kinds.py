"""What a kernel, a launcher or a device is, other modules ask by its properties;
every other test has its reason here.
"""

import ast
import re
from pathlib import Path

import pytest

from ultrabench.hardware import DEVICE_KINDS
from ultrabench.kernel_config import KERNEL_KINDS
from ultrabench.sweep.config.launcher_config import LAUNCHER_KINDS

ROOT = Path(__file__).parents[3]
ROOMS = ("src/ultrabench", "sweep", "launchers", "agent", "kernel", "analysis")
NAMES = {*KERNEL_KINDS, *DEVICE_KINDS, *LAUNCHER_KINDS}
HOMES = {"src/ultrabench/kernel_config.py", "src/ultrabench/hardware.py", "sweep/config/launcher_config.py"}
REASONS = {
    "agent/ranks/node.py": "the event probe of a report",
    "agent/ranks/rank_progress.py": "the event probe of a report",
    "src/ultrabench/rank_report.py": "the event probe of a report",
}
"""File -> what it compares with a text that is also the name of a kind."""
KIND = re.compile(r"(kernel|program|launcher|hardware|device)\w*\.(kind|name|device|type)$")
"""Matches the end of an expression that is the name of a kind."""


def comparisons_by_name(text):
    """The lines of a program that compare with the name of a kind, or the name of a kind with a text or a constant."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.match_case):
            parts = [*ast.walk(node.pattern)]
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            parts = [part for operand in operands for part in (operand, *getattr(operand, "elts", ()))]
        else:
            continue
        values = [part.value for part in parts if isinstance(part, ast.MatchValue)] + parts
        is_kind = any(KIND.search(ast.unparse(part)) for part in values if isinstance(part, ast.Attribute))
        has_constant = any(isinstance(part, ast.Name) and part.id.isupper() for part in values)
        texts = {
            part.value for part in values if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        if texts & NAMES or (is_kind and has_constant):
            yield values[0].lineno


def test_only_these_files_ask_for_the_name_of_a_kind():
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if not path.parent.is_symlink()]
    lines_by_file = {
        name: lines
        for path in paths
        if (name := str(path.relative_to(ROOT))) not in HOMES
        if (lines := [*comparisons_by_name(path.read_text())])
    }
    assert lines_by_file.keys() == REASONS.keys(), lines_by_file


@pytest.mark.parametrize(
    "text",
    [
        "if config.kernel.kind != 'probe': pass", "is_ours = values.get('kind', EMBEDDED) == 'embedded'",
        "if launcher.name in ('local', other): pass", "if hardware.device == USUAL_DEVICE: pass",
        "if device.type == 'cuda': pass", "num_calls = 5 if self.device.type == USUAL_DEVICE else 1",
        "match launcher_config.name:\n    case 'slurm':\n        pass",
    ],
)  # fmt: skip
def test_a_comparison_is_seen(text):
    assert [*comparisons_by_name(text)]


def test_other_comparisons_are_not_seen():
    assert not [
        *comparisons_by_name("a.hardware.name == b.hardware.name\nstarter.name == 'deepspeed'\nkernel.trains")
    ]


CHECKS_OF_SLURM = {f"launchers/doctor/{name}.py" for name in ("checkup", "cluster_file", "site_checks")}
"""Files that only examine Slurm, and that another launcher would not change."""
SLURM_REASONS = {
    "analysis/studies/nodes/command.py": "a list of hosts as sbatch reads it, besides JSON",
    "launchers/starters.py": "srun and jsrun as the starters of a user's program, inside of any job",
    "src/ultrabench/store/events.py": "the word of journals for every batch system",
    "sweep/config/compose.py": "how to write the options of SlurmSettings.sbatch",
    "sweep/config/sweep_config.py": "the setting of SlurmSettings that starts a container, as an example",
}
"""File -> why it writes a word of Slurm; another launcher would not change it."""
SLURM = re.compile(
    r"slurm|(?<![a-z])(?:sbatch|srun|scancel|squeue|sacct|sacctmgr|scontrol|sinfo)(?![a-z])", re.IGNORECASE
)


def words_of_slurm(text):
    """The lines of a program with a name or a text, apart from docstrings, that has a word of Slurm."""
    nodes = [*ast.walk(ast.parse(text))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant):
            word = "" if id(node) in docstrings else node.value
        elif isinstance(node, ast.ImportFrom):
            word = f"{node.module} {' '.join(alias.name for alias in node.names)}"
        else:
            word = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
        if isinstance(word, str) and SLURM.search(word):
            yield node.lineno


def test_the_page_names_the_files_that_know_a_launcher():
    page = (ROOT / "docs/design/architecture.md").read_text()
    section = page.partition("## Another launcher")[2].partition("\n## ")[0]
    files = {path for path in re.findall(r"^\| \[?`([^`]+)`", section, re.MULTILINE) if "NAME" not in path}
    assert all((ROOT / path).is_file() for path in files)
    assert len(files) <= 8, "two more are new"
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if not path.parent.is_symlink()]
    texts_by_name = {
        name: path.read_text()
        for path in paths
        if not (name := str(path.relative_to(ROOT))).startswith("launchers/slurm/")
    }
    lines_by_file = {
        name: lines
        for name, text in texts_by_name.items()
        if SLURM.search(text) and (lines := [*words_of_slurm(text)])
    }
    other_files = lines_by_file.keys() - files - CHECKS_OF_SLURM
    assert other_files == SLURM_REASONS.keys(), {name: lines_by_file.get(name) for name in other_files}


def test_a_word_of_slurm_is_seen():
    lines = (
        "advice = f'add launcher=slurm, or {other}'", "_NOISE = re.compile(r'|srun: |mpirun')",
        "gres = config.launcher.slurm", "from ultrabench.launchers.slurm.site import Site",
        "node = environ['SLURM_NODEID']", "def _slurm_job(): pass",
    )  # fmt: skip
    for line in lines:
        assert [*words_of_slurm(line)], line
    assert not [*words_of_slurm('def f():\n    "A job of Slurm."\n    return ["mysruns"]')]
