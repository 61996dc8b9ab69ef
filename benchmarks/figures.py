"""Measures whole processes of the page, the heatmap and every kind of `ultrabench plot`, of one collected table.

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
        commands = {"report": ("report", table, "-o", f"{folder}/page.html")}
        commands["heatmap"] = ("heatmap", table, "-o", f"{folder}/figure.png")
        for kind in KINDS:
            source = () if kind == "schedule" else (table,)
            commands[f"plot {kind}"] = ("plot", kind, *source, "-o", f"{folder}/figure.png")
        for name, words in commands.items():
            try:
                print_row(name, attempts, ultrabench(*words))
            except subprocess.CalledProcessError as error:
                print(f"| {name} | {attempts:,} | exit code {error.returncode} | |", flush=True)
