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
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path, store = os.environ.get("ULTRABENCH_STORE"), None
    if path is not None:
        while rank and not Path(path).exists():
            time.sleep(STORE_POLL_S)
        # The store of rank 0 takes a free port, which the agent tells the other ranks.
        port = int(Path(path).read_text()) if rank else 0
        host, is_master = os.environ["MASTER_ADDR"], rank == 0
        store = dist.TCPStore(host, port, size, is_master, PATIENCE, wait_for_workers=False)  # type: ignore[attr-defined]
        if is_master:
            report.write("store", port=store.port)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE, device_id=pin)
