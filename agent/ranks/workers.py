"""The training processes of a node, by the variables RANK and WORLD_SIZE that torchrun and other starters give them."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ultrabench.processes import parent_of, start_time, variables_of


class Worker(NamedTuple):
    """A process that a starter has made a rank; the processes that it starts itself, such as data loaders, are none."""

    rank: int
    world_size: int
    pid: int


def workers_among(pids: Collection[int]) -> list[Worker]:
    """The workers among these processes, in the order in which they were started.

    Children inherit the variables of a worker, so that only the first process of each family of one rank is a worker.
    """
    candidates = {worker.pid: worker for pid in pids if (worker := _worker(pid))}
    ticks_by_pid = {pid: ticks for pid in candidates if (ticks := start_time(pid)) is not None}
    outer_workers = [w for w in candidates.values() if w.pid in ticks_by_pid and not _is_inner(w, candidates)]
    return sorted(outer_workers, key=lambda worker: (ticks_by_pid[worker.pid], worker.pid))


def _is_inner(worker: Worker, candidates: Mapping[int, Worker]) -> bool:
    parent = candidates.get(parent_of(worker.pid) or 0)
    return parent is not None and parent.rank == worker.rank


def _worker(pid: int) -> Worker | None:
    variables = variables_of(pid)
    rank, world_size = variables.get("RANK", ""), variables.get("WORLD_SIZE", "")
    return Worker(int(rank), int(world_size), pid) if rank.isdecimal() and world_size.isdecimal() else None


def pid_by_rank(workers: Iterable[Worker], ranks: range) -> dict[int, int]:
    """The pid of each of these ranks of a node that runs; of several processes with the same rank
    that of the first one.

    A starter may number its nodes in another order. Then its ranks stand for those of the node, in their order.
    """
    pids = {worker.rank: worker.pid for worker in reversed([*workers])}
    if pids.keys() & {*ranks}:
        return {rank: pid for rank, pid in pids.items() if rank in ranks}
    return dict(zip(ranks, (pid for _, pid in sorted(pids.items())), strict=False))


def wrong_size_text(workers: Iterable[Worker], world_size: int) -> str | None:
    """Why a command that starts the ranks of a node trains another number of ranks than the layout;
    None if it does not.
    """
    worker = next((worker for worker in workers if worker.world_size != world_size), None)
    if worker is None:
        return None
    fact = f"the command started ranks with WORLD_SIZE={worker.world_size}; the layout has {world_size} ranks"
    return f"{fact}: pass it nodes and ranks, such as --nnodes={{nodes}} --nproc_per_node={{gpus_per_node}}"


def repeated_rank_text(workers: Iterable[Worker], rank_by_pid: Mapping[int, int]) -> str | None:
    """Why a command that is started for each rank starts all ranks of a node itself; None if it does not.

    Args:
        rank_by_pid: pid of each process that the agent has started -> its rank.
    """
    processes_by_worker = defaultdict[int, set[int]](set)
    for worker in workers:
        ancestor_pid: int | None = worker.pid
        while ancestor_pid and ancestor_pid not in rank_by_pid:
            ancestor_pid = parent_of(ancestor_pid)
        if ancestor_pid and worker.world_size > 1:
            processes_by_worker[worker.rank].add(rank_by_pid[ancestor_pid])
    for worker_rank, process_ranks in sorted(processes_by_worker.items()):
        if len(process_ranks) > 1:
            first, second, *_ = sorted(process_ranks)
            fact = f"the commands of ranks {first} and {second} both started RANK={worker_rank}"
            return f"{fact}, so that several trainings compete: set kernel.launch_per=node"
    return None
