"""Counts the collectives and the FLOPs that a rank executes inside a `with` block.

Every observer is a dispatch mode: it sees the operators on plain tensors that remain after autograd and
DTensor, in forward and backward.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
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
"""Operator -> our name for it; the first tensor of an all-gather may be its output or its input."""


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator on plain tensors, then passes it to `see` and to the observers `beside`.

    One mode that passes operators to three observers costs a third of three modes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.beside: tuple[Observer, ...] = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Lets DTensor turn its operators into operators on plain tensors, which then arrive here."""
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for observer in (self, *self.beside):
            observer.see(func, args, kwargs, out)
        return out

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Records an operator that was called with these arguments and returned `out`."""
        raise NotImplementedError


class CollectiveCounts(Observer):  # type: ignore[no-untyped-call]
    """Counts every collective issued inside the `with` block.

    `calls` and `payload_bytes` map (axis, operation) to numbers. The payload is the larger tensor: the output
    of an all-gather, the input of a reduce-scatter. If an axis spans the whole world, they share one group,
    so collectives over the world count for that axis.
    """

    def __init__(self, mesh: DeviceMesh, named: Mapping[str, dist.ProcessGroup] = {}) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.payload_bytes: Counter[tuple[str, str]] = Counter()
        axes = {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}
        self._axis = {str(g.group_name): axis for axis, g in {**axes, **named}.items()}

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts `func` if it is a collective."""
        if func.namespace not in ("c10d", "_c10d_functional"):
            return
        name = func._schema.name.partition("::")[2]
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


_FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Matrix product -> index of the argument that is the left factor."""
_ATTENTION = tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))


class ExecutedFlops(Observer):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of matrix products and attention inside the `with` block, in `flops`.

    Causal attention counts like full attention: two products of q.shape[2] x k.shape[2] x D for each head in
    forward, and five in backward, which recomputes the scores (arXiv 2205.14135, algorithm 4). Operators
    inside of a function that torch.compile has fused are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts `func` if it is a matrix product or attention."""
        if func.namespace != "aten":
            return
        name = func._schema.name.partition("::")[2].removesuffix("_")
        if name in _FIRST_FACTOR:
            result = out if isinstance(out, Tensor) else out[0]
            self.flops += 2 * result.numel() * int(args[_FIRST_FACTOR[name]].shape[-1])
        elif name.startswith(_ATTENTION):
            backward = "backward" in name
            q, k = args[1:3] if backward else args[:2]
            self.flops += (5 if backward else 2) * 2 * q.numel() * int(k.shape[2])
