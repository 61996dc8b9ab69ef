"""A campaign runs sweeps on a real Slurm, injects faults one after another, and judges the results."""

import contextlib
import json
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests import patience
from tests.chaos import bad_nodes, failures, interference, misleading, ownership, refusals
from tests.chaos.fault import Fault
from tests.chaos.judge import SlurmView, allocation_events, excluded_nodes, judge, submitted_jobs
from tests.chaos.nodes import Nodes
from tests.chaos.target import PROGRAM, MissedError, hosts
from tests.chaos.witness import executions_of
from tests.slurm.conftest import Cluster
from tests.slurm.sweeps import MANY, SlurmBench, slurm_says

STRIKES = failures.STRIKES | interference.STRIKES | misleading.STRIKES | refusals.STRIKES
STRIKES |= bad_nodes.STRIKES | ownership.STRIKES
SIZE = "64m"
"""Size of the file system for the results, which is small so that faults can fill it."""
LIFE_S = 15.0
"""Longest time, in seconds, that the next fault waits for the sweep to make progress after a fault."""
AGAIN_S = 20.0
"""Seconds after which a fault that hit nothing is repeated; sooner if the sweep moves or a new one runs."""
END_S = 420.0
"""Seconds within which a sweep has to end after the last fault. A launcher gives up agents of another cluster, which it
cannot see, only when they were silent for their time limit, which is at least 300 s."""
ANSWER_S = 60.0
"""Seconds within which `sweep status` and `collect` have to answer."""
MAX_LAUNCHES = 30
"""Largest number of launches of one sweep, including those that were killed."""
COMMON = (
    "model=tiny", "launcher=slurm", "launcher.mem=300M", "launcher.poll_s=1", "launcher.grace_s=4",
    # On a machine with a load of ten for each core, agents missed three heartbeats of one second.
    "launcher.max_nodes=8", "launcher.heartbeat_s=2", "launcher.requeue=true", "launcher.preflight=false",
    "measure.deadline_floor_s=2", "measure.run_limit_s=40", "measure.min_steps=6", "measure.confirm=1",
    # A fault may let a rank sleep in its first step, which has to be noticed within the limit too.
    "measure.start_deadline_s=20",
    # Faults kill nodes that come back later; if all of them were excluded, the largest runs could not run.
    "retry.backoff_s=1", "retry.backoff_max_s=4", "retry.max_excluded=2", "measure.max_foreign_load=null",
)  # fmt: skip
LONG = "launcher.allocation_minutes=0.8"
"""Option of every second sweep: its jobs last longer than all grace periods; other sweeps have short jobs."""
EMBEDDED = ("sweep.gbs=4", "sweep.nodes=[1,2]", "sweep.zero_stage=[0]", "sweep.mbs=[1]", "measure.max_steps=60",
            "measure.target_ci95_rel=0.0001", "launcher.allocation_minutes=1", "measure.run_limit_s=300",
            "measure.start_deadline_s=120")  # fmt: skip
IN_PARTS = ("sweep.gbs=48", "sweep.gas=null", "sweep.mbs=[1,2]", "sweep.tp=[1]", "sweep.seq_len=32",
            "measure.partial_steps=auto", "measure.max_steps=20")  # fmt: skip
"""Options of every second sweep of the embedded kernel: seven of eight runs are screened by parts of steps, one by few
whole steps, and the best of each number of nodes is started again in full."""


class Campaign:
    """A series of sweeps in the folder of a bench, with their results on a small file system of its own."""

    def __init__(self, bench: SlurmBench, cluster: Cluster, say: Callable[[str], None]) -> None:
        self.bench, self.cluster, self.say = bench, cluster, say
        self.clusters = [cluster]
        """The cluster of the sweeps, and after its first use a second one on this machine."""
        bench.slowness = 1.0  # faults last as long as the deadlines above need
        self.results = bench.folder / "results"
        self.records: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.sweep, self.embedded = "", False
        self._numbers, self._launches, self._opened = 0, 0, 0.0
        self._launchers: list[subprocess.Popen[bytes]] = []
        for name in ("results", "orders", "taken", "always", "bad"):
            (bench.folder / name).mkdir()
        self.nodes = Nodes(bench.folder / "nodes", cluster.nodes())
        words = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(self.results)]
        self.mounted = subprocess.run(words, capture_output=True).returncode == 0
        self._other_mounts: list[Path] = []

    @property
    def folder(self) -> Path:
        """The folder of the current sweep."""
        return self.results / self.sweep

    def run(self, faults: list[Fault], embedded: bool = False) -> None:
        """Injects all faults into one sweep after another, and judges each sweep."""
        self.embedded = embedded
        self._open()
        for fault in faults:
            self._inject(fault)
        self._finish()

    def close(self) -> None:
        """Ends the launchers and removes the file system."""
        self.kill_launchers()
        if run_counts := self.cluster.jobs():
            self.cluster.run("scancel", *run_counts, code=None)
        for other in self.clusters[1:]:
            other.tool("down")
        for path in (*self._other_mounts, *([self.results] if self.mounted else [])):
            subprocess.run(["umount", "--lazy", str(path)], capture_output=True)
        self.nodes.close()

    def mount_again(self, path: Path) -> bool:
        """Makes the results appear at another path until the end; returns False where nothing can be mounted."""
        if self.mounted:
            path.mkdir()
            subprocess.run(["mount", "--bind", str(self.results), str(path)], check=True, capture_output=True)
            self._other_mounts.append(path)
        return self.mounted

    def launch(self, *options: str, program: Sequence[str] = (), **variables: str) -> None:
        """Starts a launcher of the sweep, as a person does who sees that none runs.

        Args:
            options: options of this launch besides those of the sweep.
            program: arguments of Python that replace those which run ultrabench.
            variables: of its environment, besides those of this process.
        """
        self._launches += 1
        command = self.bench.command(*self.launch_words(), *options)
        if program:
            command[1:3] = ["-P", *program]
        words = ["env", "--default-signal=INT", *command]
        self._launchers.append(self.start(words, f"launcher.{self._launches}.log", **variables))

    def start(self, words: Sequence[str], log: str, **variables: str) -> "subprocess.Popen[bytes]":
        """Starts a command in a session of its own, whose output is added to the file `log`."""
        with (self.bench.folder / log).open("ab") as file:
            return subprocess.Popen(
                words, cwd=self.bench.folder, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip

    def launch_words(self) -> list[str]:
        """The words of the command line that launches the current sweep."""
        options = (*EMBEDDED, *IN_PARTS) if self._numbers % 2 else EMBEDDED
        if not self.embedded:
            options = (*self.program_options(self.sweep), *MANY, *([LONG] if self._numbers % 2 == 0 else []))
        common = (*COMMON, f"launcher.srun=['--task-prolog={self.nodes.prolog}']")
        return ["sweep", "launch", f"name={self.sweep}", *common, *options, "--max-gpu-hours", "100"]

    def program_options(self, sweep: str) -> tuple[str, ...]:
        """Options of a sweep that runs the program of these tests."""
        program = ["python", str(PROGRAM), str(self.bench.folder), sweep]
        words = ",".join(f"'{arg}'" for arg in [*program, "{run_id}", "{repeat}", "{attempt}"])
        return (
            "kernel=command", f"kernel.command=[{words}]", "sweep.tp=1", "sweep.pp=1", "measure.warmup_steps=2",
        )  # fmt: skip

    def kill_launchers(self) -> None:
        """Kills all launchers."""
        for launcher in self.living():
            launcher.kill()
            launcher.wait()

    def complain(self, problem: str) -> None:
        """Records and shows a problem."""
        self.problems.append(f"{self.sweep}: {problem}")
        self.say(f"     PROBLEM {problem}")

    def living(self) -> list["subprocess.Popen[bytes]"]:
        """The launchers that run."""
        return [launcher for launcher in self._launchers if launcher.poll() is None]

    def _open(self) -> None:
        self._numbers += 1
        self.sweep = f"{'e' if self.embedded else 's'}{self._numbers}"
        self._launchers, self._opened = [], time.time()
        self.launch()
        self._wait(lambda: self._signs() > 0, 60.0)

    def _inject(self, fault: Fault) -> None:
        self._watch(fault.wait_s)
        before, record = self._signs(), self._tried(fault)
        if "missed" in record:
            # A sweep that was just ending had nothing left to hit, but the next sweep has.
            self._watch(AGAIN_S, lambda: self.sweep != record["sweep"] or self._signs() > before)
            before, record = self._signs(), self._tried(fault)
        self.records.append(record)
        self.say(f"{fault.number:4d} {fault.kind:18s} {record.get('target') or record.get('missed')}")
        if "missed" not in record:
            self._wait(lambda: self._signs() > before, LIFE_S)

    def _tried(self, fault: Fault) -> dict[str, Any]:
        """What a fault hit, or why it `missed`."""
        time_s = round(time.time(), 1)
        record = {"number": fault.number, "kind": fault.kind, "sweep": self.sweep, "at": time_s}
        try:
            if fault.kind in ("disk_full", "read_only") and not self.mounted:
                raise MissedError("no file system can be mounted here")
            return {**record, "allocations": [], **STRIKES[fault.kind](self, fault)}
        except MissedError as error:
            return {**record, "missed": str(error)}

    def _watch(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Keeps a sweep and its launcher running for some seconds, or until `until` returns True."""
        end = time.monotonic() + seconds
        while True:
            if not self.living() and self._over():
                self._judge()
                self._open()
            if time.monotonic() > end or until():
                return
            time.sleep(0.1)

    def _over(self) -> bool:
        """Whether the sweep has ended; starts another launcher if it has not and none runs."""
        code = self._launchers[-1].returncode
        status_json = self._answer("sweep", "status", self.sweep, "--json") if code in (0, 1) else ""
        run_counts = json.loads(status_json)["by_status"] if status_json else {"pending": 1}
        if not (run_counts.get("pending") or run_counts.get("running")):
            return True
        self.say(f"     a launcher ended with {code}: {self._last_words()}")
        if len(self._launchers) > MAX_LAUNCHES:
            self.complain(f"{len(self._launchers)} launches did not end it: {self._last_words()}")
            return True
        self.launch()
        return False

    def _answer(self, *words: str) -> str:
        """The output of a command; empty if it fails or hangs, which is recorded as a problem."""
        try:
            return self.bench.apart(*words, seconds=ANSWER_S).stdout
        except subprocess.TimeoutExpired:
            self.complain(f"{' '.join(words)} did not answer within {ANSWER_S:g} s")
            return ""

    def _last_words(self) -> str:
        log = self.bench.folder / f"launcher.{self._launches}.log"
        return (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1][:300]

    def _finish(self) -> None:
        deadline = patience.Deadline(END_S)
        while self.living() or not self._over():
            if deadline.over():
                self.complain(f"it has not ended {END_S:.0f} s after the last fault: {self._last_words()}")
                self.kill_launchers()
                break
            time.sleep(0.2)
        self._judge()
        with contextlib.suppress(AssertionError):
            self.cluster.wait_for(lambda: all(cluster.clean() for cluster in self.clusters), 40.0)
        self._wait(lambda: not self.bench.leftovers(), 20.0)
        self.problems += [f"left: {process}" for process in self.bench.leftovers()]
        unclean = [cluster for cluster in self.clusters if not cluster.clean()]
        self.problems += [f"nodes {cluster.nodes()}, jobs {cluster.jobs()}" for cluster in unclean]

    def _judge(self) -> None:
        mine = [r for r in self.records if r["sweep"] == self.sweep]
        self._answer("collect", self.sweep)
        try:
            table = pq.read_table(self.folder / "runs.parquet").to_pylist()
        except OSError as error:
            self.complain(f"it cannot be judged: {error}")
            return
        executions = None if self.embedded else executions_of(self.sweep, self.bench.executions())
        view, launches = self._view(), len(self._launchers)
        # The larger of the counts of the journal and of Slurm.
        jobs = max(sum(map(len, view.job_ids.values())), submitted_jobs(self.folder / "journal"))
        problems = judge(table, mine, executions, jobs, launches, view)
        counts = f"{jobs} jobs, {launches} launches, {len(problems)} problems"
        self.say(f"     sweep {self.sweep} is over: {self._last_words()}; {counts}")
        for problem in problems:
            self.complain(problem)

    def _view(self) -> SlurmView:
        """What Slurm knows about the jobs of the sweep, and what the sweep told Slurm and its journal about them."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self._opened))
        job_ids, nodes = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        options = ("-a", "-X", "-n", "-P", "-D", "-S", since, "-o", "JobID,NodeList,JobName")
        for line in slurm_says("sacct", *options).splitlines():
            job_id, names, job_name = line.split("|", 2)
            if job_name.startswith(f"ub-{self.sweep}-"):
                array = "-".join(job_name.split("-")[-2:])
                name = f"{array}.{job_id.partition('_')[2]}"
                job_ids[name].add(job_id)
                nodes[name] |= set(hosts(names))
        return SlurmView(
            job_ids=job_ids, nodes=nodes, journal=[*allocation_events(self.folder / "journal")],
            excluded=excluded_nodes(self._launcher_logs()), age_s=time.time() - self._opened,
        )  # fmt: skip

    def _launcher_logs(self) -> list[str]:
        """What the launchers of the current sweep have printed."""
        numbers = range(self._launches - len(self._launchers) + 1, self._launches + 1)
        paths = [self.bench.folder / f"launcher.{number}.log" for number in numbers]
        return [path.read_text(errors="replace") for path in paths if path.exists()]

    def _signs(self) -> int:
        """A number that grows with everything the agents do."""
        journals = self.folder.glob("journal/agent-*.jsonl")
        return sum(path.stat().st_size for path in journals if path.exists())

    def _wait(self, ready: Callable[[], object], seconds: float) -> None:
        deadline = patience.Deadline(seconds)
        while not ready() and not deadline.over():
            time.sleep(0.1)
