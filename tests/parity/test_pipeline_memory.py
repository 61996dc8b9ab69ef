"""A pipeline frees what a finished micro-batch needed while the step goes on."""

import pytest

from tests.parity.test_dryrun import costs
from tests.parity.test_layouts import TINY, spec_of

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_more_micro_batches_need_no_more_memory(server, schedule):
    """Only their inputs and targets stay, of 8 bytes each, but no messages nor what a loss was computed from."""
    few, many = (spec_of(f"pp=2 gas={gas} {schedule}", TINY) for gas in (8, 12))
    less, more = (costs(server, "dry costs", spec)[-1].peak_bytes for spec in (few, many))
    batch = 16 * (many.layout.gas - few.layout.gas) * few.layout.mbs * few.seq_len
    assert more - less == pytest.approx(batch, abs=64)  # and the losses
