"""Two hosts that share a results folder, each with its own processes: here, two UTS namespaces."""

import subprocess

import pytest

from tests import patience

pytestmark = pytest.mark.local


def test_a_launcher_on_another_host_waits_for_what_it_cannot_see(bench, monkeypatch):
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("no UTS namespace can be made here: another host needs root")
    monkeypatch.setenv("STEP_S", "0.8")
    words = ["sweep", "launch", *bench.overrides("fine", "sweep.nodes=[1]", "sweep.gbs=2", "sweep.mbs=[1]", "sweep.zero_stage=[0]", "sweep.gas=[1]")]  # fmt: skip
    here = bench.start(*words)
    bench.wait_for(bench.executions)
    other = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh", *bench.command(*words)]
    done = patience.run(other, cwd=bench.folder)
    output, _ = here.communicate(timeout=60)
    assert (done.returncode, here.returncode) == (0, 0), done.stderr + output
    assert "it is watched, and neither ended nor replaced" in done.stderr
    assert "vanished" not in done.stderr + output
    (row,) = bench.rows()
    assert (row["status"], len(bench.executions())) == ("ok", 1)
