"""Where measurements of others lie that are no part of this project; tests that need them are skipped without."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("ULTRABENCH_PUBLISHED", Path(__file__).parents[2] / "shared"))
"""The folder with PLAYBOOK.md and data/*.csv; the variable ULTRABENCH_PUBLISHED names another one."""
PLAYBOOK = FOLDER / "data" / "playbook_runs.csv"
RUNS = FOLDER / "data" / "published_runs.csv"

FRAMEWORKS = FOLDER / "data" / "published_frameworks.csv"
LAYOUTS = FOLDER / "data" / "published_layouts.csv"


def needs(path):
    """A mark that skips a test where the file is absent."""
    return pytest.mark.skipif(not path.is_file(), reason=f"{path.name} is not in {FOLDER}")
