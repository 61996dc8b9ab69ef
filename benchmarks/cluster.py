"""A Slurm of simulated nodes for the time of a benchmark, and what it was asked meanwhile."""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools/slurm_cluster.py"
OURS = {"REQUEST_STATS_INFO"}
"""RPCs of sdiag itself."""
DAEMONS = re.compile(r"MESSAGE_|REQUEST_(PING|COMPLETE_|STEP_COMPLETE|UPDATE_NODE)|ACCOUNTING_")
"""RPCs that slurmd and slurmdbd send: they come with every job and step, whoever submitted it."""


@contextmanager
def cluster() -> Iterator[None]:
    """Slurm's commands find a cluster: that of SLURM_CONF, else one that is gone afterwards."""
    if "SLURM_CONF" in os.environ:
        yield
        return
    folder = tempfile.mkdtemp(prefix="ultrabench-slurm-")
    try:
        subprocess.run([sys.executable, str(TOOL), "up", f"--dir={folder}"], check=True, stdout=2)
        os.environ["SLURM_CONF"] = f"{folder}/slurm.conf"
        yield
    finally:
        os.environ.pop("SLURM_CONF", None)
        subprocess.run([sys.executable, str(TOOL), "down", f"--dir={folder}"], check=True, stdout=2)


def output(*words: str, env: dict[str, str] | None = None) -> str:
    """What a program prints."""
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout


def rpcs() -> Counter[str]:
    """Messages that slurmctld has taken since it started, by type; those of sdiag are left out."""
    _, _, tables = output("sdiag").partition("by message type")
    found = re.findall(r"^\s*(\w+)\s*\( *\d+\) *count:(\d+)", tables.partition("by user")[0], re.MULTILINE)
    return Counter({name: int(count) for name, count in found if name not in OURS})


def asked(counts: Counter[str]) -> int:
    """RPCs that somebody's commands sent, not the daemons."""
    return sum(count for name, count in counts.items() if not DAEMONS.match(name))
