"""Pipeline parallelism: each rank of the pp axis has stages of the model, with shapes given in advance."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from ultrabench.kernel.compat import (
    BuffersOnDemand,
    PeerlessWarmup,
    backward_of_stage,
    batch_p2p,
    require_split_backward,
    widen_gradients,
)
from ultrabench.kernel.dp import COMPUTE_DTYPE
from ultrabench.kernel.loss import HeadGradient
from ultrabench.kernel.mesh import local_shard, num_losses
from ultrabench.kernel.model import Decoder
from ultrabench.kernel.tp import TensorParallel
from ultrabench.layout import Layout
from ultrabench.run import RunSpec

_TORCH_SCHEDULES = {"1f1b": "1F1B", "afab": "GPipe", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
SCHEDULE_CLASSES = {schedule: get_schedule_class(name) for schedule, name in _TORCH_SCHEDULES.items()}
"""Our name of a schedule -> its class in torch."""


class TrainStage(BuffersOnDemand, PeerlessWarmup, PipelineStage):
    """A pipeline stage that passes targets to the last part of the model, and reports finished micro-batches."""

    after_microbatch: Callable[[], None]
    """It is called after every forward and every backward of a micro-batch."""
    tp_ranks: TensorParallel
    """Tensor parallelism over the ranks of the tp axis; its flags say which gradients a backward pass computes."""
    targets: Iterator[Tensor]
    """The targets of each micro-batch, in the order in which every schedule runs their forwards."""
    shares_rank: bool
    """Whether the stage shares its rank with other stages. Then it waits itself for what it sends: torch's schedules do
    so in time only where a rank has one stage."""
    pending_sends: defaultdict[int, list[dist.Work]]
    """Micro-batch -> messages on their way that its backward waits for."""

    def forward_maybe_with_nosync(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Passes the targets to the model; if torch passed them, it would keep them as inputs of backward."""
        if self.is_last:
            kwargs["targets"] = next(self.targets)
        out = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.after_microbatch()
        return out

    def backward_maybe_with_nosync(self, backward_type, bwd_kwargs, last_backward=False):  # type: ignore[no-untyped-def]
        """Runs one backward pass of a micro-batch: for the gradients of its input, of the weights, or of both.

        The last backward pass for both also starts to reduce the gradients of a group of parameters as soon as they
        are complete, while backward continues with other groups. Torch would reduce all groups after the pass.
        """
        self.tp_ranks.wants_input_grads = backward_type != "weight"
        self.tp_ranks.wants_weight_grads = backward_type != "input"
        if not last_backward or backward_type != "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert isinstance(self.submod, FSDPModule)
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        return backward_of_stage(bwd_kwargs), None

    def backward_one_chunk(self, bwd_chunk_id, loss=None, *args, **kwargs):  # type: ignore[no-untyped-def]
        """Runs torch's backward of a micro-batch, then calls `after_microbatch`.

        The schedule keeps all losses until the step ends, and the graph of each would keep the stage's input.
        """
        self.finish_sends(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        if loss is not None:
            loss.detach_()
        self.after_microbatch()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduces all gradients of the step, also under schedules that compute some gradients of weights later."""
        widen_gradients(self.submod)
        super().perform_reduce_grad(grad_scale_factor)

    def get_fwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        """Starts to send the output of a micro-batch if this rank has several stages, else leaves that to the schedule.

        The backward of the same micro-batch waits until the output is sent: it needs the gradient that the next stage
        computes from it. Torch would wait at the end of the step, and keep the memory of all messages until then.
        """
        return self._start_sends(super().get_fwd_send_ops(chunk), chunk)

    def get_bwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        """Starts to send the gradient of the input, for which the backward of the next micro-batch waits."""
        return self._start_sends(super().get_bwd_send_ops(chunk), chunk + 1)

    def _start_sends(self, messages: list[dist.P2POp], awaiting_chunk: int) -> list[dist.P2POp]:
        """Starts to send, and returns the messages that are left to the schedule."""
        if not self.shares_rank:
            return messages
        self.pending_sends[awaiting_chunk] += batch_p2p(messages)
        return []

    def finish_sends(self, chunk: int) -> None:
        """Waits for the messages that must have been sent before the backward of micro-batch `chunk`."""
        for work in self.pending_sends.pop(chunk, ()):
            work.wait()


class Pipeline:
    """The stages of this rank, and the schedule of their micro-batches."""

    def __init__(
        self,
        spec: RunSpec,
        models: Sequence[Decoder],
        pp_mesh: DeviceMesh,
        device: torch.device,
        after_microbatch: Callable[[], None],
        tp_ranks: TensorParallel,
    ) -> None:
        layout, dtype = spec.layout, COMPUTE_DTYPE[spec.kernel.precision]
        wide_dtype = torch.promote_types(dtype, torch.float32)
        if layout.pp_schedule == "zbv":
            require_split_backward()
        self._mbs = layout.mbs
        num_stages, pp_group = layout.num_stages, pp_mesh.get_group()
        # Without the shapes of a stage's input and output torch would run the model to find them. For each
        # micro-batch a stage sends B * S/(cp*tp) * H elements to the next one and receives as many gradients.
        mbs, local_seq_len = layout.mbs, spec.workload.seq_len // layout.cp
        num_token_parts = layout.tp if tp_ranks.sequence_parallel else 1
        activation_shape = (mbs, local_seq_len // num_token_parts, spec.shape.hidden_size)
        meta_activation = torch.empty(activation_shape, dtype=dtype, device="meta", requires_grad=True)
        meta_tokens = torch.empty((mbs, local_seq_len), dtype=torch.int64, device="meta")
        meta_loss = torch.empty((), dtype=wide_dtype, device="meta", requires_grad=True)
        self.stages = list[TrainStage]()
        for stage_index, model in zip(layout.stages_of(pp_mesh.get_local_rank()), models, strict=True):
            stage_input = meta_tokens if stage_index == 0 else meta_activation
            stage_output = meta_loss if stage_index == num_stages - 1 else meta_activation
            stage = TrainStage(
                model, stage_index, num_stages, device, stage_input, stage_output, group=pp_group
            )
            stage.after_microbatch, stage.tp_ranks = after_microbatch, tp_ranks
            stage.shares_rank, stage.pending_sends = layout.virtual_stages > 1, defaultdict(list)
            self.stages.append(stage)
            if model.head is not None and layout.pp_schedule == "afab":
                model.head.shared_gradient = HeadGradient()
        self._schedules = dict[int, Any]()
        """Number of micro-batches of a step -> the schedule that runs them."""
        self.set_layout(layout)

    def set_layout(self, layout: Layout) -> None:
        """Makes the next steps those of a layout that differs in gas at most from the one before.

        The stages keep what a schedule has prepared for each micro-batch, so that schedules can take turns.
        """
        self._gas = layout.gas
        if layout.gas not in self._schedules:
            self._schedules[layout.gas] = SCHEDULE_CLASSES[layout.pp_schedule](
                # Schedules of torch for several stages on a rank take a list.
                self.stages if layout.virtual_stages > 1 else self.stages[0],
                n_microbatches=layout.gas,
                # The last stage returns the loss of a micro-batch; that of the step is the mean over all ranks' losses.
                loss_fn=lambda loss, _: loss / num_losses(layout),
                scale_grads=False,
            )
        self.schedule = self._schedules[layout.gas]
        for stage in self.stages:
            if stage.chunks is not None:  # a schedule sets it only before its first step
                stage.chunks = layout.gas

    def run(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Runs forward and backward of all micro-batches; returns their losses if it has the last stage."""
        losses = list[Tensor]()
        has_first_stage = any(stage.is_first for stage in self.stages)
        has_last_stage = any(stage.is_last for stage in self.stages)
        for stage in self.stages:
            stage.targets = iter(targets.split(self._mbs))  # type: ignore[no-untyped-call]
        loss_arguments = {"target": targets, "losses": losses} if has_last_stage else {}
        self.schedule.step(*((inputs,) if has_first_stage else ()), **loss_arguments, return_outputs=False)
        for stage in self.stages:
            stage.finish_sends(self._gas)
        return losses


def tied_peer(layout: Layout, pp_rank: int) -> int | None:
    """The rank of the pp axis that holds the other copy of a tied embedding.

    It is None if `pp_rank` holds both copies or none.
    """
    end_ranks = {r for r in range(layout.pp) if {0, layout.num_stages - 1} & set(layout.stages_of(r))}
    return sum(end_ranks) - pp_rank if pp_rank in end_ranks and len(end_ranks) == 2 else None


def swap(tensor: Tensor, peer_rank: int, pp_group: dist.ProcessGroup) -> Tensor:
    """Sends `tensor` to `peer_rank` of the pp axis, and returns the tensor of that rank; only these two ranks call it.

    A group of the two would hang with NCCL, which makes a group only if all ranks take part.
    """
    peer_tensor = torch.empty_like(tensor)
    send_op = dist.P2POp(dist.isend, tensor, group=pp_group, group_peer=peer_rank)
    receive_op = dist.P2POp(dist.irecv, peer_tensor, group=pp_group, group_peer=peer_rank)
    for work in dist.batch_isend_irecv([send_op, receive_op]):
        work.wait()
    return peer_tensor


def sum_tied_gradients(models: Sequence[Decoder], peer_rank: int | None, pp_group: dist.ProcessGroup) -> None:
    """Replaces the gradients of both copies of an embedding by their sum, so that the copies stay equal bit by bit.

    The last stage has a copy as its head, or for modules that predict more tokens. A rank without a copy does nothing.
    `peer_rank` is what `tied_peer` returns. The ranks of the first and the last stage send each other V*H/(tp*shards)
    elements.
    """
    weights = (copy.get_parameter("weight") for model in models for copy in model.embedding_copies)
    local_grads = [local_shard(weight.grad) for weight in weights if weight.grad is not None]
    if peer_rank is not None:
        local_grads[0] += swap(local_grads[0], peer_rank, pp_group)
    elif len(local_grads) == 2:
        local_grads[0] += local_grads[1]
        local_grads[1].copy_(local_grads[0])
