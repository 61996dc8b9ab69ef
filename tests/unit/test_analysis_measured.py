from dataclasses import replace

import pyarrow as pa
import pytest

from tests.unit.analysis_sweeps import LAYOUTS, OK, TINY, candidate, claim, make_sweep, rows_of, spec_of
from ultrabench.analysis.measured import measured_runs
from ultrabench.analysis.schema import SCHEMA
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import Layout
from ultrabench.store.journal import JournalWriter


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
