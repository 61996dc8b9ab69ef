"""The CPUs of ranks, and ranks that a real fork server starts."""

import os
import sys
from contextlib import ExitStack

import pytest

from tests.patience import slowness, wait_until
from ultrabench.agent.ranks import fork_server
from ultrabench.agent.ranks.fork_server import ForkServer, cpu_text, rank_cpus

MINE = tuple(sorted(os.sched_getaffinity(0)))
FIRST, LAST = MINE[:1], MINE[-1:]
THEIRS = (100000,)
two_cpus = pytest.mark.skipif(len(MINE) < 2, reason="needs two CPUs to choose from")


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", (0, 1, 2, 3, 8)), ("5", (5,)), ("", ()), ("0,2,4-5", (0, 2, 4, 5))]
)
def test_lists_of_cpus(text, cpus):
    assert cpu_text((*reversed(cpus), *cpus)) == text


DEVICES = {"0000:1b:00.0": 1, "0000:43:00.0": 0, "0001:c3:00.0": -1, "0000:c4:00.0": 2}


@pytest.mark.parametrize(
    ("ranks", "buses", "nodes", "expected"),
    [
        # A node of memory, or of CPUs that others have, does not count; one node leaves nothing to choose.
        (2, None, [], None),
        (2, None, [MINE, (), THEIRS], None),
        # Without GPUs ranks are spread in order.
        (4, None, [FIRST + THEIRS, LAST], [FIRST, FIRST, LAST, LAST]),
        (3, None, [FIRST + THEIRS, LAST], [FIRST, FIRST, LAST]),
        # With GPUs they run near them; all our CPUs if the GPU's node is unknown, that of others, not there or not
        # given.
        (6, ["00000000:1B:00.0", "0000:43:00.0", "00000001:C3:00.0", "0000:C4:00.0", "0000:ff:00.0"],
            [FIRST, LAST, THEIRS],
         [LAST, FIRST, MINE, MINE, MINE, MINE]),
    ],
)  # fmt: skip
@two_cpus
def test_the_cpus_of_ranks(tmp_path, ranks, buses, nodes, expected):
    files = {f"devices/system/cpu/cpu{n}/node{i}/cpu": n for i, cpus in enumerate(nodes) for n in cpus}
    files |= {f"bus/pci/devices/{bus}/numa_node": node for bus, node in DEVICES.items()}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert rank_cpus(ranks, buses, tmp_path) == expected


TELL = "import os; print(sorted(os.sched_getaffinity(0)))"


def exits(server, count):
    ends = []
    wait_until(lambda: ends.extend(server.new_exits()) or len(ends) >= count, 30)
    return sorted(ends)


@pytest.fixture
def start(tmp_path):
    """Starts fork servers."""
    with ExitStack() as stack:

        def make(module="", **env):
            server = ForkServer(tmp_path / "server.log", {**os.environ, **env}, module)
            stack.callback(server.stop)
            return server

        yield make


def execute(server, rank, folder, *command, cpus=None, **env):
    env = {**os.environ, **env}
    server.fork(rank, env, folder / f"{rank}.log", cpus, command=list(command), cwd=str(folder))


@two_cpus
def test_forked_and_executed_ranks_are_bound(tmp_path, start):
    (tmp_path / "tells.py").write_text(f"def main():\n    {TELL}\n    return 0\n")
    server = start("tells", PYTHONPATH=str(tmp_path))
    for rank, cpus in enumerate((LAST, None)):
        server.fork(rank, {}, tmp_path / f"{rank}.log", cpus)
        execute(server, rank + 2, tmp_path, sys.executable, "-c", TELL, cpus=cpus)
    assert exits(server, 4) == [(rank, 0) for rank in range(4)]
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(4)]
    assert logs == [f"{list(cpus)}\n" for cpus in (LAST, MINE, LAST, MINE)]


def test_a_program_finds_its_folder_its_environment_and_signals_as_usual(tmp_path, start):
    server = start()
    script = 'echo "$MINE $(pwd) $(ls -l /proc/self/fd | grep -c pipe)"; kill -PIPE $$'
    execute(server, 0, tmp_path, "sh", "-c", script, MINE="own")
    assert exits(server, 1) == [(0, -13)]
    assert (tmp_path / "0.log").read_text() == f"own {tmp_path} 1\n"


def test_a_program_that_cannot_start_fails_its_rank_alone(tmp_path, start):
    server = start()
    execute(server, 3, tmp_path, sys.executable, "-c", TELL, cpus=THEIRS)
    execute(server, 4, tmp_path, "no-such-program")
    assert exits(server, 2) == [(3, 127), (4, 127)]
    assert f"cannot start {sys.executable}" in (tmp_path / "3.log").read_text()
    assert "cannot start no-such-program" in (tmp_path / "4.log").read_text()


def test_a_fork_server_that_cannot_start_passes_on_its_exit_code(tmp_path, start):
    server = start(PYTHONHOME=str(tmp_path))
    server.fork(0, {}, tmp_path / "rank0.log", None)
    assert exits(server, 1) == [(0, 1)]
    assert "encodings" in (tmp_path / "server.log").read_text()


SLOW = """
import os, time
time.sleep({import_s})
os.register_at_fork(before=lambda: time.sleep(0.5))
main = lambda: 0
"""


def test_a_server_that_imports_for_long_has_its_time_to_fork_from_then_on(tmp_path, start, monkeypatch):
    """It was replaced as soon as it was ready, again and again, where the import alone took longer than a fork may."""
    fork_timeout_s = 2.0 * slowness()
    monkeypatch.setattr(fork_server, "FORK_LIMIT_S", fork_timeout_s)
    (tmp_path / "slow.py").write_text(SLOW.format(import_s=1.5 * fork_timeout_s))
    server, codes = start("slow", PYTHONPATH=str(tmp_path)), []
    server.fork(0, {}, tmp_path / "rank0.log", None)
    first = server.pid
    wait_until(lambda: codes.extend(server.new_exits()) or server.replace_if_stuck() or codes, 60)
    assert (codes, server.pid) == ([(0, 0)], first)
