"""Why a run hangs: the ranks for which others wait, by what every rank was doing."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.rank_report import STEP_PARTS

MAX_NAMED_RANKS = 4
"""Ranks that a message names one by one; further ranks are only counted."""
WAITING_FUNCTIONS = frozenset({
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "irecv", "isend", "monitored_barrier", "recv", "reduce_scatter", "reduce_scatter_tensor",
    "send", "synchronize", "wait", "wait_tensor",
})  # fmt: skip
"""Functions of torch in which a rank waits for other ranks."""
INNER_FRAMES = 6
"""How many of the innermost frames are searched for a function of WAITING_FUNCTIONS."""

Ranks = Sequence[RankProgress]


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective that a rank has entered and not finished."""

    rank: RankProgress = field(compare=False)
    group: str
    group_ranks: tuple[int, ...]
    collective_number: int
    op: str
    has_begun: bool | None = field(compare=False)
    """Whether the rank's device has begun the collective; None where that is unknown."""

    def __str__(self) -> str:
        return f"{self.op} #{self.collective_number} of group {self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangCause:
    """The cause of a hang as a line and as a paragraph, with the ranks that caused it."""

    headline: str
    details: tuple[str, ...] = ()
    culprits: tuple[RankProgress, ...] = ()

    @property
    def text(self) -> str:
        """The headline and the details as one paragraph."""
        return ". ".join((self.headline, *self.details)) + "."


def find_hang_cause(ranks: Ranks) -> HangCause:
    """Which ranks are behind or missing, and what shows it, by the first of CHECKS that finds something."""
    alive = [r for r in ranks if r.code is None]
    return next(filter(None, (check(ranks, alive) for check in CHECKS)))


def hang_row(rank: RankProgress) -> dict[str, Any]:
    """The row of a rank in the table of `sweep show`."""
    group = max(rank.evidence["groups"], key=lambda g: int(g["entered"]), default=None)
    last_call = f"#{group['entered']} of {group['group']}, done" if group and group["entered"] else ""
    state = rank.evidence["state"] if rank.code is None else f"exited {rank.code}"
    reported = {name: getattr(rank, name) for name in ("host", "phase", "part", "microbatches")}
    position = {"step": _step(rank), "collective": _wait_text(rank) or last_call, "at": _function(rank)}
    return {"rank": rank.number, "state": state, **reported, **position}


def _step(rank: RankProgress) -> int:
    """The step that a rank is in, or how many steps it has reported."""
    return rank.step or len(rank.steps)


def _function(rank: RankProgress) -> str | None:
    """The innermost function that is not part of torch, with the end of its path."""
    stack = rank.evidence["stack"]
    frame = next((frame for frame in stack if "/torch/" not in frame), stack[0] if stack else "")
    function, _, location = frame.partition(" (")
    return f"{function} ({'/'.join(location.split('/')[-2:])}" if frame else None


def _function_texts(ranks: Ranks) -> Iterator[str]:
    """Sentences that name the functions in which the first two of these ranks are."""
    for r in filter(_function, ranks[:2]):
        is_blocked = r.evidence["state"] == "D" and r.evidence["wchan"]
        kernel_text = f", in the kernel function {r.evidence['wchan']}" if is_blocked else ""
        yield f"Rank {r.number} is in {_function(r)}{kernel_text}"


def _pending(*ranks: RankProgress) -> Iterator[Pending]:
    """The collectives that ranks have not finished, at most one of each rank in each group."""
    for rank, group in ((r, group) for r in ranks for group in r.evidence["groups"]):
        collective_number = (group["finished"] or 0) + 1
        if group["finished"] is not None and collective_number <= group["entered"]:
            op = group["ops"].get(str(collective_number), "collective")
            has_begun = None if group["started"] is None else group["started"] >= collective_number
            yield Pending(rank, group["group"], tuple(group["ranks"]), collective_number, op, has_begun)


def _wait_text(rank: RankProgress) -> str | None:
    """The collective, or the function of torch, in which a rank waits for others."""
    function_names = [f.partition(" ")[0] for f in rank.evidence["stack"][:INNER_FRAMES] if "/torch/" in f]
    waiting_function = next((name for name in reversed(function_names) if name in WAITING_FUNCTIONS), None)
    return next(map(str, _pending(rank)), waiting_function)


def _has_entered(rank: RankProgress, pending: Pending) -> bool:
    """Whether a rank reported that it has entered a collective."""
    groups = (g for g in rank.evidence["groups"] if g["entered"] >= pending.collective_number)
    return any((g["group"], tuple(g["ranks"])) == (pending.group, pending.group_ranks) for g in groups)


def _find_exited(ranks: Ranks, alive: Ranks) -> HangCause | None:
    """Ranks that ended before they were done, while others wait for them."""
    exited_ranks = [r for r in ranks if r.code is not None and not r.done_line]
    has_answers = any(r.evidence["groups"] for r in alive)
    if not exited_ranks or not alive or (has_answers and not _waiting_counts(alive, exited_ranks)):
        return None
    description = f"exited early with code {exited_ranks[0].code} in phase {exited_ranks[0].phase}"
    return _blame(description, exited_ranks, alive)


def _find_in_state(state: str, description: str, _: Ranks, alive: Ranks) -> HangCause | None:
    """Living ranks whose process is in a state of /proc."""
    return _blame(description, [r for r in alive if r.evidence["state"] == state], alive)


def _find_missing(ranks: Ranks, alive: Ranks) -> HangCause | None:
    """A collective that only some ranks entered; the others, if they do not wait themselves, are the cause."""
    rank_by_number = {r.number: r for r in ranks}
    missed_calls: dict[RankProgress, Counter[Pending]] = defaultdict(Counter)
    waiting_ranks = set()
    for pending in _pending(*alive):
        for member in (rank_by_number[number] for number in pending.group_ranks if number in rank_by_number):
            if not _has_entered(member, pending):
                missed_calls[member][pending] += 1
                waiting_ranks.add(pending.rank)
    roots = [r for r in ranks if r in missed_calls and r not in waiting_ranks]
    roots = [r for r in roots if r.evidence["groups"]] or roots
    # A root that waits as well may wait for another root in a call that the records do not show.
    roots = [r for r in roots if not _wait_text(r)] or roots
    if not roots:
        return _blame_each_other([r for r in ranks if r in waiting_ranks]) if missed_calls else None
    collective = missed_calls[roots[0]].most_common(1)[0][0]
    return _blame(f"never entered {collective}", [r for r in roots if collective in missed_calls[r]], alive)


def _blame_each_other(stuck_ranks: Ranks) -> HangCause:
    waits_text = ", ".join(f"rank {r.number} is in {_wait_text(r)}" for r in stuck_ranks[:MAX_NAMED_RANKS])
    headline = f"ranks wait for each other in different collectives: {waits_text}"
    details = ("They call collectives in different orders", *_function_texts(stuck_ranks))
    return HangCause(headline=headline, details=details, culprits=tuple(stuck_ranks))


def _find_different(_: Ranks, alive: Ranks) -> HangCause | None:
    """Members of a group whose collectives with the same number differ, or whose devices have not begun it."""
    calls_by_number: dict[Any, list[Pending]] = defaultdict(list)
    for call in _pending(*alive):
        calls_by_number[call.group, call.group_ranks, call.collective_number].append(call)
    for calls in calls_by_number.values():
        usual_op = Counter(call.op for call in calls).most_common(1)[0][0]
        if odd_calls := [call for call in calls if call.op != usual_op]:
            description = f"entered {odd_calls[0]} where others entered {usual_op}"
            return _blame(description, [call.rank for call in odd_calls if call.op == odd_calls[0].op], alive)
        late_calls = [call for call in calls if call.has_begun is False]
        if late_calls and len(late_calls) < len(calls):
            description = f"entered {late_calls[0]}, but its device has not begun it"
            return _blame(description, [call.rank for call in late_calls], alive)
    return None


def _find_common_wait(_: Ranks, alive: Ranks) -> HangCause | None:
    """All ranks wait in collectives that all of them have entered."""
    collectives = list(_pending(*alive))
    if not alive or {collective.rank for collective in collectives} != set(alive):
        return None
    common_call = Counter(map(str, collectives)).most_common(1)[0][0]
    headline = f"all {len(alive)} ranks wait in collectives that all have entered, such as {common_call}"
    details = ("No rank is missing: the network or its library is stuck",)
    return HangCause(headline=headline, details=details)


def _find_busy(_: Ranks, alive: Ranks) -> HangCause | None:
    """Some ranks wait and others compute; ranks without a known stack count as neither."""
    busy_ranks = [r for r in alive if r.evidence["stack"] and not _wait_text(r)]
    if not busy_ranks or not any(map(_wait_text, alive)):
        return None
    return _blame(f"is in {_function(busy_ranks[0])}, not in a collective", busy_ranks, alive)


def _find_behind(_: Ranks, alive: Ranks) -> HangCause | None:
    """The ranks that have done the least, if they are a minority of those that report steps or micro-batches."""
    candidates = [r for r in alive if _step(r) or r.microbatches]
    for levels in zip(*map(_progress_levels, candidates), strict=True):
        lowest_level, highest_level = min(levels), max(levels)
        laggards = [r for r, level in zip(candidates, levels, strict=True) if level == lowest_level]
        if lowest_level != highest_level:
            description = f"is behind: it is {lowest_level[1]}, others are {highest_level[1]}"
            return _blame(description, laggards, alive) if 2 * len(laggards) <= len(candidates) else None
    return None


def _progress_levels(rank: RankProgress) -> tuple[tuple[int, str], ...]:
    """Step, part of the step and micro-batches that a rank has reached, each as a number and as a text."""
    part, count = rank.part if rank.part in STEP_PARTS else STEP_PARTS[0], rank.microbatches
    step_level = _step(rank), f"in step {_step(rank)}"
    return step_level, (STEP_PARTS.index(part), f"in {part}"), (count, f"at {count} micro-batches")


def _describe_first(_: Ranks, alive: Ranks) -> HangCause:
    """What the first living rank does, when no check has found a cause."""
    if not alive:
        return HangCause(headline="all ranks had ended")
    phase_text = f"phase {alive[0].phase}" + (f", step {_step(alive[0])}" if _step(alive[0]) else "")
    headline = f"none of {len(alive)} ranks stands out: rank {alive[0].number} is in {phase_text}"
    return HangCause(headline=headline, details=tuple(_function_texts(alive[:1])))


CHECKS = (
    _find_exited,
    partial(_find_in_state, "T", "is stopped (state T), for example by SIGSTOP"),
    partial(_find_in_state, "Z", "is dead but not reaped (state Z)"),
    _find_missing,
    _find_different,
    partial(_find_in_state, "D", "waits for a device or a disk (state D)"),
    _find_common_wait,
    _find_busy,
    _find_behind,
    _describe_first,
)
"""Certain causes come first: a rank that has ended or is stopped explains why the others wait."""


def _waiting_counts(alive: Ranks, culprits: Ranks) -> Counter[str]:
    """The collectives in which other ranks wait for `culprits`, with the number of ranks that wait."""
    numbers = {r.number for r in culprits}
    collectives = _pending(*(r for r in alive if r not in culprits))
    return Counter(str(c) for c in collectives if not numbers.isdisjoint(c.group_ranks))


def _blame(description: str, culprits: Ranks, alive: Ranks) -> HangCause | None:
    """A cause such as `rank 5 on gpu03 DESCRIPTION; 7 ranks wait for it`; None without culprits."""
    if not culprits:
        return None
    num_more = len(culprits) - MAX_NAMED_RANKS
    more_text = f" and {num_more} more ranks" if num_more > 0 else ""
    headline = f"{', '.join(r.name for r in culprits[:MAX_NAMED_RANKS])}{more_text} {description}"
    wait_texts = [wait_text for r in alive if r not in culprits and (wait_text := _wait_text(r))]
    if waiting_counts := _waiting_counts(alive, culprits):
        (collective, num_waiting), num_waits = waiting_counts.most_common(1)[0], len(wait_texts)
        call_text = "" if collective in description else f" in {collective}"
        headline += f"; {_count_text(num_waiting)} for {'it' if len(culprits) == 1 else 'them'}{call_text}"
        headline += f", {num_waits - num_waiting} more wait behind these" if num_waits > num_waiting else ""
    elif wait_texts:
        headline += f"; {_count_text(len(wait_texts))} in {wait_texts[0]}"
    return HangCause(headline=headline, details=tuple(_function_texts(culprits)), culprits=tuple(culprits))


def _count_text(num_ranks: int) -> str:
    return "1 rank waits" if num_ranks == 1 else f"{num_ranks} ranks wait"
