"""Counts the collectives of one step on every rank: a CheckSpec line in, a JSON line out."""

import dataclasses
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ultrabench.kernel.check_spec import CheckSpec
from ultrabench.kernel.children import run_forked
from ultrabench.kernel.counts import CollectiveCounts
from ultrabench.kernel.mesh import build_mesh
from ultrabench.kernel.step import TrainStep
from ultrabench.record import from_dict


def count(spec: CheckSpec, rank: int, folder: Path) -> None:
    """Counts the second step: the first makes optimizer states and warms caches."""
    store = dist.FileStore(str(folder / "store"), spec.layout.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.layout.world_size)
    kernel = dataclasses.replace(spec.run.kernel, precision="fp32")
    run = dataclasses.replace(spec.run, kernel=kernel)
    trainer = TrainStep(run, torch.device("cpu"), build_mesh(spec.layout, "cpu"))
    batch = trainer.batch(1)
    trainer.update(trainer.accumulate(*batch))
    with CollectiveCounts(trainer.mesh, trainer.other_groups) as counts:
        trainer.update(trainer.accumulate(*batch))
    out = {
        f"{axis} {op}": [calls, counts.payload_bytes[axis, op]]
        for (axis, op), calls in sorted(counts.calls.items())
    }
    (folder / f"counts{rank}.json").write_text(json.dumps(out))


def counts_of_ranks(spec: CheckSpec) -> list[dict[str, list[int]]] | str:
    """Counts by rank, or what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = range(spec.layout.world_size)
        bodies = {f"rank {rank}": partial(count, spec, rank, folder) for rank in ranks}
        error = run_forked(bodies, folder, 60)
        return error or [json.loads((folder / f"counts{r}.json").read_text()) for r in ranks]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(counts_of_ranks(from_dict(CheckSpec, json.loads(line)))), flush=True)
