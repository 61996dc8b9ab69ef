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

ANSWER_TIMEOUT_S = 3.0
"""Seconds to wait for the answers of ranks; a rank that can answer does so immediately."""
PY_SPY_TIMEOUT_S = 10.0
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
    """What is known about it, as in `RankProgress.evidence`. The state is T if any process of the rank is stopped."""
    is_signalled: bool
    """Whether signals have asked the rank for its stacks and collectives."""


def hang_evidence(run_folder: Path, pids: dict[int, int], tag: str) -> Iterator[list[RankEvent]]:
    """Asks every rank, then runs py-spy on it; yields [] while it waits for answers, then the events.

    Args:
        run_folder: node-local folder of the run; raw stacks and dumps go into its EVIDENCE_FOLDER.
        pids: rank -> the process that was started as that rank.
        tag: the tag of the processes of the run; no other process is sent a signal.
    """
    subjects = _ask_ranks(run_folder, pids, tag)
    deadline_s, previous_bytes = time.monotonic() + ANSWER_TIMEOUT_S, -1
    while time.monotonic() < deadline_s:
        reports = [s.report for s in subjects if s.is_signalled]
        stack_bytes = sum(file_size(f"{report}{STACKS_SUFFIX}") for report in reports)
        has_collectives = all(file_size(f"{report}{COLLECTIVES_SUFFIX}") for report in reports)
        if has_collectives and stack_bytes == previous_bytes:  # no rank is still writing its stacks
            break
        previous_bytes = stack_bytes
        yield []
    folder = run_folder / EVIDENCE_FOLDER
    spies = _start_py_spy(subjects, folder)
    deadline_s = time.monotonic() + PY_SPY_TIMEOUT_S
    while any(spy.poll() is None for spy in spies) and time.monotonic() < deadline_s:
        yield []
    for spy in spies:
        spy.kill()
        spy.wait()
    yield [{"rank": s.rank, "evidence": _collect_evidence(s, folder)} for s in subjects]


def _ask_ranks(run_folder: Path, pids: dict[int, int], tag: str) -> list[_Subject]:
    """Reads the states of all processes of each rank, and signals the ranks that promised to answer."""
    family_by_rank = {rank: [pid, *sorted(descendants(pid))] for rank, pid in pids.items()}
    reads: list[dict[int, str]] = []
    for _ in range(STATE_READS):
        reads.append({pid: _state(pid) for family in family_by_rank.values() for pid in family})
        time.sleep(BETWEEN_READS_S)
    subjects = []
    for rank, family in family_by_rank.items():
        report = run_folder / f"rank{rank}.report"
        answering_pid = _dumping_process(report)
        # The process that was started may be a shell, whose child is the rank.
        python_pids = (pid for pid in family if read_text(f"/proc/{pid}/comm").startswith("python"))
        pid = answering_pid if answering_pid in family else next(python_pids, family[0])
        wchan = read_text(f"/proc/{pid}/wchan").strip().strip("0")
        evidence = {"state": _lasting_state(pid, family, reads), "wchan": wchan}
        is_signalled = answering_pid == pid and evidence["state"] not in "TZ" and tag_of(pid) == tag
        for signal_number in (signal.SIGUSR1, signal.SIGUSR2) if is_signalled else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        subjects.append(_Subject(rank, report, pid, evidence, is_signalled))
    return subjects


def _start_py_spy(subjects: list[_Subject], folder: Path) -> list[subprocess.Popen[bytes]]:
    """Starts py-spy, if it is installed, on each rank; on a stopped rank it only reads the memory."""
    py_spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    processes = []
    for subject in subjects if py_spy else ():
        mode = "--nonblocking" if subject.evidence["state"] == "T" else "--native"
        command = [str(py_spy), "dump", "--pid", str(subject.pid), mode]
        with (folder / f"rank{subject.rank}.py-spy.txt").open("wb") as output:
            processes.append(subprocess.Popen(command, stdout=output, stderr=output))
    return processes


def _collect_evidence(subject: _Subject, folder: Path) -> dict[str, Any]:
    stacks_text = read_text(f"{subject.report}{STACKS_SUFFIX}")
    collectives_text = read_text(f"{subject.report}{COLLECTIVES_SUFFIX}")
    for name, text in (("stacks.txt", stacks_text), ("collectives.json", collectives_text)):
        if text:
            (folder / f"rank{subject.rank}.{name}").write_text(text)
    stack = main_stack(stacks_text) or main_stack(read_text(folder / f"rank{subject.rank}.py-spy.txt"))
    return {**subject.evidence, "stack": stack, "groups": _checked_groups(collectives_text)}


def dump_variables(run_folder: Path) -> dict[str, str]:
    """The variables by which the flight recorder of NCCL, if it is on, writes to the folder of the run."""
    # New versions of torch read the first name, old ones the second.
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return dict.fromkeys(names, str(run_folder / EVIDENCE_FOLDER / "nccl_trace_rank_"))


def main_stack(text: str) -> list[str]:
    """The frames of the main thread as `function (file:line)`, innermost first, from faulthandler or py-spy.

    faulthandler writes the main thread last, py-spy first.
    """
    stacks: list[list[str]] = []
    is_py_spy = text.startswith("Process ")
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            stacks.append([])
        frame = (_PY_SPY_FRAME if is_py_spy else _FAULTHANDLER_FRAME).match(line)
        if frame and stacks:
            stacks[-1].append(f"{frame['function']} ({frame['path']}:{frame['line']})"[-NAME_CHARS:])
    return stacks[0 if is_py_spy else -1][:STACK_DEPTH] if stacks else []


def _checked_groups(collectives_text: str) -> list[dict[str, Any]]:
    """The process groups in the answer of a rank; none if the answer is invalid."""
    try:
        return [_checked_group(group) for group in json.loads(collectives_text)["groups"]]
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return []


def _checked_group(reported: dict[str, Any]) -> dict[str, Any]:
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


def _lasting_state(pid: int, family: list[int], reads: list[dict[int, str]]) -> str:
    """The state of `pid` if it was the same in all reads; T if any process of its family stays stopped."""
    if any(all(states[member] in "Tt" for states in reads) for member in family):
        return "T"
    pid_states = {states[pid] for states in reads}
    return pid_states.pop() if len(pid_states) == 1 else "?"


def _state(pid: int) -> str:
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1] or "?"
