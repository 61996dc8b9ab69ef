"""Private parts of torch that training uses, and what differs between the supported versions.

The end of each docstring says when torch makes the item needless, or which private part keeps it here. The dry run,
the profiler and the flight recorder use other private parts.
"""

import datetime
import functools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.backends import cudnn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import _backward, schedules
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.tensor import DTensor
from torch.fx.traceback import annotate
from torch.fx.traceback import get_current_meta as current_meta
from torch.nn import attention, functional

from ultrabench.errors import ConfigError
from ultrabench.kernel.device import kind_of

foreach_norm, foreach_mul_ = torch._foreach_norm, torch._foreach_mul_
"""The norm of each tensor of a list, and each tensor times a factor, in place; few kernels for the whole list.

Stay: torch.nn.utils has neither of them alone.
"""


def group_name(argument: Any) -> str | None:
    """The name of the process group that an operator's argument stands for; None for other arguments.

    Functional collectives get the name as text, c10d operators get the group as a boxed object.
    Stays: the arguments of these operators are not public.
    """
    if isinstance(argument, torch.ScriptObject):
        with suppress(RuntimeError, TypeError):  # objects that are no process groups
            return str(dist.ProcessGroup.unbox(argument).group_name)
    return argument if isinstance(argument, str) else None


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory of `tensor` on this rank; it may be a DTensor.

    Stays: `to_local` is an operation, which modes that watch operations must not start.
    """
    local_tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local_tensor.untyped_storage()


GROUP_TIMEOUT = datetime.timedelta(hours=12)
"""Time-out of all process groups; it is longer than any run, since the deadlines of the agent detect hangs."""


def use_timeout(timeout: datetime.timedelta) -> None:
    """Sets the time-out of all process groups that are made from now on, also of those that torch makes itself.

    `init_device_mesh` takes no time-out for the groups of its axes, and NCCL's own would be 10 minutes.
    Goes when `init_device_mesh` takes a time-out.
    """
    c10d = dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]


@functools.cache
def use_one_gloo_worker() -> None:
    """Makes each later group of gloo run its collectives in one thread, in the order in which they start.

    By itself torch gives a group two threads, which write the name of the last collective without a lock. A name of
    more than 15 letters, such as that of the all-gathers here, lies on the heap, and is then freed twice. Goes when
    torch writes it under a lock (2.13 does not).
    """
    gloo = dist.ProcessGroupGloo
    init = gloo.__init__

    def init_with_one_worker(
        self: dist.ProcessGroupGloo,
        store: Any,
        rank: int,
        size: int,
        timeout: datetime.timedelta = GROUP_TIMEOUT,
    ) -> None:
        options: Any = gloo._Options()  # type: ignore[attr-defined]
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        options._devices = [gloo.create_device(interface=name) for name in interfaces if name]
        if not options._devices:
            options._devices = [gloo.create_default_device()]
        options._threads, options._timeout = 1, timeout
        init(self, store, rank, size, options)

    gloo.__init__ = init_with_one_worker  # type: ignore[method-assign]


class ShardState(NamedTuple):
    """How fully_shard holds the parameters of a module.

    Stays with `shard_state`: the state of fully_shard is not public.
    """

    num_shards: int
    num_ranks: int
    """Number of ranks of all shards and their replicas."""
    is_sharded: bool
    """Whether the parameters are sharded now."""
    reduces_next: bool
    """Whether the next backward reduces their gradients."""
    has_reduced: bool
    """Whether gradients of earlier micro-batches have been reduced."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Dtypes of the parameters that the optimizer updates, and of the gathered ones in products."""


def shard_state(module: Any) -> ShardState:
    """The state of a module that fully_shard has wrapped and that has run."""
    group = module._get_fsdp_state()._fsdp_param_group  # the parameters that it gathers together
    num_shards, param = group.mesh_info.shard_mesh_size, group.fsdp_params[0]
    dtypes = param.sharded_param.dtype, param._unsharded_param.dtype
    # Among replicas the sums of a shard group wait apart until the last micro-batch.
    has_reduced = param.sharded_param.grad is not None or group._partial_reduce_output is not None
    # The hook of apply_dp, if there is one, sums over the replicas.
    num_replicas = group._all_reduce_hook.keywords["group"].size() if group._all_reduce_hook else 1
    num_ranks = group.mesh_info.mesh.size() * num_replicas
    return ShardState(num_shards, num_ranks, not group.is_unsharded, group.reduce_grads, has_reduced, dtypes)


def reduce_gradients(model: Any) -> None:
    """Reduces the gradients of all groups that fully_shard has made in a model, the last ones first,
    and waits for them.

    fully_shard does so itself during backward; this is what torch's pipelines do after the last one.
    Goes when FSDPModule has a method for it.
    """
    root_state = model._get_fsdp_state()
    for module_state in root_state._state_ctx.all_states[::-1]:
        if module_state._fsdp_param_group:
            module_state._fsdp_param_group.post_backward()
    root_state._root_post_backward_final_callback()


def widen_gradients(model: torch.nn.Module) -> None:
    """Converts gradients of parameters that fully_shard holds to the dtype of their reduction, and adds them up.

    fully_shard does so itself after each backward, but does it only in the next one for weights whose
    gradients are computed apart.
    Goes when torch's own schedules do it for backward passes of weights.
    """
    for module in model.modules():
        param_group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for param in param_group.fsdp_params if param_group else ():
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


_collectives = torch.ops._c10d_functional
"""Operators that start a collective, which compiled layers keep as they are.

Stay: the functions of torch.distributed wait where they are compiled, and those of its module _functional_collectives
are private, too.
"""


def all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Starts to gather the tensors of all ranks along dim 0; the result may be read after `wait`."""
    return _collectives.all_gather_into_tensor(tensor, group.size(), group.group_name)  # type: ignore[no-any-return]


def reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Starts to sum `tensor` over all ranks and to give each its part along dim 0; read it after `wait`."""
    return _collectives.reduce_scatter_tensor(tensor, "sum", group.size(), group.group_name)  # type: ignore[no-any-return]


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Starts to sum `tensor` over all ranks; the result may be read after `wait`."""
    return _collectives.all_reduce(tensor, "sum", group.group_name)  # type: ignore[no-any-return]


def all_to_all(
    tensor: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Starts to send `send_counts` rows to the ranks and to receive `receive_counts` rows;
    read the result after `wait`.
    """
    return _collectives.all_to_all_single(tensor, [*receive_counts], [*send_counts], group.group_name)  # type: ignore[no-any-return]


def wait(tensor: Tensor) -> Tensor:
    """The result of a collective that has begun."""
    return _collectives.wait_tensor(tensor)  # type: ignore[no-any-return]


WAIT_OPERATOR = _collectives.wait_tensor.default
"""The operator behind `wait`, which returns its argument; without data torch makes another tensor."""


_aten = torch.ops.aten
silu_backward, gelu_backward = _aten.silu_backward, _aten.gelu_backward
"""The gradients of the inputs of silu and gelu. Stay: they are no public functions."""


def grouped_mm(rows: Tensor, weights: Tensor, group_ends: Tensor) -> Tensor:
    """Products of groups of rows, which end at `group_ends`, with the weight of each,
    or of groups of columns with rows.
    """
    return torch._grouped_mm(rows, weights, offs=group_ends)


_FUSED_ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""The operators by which torch computes attention without a matrix of scores."""
_SUM_COLLECTIVES = (_collectives.reduce_scatter_tensor.default, _collectives.all_reduce.default)
"""The operators that sum over ranks."""
_KEPT_IF_MARKED = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    _collectives.all_to_all_single.default,
)
"""The operators whose results selective recomputation keeps if `mark_as_kept` marks their call."""


def mark_as_kept(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, whose products and all-to-alls selective recomputation keeps, in eager and in compiled layers.

    Torch hands an annotation of a call on to the operators that it makes of the call.
    Stays: torch.fx.traceback is public, but torch promises nothing of it.
    """

    @functools.wraps(function)
    def marked_function(*args: Any) -> Tensor:
        with annotate({"kept": True}):
            return function(*args)

    return marked_function


kept_linear = mark_as_kept(functional.linear)


def keeps_result(operator: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether recompute=selective keeps the result of a call of an operator in a layer.

    It keeps the products and all-to-alls that `mark_as_kept` marks, sums over ranks, which would be sent again, and
    attention. Of a ring this is only the rank's own part, which is the causal one.
    Stays: what a policy of selective recomputation sees are private operators.
    """
    if operator in _KEPT_IF_MARKED:
        return "kept" in current_meta().get("custom", ())
    if operator not in _FUSED_ATTENTION:
        return operator in _SUM_COLLECTIVES
    argument_names = (argument.name for argument in operator._schema.arguments)
    return bool(dict(zip(argument_names, args, strict=False), **kwargs).get("is_causal"))


def pads_values(backend: str) -> bool:
    """Whether an implementation needs values as wide as queries; zeros are then added to narrower ones.

    Goes when the flash attention of torch takes heads of two widths.
    """
    return backend in ("flash", "flash3")


def _widened(tensor: Tensor, width: int) -> Tensor:
    """The tensor with zeros after its last channels, up to `width` of them."""
    return functional.pad(tensor, (0, width - tensor.shape[-1])) if tensor.shape[-1] < width else tensor


def _narrowed(tensor_BNSD: Tensor, width: int) -> Tensor:
    """The first channels of each head, in memory that holds nothing else, in the order B, S, heads, channels."""
    if tensor_BNSD.shape[-1] == width:
        return tensor_BNSD
    return tensor_BNSD.transpose(1, 2)[..., :width].contiguous().transpose(1, 2)


def attention_forward(
    backend: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention over one part of the keys, and the log of its softmax sums.

    q is B x N x S x D, k and v are B x K x S x D, the log is B x N x S. Values, and then the output, may be narrower.
    Stays like the operators that it calls, and so does its backward.
    """
    v_width = v.shape[-1]
    if pads_values(backend):
        v = _widened(v, q.shape[-1])
    if backend == "cudnn":
        outputs = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        return outputs[0], outputs[1].squeeze(3)
    if q.is_cuda:
        outputs = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        outputs = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return _narrowed(outputs[0], v_width), outputs[1]


def attention_backward(
    backend: str, grad: Tensor, q: Tensor, out: Tensor, log_sum: Tensor, k: Tensor, v: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for one part of the keys, from `grad`, that of the output.

    `out` and `log_sum` are those of the query over all parts.
    """
    v_width = v.shape[-1]
    if pads_values(backend):
        grad, v, out = (_widened(tensor, q.shape[-1]) for tensor in (grad, v, out))
    tensors, log_sum = (grad, q, k, v, out), log_sum.contiguous()
    lengths_and_mask = (q.shape[2], k.shape[2], 0.0, causal)  # 0.0 is the probability of dropout
    # Without dropout no random numbers are drawn, so any state of the generator is correct.
    random_state = torch.zeros(2, dtype=torch.int64 if backend == "cudnn" else torch.uint64, device=q.device)
    if backend == "cudnn":
        options: tuple[Any, ...] = (random_state[0], random_state[1], None, None, None, *lengths_and_mask)
        # The log of cuDNN is B x N x S x 1.
        grads = _aten._scaled_dot_product_cudnn_attention_backward(*tensors, log_sum.unsqueeze(3), *options)
    elif q.is_cuda:
        options = (None, None, *lengths_and_mask, random_state, random_state[:1])
        grads = _aten._scaled_dot_product_flash_attention_backward(*tensors, log_sum, *options)
    else:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, log_sum, 0.0, causal)
    grad_q, grad_k, grad_v = grads
    return grad_q, grad_k, _narrowed(grad_v, v_width)


def prefers_cudnn_attention(device: torch.device) -> bool:
    """Whether torch itself prefers cuDNN's attention on this GPU.

    It does on Hopper and Blackwell from cuDNN 9.15.1 on; before that sequences had to be multiples of 128
    (ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention).
    Goes when torch says which implementation it prefers.
    """
    is_new_enough = torch.version.hip is None and (cudnn.version() or 0) >= 91501  # type: ignore[no-untyped-call]
    return is_new_enough and torch.cuda.get_device_capability(device)[0] in (9, 10)


def activate_flash3() -> None:
    """Makes FlashAttention-3 the implementation behind torch's flash attention.

    Goes when torch chooses it by itself.

    Raises:
        ConfigError: this torch does not know it, or its package is not installed.
    """
    try:
        attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        advice = "install the package flash_attn_interface on the nodes, or use kernel.attention=auto"
        raise ConfigError(f"kernel.attention=flash3: {error}; {advice}") from error


def process_group(name: str) -> dist.ProcessGroup:
    """The process group with this name. Stays: torch finds it, but by a private function."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


def uncompiled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that torch.compile was given; `function` itself if it was not compiled. Stays: it is private."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def compiler_of(backend: str) -> Callable[..., Any]:
    """The function behind the name of a backend of torch.compile. Stays: torch.compiler lists names only."""
    from torch._dynamo import lookup_backend  # takes seconds to import

    return lookup_backend(backend)


def require_split_backward() -> None:
    """Ends a schedule that computes gradients of inputs and of weights apart where torch loses some of them.

    Up to torch 2.11 the backward of weights cannot begin at a function that is written in Python, and adds the
    gradients of all its results as if it had one. Goes when no older torch than 2.13 is supported.

    Raises:
        RuntimeError: this torch is too old.
    """
    if not hasattr(_backward, "_autograd_grad_for_inputs"):
        reason_text = f"zbv needs torch 2.13 or newer, but {torch.__version__} loses gradients"
        raise RuntimeError(f"{reason_text}; use another schedule")


class PeerlessWarmup:
    """A mixin, listed before PipelineStage, that skips the first messages between neighbours under gloo.

    A rank of the V-shaped schedules is its own neighbour, and gloo cannot send to itself.
    Goes when torch leaves out such messages or gloo can.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        if not kind_of(self.device).has_gpus:  # type: ignore[attr-defined]
            return []
        return super()._get_init_p2p_neighbors_ops()  # type: ignore[misc,no-any-return]


class BuffersOnDemand:
    """A mixin, listed before PipelineStage, that holds each receive buffer only while it is needed.

    By itself torch makes two buffers for every micro-batch of a step and keeps them for ever (2.13 still does).
    Goes when it makes them where they are needed.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with patch.object(self, "device", torch.device("meta")):
            return super()._prepare_forward_infra(*args, **kwargs)  # type: ignore[misc]

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with patch.object(self, "device", torch.device("meta")):
            return super()._prepare_backward_infra(*args, **kwargs)  # type: ignore[misc]

    def _get_recv_ops(self, recv_infos: Sequence[Any]) -> Any:
        _move_buffers(recv_infos, self.device)  # type: ignore[attr-defined]
        return super()._get_recv_ops(recv_infos)  # type: ignore[misc]

    def _retrieve_recv_activations(self, chunk: int) -> Any:
        received_tensors = super()._retrieve_recv_activations(chunk)  # type: ignore[misc]
        _move_buffers(self.args_recv_info[chunk], torch.device("meta"))  # type: ignore[attr-defined]
        return received_tensors

    def _retrieve_recv_grads(self, chunk: int) -> Any:
        received_tensors = super()._retrieve_recv_grads(chunk)  # type: ignore[misc]
        _move_buffers(self.grad_recv_info[chunk], torch.device("meta"))  # type: ignore[attr-defined]
        return received_tensors


def _move_buffers(recv_infos: Sequence[Any], device: torch.device) -> None:
    """Replaces the buffers by new ones on `device`; those on the meta device only say size and type."""
    for recv_info in recv_infos:
        if (old := getattr(recv_info, "buffer", None)) is not None:
            recv_info.buffer = torch.empty_like(old, device=device, requires_grad=old.requires_grad)


batch_p2p = schedules._batch_p2p
"""Starts to send or receive; a rank must do it as its peer does, since NCCL has other channels for batches.

Stays: it is private, as is the next one.
"""


def backward_of_stage(tensors: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """The gradients of a stage's inputs, after a backward pass from its outputs.

    `tensors` are the keyword arguments that torch passes to the backward of a stage.
    """
    return stage_backward(tensors["stage_output"], tensors["output_grads"], tensors["input_values"])
