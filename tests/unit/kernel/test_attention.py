"""Implementations of attention: they agree, are chosen by the device, and get tensors that they need not copy."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import CheckpointPolicy

from tests.configs import refused
from ultrabench.kernel import attention, cp, recompute
from ultrabench.kernel.compat import attention_backward, attention_forward
from ultrabench.kernel_config import KernelConfig

CPU, GPU = torch.device("cpu"), torch.device("cuda")
B, S, N, K, D = 2, 16, 4, 2, 8


def heads(count, **options):
    """Random values, B x count x S x D, in the memory order of a projection: B, S, count, D."""
    return torch.randn(B, S, count, D, dtype=torch.float64, **options).transpose(1, 2)


def test_math_and_flash_agree():
    """Output and all gradients, with grouped heads, in fp64."""
    torch.manual_seed(0)
    inputs = [heads(count).detach().requires_grad_() for count in (N, K, K)]
    grad, found = heads(N), []
    for chosen in ("math", "flash"):
        out = attention.pinned_attention(chosen, *inputs)
        found.append([out, *torch.autograd.grad(out, inputs, grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("asked", "precision", "head_width", "device", "runs"),
    [
        ("auto", "bf16", 128, CPU, "flash"), ("math", "fp32", 128, CPU, "math"), ("flash", "fp64", 128, CPU, "flash"),
        ("auto", "bf16", 128, GPU, "cudnn"), ("auto", "bf16", 256, GPU, "flash"), ("auto", "bf16", 100, GPU, "flash"),
        ("auto", "fp32", 128, GPU, "math"), ("flash", "bf16", 128, GPU, "flash"), ("cudnn", "bf16", 64, GPU, "cudnn"),
    ],
)  # fmt: skip
def test_what_runs(monkeypatch, asked, precision, head_width, device, runs):
    """On a GPU for which torch prefers cuDNN; without it auto is flash."""
    monkeypatch.setattr(attention, "has_cudnn_attention", lambda _: True)
    kernel = KernelConfig(name="embedded", attention=asked, precision=precision)
    assert attention.implementation(kernel, head_width, device) == runs
    monkeypatch.setattr(attention, "has_cudnn_attention", lambda _: False)
    without = "flash" if asked == "auto" and runs == "cudnn" else runs
    assert attention.implementation(kernel, head_width, device) == without


def test_flash3_that_is_not_installed_is_told_in_one_line():
    """The package flash_attn_interface exists for GPUs only."""
    with refused("kernel.attention=flash3: "):
        attention.implementation(
            KernelConfig(name="embedded", attention="flash3", precision="bf16"), 128, GPU
        )


def test_the_operators_of_cudnn_take_our_arguments():
    """In the order of their schema, which torch checks without a GPU on tensors without data."""
    q, k = (torch.empty(B, count, S, D, dtype=torch.bfloat16, device="meta") for count in (N, K))
    out, log_sum = attention_forward("cudnn", q, k, k, causal=True)
    assert (out.shape, log_sum.shape, log_sum.dtype) == (q.shape, (B, N, S), torch.float32)
    grads = attention_backward("cudnn", out, q, out, log_sum, k, k, causal=True)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]


def test_selective_recomputation_keeps_a_compiled_ring():
    """It holds the results of attention, which selective recomputation keeps."""
    forward, _ = recompute._selection()
    asked = SimpleNamespace(is_recompute=False)
    assert forward.policy_fn(asked, cp.RING_FORWARD) == CheckpointPolicy.MUST_SAVE


@pytest.fixture
def ring():
    """The name of a group of two ranks, in which nothing is sent."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_the_ring_makes_no_order_that_flash_must_copy(monkeypatch, ring):
    """Keys, values, outputs and gradients have the memory order B, S, heads, D."""
    seen = list[bool]()

    def spy(right):
        def run(chosen, *tensors, causal):
            seen.extend(t.transpose(1, 2)[0].is_contiguous() for t in tensors if t.dim() == 4)
            return right(chosen, *tensors, causal=causal)

        return run

    for name in ("attention_forward", "attention_backward"):
        monkeypatch.setattr(cp, name, spy(getattr(cp, name)))
    q, k, v = (heads(count).detach().requires_grad_() for count in (N, K, K))
    out = cp.ring_attention(ring, "flash", q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), heads(N))
    assert [t.stride() for t in (out, *grads)] == [t.stride() for t in (q, q, k, v)]
    assert len(seen) == 2 * (3 + 5)
    assert all(seen)
