"""Provides a real Slurm of simulated nodes for the session, and checks that every test leaves it clean."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import patience
from tests.slurm.sweeps import SlurmBench
from ultrabench.processes import TAG_VARIABLE

TOOL = Path(__file__).parents[2] / "tools/slurm_cluster.py"
SETTINGS = ("--nodes", "8", "--gpus", "8", "--max-array-size", "101")


@dataclass
class Cluster:
    """A cluster in a folder, with its Slurm commands and daemons."""

    folder: Path

    def tool(self, verb: str, *words: str, code: int = 0) -> str:
        """The output of slurm_cluster.py for this cluster; skips the test if that cannot work here."""
        command = [sys.executable, str(TOOL), verb, f"--dir={self.folder}", *words]
        process = patience.run(command)
        if verb == "up" and process.returncode == 2 != code:
            pytest.skip(process.stderr.strip().splitlines()[-1])
        assert process.returncode == code, f"{process.returncode}\n{process.stdout}\n{process.stderr}"
        return process.stdout + process.stderr * (code != 0)

    def run(self, *words: str, code: int | None = 0, timeout: float = 60) -> str:
        """The output of a Slurm command."""
        # SLURM_CONF in our environment may be that of another cluster.
        command = ["env", f"SLURM_CONF={self.folder}/slurm.conf", *words]
        process = patience.run(command, timeout, cwd=self.folder)
        if code is not None:
            assert process.returncode == code, f"{process.returncode}\n{process.stdout}\n{process.stderr}"
        return process.stdout

    def nodes(self) -> dict[str, str]:
        """The state of each node: idle, mixed, completing, down, ..."""
        lines = self.run("sinfo", "-h", "-N", "-p", "hopper", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)  # type: ignore[misc]

    def jobs(self) -> list[str]:
        """The ids of the jobs that are not over; each element of an array has its own."""
        return self.run("squeue", "-h", "--array", "-o", "%i").split()

    def clean(self) -> bool:
        """Whether every node is idle and no job is left."""
        return set(self.nodes().values()) == {"idle"} and not self.jobs()

    def wait_for(self, test: Callable[[], object], seconds: float = 30.0) -> None:
        # Most of what is asked starts commands of Slurm.
        patience.wait_until(test, seconds, lambda: f"nodes {self.nodes()}, jobs {self.jobs()}", rest_s=0.25)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A cluster of 8 nodes of 8 GPUs with accounting; Slurm's commands find it through SLURM_CONF."""
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="ultrabench-slurm-")))
    with pytest.MonkeyPatch.context() as patch:
        try:
            cluster.tool("up", *SETTINGS)
            patch.setenv("SLURM_CONF", str(cluster.folder / "slurm.conf"))
            yield cluster
        finally:
            cluster.tool("down")


@pytest.fixture(autouse=True)
def cleanliness(slurm: Cluster) -> Iterator[None]:
    """Fails a test after which nodes are not idle or jobs are left; the next test gets a clean cluster."""
    yield
    try:
        slurm.wait_for(slurm.clean)
    except AssertionError:
        jobs = slurm.jobs()
        if jobs:
            slurm.run("scancel", *jobs, code=None)
        slurm.tool("up", *SETTINGS)
        raise


@pytest.fixture
def sweeps(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmBench]:
    """A folder for sweeps on the session's cluster; fails if a process of theirs is left."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("STEP_S", "0.002")
    monkeypatch.delenv(TAG_VARIABLE, raising=False)
    bench = SlurmBench(tmp_path)
    yield bench
    bench.close()
    slurm.wait_for(lambda: not bench.leftovers())
