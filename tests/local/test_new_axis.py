"""An axis that is added to the fields of Layout is planned, run, collected and drawn without any other change."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

import ultrabench

pytestmark = pytest.mark.local

LAST = '    virtual_stages: Count = axis("x", "Pipeline stages on each rank.", default=1, implied=(1,))\n'
NEW = (
    "    shards: Annotated[int, one_of(1, 2, 4)] = axis(\n"
    '        "shards", "Ranks that share the weights.", default=1, implied=(1,)\n    )\n'
)


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """A copy of the package with one more axis, which every process of the test imports."""
    package = tmp_path / "copy" / "ultrabench"
    shutil.copytree(Path(ultrabench.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / "layout.py").read_text()
    assert LAST in text
    (package / "layout.py").write_text(text.replace(LAST, LAST + NEW))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(package.parent), str(Path.cwd()))))


def test_one_more_field_is_one_more_axis(changed, bench):
    words = bench.launch("fine", "+sweep.shards=[1,2]", gbs=8, mbs=1)
    bench.apart_always = True
    plan = json.loads(bench.run("sweep", "plan", *words[2:], "--json"))
    assert (plan["candidates"], plan["runs"]) == (2, 2)
    bench.run(*words)
    rows = bench.rows()
    assert sorted((r["status"], r["shards"]) for r in rows) == [("ok", 1), ("ok", 2)]
    two = next(row["run_id"] for row in rows if row["shards"] == 2)
    (cell,) = json.loads(bench.run("heatmap", "t", "--json", "--include-suspects"))
    assert cell["shards"] in (1, 2)
    bench.run("heatmap", "t", "-o", "f.svg", "--rank-by", "shards", "--include-suspects")
    assert "shards2" in (bench.folder / "f.svg").read_text()
    assert re.search(r"^shards +2$", bench.run("sweep", "show", two, "--sweep", "t"), re.MULTILINE)
    bad = bench.end(bench.start("sweep", "plan", *words[2:], "+sweep.shards=[3]"), 2)
    assert "sweep.shards=[3]; each must be 1, 2 or 4" in bad
