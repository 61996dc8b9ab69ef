"""Processes whose steps are put on a tape: run again with the answers they have had, they go on from there.

A process is its program and what its steps have given so far; to take one more it is run again from its
beginning (a launcher: of its current look).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

from tests.strategies import written
from ultrabench.launchers.allocation_ends import LaunchMemory
from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.store.events import NAMES, Event, Line, Submitting
from ultrabench.store.state import SweepState, fold

WHOLE = 99
"""More steps than a block has."""


class Halt(BaseException):
    """The process stands before its next step, or is dead."""


@dataclass(frozen=True)
class Process:
    """A launcher or the leading agent of a start of a job."""

    name: str
    answers: tuple[Any, ...] = ()
    """Of its steps so far; of a launcher, since it last began to look."""
    latest: dict[str, Any] = field(default_factory=dict)
    """What of the answers its future depends on: the latest of each kind."""
    seq: int = 0
    """Lines it had written before them."""
    memory: LaunchMemory | None = None
    """Of a launcher: what it remembers from one look to the next; None before its first look."""
    over: bool = False

    @cached_property
    def key(self) -> Any:
        """Equal for processes with the same future."""
        memory, latest = _frozen(self.memory), frozenset(self.latest.items())
        return self.name, len(self.answers), latest, self.seq, memory, self.over


def _frozen(value: Any) -> Any:
    if is_dataclass(value):
        return tuple(_frozen(getattr(value, member.name)) for member in fields(value))
    if isinstance(value, dict):
        return frozenset((key, _frozen(content)) for key, content in value.items())
    return frozenset(value) if isinstance(value, set) else value


class Tape:
    """Gives a process the answers it has had, then lets it take new steps."""

    def __init__(self, process: Process, max_steps: int) -> None:
        self.answers, self.latest = list(process.answers), dict(process.latest)
        self._at, self._max_steps = 0, max_steps
        self._actions: list[str] = []
        self.new = 0
        """Number of new steps."""
        self.coarse = False
        """Its looking around is one step."""
        self.last = ""
        """Its latest step."""

    def summary(self, who: str) -> str:
        """What it has done now, in words."""
        return f"{who}: {', '.join(self._actions)}{' and dies' if self._max_steps != WHOLE else ''}"

    def step(self, take: Callable[[], Any], *, action: str, wait: bool = False, kind: str = "") -> Any:
        """The answer of a step.

        Args:
            wait: others may come before it.
            kind: of what it tells the process, which an answer of the same kind replaces.
        """
        if self._at == len(self.answers):
            if self.new >= self._max_steps or (wait and self.new and not (self.coarse and action == "reads")):
                raise Halt
            answer = take()
            self.new += 1
            self._actions.append(action)
            self.answers.append(answer)
            if kind:
                self.latest[kind] = id(answer) if kind == "state" else repr(answer)
        self._at, self.last = self._at + 1, action
        return self.answers[self._at - 1]


Journal = dict[tuple[str, int, int], Line]
"""Writer, number and checksum of a line -> the line."""


class TapedJournal:
    """A journal writer that outlives the runs of its process; others may come before it writes an event of `waits`."""

    def __init__(
        self, journal: Journal, process: Process, tape: Tape, waits: tuple[type[Event], ...] = ()
    ) -> None:
        self.name, self.seq, self._journal, self._tape = process.name, process.seq, journal, tape
        self._waits = waits

    def write(self, event: Event) -> None:
        def take() -> None:
            line = written(event, writer=self.name, seq=self.seq)
            self._journal[self.name, self.seq, line.checksum] = line
            if isinstance(event, Submitting):  # what follows is in its lines
                self._tape.latest.clear()

        wait = isinstance(event, self._waits)
        self._tape.step(take, action=f"writes {NAMES[type(event)]}", wait=wait)
        self.seq += 1


@dataclass(slots=True, kw_only=True)
class TapedSweep(OpenSweep):
    """An open sweep that reads and folds all journals at once, in one step."""

    tape: Tape
    lines: Journal
    folds: dict[frozenset[tuple[str, int, int]], SweepState]
    """All lines -> their fold."""
    _state: SweepState = field(default_factory=SweepState)

    def state(self) -> SweepState:
        # Read again with nothing in between, it is the later reading that counts.
        wait = self.tape.last != "reads"
        latest = self.tape.step(self._read, action="reads", wait=wait, kind="state")
        for member in fields(SweepState):  # always the same object, as the real one: what was known is gone
            setattr(self._state, member.name, getattr(latest, member.name))
        return self._state

    def owner_of(self, name: str) -> str | None:
        read = super(TapedSweep, self).owner_of
        return self.tape.step(lambda: read(name), action=f"reads claim {name}", kind=f"claim {name}")

    def give_up(self, name: str) -> bool:
        claim = super(TapedSweep, self).give_up
        return self.tape.step(lambda: claim(name), action=f"gives up {name}", kind=f"claim {name}")

    def _read(self) -> SweepState:
        content = frozenset(self.lines)
        if content not in self.folds:
            self.folds[content] = fold(self.lines.values())
        return self.folds[content]
