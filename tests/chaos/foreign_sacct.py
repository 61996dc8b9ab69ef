"""Answers as sacct does that knows another job with the same id: python foreign_sacct.py COLUMN SACCT WORDS...

Each row gets another state and duration, and another value in COLUMN, if it has this column.
"""

import subprocess
import sys

OTHER = {"JobName": "train", "UID": "4711", "User": "alice", "Cluster": "old", "Submit": "978307200"}

column, *command = sys.argv[1:]
columns = next(arg for arg in command if arg.startswith("--format=")).removeprefix("--format=").split(",")
values = {"State": "OUT_OF_MEMORY", "Elapsed": "20-00:00:00", column: OTHER[column]}
process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
for line in process.stdout.splitlines():
    row = zip(columns, line.split("|", len(columns) - 1), strict=True)
    print("|".join(values.get(name, value) for name, value in row))
sys.exit(process.returncode)
