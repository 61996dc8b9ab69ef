"""Real sweeps on this machine, driven through the command line."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ultrabench.processes import TAG_VARIABLE, command_line, own_processes, tag_of

PROGRAM = Path(__file__).parent / "program.py"


@dataclass
class Bench:
    """A folder with sweeps, and the ultrabench that runs them."""

    folder: Path

    @property
    def witness(self) -> Path:
        return self.folder / "witness.txt"

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "ultrabench.cli.main", *words]

    def run(self, *words: str, code: int | None = 0, timeout: float = 240) -> str:
        done = subprocess.run(
            self.command(*words), cwd=self.folder, capture_output=True, text=True, timeout=timeout
        )
        if code is not None:
            assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        # A test run in the background ignores Ctrl-C and hang-ups, and what it starts would inherit that.
        return subprocess.Popen(
            ["env", "--default-signal=INT,HUP", *self.command(*words)],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def overrides(self, behaviour: str, *more: str) -> list[str]:
        """A sweep of the misbehaving program."""
        program = ["python", str(PROGRAM), str(self.witness), behaviour]
        words = ",".join(f"'{w}'" for w in [*program, "{run_id}", "{repeat}", "{attempt}"])
        return [
            "kernel=command", f"kernel.command=[{words}]", "model=tiny", "name=t", "sweep.tp=1",
            "sweep.pp=1", "measure.warmup_steps=2", "measure.min_steps=6", "measure.deadline_floor_s=2",
            "launcher.heartbeat_s=3", "launcher.preflight=false", "retry.backoff_s=0", *more,
        ]  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        import pyarrow.parquet as pq

        self.run("collect", "t")
        table = pq.read_table(self.folder / "results/t/runs.parquet")
        return [row for row in table.to_pylist() if row["attempt"] is not None]

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("sweep", "status", "t", "--json"))
        return found

    def executions(self) -> list[str]:
        return self.witness.read_text().splitlines() if self.witness.exists() else []

    def leftovers(self) -> list[str]:
        """Processes of sweeps in this folder that still run."""
        found = []
        for pid in own_processes():
            words = command_line(pid)
            tag = tag_of(pid)
            ours = any(str(self.folder) in word for word in words)
            if ours or (tag and tag.split(":")[0] in self.allocations()):
                found.append(f"{pid} {tag} {' '.join(words)[:200]}")
        return found

    def allocations(self) -> set[str]:
        return {p.name for p in self.folder.glob("results/*/allocations/*")}

    def wait_for(self, what: Any, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.05)


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path)
    os.environ.pop(TAG_VARIABLE, None)
    yield made
    assert made.leftovers() == []
