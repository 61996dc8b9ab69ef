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

For each layer and micro-batch a rank sends 2*B*K*S/cp*D elements cp-1 times in forward (of latent attention the widths
of a head's keys and values add up to its 2*D). In backward it sends
the same again, and also the gradients of these elements cp times.

With cp_exchange=allgather nothing travels beside attention: one all-gather before it brings the keys and values of
all ranks, in forward and in backward, and one reduce-scatter after its backward sums their gradients. The parts are
the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel.compat import (
    all_gather,
    attention_backward,
    attention_forward,
    process_group,
    reduce_scatter,
    wait,
)
from ultrabench.kernel.compile import as_operator


def local_positions(seq_len: int, cp: int, cp_rank: int) -> tuple[range, ...]:
    """The positions of a sequence that rank `cp_rank` of the ring holds."""
    if cp == 1:
        return (range(seq_len),)
    chunk_len = seq_len // (2 * cp)
    return tuple(range(i * chunk_len, (i + 1) * chunk_len) for i in (cp_rank, 2 * cp - 1 - cp_rank))


def tokens_at(tokens_BS: Tensor, positions: Sequence[range]) -> Tensor:
    """The tokens at the positions of `positions`, copied, since the pipeline of torch 2.11 rejects
    strides of a view.
    """
    return torch.cat([tokens_BS[:, chunk.start : chunk.stop] for chunk in positions], dim=1)


def ring_attention(
    group_name: str, cp_exchange: str, backend: str, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor
) -> Tensor:
    """The attention of this rank's queries to their own and all earlier positions, B x N x S/cp x D.

    `cp_exchange` is that of the layout, ring or allgather; `backend` names the implementation of attention.
    """
    out: Tensor = _RingAttention.apply(q_BNSD, k_BKSD, v_BKSD, group_name, cp_exchange, backend)  # type: ignore[no-untyped-call]
    return out


class RingTransfer:
    """A tensor that is being sent to the next rank while the tensor of the previous rank arrives."""

    def __init__(self, sent_tensor: Tensor, receive_buffer: Tensor, group: dist.ProcessGroup | None) -> None:
        ranks = dist.get_process_group_ranks(group)
        ring_position = ranks.index(dist.get_rank())
        self._sent_tensor, self._receive_buffer = sent_tensor, receive_buffer
        send_op = dist.P2POp(dist.isend, sent_tensor, ranks[(ring_position + 1) % len(ranks)], group)
        receive_op = dist.P2POp(dist.irecv, receive_buffer, ranks[ring_position - 1], group)
        self._works = dist.batch_isend_irecv([send_op, receive_op])

    def wait(self) -> Tensor:
        """Waits for the tensor of the previous rank, and returns it."""
        for work in self._works:
            work.wait()
        return self._receive_buffer


def _attended_slices(rank: int, other_rank: int, local_seq_len: int) -> tuple[slice, slice, bool]:
    """The queries of `rank`, the keys of `other_rank` they attend to, and whether the mask is causal.

    `local_seq_len` is the number of tokens of a sequence on each rank.
    """
    all_tokens, half_len = slice(None), local_seq_len // 2
    if other_rank < rank:
        return all_tokens, slice(half_len), False
    return slice(half_len, None) if other_rank > rank else all_tokens, all_tokens, other_rank == rank


def _visits(
    kv: Tensor, local_seq_len: int, group: dist.ProcessGroup, cp_exchange: str
) -> Iterator[tuple[Tensor, slice, slice, bool]]:
    """Yields the packed keys and values of each rank, this one's first, then the three values of `_attended_slices`."""
    rank, num_ranks, kv_by_rank = group.rank(), group.size(), None
    if cp_exchange == "allgather":
        kv_by_rank = wait(all_gather(kv, group)).unflatten(0, (num_ranks, -1))  # type: ignore[no-untyped-call]
    for turn in range(num_ranks):
        source_rank, transfer = (rank - turn) % num_ranks, None
        if kv_by_rank is not None:
            kv = kv_by_rank[source_rank]
        elif turn < num_ranks - 1:
            transfer = RingTransfer(kv, torch.empty_like(kv), group)
        yield kv, *_attended_slices(rank, source_rank, local_seq_len)
        if transfer is not None:
            kv = transfer.wait()


def _pack_kv(k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """Keys and values in one tensor of one dim to send, each in the order B, S, K, D, which attention need not copy."""
    return torch.cat([tensor.transpose(1, 2).flatten() for tensor in (k_BKSD, v_BKSD)])


def _unpack_kv(kv: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and the values in what `_pack_kv` makes of tensors that have the shapes of k and v, as views."""
    k, v = torch.split(kv, [k_BKSD.numel(), v_BKSD.numel()])
    return k.view_as(k_BKSD.transpose(1, 2)).transpose(1, 2), v.view_as(v_BKSD.transpose(1, 2)).transpose(
        1, 2
    )


def empty_output(q_BNSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """Memory for the output of attention, in the order B, S, N, D."""
    batch_size, num_heads, seq_len, _ = q_BNSD.shape
    return q_BNSD.new_empty(batch_size, seq_len, num_heads, v_BKSD.shape[-1]).transpose(1, 2)


def _empty_ring_results(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    return empty_output(q, v), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@as_operator(_empty_ring_results)
def _ring_forward(
    q: Tensor, k: Tensor, v: Tensor, group_name: str, cp_exchange: str, backend: str
) -> tuple[Tensor, Tensor]:
    """The output of attention over all parts, B x N x S x D, and the log of its softmax sums, B x N x S."""
    out, log_sum, group = torch.empty(0), torch.empty(0), process_group(group_name)
    for kv, query_slice, key_slice, causal in _visits(_pack_kv(k, v), k.shape[2], group, cp_exchange):
        keys, values = (tensor[:, :, key_slice] for tensor in _unpack_kv(kv, k, v))
        part_out, part_log_sum = attention_forward(backend, q[:, :, query_slice], keys, values, causal=causal)
        if causal:  # the first part, which is the rank's own; recomputation may keep what attention returned
            wide_dtype = torch.promote_types(q.dtype, torch.float32)
            out, log_sum = part_out.to(wide_dtype, copy=True), part_log_sum.to(wide_dtype, copy=True)
            continue
        old_log_sum = log_sum[:, :, query_slice]
        part_share = torch.sigmoid(part_log_sum - old_log_sum)[..., None]
        out[:, :, query_slice].lerp_(part_out.to(out.dtype), part_share)
        log_sum[:, :, query_slice] = torch.logaddexp(old_log_sum, part_log_sum)
    return out.to(q.dtype), log_sum.contiguous()


def _empty_ring_gradients(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(_pack_kv(k, v))


@as_operator(_empty_ring_gradients)
def _ring_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, group_name: str, cp_exchange: str,
    backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of q, and those of k and v packed as by `_pack_kv`.

    cp_exchange=ring: the gradients of a rank's keys and values travel behind these. Each rank adds its summand, and
    the last transfer brings the sum to the rank that owns them. cp_exchange=allgather: each rank adds its summands to
    one sum per owner, and a reduce-scatter adds these up over the ranks.
    """
    kv, group = _pack_kv(k, v), process_group(group_name)
    grad_q = torch.zeros_like(q, dtype=log_sum.dtype)
    num_kv_owners = 1 if cp_exchange == "ring" else group.size()
    grad_kv_sums, transfer = kv.new_zeros((num_kv_owners, *kv.shape), dtype=log_sum.dtype), None
    visits = _visits(kv, k.shape[2], group, cp_exchange)
    for turn, (visiting_kv, query_slice, key_slice, causal) in enumerate(visits):
        query_tensors = (t[:, :, query_slice] for t in (grad_out, q, out, log_sum))
        keys_and_values = (tensor[:, :, key_slice] for tensor in _unpack_kv(visiting_kv, k, v))
        dq, dk, dv = attention_backward(backend, *query_tensors, *keys_and_values, causal=causal)
        if transfer is not None:
            grad_kv_sums = transfer.wait()
        visiting_grad_k, visiting_grad_v = _unpack_kv(
            grad_kv_sums[(group.rank() - turn) % num_kv_owners], k, v
        )
        visiting_grad_k[:, :, key_slice] += dk
        visiting_grad_v[:, :, key_slice] += dv
        grad_q[:, :, query_slice] += dq
        if cp_exchange == "ring":
            transfer = RingTransfer(grad_kv_sums, torch.empty_like(grad_kv_sums), group)
    if transfer is None:
        return grad_q.to(q.dtype), wait(reduce_scatter(grad_kv_sums.flatten(), group)).to(q.dtype)
    return grad_q.to(q.dtype), transfer.wait()[0].to(q.dtype)


RING_FORWARD = torch.ops.ultrabench.ring_forward.default
"""The operator that runs `_ring_forward` in compiled layers; it returns the output and the log of the softmax sums."""


class _RingAttention(torch.autograd.Function):
    """`_ring_forward`, with `_ring_backward` as its backward."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, *ring_options: str) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.ring_options = ring_options
        out, log_sum = _ring_forward(q, k, v, *ctx.ring_options)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def]
        q, k, v, *results = ctx.saved_tensors  # recomputation gives them once
        grad_q, grad_kv = _ring_backward(grad_out, q, k, v, *results, *ctx.ring_options)
        return grad_q, *_unpack_kv(grad_kv, k, v), None, None, None
