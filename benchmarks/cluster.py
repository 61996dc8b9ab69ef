"""Provides a Slurm of simulated nodes during a benchmark, and counts the RPCs it gets."""

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
"""RPCs that sdiag itself sends."""
DAEMONS = re.compile(r"MESSAGE_|REQUEST_(PING|COMPLETE_|STEP_COMPLETE|UPDATE_NODE)|ACCOUNTING_")
"""RPCs that slurmd and slurmdbd send; every job and step causes them, whoever submitted it."""


@contextmanager
def cluster() -> Iterator[None]:
    """Makes Slurm's commands find a cluster: that of SLURM_CONF, or a new one that is removed afterwards."""
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
    """The output of a program."""
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout


def rpcs() -> Counter[str]:
    """The number of RPCs that slurmctld has received since it started, by type, without those of sdiag."""
    _, _, tables = output("sdiag").partition("by message type")
    counts = re.findall(r"^\s*(\w+)\s*\( *\d+\) *count:(\d+)", tables.partition("by user")[0], re.MULTILINE)
    return Counter({name: int(count) for name, count in counts if name not in OURS})


def asked(counts: Counter[str]) -> int:
    """The number of RPCs that commands sent, without those of daemons."""
    return sum(count for name, count in counts.items() if not DAEMONS.match(name))
