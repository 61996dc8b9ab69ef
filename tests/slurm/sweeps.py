"""Runs real sweeps on the Slurm of simulated nodes, through the command line."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from tests import patience
from tests.local.conftest import Bench

MANY = ("sweep.nodes=[1,2,4]", "sweep.gbs=32", "sweep.zero_stage=[0,1,2,3]", "sweep.mbs=[1,2,4,8]",
        "sweep.gas=[1,2,4,8]", "launcher.allocation_minutes=0.2")  # fmt: skip
"""Options of a sweep of 40 runs on 1, 2 and 4 nodes."""
FEW = ("sweep.nodes=[1,2]", "sweep.gbs=8", "sweep.zero_stage=[0,1]", "sweep.mbs=[1,2,4]",
       "sweep.gas=[1,2,4]", "launcher.allocation_minutes=0.1")  # fmt: skip
"""Options of a sweep of 10 runs on 1 and 2 nodes."""


@dataclass
class SlurmBench(Bench):
    """A folder with sweeps on a Slurm; the folder `path` comes first in the PATH of commands."""

    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def overrides(self, behaviour: str, *more: str) -> list[str]:
        return super().overrides(
            behaviour, "launcher=slurm", "launcher.mem=150M", "launcher.poll_s=1", "launcher.grace_s=4",
            "launcher.max_nodes=8", "measure.run_limit_s=60", "launcher.environment=[STEP_S]", *more,
        )  # fmt: skip

    def launch(self, behaviour: str, *more: str) -> list[str]:
        """The command line of a launch that asks no questions."""
        return ["sweep", "launch", *self.overrides(behaviour, *more), "--max-gpu-hours", "100"]

    def fake(self, program: str, script: str) -> None:
        """Replaces a program of Slurm by a script, which finds the real program as $REAL."""
        folder = self.folder / "bin"
        folder.mkdir(exist_ok=True)
        path = folder / program
        path.write_text(f"#!/bin/bash\nREAL=/usr/bin/{program}\nCOUNT={self.folder}/{program}.count\n"
                        f'echo x >> $COUNT; N=$(wc -l < $COUNT)\n{script}\n')  # fmt: skip
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        os.environ["PATH"] = f"{folder}:{self.environ['PATH']}"

    def job_ids(self) -> list[str]:
        """The jobs of the sweep that are queued or running."""
        return slurm_says("squeue", "-h", "-r", "-o", "%i", "-t", "PD,R,CF").split()


def in_files(folder: Path, text: str) -> list[str]:
    """The files under `folder` that contain `text`."""
    return [str(p) for p in folder.rglob("*") if p.is_file() and text.encode() in p.read_bytes()]


def slurm_says(*words: str) -> str:
    """The output of a Slurm command; empty while Slurm does not answer."""
    return patience.run([*words], 30).stdout
