"""Two models of one name are kept apart wherever runs are ranked, compared or launched."""

from dataclasses import replace

import pyarrow as pa
import pytest

from tests.configs import refused
from tests.sweep_folder import write
from tests.unit.analysis.sweeps import OK, SPECS, TINY, attempted, make_sweep, swept
from tests.unit.analysis.tables import row, table_of
from ultrabench.analysis.figures.runs import final_rows
from ultrabench.analysis.page.rows import document
from ultrabench.analysis.results.cells import compared_with
from ultrabench.analysis.results.collect import collect, conform_to_schema
from ultrabench.analysis.results.ranking import leaderboard, rank
from ultrabench.analysis.studies.compare.compare import compare
from ultrabench.cli.sweep.top import cell_text
from ultrabench.store.journal import read_journal
from ultrabench.store.state import fold
from ultrabench.sweep.running.other_shapes import other_shapes

SPEC = SPECS[0]
HALF = replace(TINY, partial_rotary_factor=0.5)
SIGMOID = replace(TINY, rope_theta=5e5)
MARKS = {shape: f"tiny ({shape.model_id[:4]})" for shape in (TINY, HALF, SIGMOID)}


def sweep_of(path, *shapes):
    """A sweep that planned tiny and made the same layout with each of these shapes."""
    specs = [replace(SPEC, shape=shape) for shape in shapes]
    folder = make_sweep(path, specs[-1:], models=shapes[-1:])
    write(folder, *(event for spec in specs for event in attempted(spec, OK)))
    return folder


def table(path, *shapes):
    return collect([sweep_of(path, *shapes)], pytest.fail)


def without_ids(results):
    """A table as it was before results had these columns."""
    return conform_to_schema(results.drop_columns(["model_id", "model_settings"]), "old.parquet")


def test_a_changed_model_is_another_cell_with_another_name(tmp_path):
    results = table(tmp_path / "s", TINY, HALF, SIGMOID)
    names = {*MARKS.values()}
    assert {cell.title for cell in rank(results)} == names
    assert {cell_text(board[0]) for board in leaderboard(results)} == {f"{name} on 1 node" for name in names}
    assert {cell["model"] for cell in document(results, public=True)["cells"]} == names
    assert {*final_rows(results)["panel"]} == names
    settings = dict(zip(results["model_id"].to_pylist(), results["model_settings"].to_pylist(), strict=True))
    assert settings == {TINY.model_id: None, HALF.model_id: None, SIGMOID.model_id: '{"rope_theta":500000.0}'}


def test_a_name_is_no_part_of_a_model_and_older_tables_know_names_alone(tmp_path):
    assert TINY.model_id == replace(TINY, name="other").model_id
    assert [cell.title for cell in rank(without_ids(table(tmp_path / "t", TINY, SIGMOID)))] == ["tiny"]


def test_compare_names_what_differs_in_a_model(tmp_path):
    ours, half, sigmoid = (table(tmp_path / s.model_id, s) for s in (TINY, HALF, SIGMOID))
    differs = "and B (1); model tiny differs: partial_rotary_factor is 1 in A and 0.5 in B: compare"
    with refused(differs):
        compare(ours, half, 0.05)
    with refused("model tiny differs: rope_theta is 500000 in A and 10000 in B"):
        compare(sigmoid, ours, 0.05)
    two_models = pa.concat_tables([ours, half])
    comparison = compare(two_models, pa.concat_tables([half, sigmoid]), 0.05)
    assert [*comparison.rows["model"]] == [MARKS[HALF]]
    assert "Not compared: model tiny differs: rope_theta is 10000 in A and 500000 in B." in comparison.notes
    assert len(compare(without_ids(ours), sigmoid, 0.05).rows) == 1


def test_ratios_of_a_heatmap_are_of_the_same_model():
    def cells(model_id, rate):
        return rank(table_of(row("a", rate, model_id=model_id)))

    for theirs, ratio in (("a" * 16, 2.0), ("b" * 16, None), (None, 2.0)):
        (cell,) = compared_with(cells("a" * 16, 200.0), cells(theirs, 100.0))
        assert cell.compare_ratio == ratio


def test_a_launch_tells_that_earlier_runs_had_another_shape(tmp_path):
    folder = swept(tmp_path, OK, OK)
    state = fold(read_journal(folder.journal))
    assert [*other_shapes([TINY, replace(HALF, name="other")], state)] == []
    (line,) = other_shapes([replace(HALF, rope_theta=5e5)], state)
    fact = "model tiny has a different shape than in 2 runs of earlier launches"
    assert line.startswith(f"{fact} (rope_theta: 10000 -> 500000, partial_rotary_factor: 1 -> 0.5): ")
