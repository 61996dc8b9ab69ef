"""What the agents of allocations read, and which allocations one submission can hold."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ultrabench.allocation import Allocation
from ultrabench.launchers.open_sweep import OpenSweep, rank_threads
from ultrabench.run import Task
from ultrabench.sweep.control import Cell, cell_of
from ultrabench.sweep.decide import Todo
from ultrabench.sweep.pack import run_limit_s
from ultrabench.sweep.price import Draft


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
            tasks=tuple(_task(sweep, todo, draft.best_step_times_s) for todo in draft.group),
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
        gpu_names=config.hardware.accelerator.reported_as,
        predicted_step_time_s=todo.candidate.prediction.step_time_s,
        predicted_duration_s=todo.candidate.duration_s(sweep.plan.steps),
        limit_s=run_limit_s(todo, config, sweep.plan.steps),
        best_step_time_s=best.get(cell_of(todo.candidate)),
        profile=config.profile,
    )
