"""The links of one and two simulated nodes, measured by a sweep and drawn."""

import json

import pyarrow.parquet as pq
import pytest

from tests.local.conftest import PEAK
from ultrabench.device_rates import LONG_SIZES_BYTES, OPERATIONS

pytestmark = pytest.mark.local


def test_a_sweep_measures_the_links_and_plot_draws_them(bench):
    words = [
        "sweep=comm", "name=t", "measure.max_steps=6", "measure.min_steps=6", "measure.warmup_steps=2", PEAK,
    ]  # fmt: skip
    bench.run("sweep", "launch", *words, "measure.loss_step=3")
    assert bench.status()["by_status"] == {"ok": 2}
    bench.run("collect", "t")
    rows = pq.read_table(bench.folder / "results/t/runs.parquet").to_pylist()
    assert [(r["nodes"], r["status"], r["kernel"], r["model"]) for r in rows] == [
        (1, "ok", "probe", None), (2, "ok", "probe", None)
    ]  # fmt: skip
    sizes = LONG_SIZES_BYTES["cpu"]
    for row in rows:
        across = [b for b in row["bandwidths"] if b["scope"] == "all"]
        assert [(b["operation"], b["bytes"]) for b in across] == [(o, s) for o in OPERATIONS for s in sizes]
        assert len(row["bandwidths"]) == 2 * len(across)
        assert row["memory_copy_bytes_per_s"] > 1e8
        largest = {b["operation"]: b["busbw_bytes_per_s"] for b in across if b["bytes"] == sizes[-1]}
        assert {o: row[f"{o}_busbw_bytes_per_s"] for o in OPERATIONS} == largest
    assert "drew " in bench.done("plot", "comm", "t").stderr
    assert (bench.folder / "results/t/comm.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(bench.run("heatmap", "t", "--json")) == []
