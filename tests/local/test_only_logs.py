"""A program that only logs, on two nodes, and tells its steps on its last rank: as Megatron-LM does."""

import pytest

from tests.local.conftest import PEAK

pytestmark = pytest.mark.local

PROGRAM = """
import os
if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    for step in range(1, 9):
        time = "elapsed time per iteration (ms): 250.0"
        print(f" iteration {step:8d}/{8:8d} | {time} | lm loss: {10 / step:.6E} | grad norm: 1.4 |", flush=True)
"""


def test_steps_are_read_from_the_last_ranks_log(bench):
    (bench.folder / "program.py").write_text(PROGRAM)
    bench.run(
        "sweep", "launch", "kernel=megatron", "kernel.command=[python,program.py]", "model=tiny", "name=t",
        "sweep.nodes=2", "sweep.tp=1", "sweep.pp=1", "sweep.zero_stage=1", "sweep.mbs=1", "sweep.gas=2",
        "sweep.gbs=8", "measure.warmup_steps=2", "measure.max_steps=6", "launcher.preflight=false", PEAK,
    )  # fmt: skip
    (row,) = bench.rows()
    assert row["status"] == "ok"
    assert row["measured_by"] == "log"
    assert row["step_times_s"] == [0.25] * 6
    assert row["loss_final"] == pytest.approx(10 / 5)
