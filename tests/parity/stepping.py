"""What a step costs real ranks, and what a dry run says: a CheckSpec line in, a JSON line out."""

import dataclasses
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel.check_spec import CheckSpec
from ultrabench.kernel.children import run_forked
from ultrabench.kernel.dryrun import dry_run, measure_step
from ultrabench.kernel.step import TrainStep
from ultrabench.record import from_dict
from ultrabench.run import RunSpec

LETTING_GO_S = 0.3


def bf16(spec: CheckSpec) -> RunSpec:
    """The checked run in the precision of GPUs."""
    return dataclasses.replace(spec.run, kernel=dataclasses.replace(spec.run.kernel, precision="bf16"))


def train_a_step(trainer: TrainStep) -> None:
    """The first step; from now on updates end when gloo's thread has let go of what it sent."""
    right = trainer.update

    def update(loss: Tensor) -> tuple[Tensor, Tensor]:
        out = right(loss)
        time.sleep(LETTING_GO_S)
        return out

    trainer.update = update  # type: ignore[method-assign]
    trainer.update(trainer.accumulate(*trainer.batch(1)))


def cost(spec: CheckSpec, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), spec.layout.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.layout.world_size)
    (folder / f"cost{rank}.json").write_text(json.dumps(measure_step(bf16(spec), train_a_step)))


def costs(spec: CheckSpec) -> list[list[object]] | str:
    """Of all real ranks, then dry-run of the first rank of each pipeline stage; or what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = range(spec.layout.world_size)
        firsts = ranks[:: spec.layout.world_size // spec.layout.pp]
        error = run_forked({f"rank {r}": partial(cost, spec, r, folder) for r in ranks}, folder, 120)
        dry = {f"dry {r}": partial(dry_run, bf16(spec), r, folder / f"dry{r}.json") for r in firsts}
        error = error or run_forked(dry, folder, 120)
        files = [f"cost{r}.json" for r in ranks], [f"dry{r}.json" for r in firsts]
        return error or [[json.loads((folder / file).read_text()) for file in some] for some in files]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(costs(from_dict(CheckSpec, json.loads(line)))), flush=True)
