"""Makes the process group in which the ranks of a run find each other."""

import datetime
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ultrabench.rank_report import Report

PATIENCE = datetime.timedelta(hours=12)
"""Time-out of the process group; it is longer than any run, since the deadlines of the agent detect hangs."""
STORE_POLL_S = 0.005


def join(report: Report, device: torch.device) -> None:
    """Makes the default process group: NCCL for GPUs, gloo for CPUs."""
    backend, pin = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    path = os.environ.get("ULTRABENCH_STORE")
    if path is None:
        dist.init_process_group(backend, timeout=PATIENCE, device_id=pin)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        store = _store(0, size, is_master=True)
        report.write("store", port=store.port)
    else:
        while not Path(path).exists():
            time.sleep(STORE_POLL_S)
        store = _store(int(Path(path).read_text()), size, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE, device_id=pin)


def _store(port: int, size: int, *, is_master: bool) -> dist.TCPStore:  # type: ignore[name-defined]
    """The key-value store of the run; its master takes a free port, which the agent tells the other ranks."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], port, size, is_master, PATIENCE, wait_for_workers=False
    )
