"""Measures whole processes of `ultrabench nodes` on sweeps that have ended, in multiples of `ultrabench --help`.

Usage: nodes.py [ATTEMPTS]..., by default 1000 4000 16000 100000.
"""

from pathlib import Path

from finished_sweep import HOSTS, PACKED, ended_sweeps
from timing import print_row, ultrabench

from ultrabench.store import events


def add_preflights(sweep: Path, attempts: int) -> None:
    """Adds a preflight of two nodes to each allocation of a sweep."""
    for number, first in enumerate(range(0, attempts, PACKED)):
        hosts = [{"host": f"n{(number + other) % HOSTS:02}"} for other in (1, 2)]
        probe = {name: [1e12 + number % 7] * 16 for name in ("gemm_flops_per_s", "memory_copy_bytes_per_s")}
        event = events.Preflight(allocation=f"a{first}", found={"nodes": hosts, "probe": probe})
        line = events.encode(events.Line(event=event, writer=f"p{first}", seq=0, time=0.0))
        (sweep / "journal" / f"agent-p-{first}.jsonl").write_bytes(line)


if __name__ == "__main__":
    print("| command | attempts | CPU time | wall-clock time |\n|---|---|---|---|")
    for attempts, sweep, _ in ended_sweeps():
        add_preflights(Path(sweep), attempts)
        print_row("nodes", attempts, ultrabench("nodes", sweep))
