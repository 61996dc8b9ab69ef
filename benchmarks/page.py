"""Measures the time and the largest memory of `ultrabench report` of one collected table.

Usage: page.py [ATTEMPTS]..., by default 180000.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from finished_sweep import write_sweep
from timing import ultrabench

print("| rows of attempts | wall-clock time | CPU time | peak memory | page |\n|---|---|---|---|---|")
for attempts in map(int, sys.argv[1:] or ["180000"]):
    with tempfile.TemporaryDirectory() as folder:
        sweep = write_sweep(Path(folder) / "big", attempts)
        table, page = f"{folder}/runs.parquet", Path(folder) / "page.html"
        subprocess.run(
            ultrabench("collect", str(sweep.path), "-o", table), check=True, stderr=subprocess.DEVNULL
        )
        start_s = time.perf_counter()
        command = ultrabench("report", table, "-o", str(page))
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        _, wait_status, usage = os.wait4(process.pid, 0)
        assert wait_status == 0
        wall_s, cpu_s = time.perf_counter() - start_s, usage.ru_utime + usage.ru_stime
        memory_text = f"{usage.ru_maxrss / 2**20:.2f} GiB"
        print(
            f"| {attempts:,} | {wall_s:.1f} s | {cpu_s:.1f} s | {memory_text} | {page.stat().st_size / 1e6:.0f} MB |"
        )
