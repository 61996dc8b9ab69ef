"""Counts how many of 1,000 healthy runs of the embedded kernel end as a hang or a time-out (none should).

It measures 25 tiny layouts on two ranks again and again, with the deadlines of `measure=quick`. A second call
with the same folder continues the first one.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
from sweeps import LAYOUTS, launch, write_model
from timing import ultrabench

from ultrabench.result import Status


def main() -> int:
    folder, runs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    write_model(folder)
    repeats = f"repeats={-(-runs // 25)}"  # of 25 layouts
    others = ("name=healthy", "measure.race=null", "measure.max_foreign_load=null")
    launch(folder, *LAYOUTS, *others, repeats, check=False)
    subprocess.run(ultrabench("collect", "healthy"), cwd=folder, check=True)
    table = pq.read_table(folder / "results/healthy/runs.parquet")
    ends = Counter(map(str, table["status"].to_pylist()))
    print(json.dumps(ends))
    return int(not ends.keys() <= {Status.OK, Status.REJECTED})


if __name__ == "__main__":
    sys.exit(main())
