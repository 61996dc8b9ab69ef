"""A sweep that its budget ends says how to go on, and goes on like that."""

import shlex

import pytest

pytestmark = pytest.mark.local


def test_the_printed_command_goes_on_to_the_end(bench):
    axes = ("sweep.nodes=1", "sweep.gbs=16", "sweep.zero_stage=0", "sweep.mbs=[1,2,4]", "sweep.gas=null",
            "launcher.pack=1")  # fmt: skip
    words = ["sweep", "launch", *bench.overrides("fine", *axes)]
    stopped = bench.start(*words, "--max-gpu-hours", "0.001")
    said, _ = stopped.communicate(timeout=120)
    assert stopped.returncode == 1, said
    assert "over the 0.001 that may be used" in said
    assert bench.executions() == [], "a job is submitted only where its predicted price is left"
    again = shlex.split(said.split("go on with: ")[1].splitlines()[0])
    assert again[:4] == ["ultrabench", "sweep", "resume", "t"]
    bench.run(*again[1:])
    assert [r["status"] for r in bench.rows()] == ["ok"] * 3
    assert len(bench.executions()) == 3
