"""The names of axes are listed in layout.py; every other list of them has its reason here."""

import ast
from pathlib import Path

from ultrabench.layout import AXES

ROOT = Path(__file__).parents[3]
ROOMS = ("src/ultrabench", "sweep", "launchers", "agent", "kernel", "analysis")
MAX_LISTS = 12
REASONS = {
    "analysis/figures/plots/bubble.py": "the columns of its points, in the order in which they are sorted",
    "analysis/figures/plots/schedule.py": "what the order of passes depends on",
    "kernel/mesh.py": "the mesh of torch splits dp into replicas and shards",
    "kernel/rank/ran.py": "each option is read back from the running model in its own way",
    "src/ultrabench/layout.py": "COMPARABLE_AXES: somebody has to look how an axis changes memory before it joins",
    "sweep/best_runs.py": "the values of recomputation and ZeRO that take least time and least memory",
    "sweep/grid.py": "each of these axes follows from others in its own way",
    "sweep/predict/param_bytes.py": "the axes that decide how ranks divide parameters, which layouts share",
    "sweep/predict/profile_errors.py": "kinds of layouts whose predictions are off alike, as sentences name them",
    "sweep/predict/search.py": "numbers that may be 0 have a distance of their own",
    "sweep/predict/step_time.py": "the axes that decide the time of a part of a step, which layouts share",
    "sweep/remedy.py": "the values that save memory, in the order in which they are advised",
}
"""File -> why it lists axes by hand. An axis that is added to Layout has to be looked for in these files only."""


def lists_of_axes(text):
    """The lines of a program where two or more names of axes stand in one tuple, list, set or dict."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts = node.elts
        elif isinstance(node, ast.Dict):
            parts = node.keys
        else:
            continue
        names = {part.value for part in parts if isinstance(part, ast.Constant)}
        if len(names.intersection(AXES)) > 1:
            yield node.lineno


def test_only_these_files_list_axes_by_hand():
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if not path.parent.is_symlink()]
    lines_by_file = {
        str(path.relative_to(ROOT)): lines for path in paths if (lines := [*lists_of_axes(path.read_text())])
    }
    assert lines_by_file.keys() == REASONS.keys(), lines_by_file
    assert len(REASONS) <= MAX_LISTS


def test_a_list_is_seen():
    assert [*lists_of_axes('x = ("dp", "tp")\ny = {"mbs": 1, "gas": 2}\nz = ("dp", "nodes")')] == [1, 2]
