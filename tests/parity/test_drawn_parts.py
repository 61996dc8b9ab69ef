"""Layouts drawn at random of models with parts that few models have give what one process gives, in fp64."""

import random

import pytest

from tests.parity import drawn
from ultrabench.kernel.check.parity import run_check

pytestmark = pytest.mark.parity

SEEDS = range(20)
IN_EVERY_RUN = (0, 1, 15, 18)
"""Seeds of layouts of at most six ranks that are not compiled."""


def has_part(spec):
    """Whether a drawn model has blocks without a gate, groups of experts, yarn or modules that predict more tokens."""
    shape = spec.shape
    is_stretched = shape.rope_scaling is not None and shape.rope_scaling.rope_type == "yarn"
    return shape.layer_types or shape.n_group > 1 or is_stretched or shape.num_nextn_predict_layers


def draw(seed):
    """The first drawn layout with tensor or pipeline parallelism whose model has such a part."""
    pick = random.Random(seed)
    while True:
        spec = drawn.draw(pick)
        if spec and spec.layout.tp * spec.layout.pp > 1 and has_part(spec):
            return spec


@pytest.mark.parametrize(
    "seed", [s if s in IN_EVERY_RUN else pytest.param(s, marks=pytest.mark.campaign) for s in SEEDS]
)
def test_a_drawn_layout_equals_one_process(server, seed):
    spec = draw(seed)
    result = server.ask(run_check, spec)
    assert result.error is None, spec
    assert result.passed, (spec, result)
