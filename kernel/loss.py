"""Head and cross-entropy in one function, over chunks of tokens, so that not all logits exist at once.

With T tokens, the loss is the mean over t of log(sum_v exp(l_tv)) - l_t,target, and its gradient with respect
to the logits is (softmax(l) - onehot) / T. Forward computes the logits of a chunk, turns them in place into
that gradient, multiplies it into both gradients of the head, and frees it. This costs the same three matrix
products as the plain head, but holds at most MAX_CHUNK_LOGITS logits at a time where the plain head keeps T*V. The
gradients of the weights from several chunks are added in at least fp32.

Under tensor parallelism a rank holds V/tp rows of the head, and each softmax over at most MAX_SOFTMAX_LOGITS logits
needs two all-reduces over tp: of a maximum and of two sums for each of its tokens. Rows that only pad the vocabulary
have no share in any softmax, so that they get no gradient and give none.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

MAX_CHUNK_LOGITS = 2**29
"""Largest number of logits in a chunk: 4096 tokens with a vocabulary of 131072, 1 GiB in bf16.

Each chunk beyond the first adds V*H numbers to a sum in fp32, so that chunks are larger than parts of a softmax. Two
layers of Llama 3.1 8B and 4096 tokens in bf16 peak 0.8 GiB higher in a dry run with 2**27 for both, because of that
sum, and 1.5 GiB higher with 2**29 for both.
"""
MAX_SOFTMAX_LOGITS = 2**27
"""Largest number of logits whose softmax is computed at a time, 1 GiB in two copies of fp32."""


def logits_to_gradient(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Overwrites `logits` with the gradient of the sum of the losses of their tokens; returns that sum."""
    wide_dtype = torch.promote_types(logits.dtype, torch.float32)
    is_local = (targets >= 0) & (targets < logits.shape[1])
    target_index = targets.where(is_local, 0)[:, None]
    log_p = torch.log_softmax(logits, 1, dtype=wide_dtype)
    if group is None:
        loss_sum = -log_p.gather(1, target_index).sum()
    else:
        # First the log of the sum of this rank's exponentials, then that of all ranks.
        local_log_sum = logits[:, 0].to(wide_dtype) - log_p[:, 0]
        max_log_sum = local_log_sum.clone()
        dist.all_reduce(max_log_sum, dist.ReduceOp.MAX, group)
        target_logit = logits.gather(1, target_index)[:, 0].to(wide_dtype)
        exp_and_logit = (local_log_sum - max_log_sum).exp(), (target_logit - max_log_sum) * is_local
        sums_over_ranks = torch.stack(exp_and_logit)
        dist.all_reduce(sums_over_ranks, group=group)
        log_sum = sums_over_ranks[0].log()
        log_p += (local_log_sum - max_log_sum - log_sum)[:, None]
        loss_sum = (log_sum - sums_over_ranks[1]).sum()
    target_grad = log_p.gather(1, target_index).exp() - is_local[:, None].to(wide_dtype)
    torch.exp(log_p, out=logits)
    logits.scatter_(1, target_index, target_grad.to(logits.dtype))
    return loss_sum


def mask_padding(logits: Tensor, num_tokens: int) -> None:
    """Overwrites the columns of `logits` from `num_tokens` on, which stand for no token, so that their softmax is 0.

    Their value is finite: a rank that has padding only would compute NaN from the log of a sum that is 0.
    """
    logits[:, num_tokens:] = torch.finfo(logits.dtype).min


ToGradient = Callable[[Tensor, Tensor, dist.ProcessGroup | None], Tensor]
"""A function that does the same as `logits_to_gradient`."""


@dataclass(slots=True)
class HeadGradient:
    """The gradient of the head's weights, summed over the micro-batches whose backward has not begun.

    A schedule that runs all forwards first would otherwise keep gas times V*H elements. The first backward takes
    the whole sum, so that all these losses must have the same weight. Other schedules have one such micro-batch at
    the head, and need none; zbv could not take it, since its split backward asks for each gradient twice.
    """

    grad_sum: Tensor | None = None
    """The sum, V x H; None before the first forward, and after the backward that took it."""


def head_loss(
    x_BSH: Tensor,
    weight_VH: Tensor,
    targets_BS: Tensor,
    shared_gradient: HeadGradient | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    to_gradient: ToGradient = logits_to_gradient,
    loss_weight: float = 1.0,
) -> Tensor:
    """The mean loss over the tokens of a micro-batch, in at least fp32.

    If the ranks of `group` share the vocabulary, each of them has all tokens and a part of the gradient of x.

    Args:
        shared_gradient: where the gradient of the weights is added up over micro-batches; None if it is not.
        group: the ranks of tp that share the vocabulary; None if this rank holds it whole.
        vocab_size: number of rows of the head on all these ranks that stand for a token; None if all do.
        to_gradient: `logits_to_gradient`, or that function compiled.
        loss_weight: what the loss is multiplied by, before a shared gradient is added up.
    """
    x_TH, targets_T = x_BSH.flatten(0, 1), targets_BS.flatten()
    head_options = shared_gradient, group, vocab_size, to_gradient, loss_weight
    loss: Tensor = _HeadLoss.apply(x_TH, weight_VH, targets_T, *head_options)  # type: ignore[no-untyped-call]
    return loss


def _add_gradients(grad_sum: Tensor | None, new_grad: Tensor) -> Tensor:
    """The sum of gradients, in at least fp32 from the second summand on, since bf16 loses small ones."""
    if grad_sum is None:
        return new_grad
    return grad_sum.to(torch.promote_types(new_grad.dtype, torch.float32)).add_(new_grad)


class _HeadLoss(torch.autograd.Function):
    """`head_loss` for flattened tokens; forward computes both gradients, and backward only scales them."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        shared_gradient: HeadGradient | None,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
        to_gradient: ToGradient,
        loss_weight: float,
    ) -> Tensor:
        num_tokens, num_rows = len(x_TH), len(weight_VH)
        first_row = 0 if group is None else group.rank() * num_rows
        num_token_rows = num_rows if vocab_size is None else min(max(vocab_size - first_row, 0), num_rows)
        loss = x_TH.new_zeros((), dtype=torch.promote_types(x_TH.dtype, torch.float32))
        grad_x = torch.empty_like(x_TH)
        grad_weight = None if shared_gradient is None else shared_gradient.grad_sum
        targets_T = targets_T - first_row
        chunk_tokens, softmax_tokens = (max(1, n // num_rows) for n in (MAX_CHUNK_LOGITS, MAX_SOFTMAX_LOGITS))
        chunks = (tensor.split(chunk_tokens) for tensor in (x_TH, targets_T, grad_x))  # type: ignore[no-untyped-call]
        for chunk_x, chunk_targets, chunk_grad in zip(*chunks, strict=True):
            logits = chunk_x @ weight_VH.t()
            if num_token_rows < num_rows:
                mask_padding(logits, num_token_rows)
            softmax_parts = (tensor.split(softmax_tokens) for tensor in (logits, chunk_targets))
            for part_logits, part_targets in zip(*softmax_parts, strict=True):
                loss += to_gradient(part_logits, part_targets, group)
            if loss_weight != 1:
                logits *= loss_weight
            torch.mm(logits, weight_VH, out=chunk_grad)
            grad_weight = _add_gradients(grad_weight, logits.t() @ chunk_x)
        if shared_gradient is not None:
            shared_gradient.grad_sum, grad_weight = grad_weight, None
        ctx.num_tokens, ctx.dtype, ctx.shared_gradient = num_tokens, x_TH.dtype, shared_gradient
        ctx.save_for_backward(grad_x, grad_weight)
        return loss * (loss_weight / num_tokens) if loss_weight != 1 else loss / num_tokens

    @staticmethod
    def backward(ctx, grad_loss: Tensor):  # type: ignore[no-untyped-def]
        grad_x, grad_weight = ctx.saved_tensors
        if ctx.shared_gradient is not None:
            grad_weight, ctx.shared_gradient.grad_sum = ctx.shared_gradient.grad_sum, None
        # A factor with one dim makes torch multiply in fp32; a 0-dim factor would be rounded to bf16 first. The
        # products are new tensors, since a split backward pass calls this twice.
        grad_scale = (grad_loss / ctx.num_tokens)[None]
        scaled_grads = (
            None if grad is None else torch.mul(grad, grad_scale, out=torch.empty_like(grad, dtype=ctx.dtype))
            for grad in (grad_x, grad_weight)
        )
        return *scaled_grads, *[None] * 6
