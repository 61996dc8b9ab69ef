"""What is done to a sweep, drawn from a seed, and which ends of attempts it explains."""

import random
from dataclasses import dataclass

WITH_THE_JOB = frozenset({"lost", "node_fail", "cancelled", "preempted"})
"""How an attempt may end whose allocation is taken away."""

FAILURES: dict[str, frozenset[str]] = {
    "kill_launcher": frozenset(),
    "two_launchers": frozenset(),
    "kill_leader": WITH_THE_JOB,
    "kill_follower": WITH_THE_JOB,
    "stop_leader": WITH_THE_JOB,
    "stop_follower": WITH_THE_JOB,
    "kill_rank": frozenset({"crash"}),
    "stop_rank": frozenset({"hang"}),
    "sleep_rank": frozenset({"hang"}),
    "exit_rank": frozenset({"crash"}),
    "orphan": frozenset(),
    "node_down": WITH_THE_JOB,
    "node_silent": WITH_THE_JOB,
    "slurmctld": frozenset(),
    "scancel": WITH_THE_JOB,
    "requeue": WITH_THE_JOB,
    "disk_full": frozenset(),
    "read_only": frozenset(),
    "torn_line": frozenset(),
    "deleted_logs": frozenset(),
}
"""Something dies, stands still or is full."""
INTERFERENCE: dict[str, frozenset[str]] = {
    "other_user": frozenset(),
    "other_cluster": frozenset(),
    "clock_offset": frozenset(),
    "unreadable_claim": WITH_THE_JOB,
    "double_submission": frozenset(),
    "empty_squeue": frozenset(),
    "hostile_numbers": frozenset({"invalid"}),
    "port_scan": frozenset(),
    "reforking_children": frozenset(),
    "fifo_journal": frozenset(),
}
"""Somebody else looks on, something lies, or a program does what none should."""
EXPLAINS = FAILURES | INTERFERENCE
"""Kind of fault -> ends of the attempt it hits, at most one an allocation, that tell the truth about it."""
OF_A_PROGRAM = frozenset({"sleep_rank", "exit_rank", "orphan", "hostile_numbers", "reforking_children"})
"""Kinds that need the program of these tests, which obeys orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; what it hits is settled by `share` among what there is when its time has come."""

    number: int
    kind: str
    wait_s: float
    """After the sweep has recovered from the fault before."""
    share: int
    """0 to 99."""


def draw(seed: str, count: int, kinds: tuple[str, ...] = tuple(EXPLAINS)) -> list[Fault]:
    """`count` faults in random order, each kind about as often as the others; the same for the same seed."""
    chance = random.Random(seed)
    deck: list[str] = []
    while len(deck) < count:
        deck += chance.sample(kinds, len(kinds))
    return [
        Fault(number=n, kind=kind, wait_s=round(chance.uniform(0.2, 2.0), 2), share=chance.randrange(100))
        for n, kind in enumerate(deck[:count])
    ]
