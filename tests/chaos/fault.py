"""The kinds of faults, the ends of attempts that each explains, and how faults are drawn from a seed."""

import random
from dataclasses import dataclass

WITH_THE_JOB = frozenset({"lost", "node_fail", "cancelled", "preempted"})
"""Ends of an attempt whose allocation is taken away."""

FAILURES: dict[str, frozenset[str]] = {
    "kill_launcher": frozenset(), "two_launchers": frozenset(), "kill_leader": WITH_THE_JOB,
    "kill_follower": WITH_THE_JOB, "stop_leader": WITH_THE_JOB, "stop_follower": WITH_THE_JOB,
    "kill_rank": frozenset({"crash"}), "stop_rank": frozenset({"hang"}), "sleep_rank": frozenset({"hang"}),
    "exit_rank": frozenset({"crash"}), "orphan": frozenset(), "node_down": WITH_THE_JOB,
    "node_silent": WITH_THE_JOB, "slurmctld": frozenset(), "scancel": WITH_THE_JOB, "requeue": WITH_THE_JOB,
    "disk_full": frozenset(), "read_only": WITH_THE_JOB, "torn_line": frozenset(), "deleted_logs": frozenset(),
}  # fmt: skip
"""Kinds of faults by which something dies, stops or is full, with the ends that they explain."""
INTERFERENCE: dict[str, frozenset[str]] = {
    "other_user": frozenset(), "other_cluster": frozenset(), "clock_offset": frozenset(),
    "unreadable_claim": WITH_THE_JOB, "double_submission": frozenset(), "empty_squeue": frozenset(),
    "hostile_numbers": frozenset({"invalid"}), "port_scan": frozenset(), "reforking_children": frozenset(),
    "fifo_journal": frozenset(),
}  # fmt: skip
"""Kinds of faults by which others look on, something gives false answers, or a program misbehaves."""
MISLEADING: dict[str, frozenset[str]] = {
    "slow_unlink": frozenset(), "scratch_full": WITH_THE_JOB | {"crash disk_full"}, "stop_fork_server": frozenset(),
    "kill_agent_always": WITH_THE_JOB, "foreign_accounting": WITH_THE_JOB, "suspended_processes": frozenset(),
    "local_launchers": frozenset(), "sbatch_banner": frozenset(), "long_epilog": frozenset(),
}  # fmt: skip
"""Kinds of faults by which an innocent run, node or number looks wrong, with the ends that they explain."""
REFUSALS: dict[str, frozenset[str]] = {
    "partition_away": frozenset(), "submit_limit": frozenset(), "busy_controller": frozenset(),
}  # fmt: skip
"""Kinds of faults by which Slurm takes no jobs for a while, with the ends that they explain."""
BAD_NODES: dict[str, frozenset[str]] = {
    "bad_node": frozenset({"crash"}),
    "no_agent": frozenset({"lost not_started"}),
}
"""Kinds of faults of one node that nobody has listed; every crash there, and every job that starts no
agent, is explained."""
OWNERSHIP: dict[str, frozenset[str]] = {
    "linked_results": frozenset(), "rename": frozenset(), "hidden_pids": frozenset(), "hanging_sbatch": frozenset(),
    "bad_variant": frozenset(), "full_at_end": frozenset(),
}  # fmt: skip
"""Kinds of faults by which it is unclear who owns or follows a sweep, or what a run leaves and needs at its end."""
EXPLAINS = FAILURES | INTERFERENCE | MISLEADING | REFUSALS | BAD_NODES | OWNERSHIP
"""Kind of fault -> the true ends of the attempt it hits: a status, or a status and a cause.

A fault explains at most one end per allocation, and of a run that it hits in every attempt MAX_ATTEMPTS.
"""
MAX_ATTEMPTS = 3
"""Largest number of attempts of a run that takes its allocation away each time."""
OF_A_PROGRAM = frozenset({"sleep_rank", "exit_rank", "orphan", "hostile_numbers", "reforking_children", "slow_unlink",
                          "kill_agent_always", "bad_node", "bad_variant", "full_at_end"})  # fmt: skip
"""Kinds that need the program of these tests, which carries out orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; `share` chooses its target among those that exist at the time of the fault."""

    number: int
    kind: str
    wait_s: float
    """Seconds to wait after the sweep has recovered from the previous fault."""
    share: int
    """A number from 0 to 99."""


def draw(seed: str, count: int, kinds: tuple[str, ...] = tuple(EXPLAINS)) -> list[Fault]:
    """`count` faults in random order, all kinds about equally often; the same seed gives the same faults."""
    chance = random.Random(seed)
    deck: list[str] = []
    while len(deck) < count:
        deck += chance.sample(kinds, len(kinds))
    return [
        Fault(number=n, kind=kind, wait_s=round(chance.uniform(0.2, 2.0), 2), share=chance.randrange(100))
        for n, kind in enumerate(deck[:count])
    ]
