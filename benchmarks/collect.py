"""Measures whole processes of `sweep status --json`, `collect`, `heatmap` and `report` on sweeps that have ended.

Usage: collect.py [ATTEMPTS]..., by default 1000 4000 16000 100000.
"""

import sys
import tempfile
from pathlib import Path

from finished_sweep import write_sweep
from timing import print_row, ultrabench

print("| command | attempts | CPU time | wall-clock time |\n|---|---|---|---|")
for attempts in map(int, sys.argv[1:] or (1000, 4000, 16000, 100_000)):
    with tempfile.TemporaryDirectory() as folder:
        sweep, table = str(write_sweep(Path(folder) / "sweep", attempts).path), f"{folder}/runs.parquet"
        print_row("sweep status --json", attempts, ultrabench("sweep", "status", sweep, "--json"))
        print_row("collect", attempts, ultrabench("collect", sweep, "-o", table))
        for name, words in (
            ("heatmap of runs.parquet", ("-o", f"{folder}/h.png")),
            ("heatmap --json", ("--json",)),
        ):
            print_row(name, attempts, ultrabench("heatmap", table, *words))
        print_row("report", attempts, ultrabench("report", sweep))
