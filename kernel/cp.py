"""Context parallelism: a ring of ranks, each of which holds two chunks of every sequence.

A sequence has 2*cp chunks. Rank r holds the r-th chunk and the r-th from the end, so that all ranks have the
same work under the causal mask (zig-zag; arXiv 2310.01889 for the ring). Keys and values travel round the
ring, and rank r attends to those of rank j as follows:

    j == r  all queries, with the causal mask, since the two chunks are in order
    j <  r  all queries, but only to the earlier chunk of j
    j >  r  only the later queries, to both chunks of j

Softmax over parts: let l_j be the log of the sum of exponentials of part j (shape B x N x S), and o_j its
output. Then l = log sum_j exp(l_j) and out = sum_j o_j exp(l_j - l). The backward of a part is that of flash
attention with `out` and `l` of all parts (arXiv 2307.08691, section 3.1.2).

For each layer and micro-batch a rank sends 2*B*K*S/cp*D elements cp-1 times in forward. In backward it sends
the same again, and also the gradients of these elements cp times.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel.compat import flash_backward, flash_forward
from ultrabench.kernel.model import Attention, Decoder


def spans(seq_len: int, cp: int, rank: int) -> tuple[range, ...]:
    """The positions of a sequence that a rank of the ring holds."""
    if cp == 1:
        return (range(seq_len),)
    size = seq_len // (2 * cp)
    return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * cp - 1 - rank))


def take(tokens_BS: Tensor, own: Sequence[range]) -> Tensor:
    """The tokens at the positions `own`, copied, since the pipeline of torch 2.11 rejects strides of a view."""
    return torch.cat([tokens_BS[:, span.start : span.stop] for span in own], dim=1)


def apply_cp(model: Decoder, group: dist.ProcessGroup | None) -> None:
    """Makes every layer of `model` attend around the ring `group`; does nothing if `group` is None."""
    if group is None:
        return
    for layer in model.layers.values():
        attention = layer.attention
        assert isinstance(attention, Attention)
        attention.core = partial(ring_attention, group)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def ring_attention(group: dist.ProcessGroup, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """The attention of this rank's queries to their own and all earlier positions, B x N x S/cp x D."""
    out: Tensor = _RingAttention.apply(q_BNSD, k_BKSD, v_BKSD, group)  # type: ignore[no-untyped-call]
    return out


class Passing:
    """A tensor that is being sent to the next rank while the tensor of the previous rank arrives."""

    def __init__(self, tensor: Tensor, arriving: Tensor, group: dist.ProcessGroup | None) -> None:
        ring = dist.get_process_group_ranks(group)
        at = ring.index(dist.get_rank())
        self._sent, self._arriving = tensor, arriving
        send = dist.P2POp(dist.isend, tensor, ring[(at + 1) % len(ring)], group)
        receive = dist.P2POp(dist.irecv, arriving, ring[at - 1], group)
        self._works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Waits for the tensor of the previous rank and returns it."""
        for work in self._works:
            work.wait()
        return self._arriving


def _meet(rank: int, other: int, seq: int) -> tuple[slice, slice, bool]:
    """The queries of `rank`, the keys of `other` that they attend to, and whether the causal mask applies."""
    whole, half = slice(None), seq // 2
    if other == rank:
        return whole, whole, True
    return (whole, slice(half), False) if other < rank else (slice(half, None), whole, False)


def _turns(pair: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[Tensor, slice, slice, bool]]:
    """Sends keys and values round the ring; yields those of each rank with what `_meet` says of them."""
    for turn in range(group.size()):
        passing = Passing(pair, torch.empty_like(pair), group) if turn < group.size() - 1 else None
        yield pair, *_meet(group.rank(), (group.rank() - turn) % group.size(), pair.shape[3])
        if passing is not None:
            pair = passing.wait()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        total = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        for pair, own, theirs, causal in _turns(torch.stack((k, v)), group):
            part, log_sum = flash_forward(q[:, :, own], *pair[:, :, :, theirs], causal=causal)
            before = total[:, :, own]
            now = torch.logaddexp(before, log_sum.to(wide))
            out[:, :, own] *= (before - now).exp()[..., None]
            out[:, :, own] += part * (log_sum - now).exp()[..., None]
            total[:, :, own] = now
        ctx.group = group
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        q, k, v, out, total = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        # The gradients of keys and values travel with them, and the last turn brings them to their rank.
        grad_pair = torch.zeros((2, *k.shape), dtype=wide, device=q.device)
        homing: Passing | None = None
        for pair, own, theirs, causal in _turns(torch.stack((k, v)), ctx.group):
            mine = (t[:, :, own] for t in (grad, q, out, total))
            dq, dk, dv = flash_backward(*mine, *pair[:, :, :, theirs], causal=causal)
            arrived = grad_pair if homing is None else homing.wait()
            arrived[0, :, :, theirs] += dk
            arrived[1, :, :, theirs] += dv
            grad_q[:, :, own] += dq
            homing = Passing(arrived, torch.empty_like(arrived), ctx.group)
        assert homing is not None
        grad_k, grad_v = homing.wait().to(q.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None
