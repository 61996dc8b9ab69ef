"""Synthetic tokens: a sample depends only on the seed, the step and its index in the global batch."""

import hashlib

import torch
from torch import Tensor

from ultrabench.layout import Layout
from ultrabench.run import Workload


def sample(seed: int, step: int, index: int, seq_len: int, vocab_size: int) -> Tensor:
    """The seq_len + 1 tokens of sample `index` of the global batch of `step`.

    Small tokens are far more frequent than large ones, so that a few steps of training lower the loss, and a
    layout that trains incorrectly can be recognised by its loss.
    """
    seed_digest = hashlib.sha256(f"{seed}:{step}:{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed_digest[:7], "big"))
    uniform_values = torch.rand(seq_len + 1, generator=generator, dtype=torch.float64)
    return (uniform_values**4 * vocab_size).long()


def sample_indices(layout: Layout, dp_rank: int) -> range:
    """The samples of the global batch that `dp_rank` trains on, in the order of its micro-batches."""
    samples_per_rank = layout.gas * layout.mbs
    return range(dp_rank * samples_per_rank, (dp_rank + 1) * samples_per_rank)


def make_batch(
    indices: range, step: int, workload: Workload, vocab_size: int, device: torch.device, num_later: int = 0
) -> tuple[Tensor, Tensor]:
    """The inputs and targets of the samples, len(indices) x S each; a target is the next token.

    If `num_later` tokens after the next one are targets, too, the targets have a last dim of 1 + num_later.
    """
    seed, seq_len = workload.seed, workload.seq_len
    tokens = torch.stack([sample(seed, step, i, seq_len + num_later, vocab_size) for i in indices]).to(device)
    targets = [tokens[:, 1 + k : 1 + k + seq_len] for k in range(1 + num_later)]
    return tokens[:, :seq_len], torch.stack(targets, -1) if num_later else targets[0]
