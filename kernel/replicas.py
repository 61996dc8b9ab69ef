"""Checks that ranks which must hold the same numbers still hold the same, bit for bit."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ultrabench.kernel.failure import ReplicasDifferError
from ultrabench.kernel.mesh import local
from ultrabench.kernel.step import TrainStep

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_equal_replicas(trainer: TrainStep) -> None:
    """Compares a checksum of every parameter between the ranks that hold a copy of the same part.

    Copies lie along dp_replicate, norms along tp, and a tied embedding on the first and the last
    stage. Collective; an all-reduce of 16 bytes a parameter along each of these, and one over all.

    Raises:
        ReplicasDifferError: on every rank when any copy differs; names what differs on this one.
    """
    found = set[str]()
    for axis in ("dp_replicate", "tp"):
        names = [n for n, p in trainer.params.items() if _replicated(p, axis)]
        found |= _differing(trainer, names, trainer.mesh.get_group(axis))
    if trainer.tied_group is not None:
        held = [n for n in ("embedding.weight", "head.weight") if n in trainer.params]
        found |= _differing(trainer, held, trainer.tied_group)
    anywhere = torch.tensor([len(found)], device=trainer.device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    if anywhere.item():
        named = f"here {sorted(found)[0]} and {len(found) - 1} more" if found else "on other ranks"
        raise ReplicasDifferError(f"copies of the same parameters differ: {named}")


def _replicated(param: Tensor, axis: str) -> bool:
    if not isinstance(param, DTensor) or axis not in (names := param.device_mesh.mesh_dim_names or ()):
        return False
    return param.placements[names.index(axis)].is_replicate()


def _differing(trainer: TrainStep, names: Sequence[str], group: dist.ProcessGroup) -> set[str]:
    """Those of `names` whose checksum is not the same in the whole group."""
    if not names or group.size() == 1:
        return set()
    shards = [local(trainer.params[name].detach()) for name in names]
    sums = torch.stack([s.view(_BITS[s.element_size()]).sum(dtype=torch.int64) for s in shards])
    # The largest of a and the largest of -a are those of the same number only if all are equal.
    both = torch.stack((sums, -sums))
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return {name for name, same in zip(names, (both[0] == -both[1]).tolist(), strict=True) if not same}
