"""What a step really costs every rank: a CheckSpec line in, the RankCosts of all ranks out, as JSON."""

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
from ultrabench.kernel.dryrun import measure_step
from ultrabench.kernel.step import TrainStep
from ultrabench.record import from_dict
from ultrabench.run import RunSpec


def bf16(spec: CheckSpec) -> RunSpec:
    """The checked run in the precision of GPUs."""
    return dataclasses.replace(spec.run, kernel=dataclasses.replace(spec.run.kernel, precision="bf16"))


def train_a_step(trainer: TrainStep) -> None:
    trainer.update(trainer.accumulate(*trainer.batch(1)))


def cost(spec: CheckSpec, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), spec.layout.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.layout.world_size)
    (folder / f"cost{rank}.json").write_text(json.dumps(measure_step(bf16(spec), train_a_step)))


def costs(spec: CheckSpec) -> list[dict[str, object]] | str:
    """By rank, or what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = range(spec.layout.world_size)
        error = run_forked({f"rank {r}": partial(cost, spec, r, folder) for r in ranks}, folder, 120)
        return error or [json.loads((folder / f"cost{r}.json").read_text()) for r in ranks]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(costs(from_dict(CheckSpec, json.loads(line)))), flush=True)
