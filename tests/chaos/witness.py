"""Reads what the program of these tests recorded about its own executions, independently of ultrabench."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Execution:
    """One start of rank 0 of an attempt."""

    key: str
    """The attempt, as RUN_ID.REPEAT.ATTEMPT."""
    allocation: str
    host: str
    """The node of rank 0."""
    process: str
    """The pid and start time of rank 0."""
    started_s: float
    last_s: float
    """Time of its last sign of life, by the monotonic clock that all simulated nodes share."""
    ended: bool = False
    """Whether the program came to its own end, which a killed program does not."""

    def beside(self, other: "Execution") -> bool:
        """Whether both executions overlap in time."""
        return self.started_s <= other.last_s and other.started_s <= self.last_s


def executions_of(sweep: str, lines: Iterable[str]) -> list[Execution]:
    """The executions of a sweep, in order of their start.

    A line is SWEEP RUN_ID REPEAT ATTEMPT WORD ALLOCATION HOST PROCESS SECONDS, where WORD is start, step or end.
    """
    executions: dict[tuple[str, str], Execution] = {}
    for line in lines:
        name, run_id, repeat, attempt, event, allocation, host, process, seconds = line.split()
        key, t_s = f"{run_id}.{repeat}.{attempt}", float(seconds)
        if name != sweep:
            continue
        new = Execution(key=key, allocation=allocation, host=host, process=process, started_s=t_s, last_s=t_s)
        current = executions.setdefault((key, process), new)
        current.last_s, current.ended = max(current.last_s, t_s), current.ended or event == "end"
    return sorted(executions.values(), key=lambda execution: execution.started_s)
