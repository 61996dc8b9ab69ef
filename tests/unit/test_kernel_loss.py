"""The loss over chunks of tokens is the loss of all logits, in value and in both gradients."""

import pytest
import torch

from ultrabench.kernel import loss
from ultrabench.kernel.model import cross_entropy

TOKENS, HIDDEN, VOCABULARY = 24, 16, 50


def both(monkeypatch, logits, dtype):
    """Loss, gradient of x and of the head, by the plain way and by ours with this limit."""
    monkeypatch.setattr(loss, "LOGITS", logits)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS // 2, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=generator)
    found = []
    for compute in (
        lambda a, w: cross_entropy(a @ w.t(), targets),
        lambda a, w: loss.head_loss(a, w, targets),
    ):
        own = [t.clone().requires_grad_() for t in (x, weight)]
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
