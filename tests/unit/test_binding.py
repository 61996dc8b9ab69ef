import os
import sys

import pytest

from tests.patience import wait_until
from ultrabench.agent.ranks.binding import cpu_list, cpu_text, rank_cpus
from ultrabench.agent.ranks.forks import Exit, ForkServer

MINE = tuple(sorted(os.sched_getaffinity(0)))
FIRST, LAST = MINE[:1], MINE[-1:]
two_cpus = pytest.mark.skipif(len(MINE) < 2, reason="needs two CPUs to choose from")


@pytest.fixture
def sysfs(tmp_path):
    """Makes a tree like /sys of NUMA nodes with the given CPU lists and of devices on them."""

    def make(nodes, devices=()):
        for i, cpus in enumerate(nodes):
            folder = tmp_path / f"devices/system/node/node{i}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{cpus}\n")
        for bus, node in dict(devices).items():
            folder = tmp_path / "bus/pci/devices" / bus
            folder.mkdir(parents=True)
            (folder / "numa_node").write_text(f"{node}\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", (0, 1, 2, 3, 8)), ("5", (5,)), ("", ()), ("0-1,4-5", (0, 1, 4, 5)), ("0-0,2,4", (0, 2, 4))],
)
def test_lists_of_cpus(text, cpus):
    assert cpu_list(f"{text}\n") == cpus
    assert cpu_list(cpu_text(cpus)) == cpus


def test_the_text_of_cpus_is_the_shortest():
    assert cpu_text((0, 1, 2, 3, 8)) == "0-3,8"
    assert cpu_text((9, 8, 1, 1)) == "1,8-9"
    assert cpu_text(()) == ""


def test_what_is_no_list_of_cpus_is_refused():
    with pytest.raises(ValueError, match="invalid literal"):
        cpu_list("0-3,x")


def test_one_numa_node_leaves_nothing_to_choose(sysfs, tmp_path):
    assert rank_cpus(2, False, tmp_path / "nothing") is None
    assert rank_cpus(2, False, sysfs(["0-4095"])) is None


@two_cpus
def test_a_node_of_memory_or_of_others_cpus_does_not_count(sysfs):
    assert rank_cpus(2, False, sysfs([cpu_text(MINE), "", "100000-100007"])) is None


@two_cpus
def test_without_gpus_ranks_are_spread_in_order(sysfs):
    tree = sysfs([f"{FIRST[0]},100000", f"{LAST[0]},100001"])
    assert rank_cpus(4, False, tree) == [FIRST, FIRST, LAST, LAST]
    assert rank_cpus(3, False, tree) == [FIRST, FIRST, LAST]
    assert rank_cpus(1, False, tree) == [FIRST]


@two_cpus
def test_ranks_run_near_their_gpus(sysfs):
    devices = {"0000:1b:00.0": 1, "0000:43:00.0": 0, "0001:c3:00.0": -1, "0000:c4:00.0": 2}
    tree = sysfs([cpu_text(FIRST), cpu_text(LAST), "100000"], devices)
    buses = ["00000000:1B:00.0", "0000:43:00.0", "00000001:C3:00.0", "0000:C4:00.0", "0000:ff:00.0"]
    # Unknown, on a node whose CPUs others have, not there at all, and not told: all our CPUs.
    assert rank_cpus(6, True, tree, buses) == [LAST, FIRST, MINE, MINE, MINE, MINE]
    assert rank_cpus(2, True, tree, buses) == [LAST, FIRST]


TELL = "import os; print(sorted(os.sched_getaffinity(0)))"


def wait_for_exits(ranks, count):
    found = []
    wait_until(lambda: found.extend(ranks.exits()) or len(found) >= count, 30)
    return sorted(found, key=lambda e: e.rank)


@pytest.fixture
def server(tmp_path):
    (tmp_path / "tells.py").write_text(f"def main():\n    {TELL}\n    return 0\n")
    made = ForkServer(tmp_path / "server.log", {**os.environ, "PYTHONPATH": str(tmp_path)}, "tells")
    yield made
    made.stop()


@two_cpus
def test_a_forked_rank_is_bound(tmp_path, server):
    server.fork(0, {}, tmp_path / "0.log", LAST)
    server.fork(1, {}, tmp_path / "1.log")
    assert wait_for_exits(server, 2) == [Exit(rank=0, code=0), Exit(rank=1, code=0)]
    assert (tmp_path / "0.log").read_text() == f"{list(LAST)}\n"
    assert (tmp_path / "1.log").read_text() == f"{list(MINE)}\n"


def execute(server, rank, folder, *command, cpus=None, **env):
    env = {**os.environ, **env}
    server.fork(rank, env, folder / f"{rank}.log", cpus, command=list(command), cwd=str(folder))


@two_cpus
def test_an_executed_rank_is_bound(tmp_path, server):
    for rank, cpus in ((0, LAST), (1, None)):
        execute(server, rank, tmp_path, sys.executable, "-c", TELL, cpus=cpus)
    assert wait_for_exits(server, 2) == [Exit(rank=0, code=0), Exit(rank=1, code=0)]
    assert (tmp_path / "0.log").read_text() == f"{list(LAST)}\n"
    assert (tmp_path / "1.log").read_text() == f"{list(MINE)}\n"


def test_a_program_finds_its_folder_its_environment_and_signals_as_usual(tmp_path):
    server = ForkServer(tmp_path / "server.log", dict(os.environ))  # it imports nothing
    script = 'echo "$MINE $(pwd) $(ls -l /proc/self/fd | grep -c pipe)"; kill -PIPE $$'
    execute(server, 0, tmp_path, "sh", "-c", script, MINE="own")
    assert wait_for_exits(server, 1) == [Exit(rank=0, code=-13)]
    server.stop()
    assert (tmp_path / "0.log").read_text() == f"own {tmp_path} 1\n"


@pytest.mark.parametrize(
    ("command", "cpus"), [([sys.executable, "-c", TELL], (100000,)), (["no-such-program"], None)]
)
def test_what_cannot_start_fails_the_rank_alone(tmp_path, server, command, cpus):
    execute(server, 3, tmp_path, *command, cpus=cpus)
    assert wait_for_exits(server, 1) == [Exit(rank=3, code=127)]
    assert f"cannot start {command[0]}" in (tmp_path / "3.log").read_text()
    assert server.pid is not None
