"""The command `plot`: its kinds, and what it says of mistakes."""

import pytest

from tests.unit.cli.conftest import one_line
from ultrabench.analysis.figures.kinds import KINDS


def test_list_shows_every_kind_in_a_line(ultrabench):
    code, out, _ = ultrabench("plot", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(KINDS)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["com"], "unknown figure 'com'; did you mean comm?"),
        (["comm", "a", "b"], "a b: name one sweep or file"),
        (["comm", "nodez=4"], "unknown column 'nodez'; did you mean nodes"),
        (["comm", "nodes=3"], "unknown value of nodes in these rows '3'"),
        (["schedule", "x.parquet"], "cannot read x.parquet"),
        (["schedule", "quick-cpu"], "the figure schedule shows a layout, no results"),
        (["schedule", "tp=2"], "unknown word of the figure schedule 'tp'"),
        (["schedule", "pp=4", "gas=2", "pp_schedule=interleaved"], "cannot run: gas=2 is less than pp-1=3"),
        (["schedule", "pp=4", "gas=3", "pp_schedule=1f1b"], "1f1b needs gas >= pp; gas=3, pp=4"),
        (["schedule", "pp=4", "gas=9", "pp_schedule=interleaved"], "a multiple of its 2 rounds; gas=9"),
        (["schedule", "virtual_stages=2"], "virtual_stages=2 with pp_schedule=1f1b; must be 1"),
        (["schedule", "pp=100", "gas=101"], "pp=100, gas=101 has 20,200 passes; a figure holds 20,000"),
        (["memory", "tpp=3"], "unknown argument 'tpp'; did you mean tp"),
        (["memory", "--axis", "ppp"], "unknown axis of the figure memory 'ppp'; did you mean pp"),
        (["comm", "--axis", "tp"], "--axis tp: the figure comm has no choice of axis"),
    ],
)
def test_a_mistake_is_one_line(ultrabench, sweep, words, told):
    assert told in one_line(ultrabench, "plot", *words)


def test_a_layout_is_drawn_without_results(ultrabench, tmp_path):
    code, _, said = ultrabench("plot", "schedule", "pp=2", "gas=3")
    assert (code, said) == (0, "drew schedule.png\n")
    assert (tmp_path / "schedule.png").stat().st_size > 10_000
