"""One optimizer step of any layout: build, accumulate gradients, clip, update."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from ultrabench.kernel.data import load, sample_indices
from ultrabench.kernel.dp import COMPUTE_DTYPE, MASTER_DTYPE, apply_dp, begin_microbatch
from ultrabench.kernel.mesh import local, num_shards, part_of, take
from ultrabench.kernel.model import Decoder, cross_entropy
from ultrabench.kernel.pp import build_schedule, run_schedule, sum_tied_gradients, tied_group
from ultrabench.kernel.tp import apply_tp
from ultrabench.layout import Layout
from ultrabench.run import RunSpec
from ultrabench.stages import split_stages

LEARNING_RATE = 3e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
"""Largest norm of the whole gradient; the recipe of Llama (arXiv 2302.13971, section 2.3)."""


def loss_scale(layout: Layout) -> float:
    """What a micro-batch's mean loss is multiplied with, so that a step's gradients are means.

    fully_shard averages over dp, so what is left is the mean over the micro-batches.
    """
    return 1.0 / layout.gas


def initialise(model: Decoder, seed: int, device: torch.device) -> None:
    """Gives every parameter its part of the full value that its name and `seed` stand for.

    One full matrix at a time exists on the device.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for name, param in model.named_parameters():
            full = model.initial_value(name, param.shape, seed, device)
            local(param).copy_(take(full, part_of(param)))


class TrainStep:
    """A rank's share of the model and its optimizer; every method is collective."""

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        mesh: DeviceMesh,
        *,
        clip_norm: float = CLIP_NORM,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        layout = self.layout = spec.layout
        self.spec, self.device, self.mesh = spec, device, mesh
        self.clip_norm, self.progress = clip_norm, progress
        stage = split_stages(spec.shape, layout.pp)[mesh.get_local_rank("pp")]
        precision = spec.kernel.precision
        with torch.device("meta"):
            self.model = Decoder(spec.shape, stage, spec.workload.seq_len)
        self.model.to(MASTER_DTYPE[precision])
        apply_tp(self.model, mesh["tp"])
        apply_dp(self.model, mesh, layout.zero_stage, precision)
        initialise(self.model, spec.workload.seed, device)
        assert isinstance(self.model, FSDPModule)
        self.fsdp: FSDPModule = self.model
        # The first gather lays out the shards for good; the optimizer must hold those.
        self.fsdp.unshard()
        self.fsdp.reshard()
        tied = spec.shape.tie_word_embeddings and layout.pp > 1
        self.tied_group = tied_group(layout, dist.get_rank()) if tied else None
        self._set_up_optimizer(tied)
        if layout.pp > 1:
            dtype = COMPUTE_DTYPE[precision]
            self.schedule = build_schedule(
                self.model, layout, mesh["pp"], device, dtype, self.scaled_loss, progress
            )

    def _set_up_optimizer(self, tied: bool) -> None:
        """AdamW over this rank's own values: it works element by element, so shards suffice.

        Each parameter weighs 1 / (ranks that hold the same part) in the norm, and nothing on the
        last stage's copy of a tied embedding, so that the norm counts each number once.
        """
        self.params = dict(self.model.named_parameters())
        stage_ranks = dist.get_world_size() // self.layout.pp
        self.weights = {
            name: 0.0 if tied and name == "head.weight" else num_shards(param) / stage_ranks
            for name, param in self.params.items()
        }
        self.shards = {name: local(param.detach()) for name, param in self.params.items()}
        filled = [shard for shard in self.shards.values() if shard.numel()]
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            filled, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=fused
        )

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank in `step`: gas*mbs x S tokens each, on the device."""
        indices = sample_indices(self.layout, self.layout.coordinates(dist.get_rank()).dp)
        return load(indices, step, self.spec.workload, self.spec.shape.vocab_size, self.device)

    def scaled_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch's share of the loss of the step."""
        return cross_entropy(logits, targets) * loss_scale(self.layout)

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Leaves the gradients of the mean loss of the global batch in the parameters.

        Returns:
            This dp rank's mean loss on the last stage, 0 elsewhere.
        """
        if self.layout.tp == 1:
            return self._accumulate(inputs, targets)
        with loss_parallel():
            return self._accumulate(inputs, targets)

    def _accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        losses = []
        if self.layout.pp > 1:
            losses = run_schedule(self.schedule, inputs, targets, self.mesh["pp"])
            sum_tied_gradients(self.model, self.tied_group)
        else:
            batches = zip(*(t.split(self.layout.mbs) for t in (inputs, targets)), strict=True)  # type: ignore[no-untyped-call]
            for index, (x, y) in enumerate(batches):
                last = index == self.layout.gas - 1
                begin_microbatch(self.fsdp, self.layout.zero_stage, last=last)
                loss = self.scaled_loss(self.model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
                self.progress()
        none = torch.zeros((), device=self.device)
        return sum((local(loss.detach()) for loss in losses), none)

    def update(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clips by the norm of the whole gradient, updates, and clears the gradients.

        One all-reduce of two fp64 numbers over the world.

        Returns:
            The mean loss of the global batch and the norm before clipping, the same on all ranks.
        """
        grads = {n: local(p.grad.detach()) for n, p in self.params.items() if p.grad is not None}
        last_stage = self.mesh.get_local_rank("pp") == self.layout.pp - 1
        holders = dist.get_world_size() // self.layout.pp
        both = torch.zeros(2, dtype=torch.float64, device=self.device)
        both[0] = loss / holders if last_stage else 0.0
        for name, grad in grads.items():
            both[1] += torch.linalg.vector_norm(grad).double().square() * self.weights[name]
        dist.all_reduce(both)
        norm = both[1].sqrt()
        factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for name, grad in grads.items():
            self.shards[name].grad = grad.mul_(factor.to(grad.dtype))
        self.optimizer.step()
        self.optimizer.zero_grad()
        for param in self.params.values():
            param.grad = None
        return both[0], norm
