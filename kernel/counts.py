"""Counted collectives: what a step really sends, by mesh axis and operation."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ultrabench.kernel.compat import group_name

_OPS = {
    "all_gather_into_tensor": "all_gather", "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce", "allreduce_": "all_reduce", "broadcast_": "broadcast",
    "send": "send", "recv_": "recv",
}  # fmt: skip
"""Operator -> what we call it; an all-gather's first tensor may be its output or its input."""


class CollectiveCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every collective issued inside the `with` block.

    `calls` and `payload_bytes` map (axis, operation) to numbers; the payload is the larger tensor:
    what an all-gather ends with, what a reduce-scatter begins with. An axis that spans the world
    shares its group, so collectives over the world count there.
    """

    def __init__(self, mesh: DeviceMesh, named: Mapping[str, dist.ProcessGroup] = {}) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[str, str]] = Counter()
        self.payload_bytes: Counter[tuple[str, str]] = Counter()
        axes = {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}
        self._axis = {str(g.group_name): axis for axis, g in {**axes, **named}.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Counts `func` if it is a collective, then runs it."""
        if any(issubclass(t, DTensor) for t in types):
            # Let DTensor turn it into operators on plain tensors; those come here again.
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2], args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any, kwargs: Any) -> None:
        if name not in _OPS:
            return
        leaves = tree_leaves((args, kwargs))
        groups = [g for g in map(group_name, leaves) if g is not None]
        axis = next((self._axis[g] for g in groups if g in self._axis), "world")
        sizes = [t.nbytes for t in leaves if isinstance(t, torch.Tensor)]
        size = max(sizes, default=0)
        if name == "all_gather_into_tensor":
            size *= next(n for n in leaves if isinstance(n, int))
        self.calls[axis, _OPS[name]] += 1
        self.payload_bytes[axis, _OPS[name]] += size
