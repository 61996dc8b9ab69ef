"""A short seeded part of the chaos campaign; `make chaos` runs the long one."""

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.fault import EXPLAINS, draw

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]


def test_the_same_seed_draws_the_same_faults():
    assert draw("7", 60) == draw("7", 60) != draw("8", 60)
    assert {fault.kind for fault in draw("7", len(EXPLAINS))} == set(EXPLAINS)


KINDS = ("other_user", "other_cluster", "clock_offset", "port_scan", "reforking_children", "fifo_journal", "torn_line",
         "deleted_logs", "read_only", "node_silent", "kill_follower", "hostile_numbers", "stop_leader",
         "unreadable_claim", "double_submission", "empty_squeue")  # fmt: skip
"""Faults that no other test of this folder makes; test_troubles.py has the others."""


def test_a_sweep_survives_whatever_clusters_do(sweeps, slurm):
    campaign = Campaign(sweeps, slurm, print)
    try:
        campaign.run(draw("5", len(KINDS), KINDS))
    finally:
        campaign.close()
    assert campaign.problems == []
    assert sum("missed" not in record for record in campaign.records) >= 13
