"""Why a run hangs: the ranks for which others wait, by what every rank was doing."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.layout import Layout
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
class PendingCall:
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


def find_hang_cause(ranks: Ranks, layout: Layout | None = None, rank_order: Sequence[str] = ()) -> HangCause:
    """Which ranks are behind or missing, and what shows it, by the first of HANG_CHECKS that finds something.

    Args:
        layout: the layout of the ranks, by which the details name the places of two culprits; None if it is unknown.
        rank_order: how ranks are numbered, as for `Layout.stride`.
    """
    live_ranks = [r for r in ranks if not r.has_ended]
    cause = next(filter(None, (check(ranks, live_ranks) for check in HANG_CHECKS)))
    if layout is None or len(cause.culprits) == len(ranks):
        return cause
    place_texts = [_place_text(r.number, layout, rank_order) for r in cause.culprits[:2]]
    return replace(cause, details=(*cause.details, *filter(None, place_texts)))


def _place_text(rank: int, layout: Layout, rank_order: Sequence[str]) -> str | None:
    """The place of a rank on the axes of its layout; None if there is one axis only, where it is the rank itself."""
    index_by_degree = layout.coordinates(rank, rank_order)._asdict()
    places = [f"{degree} {index}" for degree, index in index_by_degree.items() if getattr(layout, degree) > 1]
    return f"Rank {rank} has the place {', '.join(places)} in the layout" if len(places) > 1 else None


def hang_row(rank: RankProgress) -> dict[str, Any]:
    """The row of a rank in the table of `sweep show`."""
    group = max(rank.evidence["groups"], key=lambda g: int(g["entered"]), default=None)
    last_call = f"#{group['entered']} of {group['group']}, done" if group and group["entered"] else ""
    state = rank.evidence["state"] if not rank.has_ended else f"exited {rank.code}"
    reports = {name: getattr(rank, name) for name in ("host", "phase", "part", "microbatches")}
    position = {"step": _step(rank), "collective": _wait_text(rank) or last_call, "at": _function(rank)}
    return {"rank": rank.number, "state": state, **reports, **position}


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


def _pending_calls(*ranks: RankProgress) -> Iterator[PendingCall]:
    """The collectives that ranks have not finished, at most one of each rank in each group."""
    for rank, group in ((r, group) for r in ranks for group in r.evidence["groups"]):
        collective_number = (group["finished"] or 0) + 1
        if group["finished"] is not None and collective_number <= group["entered"]:
            op = group["ops"].get(str(collective_number), "collective")
            has_begun = None if group["started"] is None else group["started"] >= collective_number
            yield PendingCall(rank, group["group"], tuple(group["ranks"]), collective_number, op, has_begun)


def _wait_text(rank: RankProgress) -> str | None:
    """The collective, or the function of torch, in which a rank waits for others."""
    function_names = [f.partition(" ")[0] for f in rank.evidence["stack"][:INNER_FRAMES] if "/torch/" in f]
    waiting_function = next((name for name in reversed(function_names) if name in WAITING_FUNCTIONS), None)
    return next(map(str, _pending_calls(rank)), waiting_function)


def _has_entered(rank: RankProgress, call: PendingCall) -> bool:
    """Whether a rank reported that it has entered a collective."""
    groups = (g for g in rank.evidence["groups"] if g["entered"] >= call.collective_number)
    return any((g["group"], tuple(g["ranks"])) == (call.group, call.group_ranks) for g in groups)


def _find_exited_ranks(ranks: Ranks, live_ranks: Ranks) -> HangCause | None:
    """Ranks that ended before they were done, while others wait for them."""
    exited_ranks = [r for r in ranks if r.has_ended and not r.done_line]
    has_answers = any(r.evidence["groups"] for r in live_ranks)
    if not exited_ranks or not live_ranks or (has_answers and not _waiting_by_call(live_ranks, exited_ranks)):
        return None
    description = f"exited early with code {exited_ranks[0].code} in phase {exited_ranks[0].phase}"
    return _blame(description, exited_ranks, live_ranks)


def _find_in_state(state: str, description: str, _: Ranks, live_ranks: Ranks) -> HangCause | None:
    """Living ranks whose process is in a state of /proc."""
    return _blame(description, [r for r in live_ranks if r.evidence["state"] == state], live_ranks)


def _find_missing_ranks(ranks: Ranks, live_ranks: Ranks) -> HangCause | None:
    """A collective that only some ranks entered; the others, if they do not wait themselves, are the cause."""
    rank_by_number = {r.number: r for r in ranks}
    missed_calls: dict[RankProgress, Counter[PendingCall]] = defaultdict(Counter)
    waiting_ranks = set()
    for call in _pending_calls(*live_ranks):
        for member in (rank_by_number[n] for n in call.group_ranks if n in rank_by_number):
            if not _has_entered(member, call):
                missed_calls[member][call] += 1
                waiting_ranks.add(call.rank)
    roots = [r for r in ranks if r in missed_calls and r not in waiting_ranks]
    roots = [r for r in roots if r.evidence["groups"]] or roots
    # A root that waits as well may wait for another root in a call that the records do not show.
    roots = [r for r in roots if not _wait_text(r)] or roots
    if not roots:
        return _blame_each_other([r for r in ranks if r in waiting_ranks]) if missed_calls else None
    missed_call = missed_calls[roots[0]].most_common(1)[0][0]
    culprits = [r for r in roots if missed_call in missed_calls[r]]
    return _blame(f"never entered {missed_call}", culprits, live_ranks)


def _blame_each_other(stuck_ranks: Ranks) -> HangCause:
    waits_text = ", ".join(f"rank {r.number} is in {_wait_text(r)}" for r in stuck_ranks[:MAX_NAMED_RANKS])
    headline = f"ranks wait for each other in different collectives: {waits_text}"
    details = ("They call collectives in different orders", *_function_texts(stuck_ranks))
    return HangCause(headline=headline, details=details, culprits=tuple(stuck_ranks))


def _find_differing_calls(_: Ranks, live_ranks: Ranks) -> HangCause | None:
    """Members of a group whose collectives with the same number differ, or whose devices have not begun it."""
    calls_by_collective: dict[Any, list[PendingCall]] = defaultdict(list)
    for c in _pending_calls(*live_ranks):
        calls_by_collective[c.group, c.group_ranks, c.collective_number].append(c)
    for calls in calls_by_collective.values():
        usual_op = Counter(c.op for c in calls).most_common(1)[0][0]
        if odd_calls := [c for c in calls if c.op != usual_op]:
            description = f"entered {odd_calls[0]} where others entered {usual_op}"
            return _blame(description, [c.rank for c in odd_calls if c.op == odd_calls[0].op], live_ranks)
        late_calls = [c for c in calls if c.has_begun is False]
        if late_calls and len(late_calls) < len(calls):
            description = f"entered {late_calls[0]}, but its device has not begun it"
            return _blame(description, [c.rank for c in late_calls], live_ranks)
    return None


def _find_common_wait(_: Ranks, live_ranks: Ranks) -> HangCause | None:
    """All ranks wait in collectives that all of them have entered."""
    calls = list(_pending_calls(*live_ranks))
    if not live_ranks or {call.rank for call in calls} != set(live_ranks):
        return None
    common_call = Counter(map(str, calls)).most_common(1)[0][0]
    headline = f"all {len(live_ranks)} ranks wait in collectives that all have entered, such as {common_call}"
    return HangCause(headline=headline, details=("No rank is missing: the network or its library is stuck",))


def _find_busy_ranks(_: Ranks, live_ranks: Ranks) -> HangCause | None:
    """Some ranks wait and others compute; ranks without a known stack count as neither."""
    busy_ranks = [r for r in live_ranks if r.evidence["stack"] and not _wait_text(r)]
    if not busy_ranks or not any(map(_wait_text, live_ranks)):
        return None
    return _blame(f"is in {_function(busy_ranks[0])}, not in a collective", busy_ranks, live_ranks)


def _find_ranks_behind(_: Ranks, live_ranks: Ranks) -> HangCause | None:
    """The ranks that have done the least, if they are a minority of those that report steps or micro-batches."""
    candidates = [r for r in live_ranks if _step(r) or r.microbatches]
    for levels in zip(*map(_progress_levels, candidates), strict=True):
        lowest_level, highest_level = min(levels), max(levels)
        laggards = [r for r, level in zip(candidates, levels, strict=True) if level == lowest_level]
        if lowest_level != highest_level:
            description = f"is behind: it is {lowest_level[1]}, others are {highest_level[1]}"
            return _blame(description, laggards, live_ranks) if 2 * len(laggards) <= len(candidates) else None
    return None


def _progress_levels(rank: RankProgress) -> tuple[tuple[int, str], ...]:
    """Step, part of the step and micro-batches that a rank has reached, each as a number and as a text."""
    part, count = rank.part if rank.part in STEP_PARTS else STEP_PARTS[0], rank.microbatches
    step_level = _step(rank), f"in step {_step(rank)}"
    return step_level, (STEP_PARTS.index(part), f"in {part}"), (count, f"at {count} micro-batches")


def _describe_first_rank(_: Ranks, live_ranks: Ranks) -> HangCause:
    """What the first living rank does, when no check has found a cause."""
    if not live_ranks:
        return HangCause(headline="all ranks had ended")
    rank, step = live_ranks[0], _step(live_ranks[0])
    phase_text = f"phase {rank.phase}" + (f", step {step}" if step else "")
    headline = f"none of {len(live_ranks)} ranks stands out: rank {rank.number} is in {phase_text}"
    return HangCause(headline=headline, details=tuple(_function_texts(live_ranks[:1])))


HANG_CHECKS = (
    partial(_find_in_state, "T", "is stopped (state T), for example by SIGSTOP"),
    partial(_find_in_state, "Z", "is dead but not reaped (state Z)"),
    _find_exited_ranks,
    _find_missing_ranks,
    _find_differing_calls,
    partial(_find_in_state, "D", "waits for a device or a disk (state D)"),
    _find_common_wait,
    _find_busy_ranks,
    _find_ranks_behind,
    _describe_first_rank,
)
"""Certain causes come first: a rank that is stopped or has ended explains why the others wait."""


def _waiting_by_call(live_ranks: Ranks, culprits: Ranks) -> Counter[str]:
    """The collectives in which other ranks wait for `culprits`, with the number of ranks that wait."""
    culprit_numbers = {r.number for r in culprits}
    calls = _pending_calls(*(r for r in live_ranks if r not in culprits))
    return Counter(str(call) for call in calls if not culprit_numbers.isdisjoint(call.group_ranks))


def _blame(description: str, culprits: Ranks, live_ranks: Ranks) -> HangCause | None:
    """A cause such as `rank 5 on gpu03 DESCRIPTION; 7 ranks wait for it`; None without culprits."""
    if not culprits:
        return None
    num_unnamed = len(culprits) - MAX_NAMED_RANKS
    more_text = f" and {num_unnamed} more ranks" if num_unnamed > 0 else ""
    headline = f"{', '.join(r.name for r in culprits[:MAX_NAMED_RANKS])}{more_text} {description}"
    wait_texts = [wait_text for r in live_ranks if r not in culprits and (wait_text := _wait_text(r))]
    if num_waiting_by_call := _waiting_by_call(live_ranks, culprits):
        (collective, num_waiting), num_waits = num_waiting_by_call.most_common(1)[0], len(wait_texts)
        call_suffix = "" if collective in description else f" in {collective}"
        headline += f"; {_count_text(num_waiting)} for {'it' if len(culprits) == 1 else 'them'}{call_suffix}"
        headline += f", {num_waits - num_waiting} more wait behind these" if num_waits > num_waiting else ""
    elif wait_texts:
        headline += f"; {_count_text(len(wait_texts))} in {wait_texts[0]}"
    return HangCause(headline=headline, details=tuple(_function_texts(culprits)), culprits=tuple(culprits))


def _count_text(num_ranks: int) -> str:
    return "1 rank waits" if num_ranks == 1 else f"{num_ranks} ranks wait"
