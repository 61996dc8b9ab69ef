"""Checks that ranks which must hold the same parameters still do, bit for bit."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ultrabench.kernel.mesh import local
from ultrabench.kernel.rank.failure import ReplicasDifferError
from ultrabench.kernel.step import TrainStep
from ultrabench.kernel.tp import cut_dim

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_equal_replicas(trainer: TrainStep) -> None:
    """Compares a checksum of every parameter between the ranks that hold copies of the same part.

    Ranks along dp_replicate hold copies of all parameters, ranks along tp hold copies of norms, and the first
    and the last stage hold copies of a tied embedding. All ranks have to call it. It needs an all-reduce of
    16 bytes per parameter along each of these, and one over all ranks.

    Raises:
        ReplicasDifferError: on every rank if any copy differs; it names the differences on this rank.
    """
    found = set[str]()
    whole = [name for name in trainer.params if cut_dim(name) is None]
    found |= _differing(trainer, whole, trainer.mesh.get_group("tp"))
    found |= _differing(trainer, list(trainer.params), trainer.mesh.get_group("dp_replicate"))
    if trainer.tied_group is not None:
        held = [n for n in ("embedding.weight", "head.weight") if n in trainer.params]
        found |= _differing(trainer, held, trainer.tied_group)
    anywhere = torch.tensor([len(found)], device=trainer.device)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    if anywhere.item():
        named = f"here {sorted(found)[0]} and {len(found) - 1} more" if found else "on other ranks"
        raise ReplicasDifferError(f"copies of the same parameters differ: {named}")


def _differing(trainer: TrainStep, names: Sequence[str], group: dist.ProcessGroup) -> set[str]:
    """The names among `names` whose checksums differ within the group."""
    if not names or group.size() == 1:
        return set()
    shards = [local(trainer.params[name].detach()) for name in names]
    sums = torch.stack([s.view(_BITS[s.element_size()]).sum(dtype=torch.int64) for s in shards])
    # The maximum of the sums equals minus the maximum of the negated sums only if all sums are equal.
    both = torch.stack((sums, -sums))
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return {name for name, same in zip(names, (both[0] == -both[1]).tolist(), strict=True) if not same}
