"""A rank that tells its time-outs and may have the fault of planted.py that FAULT names."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parity.planted import FAULTS
from ultrabench.kernel import worker
from ultrabench.kernel.step import TrainStep

require_equal_replicas = worker.require_equal_replicas


def tell_timeouts(trainer: TrainStep) -> None:
    """Also writes the seconds after which each group gives up, at the end of the steps."""
    groups = dist.distributed_c10d._world.pg_map
    options = {g.group_desc: g._get_backend(torch.device("cpu")).options for g in groups}
    timeouts_s = {name: option._timeout.total_seconds() for name, option in options.items()}
    Path(f"{os.environ['ULTRABENCH_REPORT']}.timeouts").write_text(json.dumps(timeouts_s))
    require_equal_replicas(trainer)


def main() -> int:
    """The exit code of the rank, which is right without FAULT."""
    worker.require_equal_replicas = tell_timeouts
    if name := os.environ.get("FAULT"):
        FAULTS[name]()
    return worker.main()
