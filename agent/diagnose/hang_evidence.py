"""The evidence of a hang from one node: the states, stacks and last collectives of its ranks."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ultrabench.agent.ranks.cleanup import EVIDENCE_FOLDER, MAX_TEXT_BYTES, file_size_bytes, read_text
from ultrabench.agent.ranks.rank_progress import RankEvent
from ultrabench.processes import descendants, tag_of
from ultrabench.rank_report import COLLECTIVES_SUFFIX, STACKS_SUFFIX, parse_line, read_or_nothing

ANSWER_TIMEOUT_S = 3.0
"""Seconds to wait for the answers of ranks; a rank that can answer does so immediately."""
PY_SPY_TIMEOUT_S = 10.0
"""Seconds to wait for py-spy."""
FATAL_DUMP_TIMEOUT_S = 1.0
"""Seconds to wait until a rank that was sent SIGABRT has written its stacks and ended."""
NUM_STATE_READS = 3
"""How many times the state of a process is read; only a state that lasts counts."""
STATE_READ_PAUSE_S = 0.02
"""Seconds between two reads of the state of a process."""
MAX_STACK_FRAMES = 40
"""Largest number of frames of a stack that are kept."""
MAX_NAME_CHARS = 300
"""Longest name of a function, a group or a collective, in characters."""

_FAULTHANDLER_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_PY_SPY_FRAME = re.compile(r"^    (?P<function>\S.*) \((?P<path>.+\.py|<\w+>):(?P<line>\d+)\)$")


class _ExaminedRank(NamedTuple):
    """A rank that is examined."""

    rank: int
    report_path: Path
    pid: int
    evidence: dict[str, Any]
    """What is known about it, as in `RankProgress.evidence`. The state is T if any process of the rank is stopped."""
    is_signalled: bool
    """Whether signals have asked the rank for its stacks and collectives."""


def hang_evidence(run_folder: Path, pid_by_rank: dict[int, int], tag: str) -> Iterator[list[RankEvent]]:
    """Asks every rank, then runs py-spy on it; yields [] while it waits for answers, then the events.

    Args:
        run_folder: node-local folder of the run; raw stacks and dumps go into its EVIDENCE_FOLDER.
        pid_by_rank: rank -> the process that was started as that rank.
        tag: the tag of the processes of the run; no other process is sent a signal.
    """
    examined_ranks = _ask_ranks(run_folder, pid_by_rank, tag)
    deadline_s, previous_bytes = time.monotonic() + ANSWER_TIMEOUT_S, -1
    while time.monotonic() < deadline_s:
        paths = [e.report_path for e in examined_ranks if e.is_signalled]
        stack_bytes = sum(file_size_bytes(f"{path}{STACKS_SUFFIX}") for path in paths)
        has_collectives = all(file_size_bytes(f"{path}{COLLECTIVES_SUFFIX}") for path in paths)
        if has_collectives and stack_bytes == previous_bytes:  # no rank is still writing its stacks
            break
        previous_bytes = stack_bytes
        yield []
    folder = run_folder / EVIDENCE_FOLDER
    py_spies = _start_py_spy(examined_ranks, folder)
    deadline_s = time.monotonic() + PY_SPY_TIMEOUT_S
    while any(py_spy.poll() is None for py_spy in py_spies) and time.monotonic() < deadline_s:
        yield []
    for py_spy in py_spies:
        py_spy.kill()
        py_spy.wait()
    yield [{"rank": e.rank, "evidence": _collect_evidence(e, folder)} for e in examined_ranks]


def _ask_ranks(run_folder: Path, pid_by_rank: dict[int, int], tag: str) -> list[_ExaminedRank]:
    """Reads the states of all processes of each rank, and signals the ranks that promised to answer."""
    family_by_rank = {rank: [pid, *sorted(descendants(pid))] for rank, pid in pid_by_rank.items()}
    states_by_read: list[dict[int, str]] = []
    for _ in range(NUM_STATE_READS):
        states_by_read.append({pid: _process_state(pid) for pids in family_by_rank.values() for pid in pids})
        time.sleep(STATE_READ_PAUSE_S)
    examined_ranks = []
    for rank, pids in family_by_rank.items():
        report_path = run_folder / f"rank{rank}.report"
        answering_pid = _promised_pid(report_path)
        pid = answering_pid if answering_pid in pids else _training_pid(pids)
        wchan = read_text(f"/proc/{pid}/wchan").strip().strip("0")
        evidence = {"state": _lasting_state(pid, pids, states_by_read), "wchan": wchan}
        is_signalled = answering_pid == pid and evidence["state"] not in "TZ" and tag_of(pid) == tag
        for signal_number in (signal.SIGUSR1, signal.SIGUSR2) if is_signalled else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        examined_ranks.append(_ExaminedRank(rank, report_path, pid, evidence, is_signalled))
    return examined_ranks


def _training_pid(family_pids: list[int]) -> int:
    """The process of a rank that trains; the process that was started may be a shell, whose child it is."""
    python_pids = (pid for pid in family_pids if read_text(f"/proc/{pid}/comm").startswith(("python", "pt_")))
    return next(python_pids, family_pids[0])


def fatal_stacks(
    run_folder: Path, pid_by_rank: dict[int, int], log_by_rank: dict[int, Path], all_pids: Iterable[int]
) -> Iterator[list[RankEvent]]:
    """Ends ranks by SIGABRT, on which Python writes its stacks; yields [] while it waits, then the events.

    It is for ranks of a run that is to be ended, since also a stopped process answers this signal. All processes are
    stopped first, so that no rank or starter reacts to the end of another one. What ranks have written to their logs
    meanwhile is moved to EVIDENCE_FOLDER, so that the logs show no failure that ultrabench has caused.

    Args:
        pid_by_rank: rank -> the process that was started as that rank.
        log_by_rank: rank -> its log, which several ranks may share.
        all_pids: all processes of the run on this node.
    """
    for pid in all_pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGSTOP)
    stack_by_rank: dict[int, list[str]] = {}
    for rank, first_pid in pid_by_rank.items():
        pid, log_path = _training_pid([first_pid, *sorted(descendants(first_pid))]), log_by_rank[rank]
        log_bytes, deadline_s = file_size_bytes(log_path), time.monotonic() + FATAL_DUMP_TIMEOUT_S
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            os.kill(pid, signal.SIGABRT)
            os.kill(pid, signal.SIGCONT)
        while _process_state(pid) not in "ZX?" and time.monotonic() < deadline_s:
            yield []
        with contextlib.suppress(OSError):
            stacks_text = read_or_nothing(log_path, log_bytes, MAX_TEXT_BYTES).decode(errors="replace")
            if stacks_text:
                (run_folder / EVIDENCE_FOLDER / f"rank{rank}.stacks.txt").write_text(stacks_text)
                os.truncate(log_path, log_bytes)
            stack_by_rank[rank] = main_stack(stacks_text)
    yield [{"rank": rank, "stack": stack_by_rank.get(rank, [])} for rank in log_by_rank]


def _start_py_spy(examined_ranks: list[_ExaminedRank], folder: Path) -> list[subprocess.Popen[bytes]]:
    """Starts py-spy, if it is installed, on each rank; on a stopped rank it only reads the memory."""
    py_spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    processes = []
    for examined in examined_ranks if py_spy else ():
        mode_option = "--nonblocking" if examined.evidence["state"] == "T" else "--native"
        command = [str(py_spy), "dump", "--pid", str(examined.pid), mode_option]
        with (folder / f"rank{examined.rank}.py-spy.txt").open("wb") as output:
            processes.append(subprocess.Popen(command, stdout=output, stderr=output))
    return processes


def _collect_evidence(examined: _ExaminedRank, folder: Path) -> dict[str, Any]:
    stacks_text = read_text(f"{examined.report_path}{STACKS_SUFFIX}")
    collectives_text = read_text(f"{examined.report_path}{COLLECTIVES_SUFFIX}")
    for suffix, text in (("stacks.txt", stacks_text), ("collectives.json", collectives_text)):
        if text:
            (folder / f"rank{examined.rank}.{suffix}").write_text(text)
    stack = main_stack(stacks_text) or main_stack(read_text(folder / f"rank{examined.rank}.py-spy.txt"))
    return {**examined.evidence, "stack": stack, "groups": _checked_groups(collectives_text)}


def dump_variables(run_folder: Path) -> dict[str, str]:
    """The variables by which the flight recorder of NCCL, if it is on, writes to the folder of the run."""
    # New versions of torch read the first name, old ones the second.
    variable_names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return dict.fromkeys(variable_names, str(run_folder / EVIDENCE_FOLDER / "nccl_trace_rank_"))


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
            stacks[-1].append(f"{frame['function']} ({frame['path']}:{frame['line']})"[-MAX_NAME_CHARS:])
    return stacks[0 if is_py_spy else -1][:MAX_STACK_FRAMES] if stacks else []


def _checked_groups(collectives_text: str) -> list[dict[str, Any]]:
    """The process groups in the answer of a rank; none if the answer is invalid."""
    try:
        return [_checked_group(group) for group in json.loads(collectives_text)["groups"]]
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return []


def _checked_group(report: dict[str, Any]) -> dict[str, Any]:
    """A process group of an answer, with values of the right types and of bounded size."""
    group, ranks = str(report["group"])[:MAX_NAME_CHARS], [int(rank) for rank in report["ranks"]]
    counts = {key: None if report[key] is None else int(report[key]) for key in ("started", "finished")}
    ops = {str(number): str(op)[:MAX_NAME_CHARS] for number, op in report["ops"].items()}
    return {"group": group, "ranks": ranks, "entered": int(report["entered"]), **counts, "ops": ops}


def _promised_pid(report_path: Path) -> int | None:
    """The process that promised, at the beginning of the report, to answer signals with its stacks."""
    lines = (parse_line(line_text) for line_text in read_text(report_path).splitlines())
    promises = (line for line in lines if line and line["event"] == "stack_dump" and "pid" in line)
    return next((promise["pid"] for promise in promises), None)


def _lasting_state(pid: int, family_pids: list[int], states_by_read: list[dict[int, str]]) -> str:
    """The state of `pid` if it was the same in all reads; T if any process of its family stays stopped."""
    if any(all(states[member] in "Tt" for states in states_by_read) for member in family_pids):
        return "T"
    pid_states = {states[pid] for states in states_by_read}
    return pid_states.pop() if len(pid_states) == 1 else "?"


def _process_state(pid: int) -> str:
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1] or "?"
