"""Checks that ranks which must hold the same parameters still do, bit for bit where no rounding can differ."""

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel.cut import num_tp_copies
from ultrabench.kernel.mesh import EXPERT_AXES, MESH_AXES, is_expert, reduce_over_ranks
from ultrabench.kernel.model import TIED_PARAMETER_NAME
from ultrabench.kernel.moe import router_biases
from ultrabench.kernel.pp import swap
from ultrabench.kernel.rank.failure import ReplicasDifferError
from ultrabench.kernel.step import TrainStep

MAX_ROUNDINGS = 16
"""Largest allowed mean difference of two copies of an RMSNorm's weight, in units of eps times their mean size.

Copies in which only rounding differs stay far below it: 4,096 weights of size 1 under AdamW, with gradients
that were summed over up to 8 ranks in opposite orders, differed by less than 0.01 after 100 steps at a learning
rate of 3e-4, in fp32 as in fp64. With a planted fault, in which each copy kept only its own rank's part of the
gradient, they differed by 840 in fp32 after 6 steps at a learning rate of 3e-5.
"""
KV_AXIS = "kv"
"""The name of the ranks of tp that hold copies of the same key/value head; they are no axis of the mesh."""
_INT_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the dtype of integers that have as many."""


def require_equal_replicas(trainer: TrainStep) -> None:
    """Compares the parameters of the ranks that hold copies of the same part.

    Ranks along dp_replicate hold copies of all parameters but experts, those along expert_replicate of experts,
    and the first and the last stage hold copies of a tied embedding: checksums of the bits are equal,
    since all copies got the same sums. All ranks of a pipeline stage hold the same biases of routers.
    Ranks along tp hold copies of norms and routers, and those of `kv_group` copies of a key/value head.
    Their gradients are sums over tp and dp, in an order that NCCL may choose differently in every group,
    so that they may differ by MAX_ROUNDINGS, between these ranks and along dp_replicate. All ranks have to call it.
    Its all-reduces have 16 bytes per parameter tensor, and 2 numbers per element of the weights of norms,
    routers and copied heads.

    Raises:
        ReplicasDifferError: on every rank if any copy differs; it names the differences on this rank.
    """
    params, cuts, tp = trainer.shards, trainer.cuts, trainer.layout.tp
    tp_copies = {n: p for n, p in params.items() if num_tp_copies(cuts[n], tp) > 1}
    head_copies = {n: p for n, p in tp_copies.items() if cuts[n].dim is not None}
    whole_copies = {n: p for n, p in tp_copies.items() if n not in head_copies}
    checked_params = {name: param for name, param in params.items() if name not in tp_copies}
    checksums = {n: p.view(_INT_DTYPES[p.element_size()]).sum() for n, p in checked_params.items()}
    bias_by_name = {name: bias for model in trainer.models for name, bias in router_biases(model).items()}
    axes_and_copies = [
        ("dp_replicate", {n: checksum for n, checksum in checksums.items() if not is_expert(n)}),
        ("expert_replicate", {n: checksum for n, checksum in checksums.items() if is_expert(n)}),
        *((axis, bias_by_name) for axis in MESH_AXES[1:]),
    ]
    differing_names = set[str]()
    for axis, copies in axes_and_copies:
        differing_names |= {n for n, spread in _spread_along(trainer, copies, axis).items() if spread.any()}
    for axis, copies in (("tp", whole_copies), (KV_AXIS, head_copies), ("dp_replicate", tp_copies)):
        for name, spread in _spread_along(trainer, copies, axis).items():
            param = params[name]
            if not spread.sum() <= MAX_ROUNDINGS * torch.finfo(param.dtype).eps * param.abs().sum():
                differing_names.add(name)
    if trainer.ties_across_stages:
        tied_names = [n for n in (TIED_PARAMETER_NAME, trainer.copy_name) if n in checksums]
        tied_checksums = [checksums[name] for name in tied_names]
        if trainer.tied_peer is not None:
            tied_checksums.append(swap(tied_checksums[0], trainer.tied_peer, trainer.mesh.get_group("pp")))
        if len({int(checksum) for checksum in tied_checksums}) > 1:
            differing_names.update(tied_names)
    if reduce_over_ranks(len(differing_names), trainer.device):
        place_text = "on other ranks"
        if differing_names:
            place_text = f"here {min(differing_names)} and {len(differing_names) - 1} more"
        raise ReplicasDifferError(f"copies of the same parameters differ: {place_text}")


def _spread_along(trainer: TrainStep, value_by_name: dict[str, Tensor], axis: str) -> dict[str, Tensor]:
    """The largest minus the smallest value of each element along the axis, by name; 0 only if all are equal."""
    mesh = trainer.expert_mesh if axis in EXPERT_AXES else trainer.mesh
    group = trainer.kv_group if axis == KV_AXIS else mesh.get_group(axis) if mesh else None
    if not value_by_name or group is None or group.size() == 1:
        return {}
    flat_values = torch.cat([value.flatten() for value in value_by_name.values()])
    # The smallest value is minus the largest of the negated values.
    extremes = torch.stack((flat_values, -flat_values))
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    spreads = torch.split(extremes[0] + extremes[1], [value.numel() for value in value_by_name.values()])
    return dict(zip(value_by_name, spreads, strict=True))
