"""Makes the allocations that agents read, and groups the jobs that can be submitted together."""

import time
from collections.abc import Sequence
from pathlib import Path

from ultrabench.run import Task
from ultrabench.store.allocation import Allocation, utc_offset_s
from ultrabench.store.folder import SweepFolder
from ultrabench.store.jobs_seen import Origin
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.predict.predict import start_s
from ultrabench.sweep.running.attempts import PlannedAttempt
from ultrabench.sweep.running.price import PlannedJob, run_limit_s


def array_groups(jobs: Sequence[PlannedJob], max_size: int) -> list[list[PlannedJob]]:
    """The jobs in groups of at most `max_size`, each of equal nodes, time limit, runtime and nodes to avoid."""
    groups: dict[tuple[object, ...], list[PlannedJob]] = {}
    for job in jobs:
        group_key = (job.nodes, job.limit_s, job.attempts[0].candidate.runtime, job.avoid)
        groups.setdefault(group_key, []).append(job)
    return [group[i : i + max_size] for group in groups.values() for i in range(0, len(group), max_size)]


def make_allocations(
    plan: Plan,
    folder: SweepFolder,
    jobs: Sequence[PlannedJob],
    *,
    token: str,
    origin: Origin,
    kernel_digest: str,
    sweep_id: str = "",
    git_commit: str | None = None,
    num_cores: int | None = None,
) -> list[Allocation]:
    """The allocations of one submission, as their agents will read them; this writes no file.

    Args:
        token: hexadecimal digits that no other submission has.
        origin: the user who submits the allocations, and the cluster or host.
        kernel_digest: digest of the training program; the program on the nodes must have the same one.
        sweep_id: id of the sweep, by which its checkpoints and jobs are found under every path and name.
        num_cores: number of cores of this host; None if they were not counted.
    """
    config = plan.config
    return [
        Allocation(
            name=f"n{job.nodes}-{token[:8]}.{index}",
            sweep_dir=str(folder.path),
            sweep_id=sweep_id,
            work_dir=str(Path.cwd()),
            nodes=job.nodes,
            gpus_per_node=config.hardware.gpus_per_node,
            simulated=config.hardware.simulated,
            threads=_rank_threads(config, job.nodes, num_cores),
            heartbeat_s=config.launcher.heartbeat_s,
            limit_s=job.limit_s,
            kernel_digest=kernel_digest,
            git_commit=git_commit,
            preflight=config.launcher.preflight,
            control=job.control,
            window=config.launcher.window,
            utc_offset_s=utc_offset_s(time.time()) if config.launcher.window else None,
            by=origin,
            tasks=tuple(_task(plan, folder, sweep_id, attempt, job) for attempt in job.attempts),
        )
        for index, job in enumerate(jobs)
    ]


def _task(plan: Plan, folder: SweepFolder, sweep_id: str, attempt: PlannedAttempt, job: PlannedJob) -> Task:
    config, run = plan.config, attempt.candidate
    save_folder = Path.cwd() / (config.measure.checkpoint_folder or folder.path)
    best_run, tokens_per_gpu = job.best.get(run.cell), run.spec.tokens_per_step / run.layout.world_size
    has_same_control = best_run is not None and best_run.by_control and best_run.control == job.control
    return Task(
        **attempt.key._asdict(),
        spec=run.spec,
        measure=config.measure,
        device=config.hardware.device,
        rank_mem_bytes=config.hardware.mem_bytes,
        gpu_names=config.hardware.reported_as,
        predicted_step_time_s=run.prediction.step_time_s,
        predicted_duration_s=run.duration_s,
        predicted_start_s=start_s(config.hardware, run.nodes) + run.start_excess_s,
        limit_s=run_limit_s(attempt, config),
        best_step_time_s=tokens_per_gpu / best_run.rate if best_run and best_run.rate else None,
        best_control_ratio=best_run.control_ratio if best_run and has_same_control else None,
        traced=config.trace,
        slice=run.slice,
        few_steps=run.few_steps,
        checkpoint=str(folder.checkpoint(save_folder, sweep_id, attempt.key))
        if config.measure.checkpoint
        else None,
    )


def _rank_threads(config: SweepConfig, num_nodes: int, num_cores: int | None) -> int | None:
    """The value of OMP_NUM_THREADS for a rank: the cores of the host, divided among the ranks on it.

    It is None if the nodes are other hosts, since the agents there count the cores themselves.
    """
    if num_cores is None or (config.launcher.holds_nodes and not config.hardware.simulated):
        return None
    num_nodes_on_host = num_nodes if config.hardware.simulated else 1
    return max(1, num_cores // (config.hardware.gpus_per_node * num_nodes_on_host))
