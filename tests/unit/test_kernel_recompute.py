"""Layers that compute parts of themselves again in backward."""

from types import FunctionType

import pytest

from ultrabench.kernel.model import Decoder
from ultrabench.kernel.recompute import apply_recompute, recompute_of
from ultrabench.kernel.requests import TINY
from ultrabench.layout import Layout
from ultrabench.stages import split_stages


@pytest.mark.parametrize("recompute", ["full", "selective", "attention", "every3"])
def test_dynamo_can_read_a_recomputed_layer(recompute: str) -> None:
    """Dynamo compiles functions; of a functools.partial it compiles nothing, without a word."""
    model = Decoder(TINY, split_stages(TINY, 1)[0], [range(8)])
    layout = Layout(dp=1, recompute=recompute)
    assert recompute_of([model], layout) == "none"
    apply_recompute(model, layout)
    assert recompute_of([model], layout) == recompute
    functions = [f for layer in model.layers.values() for f in (layer.forward, layer.attention.core)]
    wrapped = [f for f in functions if hasattr(f, "recompute")]
    assert len(wrapped) == (1 if recompute == "every3" else TINY.num_hidden_layers)
    assert all(isinstance(f, FunctionType) for f in wrapped)
