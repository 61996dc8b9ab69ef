"""Decides what follows from a failure: try again, on other nodes or not, give up, or stop the sweep."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ultrabench.kernel_config import LOG_OPTIONS
from ultrabench.result import NOT_STARTED, STATUSES, UNMEASURED, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.standing import failed_in_full
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.config.sweep_config import OUTSIDE, RetryPolicy
from ultrabench.sweep.running.blame import Blame

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
    avoid: tuple[str, ...] = ()
    """Nodes that the next attempt should not use, if enough others exist."""


def decide_retry(
    attempts: Sequence[AttemptState],
    policy: RetryPolicy,
    *,
    blame: Blame,
    old_attempts: frozenset[AttemptKey] = frozenset(),
    memory_share: float = 1.0,
) -> RetryDecision:
    """Whether one repeat of a run is tried again after its failed `attempts`, given in their order.

    Args:
        blame: what all attempts of the sweep say about nodes and runs.
        old_attempts: attempts that ended before this launch; of these, failures that were not the run's fault
            do not count.
        memory_share: predicted memory of the run, as a share of the memory of a rank.
    """
    ended_attempts = [(attempt, attempt.result) for attempt in attempts if attempt.result is not None]
    last_attempt, last_result = ended_attempts[-1]
    if nodes_text := blame.program_failures.get(last_result.fingerprint or ""):
        return RetryDecision(retry=False, why=f"the same failure came on {nodes_text}")
    if last_result.status == Status.CRASH and last_result.cause == NOT_STARTED:
        return RetryDecision(retry=False, why="its container or interpreter cannot start")
    kind = _kind(last_attempt, last_result, policy, blame)
    same_kind_keys = [a.key for a, result in ended_attempts if _kind(a, result, policy, blame) == kind]
    if kind == OUTSIDE:
        same_kind_keys = [key for key in same_kind_keys if key not in old_attempts]
    num_failures = len(same_kind_keys)
    num_allowed = _num_allowed(last_attempt, last_result, policy, blame, memory_share)
    name = last_result.cause if kind == last_result.cause else last_result.status.value
    if num_failures > num_allowed:
        return RetryDecision(retry=False, why=f"{name}: {num_failures} of at most {num_allowed + 1} failures")
    avoid = blame.avoid(last_attempt.key.run_id, last_attempt.key.repeat)
    why = f"{name}: attempt {num_failures + 1} of {num_allowed + 1}"
    why += f", without {','.join(avoid)} if enough other nodes exist" if avoid else ""
    # Waiting may help where the policy itself tries again; a try on other nodes needs no pause.
    may_help = STATUSES[last_result.status].pause and num_failures <= policy.allowed(last_result)
    pause_s = min(policy.backoff_max_s, policy.backoff_s * 2.0 ** (num_failures - 1)) if may_help else 0.0
    return RetryDecision(retry=True, why=why, pause_s=pause_s, avoid=avoid)


def _num_allowed(
    attempt: AttemptState, result: RunResult, policy: RetryPolicy, blame: Blame, memory_share: float
) -> int:
    """How often a run is tried again after this failure, by the policy and by what other nodes may tell."""
    num_allowed = policy.allowed(result)
    if blame.came_from_excluded(attempt):
        return policy.attempts[Status.NODE_FAIL]
    if policy.kind(result) == OUTSIDE:
        return num_allowed
    if result.status == Status.OOM and not _is_sure_oom(result, memory_share):
        return num_allowed + 1
    return max(num_allowed, blame.num_tries_elsewhere(attempt))


def _kind(attempt: AttemptState, result: RunResult, policy: RetryPolicy, blame: Blame) -> str:
    """The failures with which a failure is counted together; one that an excluded node explains is not the run's."""
    return OUTSIDE if blame.came_from_excluded(attempt) else policy.kind(result)


def _is_sure_oom(result: RunResult, memory_share: float) -> bool:
    return bool(result.confirmed) and memory_share >= SURE_OOM_MEM_SHARE


def proven_oom(attempts: Iterable[AttemptState], memory_share: float) -> bool:
    """Whether it is certain that this run does not fit, so that larger runs may be left out.

    One confirmed OOM is enough where the prediction agrees; else it takes two, one of them confirmed.
    """
    ooms = [a.result for a in attempts if a.result and a.result.status == Status.OOM]
    is_repeated = len(ooms) > 1 and any(oom.confirmed for oom in ooms)
    return is_repeated or any(_is_sure_oom(oom, memory_share) for oom in ooms)


def has_failed_in_full(attempts: Iterable[AttemptState]) -> bool:
    """Whether a run was only screened, and the start that was to measure it in full has failed.

    Args:
        attempts: those of one run, sorted by repeat and attempt.
    """
    last_results = {attempt.key.repeat: attempt.result for attempt in attempts}.values()
    return failed_in_full((result.status, result.is_screened) for result in last_results if result)


def breaker_reason(
    state: SweepState, policy: RetryPolicy, blame: Blame, ages_s: Mapping[AttemptKey, float]
) -> str | None:
    """The reason to stop the sweep: the latest runs of this launch all failed in the same way,
    or no step of its program is known.

    Args:
        ages_s: seconds since this launch saw each attempt end. They give the order of the ends, because
            the clocks of nodes may differ.
    """
    if policy.breaker is None:
        return None
    keys_by_end = sorted((-ago_s, key) for key, ago_s in ages_s.items() if key in state.attempts)
    # A node that fails every run is excluded, which stops its failures without stopping the sweep.
    results = (
        state.attempts[key].result
        for _, key in keys_by_end
        if not blame.came_from_excluded(state.attempts[key])
    )
    # Jobs that start nothing are counted by their nodes and variants.
    counted_results = [
        r for r in results if r and not STATUSES[r.status].passed_over and r.cause != NOT_STARTED
    ]
    measured_digests = {ok.kernel_digest for attempt in state.attempts.values() if (ok := attempt.ok)}
    if any(r.cause == UNMEASURED and r.kernel_digest not in measured_digests for r in counted_results):
        problem = "the first run of this program could not be measured, and others would fail in the same way"
        options = ", ".join(f"kernel.{option}" for option in LOG_OPTIONS)
        return f"{problem}; fix the program or the patterns for its log ({options}), then launch again"
    last_runs = counted_results[-policy.breaker :]
    failure_signatures = {(result.status, result.fingerprint or result.cause) for result in last_runs}
    if len(last_runs) < policy.breaker or len(failure_signatures) > 1 or last_runs[-1].status == Status.OK:
        return None
    repetition = f"the last {len(last_runs)} runs all failed in the same way: {last_runs[-1].status.value}"
    advice = f"fix the cause and launch again, or raise retry.breaker={policy.breaker}"
    return f"{repetition} ({last_runs[-1].reason}); {advice}"
