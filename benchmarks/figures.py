"""Measures whole processes of the heatmap and of every kind of `ultrabench plot`, of one collected table.

Usage: figures.py [ATTEMPTS]..., by default 1000 4000 16000 100000. A kind that has nothing to draw in a finished
sweep of training runs, such as the bandwidth of sweep=comm, is named and left out.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from finished_sweep import write_sweep
from timing import print_row, ultrabench

from ultrabench.analysis.figures.kinds import KINDS

print("| figure | attempts | CPU time | wall-clock time |\n|---|---|---|---|")
for attempts in map(int, sys.argv[1:] or (1000, 4000, 16000, 100_000)):
    with tempfile.TemporaryDirectory() as folder:
        sweep, table = str(write_sweep(Path(folder) / "sweep", attempts).path), f"{folder}/runs.parquet"
        subprocess.run(ultrabench("collect", sweep, "-o", table), check=True, stderr=subprocess.DEVNULL)
        commands = {"heatmap": ("heatmap", table)} | {f"plot {kind}": ("plot", kind, table) for kind in KINDS}
        for name, words in commands.items():
            try:
                print_row(name, attempts, ultrabench(*words, "-o", f"{folder}/figure.png"))
            except subprocess.CalledProcessError as error:
                print(f"| {name} | {attempts:,} | exit code {error.returncode} | |", flush=True)
