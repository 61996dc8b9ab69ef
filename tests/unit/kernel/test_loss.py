"""The loss over chunks of tokens is the loss of all logits, in value and in both gradients."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ultrabench.kernel import loss
from ultrabench.kernel.model import cross_entropy

TOKENS, HIDDEN, VOCABULARY = 24, 16, 50


def plain_loss(x, weight, targets):
    return cross_entropy(x @ weight.t(), targets)


def loss_and_grads(monkeypatch, compute, dtype, logits=10**9, tokens=TOKENS):
    """A third of the loss of random values, and its gradients of x and of the head, in chunks of so many logits."""
    monkeypatch.setattr(loss, "MAX_CHUNK_LOGITS", logits)
    monkeypatch.setattr(loss, "MAX_SOFTMAX_LOGITS", logits // 2)
    generator = torch.Generator().manual_seed(1)
    sizes, targets = ((2, tokens // 2, HIDDEN), (VOCABULARY, HIDDEN)), torch.arange(tokens) % VOCABULARY
    inputs = [torch.randn(size, generator=generator).bfloat16().to(dtype).requires_grad_() for size in sizes]
    out = compute(*inputs, targets.view(2, -1)) / 3
    out.backward()
    return [out.detach(), *(t.grad for t in inputs)]


@pytest.mark.parametrize("logits", [1, 7 * VOCABULARY, TOKENS * VOCABULARY, 10**9])
def test_chunks_of_any_size_give_the_plain_loss(monkeypatch, logits):
    plain = loss_and_grads(monkeypatch, plain_loss, torch.float64)
    ours = loss_and_grads(monkeypatch, loss.head_loss, torch.float64, logits)
    for expected, actual in zip(plain, ours, strict=True):
        assert (expected - actual).abs().max() < 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_that_pad_the_head_take_no_part(monkeypatch, dtype):
    """Loss and gradients are those without these rows, whatever their values, and their own gradient is 0."""

    def padded_loss(x, weight, targets):
        padding = torch.full((14, HIDDEN), 3.0, dtype=dtype)
        rows = torch.cat((weight, padding)).detach().requires_grad_()
        value = loss.head_loss(x, rows, targets, None, None, VOCABULARY)
        rows.register_hook(lambda grad: padding_grads.append(grad[VOCABULARY:]))
        weight.grad = torch.autograd.grad(value / 3, rows, retain_graph=True)[0][:VOCABULARY]
        return value

    padding_grads = []
    plain = loss_and_grads(monkeypatch, loss.head_loss, dtype, 7 * VOCABULARY)
    padded = loss_and_grads(monkeypatch, padded_loss, dtype, 7 * VOCABULARY)
    assert all(not grad.any() for grad in padding_grads)
    for expected, actual in zip(plain, padded, strict=True):
        assert (expected - actual).abs().max() <= torch.finfo(dtype).eps * 4 * expected.abs().max()


@pytest.mark.parametrize(("tokens", "logits"), [(TOKENS, 7 * VOCABULARY), (512, 1)])
def test_half_precision_is_as_near_as_its_rounding(monkeypatch, tokens, logits):
    """Also the sum over hundreds of chunks."""
    functions = (plain_loss, loss.head_loss)
    plain, ours = (loss_and_grads(monkeypatch, f, torch.bfloat16, logits, tokens) for f in functions)
    for expected, actual in zip(plain, ours, strict=True):
        assert expected.dtype == actual.dtype
        assert (expected - actual).abs().max() <= 2**-7 * expected.abs().max()


def test_the_softmax_of_half_precision_is_wide():
    """A gradient is rounded once, when it takes the place of its logit; the loss is not rounded."""
    logits = 4 * torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(1)).bfloat16()
    targets, exact = torch.arange(TOKENS), logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, reduction="sum")
    expected.backward()
    assert loss.logits_to_gradient(logits, targets, None).item() == pytest.approx(expected.item(), rel=1e-6)
    assert ((logits - exact.grad).abs() <= 1.01 * 2**-8 * exact.grad.abs()).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch itself uses it
def test_generated_code_gives_the_same_gradient(monkeypatch):
    """In bf16, on one of two ranks that share the vocabulary; test_counts.py compares such ranks, in fp64.

    Code generation takes 20 s of CPU time, but no other test of `make test` runs such code.
    """
    # Otherwise torch compiles a program for each instruction set of this CPU, to see whether that works.
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    logits, targets = torch.randn(24, 50).bfloat16(), torch.arange(24)
    compiled = torch.compile(loss.logits_to_gradient, fullgraph=True, dynamic=False)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # sums are those of this rank
    try:
        (eager_loss, eager), (compiled_loss, generated) = (
            (function(overwritten := logits.clone(), targets, dist.group.WORLD), overwritten)
            for function in (loss.logits_to_gradient, compiled)
        )
    finally:
        dist.destroy_process_group()
    assert compiled_loss == pytest.approx(eager_loss)
    assert (generated - eager).abs().max() <= torch.finfo(torch.bfloat16).eps


def test_the_weight_of_a_micro_batch_is_not_rounded_to_half_precision(monkeypatch):
    _, *exact = loss_and_grads(monkeypatch, plain_loss, torch.float64)
    _, *ours = loss_and_grads(monkeypatch, loss.head_loss, torch.bfloat16)
    for a, b in zip(exact, ours, strict=True):
        # 1/3 in bf16 is 0.2 % too large.
        assert abs((a * b).sum() / a.square().sum() - 1) < 0.001


def test_pending_gradients_are_one_sum_and_no_logits_are_kept():
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(3, 1, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    shared_sum, grads, sizes = loss.HeadGradient(), [], []
    for shared in (None, shared_sum):
        weight = torch.linspace(-1, 1, VOCABULARY * HIDDEN, dtype=torch.float64).view(-1, HIDDEN)
        weight.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            losses = [loss.head_loss(x.requires_grad_(), weight, targets, shared) for x in xs]
        for value in losses:
            value.backward()
        grads.append(weight.grad)
    assert (grads[0] - grads[1]).abs().max() < 1e-13
    assert shared_sum.grad_sum is None
    assert sum(sizes) == 2 * xs.numel() + 3 * weight.numel()
