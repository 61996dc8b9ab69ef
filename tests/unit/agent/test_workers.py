"""Ranks that a command has started are found by the variables of their processes."""

import os
import signal
import subprocess

import pytest

from tests.patience import wait_until
from ultrabench.agent.ranks.workers import (
    Worker,
    pid_by_rank,
    repeated_rank_text,
    workers_among,
    wrong_size_text,
)
from ultrabench.processes import descendants

TWO_RANKS = "RANK=1 WORLD_SIZE=2 sleep 99 & RANK=0 WORLD_SIZE=2 sh -c 'sleep 98 & wait' & wait"


@pytest.fixture
def starters():
    """Two starters, each with two ranks, of which one has a child."""
    starters = [subprocess.Popen(["sh", "-c", TWO_RANKS], start_new_session=True) for _ in range(2)]
    wait_until(lambda: all(len(descendants(starter.pid)) == 3 for starter in starters), 20)
    yield [starter.pid for starter in starters]
    for starter in starters:
        os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()


def test_children_of_ranks_are_no_ranks_and_equal_ranks_show_two_trainings(starters):
    wait_until(lambda: len(workers_among(descendants(starters[0]))) == 2, 20)
    workers = workers_among(descendants(starters[0]))
    assert sorted((worker.rank, worker.world_size) for worker in workers) == [(0, 2), (1, 2)]
    assert repeated_rank_text(workers, {starters[0]: 0}) is None
    assert wrong_size_text(workers, 2) is None
    problem = "the command started ranks with WORLD_SIZE=2; the layout has 4 ranks: pass it nodes and ranks"
    assert wrong_size_text(workers, 4).startswith(problem)
    all_workers = workers_among(descendants(starters[0]) | descendants(starters[1]))
    problem = (
        "the commands of ranks 4 and 7 both started RANK=0, so that several trainings compete: "
        "set kernel.launch_per=node"
    )
    assert repeated_rank_text(all_workers, {starters[0]: 7, starters[1]: 4}) == problem


def test_the_ranks_of_a_node_may_have_other_numbers_than_ultrabench_gives_them():
    workers = [Worker(3, 4, 13), Worker(2, 4, 12), Worker(3, 4, 99)]
    assert pid_by_rank(workers, range(2, 4)) == {2: 12, 3: 13}
    assert pid_by_rank(workers, range(2)) == {0: 12, 1: 13}
    assert pid_by_rank([], range(2)) == {}
