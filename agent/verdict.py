"""Why a run stands still: whom the others wait for, judged from what every rank was doing."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ultrabench.agent.rank_facts import Pending, RankFacts

Ranks = Sequence[RankFacts]
NAMED = 4
"""So many ranks are named one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer in a line and in a paragraph, with the ranks it blames."""

    headline: str
    details: tuple[str, ...] = ()
    blamed: tuple[RankFacts, ...] = ()

    @property
    def text(self) -> str:
        """The paragraph."""
        return ". ".join((self.headline, *self.details)) + "."

    @property
    def hosts(self) -> tuple[str, ...]:
        """Of the ranks it blames."""
        return tuple(sorted({r.host for r in self.blamed}))


def verdict(ranks: Ranks) -> Verdict:
    """Who is behind or missing.

    Ranks that have left or are stopped explain everything; then the order of collectives is
    looked at, then who is busy while others wait, and at last who has done the least.
    """
    alive = [r for r in ranks if r.code is None]
    for test in TESTS:
        found = test(ranks, alive)
        if found is not None:
            return found
    if not alive:
        return Verdict(headline="all ranks had ended")
    at = f"phase {alive[0].phase}" + (f", step {alive[0].step}" if alive[0].step else "")
    return Verdict(headline=f"no rank stands out of {len(alive)}: rank {alive[0].rank} is in {at}",
                   details=_places(alive[:1]))  # fmt: skip


def _left(ranks: Ranks, alive: Ranks) -> Verdict | None:
    """Ranks that ended before they were done, while others wait for them."""
    gone = [r for r in ranks if r.code is not None and not r.done]
    known = any(r.groups for r in alive)
    if not gone or not alive or (known and not _direct(alive, gone)):
        return None
    return _blame(f"exited with code {gone[0].code} in phase {gone[0].phase}, not done", gone, alive)


def _stopped(_: Ranks, alive: Ranks) -> Verdict | None:
    stopped = [r for r in alive if r.state == "T"]
    dead = [r for r in alive if r.state == "Z"]
    if stopped:
        return _blame("is stopped (state T), as by SIGSTOP", stopped, alive)
    return _blame("is dead, and nobody has noticed (state Z)", dead, alive) if dead else None


def _missing(ranks: Ranks, alive: Ranks) -> Verdict | None:
    """A collective that some entered and others did not: whoever waits for nobody is the cause."""
    by_rank = {r.rank: r for r in ranks}
    awaited: dict[int, Counter[Pending]] = {}
    waiters = set()
    for r in alive:
        for p in r.pending:
            for member in (by_rank[m] for m in p.ranks if m != r.rank and m in by_rank):
                entered = member.entered(p.group, p.ranks)
                if entered is None or entered < p.number:
                    plain = Pending(group=p.group, ranks=p.ranks, number=p.number, op=p.op, started=None)
                    awaited.setdefault(member.rank, Counter())[plain] += 1
                    waiters.add(r.rank)
    roots = [by_rank[rank] for rank in sorted(awaited) if rank not in waiters]
    told = [r for r in roots if r.groups] or roots
    # Of two that are missing, one may be waiting for the other in a way that no record holds.
    told = [r for r in told if not r.waits_in] or told
    if not awaited:
        return None
    if not told:
        return _each_other([by_rank[rank] for rank in sorted(waiters)])
    at = awaited[told[0].rank].most_common(1)[0][0]
    same = [r for r in told if at in awaited[r.rank]]
    return _blame(f"never entered {at}", same, alive)


def _each_other(stuck: Ranks) -> Verdict:
    shown = [f"rank {r.rank} is in {r.waits_in}" for r in stuck[:NAMED]]
    return Verdict(
        headline="ranks wait for each other in different collectives: " + ", ".join(shown),
        details=("They call collectives in different orders", *_places(stuck)),
        blamed=tuple(stuck),
    )


def _different(_: Ranks, alive: Ranks) -> Verdict | None:
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
            return _blame(
                f"entered {late[0][1]}, but its device has not begun it", [r for r, _ in late], alive
            )
    return None


def _in_kernel(_: Ranks, alive: Ranks) -> Verdict | None:
    stuck = [r for r in alive if r.state == "D"]
    return _blame("waits for a device or a disk (state D)", stuck, alive) if stuck else None


def _together(_: Ranks, alive: Ranks) -> Verdict | None:
    """All stand in a collective that all have entered."""
    if not alive or not all(r.pending for r in alive):
        return None
    at = Counter(str(p) for r in alive for p in r.pending).most_common(1)[0][0]
    headline = f"all {len(alive)} ranks wait in collectives that all have entered, such as {at}"
    return Verdict(
        headline=headline, details=("No rank is missing: the network or its library stands still",)
    )


def _busy(_: Ranks, alive: Ranks) -> Verdict | None:
    """Some wait and others compute; a rank that told nothing is neither."""
    waiting = [r for r in alive if r.waits_in]
    busy = [r for r in alive if r.stack and not r.waits_in]
    return _blame(f"is in {busy[0].where}, in no collective", busy, alive) if waiting and busy else None


def _behind(_: Ranks, alive: Ranks) -> Verdict | None:
    """The minority with the least done, among ranks that count."""
    counting = [r for r in alive if r.step or r.microbatches]
    order = ("data", "forward_backward", "optimizer")
    keys: list[tuple[Callable[[RankFacts], int], Callable[[int], str]]] = [
        (lambda r: r.step, lambda n: f"in step {n}"),
        (lambda r: order.index(r.part) if r.part in order else 0, lambda n: f"in {order[n]}"),
        (lambda r: r.microbatches, lambda n: f"at {n} micro-batches"),
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


def _blame(what: str, blamed: Ranks, alive: Ranks) -> Verdict:
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
    return Verdict(headline=headline, details=_places(blamed), blamed=tuple(blamed))


def _count(ranks: int) -> str:
    return "1 rank waits" if ranks == 1 else f"{ranks} ranks wait"


def _places(ranks: Ranks) -> tuple[str, ...]:
    """Where some of the ranks stand, in words."""
    kernel = {r.rank: f", in the kernel's {r.wchan}" if r.state == "D" and r.wchan else "" for r in ranks}
    return tuple(f"Rank {r.rank} is in {r.where}{kernel[r.rank]}" for r in ranks[:2] if r.where)
