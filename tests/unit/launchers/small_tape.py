"""Processes whose steps are put on a tape: run again with the answers they have had, they go on from there.

A process is its program and what its steps have given so far; to take one more it is run again from its
beginning (a launcher: of its current look). Journals and claims are real files.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ultrabench.launchers.open_sweep import OpenSweep
from ultrabench.store.events import NAMES, Event, Submitting
from ultrabench.store.journal import JournalWriter, read_journal
from ultrabench.store.state import SweepState, fold

WHOLE = 99
"""More steps than a block has."""
PLAIN = (int, str, set, frozenset, dict, float, type(None))


class Halt(BaseException):
    """The process stands before its next step, or is dead."""


@dataclass(frozen=True)
class Process:
    """A launcher or the leading agent of a start of a job."""

    name: str
    answers: tuple[Any, ...] = ()
    """Of its steps so far; of a launcher, since it last began to look."""
    known: dict[str, Any] = field(default_factory=dict)
    """What of the answers its future depends on: the latest of each kind."""
    seq: int = 0
    """Lines it had written before them."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Of a launcher: what its reconciler remembers from one look to the next."""
    over: bool = False

    @cached_property
    def key(self) -> Any:
        """Equal for processes with the same future."""
        memory, known = _frozen(self.memory), frozenset(self.known.items())
        return self.name, len(self.answers), known, self.seq, memory, self.over


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return frozenset((key, _frozen(held)) for key, held in value.items())
    return frozenset(value) if isinstance(value, set) else value


class Tape:
    """Gives a process the answers it has had, then lets it take new steps."""

    def __init__(self, process: Process, most: int) -> None:
        self.answers, self.known = list(process.answers), dict(process.known)
        self._at, self._new, self._most = 0, 0, most
        self._words: list[str] = []
        self.coarse = False
        """Its looking around is one step."""
        self.last = ""
        """Its latest step."""
        self.dying = False
        """The next step is cut short; a write then leaves half a line."""

    @property
    def new(self) -> int:
        return self._new

    def told(self, who: str) -> str:
        """What it has done now, in words."""
        return f"{who}: {', '.join(self._words)}{' and dies' if self._most != WHOLE else ''}"

    def step(self, take: Callable[[], Any], *, word: str, wait: bool = False, kind: str = "") -> Any:
        """The answer of a step.

        Args:
            wait: others may come before it.
            kind: of what it tells the process, which an answer of the same kind replaces.
        """
        if self._at == len(self.answers):
            if self._new >= self._most or (wait and self._new and not (self.coarse and word == "reads")):
                self.dying = self._new >= self._most
                raise Halt
            answer = take()
            self._new += 1
            self._words.append(word)
            self.answers.append(answer)
            if kind:
                self.known[kind] = id(answer) if kind == "state" else repr(answer)
        self._at, self.last = self._at + 1, word
        return self.answers[self._at - 1]


class TapedJournal:
    """A journal writer that outlives the runs of its process, and dies with it in mid-line."""

    def __init__(self, folder: Path, process: Process, tape: Tape) -> None:
        self._writer = JournalWriter(folder, "process")
        self._writer.name, self._writer.path = process.name, folder / f"{process.name}.jsonl"
        self._writer._seq = process.seq
        self.name, self.path, self._tape, self._seq = process.name, self._writer.path, tape, process.seq

    @property
    def seq(self) -> int:
        """Lines written so far."""
        return self._seq

    def write(self, event: Event, *, wait: bool = False) -> None:
        def take() -> None:
            self._writer._seq = self._seq
            self._writer.write(event)
            self._writer._close()
            if isinstance(event, Submitting):  # what follows is in its lines
                self._tape.known.clear()

        try:
            self._tape.step(take, word=f"writes {NAMES[type(event)]}", wait=wait)
        except Halt:
            if self._tape.dying:
                with self.path.open("ab") as file:
                    file.write(b'{"v":1,"writer":"half of a li')
            raise
        self._seq += 1


@dataclass(slots=True, kw_only=True)
class TapedSweep(OpenSweep):
    """An open sweep that reads and folds all journals at once, in one step."""

    tape: Tape
    folds: dict[bytes, SweepState]
    """Content of all journals -> their fold."""
    told: dict[str, bytes]
    """Content of the journals, in which meanwhile only its own has changed."""
    _held: SweepState = field(default_factory=SweepState)

    def state(self) -> SweepState:
        # Read again with nothing in between, it is the later reading that counts.
        wait = self.tape.last != "reads"
        found = self.tape.step(self._read, word="reads", wait=wait, kind="state")
        for each in fields(SweepState):  # always the same object, as the real one: what was known is gone
            setattr(self._held, each.name, getattr(found, each.name))
        return self._held

    def owner_of(self, name: str) -> str | None:
        read = super(TapedSweep, self).owner_of
        return self.tape.step(lambda: read(name), word=f"reads claim {name}", kind=f"claim {name}")

    def give_up(self, name: str) -> bool:
        claim = super(TapedSweep, self).give_up
        return self.tape.step(lambda: claim(name), word=f"gives up {name}", kind=f"claim {name}")

    def _read(self) -> SweepState:
        if self.tape.new and self.journal.path.exists():
            self.told[f"journal/{self.journal.path.name}"] = self.journal.path.read_bytes()
        content = b"".join(lines for _, lines in sorted(self.told.items()))
        if content not in self.folds:
            self.folds[content] = fold(read_journal(self.folder.journal))
        return self.folds[content]
