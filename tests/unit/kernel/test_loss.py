"""The loss over chunks of tokens is the loss of all logits, in value and in both gradients."""

import pytest
import torch

from ultrabench.kernel import loss
from ultrabench.kernel.model import cross_entropy

TOKENS, HIDDEN, VOCABULARY = 24, 16, 50


def both(monkeypatch, logits, dtype, plain_dtype=None):
    """Loss, gradient of x and of the head, by the plain way and by ours with this limit."""
    monkeypatch.setattr(loss, "LOGITS", logits)
    monkeypatch.setattr(loss, "WIDE_LOGITS", logits // 2)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS // 2, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=generator)
    found = []
    for compute, of_this in (
        (lambda a, w: cross_entropy(a @ w.t(), targets), plain_dtype or dtype),
        (lambda a, w: loss.head_loss(a, w, targets), dtype),
    ):
        own = [t.to(of_this, copy=True).requires_grad_() for t in (x, weight)]
        out = compute(*own) / 3
        out.backward()
        found.append([out.detach(), *(t.grad for t in own)])
    return zip(*found, strict=True)


@pytest.mark.parametrize("logits", [1, 7 * VOCABULARY, TOKENS * VOCABULARY, 10**9])
def test_chunks_of_any_size_give_the_plain_loss(monkeypatch, logits):
    for plain, ours in both(monkeypatch, logits, torch.float64):
        assert (plain - ours).abs().max() < 1e-13


def test_half_precision_is_as_near_as_its_rounding(monkeypatch):
    for plain, ours in both(monkeypatch, 7 * VOCABULARY, torch.bfloat16):
        assert ours.dtype == plain.dtype
        assert (plain - ours).abs().max() <= 2**-7 * plain.abs().max()


def test_what_is_kept_does_not_grow_with_the_vocabulary(monkeypatch):
    monkeypatch.setattr(loss, "LOGITS", 64)
    kept = []
    x = torch.randn(1, 512, 4, requires_grad=True)
    weight = torch.randn(64, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss.head_loss(x, weight, torch.zeros(1, 512, dtype=torch.int64))
    assert sum(kept) == x.numel() + weight.numel()


def test_the_weight_of_a_micro_batch_is_not_rounded_to_half_precision(monkeypatch):
    (_, *exact), _ = zip(*both(monkeypatch, 10**9, torch.bfloat16, torch.float64), strict=True)
    _, (_, *ours) = zip(*both(monkeypatch, 10**9, torch.bfloat16), strict=True)
    for a, b in zip(exact, ours, strict=True):
        # 1/3 in bf16 is 0.2 % too large.
        assert abs((a * b).sum() / a.square().sum() - 1) < 0.001


def test_many_chunks_add_up_as_one_does_in_half_precision(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 4, generator=generator).bfloat16() for n in (512, 8))
    targets = torch.randint(8, (1, 512), generator=generator)
    found = []
    for logits in (1, 10**9):
        monkeypatch.setattr(loss, "LOGITS", logits)
        own = weight.clone().requires_grad_()
        loss.head_loss(x[None], own, targets).backward()
        found.append(own.grad.double())
    assert (found[0] - found[1]).norm() < 0.005 * found[1].norm()


def test_pending_gradients_are_one_sum():
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(3, 1, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    pending, grads, kept = loss.Pending(), [], []
    for shared in (None, pending):
        weight = (
            torch.linspace(-1, 1, VOCABULARY * HIDDEN, dtype=torch.float64).view(-1, HIDDEN).requires_grad_()
        )
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            losses = [loss.head_loss(x.requires_grad_(), weight, targets, shared) for x in xs]
        for one in losses:
            one.backward()
        grads.append(weight.grad)
    assert (grads[0] - grads[1]).abs().max() < 1e-13
    assert pending.total is None
    assert sum(kept) == 2 * xs.numel() + 3 * weight.numel()
