"""Runs that are left out because another run had not enough memory; nothing of it is stored."""

from collections.abc import Iterable, Mapping, Sequence

from ultrabench.layout import dominates
from ultrabench.result import Status
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.running.retry import settled_oom


def left_out(runs: Iterable[Candidate], state: SweepState) -> dict[str, str]:
    """run_id of each run that cannot fit -> run_id of the run that had not enough memory.

    A run that was ok, or that the user asks for, is not left out. Where a run was ok that should not have
    fitted, the run that had not enough memory says nothing about others.
    """
    if not any(_ended(attempt, Status.OOM) for attempt in state.attempts.values()):
        return {}
    tried: dict[str, list[AttemptState]] = {}
    for key, attempt in sorted(state.attempts.items()):
        tried.setdefault(key.run_id, []).append(attempt)
    kin: dict[tuple[object, ...], list[Candidate]] = {}
    for run in runs:
        at = run.layout
        kin.setdefault((run.cell, at.tp, at.pp, at.cp), []).append(run)
    fitted = {i for i, attempts in tried.items() if any(_ended(a, Status.OK) for a in attempts)}
    asked = {key.run_id for key in state.retried}
    found: dict[str, str] = {}
    for group in kin.values():
        for victims, run_id in _speaking(group, tried, fitted):
            found |= dict.fromkeys(victims - asked - found.keys(), run_id)
    return found


def _speaking(
    group: Sequence[Candidate], tried: Mapping[str, list[AttemptState]], fitted: set[str]
) -> Iterable[tuple[set[str], str]]:
    """For each run of a group that surely had not enough memory: the runs that need more, and its run_id."""
    for run in group:
        attempts = tried.get(run.run_id, [])
        if run.run_id not in fitted and settled_oom(attempts, run.prediction.memory_share):
            victims = {o.run_id for o in group if dominates(run.layout, o.layout)}
            if not victims & fitted:
                yield victims, run.run_id


def _ended(attempt: AttemptState, status: Status) -> bool:
    return attempt.result is not None and attempt.result.status == status


def skipped_reason(by: str) -> str:
    """What a row says of a run that is left out."""
    return f"dominated by {by}, which had not enough memory with a smaller micro-batch or a higher ZeRO stage"
