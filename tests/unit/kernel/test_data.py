"""Every layout trains on the same samples."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ultrabench.kernel import data
from ultrabench.layout import Layout
from ultrabench.run import Workload


@given(dp=st.integers(1, 6), mbs=st.integers(1, 4), gas=st.integers(1, 5))
def test_samples_of_all_dp_ranks_are_the_global_batch(dp, mbs, gas):
    """Once each, mbs*gas on every rank."""
    layout = Layout(dp=dp, mbs=mbs, gas=gas)
    ranks = [data.sample_indices(layout, rank) for rank in range(dp)]
    assert all(len(indices) == mbs * gas for indices in ranks)
    assert sorted(i for indices in ranks for i in indices) == list(range(layout.gbs))


def test_tokens_depend_on_seed_step_and_index_only():
    """The same sample read alone or in a batch; another in another step or with another seed."""

    def batch(indices, seed=1, step=1):
        return data.load(indices, step, Workload(seq_len=16, gbs=4, seed=seed), 100, torch.device("cpu"))

    inputs, targets = batch(range(4))
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(batch(range(2, 3))[0][0], inputs[2])
    assert len({tuple(tokens.tolist()) for tokens in inputs}) == 4
    assert not torch.equal(batch(range(4), step=2)[0], inputs)
    assert not torch.equal(batch(range(4), seed=2)[0], inputs)
    assert int(inputs.min()) >= 0
    assert int(inputs.max()) < 100
