"""Faults by which an option is ignored: training is correct or nearly so."""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.parity.fault import changed, planted
from ultrabench.kernel import dp, moe, pp, step


@planted(step, "apply_recompute", ignored="full")
def no_recompute(right, *_):
    """Layers keep everything."""


@planted(step, "apply_recompute", ignored="selective")
def full_for_selective(right, decoder, layout):
    """Layers keep only their input, whatever is asked for."""
    right(decoder, replace(layout, recompute="full"))


@planted(pp, "SCHEDULE_CLASSES", ignored="pp=2 gas=2")
def other_schedule(right):
    """Under 1f1b all forwards run first."""
    return right | {"1f1b": right["afab"]}


@planted(step, "stages_by_rank", ignored="pp=2 gas=2 pp_layout=1-3")
def cut_by_cost(right, shape, layout):
    """Stages are cut by cost, whatever is asked for."""
    return right(shape, replace(layout, pp_layout="cost"))


@planted(step, "apply_dp", ignored="zero_stage=3")
def gathered_parameters(right, decoder, mesh, zero_stage, *rest):
    """Parameters stay gathered after forward."""
    right(decoder, mesh, 1, *rest)


@planted(step, "apply_dp", ignored="dp=4 zero_stage=1 dp_shard=2 gas=2")
def shards_everywhere(right, decoder, mesh, *args):
    """All ranks of dp share the parameters, where dp_shard says how many do."""
    names = ("dp_replicate", "dp_shard")
    right(decoder, init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=names), *args)


@planted(step, "begin_microbatch", ignored="dp=2 zero_stage=2 gas=2")
def zero2_as_1(right, decoder, zero_stage, **options):
    """Gradients are reduced in the last micro-batch only."""
    right(decoder, min(zero_stage, 1), **options)


@planted(step, "TensorParallel", ignored="tp=2 sequence_parallel=off")
def shared_tokens(right, group, _, fp8):
    """The ranks of tp share the tokens, whatever is asked for."""
    return right(group, True, fp8)


@planted(step, "begin_microbatch", ignored="dp=2 zero_stage=1 gas=2 dp_overlap=off")
def overlapped(right, decoder, zero_stage, *, is_last, overlap):
    """Backward reduces gradients, whatever is asked for."""
    right(decoder, zero_stage, is_last=is_last, overlap=True)


@planted(step, "apply_dp", ignored="gas=1 bf16")
def no_bf16(right, decoder, mesh, zero_stage, precision, experts):
    """Layers compute in the precision of the optimizer."""
    right(decoder, mesh, zero_stage, "fp32", experts)


@planted(step, "apply_compile", ignored="compile")
def no_compile(right, decoder, _):
    """Layers are marked as compiled, but torch compiles nothing."""
    for layer in decoder.layers.values():
        layer.forward = torch.compiler.disable(layer.forward)


@planted(step, "apply_attention", ignored="gas=1")
def any_attention(right, *_):
    """Torch chooses the implementation of attention."""


@planted(step, "apply_attention", ignored="gas=1")
def plain_attention(right, decoder, _, *args):
    """The plain implementation of attention runs, which keeps all scores."""
    right(decoder, "math", *args)


@planted(step, "apply_attention", ignored="cp=2 cp_exchange=allgather")
def ring_for_gather(right, decoder, chosen, group, _):
    """Keys and values travel in a ring, whatever is asked for."""
    right(decoder, chosen, group, "ring")


@planted(step, "make_batch", ignored="gas=4")
def half_the_micro_batches(right, indices, *args):
    """Half of the samples train, and each of them reduces gradients."""
    begin = step.begin_microbatch
    step.begin_microbatch = lambda decoder, zero_stage, **_: begin(
        decoder, zero_stage, is_last=True, overlap=True
    )
    return right(indices[: len(indices) // 2], *args)


@planted(step, "apply_compile", ignored="compile")
def one_compiled_layer(right, decoder, backend):
    """Only the first layer of a stage is compiled."""
    first = next(iter(decoder.layers.values()))
    first.forward = torch.compile(first.forward, backend=backend, fullgraph=True)


@planted(dp, "MixedPrecisionPolicy", ignored="dp=2 bf16")
def forgotten_reduce_dtype(right, **dtypes):
    """Gradients are reduced and added up in the precision of the products."""
    return right(param_dtype=dtypes.get("param_dtype"))


def rounded_after(update, trainer, loss, tensors):
    """An update after which some tensors have been rounded to bf16."""
    out = update(trainer, loss)
    for tensor in tensors(trainer):
        tensor.copy_(tensor.bfloat16())
    return out


@planted(step.TrainStep, "update", ignored="gas=1 bf16")
def rounded_masters(right, self, loss):
    """The parameters that the optimizer updates are rounded to bf16."""
    return rounded_after(right, self, loss, lambda trainer: trainer.shards.values())


@planted(step.TrainStep, "update", ignored="gas=1 bf16")
def rounded_moments(right, self, loss):
    """The first moments of AdamW are rounded to bf16."""
    states = self.optimizer.state
    return rounded_after(right, self, loss, lambda _: [state["exp_avg"] for state in states.values()])


@planted(step, "initialise", ignored="gas=1 fp32")
def tf32(right, *args):
    """Products of fp32 numbers are rounded to TF32 where the device can."""
    torch.set_float32_matmul_precision("high")
    right(*args)


@planted(step, "torch", ignored="gas=1")
def unfused_optimizer(right):
    """AdamW launches several kernels for each operation."""
    return changed(
        right, optim=changed(right.optim, AdamW=lambda *args, fused, **kw: right.optim.AdamW(*args, **kw))
    )


def rounded_gradients(trainer, is_rounded):
    """Rounds the gradients of some parameters to bf16."""
    for name, param in trainer.params.items():
        if param.grad is not None and is_rounded(name):
            grad = param.grad.to_local()
            grad.copy_(grad.bfloat16())


@planted(step.TrainStep, "accumulate", ignored="dp=2 gas=2 bf16")
def narrow_head_gradient(right, self, *batch):
    """The gradient of the head is reduced in bf16."""
    loss = right(self, *batch)
    rounded_gradients(self, lambda name: name == "head.weight")
    return loss


@planted(step.TrainStep, "accumulate", ignored="tp=2 gas=2 bf16")
def narrow_whole_sums(right, self, *batch):
    """Gradients of norms are summed over tp in bf16."""
    loss = right(self, *batch)
    rounded_gradients(self, lambda name: self.cuts[name].dim is None)
    return loss


@planted(step.TrainStep, "accumulate", ignored="tp=2 gas=2 uneven bf16")
def narrow_copied_sums(right, self, *batch):
    """Gradients of copies of key/value heads are summed in bf16."""
    loss = right(self, *batch)
    rounded_gradients(self, lambda name: bool(self.cuts[name].num_heads))
    return loss


@planted(step.TrainStep, "accumulate", ignored="dp=2 gas=2 moe bf16")
def narrow_expert_gradients(right, self, *batch):
    """Gradients of experts are reduced in bf16."""
    loss = right(self, *batch)
    rounded_gradients(self, lambda name: ".experts." in name)
    return loss


@planted(moe.SparseFeedForward, "scores_of", ignored="dp=2 ep=2 moe bf16")
def narrow_scores(right, self, logits):
    """The scores of experts are computed in the precision of the products."""
    return logits.sigmoid() if self.sizes.scoring_func == "sigmoid" else logits.softmax(-1)
