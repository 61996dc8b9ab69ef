"""docs/gallery.md: its commands draw its pictures, and every kind of figure is on it."""

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import ultrabench as library
from tests.published import PLAYBOOK, needs
from tests.unit.cli.conftest import ultrabench  # noqa: F401
from ultrabench.analysis.collect import parquet
from ultrabench.analysis.figures.kinds import KINDS
from ultrabench.analysis.importing.import_table import import_csv
from ultrabench.analysis.importing.table_map import built_in, read_map
from ultrabench.errors import ConfigError

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


@pytest.fixture(scope="module")
def playbook(tmp_path_factory):
    path = tmp_path_factory.mktemp("playbook") / "playbook.parquet"
    path.write_bytes(parquet(import_csv(PLAYBOOK, read_map(built_in("nanotron"))).table))
    return library.read(path)


@needs(PLAYBOOK)
@pytest.mark.parametrize("kind", ["heatmap", *(name for name, told in KINDS.items() if not told.of_layout)])
def test_every_kind_draws_the_rows_of_the_playbook_or_says_why_not(playbook, kind, tmp_path):
    if kind in ("comm", "predicted"):  # imported rows have neither bandwidths of all sizes nor predictions
        with pytest.raises(ConfigError, match="ultrabench"):
            library.plot(kind, playbook)
        return
    library.plot(kind, playbook).savefig(tmp_path / "f.png", dpi=50)
    assert os.path.getsize(tmp_path / "f.png") > 5000
