"""The figures of examples/gallery/README.md: every kind is there, and each command draws its picture."""

import runpy
from pathlib import Path

import pytest

from tests.unit.cli.conftest import ultrabench  # noqa: F401
from ultrabench.analysis.figures.kinds import KINDS

ROOT = Path(__file__).parents[3]
COMMANDS = runpy.run_path(str(ROOT / "examples/gallery/draw.py"))["commands"]()


def test_every_kind_of_figure_is_in_the_gallery():
    assert {words[1] for words in COMMANDS if words[0] == "plot"} == {*KINDS}


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: Path(words[-1]).name)
def test_a_command_of_the_gallery_draws_its_picture(ultrabench, words, tmp_path, monkeypatch):  # noqa: F811
    drawn, kept = tmp_path / Path(words[-1]).name, ROOT / words[-1]
    monkeypatch.chdir(ROOT)
    code, _, err = ultrabench(*words[:-1], str(drawn))
    assert code == 0, err
    assert drawn.stat().st_size > 5000
    assert kept.exists() or kept.suffix == ".html", "draw it: make gallery"
