"""Result tables: their columns, files that hold them, and the runs that their rows measured."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.configs import refused
from tests.sweep_folder import write
from tests.unit.analysis.sweeps import OK, SPECS, TINY, attempted, rows_of, spec_of, swept
from tests.unit.analysis.tables import row, table_of
from ultrabench.analysis.results.collect import collect, parquet, read_parquet
from ultrabench.analysis.results.measured import measured_runs
from ultrabench.analysis.results.schema import SCHEMA, VERSION_KEY, markdown
from ultrabench.device_rates import NODE_RATES
from ultrabench.errors import SweepFolderError
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "columns.md"


def test_parquet_and_back_and_through_pandas(tmp_path):
    table = collect([swept(tmp_path, None, OK)], pytest.fail)
    (path := tmp_path / "runs.parquet").write_bytes(parquet(table))
    assert read_parquet(path).equals(table)
    assert read_parquet(path).schema.equals(SCHEMA, check_metadata=True)
    assert parquet(table) == path.read_bytes()
    table.to_pandas().drop(columns=["confirmed"]).assign(mine=1.5).to_parquet(path)
    reread = read_parquet(path)
    assert reread.select(SCHEMA.names).equals(table)
    assert reread["mine"].to_pylist() == [1.5] * len(table)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (table_of({"schema_version": 2}).replace_schema_metadata({VERSION_KEY: b"2"}), "schema version 2"),
        (pa.table({"x": [1]}), "is not a result table"),
        (pa.table({"schema_version": ["new"]}), "is not a result table"),
        (pa.table({"schema_version": [1]}), "is not a result table"),
        (pa.table({"schema_version": [1], "run_id": ["a"], "mfu": ["much"]}), "lacks the column model"),
        (table_of().drop_columns(["status"]), "lacks the column status"),
        (table_of().drop_columns(["mfu"]).append_column("mfu", pa.array([], pa.date32())), "column mfu"),
        (b"no parquet", "cannot read"),
        (None, "no such file"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "x.parquet"
    if content is not None:
        path.write_bytes(content) if isinstance(content, bytes) else pq.write_table(content, path)
    with refused(message, SweepFolderError):
        read_parquet(path)


def test_page_is_what_the_table_prints():
    assert PAGE.read_text() == markdown()


def test_every_column_is_described_and_typed_as_its_unit():
    reals = ("_s", "_per_s", "_rel", "mfu", "hfu")
    assert all(column.metadata[b"description"] for column in SCHEMA)
    assert {column.type for column in SCHEMA if column.name.endswith("_bytes")} == {pa.int64()}
    others = [column for column in SCHEMA if column.name.endswith(reals) and column.type != pa.float64()]
    assert {column.type for column in others} == {pa.list_(pa.float64())}
    assert {column.name for column in others} == {"step_times_s", *NODE_RATES}


def test_an_attempt_becomes_the_run_that_it_measured(tmp_path):
    pipeline = {"pp_schedule": "interleaved", "virtual_stages": 2, "recompute": "every2"}
    kernel = KernelConfig(name="embedded", precision="bf16", compile=True)
    spec = spec_of(Layout(dp=2, tp=2, pp=2, gas=8, **pipeline), kernel)
    folder = swept(tmp_path, specs=SPECS[:1])
    write(folder, *attempted(spec, replace(OK, peak_mem_reserved_rank0_bytes=7, attention="flash")))
    ((run,), left_out) = measured_runs(table_of(*rows_of(folder)))
    assert (run.spec, left_out) == (replace(spec, kernel=replace(kernel, attention="flash")), {})
    assert (run.status, run.is_final, run.kernel_version) == ("ok", True, str(kernel.version))
    assert (run.step_time_s, run.peak_mem_reserved_rank0_bytes, run.hardware) == (0.2, 7, "h100x8")
    assert run.allreduce_busbw_bytes_per_s is run.suspect is run.source is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"intermediate_size": None}, "missing intermediate_size of model=8B"),
     ({"zero_stage": 4}, "zero_stage=4; must be 0 to 3"),
     ({"dp": 16}, "has 16 ranks; 1 node of 8 have 8")],
)  # fmt: skip
def test_rows_that_name_no_run_are_named_by_reason(change, reason):
    runs, left_out = measured_runs(table_of(row("a"), row("b", **change)))
    assert [run.run_id for run in runs] == ["a"]
    ((text, names),) = left_out.items()
    assert reason in text
    assert names == ["run b of 8B on 1 node"]


def test_models_of_any_shape_come_back_from_a_table():
    wide = {"head_dim": 32, "qk_norm": True, "sliding_window": 64, "num_key_value_heads": 2}
    other = {"kernel": "nanotron", "kernel_version": "before_pp_fix", "model": "tiny"}
    ((run,), _) = measured_runs(table_of(row("a", status="oom", **wide, **other)))
    assert run.spec.shape == replace(TINY, **wide)
    assert (run.spec.kernel.name, run.spec.kernel.kind, run.spec.kernel.version) == ("nanotron", "command", 1)
    assert run.kernel_version == "before_pp_fix"
