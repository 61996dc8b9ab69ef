"""The first change that CONTRIBUTING.md shows applies to this code, and its test fails without its rule."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ultrabench.sweep import refusals

ROOT = Path(__file__).resolve().parents[3]
SOURCE, TEST = "sweep/refusals.py", "tests/unit/sweep/test_refusals.py"


def shown_diff():
    """The change as a reader copies it from the page."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.search(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]


def names_of(path):
    """The names that a Python file defines."""
    names = {"__name__": "changed", "__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    return names


def test_the_first_change_of_contributing_applies_and_its_test_needs_its_rule(tmp_path):
    diff = shown_diff()
    changed_files = re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)
    assert {SOURCE, TEST} < {*changed_files}
    for name in changed_files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=tmp_path, check=True)

    tests = names_of(tmp_path / TEST)
    (name,) = re.findall(r"^\+def (test_\w+)", diff, re.MULTILINE)

    def run_shown_test(refusal):
        tests["refusal"] = refusal
        for case in tests[name].pytestmark[0].args[1]:
            tests[name](*case)

    run_shown_test(names_of(tmp_path / SOURCE)["refusal"])
    with pytest.raises(AssertionError):
        run_shown_test(refusals.refusal)
