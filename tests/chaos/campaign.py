"""A campaign: sweeps on a real Slurm, faults one after another, and a verdict from outside."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.fault import OF_A_PROGRAM, Fault
from tests.chaos.judge import judge
from tests.chaos.strike import MissedError, strike
from tests.chaos.target import PROGRAM
from tests.slurm.conftest import Cluster
from tests.slurm.sweeps import MANY, SlurmBench

SIZE = "64m"
"""Of the file system that holds the results, which has to be filled now and then."""
LIFE_S = 15.0
"""After a fault the next one waits until something moves, at most so long."""
END_S = 300.0
"""After the last fault a sweep has to come to its end within this time."""
MOST_LAUNCHES = 30
"""Of one sweep, those that were killed included."""
COMMON = (
    "model=tiny", "launcher=slurm", "launcher.mem=300M", "launcher.poll_s=1", "launcher.grace_s=4",
    "launcher.max_nodes=8", "launcher.heartbeat_s=1", "launcher.requeue=true", "launcher.preflight=false",
    "measure.deadline_floor_s=2", "measure.run_limit_s=60", "measure.min_steps=6", "measure.confirm=1",
    # A rank may be made to sleep in its first step: silence there has to be noticed within the limit, too.
    "measure.start_deadline_s=20",
    # Nodes die by our hand and come back; were they all left out, the largest runs could not go on.
    "retry.backoff_s=1", "retry.backoff_max_s=4", "retry.max_excluded=2",
)  # fmt: skip
EMBEDDED = ("sweep.gbs=4", "sweep.nodes=[1,2]", "sweep.zero_stage=[0]", "sweep.mbs=[1]", "measure.max_steps=60",
            "measure.target_ci95_rel=0.0001", "launcher.allocation_minutes=1", "measure.run_limit_s=300",
            "measure.start_deadline_s=120")  # fmt: skip


class Campaign:
    """Sweeps in the folder of a bench, the results on a small file system of their own."""

    def __init__(
        self, bench: SlurmBench, cluster: Cluster, say: Callable[[str], None] = lambda note: None
    ) -> None:
        self.bench, self.cluster, self.say = bench, cluster, say
        self.results = bench.folder / "results"
        self.records: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.sweep, self.embedded = "", False
        self._numbers, self._launches = 0, 0
        self._launchers: list[subprocess.Popen[bytes]] = []
        for name in ("results", "orders", "taken"):
            (bench.folder / name).mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(self.results)]
        self.mounted = subprocess.run(words, capture_output=True).returncode == 0

    @property
    def folder(self) -> Path:
        """Of the sweep that runs now."""
        return self.results / self.sweep

    def run(self, faults: list[Fault], embedded: bool = False) -> None:
        """Injects all of them, one sweep after another, and judges each."""
        self.embedded = embedded
        self._open()
        for fault in faults:
            self._inject(fault)
        self._finish()

    def close(self) -> None:
        """Leaves nothing: launchers end, the file system goes."""
        for launcher in self.living():
            launcher.kill()
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.results)], capture_output=True)

    def launch(self) -> None:
        """Starts a launcher of the sweep, as a person would who sees none."""
        self._launches += 1
        with (self.bench.folder / f"launcher.{self._launches}.log").open("wb") as log:
            words = self.bench.command("sweep", "launch", *self._words(), "--max-gpu-hours", "100")
            command = ["env", "--default-signal=INT", *words]
            started = subprocess.Popen(
                command, cwd=self.bench.folder, stdout=log, stderr=log, start_new_session=True
            )
        self._launchers.append(started)

    def living(self) -> list["subprocess.Popen[bytes]"]:
        """Launchers that run."""
        return [launcher for launcher in self._launchers if launcher.poll() is None]

    def _words(self) -> list[str]:
        if self.embedded:
            return [f"name={self.sweep}", *COMMON, *EMBEDDED]
        program = ["python", str(PROGRAM), str(self.bench.folder), self.sweep]
        words = ",".join(f"'{word}'" for word in [*program, "{run_id}", "{repeat}", "{attempt}"])
        return [
            f"name={self.sweep}", "kernel=command", f"kernel.command=[{words}]", "sweep.tp=1", "sweep.pp=1",
            "measure.warmup_steps=2", *COMMON, *MANY,
        ]  # fmt: skip

    def _open(self) -> None:
        self._numbers += 1
        self.sweep = f"{'e' if self.embedded else 's'}{self._numbers}"
        self._launchers = []
        self.launch()
        self._wait(lambda: self._signs() > 0, 60.0)

    def _inject(self, fault: Fault) -> None:
        self._watch_for(fault.wait_s)
        record: dict[str, Any] = {"number": fault.number, "kind": fault.kind, "sweep": self.sweep}
        record["at"] = round(time.time(), 1)
        before = self._signs()
        if fault.kind in ("disk_full", "read_only") and not self.mounted:
            record["missed"] = "no file system can be mounted here"
        elif self.embedded and fault.kind in OF_A_PROGRAM:
            record["missed"] = "the embedded kernel obeys no orders"
        else:
            try:
                record |= strike(self, fault)
            except MissedError:
                record["missed"] = "there was nothing to hit"
        self.records.append(record)
        self.say(f"{fault.number:4d} {fault.kind:14s} {record.get('target') or record.get('missed')}")
        if "missed" not in record:
            self._wait(lambda: self._signs() > before, LIFE_S)

    def _watch_for(self, seconds: float) -> None:
        """Keeps a launcher running, and a sweep."""
        end = time.monotonic() + seconds
        while True:
            if not self.living() and self._over():
                self._judge()
                self._open()
            if time.monotonic() > end:
                return
            time.sleep(0.1)

    def _over(self) -> bool:
        """Whether the sweep has come to its end; starts another launcher when it has not."""
        code = self._launchers[-1].returncode
        told = self.bench.run("sweep", "status", self.sweep, "--json", code=None) if code in (0, 1) else ""
        left = json.loads(told)["by_status"] if told else {"pending": 1}
        if not (left.get("pending") or left.get("running")):
            return True
        self.say(f"     a launcher ended with {code}: {self._last_words()}")
        if len(self._launchers) > MOST_LAUNCHES:
            raise AssertionError(
                f"{len(self._launchers)} launches did not end {self.sweep}: {self._last_words()}"
            )
        self.launch()
        return False

    def _last_words(self) -> str:
        log = self.bench.folder / f"launcher.{self._launches}.log"
        return (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1][:300]

    def _finish(self) -> None:
        end = time.monotonic() + END_S
        while self.living() or not self._over():
            if time.monotonic() > end:
                self.problems.append(f"{self.sweep} has not ended {END_S:.0f} s after the last fault")
                for launcher in self.living():
                    launcher.kill()
                break
            time.sleep(0.2)
        self._judge()
        with contextlib.suppress(AssertionError):
            self.cluster.wait_for(self.cluster.clean, 40.0)
        self._wait(lambda: not self.bench.leftovers(), 20.0)
        self.problems += [f"left: {process}" for process in self.bench.leftovers()]
        if not self.cluster.clean():
            self.problems.append(f"nodes {self.cluster.nodes()}, jobs {self.cluster.jobs()}")

    def _judge(self) -> None:
        mine = [r for r in self.records if r["sweep"] == self.sweep]
        executions = [
            words[1:] for line in self.bench.executions() if (words := line.split())[0] == self.sweep
        ]
        found = judge(self.bench, self.sweep, mine, None if self.embedded else executions)
        self.problems += [f"{self.sweep}: {problem}" for problem in found]
        self.say(f"     sweep {self.sweep} is over: {self._last_words()}; {len(found)} problems")
        for problem in found:
            self.say(f"     PROBLEM {problem}")

    def _signs(self) -> int:
        """Grows with whatever agents do."""
        return sum(
            p.stat().st_size for p in self.results.glob(f"{self.sweep}/journal/agent-*.jsonl") if p.exists()
        )

    def _wait(self, what: Callable[[], object], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not what() and time.monotonic() < end:
            time.sleep(0.1)
