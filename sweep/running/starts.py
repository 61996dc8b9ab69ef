"""Decides by comparison whether a variant or a node is at fault when jobs run nothing: the container or interpreter of
the jobs, or the nodes on which they did not start."""

from collections import defaultdict
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field

from ultrabench.result import NOT_STARTED
from ultrabench.run import AttemptKey
from ultrabench.store.events import EndCode
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.running.attempts import Launch
from ultrabench.variant import Runtime, runtime_of, runtime_text

MAX_ALLOCATIONS_WITHOUT_RUN = 3
"""A variant fails, or the sweep stops, after this many allocations in a row that ended without having claimed a run, on
disjoint nodes.

Of those on the same nodes, one counts, as long as others may be tried: max_jobs may have been queued for them before.
"""
ENDS_ALLOWED_WITHOUT_RUN = (EndCode.PAUSED, EndCode.OUTSIDE_WINDOW)
"""Codes of ends that do not count for MAX_ALLOCATIONS_WITHOUT_RUN."""


@dataclass(slots=True, kw_only=True)
class UselessRow:
    """Allocations in a row that ended without having claimed a run."""

    allocations: list[AllocationState] = field(default_factory=list)
    num_telling: int = 0
    """Number of these allocations without those whose nodes may explain their end."""
    runtimes: set[Runtime] = field(default_factory=set)
    suspect_nodes: set[str] = field(default_factory=set)
    """Nodes on which they failed and nothing else has started since."""

    def add(self, allocation: AllocationState, cleared_nodes: Set[str] = frozenset()) -> None:
        """Adds an allocation; `cleared_nodes` are nodes that are known to work."""
        failed_on = {*allocation.end.failed_on} if allocation.end else set[str]()
        failed_on -= cleared_nodes
        self.allocations.append(allocation)
        self.num_telling += self.suspect_nodes.isdisjoint(failed_on)
        self.runtimes.add(runtime_of(allocation.variant))
        self.suspect_nodes |= failed_on

    def is_enough(self, limits: JobLimits) -> bool:
        """Whether the nodes are not at fault: the allocations were on disjoint nodes,
        or are too many for one bad node.
        """
        max_in_a_row = MAX_ALLOCATIONS_WITHOUT_RUN + limits.max_jobs
        return self.num_telling >= MAX_ALLOCATIONS_WITHOUT_RUN or len(self.allocations) >= max_in_a_row

    @property
    def failed_on(self) -> tuple[str, ...]:
        """The nodes on which nothing started."""
        ends = (allocation.end for allocation in self.allocations)
        return tuple(sorted({host for end in ends if end for host in end.failed_on}))


@dataclass(slots=True, kw_only=True)
class Starts:
    """Which allocations of a launch ran something, for each variant of jobs and for all of them."""

    row: UselessRow = field(default_factory=UselessRow)
    """The latest allocations of the launch, as far as none of them ran anything."""
    row_by_runtime: dict[Runtime, UselessRow] = field(default_factory=lambda: defaultdict(UselessRow))
    """Runtime -> the same for its allocations."""
    started_since: dict[Runtime, set[Runtime]] = field(default_factory=lambda: defaultdict(set))
    """Runtime -> other runtimes of which a job ran something after the first allocation of its row."""
    started_runtimes: frozenset[Runtime] = frozenset()
    """Runtimes of which a job ever ran something, in this launch or an earlier one."""

    def unstartable(self, limits: JobLimits) -> dict[Runtime, str]:
        """Runtime whose container or interpreter is at fault -> the reason.

        Jobs of other runtimes must have run something: after the first of its own failed, or ever,
        if none of its own and of the others that fail now did. Else all jobs may fail for another reason,
        such as a file server that does not answer.
        """
        new_runtimes = frozenset(self.row_by_runtime) - self.started_runtimes
        reasons = dict[Runtime, str]()
        for runtime, row in self.row_by_runtime.items():
            others_work = self.started_since[runtime] or (
                self.started_runtimes and runtime in new_runtimes and self.row.runtimes <= new_runtimes
            )
            if row.is_enough(limits) and others_work and any(value is not None for value in runtime):
                reasons[runtime] = _reason(runtime, row)
        return reasons

    def dead_end(self, limits: JobLimits, open_runtimes: Collection[Runtime]) -> Sequence[AllocationState]:
        """The latest allocations, if jobs run nothing whatever their variant and their nodes; else none.

        Those of variants that are at fault do not count.

        Args:
            open_runtimes: the runtimes of the attempts that are left to submit.
        """
        runtimes_at_fault, row = self.unstartable(limits), UselessRow()
        for allocation in self.row.allocations:
            if runtime_of(allocation.variant) not in runtimes_at_fault:
                row.add(allocation)
        return row.allocations if row.is_enough(limits) and row.runtimes >= {*open_runtimes} else ()


def _reason(runtime: Runtime, row: UselessRow) -> str:
    """Why the runs of a runtime fail, such as `container=a.sif started on none of gpu01,gpu02: FATAL: no such file`."""
    hosts, latest_end = row.failed_on, row.allocations[-1].ended
    nodes_text = f" on {','.join(hosts)}" if hosts else ""
    num = len(row.allocations)
    return (
        f"{runtime_text(runtime)}: {num} jobs in a row ran nothing{nodes_text}, "
        f"while those of other variants did ({latest_end})"
    )


def starts_of(state: SweepState, launch: Launch) -> Starts:
    """What the allocations of a launch say about the variants and the nodes of its jobs."""
    starts = Starts()
    ran_names = keys_by_allocation(state).keys()
    hosts_by_name = defaultdict[str, set[str]](set)
    for attempt in state.attempts.values():
        if attempt.allocation in ran_names and attempt.result:
            hosts_by_name[attempt.allocation] |= {*attempt.result.hostnames}
    starts.started_runtimes = frozenset(
        runtime_of(a.variant) for a in state.allocations.values() if a.name in ran_names
    )
    works_for_others = defaultdict[Runtime, set[str]](set)
    for allocation in telling_allocations(state, launch, ran_names):
        runtime = runtime_of(allocation.variant)
        if allocation.name in ran_names:
            hosts = hosts_by_name[allocation.name] | {agent.host for agent in allocation.agents}
            starts.row = UselessRow()
            starts.row_by_runtime.pop(runtime, None)
            starts.started_since.pop(runtime, None)
            for other_runtime, row in starts.row_by_runtime.items():
                row.suspect_nodes -= hosts
                starts.started_since[other_runtime].add(runtime)
            works_for_others[runtime] |= hosts
        elif allocation.end is None or allocation.end.code not in ENDS_ALLOWED_WITHOUT_RUN:
            is_new = runtime not in starts.started_runtimes
            others = (nodes for other_runtime, nodes in works_for_others.items() if other_runtime != runtime)
            starts.row_by_runtime[runtime].add(allocation, set().union(*others) if is_new else frozenset())
            starts.row.add(allocation)
    return starts


def keys_by_allocation(state: SweepState) -> dict[str, frozenset[AttemptKey]]:
    """Allocation -> the attempts that it has claimed, without the one that counts as tried though no agent started."""
    keys_by_name = defaultdict[str, set[AttemptKey]](set)
    for attempt in state.attempts.values():
        is_unstarted = attempt.result is not None and attempt.result.cause == NOT_STARTED
        if attempt.allocation and not is_unstarted:
            keys_by_name[attempt.allocation].add(attempt.key)
    return {name: frozenset(keys) for name, keys in keys_by_name.items()}


def telling_allocations(
    state: SweepState, launch: Launch, ran_names: Collection[str]
) -> list[AllocationState]:
    """The allocations of a launch that ran something or are over, in the order of their submission.

    One that still runs shows that its nodes work as soon as it has claimed a run.
    """
    allocations = (a for a in state.allocations.values() if a.submission[0] == launch.name)
    telling = (a for a in allocations if a.ended is not None or a.name in ran_names)
    return sorted(
        (a for a in telling if a.name not in launch.excused), key=lambda allocation: allocation.submission
    )
