"""One attempt from the start of its ranks to the moment when they are gone, or have to go."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ultrabench.agent.agent_group import AgentGroup
from ultrabench.agent.connection import POLL_S
from ultrabench.agent.diagnose.hang_cause import HangCause, find_hang_cause
from ultrabench.agent.diagnose.rank_facts import RankFacts, facts_of
from ultrabench.agent.ranks.deadline import Overdue, overdue
from ultrabench.agent.ranks.rank_progress import AttemptProgress
from ultrabench.result import RunResult, Status
from ultrabench.run import Task

PEER_GRACE_S = 2.0
"""Seconds that the other ranks get after the first failure to report what they know."""
RACE_STEPS = 2
"""Measured steps after which a run may be given up as too slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Why the watching ended; when nothing is set, the ranks ended by themselves."""

    missed: Overdue | None = None
    """The deadline for which the ranks have to go."""
    ended: str | None = None
    """Why the allocation ends under the run."""
    hang_cause: HangCause | None = None
    """Why the run hung, if it did."""
    facts: Sequence[RankFacts] = ()
    """What the cause of the hang was found from."""


def watch(
    group: AgentGroup,
    task: Task,
    progress: AttemptProgress,
    ends: float,
    write_phase: Callable[[AttemptProgress], None],
    race_s: float | None = None,
) -> Watched:
    """Follows the ranks of `task`.

    Args:
        ends: end of the allocation by time.monotonic().
        write_phase: called when rank 0 enters another phase.
        race_s: a run whose fastest step takes longer cannot be the best, and is stopped.
    """
    port_sent, phase, failed_at = False, "", 0.0
    while progress.running:
        group.listen(progress, POLL_S)
        if progress.port is not None and not port_sent:
            port_sent = True
            group.send_port(progress.port)
        if progress.phase != phase:
            phase = progress.phase
            write_phase(progress)
        now = time.monotonic()
        ended = group.interrupted or ("the time of its allocation ended" if now > ends else None)
        if ended:
            return Watched(ended=ended)
        if progress.failed:
            failed_at = failed_at or now
            if now - failed_at > PEER_GRACE_S:
                return Watched()
            continue
        missed = overdue(task, progress, now)
        if missed and missed.status == Status.HANG:
            return _examined(group, progress, missed)
        enough = _out_of_time(task, progress, missed) if missed else _lost_race(task, progress, race_s)
        if enough:
            return Watched(missed=enough)
    return Watched()


def _examined(group: AgentGroup, progress: AttemptProgress, missed: Overdue) -> Watched:
    """Finds out what the ranks do before they have to go, and why they hang."""
    group.examine(progress)
    per_node = len(progress.ranks) // len(group.hosts)
    facts = [facts_of(i, group.hosts[i // per_node], rank) for i, rank in enumerate(progress.ranks)]
    cause = find_hang_cause(facts)
    missed = replace(missed, reason=f"{cause.headline}; {missed.reason}")
    return Watched(missed=missed, facts=facts, hang_cause=cause)


def explained(result: RunResult, watched: Watched) -> RunResult:
    """The result with the cause of the hang, its evidence and, of a hang, the hosts it points at."""
    cause = watched.hang_cause
    if cause is None or result.status == Status.OK:
        return result
    evidence = {**result.evidence, "verdict": cause.text, "autopsy": [f.row() for f in watched.facts]}
    suspects = cause.hosts if result.status == Status.HANG else result.suspects
    return replace(result, evidence=evidence, suspects=suspects)


def _out_of_time(task: Task, progress: AttemptProgress, missed: Overdue) -> Overdue:
    """What a run is that had used up its time: with enough measured steps it is ok all the same."""
    rank = progress.ranks[0]
    reason = missed.reason + (f"; {len(rank.steps)} steps done" if rank.steps else "")
    enough = len(rank.measured_steps(task.measure)) >= task.measure.min_steps
    if enough and len(rank.steps) >= task.measure.loss_step:
        return Overdue(status=Status.OK, reason=reason, stopped="time_limit")
    return replace(missed, reason=reason)


def _lost_race(task: Task, progress: AttemptProgress, race_s: float | None) -> Overdue | None:
    """Whether it is clear that others are faster; the step whose loss is compared has to be done."""
    rank = progress.ranks[0]
    if race_s is None or rank.done or len(rank.steps) < task.measure.loss_step:
        return None
    times = rank.measured_steps(task.measure)
    if len(times) < RACE_STEPS or min(times) <= race_s:
        return None
    reason = f"the fastest of {len(times)} steps took {min(times):.4g} s; the best of its cell needs"
    needs = f"{race_s / (task.measure.race or 1.0):.4g} s"
    return Overdue(status=Status.OK, reason=f"{reason} {needs}", stopped="slower_than_best")
