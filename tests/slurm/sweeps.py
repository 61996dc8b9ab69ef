"""Runs real sweeps on the Slurm of simulated nodes, through the command line."""

from dataclasses import dataclass
from typing import Any

from tests import patience
from tests.local.conftest import Bench

MANY = ("sweep.nodes=[1,2,4]", "sweep.gbs=32", "sweep.zero_stage=[0,1,2,3]", "sweep.mbs=[1,2,4,8]",
        "sweep.gas=[1,2,4,8]", "launcher.allocation_minutes=0.2")  # fmt: skip
"""Options of a sweep of 40 runs on 1, 2 and 4 nodes."""
FEW = ("sweep.nodes=[1,2]", "sweep.gbs=8", "sweep.zero_stage=[0,1]", "sweep.mbs=[1,2,4]",
       "sweep.gas=[1,2,4]", "launcher.allocation_minutes=0.1")  # fmt: skip
"""Options of a sweep of 10 runs on 1 and 2 nodes."""
FEWER = (*FEW[1:], "sweep.nodes=1", "sweep.zero_stage=0")
"""Options of a sweep of 3 runs on 1 node, for what clusters do before a run begins."""


@dataclass
class SlurmBench(Bench):
    """A folder with sweeps on a Slurm; its folder `bin` comes first in PATH."""

    def overrides(self, behaviour: str, *options: str) -> list[str]:
        return super().overrides(
            behaviour, "launcher=slurm", "launcher.control=true", "launcher.mem=150M", "launcher.poll_s=1",
            "launcher.grace_s=4",
            "launcher.max_nodes=8", "measure.run_limit_s=60", "launcher.environment=[STEP_S]", *options,
        )  # fmt: skip

    def wait_for(self, test: Any, seconds: float = 60.0, rest_s: float = 0.25) -> None:
        """Asks less often than on one machine, since most of what is asked starts commands of Slurm."""
        super().wait_for(test, seconds, rest_s)

    def launch(self, behaviour: str, *options: str) -> list[str]:
        """The command line of a launch that asks no questions."""
        return ["sweep", "launch", *self.overrides(behaviour, *options), "--max-gpu-hours", "100"]

    def fake(self, program: str, script: str) -> None:
        """Replaces a program of Slurm by a script, which finds the real program as $REAL and the number
        of this call as $N.
        """
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        path = folder / program
        calls = f"{self.folder}/{program}.calls"
        path.write_text(
            f"#!/bin/bash\nREAL=/usr/bin/{program}\necho x >> {calls}; N=$(wc -l < {calls})\n{script}\n"
        )
        path.chmod(0o755)

    def job_ids(self) -> list[str]:
        """The jobs of the sweep that are queued or running."""
        return slurm_says("squeue", "-h", "-r", "-o", "%i", "-t", "PD,R,CF").split()


def slurm_says(*words: str) -> str:
    """The output of a Slurm command; empty while Slurm does not answer."""
    return patience.run([*words], 30).stdout
