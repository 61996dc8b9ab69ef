"""Real training steps on a fake GPU: known seconds, bytes and FLOPs, and no wait but those that a step needs."""

from collections import Counter

import pytest
import torch

from tests.parity.test_dryrun import flops_of_one_rank_a_stage, predict_stages
from tests.parity.test_layouts import spec_of
from tests.unit.kernel.fake_gpu import FRAGMENTED_BYTES
from tests.unit.kernel.fake_training import FLOPS_PER_S, SENT_BYTES_PER_S, TrainedRun

NEAR_S = 3e-4
"""Launches of operators that the GPU waits for, and messages of a few bytes."""
NEAR_BYTES = 0.1
"""Error of the closed form of the peak for two narrow layers, whose loss weighs more than in a real model."""
BF16, FP32 = 2, 4
"""Bytes of a number."""


def trained(case, num_reads=0):
    """The check and the run of a case, whose steps wait for the GPU when they end, and `num_reads` times before.

    These are the reads of each micro-batch. After a step the host reads the loss and the norm of the gradient. The
    cache is emptied and the peak is reset once, before the first step; the peak of all steps is the same.
    """
    spec = spec_of(case)
    run, layout = TrainedRun(spec.run), spec.layout
    micro_batch = ["read"] * num_reads + ["micro-batch"]
    timed = ["synchronize", "part_1", *micro_batch * layout.gas, "part_2", "synchronize"]
    assert run.step_calls() == [["part_0", *timed, "read", "read"]] * 3
    assert [call for call in run.gpu.calls if call != "read"][:4] == [
        "empty_cache", "reset_peak", "reset_retries", "part 0"
    ]  # fmt: skip
    assert [run.gpu.calls.count(name) for name in ("empty_cache", "reset_peak", "synchronize")] == [
        1,
        1,
        2 * 3,
    ]
    num_kernels = Counter(name for name, *_ in run.gpu.kernels)
    updates = [num_kernels[name] for name in ("_foreach_norm", "_foreach_mul_", "_fused_adamw_")]
    assert updates == [3, 3 * 2, 3], "few kernels update all parameters"
    peaks, (stage,) = run.events("memory"), predict_stages(spec.run)
    for peak in peaks:
        assert peak["allocated_bytes"] == pytest.approx(stage.allocated_bytes, rel=NEAR_BYTES)
        assert peak["reserved_bytes"] == peak["allocated_bytes"] + FRAGMENTED_BYTES
        assert peak["allocator_retries"] == 0
    return spec, run


def require_seconds(spec, run, exposed_bytes):
    """A step takes the time of its products, in bf16, and of what is sent while none of them runs."""
    flops = flops_of_one_rank_a_stage(spec)
    expected_s = flops / FLOPS_PER_S[torch.bfloat16] + exposed_bytes / SENT_BYTES_PER_S
    assert [step["seconds"] for step in run.events("step")] == pytest.approx([expected_s] * 3, abs=NEAR_S)
    assert run.events("done")[0]["hardware_flops_per_step"] == flops * spec.layout.world_size


def test_shards_are_gathered_and_reduced_beside_products():
    """Except for those of the embedding and the first layer, which are gathered first and reduced last."""
    spec, run = trained("dp=2 zero_stage=3 gas=2 bf16")
    h = spec.shape.hidden_size
    first_params = spec.shape.vocab_size * h + spec.shape.layer(0).num_params(h)
    require_seconds(spec, run, spec.layout.gas * (BF16 + FP32) * first_params)


def test_tokens_are_exchanged_beside_products_in_backward_only():
    """Forward of a layer gathers and sums twice, and backward gathers two gradients; recomputation gathers again."""
    spec, run = trained("tp=2 gas=2 selective bf16")
    h, num_layers, num_tokens = spec.shape.hidden_size, spec.shape.num_hidden_layers, spec.seq_len
    num_exchanges = (4 + 2 + 2) * num_layers + 4  # those of embedding and head are exposed, too
    softmax_bytes = 3 * FP32 * num_tokens  # a maximum and two sums for each token
    norm_bytes = FP32 * (2 * num_layers + 1) * h
    micro_batch_bytes = num_exchanges * BF16 * num_tokens * h + softmax_bytes
    require_seconds(spec, run, spec.layout.gas * micro_batch_bytes + norm_bytes)


def test_a_ring_sends_and_waits_without_the_host():
    """Ranks of tp also sum the gradients of the copies of a key/value head."""
    trained("cp=2 tp=4 gas=2 uneven biased bf16")


def test_routers_are_read_once_in_forward_and_never_in_backward():
    """A rank has to know how many rows it gets: one read for its sparse layer."""
    trained("dp=2 ep=2 gas=2 moe routing=learned bf16", num_reads=1)
