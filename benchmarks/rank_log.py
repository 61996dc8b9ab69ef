"""Measures how long a node reads the log of a rank that failed: `python benchmarks/rank_log.py [MIB]`,
64 MiB by default.

The log is progress with a warning now and then, and an exception in its middle. The worst log has as many words of
failures as can be: tracebacks from beginning to end.
"""

import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from ultrabench.agent.ranks.rank_log import read_log

REPEATS = 7
STACK = 'Traceback (most recent call last):\n  File "/src/train.py", line 88, in <module>\n    main()\n'
ERROR = f"{STACK}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def progress(num_bytes: int) -> bytes:
    """Lines of a training program, and warnings."""
    chance = random.Random(1)
    lines = [
        f"iteration {n}/20000 | consumed tokens: {n * 4096} | loss {chance.random() * 10:.4f} | lr 3.0e-4 | "
        f"grad norm {chance.random():.3f} | {chance.random() * 300:.1f} TFLOP/s"
        for n in range(5000)
    ]
    lines += [
        "[W1124 10:00:00.1 socket.cpp:697] [c10d] The client socket has failed to connect to [gpu01]:29500."
    ] * 50
    text = ("\n".join(chance.sample(lines, len(lines))) + "\n").encode()
    return (text * (num_bytes // len(text) + 1))[:num_bytes].rpartition(b"\n")[0] + b"\n"


def main(mib: int) -> None:
    half = progress(mib * 2**19)
    logs = {
        "progress": half + ERROR.encode() + half,
        "tracebacks": ERROR.encode() * (mib * 2**20 // len(ERROR)),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, log in logs.items():
            path = Path(folder) / f"{name}.log"
            path.write_bytes(log)
            seconds, cpu_seconds = [], []
            for _ in range(REPEATS):
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                record = read_log(path)
                seconds.append(time.perf_counter() - start_s)
                cpu_seconds.append(time.process_time() - start_cpu_s)
            print(
                f"{mib} MiB of {name}: median {median(seconds):.2f} s, {median(cpu_seconds):.2f} s of CPU time",
                end="",
            )
            print(f", longest {max(seconds):.2f} s; {len(record.failures)} failures")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 64)
