"""A short seeded part of the chaos campaign; `make chaos` runs the long one."""

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.fault import EXPLAINS, INTERFERENCE, draw

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]


def test_the_same_seed_draws_the_same_faults():
    assert draw("7", 60) == draw("7", 60) != draw("8", 60)
    assert {fault.kind for fault in draw("7", len(EXPLAINS))} == set(EXPLAINS)


def test_a_sweep_survives_whatever_clusters_do(sweeps, slurm):
    campaign = Campaign(sweeps, slurm, print)
    faults = draw("5", 25)
    assert len({fault.kind for fault in faults} & INTERFERENCE.keys()) >= 5
    try:
        campaign.run(faults)
    finally:
        campaign.close()
    assert campaign.problems == []
    assert sum("missed" not in record for record in campaign.records) >= 20
