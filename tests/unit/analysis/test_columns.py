"""A column has one home, from which all that shows, ranks, draws or exports it derives."""

import json
import subprocess
import sys

import pytest

from tests.unit.analysis.tables import row, table_of
from ultrabench.analysis.results.columns import RESULT_TABLE
from ultrabench.analysis.results.ranking import rank
from ultrabench.column import NUMBER, NUMERIC_TYPES, Better, ColumnType, Source
from ultrabench.errors import ConfigError
from ultrabench.layout import AXES


def test_a_measured_number_that_two_places_declare_appears_everywhere(tmp_path):
    command = [sys.executable, "-m", "tests.unit.analysis.new_number", str(tmp_path)]
    shown = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert shown == {
        "result": 52.5, "row": [52.5], "schema": "double",
        "documentation": ["| `fan_power_w` | number | W | lower | Power of the fans of a node. |"],
        "terminal": "1.5 kW", "rank by": [["cool", "hot"]], "heatmap": [True, True, True], "pareto": True,
        "trackers": [90.0, 52.5],
        "page": [[52.5, 90.0], [["fan_power_w", "number", "W", "lower", "Power of the fans of a node."]],
            ["prefixed", "W"]],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["dp", "nodes", "mine"])
def test_runs_are_not_ranked_by_a_column_that_says_not_what_is_better(name):
    table = table_of(row("a"))
    table = table.append_column("mine", [[1.5]])
    fact = f"cannot rank by {name}: it is unknown whether higher or lower values are better"
    with pytest.raises(
        ConfigError, match=rf"^{fact}; choose another column \(known: tokens_per_s_per_gpu, mfu, .* more\)$"
    ):
        rank(table, rank_by=name)


def test_a_column_by_which_runs_rank_is_a_number_and_an_axis_is_none_of_them():
    directed = [column for column in RESULT_TABLE.values() if column.better != Better.NONE]
    assert {column.type for column in directed} == {*NUMERIC_TYPES}
    assert all(column.better != Better.NONE for column in RESULT_TABLE.values() if column.follows_step_time)
    assert {RESULT_TABLE[name].better for name in AXES} == {Better.NONE}
    assert {RESULT_TABLE[name].source for name in AXES} == {Source.RUN}


def test_the_unit_of_a_column_is_that_of_its_name():
    symbol_by_ending = {
        "_bytes": "B",
        "_s": "s",
        "_bytes_per_s": "B/s",
        "_flops_per_s": "FLOP/s",
        "_hz": "Hz",
    }
    for ending, symbol in symbol_by_ending.items():
        others = [longer for longer in symbol_by_ending if longer.endswith(ending) and longer != ending]
        names = [n for n in RESULT_TABLE if n.endswith(ending) and not n.endswith((*others, "tokens_per_s"))]
        assert {RESULT_TABLE[name].unit.symbol for name in names} == {symbol}, ending
    texts = {ColumnType.TEXT, ColumnType.TEXTS, ColumnType.BOOL, ColumnType.TIME}
    assert all(column.unit == NUMBER for column in RESULT_TABLE.values() if column.type in texts)
