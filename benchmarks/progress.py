"""Measures what it costs a rank to keep its progress in shared memory, and its agent to read it.

The cost of a step is that of its three parts and of its micro-batches; the share is that of a step of 10 ms
with 8 micro-batches. If there is a GPU, the event of a micro-batch is counted too.
"""

import tempfile
from pathlib import Path
from statistics import median

import torch
from timing import seconds_a_call

from ultrabench.kernel.rank.progress import device_progress
from ultrabench.rank_report import STEP_PARTS, Report, read_progress

STEP_S = 0.010
MICROBATCHES = 8
POLLS_PER_S = 20
"""Number of times per second that an agent looks at each of its ranks."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report"
        report = Report(path)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        count = device_progress(device, report.microbatch)

        def step() -> None:
            for part in range(len(STEP_PARTS)):
                report.enter_part(part, 1)
            for _ in range(MICROBATCHES):
                count()

        calls = (step, lambda: read_progress(path))
        step_s, read_s = (median(seconds_a_call(call, 2000)) for call in calls)
    print(f"a step of {MICROBATCHES} micro-batches on {device.type}: {step_s * 1e6:.2f} us", end="")
    print(f", {step_s / STEP_S:.5%} of a step of 10 ms")
    print(f"an agent's look at a rank: {read_s * 1e6:.1f} us, {read_s * POLLS_PER_S:.4%} of one core")


if __name__ == "__main__":
    main()
