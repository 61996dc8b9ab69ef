"""Private uses of torch by which a single process acts as one rank of a large world, without data."""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from ultrabench.kernel import mesh


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process `rank` of a process group in which nothing is sent, and tensors without data."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    with (
        # The stages of torch 2.13 agree on shapes by messages; earlier versions have no such method.
        patch.object(schedules._PipelineSchedule, "_warmup_p2p", _skip_shape_messages, create=True),
        patch.object(dist, "isend", _send_holding_tensor),
        patch.object(dist.distributed_c10d, "isend", _send_holding_tensor),
        FakeTensorMode(),
    ):
        yield
    dist.destroy_process_group()


def _skip_shape_messages(schedule: Any, stages: list[Any], *_: Any) -> None:
    """Replaces the messages by which stages of torch 2.13 agree on shapes, which are given in advance."""
    stage_module = sys.modules[PipelineStage.__module__]
    for stage in stages:
        stage._inference_mode = stage_module.InferenceMode.STATIC


_fake_send = dist.isend


def _send_holding_tensor(tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
    """A send that keeps its tensor alive while somebody may wait for it, as a real send does."""
    work = _fake_send(tensor, *args, **kwargs)
    if work is not None:
        weakref.finalize(work, id, tensor)
    return work


@contextmanager
def observe_resizes(count_resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Lets dispatch modes see every change of the memory of a step.

    It calls `count_resized` with every storage that is resized, which is how fully_shard frees and takes memory,
    and hides from dispatch modes how torch makes meshes of ranks.
    """
    torch_resize = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        resized_storage = torch_resize(storage, num_bytes)
        count_resized(storage)
        return resized_storage

    methods_to_hide = [(DeviceMesh, "__getitem__"), (DeviceMesh, "_concatenate"), (mesh, "init_device_mesh")]
    with ExitStack() as exit_stack:
        for owner, method_name in methods_to_hide:
            hidden_method = _disable_current_modes()(getattr(owner, method_name))
            exit_stack.enter_context(patch.object(owner, method_name, hidden_method))
        exit_stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize))
        yield


class ShardedTensors:
    """The buffers that fully_shard holds for `models`; `on_gradient` is called for each new gradient."""

    def __init__(self, models: Sequence[nn.Module], on_gradient: Callable[[Tensor], None]) -> None:
        modules = (m for model in models for m in model.modules() if isinstance(m, FSDPModule))
        # Norm and head are one group.
        groups = dict.fromkeys(module._get_fsdp_state()._fsdp_param_group for module in modules)
        self._params = [param for group in groups if group for param in group.fsdp_params]
        for param in self._params:
            param._unsharded_param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda tensor: None if tensor.grad is None else on_gradient(tensor.grad)
            )

    def gathered_buffers(self) -> Iterator[Tensor]:
        """The buffers of gathered parameters."""
        for param in self._params:
            yield from param.all_gather_outputs

    def waiting_gradients(self) -> Iterator[Tensor]:
        """The gradients that wait for more micro-batches, for their reduction or for the optimizer."""
        for param in self._params:
            grads = (param.sharded_param.grad, param.unsharded_accumulated_grad, param._unsharded_param.grad)
            yield from (grad for grad in grads if grad is not None)
