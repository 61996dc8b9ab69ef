"""Attempts to allocations: what shares a job, its control run, its limit and its price."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType

from ultrabench.allocation import Allocation
from ultrabench.launchers.prepare import OpenSweep, rank_threads
from ultrabench.run import Task
from ultrabench.state import AttemptKey, SweepState
from ultrabench.sweep.contenders import best_step_times_s
from ultrabench.sweep.control import Cell, cell_of, controls, next_repeat
from ultrabench.sweep.decide import Decision, Todo
from ultrabench.sweep.pack import allocation_limit_s, pack, run_limit_s
from ultrabench.sweep.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An allocation that could be submitted."""

    group: tuple[Todo, ...]
    """In the order they run, the control first."""
    control: str | None
    limit_s: float
    gpu_hours: float
    """Predicted price."""
    best_step_times_s: Mapping[Cell, float] = field(default_factory=dict)
    """Of the cells so far: what is much slower need not be measured to the end."""

    @property
    def nodes(self) -> int:
        """Its size."""
        return self.group[0].candidate.nodes


def drafts(
    sweep: OpenSweep, decision: Decision, state: SweepState, max_limit_s: float,
    held_s: Mapping[str, float] = MappingProxyType({}),
) -> list[Draft]:  # fmt: skip
    """The allocations that a decision asks for, in its order; of an untried size only one."""
    config, steps = sweep.config, sweep.plan.steps
    overhead_s = _overhead_s(state, held_s)
    groups = pack(decision.todo, config, steps)
    cells = controls(sweep.plan) if config.launcher.control and config.launcher.pack != 1 else {}
    known = [*state.attempts, *(key for held in state.allocations.values() for key in held.tasks)]
    known += [t.key for t in decision.todo]
    best = best_step_times_s(state, sweep.plan.runs)
    found, seen = [], set[int]()
    for group in groups:
        nodes = group[0].candidate.nodes
        if nodes in decision.untried & seen:
            continue
        seen.add(nodes)
        control = cells.get(cell_of(group[0].candidate))
        if control is not None:
            run_id = control.run_id
            own = [t for t in group if t.key.run_id == run_id]
            if not own:
                repeat = next_repeat(run_id, known, config.repeats)
                own = [Todo(candidate=control, key=AttemptKey(run_id, repeat, 0))]
                known.append(own[0].key)
            group = (*own, *(t for t in group if t.key.run_id != run_id))
        found.append(
            Draft(
                group=group,
                control=control.run_id if control else None,
                limit_s=min(max_limit_s, allocation_limit_s(group, config, steps)),
                gpu_hours=sum(t.candidate.gpu_hours(steps) for t in group)
                + overhead_s * nodes * config.hardware.gpus_per_node / 3600,
                best_step_times_s=best,
            )
        )
    return found


def _overhead_s(state: SweepState, held_s: Mapping[str, float]) -> float:
    """Median time that allocations so far held their nodes beyond their runs; 0 before a run has ended.

    Until an allocation is over, those that have ended a run stand for it: `held_s` is how long they have
    held their nodes by the latest look.
    """
    ran: dict[str, float] = {}
    for attempt in state.attempts.values():
        if attempt.allocation and attempt.result:
            ran[attempt.allocation] = ran.get(attempt.allocation, 0.0) + (attempt.result.duration_s or 0.0)
    over = {h.name: h.held_s for h in state.allocations.values() if h.agents and h.ended is not None}
    over = over or {name: seconds for name, seconds in held_s.items() if ran.get(name)}
    return median(max(0.0, seconds - ran.get(name, 0.0)) for name, seconds in over.items()) if over else 0.0


def shapes(chosen: Sequence[Draft], max_array: int) -> list[list[Draft]]:
    """The drafts that one submission each can hold: alike in nodes and time limit."""
    alike: dict[tuple[int, float], list[Draft]] = {}
    for draft in chosen:
        alike.setdefault((draft.nodes, draft.limit_s), []).append(draft)
    return [
        group[start : start + max_array]
        for group in alike.values()
        for start in range(0, len(group), max_array)
    ]


def allocations(
    sweep: OpenSweep, array: Sequence[Draft], by: Mapping[str, str] = MappingProxyType({})
) -> list[Allocation]:
    """What the agents of a submission's allocations will read; nothing is written yet.

    Args:
        by: who submits them and where, {user, cluster, host}.
    """
    config = sweep.config
    token = f"n{array[0].nodes}-{uuid.uuid4().hex[:8]}"
    return [
        Allocation(
            name=f"{token}.{number}",
            sweep_dir=str(sweep.folder.path),
            work_dir=str(Path.cwd()),
            nodes=draft.nodes,
            gpus_per_node=config.hardware.gpus_per_node,
            simulated=config.hardware.simulated,
            threads=rank_threads(config, draft.nodes, sweep.environment.get("cores")),
            heartbeat_s=config.launcher.heartbeat_s,
            limit_s=draft.limit_s,
            kernel_digest=sweep.kernel_digest,
            git_commit=sweep.git_commit,
            preflight=config.launcher.preflight,
            control=draft.control,
            window=config.launcher.window,
            by=dict(by),
            tasks=tuple(sweep.alter(_task(sweep, todo, draft.best_step_times_s)) for todo in draft.group),
        )
        for number, draft in enumerate(array)
    ]


def _task(sweep: OpenSweep, todo: Todo, best: Mapping[Cell, float]) -> Task:
    config = sweep.config
    return Task(
        run_id=todo.key.run_id,
        repeat=todo.key.repeat,
        attempt=todo.key.attempt,
        spec=todo.candidate.spec,
        measure=config.measure,
        device=config.hardware.device,
        rank_mem_bytes=config.hardware.rank_mem_bytes,
        gpu_names=config.hardware.reported_as,
        predicted_step_time_s=todo.candidate.prediction.step_time_s,
        predicted_duration_s=todo.candidate.duration_s(sweep.plan.steps),
        limit_s=run_limit_s(todo, config, sweep.plan.steps),
        best_step_time_s=best.get(cell_of(todo.candidate)),
        profile=config.profile,
    )


def committed_gpu_hours(
    plan: Plan,
    state: SweepState,
    open_names: Sequence[str],
    held_s: Mapping[str, float] = MappingProxyType({}),
) -> float:
    """GPU hours for which allocations held their nodes; of open ones what was predicted, if that is more.

    Args:
        held_s: seconds that allocations have held their nodes by the latest look, setup included.
    """
    per_node, steps = plan.config.hardware.gpus_per_node, plan.steps
    price = {c.run_id: c.gpu_hours(steps) for c in plan.runs}
    overhead_s, total = _overhead_s(state, held_s), 0.0
    for name, held in state.allocations.items():
        seconds = held.held_s if held.timed else max(held.held_s, held_s.get(name, 0.0))
        planned = 0.0
        if name in open_names:
            planned = overhead_s * held.nodes * per_node / 3600
            planned += sum(price.get(key.run_id, 0.0) for key in held.tasks)
        total += max(seconds * held.nodes * per_node / 3600, planned)
    return total
