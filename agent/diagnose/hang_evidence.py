"""The evidence of a hang from one node: the states, stacks and last collectives of its ranks."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ultrabench.agent.ranks.cleanup import EVIDENCE_FOLDER, file_size, read_text
from ultrabench.agent.ranks.rank_progress import RankEvent
from ultrabench.processes import descendants, tag_of
from ultrabench.rank_report import COLLECTIVES_SUFFIX, STACKS_SUFFIX, parse_line

ANSWER_S = 3.0
"""Seconds to wait for the answers of ranks; one that can answer does so at once."""
PY_SPY_S = 10.0
"""Seconds to wait for py-spy."""
STATE_READS = 3
"""How many times the state of a process is read; only a state that lasts counts."""
BETWEEN_READS_S = 0.02
"""Seconds between two reads of the state of a process."""
STACK_DEPTH = 40
"""Largest number of frames of a stack that are kept."""
NAME_CHARS = 300
"""Longest name of a function, a group or a collective, in characters."""

_FAULTHANDLER_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_PY_SPY_FRAME = re.compile(r"^    (?P<function>\S.*) \((?P<path>.+\.py|<\w+>):(?P<line>\d+)\)$")


class _Subject(NamedTuple):
    """A rank that is examined."""

    rank: int
    report: Path
    pid: int
    evidence: dict[str, Any]
    """What is known of it, as in `RankProgress.evidence`. The state is T if any process of the rank is stopped."""
    signalled: bool
    """The rank was asked by signals for its stacks and collectives."""


def hang_evidence(run: Path, pids: dict[int, int], tag: str) -> Iterator[list[RankEvent]]:
    """Asks every rank, then runs py-spy on it; yields [] while it waits for answers, then the events.

    Args:
        run: node-local folder of the run; raw stacks and dumps go into its EVIDENCE_FOLDER.
        pids: rank -> the process that was started as that rank.
        tag: the tag of the processes of the run; no other process is sent a signal.
    """
    subjects = _asked(run, pids, tag)
    end, before = time.monotonic() + ANSWER_S, -1
    while time.monotonic() < end:
        reports = [s.report for s in subjects if s.signalled]
        written = sum(file_size(f"{report}{STACKS_SUFFIX}") for report in reports)
        # All ranks that were asked have written their collectives, and none is still writing stacks.
        if written == before and all(file_size(f"{report}{COLLECTIVES_SUFFIX}") for report in reports):
            break
        before = written
        yield []
    folder = run / EVIDENCE_FOLDER
    spies = _spies(subjects, folder)
    end = time.monotonic() + PY_SPY_S
    while any(spy.poll() is None for spy in spies) and time.monotonic() < end:
        yield []
    for spy in spies:
        spy.kill()
        spy.wait()
    yield [{"rank": s.rank, "evidence": _evidence_of(s, folder)} for s in subjects]


def _asked(run: Path, pids: dict[int, int], tag: str) -> list[_Subject]:
    """Reads the states of all processes of each rank, and asks the ranks that promised to answer."""
    families = {rank: [pid, *sorted(descendants(pid))] for rank, pid in pids.items()}
    looks: list[dict[int, str]] = []
    for _ in range(STATE_READS):
        looks.append({p: _state(p) for family in families.values() for p in family})
        time.sleep(BETWEEN_READS_S)
    subjects = []
    for rank, family in families.items():
        report = run / f"rank{rank}.report"
        promised = _dumping_process(report)
        # The process that was started may be a shell.
        pythons = (pid for pid in family if read_text(f"/proc/{pid}/comm").startswith("python"))
        pid = promised if promised in family else next(pythons, family[0])
        wchan = read_text(f"/proc/{pid}/wchan").strip().strip("0")
        evidence = {"state": _lasting(pid, family, looks), "wchan": wchan}
        signalled = promised == pid and evidence["state"] not in "TZ" and tag_of(pid) == tag
        for number in (signal.SIGUSR1, signal.SIGUSR2) if signalled else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        subjects.append(_Subject(rank=rank, report=report, pid=pid, evidence=evidence, signalled=signalled))
    return subjects


def _spies(subjects: list[_Subject], folder: Path) -> list[subprocess.Popen[bytes]]:
    """Starts py-spy on each rank, if it is installed; of a stopped rank it may only read the memory."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    spies = []
    for subject in subjects if program else ():
        how = "--nonblocking" if subject.evidence["state"] == "T" else "--native"
        command = [str(program), "dump", "--pid", str(subject.pid), how]
        with (folder / f"rank{subject.rank}.py-spy.txt").open("wb") as out:
            spies.append(subprocess.Popen(command, stdout=out, stderr=out))
    return spies


def _evidence_of(subject: _Subject, folder: Path) -> dict[str, Any]:
    stacks = read_text(f"{subject.report}{STACKS_SUFFIX}")
    collectives = read_text(f"{subject.report}{COLLECTIVES_SUFFIX}")
    for name, text in (("stacks.txt", stacks), ("collectives.json", collectives)):
        if text:
            (folder / f"rank{subject.rank}.{name}").write_text(text)
    stack = main_stack(stacks) or main_stack(read_text(folder / f"rank{subject.rank}.py-spy.txt"))
    return {**subject.evidence, "stack": stack, "groups": _groups(collectives)}


def dump_variables(run: Path) -> dict[str, str]:
    """The variables by which the flight recorder of NCCL, if it is on, writes to the folder of the run."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # the new name and the old one
    return dict.fromkeys(names, str(run / EVIDENCE_FOLDER / "nccl_trace_rank_"))


def main_stack(text: str) -> list[str]:
    """The frames of the main thread as `function (file:line)`, innermost first, from faulthandler or py-spy.

    faulthandler writes the main thread last, py-spy first.
    """
    threads: list[list[str]] = []
    spy = text.startswith("Process ")
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append([])
        frame = (_PY_SPY_FRAME if spy else _FAULTHANDLER_FRAME).match(line)
        if frame and threads:
            threads[-1].append(f"{frame['function']} ({frame['path']}:{frame['line']})"[-NAME_CHARS:])
    return threads[0 if spy else -1][:STACK_DEPTH] if threads else []


def _groups(collectives: str) -> list[dict[str, Any]]:
    """The process groups in the answer of a rank; none if the answer is invalid."""
    try:
        return [_group(reported) for reported in json.loads(collectives)["groups"]]
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return []


def _group(reported: dict[str, Any]) -> dict[str, Any]:
    """A process group of an answer, with values of the right types and of bounded size."""
    name, ranks = str(reported["group"])[:NAME_CHARS], [int(rank) for rank in reported["ranks"]]
    counts = {key: None if reported[key] is None else int(reported[key]) for key in ("started", "finished")}
    ops = {str(number): str(op)[:NAME_CHARS] for number, op in reported["ops"].items()}
    return {"group": name, "ranks": ranks, "entered": int(reported["entered"]), **counts, "ops": ops}


def _dumping_process(report: Path) -> int | None:
    """The process that promised, at the beginning of the report, to answer signals with its stacks."""
    lines = (parse_line(text) for text in read_text(report).splitlines())
    promises = (line for line in lines if line and line["event"] == "stack_dump" and "pid" in line)
    return next((promise["pid"] for promise in promises), None)


def _lasting(pid: int, family: list[int], looks: list[dict[int, str]]) -> str:
    """The state of `pid` if it was the same in all looks; T if any process of its family stays stopped."""
    if any(all(look[member] in "Tt" for look in looks) for member in family):
        return "T"
    states = {look[pid] for look in looks}
    return states.pop() if len(states) == 1 else "?"


def _state(pid: int) -> str:
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1] or "?"
