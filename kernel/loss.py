"""Head and cross-entropy in one function, over chunks of tokens, so that not all logits exist at once.

With T tokens, the loss is the mean over t of log(sum_v exp(l_tv)) - l_t,target, and its gradient with respect
to the logits is (softmax(l) - onehot) / T. Forward computes the logits of a chunk, turns them in place into
that gradient, multiplies it into both gradients of the head, and frees it. This costs the same three matrix
products as the plain head, but holds at most LOGITS logits at a time where the plain head keeps T*V.

Under tensor parallelism a rank holds V/tp rows of the head, and each chunk needs two all-reduces over tp: of
T maxima and of 2*T sums.
"""

import torch
import torch.distributed as dist
from torch import Tensor

LOGITS = 2**28
"""Largest number of logits in a chunk: 2048 tokens with a vocabulary of 131072, 1.5 GiB in bf16 and fp32."""


def head_loss(
    x_BSH: Tensor, weight_VH: Tensor, targets_BS: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The mean loss over the tokens of a micro-batch, in at least fp32.

    If the ranks of `group` share the vocabulary, each of them has all tokens and a part of the gradient of x.
    """
    first = 0 if group is None else group.rank() * weight_VH.shape[0]
    x_TH, targets_T = x_BSH.flatten(0, 1), targets_BS.flatten()
    loss: Tensor = _HeadLoss.apply(x_TH, weight_VH, targets_T, group, first)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, group: dist.ProcessGroup | None, first: int
    ) -> Tensor:
        tokens, wide = x_TH.shape[0], torch.promote_types(x_TH.dtype, torch.float32)
        grad_x, grad_weight = torch.empty_like(x_TH), torch.zeros_like(weight_VH)
        loss = torch.zeros((), dtype=wide, device=x_TH.device)
        rows = max(1, LOGITS // weight_VH.shape[0])
        for x, targets, into in zip(x_TH.split(rows), targets_T.split(rows), grad_x.split(rows), strict=True):  # type: ignore[no-untyped-call]
            logits = x @ weight_VH.t()
            loss += _to_gradient(logits, targets - first, group)
            torch.mm(logits, weight_VH, out=into)
            grad_weight.addmm_(logits.t(), x)
        ctx.tokens = tokens
        ctx.save_for_backward(grad_x, grad_weight)
        return loss / tokens

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        # This is not done in place, since a split backward pass calls it twice.
        grad_x, grad_weight = (t * (grad / ctx.tokens).to(t.dtype) for t in ctx.saved_tensors)
        return grad_x, grad_weight, None, None, None


def _to_gradient(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of the losses of a chunk; overwrites `logits` with the gradient of that sum."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    here = (targets >= 0) & (targets < logits.shape[1])
    index = targets.where(here, 0)[:, None]
    log_p = torch.log_softmax(logits, 1, dtype=wide)
    if group is None:
        loss = -log_p.gather(1, index).sum()
    else:
        # First the log of the sum of this rank's exponentials, then that of all ranks.
        own = logits[:, 0].to(wide) - log_p[:, 0]
        highest = own.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        target = logits.gather(1, index)[:, 0].to(wide)
        sums = torch.stack(((own - highest).exp(), (target - highest) * here))
        dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        log_p += (own - highest - log_total)[:, None]
        loss = (log_total - sums[1]).sum()
    torch.exp(log_p, out=logits)
    logits.scatter_add_(1, index, -here.to(logits.dtype)[:, None])
    return loss
