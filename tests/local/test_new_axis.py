"""An axis that is added to the fields of Layout is planned, run, ranked and drawn without any other change."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ultrabench
from tests import patience

pytestmark = pytest.mark.local

END_OF_FIELDS = "    def __post_init__"
NEW_AXES = """\
    shards: Annotated[int, between(1, 4)] = axis(
        "shards", "Ranks that share the weights.", kind=CHOICE, title="ranks that share the weights",
        default=1, implied=(1,), usual=(1, 2, 4), added_later=True,
    )
    etp: Count = axis(
        "etp", "Expert-parallel degree.", kind=CHOICE, title="expert-parallel degree", default=1, implied=(1,),
        usual=POWERS_OF_TWO, divides=("dp", "cp"), added_later=True,
    )
    up: Count = axis(
        "up", "Degree of Ulysses.", kind=DEGREE, title="degree of Ulysses", default=1, implied=(1,), added_later=True,
    )

"""
"""A choice, a degree that regroups the ranks of others, and a degree that multiplies the number of ranks."""
NAMES = ("shards", "etp", "up")
INNERMOST = "    tp: int\n\n\n"
DISTANCES = """
from dataclasses import replace
from ultrabench.layout import NEUTRAL, Layout
from ultrabench.sweep.predict.search import coordinates, words
layout = Layout(dp=4)
for name in ("shards", "etp", "up"):
    other = replace(layout, **{name: 2})
    print(name, (coordinates(other), words(other)) != (coordinates(layout), words(layout)), other.world_size)
"""


SEVERAL = """
import contextlib, io, json, sys
from ultrabench.cli import main as cli
for words in json.loads(sys.argv[1]):
    sys.argv, output, messages = ["ultrabench", *words], io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
            cli.main()
    except SystemExit as left:
        print(json.dumps([left.code, output.getvalue(), messages.getvalue()]))
"""
"""Runs several commands in one process; prints the exit code, stdout and stderr of each."""


@pytest.fixture(scope="module")
def changed_package(tmp_path_factory):
    """A copy of the package with three more axes."""
    package = tmp_path_factory.mktemp("copy") / "ultrabench"
    shutil.copytree(Path(ultrabench.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / "layout.py").read_text()
    assert text.count(END_OF_FIELDS) == text.count(INNERMOST) == 1
    text = text.replace(END_OF_FIELDS, NEW_AXES + END_OF_FIELDS)
    (package / "layout.py").write_text(
        text.replace(INNERMOST, INNERMOST.replace("\n\n\n", "\n    up: int\n\n\n"))
    )
    return package


@pytest.fixture
def changed_bench(changed_package, monkeypatch, bench):
    """Runs commands of the changed package, which every process of the test imports."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(changed_package.parent), str(Path.cwd()))))
    bench.apart_always = True
    return bench


def several(bench, *commands, code=0):
    """The outputs of several commands, which all end with this code: stdout if that is 0, else stderr."""
    lines = [bench.command(*words)[3:] for words in commands]  # without the program
    words = [sys.executable, "-c", SEVERAL, json.dumps(lines)]
    process = patience.run(words, cwd=bench.folder, env=bench.environment())
    answers = [json.loads(line) for line in process.stdout.splitlines()]
    assert [answer[0] for answer in answers] == [code] * len(commands), process.stderr + process.stdout
    return [output if code == 0 else messages for _, output, messages in answers]


def test_three_more_fields_are_three_more_axes(changed_bench, bench):
    before = bench.here(
        "sweep", "plan", *bench.launch("fine", gbs=8, mbs=1)[2:], "--json", "-o", "before.parquet"
    )
    assert before.returncode == 0
    new_axes = [f"+sweep.{name}=[1,2]" for name in NAMES]
    words = changed_bench.launch("fine", *new_axes, gbs=8, mbs=1)
    (output,) = several(changed_bench, ["sweep", "plan", *words[2:], "--json", "-o", "plan.parquet"])
    plan = json.loads(output)
    # Two GPUs: up=2 leaves dp=1, which etp=2 does not divide.
    assert (plan["candidates"], plan["runs"], plan["rejected"]) == (8, 6, {"etp_divides_dp_cp": 2})
    assert {*run_ids(changed_bench, "before.parquet")} < {*run_ids(changed_bench, "plan.parquet")}

    changed_bench.run(*words)
    rows = changed_bench.rows()
    assert {row["status"] for row in rows} == {"ok"}
    layouts = {tuple(row[name] for name in ("dp", *NAMES)) for row in rows}
    assert layouts == {(2, 1, 1, 1), (2, 1, 2, 1), (2, 2, 1, 1), (2, 2, 2, 1), (1, 1, 1, 2), (1, 2, 1, 2)}

    two = next(row["run_id"] for row in rows if row["shards"] == row["etp"] == 2)
    best, shown, *_ = several(
        changed_bench, ["heatmap", "t", "--json", "--include-suspects"], ["sweep", "show", two, "--sweep", "t"],
        *(["heatmap", "t", f"{name}=2", "-o", f"{name}.svg", "--include-suspects"] for name in NAMES),
        ["report", "t", "-o", "page.html"],
    )  # fmt: skip
    (cell,) = json.loads(best)
    assert tuple(cell[name] for name in ("dp", *NAMES)) in layouts
    for name in NAMES:
        assert f"{name}2" in (changed_bench.folder / f"{name}.svg").read_text()
    assert re.search(r"^etp +2$", shown, re.MULTILINE)
    page = (changed_bench.folder / "page.html").read_text()
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    for name in NAMES:
        column = data["columns"][name]
        assert {*column.get("distinct", column.get("values"))} >= {1, 2}

    (bad,) = several(changed_bench, ["sweep", "plan", *words[2:], "+sweep.shards=[5]"], code=2)
    assert "sweep.shards=5; must be 1 to 4" in bad


def test_a_folder_from_before_the_axes_is_read_with_their_neutral_values(changed_bench):
    old = changed_bench.folder / "results" / "old"
    shutil.copytree(Path(__file__).parents[1] / "fixtures/v0.2.0/results/local", old)
    status, cells, *_ = several(
        changed_bench, ["sweep", "status", "old", "--json"], ["heatmap", "old", "--json", "--include-suspects"],
        ["sweep", "top", "old"], ["report", "old", "-o", "page.html"],
    )  # fmt: skip
    assert json.loads(status)["runs"] > 0
    assert [json.loads(cells)[0][name] for name in NAMES] == [1, 1, 1]


def test_predictions_and_the_search_know_three_more_axes(changed_bench):
    titles = ("ranks that share the weights", "expert-parallel degree", "degree of Ulysses")
    words = ["plot", "memory", "model=tiny", "hardware=h100x8", "tp=2", "--axis"]
    several(changed_bench, *([*words, name, "-o", f"{name}.svg"] for name in NAMES))
    for name, title in zip(NAMES, titles, strict=True):
        texts = re.findall(r"<text[^>]*>([^<]*)", (changed_bench.folder / f"{name}.svg").read_text())
        assert {f"{title} ({name})", "1", "2", "4"} <= {*texts}
    # Each is as far from its neutral value as a doubled degree; a multiplied one doubles the number of ranks.
    process = subprocess.run([sys.executable, "-c", DISTANCES], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == ["shards True 4", "etp True 4", "up True 8"]


def run_ids(bench, plan):
    import pyarrow.parquet as pq

    return pq.read_table(bench.folder / plan, columns=["run_id"])["run_id"].to_pylist()
