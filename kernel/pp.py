"""Pipeline parallelism: one stage on each rank of the pp axis, shapes fixed in advance."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from ultrabench.kernel.mesh import local
from ultrabench.kernel.model import Decoder
from ultrabench.layout import Layout

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"1f1b": Schedule1F1B, "afab": ScheduleGPipe}


class CountedStage(PipelineStage):
    """A stage that tells `progress` of every finished forward and every finished backward."""

    progress: Callable[[], None]

    def forward_one_chunk(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """As torch's, then counts."""
        out = super().forward_one_chunk(*args, **kwargs)
        self.progress()
        return out

    def backward_one_chunk(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        """As torch's, then counts."""
        out = super().backward_one_chunk(*args, **kwargs)
        self.progress()
        return out


def _stage_shapes(model: Decoder, layout: Layout, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What goes into and out of stage `index`, without memory.

    A rank sends B * S/tp * H elements of the compute dtype to the next stage for each
    micro-batch, and receives as many gradients from it.
    """
    b, s, shape = layout.mbs, model.seq_len, model.shape
    hidden = (b, s // layout.tp, shape.hidden_size)
    x = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
    logits = (b, s, shape.vocab_size)
    first, last = index == 0, index == layout.pp - 1
    tokens = torch.empty((b, s), dtype=torch.int64, device="meta")
    out = torch.empty(logits, dtype=dtype, device="meta", requires_grad=True)
    return tokens if first else x, out if last else x


def build_schedule(
    model: Decoder,
    layout: Layout,
    pp_mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    progress: Callable[[], None],
) -> PipelineScheduleSingle:
    """The schedule that runs this rank's stage; `loss_fn` already scales a micro-batch's loss."""
    index = pp_mesh.get_local_rank()
    ins, outs = _stage_shapes(model, layout, index, dtype)
    # Static shapes: otherwise torch runs the model once more to find them.
    stage = CountedStage(
        model, index, layout.pp, device, input_args=ins, output_args=outs, group=pp_mesh.get_group()
    )
    stage.progress = progress
    make = SCHEDULES[layout.pp_schedule]
    return make(stage, n_microbatches=layout.gas, loss_fn=loss_fn, scale_grads=False)


def run_schedule(
    schedule: PipelineScheduleSingle, inputs: Tensor, targets: Tensor, pp_mesh: DeviceMesh
) -> list[Tensor]:
    """Runs forward and backward of all micro-batches; the losses, on the last stage only."""
    index, losses = pp_mesh.get_local_rank(), list[Tensor]()
    args = (inputs,) if index == 0 else ()
    if index == pp_mesh.size() - 1:
        schedule.step(*args, target=targets, losses=losses, return_outputs=False)
    else:
        schedule.step(*args, return_outputs=False)
    return losses


def tied_group(layout: Layout, rank: int) -> dist.ProcessGroup | None:
    """The group of the two ranks that hold this rank's part of a tied embedding.

    None on middle stages. A collective call of the two members only.
    """
    at = layout.coordinates(rank)
    if at.pp not in (0, layout.pp - 1):
        return None
    ranks = [layout.rank(at._replace(pp=pp)) for pp in (0, layout.pp - 1)]
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group


def sum_tied_gradients(model: Decoder, group: dist.ProcessGroup | None) -> None:
    """Gives both copies of a tied embedding the sum of their gradients.

    One all-reduce of V*H/(tp*shards) elements between the first and the last stage.
    """
    holder = model.embedding if model.embedding is not None else model.head
    if group is not None and holder is not None and holder.weight.grad is not None:
        dist.all_reduce(local(holder.weight.grad), group=group)
