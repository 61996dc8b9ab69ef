"""Why a run hangs: which ranks the others wait for, found from what every rank was doing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.rank_report import PARTS

NAMED = 4
"""How many ranks are named one by one; of more the rest is counted."""


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
        (unknown), `wchan` the function of the kernel in which it sleeps, `stack` the frames of its main
        thread as `function (file:line)`, innermost first. `groups` has {group, ranks, entered, started,
        finished, ops} for each process group, and is empty if the rank did not answer.
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


Ranks = Sequence[RankFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class HangCause:
    """The cause of a hang in a line and in a paragraph, with the ranks that are to blame."""

    headline: str
    details: tuple[str, ...] = ()
    blamed: tuple[RankFacts, ...] = ()

    @property
    def text(self) -> str:
        """The headline and the details as one paragraph."""
        return ". ".join((self.headline, *self.details)) + "."

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the ranks that are to blame."""
        return tuple(sorted({r.host for r in self.blamed}))


def find_hang_cause(ranks: Ranks) -> HangCause:
    """Which ranks are behind or missing, and how that shows.

    Ranks that have left or are stopped explain everything; then the order of collectives is
    looked at, then who is busy while others wait, and at last who has done the least.
    """
    alive = [r for r in ranks if r.progress.code is None]
    for test in TESTS:
        if found := test(ranks, alive):
            return found
    if not alive:
        return HangCause(headline="all ranks had ended")
    at = f"phase {alive[0].progress.phase}" + (f", step {alive[0].step}" if alive[0].step else "")
    headline = f"no rank stands out of {len(alive)}: rank {alive[0].rank} is in {at}"
    return HangCause(headline=headline, details=_places(alive[:1]))


def _left(ranks: Ranks, alive: Ranks) -> HangCause | None:
    """Ranks that ended before they were done, while others wait for them."""
    gone = [r for r in ranks if r.progress.code is not None and r.progress.done is None]
    if not gone or not alive or (any(r.found["groups"] for r in alive) and not _direct(alive, gone)):
        return None
    first = gone[0].progress
    return _blame(f"exited with code {first.code} in phase {first.phase}, not done", gone, alive)


def _stopped(_: Ranks, alive: Ranks) -> HangCause | None:
    stopped = [r for r in alive if r.found["state"] == "T"]
    dead = [r for r in alive if r.found["state"] == "Z"]
    if stopped:
        return _blame("is stopped (state T), as by SIGSTOP", stopped, alive)
    return _blame("is dead, and nobody has noticed (state Z)", dead, alive) if dead else None


def _missing(ranks: Ranks, alive: Ranks) -> HangCause | None:
    """A collective that some ranks entered and others did not: those that wait for nobody are the cause."""
    by_rank = {r.rank: r for r in ranks}
    awaited: dict[int, Counter[Pending]] = {}
    waiters = set()
    for r in alive:
        for p in r.pending:
            for member in (by_rank[m] for m in p.ranks if m != r.rank and m in by_rank):
                entered = member.entered(p.group, p.ranks)
                if entered is None or entered < p.number:
                    awaited.setdefault(member.rank, Counter())[replace(p, started=None)] += 1
                    waiters.add(r.rank)
    roots = [by_rank[rank] for rank in sorted(awaited) if rank not in waiters]
    told = [r for r in roots if r.found["groups"]] or roots
    # Of two that are missing, one may be waiting for the other in a way that no record holds.
    told = [r for r in told if not r.waits_in] or told
    if not told:
        return _each_other([by_rank[rank] for rank in sorted(waiters)]) if awaited else None
    at = awaited[told[0].rank].most_common(1)[0][0]
    same = [r for r in told if at in awaited[r.rank]]
    return _blame(f"never entered {at}", same, alive)


def _each_other(stuck: Ranks) -> HangCause:
    shown = ", ".join(f"rank {r.rank} is in {r.waits_in}" for r in stuck[:NAMED])
    headline = f"ranks wait for each other in different collectives: {shown}"
    details = ("They call collectives in different orders", *_places(stuck))
    return HangCause(headline=headline, details=details, blamed=tuple(stuck))


def _different(_: Ranks, alive: Ranks) -> HangCause | None:
    """Members of a group that call different collectives under the same number, or whose devices lag."""
    by_place: dict[tuple[str, tuple[int, ...], int], list[tuple[RankFacts, Pending]]] = {}
    for r in alive:
        for p in r.pending:
            by_place.setdefault((p.group, p.ranks, p.number), []).append((r, p))
    for members in by_place.values():
        usual, count = Counter(p.op for _, p in members).most_common(1)[0]
        odd = [(r, p) for r, p in members if p.op != usual]
        if odd and count < len(members):
            what = f"entered {odd[0][1]} where others entered {usual}"
            return _blame(what, [r for r, p in odd if p.op == odd[0][1].op], alive)
        late = [(r, p) for r, p in members if p.started is False]
        if late and len(late) < len(members):
            what = f"entered {late[0][1]}, but its device has not begun it"
            return _blame(what, [r for r, _ in late], alive)
    return None


def _in_kernel(_: Ranks, alive: Ranks) -> HangCause | None:
    stuck = [r for r in alive if r.found["state"] == "D"]
    return _blame("waits for a device or a disk (state D)", stuck, alive) if stuck else None


def _together(_: Ranks, alive: Ranks) -> HangCause | None:
    """All ranks wait in collectives that all of them have entered."""
    if not alive or not all(r.pending for r in alive):
        return None
    at = Counter(str(p) for r in alive for p in r.pending).most_common(1)[0][0]
    headline = f"all {len(alive)} ranks wait in collectives that all have entered, such as {at}"
    details = ("No rank is missing: the network or its library stands still",)
    return HangCause(headline=headline, details=details)


def _busy(_: Ranks, alive: Ranks) -> HangCause | None:
    """Some ranks wait and others compute; a rank of which nothing is known does neither."""
    waiting = [r for r in alive if r.waits_in]
    busy = [r for r in alive if r.found["stack"] and not r.waits_in]
    return _blame(f"is in {busy[0].where}, in no collective", busy, alive) if waiting and busy else None


def _behind(_: Ranks, alive: Ranks) -> HangCause | None:
    """The minority of ranks that has done the least, among ranks that report steps or micro-batches."""
    counting = [r for r in alive if r.step or r.progress.microbatches]
    for level in range(3):
        at = {r.rank: _place(r)[level] for r in counting}
        late = [r for r in counting if at[r.rank] == min(at.values())]
        if len(late) < len(counting):
            if 2 * len(late) > len(counting):
                return None
            least, most = min(at.values())[1], max(at.values())[1]
            return _blame(f"is behind: it is {least}, others are {most}", late, alive)
    return None


def _place(r: RankFacts) -> tuple[tuple[int, str], ...]:
    """How far a rank has come, by step, part of the step and micro-batches: as a number and in words."""
    part, count = r.progress.part if r.progress.part in PARTS else PARTS[0], r.progress.microbatches
    return (
        (r.step, f"in step {r.step}"),
        (PARTS.index(part), f"in {part}"),
        (count, f"at {count} micro-batches"),
    )


TESTS = (_left, _stopped, _missing, _different, _in_kernel, _together, _busy, _behind)


def _direct(alive: Ranks, blamed: Ranks) -> Counter[str]:
    """The collectives in which others wait for `blamed`, with how many do."""
    names = {r.rank for r in blamed}
    found = (p for r in alive if r.rank not in names for p in r.pending if names & set(p.ranks))
    return Counter(str(p) for p in found)


def _blame(what: str, blamed: Ranks, alive: Ranks) -> HangCause:
    """`rank 5 on gpu03 WHAT; 7 ranks wait for it`."""
    more = f" and {len(blamed) - NAMED} more ranks" if len(blamed) > NAMED else ""
    headline = f"{', '.join(r.name for r in blamed[:NAMED])}{more} {what}"
    direct = _direct(alive, blamed)
    others = [r for r in alive if r not in blamed and r.waits_in]
    if direct:
        at, count = direct.most_common(1)[0]
        place = "" if at in what else f" in {at}"
        headline += f"; {_count(count)} for {'it' if len(blamed) == 1 else 'them'}{place}"
        headline += f", {len(others) - count} more behind" if len(others) > count else ""
    elif others:
        headline += f"; {_count(len(others))} in {others[0].waits_in}"
    return HangCause(headline=headline, details=_places(blamed), blamed=tuple(blamed))


def _count(ranks: int) -> str:
    return "1 rank waits" if ranks == 1 else f"{ranks} ranks wait"


def _places(ranks: Ranks) -> tuple[str, ...]:
    """In which function the first two of these ranks are, in words."""
    places = []
    for r in (r for r in ranks[:2] if r.where):
        wchan = r.found["wchan"] if r.found["state"] == "D" else ""
        places.append(f"Rank {r.rank} is in {r.where}" + (f", in the kernel's {wchan}" if wchan else ""))
    return tuple(places)
