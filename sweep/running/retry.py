"""Decides what follows from a failure: try again, give up, avoid a node, or stop the sweep."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ultrabench.errors import counted
from ultrabench.log_patterns import LOG_PATTERNS
from ultrabench.result import AGENT_GONE, STATUSES, UNMEASURED, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.config.sweep_config import RetryPolicy

MIN_SUSPECTING_RUNS = 2
"""Number of different runs that must suspect a node before it is avoided; one run alone may be wrong."""
SURE_OOM_MEM_SHARE = 0.85
"""Predicted share of a rank's memory from which one confirmed OOM is enough. Below it a second one is needed,
since the prediction may be wrong by about 15 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDecision:
    """Whether a run is tried again, and why."""

    retry: bool
    why: str
    pause_s: float = 0.0
    """Seconds to wait after the end of the latest attempt."""


def decide_retry(
    attempts: Sequence[AttemptState],
    policy: RetryPolicy,
    *,
    old_attempts: frozenset[AttemptKey] = frozenset(),
    memory_share: float = 1.0,
) -> RetryDecision:
    """Whether one repeat of a run is tried again after its failed `attempts`, given in their order.

    Args:
        old_attempts: attempts that ended before this launch; of these, failures that were not the run's fault
            do not count.
        memory_share: predicted memory of the run, as a share of the memory of a rank.
    """
    results = [attempt.result for attempt in attempts if attempt.result is not None]
    last_result = results[-1]
    kind, num_allowed = policy.kind(last_result), policy.allowed(last_result)
    same_kind_keys = [a.key for a in attempts if a.result and policy.kind(a.result) == kind]
    if kind == "outside":
        same_kind_keys = [key for key in same_kind_keys if key not in old_attempts]
    elif last_result.status == Status.OOM and not _is_sure_oom(last_result, memory_share):
        num_allowed += 1
    elif host_texts := _hosts_of_same_failure(results):
        return RetryDecision(retry=False, why=f"the same failure on {host_texts[0]} and on {host_texts[1]}")
    num_failures = len(same_kind_keys)
    name = last_result.cause if kind == last_result.cause else last_result.status.value
    if num_failures > num_allowed:
        return RetryDecision(retry=False, why=f"{name}: {num_failures} of at most {num_allowed + 1} failures")
    why = f"{name}: attempt {num_failures + 1} of {num_allowed + 1}"
    pause_s = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** (num_failures - 1))
    return RetryDecision(retry=True, why=why, pause_s=pause_s if STATUSES[last_result.status].pause else 0.0)


def _is_sure_oom(result: RunResult, memory_share: float) -> bool:
    return bool(result.confirmed) and memory_share >= SURE_OOM_MEM_SHARE


def proven_oom(attempts: Iterable[AttemptState], memory_share: float) -> bool:
    """Whether it is certain that this run does not fit, so that larger runs may be left out.

    One confirmed OOM is enough where the prediction agrees; else it takes two, one of them confirmed.
    """
    ooms = [a.result for a in attempts if a.result and a.result.status == Status.OOM]
    is_repeated = len(ooms) > 1 and any(oom.confirmed for oom in ooms)
    return is_repeated or any(_is_sure_oom(oom, memory_share) for oom in ooms)


def _hosts_of_same_failure(results: Sequence[RunResult]) -> tuple[str, str] | None:
    """Two sets of nodes that had the same failure and share no node; None when there are no such sets."""
    last = results[-1]
    for earlier in results[:-1]:
        is_same_failure = last.fingerprint is not None and earlier.fingerprint == last.fingerprint
        has_common_node = not set(last.hostnames).isdisjoint(earlier.hostnames)
        if is_same_failure and last.hostnames and earlier.hostnames and not has_common_node:
            return ",".join(earlier.hostnames), ",".join(last.hostnames)
    return None


def host_failures_by_run(state: SweepState) -> dict[str, list[RunResult]]:
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
    failures_by_run = host_failures_by_run(state).items()
    return frozenset(run_id for run_id, failures in failures_by_run if _have_disjoint_suspects(failures))


def _have_disjoint_suspects(failures: Iterable[RunResult]) -> bool:
    """Whether two failures of a run, which no node has said itself, have one cause and no host in common."""
    suspected_failures = [failure for failure in failures if not _is_reported_by_node(failure)]
    pairs = (pair for pair in combinations(suspected_failures, 2) if pair[0].cause == pair[1].cause)
    return any(set(first.suspect_hosts).isdisjoint(second.suspect_hosts) for first, second in pairs)


def _is_reported_by_node(result: RunResult) -> bool:
    """Whether Slurm or the node itself says that the node failed; the silence of its agent alone says less."""
    return result.status == Status.NODE_FAIL and result.cause != AGENT_GONE


def excluded_nodes(state: SweepState, policy: RetryPolicy) -> dict[str, str]:
    """Nodes that must not be used again -> the reason, the worst node first; empty with launcher=local, which has no other node.

    A node is excluded if it or Slurm says that it failed, or if several runs point at it. Where some run was ok on it,
    runs that fail in the same way elsewhere do not count, so that it may be used again when such a run is found out.
    """
    if state.config.get("launcher", {}).get("name") == "local":
        return {}
    runs_by_host: dict[str, set[str]] = defaultdict(set)
    ends = [end for allocation in state.allocations.values() for end in allocation.ends.values()]
    failure_by_host = {node: "its agent or Slurm reported it unusable" for end in ends for node in end.avoid}
    suspect_run_ids = suspect_runs(state)
    working_hosts = {host for a in state.attempts.values() if (ok := a.ok) for host in ok.hostnames}
    for run_id, failures in host_failures_by_run(state).items():
        for result in failures:
            for host in result.suspect_hosts:
                if _is_reported_by_node(result):
                    failure_by_host[host] = str(result.reason)
                elif run_id not in suspect_run_ids or host not in working_hosts:
                    runs_by_host[host].add(run_id)
    num_by_host = {host: len(ids) for host, ids in runs_by_host.items() if len(ids) >= MIN_SUSPECTING_RUNS}
    suspicions = {host: f"suspected in {counted(num_runs, 'run')}" for host, num_runs in num_by_host.items()}
    reason_by_host = suspicions | failure_by_host
    excluded_hosts = reason_by_host.keys() - {*policy.forgive}
    ranked_hosts = sorted(excluded_hosts, key=lambda h: (h not in failure_by_host, -len(runs_by_host[h]), h))
    return {host: reason_by_host[host] for host in ranked_hosts[: policy.max_excluded]}


def breaker_reason(state: SweepState, policy: RetryPolicy, ages_s: Mapping[AttemptKey, float]) -> str | None:
    """The reason to stop the sweep: the latest runs of this launch all failed in the same way, or no step of its program is known.

    Args:
        ages_s: seconds since this launch saw each attempt end. They give the order of the ends, because
            the clocks of nodes may differ.
    """
    if policy.breaker is None:
        return None
    keys_by_end = sorted((-ago_s, key) for key, ago_s in ages_s.items() if key in state.attempts)
    results = (state.attempts[key].result for _, key in keys_by_end)
    counted_results = [r for r in results if r and not STATUSES[r.status].passed_over]
    measured_digests = {ok.kernel_digest for attempt in state.attempts.values() if (ok := attempt.ok)}
    if any(r.cause == UNMEASURED and r.kernel_digest not in measured_digests for r in counted_results):
        problem = "the first run of this program could not be measured, and others would fail in the same way"
        options = ", ".join(f"kernel.{option}" for option in LOG_PATTERNS)
        return f"{problem}; fix the program or the patterns for its log ({options}), then launch again"
    last_runs = counted_results[-policy.breaker :]
    failure_signatures = {(result.status, result.fingerprint or result.cause) for result in last_runs}
    if len(last_runs) < policy.breaker or len(failure_signatures) > 1 or last_runs[-1].status == Status.OK:
        return None
    repetition = f"the last {len(last_runs)} runs all failed in the same way: {last_runs[-1].status.value}"
    advice = f"fix the cause and launch again, or raise retry.breaker={policy.breaker}"
    return f"{repetition} ({last_runs[-1].reason}); {advice}"
