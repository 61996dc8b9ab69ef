from pathlib import Path

import pyarrow as pa

from ultrabench.analysis.schema import SCHEMA, VERSION_KEY, markdown

PAGE = Path(__file__).parents[2] / "docs" / "results-schema.md"


def test_page_is_what_the_table_prints():
    assert PAGE.read_text() == markdown()


def test_every_column_is_named_once_described_and_typed_as_its_unit():
    assert len(set(SCHEMA.names)) == len(SCHEMA)
    assert SCHEMA.metadata[VERSION_KEY] == b"1"
    for field in SCHEMA:
        assert field.metadata[b"description"]
        if field.name.endswith("_bytes"):
            assert field.type == pa.int64(), field.name
        elif field.name.endswith(("_s", "_per_s", "_rel", "mfu", "hfu")):
            assert field.type == (pa.list_(pa.float64()) if field.name == "step_times_s" else pa.float64()), (
                field.name
            )
