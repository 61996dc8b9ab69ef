"""The example of a program that is built on transformers' Trainer, read by its log alone."""

import json
import shutil
from pathlib import Path

import pytest

from tests.local.conftest import AT_ONCE, axes

pytestmark = pytest.mark.local
EXAMPLE = Path(__file__).parents[2] / "examples/trainer"


def test_the_log_of_a_trainer_alone_gives_a_heatmap(bench):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    shutil.copytree(EXAMPLE, bench.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("out"))
    sizes = axes(nodes=[1], tp=1, pp=1, zero_stage=0, gbs=4, mbs=2, gas=None, seq_len=32)
    measured = "measure.warmup_steps=1", "measure.max_steps=6", "measure.loss_step=3"
    bench.run("sweep", "launch", "kernel=trainer", "model=tiny", "name=t", *sizes, *measured, *AT_ONCE)
    rows = [row for row in bench.rows() if row["status"] == "ok"]
    row = rows[0]
    assert {row["run_id"] for row in rows} == {row["run_id"]}, "a suspect row may be measured again"
    assert (row["measured_by"], row["num_steps_measured"], row["dp"], row["gas"]) == ("arrival", 6, 2, 1)
    assert row["num_params"] == row["source_num_params"]
    assert row["mfu"] > 0
    assert row["loss_final"] == pytest.approx(6.24, abs=0.2)  # ln(512), of uniform predictions
    assert row["peak_mem_reserved_bytes"] > 2**26
    (cell,) = json.loads(bench.run("heatmap", "t", "--json", "--include-suspects"))
    assert cell["run_id"] == row["run_id"]
    assert [*(bench.folder / "out").rglob("*")] == [], "nothing was saved"
