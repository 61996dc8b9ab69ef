"""A training program that ultrabench runs through kernel=command: any framework would do.

ultrabench sweep launch kernel=command kernel.command='[python,examples/command.py]' name=example
"""

import json
import os
import time

task = json.load(open(os.environ["ULTRABENCH_SPEC"]))
layout, workload, measure = task["spec"]["layout"], task["spec"]["workload"], task["measure"]
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)


def say(event, **values):
    print(json.dumps({"event": event, **values}), file=report)


say("phase", name="train")
tokens = workload["gbs"] * workload["seq_len"]
seconds = 1e-3 * tokens / (layout["dp"] * layout["tp"] * layout["pp"])
for step in range(1, measure["warmup_steps"] + measure["min_steps"] + 1):
    start = time.perf_counter()
    time.sleep(seconds * (1 + 0.1 * layout["tp"]))  # your training step
    say("step", step=step, seconds=time.perf_counter() - start, tokens=tokens, loss=10 / step)
say("memory", allocated_bytes=2**20 * layout["mbs"], reserved_bytes=2**21 * layout["mbs"])
say("done")
