import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.predict.test_calibrate import BASE, TRUTH, measured
from ultrabench.analysis.schema import SCHEMA
from ultrabench.record import values_of
from ultrabench.sweep.config.compose import files
from ultrabench.sweep.config.load import load_profile

H100 = Path(__file__).parents[3] / "benchmarks" / "h100"
"""Results of runs on one H100; no constant comes from those of unseen.parquet."""


def row_of(case):
    """The row of results of a case."""
    run, spec = case.run, case.run.spec
    records = values_of(spec.shape) | values_of(spec.layout) | values_of(spec.workload) | values_of(run)
    more = {
        "model": spec.shape.name,
        "nodes": spec.nodes,
        "gpus_per_node": spec.gpus_per_node,
        "kernel": "embedded",
    }
    known = records | more | {"precision": "bf16", "kernel_version": "3", "schema_version": 1}
    return {name: known.get(name) for name in SCHEMA.names}


@pytest.fixture
def runs(tmp_path):
    """A file of results of runs with known constants."""

    def write(constants, count=8):
        table = pa.Table.from_pylist([row_of(case) for case in measured(constants, count)], schema=SCHEMA)
        pq.write_table(table, tmp_path / "runs.parquet")
        return "runs.parquet"

    return write


def test_validate_prints_metrics_rows_and_a_figure(ultrabench, runs, tmp_path):
    code, out, err = ultrabench(
        "predict", "validate", runs(BASE.time), "--json", "--rows", "r.parquet", "-o", "f.svg"
    )
    found = json.loads(out)
    assert code == 0
    assert found["healthy"]["rows"] == found["all"]["rows"] == 8
    assert found["all"]["step_time"]["median_error"] < 0.03
    assert "8 runs; left out: none" in err
    rows = pq.read_table(tmp_path / "r.parquet")
    assert {"predicted_step_time_s", "predicted_low_s", "predicted_high_s", "p_oom", "regime"} <= set(
        rows.column_names
    )
    assert (tmp_path / "f.svg").read_text().startswith("<?xml")
    code, out, _ = ultrabench("predict", "validate", "runs.parquet")
    assert code == 0
    assert "step time of healthy rows, profile ultrabench: 8 runs (0 excluded)" in out
    assert out.count("memory and OOM of all rows") == 1
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", ["runs", "unseen"])
def test_our_kernel_is_predicted_as_it_ran_on_a_gpu(ultrabench, name):
    _, out, _ = ultrabench("predict", "validate", str(H100 / f"{name}.parquet"), "--json")
    found = json.loads(out)["all"]
    assert found["step_time"]["median_error"] < 0.05
    assert found["memory"]["median_error"] < 0.01
    assert found["memory"]["p90_error"] < 0.03
    assert found["oom"]["accuracy"] == 1


@pytest.mark.parametrize("profile", sorted(files("profiles")))
def test_every_profile_predicts_a_layout(ultrabench, profile):
    code, out, _ = ultrabench(
        "predict", "model=1B", "hardware=h100x8", "tp=2", f"profile={profile}", "--json"
    )
    assert code == 0
    assert 0 < json.loads(out)["peak_mem_bytes"] < 80 * 2**30


def test_calibrate_writes_a_profile_that_validate_uses(ultrabench, runs):
    code, out, _ = ultrabench("predict", "calibrate", runs(TRUTH), "--json")
    found = json.loads(out)
    assert (code, found["runs"], found["prior"]) == (0, 8, "ultrabench")
    assert found["fitted"] == {"step_time": 8, "memory": 0}
    assert found["after"]["median_error"] < found["before"]["median_error"]
    assert load_profile("mine").prior == "ultrabench"
    _, out, err = ultrabench("predict", "validate", "runs.parquet", "profile=mine", "--json")
    assert json.loads(out)["profile"]["source"] in err
    assert "are those of the fit" in err
    assert json.loads(out)["all"]["step_time"]["median_error"] < found["before"]["median_error"] / 2


@pytest.mark.parametrize("command", ["calibrate", "validate", "replay"])
def test_rows_without_a_time_above_0_are_counted(ultrabench, runs, tmp_path, command):
    path = tmp_path / runs(BASE.time, 3)
    table = pq.read_table(path)
    at = table.schema.get_field_index("step_time_s")
    times = pa.array([-1.0, 0.0, -2.0], pa.float64())
    pq.write_table(table.set_column(at, table.schema.field(at), times), path)
    code, _, err = ultrabench("predict", command, "runs.parquet")
    assert code == 2
    assert "0 runs; left out: 3 with a step time that is not above 0 s" in err


@pytest.mark.parametrize(("words", "line"), [
    ("validate runs.parquet --leave-out kernel", "unknown group for --leave-out 'kernel'"),
    ("validate runs.parquet --profile nanotrn", "unknown profile 'nanotrn'; did you mean nanotron?"),
    ("validate runs.parquet --rows r.csv", "name a file that ends in .parquet"),
    ("validate runs.parquet -o f.gif", "f.gif; figures are written as .png, .svg or .pdf"),
    ("calibrate runs.parquet -o mine.yml", "mine.yml is no name of a profile; end it in .yaml"),
    ("calibrate runs.parquet", "3 healthy runs with a step time; a fit needs at least 5"),
])  # fmt: skip
def test_a_mistake_is_one_line(ultrabench, runs, words, line):
    runs(BASE.time, 3)
    code, _, err = ultrabench("predict", *words.split())
    assert code == 2
    assert line in err.splitlines()[-1]
