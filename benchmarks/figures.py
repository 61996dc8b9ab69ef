"""Measures whole processes of the page, the heatmap and every kind of `ultrabench plot`, of one collected table.

Usage: figures.py [ATTEMPTS]..., by default 1000 4000 16000 100000. A kind that has nothing to draw in a finished
sweep of training runs, such as the bandwidth of sweep=comm, is named and left out.
"""

import subprocess

from finished_sweep import ended_sweeps
from timing import print_row, ultrabench

from ultrabench.analysis.figures.kinds import KINDS

print("| figure | attempts | CPU time | wall-clock time |\n|---|---|---|---|")
for attempts, sweep, table in ended_sweeps():
    subprocess.run(ultrabench("collect", sweep, "-o", table), check=True, stderr=subprocess.DEVNULL)
    commands: dict[str, tuple[str, ...]] = {"report": ("report", table, "-o", f"{table}.html")}
    commands["heatmap"] = ("heatmap", table, "-o", f"{table}.png")
    for kind in KINDS:
        source = () if kind == "schedule" else (table,)
        commands[f"plot {kind}"] = ("plot", kind, *source, "-o", f"{table}.png")
    for name, words in commands.items():
        try:
            print_row(name, attempts, ultrabench(*words))
        except subprocess.CalledProcessError as error:
            print(f"| {name} | {attempts:,} | exit code {error.returncode} | |", flush=True)
