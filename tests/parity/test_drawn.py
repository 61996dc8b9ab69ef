"""Layouts of latent attention that are drawn at random give what one process gives, in fp64."""

import random

import pytest

from tests.parity.drawn import drawn_specs
from ultrabench.kernel.check.parity import run_check

pytestmark = pytest.mark.parity

NUM_LAYOUTS, NUM_EVERY_RUN, SEED = 40, 5, 93


@pytest.fixture(scope="module")
def specs():
    return drawn_specs(NUM_LAYOUTS, random.Random(SEED), latent=True)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=pytest.mark.campaign if n >= NUM_EVERY_RUN else ()) for n in range(NUM_LAYOUTS)],
)
def test_a_drawn_layout_equals_one_process(server, specs, number):
    """`python -m tests.parity.drawn 40 93 latent` prints the layouts and their differences."""
    result = server.ask(run_check, specs[number])
    assert result.error is None, specs[number]
    assert not result.missing_gradients
    assert result.passed, (specs[number], result)
