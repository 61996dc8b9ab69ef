"""Faults of whole training steps on GPUs, whose streams or host wait too seldom, too often or in the wrong place."""

import torch
import torch.distributed as dist

from tests.parity.fault import changed, planted
from ultrabench.kernel import cp, ep, moe, step, tp

SHARDS = "test_training_on_a_gpu.test_shards_are_gathered_and_reduced_beside_products"
TOKENS = "test_training_on_a_gpu.test_tokens_are_exchanged_beside_products_in_backward_only"
RING = "test_training_on_a_gpu.test_a_ring_sends_and_waits_without_the_host"
ROUTERS = "test_training_on_a_gpu.test_routers_are_read_once_in_forward_and_never_in_backward"


# Waits of streams that are lost.


@planted(tp, "wait", unit=TOKENS)
def unawaited_tokens(right, tensor):
    """Tokens of other ranks are read before they have arrived."""
    return tensor


@planted(cp.RingTransfer, "wait", unit=RING)
def unawaited_keys(right, self):
    """Keys and values of the rank before are read before they have arrived."""
    return self._receive_buffer


@planted(ep, "wait", unit=ROUTERS)
def unawaited_rows(right, tensor):
    """Rows of other ranks are read before they have arrived."""
    return tensor


@planted(tp, "dist", unit=TOKENS)
def unawaited_norms(right):
    """Sums over tp of the gradients of norms are read while they are under way."""

    def all_reduce(tensor, group):
        dist.all_reduce(tensor, group=group, async_op=True)

    return changed(right, all_reduce=all_reduce)


@planted(step.TrainStep, "update", unit=f"{SHARDS}, {TOKENS}")
def optimizer_beside_backward(right, self, loss_summand):
    """The optimizer runs on a stream of its own, which does not wait for the gradients."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return right(self, loss_summand)


# Waits of the host that a step does not need.


@planted(step.TrainStep, "accumulate", unit=f"{SHARDS}, {RING}")
def loss_read_in_a_step(right, self, inputs, targets):
    """The host reads the loss before it launches the optimizer."""
    loss = right(self, inputs, targets)
    float(loss)
    return loss


@planted(step, "clip_factor", unit=SHARDS)
def clipped_on_the_host(right, gradient_norm, max_norm):
    """The host reads the norm of the gradient and decides whether it clips."""
    return right(gradient_norm, max_norm) if gradient_norm > max_norm else torch.ones_like(gradient_norm)


@planted(step, "end_microbatch", unit=f"{SHARDS}, {TOKENS}")
def finished_micro_batches(right, model, zero_stage, **options):
    """The host waits for the GPU after each micro-batch."""
    right(model, zero_stage, **options)
    torch.cuda.synchronize()


@planted(moe._CountTokens, "backward", unit=ROUTERS)
def counts_read_in_backward(right, ctx, grad_scores):
    """Backward counts the tokens of experts by a function that reads the largest index back."""
    (experts_Tk,) = ctx.saved_tensors
    ctx.token_counts.add_(torch.bincount(experts_Tk.flatten(), minlength=len(ctx.token_counts)))
    return grad_scores, None, None


@planted(ep.ExpertParallel, "learned_route", unit=ROUTERS)
def chosen_experts_read(right, self, num_experts, experts_Tk):
    """The host reads the experts of all tokens besides their numbers."""
    experts_Tk.tolist()
    return right(self, num_experts, experts_Tk)


# Memory.


@planted(step.TrainStep, "update", unit=f"{SHARDS}, {ROUTERS}")
def cache_emptied_by_the_optimizer(right, self, loss_summand):
    """Memory that backward no longer needs goes back to the driver before the optimizer takes it."""
    torch.cuda.empty_cache()
    return right(self, loss_summand)


@planted(step.TrainStep, "batch", unit=SHARDS)
def peak_reset_by_data(right, self, step_number):
    """The peak is reset when the data of a step are made."""
    torch.cuda.reset_peak_memory_stats()
    return right(self, step_number)


@planted(step.TrainStep, "accumulate", unit=TOKENS)
def kept_micro_batches(right, self, inputs, targets):
    """A step keeps a copy of the gradients that backward made."""
    loss = right(self, inputs, targets)
    self.copies = [p.grad.clone() for p in self.params.values() if p.grad is not None]
    return loss


@planted(step, "make_batch", unit=SHARDS)
def data_on_the_first_gpu(right, indices, number, workload, vocab_size, device, *args):
    """The data of all ranks are made on GPU 0."""
    return right(indices, number, workload, vocab_size, torch.device(device.type, 0), *args)


# Work and messages.


@planted(tp, "_input_gradient", unit=TOKENS)
def wide_input_gradients(right, tp_ranks, grads, weights):
    """Gradients of what products get are computed in fp32."""
    wide_grads, wide_weights = ([t.float() for t in tensors] for tensors in (grads, weights))
    return right(tp_ranks, wide_grads, wide_weights).to(grads[0].dtype)


@planted(tp, "_weight_gradients", unit=TOKENS)
def weight_gradients_twice(right, tp_ranks, grads, x):
    """Gradients of weights are computed twice."""
    right(tp_ranks, grads, x)
    return right(tp_ranks, grads, x)


@planted(tp.TensorParallel, "scatter", unit=TOKENS)
def exposed_sums(right, self, x):
    """Sums over tp are waited for where they begin, not where they are needed."""
    result = right(self, x)()
    return lambda: result
