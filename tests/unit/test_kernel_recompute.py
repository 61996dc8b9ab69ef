"""Layers that compute parts of themselves again in backward."""

from types import FunctionType

import pytest

from ultrabench.kernel.model import Decoder
from ultrabench.kernel.recompute import apply_recompute
from ultrabench.kernel.requests import TINY
from ultrabench.stages import split_stages


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_dynamo_can_read_a_recomputed_layer(recompute: str) -> None:
    """Dynamo compiles functions; of a functools.partial it compiles nothing, without a word."""
    model = Decoder(TINY, split_stages(TINY, 1)[0], [range(8)])
    apply_recompute(model, recompute)
    assert all(isinstance(layer.forward, FunctionType) for layer in model.layers.values())
