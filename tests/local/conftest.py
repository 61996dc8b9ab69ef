"""Runs real sweeps on this machine, through the command line."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import patience
from ultrabench.cli import main as cli
from ultrabench.machine_lock import LOCK_VARIABLE
from ultrabench.processes import TAG_VARIABLE, command_line, own_processes, tag_of
from ultrabench.store.journal import read_journal
from ultrabench.store.state import SweepState, fold

PROGRAM = Path(__file__).parent / "program.py"
DEADLINES = ("measure.deadline_floor_s", "measure.run_limit_s", "launcher.heartbeat_s", "launcher.grace_s")
"""Deadlines that a slow machine may exceed although nothing is wrong; tests give them for an idle machine."""
READING = ("collect", "heatmap", "plot", "doctor", "status", "show", "top", "logs", "plan", "pause", "cancel")
"""Commands that end soon and start no runs: tests run them in their own process, which has the imports."""
PEAK = "++hardware.peak_flops_per_s={fp32:1e11,bf16:1e11}"
"""With a given rate no launch measures this machine, nor imports torch if kernel=command."""


EMBEDDED = (
    "model=tiny", "name=t", "sweep.seq_len=32", "measure.warmup_steps=1", "measure.loss_step=3",
    "measure.max_foreign_load=null",
)  # fmt: skip
"""Options of a small sweep of the embedded kernel."""
MEASURING = '"name":"measure"'
"""What the journal says of a run that has reached its measured steps."""
AT_ONCE = (
    "launcher.preflight=false", "launcher.control=false", "retry.backoff_s=0", "measure.max_foreign_load=null", PEAK
)  # fmt: skip
"""Options of a sweep that begins with its first run, makes no further ones and does not rest."""


def axes(**values: Any) -> list[str]:
    """Options that give axes of a sweep these values."""
    return [f"sweep.{name}={'null' if value is None else value}" for name, value in values.items()]


@dataclass
class Bench:
    """A folder with sweeps, and the ultrabench commands that run them."""

    folder: Path
    slowness: float = field(default_factory=patience.slowness)
    """How many times slower than an idle one this machine is; it is fixed, so that sweeps stay the same."""
    started: list[patience.Process] = field(default_factory=list)
    apart_always: bool = False
    """Whether every command gets a process of its own, since this one has other sources of ultrabench."""

    @property
    def witness(self) -> Path:
        return self.folder / "witness.txt"

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "ultrabench.cli.main", *self._scaled(words)]

    def _scaled(self, words: Sequence[str]) -> list[str]:
        """The words, with deadlines for this machine; of options of the same name only the last."""
        last = {option.partition("=")[0] if "=" in option else i: option for i, option in enumerate(words)}
        return [
            f"{name}={float(option.partition('=')[2]) * self.slowness:.1f}" if name in DEADLINES else option
            for name, option in last.items()
        ]

    def environment(self) -> dict[str, str]:
        """Our environment variables; on a slow machine steps of the program last longer, as tests do."""
        step_s = os.environ.get("STEP_S")
        step = {"STEP_S": f"{float(step_s) * self.slowness:.4f}"} if step_s else {}
        # Tests run beside each other, sweeps of one folder do not.
        machine = {LOCK_VARIABLE: str(self.folder)}
        return {**os.environ, **machine, **step}

    def done(self, *words: str, seconds: float = 240) -> subprocess.CompletedProcess[str]:
        """Runs a command until it ends; returns both outputs and the exit code."""
        reads = words[words[0] == "sweep"] in READING and "--deep" not in words
        return self.here(*words) if reads and not self.apart_always else self.apart(*words, seconds=seconds)

    def apart(self, *words: str, seconds: float) -> subprocess.CompletedProcess[str]:
        """Runs a command in a process of its own, which is killed if it does not end in time."""
        return patience.run(self.command(*words), seconds, cwd=self.folder, env=self.environment())

    def here(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command in this process, without the second that its imports take elsewhere."""
        output, errors = io.StringIO(), io.StringIO()
        command = ["ultrabench", *self._scaled(words)]
        with (
            mock.patch.object(sys, "argv", command), contextlib.chdir(self.folder),
            contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors),
            pytest.raises(SystemExit) as raised,
        ):  # fmt: skip
            cli.main()
        code = raised.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(command, code, output.getvalue(), errors.getvalue())

    def run(self, *words: str, code: int = 0, seconds: float = 240) -> str:
        process = self.done(*words, seconds=seconds)
        assert process.returncode == code, f"{process.returncode}\n{process.stdout}\n{process.stderr}"
        return process.stdout

    def start(self, *words: str) -> patience.Process:
        # A test run in the background ignores SIGINT and SIGHUP, and its children would inherit that.
        command = ["env", "--default-signal=INT,HUP", *self.command(*words)]
        self.started.append(
            patience.Process(
                command, cwd=self.folder, env=self.environment(), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )
        )  # fmt: skip
        return self.started[-1]

    @staticmethod
    def end(launcher: patience.Process, code: int = 0, seconds: float = 120) -> str:
        """Waits until a process of `start` ends with this exit code; returns its output."""
        output, _ = launcher.communicate(timeout=seconds)
        assert launcher.returncode == code, output
        return str(output)

    def close(self) -> None:
        """Ends the launchers that a failed test has left."""
        for process in self.started:
            if process.returncode is None:
                process.kill()
                process.communicate()

    def overrides(self, behaviour: str, *options: str) -> list[str]:
        """The options of a sweep of the misbehaving program."""
        program = ["python", str(PROGRAM), str(self.witness), behaviour]
        words = ",".join(f"'{w}'" for w in [*program, "{run_id}", "{repeat}", "{attempt}"])
        return [
            "kernel=command", f"kernel.command=[{words}]", "model=tiny", "name=t", "sweep.tp=1",
            "sweep.pp=1", "measure.warmup_steps=2", "measure.min_steps=6", "measure.deadline_floor_s=2",
            "launcher.heartbeat_s=3", *AT_ONCE, *options,
        ]  # fmt: skip

    def launch(self, behaviour: str, *options: str, **sizes: Any) -> list[str]:
        """The command line of a launch, unless told otherwise on one node, without ZeRO, with any accumulation."""
        sizes = {"nodes": 1, "zero_stage": 0, "gas": None, **sizes}
        return ["sweep", "launch", *self.overrides(behaviour, *axes(**sizes), *options)]

    def rows(self) -> list[dict[str, Any]]:
        import pyarrow.parquet as pq

        self.run("collect", "t")
        table = pq.read_table(self.folder / "results/t/runs.parquet")
        return [row for row in table.to_pylist() if row["attempt"] is not None]

    def journal(self) -> str:
        """The text of all journal files."""
        return "".join(p.read_text() for p in sorted(self.folder.glob("results/t/journal/*.jsonl")))

    def state(self) -> SweepState:
        """The state of the sweep; files of a journal have no order, since process ids start again from 1."""
        return fold(read_journal(self.folder / "results/t/journal"))

    def count(self, event: str) -> int:
        """How many events of this kind the journal holds."""
        return self.journal().count(f'"event":"{event}"')

    def measuring(self) -> bool:
        """Whether some run has reached its measured steps."""
        return MEASURING in self.journal()

    def assert_each_ran_once(self, runs: int, allowed: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
        """Asserts that every run ended ok once per repeat and nothing ran twice; returns all rows."""
        rows, executions = self.rows(), self.executions()
        attempts = {f"{r['run_id']} {r['repeat']} {r['attempt']}": r["status"] for r in rows}
        assert max(Counter(executions).values()) == 1, "an attempt ran twice"
        assert set(executions) <= set(attempts), "a run that is not recorded"
        # An agent that dies between its claim and the first line of the program leaves an attempt without execution.
        assert "ok" not in {attempts[key] for key in set(attempts) - set(executions)}
        oks = Counter((r["run_id"], r["repeat"]) for r in rows if r["status"] == "ok")
        assert len({run for run, _ in oks}) == runs
        assert set(oks.values()) == {1}
        assert [r for r in rows if r["status"] not in {"ok", *allowed}] == []
        return rows

    def status(self) -> dict[str, Any]:
        return json.loads(self.run("sweep", "status", "t", "--json"))  # type: ignore[no-any-return]

    def executions(self) -> list[str]:
        return self.witness.read_text().splitlines() if self.witness.exists() else []

    def leftovers(self) -> list[str]:
        """The processes of sweeps in this folder that still run."""
        processes = [(pid, tag_of(pid) or "", " ".join(command_line(pid))) for pid in own_processes()]
        return [
            f"{pid} {tag} {words[:200]}"
            for pid, tag, words in processes
            if str(self.folder) in words or tag.split(":")[0] in self.allocations()
        ]

    def agents(self) -> list[int]:
        """The agents of sweeps in this folder."""
        words = {pid: command_line(pid) for pid in own_processes()}
        return [p for p, w in words.items() if "ultrabench.agent" in w and str(self.folder) in " ".join(w)]

    def allocations(self) -> set[str]:
        return {p.name for p in self.folder.glob("results/*/allocations/*")}

    def wait_for(self, test: Any, seconds: float = 60.0, rest_s: float = 0.05) -> None:
        patience.wait_until(test, seconds, lambda: "\n".join(["what still runs:", *self.leftovers()]), rest_s)


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    new_bench = Bench(tmp_path)
    os.environ.pop(TAG_VARIABLE, None)
    yield new_bench
    new_bench.close()
    try:
        new_bench.wait_for(lambda: new_bench.leftovers() == [], 10)
    except AssertionError:
        for line in new_bench.leftovers():  # these processes would disturb the next test
            os.kill(int(line.split()[0]), signal.SIGKILL)
        raise
