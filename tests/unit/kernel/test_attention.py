"""Implementations of attention: they agree, are chosen by the device, and get tensors that they need not copy."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

from tests.configs import refused
from ultrabench.kernel import attention, cp, recompute
from ultrabench.kernel.compat import attention_backward, attention_forward
from ultrabench.kernel.dryrun.counts import ExecutedFlops
from ultrabench.kernel.model import causal_attention
from ultrabench.kernel_config import KernelConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")
B, S, N, K, D = 2, 16, 4, 2, 8


def heads(count):
    """Random values, B x count x S x D, in the memory order of a projection: B, S, count, D."""
    return torch.randn(B, S, count, D, dtype=torch.float64).transpose(1, 2).requires_grad_()


def test_math_and_flash_agree():
    """Output and all gradients, with grouped heads, in fp64."""
    torch.manual_seed(0)
    inputs, grad = [heads(count) for count in (N, K, K)], heads(N)
    math, flash = (attention.pinned_attention(chosen, *inputs) for chosen in ("math", "flash"))
    torch.testing.assert_close(math, flash, rtol=0, atol=1e-12)
    for exact, fast in zip(*(torch.autograd.grad(out, inputs, grad) for out in (math, flash)), strict=True):
        torch.testing.assert_close(exact, fast, rtol=0, atol=1e-12)


def test_parts_of_a_ring_are_merged_in_at_least_fp32():
    """Output and gradients are what fp64 makes of the same parts, rounded once; the last of four ranks attends to all.

    Its gradients of all keys and values are added up here, as if they had one owner.
    """
    torch.manual_seed(0)
    query, keys, values = (torch.randn(B, count, 4 * S, D).bfloat16() for count in (N, K, K))
    query, visits = query[:, :, -S:], [*zip(keys.split(S, 2), values.split(S, 2), strict=True)][::-1]
    parts = [attention_forward("flash", query, *visit, causal=n == 0) for n, visit in enumerate(visits)]
    sums = torch.stack([log_sum.double() for _, log_sum in parts])
    shares = (sums - sums.logsumexp(0))[..., None].exp()
    merged = sum(share * out.double() for share, (out, _) in zip(shares, parts, strict=True))

    def visits_in_turn(kv, seq_len, group, exchange):
        for n, visit in enumerate(visits):
            yield cp._pack_kv(*visit), slice(None), slice(None), n == 0

    lone_rank = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    lone = {"process_group": lambda _: lone_rank, "reduce_scatter": lambda sums, _: sums, "wait": lambda t: t}
    grad = torch.randn(query.shape).bfloat16()
    with mock.patch.multiple(cp, _visits=visits_in_turn, **lone):
        out, log_sum = cp._ring_forward(query, *visits[0], "group", "allgather", "flash")
        assert_rounded_once(out, merged)
        grads = cp._ring_backward(grad, query, *visits[0], out, log_sum, "group", "allgather", "flash")
    parts_grads = [
        attention_backward("flash", grad, query, out, log_sum, *visit, causal=n == 0)
        for n, visit in enumerate(visits)
    ]
    summed_q, *summed_kv = (sum(part.double() for part in kind) for kind in zip(*parts_grads, strict=True))
    assert_rounded_once(grads[0], summed_q)
    assert_rounded_once(grads[1], cp._pack_kv(*summed_kv))


def assert_rounded_once(rounded, exact):
    """Each number in bf16 is off by at most half a unit in the last place."""
    error = (rounded.double() - exact).abs() / exact.abs().clamp(min=2.0**-10)
    assert float(error.max()) <= 2**-8 * 1.01


@pytest.mark.parametrize(
    ("chosen", "precision", "head_width", "device", "has_cudnn", "runs"),
    [
        ("auto", "bf16", 128, CPU, True, "flash"), ("math", "fp32", 128, CPU, True, "math"),
        ("flash", "fp64", 128, CPU, True, "flash"), ("auto", "bf16", 128, GPU, True, "cudnn"),
        ("auto", "bf16", 128, GPU, False, "flash"), ("auto", "bf16", 256, GPU, True, "flash"),
        ("auto", "bf16", 100, GPU, True, "flash"), ("auto", "fp32", 128, GPU, True, "math"),
        ("flash", "bf16", 128, GPU, True, "flash"), ("cudnn", "bf16", 64, GPU, True, "cudnn"),
        ("cudnn", "bf16", 64, GPU, False, "cudnn"),
    ],
)  # fmt: skip
def test_what_runs(monkeypatch, chosen, precision, head_width, device, has_cudnn, runs):
    """`has_cudnn` is whether torch prefers cuDNN on that GPU."""
    monkeypatch.setattr(attention, "prefers_cudnn_attention", lambda _: has_cudnn)
    kernel = KernelConfig(name="embedded", attention=chosen, precision=precision)
    assert attention.choose_backend(kernel, (head_width, 64), device) == runs


def test_flash3_that_is_not_installed_is_told_in_one_line():
    """The package flash_attn_interface exists for GPUs only."""
    kernel = KernelConfig(name="embedded", attention="flash3", precision="bf16")
    with refused("kernel.attention=flash3: "):
        attention.choose_backend(kernel, (128, 128), GPU)


def test_the_operators_of_cudnn_take_our_arguments():
    """In the order of their schema, which torch checks without a GPU on tensors without data."""
    q, k = (torch.empty(B, count, S, D, dtype=torch.bfloat16, device="meta") for count in (N, K))
    out, log_sum = attention_forward("cudnn", q, k, k, causal=True)
    assert (out.shape, log_sum.shape, log_sum.dtype) == (q.shape, (B, N, S), torch.float32)
    grads = attention_backward("cudnn", out, q, out, log_sum, k, k, causal=True)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_flops_of_attention_follow_both_widths():
    """Of one head and 16 pairs: a product over 12 and one over 8 channels in forward, three and two in backward."""
    q, k, v = (torch.empty(1, 1, 4, width, dtype=torch.bfloat16, device="meta") for width in (12, 12, 8))
    with ExecutedFlops() as forward:
        out, log_sum = attention_forward("cudnn", q, k, v, causal=True)
    with ExecutedFlops() as backward:
        attention_backward("cudnn", out, q, out, log_sum, k, v, causal=True)
    assert out.shape == v.shape
    assert (forward.flops, backward.flops) == (2 * 16 * (12 + 8), 2 * 16 * (3 * 12 + 2 * 8))


@pytest.mark.parametrize("chosen", ["math", "flash"])
def test_narrow_values_give_the_same_with_and_without_padding(chosen):
    """Output and gradients are those of plain attention, without padding in memory; flash pads values."""
    torch.manual_seed(0)
    inputs = [*(heads(N) for _ in range(3))]
    inputs[2] = inputs[2][..., : D - 2].detach().requires_grad_()
    exact, out = causal_attention(*inputs), attention.pinned_attention(chosen, *inputs)
    torch.testing.assert_close(exact, out, rtol=0, atol=1e-12)
    assert chosen == "math" or out.transpose(1, 2).is_contiguous()
    grad = torch.randn_like(exact)
    for of_exact, of_chosen in zip(
        *(torch.autograd.grad(o, inputs, grad) for o in (exact, out)), strict=True
    ):
        torch.testing.assert_close(of_exact, of_chosen, rtol=0, atol=1e-12)


def test_selective_recomputation_keeps_a_compiled_ring():
    """It holds the results of attention, which selective recomputation keeps."""
    forward, _ = recompute._selective_contexts()
    context = SimpleNamespace(is_recompute=False)
    assert forward.policy_fn(context, cp.RING_FORWARD) == CheckpointPolicy.MUST_SAVE


@pytest.fixture
def ring():
    """The name of a group of two ranks, in which nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_the_ring_makes_no_order_that_flash_must_copy(monkeypatch, ring):
    """Keys, values, outputs and gradients have the memory order B, S, heads, D."""
    contiguous = list[bool]()

    def see(right, chosen, *tensors, causal):
        contiguous.extend(t.transpose(1, 2)[0].is_contiguous() for t in tensors if t.dim() == 4)
        return right(chosen, *tensors, causal=causal)

    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(cp, name, partial(see, getattr(cp, name)))
    q, k, v = inputs = [heads(count) for count in (N, K, K)]
    out = cp.ring_attention(ring, "ring", "flash", *inputs)
    grads = torch.autograd.grad(out, inputs, heads(N))
    assert [t.stride() for t in (out, *grads)] == [t.stride() for t in (q, q, k, v)]
    assert contiguous == [True] * 2 * (3 + 5)
