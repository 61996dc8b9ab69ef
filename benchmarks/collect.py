"""Measures whole processes of `sweep status --json`, `collect`, `heatmap` and `report` on sweeps that have ended.

Usage: collect.py [ATTEMPTS]..., by default 1000 4000 16000 100000.
"""

from finished_sweep import ended_sweeps
from timing import print_row, ultrabench

print("| command | attempts | CPU time | wall-clock time |\n|---|---|---|---|")
for attempts, sweep, table in ended_sweeps():
    print_row("sweep status --json", attempts, ultrabench("sweep", "status", sweep, "--json"))
    print_row("collect", attempts, ultrabench("collect", sweep, "-o", table))
    print_row("heatmap of runs.parquet", attempts, ultrabench("heatmap", table, "-o", f"{table}.png"))
    print_row("heatmap --json", attempts, ultrabench("heatmap", table, "--json"))
    print_row("report", attempts, ultrabench("report", sweep))
