"""Why a run hangs: which ranks the others wait for, found from what every rank was doing."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.rank_report import STEP_PARTS

MAX_NAMED_RANKS = 4
"""Ranks that a message names one by one; further ranks are only counted."""
WAITING = frozenset({
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "irecv", "isend", "monitored_barrier", "recv", "reduce_scatter", "reduce_scatter_tensor",
    "send", "synchronize", "wait", "wait_tensor",
})  # fmt: skip
"""Functions of torch in which a rank waits for others."""
INNER_FRAMES = 6
"""How many of the innermost frames are searched for a function of WAITING."""

Ranks = Sequence[RankProgress]


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective that a rank has entered and not finished."""

    rank: RankProgress = field(compare=False)
    group: str
    ranks: tuple[int, ...]
    number: int
    op: str
    started: bool | None = field(compare=False)
    """Whether the rank's device has begun the collective; None where that is unknown."""

    def __str__(self) -> str:
        return f"{self.op} #{self.number} of group {self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangCause:
    """The cause of a hang in a line and in a paragraph, with the ranks that caused it."""

    headline: str
    details: tuple[str, ...] = ()
    culprits: tuple[RankProgress, ...] = ()

    @property
    def text(self) -> str:
        """The headline and the details as one paragraph."""
        return ". ".join((self.headline, *self.details)) + "."


def find_hang_cause(ranks: Ranks) -> HangCause:
    """Which ranks are behind or missing, and how that shows: the first of CHECKS that finds something."""
    alive = [r for r in ranks if r.code is None]
    return next(filter(None, (check(ranks, alive) for check in CHECKS)))


def hang_row(rank: RankProgress) -> dict[str, Any]:
    """The row of a rank in the table of `sweep show`."""
    latest = max(rank.evidence["groups"], key=lambda g: int(g["entered"]), default=None)
    last = f"#{latest['entered']} of {latest['group']}, done" if latest and latest["entered"] else ""
    state = rank.evidence["state"] if rank.code is None else f"exited {rank.code}"
    reported = {name: getattr(rank, name) for name in ("host", "phase", "part", "microbatches")}
    place = {"step": _step(rank), "collective": _waits_in(rank) or last, "at": _function(rank)}
    return {"rank": rank.number, "state": state, **reported, **place}


def _step(rank: RankProgress) -> int:
    """The step that a rank is in, or how many steps it has reported."""
    return rank.step or len(rank.steps)


def _function(rank: RankProgress) -> str | None:
    """The innermost function that is not torch's own, with the end of its path."""
    stack = rank.evidence["stack"]
    frame = next((f for f in stack if "/torch/" not in f), stack[0] if stack else "")
    function, _, place = frame.partition(" (")
    return f"{function} ({'/'.join(place.split('/')[-2:])}" if frame else None


def _functions(ranks: Ranks) -> Iterator[str]:
    """Sentences that name the functions in which the first two of these ranks are."""
    for r in filter(_function, ranks[:2]):
        waits = r.evidence["state"] == "D" and r.evidence["wchan"]
        inside = f", in the kernel function {r.evidence['wchan']}" if waits else ""
        yield f"Rank {r.number} is in {_function(r)}{inside}"


def _pending(*ranks: RankProgress) -> Iterator[Pending]:
    """The collectives that ranks have not finished, at most one of each rank in each group."""
    for rank, g in ((r, group) for r in ranks for group in r.evidence["groups"]):
        number = (g["finished"] or 0) + 1
        if g["finished"] is not None and number <= g["entered"]:
            op = g["ops"].get(str(number), "collective")
            started = None if g["started"] is None else g["started"] >= number
            yield Pending(rank, g["group"], tuple(g["ranks"]), number, op, started)


def _waits_in(rank: RankProgress) -> str | None:
    """The collective, or the function of torch, in which a rank waits for others."""
    inner = [f.partition(" ")[0] for f in rank.evidence["stack"][:INNER_FRAMES] if "/torch/" in f]
    waiting_function = next((name for name in reversed(inner) if name in WAITING), None)
    return next(map(str, _pending(rank)), waiting_function)


def _has_entered(rank: RankProgress, pending: Pending) -> bool:
    """Whether a rank reported that it has entered a collective."""
    entered = (g for g in rank.evidence["groups"] if g["entered"] >= pending.number)
    return any((g["group"], tuple(g["ranks"])) == (pending.group, pending.ranks) for g in entered)


def _exited(ranks: Ranks, alive: Ranks) -> HangCause | None:
    """Ranks that ended before they were done, while others wait for them."""
    exited = [r for r in ranks if r.code is not None and not r.done_line]
    answered = any(r.evidence["groups"] for r in alive)
    if not exited or not alive or (answered and not _waiting_for(alive, exited)):
        return None
    return _blame(f"exited early with code {exited[0].code} in phase {exited[0].phase}", exited, alive)


def _in_state(state: str, description: str, _: Ranks, alive: Ranks) -> HangCause | None:
    """Living ranks whose process is in a state of /proc."""
    return _blame(description, [r for r in alive if r.evidence["state"] == state], alive)


def _missing(ranks: Ranks, alive: Ranks) -> HangCause | None:
    """A collective that some ranks entered and others did not: those that wait for nobody are the cause."""
    by_number = {r.number: r for r in ranks}
    awaited: dict[RankProgress, Counter[Pending]] = defaultdict(Counter)
    waiting = set()
    for p in _pending(*alive):
        for member in (by_number[number] for number in p.ranks if number in by_number):
            if not _has_entered(member, p):
                awaited[member][p] += 1
                waiting.add(p.rank)
    roots = [r for r in ranks if r in awaited and r not in waiting]
    roots = [r for r in roots if r.evidence["groups"]] or roots
    # A rank that waits as well may wait for another missing rank, in a way that no record holds.
    roots = [r for r in roots if not _waits_in(r)] or roots
    if not roots:
        return _each_other([r for r in ranks if r in waiting]) if awaited else None
    collective = awaited[roots[0]].most_common(1)[0][0]
    return _blame(f"never entered {collective}", [r for r in roots if collective in awaited[r]], alive)


def _each_other(stuck: Ranks) -> HangCause:
    shown = ", ".join(f"rank {r.number} is in {_waits_in(r)}" for r in stuck[:MAX_NAMED_RANKS])
    headline = f"ranks wait for each other in different collectives: {shown}"
    details = ("They call collectives in different orders", *_functions(stuck))
    return HangCause(headline=headline, details=details, culprits=tuple(stuck))


def _different(_: Ranks, alive: Ranks) -> HangCause | None:
    """Members of a group that call different collectives under the same number, or whose devices are late."""
    calls: dict[Any, list[Pending]] = defaultdict(list)
    for p in _pending(*alive):
        calls[p.group, p.ranks, p.number].append(p)
    for members in calls.values():
        usual = Counter(p.op for p in members).most_common(1)[0][0]
        if odd := [p for p in members if p.op != usual]:
            description = f"entered {odd[0]} where others entered {usual}"
            return _blame(description, [p.rank for p in odd if p.op == odd[0].op], alive)
        late = [p for p in members if p.started is False]
        if late and len(late) < len(members):
            description = f"entered {late[0]}, but its device has not begun it"
            return _blame(description, [p.rank for p in late], alive)
    return None


def _together(_: Ranks, alive: Ranks) -> HangCause | None:
    """All ranks wait in collectives that all of them have entered."""
    waits = list(_pending(*alive))
    if not alive or {p.rank for p in waits} != set(alive):
        return None
    most_common = Counter(map(str, waits)).most_common(1)[0][0]
    headline = f"all {len(alive)} ranks wait in collectives that all have entered, such as {most_common}"
    details = ("No rank is missing: the network or its library is stuck",)
    return HangCause(headline=headline, details=details)


def _busy(_: Ranks, alive: Ranks) -> HangCause | None:
    """Some ranks wait and others compute; a rank of which nothing is known does neither."""
    busy = [r for r in alive if r.evidence["stack"] and not _waits_in(r)]
    if not busy or not any(map(_waits_in, alive)):
        return None
    return _blame(f"is in {_function(busy[0])}, not in a collective", busy, alive)


def _behind(_: Ranks, alive: Ranks) -> HangCause | None:
    """The minority of ranks that has done the least, among ranks that report steps or micro-batches."""
    counting = [r for r in alive if _step(r) or r.microbatches]
    for level in zip(*map(_reached, counting), strict=True):
        least, furthest = min(level), max(level)
        late = [r for r, reached in zip(counting, level, strict=True) if reached == least]
        if least != furthest:
            description = f"is behind: it is {least[1]}, others are {furthest[1]}"
            return _blame(description, late, alive) if 2 * len(late) <= len(counting) else None
    return None


def _reached(r: RankProgress) -> tuple[tuple[int, str], ...]:
    """How far a rank has come, by step, part of the step and micro-batches: as a number and in words."""
    part, count = r.part if r.part in STEP_PARTS else STEP_PARTS[0], r.microbatches
    steps = _step(r), f"in step {_step(r)}"
    return steps, (STEP_PARTS.index(part), f"in {part}"), (count, f"at {count} micro-batches")


def _unexplained(_: Ranks, alive: Ranks) -> HangCause:
    """What the first living rank does, when no check has found a cause."""
    if not alive:
        return HangCause(headline="all ranks had ended")
    place = f"phase {alive[0].phase}" + (f", step {_step(alive[0])}" if _step(alive[0]) else "")
    headline = f"none of {len(alive)} ranks stands out: rank {alive[0].number} is in {place}"
    return HangCause(headline=headline, details=tuple(_functions(alive[:1])))


CHECKS = (
    _exited,
    partial(_in_state, "T", "is stopped (state T), for example by SIGSTOP"),
    partial(_in_state, "Z", "is dead but not reaped (state Z)"),
    _missing,
    _different,
    partial(_in_state, "D", "waits for a device or a disk (state D)"),
    _together,
    _busy,
    _behind,
    _unexplained,
)
"""Certain causes first: a rank that has left or is stopped explains what all the others do."""


def _waiting_for(alive: Ranks, culprits: Ranks) -> Counter[str]:
    """The collectives in which others wait for `culprits`, with the number of ranks that wait."""
    numbers = {r.number for r in culprits}
    pending = _pending(*(r for r in alive if r not in culprits))
    return Counter(str(p) for p in pending if not numbers.isdisjoint(p.ranks))


def _blame(description: str, culprits: Ranks, alive: Ranks) -> HangCause | None:
    """A cause such as `rank 5 on gpu03 WHAT; 7 ranks wait for it`; None without culprits."""
    if not culprits:
        return None
    unnamed = f" and {len(culprits) - MAX_NAMED_RANKS} more ranks" if len(culprits) > MAX_NAMED_RANKS else ""
    headline = f"{', '.join(r.name for r in culprits[:MAX_NAMED_RANKS])}{unnamed} {description}"
    others = [waits for r in alive if r not in culprits and (waits := _waits_in(r))]
    if waiting := _waiting_for(alive, culprits):
        collective, count = waiting.most_common(1)[0]
        place = "" if collective in description else f" in {collective}"
        headline += f"; {_count(count)} for {'it' if len(culprits) == 1 else 'them'}{place}"
        headline += f", {len(others) - count} more wait behind these" if len(others) > count else ""
    elif others:
        headline += f"; {_count(len(others))} in {others[0]}"
    return HangCause(headline=headline, details=tuple(_functions(culprits)), culprits=tuple(culprits))


def _count(ranks: int) -> str:
    return "1 rank waits" if ranks == 1 else f"{ranks} ranks wait"
