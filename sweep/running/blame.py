"""Decides by comparison whether a node or a run is at fault: the table run x node x outcome, and what follows from it.

A text or one observation decides nothing, unless it is proof. A run that failed on some nodes is tried on others: if it
is ok there, that counts against the first nodes; if it fails in the same way, the failure is the program's. GPUs that
compute the same chain of operations are compared with each other and with themselves (`device_digest`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import comb
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from ultrabench.device_digest import HostVerdict, differences, host_verdicts
from ultrabench.errors import ConfigError, counted
from ultrabench.record import from_dict
from ultrabench.result import (
    LOCATED_STATUSES,
    NOT_STARTED,
    TRANSIENT_CAUSES,
    RunResult,
    Status,
    proves_node_fault,
)
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.config.launcher_config import launcher_kind
from ultrabench.sweep.config.sweep_config import RetryPolicy
from ultrabench.variant import Runtime, runtime_of

MIN_SUSPECTING_RUNS = 2
"""Number of different runs that must suspect a node before it is excluded; one run alone may be wrong."""
MIN_RUNS_AGAINST_WORKING_NODE = 3
"""Number of different runs that must suspect a node on which runs were ok before.

Flaky programs fail on such a node, too, but seldom three times in a row.
"""
MAX_CHANCE = 0.05
"""Where failures also come elsewhere, or runs are ok on the node since, the largest p-value at which it is excluded.

It is multiplied by the number of such failures, since each of them begins a series that is tested.
"""
MIN_DISJOINT_SETS = 3
"""Number of disjoint sets of nodes on which a run must fail in the same way until that is the program's.

Two are enough if a run was ok on one of these nodes. Else they may be bad alike, and bad nodes are always free.
"""
EVENTS_OF_BLAME = (
    "launched",
    "pause",
    "cancel",
    "submitting",
    "allocation_planned",
    "allocation_ended",
    "preflight",
    "claimed",
    "result",
    "failed",
)
"""The events of a journal from which the table follows."""
NUM_NAMED_RUNS = 3
"""Runs that a reason names one by one."""


class NodeRole(NamedTuple):
    """The role of a node in a run. Failures that stay in one role whatever node is there are the program's."""

    has_rank_0: bool
    has_first_stage: bool
    has_last_stage: bool


@cache
def _node_roles(num_hosts: int, num_stages: int) -> tuple[NodeRole, ...]:
    """What the nodes of a run hold, if ranks are numbered along the nodes, and pipeline stages along the ranks."""
    return tuple(
        NodeRole(
            has_rank_0=index == 0,
            has_first_stage=index * num_stages // num_hosts == 0,
            has_last_stage=((index + 1) * num_stages - 1) // num_hosts == num_stages - 1,
        )
        for index in range(num_hosts)
    )


class _Layout(msgspec.Struct):
    """The part of a claimed layout that says how many pipeline stages it has."""

    pp: int = 1


class _PipelineSpec(msgspec.Struct):
    """The part of a claimed spec that says which stages a node held."""

    layout: _Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One row of the table: an attempt of a run, what it says about each of its nodes, and when it began."""

    run_id: str
    key: AttemptKey
    hosts: tuple[str, ...]
    """Its nodes, in the order of its ranks."""
    is_ok: bool
    failure: str = ""
    """What is equal for equal failures: the fingerprint, or status and cause; empty if it is ok."""
    began_on: frozenset[str] = frozenset()
    """Nodes on which the failure began; empty if that is unknown or says nothing."""
    suspects: frozenset[str] = frozenset()
    """Nodes that this attempt alone makes suspects."""
    is_proof: bool = False
    """Whether the node or Slurm itself said that the suspects failed."""
    reason: str = ""
    started_at: float = 0.0
    """When it began, in seconds since 1970, by the clock of its first node."""
    num_stages: int = 1

    @property
    def may_be_local(self) -> bool:
        """Whether it began on some of its nodes only, or had one node, so that other nodes could tell more."""
        return bool(self.began_on) and (len(self.hosts) == 1 or self.began_on < frozenset(self.hosts))

    def role_of(self, host: str) -> NodeRole:
        """The role of `host` in the run."""
        return self.roles[self.hosts.index(host)]

    @property
    def roles(self) -> tuple[NodeRole, ...]:
        """The role of each node of the run."""
        return _node_roles(len(self.hosts), self.num_stages)


def trial_of(attempt: AttemptState) -> Trial | None:
    """The row of an attempt; None if it says nothing about its nodes."""
    result = attempt.result
    # Where Slurm alone knows of an attempt, it may name only the nodes that failed.
    hosts = (result.hostnames or result.suspect_hosts) if result else ()
    if result is None or not hosts:
        return None
    has_several_hosts = len(hosts) > 1
    spec = attempt.spec_as(_PipelineSpec) if has_several_hosts else None
    trial = Trial(
        run_id=attempt.key.run_id,
        key=attempt.key,
        hosts=hosts,
        is_ok=result.status == Status.OK,
        started_at=result.started_at or attempt.time or 0.0,
        num_stages=spec.layout.pp if spec else 1,
    )
    if trial.is_ok or result.status not in LOCATED_STATUSES:
        return trial if trial.is_ok else None
    is_proof = proves_node_fault(result.status, result.cause) and bool(result.suspect_hosts)
    return replace(
        trial,
        failure=result.fingerprint or f"{result.status} {result.cause}",
        began_on=_began_on(result),
        # In a run of one node nothing can be compared.
        suspects=frozenset(result.suspect_hosts if is_proof or has_several_hosts else ()),
        is_proof=is_proof,
        reason=result.reason or "",
    )


def _began_on(result: RunResult) -> frozenset[str]:
    """The hosts on which a failure began, also for results of versions that did not record them."""
    if result.confirmed or result.cause in TRANSIENT_CAUSES or result.cause == "host_oom":
        return frozenset()
    began_on = result.began_on or result.suspect_hosts
    return frozenset(began_on or (result.hostnames if len(result.hostnames) == 1 else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """An allocation on whose nodes no agent started, or whose preflight failed."""

    allocation: str
    failed_on: frozenset[str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What the table says about one node beside the others in the same role."""

    node: str
    failed_runs: tuple[str, ...]
    """run_ids of the runs that failed because of it, as far as the comparison shows."""
    num_ok_since: int
    """Number of attempts that were ok on it after the first of these failures."""
    has_worked: bool
    """Whether any run was ok on it."""
    num_failed_elsewhere: int
    """Number of runs that failed on other nodes, and that were ok elsewhere or failed as those on this node did."""
    num_ok_elsewhere: int
    """Number of attempts that were ok without it."""

    @property
    def is_suspect(self) -> bool:
        """Whether the node is excluded: enough runs failed on it, others are ok without it, and that is not chance."""
        if not self.num_ok_elsewhere:
            return False  # nothing can be compared
        if self.num_failed_elsewhere or self.num_ok_since:
            return len(self.failed_runs) >= MIN_SUSPECTING_RUNS and self.p_value <= MAX_CHANCE
        return len(self.failed_runs) >= (
            MIN_RUNS_AGAINST_WORKING_NODE if self.has_worked else MIN_SUSPECTING_RUNS
        )

    @property
    def p_value(self) -> float:
        """The probability of so many failures on this node if all nodes fail alike, times the number of failures.

        It is that of Fisher's exact test, one-sided, of the table node or others x failed or ok.
        """
        num_failed, num_failed_elsewhere = len(self.failed_runs), self.num_failed_elsewhere
        num_here = num_failed + self.num_ok_since
        num_elsewhere = num_failed_elsewhere + self.num_ok_elsewhere
        num_all_failed = num_failed + num_failed_elsewhere
        num_ways = sum(
            comb(num_here, k) * comb(num_elsewhere, num_all_failed - k)
            for k in range(num_failed, min(num_here, num_all_failed) + 1)
        )
        return num_all_failed * num_ways / comb(num_here + num_elsewhere, num_all_failed)

    @property
    def text(self) -> str:
        """The row in words, such as
        `2 runs failed there (1a2b, 3c4d), 0 attempts were ok there since; elsewhere ...`.
        """
        names = ", ".join(run_id[:8] for run_id in self.failed_runs[:NUM_NAMED_RUNS])
        names += ", ..." if len(self.failed_runs) > NUM_NAMED_RUNS else ""
        failed_text = f"{counted(len(self.failed_runs), 'run')} failed there ({names})"
        ok_text = f"{counted(self.num_ok_since, 'attempt')} ok there since"
        elsewhere_text = f"{counted(self.num_failed_elsewhere, 'run')} failed"
        elsewhere_text += f", {counted(self.num_ok_elsewhere, 'attempt')} ok"
        return f"{failed_text}, {ok_text}; elsewhere {elsewhere_text}"


@dataclass(frozen=True, kw_only=True)
class Blame:
    """What the table says: which nodes to exclude and why, where not to run next,
    and which failures are the program's.
    """

    trials: Mapping[str, Sequence[Trial]] = field(default_factory=dict)
    """run_id -> the rows of the run."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Node that must not be used again -> the reason, the surest first."""
    over_limit: tuple[str, ...] = ()
    """Nodes that would be excluded, too, if retry.max_excluded were larger."""
    start_failures: Mapping[str, str] = field(default_factory=dict)
    """Node on which nothing started, and which is not excluded -> the reason."""
    differing: Mapping[str, str] = field(default_factory=dict)
    """Node with a GPU that computed other bits than it should in one preflight, and which is not excluded
    -> the reason."""
    program_failures: Mapping[str, str] = field(default_factory=dict)
    """Failure that one run had on disjoint nodes, so that no further nodes are tried -> two such sets
    of nodes, in words."""
    repeated_on: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Failure -> nodes on which one run had it twice, since there were no others to try."""
    working: frozenset[str] = frozenset()
    """Nodes on which some run was ok."""

    @property
    def node_lines(self) -> dict[str, str]:
        """Node that jobs do not use, or only if they must -> a line that says why."""
        excluded = {node: f"node {node} is excluded: {reason}" for node, reason in self.excluded.items()}
        avoided = {
            node: f"node {node} is used last: {reason}"
            for node, reason in {**self.differing, **self.start_failures}.items()
        }
        return excluded | avoided

    def num_tries_elsewhere(self, attempt: AttemptState) -> int:
        """How often a run is tried again on other nodes after this failure, even if the retry policy allows less.

        It is 0 if the failure is known to be the program's or says nothing about nodes, else 1, and more as long as
        nothing was ok on the nodes on which the run has failed.
        """
        trial = trial_of(attempt)
        if trial is None or trial.is_ok or not trial.may_be_local:
            return 0
        repeated_on = self.repeated_on.get(trial.failure, frozenset())
        if trial.failure in self.program_failures or trial.began_on <= repeated_on:
            return 0
        avoided = self.avoid(trial.run_id, trial.key.repeat)
        return MIN_DISJOINT_SETS - 1 if self.working.isdisjoint(avoided) else 1

    def avoid(self, run_id: str, repeat: int) -> tuple[str, ...]:
        """The nodes that the next attempt of a repeat should not use, sorted: those on which its failures began."""
        trials = (t for t in self.trials.get(run_id, ()) if t.key.repeat == repeat and not t.is_ok)
        return tuple(sorted({host for t in trials if t.may_be_local for host in t.began_on}))

    def came_from_excluded(self, attempt: AttemptState) -> bool:
        """Whether an attempt failed on nodes only that are excluded by now, so that it says nothing about its run.

        It does say something where the run was tried on such nodes again, since it can use no others.
        """
        trial = trial_of(attempt)
        if trial is None or trial.is_ok or not trial.began_on or not trial.began_on <= self.excluded.keys():
            return False
        others = (t for t in self.trials.get(trial.run_id, ()) if not t.is_ok and t.key != trial.key)
        return all(trial.began_on.isdisjoint(other.began_on) for other in others)


def policy_of(state: SweepState) -> RetryPolicy | None:
    """The retry policy of the latest launch; None where there is none, or only one that this version cannot read."""
    with suppress(ConfigError, KeyError):
        return from_dict(RetryPolicy, state.config["retry"], skip_unknown=True)
    return None


def latest_blame(state: SweepState) -> Blame:
    """What the journal says about nodes and runs, by the retry policy of the latest launch."""
    policy = policy_of(state)
    return blame_of(state, policy) if policy else Blame()


def blame_of(state: SweepState, policy: RetryPolicy) -> Blame:
    """What the journal says about nodes and runs."""
    rows = [t for a in state.attempts.values() if (t := trial_of(a))] if _has_located_failures(state) else []
    has_other_nodes = launcher_kind(state.config.get("launcher", {})).holds_nodes
    verdicts = host_verdicts(differences(state.digests()))
    return decide_blame(rows, failed_starts(state), _reported_nodes(state), policy, has_other_nodes, verdicts)


def _has_located_failures(state: SweepState) -> bool:
    statuses = {attempt.result.status for attempt in state.attempts.values() if attempt.result}
    return not LOCATED_STATUSES.isdisjoint(statuses)


def _reported_nodes(state: SweepState) -> dict[str, str]:
    """Node -> why its agent or the batch system reported it unusable, by the ends of allocations."""
    ends = [end for allocation in state.allocations.values() for end in allocation.ends.values()]
    return {node: "its agent or the batch system reported it unusable" for end in ends for node in end.avoid}


def failed_starts(state: SweepState) -> list[FailedStart]:
    """The allocations that started nothing on known nodes, as far as these nodes may be at fault.

    Left out are those on whose nodes others started later, and those of variants that can start nowhere.
    """
    last_start_by_host = defaultdict[str, float](float)
    for attempt in state.attempts.values():
        for host in attempt.result.hostnames if attempt.result else ():
            last_start_by_host[host] = max(last_start_by_host[host], attempt.time or 0.0)
    starts, bad_runtimes = [], _unstartable_runtimes(state)
    for allocation in state.allocations.values():
        if runtime_of(allocation.variant) in bad_runtimes:
            continue
        for end in allocation.ends.values():
            submitted_at = allocation.submitting_at or 0.0
            failed_on = frozenset(h for h in end.failed_on if last_start_by_host[h] <= submitted_at)
            if failed_on:
                starts.append(FailedStart(allocation=allocation.name, failed_on=failed_on, reason=end.reason))
    return sorted(starts, key=lambda start: start.allocation)


class _VariantSpec(msgspec.Struct):
    """The part of a spec that says in which container and by which interpreter a run runs."""

    variant: dict[str, Any] = {}


def _unstartable_runtimes(state: SweepState) -> set[Runtime]:
    """The runtimes whose runs failed because their container or interpreter cannot start."""
    results = ((attempt, attempt.result) for attempt in state.attempts.values())
    unstarted = [a for a, r in results if r and r.cause == NOT_STARTED and r.status == Status.CRASH]
    specs = (attempt.spec_as(_VariantSpec) for attempt in unstarted)
    return {runtime_of(spec.variant) for spec in specs if spec}


def decide_blame(
    rows: Sequence[Trial],
    starts: Sequence[FailedStart],
    reported: Mapping[str, str],
    policy: RetryPolicy,
    has_other_nodes: bool = True,
    verdicts: Mapping[str, HostVerdict] = MappingProxyType({}),
) -> Blame:
    """What follows from the table; it depends on neither the order of its rows nor the texts of failures.

    Args:
        rows: one row for each attempt.
        starts: allocations that started nothing.
        reported: node -> why its agent or the batch system reported it unusable.
        has_other_nodes: False for this machine, on which no node can be excluded.
        verdicts: node with a GPU that computed other bits than it should -> what the preflights say.
    """
    trials_by_run = defaultdict[str, list[Trial]](list)
    for trial in sorted(rows, key=lambda trial: tuple(trial.key)):
        trials_by_run[trial.run_id].append(trial)
    table = _Table(trials_by_run)
    excluded, over_limit = dict[str, str](), tuple[str, ...]()
    if has_other_nodes:
        proven = {h: t.reason for t in table.failures if t.is_proof for h in sorted(t.suspects)}
        records = {record.node: record for record in table.records() if record.is_suspect}
        ranked = sorted(records.values(), key=lambda record: (-len(record.failed_runs), record.node))
        suspected = {record.node: record.text for record in ranked}
        differing = {node: verdict.reason for node, verdict in verdicts.items() if verdict.is_confirmed}
        reasons = suspected | differing | dict(reported) | proven
        order = [*sorted(reported.keys() | proven.keys()), *sorted(differing), *suspected]
        names = [node for node in dict.fromkeys(order) if node not in policy.forgiven]
        excluded = {node: reasons[node] for node in names[: policy.max_excluded]}
        over_limit = tuple(names[policy.max_excluded :])
    unconfirmed = verdicts.keys() - excluded.keys() - set(policy.forgiven) if has_other_nodes else ()
    return Blame(
        trials=trials_by_run,
        excluded=excluded,
        over_limit=over_limit,
        start_failures=_start_failures(starts, excluded, policy) if has_other_nodes else {},
        differing={node: verdicts[node].reason for node in sorted(unconfirmed)},
        program_failures=table.program_failures,
        repeated_on=table.repeated_on,
        working=table.working,
    )


def _start_failures(
    starts: Sequence[FailedStart], excluded: Mapping[str, str], policy: RetryPolicy
) -> dict[str, str]:
    """Node on which nothing started -> the reason. One start is enough to prefer other nodes, which are tried next."""
    reasons = {node: f"nothing started there: {s.reason}" for s in starts for node in sorted(s.failed_on)}
    return {node: reason for node, reason in reasons.items() if node not in {*excluded, *policy.forgiven}}


def _disjoint_sets(node_sets: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """The sets of nodes, in their order, without those that share a node with an earlier one."""
    disjoint_sets = list[frozenset[str]]()
    for nodes in node_sets:
        if all(nodes.isdisjoint(earlier) for earlier in disjoint_sets):
            disjoint_sets.append(nodes)
    return disjoint_sets


def _node_names(nodes: Iterable[str]) -> str:
    return ",".join(sorted(nodes))


class _Table:
    """The rows of all runs, and the comparisons between them."""

    def __init__(self, trials_by_run: Mapping[str, Sequence[Trial]]) -> None:
        self._trials_by_run = trials_by_run
        self._rows = [trial for trials in trials_by_run.values() for trial in trials]
        self.failures = [trial for trial in self._rows if not trial.is_ok]
        self.working = frozenset(self._ok_trials_by_host)
        self._refuted = dict[tuple[str, str], str]()
        """run_id and a failure that the run had on disjoint nodes, which are not to blame for it -> these nodes,
        in words."""
        repeated_on = defaultdict[str, frozenset[str]](frozenset)
        inconstant = set[str]()
        for run_id, trials in trials_by_run.items():
            unproven = [t for t in trials if not t.is_ok and not t.is_proof]
            was_ok = any(t.is_ok for t in trials)
            for failure in {t.failure for t in unproven if t.began_on}:
                # Where it is not known where a failure began, it was somewhere on the nodes of the attempt.
                node_sets = [t.began_on or frozenset(t.hosts) for t in unproven if t.failure == failure]
                disjoint_sets = _disjoint_sets(node_sets)
                if was_ok:
                    inconstant.add(failure)
                elif self._tell_enough(disjoint_sets):
                    self._refuted[run_id, failure] = " and on ".join(map(_node_names, disjoint_sets))
                elif len(disjoint_sets) < len(node_sets):
                    repeated_on[failure] |= frozenset().union(*node_sets)
        self.repeated_on = {f: hosts for f, hosts in repeated_on.items() if f not in inconstant}
        disjoint = self._failures_everywhere()
        disjoint |= {failure: nodes_text for (_, failure), nodes_text in self._refuted.items()}
        self.program_failures = {
            failure: nodes_text
            for failure, nodes_text in disjoint.items()
            if failure not in inconstant and not self._is_confined(failure)
        }

    @cached_property
    def _ok_trials_by_host(self) -> Mapping[str, Sequence[Trial]]:
        trials_by_host = defaultdict[str, list[Trial]](list)
        for trial in self._rows:
            for host in trial.hosts if trial.is_ok else ():
                trials_by_host[host].append(trial)
        return trials_by_host

    @cached_property
    def _num_ok_by_roles(self) -> Mapping[tuple[NodeRole, ...], int]:
        """What the nodes of an attempt held -> the number of such attempts that were ok."""
        return Counter(trial.roles for trial in self._rows if trial.is_ok)

    def _failures_everywhere(self) -> dict[str, str]:
        """Failure that different runs had on enough disjoint nodes before any run was ok -> these nodes, in words."""
        if self.working:
            return {}
        sets_by_failure = defaultdict[str, list[frozenset[str]]](list)
        for trial in self.failures:
            if trial.began_on and not trial.is_proof:
                sets_by_failure[trial.failure].append(trial.began_on)
        disjoint = {failure: _disjoint_sets(node_sets) for failure, node_sets in sets_by_failure.items()}
        return {f: " and on ".join(map(_node_names, s)) for f, s in disjoint.items() if self._tell_enough(s)}

    def _tell_enough(self, disjoint_sets: Sequence[frozenset[str]]) -> bool:
        """Whether a failure on these disjoint sets of nodes shows that it does not depend on the nodes."""
        is_working = any(not self.working.isdisjoint(nodes) for nodes in disjoint_sets)
        return len(disjoint_sets) >= (2 if is_working else MIN_DISJOINT_SETS)

    def _num_runs_ok_since(self, host: str, since: float) -> int:
        """The number of runs that were ok on a node, in any role, since a time."""
        return len({t.run_id for t in self._ok_trials_by_host.get(host, ()) if t.started_at >= since})

    def _is_confined(self, failure: str) -> bool:
        """Whether only nodes on which nothing else works had this failure, while others work:
        then several nodes are bad.
        """
        runs_by_host, first_at = defaultdict[str, set[str]](set), dict[str, float]()
        for trial in self.failures:
            for host in trial.began_on if trial.failure == failure else ():
                runs_by_host[host].add(trial.run_id)
                first_at[host] = min(trial.started_at, first_at.get(host, trial.started_at))
        are_bad = all(
            len(runs) >= MIN_SUSPECTING_RUNS and not self._num_runs_ok_since(host, first_at[host])
            for host, runs in runs_by_host.items()
        )
        ok_elsewhere = {t.run_id for t in self._rows if t.is_ok and runs_by_host.keys().isdisjoint(t.hosts)}
        return are_bad and len(ok_elsewhere) >= MIN_SUSPECTING_RUNS

    @cached_property
    def _blamed_trials(self) -> Mapping[str, Sequence[Trial]]:
        """Node -> the failed attempts that count against it, without proof.

        They are those that suspect it, and those that began there of runs that were ok without it.
        """
        trials_by_host = defaultdict[str, list[Trial]](list)
        for trial in self.failures:
            if trial.is_proof or (trial.run_id, trial.failure) in self._refuted:
                continue
            ok_hosts = [{*t.hosts} for t in self._trials_by_run[trial.run_id] if t.is_ok]
            for host in trial.suspects | trial.began_on:
                if host in trial.suspects or any(host not in hosts for hosts in ok_hosts):
                    trials_by_host[host].append(trial)
        return trials_by_host

    @cached_property
    def _located_failures(self) -> Sequence[tuple[Trial, bool]]:
        """The failed attempts of which it is known where they began, and whether they count against these nodes."""
        blaming_keys = {trial.key for trials in self._blamed_trials.values() for trial in trials}
        return [(t, t.key in blaming_keys) for t in self.failures if t.began_on and not t.is_proof]

    @cached_property
    def _likely_bad(self) -> frozenset[str]:
        """Nodes on which several runs failed and none was ok since; they say nothing about how often
        nodes fail by chance.
        """
        return frozenset(
            host
            for host, trials in self._blamed_trials.items()
            if len({t.run_id for t in trials}) >= MIN_SUSPECTING_RUNS
            and not self._num_runs_ok_since(host, min(t.started_at for t in trials))
        )

    def records(self) -> Iterable[NodeRecord]:
        """A record of each node that failed attempts of enough runs count against."""
        for node, trials in self._blamed_trials.items():
            if len({trial.run_id for trial in trials}) >= MIN_SUSPECTING_RUNS:
                yield self._record(node, trials)

    def _record(self, node: str, blamed_trials: Sequence[Trial]) -> NodeRecord:
        """The record of a node in the roles in which it failed."""
        roles = {t.role_of(node) for t in blamed_trials if node in t.hosts}
        first_at = min(t.started_at for t in blamed_trials)
        ok_here = self._ok_trials_by_host.get(node, ())
        num_ok_since = sum(t.started_at >= first_at and t.role_of(node) in roles for t in ok_here)
        # All attempts in which some node had one of these roles, without those in which this node took part.
        num_ok = sum(
            num for trial_roles, num in self._num_ok_by_roles.items() if not roles.isdisjoint(trial_roles)
        )
        num_ok_with_it = sum(not roles.isdisjoint(t.roles) for t in ok_here)
        failed_runs = {trial.run_id for trial in blamed_trials}
        failures, not_compared = {trial.failure for trial in blamed_trials}, {node, *self._likely_bad}
        failed_elsewhere = {
            trial.run_id
            for trial, is_blaming in self._located_failures
            for host in trial.began_on - not_compared
            if (is_blaming or trial.failure in failures)
            and host in trial.hosts
            and trial.role_of(host) in roles
        }
        return NodeRecord(
            node=node,
            failed_runs=tuple(sorted(failed_runs)),
            num_ok_since=num_ok_since,
            has_worked=bool(ok_here),
            num_failed_elsewhere=len(failed_elsewhere),
            num_ok_elsewhere=num_ok - num_ok_with_it,
        )
