"""Joins the ranks, builds their mesh, and tells which part of a full parameter a rank holds."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ultrabench.kernel.compat import GROUP_TIMEOUT, use_one_gloo_worker, use_timeout
from ultrabench.kernel.device import kind_of
from ultrabench.layout import Layout

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The axes of the mesh, outermost first, in the order of `Layout.coordinates`; dp and cp share one axis."""

EXPERT_AXES = ("pp", "expert_replicate", "expert_shard", "ep")
"""The axes of the mesh of experts, outermost first; the ranks of a pipeline stage are those of the other mesh."""

Part = tuple[tuple[int, int, int], ...]
"""Successive cuts (dim, start, length) that lead from a full tensor to one rank's part."""


def join_process_group(device: torch.device, store: Any = None, rank: int = -1, world_size: int = -1) -> None:
    """Makes the default process group: NCCL for GPUs, gloo for CPUs; without a store as the environment says."""
    use_timeout(GROUP_TIMEOUT)
    use_one_gloo_worker()
    backend, bound_device = ("nccl", device) if kind_of(device).has_gpus else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=bound_device)


def reduce_over_ranks(value: float, device: torch.device, op: Any = dist.ReduceOp.MAX) -> float:
    """The largest `value` of all ranks, or what `op` makes of their values; all ranks have to call it."""
    reduced_value = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(reduced_value, op)
    return float(reduced_value)


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of `layout`; ZeRO shards along dp_shard, and the ranks along dp_replicate hold the same shards.

    The ranks of a context-parallel group hold the same parameters and different tokens, as the ranks of dp
    do, so both share these axes.
    """
    num_replicas = layout.dp * layout.cp // layout.zero_shards
    axis_sizes = (layout.pp, num_replicas, layout.zero_shards, layout.tp)
    return init_device_mesh(device_type, axis_sizes, mesh_dim_names=MESH_AXES)


def build_expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of the experts: each of the ranks along ep holds other ones, those along expert_shard share them."""
    axis_sizes = (layout.pp, layout.expert_copies, layout.expert_shards, layout.ep)
    return init_device_mesh(device_type, axis_sizes, mesh_dim_names=EXPERT_AXES)


def is_expert(name: str) -> bool:
    """Whether the parameter belongs to the experts among which a router chooses."""
    return ".experts." in name


def is_norm(name: str) -> bool:
    """Whether the parameter is the weight of a norm."""
    return name.endswith("norm.weight")


def cp_group(layout: Layout) -> dist.ProcessGroup | None:
    """The group of ranks that share the tokens of this rank's sequences; None if this rank holds them all.

    All ranks have to call it. Like a mesh, it takes the group of all ranks for a ring of all ranks, and with
    NCCL it makes all rings in one call: NCCL can only split a communicator if all its ranks do.
    """
    if layout.cp == 1:
        return None
    first_ranks = (rank for rank in range(layout.world_size) if layout.coordinates(rank).cp == 0)
    return _group_among([range(r, r + layout.cp * layout.tp, layout.tp) for r in first_ranks], "cp")


def kv_group(layout: Layout, num_copies: int, tp_group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The group of ranks that hold copies of the same key/value head; None if no other rank has that of this one.

    All ranks have to call it. It is `tp_group`, the ranks of tp, where these hold copies of a single head.
    """
    if num_copies in (1, layout.tp):
        return None if num_copies == 1 else tp_group
    first_ranks = range(0, layout.world_size, num_copies)
    return _group_among([range(rank, rank + num_copies) for rank in first_ranks], "kv")


def _group_among(ranks_by_group: list[range], axis: str) -> dist.ProcessGroup | None:
    """The group of this rank among groups that together have all ranks; `axis` names it in the evidence of a hang."""
    world_group, groups = dist.group.WORLD, [[*ranks] for ranks in ranks_by_group]
    assert world_group is not None
    if len(groups) == 1:
        return world_group
    if world_group.bound_device_id is not None:
        return dist.split_group(split_ranks=groups, group_desc=f"mesh_{axis}")
    new_group, _ = dist.new_subgroups_by_enumeration(groups, group_desc=f"mesh_{axis}")  # type: ignore[no-untyped-call]
    return new_group  # type: ignore[no-any-return]


def dp_part(param: Tensor) -> Part:
    """The cut by which fully_shard makes this rank's part of `param`.

    All parts have the same number of rows, except for the last ones, which may be shorter or empty.
    """
    if not isinstance(param, DTensor):
        return ()
    num_rows, shard_axis = param.shape[0], _shard_axis(param)
    rows_per_shard = -(-num_rows // shard_axis.size())
    first_row = min(rows_per_shard * shard_axis.get_local_rank(), num_rows)
    return ((0, first_row, min(rows_per_shard, num_rows - first_row)),)


def num_losses(layout: Layout) -> int:
    """Number of mean losses in a step, one for each micro-batch of each rank of dp and cp.

    Gradients are sums over all of them, so that each is divided by their number before its backward.
    """
    return layout.gas * layout.dp * layout.cp


def part_view(full_tensor: Tensor, part: Part) -> Tensor:
    """The part of `full_tensor` that `part` describes, as a view."""
    for dim, start, length in part:
        full_tensor = full_tensor.narrow(dim, start, length)
    return full_tensor


def own_values(tensor: Tensor, part: Part) -> Tensor:
    """This rank's values of a parameter or its gradient, of which it holds `part`, sharing their memory.

    They are its shard without the rows that pad the vocabulary, which belong to no part.
    """
    values = local_shard(tensor)
    for dim, _, length in part[-1:]:
        values = values.narrow(dim, 0, length) if length < values.shape[dim] else values
    return values


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's own values of `tensor`, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_shards(param: Tensor) -> int:
    """The number of parts into which fully_shard cuts `param`."""
    return _shard_axis(param).size() if isinstance(param, DTensor) else 1


def _shard_axis(param: DTensor) -> DeviceMesh:
    """The mesh axis along which fully_shard cuts `param`, the innermost one of its mesh."""
    axis_names = param.device_mesh.mesh_dim_names
    assert axis_names is not None
    return param.device_mesh[axis_names[-1]]
