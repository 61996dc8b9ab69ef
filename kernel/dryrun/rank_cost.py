"""Finds what a step would cost: runs the real kernel without data and without other ranks.

`python -P -m ultrabench.kernel.dryrun.rank_cost` reads a RunSpec from stdin and writes one RankCost per line,
for the first rank of each pipeline stage. The process imports torch, but only its forked children compute.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel.children import ChildError, run_forked
from ultrabench.kernel.dp import MASTER_DTYPE
from ultrabench.kernel.dryrun.counts import CollectiveCounts, ExecutedFlops, LiveBytes
from ultrabench.kernel.dryrun.fake_world import ShardedTensors, fake_world, watched_memory
from ultrabench.kernel.loss import logits_to_gradient
from ultrabench.kernel.mesh import build_mesh
from ultrabench.kernel.step import TrainStep
from ultrabench.processes import die_with_parent
from ultrabench.record import from_dict
from ultrabench.run import RunSpec

TIMEOUT_S = 6 * 3600.0
_CPU = torch.device("cpu")


def make_states(trainer: TrainStep) -> None:
    """Makes the optimizer's states, which exist from the second step of a real run on."""
    for shard in trainer.shards.values():
        shard.grad = torch.zeros_like(shard)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def _generated_loss(
    storages: LiveBytes, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """`logits_to_gradient` with the memory of the code that inductor generates of it (torch 2.13, CPU).

    That code makes the gradient beside the logits and, where ranks share the vocabulary, one copy in at least fp32.
    """
    buffers = [torch.empty_like(logits)]
    if group is not None:
        buffers.append(torch.empty_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32)))
    with storages.paused():
        return logits_to_gradient(logits, targets, group)


def measure_step(spec: RunSpec, prepare: Callable[[TrainStep], object] = make_states) -> dict[str, Any]:
    """The RankCost of this rank of the default process group, as JSON values.

    Tests call it on real ranks to check dry runs; real ranks `prepare` with a training step.
    """
    with LiveBytes() as storages, watched_memory(storages.count_resized):
        mesh = build_mesh(spec.layout, "cpu")
        # Without generating code, torch decides as it does on GPUs what a compiled layer keeps.
        trainer = TrainStep(
            spec, _CPU, mesh, backend="aot_eager",
            after_microbatch=lambda: storages.set_kind("gradient", sharded.gradients()),
        )  # fmt: skip
        sharded = ShardedTensors(trainer.models, lambda grad: storages.set_kind("gradient", [grad]))
        for model in trainer.models:
            if spec.compiles and model.head is not None:
                model.head.loss = partial(model.head.loss, to_gradient=partial(_generated_loss, storages))
        prepare(trainer)
        batch = trainer.batch(1)
        storages.reset_peak()
        with (
            CollectiveCounts(mesh, trainer.cp_group, trainer.expert_mesh) as collectives,
            ExecutedFlops() as executed,
        ):
            loss = trainer.accumulate(*batch)
            storages.set_kind("gradient", sharded.gradients())
            trainer.update(loss)
        del batch, loss
    storages.set_kind("parameter", [*trainer.shards.values(), *sharded.gathered()])
    storages.set_kind("optimizer", (t for state in trainer.optimizer.state.values() for t in state.values()))
    bytes_by_kind = storages.peak_by_kind()
    return {
        "pp_rank": trainer.coordinates.pp, "rank": dist.get_rank(),
        "static_bytes": storages.live_bytes, "peak_bytes": storages.peak_bytes,
        **{f"{kind}_bytes": bytes_by_kind[kind] for kind in ("parameter", "gradient", "optimizer", "activation")},
        "hardware_flops": executed.flops,
        "collectives": dict(sorted(collectives.calls_and_bytes.items())),
    }  # fmt: skip


def rank_cost(spec: RunSpec, rank: int) -> dict[str, Any]:
    """The RankCost of `rank`, as JSON values.

    If a rank has one stage, every micro-batch after the first ones adds the same cost, so only some of many
    micro-batches are run and the cost of the others is extrapolated.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(MASTER_DTYPE[spec.kernel.precision])
    gc.disable()  # measured steps also run without the garbage collector
    gas, pp = spec.layout.gas, spec.layout.pp
    if gas <= 5 * pp or spec.layout.virtual_stages > 1:
        return _fake_step(spec, rank)
    cost_of_3, cost_of_4 = (_fake_step(_with_gas(spec, n * pp), rank) for n in (3, 4))
    return {key: _extrapolate(cost_of_3[key], value, (gas - 4 * pp, pp)) for key, value in cost_of_4.items()}


def _fake_step(spec: RunSpec, rank: int) -> dict[str, Any]:
    with fake_world(rank, spec.layout.world_size):
        return measure_step(spec)


def _with_gas(spec: RunSpec, gas: int) -> RunSpec:
    layout = replace(spec.layout, gas=gas)
    return replace(spec, layout=layout, workload=replace(spec.workload, gbs=layout.gbs))


def _extrapolate(smaller: Any, larger: Any, ratio: tuple[int, int]) -> Any:
    """`larger` plus the difference of `larger` and `smaller` times the quotient `ratio`, for every number."""
    if isinstance(larger, dict):
        return {key: _extrapolate(smaller[key], value, ratio) for key, value in larger.items()}
    if isinstance(larger, list):
        return [_extrapolate(x, y, ratio) for x, y in zip(smaller, larger, strict=True)]
    return larger + (larger - smaller) * ratio[0] // ratio[1]


def main() -> None:
    """Prints the cost of all pipeline stages; it runs as many of them at a time as there are cores."""
    if not (request := sys.stdin.read()):
        return  # the process that asks was killed before it wrote
    spec = from_dict(RunSpec, json.loads(request))
    ranks = [spec.layout.first_rank(pp) for pp in range(spec.layout.pp)]
    cores = len(os.sched_getaffinity(0))
    try:
        for start in range(0, len(ranks), cores):
            bodies = {f"rank {rank}": partial(rank_cost, spec, rank) for rank in ranks[start : start + cores]}
            for cost in run_forked(bodies, TIMEOUT_S).values():
                print(json.dumps(cost), flush=True)
    except ChildError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    die_with_parent(os.getppid())  # the process that asks may be killed
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # it may have ended already during the import of torch
    main()
