"""One optimizer step of any layout: builds the model, accumulates gradients, clips and updates."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ultrabench.kernel import cp
from ultrabench.kernel.attention import apply_attention, choose_backend
from ultrabench.kernel.compat import foreach_mul_, foreach_norm
from ultrabench.kernel.compile import GraphCounter, apply_compile
from ultrabench.kernel.cut import Cut, cuts_of, num_tp_copies
from ultrabench.kernel.data import make_batch, sample_indices
from ultrabench.kernel.dp import MASTER_DTYPE, apply_dp, begin_microbatch, end_microbatch
from ultrabench.kernel.ep import apply_ep
from ultrabench.kernel.mesh import (
    build_expert_mesh,
    cp_group,
    is_expert,
    kv_group,
    local_shard,
    num_losses,
    num_shards,
    own_values,
)
from ultrabench.kernel.model import Decoder, copy_name
from ultrabench.kernel.moe import update_router_biases
from ultrabench.kernel.pp import Pipeline, sum_tied_gradients, tied_peer
from ultrabench.kernel.recompute import apply_recompute
from ultrabench.kernel.tp import TensorParallel, apply_tp, part_of, sum_copied_gradients, sum_whole_gradients
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.routing import LEARNED_ROUTING
from ultrabench.run import RunSpec
from ultrabench.stages import Stage, stages_by_rank
from ultrabench.tensor_parallel import most_kv_copies

ADAMW_BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
"""Weight decay of AdamW; with ADAMW_BETAS, as in the recipe of Llama (arXiv 2302.13971, section 2.3)."""
CLIP_NORM = 1.0
"""Largest norm of the whole gradient, as in the recipe of Llama (arXiv 2302.13971, section 2.3)."""


def learning_rate(shape: ModelShape) -> float:
    """The learning rate: 3e-4 up to a hidden_size of 128, and in inverse proportion to it beyond.

    AdamW moves each weight by about the rate, and an activation is a sum over hidden_size of them, so that an
    update changes activations of any width alike (arXiv 2203.03466). There is no warm-up: with a fixed rate
    either wide models drift by rounding, or narrow ones train too little to show a fault in the loss.
    """
    return 3e-4 * min(1.0, 128 / shape.hidden_size)


def clip_factor(gradient_norm: Tensor, max_norm: float) -> Tensor:
    """What a gradient with this norm is multiplied by, so that its norm is `max_norm` if it is larger."""
    return (max_norm / (gradient_norm + 1e-6)).clamp(max=1.0)


def initialise(
    model: Decoder,
    full_shapes: Mapping[str, torch.Size],
    seed: int,
    device: torch.device,
    cut_group: Callable[[str], dist.ProcessGroup],
) -> None:
    """Gives every parameter its part of the full initial value, which depends on its name and `seed`, and 0 to padding.

    Only one full matrix at a time exists on the device.

    Args:
        full_shapes: the shape of each full parameter, by its name.
        cut_group: a function from the name of a parameter to the ranks over which it is cut.
    """
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    cuts, vocab_size = cuts_of(model), model.shape.vocab_size
    with torch.no_grad():
        for name, param in model.named_parameters():
            part = part_of(cuts[name], param, cut_group(name), vocab_size)
            local_shard(param).zero_()
            own_values(param, part).copy_(model.initial_value(name, full_shapes[name], seed, device, part))


def num_copies(name: str, param: Tensor, layout: Layout, cut: Cut) -> int:
    """Number of ranks that hold the same part of a parameter: the ranks of a pipeline stage / the number of parts."""
    num_cut_parts = layout.ep if is_expert(name) else layout.tp // num_tp_copies(cut, layout.tp)
    return layout.dp * layout.cp * layout.tp // (num_cut_parts * num_shards(param))


class TrainStep:
    """A rank's share of the model and its optimizer; all ranks have to call every method together.

    The dicts params, parts, shards and grad_norm_weights have a value for the name of each parameter: the parameter,
    the cuts that lead to this rank's part of it, that part without padding, and its weight in the square of the
    gradient's norm.
    """

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        mesh: DeviceMesh,
        *,
        after_microbatch: Callable[[], None] = lambda: None,
        compile_backend: str = "inductor",
    ) -> None:
        layout = self.layout = spec.layout
        self.spec, self.device, self.mesh = spec, device, mesh
        self.clip_norm, self.after_microbatch = CLIP_NORM, after_microbatch
        self.compiler = GraphCounter(compile_backend)
        self.attention_backend = choose_backend(spec.kernel, spec.shape.head_widths, device)
        self.coordinates = layout.coordinates(dist.get_rank())
        self.positions = cp.local_positions(spec.workload.seq_len, layout.cp, self.coordinates.cp)
        self.cp_group = cp_group(layout)
        num_kv_copies = most_kv_copies(spec.shape, layout.tp)
        self.kv_group = kv_group(layout, num_kv_copies, mesh.get_group("tp"))
        self.expert_mesh = build_expert_mesh(layout, device.type) if spec.shape.num_experts else None
        stages = stages_by_rank(spec.shape, layout)[self.coordinates.pp]
        is_fp8 = spec.kernel.precision == "fp8"
        self.full_shapes = dict[str, torch.Size]()
        """The shape of each full parameter of this rank's stages, by its name."""
        self.tp_ranks = TensorParallel(mesh.get_group("tp"), layout.sequence_parallel == "on", is_fp8)
        self.models = [self._build_stage(stage) for stage in stages]
        self.copy_name = copy_name(spec.shape) if layout.pp > 1 else None
        self.ties_across_stages = self.copy_name is not None
        self.tied_peer = tied_peer(layout, self.coordinates.pp) if self.ties_across_stages else None
        self.params = {name: p for model in self.models for name, p in model.named_parameters()}
        self.cuts = {name: cut for model in self.models for name, cut in cuts_of(model).items()}
        vocab_size = spec.shape.vocab_size
        self.parts = {
            n: part_of(self.cuts[n], p, self.cut_group(n), vocab_size) for n, p in self.params.items()
        }
        self.shards = {name: own_values(p.detach(), self.parts[name]) for name, p in self.params.items()}
        # The norm counts each number once: that of a tied embedding on the first stage.
        self.grad_norm_weights = {
            n: 1 / num_copies(n, p, layout, self.cuts[n]) for n, p in self.params.items()
        }
        if self.ties_across_stages:
            self.grad_norm_weights[str(self.copy_name)] = 0.0
        # AdamW works element by element, so that it is enough to give it the shards of this rank.
        nonempty_shards = [shard for shard in self.shards.values() if shard.numel()]
        lr = learning_rate(spec.shape)
        self.optimizer = torch.optim.AdamW(
            nonempty_shards, lr=lr, betas=ADAMW_BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        if layout.pp > 1:
            self.pipeline = Pipeline(spec, self.models, mesh["pp"], device, after_microbatch, self.tp_ranks)

    def set_gas(self, gas: int) -> None:
        """Makes the next steps of `gas` micro-batches on each rank, and so of another global batch."""
        self.spec = self.spec.with_gas(gas)
        self.layout = self.spec.layout
        if self.layout.pp > 1:
            self.pipeline.set_layout(self.layout)

    def cut_group(self, name: str) -> dist.ProcessGroup:
        """The ranks over which the parameter `name` is cut: those of ep for experts, else those of tp."""
        expert_mesh = self.expert_mesh if is_expert(name) else None
        return expert_mesh.get_group("ep") if expert_mesh else self.tp_ranks.group

    def _build_stage(self, stage: Stage) -> Decoder:
        """Builds a stage of the model, and applies every form of parallelism of the layout to it."""
        spec, kernel = self.spec, self.spec.kernel
        with torch.device("meta"):
            model = Decoder(spec.shape, stage, self.positions, kernel.routing)
        self.full_shapes |= {name: param.shape for name, param in model.named_parameters()}
        if MASTER_DTYPE[kernel.precision] != torch.get_default_dtype():
            model.to(MASTER_DTYPE[kernel.precision])  # tensors of a dry run do not permit this
        apply_attention(model, self.attention_backend, self.cp_group, self.layout.cp_exchange)
        apply_tp(model, self.tp_ranks)
        if self.expert_mesh is not None:
            ep_group = self.expert_mesh.get_group("ep")
            apply_ep(model, self.layout, ep_group, self.tp_ranks, spec.workload.seq_len)
        apply_recompute(model, self.layout)
        if spec.compiles:
            apply_compile(model, self.compiler)
        apply_dp(model, self.mesh, self.layout.zero_stage, kernel.precision, self.expert_mesh)
        initialise(model, self.full_shapes, spec.workload.seed, self.device, self.cut_group)
        # The first gather gives the shards their final memory, which the optimizer must refer to.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()
        return model

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of this rank in `step`: gas*mbs x S/cp tokens each, on the device."""
        indices = sample_indices(self.layout, self.coordinates.dp)
        workload, shape = self.spec.workload, self.spec.shape
        num_later = shape.num_nextn_predict_layers
        inputs, targets = make_batch(indices, step, workload, shape.vocab_size, self.device, num_later)
        return cp.tokens_at(inputs, self.positions), cp.tokens_at(targets, self.positions)

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Computes the gradients of the mean loss of the global batch, and leaves them in the parameters.

        Returns:
            This rank's summand of that loss if it has the last stage, otherwise 0. Ranks of tp have the same one.
        """
        losses = []
        if self.layout.pp > 1:
            losses = self.pipeline.run(inputs, targets)
            if self.ties_across_stages:
                sum_tied_gradients(self.models, self.tied_peer, self.mesh.get_group("pp"))
        else:
            (model,) = self.models
            assert isinstance(model, FSDPModule)
            micro_batches = zip(*(tensor.split(self.layout.mbs) for tensor in (inputs, targets)), strict=True)  # type: ignore[no-untyped-call]
            for i, (micro_inputs, micro_targets) in enumerate(micro_batches):
                is_last = i == self.layout.gas - 1
                microbatch_options = {"is_last": is_last, "overlap": self.layout.dp_overlap == "on"}
                begin_microbatch(model, self.layout.zero_stage, **microbatch_options)
                loss = model(micro_inputs, micro_targets) / num_losses(self.layout)
                loss.backward()
                end_microbatch(model, self.layout.zero_stage, **microbatch_options)
                losses.append(loss.detach())
                self.after_microbatch()
        sum_whole_gradients(self.params.items(), self.cuts, self.tp_ranks)
        sum_copied_gradients(self.params.items(), self.cuts, self.kv_group)
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.device))

    def update(self, loss_summand: Tensor) -> Tensor:
        """Clips by the norm of the whole gradient, updates the parameters, and clears the gradients.

        It needs one all-reduce of two fp64 numbers over all ranks. `loss_summand` is what `accumulate` returned.

        Returns:
            The mean loss of the global batch, the same on all ranks.
        """
        grads = {name: p.grad.detach() for name, p in self.params.items() if p.grad is not None}
        local_grads = {name: own_values(grad, self.parts[name]) for name, grad in grads.items()}
        nonempty_grads = {name: grad for name, grad in local_grads.items() if grad.numel()}
        loss_and_squared_norm = torch.zeros(2, dtype=torch.float64, device=self.device)
        loss_and_squared_norm[0] = loss_summand / self.layout.tp
        # These functions take all parameters in a few kernels, as torch.nn.utils.clip_grad_norm_ does.
        grad_norms = foreach_norm([*nonempty_grads.values()])
        foreach_mul_(grad_norms, [self.grad_norm_weights[name] ** 0.5 for name in nonempty_grads])
        loss_and_squared_norm[1] = torch.stack(grad_norms).double().square().sum()
        dist.all_reduce(loss_and_squared_norm)
        self.gradient_norm = loss_and_squared_norm[1].sqrt()
        clip_scale = clip_factor(self.gradient_norm, self.clip_norm)
        foreach_mul_([*nonempty_grads.values()], clip_scale.to(grad_norms[0].dtype))
        for name, grad in nonempty_grads.items():
            self.shards[name].grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        for param in self.params.values():
            param.grad = None
        if self.spec.shape.num_experts and self.spec.kernel.routing == LEARNED_ROUTING:
            update_router_biases(self.models, self.spec.shape)
        return loss_and_squared_norm[0]
