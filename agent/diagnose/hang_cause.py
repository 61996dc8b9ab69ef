"""Why a run hangs: which ranks the others wait for, found from what every rank was doing."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ultrabench.agent.diagnose.rank_facts import Pending, RankFacts

Ranks = Sequence[RankFacts]
NAMED = 4
"""How many ranks are named one by one; of more the rest is counted."""


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
    known = any(r.found["groups"] for r in alive)
    if not gone or not alive or (known and not _direct(alive, gone)):
        return None
    return _blame(
        f"exited with code {gone[0].progress.code} in phase {gone[0].progress.phase}, not done", gone, alive
    )


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
    shown = [f"rank {r.rank} is in {r.waits_in}" for r in stuck[:NAMED]]
    return HangCause(
        headline="ranks wait for each other in different collectives: " + ", ".join(shown),
        details=("They call collectives in different orders", *_places(stuck)),
        blamed=tuple(stuck),
    )


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
    order = ("data", "forward_backward", "optimizer")
    keys: list[tuple[Callable[[RankFacts], int], Callable[[int], str]]] = [
        (lambda r: r.step, lambda n: f"in step {n}"),
        (
            lambda r: order.index(r.progress.part) if r.progress.part in order else 0,
            lambda n: f"in {order[n]}",
        ),
        (lambda r: r.progress.microbatches, lambda n: f"at {n} micro-batches"),
    ]
    for key, text in keys:
        values = sorted({key(r) for r in counting})
        late = [r for r in counting if key(r) == values[0]]
        if len(values) > 1:
            if 2 * len(late) > len(counting):
                return None
            return _blame(f"is behind: it is {text(values[0])}, others are {text(values[-1])}", late, alive)
    return None


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
