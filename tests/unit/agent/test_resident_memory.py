"""The peak memory of programs of the user on CPUs."""

import subprocess
import sys

from ultrabench.agent.ranks import resident_memory
from ultrabench.agent.ranks.resident_memory import ResidentMemory

HOLD_AND_FREE = "size = 80 * 2**20; data = b'x' * size; del data; print('freed', flush=True); input()"


def test_the_largest_process_of_a_rank_counts_even_after_it_has_freed_its_memory(monkeypatch):
    monkeypatch.setattr(resident_memory, "WALK_INTERVAL_S", 0.0)
    command = ["sh", "-c", '"$0" -c "$1"; exit 3', sys.executable, HOLD_AND_FREE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout.readline() == b"freed\n"
        memory = ResidentMemory()
        ((rank, peak_bytes),) = memory.grown({5: shell.pid})
        assert rank == 5
        assert 80 * 2**20 < peak_bytes < 160 * 2**20
        assert [*memory.grown({5: shell.pid})] == [], "only growth is told"
        memory.clear()
        assert len([*memory.grown({5: shell.pid})]) == 1
        shell.stdin.close()
    memory.clear()
    assert [*memory.grown({5: shell.pid})] == []
