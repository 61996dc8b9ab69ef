import os
import time

from ultrabench.agent.ranks.forks import ForkServer


def test_a_fork_server_that_cannot_start_tells_its_own_exit_code(tmp_path):
    log = tmp_path / "fork_server.log"
    server = ForkServer(log, {**os.environ, "PYTHONHOME": str(tmp_path)})
    server.fork(0, {}, tmp_path / "rank0.log")
    ends = []
    while not ends:
        time.sleep(0.01)
        ends = list(server.exits())
    server.stop()
    assert [(end.rank, end.code) for end in ends] == [(0, 1)]
    assert "encodings" in log.read_text()
