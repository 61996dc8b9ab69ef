"""A short seeded part of the chaos campaign; `make chaos` runs the long one."""

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.fault import draw

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]


KINDS = ("other_user", "port_scan", "reforking_children", "double_submission")
KINDS_IN_PARTS = ("unreadable_claim", "deleted_logs")
OTHER_KINDS = ("other_cluster", "clock_offset", "fifo_journal", "hostile_numbers")
"""Faults that no other test makes; `make chaos` makes all kinds."""


@pytest.mark.parametrize(("kinds", "in_parts"), [
    (KINDS, False), (KINDS_IN_PARTS, True), pytest.param(OTHER_KINDS, False, marks=pytest.mark.campaign)
])  # fmt: skip
def test_a_sweep_survives_whatever_clusters_do(sweeps, slurm, kinds, in_parts):
    """Of a program, and of the embedded kernel measured by parts of steps."""
    campaign = Campaign(sweeps, slurm, print)
    try:
        campaign.run(draw("5", len(kinds), kinds), embedded=in_parts)
    finally:
        campaign.close()
    assert campaign.problems == []
    hit = [record for record in campaign.records if "missed" not in record]
    assert len(hit) >= len(kinds) * 2 // 3, (
        "a few may find nothing to hit, such as a sweep that is about to end"
    )
