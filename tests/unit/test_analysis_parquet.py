import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.analysis_sweeps import OK, SPECS, candidate, make_sweep, rows_of, swept
from ultrabench.analysis.collect import collect, parquet, read_parquet
from ultrabench.analysis.schema import SCHEMA, VERSION_KEY
from ultrabench.errors import SweepFolderError
from ultrabench.store.folder import SweepFolder


def test_several_sweeps_follow_each_other(tmp_path):
    one = make_sweep(tmp_path / "one", [candidate(spec) for spec in SPECS])
    two = make_sweep(tmp_path / "two", [candidate(SPECS[0])])
    rows = rows_of(two, one)
    assert [row["sweep"] for row in rows] == ["two"] + ["one"] * len(SPECS)
    assert [row["run_id"] for row in rows[1:]] == [spec.run_id for spec in SPECS]


def test_parquet_and_back(tmp_path):
    folder, _ = swept(tmp_path, None, OK)
    table = collect([folder], pytest.fail)
    (path := tmp_path / "runs.parquet").write_bytes(parquet(table))
    assert read_parquet(path).equals(table)
    assert read_parquet(path).schema.equals(SCHEMA, check_metadata=True)
    assert parquet(table) == path.read_bytes()


def test_a_file_that_went_through_pandas_is_still_ours(tmp_path):
    folder = make_sweep(tmp_path / "s", [candidate(spec) for spec in SPECS])
    table = collect([folder], pytest.fail)
    frame = table.to_pandas().drop(columns=["hfu"])
    frame["mine"] = 1.5
    frame.to_parquet(tmp_path / "p.parquet")
    again = read_parquet(tmp_path / "p.parquet")
    assert again.select(SCHEMA.names).equals(table)
    assert again["mine"].to_pylist() == [1.5] * len(SPECS)


@pytest.mark.parametrize(
    ("held", "word"),
    [
        (pa.Table.from_pylist([{"schema_version": 2}], schema=SCHEMA).replace_schema_metadata({VERSION_KEY: b"2"}),
         "schema 2"),
        (pa.table({"x": [1]}), "no result table"),
        (pa.table({"schema_version": ["new"]}), "no result table"),
        (pa.table({"schema_version": [1]}), "no result table"),
        (pa.table({"schema_version": [1], "run_id": ["a"], "mfu": ["much"]}), "column mfu"),
        (b"no parquet", "cannot read"),
        (None, "there is no such file"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path, held, word):
    path = tmp_path / "x.parquet"
    if held is not None:
        path.write_bytes(held) if isinstance(held, bytes) else pq.write_table(held, path)
    with pytest.raises(SweepFolderError, match=word) as told:
        read_parquet(path)
    assert "\n" not in str(told.value)


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(SweepFolderError, match=r"no sweep\.json"):
        collect([SweepFolder(tmp_path)], pytest.fail)
    folder = make_sweep(tmp_path / "s", [candidate(SPECS[0])])
    folder.plan.write_text("no parquet")
    with pytest.raises(SweepFolderError, match="cannot read"):
        collect([folder], pytest.fail)
    folder.plan.unlink()
    told = []
    assert collect([folder], told.append).num_rows == 0
    assert len(told) == 1
    folder.sweep_json.write_text('{"schema_version": 2, "models": []}')
    with pytest.raises(SweepFolderError, match="hardware"):
        collect([folder], pytest.fail)
