"""One attempt from the start of its ranks to the moment when they are gone, or have to go."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ultrabench.agent.deadline import Overdue, overdue
from ultrabench.agent.gang import POLL_S, Gang
from ultrabench.agent.gathering import Gathering
from ultrabench.agent.judgement import measured_steps
from ultrabench.agent.rank_facts import RankFacts, facts_of
from ultrabench.agent.verdict import Verdict, verdict
from ultrabench.result import RunResult, Status
from ultrabench.run import Task

PEER_GRACE_S = 2.0
"""After the first failure of a rank its peers get this long to say what they know."""
RACE_STEPS = 2
"""Measured steps after which a run may be given up as too slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Why the watching ended; nothing set: the ranks ended by themselves."""

    missed: Overdue | None = None
    """The deadline for which the ranks have to go."""
    ended: str | None = None
    """Why the allocation ends under the run."""
    verdict: Verdict | None = None
    """Of a run that stood still."""
    facts: Sequence[RankFacts] = ()
    """What the verdict rests on."""


def watch(
    gang: Gang,
    task: Task,
    gathering: Gathering,
    ends: float,
    tell_phase: Callable[[Gathering], None],
    race_s: float | None = None,
) -> Watched:
    """Follows the ranks of `task`.

    Args:
        ends: end of the allocation by time.monotonic().
        tell_phase: called when rank 0 enters another phase.
        race_s: a run whose fastest step takes longer cannot be the best, and is stopped.
    """
    told_port, told_phase, failed_at = False, "", 0.0
    while gathering.running:
        gang.listen(gathering, POLL_S)
        if gathering.port is not None and not told_port:
            told_port = True
            gang.tell_port(gathering.port)
        if gathering.phase != told_phase:
            told_phase = gathering.phase
            tell_phase(gathering)
        now = time.monotonic()
        ended = gang.interrupted or ("the time of its allocation ended" if now > ends else None)
        if ended:
            return Watched(ended=ended)
        if gathering.failed:
            failed_at = failed_at or now
            if now - failed_at > PEER_GRACE_S:
                return Watched()
            continue
        missed = _overdue(task, gathering, now)
        if missed and missed.status == Status.HANG:
            return _examined(gang, gathering, missed)
        enough = _out_of_time(task, gathering, missed) if missed else _lost_race(task, gathering, race_s)
        if enough:
            return Watched(missed=enough)
    return Watched()


def _examined(gang: Gang, gathering: Gathering, missed: Overdue) -> Watched:
    """Asks what the ranks do before they have to go; of a hang that is the reason."""
    gang.autopsy(gathering)
    per_node = len(gathering.ranks) // len(gang.hosts)
    facts = [facts_of(i, gang.hosts[i // per_node], story) for i, story in enumerate(gathering.ranks)]
    found = verdict(facts)
    missed = replace(missed, reason=f"{found.headline}; {missed.reason}")
    return Watched(missed=missed, facts=facts, verdict=found)


def explained(result: RunResult, watched: Watched) -> RunResult:
    """The result with the verdict, its evidence and, of a hang, the hosts it points at."""
    found = watched.verdict
    if found is None or result.status == Status.OK:
        return result
    evidence = {**result.evidence, "verdict": found.text, "autopsy": [f.row() for f in watched.facts]}
    suspects = found.hosts if result.status == Status.HANG else result.suspects
    return replace(result, evidence=evidence, suspects=suspects)


def _overdue(task: Task, gathering: Gathering, now: float) -> Overdue | None:
    return overdue(
        now=now,
        started=gathering.started,
        moved=gathering.moved,
        first_step=gathering.first_step,
        slowest_gap_s=gathering.slowest_gap_s,
        phase=gathering.phase,
        spoke=gathering.spoke or task.forked,
        predicted_step_time_s=task.predicted_step_time_s,
        limit_s=task.limit_s,
        measure=task.measure,
    )


def _out_of_time(task: Task, gathering: Gathering, missed: Overdue) -> Overdue:
    """What to make of a run that had had its time: enough measured steps are a measurement all the same."""
    rank = gathering.ranks[0]
    times = measured_steps(rank, task.measure)
    reason = missed.reason + (f"; {len(rank.steps)} steps done" if rank.steps else "")
    if len(times) >= task.measure.min_steps and len(rank.steps) >= task.measure.loss_step:
        return Overdue(status=Status.OK, reason=reason, stopped="time_limit")
    return replace(missed, reason=reason)


def _lost_race(task: Task, gathering: Gathering, race_s: float | None) -> Overdue | None:
    """Whether it is clear that others are faster; the step whose loss is compared has to be done."""
    rank = gathering.ranks[0]
    if race_s is None or rank.done or len(rank.steps) < task.measure.loss_step:
        return None
    times = measured_steps(rank, task.measure)
    if len(times) < RACE_STEPS or min(times) <= race_s:
        return None
    reason = f"the fastest of {len(times)} steps took {min(times):.4g} s; the best of its cell needs"
    needs = f"{race_s / (task.measure.race or 1.0):.4g} s"
    return Overdue(status=Status.OK, reason=f"{reason} {needs}", stopped="slower_than_best")
