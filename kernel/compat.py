"""Private parts of torch that training uses, and what differs between the supported versions.

The dry run and the profiler use other private parts.
"""

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.backends import cudnn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import _backward, schedules
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.tensor import DTensor
from torch.nn import attention

from ultrabench.errors import ConfigError

foreach_norm, foreach_mul_ = torch._foreach_norm, torch._foreach_mul_
"""The norm of each tensor of a list, and each tensor times a factor, in place; few kernels for the whole list."""


def group_name(argument: Any) -> str | None:
    """The name of the process group that an operator's argument stands for; None for other arguments.

    Functional collectives get the name as text, c10d operators get the group as a boxed object.
    """
    if isinstance(argument, str):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return str(dist.ProcessGroup.unbox(argument).group_name)
        except (RuntimeError, TypeError):
            return None
    return None


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory on this rank of `tensor`, which may be a DTensor."""
    local_tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local_tensor.untyped_storage()


PATIENCE = datetime.timedelta(hours=12)
"""Time-out of all process groups; it is longer than any run, since the deadlines of the agent detect hangs."""


def use_timeout(timeout: datetime.timedelta) -> None:
    """Sets the time-out of all process groups that are made from now on, also of those that torch makes itself.

    `init_device_mesh` takes no time-out for the groups of its axes, and NCCL's own would be 10 minutes.
    """
    c10d = dist.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]


class ShardState(NamedTuple):
    """How fully_shard holds the parameters of a module."""

    shards: int
    copies: int
    """Number of ranks of all shards and their replicas."""
    resharded: bool
    """Whether the parameters are sharded now."""
    reduces: bool
    """Whether the next backward reduces their gradients."""
    has_reduced: bool
    """Whether gradients of earlier micro-batches have been reduced."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Dtypes of the parameters that the optimizer updates, and of the gathered ones in products."""


def shard_state(module: Any) -> ShardState:
    """The state of a module that fully_shard has wrapped and that has run."""
    group = module._get_fsdp_state()._fsdp_param_group
    shards, param = group.mesh_info.shard_mesh_size, group.fsdp_params[0]
    dtypes = param.sharded_param.dtype, param._unsharded_param.dtype
    # Among replicas the sums of a shard group wait apart until the last micro-batch.
    has_reduced = param.sharded_param.grad is not None or group._partial_reduce_output is not None
    reduced = group.reduce_grads, has_reduced
    return ShardState(shards, group.mesh_info.mesh.size(), not group.is_unsharded, *reduced, dtypes)


def reduce_gradients(model: Any) -> None:
    """Reduces the gradients of all groups that fully_shard has made in a model, the last ones first, and waits for them.

    fully_shard does so itself during backward; this is what torch's pipelines do after the last one.
    """
    state = model._get_fsdp_state()
    for module_state in state._state_ctx.all_states[::-1]:
        if module_state._fsdp_param_group:
            module_state._fsdp_param_group.post_backward()
    state._root_post_backward_final_callback()


def widen_gradients(model: torch.nn.Module) -> None:
    """Converts gradients of parameters that fully_shard holds to the dtype of their reduction, and adds them up.

    fully_shard does so itself after each backward, but does it only in the next one for weights whose
    gradients are computed apart.
    """
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for param in group.fsdp_params if group else ():
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()


_collectives = torch.ops._c10d_functional


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
    tensor: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Starts to send so many rows to each rank and to receive so many from each; read the result after `wait`."""
    return _collectives.all_to_all_single(tensor, [*receives], [*sends], group.group_name)  # type: ignore[no-any-return]


def wait(tensor: Tensor) -> Tensor:
    """The result of a collective that has begun."""
    return _collectives.wait_tensor(tensor)  # type: ignore[no-any-return]


_aten = torch.ops.aten
silu_backward = _aten.silu_backward


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Products of groups of rows, which end at `ends`, with the weight of each, or of groups of columns with rows."""
    return torch._grouped_mm(rows, weights, offs=ends)


SELECTED = {
    _aten.mm.default: (0, 2, 4),
    _collectives.all_to_all_single.default: (0, 1),
    _collectives.reduce_scatter_tensor.default: (0, 1),
    _collectives.all_reduce.default: (0, 1),
    _aten._scaled_dot_product_flash_attention.default: (0,),
    _aten._scaled_dot_product_efficient_attention.default: (0,),
    _aten._scaled_dot_product_cudnn_attention.default: (0,),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: (0,),
}
"""Operator -> which of its calls in a layer have a result that recompute=selective keeps.

Of the products with q, k, v, out, gate, up and down these are every second one, as in torchtitan, but not down,
which no backward needs. Both sums over ranks are kept, since they would be sent again, and so are the rows and scores that a
sparse layer receives. There gate is that of the shared experts or, without them, the router's product is in its place.
"""


def attention_forward(chosen: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention over one part of the keys, and the log of its softmax sums.

    q is B x N x S x D like the output, k and v are B x K x S x D, and the log is B x N x S.
    """
    if chosen == "cudnn":
        outputs = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        return outputs[0], outputs[1].squeeze(3)
    if q.is_cuda:
        outputs = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        outputs = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return outputs[0], outputs[1]


def attention_backward(
    chosen: str, grad: Tensor, q: Tensor, out: Tensor, log_sum: Tensor, k: Tensor, v: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for one part; `out` and `log_sum` are those of the query over all parts."""
    tensors, log_sum, sizes = (
        (grad, q, k, v, out),
        log_sum.contiguous(),
        (q.shape[2], k.shape[2], 0.0, causal),
    )
    # Without dropout no random numbers are drawn, so any state of the generator is correct.
    unused = torch.zeros(2, dtype=torch.int64 if chosen == "cudnn" else torch.uint64, device=q.device)
    if chosen == "cudnn":
        rest: tuple[Any, ...] = (unused[0], unused[1], None, None, None, *sizes)
        # The log of cuDNN is B x N x S x 1.
        grads = _aten._scaled_dot_product_cudnn_attention_backward(*tensors, log_sum.unsqueeze(3), *rest)
    elif q.is_cuda:
        rest = (None, None, *sizes, unused, unused[:1])
        grads = _aten._scaled_dot_product_flash_attention_backward(*tensors, log_sum, *rest)
    else:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, log_sum, 0.0, causal)
    return grads  # type: ignore[no-any-return]


def has_cudnn_attention(device: torch.device) -> bool:
    """Whether torch itself prefers cuDNN's attention on this GPU.

    It does on Hopper and Blackwell from cuDNN 9.15.1 on; before that sequences had to be multiples of 128
    (ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention).
    """
    new = torch.version.hip is None and (cudnn.version() or 0) >= 91501  # type: ignore[no-untyped-call]
    return new and torch.cuda.get_device_capability(device)[0] in (9, 10)


def activate_flash3() -> None:
    """Makes FlashAttention-3 the implementation behind torch's flash attention.

    Raises:
        ConfigError: this torch does not know it, or its package is not installed.
    """
    try:
        attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        advice = "it needs the package flash_attn_interface on the nodes; take kernel.attention=auto"
        raise ConfigError(f"kernel.attention=flash3: {error}; {advice}") from error


def group_of(name: str) -> dist.ProcessGroup:
    """The process group with this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that torch.compile was given; `function` itself if it was not compiled."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def compiler_of(backend: str) -> Callable[..., Any]:
    """The function behind the name of a backend of torch.compile."""
    from torch._dynamo import lookup_backend  # takes seconds to import

    return lookup_backend(backend)


def require_split_backward() -> None:
    """Ends a schedule that computes gradients of inputs and of weights apart where torch loses some of them.

    Up to torch 2.11 the backward of weights cannot begin at a function that is written in Python, and adds the
    gradients of all its results as if it had one.

    Raises:
        RuntimeError: this torch is too old.
    """
    if not hasattr(_backward, "_autograd_grad_for_inputs"):
        reason = f"zbv needs torch 2.13: {torch.__version__} loses gradients"
        raise RuntimeError(f"{reason}; take another schedule")


class PeerlessWarmup:
    """A mixin, listed before PipelineStage, that skips the first messages between neighbours under gloo.

    A rank of the V-shaped schedules is its own neighbour, and gloo cannot send to itself.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        if self.device.type == "cpu":  # type: ignore[attr-defined]
            return []
        return super()._get_init_p2p_neighbors_ops()  # type: ignore[misc,no-any-return]


class BuffersOnDemand:
    """A mixin, listed before PipelineStage, that holds each receive buffer only while it is needed.

    By itself torch makes two buffers for every micro-batch of a step and keeps them for ever.
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
        received = super()._retrieve_recv_activations(chunk)  # type: ignore[misc]
        _move_buffers(self.args_recv_info[chunk], torch.device("meta"))  # type: ignore[attr-defined]
        return received

    def _retrieve_recv_grads(self, chunk: int) -> Any:
        received = super()._retrieve_recv_grads(chunk)  # type: ignore[misc]
        _move_buffers(self.grad_recv_info[chunk], torch.device("meta"))  # type: ignore[attr-defined]
        return received


def _move_buffers(recv_infos: Sequence[Any], device: torch.device) -> None:
    """Replaces the buffers by new ones on `device`; those on the meta device only say size and type."""
    for info in recv_infos:
        if (old := getattr(info, "buffer", None)) is not None:
            info.buffer = torch.empty_like(old, device=device, requires_grad=old.requires_grad)


batch_p2p = schedules._batch_p2p
"""Starts to send or receive; a rank must do it as its peer does, since NCCL has other channels for batches."""


def whole_backward(of_stage: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """The gradients of a stage's inputs, after a backward pass from its outputs; torch's own arguments."""
    return stage_backward(of_stage["stage_output"], of_stage["output_grads"], of_stage["input_values"])


GROUP_NAMES = {"default_pg": "world", "undefined": "ranks"}
"""Name of a group in torch -> our name; the groups of a mesh have the names of their axes."""


def last_collectives() -> list[dict[str, Any]]:
    """The collectives of each process group of this rank: how many it has entered, started and finished.

    They come from torch's flight recorder, which is on by default; if it does not know a group, only the
    sequence number of the group is known. Items are {group, ranks, entered, started, finished, ops}; `ops`
    maps numbers to names of the first unfinished collectives, or of the last one. Unknown values are None.
    """
    by_group: dict[str, list[dict[str, Any]]] = {}
    for entry in _flight_record():
        if not entry["is_p2p"]:
            by_group.setdefault(entry["process_group"][0], []).append(entry)
    counts = []
    for group, name in dist.distributed_c10d._world.pg_names.items():
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            axis = group.group_desc.removeprefix("mesh_")
            group_counts = {
                "group": GROUP_NAMES.get(axis, axis),
                "ranks": ranks,
                **_count(by_group.get(name, [])),
            }
            group_counts["entered"] = group_counts["entered"] or group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            counts.append(group_counts)
    return counts


def _count(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The highest collective numbers among the entries of one group."""
    finished = [e["collective_seq_id"] for e in entries if e["retired"] or e["state"] == "completed"]
    begun = [e["collective_seq_id"] for e in entries if e["state"] == "started"]
    # A retired NCCL collective has begun; a collective of gloo stays "scheduled" until it ends.
    starts = (
        max([*begun, *finished], default=None) if any(e["state"] != "scheduled" for e in entries) else None
    )
    unfinished = [e for e in entries if e["collective_seq_id"] not in finished][:4] or entries[-1:]
    return {
        "entered": max((e["collective_seq_id"] for e in entries), default=None),
        "started": starts,
        "finished": max(finished, default=0) if entries else None,
        "ops": {e["collective_seq_id"]: e["profiling_name"].partition(":")[2] for e in unfinished},
    }


def _flight_record() -> list[dict[str, Any]]:
    """The entries of both flight recorders (one is for NCCL, one for all others), in order."""
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dumps = [getattr(_distributed_c10d, name) for name in names if hasattr(_distributed_c10d, name)]
    return [entry for dump in dumps for entry in json.loads(dump(True, False)).get("entries", [])]
