"""Counts how many of 1,000 healthy runs of the embedded kernel end as a hang or a time-out (none should).

It measures 25 tiny layouts on two ranks again and again, with the deadlines of `measure=quick`. A second call
with the same folder continues the first one.
"""

import json
import subprocess
import sys
from pathlib import Path

from goodput import MODEL

OVERRIDES = [
    "name=healthy", "hardware=cpu", "model=minute", "measure=quick", "measure.race=null",
    "sweep.nodes=[1]", "sweep.tp=[1]", "sweep.pp=[1,2]", "sweep.zero_stage=[0,1,2,3]",
    "sweep.mbs=[1,2,3,4,6,8,12,24]", "sweep.gas=[1,2,3,4,6]", "sweep.gbs=24", "sweep.seq_len=16",
]  # fmt: skip
LAYOUTS = 25


def main() -> int:
    folder, runs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000
    model = folder / "ultrabench" / "model" / "minute.yaml"
    model.parent.mkdir(parents=True, exist_ok=True)
    model.write_text(MODEL)
    command = [sys.executable, "-m", "ultrabench.cli.main", "sweep"]
    repeats = f"repeats={-(-runs // LAYOUTS)}"
    subprocess.run([*command, "launch", *OVERRIDES, repeats], cwd=folder, stdout=subprocess.DEVNULL)
    subprocess.run([*command[:-1], "collect", "healthy"], cwd=folder, check=True)
    import pyarrow.parquet as pq

    rows = pq.read_table(folder / "results/healthy/runs.parquet").to_pylist()
    ends: dict[str, int] = {}
    for row in rows:
        ends[str(row["status"])] = ends.get(str(row["status"]), 0) + 1
    print(json.dumps(ends))
    return int(any(status != "ok" for status in ends))


if __name__ == "__main__":
    sys.exit(main())
