"""Result tables: their columns, files that hold them, and the runs that their rows measured."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.configs import refused
from tests.unit.analysis.sweeps import (
    LAYOUTS,
    OK,
    SPECS,
    TINY,
    candidate,
    claim,
    make_sweep,
    rows_of,
    spec_of,
    swept,
)
from ultrabench.analysis.collect import collect, parquet, read_parquet
from ultrabench.analysis.measured import measured_runs
from ultrabench.analysis.schema import SCHEMA, VERSION_KEY, markdown
from ultrabench.errors import SweepFolderError
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import JournalWriter


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
        (pa.table({"schema_version": [1], "run_id": ["a"], "mfu": ["much"]}), "lacks the column model"),
        (pa.Table.from_pylist([], SCHEMA).drop_columns(["status"]), "lacks the column status"),
        (pa.Table.from_pylist([], SCHEMA).drop_columns(["mfu"]).append_column("mfu", pa.array([], pa.date32())),
         "column mfu"),
        (b"no parquet", "cannot read"),
        (None, "there is no such file"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path, held, word):
    path = tmp_path / "x.parquet"
    if held is not None:
        path.write_bytes(held) if isinstance(held, bytes) else pq.write_table(held, path)
    with refused(word, SweepFolderError):
        read_parquet(path)


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


PAGE = Path(__file__).parents[3] / "docs" / "results-schema.md"


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


def table(rows):
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def test_attempts_become_the_runs_they_measured(tmp_path):
    pipeline = Layout(
        dp=2, tp=2, pp=2, gas=8, pp_schedule="interleaved", virtual_stages=2, recompute="every2"
    )
    specs = [
        spec_of(LAYOUTS[5]),
        spec_of(pipeline, KernelConfig(name="embedded", precision="bf16", compile=True)),
    ]
    folder = make_sweep(tmp_path / "s", [candidate(spec_of(LAYOUTS[0]))])
    writer = JournalWriter(folder.journal, "agent")
    for spec in specs:
        claim(writer, spec, result=replace(OK, peak_mem_reserved_rank0_bytes=7, attention="flash"))
    runs, left_out = measured_runs(table(rows_of(folder)))
    by_id = {run.run_id: run for run in runs}
    assert (len(runs), left_out) == (2, {})
    for spec in specs:
        found = by_id[spec.run_id]
        kernel = replace(spec.kernel, attention="flash")
        assert found.spec == replace(spec, kernel=kernel)
        assert (found.status, found.is_final) == ("ok", True)
        assert (found.step_time_s, found.peak_mem_reserved_rank0_bytes, found.hardware) == (0.2, 7, "h100x8")
        assert found.allreduce_busbw_bytes_per_s is found.suspect is found.source is None
        assert found.kernel_version == str(spec.kernel.version)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"intermediate_size": None}, "row.shape lacks intermediate_size"),
     ({"zero_stage": 4}, "zero_stage=4; must be 0, 1, 2 or 3"),
     ({"nodes": 2}, "has 8 ranks; 2 nodes of 8 have 16")],
)  # fmt: skip
def test_rows_that_name_no_run_are_counted_by_reason(tmp_path, change, reason):
    folder = make_sweep(tmp_path / "s", [candidate(spec_of(LAYOUTS[0]))])
    claim(JournalWriter(folder.journal, "agent"), spec_of(LAYOUTS[0]), result=OK)
    (row,) = rows_of(folder)
    runs, left_out = measured_runs(table([row, row | change]))
    assert len(runs) == 1
    ((told, number),) = left_out.items()
    assert reason in told
    assert number == 1


def test_models_of_any_shape_come_back_from_a_table(tmp_path):
    (row,) = rows_of(make_sweep(tmp_path / "s", [candidate(spec_of(LAYOUTS[0]))]))
    wide = {"head_dim": 32, "qk_norm": True, "sliding_window": 64, "num_key_value_heads": 2}
    other = {"kernel": "nanotron", "kernel_version": "before_pp_fix", "status": "oom", "precision": "bf16"}
    ((run,), _) = measured_runs(table([row | wide | other]))
    assert run.spec.shape == replace(TINY, **wide)
    assert (run.spec.kernel.name, run.spec.kernel.kind, run.spec.kernel.version) == ("nanotron", "command", 1)
    assert run.kernel_version == "before_pp_fix"
