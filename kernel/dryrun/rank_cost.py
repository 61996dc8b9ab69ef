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
from ultrabench.kernel.dryrun.fake_world import ShardedTensors, fake_world, observe_resizes
from ultrabench.kernel.loss import logits_to_gradient
from ultrabench.kernel.mesh import build_mesh
from ultrabench.kernel.step import TrainStep
from ultrabench.processes import die_with_parent
from ultrabench.record import from_dict
from ultrabench.run import RunSpec

COST_TIMEOUT_S = 6 * 3600.0
"""Seconds in which the ranks that run at a time must find their costs."""
_CPU = torch.device("cpu")


def init_optimizer(trainer: TrainStep) -> None:
    """Makes the optimizer's states, which exist from the second step of a real run on."""
    for shard in trainer.shards.values():
        shard.grad = torch.zeros_like(shard)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def _inductor_loss(
    byte_counter: LiveBytes, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """`logits_to_gradient` with the memory of the code that inductor generates of it (torch 2.13, CPU).

    That code makes the gradient beside the logits and, where ranks share the vocabulary, one copy in at least fp32.
    """
    buffers = [torch.empty_like(logits)]
    if group is not None:
        buffers.append(torch.empty_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32)))
    with byte_counter.pause():
        return logits_to_gradient(logits, targets, group)


def measure_step(spec: RunSpec, prepare: Callable[[TrainStep], object] = init_optimizer) -> dict[str, Any]:
    """The RankCost of this rank of the default process group, as JSON values; `prepare` runs before the counted step.

    Tests call it on real ranks to check dry runs, with a training step as `prepare`.
    """
    with LiveBytes() as byte_counter, observe_resizes(byte_counter.count_resized):
        mesh, set_kind = build_mesh(spec.layout, "cpu"), byte_counter.set_kind
        # Without generating code, torch decides as it does on GPUs what a compiled layer keeps.
        trainer = TrainStep(
            spec, _CPU, mesh, compile_backend="aot_eager",
            after_microbatch=lambda: set_kind("gradient", sharded_tensors.waiting_gradients()),
        )  # fmt: skip
        sharded_tensors = ShardedTensors(trainer.models, lambda grad: set_kind("gradient", [grad]))
        for model in trainer.models:
            if spec.compiles and model.head is not None:
                model.head.loss = partial(model.head.loss, to_gradient=partial(_inductor_loss, byte_counter))
        prepare(trainer)
        batch = trainer.batch(1)
        byte_counter.reset_peak()
        groups = mesh, trainer.cp_group, trainer.expert_mesh, trainer.kv_group
        with CollectiveCounts(*groups) as collective_counter, ExecutedFlops() as flop_counter:
            loss = trainer.accumulate(*batch)
            set_kind("gradient", sharded_tensors.waiting_gradients())
            trainer.update(loss)
        del batch, loss
    set_kind("parameter", [*trainer.shards.values(), *sharded_tensors.gathered_buffers()])
    set_kind("optimizer", (t for state in trainer.optimizer.state.values() for t in state.values()))
    bytes_by_kind = byte_counter.peak_bytes_by_kind()
    return {
        "pp_rank": trainer.coordinates.pp, "rank": dist.get_rank(),
        "static_bytes": byte_counter.live_bytes, "peak_bytes": byte_counter.peak_bytes,
        **{f"{kind}_bytes": bytes_by_kind[kind] for kind in ("parameter", "gradient", "optimizer", "activation")},
        "hardware_flops": flop_counter.flops,
        "collectives": dict(sorted(collective_counter.calls_and_bytes.items())),
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
    cost_at_3pp, cost_at_4pp = (_fake_step(_with_gas(spec, n * pp), rank) for n in (3, 4))
    return _extrapolate(cost_at_3pp, cost_at_4pp, (gas - 4 * pp, pp))  # type: ignore[no-any-return]


def _fake_step(spec: RunSpec, rank: int) -> dict[str, Any]:
    with fake_world(rank, spec.layout.world_size):
        return measure_step(spec)


def _with_gas(spec: RunSpec, gas: int) -> RunSpec:
    layout = replace(spec.layout, gas=gas)
    return replace(spec, layout=layout, workload=replace(spec.workload, gbs=layout.gbs))


def _extrapolate(cost: Any, next_cost: Any, ratio: tuple[int, int]) -> Any:
    """For every number: `next_cost` + (`next_cost` - `cost`) * ratio[0] / ratio[1]."""
    if isinstance(next_cost, dict):
        return {key: _extrapolate(cost[key], value, ratio) for key, value in next_cost.items()}
    if isinstance(next_cost, list):
        return [_extrapolate(x, next_x, ratio) for x, next_x in zip(cost, next_cost, strict=True)]
    return next_cost + (next_cost - cost) * ratio[0] // ratio[1]


def main() -> None:
    """Prints the cost of all pipeline stages; it runs as many of them at a time as there are cores."""
    if not (request := sys.stdin.read()):
        return  # the process that asks was killed before it wrote
    spec = from_dict(RunSpec, json.loads(request))
    first_ranks = [spec.layout.first_rank(pp_rank) for pp_rank in range(spec.layout.pp)]
    num_cores = len(os.sched_getaffinity(0))
    try:
        for i in range(0, len(first_ranks), num_cores):
            functions = {f"rank {r}": partial(rank_cost, spec, r) for r in first_ranks[i : i + num_cores]}
            for cost in run_forked(functions, COST_TIMEOUT_S).values():
                print(json.dumps(cost), flush=True)
    except ChildError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    die_with_parent(os.getppid())  # the process that asks may be killed
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # it may have ended already during the import of torch
    main()
