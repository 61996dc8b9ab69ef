"""Private uses of torch by which a single process acts as one rank of a large world, without data."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from ultrabench.kernel import mesh


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Sets up a default process group in which this process is `rank`; it is alone and sends nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Makes tensors inside the `with` block have shapes but no data."""
    with ExitStack() as stack:
        if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):
            stack.enter_context(_replaced(schedules._PipelineSchedule, "_warmup_p2p", _no_vote))
        send = _holding(dist.isend)
        for owner in (dist, dist.distributed_c10d):
            stack.enter_context(_replaced(owner, "isend", send))
        stack.enter_context(FakeTensorMode())
        yield


def _holding(isend: Callable[..., dist.Work | None]) -> Callable[..., dist.Work | None]:
    """A send that keeps its tensor alive while somebody may wait for it, as a real send does."""

    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        work = isend(tensor, *args, **kwargs)
        if work is not None:
            weakref.finalize(work, id, tensor)
        return work

    return run


@contextmanager
def unseen_bookkeeping() -> Iterator[None]:
    """Hides from dispatch modes how torch makes meshes of ranks, and how DTensor computes full shapes."""
    with ExitStack() as stack:
        stack.enter_context(_outside(mesh, "init_device_mesh"))
        for name in ("__getitem__", "_concatenate"):
            stack.enter_context(_outside(DeviceMesh, name))
        stack.enter_context(_outside(ShardingPropagator, "_propagate_tensor_meta_non_cached"))
        yield


@contextmanager
def _replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def _no_vote(schedule: Any, stages: list[Any], *_: Any) -> None:
    """Replaces the messages by which stages of torch 2.13 agree on shapes, which are given in advance."""
    modes = sys.modules[PipelineStage.__module__]
    for stage in stages:
        stage._inference_mode = modes.InferenceMode.STATIC


def _outside(owner: Any, name: str) -> AbstractContextManager[None]:
    """Makes `owner.name` run outside of all dispatch modes."""
    inner: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(inner)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return inner(*args, **kwargs)

    return _replaced(owner, name, run)


def watched_resizes(seen: Callable[[torch.UntypedStorage], None]) -> AbstractContextManager[None]:
    """Calls `seen` with every storage that is resized, which is how fully_shard frees and takes memory."""
    inner = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        out = inner(storage, size)
        seen(storage)
        return out

    return _replaced(torch.UntypedStorage, "resize_", resize)


def held(tensor: Tensor) -> Tensor:
    """The tensor on this rank with the memory of `tensor`, a DTensor or the result of a collective."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


class ShardedTensors:
    """The buffers that fully_shard holds for `models`; `on_gradient` is called for each new gradient."""

    def __init__(self, models: Sequence[nn.Module], on_gradient: Callable[[Tensor], None]) -> None:
        modules = [m for model in models for m in model.modules() if isinstance(m, FSDPModule)]
        for module in modules:
            module.unshard()  # makes the parameters that accumulate gradients
            module.reshard()
        groups = [module._get_fsdp_state()._fsdp_param_group for module in modules]
        self._params = [param for group in groups if group for param in group.fsdp_params]
        for param in self._params:
            param._unsharded_param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda full: on_gradient(full.grad)
            )

    def gathered(self) -> Iterator[Tensor]:
        """The buffers of gathered parameters."""
        for param in self._params:
            yield from param.all_gather_outputs

    def gradients(self) -> Iterator[Tensor]:
        """The gradients that wait for more micro-batches, for their reduction or for the optimizer."""
        for p in self._params:
            found = (p.sharded_param.grad, p.unsharded_accumulated_grad, p._unsharded_param.grad)
            yield from (grad for grad in found if grad is not None)
