"""docs/gallery.md: its commands draw its pictures, and every kind of figure is on it."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.unit.cli.conftest import ultrabench  # noqa: F401
from ultrabench.analysis.figures.kinds import KINDS

ROOT = Path(__file__).parents[3]


def commands():
    spec = spec_from_file_location("draw", ROOT / "examples/gallery/draw.py")
    draw = module_from_spec(spec)
    spec.loader.exec_module(draw)
    return draw.commands()


def test_every_kind_of_figure_is_in_the_gallery():
    assert {words[1] for words in commands() if words[0] == "plot"} == {*KINDS}


@pytest.mark.parametrize("words", commands(), ids=lambda words: Path(words[-1]).name)
def test_a_command_of_the_gallery_draws_its_picture(ultrabench, words, tmp_path, monkeypatch):  # noqa: F811
    drawn, kept = tmp_path / Path(words[-1]).name, ROOT / words[-1]
    monkeypatch.chdir(ROOT)
    code, _, err = ultrabench(*words[:-1], str(drawn))
    assert code == 0, err
    assert drawn.stat().st_size > 5000
    assert kept.exists() or kept.suffix == ".html", "draw it: make gallery"
