"""A look at the ranks of one node before they are killed: states, stacks, last collectives."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrabench.processes import descendants, tag_of
from ultrabench.report import COLLECTIVES_SUFFIX, STACKS_SUFFIX, parse_line, read_part

FOLDER = "autopsy"
ANSWER_S = 3.0
"""A rank that can answer does so at once; one whose interpreter is stuck never does."""
PY_SPY_S = 10.0
LOOKS = 3
"""Looks at /proc: a state counts when it lasts."""
LOOK_S = 0.02
STACK_DEPTH = 40
NAME_CHARS = 300
"""Of a function, a group or a collective."""
TEXT_BYTES = 2**22
"""How much of an answer, or of a report, is read."""

_FAULTHANDLER_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_PY_SPY_FRAME = re.compile(r"^    (\S.*) \((.+\.py|<\w+>):(\d+)\)$")


@dataclass(slots=True, kw_only=True)
class _Subject:
    """One rank that is looked at."""

    report: Path
    pid: int
    state: str
    """R, S, D, T, Z as /proc gives it, T if anything of it is stopped; ? where looks differ or none was left."""
    wchan: str
    asked: bool = False
    spy: subprocess.Popen[bytes] | None = None


class Autopsy:
    """Asks every rank, then lets py-spy look, without ever waiting: call `finished` until it answers.

    Args:
        run: node-local folder of the run; raw stacks and dumps go into its FOLDER.
        pids: rank -> the process that was started as that rank.
        tag: of the processes of the run; no other is sent a signal.
    """

    def __init__(self, run: Path, pids: dict[int, int], tag: str) -> None:
        self._folder = run / FOLDER
        families = {rank: [pid, *sorted(descendants(pid))] for rank, pid in pids.items()}
        looks: list[dict[int, str]] = []
        for _ in range(LOOKS):
            looks.append({p: _state(p) for family in families.values() for p in family})
            time.sleep(LOOK_S)
        self._subjects = {}
        for rank, family in families.items():
            report = run / f"rank{rank}.report"
            witness = _witness(report)
            pid = witness if witness in family else _python_of(family)
            state = _lasting(pid, family, looks)
            subject = _Subject(report=report, pid=pid, state=state, wchan=_wchan(pid))
            if witness == pid and state not in "TZ" and tag_of(pid) == tag:
                subject.asked = True
                for number in (signal.SIGUSR1, signal.SIGUSR2):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            self._subjects[rank] = subject
        self._until = time.monotonic() + ANSWER_S
        self._spying = False
        self._sizes = -1

    def finished(self) -> list[dict[str, Any]] | None:
        """What was found, as news of the ranks: {rank, found}; None while answers are waited for."""
        subjects = self._subjects.values()
        late = time.monotonic() > self._until
        if not self._spying:
            if not late and not self._answered():
                return None
            self._spying, self._until = True, time.monotonic() + PY_SPY_S
            self._send_spies()
        running = [s.spy for s in subjects if s.spy is not None and s.spy.poll() is None]
        if running and not late:
            return None
        for spy in running:
            spy.kill()
            spy.wait()
        return [{"rank": rank, "found": self._found(rank, s)} for rank, s in self._subjects.items()]

    def _answered(self) -> bool:
        """All that were asked have told their collectives, and nobody is still writing stacks."""
        asked = [s.report for s in self._subjects.values() if s.asked]
        before, self._sizes = self._sizes, sum(_size(f"{report}{STACKS_SUFFIX}") for report in asked)
        told = all(_size(f"{report}{COLLECTIVES_SUFFIX}") for report in asked)
        return told and self._sizes == before

    def _send_spies(self) -> None:
        """py-spy needs no help of the rank; a stopped one it may only read."""
        program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
        for rank, subject in self._subjects.items() if program else ():
            assert program is not None
            how = "--nonblocking" if subject.state == "T" else "--native"
            with (self._folder / f"rank{rank}.py-spy.txt").open("wb") as out:
                subject.spy = subprocess.Popen(
                    [program, "dump", "--pid", str(subject.pid), how], stdout=out, stderr=out
                )

    def _found(self, rank: int, subject: _Subject) -> dict[str, Any]:
        stacks = _text(f"{subject.report}{STACKS_SUFFIX}")
        told = _text(f"{subject.report}{COLLECTIVES_SUFFIX}")
        for name, text in (("stacks.txt", stacks), ("collectives.json", told)):
            if text:
                (self._folder / f"rank{rank}.{name}").write_text(text)
        spied = _text(self._folder / f"rank{rank}.py-spy.txt") if subject.spy else ""
        stack = main_stack(stacks) or main_stack(spied)
        return {
            "state": subject.state,
            "wchan": subject.wchan,
            "stack": stack,
            "answered": bool(told),
            "groups": _groups(told),
        }


def dump_variables(run: Path) -> dict[str, str]:
    """Has NCCL's flight recorder, where it dumps at all, dump into the run's folder: new and old name."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return dict.fromkeys(names, str(run / FOLDER / "nccl_trace_rank_"))


def main_stack(text: str) -> list[str]:
    """`function (file:line)` of the main thread, innermost first, from faulthandler or py-spy.

    faulthandler puts the main thread last, py-spy first.
    """
    threads: list[list[str]] = []
    spy = text.startswith("Process ")
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        found = (_PY_SPY_FRAME if spy else _FAULTHANDLER_FRAME).match(line)
        if found and threads:
            function, path, number = found.groups() if spy else (found[3], found[1], found[2])
            threads[-1].append(f"{function} ({path}:{number})"[-NAME_CHARS:])
    return threads[0 if spy else -1][:STACK_DEPTH] if threads else []


def _groups(told: str) -> list[dict[str, Any]]:
    """The process groups of a rank that can be understood of what it answered."""
    try:
        answer = json.loads(told)
        given = answer["groups"]
        return [
            {
                "group": str(g["group"])[:NAME_CHARS],
                "ranks": [int(rank) for rank in g["ranks"]],
                "entered": int(g["entered"]),
                **{name: None if g[name] is None else int(g[name]) for name in ("started", "finished")},
                "ops": {str(number): str(op)[:NAME_CHARS] for number, op in g["ops"].items()},
            }
            for g in given
        ]
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return []


def _witness(report: Path) -> int | None:
    """The process that promised to answer signals, by the beginning of its report."""
    for text in _text(report).splitlines():
        line = parse_line(text)
        if line and line["event"] == "witness" and "pid" in line:
            return int(line["pid"])
    return None


def _lasting(pid: int, family: list[int], looks: list[dict[int, str]]) -> str:
    for member in (pid, *family):
        if all(look[member] in "Tt" for look in looks):
            return "T"
    states = {look[pid] for look in looks}
    return states.pop() if len(states) == 1 else "?"


def _python_of(family: list[int]) -> int:
    """The first Python of a rank's processes: what was started may be a shell."""
    return next((pid for pid in family if _text(f"/proc/{pid}/comm").startswith("python")), family[0])


def _state(pid: int) -> str:
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1] or "?"


def _wchan(pid: int) -> str:
    return _text(f"/proc/{pid}/wchan").strip().strip("0")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _text(path: str | Path) -> str:
    return read_part(path, 0, TEXT_BYTES).decode(errors="replace")
