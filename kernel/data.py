"""Synthetic tokens: a sample depends on seed, step and its place in the global batch only."""

import hashlib

import torch
from torch import Tensor

from ultrabench.layout import Layout
from ultrabench.run import Workload


def sample(seed: int, step: int, index: int, seq_len: int, vocab_size: int) -> Tensor:
    """The seq_len + 1 tokens of sample `index` of the global batch of `step`.

    Small tokens are far more frequent than large ones, so that a few steps of training lower the
    loss, and a layout that trains wrongly shows.
    """
    digest = hashlib.sha256(f"{seed}:{step}:{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    uniform = torch.rand(seq_len + 1, generator=generator, dtype=torch.float64)
    return (uniform**4 * vocab_size).long()


def sample_indices(layout: Layout, dp_rank: int) -> range:
    """Samples of the global batch that `dp_rank` trains on: micro-batch after micro-batch."""
    own = layout.gas * layout.mbs
    return range(dp_rank * own, (dp_rank + 1) * own)


def load(
    indices: range, step: int, workload: Workload, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the samples, len(indices) x S each; a target is the next token."""
    seed, seq_len = workload.seed, workload.seq_len
    tokens = torch.stack([sample(seed, step, i, seq_len, vocab_size) for i in indices]).to(device)
    # contiguous() would keep the stride of a single row, which torch 2.11's pipeline refuses.
    dense = torch.contiguous_format
    return tokens[:, :-1].clone(memory_format=dense), tokens[:, 1:].clone(memory_format=dense)
