"""Decides what follows from a failure: try again, give up, avoid a node, or stop the sweep."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ultrabench.errors import counted
from ultrabench.result import AGENT_GONE, STATUSES, UNMEASURED, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.config.sweep_config import RetryPolicy

EXCLUDE_AFTER = 2
"""Number of different runs that must suspect a node before it is avoided; one run alone may be wrong."""
SURE_OOM = 0.85
"""Predicted share of a rank's memory from which one confirmed OOM is enough. Below it a second one is needed,
since the prediction may be wrong by about 15 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDecision:
    """Whether a run is tried again, and why."""

    again: bool
    why: str
    pause_s: float = 0.0
    """Seconds to wait after the end of the latest attempt."""


def decide_retry(
    attempts: Sequence[AttemptState],
    policy: RetryPolicy,
    *,
    old: frozenset[AttemptKey] = frozenset(),
    memory_share: float = 1.0,
) -> RetryDecision:
    """Whether one repeat of a run is tried again after its failed `attempts`, given in their order.

    Args:
        old: attempts that ended before this launch; of these, failures that were not the run's fault
            do not count.
        memory_share: predicted memory of the run, as a share of the memory of a rank.
    """
    results = [a.result for a in attempts if a.result is not None]
    last = results[-1]
    kind, allowed = policy.kind(last), policy.allowed(last)
    alike = [a for a in attempts if a.result and policy.kind(a.result) == kind]
    if kind == "outside":
        alike = [a for a in alike if a.key not in old]
    elif last.status == Status.OOM and not _sure(last, memory_share):
        allowed += 1
    elif hosts := _deterministic(results):
        return RetryDecision(again=False, why=f"the same failure on {hosts[0]} and on {hosts[1]}")
    used = len(alike)
    name = last.cause if kind == last.cause else last.status.value
    if used > allowed:
        return RetryDecision(again=False, why=f"{name}: {used} of it, {allowed + 1} at most")
    why = f"{name}: attempt {used + 1} of {allowed + 1}"
    pause_s = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** (used - 1))
    return RetryDecision(again=True, why=why, pause_s=pause_s if STATUSES[last.status].pause else 0.0)


def _sure(result: RunResult, memory_share: float) -> bool:
    return bool(result.confirmed) and memory_share >= SURE_OOM


def settled_oom(attempts: Iterable[AttemptState], memory_share: float) -> bool:
    """Whether it is settled that this run does not fit, so that larger runs may be left out.

    One confirmed OOM is enough where the prediction agrees; else it takes two, one of them confirmed.
    """
    ooms = [a.result for a in attempts if a.result and a.result.status == Status.OOM]
    return any(_sure(r, memory_share) for r in ooms) or (len(ooms) > 1 and any(r.confirmed for r in ooms))


def _deterministic(results: Sequence[RunResult]) -> tuple[str, str] | None:
    """Two sets of nodes that had the same failure and share no node; None when there are no such sets."""
    last = results[-1]
    for other in results[:-1]:
        same = last.fingerprint is not None and other.fingerprint == last.fingerprint
        if same and last.hostnames and other.hostnames and not set(last.hostnames) & set(other.hostnames):
            return ",".join(other.hostnames), ",".join(last.hostnames)
    return None


def pointed_at(state: SweepState) -> dict[str, list[RunResult]]:
    """run_id -> the failures of the run that point at hosts.

    Invalid runs are left out, since what is computed wrongly is no node's fault.
    """
    failures: dict[str, list[RunResult]] = defaultdict(list)
    for key, attempt in state.attempts.items():
        if (result := attempt.result) and result.suspect_hosts and result.status != Status.INVALID:
            failures[key.run_id].append(result)
    return failures


def suspect_runs(state: SweepState) -> frozenset[str]:
    """The runs that failed for one cause on hosts that have none in common: they are at fault, and not the hosts."""
    return frozenset(
        run_id
        for run_id, failures in pointed_at(state).items()
        if any(
            one.cause == other.cause and not {*one.suspect_hosts} & {*other.suspect_hosts}
            for one, other in combinations(failures, 2)
            if not _said_by_node(one) and not _said_by_node(other)
        )
    )


def _said_by_node(result: RunResult) -> bool:
    """Whether Slurm or the node itself says that the node failed; the silence of its agent alone says less."""
    return result.status == Status.NODE_FAIL and result.cause != AGENT_GONE


def excluded_nodes(state: SweepState, policy: RetryPolicy) -> dict[str, str]:
    """Nodes that must not be used again -> the reason, the worst node first; empty with launcher=local, which has no other node.

    A node is excluded if it or Slurm says that it failed, or if several runs point at it. Where some run was ok on it,
    runs that fail in the same way elsewhere do not count, so that it may be used again when such a run is found out.
    """
    if state.config.get("launcher", {}).get("name") == "local":
        return {}
    blamed: dict[str, set[str]] = defaultdict(set)
    ends = [end for allocation in state.allocations.values() for end in allocation.ends.values()]
    failed = {node: "its agent gave it up" for end in ends for node in end.avoid}
    doubted = suspect_runs(state)
    worked = {host for a in state.attempts.values() if (ok := a.ok) for host in ok.hostnames}
    for run_id, failures in pointed_at(state).items():
        for result in failures:
            for host in result.suspect_hosts:
                if _said_by_node(result):
                    failed[host] = str(result.reason)
                elif run_id not in doubted or host not in worked:
                    blamed[host].add(run_id)
    often = {host: len(runs) for host, runs in blamed.items() if len(runs) >= EXCLUDE_AFTER}
    reasons = {host: f"suspected in {counted(number, 'run')}" for host, number in often.items()} | failed
    ranked = sorted(reasons.keys() - {*policy.forgive}, key=lambda h: (h not in failed, -len(blamed[h]), h))
    return {host: reasons[host] for host in ranked[: policy.max_excluded]}


def breaker_reason(state: SweepState, policy: RetryPolicy, ended_s: Mapping[AttemptKey, float]) -> str | None:
    """The reason to stop the sweep: the latest runs of this launch all failed in the same way, or no step of its program is known.

    Args:
        ended_s: seconds since this launch saw each attempt end. They give the order of the ends, because
            the clocks of nodes may differ.
    """
    if policy.breaker is None:
        return None
    ended = sorted((-ago_s, key) for key, ago_s in ended_s.items() if key in state.attempts)
    results = (state.attempts[key].result for _, key in ended)
    telling = [r for r in results if r and not STATUSES[r.status].passed_over]
    measured = {ok.kernel_digest for attempt in state.attempts.values() if (ok := attempt.ok)}
    if any(r.cause == UNMEASURED and r.kernel_digest not in measured for r in telling):
        why = "the first run of this program reported no step that counts, and the others would end alike"
        return f"{why}; mend it or kernel.step_line and launch again"
    latest = telling[-policy.breaker :]
    kinds = {(r.status, r.fingerprint or r.cause) for r in latest}
    if len(latest) < policy.breaker or len(kinds) > 1 or latest[-1].status == Status.OK:
        return None
    same = f"the last {len(latest)} runs all ended as {latest[-1].status.value} in the same way"
    advice = f"mend that and launch again, or raise retry.breaker={policy.breaker}"
    return f"{same} ({latest[-1].reason}); {advice}"
