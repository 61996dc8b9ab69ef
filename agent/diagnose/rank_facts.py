"""What one rank was doing when its run hung."""

from dataclasses import dataclass
from typing import Any

from ultrabench.agent.ranks.rank_progress import RankProgress

WAITING = frozenset({
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "irecv", "isend", "monitored_barrier", "recv", "reduce_scatter", "reduce_scatter_tensor",
    "send", "synchronize", "wait", "wait_tensor",
})  # fmt: skip
"""Functions of torch in which a rank waits for others."""
INNER_FRAMES = 6
"""How many of the innermost frames are searched for a function in which the rank waits."""


UNKNOWN: dict[str, Any] = {"state": "?", "wchan": "", "stack": (), "groups": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A collective that a rank has entered and not finished."""

    group: str
    ranks: tuple[int, ...]
    number: int
    op: str
    started: bool | None
    """Whether its device has begun it; None where that is unknown."""

    def __str__(self) -> str:
        return f"{self.op} #{self.number} of group {self.group}"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank of a run that hangs: what it reported, and what its node found."""

    rank: int
    host: str
    progress: RankProgress

    @property
    def found(self) -> dict[str, Any]:
        """What its node found: {state, wchan, stack, groups}.

        `state` is R (runs), S (sleeps), D (waits for a device or disk), T (is stopped), Z (is dead) or ?
        (unknown), `wchan` the function of the kernel in which it sleeps, `stack` the frames of its main thread
        as `function (file:line)`, innermost first. `groups` has {group, ranks, entered, started, finished,
        ops} for each process group, and is empty if the rank did not answer.
        """
        return UNKNOWN | (self.progress.found or {})

    @property
    def step(self) -> int:
        """The step it is in, or how many steps it has reported."""
        return self.progress.step or len(self.progress.steps)

    @property
    def name(self) -> str:
        """The rank and its host."""
        return f"rank {self.rank} on {self.host}"

    @property
    def where(self) -> str | None:
        """The innermost function that is not torch's own, with the end of its path."""
        own = (f for f in self.found["stack"] if "/torch/" not in f)
        frame = next(own, None) or next(iter(self.found["stack"]), None)
        if frame is None:
            return None
        function, _, place = frame.partition(" (")
        return f"{function} ({'/'.join(place.split('/')[-2:])}"

    @property
    def pending(self) -> tuple[Pending, ...]:
        """The collective that it has not finished, for each group where there is one."""
        found = []
        for g in self.found["groups"]:
            number = (g["finished"] or 0) + 1
            if g["finished"] is not None and number <= g["entered"]:
                started = None if g["started"] is None else g["started"] >= number
                op = g["ops"].get(str(number), "collective")
                ranks = tuple(g["ranks"])
                found.append(Pending(group=g["group"], ranks=ranks, number=number, op=op, started=started))
        return tuple(found)

    @property
    def waits_in(self) -> str | None:
        """The collective, or the function of torch, in which it waits for others."""
        inner = [f.partition(" ")[0] for f in self.found["stack"][:INNER_FRAMES] if "/torch/" in f]
        called = next((name for name in reversed(inner) if name in WAITING), None)
        return str(self.pending[0]) if self.pending else called

    def entered(self, group: str, ranks: tuple[int, ...]) -> int | None:
        """How many collectives of a group it has entered; None where it did not report that."""
        same = (g for g in self.found["groups"] if g["group"] == group and tuple(g["ranks"]) == ranks)
        return next((g["entered"] for g in same), None)

    def row(self) -> dict[str, Any]:
        """The row of this rank in the table of `sweep show`."""
        told, groups = self.progress, self.found["groups"]
        latest = max(groups, key=lambda g: int(g["entered"]), default=None)
        last = f"#{latest['entered']} of {latest['group']}, done" if latest and latest["entered"] else ""
        return {
            "rank": self.rank,
            "host": self.host,
            "state": self.found["state"] if told.code is None else f"exited {told.code}",
            "phase": told.phase,
            "step": self.step,
            "part": told.part,
            "microbatches": told.microbatches,
            "collective": self.waits_in or last,
            "at": self.where,
        }
