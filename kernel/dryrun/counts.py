"""Counts the collectives, the FLOPs and the live bytes of a rank inside a `with` block.

Every observer is a dispatch mode: it sees the operators on plain tensors that remain after autograd and
DTensor, in forward and backward.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ultrabench.kernel.compat import WAIT_OPERATOR, group_name, storage_of
from ultrabench.kernel.compile import FUNCTION_BY_OPERATOR

_OPERATION_NAMES = {
    "all_gather_into_tensor": "all_gather", "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "all_reduce": "all_reduce", "allreduce_": "all_reduce", "broadcast_": "broadcast",
    "all_to_all_single": "all_to_all", "alltoall_base_": "all_to_all", "send": "send", "recv_": "recv",
}  # fmt: skip
"""Operator -> our name for it; the first tensor of an all-gather may be its output or its input."""


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator on plain tensors, then passes it to `record`."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Yes: compiled layers run as they are, and the operators that they call are seen."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Lets DTensor turn its operators into operators on plain tensors,
        which then arrive here as those of ours do.
        """
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        if plain_implementation := FUNCTION_BY_OPERATOR.get(func):
            with self:
                return plain_implementation(*args)
        if isinstance(func, HigherOrderOperator):
            # Compiled recomputation: an operator that may draw random numbers, after their state if that is given.
            operator_index = next(i for i, argument in enumerate(args) if isinstance(argument, OpOverload))
            with self:
                out = args[operator_index](*args[operator_index + 1 :], **kwargs)
                return out if operator_index else (torch.empty(0), out)
        out = func(*args, **kwargs)
        if func is WAIT_OPERATOR:
            out = args[0]
        self.record(func, args, kwargs, out)
        return out

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Records an operator that was called with these arguments and returned `out`."""
        raise NotImplementedError


class CollectiveCounts(Observer):  # type: ignore[no-untyped-call]
    """Counts every collective issued inside the `with` block.

    `calls_and_bytes` maps axis and operation, such as `tp all_gather`, to the number of calls and the payload in bytes.
    The payload is the larger tensor: the output of an all-gather, the input of a reduce-scatter. If an axis
    spans the whole world, they share one group, so collectives over the world count for that axis, except for
    all-to-alls, which only the ranks of ep do. The axis kv has the ranks of tp that hold copies of a key/value head,
    unless these are all ranks of tp.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        cp_group: dist.ProcessGroup | None,
        expert_mesh: DeviceMesh | None = None,
        kv_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls_and_bytes = defaultdict[str, list[int]](lambda: [0, 0])
        meshes = [m for m in (expert_mesh, mesh) if m]
        mesh_groups = {axis: m.get_group(axis) for m in meshes for axis in m.mesh_dim_names or ()}
        group_by_axis = {"kv": kv_group, **mesh_groups, "cp": cp_group}
        self._axis_by_group: dict[Any, str] = {
            str(group.group_name): axis for axis, group in group_by_axis.items() if group
        }

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts `func` if it is a collective."""
        if func.namespace not in ("c10d", "_c10d_functional"):
            return
        operator_name = func._schema.name.partition("::")[2]
        if (operation := _OPERATION_NAMES.get(operator_name)) is None:
            return
        argument_leaves = tree_leaves((args, kwargs))
        axes = (self._axis_by_group.get(group_name(leaf)) for leaf in argument_leaves)
        payload_bytes = max((t.nbytes for t in argument_leaves if isinstance(t, Tensor)), default=0)
        if operator_name == "all_gather_into_tensor":
            payload_bytes *= next(n for n in argument_leaves if isinstance(n, int))
        axis = "ep" if operation == "all_to_all" else next(filter(None, axes), "world")
        num_calls_and_bytes = self.calls_and_bytes[f"{axis} {operation}"]
        num_calls_and_bytes[0] += 1
        num_calls_and_bytes[1] += payload_bytes


_LEFT_FACTOR_INDEX = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "_scaled_mm": 0}
"""Matrix product -> index of the argument that is the left factor."""
_FUSED_ATTENTION = tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))


class ExecutedFlops(Observer):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of matrix products and attention inside the `with` block, in `flops`.

    Causal attention counts like full attention: for each head and pair of a query and a key one product over the
    channels of keys and one over those of values in forward, and three and two in backward, which recomputes the
    scores (arXiv 2205.14135, algorithm 4). Zeros that pad values are multiplied, so they count. In compiled layers
    these are still operators of torch, which inductor calls, except those in kernels that it generates.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts `func` if it is a matrix product or attention."""
        if func.namespace != "aten":
            return
        operator_name = func._schema.name.partition("::")[2].removesuffix("_")
        if operator_name in _LEFT_FACTOR_INDEX:
            product = out if isinstance(out, Tensor) else out[0]
            self.flops += 2 * product.numel() * int(args[_LEFT_FACTOR_INDEX[operator_name]].shape[-1])
        elif operator_name == "_grouped_mm":
            self.flops += 2 * args[0].numel() * int(args[1].shape[-1])
        elif operator_name.startswith(_FUSED_ATTENTION):
            is_backward = "backward" in operator_name
            q, k, v = args[1:4] if is_backward else args[:3]
            num_pairs, v_width = q.numel() // q.shape[-1] * int(k.shape[2]), int(v.shape[-1])
            qk_products, v_products = (3, 2) if is_backward else (1, 1)
            self.flops += 2 * num_pairs * (qk_products * int(q.shape[-1]) + v_products * v_width)


class _CountedStorage:
    """The record of a storage; it stays among those of the peak after the memory of the storage is freed."""

    kind = "activation"


class LiveBytes(Observer):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages that operators inside the `with` block returned.

    The counts do not come from an allocator: nothing is rounded or cached, and workspaces inside an operator
    are not seen. So real tensors and tensors without data give the same numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live_bytes = self.peak_bytes = 0
        self._storage_by_id: dict[int, _CountedStorage] = {}
        """Id of a storage -> its record; a later storage may get the same id."""
        self._bytes_by_storage: dict[_CountedStorage, int] = {}
        self._peak_bytes_by_storage: dict[_CountedStorage, int] | None = None
        """The bytes at the peak; None while the peak is now."""
        self._is_paused = False
        self._freed_ids: list[int] = []
        """Ids of storages that were freed, perhaps by another thread, and are not yet subtracted."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Does not count what operators return inside the `with` block."""
        self._is_paused = True
        yield
        self._is_paused = False

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts the storages that `func` made."""
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor) and not (tensor.is_meta or self._is_paused):
                storage = storage_of(tensor)
                self._subtract_freed()  # its id may have belonged to a freed storage
                if id(storage) not in self._storage_by_id:
                    self._storage_by_id[id(storage)] = counted_storage = _CountedStorage()
                    weakref.finalize(storage, self._freed_ids.append, id(storage))
                    self._set_bytes(counted_storage, storage.nbytes())

    def _subtract_freed(self) -> None:
        """Subtracts freed storages; it runs later than they are freed, which may happen in any operation."""
        while self._freed_ids:
            counted_storage = self._storage_by_id.pop(self._freed_ids.pop(0))
            self._set_bytes(counted_storage, 0)
            del self._bytes_by_storage[counted_storage]

    @property
    def live_bytes(self) -> int:
        """The bytes of the storages that are live now."""
        self._subtract_freed()
        return self._live_bytes

    def count_resized(self, storage: torch.UntypedStorage) -> None:
        """Counts the new size of a storage whose memory was freed or taken again without an operator."""
        self._subtract_freed()
        if id(storage) in self._storage_by_id:
            self._set_bytes(self._storage_by_id[id(storage)], storage.nbytes())

    def _set_bytes(self, counted_storage: _CountedStorage, new_bytes: int) -> None:
        added_bytes = new_bytes - self._bytes_by_storage.get(counted_storage, 0)
        if added_bytes < 0 and self._peak_bytes_by_storage is None:
            self._peak_bytes_by_storage = self._bytes_by_storage.copy()
        self._bytes_by_storage[counted_storage] = new_bytes
        self._live_bytes += added_bytes
        if self._live_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_bytes_by_storage = self._live_bytes, None

    def reset_peak(self) -> None:
        """Sets the peak to the storages that are live now."""
        self.peak_bytes, self._peak_bytes_by_storage = self.live_bytes, None

    def set_kind(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Sets the kind of the storages of `tensors` for all their lifetime; the default is activation."""
        self._subtract_freed()
        for tensor in tensors:
            counted_storage = self._storage_by_id.get(id(storage_of(tensor)))
            if counted_storage is not None:
                counted_storage.kind = kind

    def peak_bytes_by_kind(self) -> Counter[str]:
        """The bytes of each kind at the peak; their sum is the peak."""
        bytes_by_kind = Counter[str]()
        peak_bytes = self._peak_bytes_by_storage
        for storage, num_bytes in (self._bytes_by_storage if peak_bytes is None else peak_bytes).items():
            bytes_by_kind[storage.kind] += num_bytes
        return bytes_by_kind
