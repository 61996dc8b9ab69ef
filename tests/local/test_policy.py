"""A sweep whose runs all fail in the same way is stopped, and says why."""

import pytest

pytestmark = pytest.mark.local


def test_the_breaker_stops_a_sweep_and_a_new_launch_goes_on(bench):
    axes = ("sweep.nodes=1", "sweep.gbs=32", "sweep.zero_stage=[0,1]", "sweep.mbs=[1,2,4]", "sweep.gas=[4,8,16]",
            "launcher.pack=1")  # fmt: skip
    words = ["sweep", "launch", *bench.overrides("raise", *axes), "retry.breaker=3"]
    for executed in (3, 6):
        done = bench.done(*words)
        assert done.returncode == 1
        assert "the last 3 runs all ended as crash in the same way" in done.stderr
        assert "planted error" in done.stderr
        assert len(bench.executions()) == executed
    assert bench.status()["by_status"] == {"crash": 6}
