from pathlib import Path

import pyarrow as pa

from ultrabench.analysis.schema import COLUMNS, SCHEMA, VERSION_KEY, markdown

PAGE = Path(__file__).parents[2] / "docs" / "results-schema.md"


def test_page_is_what_the_table_prints():
    assert PAGE.read_text() == markdown()


def test_every_column_is_named_once_typed_and_described():
    names = [column.name for column in COLUMNS]
    assert len(set(names)) == len(names)
    assert SCHEMA.names == names
    for field in SCHEMA:
        assert field.metadata[b"description"]
    assert SCHEMA.metadata[VERSION_KEY] == b"1"


def test_types_hold_what_units_promise():
    for column in COLUMNS:
        if column.name.endswith("_bytes"):
            assert column.type == pa.int64(), column.name
        elif column.name.endswith(("_s", "_per_s", "_rel", "mfu", "hfu")) and column.name != "step_times_s":
            assert column.type == pa.float64(), column.name
    assert SCHEMA.field("step_times_s").type == pa.list_(pa.float64())
    assert SCHEMA.field("hostnames").type == pa.list_(pa.string())
